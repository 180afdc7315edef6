"""The black-box engine against a small local server: log-probabilities, greedy tokens, refusals, and a server that is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from campaigns.case import GenerateCase, SessionCase
from campaigns.isolation.inprocess import InProcess
from campaigns.trial import Bench, Outcome
from campaigns.weights import weights_for
from impls.checkpoint import write_checkpoint
from impls.peers.blackbox_engine import BlackBoxEngine
from impls.registry import EngineLoadError, resolve
from oracles.judgement import Verdict
from spec.config import preset
from spec.engine import EngineError, Unsupported
from spec.model import GoldenModel
from spec.script import WeightsKey
from spec.weights import random_weights
from tests.impls.completions_server import serving

CONFIG = preset("tiny")
TREE = ((0, 1), (1, 0), (0, 1))
CASE = SessionCase(
    "tiny", (), 0, "ordinary", ((4, 1), (2, 2)), ((TREE, ()),), generate=GenerateCase("none", 0, 50, 0, 0, 1, 3, 1), hazards=("fork",)
)


@pytest.fixture(scope="module")
def model() -> GoldenModel:
    return GoldenModel(CONFIG, weights_for(CONFIG, WeightsKey(0)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the server is said to hold."""
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, CONFIG, weights_for(CONFIG, WeightsKey(0)).__getitem__)
    return path


def outcome(url: str) -> Outcome:
    return Bench(InProcess(BlackBoxEngine(url))).outcome(CASE)


def test_log_probabilities_of_an_honest_server_lie_within_the_statistical_bound(model: GoldenModel, folder: Path) -> None:
    with serving(model) as url:
        judged = {(j.rung, j.tap): j for j in outcome(f"{url}#{folder}").judgements}
    for rung in ("prefill", "tree verify"):
        assert judged[rung, "logits"].verdict is Verdict.UNVERIFIED  # nothing is proven, nothing is wrong
        assert 0 < judged[rung, "logits"].share < 1
        assert judged[rung, "token"].verdict is Verdict.EXACT
    assert {j.verdict for key, j in judged.items() if key[0] == "whole loop"} <= {Verdict.EXACT, Verdict.UNVERIFIED}


def test_a_server_whose_logits_are_off_is_a_statistical_defect(model: GoldenModel, folder: Path) -> None:
    with serving(model, wrong=1e-3) as url:
        worst = outcome(f"{url}#{folder}").worst
    assert worst is not None and worst.verdict is Verdict.DEFECT and "statistical" in worst.message


def test_a_server_that_shows_some_tokens_only_is_unsupported_and_not_wrong(model: GoldenModel, folder: Path) -> None:
    with serving(model, shown=5) as url:
        found = outcome(f"{url}#{folder}")
    assert found.verdict is Verdict.UNSUPPORTED
    assert any("returns 5 of 96" in j.message for j in found.judgements)


def test_other_weights_or_another_configuration_are_refused(model: GoldenModel, folder: Path) -> None:
    with serving(model) as url:
        engine = BlackBoxEngine(f"{url}#{folder}")
        with pytest.raises(Unsupported, match="another 'embed'"):
            engine.open(CONFIG, random_weights(CONFIG, 1).__getitem__)
        with pytest.raises(Unsupported, match="routed_scale"):
            engine.open(preset("tiny", routed_scale=2.0), random_weights(CONFIG, 0).__getitem__)
        with pytest.raises(Unsupported, match="name the checkpoint"):
            BlackBoxEngine(url).open(CONFIG, random_weights(CONFIG, 0).__getitem__)


def test_the_registry_names_the_server_that_does_not_answer() -> None:
    with pytest.raises(EngineLoadError, match=r"http://127\.0\.0\.1:9/v1/models"):
        resolve("http://127.0.0.1:9/v1")


def test_tokens_as_text_are_refused(model: GoldenModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model) as url:
        engine = BlackBoxEngine(url)
        monkeypatch.setattr(engine, "_ask", lambda path, body: {"choices": [{"logprobs": {"tokens": [" the"], "top_logprobs": [{}]}}]})
        with pytest.raises(EngineError, match="token ' the' is text"):
            engine.complete([1], 1, 1)


def test_a_path_that_leaves_out_an_ancestor_is_refused(model: GoldenModel, folder: Path) -> None:
    from spec.engine import Rows

    chain = Rows(np.zeros(3, np.int32), np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), np.arange(-1, 2, dtype=np.int32))
    with serving(model) as url:
        session = BlackBoxEngine(f"{url}#{folder}").open(CONFIG, weights_for(CONFIG, WeightsKey(0)).__getitem__)
        session.forward(chain, np.zeros(3, np.bool_), frozenset(), lambda name, layer, array: None)
        with pytest.raises(Unsupported, match="leaves out ancestors"):
            session.commit(0, np.array([0, 2], np.int32))
