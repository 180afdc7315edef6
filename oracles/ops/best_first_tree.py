"""The draft tree on the engine's own table (T2, T3, T5, T6): exact, order and ties included.

Only a profile that declares float32 score sums gets a band: nodes may then trade places where their exact scores differ by less than
what rounding the sums in float32 can move them.
"""

from __future__ import annotations

import math

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
    """A tree of other nodes or another order: accepted iff some float32 sums within their rounding give exactly this order."""
    tokens, parents = (outputs[name][: tree.count + 1] for name in ("tokens", "parents"))
    radius = np.zeros(inputs["log_probs"].shape)
    decided = tree_problem(tokens, parents, inputs["ids"], inputs["log_probs"], radius, True)
    depths: NDArray[np.int32] = np.full(len(outputs["depths"]), PADDING, np.int32)
    if not decided.problem:
        depths[: len(tokens)] = check_structure(parents)
    count = np.array([tree.count], np.int32)
    tail: NDArray[np.int32] = np.full(len(outputs["tokens"]), PADDING, np.int32)
    for name in ("tokens", "parents"):
        tail[: tree.count + 1] = outputs[name][: tree.count + 1]
        if not np.array_equal(tail, outputs[name]):
            return {
                "tokens": decided,
                "parents": decided,
                name: Equal(tail, "C4"),
                "depths": Equal(depths, "T6"),
                "count": Equal(count, "T5"),
            }
    return {"tokens": decided, "parents": decided, "depths": Equal(depths, "T6"), "count": Equal(count, "T5")}


def tree_problem(
    tokens: NDArray[np.int32], parents: NDArray[np.int32], ids: NDArray[np.int32], log_probs: NDArray[np.float32], radius: NDArray[np.float64],
    float32_scores: bool,
) -> Decided:  # fmt: skip
    """Whether some table within `radius` of `log_probs` [L, K], summed exactly (or in float32), gives exactly this tree.

    A path of d terms has a score within sum(radius), and gamma(d - 1) sum|lp| more for float32 sums. Popping node i is right if no
    node that was waiting then had a score above its own by more than both errors together.
    """
    try:
        walked = check_structure(parents, tokens)
    except TreeError as broken:
        return Decided(f"{broken.message} ({broken.rule})", broken.rule)
    table = log_probs.astype(np.float64)
    ranks: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        depth = walked[node]
        at = np.flatnonzero(ids[depth - 1] == tokens[node]) if depth <= len(ids) else np.zeros(0, np.int64)
        if not len(at) or table[depth - 1, at[0]] == -np.inf:
            text = f"tokens[{node}] is {int(tokens[node])}, but that is no candidate at depth {depth} (T4)"
            return Decided(text, "T4", (node,), float(tokens[node]))
        ranks.append((*ranks[int(parents[node])], int(at[0])))
    return _worst_pop(ranks, table, radius, float32_scores and not exact_in_float32(table))


def exact_in_float32(table: NDArray[np.float64]) -> bool:
    """Whether no sum of one entry per depth can round in float32, whatever the order: all are multiples of one power of two q, and below
    2^24 q. Then ties are exact, and their rule holds under float32 sums as well."""
    finite = np.where(np.isfinite(table), table, 0.0)
    bound = float(np.abs(finite).max(1, initial=0.0).sum())
    scaled = np.ldexp(finite, 24 - math.frexp(bound)[1])
    return bool((scaled == np.rint(scaled)).all())


def _worst_pop(
    ranks: list[tuple[int, ...]], table: NDArray[np.float64], radius: NDArray[np.float64], float32_scores: bool
) -> Decided:  # fmt: skip
    """The largest (score of a waiting node - score of the popped one) / band over all pops."""
    depth_max, width = table.shape

    def score(path: tuple[int, ...]) -> tuple[float, float]:
        terms = [float(table[level, rank]) for level, rank in enumerate(path)]
        error = sum(float(radius[level, rank]) for level, rank in enumerate(path))
        roundings = max(0, len(path) - 1) if float32_scores else 0
        error += roundings * UNIT_FLOAT32 / (1 - roundings * UNIT_FLOAT32) * (sum(map(abs, terms)) + error)
        return sum(terms), error * INFLATE

    waiting: set[tuple[int, ...]] = {(0,)} if depth_max and width and table[0, 0] > -np.inf else set()
    share, worst = 0.0, Decided("", "T3")
    for node, path in enumerate(ranks[1:], 1):
        if path not in waiting:
            return Decided(f"node {node} comes before its parent or its better sibling (T3)", "T3", (node,))
        own, own_error = score(path)
        for other in waiting:
            rival, rival_error = score(other)
            over, band = rival - own, max(own_error + rival_error, 1e-300)
            if over == 0 and other < path and band == 1e-300:
                return Decided(
                    f"node {node} ties with a node of a smaller rank path that was still waiting (T3)", "T3", (node,), own, rival
                )
            if over > share * band:
                share = over / band
                text = "" if share <= 1 else f"node {node} has score {own:.9g}, but a node of score {rival:.9g} was still waiting (T3)"
                worst = Decided(text, "T3", (node,), own, rival, band, min(share, 1.0))
        waiting.remove(path)
        if path[-1] + 1 < width and table[len(path) - 1, path[-1] + 1] > -np.inf:
            waiting.add((*path[:-1], path[-1] + 1))
        if len(path) < depth_max and table[len(path), 0] > -np.inf:
            waiting.add((*path, 0))
    return worst
