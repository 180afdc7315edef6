"""Attention weights over the visible keys."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.arithmetic import softmax
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, H = heads, S = keys. Any nonzero byte is visible; what stands in invisible columns, NaN included, does not matter."""
    return {"out": softmax(inputs["scores"], inputs["visible"][:, None] != 0)}


RECORD = Op(
    name="softmax",
    summary="out = exp(s - max) / sum over visible s; invisible keys 0, a row that sees nothing all 0",
    rules=("M5", "C3", "N1"),
    dims={"T": "rows", "H": "heads", "S": "keys"},
    inputs=(Tensor("scores", ("T", "H", "S")), Tensor("visible", ("T", "S"), "uint8")),
    params={},
    outputs=(Tensor("out", ("T", "H", "S")),),
    function=golden,
)
