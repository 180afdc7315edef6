"""Embedding rows are copies (M1): bit for bit, but for one rounding where the profile stores less than float32."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from oracles.ball import Arithmetic, Ball
from oracles.compare import Equal, Expected, Near
from oracles.ops.record import Arrays, Params
from spec.engine import UNIT_FLOAT32


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    rows = inputs["table"][inputs["ids"]]
    if a.output > UNIT_FLOAT32:
        return {"out": Near(row_ball(rows, a), "M1")}
    return {"out": Equal(rows, "M1", bits=True)}


def row_ball(rows: NDArray[Any], a: Arithmetic) -> Ball:
    """The gathered rows, with the radius of one rounding to the output format if that is not float32."""
    ball = Ball(rows)
    if a.output > UNIT_FLOAT32:
        ball.rad = a.output * ball.absolute + a.eta
    return ball
