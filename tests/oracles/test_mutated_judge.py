"""The judge is broken on purpose, and its own battery must notice.

A battery of calls and sessions, each with what the judge must say of it: a finding, or none. The judge says it of all of them. Then each mutated judge
is run through the same battery: the real `judge_op` and `SessionJudge`, in which one comparison is replaced by a rule that somebody uses somewhere.
At least one case must flip; for the rules that are in use, the case that shows what is wrong with them is named.

That cannot pass for nothing: a mutation that replaces everything by itself flips no case, every mutation is seen to be reached, every case that must
be found is let through by some mutation, and every case that must pass is an alarm of some mutation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from conftest import altered, honest, judge_of
from numpy.typing import NDArray
from test_judge import MUTANTS as COMPARATORS

from campaigns.hazards import poison
from oracles import cached, compare, walked
from oracles.ball import Ball, Wide, arithmetic
from oracles.compare import Equal, Near
from oracles.judge import judge_op
from oracles.judgement import FINDINGS, Judgement, Verdict
from oracles.ops import BOUNDS
from spec.engine import Profile
from spec.ops import OPS
from spec.script import Forward, OpCall

F = np.float32
ORIGINAL_SHARES, ORIGINAL_EQUAL = compare.shares, compare.judge_equal
Array = NDArray[Any]
Outputs = Mapping[str, Array]


# ---- the battery ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Asked:
    """A call with the outputs of some engine. `wrong`: the judge must have a finding."""

    call: OpCall
    outputs: Outputs
    wrong: bool


def called(op: str, inputs: Mapping[str, Array], params: Mapping[str, Any] | None = None) -> tuple[OpCall, dict[str, Array]]:
    """The call, and the golden outputs."""
    golden = OPS[op].function(inputs, params or {})
    shapes = {name: (value.shape, str(value.dtype)) for name, value in golden.items()}
    return OpCall(op, dict(inputs), params or {}, shapes), {name: np.array(value) for name, value in golden.items()}


def rows(seed: int, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.Generator(np.random.Philox(seed)).standard_normal(shape) * scale).astype(F)


def product(scale: float = 1.0, size: int = 5) -> tuple[OpCall, Array]:
    call, golden = called("matmul", {"x": rows(1, size, 7, scale=scale), "w": rows(2, 7, size)})
    return call, golden["out"]


def moved(by: float, at: tuple[int, int] = (2, 1), *, size: int = 5) -> Asked:
    """One element of a product, `by` times its radius away from the exact value."""
    call, out = product(size=size)
    near = BOUNDS["matmul"](call.inputs, {}, {"out": out}, arithmetic(Profile()))["out"]
    assert isinstance(near, Near)
    assert near.ball.rad is not None
    out[at] = near.ball.mid[at] + by * near.ball.rad[at]
    return Asked(call, {"out": out}, abs(by) > 1)


def changed(change: Callable[[Array], Array | None], wrong: bool = True, scale: float = 1.0) -> Asked:
    """A product whose golden output is changed, in place or by what comes back."""
    call, out = product(scale)
    other = change(out)
    return Asked(call, {"out": out if other is None else other}, wrong)


def put(value: float) -> Callable[[Array], None]:
    def change(out: Array) -> None:
        out[2, 1] = value

    return change


def unwritten(out: Array) -> None:
    poison(out[2:3, 1:2])


def cancelled() -> Asked:
    """1 + 3e-8 - 1: float32 leaves nothing of it in this order, and all of it in another one."""
    call, golden = called("matmul", {"x": np.array([[1, 3e-8, -1]] * 2, F), "w": np.ones((3, 2), F)})
    assert (golden["out"] > 2e-8).all()
    return Asked(call, {"out": np.full((2, 2), F(F(1) + F(3e-8)) - F(1), F)}, False)


def copied(payload: int) -> Asked:
    """An embedding row that holds a NaN with the payload 1: copies keep it."""
    table = rows(3, 4, 3)
    table.view(np.uint32)[2, 1] = 0x7FC00001
    call, golden = called("embed", {"table": table, "ids": np.array([2, 0], np.int32)})
    golden["out"].view(np.uint32)[0, 1] = 0x7FC00000 + payload
    return Asked(call, golden, payload != 1)


def chosen(change: Callable[[Array], Array | None], wrong: bool = True) -> Asked:
    call, golden = called("argmax", {"logits": rows(4, 3, 6)})
    other = change(golden["ids"])
    return Asked(call, {"ids": golden["ids"] if other is None else other}, wrong)


def next_token(ids: Array) -> None:
    ids[1] = (ids[1] + 1) % 6


def beside_a_large_row() -> Asked:
    """A hundred of its own bounds, which are a thousandth of the bounds of the row above."""
    call, golden = called("matmul", {"x": rows(1, 2, 7) * np.array([[1e6], [1]], F), "w": rows(2, 7, 3)})
    near = BOUNDS["matmul"](call.inputs, {}, golden, arithmetic(Profile()))["out"]
    assert isinstance(near, Near)
    assert near.ball.rad is not None
    golden["out"][1, 2] += 100 * near.ball.rad[1, 2]
    return Asked(call, golden, True)


def seen_through_a_mask() -> Asked:
    """A weight that must be exactly 0 is a very small number."""
    call, golden = called("softmax", {"scores": rows(7, 1, 1, 3), "visible": np.array([[1, 0, 1]], np.uint8)})
    golden["out"][0, 0, 1] = 1e-30
    return Asked(call, golden, True)


def negated() -> Asked:
    call, golden = called("swiglu", {"gate": rows(5, 2, 4), "up": rows(6, 2, 4)})
    return Asked(call, {"out": -golden["out"]}, True)


def whole(outputs: Callable[[Outputs], Outputs], wrong: bool = True) -> Asked:
    inputs = {"tokens": np.array([5, 7, 8], np.int32), "parents": np.array([-1, 0, 0], np.int32), "target": np.array([8, 1, 2], np.int32)}
    call, golden = called("accept", inputs)
    return Asked(call, outputs(golden), wrong)


CALLS: dict[str, Asked] = {
    "right": changed(lambda out: None, False),
    "right, tiny": changed(lambda out: None, False, 1e-9),
    "right, cancelled": cancelled(),
    "right, copied": copied(1),
    "right token": chosen(lambda ids: None, False),
    "right path": whole(lambda golden: golden, False),
    "three quarters of the bound": moved(0.75),
    "three quarters of the bound, below": moved(-0.75),
    "one and a half bounds": moved(1.5),
    "one and a half bounds, below": moved(-1.5),
    "a hundred bounds, in the first row": moved(100, (0, 1)),
    "a hundred bounds, in the last row": moved(100, (4, 1)),
    "a hundred bounds, in the last column": moved(100, (2, 4)),
    "a hundred bounds, in one of 4096 elements": moved(100, (31, 17), size=64),
    "a common factor": changed(lambda out: out * F(2)),
    "half of a tiny row": changed(lambda out: np.concatenate([out[:2], out[2:3] / F(2), out[3:]]), True, 1e-9),
    "a hundred bounds, beside a large row": beside_a_large_row(),
    "a masked weight that is not 0": seen_through_a_mask(),
    "another sign": negated(),
    "NaN": changed(put(np.nan)),
    "infinity": changed(put(np.inf)),
    "never written": changed(unwritten),
    "another NaN": copied(2),
    "flat": changed(lambda out: out.ravel()),
    "transposed shape": changed(lambda out: out.reshape(1, 25)),
    "float64": changed(lambda out: out.astype(np.float64)),
    "int64": chosen(lambda ids: ids.astype(np.int64)),
    "another token": chosen(next_token),
    "another bonus": whole(lambda golden: {**golden, "bonus": golden["bonus"] + np.int32(1)}),
    "no bonus": whole(lambda golden: {name: value for name, value in golden.items() if name != "bonus"}),
}


def session_with(change: Callable[[dict[tuple[str, int], Array]], None]) -> Callable[[], list[Judgement]]:
    """The taps of the first tree, changed."""
    script, trace = honest()
    step = next(number for number, step in enumerate(script.steps) if isinstance(step, Forward) and step.phase == "tree")
    other = altered(trace, lambda answers: change(answers[step].taps))
    return lambda: judge_of().judge(script, other)


def one_number(taps: dict[tuple[str, int], Array]) -> None:
    taps["attn_out", 0][3, 2] += F(1e-3)


def one_choice(taps: dict[tuple[str, int], Array]) -> None:
    ids = taps["argmax", max(layer for name, layer in taps if name == "argmax")]
    ids[3] = (ids[3] + 1) % 7


SESSIONS: dict[str, tuple[Callable[[], list[Judgement]], bool]] = {
    "session, right": (session_with(lambda taps: None), False),
    "session, one number of a tap": (session_with(one_number), True),
    "session, one choice": (session_with(one_choice), True),
}
BATTERY = (*CALLS, *SESSIONS)


def alarms(read: Callable[[OpCall, Outputs], Outputs] = lambda call, outputs: outputs) -> dict[str, bool]:
    """case -> whether the judge, as it is now, has a finding. `read`: how it takes the outputs."""
    said = {name: judge_op(asked.call, read(asked.call, asked.outputs), Profile()) for name, asked in CALLS.items()}
    return {name: any(j.verdict in FINDINGS for j in judgements) for name, judgements in said.items()} | {
        name: session_alarm(judged) for name, (judged, _) in SESSIONS.items()
    }


def session_alarm(judged: Callable[[], list[Judgement]]) -> bool:
    """A mutated judge may look for the reason of an alarm that has none (oracles/diagnosis.py), and find no candidate: the alarm was raised."""
    try:
        return any(j.verdict in FINDINGS for j in judged())
    except IndexError:
        return True


DUE = {name: asked.wrong for name, asked in CALLS.items()} | {name: wrong for name, (_, wrong) in SESSIONS.items()}


# ---- mutations -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutation:
    """What is replaced: the shares of a ball, which values count as unequal, how outputs are read."""

    near: Callable[[Array, Near], Wide] = ORIGINAL_SHARES  # (found, expected) [rows, columns]
    unequal: Callable[[Array, Array], Any] | None = None
    read: Callable[[OpCall, Outputs], Outputs] = lambda call, outputs: outputs


def share_of(x: Array, near: Near) -> Wide:
    """|x - mid| / radius; NaN counts as far away."""
    assert near.ball.rad is not None
    return np.nan_to_num(np.abs(x - near.ball.mid) / np.maximum(near.ball.rad, 5e-324), nan=np.inf)


def passes_if(rule: Callable[[Array, Array], bool]) -> Callable[[Array, Near], Wide]:
    """A rule for whole arrays: (found, exact) -> bool."""
    return lambda found, near: np.full(near.ball.mid.shape, 0.0 if rule(np.asarray(found, np.float64), near.ball.mid) else 2.0)


def cosine(x: Array, y: Array) -> bool:
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return bool(float((x * y).sum()) / size > 0.999) if size else not (x.any() or y.any())


def any_length(call: OpCall, outputs: Outputs) -> Outputs:
    return {name: np.resize(value, call.outputs[name][0]) for name, value in outputs.items()}


def any_type(call: OpCall, outputs: Outputs) -> Outputs:
    return {name: value.astype(call.outputs[name][1]) for name, value in outputs.items()}


def with_golden(call: OpCall, outputs: Outputs) -> Outputs:
    return {**OPS[call.op].function(call.inputs, call.params), **outputs}


def same_or_both_nan(found: Array, values: Array) -> Any:
    return (found != values) & ~((found != found) & (values != values))


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    # rule -> (the judge with it, the case of the battery that shows what is wrong with it)
    "cosine only": (Mutation(passes_if(cosine)), "a common factor"),
    "length only": (Mutation(passes_if(lambda x, y: x.size == y.size), lambda x, y: np.zeros(x.shape, np.bool_)), "NaN"),
    "norm only": (Mutation(passes_if(lambda x, y: bool(abs(np.linalg.norm(x) / np.linalg.norm(y) - 1) < 1e-6))), "another sign"),
    "token-exact only": (Mutation(passes_if(lambda x, y: np.array_equal(x.argmax(-1), y.argmax(-1)))), "half of a tiny row"),
    "mean error instead of maximum": (
        Mutation(lambda x, near: np.full(near.ball.mid.shape, share_of(x, near).mean())), "a hundred bounds, in one of 4096 elements",
    ),
    "first row only": (
        Mutation(lambda x, near: np.concatenate([share_of(x, near)[:1], np.zeros_like(near.ball.mid[1:])])), "a hundred bounds, in the last row",
    ),
    "last token only": (
        Mutation(lambda x, near: np.concatenate([np.zeros_like(near.ball.mid[:-1]), share_of(x, near)[-1:]])), "a hundred bounds, in the first row",
    ),
    "shape ignored": (Mutation(read=any_length), "flat"),
    "dtype ignored": (Mutation(read=any_type), "float64"),
    "sign ignored": (
        Mutation(lambda x, near: share_of(np.abs(x), dataclasses.replace(near, ball=Ball(np.abs(near.ball.mid), near.ball.rad)))),
        "another sign",
    ),
    "relative without absolute at zero": (
        Mutation(lambda x, near: np.nan_to_num(np.abs(x - near.ball.mid) / (1e-5 * np.abs(near.ball.mid)), nan=np.inf)), "right, cancelled",
    ),
    "absolute only": (Mutation(lambda x, near: np.nan_to_num(np.abs(x - near.ball.mid) / 1e-8, nan=np.inf)), "half of a tiny row"),
    "NaN == NaN accepted": (Mutation(unequal=same_or_both_nan), "another NaN"),
    "NaN of the found values is nobody's": (Mutation(lambda x, near: np.where(np.isnan(x), 0.0, share_of(x, near))), "never written"),
    "integers within one": (Mutation(unequal=lambda x, y: np.abs(x.astype(np.float64) - y) > 1 if x.dtype.kind != "f" else x != y), "another bonus"),
    "missing outputs ignored": (Mutation(read=with_golden), "no bonus"),
    "always an alarm": (Mutation(lambda x, near: np.full(near.ball.mid.shape, np.inf), lambda x, y: np.ones(x.shape, np.bool_)), "right path"),
    "tokens not compared": (Mutation(unequal=lambda x, y: (x != y) & (x.dtype.kind == "f")), "another token"),
} | {name: (Mutation(comparator), "") for name, comparator in COMPARATORS.items()}  # fmt: skip


@contextmanager
def broken(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The judge with the mutation in place; yields the names of what was reached."""
    reached: list[str] = []

    def near(found: Array, expected: Near) -> Wide:
        if mutation.near is ORIGINAL_SHARES or expected.ball.rad is None or not found.size:
            return ORIGINAL_SHARES(found, expected)
        reached.append("near")
        shape = (len(found), -1)  # taps have heads
        where = None if expected.where is None else np.broadcast_to(expected.where, found.shape).reshape(shape)
        ball = Ball(expected.ball.mid.reshape(shape), np.broadcast_to(expected.ball.rad, found.shape).reshape(shape))
        with np.errstate(all="ignore"):
            return mutation.near(found.reshape(shape), Near(ball, expected.rule, where)).reshape(found.shape)

    def equal(found: Array, expected: Equal, **place: Any) -> Judgement:
        if mutation.unequal is None:
            return ORIGINAL_EQUAL(found, expected, **place)
        reached.append("equal")
        wrong = bool(np.any(mutation.unequal(found, expected.values)))
        place = {name: value for name, value in place.items() if name != "message"}
        return Judgement(Verdict.DEFECT if wrong else Verdict.EXACT, expected.rule, **{"token": -1} | place)

    with monkeypatch.context() as patch:
        for module in (compare, walked, cached):
            patch.setattr(module, "shares", near)
        for module in (compare, walked):
            patch.setattr(module, "judge_equal", equal)
        yield reached


def flips(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> tuple[frozenset[str], frozenset[str]]:
    """The cases of which the mutated judge says the contrary, and what it reached."""

    def read(call: OpCall, outputs: Outputs) -> Outputs:
        present = {name: value for name, value in outputs.items() if name in call.outputs}
        return mutation.read(call, present)

    with broken(mutation, monkeypatch) as reached:
        said = alarms(read)
    return frozenset(name for name in BATTERY if said[name] != DUE[name]), frozenset(reached)


@cache
def all_flips() -> dict[str, frozenset[str]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return {name: flips(mutation, monkeypatch)[0] for name, (mutation, _) in MUTATIONS.items()}


# ---- tests ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BATTERY)
def test_the_judge_says_what_it_must_of_every_case(case: str) -> None:
    assert alarms()[case] == DUE[case] if case in SESSIONS else _alarm(CALLS[case]) == DUE[case]


def _alarm(asked: Asked) -> bool:
    return any(j.verdict in FINDINGS for j in judge_op(asked.call, asked.outputs, Profile()))


def test_replacing_everything_by_itself_flips_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = Mutation(
        lambda found, near: ORIGINAL_SHARES(found, near), lambda found, values: found.tobytes() != values.astype(found.dtype).tobytes()
    )
    found, reached = flips(itself, monkeypatch)
    assert found == frozenset()
    assert reached == {"near", "equal"}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_judge_flips_a_case(name: str) -> None:
    assert all_flips()[name], "nothing of the battery notices"


@pytest.mark.parametrize("name", [name for name, (_, case) in MUTATIONS.items() if case])
def test_a_rule_in_use_flips_the_case_that_shows_what_is_wrong_with_it(name: str) -> None:
    assert MUTATIONS[name][1] in all_flips()[name]


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_reached(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name][0]
    replaced = {"near": mutation.near is not ORIGINAL_SHARES, "equal": mutation.unequal is not None}
    _, reached = flips(mutation, monkeypatch)
    assert {part for part, is_replaced in replaced.items() if is_replaced} <= reached
    assert any(replaced.values()) or any(mutation.read(asked.call, asked.outputs) is not asked.outputs for asked in CALLS.values())


def test_every_case_is_flipped_by_some_mutation() -> None:
    flipped = frozenset[str]().union(*all_flips().values())
    assert set(BATTERY) == flipped
