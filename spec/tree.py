"""The draft tree as equations: table, best-first order, positions, visibility, acceptance, compaction, cut.

Rules T1-T8, C1-C3, A1, A3, A4 and K1-K3 of `spec/rules.py`. Nothing here knows a model or a cache: arrays in, arrays out.
Names: P = prefix_len, committed tokens (the root is not one of them); B = budget, nodes without the root; L = depths;
K = min(B, V) candidates per depth; N = nodes without the root; M = N + 1 rows of the verification batch.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import log_probs

Int = NDArray[np.int32]
Float = NDArray[np.float32]
Bool = NDArray[np.bool_]

BUDGET_MAX = 2**14  # 16 times the largest budget in use; a mask of that many rows already takes 256 MiB
_QUANTUM_EXPONENT = 149  # 2**-149 divides every finite float32


class TreeError(ValueError):
    """Input outside the domain of a tree rule; `rule` is its id, the message says what was found and what is accepted."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule
        self.message = message

    def __reduce__(self) -> tuple[type[TreeError], tuple[str, str]]:
        return TreeError, (self.rule, self.message)


@dataclass(frozen=True, eq=False)
class DraftTable:
    """Candidates by rank: row d-1 belongs to depth d (T1), column r to rank r (T4); log_probs <= 0, descending along a row."""

    ids: Int  # [L, K], token ids of the whole vocabulary
    log_probs: Float  # [L, K], fp32(logit - logZ), -inf: not a candidate


@dataclass(frozen=True, eq=False)
class Tree:
    """Nodes in pop order, root first (T3). `ranks[i]` is the rank path of node i, () for the root."""

    tokens: Int  # [N + 1]
    parents: Int  # [N + 1], -1 for the root
    depths: Int  # [N + 1], 0 for the root
    ranks: tuple[tuple[int, ...], ...]
    scores: NDArray[np.float64]  # [N + 1], sum of log_probs along the path (rounded once where `exact_in_double` is False)
    budget: int
    exact_in_double: bool  # False: the order was found with longer arithmetic, because a double would round some sum

    @property
    def count(self) -> int:
        """N, the number of nodes without the root (T5)."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Acceptance:
    """`path`: accepted nodes, 0 first; the round emits the tokens of path[1:] and then `bonus`, len(path) tokens in all."""

    path: tuple[int, ...]
    bonus: int


# The table and the tree


def check_budget(budget: int) -> None:
    """T5: 0 <= budget <= BUDGET_MAX; 0 is the root alone, plain autoregressive decoding. Raises TreeError."""
    if not 0 <= budget <= BUDGET_MAX:
        raise TreeError("T5", f"budget is {budget}, but must be between 0 and {BUDGET_MAX} (the root is not counted)")


def draft_table(logits: Float, budget: int) -> DraftTable:
    """The K = min(budget, V) best candidates of each row of `logits` [L, V], by (logit descending, id ascending).

    lp = fp32(logit - logZ), logZ = fp32(logsumexp(row)) (T2). A row of -inf only has no candidate: its lp are -inf (T8).
    Raises TreeError for NaN, +inf or a budget out of range.
    """
    check_budget(budget)
    if logits.ndim != 2:
        raise TreeError("T1", f"logits have shape {list(logits.shape)}, but must be [depth, vocabulary]")
    bad = np.isnan(logits) | (logits == np.inf)
    if bad.any():
        depth, token = (int(i) for i in np.argwhere(bad)[0])
        raise TreeError("T8", f"the logit of token {token} at depth {depth + 1} is {logits[depth, token]}, but must be finite or -inf")
    width = min(budget, logits.shape[1])
    # -(-0.0) and -(0.0) compare equal, so a stable sort leaves them to the lower id
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :width].astype(np.int32)  # (L,K)
    table = np.full(logits.shape, -np.inf, np.float32)  # (L,V)
    alive = (logits > -np.inf).any(axis=1)
    if alive.any():
        table[alive] = log_probs(logits[alive])
    return DraftTable(ids, np.take_along_axis(table, ids, axis=1))


def best_first_tree(table: DraftTable, root: int, budget: int) -> Tree:
    """The first `budget` rank paths by (score descending, rank path ascending), root excluded (T3, T5, T7).

    A rank path (r1, .., rd) has the score sum_i log_probs[i, r_i], summed exactly (T2). The heap expands lazily: a node's
    next sibling and first child enter when it leaves. That loses nothing where rows descend and no entry is above 0, as in
    every table made by T2; where an engine's own table has a log-probability slightly above 0, this order is the definition,
    because it alone keeps the tree closed under parents (T6). Raises TreeError for NaN, +inf, a row that ascends, a bad budget.
    """
    check_budget(budget)
    scores, quantum_exponent = _summable(table)
    ids: list[list[int]] = table.ids.tolist()
    widths = [len(row) for row in scores]
    tokens, parents, depths = [root], [-1], [0]
    sums: list[float] = [0]
    ranks: list[tuple[int, ...]] = [()]
    # (-score, rank path, parent, -score of the parent); rank paths are unique, so that the order is total
    heap: list[tuple[float, tuple[int, ...], int, float]] = []
    if widths and widths[0]:
        heap.append((-scores[0][0], (0,), 0, 0))
    number = 0
    while heap and number < budget:
        negative, path, parent, negative_parent = heap[0]
        number += 1
        depth = len(path)
        rank = path[-1]
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        sums.append(0 - negative)  # not -negative: a score of zero is 0.0, never -0.0
        ranks.append(path)
        rank += 1
        if rank < widths[depth - 1]:
            heapq.heapreplace(heap, (negative_parent - scores[depth - 1][rank], (*path[:-1], rank), parent, negative_parent))
        else:
            heapq.heappop(heap)
        if depth < len(widths) and widths[depth]:
            heapq.heappush(heap, (negative - scores[depth][0], (*path, 0), number, negative))
    if quantum_exponent:
        unit = 2**quantum_exponent
        sums = [total / unit for total in sums]  # int / int rounds once, to nearest
    return Tree(
        tokens=np.array(tokens, np.int32),
        parents=np.array(parents, np.int32),
        depths=np.array(depths, np.int32),
        ranks=tuple(ranks),
        scores=np.array(sums, np.float64),
        budget=budget,
        exact_in_double=not quantum_exponent,
    )


def root_tree(root: int) -> Tree:
    """The tree of budget 0: plain autoregressive decoding (T5)."""
    return Tree(np.array([root], np.int32), np.array([-1], np.int32), np.zeros(1, np.int32), ((),), np.zeros(1), 0, True)


def _summable(table: DraftTable) -> tuple[list[list[float]], int]:
    """Rows of finite log_probs, as doubles (exponent 0), or as integers in units of 2**-exponent where a double sum may round.

    Doubles are exact when every entry is a multiple of one power of two q and no sum reaches 2**53 q. An fp32 lp is a
    difference of two fp32 numbers of size 10..40, a multiple of about 2**-20, so that LM-like tables pass.
    Raises TreeError for NaN, +inf or a row that ascends.
    """
    values = table.log_probs.astype(np.float64)  # (L,K)
    if values.ndim != 2 or table.ids.shape != values.shape:
        raise TreeError("T4", f"ids {list(table.ids.shape)} and log_probs {list(values.shape)} must have one shape [depth, rank]")
    rows: list[list[float]] = values.tolist()
    bound = 0.0
    for depth, row in enumerate(rows):
        while row and row[-1] == -math.inf:  # T8: -inf candidates are no nodes; they are a tail, or the row ascends
            row.pop()
        if not all(later <= earlier for earlier, later in itertools.pairwise(row)) or (row and not row[0] < math.inf):
            raise _table_error(table, depth)
        if row:
            bound += max(abs(row[0]), abs(row[-1]))
    if bound == 0.0:
        return rows, 0
    exponent = 53 - math.frexp(bound)[1]
    scaled = np.ldexp(values, exponent)
    if bool((scaled == np.rint(scaled)).all()):  # holds for -inf as well
        return rows, 0
    unit = 2**_QUANTUM_EXPONENT
    return [[_integer(value, unit) for value in row] for row in rows], _QUANTUM_EXPONENT


def _integer(value: float, unit: int) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * (unit // denominator)


def _table_error(table: DraftTable, depth: int) -> TreeError:
    for rank, value in enumerate(table.log_probs[depth].tolist()):
        if math.isnan(value) or value == math.inf:
            return TreeError("T8", f"log_probs[{depth}, {rank}] is {value}, but must be finite or -inf")
    return TreeError("T4", f"log_probs[{depth}] ascends, but ranks follow descending log-probabilities")


# Structure, positions, visibility


def check_structure(parents: Sequence[int] | Int, tokens: Sequence[int] | Int | None = None) -> list[int]:
    """The depth of each node of one tree. Raises TreeError (T6) unless node 0 is the only root, 0 <= parent(i) < i for the
    others, and, where `tokens` are given, no token occurs twice under one parent."""
    walk = _plain(parents)
    if not walk or walk[0] != -1:
        raise TreeError("T6", f"parents[0] is {walk[0] if walk else 'missing'}, but node 0 is the root: -1")
    depths = [0] * len(walk)
    for node in range(1, len(walk)):
        parent = walk[node]
        if not 0 <= parent < node:
            raise TreeError("T6", f"parents[{node}] is {parent}, but must be between 0 and {node - 1}")
        depths[node] = depths[parent] + 1
    if tokens is not None:
        if len(tokens) != len(walk):
            raise TreeError("T6", f"there are {len(tokens)} tokens, but {len(walk)} parents")
        seen: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(walk, _plain(tokens), strict=True)):
            if key in seen:
                raise TreeError("T6", f"nodes {seen[key]} and {node} are both token {key[1]} under parent {key[0]}")
            seen[key] = node
    return depths


def positions(depths: Sequence[int] | Int, prefix_len: int) -> Int:
    """P + depth (C2). The cache slot of node i is P + i: another number as soon as the tree branches."""
    return np.asarray(depths, np.int32) + np.int32(prefix_len)


def visibility(parents: Sequence[int] | Int, prefix_len: int, *, window: int | None = None) -> Bool:
    """bool [M, P + M]: row i sees the prefix and its ancestors-or-self, nothing else (C3).

    `window` W adds pos(i) - pos(key) < W, on positions: the slot for the prefix, P + depth for tree keys. Raises TreeError
    as `check_structure` does.
    """
    depths = check_structure(parents)
    walk = _plain(parents)
    rows = len(walk)
    seen = np.zeros((rows, prefix_len + rows), np.bool_)  # (M,P+M)
    seen[:, :prefix_len] = True
    seen[0, prefix_len] = True
    for node in range(1, rows):
        seen[node] = seen[walk[node]]
        seen[node, prefix_len + node] = True
    if window is not None:
        if window < 1:
            raise TreeError("C3", f"window is {window}, but a row sees at least itself: give at least 1")
        of_rows = positions(depths, prefix_len)  # (M,)
        of_keys = np.concatenate([np.arange(prefix_len, dtype=np.int32), of_rows])  # (P+M,)
        seen &= of_rows[:, None] - of_keys[None, :] < window
    return seen


# Acceptance and commit


def accept_greedy(tokens: Sequence[int] | Int, parents: Sequence[int] | Int, target_ids: Sequence[int] | Int) -> Acceptance:
    """Walk from the root to the child that is the target's choice, until there is none; that choice is the bonus (A1, A3).

    target_ids[i] is the argmax of row i, lowest id among equal maxima; it decides among the children of i (V1).
    Raises TreeError (T6) for a malformed tree, or when the three lengths differ.
    """
    check_structure(parents, tokens)
    ids, walk, target = _plain(tokens), _plain(parents), _plain(target_ids)
    if len(target) != len(ids):
        raise TreeError("V1", f"there are {len(target)} target ids, but {len(ids)} nodes: one row decides for each")
    path = [0]
    wanted = target[0]
    for node in range(1, len(ids)):  # children come after their parent, so that one pass is the whole walk
        if walk[node] == path[-1] and ids[node] == wanted:
            path.append(node)
            wanted = target[node]
    return Acceptance(tuple(path), wanted)


def check_path(path: Sequence[int] | Int, pending: int) -> None:
    """K1: indices of pending rows, strictly increasing. Raises TreeError."""
    previous = -1
    for index in _plain(path):
        if not previous < index < pending:
            raise TreeError("K1", f"path holds {index} after {previous}, but must ascend strictly below {pending}")
        previous = index


def compact(rows: NDArray[np.generic], prefix_len: int, path: Sequence[int] | Int) -> NDArray[np.generic]:
    """New rows [P + len(path), ...] of a cache [P + M, ...]: dst(P + j) = src(P + path[j]) (K1), length P + len(path) (K2),
    nothing below P changes (K7). Everything is read before anything is written. Raises TreeError (K1) for a bad path."""
    if not 0 <= prefix_len <= len(rows):
        raise TreeError("K1", f"prefix_len is {prefix_len}, but the cache holds {len(rows)} rows")
    check_path(path, len(rows) - prefix_len)
    kept = np.asarray(path, np.int64) + prefix_len
    return np.concatenate([rows[:prefix_len], rows[kept]])


def cut(tokens: Iterable[int], stop_tokens: Sequence[int], max_new: int) -> tuple[int, ...]:
    """The emitted stream: up to the first stop token, which is kept, and at most max_new tokens (A4, L3)."""
    out: list[int] = []
    for token in tokens:
        if len(out) >= max_new:
            break
        out.append(token)
        if token in stop_tokens:
            break
    return tuple(out)


def _plain(values: Sequence[int] | Int) -> list[int]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
