"""The draft tree on the engine's own table (T2, T3, T5, T6): exact, order and ties included.

Only a profile that declares float32 score sums gets a band: nodes may then trade places where their exact scores differ by less than
what rounding the sums in float32 can move them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.ball import INFLATE, Arithmetic
from oracles.compare import Decided, Equal, Expected
from oracles.ops.record import Arrays, Params
from oracles.ops.tree_mask import refused
from spec.engine import UNIT_FLOAT32
from spec.tree import DraftTable, Tree, TreeError, best_first_tree, check_structure

PADDING = -1  # of entries past node N


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    budget, root = int(params["budget"]), int(params["root"])
    try:
        tree = best_first_tree(DraftTable(inputs["ids"], inputs["log_probs"]), root, budget)
    except TreeError as refusal:
        return dict.fromkeys(("tokens", "parents", "depths", "count"), refused(refusal))
    expected = {"tokens": tree.tokens, "parents": tree.parents, "depths": tree.depths}
    padded: dict[str, Expected] = {}
    for name, values in expected.items():
        full = np.full(budget + 1, PADDING, np.int32)
        full[: len(values)] = values
        padded[name] = Equal(full, "T3")
    padded["count"] = Equal(np.array([tree.count], np.int32), "T5")
    if a.float32_scores and any(not np.array_equal(outputs[name], padded[name].values) for name in ("tokens", "parents")):  # type: ignore[union-attr]
        return _within_band(inputs, outputs, tree)
    return padded


def _within_band(inputs: Arrays, outputs: Arrays, tree: Tree) -> dict[str, Expected]:
    """A tree of other nodes or another order: accepted iff some float32 sums within their rounding give exactly this order.

    The exact score s of a path of d terms is computed within gamma(d - 1) sum|lp|. Popping node i is right if no candidate on the
    frontier then had a score above s_i by more than both errors together.
    """
    tokens, parents = (outputs[name][: tree.count + 1] for name in ("tokens", "parents"))
    try:
        walked = check_structure(parents, tokens)
    except TreeError as broken:
        wrong = Decided(f"{broken.message} ({broken.rule})", broken.rule)
        return dict.fromkeys(("tokens", "parents", "depths", "count"), wrong)
    ids, log_probs = inputs["ids"], inputs["log_probs"].astype(np.float64)
    ranks: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        depth = walked[node]
        at = np.flatnonzero(ids[depth - 1] == tokens[node]) if depth <= len(ids) else np.zeros(0, np.int64)
        if not len(at) or log_probs[depth - 1, at[0]] == -np.inf:
            text = f"tokens[{node}] is {int(tokens[node])}, but that is no candidate at depth {depth} (T4)"
            return _same(Decided(text, "T4", (node,), float(tokens[node])), outputs, tree, walked)
        ranks.append((*ranks[int(parents[node])], int(at[0])))
    worst = _worst_pop(ranks, log_probs)
    return _same(worst, outputs, tree, walked)


def _worst_pop(ranks: list[tuple[int, ...]], log_probs: NDArray[np.float64]) -> Decided:
    """The largest (best frontier score - popped score) / band over all pops."""
    depth_max, width = log_probs.shape

    def score(path: tuple[int, ...]) -> tuple[float, float]:
        terms = [float(log_probs[level, rank]) for level, rank in enumerate(path)]
        roundings = max(0, len(path) - 1)
        return sum(terms), roundings * UNIT_FLOAT32 / (1 - roundings * UNIT_FLOAT32) * sum(map(abs, terms)) * INFLATE

    frontier: set[tuple[int, ...]] = {(0,)} if depth_max and width else set()
    share, found = 0.0, Decided("", "T3")
    for node, path in enumerate(ranks[1:], 1):
        if path not in frontier:
            return Decided(f"node {node} comes before its parent or its better sibling (T3)", "T3", (node,))
        own, own_error = score(path)
        for other in frontier:
            rival, rival_error = score(other)
            over, band = rival - own, own_error + rival_error
            if over > 0 and over > share * max(band, 1e-300):
                share = over / max(band, 1e-300)
                text = "" if share <= 1 else f"node {node} has score {own:.9g}, but a node of score {rival:.9g} was still waiting (T3)"
                found = Decided(text, "T3", (node,), own, rival, band, min(share, 1.0))
        frontier.remove(path)
        if path[-1] + 1 < width and log_probs[len(path) - 1, path[-1] + 1] > -np.inf:
            frontier.add((*path[:-1], path[-1] + 1))
        if len(path) < depth_max and log_probs[len(path), 0] > -np.inf:
            frontier.add((*path, 0))
    return found


def _same(decided: Decided, outputs: Arrays, tree: Tree, walked: list[int]) -> dict[str, Expected]:
    depths = np.full(len(outputs["depths"]), PADDING, np.int32)
    depths[: len(walked)] = walked
    count: NDArray[Any] = np.array([tree.count], np.int32)
    return {"tokens": decided, "parents": decided, "depths": Equal(depths, "T6"), "count": Equal(count, "T5")}
