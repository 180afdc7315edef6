"""What one trial makes of the judgements of its parts: relations that taps prove."""

from __future__ import annotations

import dataclasses

import pytest

from campaigns.trial import proven_by_taps
from oracles.judgement import Judgement, Verdict
from spec.engine import Description

TAPPED = Description("mine", "1", taps=frozenset({"q"}))
OPEN = Judgement(Verdict.UNVERIFIED, "C6", "forward", "relation alone", "decode", checked=96, message="no proof")
PASSED = Judgement(Verdict.WITHIN_BOUND, "N2", "matmul", "q", "decode", checked=48)


def test_a_relation_of_two_runs_that_are_proven_is_proven() -> None:
    (judgement,) = proven_by_taps([OPEN], TAPPED, [PASSED, PASSED])
    assert judgement.verdict is Verdict.WITHIN_BOUND
    assert judgement.checked == OPEN.checked


@pytest.mark.parametrize("verdict", [Verdict.UNVERIFIED, Verdict.UNSUPPORTED, Verdict.WARNING, Verdict.DEFECT, Verdict.CRASHED])
def test_one_open_judgement_of_either_run_leaves_the_relation_open(verdict: Verdict) -> None:
    assert proven_by_taps([OPEN], TAPPED, [PASSED, dataclasses.replace(PASSED, verdict=verdict)]) == [OPEN]


def test_without_taps_and_without_pairs_nothing_is_proven() -> None:
    assert proven_by_taps([OPEN], Description("mine", "1"), [PASSED]) == [OPEN]
    nothing = dataclasses.replace(OPEN, checked=0)
    assert proven_by_taps([nothing], TAPPED, [PASSED]) == [nothing]


def test_a_broken_relation_stays_a_finding() -> None:
    broken = dataclasses.replace(OPEN, verdict=Verdict.DEFECT)
    assert proven_by_taps([broken], TAPPED, [PASSED]) == [broken]
