"""Fused attention over a cache [latent | rope] (M5, C3): the region scores -> softmax -> o_latent, composed by ball arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracles.ball import Arithmetic, Ball
from oracles.compare import Expected, Near
from oracles.ops import o_latent, scores, softmax
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    visible: NDArray[np.bool_] = inputs["visible"].astype(np.bool_)
    # a key that no row sees may hold anything, poison included
    cache = np.where(visible.any(axis=0, keepdims=True).T, inputs["cache"], np.float32(0))
    scale = float(np.float32(params["scale"]))
    return {"out": Near(bound(Ball(inputs["q"]), Ball(cache), visible, int(params["kv_rank"]), scale, a), "M5")}


def bound(q: Ball, cache: Ball, visible: NDArray[np.bool_], kv_rank: int, scale: float, a: Arithmetic) -> Ball:
    """q [T, H, R + D], cache [S, R + D], visible [T, S] -> [T, H, R]."""
    weights = softmax.bound(scores.bound(q, cache, scale, a), visible[:, None, :], a)
    return o_latent.bound(weights, cache[:, :kv_rank], visible.sum(-1)[:, None, None], a)
