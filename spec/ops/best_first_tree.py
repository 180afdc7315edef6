"""Draft table -> the first `budget` rank paths in best-first order, as a padded tree."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.record import Arrays, Op, Params, Tensor
from spec.tree import DraftTable, best_first_tree

PADDING = -1  # of entries past node N: a fixed-width buffer must not look like nodes (T5, C4)


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """L = depths, K = candidates per depth, B = budget. Raises TreeError for a table outside T8, or a budget out of range."""
    budget = int(params["budget"])
    tree = best_first_tree(DraftTable(inputs["ids"], inputs["log_probs"]), int(params["root"]), budget)
    padded = {"tokens": tree.tokens, "parents": tree.parents, "depths": tree.depths}
    outputs: dict[str, NDArray[Any]] = {}
    for name, values in padded.items():
        outputs[name] = np.full(budget + 1, PADDING, np.int32)
        outputs[name][: len(values)] = values
    outputs["count"] = np.array([tree.count], np.int32)
    return outputs


RECORD = Op(
    name="best_first_tree",
    summary="nodes in pop order by (exact path score descending, rank path ascending), the root at index 0",
    rules=("T2", "T3", "T5", "T6", "T7", "T8"),
    dims={"L": "depths", "K": "candidates per depth", "budget": "nodes without the root"},
    inputs=(Tensor("ids", ("L", "K"), "int32"), Tensor("log_probs", ("L", "K"))),
    params={"budget": "int", "root": "int"},
    outputs=(
        Tensor("tokens", ("budget+1",), "int32"),
        Tensor("parents", ("budget+1",), "int32"),
        Tensor("depths", ("budget+1",), "int32"),
        Tensor("count", ("1",), "int32"),
    ),
    function=golden,
)
