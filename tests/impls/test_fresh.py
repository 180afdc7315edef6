"""Each fresh plant differs from the honest engine on an input made by hand, and not on a neighbour of it. No judge is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from impls.native import build
from impls.planted.fresh import FRESH, OVERRIDES
from impls.planted.mutants import PLANTS
from impls.planted.native_plants import PLANTS as NATIVE_PLANTS
from impls.registry import resolve
from spec.config import preset
from spec.engine import Limits, Rows
from spec.weights import random_weights

CONFIG = preset("tiny")
WEIGHTS = random_weights(CONFIG, 3)
Step = tuple[str, Any]


def rows(*sequences: tuple[int, int, Sequence[int]]) -> Rows:
    """(sequence, prefix length, parents among its own rows), one after the other; tokens are counted up."""
    sequence: list[int] = []
    position: list[int] = []
    parent: list[int] = []
    for name, prefix_len, parents in sequences:
        first = len(sequence)
        depths: list[int] = []
        for above in parents:
            depths.append(depths[above] + 1 if above >= 0 else 0)
            sequence.append(name)
            parent.append(first + above if above >= 0 else -1)
            position.append(prefix_len + depths[-1])
    columns = (sequence, np.arange(7, 7 + len(sequence)), position, parent)
    return Rows(*(np.array(column, np.int32) for column in columns))


def answers(name: str, steps: Sequence[Step]) -> list[NDArray[np.float32]]:
    """Logits of every forward and the rows of every look into the cache."""
    session, out = resolve(name).open(CONFIG, WEIGHTS.__getitem__), []
    for verb, argument in steps:
        if verb == "forward":
            out.append(session.forward(argument, np.ones(len(argument), np.bool_), frozenset(), lambda *_: None))
        elif verb == "commit":
            session.commit(argument[0], np.arange(argument[1], dtype=np.int32))
        elif verb == "rows":
            out.append(session.cache_rows(argument, 0))
        else:
            getattr(session, verb)(*argument)
    return out


def called(name: str, op: str, params: dict[str, float], shape: tuple[int, ...], output: str = "out", **inputs: Any) -> NDArray[Any]:
    """`output` of an operation whose outputs all have one shape."""
    names = {"route": ("ids", "weights"), "argmax": ("ids",)}.get(op, ("out",))
    outputs = {key: np.zeros(shape, np.int32 if key == "ids" else np.float32) for key in names}
    resolve(name).run_op(op, {key: np.asarray(value) for key, value in inputs.items()}, params, outputs)
    return outputs[output]


def prompt(sequence: int, length: int) -> list[Step]:
    return [("forward", rows((sequence, 0, range(-1, length - 1)))), ("commit", (sequence, length))]


SESSIONS: dict[str, tuple[list[Step], list[Step]]] = {  # plant: steps that show it, steps that do not
    "rope-bf16-frequency": (prompt(0, 2), prompt(0, 1)),
    "rope-first-row-only": (
        [*prompt(0, 3), *prompt(1, 3), ("forward", rows((0, 3, [-1]), (1, 3, [-1])))],
        [*prompt(0, 3), *prompt(1, 3), ("forward", rows((0, 3, [-1]), (1, 3, [-1, 0])))],
    ),
    "verify-keys-are-prefix": ([*prompt(0, 3), ("forward", rows((0, 3, [-1, 0])))], [*prompt(0, 3), ("forward", rows((0, 3, [-1])))]),
    "prefix-hit-contiguous": ([*prompt(0, 3), ("forward", rows((0, 3, [-1, 0])))], [*prompt(0, 3), ("forward", rows((0, 3, [-1])))]),
    "page-end-slot": ([*prompt(0, 3), ("forward", rows((0, 3, [-1])))], [*prompt(0, 4), ("forward", rows((0, 4, [-1])))]),
    "fork-not-counted": (
        [*prompt(0, 4), ("fork", (0, 1)), ("evict", (1,)), ("rows", 0)],
        [*prompt(0, 3), ("fork", (0, 1)), ("evict", (1,)), ("rows", 0)],
    ),
    "decode-after-prefill": (
        [*prompt(0, 3), ("forward", rows((0, 3, [-1]), (1, 0, [-1, 0])))],
        [*prompt(0, 3), ("forward", rows((1, 0, [-1, 0]), (0, 3, [-1])))],
    ),
}


@pytest.mark.parametrize("name", SESSIONS)
def test_session_differs_at_its_trigger_only(name: str) -> None:
    shown, neighbour = SESSIONS[name]
    assert not all(map(np.array_equal, answers(f"blocked:{name}", shown), answers("blocked", shown)))
    assert all(map(np.array_equal, answers(f"blocked:{name}", neighbour), answers("blocked", neighbour)))


def scores(experts: int) -> NDArray[np.float32]:
    return (1 / (1 + np.exp(-np.linspace(-2, 1, experts)[None])))[:, ::-1].astype(np.float32)


def routed(experts: int, bias: Sequence[float]) -> tuple[str, dict[str, float], tuple[int, ...], str, dict[str, Any]]:
    params = {
        "top_k": 4,
        "groups": 1,
        "top_groups": 1,
        "group_score_max": 0,
        "norm_top_k": 1,
        "routed_scale": 1.0,
        "denominator_eps": 1e-20,
    }
    return "route", params, (1, 4), "weights", {"scores": scores(experts), "bias": np.array(bias, np.float32)}


FLAT = np.full((1, 16), 0.5, np.float32)
ROW = np.array([[100, *[0.0] * 63]], np.float32)
CALLS: dict[str, tuple[Any, ...]] = {
    "padded-argmax": (
        ("argmax", {}, (1,), "ids", {"logits": np.full((1, 10), -1, np.float32)}),
        ("argmax", {}, (1,), "ids", {"logits": np.linspace(-1, 1, 10, dtype=np.float32)[None]}),
    ),
    "gate-tile-16-4": (routed(16, [0] * 16), routed(12, [0] * 12)),
    "routing-bias-bf16": (
        (*routed(16, [7 + 0.001 * i for i in range(16)])[:3], "ids", {"scores": FLAT, "bias": (7 + 0.001 * np.arange(16)).astype(np.float32)}),
        (*routed(16, [7 + i for i in range(16)])[:3], "ids", {"scores": FLAT, "bias": (7 + np.arange(16)).astype(np.float32)}),
    ),
    "eps-times-peak": (
        ("rms_norm", {"eps": 1e-5}, (1, 64), "out", {"x": ROW, "gain": np.ones(64, np.float32)}),
        ("rms_norm", {"eps": 1e-5}, (1, 64), "out", {"x": ROW / 100, "gain": np.ones(64, np.float32)}),
    ),
    "softmax-naive": tuple(
        ("softmax", {}, (1, 1, 2), "out", {"scores": np.array([[[high, 0]]], np.float32), "visible": np.ones((1, 2), np.uint8)})
        for high in (100, 0)
    ),
    "gemv-k-tail": tuple(
        ("matmul", {}, (1, 2), "out", {"x": np.ones((1, terms), np.float32), "w": np.ones((terms, 2), np.float32)}) for terms in (33, 32)
    ),
    "norm-odd-width": tuple(
        ("rms_norm", {"eps": 1e-6}, (2, width), "out", {"x": np.arange(1, 1 + 2 * width, dtype=np.float32).reshape(2, -1), "gain": np.ones(width, np.float32)})
        for width in (3, 4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_operation_differs_at_its_trigger_only(name: str) -> None:
    engine, (shown, neighbour) = FRESH[name].engine, CALLS[name]
    honest = engine.partition(":")[0]

    def out(of: str, call: Any) -> NDArray[Any]:
        op, params, shape, output, inputs = call
        try:
            return called(of, op, params, shape, output, **inputs)
        except build.NoCompiler as problem:
            pytest.skip(str(problem))

    assert not np.array_equal(out(engine, shown), out(honest, shown))
    assert np.array_equal(out(engine, neighbour), out(honest, neighbour))


def test_prompt_tail_twice_changes_a_first_token() -> None:
    try:
        engines = [resolve(name) for name in ("native", FRESH["prompt-tail-twice"].engine)]
    except build.NoCompiler as problem:
        pytest.skip(str(problem))
    prompts = [np.array([5, last], np.int32) for last in range(8)]
    firsts = []
    for engine in engines:
        session = engine.open(CONFIG, WEIGHTS.__getitem__)
        firsts.append([g.tokens for g in session.generate(prompts, None, 1, Limits(max_new=1))])
    assert firsts[0] != firsts[1]


def test_fifteen_and_apart_from_the_library() -> None:
    assert len(FRESH) == 15
    assert not set(FRESH) & {*PLANTS, *NATIVE_PLANTS}
    assert set(OVERRIDES) == {name for name, plant in FRESH.items() if plant.kind == "python"}
    assert {*SESSIONS, *CALLS, "prompt-tail-twice"} == set(FRESH)
