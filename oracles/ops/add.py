"""Residual add: one rounding, so equality with fl(a + b) (N4); lower precisions add their own rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles.ball import ETA_GRADUAL, THIRD, Arithmetic, Ball, either, finish
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params
from spec.engine import UNIT_FLOAT32


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    x, y = inputs["a"], inputs["b"]
    return {"out": Near(bound(Ball(x), Ball(y), a), "N4" if one_rounding(a) else "N2")}


def one_rounding(a: Arithmetic) -> bool:
    """float32 or wider, rounded once: float64 then float32 gives the same bits for a sum (53 >= 2 * 24 + 2)."""
    return a.output <= UNIT_FLOAT32


def bound(x: Ball, y: Ball, a: Arithmetic) -> Ball:
    """Exact float32 leaves: radius 0 (with flush to zero, 3 eta: two operands and the sum). Otherwise gamma(1) and INHERIT."""
    mid = x.mid + y.mid
    overflow = either(x.overflow, y.overflow)
    if x.exact and y.exact and one_rounding(a) and not a.real:
        with np.errstate(over="ignore"):
            rounded = mid.astype(np.float32).astype(np.float64)
        std = np.sqrt(THIRD) * a.unit * np.abs(mid) if a.statistics else None
        return Ball(rounded, np.full(mid.shape, 3 * a.eta) if a.eta > ETA_GRADUAL else None, std, overflow)
    rad: Any = 0.0 if x.rad is None else x.rad
    if y.rad is not None:
        rad = rad + y.rad
    rad = rad + a.gamma(1) * (np.abs(mid) + rad)
    variance: Any = 0.0
    if a.statistics:
        variance = THIRD * np.square(a.unit * mid)
        for part in (x.std, y.std):
            if part is not None:
                variance = variance + np.square(part)
    return finish(mid, rad, variance, a, overflow, 3 * a.eta)
