"""Where the weights of a product live: prepared once and kept, or fetched for each use. The bits are the same.

Each product of the model is bound to one of these once, where the model is built. A bias is one more row of the matrix, met by a
constant 1: the whole is one operation with one rounding (rule M3).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import Prepared, grouped_matmul, matmul, prepare, prepare_joined, swiglu
from spec.exact import Float
from spec.weights import Weights

Product = Callable[[Float], Float]
Experts = Callable[[Float, NDArray[np.int32]], tuple[Float, Float, Float, Float]]
"""x [T, N], ids [T, K] -> gate, up, act [T, K, F] and out [T, K, N] of the chosen experts."""
Tensor = Callable[[str], Float]


class Source(Protocol):
    def product(self, names: tuple[str, ...], biases: tuple[str, ...] = ()) -> Product:
        """x [T, K] -> x @ [W1 | W2 | ..] + [b1 | b2 | ..]."""
        ...

    def transposed(self, name: str) -> Product:
        """x [T, N] -> x @ W^T."""
        ...

    def heads(self, name: str) -> Product:
        """x [T, H, i] -> [T, H, o], head by head."""
        ...

    def experts(self, layer: int) -> Experts: ...


class Kept:
    """Every matrix in float32 and float64, with the bounds of its columns."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def product(self, names: tuple[str, ...], biases: tuple[str, ...] = ()) -> Product:
        matrices = [self._weights[name] for name in names]
        if not biases:
            return partial(_times, prepared=prepare_joined(*matrices))
        row = np.concatenate([self._weights[name] for name in biases])
        return partial(_times_and_one, matrix=prepare(np.concatenate([np.concatenate(matrices, -1), row[None]])))

    def transposed(self, name: str) -> Product:
        return partial(_times, prepared=prepare(self._weights[name].T))

    def heads(self, name: str) -> Product:
        return partial(per_head, matrices=prepare(self._weights[name]))

    def experts(self, layer: int) -> Experts:
        gate_up = prepare_joined(self._weights[f"{layer}.expert_gate"], self._weights[f"{layer}.expert_up"])
        down = prepare(self._weights[f"{layer}.expert_down"])

        def run(x: Float, ids: NDArray[np.int32]) -> tuple[Float, Float, Float, Float]:
            (T, K), pairs = ids.shape, ids.reshape(-1)
            gate, up = halves(grouped_matmul(np.repeat(x, K, axis=0), gate_up, pairs))
            act = swiglu(gate, up)
            out = grouped_matmul(act, down, pairs)
            return gate.reshape(T, K, -1), up.reshape(T, K, -1), act.reshape(T, K, -1), out.reshape(T, K, -1)

        return run


class Fetched:
    """Nothing is kept: `tensor(name)` gives a matrix, or one expert's as "3.expert_gate/17", each time that it is used."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def product(self, names: tuple[str, ...], biases: tuple[str, ...] = ()) -> Product:
        def run(x: Float) -> Float:
            if not biases:
                return np.concatenate([matmul(x, self._tensor(name)) for name in names], -1)
            pairs = zip(names, biases, strict=True)
            return np.concatenate([_times_and_one(x, np.concatenate([self._tensor(w), self._tensor(b)[None]])) for w, b in pairs], -1)

        return run

    def transposed(self, name: str) -> Product:
        return lambda x: matmul(x, self._tensor(name).T)

    def heads(self, name: str) -> Product:
        return lambda x: per_head(x, self._tensor(name))

    def experts(self, layer: int) -> Experts:
        def run(x: Float, ids: NDArray[np.int32]) -> tuple[Float, Float, Float, Float]:
            parts: list[list[Float]] = []
            places: list[NDArray[np.intp]] = []
            for expert in np.unique(ids).tolist():
                place = np.flatnonzero(ids.ravel() == expert)
                rows = x[place // ids.shape[1]]
                gate, up = (matmul(rows, self._tensor(f"{layer}.expert_{name}/{expert}")) for name in ("gate", "up"))
                act = swiglu(gate, up)
                parts.append([gate, up, act, matmul(act, self._tensor(f"{layer}.expert_down/{expert}"))])
                places.append(place)
            back = np.argsort(np.concatenate(places))
            gate, up, act, out = (np.concatenate(list(of_experts))[back].reshape(*ids.shape, -1) for of_experts in zip(*parts, strict=True))
            return gate, up, act, out

        return run


def per_head(x: Float, matrices: Float | Prepared) -> Float:
    """x [T, H, i] times matrices [H, i, o], head by head -> [T, H, o]."""
    return np.ascontiguousarray(matmul(x.transpose(1, 0, 2), matrices).transpose(1, 0, 2))


def halves(joined: Float) -> tuple[Float, Float]:
    half = joined.shape[-1] // 2
    return joined[..., :half], joined[..., half:]


def _times(x: Float, prepared: Prepared) -> Float:
    return matmul(x, prepared)


def _times_and_one(x: Float, matrix: Float | Prepared) -> Float:
    return matmul(np.concatenate([x, np.ones((len(x), 1), np.float32)], 1), matrix)
