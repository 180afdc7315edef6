"""sum_k weight_k * expert_k + shared (M7): one DOT of K + 1 terms per element."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles.ball import Arithmetic, Ball, Wide, concatenate, dot
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    return {"out": Near(bound(Ball(inputs["weights"]), Ball(inputs["experts"]), Ball(inputs["shared"]), a))}


def bound(weights: Ball, experts: Ball, shared: Ball | None, a: Arithmetic) -> Ball:
    """weights [T, K], experts [T, K, N], shared [T, N] or None -> [T, N]; rad = gamma(K + 1)(sum |w d| + |shared|)."""
    if shared is not None:
        one = Ball(np.ones((weights.mid.shape[0], 1)))
        weights = concatenate([weights, one], 1)
        experts = concatenate([experts, shared.map(lambda part: part[:, None])], 1)
    return dot(weights, experts, weights.mid.shape[1], a, multiply=_mix)


def _mix(weights: Wide, parts: Wide) -> Any:
    return (weights[:, None, :] @ parts)[:, 0]
