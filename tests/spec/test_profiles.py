"""Each named profile against its rule written as a search over all rank paths, and the smallest inputs of DDTREE section 6."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.profiles import NAMES, RankPath, cost_thresholds, profile, surrogate_mass, tree_of_ranks
from spec.tree import DraftTable, TreeError, best_first_tree, check_structure, draft_table
from spec.weights import philox

many = settings(deadline=None, max_examples=120, derandomize=True)
Plain = list[list[float]]


def table_of(log_probs: Plain) -> DraftTable:
    array = np.array(log_probs, np.float32)
    return DraftTable(np.tile(np.arange(array.shape[1], dtype=np.int32), (len(array), 1)), array)


def paths(name: str, log_probs: Plain, budget: int, **fixed: float) -> list[RankPath]:
    return list(profile(name, **fixed).build(table_of(log_probs), 0, budget).ranks[1:])  # type: ignore[arg-type]


# Second forms: the next node is the best of all that may come next, found by looking at every path


def all_paths(log_probs: Plain) -> list[RankPath]:
    ranks = [[r for r, value in enumerate(row) if value > -math.inf] for row in log_probs]
    return [path for depth in range(1, len(ranks) + 1) for path in itertools.product(*ranks[:depth])]


def score(log_probs: Plain, path: RankPath, nats: float = 0.0) -> Fraction:
    return sum((Fraction(float(np.float32(log_probs[d][r]))) for d, r in enumerate(path)), Fraction(0)) + Fraction(nats) * (len(path) - 1)


def generator(path: RankPath) -> RankPath:
    """What must have been taken before: the better sibling, or the parent of a best child."""
    return (*path[:-1], path[-1] - 1) if path[-1] else path[:-1]


def taken_one_by_one(
    universe: Iterable[RankPath], key: Callable[[RankPath], object], budget: int, seed: list[RankPath] | None = None
) -> list[RankPath]:
    left = set(universe)
    taken: list[RankPath] = []
    for first in seed or []:
        if first in left and len(taken) < budget:
            taken.append(first)
            left.remove(first)
    while len(taken) < budget:
        ready = [path for path in left if generator(path) == () or generator(path) in taken]
        if not ready:
            break
        best = min(ready, key=key)  # type: ignore[type-var]
        taken.append(best)
        left.remove(best)
    return taken


def by_search(name: str, log_probs: Plain, budget: int) -> list[RankPath]:
    universe = all_paths(log_probs)

    def in_order(path: RankPath) -> object:
        return (-score(log_probs, path), path)

    chain = [path for path in universe if not any(path)]
    if name == "paper":
        return sorted(universe, key=in_order)[:budget]
    if name == "level-order":
        return sorted(sorted(universe, key=in_order)[:budget], key=len)
    if name == "root-in-budget":
        return sorted(universe, key=in_order)[: max(0, budget - 1)]
    if name == "spine":
        rest = [path for path in sorted(universe, key=in_order) if any(path)]
        return [*chain, *rest][:budget]
    if name == "short-spine":
        return chain[:budget] if budget <= len(chain) else sorted(universe, key=in_order)[:budget]
    if name == "bonus":
        return taken_one_by_one(universe, lambda path: (-score(log_probs, path, 0.2), path), budget)
    if name == "early-stop":
        if not budget or not universe:
            return []
        limit = score(log_probs, (0,)) - Fraction(math.log(budget)) - 1
        order = sorted(universe, key=in_order)[:budget]
        stop = next((i for i, path in enumerate(order) if any(path) and score(log_probs, path) < limit), len(order))
        return order[:stop]
    assert name == "eager"
    taken: list[RankPath] = [()]
    opened: set[RankPath] = set()
    while len(taken) <= budget:
        waiting = [path for path in taken if path not in opened]
        if not waiting:
            break
        best = min(waiting, key=lambda path: (-score(log_probs, path) if path else 0, taken.index(path)))
        opened.add(best)
        children = [path for path in universe if path[:-1] == best]
        taken += sorted(children)
    return taken[1 : budget + 1]


tables = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.sampled_from([0.0, -0.25, -0.5, -0.5, -1.0, -1.0, -1.5, -3.0, -math.inf]), min_size=width, max_size=width).map(
            lambda row: sorted(row, reverse=True)
        ),
        min_size=1,
        max_size=3,
    )
)


@pytest.mark.parametrize("name", ["paper", "level-order", "root-in-budget", "spine", "short-spine", "bonus", "early-stop", "eager"])
@many
@given(log_probs=tables, budget=st.integers(0, 14))
def test_a_profile_is_its_rule(name: str, log_probs: Plain, budget: int) -> None:
    assert paths(name, log_probs, budget) == by_search(name, log_probs, budget)


@many
@given(log_probs=tables, budget=st.integers(0, 14), width=st.integers(1, 5))
def test_a_cap_is_the_paper_on_fewer_candidates(log_probs: Plain, budget: int, width: int) -> None:
    shorter = [row[:width] for row in log_probs]
    assert paths("capped", log_probs, budget, width=width) == by_search("paper", shorter, budget)
    assert paths("eager", log_probs, budget, width=width) == by_search("eager", shorter, budget)
    narrow = min(max(budget // len(log_probs) + 1, 2), 6)
    assert paths("narrow", log_probs, budget) == by_search("paper", [row[:narrow] for row in log_probs], budget)


@many
@given(log_probs=tables, budget=st.integers(0, 14))
def test_fifo_is_the_paper_up_to_ties(log_probs: Plain, budget: int) -> None:
    scores = functools.partial(score, log_probs)
    assert list(map(scores, paths("fifo", log_probs, budget))) == list(map(scores, by_search("paper", log_probs, budget)))


@many
@given(log_probs=tables, budget=st.integers(0, 14), cost=st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0, 3.0]))
def test_cost_stop_is_the_first_node_that_does_not_improve(log_probs: Plain, budget: int, cost: float) -> None:
    """The ratio itself, node after node, in exact arithmetic of the double masses; a near tie is left out."""
    order = by_search("paper", log_probs, budget)
    mass, kept = Fraction(1), 0
    for node, path in enumerate(order, 1):
        more = mass + Fraction(math.exp(float(score(log_probs, path))))
        before, after = mass / (1 + Fraction(cost) * (node - 1)), more / (1 + Fraction(cost) * node)
        if abs(after - before) < Fraction(2) ** -40:  # far above the roundings of both forms
            return
        if after < before:
            break
        mass, kept = more, node
    assert paths("cost-stop", log_probs, budget, cost=cost) == order[:kept]


@many
@given(log_probs=tables, budget=st.integers(0, 14))
def test_every_profile_builds_a_tree_within_its_budget_and_none_beats_the_paper(log_probs: Plain, budget: int) -> None:
    """T6 and section 1.9: no tree of N nodes has more surrogate mass than the paper's of N nodes."""
    for name in NAMES:
        tree = profile(name, width=2, cost=0.2).build(table_of(log_probs), 9, budget)
        assert check_structure(tree.parents, tree.tokens) == tree.depths.tolist()
        assert tree.count <= budget
        assert int(tree.tokens[0]) == 9
        rival = best_first_tree(table_of(log_probs), 9, tree.count)
        assert surrogate_mass(tree) <= surrogate_mass(rival) * (1 + 2.0**-40)  # 14 exponentials, each within an ulp or two


# Smallest inputs of DDTREE section 6


def test_row_1_first_in_first_out() -> None:
    assert paths("paper", [[-1, -1], [0, -5]], 2) == [(0,), (0, 0)]
    assert paths("fifo", [[-1, -1], [0, -5]], 2) == [(0,), (1,)]


def test_row_3_chain_seed() -> None:
    log_probs = [[-0.7, -0.7], [-3.0, -3.5], [-0.1, -3.0]]
    assert paths("paper", log_probs, 3) == [(0,), (1,), (0, 0)]
    assert paths("spine", log_probs, 3) == [(0,), (0, 0), (0, 0, 0)]


def test_row_4_chain_for_small_budgets() -> None:
    log_probs = np.log([[0.5, 0.45], [0.5, 0.4]]).tolist()
    assert paths("paper", log_probs, 2) == [(0,), (1,)]
    assert paths("short-spine", log_probs, 2) == [(0,), (0, 0)]


def test_row_5_depth_bonus() -> None:
    log_probs = [np.log([0.5, 0.2, 0.19]).tolist(), np.log([0.35, 0.3, 0.01]).tolist()]
    assert paths("paper", log_probs, 3) == [(0,), (1,), (2,)]
    assert paths("bonus", log_probs, 3) == [(0,), (0, 0), (1,)]


def test_row_6_early_stop() -> None:
    log_probs = np.log([[0.9, 0.05, 0.03]] * 2).tolist()
    assert len(paths("early-stop", log_probs, 9)) < len(paths("paper", log_probs, 9)) == 9


def test_masses_by_hand() -> None:
    log_probs = np.log([[0.5, 0.25], [0.5, 0.5]]).tolist()
    tree = profile("paper").build(table_of(log_probs), 0, 3)
    assert surrogate_mass(tree) == pytest.approx(0.5 + 0.25 + 0.25, rel=2.0**-20)  # the table is float32
    # first node: c < .5 / 1; second: A = 1.5, c < .25 / (1.5 - .25); third: A = 1.75, c < .25 / (1.75 - .5)
    assert cost_thresholds(tree) == pytest.approx([0.5, 0.2, 0.2], rel=2.0**-20)


def test_names_and_parameters() -> None:
    assert profile("capped", width=6).parameter == "width 6"
    assert profile("eager+root-in-budget", width=3).build(table_of([[-1.0, -1.0]]), 0, 2).count == 1
    for bad in ("beam", "paper+heap"):
        with pytest.raises(KeyError, match="there is no tree profile"):
            profile(bad)
    with pytest.raises(ValueError, match="needs a width"):
        profile("capped")
    with pytest.raises(ValueError, match="needs a cost"):
        profile("cost-stop")


@pytest.mark.parametrize("name", NAMES)
def test_tables_outside_the_domain_are_refused(name: str) -> None:
    build = profile(name, width=2, cost=0.1).build
    for log_probs, rule in ([[math.nan, -1.0]], "T8"), ([[-2.0, -1.0]], "T4"):
        with pytest.raises(TreeError, match=rule):
            build(table_of(log_probs), 0, 2)
    with pytest.raises(TreeError, match="T5"):
        build(table_of([[-1.0]]), 0, -3)


def test_a_tree_of_given_paths() -> None:
    table = draft_table(philox("ranks", 0).standard_normal((2, 3)).astype(np.float32), 3)
    built = profile("paper").build(table, 5, 4)
    again = tree_of_ranks(built.ranks[1:], table, 5, 4)
    assert np.array_equal(again.tokens, built.tokens)
    assert np.array_equal(again.parents, built.parents)
    assert np.array_equal(again.scores, built.scores)
    with pytest.raises(KeyError):
        tree_of_ranks([(0, 0)], table, 5, 4)
