"""What a black box cannot hide: the drafter is ours, so we see after which history each round begins, and with that how much the round before accepted.

No account of the engine's rounds is needed. The histories must be the engine's own stream, and a round must accept what the spec's tree of its draft
logits accepts along that stream. Left open are only nodes whose place in the order hangs on the rounding of log-probabilities; exact ties are
decided by the rank path (T3) wherever every engine computes the same terms.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from oracles.ball import Arithmetic
from oracles.judgement import Judgement, Verdict
from oracles.ops.draft_table import log_softmax
from spec.engine import UNIT_FLOAT32, Drafter, Float
from spec.script import Generate
from spec.tree import TreeError, best_first_tree, draft_table

History = tuple[int, ...]
RankPath = tuple[int, ...]
UNIT_DOUBLE = 2.0**-53
BEYOND = 16  # nodes behind the budget that are looked at first
FACTOR, FACTOR_MAX = 4, 64  # then more, where they may still come before


def judge_drafted(
    step: Generate, streams: Sequence[Sequence[int]], drafted: Sequence[tuple[int, History]], place: dict[str, Any], a: Arithmetic
) -> Judgement | None:
    """The first fault in order of sequences and rounds; None where nothing contradicts the stream."""
    assert step.drafter is not None
    for sequence, (prompt, tokens) in enumerate(zip(step.prompts, streams, strict=True)):
        whole = (*prompt.tolist(), *tokens)
        met: list[History] = []
        for of, history in drafted:
            if of == sequence and len(history) > len(prompt) and (not met or len(history) > len(met[-1])):
                met.append(history)
        for number, history in enumerate(met):
            shared = min(len(history), len(whole))
            if history[:shared] != whole[:shared]:
                at = next(i for i in range(shared) if history[i] != whole[i])
                text = f"sequence {sequence}, round {number}: the drafter was given token {history[at]} at {at}, but the stream has {whole[at]} (D3)"
                return Judgement(Verdict.DEFECT, "D3", "generate", "drafted", token=number, share=float("inf"), message=text, **place)
        for number, (before, after) in enumerate(itertools.pairwise(met)):
            problem = _round_problem(step.drafter, sequence, before, after[len(before) :], step.budget, a)
            if problem:
                text = f"sequence {sequence}, round {number}: {problem} (A1)"
                return Judgement(
                    Verdict.DEFECT, "A1", "best_first_tree", "drafted", token=number, share=float("inf"), message=text, **place
                )
    return None


def _round_problem(drafter: Drafter, sequence: int, history: History, emitted: History, budget: int, a: Arithmetic) -> str:
    """What is wrong with a round that emitted these tokens, the bonus last; "" where nothing is certain."""
    logits = np.asarray(drafter.draft(sequence, np.array(history, np.int32)), np.float32)
    try:
        edge = Edge(logits, budget, a)
    except TreeError:
        return ""
    path: RankPath = ()
    for place, token in enumerate(emitted):
        rank = edge.rank(place, token)
        node = None if rank is None else (*path, rank)
        if place == len(emitted) - 1:
            stopped_early = node is not None and edge.certainly_inside(node)
            return f"it stopped before token {token} at {len(history) + place}, which is a node of its tree" if stopped_early else ""
        if node is None or edge.certainly_outside(node):
            return f"it accepted token {token} at {len(history) + place}, which is no node of its tree"
        path = node
    return ""


class Edge:
    """Which rank paths are nodes of the tree of `budget` nodes that any engine of this arithmetic builds of these logits [L, V].

    A path q comes before p for certain
    - where its ranks are nowhere larger and it is no longer: log-probabilities of a row descend with the ranks in any rounding, because each is the
      same non-decreasing function of its logit, and a path comes after its beginnings (T6);
    - where both have the same terms, by the rank path (T3): equal logits of a row have equal log-probabilities, and those of a row with one
      finite logit are 0 in every engine, because exp(0) = 1 and log(1) = 0 exactly (C17, F.10.3);
    - else where its score is higher by more than the radii of the log-probabilities in which the two differ.

    A path is inside if fewer than `budget` others may come before it, and outside if `budget` others do. Raises TreeError as `draft_table`.
    """

    def __init__(self, logits: Float, budget: int, a: Arithmetic) -> None:
        self.budget = budget
        self._logits = logits
        self._table = draft_table(logits, budget)
        ids = self._table.ids
        rad = log_softmax(logits, ids, a).rad
        assert rad is not None
        one = np.count_nonzero(logits > -np.inf, axis=1) == 1
        self._one: list[bool] = one.tolist()
        self._rad: list[list[float]] = np.where(one[:, None] | ~np.isfinite(rad), 0.0, rad).tolist()
        self._values: list[list[float]] = np.take_along_axis(logits, ids, 1).tolist()
        self._log_probs: list[list[float]] = self._table.log_probs.astype(np.float64).tolist()
        self._ids: list[list[int]] = ids.tolist()
        self._unit = UNIT_FLOAT32 if a.float32_scores else UNIT_DOUBLE
        self._size = 0
        self._rivals: list[tuple[RankPath, float]] = []
        self._all = False
        self._look(budget + BEYOND)

    def rank(self, depth: int, token: int) -> int | None:
        """Of the token at this depth, counted from 0; None where no path holds it (T1, T4, T8)."""
        if depth >= len(self._ids) or token not in self._ids[depth]:
            return None
        rank = self._ids[depth].index(token)
        return rank if self._log_probs[depth][rank] > -np.inf else None

    def certainly_inside(self, path: RankPath) -> bool:
        score = self._score(path)
        while not self._all and self._rivals and self._rivals[-1][1] >= score - self._reach(path, score):
            if self._size >= FACTOR_MAX * (self.budget + BEYOND):
                return False
            self._look(FACTOR * self._size)
        before = sum(rival != path and not self._precedes(path, score, rival, other) for rival, other in self._rivals)
        return before < self.budget

    def certainly_outside(self, path: RankPath) -> bool:
        score = self._score(path)
        return sum(rival != path and self._precedes(rival, other, path, score) for rival, other in self._rivals) >= self.budget

    def _look(self, size: int) -> None:
        tree = best_first_tree(self._table, 0, size)
        self._size, self._all = size, tree.count < size
        self._rivals = list(zip(tree.ranks[1:], tree.scores[1:].tolist(), strict=True))

    def _score(self, path: RankPath) -> float:
        return sum(self._log_probs[depth][rank] for depth, rank in enumerate(path))

    def _reach(self, path: RankPath, score: float) -> float:
        """No path whose score is lower by more than this may come before `path`."""
        own = sum(self._rad[depth][rank] for depth, rank in enumerate(path))
        return own + sum(max(row) for row in self._rad) + 4 * len(self._rad) * self._unit * abs(score)

    def _precedes(self, first: RankPath, score: float, second: RankPath, other: float) -> bool:
        """Whether `first` comes before `second` in every engine."""
        if len(first) <= len(second) and all(mine <= its for mine, its in zip(first, second, strict=False)):
            return True
        slack, equal = 0.0, True
        for depth in range(max(len(first), len(second))):
            ranks = [path[depth] for path in (first, second) if depth < len(path)]
            values = {self._values[depth][rank] for rank in ranks}
            if len(ranks) == 2 and len(values) == 1:
                continue
            equal = equal and len(ranks) == 1 and self._one[depth]
            slack += sum(self._rad[depth][rank] for rank in ranks)
        if equal:
            return first < second
        return score - other > slack + 2 * max(len(first), len(second)) * self._unit * (abs(score) + abs(other))
