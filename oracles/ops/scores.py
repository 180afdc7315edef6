"""Attention scores, absorbed form: scale * q . key over [latent | rope] (M5)."""

from __future__ import annotations

import numpy as np

from oracles.ball import Arithmetic, Ball, dot
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params

EXTRA = 2  # the scale, and the split into a latent and a rope part (or a scaled q)


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    return {"out": Near(bound(Ball(inputs["q"]), Ball(inputs["keys"]), float(np.float32(params["scale"])), a))}


def bound(q: Ball, keys: Ball, scale: float, a: Arithmetic) -> Ball:
    """q [T, H, C], keys [S, C] -> [T, H, S]; rad = scale gamma(C + 2) |q||k|."""
    heads, width = q.mid.shape[1:]
    flat = dot(q.reshape(-1, width), keys.transpose(1, 0), width, a, extra=EXTRA, scale=scale)
    return flat.reshape(-1, heads, keys.mid.shape[0])
