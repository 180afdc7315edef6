"""Rotary embedding with its table as an exact input (M6): two products and one sum per element."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles.ball import THIRD, Arithmetic, Ball, Wide, finish
from oracles.compare import Expected, Near
from oracles.ops.record import Arrays, Params

ENTRY = 16.0  # roundings u: 4 ulp are 8 u, and 8 more of the factor


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    cos, sin = (inputs[name].astype(np.float64)[:, None, :] for name in ("cos", "sin"))
    return {"out": Near(bound(Ball(inputs["x"]), cos, sin, bool(params["half_layout"]), a))}


def table_radius(angle: Wide, size: float, a: Arithmetic) -> Wide | None:
    """How far an entry of the engine's own table may be from the golden one; None where the profile says that it is the golden one.

    `angle` [T, D/2] = position * frequency, real; `size`: the factor of the table. A relative error e of the angle moves cos and sin by at
    most e * angle; ENTRY covers cos and sin themselves (4 ulp of libm) and a factor formed in float32 (8 roundings).
    """
    if not a.angle and not a.angle_per_pair:
        return None
    relative = a.angle + a.angle_per_pair * np.arange(angle.shape[-1])
    return np.asarray(size * (relative * angle + ENTRY * a.unit))


def bound(x: Ball, cos: Wide, sin: Wide, half_layout: bool, a: Arithmetic, table: Wide | None = None) -> Ball:
    """x [..., D] turned by tables [..., D/2] that broadcast against it; `table` is the radius of their entries.

    rad = gamma(2)(|x0 c| + |x1 s|): every term passes its product and the sum. The table is not recomputed: one built in
    float32 angles is off by about position * 2^-24, which is why its bits are an input.
    """
    full_cos, full_sin, partner = spread(cos, half_layout), spread(sin, half_layout), swap(x.mid.shape[-1], half_layout)
    sign = spread_sign(x.mid.shape[-1], half_layout)
    first, second = x.mid * full_cos, x.mid[..., partner] * (full_sin * sign)
    mid = first + second
    size = np.abs(first) + np.abs(second)
    rad: Any = a.gamma(2) * size
    variance: Any = 0.0
    if table is not None:
        spread_table = spread(table, half_layout)
        rad = rad + spread_table * (x.upper + x.upper[..., partner]) * (1 + a.gamma(2))
    if a.statistics:
        variance = THIRD * a.unit**2 * (np.square(first) + np.square(second) + np.square(mid))
        if table is not None:
            variance = variance + THIRD * np.square(spread_table) * (np.square(x.mid) + np.square(x.mid[..., partner]))
        if x.std is not None:
            variance = variance + np.square(x.std * full_cos) + np.square(x.std[..., partner] * full_sin)
    if x.rad is not None:
        inherited = x.rad * np.abs(full_cos) + x.rad[..., partner] * np.abs(full_sin)
        rad = rad + inherited * (1 + a.gamma(2))
    return finish(mid, rad, variance, a, x.overflow, 5 * a.eta)  # FLUSH: two operands, two products, one sum


def spread(table: Wide, half_layout: bool) -> Wide:
    """[..., D/2] -> [..., D]: the value of its pair for every element."""
    return np.concatenate([table, table], -1) if half_layout else np.repeat(table, 2, -1)


def swap(width: int, half_layout: bool) -> Any:
    """The index of each element's partner."""
    index = np.arange(width)
    return (index + width // 2) % width if half_layout else index ^ 1


def spread_sign(width: int, half_layout: bool) -> Wide:
    """-1 for the first element of a pair, +1 for the second: a' = a cos - b sin, b' = b cos + a sin."""
    sign = np.ones(width)
    sign[: width // 2 if half_layout else None : 1 if half_layout else 2] = -1
    return sign
