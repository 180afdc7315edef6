"""Compaction: out[P + j] = cache[P + path[j]], out[:P] = cache[:P], bit for bit (K1, K7)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.ball import Arithmetic
from oracles.compare import Equal, Expected
from oracles.ops.record import Arrays, Params
from oracles.ops.tree_mask import refused
from spec.tree import TreeError, check_path


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    cache, path, prefix_len = inputs["cache"], inputs["path"], int(params["prefix_len"])
    try:
        check_path(path, len(cache) - prefix_len)
    except TreeError as refusal:
        return {"out": refused(refusal)}
    rows = cache[np.concatenate([np.arange(prefix_len), np.asarray(path, np.int64) + prefix_len])]
    rule = "K7" if prefix_changed(outputs["out"], rows, prefix_len) else "K1"
    return {"out": Equal(rows, rule, bits=True)}


def prefix_changed(found: NDArray[Any], rows: NDArray[Any], prefix_len: int) -> bool:
    """Whether a row below P differs: another rule than a row that moved to the wrong place."""
    below, kept = (np.ascontiguousarray(part[:prefix_len]).view(np.uint32) for part in (found, rows))
    return bool((below != kept).any())
