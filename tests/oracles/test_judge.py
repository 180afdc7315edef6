"""judge_op and the comparator: shapes, poison, sentences; and a battery that every mutated comparator fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from campaigns import hazards
from oracles import compare
from oracles.ball import Ball, Wide
from oracles.compare import Near, shares
from oracles.judge import judge_op
from oracles.judgement import Judgement, Verdict
from oracles.ops import BOUNDS
from spec.engine import Profile
from spec.ops import OPS
from spec.script import OpCall

F = np.float32
X, W = np.arange(6, dtype=F).reshape(2, 3), np.ones((3, 2), F)


def matmul(out: NDArray[Any], **more: Any) -> Judgement:
    call = OpCall("matmul", {"x": X, "w": W}, {}, {"out": ((2, 2), "float32")})
    (judgement,) = judge_op(call, {"out": out}, Profile(), **more)
    return judgement


def test_every_operation_has_a_judge_and_every_output_a_judgement() -> None:
    assert set(BOUNDS) == set(OPS)


def test_the_guard_values_are_those_of_the_hazards() -> None:
    assert compare.GUARD_INT == hazards.GUARD_INT
    assert compare.POISON_BYTE == hazards.POISON_BYTE
    assert compare.POISON_FLOAT_BITS == hazards.POISON_FLOAT_BITS


def test_a_right_result_passes_and_names_its_worst_element() -> None:
    found = X @ W
    found[1, 0] = np.nextafter(found[1, 0], F(99))
    judgement = matmul(found, rung="prefill", step=3, tap="kv_a")
    assert judgement.verdict is Verdict.WITHIN_BOUND
    assert (judgement.index, judgement.rung, judgement.step, judgement.tap, judgement.checked) == ((1, 0), "prefill", 3, "kv_a", 4)
    assert 0 < judgement.share < 1 and judgement.bound > 0 and judgement.message == ""


def test_a_defect_says_what_where_how_much_and_why() -> None:
    found = X @ W
    found[1, 1] += F(1e-3)
    judgement = matmul(found, tap="attn_out")
    assert judgement.verdict is Verdict.DEFECT
    assert judgement.message == "attn_out[1, 1] is 12.001, but should be 12 within 2e-06 (N2)"
    assert judgement.expected == 12 and judgement.found == pytest.approx(12.001)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (np.zeros((2, 3), F), "[2, 3]"),
        (np.zeros((2, 2), np.float64), "float64"),
        (np.zeros((4,), F), "[4]"),
    ],
)
def test_an_output_of_another_shape_or_dtype_is_malformed(found: NDArray[Any], text: str) -> None:
    judgement = matmul(found)
    assert judgement.verdict is Verdict.MALFORMED and text in judgement.message


def test_a_missing_output_is_malformed() -> None:
    call = OpCall("matmul", {"x": X, "w": W}, {}, {"out": ((2, 2), "float32")})
    assert judge_op(call, {}, Profile())[0].verdict is Verdict.MALFORMED


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_where_it_should_be_is_named(value: float) -> None:
    found = X @ W
    found[0, 1] = value
    judgement = matmul(found)
    assert (judgement.verdict, judgement.index) == (Verdict.NONFINITE, (0, 1))


def test_an_element_that_was_never_written_is_told_from_a_computed_nan() -> None:
    found = X @ W
    hazards.poison(found[1:, 1:])
    assert "never written" in matmul(found).message
    found[1, 1] = np.nan
    assert "never written" not in matmul(found).message


def test_guard_integers_that_are_left_are_malformed() -> None:
    ids, visible = np.zeros(2, np.int32), np.zeros((2, 2), np.uint8)
    hazards.poison(ids)
    call = OpCall("argmax", {"logits": np.eye(2, dtype=F)}, {}, {"ids": ((2,), "int32")})
    assert judge_op(call, {"ids": ids}, Profile())[0].verdict is Verdict.MALFORMED
    hazards.poison(visible)
    call = OpCall(
        "tree_mask",
        {"parents": np.array([-1, 0], np.int32)},
        {"prefix_len": 0},
        {"positions": ((2,), "int32"), "visible": ((2, 2), "uint8")},
    )
    found = judge_op(call, {"positions": np.array([0, 1], np.int32), "visible": visible}, Profile())
    assert [j.verdict for j in found] == [Verdict.EXACT, Verdict.MALFORMED]


def test_a_bad_input_makes_its_own_results_unknowable_and_no_others() -> None:
    x = X.copy()
    x[0, 0] = np.nan
    call = OpCall("matmul", {"x": x, "w": W}, {}, {"out": ((2, 2), "float32")})
    right = X @ W
    assert judge_op(call, {"out": right}, Profile())[0].verdict is Verdict.WITHIN_BOUND
    right[1, 1] = 0
    assert judge_op(call, {"out": right}, Profile())[0].index == (1, 1)


def test_overflow_that_the_profile_allows_is_open_and_not_wrong() -> None:
    x, w = np.array([[3e38, 3e38, -3e38]], F), np.ones((3, 1), F)
    call = OpCall("matmul", {"x": x, "w": w}, {}, {"out": ((1, 1), "float32")})
    assert judge_op(call, {"out": np.array([[np.inf]], F)}, Profile())[0].verdict is Verdict.UNVERIFIED
    assert judge_op(call, {"out": np.array([[3e38]], F)}, Profile())[0].verdict is Verdict.WITHIN_BOUND


def test_an_exact_result_beyond_float32_is_infinity() -> None:
    call = OpCall("swiglu", {"gate": np.array([[1e30]], F), "up": np.array([[1e30]], F)}, {}, {"out": ((1, 1), "float32")})
    assert judge_op(call, {"out": np.array([[np.inf]], F)}, Profile())[0].verdict is not Verdict.NONFINITE


def test_an_empty_output_has_nothing_wrong() -> None:
    call = OpCall("matmul", {"x": np.zeros((0, 3), F), "w": W}, {}, {"out": ((0, 2), "float32")})
    assert judge_op(call, {"out": np.zeros((0, 2), F)}, Profile())[0].verdict is Verdict.EXACT


# ---- the comparator is tested by breaking it ----------------------------------------------------------------------
def battery(comparator: Callable[[NDArray[Any], Near], Wide]) -> list[str]:
    """What is wrong with a comparator: names of the cases it gets wrong."""
    mid = np.array([[1.0, -2.0, 1e6], [1e-6, 0.0, 3.0]])
    rad = np.array([[1e-6, 1e-6, 0.1], [1e-12, 0.0, 1e-7]])
    ball = Ball(mid, rad)

    def found(at: tuple[int, int], value: float) -> NDArray[Any]:
        out = mid.copy()
        out[at] = value
        return out

    cases = {
        "equal": (mid.copy(), False),
        "inside, above": (found((0, 0), 1 + 0.9e-6), False),
        "inside, below": (found((0, 1), -2 - 0.9e-6), False),
        "large inside": (found((0, 2), 1e6 + 0.09), False),
        "just outside": (found((0, 0), 1 + 1.1e-6), True),
        "outside below": (found((0, 1), -2 - 2e-6), True),
        "outside above": (found((0, 1), -2 + 2e-6), True),
        "small outside": (found((1, 0), 1.00001e-6), True),
        "not zero": (found((1, 1), 1e-300), True),
        "last element": (found((1, 2), 3 + 2e-7), True),
        "nan": (found((0, 2), np.nan), True),
        "infinity": (found((1, 0), np.inf), True),
        "minus infinity": (found((0, 1), -np.inf), True),
        "sign": (found((1, 2), -3.0), True),
    }
    wrong = []
    for name, (values, flagged) in cases.items():
        with np.errstate(all="ignore"):
            share = comparator(values, Near(ball))
        if bool((share > 1).any()) != flagged:
            wrong.append(name)
        elif flagged and np.unravel_index(int(share.argmax()), share.shape) != tuple(np.argwhere(~(values == mid))[0]):
            wrong.append(f"{name}: another element")
    hidden = found((0, 0), 5.0)
    where = np.ones(mid.shape, np.bool_)
    where[0, 0] = False
    if (comparator(hidden, Near(ball, where=where)) > 1).any():
        wrong.append("free element")
    return wrong


def mutated(change: Callable[[NDArray[Any], Ball], Wide]) -> Callable[[NDArray[Any], Near], Wide]:
    def comparator(found: NDArray[Any], near: Near) -> Wide:
        share = change(np.asarray(found, np.float64), near.ball)
        return share if near.where is None else np.where(near.where, share, 0.0)

    def quiet(found: NDArray[Any], near: Near) -> Wide:
        with np.errstate(all="ignore"):
            return comparator(found, near)

    return quiet


def radius(ball: Ball) -> Wide:
    assert ball.rad is not None
    return np.maximum(ball.rad, 5e-324)


MUTANTS: dict[str, Callable[[NDArray[Any], Near], Wide]] = {
    "NaN compares as equal": mutated(lambda x, b: np.nan_to_num(np.abs(x - b.mid) / radius(b), nan=0.0, posinf=np.inf)),
    "infinity counts as zero": mutated(lambda x, b: np.nan_to_num(np.where(np.isinf(x), 0, np.abs(x - b.mid)) / radius(b), nan=np.inf)),
    "atol 1": mutated(lambda x, b: np.nan_to_num(np.abs(x - b.mid) / (radius(b) + 1), nan=np.inf)),
    "atol 1e-5": mutated(lambda x, b: np.nan_to_num(np.abs(x - b.mid) / (radius(b) + 1e-5), nan=np.inf)),
    "bound x 1e3": mutated(lambda x, b: np.nan_to_num(np.abs(x - b.mid) / (radius(b) * 1e3), nan=np.inf)),
    "bound x 2": mutated(lambda x, b: np.nan_to_num(np.abs(x - b.mid) / (radius(b) * 2), nan=np.inf)),
    "one bound for all": mutated(lambda x, b: np.nan_to_num(np.abs(x - b.mid) / radius(b).max(), nan=np.inf)),
    "relative to the largest": mutated(lambda x, b: np.nan_to_num(np.abs(x - b.mid) / (1e-6 * np.abs(b.mid).max()), nan=np.inf)),
    "no absolute value": mutated(lambda x, b: np.nan_to_num((x - b.mid) / radius(b), nan=np.inf)),
    "signs ignored": mutated(lambda x, b: np.nan_to_num(np.abs(np.abs(x) - np.abs(b.mid)) / radius(b), nan=np.inf)),
    "zero radius is never checked": mutated(lambda x, b: np.where(radius(b) > 1e-300, np.nan_to_num(np.abs(x - b.mid) / radius(b), nan=np.inf), 0)),
    "mean instead of worst": mutated(lambda x, b: np.full(x.shape, np.nan_to_num(np.abs(x - b.mid) / radius(b), nan=np.inf).mean())),
    "first row only": mutated(lambda x, b: np.where(np.arange(len(x))[:, None] == 0, np.nan_to_num(np.abs(x - b.mid) / radius(b), nan=np.inf), 0)),
    "last column left out": mutated(lambda x, b: np.where(np.arange(x.shape[1]) < x.shape[1] - 1, np.nan_to_num(np.abs(x - b.mid) / radius(b), nan=np.inf), 0)),
    "half the bound": mutated(lambda x, b: np.nan_to_num(np.abs(x - b.mid) / (radius(b) / 2), nan=np.inf)),
    "always passes": mutated(lambda x, b: np.zeros(x.shape)),
    "masks ignored": lambda found, near: shares(found, Near(near.ball)),
}  # fmt: skip


def test_the_comparator_passes_the_battery() -> None:
    assert battery(shares) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutated_comparator_fails_the_battery(mutant: str) -> None:
    assert battery(MUTANTS[mutant])
