"""Warnings below the bound: an error too large for honest rounding in one element (z), or one with a common sign in all rows (T).

Both rest on the order-averaged rounding model and prove nothing: an honest bf16x3-emulated product passes its bound with z = 45, and
honest fused attention drifts on a GPU (NUMERICS 3). They are off by default, and the verdict is never worse than WARNING.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.compare import Near
from oracles.judgement import Judgement, Verdict

SUSPICIOUS = 8.0  # z; honest float32 passed 8 in 2 of 2000 random cases
DRIFTING = 8.0  # |T|; the largest of 500 honest cases was 6.3
ROWS_MIN = 8  # rows of a drift statistic
RELATIVE_FLOOR = 2.0**-26  # a spread below a quarter of a rounding says nothing about it
DRIFT_OPS = frozenset({"rms_norm", "softmax", "scores", "router_scores", "route", "swiglu"})
"""Operations whose rows can share a factor below one rounding: a wrong constant, a truncated function."""


def suspect(judgement: Judgement, found: NDArray[Any], near: Near) -> Judgement:
    """The judgement, or a WARNING in its place where it passed and a statistic is beyond its threshold."""
    if judgement.verdict not in (Verdict.EXACT, Verdict.WITHIN_BOUND) or near.ball.std is None:
        return judgement
    z, at = largest_z(found, near)
    t = drift(found, near) if judgement.op in DRIFT_OPS else 0.0
    if z <= SUSPICIOUS and abs(t) <= DRIFTING:
        return judgement
    if z > SUSPICIOUS:
        text = f"{judgement.tap}[{', '.join(map(str, at))}] is inside its bound, but {z:.0f} standard deviations of rounding off (z > {SUSPICIOUS:.0f})"
        return dataclasses.replace(judgement, verdict=Verdict.WARNING, index=at, message=text)
    text = f"{judgement.tap} is inside its bound, but its rows share a relative error (T = {t:.0f}, |T| > {DRIFTING:.0f})"
    return dataclasses.replace(judgement, verdict=Verdict.WARNING, message=text)


def largest_z(found: NDArray[Any], near: Near) -> tuple[float, tuple[int, ...]]:
    """max |found - mid| / std where std is positive, and where."""
    std = near.ball.std
    assert std is not None
    with np.errstate(all="ignore"):
        z = np.where(std > 0, np.abs(found - near.ball.mid) / std, 0.0)
    z = np.where(np.isfinite(z) if near.where is None else np.isfinite(z) & near.where, z, 0.0)
    if not z.size:
        return 0.0, ()
    at = np.unravel_index(int(z.argmax()), z.shape)
    return float(z[at]), tuple(int(i) for i in at)


def drift(found: NDArray[Any], near: Near) -> float:
    """t-statistic over rows of the weighted fit error = delta * reference; 0 with fewer than 8 rows."""
    ball = near.ball
    assert ball.std is not None
    if ball.mid.ndim < 2:
        return 0.0
    width = ball.mid.shape[-1]
    mid, std, error = ball.mid.reshape(-1, width), ball.std.reshape(-1, width), (found - ball.mid).reshape(-1, width)
    with np.errstate(all="ignore"):
        usable = (std > 0) & np.isfinite(error) & np.isfinite(mid)
        if near.where is not None:
            usable &= np.broadcast_to(near.where, ball.mid.shape).reshape(-1, width)
        weight = np.where(usable, mid / np.square(std), 0.0)
        delta = np.where(usable, error * weight, 0.0).sum(-1) / np.maximum(np.where(usable, mid * weight, 0.0).sum(-1), 1e-300)
    delta = delta[usable.any(-1)]
    if len(delta) < ROWS_MIN:
        return 0.0
    return float(delta.mean() / (max(float(delta.std(ddof=1)), RELATIVE_FLOOR) / np.sqrt(len(delta))))
