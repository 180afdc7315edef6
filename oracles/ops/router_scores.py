"""Router scores (M8): sigmoid, or softmax over all experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles.ball import ETA_FLUSH, Arithmetic, Ball, Wide, finish
from oracles.compare import Expected, Near
from oracles.ops import softmax
from oracles.ops.record import Arrays, Params

SECOND_ORDER = 1 + 1e-5  # products of (1 + e) terms against their first-order sum
CURVATURE = 0.0482  # above max |sigmoid''| / 2 = 1 / (12 sqrt 3)


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    return {"out": Near(bound(Ball(inputs["logits"]), bool(params["softmax"]), a))}


def bound(logits: Ball, by_softmax: bool, a: Arithmetic) -> Ball:
    if by_softmax:
        return softmax.bound(logits, np.ones(logits.mid.shape, np.bool_), a)
    return sigmoid(logits, a)


def sigmoid(x: Ball, a: Arithmetic) -> Ball:
    """1 / (1 + e^-x): rel = (e_exp + 2u|x|)(1 - s) + 2u + e_div, the 2u|x| only with exp2 folding.

    INHERIT: |s'| r + max|s''|/2 r^2. FLUSH: e^-x overflows below x = -88.7, where s is less than 2^-127.
    """
    s = logistic(x.mid)
    rel = relative(x, s, a)
    rad: Any = s * rel
    variance: Any = 0.0
    if a.statistics:
        variance = np.square(rad) / 12
    slope = s * (1 - s)
    if x.rad is not None:
        inherited = slope * x.rad + CURVATURE * np.square(x.rad)
        rad = inherited + (s + inherited) * rel
        if a.statistics and x.std is not None:
            variance = variance + np.square(slope * x.std)
    return finish(s, rad, variance, a, x.overflow, max(a.eta, ETA_FLUSH))


def logistic(x: Wide) -> Wide:
    """Accurate relatively on both sides, also at |x| = 1e4: 0.5 (1 + tanh(x/2)) is not."""
    power = np.exp(-np.abs(x))
    inverse = 1 / (1 + power)
    return np.asarray(np.where(x >= 0, inverse, power * inverse))


def relative(x: Ball, s: Wide, a: Arithmetic) -> Wide:
    """The relative error of a float32 sigmoid at x, whose value is s."""
    rel: Wide = (a.exp + 2 * a.unit * x.absolute if a.exp2_folding else a.exp) * (1 - s)
    rel += 2 * a.unit + a.div
    rel *= SECOND_ORDER
    return rel
