"""Naming what an engine builds: each profile is told from every other, in order, by numbers, by ties, and by its parameter."""

from __future__ import annotations

import math

import numpy as np
import pytest

from campaigns.tree_profile import Probe, probes
from oracles.tree_profile import Finding, Match, Observed, explain, fitted_cost, match, read_tree
from spec.profiles import NAMES, cost_thresholds, profile, surrogate_mass
from spec.tree import DraftTable, Tree, TreeError, best_first_tree, draft_table

PROBES: list[Probe] = list(probes(1))


def trees_of(name: str, **fixed: float) -> list[Observed]:
    build = profile(name, **fixed).build  # type: ignore[arg-type]
    out = []
    for probe in PROBES:
        table = draft_table(probe.logits, probe.budget)
        tree = build(table, 1, probe.budget)
        out.append(read_tree(tree.tokens, tree.parents, table, probe.budget))
    return out


def told(finding: Finding) -> tuple[str, str, Match]:
    assert finding.best is not None
    return finding.best.profile.name, finding.best.profile.parameter, finding.best.match


@pytest.mark.parametrize(
    ("name", "fixed", "parameter"),
    [(name, {}, "") for name in NAMES if name not in ("capped", "cost-stop")]
    + [
        ("capped", {"width": 2}, "width 2"),
        ("capped", {"width": 6}, "width 6"),
        ("capped", {"width": 8}, "width 8"),
        ("eager", {"width": 3}, "width 3"),
        ("eager+root-in-budget", {}, ""),
        ("spine+root-in-budget", {}, ""),
        ("capped+root-in-budget", {"width": 4}, "width 4"),
    ],
)
def test_every_profile_is_told_from_every_other(name: str, fixed: dict[str, float], parameter: str) -> None:
    finding = explain(trees_of(name, **fixed))
    assert told(finding) == (name, parameter, Match.EXACT)
    assert [e.title for e in finding.ranking if e.match == Match.EXACT] == [finding.best.title if finding.best else ""]
    assert (finding.departure is None) == (name == "paper")


@pytest.mark.parametrize("cost", [0.01, 0.05, 0.3])
def test_a_cost_is_fitted_from_the_trees(cost: float) -> None:
    """Whatever the fitted number, it builds the same trees: the interval of costs that do is not a point."""
    observed = trees_of("cost-stop", cost=cost)
    assert told(explain(observed))[0] == "cost-stop"
    fitted = fitted_cost(observed)
    assert fitted is not None
    for o in observed:
        assert profile("cost-stop", cost=fitted).build(o.table, 1, o.budget).ranks == o.found.ranks


def test_whole_trees_have_no_cost() -> None:
    assert fitted_cost(trees_of("paper")) is None
    assert fitted_cost(trees_of("spine")) is None


def test_an_interval_of_costs_by_hand() -> None:
    """Thresholds .5 and .2 (spec): one node of two kept means a cost between them."""
    table = DraftTable(np.array([[0, 1], [0, 1]], np.int32), np.log(np.array([[0.5, 0.25], [0.5, 0.5]])).astype(np.float32))
    tree = best_first_tree(table, 9, 2)
    assert cost_thresholds(tree) == pytest.approx([0.5, 0.2], rel=2.0**-20)
    observed = read_tree(tree.tokens[:2], tree.parents[:2], table, 2)
    assert fitted_cost([observed]) == pytest.approx(0.35, rel=2.0**-20)


def with_other_ties(tree: Tree, table: DraftTable, budget: int) -> Tree:
    """The same scores by larger rank paths among equals: the table's columns of equal log-probability in reverse order."""
    mirrored = DraftTable(table.ids.copy(), table.log_probs)
    for depth, row in enumerate(table.log_probs):
        for value in set(row.tolist()):
            at = np.flatnonzero(row == value)
            mirrored.ids[depth, at] = table.ids[depth, at[::-1]]
    return best_first_tree(mirrored, int(tree.tokens[0]), budget)


def test_grades_by_hand() -> None:
    table = DraftTable(np.array([[5, 6, 7]], np.int32), np.array([[-1.0, -1.0, -2.0]], np.float32))
    paper = best_first_tree(table, 9, 1)
    other = read_tree(np.array([9, 6], np.int32), np.array([-1, 0], np.int32), table, 1).found
    worse = read_tree(np.array([9, 7], np.int32), np.array([-1, 0], np.int32), table, 1).found
    assert match(paper, paper) is Match.EXACT
    assert match(paper, other) is Match.TIES
    assert match(paper, worse) is Match.NONE
    two = best_first_tree(table, 9, 2)
    swapped = read_tree(np.array([9, 6, 5], np.int32), np.array([-1, 0, 0], np.int32), table, 2).found
    assert match(two, swapped) is Match.RELABELLED


def test_another_choice_among_equals_is_the_paper_up_to_ties() -> None:
    observed = []
    for probe in PROBES:
        table = draft_table(probe.logits, probe.budget)
        tree = with_other_ties(best_first_tree(table, 1, probe.budget), table, probe.budget)
        observed.append(read_tree(tree.tokens, tree.parents, table, probe.budget))
    assert told(explain(observed))[::2] == ("paper", Match.TIES)


def test_mass_lost_by_hand() -> None:
    """One node of probability 1/4 where the paper has 1/2: half of the mass; the mean of this and a right tree is a quarter."""
    table = DraftTable(np.array([[0, 1]], np.int32), np.log(np.array([[0.5, 0.25]])).astype(np.float32))
    wrong = read_tree(np.array([9, 1], np.int32), np.array([-1, 0], np.int32), table, 1)
    right = read_tree(np.array([9, 0], np.int32), np.array([-1, 0], np.int32), table, 1)
    finding = explain([wrong, right])
    assert finding.mass_lost_max == pytest.approx(0.5, rel=2.0**-20)
    assert finding.mass_lost_mean == pytest.approx(0.25, rel=2.0**-20)
    assert finding.departure is wrong
    assert surrogate_mass(wrong.found) == pytest.approx(0.25, rel=2.0**-20)


def test_a_tree_of_nobody_is_named_nobody() -> None:
    observed = []
    for probe in PROBES:
        table = draft_table(probe.logits, probe.budget)
        worst = DraftTable(table.ids[:, ::-1].copy(), table.log_probs)  # the last candidates instead of the first
        tree = best_first_tree(worst, 1, probe.budget)
        observed.append(read_tree(tree.tokens, tree.parents, table, probe.budget))
    finding = explain(observed)
    assert finding.best is None
    assert finding.mass_lost_max > 0.5


@pytest.mark.parametrize(
    ("tokens", "parents", "budget", "rule"),
    [
        ([9, 8], [-1, 0], 1, "T4"),  # no candidate
        ([9, 7], [-1, 0], 1, "T4"),  # of log-probability -inf
        ([9, 5, 5], [-1, 0, 1], 2, "T4"),  # there is no second depth
        ([9, 5, 5], [-1, 0, 0], 2, "T6"),
        ([9, 5, 6], [-1, 0, 0], 1, "T5"),
    ],
)
def test_what_is_no_tree_of_the_table_is_refused(tokens: list[int], parents: list[int], budget: int, rule: str) -> None:
    table = DraftTable(np.array([[5, 6, 7]], np.int32), np.array([[-1.0, -1.0, -math.inf]], np.float32))
    with pytest.raises(TreeError, match=rule):
        read_tree(np.array(tokens, np.int32), np.array(parents, np.int32), table, budget)


def test_nothing_seen_nothing_explained() -> None:
    with pytest.raises(ValueError, match="no trees to explain"):
        explain([])
