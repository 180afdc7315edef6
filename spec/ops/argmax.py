"""The greedy token of each row."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.model import argmax
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, V = vocabulary. A row with a NaN gives the index of the first NaN."""
    return {"ids": argmax(inputs["logits"])}


RECORD = Op(
    name="argmax",
    summary="the lowest index among equal maxima",
    rules=("A1", "N3", "N5"),
    dims={"T": "rows", "V": "vocabulary"},
    inputs=(Tensor("logits", ("T", "V")),),
    params={},
    outputs=(Tensor("ids", ("T",), "int32"),),
    function=golden,
)
