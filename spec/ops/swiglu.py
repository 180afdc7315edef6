"""Gated activation."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.arithmetic import swiglu
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, N = elements; one operation, one rounding."""
    return {"out": swiglu(inputs["gate"], inputs["up"])}


RECORD = Op(
    name="swiglu",
    summary="out = gate * sigmoid(gate) * up",
    rules=("M7", "N1"),
    dims={"T": "rows", "N": "elements of a row"},
    inputs=(Tensor("gate", ("T", "N")), Tensor("up", ("T", "N"))),
    params={},
    outputs=(Tensor("out", ("T", "N")),),
    function=golden,
)
