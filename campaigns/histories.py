"""Failures that need what ran before: the list of earlier cases, made short (delta debugging), then each of them small.

An engine that keeps state across cases fails on a case only after others. The finding is then the whole list, replayed in order in one fresh
worker. One replay of a list is one check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from campaigns.case import Case, SessionCase
from campaigns.reduce import nodes_of, reduced

FailsAfter = Callable[[Sequence[Case], Case], bool]
"""(earlier cases, case) -> whether the case fails after them, in a fresh worker, with the wanted fingerprint."""


def total_nodes(earlier: Sequence[Case], case: Case) -> int:
    """Of every case in the list: the size of the input in the reports."""
    return sum(nodes_of(one) for one in (*earlier, case))


def shortest(earlier: Sequence[Case], fails: Callable[[Sequence[Case]], bool], checks_max: int) -> tuple[list[Case], int]:
    """The part of `earlier` that is needed, and the number of checks: the newest cases first, then ddmin (Zeller and Hildebrandt 2002)."""
    kept, checks = list(earlier), 0

    def needed(cases: list[Case]) -> bool:
        nonlocal checks
        checks += 1
        return fails(cases)

    newest = 1
    while newest < len(kept) and checks < checks_max:  # the guilty one is most often among the last
        if needed(kept[-newest:]):
            kept = kept[-newest:]
            break
        newest *= 2
    parts = 2
    while len(kept) > 1 and checks < checks_max:
        size = max(1, len(kept) // parts)
        spans = [(start, min(len(kept), start + size)) for start in range(0, len(kept), size)]
        for start, stop in spans:
            rest = kept[:start] + kept[stop:]
            if rest and checks < checks_max and needed(rest):
                kept, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(kept), 2 * parts)
    return kept, checks


def small(
    earlier: Sequence[Case], case: Case, fails: FailsAfter, *, guilty: str, rung: str, checks_max: int, seconds: float
) -> tuple[list[Case], Case, int]:
    """The shortest list found, with small cases: (earlier cases, case, checks)."""
    kept, checks = shortest(earlier, lambda cases: fails(cases, case), max(1, checks_max // 2))
    last, made = reduced(
        case, lambda one: fails(kept, one), guilty=guilty, rung=rung, checks_max=max(0, checks_max - checks) // 2, seconds=seconds / 2
    )
    checks += made
    for index in reversed(range(len(kept))):
        share = max(0, checks_max - checks) // (index + 1)
        found, made = reduced(
            kept[index],
            lambda one, index=index: fails([*kept[:index], one, *kept[index + 1 :]], last),  # type: ignore[misc]
            rung=rung if isinstance(kept[index], SessionCase) else "",
            checks_max=share, seconds=seconds / 2 / len(kept),
        )  # fmt: skip
        kept[index] = found
        checks += made
    return kept, last, checks
