"""Greedy acceptance on the given target ids (A1, V1, A3): exact."""

from __future__ import annotations

import numpy as np

from oracles.ball import Arithmetic
from oracles.compare import Equal, Expected
from oracles.ops.record import Arrays, Params
from oracles.ops.tree_mask import refused
from spec.tree import TreeError, accept_greedy

PADDING = -1  # of `path` past its length


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    try:
        accepted = accept_greedy(inputs["tokens"], inputs["parents"], inputs["target"])
    except TreeError as refusal:
        return dict.fromkeys(("path", "length", "bonus"), refused(refusal))
    path = np.full(len(inputs["tokens"]), PADDING, np.int32)
    path[: len(accepted.path)] = accepted.path
    return {
        "path": Equal(path, "A1"),
        "length": Equal(np.array([len(accepted.path)], np.int32), "A1"),
        "bonus": Equal(np.array([accepted.bonus], np.int32), "A3"),
    }
