"""What the fresh plants taught the generator: a copy that outlives its source, logits that are all negative, and a short small phase without ops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from campaigns.case import Case, SessionCase
from campaigns.discover import Discovery, diet_of
from campaigns.isolation.inprocess import InProcess
from campaigns.trial import Bench, Outcome
from campaigns.weights import weights_for
from impls.registry import resolve
from oracles.judgement import FINDINGS
from spec.config import preset
from spec.engine import Rows
from spec.script import WeightsKey

ORPHAN = SessionCase("tiny", (), 0, "ordinary", ((4, 0),), (((),),), hazards=("orphan",))


@pytest.mark.parametrize(("engine", "wrong"), [("blocked", False), ("blocked:fork-not-counted", True)])
def test_a_copy_must_outlive_its_source(engine: str, wrong: bool) -> None:
    outcome = Bench(InProcess(resolve(engine))).outcome(ORPHAN)
    assert (outcome.verdict in FINDINGS) == wrong


@pytest.mark.parametrize("name", ["tiny", "tiny-softmax", "small"])
def test_every_logit_is_negative(name: str) -> None:
    config = preset(name)
    weights = weights_for(config, WeightsKey(seed=2, regime="negative-logits"))
    session = resolve("blocked").open(config, weights.__getitem__)
    index = np.arange(12, dtype=np.int32)
    logits = session.forward(Rows(index * 0, index * 3, index, index - 1), np.ones(12, np.bool_), frozenset(), lambda *_: None)
    assert (logits < 0).all() and len(set(logits.argmax(axis=-1).tolist())) > 1


def test_an_engine_of_sessions_only_soon_meets_every_preset() -> None:
    met: set[str] = set()

    def run(cases: Sequence[Case]) -> list[Outcome]:
        met.update(case.preset for case in cases if isinstance(case, SessionCase))
        return [Outcome(case, (), 0.0) for case in cases]

    diet = diet_of(resolve("blind+blocked").describe())
    discovery = Discovery(diet, 0, run, lambda outcome: False, trials_expected=10**9)
    while discovery.trials < 200:
        discovery.step()
    assert {"tiny", "tiny-softmax", "small"} <= met
