"""Parents -> absolute positions and the visibility mask of the verification batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.record import Arrays, Op, Params, Tensor
from spec.tree import check_structure, positions, visibility


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """M = rows of the tree with its root, P = prefix_len. Raises TreeError for parents that do not ascend from one root (T6)."""
    prefix_len = int(params["prefix_len"])
    parents = inputs["parents"]
    return {
        "positions": positions(check_structure(parents), prefix_len),
        "visible": visibility(parents, prefix_len).astype(np.uint8),
    }


RECORD = Op(
    name="tree_mask",
    summary="position = P + depth; a row sees the prefix and its ancestors-or-self (1), nothing else (0)",
    rules=("C2", "C3", "C4", "C5", "T6"),
    dims={"M": "tree rows with the root", "prefix_len": "P, committed tokens"},
    inputs=(Tensor("parents", ("M",), "int32"),),
    params={"prefix_len": "int"},
    outputs=(Tensor("positions", ("M",), "int32"), Tensor("visible", ("M", "prefix_len+M"), "uint8")),
    function=golden,
)
