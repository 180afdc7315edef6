"""Commit: the cache rows of the accepted path move to the end of the prefix, the others are dropped."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.record import Arrays, Op, Params, Tensor
from spec.tree import compact


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """S = rows of the cache with the pending ones, C = width, J = rows kept. Raises TreeError for a path that does not ascend (K1)."""
    return {"out": compact(inputs["cache"], int(params["prefix_len"]), inputs["path"])}


RECORD = Op(
    name="compact",
    summary="out[P + j] = cache[P + path[j]], out[:P] = cache[:P]",
    rules=("K1", "K2", "K3", "K4", "K7"),
    dims={"S": "cache rows, pending ones included", "C": "width of a cache row", "J": "rows kept", "prefix_len": "P, committed tokens"},
    inputs=(Tensor("cache", ("S", "C")), Tensor("path", ("J",), "int32")),
    params={"prefix_len": "int"},
    outputs=(Tensor("out", ("prefix_len+J", "C")),),
    function=golden,
)
