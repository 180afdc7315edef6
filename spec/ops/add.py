"""Residual addition: one rounding."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.arithmetic import add
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, N = hidden."""
    return {"out": add(inputs["a"], inputs["b"])}


RECORD = Op(
    name="add",
    summary="out = RN32(a + b)",
    rules=("M7", "N4"),
    dims={"T": "rows", "N": "hidden"},
    inputs=(Tensor("a", ("T", "N")), Tensor("b", ("T", "N"))),
    params={},
    outputs=(Tensor("out", ("T", "N")),),
    function=golden,
)
