"""Attention output of each head, moved out of the latent space."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.products import per_head
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, H = heads, R = kv_rank, v = v_dim."""
    return {"out": per_head(inputs["o_latent"], inputs["w_vc"])}


RECORD = Op(
    name="o_heads",
    summary="out[t, h] = o_latent[t, h] @ w_vc[h]",
    rules=("M4", "N1"),
    dims={"T": "rows", "H": "heads", "R": "kv_rank", "v": "v_dim"},
    inputs=(Tensor("o_latent", ("T", "H", "R")), Tensor("w_vc", ("H", "R", "v"))),
    params={},
    outputs=(Tensor("out", ("T", "H", "v")),),
    function=golden,
)
