"""One output against what it must be: the worst element, its verdict, a sentence. No operation and no engine here.

An expectation is a ball (Near), values that must be equal (Equal), or a decision taken elsewhere (Decided). Classes of numbers come
first: NaN and infinity are told apart from finite numbers before anything is subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.ball import Ball, Wide
from oracles.judgement import Judgement, Verdict

TINY = 5e-324  # the smallest double: zero over it is zero, anything else is at least one
LARGE = 2.0**-4
"""A radius above this share of its row's root mean square proves nothing: a row over 16 keys that loses one key moves by as much."""
TIGHT = 2.0**-10
"""A composed radius up to this share of its row still carries a proof for TIE: the smallest share that bf16 would already exceed."""
FLOAT32_MAX = float(np.finfo(np.float32).max)
POISON_FLOAT_BITS = 0x7FC0DEAD  # campaigns.hazards: this NaN was never written
GUARD_INT = -7777777  # likewise
POISON_BYTE = 0xA5


@dataclass(frozen=True, slots=True)
class Near:
    """Within `ball.rad` of `ball.mid`; elements that are not `where` are free."""

    ball: Ball
    rule: str = "N2"
    where: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Equal:
    """Equal values, and equal bits for floats if `bits` (copies: even NaN payloads and the sign of zero travel)."""

    values: NDArray[Any]
    rule: str
    bits: bool = False


@dataclass(frozen=True, slots=True)
class Decided:
    """The op's own judge decided. `problem` is empty if nothing is wrong; `share` > 0 where a band was used."""

    problem: str
    rule: str
    index: tuple[int, ...] = ()
    found: float = 0.0
    expected: float = 0.0
    bound: float = 0.0
    share: float = 0.0


Expected = Near | Equal | Decided


def shares(found: NDArray[Any], near: Near) -> Wide:
    """|found - mid| / rad per element: above 1 is out of bounds, infinite for NaN and infinity where a finite value is due.

    Elements about which nothing is known (a NaN input, an overflow that the profile does not exclude) get 0; `knowable` tells.
    """
    ball = near.ball
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        share: Wide = np.abs(np.subtract(found, ball.mid, dtype=np.float64))
        share /= TINY if ball.rad is None else np.maximum(ball.rad, TINY)
    if near.where is not None:
        share = np.where(near.where, share, 0.0)
    if not np.isfinite(share).all():
        _classify(share, np.asarray(found, np.float64), ball, near.where)
    return share


def _classify(share: Wide, found: Wide, ball: Ball, where: NDArray[np.bool_] | None) -> None:
    """Settle, in place, the elements whose share is no finite number."""
    odd = ~np.isfinite(share)
    rad = np.zeros(()) if ball.rad is None else ball.rad
    unknown = np.isnan(ball.mid) | ~np.isfinite(rad)
    if where is not None:
        unknown |= ~where
    with np.errstate(invalid="ignore"):
        same_infinity = np.isinf(ball.mid) & (found == ball.mid)
        # the exact value is beyond float32: infinity of its sign is its correct rounding
        overflowed = np.isinf(found) & (np.sign(found) == np.sign(ball.mid)) & (np.abs(ball.mid) + rad >= FLOAT32_MAX)
    share[odd] = np.inf
    share[odd & (unknown | same_infinity | overflowed)] = 0.0


def judge_near(found: NDArray[Any], near: Near, share: Wide, **place: Any) -> Judgement:
    """`share` as `shares` gives it; `place` are the fields of the judgement that say where we are."""
    if not share.size:
        return Judgement(Verdict.EXACT, near.rule, message="nothing to compare: the output is empty", **place)
    flat = int(share.argmax())
    top = float(share.flat[flat])
    index = tuple(int(i) for i in np.unravel_index(flat, share.shape))
    return near_judgement(found, near, index, top, share.size, **place)


def near_judgement(
    found: NDArray[Any], near: Near, index: tuple[int, ...], share: float, checked: int, shown: tuple[int, ...] | None = None, **place: Any
) -> Judgement:
    """The judgement of one element; `shown` is its index in words, where that is another one (rows of a batch instead of all rows)."""
    ball = near.ball
    value, expected = float(found[index]), float(ball.mid[index])
    bound = 0.0 if ball.rad is None else float(ball.rad[index])
    at = index if shown is None else shown
    if share <= 1:
        verdict = Verdict.EXACT if share == 0 and not bound else Verdict.WITHIN_BOUND
        place.setdefault("token", at[0] if at else -1)
        return Judgement(
            verdict, near.rule, index=at, found=value, expected=expected, bound=bound, share=share, checked=checked, **place
        )  # fmt: skip
    fields = dict(place, rule=near.rule, index=at, found=value, expected=expected, bound=bound, share=share, checked=checked)
    fields.setdefault("token", at[0] if at else -1)
    if ball.overflow is not None and bool(np.broadcast_to(ball.overflow, ball.mid.shape)[index]):
        message = f"{name_element(fields)} is {number(value)}; float32 may overflow here in some order of evaluation, so nothing is proven"
        return Judgement(verdict=Verdict.UNVERIFIED, message=message, **fields)
    if not np.isfinite(value) and np.isfinite(expected):
        never = bits_of(found, index) == POISON_FLOAT_BITS
        message = f"{name_element(fields)} is {'never written' if never else number(value)}, but should be {number(expected)} ({near.rule})"
        return Judgement(verdict=Verdict.NONFINITE, message=message, **fields)
    within = f"exactly {number(expected)}" if not bound else f"{close_number(expected, value)} within {bound:.1g}"
    message = f"{name_element(fields)} is {close_number(value, expected)}, but should be {within} ({near.rule})"
    return Judgement(verdict=Verdict.DEFECT, message=message, **fields)


def judge_equal(found: NDArray[Any], equal: Equal, **place: Any) -> Judgement:
    values = equal.values
    if equal.bits:
        wrong = np.ascontiguousarray(found).view(np.uint32) != np.ascontiguousarray(values).view(np.uint32)
    else:
        wrong = found != values
    place.setdefault("token", -1)
    if not wrong.any():
        return Judgement(Verdict.EXACT, equal.rule, checked=int(values.size), **place)
    index = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    value, expected = found[index], values[index]
    fields = dict(
        place, rule=equal.rule, index=index, found=float(value), expected=float(expected), share=float("inf"), checked=int(values.size)
    )  # fmt: skip
    if fields["token"] < 0 and index:
        fields["token"] = index[0]
    name = name_element(fields)
    if found.dtype.kind == "f":
        if np.isfinite(expected) and not np.isfinite(value):
            never = bits_of(found, index) == POISON_FLOAT_BITS
            message = (
                f"{name} is {'never written' if never else number(float(value))}, but should be {number(float(expected))} ({equal.rule})"
            )
            return Judgement(verdict=Verdict.NONFINITE, message=message, **fields)
        shown, due = close_number(float(value), float(expected)), close_number(float(expected), float(value))
        message = f"{name} is {shown}, but must be {due}, bit for bit ({equal.rule})"
        return Judgement(verdict=Verdict.DEFECT, message=message, **fields)
    if int(value) == (POISON_BYTE if found.dtype.itemsize == 1 else GUARD_INT):
        return Judgement(
            verdict=Verdict.MALFORMED, message=f"{name} was never written, but must be {int(expected)} ({equal.rule})", **fields
        )
    return Judgement(verdict=Verdict.DEFECT, message=f"{name} is {int(value)}, but must be {int(expected)} ({equal.rule})", **fields)


def judge_decided(decided: Decided, checked: int, **place: Any) -> Judgement:
    place.setdefault("token", decided.index[0] if decided.index else -1)
    verdict = Verdict.DEFECT if decided.problem else Verdict.WITHIN_BOUND if decided.share else Verdict.EXACT
    return Judgement(
        verdict, decided.rule, index=decided.index, found=decided.found, expected=decided.expected, bound=decided.bound,
        share=float("inf") if decided.problem else decided.share, checked=checked, message=decided.problem, **place,
    )  # fmt: skip


def judge_expected(found: NDArray[Any], expected: Expected, **place: Any) -> Judgement:
    if type(expected) is Near:
        return judge_near(found, expected, shares(found, expected), **place)
    if type(expected) is Equal:
        return judge_equal(found, expected, **place)
    assert type(expected) is Decided
    return judge_decided(expected, int(found.size), **place)


# Sentences


def name_element(fields: dict[str, Any]) -> str:
    """`attn_out[3, 7], layer 1,`."""
    index = ", ".join(map(str, fields["index"]))
    layer = f", layer {fields['layer']}," if fields.get("layer", -1) >= 0 else ""
    return f"{fields['tap']}[{index}]{layer}"


def number(value: float) -> str:
    return f"{value:.6g}"


def close_number(value: float, other: float) -> str:
    """`value` with as many digits as it takes to tell it from `other`, at least 4 and at most 17."""
    for digits in range(4, 18):
        text = f"{value:.{digits}g}"
        if text != f"{other:.{digits}g}":
            return text
    return repr(value)


def bits_of(array: NDArray[Any], index: tuple[int, ...]) -> int:
    return int(np.float32(array[index]).view(np.uint32)) if array.dtype == np.float32 else 0
