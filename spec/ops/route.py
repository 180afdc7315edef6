"""The experts of each row, and their weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import top_k_weights
from spec.record import Arrays, Op, Params, Tensor
from spec.routing import choose


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, E = experts. Ids in descending order of choice."""
    scores = inputs["scores"]
    given = {**DEFAULTS, **params}
    ids = choose(
        scores, inputs["bias"], int(given["top_k"]), int(given["groups"]), int(given["top_groups"]), bool(given["group_score_max"]),
        0.0 if given["group_fill_zero"] else -np.inf,
    )  # fmt: skip
    chosen = np.take_along_axis(scores, ids, axis=1)
    weights = top_k_weights(
        chosen, float(given["routed_scale"]), bool(given["norm_top_k"]), float(given["denominator_eps"]), float(given["denominator_clamp"])
    )
    return {"ids": ids, "weights": weights}


DEFAULTS: Params = {"group_fill_zero": 0, "denominator_clamp": 0.0}

RECORD = Op(
    name="route",
    summary="top_k of RN32(score + bias) within the best groups, the lower index among equals; weights from scores alone",
    rules=("M8", "N3", "N5"),
    dims={"T": "rows", "E": "experts", "top_k": "chosen experts"},
    inputs=(Tensor("scores", ("T", "E")), Tensor("bias", ("E",))),
    params={
        "top_k": "int",
        "groups": "int",
        "top_groups": "int",
        "group_score_max": "int",
        "norm_top_k": "int",
        "routed_scale": "float",
        "denominator_eps": "float",
        "group_fill_zero": "int",
        "denominator_clamp": "float",
    },
    defaults=DEFAULTS,
    outputs=(Tensor("ids", ("T", "top_k"), "int32"), Tensor("weights", ("T", "top_k"))),
    function=golden,
)
