"""Matrix products: DOT, any order of summation, FMA or split-K (M3)."""

from __future__ import annotations

import math

import numpy as np

from oracles.ball import INFLATE, Arithmetic, Ball, concatenate, dot
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    return {"out": Near(bound(Ball(inputs["x"]), Ball(inputs["w"]), a))}


def bound(x: Ball, w: Ball, a: Arithmetic, bias: Ball | None = None) -> Ball:
    """x [..., K] @ w [K, N], plus bias [N].

    The bias is one more term, met by a constant 1; added last it is one more rounding of the others (extra). An engine whose results are
    stored in a narrower format may store the product before it adds the bias, as a linear layer of two calls does: one more rounding, of
    the product, which may be larger than the sum (OUT of |x.w| = |sum - bias|).
    """
    if bias is None:
        return dot(x, w, w.mid.shape[0], a)
    one = Ball(np.ones((*x.mid.shape[:-1], 1)))
    out = dot(concatenate([x, one], -1), concatenate([w, bias.reshape(1, -1)], 0), w.mid.shape[0] + 1, a, extra=1)
    if a.output and out.rad is not None:
        product = np.abs(out.mid - bias.mid)
        out.rad = out.rad + a.output * (1 + a.output) * (product + out.rad + (0.0 if bias.rad is None else bias.rad)) * INFLATE
        if out.std is not None:
            out.std = np.hypot(out.std, a.output * product / math.sqrt(3))
    return out
