"""SwiGLU: silu(gate) * up (M7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles.ball import ETA_FLUSH, Arithmetic, Ball, either, finish, too_large
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params
from oracles.ops.router_scores import logistic, relative

CURVATURE = 0.25  # max |silu''| / 2, at 0


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    return {"out": Near(bound(Ball(inputs["gate"]), Ball(inputs["up"]), a))}


def bound(gate: Ball, up: Ball, a: Arithmetic) -> Ball:
    """rel = (e_exp + 2u|g|)(1 - sigma) + 2u + e_div for the sigmoid, + u for its product with gate, + u for the one with up.

    A tanh form has an absolute error instead: + |g| (e_tanh + 2u) |up|. FLUSH: the sigmoid underflows or its exp overflows (below
    2^-126 either way), then two products and two subnormal operands. INHERIT: |silu'| r + max|silu''|/2 r^2, then the product.
    """
    s = logistic(gate.mid)
    silu = gate.mid * s
    mid = silu * up.mid
    rel = relative(gate, s, a)
    rel += 2 * a.unit
    size = np.abs(mid)
    lost = ETA_FLUSH * (1 + gate.absolute) * (1 + up.absolute)
    rad: Any = size * rel
    variance: Any = 0.0
    if a.tanh:
        rad = rad + gate.absolute * up.absolute * (a.exp + 2 * a.unit)
    if a.statistics:
        variance = np.square(rad) / 12
    if not (gate.exact and up.exact):
        slope = np.abs(s * (1 + gate.mid * (1 - s)))
        shift = 0.0 if gate.rad is None else slope * gate.rad + CURVATURE * np.square(gate.rad)
        inherited = (np.abs(silu) + shift) * up.upper - size
        rad = inherited + rad + inherited * rel
        if a.statistics:
            if gate.std is not None:
                variance = variance + np.square(slope * gate.std * up.mid)
            if up.std is not None:
                variance = variance + np.square(silu * up.std)
    overflow = either(gate.overflow, up.overflow)
    if gate.exact and up.exact:
        overflow = too_large(gate.absolute * up.absolute, gate.largest * up.largest)
    return finish(mid, rad, variance, a, overflow, lost)
