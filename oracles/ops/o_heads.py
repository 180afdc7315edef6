"""o_latent . w_vc per head (M4): the same contraction as q_absorb, over R."""

from __future__ import annotations

from oracles.ball import Arithmetic, Ball
from oracles.compare import Expected, Near
from oracles.ops import q_absorb
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    return {"out": Near(q_absorb.bound(Ball(inputs["o_latent"]), Ball(inputs["w_vc"]), a))}
