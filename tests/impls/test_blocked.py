"""The blocked engine is honest: within the certified bounds op by op, equal in every decision, and it keeps its cache as the rules say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from campaigns.case import OpCase, SessionCase, TreeCase
from campaigns.strategies import op_cases, session_cases, tree_cases
from impls.blocked import engine
from impls.blocked.cache import PagedCache
from impls.blocked.points import HONEST, PAGE, catalogue, rope_frequencies, rope_magnitude, rope_tables
from impls.blocked.tree import best_first_tree
from impls.registry import UnknownEngine, resolve
from spec.config import PRESETS, Config, preset
from spec.engine import Engine, EngineError, Limits, Rows, Session, Unsupported
from spec.loops import ddtree, generation, greedy, prefill_rows
from spec.model import GoldenModel
from spec.rotary import Rotary
from spec.taps import all_tap_names, taps_of_layer
from spec.tree import DraftTable
from spec.tree import best_first_tree as spec_tree
from spec.weights import random_weights
from tests.impls.blocked_judging import judged_op, judged_session, judged_tree
from tests.impls.blocked_probes import noisy, prompt, weights_of

QUICK = settings(database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


# Against the judge


@settings(QUICK, max_examples=150)
@given(op_cases(hazards=("views", "poison", "freed", "repeat")))
def test_operations_are_within_their_bounds(case: OpCase) -> None:
    assert judged_op(engine(), case) == []


@settings(QUICK, max_examples=40)
@given(tree_cases())
def test_trees_are_exact(case: TreeCase) -> None:
    assert judged_tree(engine(), case) == []


@settings(QUICK, max_examples=20)
@given(session_cases())
def test_sessions_are_within_their_bounds(case: SessionCase) -> None:
    assert judged_session(engine(), case) == []


# Against the specification


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("budget", [0, 6])
def test_own_loop_emits_what_the_golden_loop_emits(name: str, budget: int) -> None:
    config = preset(name)
    weights = random_weights(config, 7)
    prompts = [prompt(config, length, length) for length in (4, 1, 7)]
    golden, limits = GoldenModel(config, weights), Limits(10)
    drafter = noisy((5, 3)) if name == "tiny" else None
    own = engine().open(config, weights.__getitem__).generate(prompts, drafter if budget else None, budget, limits)
    if drafter is not None and budget:
        assert own == [generation(r) for r in ddtree(golden.open(), prompts, drafter, budget, limits)]
    assert [g.tokens for g in own] == [r.tokens for r in greedy(golden.open(), prompts, limits)]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_rotary_tables_have_the_golden_bits(name: str) -> None:
    config, positions = preset(name), np.arange(4096, dtype=np.int32)
    own = rope_tables(positions, rope_frequencies(config), rope_magnitude(config))
    for table, golden in zip(own, Rotary(config).tables(positions), strict=True):
        assert np.array_equal(table, golden)


@settings(QUICK, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5), st.integers(0, 12), st.sampled_from([1.0, 0.5, 2.0**-30]))
def test_trees_equal_those_of_the_specification(seed: int, depth: int, width: int, budget: int, grid: float) -> None:
    """Coarse grids force ties; the fine one makes sums that a double cannot hold."""
    rng = np.random.default_rng(seed)
    draw = -np.abs(rng.standard_normal((depth, width))) * rng.choice([1.0, 1e8, 1e-9], (depth, 1))
    log_probs = -np.sort(-np.rint(draw / grid) * grid, axis=1).astype(np.float32)
    ids = np.argsort(rng.random((depth, 20)), axis=1)[:, :width].astype(np.int32)
    own = best_first_tree(HONEST, ids, log_probs, budget, 3)
    golden = spec_tree(DraftTable(ids, log_probs), 3, budget)
    assert own.tokens == golden.tokens.tolist() and own.parents == golden.parents.tolist() and own.depths == golden.depths.tolist()


# The session


def forward(
    session: Session, tokens: NDArray[np.int32], sequence: int = 0, start: int = 0
) -> tuple[NDArray[np.float32], dict[tuple[str, int], NDArray[np.float32]]]:
    """A chain behind `start` rows, with every tap."""
    index = np.arange(len(tokens), dtype=np.int32)
    taps: dict[tuple[str, int], NDArray[np.float32]] = {}
    rows = Rows(np.full_like(index, sequence), tokens, start + index, index - 1)
    logits = session.forward(
        rows,
        np.ones(len(tokens), np.bool_),
        frozenset(all_tap_names()),
        lambda name, layer, value: taps.update({(name, layer): value.copy()}),
    )
    return logits, taps


def open_tiny(**overrides: object) -> tuple[Config, Session]:
    config = preset("tiny", **overrides)
    return config, engine().open(config, weights_of(config).__getitem__)


def test_engine_has_the_shape_of_the_seam() -> None:
    _, session = open_tiny()
    assert isinstance(engine(), Engine) and isinstance(session, Session)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_tap_has_its_declared_shape(name: str) -> None:
    config = preset(name)
    _, taps = forward(engine().open(config, weights_of(config).__getitem__), prompt(config, 5, 1))
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} | {"T": 5, "S": 5}

    def size(word: str) -> int:
        return int(eval(word, {}, fields))  # sums and products of configuration fields

    expected = {(tap.name, layer): tap for layer in range(-1, config.layers + 1) for tap in taps_of_layer(config, layer)}
    assert taps.keys() == expected.keys()
    for key, tap in expected.items():
        assert taps[key].shape == tuple(map(size, tap.dims)) and taps[key].dtype == tap.dtype, key


def test_cache_rows_are_the_taps_of_the_accepted_path() -> None:
    config, session = open_tiny()
    rows, want = prefill_rows([prompt(config, 7, 1)])
    tree = Rows(rows.sequence, rows.token, np.array([0, 1, 1, 2, 2, 3, 4], np.int32), np.array([-1, 0, 0, 1, 2, 4, 5], np.int32))
    taps: dict[tuple[str, int], NDArray[np.float32]] = {}
    session.forward(tree, want, frozenset({"latent", "k_rope"}), lambda name, layer, value: taps.update({(name, layer): value.copy()}))
    path = [0, 2, 4, 5]
    session.commit(0, np.array(path, np.int32))
    for layer in range(config.layers):
        expected = np.concatenate([taps["latent", layer], taps["k_rope", layer]], axis=1)[path]
        assert np.array_equal(session.cache_rows(0, layer), expected)


def test_rejected_rows_leave_no_trace() -> None:
    """Whatever was rejected, later rows have the same bits: batches have equal shapes, so that products round alike."""
    found = []
    for seed in (2, 3):
        config, session = open_tiny()
        forward(session, prompt(config, 6, 1))
        session.commit(0, np.arange(6, dtype=np.int32))
        forward(session, np.concatenate([[5], prompt(config, 8, seed)]).astype(np.int32), start=6)
        session.commit(0, np.array([0], np.int32))
        found.append(forward(session, prompt(config, 3, 4), start=7)[0])
    assert np.array_equal(*found)


def test_fork_goes_on_alone() -> None:
    config, session = open_tiny()
    forward(session, prompt(config, 6, 1))
    session.commit(0, np.arange(6, dtype=np.int32))
    before = session.cache_rows(0, 1)
    session.fork(0, 5)
    forward(session, prompt(config, 4, 2), sequence=5, start=6)
    session.commit(5, np.arange(4, dtype=np.int32))
    assert np.array_equal(session.cache_rows(0, 1), before) and np.array_equal(session.cache_rows(5, 1)[:6], before)
    session.evict(0)
    assert np.array_equal(session.cache_rows(5, 1)[:6], before)
    with pytest.raises(EngineError, match="no sequence 0"):
        session.cache_rows(0, 1)


def test_weights_are_the_sessions_own() -> None:
    config = preset("tiny")
    weights = {name: value.copy() for name, value in weights_of(config).items()}
    session = engine().open(config, weights.__getitem__)
    before = forward(session, prompt(config, 4, 1))[0]
    for value in weights.values():
        value[...] = np.nan
    assert np.array_equal(forward(session, prompt(config, 4, 1))[0], before)


def test_empty_batch_has_no_logits() -> None:
    config, session = open_tiny()
    none = np.zeros(0, np.int32)
    logits = session.forward(Rows(none, none, none, none), np.zeros(0, np.bool_), frozenset(), lambda name, layer, value: None)
    assert logits.shape == (0, config.vocab)


@pytest.mark.parametrize(
    "rows",
    [
        Rows(*(np.array(v, np.int32) for v in ([0], [96], [0], [-1]))),
        Rows(*(np.array(v, np.int32) for v in ([0], [1], [-1], [-1]))),
        Rows(*(np.array(v, np.int32) for v in ([0], [1], [0], [0]))),
        Rows(*(np.array(v, np.int32) for v in ([0, 1], [1, 1], [0, 1], [-1, 0]))),
    ],
    ids=["token", "position", "parent of itself", "parent in another sequence"],
)
def test_rows_outside_the_seam_are_refused(rows: Rows) -> None:
    _, session = open_tiny()
    with pytest.raises(EngineError):
        session.forward(rows, np.ones(len(rows), np.bool_), frozenset(), lambda name, layer, value: None)


@pytest.mark.parametrize("path", [[1, 1], [2, 1], [0, 4], [-1]])
def test_paths_that_do_not_ascend_are_refused(path: list[int]) -> None:
    config, session = open_tiny()
    forward(session, prompt(config, 4, 1))
    with pytest.raises(EngineError, match="K1"):
        session.commit(0, np.array(path, np.int32))


# The cache


def test_free_slots_are_poison_and_slots_do_not_follow_logical_order() -> None:
    cache = PagedCache(HONEST, layers=1, width=3, kv_rank=2)
    slots = cache.reserve(0, 3 * PAGE)
    cache.store[0, slots] = np.arange(3 * PAGE)[:, None]
    assert (np.diff(slots) != 1).any()
    before = cache.free_slots()
    cache.commit(0, [1, PAGE + 1])
    assert np.array_equal(cache.rows(0, 0)[:, 0], [1, PAGE + 1])
    assert np.isfinite(cache.store).all(axis=-1).sum() == 2 and cache.free_slots() == before + 2 * PAGE
    cache.evict(0)
    assert np.isnan(cache.store).all() and cache.free_slots() == cache.store.shape[1]


def test_cache_grows_and_keeps_its_rows() -> None:
    cache = PagedCache(HONEST, layers=2, width=2, kv_rank=1)
    for sequence in range(3):
        slots = cache.reserve(sequence, 100)  # may replace the store by a larger one
        cache.store[:, slots] = np.arange(100)[:, None] + 1000 * sequence
        cache.commit(sequence, range(100))
    assert all(np.array_equal(cache.rows(sequence, 1)[:, 0], np.arange(100) + 1000 * sequence) for sequence in range(3))


# Names and points


def test_names_resolve_through_the_registry() -> None:
    assert [resolve(name).describe().name for name in ("blocked", "blocked:Z08", "blocked:N04")] == [
        "blocked",
        "blocked:Z08",
        "blocked:N04",
    ]
    with pytest.raises(UnknownEngine, match="Z99"):
        resolve("blocked:Z99")


def test_unknown_operation_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="no op 'conv'"):
        engine().run_op("conv", {}, {}, {})


def test_every_point_has_a_contract_in_words() -> None:
    assert all(contract and signature.startswith("(") for signature, contract in catalogue().values())
