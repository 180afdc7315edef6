"""Which experts a row is sent to, and with which weights (rule M8). Decisions are exact on float32; ties go to the lower index (N5)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import add, sigmoid, softmax, top_k_weights
from spec.config import Config
from spec.exact import Float

Ids = NDArray[np.int32]


def router_scores(logits: Float, scoring_softmax: bool) -> Float:
    """logits [T, E] -> sigmoid of each (V3, K2), or softmax over all experts (V2)."""
    return softmax(logits, np.ones(logits.shape, np.bool_)) if scoring_softmax else sigmoid(logits)


GROUP_FILL = {"-inf": -np.inf, "zero": 0.0}  # Config.group_fill -> the choice of every expert in a dropped group


def choose(
    scores: Float, bias: Float | None, top_k: int, groups: int, top_groups: int, group_score_max: bool, group_fill: float = -np.inf
) -> Ids:
    """The top_k experts [T, top_k] by choice = RN32(score + bias), best first, out of the top_groups best groups.

    A group's score is its best choice, or RN32 of the sum of its two best. Experts of the other groups count as `group_fill`: -inf
    puts them out of the race, 0 beats every negative choice.
    """
    choice = scores if bias is None else add(scores, bias)  # (T,E)
    if groups > 1:
        grouped = choice.reshape(len(choice), groups, choice.shape[1] // groups)  # (T,G,E/G)
        best = np.sort(grouped, axis=-1)
        group_scores = best[..., -1] if group_score_max else add(best[..., -1], best[..., -2])  # (T,G)
        kept = np.zeros(group_scores.shape, np.bool_)
        np.put_along_axis(kept, largest(group_scores, top_groups), True, axis=-1)
        choice = np.where(kept[..., None], grouped, np.float32(group_fill)).reshape(choice.shape)
    return largest(choice, top_k)


def largest(values: Float, count: int) -> Ids:
    """Indices of the `count` largest along the last axis, in descending order, the lower index first among equals; NaN comes last."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :count].astype(np.int32)


Route = Callable[[Float], tuple[Ids, Float]]
"""scores [T, E] -> (ids, weights), each [T, top_k]"""


def router(config: Config, bias: Float | None) -> Route:
    """The routing rule of a configuration, bound once: the bias takes part in the choice and not in the weights."""
    pick = partial(
        choose, bias=bias, top_k=config.top_k, groups=config.groups, top_groups=config.top_groups,
        group_score_max=config.group_score == "max", group_fill=GROUP_FILL[config.group_fill],
    )  # fmt: skip
    weigh = partial(
        top_k_weights, scale=config.routed_scale, renormalise=config.norm_top_k, denominator_eps=config.denominator_eps,
        denominator_clamp=config.denominator_clamp,
    )  # fmt: skip

    def route(scores: Float) -> tuple[Ids, Float]:
        ids = pick(scores)
        return ids, weigh(np.take_along_axis(scores, ids, axis=-1))

    return route
