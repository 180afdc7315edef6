"""The latent cache of one sequence: per layer, rows [latent | k_rope], committed ones first and then those of the running batch.

Beside the float32 rows it keeps what canonical products need of them (spec.arithmetic.Prepared), so that a decoding step
does not widen the whole prefix again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import Prepared, prepare_wide, row_bounds
from spec.config import Config
from spec.exact import Float, Wide

FIRST_CAPACITY = 64
Number = TypeVar("Number", bound=np.floating[Any])


class LatentCache:
    """`length` rows are committed; `parents` describes the pending ones, which stand behind them in every layer."""

    def __init__(self, config: Config) -> None:
        self.length = 0
        self.parents: list[int] = []
        self.positions: NDArray[np.int32] = np.zeros(0, np.int32)  # of the committed and the pending rows
        self._kv_rank = config.kv_rank
        self._rows = np.empty((config.layers, 0, config.cache_dim), np.float32)
        self._wide: Wide = np.empty((config.layers, 0, config.cache_dim))
        self._bounds: Wide = np.empty((config.layers, 0))

    def start(self, parents: Sequence[int], positions: NDArray[np.int32] | None = None) -> None:
        """Make room for a batch of len(parents) rows in place of what is pending. `positions` None: those of a chain."""
        self.parents = list(parents)
        own = np.arange(self.length, self.length + len(parents), dtype=np.int32) if positions is None else positions
        self.positions = np.concatenate([self.positions[: self.length], own])
        needed = self.length + len(parents)
        if needed > self._rows.shape[1]:
            self._resize(max(FIRST_CAPACITY, 1 << (needed - 1).bit_length()))

    def extend(self, layer: int, rows: Float) -> None:
        """The pending rows of one layer, in batch order."""
        pending = slice(self.length, self.length + len(self.parents))
        self._rows[layer, pending] = rows
        self._wide[layer, pending] = rows
        self._bounds[layer, pending] = row_bounds(self._wide[layer, pending])

    def keys(self, layer: int) -> Prepared:
        """[R + D, S]: every row, committed and pending, as a column."""
        stop = self.length + len(self.parents)
        return Prepared(self._rows[layer, :stop].T, self._wide[layer, :stop].T, self._bounds[layer, :stop])

    def latents(self, layer: int) -> Prepared:
        """[S, R]: the latent part of the same rows."""
        stop = self.length + len(self.parents)
        return prepare_wide(self._rows[layer, :stop, : self._kv_rank], self._wide[layer, :stop, : self._kv_rank])

    def commit(self, path: NDArray[np.intp]) -> None:
        """dst(P + j) = src(P + path[j]) in every layer; the new length is P + len(path) (K1, K2)."""
        source, target = self.length + path, slice(self.length, self.length + len(path))
        if not np.array_equal(path, np.arange(len(path))):
            for array in (self._rows, self._wide, self._bounds):
                array[:, target] = array[:, source]  # the right side is a copy, so that the order of moves does not matter
        self.positions = np.concatenate([self.positions[: self.length], self.positions[source]])
        self.length += len(path)
        self.parents = []

    def committed(self, layer: int) -> Float:
        return self._rows[layer, : self.length].copy()

    def copy(self) -> LatentCache:
        """The committed rows; nothing is shared."""
        other = object.__new__(LatentCache)
        other.length, other.parents, other._kv_rank = self.length, [], self._kv_rank
        other.positions = self.positions[: self.length].copy()
        other._rows, other._wide, other._bounds = self._rows.copy(), self._wide.copy(), self._bounds.copy()
        return other

    def _resize(self, capacity: int) -> None:
        def longer(array: NDArray[Number]) -> NDArray[Number]:
            new = np.empty((array.shape[0], capacity, *array.shape[2:]), array.dtype)
            new[:, : self.length] = array[:, : self.length]
            return new

        self._rows, self._wide, self._bounds = longer(self._rows), longer(self._wide), longer(self._bounds)
