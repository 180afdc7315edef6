"""probs . latent (M5): DOT over the keys whose weight is not zero, because adding an exact zero does not round."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles.ball import Arithmetic, Ball, dot
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    probs = inputs["probs"]
    terms = np.count_nonzero(probs, axis=-1)[..., None]
    return {"out": Near(bound(Ball(probs), Ball(inputs["latent"]), terms, a))}


def bound(probs: Ball, latent: Ball, terms: Any, a: Arithmetic) -> Ball:
    """probs [T, H, S], latent [S, R] -> [T, H, R]; `terms` broadcasts against [T, H, 1]: weights that may differ from zero."""
    rows, heads, keys = probs.mid.shape
    counts = np.maximum(np.broadcast_to(terms, (rows, heads, 1)), 1).reshape(-1, 1)
    flat = dot(probs.reshape(-1, keys), latent, counts, a, count=max(1, keys))
    return flat.reshape(rows, heads, latent.mid.shape[1])
