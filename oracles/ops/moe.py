"""One SwiGLU per chosen expert (M7): the region matmul, swiglu, matmul, composed by ball arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracles.ball import Arithmetic, Ball, Multiply, Wide, dot
from oracles.compare import Expected, Near
from oracles.ops import swiglu
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    gate, up, down = (Ball(inputs[name]) for name in ("gate", "up", "down"))
    by_expert = grouped(inputs["ids"])
    x = Ball(inputs["x"])
    hidden = swiglu.bound(project(x, gate, by_expert, a), project(x, up, by_expert, a), a)
    return {"out": Near(project(hidden, down, by_expert, a))}


def project(x: Ball, w: Ball, by_expert: Multiply, a: Arithmetic) -> Ball:
    """x [T, N] or [T, K, N] with w [E, N, F] -> [T, K, F]: row t, choice k times the matrix of its expert."""
    return dot(x, w, w.mid.shape[1], a, multiply=by_expert)


def grouped(ids: NDArray[np.integer]) -> Multiply:
    """The contraction for ids [T, K]: one product per expert that is used."""
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    experts, starts = np.unique(flat[order], return_index=True)
    stops = [*starts[1:].tolist(), len(flat)]
    groups = [(int(e), order[start:stop]) for e, start, stop in zip(experts, starts.tolist(), stops, strict=True)]
    width = ids.shape[1]

    def multiply(x: Wide, w: Wide) -> Wide:
        rows = np.repeat(x, width, 0) if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        out = np.empty((len(flat), w.shape[-1]))
        for expert, chosen in groups:
            out[chosen] = rows[chosen] @ w[expert]
        return out.reshape(*ids.shape, w.shape[-1])

    return multiply
