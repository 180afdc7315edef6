"""The blocked engine's own sampler (rules S1-S3, A6): float64, by probabilities, one token at a time. Independent of spec/sampling.py on purpose.

Near ties of two keys are left to float64: an engine may, and the judge allows for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec.engine import EngineError
from spec.sampling import Sampling

Wide = NDArray[np.float64]


def seen_tokens(committed: list[int], path: list[int]) -> list[int]:
    """What penalties count: everything emitted before the round, and the path from the root to the node (A6)."""
    return [*committed, *path]


def law(sampling: Sampling, row: NDArray[np.float32], seen: list[int], prompt_len: int) -> Wide:
    """Probabilities [V] of the next token, 0 for what is truncated. Raises EngineError for a row that is no distribution."""
    logits = row.astype(np.float64)
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    for token in set(seen):
        factor = sampling.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(seen[prompt_len:]):
        logits[token] -= sampling.frequency_penalty * seen[prompt_len:].count(token)
        logits[token] -= sampling.presence_penalty
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        raise EngineError("a row of logits is no distribution: NaN, +inf, or nothing finite")
    if sampling.temperature == 0:
        only = np.zeros(len(logits))
        only[logits.argmax()] = 1.0
        return only
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    weights[weights < sampling.min_p] = 0.0
    ranked = sorted(np.flatnonzero(weights).tolist(), key=lambda token: (-logits[token], token))
    if sampling.top_k:
        last = logits[ranked[min(sampling.top_k, len(ranked)) - 1]]
        ranked = ranked[: sampling.top_k] if sampling.top_k_ties == "lowest" else [t for t in ranked if logits[t] >= last]
    if sampling.top_p < 1:
        ranked = _head(weights, ranked, sampling.top_p)
    kept = np.zeros(len(weights))
    kept[ranked] = weights[ranked]
    return np.asarray(kept / kept.sum())


def _head(weights: Wide, ranked: Sequence[int], top_p: float) -> list[int]:
    goal = top_p * math.fsum(weights[token] for token in ranked)
    mass, head = 0.0, []
    for token in ranked:
        if mass >= goal:
            break
        head.append(token)
        mass += float(weights[token])
    return head


def noise(seed: int, sequence: int, position: int, count: int) -> Wide:
    """Exponentially distributed numbers [count], -log of the uniforms of rule S3."""
    generator = np.random.Philox(counter=[0, sequence, 0, 0], key=[seed, position])
    top = generator.random_raw(count) >> 12
    return np.asarray(-np.log((2.0 * top + 1.0) / 2.0**53))


def draw(probabilities: Wide, exponentials: Wide) -> int:
    """The token whose clock rings first: argmin of exponential / probability, which is the argmax of log p + Gumbel noise."""
    with np.errstate(divide="ignore", over="ignore"):
        return int(np.argmin(exponentials / probabilities))
