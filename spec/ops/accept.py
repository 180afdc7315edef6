"""Greedy acceptance: walk from the root along the target's choices; the first one without a child is the bonus."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.record import Arrays, Op, Params, Tensor
from spec.tree import accept_greedy

PADDING = -1  # of `path` past its length


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """M = rows of the tree with its root. Raises TreeError for a malformed tree (T6)."""
    accepted = accept_greedy(inputs["tokens"], inputs["parents"], inputs["target"])
    path = np.full(len(inputs["tokens"]), PADDING, np.int32)
    path[: len(accepted.path)] = accepted.path
    return {"path": path, "length": np.array([len(accepted.path)], np.int32), "bonus": np.array([accepted.bonus], np.int32)}


RECORD = Op(
    name="accept",
    summary="path of accepted nodes, 0 first, padded with -1; bonus = target of the last accepted node",
    rules=("V1", "A1", "A3", "T6"),
    dims={"M": "tree rows with the root"},
    inputs=(Tensor("tokens", ("M",), "int32"), Tensor("parents", ("M",), "int32"), Tensor("target", ("M",), "int32")),
    params={},
    outputs=(Tensor("path", ("M",), "int32"), Tensor("length", ("1",), "int32"), Tensor("bonus", ("1",), "int32")),
    function=golden,
)
