"""Matrix product, weights row-major [in, out]."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.arithmetic import matmul
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, K = contracted, N = out."""
    return {"out": matmul(inputs["x"], inputs["w"])}


RECORD = Op(
    name="matmul",
    summary="out = x @ w",
    rules=("M3", "N1"),
    dims={"T": "rows", "K": "contracted", "N": "out"},
    inputs=(Tensor("x", ("T", "K")), Tensor("w", ("K", "N"))),
    params={},
    outputs=(Tensor("out", ("T", "N")),),
    function=golden,
)
