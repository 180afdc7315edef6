"""Rows of the embedding table by token id: a gather, no scaling."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """Raises IndexError for an id outside 0..V-1; a negative id is not counted from the end."""
    ids = inputs["ids"]
    table = inputs["table"]
    if ids.size and (ids.min() < 0 or ids.max() >= len(table)):
        raise IndexError(f"ids lie between {ids.min()} and {ids.max()}, but the table has rows 0 to {len(table) - 1}")
    return {"out": table[ids]}


RECORD = Op(
    name="embed",
    summary="out[t] = table[ids[t]]",
    rules=("M1", "N4"),
    dims={"V": "vocabulary", "N": "hidden", "T": "rows"},
    inputs=(Tensor("table", ("V", "N")), Tensor("ids", ("T",), "int32")),
    params={},
    outputs=(Tensor("out", ("T", "N")),),
    function=golden,
)
