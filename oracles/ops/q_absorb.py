"""q_nope . w_kc per head (M4)."""

from __future__ import annotations

from oracles.ball import Arithmetic, Ball, Wide, dot
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    return {"out": Near(bound(Ball(inputs["q_nope"]), Ball(inputs["w_kc"]), a))}


def bound(x: Ball, w: Ball, a: Arithmetic) -> Ball:
    """x [T, H, K] with w [H, K, N] -> [T, H, N]."""
    return dot(x, w, w.mid.shape[1], a, multiply=per_head)


def per_head(x: Wide, w: Wide) -> Wide:
    return (x.transpose(1, 0, 2) @ w).transpose(1, 0, 2)
