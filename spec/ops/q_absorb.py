"""The nope part of each query, moved into the latent space."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.products import per_head
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, H = heads, n = nope_dim, R = kv_rank."""
    return {"out": per_head(inputs["q_nope"], inputs["w_kc"])}


RECORD = Op(
    name="q_absorb",
    summary="out[t, h] = q_nope[t, h] @ w_kc[h]",
    rules=("M4", "N1"),
    dims={"T": "rows", "H": "heads", "n": "nope_dim", "R": "kv_rank"},
    inputs=(Tensor("q_nope", ("T", "H", "n")), Tensor("w_kc", ("H", "n", "R"))),
    params={},
    outputs=(Tensor("out", ("T", "H", "R")),),
    function=golden,
)
