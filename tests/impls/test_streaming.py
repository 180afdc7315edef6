"""Experts that are lent one at a time: the same bits as those that are kept, and faults of a late loan come out of the forward."""

from __future__ import annotations

import numpy as np
import pytest

from impls.blocked import BlockedEngine
from impls.native import LibraryEngine, build, native
from spec.config import MODELS, preset
from spec.engine import EngineError, Rows, Unsupported
from spec.weights import EXPERT_STACKS, WeightError, cheap_tensor, random_weights

CONFIG = preset("tiny", first_dense=0)
WEIGHTS = random_weights(CONFIG, 3)
ROWS = Rows(*(np.array(column, np.int32) for column in ([0] * 5, [3, 1, 4, 1, 5], range(5), range(-1, 4))))
WANT = np.ones(5, np.bool_)


@pytest.fixture(scope="module")
def engine() -> LibraryEngine:
    try:
        return native()
    except build.NoCompiler as problem:
        pytest.skip(str(problem))


def no_sink(name: str, layer: int, array: np.ndarray) -> None:
    """Nobody listens."""


def test_streamed_experts_give_the_bits_of_kept_ones(engine: LibraryEngine) -> None:
    asked: list[str] = []

    def provider(name: str) -> np.ndarray:
        asked.append(name)
        return WEIGHTS[name]

    with engine.open(CONFIG, WEIGHTS) as kept, engine.open(CONFIG, provider, options={"stream_experts": 1}) as streamed:
        before = len(asked)
        assert not any("expert_" in name for name in asked)
        expected, found = (session.forward(ROWS, WANT, frozenset(), no_sink) for session in (kept, streamed))
    assert np.array_equal(expected, found)
    late = asked[before:]  # a provider that knows whole stacks only is asked for a slice first
    assert late and {name.partition("/")[0].rpartition(".")[2] for name in late} <= set(EXPERT_STACKS)


def test_an_expert_that_is_not_finite_is_named_by_the_forward_that_meets_it(engine: LibraryEngine) -> None:
    broken = dict(WEIGHTS)
    broken["1.expert_up"] = np.full_like(WEIGHTS["1.expert_up"], np.inf)
    with engine.open(CONFIG, broken, options={"stream_experts": 1}) as session:
        with pytest.raises(WeightError, match=r"weight '1\.expert_up/\d' is inf at \[0, 0\]; weights must be finite"):
            session.forward(ROWS, WANT, frozenset(), no_sink)
        with pytest.raises(EngineError, match="sequence 0 is unknown"):  # nothing of the failed batch is left
            session.cache_rows(0, 0)


def test_a_parameter_that_the_engine_does_not_know_is_an_answer(engine: LibraryEngine) -> None:
    with pytest.raises(Unsupported, match="parameter moon_phase is unknown"):
        engine.open(CONFIG, WEIGHTS, options={"moon_phase": 1})


def test_an_engine_that_keeps_all_weights_says_no_to_a_large_model() -> None:
    with pytest.raises(Unsupported, match="keeps all weights in memory"):
        BlockedEngine().open(MODELS["kimi-k2-layer"], WEIGHTS.__getitem__)


def test_cheap_weights_are_keyed_by_name_and_have_the_deviation_of_random_ones() -> None:
    config = preset("tiny", hidden=512, expert_dim=96)
    first, again, other = (cheap_tensor(config, 1, name) for name in ("1.expert_gate/2", "1.expert_gate/2", "1.expert_gate/3"))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert first.shape == (512, 96) and abs(first.std() * 512**0.5 - 1) < 0.02  # 49152 uniform values: 0.02 is 6 standard errors
    assert len(np.unique(first[:, 0])) > 500  # rows are not the same row again and again
    assert np.array_equal(cheap_tensor(config, 1, "0.attn_norm"), random_weights(config, 1)["0.attn_norm"])
