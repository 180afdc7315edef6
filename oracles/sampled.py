"""A drawn token against the golden draw (S1-S3, A6): which token was due, how far rounding is from excusing another, and what explains it.

With prescribed noise a draw is a decision like an argmax: the token with the largest z + g among those that truncation keeps. An
honest engine draws another token only where its logits differ from the golden ones by enough to turn that decision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec.sampling import Sampling, gumbel_argmax, keyed_uniforms, penalised, probabilities, scaled_logits

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Draw:
    """One token of a stream: the golden row that it was drawn from, everything before it, and which request it belongs to."""

    row: Logits  # [V]
    history: tuple[int, ...]
    prompt_len: int
    sequence: int


def due(sampling: Sampling, draw: Draw) -> int:
    """The golden token."""
    z = scaled_logits(sampling, draw.row, draw.history, draw.prompt_len)
    return gumbel_argmax(z, keyed_uniforms(sampling.seed, draw.sequence, len(draw.history), len(z)))


def margin(sampling: Sampling, draw: Draw, found: int) -> float:
    """By how much two logits must move against each other for `found` to be drawn, at least; infinite where nothing helps.

    `found` must come to stand inside every truncation, and each token whose key is larger must lose the race or be truncated. All are
    distances of differences z_a - z_b, brought to logits: z = penalty(logit) / temperature, and the repetition penalty stretches a
    logit by at most max(r, 1 / r). For top-p, moving every logit by d changes a ratio of masses by at most e^(2 d).
    """
    raw = penalised(sampling, draw.row, draw.history, draw.prompt_len)
    stretch = max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)
    if raw[found] == -np.inf:
        return math.inf
    if sampling.temperature == 0:
        return float(raw.max() - raw[found]) / stretch
    z = raw / sampling.temperature
    keys = z - np.log(-np.log(keyed_uniforms(sampling.seed, draw.sequence, len(draw.history), len(z))))
    enters, leaves = _distances(sampling, z)
    rivals = np.flatnonzero((keys > keys[found]) & (enters == 0))
    race = max((min(float(keys[r] - keys[found]), float(leaves[r])) for r in rivals), default=0.0)
    return max(float(enters[found]), race) * sampling.temperature / stretch


def _distances(sampling: Sampling, z: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Per token: how far it is from being kept (0: it is), and from being dropped, in differences of z. Steps in the order of S2."""
    order = np.argsort(-z, kind="stable")
    enters, leaves = np.zeros(len(z)), np.full(len(z), np.inf)
    if sampling.min_p:
        gap = z - z.max() - math.log(sampling.min_p)
        enters, leaves = np.maximum(enters, -gap), np.minimum(leaves, np.maximum(gap, 0))
    if 0 < sampling.top_k < len(z):
        last, first_out = z[order[sampling.top_k - 1]], z[order[sampling.top_k]]
        enters, leaves = np.maximum(enters, last - z), np.minimum(leaves, np.maximum(z - first_out, 0))
    if sampling.top_p < 1:
        kept = np.where(enters[order] == 0, z[order], -np.inf)
        shares = probabilities(kept)
        before = np.concatenate([[0.0], np.cumsum(shares)[:-1]])
        ratio = np.full(len(z), np.inf)
        with np.errstate(divide="ignore"):
            ratio[order] = np.log(sampling.top_p) - np.log(before)  # above 0: kept, by this much
        enters = np.maximum(enters, np.maximum(-ratio, 0))
        leaves = np.minimum(leaves, np.maximum(ratio, 0))
    return enters, leaves


def explanation(sampling: Sampling, draw: Draw, found: int) -> tuple[str, str]:
    """(rule, words) of a known mistake that gives `found` from the golden row, or ("S3", "")."""
    for rule, words, other in _mistakes(sampling, draw):
        if other() == found:
            return rule, words
    return "S3", ""


def _mistakes(sampling: Sampling, draw: Draw) -> Iterator[tuple[str, str, Callable[[], int]]]:
    if sampling.temperature:
        yield "A2", "it is the argmax of the row: the request was decoded greedily", lambda: int(draw.row.argmax())
        for name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("temperature", 1.0)):
            if getattr(sampling, name) != neutral:
                yield "S2" if name != "temperature" else "S1", f"it is the draw without {name}", _without(sampling, draw, **{name: neutral})
    neutrals: dict[str, float] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    if any(getattr(sampling, name) != neutral for name, neutral in neutrals.items()):
        yield "A6", "it is the draw without penalties", _without(sampling, draw, **neutrals)
        for back in range(1, len(draw.history) - draw.prompt_len + 1):
            shorter = draw.history[: len(draw.history) - back]
            yield "A6", f"penalties did not see the last {back} tokens", _seeing(sampling, draw, shorter)
    if sampling.temperature:
        for offset in (-1, 1):
            yield "S3", f"the noise is that of position {len(draw.history) + offset}", _noise_at(sampling, draw, offset)
        yield "S3", "the noise is that of request 0", lambda: due(sampling, dataclasses.replace(draw, sequence=0))


def _without(sampling: Sampling, draw: Draw, **neutral: float) -> Callable[[], int]:
    return lambda: due(dataclasses.replace(sampling, **neutral), draw)  # type: ignore[arg-type]


def _seeing(sampling: Sampling, draw: Draw, history: Sequence[int]) -> Callable[[], int]:
    def other() -> int:
        z = scaled_logits(sampling, draw.row, history, draw.prompt_len)
        return gumbel_argmax(z, keyed_uniforms(sampling.seed, draw.sequence, len(draw.history), len(z)))

    return other


def _noise_at(sampling: Sampling, draw: Draw, offset: int) -> Callable[[], int]:
    def other() -> int:
        z = scaled_logits(sampling, draw.row, draw.history, draw.prompt_len)
        return gumbel_argmax(z, keyed_uniforms(sampling.seed, draw.sequence, len(draw.history) + offset, len(z)))

    return other
