"""The native engine against the specification: certified bounds, bit-exact structure, refusals, sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

from campaigns.case import OpCase, SessionCase, TreeCase
from campaigns.isolation import InProcess
from campaigns.strategies import op_cases, session_cases, tree_cases
from campaigns.trial import Bench
from campaigns.weights import weights_for
from impls.native import LibraryEngine, LibrarySession, build, native
from oracles.judgement import FINDINGS
from spec.config import PRESETS, Config, Yarn, preset
from spec.drafters import RandomDrafter, TableDrafter
from spec.engine import EngineError, Limits, Rows, Unsupported
from spec.model import GoldenModel
from spec.ops import OPS
from spec.rotary import Rotary
from spec.taps import all_tap_names, taps_of_layer
from spec.weights import random_weights

Float = NDArray[np.float32]
Taps = dict[tuple[str, int], NDArray[Any]]
REPRODUCIBLE = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def engine() -> LibraryEngine:
    try:
        return native()
    except build.NoCompiler as problem:
        pytest.skip(str(problem))


@pytest.fixture
def tiny(engine: LibraryEngine) -> Iterator[LibrarySession]:
    with opened(engine, preset("tiny")) as session:
        yield session


def opened(engine: LibraryEngine, config: Config, seed: int = 3, **options: int) -> LibrarySession:
    return engine.open(config, random_weights(config, seed), options=options)


def forward(session: LibrarySession, rows: Rows, taps: frozenset[str] = frozenset()) -> tuple[Float, Taps]:
    """Logits of every row, and the taps in the order in which they came."""
    caught: Taps = {}
    logits = session.forward(rows, np.ones(len(rows), np.bool_), taps, lambda name, layer, array: caught.__setitem__((name, layer), array))
    return logits, caught


def batch(*rows: tuple[int, int, int, int]) -> Rows:
    """Rows given as (sequence, token, position, parent)."""
    columns = np.array(rows, np.int32).reshape(-1, 4).T
    return Rows(*(np.ascontiguousarray(column) for column in columns))


def chain(tokens: list[int], sequence: int = 0, start: int = 0) -> Rows:
    return batch(*((sequence, token, start + i, i - 1) for i, token in enumerate(tokens)))


def findings(engine: LibraryEngine, case: OpCase | TreeCase | SessionCase) -> list[str]:
    judgements = Bench(InProcess(engine, weights=weights_for)).outcome(case).judgements
    assert judgements
    return [f"{j.verdict} {j.op} {j.tap} {j.rule}: {j.message}" for j in judgements if j.verdict in FINDINGS or j.verdict == "UNSUPPORTED"]


# ---- the judge finds nothing ----------------------------------------------------------------------------------------


def test_it_offers_every_operation_tap_and_capability(engine: LibraryEngine) -> None:
    description = engine.describe()
    assert description.ops == set(OPS)
    assert description.taps == set(all_tap_names())
    assert description.capabilities == {
        "run_op", "forward", "taps", "commit", "cache_rows", "fork", "evict", "free_slots", "generate", "generate_tree", "sampling",
    }  # fmt: skip
    assert (description.name, description.profile.height, description.profile.batch_invariant) == ("native", "blocked:32", True)


@pytest.mark.parametrize("op", OPS)
def test_an_operation_stays_within_its_certified_bound(engine: LibraryEngine, op: str) -> None:
    @settings(REPRODUCIBLE, max_examples=40)
    @given(op_cases(ops=(op,)))
    def check(case: OpCase) -> None:
        assert findings(engine, case) == []

    check()


def test_a_tree_round_on_its_own_outputs_follows_every_rule(engine: LibraryEngine) -> None:
    @settings(REPRODUCIBLE, max_examples=60)
    @given(tree_cases())
    def check(case: TreeCase) -> None:
        assert findings(engine, case) == []

    check()


def test_sessions_with_all_taps_stay_within_their_certified_bounds(engine: LibraryEngine) -> None:
    @settings(REPRODUCIBLE, max_examples=40)
    @given(session_cases())
    def check(case: SessionCase) -> None:
        assert findings(engine, case) == []

    check()


@pytest.mark.parametrize("op", OPS)
def test_results_do_not_depend_on_what_was_in_the_outputs(engine: LibraryEngine, op: str) -> None:
    """Poisoned or zeroed buffers: the same bits (every element is written, none is read)."""
    from campaigns.materialise import op_call

    @settings(REPRODUCIBLE, max_examples=10)
    @given(op_cases("small", ops=(op,)).filter(lambda case: case.regime != "refused"))
    def check(case: OpCase) -> None:
        call = op_call(case)
        answers = []
        for filler in (0x00, 0xFF, 0x7F):
            outputs = {name: np.empty(shape, dtype) for name, (shape, dtype) in call.outputs.items()}
            for array in outputs.values():
                array.reshape(-1).view(np.uint8).fill(filler)
            engine.run_op(op, call.inputs, call.params, outputs)
            answers.append({name: array.tobytes() for name, array in outputs.items()})
        assert answers[0] == answers[1] == answers[2]

    check()


# ---- taps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_taps_come_in_data_order_with_the_declared_shapes(engine: LibraryEngine, name: str) -> None:
    config = preset(name)
    rows = chain([5, 9, 2, 7, 1, 3])
    _, taps = forward(opened(engine, config), rows, engine.describe().taps)
    expected = [(tap.name, layer) for layer in range(-1, config.layers + 1) for tap in taps_of_layer(config, layer)]
    assert list(taps) == expected
    golden: Taps = {}
    GoldenModel(config, random_weights(config, 3)).open().forward(
        rows, np.ones(6, np.bool_), frozenset(all_tap_names()), lambda tap, layer, array: golden.__setitem__((tap, layer), array)
    )
    assert {key: (a.shape, a.dtype) for key, a in taps.items()} == {key: (a.shape, a.dtype) for key, a in golden.items()}


def test_taps_other_than_probs_do_not_change_a_bit_of_the_logits(engine: LibraryEngine) -> None:
    rows = chain([5, 9, 2, 7, 1, 3])
    with opened(engine, preset("small")) as session:
        plain, _ = forward(session, rows)
        tapped, _ = forward(session, rows, engine.describe().taps - {"probs"})
    np.testing.assert_array_equal(plain, tapped)


def test_only_the_taps_that_were_asked_for_arrive(tiny: LibrarySession) -> None:
    _, taps = forward(tiny, chain([1, 2]), frozenset({"latent", "logits"}))
    assert set(taps) == {("latent", 0), ("latent", 1), ("logits", 2)}


@pytest.mark.parametrize(
    "yarn",
    [
        None,
        Yarn(4.0, 32),
        Yarn(64.0, 4096),
        Yarn(32.0, 4096, 1.0, 1.0),
        Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=1.3),
        Yarn(16.0, 64, mscale=0.0),
    ],
)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotary_tables_have_the_bits_of_the_specification(engine: LibraryEngine, yarn: Yarn | None, layout: str) -> None:
    """A rope key of ones and zeros turns into the table itself: 1 * cos - 0 * sin, 1 * sin + 0 * cos."""
    config = preset("tiny", rope_dim=16, yarn=yarn, rope_layout=layout, rms_eps=1e-30, vocab=1)
    weights = random_weights(config, 0)
    weights["embed"][:] = 1  # the norm of a row of ones is a row of ones: mean 1, eps vanishes in float32
    weights["0.attn_norm"][:] = 0
    weights["0.attn_norm"][0] = 1
    firsts = np.arange(8) * (2 if layout == "interleaved" else 1)
    seconds = firsts + (1 if layout == "interleaved" else 8)
    weights["0.kv_a"][:] = 0
    weights["0.kv_a"][0, config.kv_rank + firsts] = 1
    positions = [0, 1, 2, 3, 31, 32, 1000, 4095, 32768, 131071, 1 << 20]
    with engine.open(config, weights) as session:
        _, taps = forward(session, batch(*((0, 0, position, -1) for position in positions)), frozenset({"k_rope"}))
    cos, sin = Rotary(config).tables(np.array(positions))
    np.testing.assert_array_equal(taps["k_rope", 0][:, firsts], cos)
    np.testing.assert_array_equal(taps["k_rope", 0][:, seconds], sin)


# ---- rows do not know each other ------------------------------------------------------------------------------------


def test_a_ragged_batch_has_the_bits_of_its_sequences_alone(engine: LibraryEngine) -> None:
    """Three sequences of unequal length, interleaved row by row; the profile claims batch invariance."""
    config = preset("small")
    sequences = {4: [5, 9, 2, 7, 1], 0: [3], 7: [8, 8, 6]}
    rows: list[tuple[int, int, int, int]] = []
    last = dict.fromkeys(sequences, -1)
    for i in range(5):
        for sequence, tokens in sequences.items():
            if i < len(tokens):
                rows.append((sequence, tokens[i], i, last[sequence]))
                last[sequence] = len(rows) - 1
    together = batch(*rows)
    with opened(engine, config) as session, opened(engine, config) as alone:
        logits, _ = forward(session, together)
        for sequence, tokens in sequences.items():
            expected, _ = forward(alone, chain(tokens, sequence))
            np.testing.assert_array_equal(logits[together.sequence == sequence], expected)


def test_a_tree_row_has_the_bits_of_the_chain_along_its_path(engine: LibraryEngine) -> None:
    config = preset("tiny")
    prompt, tokens, parents = [4, 4, 1, 90, 17], [11, 12, 13, 14, 15, 16, 17], [-1, 0, 0, 1, 2, 2, 5]
    depths = [0, 1, 1, 2, 2, 2, 3]
    tree = batch(*((0, token, 5 + depth, parent) for token, depth, parent in zip(tokens, depths, parents, strict=True)))
    with opened(engine, config) as session:
        forward(session, chain(prompt))
        session.commit(0, np.arange(5, dtype=np.int32))
        logits, _ = forward(session, tree)
        for node in range(7):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            expected, _ = forward(session, chain([tokens[i] for i in path], start=5))
            np.testing.assert_array_equal(logits[node], expected[-1])


def test_chunked_prefill_has_the_bits_of_one_forward(engine: LibraryEngine) -> None:
    """Also across the pages of 16 rows of the cache, and across the parts of 256 keys of the attention."""
    tokens = np.random.default_rng(0).integers(0, 96, 300).tolist()
    with opened(engine, preset("tiny")) as whole, opened(engine, preset("tiny")) as chunked:
        expected, _ = forward(whole, chain(tokens))
        for start in range(0, 300, 37):
            part = tokens[start : start + 37]
            logits, _ = forward(chunked, chain(part, start=start))
            np.testing.assert_array_equal(logits, expected[start : start + 37])
            chunked.commit(0, np.arange(len(part), dtype=np.int32))
        whole.commit(0, np.arange(300, dtype=np.int32))
        for layer in range(2):
            np.testing.assert_array_equal(chunked.cache_rows(0, layer), whole.cache_rows(0, layer))


def test_state_injection_has_the_bits_of_the_whole_forward(engine: LibraryEngine) -> None:
    rows = chain([5, 9, 2, 7])
    with opened(engine, preset("small")) as session:
        logits, taps = forward(session, rows, frozenset({"ffn_residual"}))
        injected = session.forward(
            rows, np.ones(4, np.bool_), frozenset(), lambda *tap: None, first_layer=1, hidden=taps["ffn_residual", 0].copy()
        )
    np.testing.assert_array_equal(injected, logits)


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_commit_keeps_the_path_in_order_and_drops_the_rest(tiny: LibrarySession) -> None:
    tree = batch((0, 1, 0, -1), (0, 2, 1, 0), (0, 3, 1, 0), (0, 4, 2, 2), (0, 5, 2, 1), (0, 6, 3, 3))
    _, taps = forward(tiny, tree, frozenset({"latent", "k_rope"}))
    tiny.commit(0, np.array([0, 2, 3, 5], np.int32))
    for layer in range(2):
        expected = np.concatenate([taps["latent", layer], taps["k_rope", layer]], axis=1)[[0, 2, 3, 5]]
        np.testing.assert_array_equal(tiny.cache_rows(0, layer), expected)


def test_a_new_batch_drops_pending_rows(tiny: LibrarySession) -> None:
    expected, _ = forward(tiny, chain([1, 2, 3]))
    again, _ = forward(tiny, chain([1, 2, 3]))
    np.testing.assert_array_equal(again, expected)
    tiny.commit(0, np.arange(3, dtype=np.int32))
    assert len(tiny.cache_rows(0, 0)) == 3


def test_a_fork_is_a_copy(tiny: LibrarySession) -> None:
    forward(tiny, chain([1, 2, 3]))
    tiny.commit(0, np.arange(3, dtype=np.int32))
    tiny.fork(0, 5)
    forked, _ = forward(tiny, batch((5, 9, 3, -1)))
    tiny.commit(5, np.zeros(1, np.int32))
    assert (len(tiny.cache_rows(0, 1)), len(tiny.cache_rows(5, 1))) == (3, 4)
    original, _ = forward(tiny, batch((0, 9, 3, -1)))
    np.testing.assert_array_equal(forked, original)
    with pytest.raises(EngineError, match="sequence 5 exists already"):
        tiny.fork(0, 5)


def test_every_slot_comes_back(tiny: LibrarySession) -> None:
    before = tiny.free_slots()
    for sequence in (0, 1):
        forward(tiny, chain(list(range(20)), sequence))
        tiny.commit(sequence, np.arange(20, dtype=np.int32))
    assert tiny.free_slots() < before
    tiny.generate([np.arange(40, dtype=np.int32)], None, 0, Limits(3))
    for sequence in (0, 1):
        tiny.evict(sequence)
    assert tiny.free_slots() == before
    with pytest.raises(EngineError, match="sequence 0 is unknown"):
        tiny.cache_rows(0, 0)


def test_a_full_cache_is_an_error_that_changes_nothing(engine: LibraryEngine) -> None:
    with opened(engine, preset("tiny"), cache_slots=32) as session:
        forward(session, chain(list(range(20))))
        session.commit(0, np.arange(20, dtype=np.int32))
        kept, free = session.cache_rows(0, 1), session.free_slots()
        with pytest.raises(EngineError, match="the cache is full: 16 more rows are needed, 0 are free"):
            forward(session, chain(list(range(20)), start=20))
        with pytest.raises(EngineError, match="the cache is full"):
            forward(session, batch((1, 1, 0, -1), (2, 1, 0, -1)))
        assert session.free_slots() == free
        np.testing.assert_array_equal(session.cache_rows(0, 1), kept)


def test_an_exception_of_the_sink_keeps_the_committed_rows(tiny: LibrarySession) -> None:
    forward(tiny, chain([1, 2, 3]))
    tiny.commit(0, np.arange(3, dtype=np.int32))
    kept = tiny.cache_rows(0, 0)

    def sink(name: str, layer: int, array: NDArray[Any]) -> None:
        if layer == 1:
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        tiny.forward(batch((0, 4, 3, -1)), np.ones(1, np.bool_), frozenset({"latent"}), sink)
    np.testing.assert_array_equal(tiny.cache_rows(0, 0), kept)


def test_no_rows_are_no_work(tiny: LibrarySession) -> None:
    logits, taps = forward(tiny, batch(), frozenset({"embed"}))
    assert logits.shape == (0, 96) and taps == {}


# ---- loops ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("drafter", ["none", "random", "ties"])
def test_generate_emits_the_tokens_and_rounds_of_the_specification(engine: LibraryEngine, name: str, drafter: str) -> None:
    config = preset(name)
    weights = random_weights(config, 3)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, config.vocab, length).astype(np.int32) for length in (5, 1, 12)]
    golden = GoldenModel(config, weights).open()
    with engine.open(config, weights) as session:
        greedy = golden.generate(prompts, None, 0, Limits(9))
        likely = np.zeros((4, config.vocab), np.float32)  # ties, and the tokens that greedy decoding emits on top
        for row, token in enumerate(greedy[0].tokens[1:5]):
            likely[row, token] = 2
        drafts = {"none": None, "random": RandomDrafter(1, config.vocab, 3), "ties": TableDrafter.of_array(likely)}[drafter]
        limits = [Limits(9), Limits(1), Limits(0), Limits(9, (greedy[0].tokens[2],)), Limits(4, (greedy[0].tokens[3], greedy[2].tokens[0]))]
        for budget in (0, 1, 6) if drafts else (0,):
            for limit in limits:
                assert session.generate(prompts, drafts, budget, limit) == golden.generate(prompts, drafts, budget, limit)


def test_generate_leaves_the_sequences_of_the_session_alone(tiny: LibrarySession) -> None:
    forward(tiny, chain([1, 2, 3]))
    tiny.commit(0, np.arange(3, dtype=np.int32))
    kept = tiny.cache_rows(0, 0)
    tiny.generate([np.array([9], np.int32), np.array([8, 7], np.int32)], RandomDrafter(1, 96, 3), 4, Limits(5))
    np.testing.assert_array_equal(tiny.cache_rows(0, 0), kept)


def test_a_failing_drafter_leaves_no_sequence_behind(tiny: LibrarySession) -> None:
    class Nan:
        block_len = 2

        def draft(self, sequence: int, history: NDArray[np.int32]) -> Float:
            return np.full((2, 96), np.nan, np.float32)

    before = tiny.free_slots()
    with pytest.raises(EngineError, match="T8: the logit of token 0 at depth 1 is nan"):
        tiny.generate([np.array([9], np.int32)], Nan(), 4, Limits(5))
    assert tiny.free_slots() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([np.zeros(0, np.int32)], None, 0, Limits(5)), "prompt 0 has no tokens"),
        (([np.array([96], np.int32)], None, 0, Limits(5)), r"token\[0\] is 96, but must be between 0 and 95"),
        (([np.array([1], np.int32)], RandomDrafter(1, 96, 3), 20000, Limits(5)), "T5: budget is 20000"),
        (([np.array([1], np.int32)], None, 0, Limits(-1)), "max_new is -1"),
    ],
)
def test_generate_refuses_what_it_cannot_do(tiny: LibrarySession, arguments: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        tiny.generate(*arguments)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (batch((0, 96, 0, -1)), r"token\[0\] is 96, but must be between 0 and 95"),
        (batch((0, -1, 0, -1)), r"token\[0\] is -1"),
        (batch((0, 1, -1, -1)), r"position\[0\] is -1, but positions start at 0"),
        (batch((0, 1, 0, 0)), r"parent\[0\] is 0, but must be -1 or an earlier row"),
        (batch((0, 1, 0, -2)), r"parent\[0\] is -2"),
        (batch((0, 1, 0, -1), (1, 1, 0, 0)), r"parent\[1\] is 0, a row of sequence 0, but must be of sequence 1"),
    ],
)
def test_bad_rows_are_refused(tiny: LibrarySession, rows: Rows, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        forward(tiny, rows)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([0, 0], "K1: path holds 0 after 0"),
        ([1, 0], "K1: path holds 0 after 1|row 1 of the path has parent 0"),
        ([0, 4], "K1: path holds 4 after 0, but must ascend strictly below 4"),
        ([-1], "K1: path holds -1"),
        ([0, 3], "K1: row 3 of the path has parent 1, but the row before it is 0"),
        ([1], "K1: row 1 of the path has parent 0, but the row before it is -1"),
    ],
)
def test_a_path_that_is_no_chain_of_the_batch_is_refused(tiny: LibrarySession, path: list[int], message: str) -> None:
    forward(tiny, batch((0, 1, 0, -1), (0, 2, 1, 0), (0, 3, 1, 0), (0, 4, 2, 1)))
    with pytest.raises(EngineError, match=message):
        tiny.commit(0, np.array(path, np.int32))


def test_unknown_names_are_refused(engine: LibraryEngine, tiny: LibrarySession) -> None:
    forward(tiny, chain([1]))
    for call in (
        lambda: tiny.commit(8, np.zeros(1, np.int32)),
        lambda: tiny.evict(8),
        lambda: tiny.fork(8, 9),
        lambda: tiny.cache_rows(8, 0),
    ):
        with pytest.raises(EngineError, match="sequence 8 is unknown"):
            call()
    with pytest.raises(EngineError, match="layer is 2, but must be between 0 and 1"):
        tiny.cache_rows(0, 2)
    with pytest.raises(Unsupported, match="there is no operation 'dropout' here; this engine has embed,"):
        engine.run_op("dropout", {}, {}, {})


X = np.ones((3, 4), np.float32)
OUT = np.zeros((3, 4), np.float32)


@pytest.mark.parametrize(
    ("op", "inputs", "params", "outputs", "message"),
    [
        ("add", {"a": X}, {}, {"out": OUT}, "add: input b is missing"),
        ("add", {"a": X, "b": X}, {}, {}, "add: output out is missing"),
        ("add", {"a": X, "b": X[:2]}, {}, {"out": OUT}, r"add: b has shape \[2, 4\], but must be \[3, 4\]"),
        ("add", {"a": X, "b": X}, {}, {"out": OUT[:2]}, r"add: out has shape \[2, 4\], but must be \[3, 4\]"),
        ("add", {"a": X, "b": X.astype(np.float64)}, {}, {"out": OUT}, "add: b is float64 with 1 lanes, but must be float32"),
        ("add", {"a": X[0], "b": X}, {}, {"out": OUT}, "add: input a has 1 dimensions, but must have 2"),
        ("rms_norm", {"x": X, "gain": X[0]}, {}, {"out": OUT}, "rms_norm: parameter eps is missing"),
        ("embed", {"table": X, "ids": np.array([3], np.int32)}, {}, {"out": OUT[:1]}, "embed: ids holds 3 at 0, but ids are between 0 and 2"),
        ("tree_mask", {"parents": np.array([-1, 1], np.int32)}, {"prefix_len": 0},
         {"positions": np.zeros(2, np.int32), "visible": np.zeros((2, 2), np.uint8)}, r"tree_mask: T6: parents\[1\] is 1, but must be between 0 and 0"),
        ("draft_table", {"logits": X}, {"budget": -1}, {}, "draft_table: T5: budget is -1"),
        ("draft_table", {"logits": X}, {"budget": 1.5}, {}, "draft_table: parameter budget is the double 1.5, but must be an integer"),
        ("softmax", {"scores": X[None], "visible": X[:1]}, {}, {"out": OUT[None]}, "softmax: visible is float32 with 1 lanes, but must be uint8"),
    ],
)  # fmt: skip
def test_bad_operands_are_refused_by_name(engine: LibraryEngine, op: str, inputs: Any, params: Any, outputs: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        engine.run_op(op, inputs, params, outputs)


def test_views_are_unsupported_and_say_so(engine: LibraryEngine) -> None:
    wide = np.ones((3, 8), np.float32)
    with pytest.raises(Unsupported, match=r"add: b has strides \[8, 2\], but this engine takes contiguous row-major tensors only"):
        engine.run_op("add", {"a": X, "b": wide[:, ::2]}, {}, {"out": OUT})
    with pytest.raises(Unsupported, match="add: out has strides"):
        engine.run_op("add", {"a": X, "b": X}, {}, {"out": wide[:, ::2]})
    one = np.ones((5, 4), np.float32)[::3][:1]  # the stride of a single row does not matter
    out = np.zeros((1, 4), np.float32)
    engine.run_op("add", {"a": one, "b": one}, {}, {"out": out})
    assert (out == 2).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_dim": 7}, "rope_dim is 7, but pairs are rotated"),
        ({"vocab": 0}, "vocab is 0, but must be at least 1"),
        ({"top_k": 9}, r"top_k is 9, but must be between 1 and experts \(8\)"),
        ({"groups": 3}, r"groups is 3, but must divide experts \(8\)"),
        ({"rms_eps": 0}, "rms_eps is 0, but must be positive and finite"),
        ({"tied": 2}, "parameter tied is 2, but must be 0 or 1"),
        ({"cache_slots": 0}, "cache_slots is 0"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused(engine: LibraryEngine, options: dict[str, int], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        opened(engine, preset("tiny"), **options)


# ---- sanitizers -----------------------------------------------------------------------------------------------------

SANITIZED = """
import sys
import numpy as np
from hypothesis import HealthCheck, given, settings
from campaigns.strategies import op_cases, session_cases, tree_cases
from impls.native import native
from tests_of_native import InProcess, findings, opened, chain, batch, forward, REPRODUCIBLE
from spec.config import preset
from spec.drafters import RandomDrafter
from spec.engine import Limits
from spec.sampling import Sampling

engine = native(sanitize=True)
for cases, count in ((op_cases(), 150), (tree_cases(), 30), (session_cases("small"), 12)):
    @settings(REPRODUCIBLE, max_examples=count)
    @given(cases)
    def check(case):
        assert findings(engine, case) == []
    check()
with opened(engine, preset("tiny"), cache_slots=64) as session:
    for attempt in (lambda: forward(session, batch((0, 96, 0, -1))), lambda: forward(session, chain([1] * 65)), lambda: session.fork(1, 2)):
        try:
            attempt()
        except Exception as problem:
            print(problem)
    session.generate([np.array([1, 2], np.int32)], RandomDrafter(1, 96, 3), 5, Limits(6))
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((95, 1.0),))
    session.sample([np.array([1, 2], np.int32), np.array([95], np.int32)], RandomDrafter(1, 96, 3), 5, Limits(6), sampling)
print("clean")
"""


@pytest.mark.timeout(900)  # builds the engine once more, and runs it many times slower
def test_the_sanitizers_find_nothing() -> None:
    """Address and undefined-behaviour sanitizers over operations, trees, sessions, two loops and three refusals, in a process of its own."""
    try:
        preload = build.sanitizer_preload()
    except build.BuildError as problem:
        pytest.skip(str(problem))
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter itself never frees everything
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONMALLOC": "malloc",  # numpy's and Python's buffers get red zones as well
    }
    code = f"import importlib.util, sys; s = importlib.util.spec_from_file_location('tests_of_native', {__file__!r}); m = importlib.util.module_from_spec(s); sys.modules['tests_of_native'] = m; s.loader.exec_module(m)\n{SANITIZED}"
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-4000:]
    assert answer.stdout.endswith("clean\n")
    assert "the cache is full" in answer.stdout
