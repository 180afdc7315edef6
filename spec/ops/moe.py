"""The chosen experts of each row: the region matmul, swiglu, matmul, before the weighted sum."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import matmul, swiglu
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, K = experts per row. Rounds after each product and after swiglu. Raises IndexError for an id outside 0..E-1."""
    x, ids, down = inputs["x"], inputs["ids"], inputs["down"]
    if ids.size and (ids.min() < 0 or ids.max() >= len(down)):
        raise IndexError(f"ids lie between {ids.min()} and {ids.max()}, but there are experts 0 to {len(down) - 1}")
    out = np.empty((*ids.shape, down.shape[-1]), np.float32)  # (T,K,N)
    for expert in np.unique(ids):
        rows, slots = np.nonzero(ids == expert)
        act = swiglu(matmul(x[rows], inputs["gate"][expert]), matmul(x[rows], inputs["up"][expert]))
        out[rows, slots] = matmul(act, down[expert])
    return {"out": out}


RECORD = Op(
    name="moe",
    summary="out[t, k] = (silu(x @ gate[e]) * (x @ up[e])) @ down[e], e = ids[t, k]",
    rules=("M7", "N1"),
    dims={"T": "rows", "N": "hidden", "K": "experts per row", "E": "experts", "F": "expert_dim"},
    inputs=(
        Tensor("x", ("T", "N")),
        Tensor("ids", ("T", "K"), "int32"),
        Tensor("gate", ("E", "N", "F")),
        Tensor("up", ("E", "N", "F")),
        Tensor("down", ("E", "F", "N")),
    ),
    params={},
    outputs=(Tensor("out", ("T", "K", "N")),),
    function=golden,
)
