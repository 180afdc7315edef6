"""Matrix products: DOT, any order of summation, FMA or split-K (M3)."""

from __future__ import annotations

from oracles.ball import Arithmetic, Ball, dot
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    return {"out": Near(bound(Ball(inputs["x"]), Ball(inputs["w"]), a))}


def bound(x: Ball, w: Ball, a: Arithmetic) -> Ball:
    """x [..., K] @ w [K, N]."""
    return dot(x, w, w.mid.shape[0], a)
