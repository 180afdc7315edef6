"""Attention output in the latent space."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.model import attention_values
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, H = heads, S = keys, R = kv_rank."""
    return {"out": attention_values(inputs["probs"], inputs["latent"])}


RECORD = Op(
    name="o_latent",
    summary="out[t, h] = sum_s probs[t, h, s] * latent[s]",
    rules=("M5", "N1"),
    dims={"T": "rows", "H": "heads", "S": "keys", "R": "kv_rank"},
    inputs=(Tensor("probs", ("T", "H", "S")), Tensor("latent", ("S", "R"))),
    params={},
    outputs=(Tensor("out", ("T", "H", "R")),),
    function=golden,
)
