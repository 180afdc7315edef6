"""The law of sampling, exactly: which streams a decoding loop emits with which probability (A2, S4, S5).

No statistics. A loop that takes its randomness from `spec.schemes.Chance` is run once for every sequence of outcomes that its
draws can have; the weights of the runs add up to 1. The other side, the law of autoregressive sampling, is the product of the
rows' distributions and shares no code with loops or schemes. Meant for tiny vocabularies: V = 3 and depth 2 or 3 take
milliseconds, and the smallest wrong schemes already show there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spec.sampling import Sampling, probabilities, scaled_logits
from spec.schemes import Chance, Place

Stream = tuple[int, ...]
Law = dict[Stream, float]

TOTAL_VARIATION_EXACT = 1e-12  # some thousand float64 roundings of probabilities at most 1: each below 2**-53
RUNS_MAX = 200_000  # a minute of enumeration; more means a vocabulary or a depth that is not tiny


class LawError(ValueError):
    """An enumeration that cannot be done; the message says what was too large."""


class _Replay:
    """A `Chance` that answers from a list of outcomes, and takes the first possible one after its end; it remembers what else there was."""

    def __init__(self, outcomes: Sequence[int]) -> None:
        self.outcomes = list(outcomes)
        self.given = len(outcomes)
        self.weight = 1.0
        self.open: list[list[int]] = []  # prefixes of outcomes that nobody has run yet
        self._asked = 0

    def token(self, z: NDArray[np.float64], place: Place) -> int:
        return self._draw(probabilities(z))

    def pick(self, weights: NDArray[np.float64], place: Place) -> int:
        return self._draw(weights / weights.sum())

    def _draw(self, shares: NDArray[np.float64]) -> int:
        possible = np.flatnonzero(shares > 0).tolist()
        if self._asked == len(self.outcomes):
            self.open += [[*self.outcomes, other] for other in possible[1:]]
            self.outcomes.append(possible[0])
        outcome = self.outcomes[self._asked]
        self._asked += 1
        self.weight *= float(shares[outcome])
        return outcome


def emitted_law(run: Callable[[Chance], Stream]) -> Law:
    """Stream -> probability, over every outcome of the draws of `run`. Raises LawError past RUNS_MAX runs."""
    waiting: list[list[int]] = [[]]
    terms: dict[Stream, list[float]] = defaultdict(list)
    for _ in range(RUNS_MAX):
        if not waiting:
            return {stream: math.fsum(weights) for stream, weights in terms.items()}
        chance = _Replay(waiting.pop())
        terms[run(chance)].append(chance.weight)
        waiting += chance.open
    raise LawError(f"more than {RUNS_MAX} outcomes: use a smaller vocabulary, fewer tokens, or a lower budget")


def autoregressive_law(
    logits_after: Callable[[Sequence[int]], NDArray[np.float32]],
    sampling: Sampling,
    prompt: Sequence[int],
    max_new: int,
    stops: Sequence[int] = (),
) -> Law:
    """Stream -> product of the target's probabilities along it, cut at the first stop token and at max_new (A4)."""
    law: Law = {}

    def extend(stream: Stream, weight: float) -> None:
        if len(stream) == max_new or (stream and stream[-1] in stops):
            law[stream] = weight
            return
        history = [*prompt, *stream]
        shares = probabilities(scaled_logits(sampling, logits_after(history), history, len(prompt)))
        for token in np.flatnonzero(shares > 0).tolist():
            extend((*stream, token), weight * float(shares[token]))

    extend((), 1.0)
    return law


def total_variation(one: Mapping[Stream, float], other: Mapping[Stream, float]) -> float:
    """Half the sum of |differences|: the largest difference that any event can show."""
    return 0.5 * math.fsum(abs(one.get(stream, 0.0) - other.get(stream, 0.0)) for stream in {*one, *other})
