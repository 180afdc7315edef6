"""Scores of the experts."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.record import Arrays, Op, Params, Tensor
from spec.routing import router_scores


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, E = experts."""
    return {"out": router_scores(inputs["logits"], bool(params["softmax"]))}


RECORD = Op(
    name="router_scores",
    summary="sigmoid of each logit, or softmax over all experts",
    rules=("M8", "N1"),
    dims={"T": "rows", "E": "experts"},
    inputs=(Tensor("logits", ("T", "E")),),
    params={"softmax": "int"},
    outputs=(Tensor("out", ("T", "E")),),
    function=golden,
)
