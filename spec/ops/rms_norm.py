"""RMSNorm over the last axis, eps inside the root."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.arithmetic import rms_norm
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, N = elements. eps as float32; a zero row with eps 0 is NaN."""
    return {"out": rms_norm(inputs["x"], inputs["gain"], float(params["eps"]))}


RECORD = Op(
    name="rms_norm",
    summary="out = gain * x / sqrt(mean(x^2) + eps)",
    rules=("M2", "N1"),
    dims={"T": "rows", "N": "elements of a row"},
    inputs=(Tensor("x", ("T", "N")), Tensor("gain", ("N",))),
    params={"eps": "float"},
    outputs=(Tensor("out", ("T", "N")),),
    function=golden,
)
