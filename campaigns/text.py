"""Prompts from real text: several languages and source code, through a byte-level tokenizer.

One token per UTF-8 byte and two special tokens, so that every text is representable, cuts may fall inside a character,
and nothing has to be downloaded. The texts are article 1 of the Universal Declaration of Human Rights (United Nations, free of
rights) and code written for this project.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int32]

BEGIN = 256
END = 257
VOCAB = 258


def encode(text: str) -> Int:
    """int32 [1 + bytes], BEGIN first."""
    return np.concatenate([[BEGIN], np.frombuffer(text.encode("utf-8"), np.uint8)]).astype(np.int32)


def decode(tokens: Int) -> str:
    """The text of the byte tokens; special tokens are dropped, a cut character becomes U+FFFD."""
    return bytes(int(t) for t in tokens if t < BEGIN).decode("utf-8", "replace")


def names() -> tuple[str, ...]:
    """The shipped texts, in a fixed order."""
    return tuple(
        sorted(entry.name.removesuffix(".txt") for entry in files("campaigns").joinpath("texts").iterdir() if entry.name.endswith(".txt"))
    )


def read(name: str) -> str:
    return files("campaigns").joinpath("texts", f"{name}.txt").read_text("utf-8")


def prompt(length: int, seed: int) -> Int:
    """`length` tokens of real text: text number seed, starting at BEGIN for seeds below the number of texts, later in it for others."""
    every = names()
    tokens = encode(read(every[seed % len(every)]))
    start = (seed // len(every)) * 17 % max(1, len(tokens) - length)
    out = tokens[start : start + length]
    return np.resize(tokens, length).astype(np.int32) if len(out) < length else out
