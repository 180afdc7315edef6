"""Embedding rows are copies (M1): bit for bit, but for one rounding where the profile stores less than float32."""

from __future__ import annotations

import numpy as np

from oracles.ball import Arithmetic, Ball
from oracles.compare import Equal, Expected, Near
from oracles.ops.record import Arrays, Params
from spec.engine import UNIT_FLOAT32


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    rows = inputs["table"][inputs["ids"]]
    if a.output > UNIT_FLOAT32:
        return {"out": Near(Ball(rows, a.output * np.abs(rows.astype(np.float64)) + a.eta), "M1")}
    return {"out": Equal(rows, "M1", bits=True)}
