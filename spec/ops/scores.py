"""Attention scores against the latent cache, every key, visible or not."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.model import attention_scores
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, H = heads, C = width of a cache row, S = keys. The scale, as float32, is part of the one operation."""
    return {"out": attention_scores(inputs["q"], inputs["keys"].T, float(params["scale"]))}


RECORD = Op(
    name="scores",
    summary="out[t, h, s] = scale * q[t, h] . keys[s]",
    rules=("M5", "N1"),
    dims={"T": "rows", "H": "heads", "C": "kv_rank + rope_dim", "S": "keys"},
    inputs=(Tensor("q", ("T", "H", "C")), Tensor("keys", ("S", "C"))),
    params={"scale": "float"},
    outputs=(Tensor("out", ("T", "H", "S")),),
    function=golden,
)
