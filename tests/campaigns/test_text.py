"""Real text through the byte-level tokenizer."""

from __future__ import annotations

import numpy as np
import pytest

from campaigns import text


@pytest.mark.parametrize("name", text.names())
def test_every_text_survives_the_round_trip(name: str) -> None:
    tokens = text.encode(text.read(name))
    assert tokens.dtype == np.int32 and tokens[0] == text.BEGIN and tokens.max() < text.VOCAB
    assert text.decode(tokens) == text.read(name)


def test_several_languages_and_source_code_are_shipped() -> None:
    assert {"english", "chinese", "arabic", "hindi", "c_code", "python_code"} <= set(text.names())
    joined = "".join(map(text.read, text.names()))
    assert max(map(ord, joined)) > 0xFFFF  # characters of one, two, three and four bytes


@pytest.mark.parametrize("seed", range(30))
def test_a_prompt_has_the_length_asked_for(seed: int) -> None:
    for length in (1, 2, 7, 40, 3000):
        tokens = text.prompt(length, seed)
        assert len(tokens) == length and tokens.min() >= 0 and tokens.max() < text.VOCAB
    assert (text.prompt(9, seed) == text.prompt(9, seed)).all()


def test_a_cut_inside_a_character_is_shown_as_replacement() -> None:
    assert text.decode(text.encode("ü")[:2]) == "�"
