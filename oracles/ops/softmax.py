"""Softmax over visible keys (M5, C3): weights of hidden keys are exactly 0, a row that sees nothing is all 0.

The bound covers every stable algorithm of the profile: plain, with exp2 and a folded log2(e), online or split with rescaling.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.ball import THIRD, Arithmetic, Ball, Wide, either, finish, zeros_if_none
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params

VANISHED = 110.0  # e^-110 is far below the smallest subnormal 2^-149 = e^-103.3: such a weight is 0 or lost underflow
GAP_MAX = 1e39  # larger than any difference of two float32; a visible score of -inf counts as this far away
CAP = 700.0  # e^700 is finite in float64 and larger than anything of float32
PAIRWISE_MAX = 192  # keys up to which all pairs are compared at once


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    visible = inputs["visible"].astype(np.bool_)[:, None, :]
    return {"out": Near(bound(Ball(inputs["scores"]), visible, a), "M5")}


def bound(scores: Ball, visible: NDArray[np.bool_], a: Arithmetic) -> Ball:
    """`visible` broadcasts against scores [..., S].

    alpha_j, the relative error of fl(e^(s_j - m)) as a weight: see `weight_error`. The denominator is off by
    beta + gamma(n)(1 + beta), beta = sum p alpha, n = visible keys, so that
    rel_j = (1 + alpha_j) / (1 - denominator) (1 + e_div)(1 + u)^2 - 1. INHERIT: with scores in s +- r, p_j is extreme when s_j moves
    one way and all others the other way.
    """
    seen = np.where(visible, scores.mid, -np.inf)
    count = np.broadcast_to(visible, seen.shape).sum(-1, keepdims=True)
    top = seen.max(-1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        gap = np.minimum(np.where(visible, top - seen, 0.0), GAP_MAX)  # d_j = m - s_j >= 0
        power = np.exp(seen - np.where(top == -np.inf, 0.0, top))
        total = power.sum(-1, keepdims=True)
        p: Wide = power / np.where(total == 0, 1.0, total)
        chain: Any = 0.0
        if a.online and not a.real:  # of real numbers only the midpoint and `std` are asked for
            if scores.rad is None:  # what an engine handed over is float32, and half as wide to compare
                chain = longest_chain(seen.astype(np.float32))
            else:
                chain = np.where(order_is_certain(seen, scores.rad), longest_chain(seen), count)
        alpha, overflow = weight_error(np.where(visible, scores.mid, 0.0), np.where(top == -np.inf, 0.0, top), gap, a, 2 * chain)
        beta = np.einsum("...s,...s->...", p, alpha)[..., None]
        terms = count if a.block is None else np.minimum(count, a.roundings(max(1, int(count.max(initial=1)))))
        denominator = beta + a.gamma(terms) * (1 + beta)
        good = denominator < 0.5
        rel = (1 + alpha) * (((1 + a.div) * (1 + a.unit) ** 2) / np.where(good, 1 - denominator, 0.5)) - 1
        rad: Any = p * rel
        if not good.all():  # the profile allows weights that are not even of the right order: all that is left is 0 <= p <= 1
            rad = np.where(good, rad, np.where(visible, 1.0, 0.0))
        variance: Any = 0.0
        if a.statistics:
            fold = 3.0 if a.exp2_folding else 1.0
            spread = np.square(fold * a.unit * np.minimum(gap, VANISHED)) + (a.exp / 2) ** 2
            spread = spread + np.square(p).sum(-1, keepdims=True) * (a.exp / 2) ** 2 + a.unit**2 * (count * THIRD + 2)
            variance = np.square(p) * THIRD * spread + np.where(visible, a.eta, 0.0) ** 2
            if scores.std is not None:
                own = np.where(visible, scores.std, 0.0)
                variance = variance + np.square(p) * (np.square(own) + np.square(p * own).sum(-1, keepdims=True))
        if scores.rad is not None:
            inherited = _inherited(p, np.where(visible, scores.rad, 0.0))
            rad = inherited + (rad + inherited * rel)
            rad = np.minimum(rad, np.maximum(p, 1 - p) + rel)
    if scores.overflow is not None:
        overflow = either(overflow, np.broadcast_to((scores.overflow & visible).any(-1, keepdims=True), seen.shape))
    ball = finish(p, rad, variance, a, overflow, 2 * a.eta)
    return Ball(p, np.where(visible, zeros_if_none(ball.rad), 0.0), ball.std, overflow)


def _inherited(p: Wide, radius: Wide) -> Wide:
    """Largest change of each p_j over scores in s +- radius; above a radius of 60 nothing is left to know."""
    r = np.minimum(np.nan_to_num(radius, nan=60.0, posinf=60.0), 60.0)
    up, down = np.exp(r), np.exp(-r)
    sum_up, sum_down = (p * up).sum(-1, keepdims=True), (p * down).sum(-1, keepdims=True)
    high = p * up / np.maximum(p * up + (sum_down - p * down), 1e-300)
    low = p * down / np.maximum(p * down + (sum_up - p * up), 1e-300)
    return np.asarray(np.maximum(high - p, p - low))


def weight_error(s: Wide, top: Wide, gap: Wide, a: Arithmetic, rescalings: Any) -> tuple[Wide, NDArray[np.bool_] | None]:
    """alpha = expm1(u d + e_exp + [exp2 folding: 2u d + 2u(|s| + |m|)] + [online: R (e_exp + 2u) + u d]), d = m - s.

    R counts the rescalings that are not by exactly 1. Weights below e^-110 are lost to underflow, which FLUSH covers. Second
    result: rows where the folding error alone can overflow exp2.
    """
    exponent = a.unit * gap * (2.0 if a.online else 1.0)
    overflow = None
    if a.exp2_folding:
        folding = 2 * a.unit * (gap + np.abs(s) + np.abs(top))
        exponent += folding
        if float(folding.max(initial=0.0)) > 80.0:
            overflow = np.broadcast_to((folding > 80.0).any(-1, keepdims=True), exponent.shape)
    base = a.exp + rescalings * (a.exp + 2 * a.unit) if a.online else a.exp
    vanished = gap - exponent > VANISHED
    exponent += base
    exponent *= 1 + 1e-5  # products of (1 + e) terms against their first-order sum
    if float(exponent.max(initial=0.0)) < 2.0**-6:
        alpha = exponent * (1 + exponent)  # e^x - 1 <= x + x^2 for x <= 1
    else:
        alpha = np.expm1(np.minimum(exponent, CAP))
    if vanished.any():
        alpha = np.where(vanished, 0.0, alpha)
    return alpha, overflow


def longest_chain(seen: NDArray[Any]) -> Wide:
    """[..., 1]: the longest strict running-max chain over any contiguous start, in both directions of the key order.

    Only such a step rescales inexactly in an online or split softmax (e^0 = 1). Hidden keys are -inf. Key j raises the running maximum of
    a scan that starts at i exactly if the last key before j that is at least as large lies before i, so that j is in the chains of an
    interval of starts; the longest chain is where most intervals overlap.
    """
    keys = seen.shape[-1]
    rows = seen.reshape(-1, keys)
    count = len(rows)
    at = np.arange(keys)
    ends = _first_not_smaller(np.concatenate([rows, rows[:, ::-1]]))
    # scans from the right start at j .. ends - 1, scans from the left at begins .. j
    begins = keys - ends[count:, ::-1]
    bounds = np.concatenate([begins, ends[:count]])
    bounds += np.arange(2 * count)[:, None] * (keys + 1)
    passed = np.bincount(bounds.ravel(), minlength=2 * count * (keys + 1)).reshape(2 * count, keys + 1)[:, :keys].cumsum(1)
    overlap = np.concatenate([passed[:count] - at, at + 1 - passed[count:]]).max(1, initial=1)
    longest: Wide = np.maximum(overlap[:count], overlap[count:]).reshape(*seen.shape[:-1], 1).astype(np.float64)
    return longest


def order_is_certain(seen: Wide, radius: Wide) -> NDArray[np.bool_]:
    """[..., 1]: rows whose scores are further apart than their radii, so that every choice within them has the same order of maxima.

    In other rows every key may rescale. Differences with hidden keys (-inf) are infinite or NaN, and in neither case small.
    """
    apart = 2 * np.max(radius, -1, keepdims=True, initial=0.0)
    close = np.diff(np.sort(seen, -1), axis=-1) <= apart
    certain: NDArray[np.bool_] = ~close.any(-1, keepdims=True)
    return certain


def _first_not_smaller(rows: NDArray[Any]) -> NDArray[np.int64]:
    """[n, S]: index of the first later element that is at least as large, S if there is none."""
    count, keys = rows.shape
    if keys > PAIRWISE_MAX:
        return _first_not_smaller_by_stack(rows)
    found = np.empty((count, keys, keys + 1), np.bool_)
    pairs = found[:, :, :keys]
    np.greater_equal(rows[:, None, :], rows[:, :, None], out=pairs)
    pairs &= _later(keys)
    found[:, :, keys] = True
    first: NDArray[np.int64] = found.argmax(-1)
    return first


@lru_cache(maxsize=64)
def _later(keys: int) -> NDArray[np.bool_]:
    """[S, S]: whether the second key comes after the first."""
    return np.ascontiguousarray(np.tri(keys, keys, -1, dtype=np.bool_).T)


def _first_not_smaller_by_stack(rows: NDArray[Any]) -> NDArray[np.int64]:
    """The same in linear time per row."""
    keys = rows.shape[1]
    out = np.full(rows.shape, keys, np.int64)
    for row, values in enumerate(rows.tolist()):
        stack: list[int] = []
        for key, value in enumerate(values):
            while stack and values[stack[-1]] <= value:
                out[row, stack.pop()] = key
            stack.append(key)
    return out
