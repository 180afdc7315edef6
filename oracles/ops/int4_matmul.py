"""Int4 products: DOT on the dequantised weights, which are exact; a kernel may multiply a group's sum by the scale instead (M3, M11).

Then every term meets one rounding more, that of the scale: `extra` = 1. A profile that dequantises to a 16-bit format declares it as
`u_input`.
"""

from __future__ import annotations

from oracles.ball import Arithmetic, Ball, dot
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params
from spec.formats import dequantised_int4


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    weights = Ball(dequantised_int4(inputs["packed"], inputs["scales"]))
    return {"out": Near(dot(Ball(inputs["x"]), weights, weights.mid.shape[0], a, extra=1))}
