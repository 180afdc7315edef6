"""RMSNorm: the radius is relative, because the sum has positive terms only (M2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles.ball import THIRD, Arithmetic, Ball, either, finish, too_large
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    return {"out": Near(bound(Ball(inputs["x"]), Ball(inputs["gain"]), float(np.float32(params["eps"])), a))}


def bound(x: Ball, gain: Ball, eps: float, a: Arithmetic) -> Ball:
    """gain * x / sqrt(mean(x^2) + eps); N = width, eps the float32 that engines receive.

    rel = (1 - gamma(roundings(N) + 4))^-1/2 (1 + e_rsqrt)(1 + u)^2 - 1: the 4 are the mean, eps and its constants, and the power
    -1/2 halves what the sum collects. INHERIT: x moves by its radius, and the root by at most d = mean(2|x| r + r^2).
    FLUSH: squares that vanish lower the mean by at most 2 eta; subnormal x or a subnormal product is lost once.
    """
    width = x.mid.shape[-1]
    mean_square = np.einsum("...n,...n->...", x.mid, x.mid)[..., None] / width + eps  # (...,1)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = 1 / np.sqrt(mean_square)
        lost = 2 * a.eta / mean_square
    normalised = x.mid * inverse
    mid = gain.mid * normalised
    growth = a.gamma(a.roundings(width) + 4) + np.minimum(lost, 0.25)
    rel = (1 - growth) ** -0.5 * ((1 + a.rsqrt) * (1 + a.unit) ** 2) - 1  # (...,1)
    size = np.abs(mid)
    flush = a.eta * (1 + gain.largest * (1 + inverse))
    variance: Any = 0.0
    if a.statistics:
        variance = np.square(mid) * (THIRD * a.unit**2 * ((width * THIRD + 1 / 6 + 4) / 4 + 2) + THIRD * a.rsqrt**2 / 4)
        if x.std is not None:
            variance = variance + np.square(gain.mid * x.std * inverse)
    if x.rad is None:
        rad = size * rel
    else:
        shift = np.mean(2 * x.absolute * x.rad + np.square(x.rad), -1, keepdims=True)
        low = np.sqrt(np.maximum(mean_square - shift, eps))
        with np.errstate(divide="ignore"):
            inherited = gain.absolute * (x.rad / low + x.absolute * (1 / low - inverse))
        rad = inherited + (size + inherited) * rel
    largest = x.largest if x.rad is None else float(x.upper.max(initial=0.0))
    overflow = either(too_large(np.broadcast_to(mean_square * width, mid.shape), largest * largest * width), x.overflow)
    return finish(mid, rad, variance, a, overflow, flush)
