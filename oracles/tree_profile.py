"""Which named profile explains the trees that an engine builds, and what surrogate mass they lose against the paper's (T7).

A judge of a family, not of one tree: an engine that is not the paper's gets the name of what it is. `paritree judge` and campaigns
hold engines to the paper's profile; this tells them why they fail.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spec.profiles import TreeProfile, cost_thresholds, profile, surrogate_mass, tree_of_ranks
from spec.tree import DraftTable, Int, Tree, TreeError, best_first_tree, check_structure

WIDTHS = range(1, 9)  # of width caps in use: 2 to 8
ALONE = ("paper", "level-order", "fifo", "root-in-budget", "spine", "short-spine", "bonus", "narrow", "early-stop", "eager")
COMBINED = ("fifo", "spine", "eager")  # with the root counted in the budget


class Match(enum.IntEnum):
    """How well a profile explains a tree; higher is stronger."""

    NONE = 0
    TIES = 1  # another choice among equal scores: the same scores, as a multiset
    RELABELLED = 2  # the same nodes under other numbers
    EXACT = 3

    @property
    def words(self) -> str:
        return ("not at all", "up to the choice among equal scores", "up to the numbers of nodes", "exactly")[self]


@dataclass(frozen=True, eq=False)
class Observed:
    """A tree as an engine built it from `table`; `found.ranks` names its nodes."""

    table: DraftTable
    budget: int
    found: Tree

    @property
    def paper(self) -> Tree:
        return best_first_tree(self.table, int(self.found.tokens[0]), self.budget)


@dataclass(frozen=True)
class Explanation:
    """`match`: the weakest over all trees; `explained`: how many trees match at all."""

    profile: TreeProfile
    match: Match
    explained: int

    @property
    def title(self) -> str:
        return f"{self.profile.name} ({self.profile.parameter})" if self.profile.parameter else self.profile.name


@dataclass(frozen=True)
class Finding:
    """`best` is None where no named profile explains every tree; `ranking` starts with the closest. Masses lost are shares of the paper's."""

    best: Explanation | None
    ranking: tuple[Explanation, ...]
    trees: int
    mass_lost_mean: float
    mass_lost_max: float
    departure: Observed | None  # the smallest tree that is not the paper's, exactly


def read_tree(tokens: Int, parents: Int, table: DraftTable, budget: int) -> Observed:
    """Name each node by its rank path. Raises TreeError for a malformed tree (T6), a token that is no candidate (T4) or too many nodes (T5)."""
    depths = check_structure(parents, tokens)
    if len(tokens) - 1 > budget:
        raise TreeError("T5", f"the tree has {len(tokens) - 1} nodes, but the budget is {budget}")
    ranks: list[tuple[int, ...]] = [()]
    for node, (token, parent, depth) in enumerate(zip(tokens.tolist()[1:], parents.tolist()[1:], depths[1:], strict=True), 1):
        row = table.ids[depth - 1].tolist() if depth <= len(table.ids) else []
        if token not in row or table.log_probs[depth - 1, row.index(token)] == -math.inf:
            raise TreeError("T4", f"tokens[{node}] is {token}, but that is no candidate at depth {depth}")
        ranks.append((*ranks[parent], row.index(token)))
    return Observed(table, budget, tree_of_ranks(ranks[1:], table, int(tokens[0]), budget))


def match(expected: Tree, found: Tree) -> Match:
    if found.ranks == expected.ranks:
        return Match.EXACT
    if set(found.ranks) == set(expected.ranks):
        return Match.RELABELLED
    return Match.TIES if Counter(found.scores.tolist()) == Counter(expected.scores.tolist()) else Match.NONE


def explain(observed: Sequence[Observed]) -> Finding:
    """The strongest match of all candidates; among equals the first, simple profiles before combined ones. Raises ValueError without trees."""
    if not observed:
        raise ValueError("there are no trees to explain")
    explanations = []
    for candidate in _candidates(observed):
        matches = [match(candidate.build(o.table, int(o.found.tokens[0]), o.budget), o.found) for o in observed]
        explanations.append(Explanation(candidate, min(matches), sum(m > Match.NONE for m in matches)))
    explanations.sort(key=lambda e: (-e.match, -e.explained))  # stable: the order of candidates decides among equals
    lost = [_mass_lost(o) for o in observed]
    departures = [o for o in observed if match(o.paper, o.found) != Match.EXACT]
    return Finding(
        best=explanations[0] if explanations[0].match > Match.NONE else None,
        ranking=tuple(explanations),
        trees=len(observed),
        mass_lost_mean=math.fsum(lost) / len(lost),
        mass_lost_max=max(lost),
        departure=min(departures, key=lambda o: (o.paper.count, o.table.ids.size), default=None),
    )


def _mass_lost(observed: Observed) -> float:
    best = surrogate_mass(observed.paper)
    return 1 - surrogate_mass(observed.found) / best if best else 0.0


def _candidates(observed: Sequence[Observed]) -> Iterator[TreeProfile]:
    for name in ALONE:
        yield profile(name)
    widest = max(o.table.ids.shape[1] for o in observed)
    for width in WIDTHS:
        if width < widest:  # a cap that no table reaches is no cap
            yield profile("capped", width=width)
            yield profile("eager", width=width)
    cost = fitted_cost(observed)
    if cost is not None:
        yield profile("cost-stop", cost=cost)
    for name in COMBINED:
        yield profile(f"{name}+root-in-budget")
    for width in WIDTHS:
        if width < widest:
            yield profile("capped+root-in-budget", width=width)
            yield profile("eager+root-in-budget", width=width)


def fitted_cost(observed: Sequence[Observed]) -> float | None:
    """A cost per node under which `cost-stop` builds exactly these trees; None where there is none, or where nothing was left out."""
    low, high = 0.0, math.inf
    for o in observed:
        paper, kept = o.paper, o.found.count
        if o.found.ranks != paper.ranks[: kept + 1]:
            return None
        thresholds = cost_thresholds(paper)
        if kept:
            high = min(high, thresholds[kept - 1])  # the last node paid for itself
        if kept < paper.count:
            low = max(low, thresholds[kept])  # the next one did not
    if not 0 < low < high:
        return None
    return low if math.isinf(high) else (low + high) / 2
