"""Planted bugs to their exact smallest case, from a large one, through the worker: shrinking ends where a person would end."""

from __future__ import annotations

import dataclasses

import pytest

from campaigns import fingerprint
from campaigns.bisect import located
from campaigns.case import Case, GenerateCase, OpCase, SessionCase, TreeCase
from campaigns.fingerprint import Fingerprint
from campaigns.isolation import InProcess, Supervisor
from campaigns.minimise import minimum
from campaigns.reduce import nodes_of
from campaigns.trial import Bench, patience
from impls import blocked
from impls.native import build
from oracles.judgement import Judgement

LARGE = SessionCase(
    "tiny", (("routed_scale", 2.5), ("top_k", 3)), 1, "ordinary", ((7, 31), (5, 4)),
    (
        (((0, 0), (1, 1), (1, 0), (2, 1), (0, 1)), ((0, 1), (1, 0))),
        (((0, 1), (1, 0), (0, 1), (2, 1)), ((0, 1),)),
    ),
    3, True, None, (),
)  # fmt: skip


def met(engine: str, case: Case) -> tuple[Fingerprint, Judgement]:
    """The first finding of `case`."""
    with Supervisor(engine, deadline_s=patience()) as supervisor:
        found = fingerprint.first(supervisor.description.name, list(Bench(supervisor).outcome(case).judgements))
    assert found is not None, f"{engine} does not show itself on the large case"
    return found


def smallest(engine: str, case: Case, wanted: Fingerprint) -> Case:
    result = minimum(engine, case, wanted, seconds=120.0)
    assert result is not None
    assert result.judgement.op == wanted.guilty or result.judgement.rule == wanted.guilty
    return result.case


def test_compaction_of_the_first_rows_needs_a_second_child_that_is_accepted() -> None:
    found, judgement = met("blocked:Z22", LARGE)
    assert (found.guilty, found.rung, judgement.rule) == ("compact", "accept and commit", "K1")
    case = smallest("blocked:Z22", LARGE, found)
    assert isinstance(case, SessionCase)
    assert nodes_of(case) == 2
    assert (len(case.prompts), case.prompts[0][0], len(case.rounds), case.overrides) == (1, 1, 1, ())
    ((_, first_hit), (_, second_hit)) = case.rounds[0][0]
    assert (first_hit, second_hit) == (0, 1)


def test_a_position_by_node_index_needs_two_children_of_the_root() -> None:
    found, _ = met("blocked:Z08", LARGE)
    case = smallest("blocked:Z08", LARGE, found)
    assert isinstance(case, SessionCase)
    assert nodes_of(case) == 2
    assert case.rounds[0][0][1][0] == 1  # the second node is one further back: a sibling


def test_a_running_maximum_that_starts_too_high_needs_one_token() -> None:
    large = dataclasses.replace(LARGE, regime="large-scores")
    found, _ = met("blocked:Z09", large)
    case = smallest("blocked:Z09", large, found)
    assert case == SessionCase("tiny", (), case.weights_seed, "large-scores", case.prompts, ())  # type: ignore[union-attr]
    assert [length for length, _ in case.prompts] == [1]  # type: ignore[union-attr]


def test_the_other_tie_rule_needs_two_nodes_of_one_operation() -> None:
    large = TreeCase(8, 3, 16, 15, 3, 0, 50, 0, 4)
    found, judgement = met("blocked:Z13", large)
    assert (found.guilty, judgement.rule) == ("best_first_tree", "T3")
    case = smallest("blocked:Z13", large, found)
    assert isinstance(case, OpCase)
    assert nodes_of(case) <= 2


def test_the_wrong_bonus_row_is_found_in_the_whole_loop() -> None:
    large = dataclasses.replace(LARGE, generate=GenerateCase("noisy", 3, 100, -1, 8, 4, 8, -1))
    found, _ = met("blocked:Z18", dataclasses.replace(large, rounds=()))
    assert found.rung == "whole loop"
    case = smallest("blocked:Z18", large, found)
    assert isinstance(case, SessionCase) and case.generate is not None
    assert (case.rounds, len(case.prompts), case.generate.budget) == ((), 1, 1)


def test_what_a_loop_without_taps_does_wrong_is_located_in_the_rounds_that_it_ran() -> None:
    """The finding is a token of the engine's own loop; the same trees, driven batch by batch, blame the operation. A right loop has no location."""
    loop = GenerateCase("edge", 148, 80, -1, 2, 1, 3, -1)
    case = SessionCase("tiny", (), 2, "tied-experts", ((4, 813),), (), generate=loop)
    bench = Bench(InProcess(blocked.engine("tree24")))
    found = fingerprint.first("tree24", list(bench.outcome(case).judgements))
    assert found is not None and found[0].rung == "whole loop"
    location = located(bench, case)
    assert location is not None
    assert (location.judgement.op, location.judgement.rung) == ("rope", "tree verify")
    assert "driven from outside" in location.note
    assert located(Bench(InProcess(blocked.engine())), case) is None


def has_compiler() -> bool:
    try:
        build.find_compiler()
    except build.NoCompiler:
        return False
    return True


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_a_native_crash_is_minimised_like_anything_else() -> None:
    six = ((0, 0), (1, 1), (0, 0), (2, 0), (0, 1), (3, 0))  # the plant crashes on a batch of exactly 7 rows
    large = dataclasses.replace(LARGE, rounds=((((0, 0),), ((0, 1),)), (six, ((0, 1),))))
    found, _ = met("native:mask-crash", large)
    assert (found.verdict, found.rung) == ("CRASHED", "tree verify")
    case = smallest("native:mask-crash", large, found)
    assert isinstance(case, SessionCase)
    # its record states the root and six nodes; a prompt of seven that joins a round late is a batch of seven rows without any node
    assert nodes_of(case) == 6 or (nodes_of(case) == 0 and case.prompts[-1][0] == 7 and case.hazards == ("late",))
    assert len(case.rounds) == 1
