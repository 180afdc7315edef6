"""Which experts a row is sent to, and with which weights (rule M8). Decisions are exact on float32; ties go to the lower index (N5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import add, sigmoid, softmax, top_k_weights
from spec.config import Config
from spec.exact import Float

Ids = NDArray[np.int32]


def router_scores(logits: Float, scoring_softmax: bool) -> Float:
    """logits [T, E] -> sigmoid of each (V3, K2), or softmax over all experts (V2)."""
    return softmax(logits, np.ones(logits.shape, np.bool_)) if scoring_softmax else sigmoid(logits)


def choose(scores: Float, bias: Float | None, top_k: int, groups: int, top_groups: int, group_score_max: bool) -> Ids:
    """The top_k experts [T, top_k] by choice = RN32(score + bias), best first, out of the top_groups best groups.

    A group's score is its best choice, or RN32 of the sum of its two best. The other groups are out of the race, -inf (not
    0, which would beat a negative choice).
    """
    choice = scores if bias is None else add(scores, bias)  # (T,E)
    if groups > 1:
        grouped = choice.reshape(len(choice), groups, choice.shape[1] // groups)  # (T,G,E/G)
        best = np.sort(grouped, axis=-1)
        group_scores = best[..., -1] if group_score_max else add(best[..., -1], best[..., -2])  # (T,G)
        kept = np.zeros(group_scores.shape, np.bool_)
        np.put_along_axis(kept, largest(group_scores, top_groups), True, axis=-1)
        choice = np.where(kept[..., None], grouped, np.float32(-np.inf)).reshape(choice.shape)
    return largest(choice, top_k)


def largest(values: Float, count: int) -> Ids:
    """Indices of the `count` largest along the last axis, in descending order, the lower index first among equals; NaN comes last."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :count].astype(np.int32)


def route(config: Config, scores: Float, bias: Float | None) -> tuple[Ids, Float]:
    """(ids, weights), each [T, top_k]: the bias takes part in the choice and not in the weights."""
    ids = choose(scores, bias, config.top_k, config.groups, config.top_groups, config.group_score == "max")
    chosen = np.take_along_axis(scores, ids, axis=-1)
    return ids, top_k_weights(chosen, config.routed_scale, config.norm_top_k, config.denominator_eps)
