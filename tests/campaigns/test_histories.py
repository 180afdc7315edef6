"""Failures that need what ran before: the shortest list is found, each case in it gets small, and one that needs nothing is left alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from campaigns import minimise
from campaigns.case import Case, OpCase, SessionCase
from campaigns.fingerprint import Fingerprint
from campaigns.histories import shortest, small, total_nodes
from campaigns.isolation import Supervisor
from campaigns.minimise import Checker, minimum
from campaigns.trial import patience


def op(seed: int) -> Case:
    return OpCase("add", (("N", 9), ("T", 4)), (), "ordinary", seed)


@pytest.mark.parametrize("guilty", [{0}, {47}, {3, 40}, {10, 11, 12}])
def test_only_the_needed_cases_stay_in_their_order(guilty: set[int]) -> None:
    cases = [op(seed) for seed in range(48)]
    needed = [cases[number] for number in sorted(guilty)]
    asked: list[Sequence[Case]] = []

    def fails(kept: Sequence[Case]) -> bool:
        asked.append(kept)
        return all(case in kept for case in needed)

    kept, checks = shortest(cases, fails, 200)
    assert kept == needed
    assert checks == len(asked) <= 60


def test_the_search_ends_at_its_limit_with_a_list_that_fails() -> None:
    cases = [op(seed) for seed in range(48)]
    kept, checks = shortest(cases, lambda kept: cases[5] in kept and cases[30] in kept, 8)
    assert checks == 8
    assert cases[5] in kept and cases[30] in kept


def test_every_case_of_the_list_gets_small() -> None:
    """As in an engine that keeps the mask of the first tree of a size: two sessions with trees of two nodes."""

    def session(nodes: int) -> SessionCase:
        return SessionCase("tiny", (), 1, "ordinary", ((5, 7), (3, 2)), ((((0, 1), *((0, 0),) * (nodes - 1)), ()),), chunk=2)

    def sizes(case: Case) -> set[int]:
        assert isinstance(case, SessionCase)
        return {len(tree) for trees in case.rounds for tree in trees}

    def fails(earlier: Sequence[Case], case: Case) -> bool:
        return any(bool({n for n in sizes(before) if n >= 2} & sizes(case)) for before in earlier)

    earlier = [session(6), session(3), session(5)]
    kept, last, checks = small(earlier, session(5), fails, guilty="", rung="", checks_max=120, seconds=60.0)
    assert fails(kept, last)
    assert len(kept) == 1
    assert checks <= 120
    assert total_nodes(kept, last) == 2 * 5  # neither can get smaller alone: the sizes must be equal


def test_state_of_a_session_decides_no_check_and_a_history_is_kept_where_it_is_needed() -> None:
    """The plant keeps the ids of the batch before, of the same size: a batch alone is right, also behind another check of the same worker."""
    once = SessionCase("tiny", (), 0, "ordinary", ((3, 0),), ())
    other = SessionCase("tiny", (), 0, "ordinary", ((3, 5),), ())
    wanted = Fingerprint("blocked:F18", "DEFECT", "route", "expert_ids", "prefill")
    with Supervisor("blocked:F18", deadline_s=patience()) as supervisor:
        checker = Checker(supervisor, wanted)
        assert [checker.fails(case) for case in (other, once, other, once)] == [False] * 4
        assert checker.fails_after([other], once)
        assert checker.runs == 5
    found = minimum("blocked:F18", once, wanted, earlier=[other])
    assert found is not None
    assert found.checks <= 120
    assert found.earlier == ()  # two chunks of one prompt show it as well: one case that needs no other is the better one


def test_a_finding_that_shows_sometimes_is_minimised_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimise, "CHECKS_MAX", 24)
    wanted = Fingerprint("blocked:race", "FLAKY", "o_latent", "o_latent", "prefill")
    case = SessionCase("tiny", (), 0, "ordinary", ((2, 0),), ())
    found = minimum("blocked:race", case, wanted)
    assert found is not None
    assert found.judgement.verdict == "FLAKY"
    assert found.runs == 20 and 0 < found.failed < 20
    assert f"fails in {found.failed} of 20 runs" in found.judgement.message
    assert found.nodes == 0
