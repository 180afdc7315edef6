"""Matrix product with int4 weights in groups of 32: the routed experts of Kimi-K2.5, in the layout of a kernel."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.arithmetic import matmul
from spec.formats import dequantised_int4
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, G = groups of 32 contracted weights, N = out. Raises FormatError (a ValueError) for a scale that is no 16-bit number."""
    return {"out": matmul(inputs["x"], dequantised_int4(inputs["packed"], inputs["scales"]))}


RECORD = Op(
    name="int4_matmul",
    summary="out = x @ w, w[k, n] = q[k, n] * scales[k / 32, n]; q of -8..7, eight in a word of packed, the lowest nibble first",
    rules=("M3", "M11", "N1"),
    dims={"T": "rows", "G": "groups of 32 contracted weights", "N": "out"},
    inputs=(Tensor("x", ("T", "G*32")), Tensor("packed", ("G*4", "N"), "int32"), Tensor("scales", ("G", "N"))),
    params={},
    outputs=(Tensor("out", ("T", "N")),),
    function=golden,
)
