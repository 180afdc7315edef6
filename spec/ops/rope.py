"""Rotation of pairs by given tables; the output keeps the layout of the input."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.arithmetic import rope
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, H = heads, D = 2 * half. The tables are inputs: their bits are given (spec/rotary.py)."""
    return {"out": rope(inputs["x"], inputs["cos"][:, None], inputs["sin"][:, None], bool(params["half_layout"]))}


RECORD = Op(
    name="rope",
    summary="a' = a cos - b sin, b' = b cos + a sin per pair, (2i, 2i+1) or with half_layout (i, i + half)",
    rules=("M6", "N1"),
    dims={"T": "rows", "H": "heads", "half": "pairs, D = 2 * half"},
    inputs=(Tensor("x", ("T", "H", "2*half")), Tensor("cos", ("T", "half")), Tensor("sin", ("T", "half"))),
    params={"half_layout": "int"},
    outputs=(Tensor("out", ("T", "H", "2*half")),),
    function=golden,
)
