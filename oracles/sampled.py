"""A drawn token against the golden draw (S1-S3, A6): which token was due, how far rounding is from excusing another, and what explains it.

With prescribed noise a draw is a decision like an argmax: the token with the largest z + g among those that truncation keeps. An
honest engine draws another token only where its logits differ from the golden ones by enough to turn that decision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec.sampling import Sampling, gumbel_argmax, keyed_uniforms, penalised, scaled_logits

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
    return _drawn(sampling, draw, draw.history, len(draw.history))


def margin(sampling: Sampling, draw: Draw, found: int) -> float:
    """By how much two logits must move against each other for `found` to be drawn, at least; infinite where nothing helps.

    `found` must come to stand inside every truncation, and each token whose key is larger must lose the race or be truncated. All are
    distances of differences z_a - z_b, brought to logits: z = penalty(logit) / temperature, and the repetition penalty stretches a
    logit by at most max(r, 1 / r).
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
        head = [_head_distances(z, token, enters, leaves, sampling.top_p) for token in range(len(z))]
        enters = np.maximum(enters, [enter for enter, _ in head])
        leaves = np.minimum(leaves, [leave for _, leave in head])
    return enters, leaves


def _head_distances(
    z: NDArray[np.float64], token: int, enters: NDArray[np.float64], leaves: NDArray[np.float64], top_p: float
) -> tuple[float, float]:
    """(to be kept, to be dropped) by top-p, behind steps whose own distances are `enters` and `leaves`.

    A move d parts the tokens into those that stand before `token` even so (A) and the others (N), and changes the odds of A by e^d at
    most. `token` is kept where odds(A) < p / (1 - p). As d grows the sets only change in its favour, so that the first d that
    suffices is found by walking from one change to the next.
    """
    masses = np.exp(z - z.max())
    goal = math.log(top_p) - math.log1p(-top_p)
    distances = []
    for sign in (1.0, -1.0):  # to be kept: A as small as d lets it be; to be dropped: as large
        ahead = sign * (z - z[token])
        marks = np.unique(
            np.concatenate([[0.0], ahead[ahead > 0], enters[(enters > 0) & np.isfinite(enters)], leaves[np.isfinite(leaves)]])
        )
        distances.append(math.inf)
        for mark, following in zip(marks, [*marks[1:], math.inf], strict=True):
            if sign > 0:
                before = (ahead > mark) & (leaves > mark)
                behind = ~before & (enters <= mark)
            else:
                before = (ahead <= mark) & (enters <= mark)
                before[token] = False
                behind = ~before & (leaves > mark)
            behind[token] = True
            odds = math.log(masses[before].sum() / masses[behind].sum()) if before.any() else -math.inf
            needed = max(float(mark), sign * (odds - goal))
            if needed <= following:
                distances[-1] = needed
                break
    return distances[0], distances[1]


def explanation(sampling: Sampling, draws: Sequence[Draw], found: Sequence[int]) -> tuple[str, str]:
    """(rule, words) of the first known mistake that gives every one of the `found` tokens from the golden rows, or ("S3", "")."""
    for rule, words, tokens in _mistakes(sampling):
        if all(token in tokens(draw) for draw, token in zip(draws, found, strict=True)):
            return rule, words
    return "S3", ""


Mistake = Callable[[Draw], Iterable[int]]
"""The tokens that an engine with this mistake may draw."""


def _mistakes(sampling: Sampling) -> Iterator[tuple[str, str, Mistake]]:
    if sampling.temperature:
        yield "A2", "every token is the argmax of its row: the request was decoded greedily", lambda draw: [int(draw.row.argmax())]
    neutrals: dict[str, float] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    if any(getattr(sampling, name) != neutral for name, neutral in neutrals.items()):
        yield "A6", "every token is the draw without penalties", _without(sampling, **neutrals)
    if sampling.temperature:
        for name, neutral, rule in (("temperature", 1.0, "S1"), ("top_k", 0, "S2"), ("top_p", 1.0, "S2"), ("min_p", 0.0, "S2")):
            if getattr(sampling, name) != neutral:
                yield rule, f"every token is the draw without {name}", _without(sampling, **{name: neutral})
        for offset in (-1, 1):
            yield "S3", f"the noise is that of the position {'before' if offset < 0 else 'after'}", _noise_at(sampling, offset)
        yield "S3", "the noise is that of request 0", lambda draw: [due(sampling, dataclasses.replace(draw, sequence=0))]
    if any(getattr(sampling, name) != neutral for name, neutral in neutrals.items()):
        yield "A6", "penalties did not see the last tokens: the history of the path, or of the round, is missing", _late(sampling)


def _without(sampling: Sampling, **neutral: float) -> Mistake:
    return lambda draw: [due(dataclasses.replace(sampling, **neutral), draw)]  # type: ignore[arg-type]


def _late(sampling: Sampling) -> Mistake:
    """Penalties of a history that ends at any earlier emitted token."""

    def tokens(draw: Draw) -> Iterator[int]:
        for seen in range(len(draw.history), draw.prompt_len - 1, -1):
            yield _drawn(sampling, draw, draw.history[:seen], len(draw.history))

    return tokens


def _noise_at(sampling: Sampling, offset: int) -> Mistake:
    return lambda draw: [_drawn(sampling, draw, draw.history, len(draw.history) + offset)]


def _drawn(sampling: Sampling, draw: Draw, history: Sequence[int], position: int) -> int:
    z = scaled_logits(sampling, draw.row, history, draw.prompt_len)
    return gumbel_argmax(z, keyed_uniforms(sampling.seed, draw.sequence, position, len(z)))
