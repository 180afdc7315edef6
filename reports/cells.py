"""The crossed coverage: eight axes in coarse classes, what can be reached at all, and which cells are the emptiest.

A **cell** has one class of each axis. It counts draft trees: one per sequence and round of a session, so that sums over any axes add up. The
store keeps the cells that were hit (table `cells`); the empty ones follow from the classes and rules here, which are the law for
`campaigns.coverage` as well.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

AXES: dict[str, tuple[str, ...]] = {
    "depth": ("0", "1", "2 to 3", "4+"),
    "width": ("0", "1", "2", "3+"),
    "prefix": ("0", "1", "15", "other"),
    "batch": ("alone", "equal", "unequal"),
    "dtype": ("float32", "bfloat16", "float16"),
    "ties": ("none", "vocabulary", "experts"),
    "hazard": ("none", "sequences", "rows", "memory"),
    "round": ("1", "2", "3+"),
}
MEANING = {
    "depth": "of the draft tree, in edges",
    "width": "most children of one node",
    "prefix": "committed rows before the tree, modulo a page of 16",
    "batch": "one sequence alone, or several with equal or unequal prefixes",
    "dtype": "format of the cache that the recipe asks for",
    "ties": "exact ties that the weights force: among the tokens of the vocabulary, or among the experts",
    "hazard": "sequences: fork, evict, orphan; rows: late, interleaved; memory: what is done to arrays and calls",
    "round": "of the session",
}
PAGE = 16  # rows of a page of the cache, and of the smallest tile of common kernels

Cell = tuple[str, ...]
"""One class per axis, in the order of AXES."""

Rule = tuple[str, Callable[[Mapping[str, str]], bool]]
UNREACHABLE: tuple[Rule, ...] = (
    ("a tree of depth 0 has no width, and every other has one", lambda c: (c["depth"] == "0") != (c["width"] == "0")),
    ("one sequence alone has no other whose rows it could take turns with", lambda c: c["batch"] == "alone" and c["hazard"] == "rows"),
)
"""(reason, whether a cell cannot be)."""


def reachable(cell: Cell) -> bool:
    named = dict(zip(AXES, cell, strict=True))
    return not any(cannot(named) for _, cannot in UNREACHABLE)


@cache
def every() -> tuple[Cell, ...]:
    """All reachable cells, in the order of the classes."""
    return tuple(cell for cell in itertools.product(*AXES.values()) if reachable(cell))


def counted(rows: Iterable[Mapping[str, Any]]) -> Counter[Cell]:
    """Trees per cell of rows of the table `cells`."""
    out: Counter[Cell] = Counter()
    for row in rows:
        out[tuple(str(row[axis]) for axis in AXES)] += int(row["trees"])
    return out


def emptiest(trees: Mapping[Cell, int], number: int) -> list[tuple[Cell, int]]:
    """`number` reachable cells with the fewest trees, and how many these are: what a campaign that fills gaps should draw next.

    Among equals the one comes first whose rarest pair of classes was met least, then the one whose pairs were met least on the whole (the product of
    1 + trees over all pairs), those already named here counted as met: so a corner of which no neighbour was seen comes before a hole in well trodden
    ground, and ten cells lie in ten corners instead of side by side. Then the order of the classes decides, so that the answer depends on the counts
    alone. About two milliseconds per cell.
    """
    cells = every()
    classes = _class_numbers()
    have = np.array([trees.get(cell, 0) for cell in cells])
    pairs = list(itertools.combinations(range(len(AXES)), 2))
    flat = [classes[:, i] * len(list(AXES.values())[j]) + classes[:, j] for i, j in pairs]  # the pair of classes of each cell as one number
    met = [np.bincount(numbers, weights=have) for numbers in flat]
    left = np.ones(len(cells), bool)
    out: list[tuple[Cell, int]] = []
    for _ in range(min(number, len(cells))):
        level = have == have[left].min()
        pair_trees = np.array([sums[numbers] for sums, numbers in zip(met, flat, strict=True)])
        rarest = np.where(level & left, pair_trees.min(axis=0), np.inf)
        on_the_whole = np.where(rarest == rarest.min(), np.log1p(pair_trees).sum(axis=0), np.inf)
        best = int(np.argmin(on_the_whole))
        out.append((cells[best], int(have[best])))
        left[best] = False
        for sums, numbers in zip(met, flat, strict=True):
            sums[numbers[best]] += 1
    return out


@cache
def _class_numbers() -> NDArray[np.int64]:
    """[cells, axes]: the number of each class."""
    return np.array([[AXES[axis].index(word) for axis, word in zip(AXES, cell, strict=True)] for cell in every()])


def pair_sums(trees: Mapping[Cell, int]) -> Counter[tuple[int, int, str, str]]:
    """(axis, axis, class, class) -> trees; axes by number, the first smaller."""
    out: Counter[tuple[int, int, str, str]] = Counter()
    for cell, number in trees.items():
        for i, j in itertools.combinations(range(len(AXES)), 2):
            out[i, j, cell[i], cell[j]] += number
    return out


@cache
def reachable_pairs() -> frozenset[tuple[int, int, str, str]]:
    return frozenset((i, j, cell[i], cell[j]) for cell in every() for i, j in itertools.combinations(range(len(AXES)), 2))


@dataclass(frozen=True)
class Margin:
    """One axis: class -> trees, and how many of its reachable cells were hit."""

    axis: str
    trees: dict[str, int]
    hit: dict[str, int]
    cells: dict[str, int]


@dataclass(frozen=True)
class Pair:
    """Two axes: (class of `rows`, class of `columns`) -> trees; None where no cell can be. `empty`: reachable, and never met."""

    rows: str
    columns: str
    trees: dict[tuple[str, str], int | None]

    @property
    def empty(self) -> list[tuple[str, str]]:
        return [key for key, number in self.trees.items() if number == 0]


@dataclass(frozen=True)
class Crossed:
    """What the page says of the table `cells`. `by_engine`: reachable cells that each engine hit."""

    trees: Counter[Cell]
    by_engine: dict[str, int]

    @property
    def hit(self) -> int:
        return sum(cell in self.trees for cell in every())

    @property
    def cells(self) -> int:
        return len(every())

    @property
    def trees_sum(self) -> int:
        return sum(self.trees.values())

    @property
    def apart(self) -> list[tuple[Pair, str, str]]:
        """(pair of axes, class, class) that were each met, and never together, though they can be."""
        met = {(margin.axis, word) for margin in self.margins for word, trees in margin.trees.items() if trees}
        return [(pair, a, b) for pair in self.pairs for a, b in pair.empty if {(pair.rows, a), (pair.columns, b)} <= met]

    @property
    def margins(self) -> list[Margin]:
        out = []
        for place, (axis, classes) in enumerate(AXES.items()):
            trees, hit, cells = (dict.fromkeys(classes, 0) for _ in range(3))
            for cell in every():
                number = self.trees.get(cell, 0)
                trees[cell[place]] += number
                hit[cell[place]] += number > 0
                cells[cell[place]] += 1
            out.append(Margin(axis, trees, hit, cells))
        return out

    @cached_property
    def pairs(self) -> list[Pair]:
        met, can = pair_sums(self.trees), reachable_pairs()
        out = []
        for (i, one), (j, other) in itertools.combinations(enumerate(AXES), 2):
            keys = itertools.product(AXES[one], AXES[other])
            out.append(Pair(one, other, {(a, b): met[i, j, a, b] if (i, j, a, b) in can else None for a, b in keys}))
        return out

    def emptiest(self, number: int) -> list[tuple[Cell, int]]:
        return emptiest(self.trees, number)
