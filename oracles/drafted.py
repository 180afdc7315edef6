"""What a black box cannot hide: the drafter is ours, so we see after which history each round begins, and with that how much the round before accepted.

No account of the engine's rounds is needed. The histories must be the engine's own stream, and a round must accept what the spec's tree of its draft
logits accepts along that stream; only nodes whose place in the tree hangs on rounding of the log-probabilities are left open.
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
        table = draft_table(logits, budget)
        tree = best_first_tree(table, history[-1], budget + 1)
    except TreeError:
        return ""
    inside, radius = min(budget, tree.count), _radius(logits, table.ids, a)
    scores = _scores(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), table.ids, table.log_probs)
    slack = 2 * radius + 4 * len(table.ids) * UNIT_FLOAT32 * max((abs(s) for s in scores if np.isfinite(s)), default=0.0)
    node = 0
    for place, token in enumerate(emitted):
        child = next((n for n in range(1, tree.count + 1) if tree.parents[n] == node and tree.tokens[n] == token), 0)
        if place == len(emitted) - 1:
            certain = 0 < child <= inside and (tree.count <= budget or scores[child] - scores[tree.count] > slack)
            return f"it stopped before token {token} at {len(history) + place}, which is a node of its tree" if certain else ""
        if not 0 < child <= inside:
            score = _extended(scores[node], int(tree.depths[node]), token, table.ids, table.log_probs)
            certain = bool(inside) and scores[inside] - score > slack
            return f"it accepted token {token} at {len(history) + place}, which is no node of its tree" if certain else ""
        node = child
    return ""


def _radius(logits: Float, ids: np.ndarray[Any, Any], a: Arithmetic) -> float:
    """How far the score of any path may be off, if every log-probability is off by its bound."""
    rad = log_softmax(logits, ids, a).rad
    finite = np.zeros(1) if rad is None else np.where(np.isfinite(rad), rad, 0.0)
    return float(finite.max(-1).sum()) if rad is not None else 0.0


def _scores(tokens: Sequence[int], parents: Sequence[int], depths: Sequence[int], ids: Any, log_probs: Any) -> list[float]:
    out = [0.0]
    for node in range(1, len(tokens)):
        out.append(_extended(out[parents[node]], depths[node] - 1, tokens[node], ids, log_probs))
    return out


def _extended(score: float, depth: int, token: int, ids: Any, log_probs: Any) -> float:
    """The score of a child with this token; -inf where the table does not hold it."""
    if depth >= len(ids):
        return -np.inf
    rank = np.flatnonzero(ids[depth] == token)
    return score + float(log_probs[depth, rank[0]]) if len(rank) else -np.inf
