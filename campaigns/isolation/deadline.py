"""How long a step may take before it counts as hung.

A hang costs its whole deadline at every hit, so the deadline follows the jobs that were seen; but a deadline that is too short turns a
busy machine into false hangs, so there is a floor, and the first jobs of a kind, which compile and page in, get an allowance.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

WINDOW = 64  # jobs remembered: enough for a median, few enough to follow a change of the case sizes
REFRESH = 16  # jobs between two medians: a median costs as much as a small case
LOSS = 4.0  # of patience, at each hang of a kind that has shown nothing else: a batch of them does not cost a first deadline each
FACTOR = 20.0  # times the median: a step of an ordinary mix is at most a few times the median job


class Deadline:
    """Per kind of job max(floor, FACTOR x median of the recent jobs); `first_s` until one was seen, and for the first one of a cold worker.

    Kinds are apart because a script with the engine's own loop takes a thousand times as long as a batch of operations.
    """

    def __init__(self, floor_s: float = 2.0, *, first_s: float = 60.0, factor: float = FACTOR) -> None:
        if not 0 < floor_s <= first_s:
            raise ValueError(f"floor_s is {floor_s} and first_s {first_s}, but 0 < floor_s <= first_s must hold")
        self.floor_s = floor_s
        self.first_s = first_s
        self.factor = factor
        self._recent_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._limit_s: dict[str, float] = {}
        self._fresh: dict[str, int] = defaultdict(int)  # jobs since the median was taken

    def limit_s(self, kind: str) -> float:
        """The seconds that one step of the next job of this kind may take."""
        return self._limit_s.get(kind, self.first_s)

    def observe(self, kind: str, seconds: float) -> None:
        """A job of this kind took `seconds` and ended."""
        recent = self._recent_s[kind]
        recent.append(seconds)
        self._fresh[kind] += 1
        if self._fresh[kind] >= min(REFRESH, len(recent)):
            self._limit_s[kind] = max(self.floor_s, self.factor * statistics.median(recent))
            self._fresh[kind] = 0

    def hung(self, kind: str) -> None:
        """A job of this kind took its whole limit. Where none has ended yet, the next one gets a part of it."""
        if kind not in self._recent_s:
            self._limit_s[kind] = max(self.floor_s, self.limit_s(kind) / LOSS)


def fixed(seconds: float) -> Deadline:
    """A deadline that never moves."""
    return Deadline(seconds, first_s=seconds, factor=0.0)
