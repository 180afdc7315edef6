"""The tree in which a kernel adds its terms, read off sums of a few masked ones (after FPRev, arXiv 2411.00442).

+M at i, -M at j and 1 elsewhere: every 1 that is added before +M and -M meet is absorbed, so n - sum is the number of leaves under their lowest
common ancestor. All pairs give the whole tree; one leaf against all others gives the additions that this leaf passes. M must absorb n ones
in the accumulator and stay finite in the format of the operands.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracles.audit import declared_height

MASK = 2.0**100  # absorbs ones in float32 and in float64; finite in float32, bfloat16 and TF32, not in float16, which then tells nothing
Sizes = NDArray[np.int64]
Tree = int | tuple["Tree", ...]


def pairs(terms: int) -> NDArray[np.int64]:
    """[n (n - 1) / 2, 2], i < j."""
    first, second = np.triu_indices(terms, 1)
    return np.stack([first, second], 1)


def masks(terms: int, of: NDArray[np.int64]) -> NDArray[np.float32]:
    """float32 [terms, pairs]: one column per pair (i, j)."""
    out = np.ones((terms, len(of)), np.float32)
    columns = np.arange(len(of))
    out[of[:, 0], columns], out[of[:, 1], columns] = MASK, -MASK
    return out


def leaves_under(sums: NDArray[np.float32], terms: int) -> Sizes | None:
    """Leaves under the common ancestor of each pair; None where the sums are no counts between 0 and n - 2."""
    found = sums.astype(np.float64)
    with np.errstate(invalid="ignore"):
        legal = np.isfinite(found) & (found == np.rint(found)) & (found >= 0) & (found <= terms - 2)
    return (terms - found).astype(np.int64) if legal.all() else None


def tree_of(under: Sizes, terms: int) -> Tree | None:
    """Nested tuples of term numbers; a node of more than two children is one fused addition. None where no tree has these sizes.

    `under`: of `pairs(terms)`, in that order.
    """
    sizes = np.zeros((terms, terms), np.int64)
    at = pairs(terms)
    sizes[at[:, 0], at[:, 1]] = sizes[at[:, 1], at[:, 0]] = under
    found = _node(sizes, list(range(terms)))
    return found if found is not None and _explains(found, sizes) else None


def _node(sizes: Sizes, leaves: list[int]) -> Tree | None:
    if len(leaves) == 1:
        return leaves[0]
    whole = int(sizes[leaves[0], leaves[1:]].max())
    if whole != len(leaves):
        return None
    children: list[Tree] = []
    left = leaves
    while left:
        child = [left[0], *(leaf for leaf in left[1:] if sizes[left[0], leaf] < whole)]
        node = _node(sizes, child)
        if node is None:
            return None
        children.append(node)
        left = [leaf for leaf in left if leaf not in child]
    return tuple(children)


def _explains(tree: Tree, sizes: Sizes) -> bool:
    """Every pair has the size that the tree gives it."""
    if not isinstance(tree, tuple):
        return True
    groups = [leaves_of(child) for child in tree]
    whole = sum(map(len, groups))
    for number, group in enumerate(groups):
        for other in groups[number + 1 :]:
            if (sizes[np.ix_(group, other)] != whole).any():
                return False
    return all(_explains(child, sizes) for child in tree)


def leaves_of(tree: Tree) -> list[int]:
    return [tree] if not isinstance(tree, tuple) else [leaf for child in tree for leaf in leaves_of(child)]


def height(tree: Tree) -> int:
    """Additions above the deepest leaf; a node of k children counts k - 1, the worst order inside it."""
    return len(tree) - 1 + max(map(height, tree)) if isinstance(tree, tuple) else 0


def widest(tree: Tree) -> int:
    return max(len(tree), *map(widest, tree)) if isinstance(tree, tuple) else 1


def depth_of_leaf(under: Sizes) -> int:
    """Ancestors of one leaf, from its pairs with all others: at least as many additions does the term pass."""
    return len(np.unique(under))


def smallest_block(heights: dict[int, int]) -> int:
    """The smallest power of two B for which min(n - 1, B + ceil(log2(n / B))) covers the heights seen at each n: kernels cut at such sizes."""
    block = 1
    while any(seen > declared_height(block, terms) for terms, seen in heights.items()):
        block *= 2
    return block


def words(tree: Tree, terms: int) -> str:
    """What kind of tree it is."""
    top = height(tree)
    if widest(tree) > 2:
        return f"fused additions of up to {widest(tree)} terms, height {top}"
    if top == terms - 1:
        return "a chain"
    if top == int(np.ceil(np.log2(terms))):
        return "a balanced tree"
    return f"partial sums, height {top}"
