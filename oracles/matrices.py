"""Where the judge's matrices live: widened once and kept, or fetched for each product in blocks of columns. The bounds are the same.

`Kept` holds float64 values and magnitudes of every weight: 16 bytes a scalar, for the hundreds of cases of a small model. `Fetched` holds
nothing: a layer in full width is judged in the memory of one block, and each expert that was chosen is fetched once per product.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from oracles.ball import Arithmetic, Ball, concatenate
from oracles.ops import matmul, moe, q_absorb
from spec.weights import Weights, tensor_of

COLUMNS = 1024  # of a fetched matrix at a time: 59 MB in float64 at 7168 rows, and as much for the magnitudes


class Matrices(Protocol):
    def vector(self, name: str) -> Ball: ...

    def product(self, x: Ball, name: str, a: Arithmetic, bias: str = "") -> Ball:
        """x [..., K] @ W [K, N] (+ bias), an engine's own order of summation."""
        ...

    def head(self, x: Ball, a: Arithmetic) -> Ball: ...

    def heads(self, x: Ball, name: str, a: Arithmetic) -> Ball:
        """x [T, H, i] -> [T, H, o], head by head."""
        ...

    def whole(self, name: str) -> Ball:
        """The tensor itself."""
        ...

    def experts(self, x: Ball, name: str, ids: NDArray[np.integer], a: Arithmetic) -> Ball:
        """x [T, N] or [T, K, N] -> [T, K, F], each row by the matrices of its experts ids [T, K]."""
        ...


class Kept:
    def __init__(self, weights: Weights, tied: bool) -> None:
        self.balls: Mapping[str, Ball] = {name: Ball(value) for name, value in weights.items() if name != "embed"}
        self._head = Ball(weights["embed"].T) if tied else self.balls["head"]

    def vector(self, name: str) -> Ball:
        return self.balls[name]

    def whole(self, name: str) -> Ball:
        return self.balls[name]

    def product(self, x: Ball, name: str, a: Arithmetic, bias: str = "") -> Ball:
        return matmul.bound(x, self.balls[name], a, self.balls[bias] if bias else None)

    def head(self, x: Ball, a: Arithmetic) -> Ball:
        return matmul.bound(x, self._head, a)

    def heads(self, x: Ball, name: str, a: Arithmetic) -> Ball:
        return q_absorb.bound(x, self.balls[name], a)

    def experts(self, x: Ball, name: str, ids: NDArray[np.integer], a: Arithmetic) -> Ball:
        w = self.balls[name]
        return moe.project(x, w, moe.grouped(ids), a)


class Fetched:
    def __init__(self, weights: Weights, tied: bool) -> None:
        self._weights, self._tied = weights, tied
        self._slice = partial(tensor_of, weights.__getitem__)

    def vector(self, name: str) -> Ball:
        return Ball(self._weights[name])

    def whole(self, name: str) -> Ball:
        return Ball(self._weights[name])

    def product(self, x: Ball, name: str, a: Arithmetic, bias: str = "") -> Ball:
        return _by_columns(x, self._weights[name], a, self._weights[bias] if bias else None)

    def head(self, x: Ball, a: Arithmetic) -> Ball:
        return _by_columns(x, self._weights["embed"].T if self._tied else self._weights["head"], a, None)

    def heads(self, x: Ball, name: str, a: Arithmetic) -> Ball:
        w = self._weights[name]
        return concatenate([q_absorb.bound(x[:, head : head + 1], Ball(w[head : head + 1]), a) for head in range(len(w))], 1)

    def experts(self, x: Ball, name: str, ids: NDArray[np.integer], a: Arithmetic) -> Ball:
        """Every place (row, choice) by its expert's own matrix, joined in order of places."""
        flat = ids.ravel()
        by_place = x.mid.ndim == 3
        rows = x.reshape(-1, x.mid.shape[-1])
        parts, places = [], []
        for expert in np.unique(flat).tolist():
            at = np.flatnonzero(flat == expert)
            parts.append(_by_columns(rows[at if by_place else at // ids.shape[1]], self._slice(f"{name}/{expert}"), a, None))
            places.append(at)
        joined = concatenate(parts, 0)
        return joined[np.argsort(np.concatenate(places))].reshape(*ids.shape, joined.mid.shape[-1])


def _by_columns(x: Ball, w: NDArray[np.float32], a: Arithmetic, bias: NDArray[np.float32] | None) -> Ball:
    parts = []
    for start in range(0, w.shape[1], COLUMNS):
        columns = slice(start, start + COLUMNS)
        parts.append(matmul.bound(x, Ball(w[:, columns]), a, None if bias is None else Ball(bias[columns])))
    return concatenate(parts, -1) if len(parts) > 1 else parts[0]
