"""Verdicts with a reason. A judgement is data: it travels to the store and to the page as it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """In order of severity; a trial has the most severe verdict of its judgements."""

    EXACT = "EXACT"  # equal bit for bit, or the exact decision on the engine's own scores
    WITHIN_BOUND = "WITHIN_BOUND"
    TIE = "TIE"  # another token, explained by certified taps and the margin
    UNSUPPORTED = "UNSUPPORTED"
    UNVERIFIED = "UNVERIFIED"  # nothing could be proven either way; never counted as passed
    WARNING = "WARNING"
    FLAKY = "FLAKY"
    MALFORMED = "MALFORMED"  # wrong shape, dtype, token range, count; an answer that is no answer
    NONFINITE = "NONFINITE"
    DEFECT = "DEFECT"
    HUNG = "HUNG"
    CRASHED = "CRASHED"


FINDINGS = frozenset({Verdict.FLAKY, Verdict.MALFORMED, Verdict.NONFINITE, Verdict.DEFECT, Verdict.HUNG, Verdict.CRASHED})
RUNGS = ("ops", "prefill", "decode", "tree verify", "accept and commit", "whole loop")


@dataclass(frozen=True)
class Judgement:
    """One checked tensor (or decision). The named element is the worst one: the largest share of its bound.

    `share` = |found - expected| / bound, 0 for EXACT, infinite for a failed exact check. `index` is the position inside the tap's
    array, `token` its row of the batch, `step` the step of the script (or the call of a tree case).
    """

    verdict: Verdict
    rule: str
    op: str
    tap: str  # tap, output or decision
    rung: str
    layer: int = -1
    step: int = 0
    token: int = -1
    index: tuple[int, ...] = ()
    found: float = 0.0
    expected: float = 0.0
    bound: float = 0.0
    share: float = 0.0
    checked: int = 0  # scalars compared
    message: str = ""


def worst(judgements: list[Judgement]) -> Judgement | None:
    """The first judgement, in data order, of those that are findings; otherwise the most severe one."""
    for judgement in judgements:
        if judgement.verdict in FINDINGS:
            return judgement
    order = list(Verdict)
    return max(judgements, key=lambda j: (order.index(j.verdict), j.share), default=None)
