"""The blocked engine's own draft tree: table, best-first builder, walk. Independent of spec/tree.py on purpose.

A tree is a list of rank paths in node order; tokens, parents and depths follow from it. Path scores are exact: integers in
units of 2**-149, of which every float32 is a multiple. Dimension letters as in points.py.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from impls.blocked.points import Float, Int, Points, RankPath
from spec.engine import EngineError

_BUDGET_MAX = 2**14


@dataclass(frozen=True)
class DraftTree:
    """Root first; `tokens`, `parents`, `depths` have N + 1 entries, the root's parent is -1."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]


def check_budget(budget: int) -> None:
    if not 0 <= budget <= _BUDGET_MAX:
        raise EngineError(f"T5: budget is {budget}, but must be between 0 and {_BUDGET_MAX}")


def draft_table(p: Points, logits: Float, budget: int) -> tuple[Int, Float]:
    """ids and log_probs, [L,K]. Raises EngineError for NaN, +inf or a bad budget (T5, T8)."""
    check_budget(budget)
    if np.isnan(logits).any() or np.isposinf(logits).any():
        raise EngineError("T8: draft logits must be finite or -inf")
    depth_max, vocab = logits.shape
    width = p.table_width(budget, vocab)
    ids = np.empty((depth_max, width), np.int32)
    log_probs = np.empty((depth_max, width), np.float32)
    for depth in range(1, depth_max + 1):
        row = logits[p.draft_row(depth)]
        columns = p.candidates(row, width)
        ids[depth - 1] = p.token_ids(columns, vocab)
        log_probs[depth - 1] = p.log_prob(row[columns], p.log_normaliser(row))
    return ids, log_probs


def best_first_tree(p: Points, ids: Int, log_probs: Float, budget: int, root: int) -> DraftTree:
    """The first `budget` rank paths by (score descending, path ascending). Raises EngineError outside T4, T5, T8."""
    check_budget(budget)
    if np.isnan(log_probs).any() or np.isposinf(log_probs).any():
        raise EngineError("T8: log_probs must be finite or -inf")
    if (log_probs[:, 1:] > log_probs[:, :-1]).any():
        raise EngineError("T4: log_probs must descend along each row")
    table: list[list[float]] = [[value for value in row if value > -math.inf] for row in log_probs.astype(np.float64).tolist()]
    id_rows: list[list[int]] = ids.tolist()
    paths = p.select(lambda count: _best_first(p, table, count), table, p.node_budget(budget, len(table)))
    return DraftTree(
        tokens=[root, *(p.node_token(id_rows, path) for path in paths)],
        parents=[-1, *p.parent_numbers(paths)],
        depths=[0, *map(len, paths)],
    )


def _best_first(p: Points, table: Sequence[Sequence[float]], count: int) -> list[RankPath]:
    """Pop `count` paths; a popped path pushes its next sibling and its first child."""
    pushes = itertools.count()
    heap: list[tuple[object, int, RankPath, object, object]] = []

    def push(ranks: RankPath, parent_score: object) -> None:
        depth = len(ranks)
        if depth <= len(table) and ranks[-1] < len(table[depth - 1]):
            value = p.path_score(parent_score, table[depth - 1][ranks[-1]])
            order = next(pushes)
            heapq.heappush(heap, (p.heap_key(value, ranks, order), order, ranks, parent_score, value))

    push((0,), 0)
    paths: list[RankPath] = []
    while heap and len(paths) < count:
        _, _, ranks, parent_score, value = heapq.heappop(heap)
        paths.append(ranks)
        push((*ranks[:-1], ranks[-1] + 1), parent_score)
        push((*ranks, 0), value)
    return paths


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node. Raises EngineError (T6) unless node 0 is the only root and every other parent comes earlier."""
    if not parents or parents[0] != -1:
        raise EngineError("T6: node 0 must be the root, with parent -1")
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise EngineError(f"T6: parents[{node}] is {parent}, but must be between 0 and {node - 1}")
        depths.append(depths[parent] + 1)
    return depths


def accept(p: Points, tokens: Sequence[int], parents: Sequence[int], target: Sequence[int]) -> tuple[list[int], int]:
    """The accepted path, root first, and the bonus. target[i] is the choice of row i. Raises EngineError (T6)."""
    node_depths(parents)
    if len(set(zip(parents, tokens, strict=True))) < len(tokens):
        raise EngineError("T6: a token occurs twice under one parent")
    path = [0]
    while True:
        child = p.child_of(path[-1], target[p.deciding_row(path[-1], parents)], tokens, parents)
        if child < 0:
            break
        path.append(child)
    path = p.accepted(path, tokens, parents, target)
    return path, p.bonus(path, parents, target)
