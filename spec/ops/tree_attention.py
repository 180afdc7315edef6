"""The fused region scores, softmax, o_latent under any visibility: what a tree attention kernel computes."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.arithmetic import softmax
from spec.model import attention_scores, attention_values
from spec.record import Arrays, Op, Params, Tensor


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, H = heads, S = keys. Rounds after scores and after the weights, as the rounding table says. A key that no row sees is never read."""
    visible, cache = inputs["visible"] != 0, inputs["cache"]
    seen = visible.any(axis=0)  # unseen slots may hold anything, NaN included
    keys = cache[seen]
    scores = attention_scores(inputs["q"], keys.T, float(params["scale"]))  # (T,H,S)
    probs = softmax(scores, visible[:, None, seen])
    return {"out": attention_values(probs, keys[:, : int(params["kv_rank"])])}


RECORD = Op(
    name="tree_attention",
    summary="o_latent of softmax(scale * q . cache) over visible keys; values are the first kv_rank columns",
    rules=("M5", "C3", "V2", "N1"),
    dims={"T": "rows", "H": "heads", "S": "keys", "C": "kv_rank + rope_dim", "kv_rank": "R, width of a latent"},
    inputs=(Tensor("q", ("T", "H", "C")), Tensor("cache", ("S", "C")), Tensor("visible", ("T", "S"), "uint8")),
    params={"kv_rank": "int", "scale": "float"},
    outputs=(Tensor("out", ("T", "H", "kv_rank")),),
    function=golden,
)
