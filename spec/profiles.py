"""Named tree profiles: the paper's builder, and what ports build instead of it (rule T7).

A profile is a pure function (table, root, budget) -> tree, with an exact rule that its docstring states; scores are exact sums, as
in T2. `paritree tree-profile` tells a port which one it is, and `surrogate_mass` what that costs: the expected number of accepted
tokens under the drafter's own product of marginals, of which the paper's tree has the most at every budget.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from spec.tree import DraftTable, Tree, best_first_tree, check_budget

RankPath = tuple[int, ...]
Builder = Callable[[DraftTable, int, int], Tree]
DEPTH_BONUS = 0.2  # nats per child, in sgl-project/sglang #29907


@dataclass(frozen=True)
class TreeProfile:
    """`build` is the rule; `parameter` says how far a family is fixed, "" where there is nothing to fix."""

    name: str
    parameter: str
    summary: str
    source: str
    build: Builder


# Builders


def paper(table: DraftTable, root: int, budget: int) -> Tree:
    """The first B rank paths by (score descending, rank path ascending)."""
    return best_first_tree(table, root, budget)


def fifo(table: DraftTable, root: int, budget: int) -> Tree:
    """As the paper, but among equal scores the path that entered the heap first; a popped path pushes its sibling, then its child."""
    return _tree(_popped(_rows(table), _push_order), table, root, budget)


def spine(table: DraftTable, root: int, budget: int) -> Tree:
    """The chain of best candidates, as deep as it and the budget go; then the other paths in the paper's order."""
    rows = _rows(table)
    chain = list(_spine(rows))
    others = (path for path in _popped(rows, _paper_order) if any(path))
    return _tree(itertools.chain(chain, others), table, root, budget)


def short_spine(table: DraftTable, root: int, budget: int) -> Tree:
    """The chain alone where the budget is at most the depth; else the paper's tree."""
    chain = list(_spine(_rows(table)))
    return _tree(chain, table, root, budget) if budget <= len(chain) else paper(table, root, budget)


def bonus(table: DraftTable, root: int, budget: int, *, nats: float = DEPTH_BONUS) -> Tree:
    """Best first on score + nats * (depth - 1), ties by rank path: a child may beat its parent, and enters when that has left the heap."""
    return _tree(_popped(_rows(table), _paper_order, Fraction(nats)), table, root, budget)


def capped(table: DraftTable, root: int, budget: int, *, width: int) -> Tree:
    """The paper's tree on the first `width` candidates of each depth."""
    return paper(DraftTable(table.ids[:, :width], table.log_probs[:, :width]), root, budget)


def narrow(table: DraftTable, root: int, budget: int) -> Tree:
    """`capped` at max(B // L + 1, 2), at most 6."""
    return capped(table, root, budget, width=min(max(budget // max(1, len(table.ids)) + 1, 2), 6))


def early_stop(table: DraftTable, root: int, budget: int) -> Tree:
    """The paper's order up to the first path off the chain with a score below lp[0, 0] - ln B - 1."""
    rows = _rows(table)
    if budget < 1 or not rows or not rows[0]:
        return paper(table, root, budget)
    limit = rows[0][0] - Fraction(math.log(budget)) - 1

    def goes_on(path: RankPath) -> bool:
        return not any(path) or _score(rows, path) >= limit

    return _tree(itertools.takewhile(goes_on, itertools.islice(_popped(rows, _paper_order), budget)), table, root, budget)


def eager(table: DraftTable, root: int, budget: int, *, width: int | None = None) -> Tree:
    """Takes the best node of the tree that has no children yet, earlier number first, and adds its `width` best children at once (None:
    all K); numbers follow insertion."""
    rows = [row[:width] for row in _rows(table)]

    def paths() -> Iterator[RankPath]:
        number = 0
        heap: list[tuple[Fraction, int, RankPath]] = [(Fraction(0), 0, ())]
        while heap:
            cost, _, path = heapq.heappop(heap)
            for rank, value in enumerate(rows[len(path)] if len(path) < len(rows) else ()):
                number += 1
                child = (*path, rank)
                heapq.heappush(heap, (cost - value, number, child))
                yield child

    return _tree(paths(), table, root, budget)


def cost_stop(table: DraftTable, root: int, budget: int, *, cost: float) -> Tree:
    """The paper's tree up to the first node that does not raise (1 + surrogate mass) / (1 + cost * nodes); that node is left out.

    `cost` is what one more row of verification costs, as a share of a round without nodes. Of a convex cost this is the
    simplest; masses are float64.
    """
    tree = paper(table, root, budget)
    kept = 0
    for node, threshold in enumerate(cost_thresholds(tree), 1):
        if cost >= threshold:
            break
        kept = node
    return paper(table, root, kept)


def level_order(table: DraftTable, root: int, budget: int) -> Tree:
    """The paper's nodes, numbered depth by depth."""
    return _tree(sorted(paper(table, root, budget).ranks[1:], key=len), table, root, budget)


def root_in_budget(build: Builder) -> Builder:
    """The same profile with B - 1 nodes beside the root."""

    def built(table: DraftTable, root: int, budget: int) -> Tree:
        check_budget(budget)
        return build(table, root, max(0, budget - 1))

    return built


# The list


def _with(build: Callable[..., Tree], **fixed: float | int) -> Builder:
    def built(table: DraftTable, root: int, budget: int) -> Tree:
        return build(table, root, budget, **fixed)

    return built


def profile(name: str, *, width: int | None = None, cost: float | None = None) -> TreeProfile:
    """The named profile; `capped` needs a width, `cost-stop` a cost, `eager` may have a width. A name may end in "+root-in-budget".

    Raises KeyError for an unknown name, ValueError for a parameter that is missing.
    """
    base, plus, suffix = name.partition("+")
    if base not in _FAMILIES or (plus and suffix != "root-in-budget"):
        raise KeyError(f"there is no tree profile {name!r}: choose one of {', '.join(_FAMILIES)}, or one of them with +root-in-budget")
    build, summary, source = _FAMILIES[base]
    parameter = ""
    fixed: dict[str, float | int] = {}
    if base == "capped" and width is None:
        raise ValueError("profile capped needs a width")
    if base == "cost-stop" and cost is None:
        raise ValueError("profile cost-stop needs a cost")
    if base in ("capped", "eager") and width is not None:
        fixed, parameter = {"width": width}, f"width {width}"
    if base == "cost-stop" and cost is not None:
        fixed, parameter = {"cost": cost}, f"cost {cost:.4g} a node"
    whole = _with(build, **fixed) if fixed else build
    if plus:
        return TreeProfile(name, parameter, f"{summary}; the root is counted in the budget", source, root_in_budget(whole))
    return TreeProfile(name, parameter, summary, source, whole)


_FAMILIES: dict[str, tuple[Callable[..., Tree], str, str]] = {
    "paper": (paper, "best first, ties by rank path: DDTree", "liranringel/ddtree c96427a"),
    "fifo": (fifo, "best first, ties first in, first out", "warpfront/hipfire ddtree.rs"),
    "level-order": (level_order, "the paper's nodes, numbered depth by depth", "sgl-project/sglang #29907"),
    "root-in-budget": (root_in_budget(paper), "the paper's tree with one node less: the root is counted", "hao-ai-lab/JetSpec"),
    "spine": (spine, "the chain of best candidates first, then best first", "Luce-Org/lucebox chain_seed"),
    "short-spine": (short_spine, "a chain where the budget is at most the depth, else the paper's tree", "sgl-project/sglang #29907"),
    "bonus": (bonus, f"best first with {DEPTH_BONUS} nats for each further depth", "sgl-project/sglang #29907"),
    "capped": (capped, "the paper's tree on a few candidates a depth", "warpfront/hipfire (8), sgl-project/sglang #27509 (6)"),
    "narrow": (narrow, "the paper's tree on min(max(B // L + 1, 2), 6) candidates a depth", "sgl-project/sglang #29907"),
    "eager": (eager, "all children of the best open node at once", "hao-ai-lab/JetSpec accum_logp"),
    "early-stop": (early_stop, "stops at the first branch below lp0 - ln B - 1", "sgl-project/sglang #29907"),
    "cost-stop": (cost_stop, "stops where a node no longer pays for its verification", "ZhangShuai1230/CaDDTree"),
}
NAMES = tuple(_FAMILIES)


# What a tree is worth


def surrogate_mass(tree: Tree) -> float:
    """Sum over the nodes of exp(score): drafted tokens that a round accepts on average, if the marginals were independent and right."""
    return math.fsum(math.exp(score) for score in tree.scores[1:].tolist())


def cost_thresholds(tree: Tree) -> list[float]:
    """For each node in order, the cost below which it is worth its verification after those before it, made to descend.

    With masses m_1.. and A = 1 + m_1 + .. + m_(n-1): (A + m_n) / (1 + c n) > A / (1 + c (n - 1)) is c < m_n / (A - (n - 1) m_n), and
    always true where that is not positive.
    """
    total, lowest, out = 1.0, math.inf, []
    for node, score in enumerate(tree.scores[1:].tolist(), 1):
        mass = math.exp(score)
        rest = total - (node - 1) * mass
        lowest = min(lowest, mass / rest if rest > 0 else math.inf)
        out.append(lowest)
        total += mass
    return out


def tree_of_ranks(paths: Sequence[RankPath], table: DraftTable, root: int, budget: int) -> Tree:
    """A tree of given rank paths in node order, each after its parent. Raises KeyError where a parent is missing."""
    return _tree(iter(paths), table, root, max(budget, len(paths)))


# Parts


def _rows(table: DraftTable) -> list[list[Fraction]]:
    """The table as exact numbers; candidates of -inf are no nodes (T8). Raises TreeError as `best_first_tree`."""
    best_first_tree(table, root=0, budget=0)
    return [[Fraction(value) for value in row if value > -math.inf] for row in table.log_probs.astype(np.float64).tolist()]


def _score(rows: list[list[Fraction]], path: RankPath) -> Fraction:
    return sum((rows[depth][rank] for depth, rank in enumerate(path)), Fraction(0))


def _spine(rows: list[list[Fraction]]) -> Iterator[RankPath]:
    for depth in itertools.takewhile(lambda d: rows[d], range(len(rows))):
        yield (0,) * (depth + 1)


Order = Callable[[RankPath, int], object]


def _paper_order(path: RankPath, pushed: int) -> object:
    return path


def _push_order(path: RankPath, pushed: int) -> object:
    return pushed


def _popped(rows: list[list[Fraction]], order: Order, per_depth: Fraction = Fraction(0)) -> Iterator[RankPath]:
    """Best first by (-(score + per_depth * (depth - 1)), order); a popped path pushes its next sibling and its first child."""
    pushes = itertools.count()
    heap: list[tuple[Fraction, object, int, RankPath]] = []

    def push(path: RankPath) -> None:
        if len(path) <= len(rows) and path[-1] < len(rows[len(path) - 1]):
            pushed = next(pushes)
            heapq.heappush(heap, (-_score(rows, path) - per_depth * (len(path) - 1), order(path, pushed), pushed, path))

    push((0,))
    while heap:
        path = heapq.heappop(heap)[3]
        yield path
        push((*path[:-1], path[-1] + 1))
        push((*path, 0))


def _tree(paths: Iterable[RankPath], table: DraftTable, root: int, budget: int) -> Tree:
    check_budget(budget)
    rows = _rows(table)
    kept = [(), *itertools.islice(paths, budget)]
    number = {path: node for node, path in enumerate(kept)}
    return Tree(
        tokens=np.array([root, *(int(table.ids[len(path) - 1, path[-1]]) for path in kept[1:])], np.int32),
        parents=np.array([-1, *(number[path[:-1]] for path in kept[1:])], np.int32),
        depths=np.array([len(path) for path in kept], np.int32),
        ranks=tuple(kept),
        scores=np.array([float(_score(rows, path)) for path in kept], np.float64),
        budget=budget,
        exact_in_double=True,
    )
