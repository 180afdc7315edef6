"""Expert choice (M8, N5): redone exactly on the given scores, group rule and ties included; weights within a bound.

The choice is a set: an engine may list its experts in any order, as long as each weight stands beside its expert.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.ball import Arithmetic, Ball, finish
from oracles.compare import Equal, Expected, Near
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    scores, found = inputs["scores"], outputs["ids"]
    ids = choose(
        scores, inputs["bias"], int(params["top_k"]), int(params["groups"]), int(params["top_groups"]), bool(params["group_score_max"])
    )  # fmt: skip
    valid = (found >= 0) & (found < scores.shape[-1])
    own = np.where(valid, found, ids)
    scale, eps = (float(np.float32(params[name])) for name in ("routed_scale", "denominator_eps"))
    ball = weights(Ball(scores), own, scale, bool(params["norm_top_k"]), eps, a)
    return {"ids": Equal(in_order_of(found, ids), "M8"), "weights": Near(ball)}


def choose(
    scores: NDArray[Any], bias: NDArray[Any], top_k: int, groups: int, top_groups: int, by_max: bool
) -> NDArray[np.int64]:  # fmt: skip
    """[T, top_k], best first: by fl32(score + bias) descending, then the lower id.

    With groups, only the experts of the `top_groups` best groups count: by the fl32 sum of a group's two best, or by its best;
    of equal groups the lower one.
    """
    choice = (scores + bias).astype(np.float32, copy=False)
    if groups > 1:
        members = choice.reshape(len(choice), groups, -1)
        if by_max:
            rank = members.max(-1)
        else:
            two = np.sort(members, -1)[..., -2:]
            rank = two[..., 0] + two[..., -1]
        kept = np.argsort(-rank, -1, kind="stable")[:, :top_groups]
        allowed = np.zeros(rank.shape, np.bool_)
        np.put_along_axis(allowed, kept, True, -1)
        choice = np.where(allowed[..., None], members, np.float32(-np.inf)).reshape(choice.shape)
    return np.argsort(-choice, -1, kind="stable")[:, :top_k]


def in_order_of(found: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[Any]:
    """`ids`, but in the engine's order in rows where the sets agree."""
    if found.shape != ids.shape:
        return ids
    same = (np.sort(found, -1) == np.sort(ids, -1)).all(-1, keepdims=True)
    return np.where(same, found, ids)


def weights(scores: Ball, ids: NDArray[Any], scale: float, renormalise: bool, eps: float, a: Arithmetic) -> Ball:
    """scale * s / (sum s + eps), or scale * s. rad = |w| (gamma(K + 4) + e_div): K - 1 additions, eps, a reciprocal and its product
    or a division, the scale. With scores of both signs the sum cancels, and its share of the error grows by sum|s| / |sum s|.

    FLUSH: each score may vanish, in the numerator and in the sum. INHERIT: numerator up, denominator down, and the reverse.
    """
    picked = Ball(np.take_along_axis(scores.mid, ids, -1))
    radius = None if scores.rad is None else np.take_along_axis(scores.rad, ids, -1)
    count = ids.shape[-1]
    if not renormalise:
        mid = picked.mid * scale
        rad: Any = a.gamma(1) * np.abs(mid)
        if radius is not None:
            rad = rad + abs(scale) * radius * (1 + a.gamma(1))
        return finish(mid, rad, np.square(mid * a.unit) / 3 if a.statistics else 0.0, a, rad_floor=a.eta * (1 + abs(scale)))
    with np.errstate(divide="ignore", invalid="ignore"):
        total = picked.mid.sum(-1, keepdims=True) + eps
        size = picked.absolute.sum(-1, keepdims=True) + abs(eps)
        mid = picked.mid * scale / total
        of_sum = a.gamma(count + 1) * size / np.abs(total)
        lost = 2 * a.eta * (count + 1) * (1 + abs(scale)) / np.abs(total)
        growth = (1 + a.gamma(3)) * (1 + a.div) / (1 - np.minimum(of_sum, 0.5)) - 1
        growth = np.where(of_sum < 0.5, growth, np.inf)
        rad = np.abs(mid) * growth + lost
        if radius is not None:
            low = np.maximum(np.abs(total) - radius.sum(-1, keepdims=True), 0.0)
            inherited = abs(scale) * (picked.absolute + radius) / low - np.abs(mid)
            rad = inherited + rad + inherited * growth
    variance = np.square(mid * a.unit) * (count + 3) / 3 if a.statistics else 0.0
    return finish(mid, rad, variance, a, rad_floor=2 * a.eta)
