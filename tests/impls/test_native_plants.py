"""Each plant of the native engine at its smallest trigger: the honest engine passes the judge, the planted one is named for it.

What the judge makes of plants in whole campaigns is measured elsewhere; here each build flavour is shown to be wrong where its
record says, and right one step before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest

from impls.native import LibraryEngine, LibrarySession, build, native
from impls.planted.native_plants import PLANTS
from oracles.judge import judge_op
from oracles.judgement import FINDINGS
from spec.config import preset
from spec.drafters import TableDrafter
from spec.engine import Limits, Rows
from spec.formats import packed_int4, rounded_bfloat16
from spec.ops import OPS
from spec.script import OpCall
from spec.weights import random_weights

CONFIG = preset("tiny")
WEIGHTS = random_weights(CONFIG, 3)


@cache
def engine(plant: str | None = None) -> LibraryEngine:
    try:
        return native(plant)
    except build.NoCompiler as problem:
        pytest.skip(str(problem))


def op(name: str, params: dict[str, Any] | None = None, **inputs: Any) -> OpCall:
    """A call with the output shapes of the golden result."""
    arrays = {key: np.asarray(value) for key, value in inputs.items()}
    golden = OPS[name].function(arrays, params or {})
    return OpCall(name, arrays, params or {}, {key: (value.shape, value.dtype.name) for key, value in golden.items()})


def accused(planted: LibraryEngine, *calls: OpCall) -> list[str]:
    """Op and rule of each finding of the last call."""
    for call in calls:
        outputs = {name: np.full(shape, -1 if dtype != "uint8" else 255, dtype) for name, (shape, dtype) in call.outputs.items()}
        planted.run_op(call.op, call.inputs, call.params, outputs)
    return [word for j in judge_op(calls[-1], outputs, planted.describe().profile) if j.verdict in FINDINGS for word in (j.op, j.rule)]


def tree(parents: list[int], prefix_len: int = 0) -> OpCall:
    return op("tree_mask", {"prefix_len": prefix_len}, parents=np.array(parents, np.int32))


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def moe(rows: int) -> OpCall:
    ids = np.zeros((rows, 1), np.int32)
    return op("moe", x=floats(rows, 3), ids=ids, gate=floats(2, 3, 4), up=floats(2, 3, 4), down=floats(2, 4, 3))


def accept(target: list[int]) -> OpCall:
    return op("accept", tokens=np.array([5, 6], np.int32), parents=np.array([-1, 0], np.int32), target=np.array(target, np.int32))


def scores(*values: float) -> OpCall:
    """One query times keys of these scores."""
    return op("scores", {"scale": 1.0}, q=np.ones((1, 1, 1), np.float32), keys=np.float32(values)[:, None])


def softmax(*values: float, visible: int = 1) -> OpCall:
    seen = np.full((1, len(values)), visible, np.uint8)
    return op("softmax", scores=np.float32(values)[None, None], visible=seen)


def attention(keys: int, rising: int) -> OpCall:
    """One row over `keys` keys; the raw score of the key at `rising` is the best by far."""
    cache = floats(keys, 3)
    cache[:, 0] = 0
    cache[rising, 0] = 4
    seen = np.ones((1, keys), np.uint8)
    return op("tree_attention", {"kv_rank": 2, "scale": 1.0}, q=np.float32([[[1, 0, 0]]]), cache=cache, visible=seen)


def route(scores: list[float], bias: list[float], **changed: Any) -> OpCall:
    params = {"top_k": 1, "groups": 1, "top_groups": 1, "group_score_max": 0, "norm_top_k": 0, "routed_scale": 1.0, "denominator_eps": 0.0}
    return op("route", params | changed, scores=np.float32([scores]), bias=np.float32(bias))


def combine(rows: int) -> OpCall:
    return op("combine", weights=floats(rows, 1), experts=floats(rows, 1, 2), shared=np.ones((rows, 2), np.float32))


def norm(eps: float) -> OpCall:
    return op("rms_norm", {"eps": eps}, x=floats(1, 4) / 64, gain=np.ones(4, np.float32))


def int4(scale: float) -> OpCall:
    quantised = np.arange(-8, 8).repeat(2)[:, None]
    return op("int4_matmul", x=floats(1, 32), packed=packed_int4(quantised), scales=np.float32([[scale]]))


def best_tree(budget: int, *log_probs: list[float]) -> OpCall:
    ids = np.arange(sum(map(len, log_probs)), dtype=np.int32).reshape(len(log_probs), -1)
    return op("best_first_tree", {"budget": budget, "root": 0}, ids=ids, log_probs=np.float32(log_probs))


def star(count: int, accepted: int) -> OpCall:
    """A root with `count` children, of which one is accepted."""
    tokens, target = np.arange(count + 1, dtype=np.int32), np.full(count + 1, 99, np.int32)
    target[0] = accepted
    return op("accept", tokens=tokens, parents=np.array([-1] + [0] * count, np.int32), target=target)


OPERATIONS: dict[str, tuple[tuple[OpCall, ...], tuple[OpCall, ...]]] = {
    # plant: (calls that are right, calls of which the last is wrong)
    "position-index": ((tree([-1, 0, 1]),), (tree([-1, 0, 0]),)),
    "mask-tile": ((tree([-1, 0, 0, 0]),), (tree([-1, 0, 0, 0, 0]),)),
    "gemm-tail-stale": ((op("matmul", x=floats(4, 3), w=floats(3, 2)),), (op("matmul", x=floats(5, 3), w=floats(3, 2)),)),
    "expert-first-row": ((moe(1),), (moe(2),)),
    "heap-fifo": (
        (op("best_first_tree", {"budget": 2, "root": 0}, ids=np.array([[1, 2], [3, 4]], np.int32), log_probs=np.float32([[-1, -1.5], [0, -5]])),),
        (op("best_first_tree", {"budget": 2, "root": 0}, ids=np.array([[1, 2], [3, 4]], np.int32), log_probs=np.float32([[-1, -1], [0, -5]])),),
    ),
    "bonus-parent": ((accept([7, 8]),), (accept([6, 8]),)),
    "compact-first": (
        (op("compact", {"prefix_len": 1}, cache=floats(4, 2), path=np.array([0, 1], np.int32)),),
        (op("compact", {"prefix_len": 1}, cache=floats(3, 2), path=np.array([1], np.int32)),),
    ),
    "scale-log2": ((scores(0.0),), (scores(1.0),)),
    "max-floor": ((softmax(-4e4, -4e4),), (softmax(-6e4, -6e4),)),
    "out-not-rescaled": ((attention(16, 15),), (attention(17, 16),)),
    "merge-unscaled": ((attention(256, 255),), (attention(257, 0),)),
    "empty-uniform": ((softmax(1.0, 2.0),), (softmax(1.0, 2.0, visible=0),)),
    "group-mask-zero": (
        (route([0.5, 0.5, 0.1, 0.1], [0, 0, 0, 0], groups=2),),
        (route([0.5, 0.5, 0.1, 0.1], [-1, -1, -2, -2], groups=2),),
    ),
    "top-k-last": ((route([0.5, 0.25], [0, 0]),), (route([0.5, 0.5], [0, 0]),)),
    "biased-weights": ((route([0.5, 0.25], [0, 0]),), (route([0.5, 0.25], [1, 1]),)),
    "shared-first-row": ((combine(1),), (combine(2),)),
    "norm-eps": ((norm(1e-5),), (norm(1e-6),)),
    "swiglu-swapped": (
        (op("swiglu", gate=np.float32([[1.0]]), up=np.float32([[1.0]])),), (op("swiglu", gate=np.float32([[1.0]]), up=np.float32([[2.0]])),),
    ),
    "argmax-last": ((op("argmax", logits=np.float32([[1, 2]])),), (op("argmax", logits=np.float32([[2, 2]])),)),
    "head-zero": (
        (op("q_absorb", q_nope=floats(1, 1, 2), w_kc=floats(1, 2, 2)),), (op("q_absorb", q_nope=floats(1, 2, 2), w_kc=floats(2, 2, 2)),),
    ),
    "mask-32": ((tree(list(range(-1, 31))),), (tree(list(range(-1, 32))),)),
    "budget-short": ((best_tree(0, [-1.0]),), (best_tree(1, [-1.0]),)),
    "child-score": ((best_tree(2, [-1.0, -5.0], [-1.0, -2.0]),), (best_tree(2, [-1.0, -1.5], [-1.25, -2.0]),)),
    "table-first-row": (
        (op("draft_table", {"budget": 1}, logits=np.float32([[1, 2]])),), (op("draft_table", {"budget": 1}, logits=np.float32([[1, 2], [5, 0]])),),
    ),
    "next-sibling": ((star(3, 2),), (star(3, 3),)),
    "int4-scale-mantissa": ((int4(2.0),), (int4(1.5),)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_planted_operation_is_named_at_its_smallest_trigger(name: str) -> None:
    right, wrong = OPERATIONS[name]
    assert accused(engine(), *wrong) == []
    assert accused(engine(name), *right) == []
    named = accused(engine(name), *wrong)
    assert set(named) & set(PLANTS[name].expected_ops), f"{named} names none of {PLANTS[name].expected_ops}"


# ---- plants that need a session -------------------------------------------------------------------------------------


def committed(session: LibrarySession, prefix: int, parents: list[int], path: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(expected, found) rows of layer 0 behind the prefix: the latents of the path, and what the cache holds after the commit."""

    def forward(rows: Rows) -> np.ndarray:
        latents: list[np.ndarray] = []
        session.forward(rows, np.zeros(len(rows), np.bool_), frozenset({"latent"}), lambda name, layer, array: latents.append(array))
        return latents[0]

    def rows(tokens: range, positions: Any, above: Any) -> Rows:
        return Rows(*(np.array(list(column), np.int32) for column in ([0] * len(tokens), tokens, positions, above)))

    forward(rows(range(prefix), range(prefix), range(-1, prefix - 1)))
    session.commit(0, np.arange(prefix, dtype=np.int32))
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    latents = forward(rows(range(40, 40 + len(parents)), [prefix + d for d in depths], parents))
    session.commit(0, np.array(path, np.int32))
    return latents[path], session.cache_rows(0, 0)[prefix:, : CONFIG.kv_rank]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("compact-first", (3, [-1, 0, 0], [0, 1]), (3, [-1, 0, 0], [0, 2])),
        ("compact-page", (13, [-1, 0, 0], [0, 2]), (14, [-1, 0, 0], [0, 2])),
        ("rejected-visible", (3, [-1, 0], [0, 1]), (3, [-1, 0], [0])),
    ],
)
def test_a_planted_commit_is_wrong_at_its_smallest_trigger(name: str, right: Any, wrong: Any) -> None:
    for plant, case, holds in ((None, right, True), (None, wrong, True), (name, right, True), (name, wrong, False)):
        with engine(plant).open(CONFIG, WEIGHTS) as session:
            assert np.array_equal(*committed(session, *case)) == holds


def test_a_window_that_is_inclusive_at_both_ends_sees_one_key_too_many() -> None:
    config = preset("tiny", window=1)
    chain = Rows(*(np.array(column, np.int32) for column in ([0, 0], [3, 4], [0, 1], [-1, 0])))
    for plant, seen in ((None, [[True, False], [False, True]]), ("window-inclusive", [[True, False], [True, True]])):
        with engine(plant).open(config, WEIGHTS) as session:
            probs: list[np.ndarray] = []
            session.forward(chain, np.zeros(2, np.bool_), frozenset({"probs"}), lambda name, layer, array, probs=probs: probs.append(array))
            assert ((probs[0][:, 0] > 0) == seen).all(), plant


def test_a_cache_that_truncates_is_another_bfloat16() -> None:
    config = preset("tiny", cache_format="bfloat16")
    row = Rows(*(np.array([column], np.int32) for column in (0, 3, 0, -1)))
    latents = {}
    for plant in (None, "cache-truncated"):
        with engine(plant).open(config, WEIGHTS) as session:
            session.forward(
                row, np.zeros(1, np.bool_), frozenset({"latent"}), lambda name, layer, array, p=plant: latents.setdefault(p, array)
            )
    assert all(np.array_equal(rounded_bfloat16(value), value) for value in latents.values())
    assert (np.abs(latents["cache-truncated"]) <= np.abs(latents[None])).all() and (latents["cache-truncated"] != latents[None]).any()


def seen_keys(session: LibrarySession, parents: list[int]) -> np.ndarray:
    """Which rows of a batch each row gives weight to."""
    probs: list[np.ndarray] = []
    count = len(parents)
    rows = Rows(np.zeros(count, np.int32), np.arange(count, dtype=np.int32), np.zeros(count, np.int32), np.array(parents, np.int32))
    session.forward(rows, np.zeros(count, np.bool_), frozenset({"probs"}), lambda name, layer, array: probs.append(array))
    session.commit(0, np.zeros(1, np.int32))
    return np.asarray(probs[0][:, 0, -count:] > 0)


def test_the_mask_of_the_first_batch_of_a_size_stays() -> None:
    chain, star = [-1, 0, 1], [-1, 0, 0]
    with engine().open(CONFIG, WEIGHTS) as honest, engine("mask-stale").open(CONFIG, WEIGHTS) as planted:
        for session in (honest, planted):
            np.testing.assert_array_equal(seen_keys(session, chain), [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
        np.testing.assert_array_equal(seen_keys(honest, star), [[1, 0, 0], [1, 1, 0], [1, 0, 1]])
        np.testing.assert_array_equal(seen_keys(planted, star), [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
        np.testing.assert_array_equal(seen_keys(planted, [-1, 0]), [[1, 0], [1, 1]])


def test_a_stop_token_inside_an_accepted_path_is_overrun() -> None:
    prompt = [np.array([5, 9], np.int32)]
    with engine().open(CONFIG, WEIGHTS) as session:
        first, second, third, *_ = session.generate(prompt, None, 0, Limits(3))[0].tokens
    table = np.zeros((1, CONFIG.vocab), np.float32)
    table[0, second] = 9
    drafter = TableDrafter.of_array(table)
    for plant, tokens in ((None, (first, second)), ("stop-last", (first, second, third))):
        with engine(plant).open(CONFIG, WEIGHTS) as session:
            assert session.generate(prompt, drafter, 1, Limits(3, (second,)))[0].tokens == tokens
            assert session.generate(prompt, drafter, 1, Limits(3, (first,)))[0].tokens == (first,)


def tapped(session: LibrarySession, name: str, rows: int, start: int = 0) -> np.ndarray:
    """A tap of layer 0 for a prompt of `rows` tokens."""
    found: list[np.ndarray] = []
    index = np.arange(rows, dtype=np.int32)
    batch = Rows(np.zeros(rows, np.int32), index + 3, index + start, index - 1)
    session.forward(batch, np.zeros(rows, np.bool_), frozenset({name}), lambda name, layer, array: found.append(array))
    return found[0]


@pytest.mark.parametrize(("name", "tap", "right"), [("key-layout", "k_rope", 1), ("norm-stride", "latent", 1)])
def test_a_planted_view_is_wrong_from_the_second_row_on(name: str, tap: str, right: int) -> None:
    with engine().open(CONFIG, WEIGHTS) as honest, engine(name).open(CONFIG, WEIGHTS) as planted:
        due, found = tapped(honest, tap, 2), tapped(planted, tap, 2)
    np.testing.assert_array_equal(found[:right], due[:right])
    assert not np.array_equal(found[right:], due[right:])


@pytest.mark.parametrize(("rows", "whole"), [(16, True), (17, False)])
def test_a_fork_of_whole_pages_loses_the_rest(rows: int, whole: bool) -> None:
    with engine("fork-pages").open(CONFIG, WEIGHTS) as session:
        tapped(session, "latent", rows)
        session.commit(0, np.arange(rows, dtype=np.int32))
        session.fork(0, 1)
        assert np.array_equal(session.cache_rows(1, 0), session.cache_rows(0, 0)) == whole


def test_an_operation_of_one_row_writes_past_its_output() -> None:
    room = np.full(8, -7, np.int32)
    engine("argmax-stray").run_op("argmax", {"logits": np.float32([[1, 2]])}, {}, {"ids": room[:1]})
    assert room.tolist() == [1, 0, -7, -7, -7, -7, -7, -7]


# ---- plants that end or stall their process -------------------------------------------------------------------------

CALL = """
import sys
import numpy as np
from impls.native import native
engine = native(sys.argv[1])
size = int(sys.argv[2])
print("calling", flush=True)
if sys.argv[1] == "mask-crash":
    parents = np.arange(-1, size - 1, dtype=np.int32)
    engine.run_op("tree_mask", {"parents": parents}, {"prefix_len": 0},
                  {"positions": np.zeros(size, np.int32), "visible": np.zeros((size, size), np.uint8)})
else:
    engine.run_op("matmul", {"x": np.ones((size, 2), np.float32), "w": np.ones((2, 2), np.float32)}, {}, {"out": np.zeros((size, 2), np.float32)})
print("returned", flush=True)
"""


def start(name: str, size: int) -> subprocess.Popen[str]:
    engine(name)  # compiled here, so that the process only loads it
    return subprocess.Popen(
        [sys.executable, "-c", CALL, name, str(size)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize("size", [6, 7, 8])
def test_the_crash_is_at_seven_rows_only(size: int) -> None:
    process = start("mask-crash", size)
    output, _ = process.communicate()
    assert output.split() == (["calling"] if size == 7 else ["calling", "returned"])
    assert process.returncode == (-11 if size == 7 else 0)


@pytest.mark.parametrize("size", [4, 5, 6])
def test_the_hang_is_at_five_rows_only(size: int) -> None:
    process = start("gemm-hang", size)
    assert process.stdout is not None
    assert process.stdout.readline() == "calling\n"
    try:
        if size == 5:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)  # an honest product of this size takes microseconds
        else:
            assert process.wait() == 0
    finally:
        process.kill()
        process.communicate()


def test_every_plant_is_shown() -> None:
    """The plants of sampling are shown in test_native_sampling.py."""
    shown = {
        *OPERATIONS,
        "key-layout",
        "norm-stride",
        "fork-pages",
        "argmax-stray",
        "mask-stale",
        "compact-page",
        "rejected-visible",
        "stop-last",
        "mask-crash",
        "gemm-hang",
        "sampled-greedy",
        "stale-penalties",
        "window-inclusive",
        "cache-truncated",
    }
    assert shown == set(PLANTS)
