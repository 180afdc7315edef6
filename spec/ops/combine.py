"""Weighted sum of the experts and the shared expert, as one operation."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.arithmetic import combine
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, K = experts per row, N = hidden."""
    return {"out": combine(inputs["weights"], inputs["experts"], inputs["shared"])}


RECORD = Op(
    name="combine",
    summary="out = sum_k weights[t, k] * experts[t, k] + shared[t]",
    rules=("M7", "N1"),
    dims={"T": "rows", "K": "experts per row", "N": "hidden"},
    inputs=(Tensor("weights", ("T", "K")), Tensor("experts", ("T", "K", "N")), Tensor("shared", ("T", "N"))),
    params={},
    outputs=(Tensor("out", ("T", "N")),),
    function=golden,
)
