"""How long a step may take before it counts as hung.

A hang costs its whole deadline at every hit, so the deadline follows the steps that were seen; but a deadline that is too short turns a
busy machine into false hangs, so there is a floor, and the first steps, which compile and page in, get an allowance.
"""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 64  # steps remembered: enough for a median, few enough to follow a change of the case sizes
REFRESH = 16  # steps between two medians: a median costs as much as a small case
FACTOR = 20.0  # times the median: a step of an ordinary mix is at most a few times the median


class Deadline:
    """max(floor, FACTOR x median of the recent steps); `first_s` until a step was seen, and for the first step of a cold worker."""

    def __init__(self, floor_s: float = 2.0, *, first_s: float = 60.0, factor: float = FACTOR) -> None:
        if not 0 < floor_s <= first_s:
            raise ValueError(f"floor_s is {floor_s} and first_s {first_s}, but 0 < floor_s <= first_s must hold")
        self.floor_s = floor_s
        self.first_s = first_s
        self.factor = factor
        self._recent_s: deque[float] = deque(maxlen=WINDOW)
        self._limit_s = first_s
        self._fresh = 0  # steps since the median was taken

    def limit_s(self, *, first: bool = False) -> float:
        """The seconds that the next step may take."""
        return self.first_s if first else self._limit_s

    def observe(self, seconds: float) -> None:
        """A step took `seconds` and ended."""
        self._recent_s.append(seconds)
        self._fresh += 1
        if self._fresh >= min(REFRESH, len(self._recent_s)):
            self._limit_s = max(self.floor_s, self.factor * statistics.median(self._recent_s))
            self._fresh = 0


def fixed(seconds: float) -> Deadline:
    """A deadline that never moves."""
    return Deadline(seconds, first_s=seconds, factor=0.0)
