"""Matrix products: DOT, any order of summation, FMA or split-K (M3)."""

from __future__ import annotations

import numpy as np

from oracles.ball import Arithmetic, Ball, concatenate, dot
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    return {"out": Near(bound(Ball(inputs["x"]), Ball(inputs["w"]), a))}


def bound(x: Ball, w: Ball, a: Arithmetic, bias: Ball | None = None) -> Ball:
    """x [..., K] @ w [K, N], plus bias [N]: one more term, met by a constant 1; added last it is one more rounding of the others (extra)."""
    if bias is None:
        return dot(x, w, w.mid.shape[0], a)
    one = Ball(np.ones((*x.mid.shape[:-1], 1)))
    return dot(concatenate([x, one], -1), concatenate([w, bias.reshape(1, -1)], 0), w.mid.shape[0] + 1, a, extra=1)
