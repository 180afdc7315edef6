"""Rows of a ragged batch, sorted out once for every peer: spans of one sequence, their trees, and paths through them (C1-C3, K1).

Nothing here computes a model; a peer's own session says how its library keeps the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec.config import Config, unfamiliar_switches
from spec.engine import EngineError, Int, Rows, Unsupported

Index = NDArray[np.intp]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Span:
    """The M rows of one sequence in a batch. `parents` count within the span, -1 for the committed prefix."""

    sequence: int
    rows: Index  # [M] rows of the batch
    parents: tuple[int, ...]
    positions: Int  # [M]
    tokens: Int  # [M]

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def ancestors(self) -> Bool:
        """[M, M]: column j is row i itself or above it."""
        above = np.eye(len(self.parents), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                above[node] |= above[parent]
        return above

    @property
    def leaves(self) -> tuple[int, ...]:
        inner = set(self.parents)
        return tuple(node for node in range(len(self.parents)) if node not in inner)


def spans_of(config: Config, rows: Rows) -> list[Span]:
    """In order of their first row. Raises EngineError for tokens, positions or parents out of range."""
    count = len(rows)
    if count and (rows.token.min() < 0 or rows.token.max() >= config.vocab):
        raise EngineError(f"tokens must be between 0 and {config.vocab - 1}")
    if count and rows.position.min() < 0:
        raise EngineError("positions must not be negative")
    out = []
    for sequence in dict.fromkeys(rows.sequence.tolist()):
        at = np.flatnonzero(rows.sequence == sequence)
        local = {row: node for node, row in enumerate(at.tolist())} | {-1: -1}
        parents = []
        for node, parent in enumerate(rows.parent[at].tolist()):
            if local.get(parent, node) >= node:
                raise EngineError(f"parent of row {int(at[node])} is {parent}, but must be an earlier row of its sequence, or -1")
            parents.append(local[parent])
        out.append(Span(sequence, at, tuple(parents), np.array(rows.position[at], np.int32), np.array(rows.token[at], np.int32)))
    return out


def refuse_unfamiliar(config: Config, known: frozenset[str], engine: str) -> None:
    """Raises Unsupported for a switch of the configuration that the engine has never heard of, and would ignore."""
    for name in unfamiliar_switches(config, known):
        raise Unsupported(f"{engine} has no {name}; the configuration says {getattr(config, name)}")


def check_path(path: Sequence[int], pending: int) -> None:
    """K1. Raises EngineError unless `path` ascends strictly within the pending rows."""
    bounds = [-1, *path, pending]
    if any(after <= before for before, after in itertools.pairwise(bounds)):
        raise EngineError(f"K1: path {list(path)} must ascend strictly within {pending} pending rows")


def check_descends(path: Sequence[int], parents: Sequence[int]) -> None:
    """For engines that name a path by its last row: raises Unsupported unless each row of `path` is the parent of the next."""
    above = -1
    for node in path:
        if parents[node] != above:
            raise Unsupported(f"path {list(path)} leaves out ancestors of row {node}; this engine keeps whole paths from the prefix on")
        above = node
