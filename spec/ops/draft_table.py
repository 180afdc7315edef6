"""Draft logits -> the K best candidates of each depth, with their float32 log-probabilities."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from spec.record import Arrays, Op, Params, Tensor
from spec.tree import draft_table


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """L = depths, V = vocabulary, K = min(budget, V). Raises TreeError for NaN or +inf (T8) and for a budget out of range (T5)."""
    table = draft_table(inputs["logits"], int(params["budget"]))
    return {"ids": table.ids, "log_probs": table.log_probs}


RECORD = Op(
    name="draft_table",
    summary="candidates by (logit descending, id ascending); lp = RN32(logit - RN32(logsumexp))",
    rules=("T1", "T2", "T4", "T8"),
    dims={"L": "depths", "V": "vocabulary", "K": "candidates per depth, min(budget, V)"},
    inputs=(Tensor("logits", ("L", "V")),),
    params={"budget": "int"},
    outputs=(Tensor("ids", ("L", "K"), "int32"), Tensor("log_probs", ("L", "K"))),
    function=golden,
)
