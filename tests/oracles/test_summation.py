"""Trees of additions read off masked sums: against kernels whose tree is known because it is written here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles.summation import (
    Tree,
    depth_of_leaf,
    height,
    leaves_of,
    leaves_under,
    masks,
    pairs,
    smallest_block,
    tree_of,
    widest,
    words,
)

F = np.float32
Column = NDArray[np.float32]


def chain(x: Column) -> F:
    total = F(0)
    for value in x:
        total = F(total + value)
    return total


def reverse(x: Column) -> F:
    return chain(x[::-1])


def pairwise(x: Column) -> F:
    return F(x[0]) if len(x) == 1 else F(pairwise(x[: len(x) // 2]) + pairwise(x[len(x) // 2 :]))


def lanes(x: Column) -> F:
    return pairwise(np.array([chain(x[lane::4]) for lane in range(4)], F))


def runs(x: Column) -> F:
    return pairwise(np.array([chain(x[start : start + 8]) for start in range(0, len(x), 8)], F))


def fused(x: Column) -> F:
    """Four terms at a time, without a rounding between them, behind the running sum: a tensor core's node of five."""
    total = 0.0
    for start in range(0, len(x), 4):
        block = [total, *map(float, x[start : start + 4])]
        top = max(map(abs, block))
        total = float(F(sum(value for value in block if abs(value) > top * 2.0**-30)))
    return F(total)


def float64(x: Column) -> F:
    return F(x.astype(np.float64).sum())


def found(kernel: Callable[[Column], F], terms: int) -> Tree | None:
    columns = masks(terms, pairs(terms))
    under = leaves_under(np.array([kernel(columns[:, c]) for c in range(columns.shape[1])], F), terms)
    return None if under is None else tree_of(under, terms)


def test_a_chain_of_four_terms() -> None:
    assert found(chain, 4) == (((0, 1), 2), 3)


def test_a_chain_from_the_end() -> None:
    assert found(reverse, 4) == (0, (1, (2, 3)))


@pytest.mark.parametrize(
    ("kernel", "terms", "expected"),
    [(chain, 16, 15), (reverse, 16, 15), (pairwise, 16, 4), (lanes, 16, 5), (runs, 32, 9), (float64, 8, 3)],
)
def test_heights(kernel: Callable[[Column], F], terms: int, expected: int) -> None:
    tree = found(kernel, terms)
    assert tree is not None
    assert height(tree) == expected or kernel is float64  # the order of np.sum is NumPy's own
    assert sorted(leaves_of(tree)) == list(range(terms))


def test_a_fused_node_is_seen_and_counts_its_worst_order() -> None:
    tree = found(fused, 12)
    assert tree is not None
    assert widest(tree) == 5
    assert height(tree) == 3 + 4 + 4
    assert words(tree, 12) == "fused additions of up to 5 terms, height 11"


def test_words_for_the_usual_trees() -> None:
    named = {kernel: words(tree, 16) for kernel in (chain, pairwise, lanes) if (tree := found(kernel, 16)) is not None}
    assert named == {chain: "a chain", pairwise: "a balanced tree", lanes: "partial sums, height 5"}


def test_a_compensated_sum_is_no_tree() -> None:
    def kahan(x: Column) -> F:
        total = lost = F(0)
        for value in x:
            term = F(value - lost)
            new = F(total + term)
            total, lost = new, F(F(new - total) - term)
        return total

    tree = found(kahan, 8)
    assert tree is None or height(tree) <= 7  # what it absorbs is lost to it as well: never more than a chain


def test_sums_that_are_no_counts_say_nothing() -> None:
    assert leaves_under(np.array([0.5, 1], F), 8) is None
    assert leaves_under(np.array([7, 1], F), 8) is None
    assert leaves_under(np.array([-1, 1], F), 8) is None
    assert leaves_under(np.array([np.nan, 1], F), 8) is None


def test_sizes_that_no_tree_has_are_refused() -> None:
    under = np.array([2, 2, 2], np.int64)  # each pair of three leaves meets below the whole
    assert tree_of(under, 3) is None
    assert tree_of(np.array([2, 3, 2], np.int64), 3) is None


def test_the_depth_of_one_leaf_is_its_chain() -> None:
    terms = 40
    of = np.stack([np.zeros(terms - 1, np.int64), np.arange(1, terms)], 1)
    columns = masks(terms, of)
    under = leaves_under(np.array([chain(columns[:, c]) for c in range(terms - 1)], F), terms)
    assert under is not None
    assert depth_of_leaf(under) == terms - 1


@pytest.mark.parametrize(("heights", "block"), [({64: 32, 256: 34, 1024: 36}, 32), ({64: 6, 256: 8}, 1), ({64: 63, 1024: 1023}, 1024)])
def test_the_smallest_block_that_covers_what_was_seen(heights: dict[int, int], block: int) -> None:
    assert smallest_block(heights) == block
