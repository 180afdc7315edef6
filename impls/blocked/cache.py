"""The paged cache: one pool of pages for all sequences, in which neither pages nor slots follow logical order.

A page holds PAGE rows of [latent | k_rope] in every layer. Slots that hold no row are NaN, so that a kernel that reads one
shows it. Pending rows (of the last forward of a sequence) lie behind its committed rows until `commit`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from impls.blocked.points import PAGE, Float, Int, Points
from spec.engine import EngineError

Slots = NDArray[np.int64]
_FIRST_PAGES = 32


def check_path(path: Sequence[int], pending: int) -> None:
    """Raises EngineError unless `path` ascends strictly within `pending` rows (K1)."""
    if any(after <= before for before, after in itertools.pairwise([-1, *path, pending])):
        raise EngineError(f"K1: path {list(path)} must ascend strictly within {pending} pending rows")


class PagedCache:
    """Rows of width C per layer and slot. Sequences exist from their first row on."""

    def __init__(self, points: Points, layers: int, width: int, kv_rank: int) -> None:
        self._points = points
        self._kv_rank = kv_rank
        self.store: Float = np.full((layers, 0, width), np.nan, np.float32)  # (layers, slots, C)
        self.positions: Int = np.zeros(0, np.int32)  # of the row in each slot: a window goes by them
        self._free: list[int] = []  # pages
        self._pages: dict[int, list[int]] = {}
        self._committed: dict[int, int] = {}
        self._pending: dict[int, int] = {}
        self._grow(_FIRST_PAGES)

    def committed(self, sequence: int) -> int:
        """P, the number of committed rows; 0 for a sequence not seen yet."""
        return self._committed.get(sequence, 0)

    def reserve(self, sequence: int, count: int) -> Slots:
        """Room for `count` pending rows, in place of those pending before; the slots of all P + count rows in logical order."""
        self._drop(sequence, self.committed(sequence))
        self._extend(sequence, self.committed(sequence) + count)
        self._pending[sequence] = count
        return self.slots(sequence, self.committed(sequence) + count)

    def slots(self, sequence: int, rows: int) -> Slots:
        """Physical slots of the first `rows` logical rows."""
        pages = np.array(self._pages.get(sequence, ()), np.int64)
        return self._points.row_slots(pages, np.arange(rows))

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        """K1-K3: dst(P+j) = src(P+path[j]), the length is P + len(path), the rest is freed. Raises EngineError for a bad path."""
        pending = self._pending.get(sequence, 0)
        check_path(path, pending)
        prefix_len = self.committed(sequence)
        slots = self.slots(sequence, prefix_len + pending)
        kept = np.array(self._points.keep(path, pending), np.int64)
        self._points.move(self.store, slots[prefix_len : prefix_len + len(kept)], slots[prefix_len + kept], self._kv_rank)
        self.positions[slots[prefix_len : prefix_len + len(kept)]] = self.positions[slots[prefix_len + kept]]
        self._committed[sequence] = self._points.committed_len(prefix_len, len(kept), pending)
        self._drop(sequence, self._committed[sequence])

    def rows(self, sequence: int, layer: int) -> Float:
        """The committed rows of a layer in logical order, [P,C]. Raises EngineError for an unknown sequence."""
        self._check_known(sequence)
        out: Float = self.store[layer, self.slots(sequence, self.committed(sequence))]
        return out

    def evict(self, sequence: int) -> None:
        """Forget a sequence; its pages are free again. Raises EngineError for an unknown one."""
        self._check_known(sequence)
        left = self.committed(sequence) - self._points.forgotten(self.committed(sequence))
        self._drop(sequence, left)
        if left:
            self._committed[sequence] = left
        else:
            del self._pages[sequence]
            self._committed.pop(sequence, None)

    def fork(self, source: int, target: int) -> None:
        """`target` starts with the committed rows of `source`. Raises EngineError if there is no source, or a target already."""
        self._check_known(source)
        if target in self._pages:
            raise EngineError(f"sequence {target} exists: evict it before it becomes a fork of {source}")
        length = self.committed(source)
        self._pages[target] = list(self._points.shared_pages(self._pages.get(source, ()), length))
        self._extend(target, length)
        own = self.slots(target, length)
        self.store[:, own] = self.store[:, self.slots(source, length)]
        self.positions[own] = self.positions[self.slots(source, length)]
        self._committed[target], self._pending[target] = length, 0

    def free_slots(self) -> int:
        """Slots of pages that belong to no sequence."""
        return len(self._free) * PAGE

    def _check_known(self, sequence: int) -> None:
        if sequence not in self._pages:
            raise EngineError(f"there is no sequence {sequence}; there are {sorted(self._pages)}")

    def _extend(self, sequence: int, rows: int) -> None:
        """Take free pages until the sequence has room for `rows`."""
        pages = self._pages.setdefault(sequence, [])
        while len(pages) * PAGE < rows:
            if not self._free:
                self._grow(self.store.shape[1] // PAGE)
            pages.append(self._free.pop())

    def _drop(self, sequence: int, rows: int) -> None:
        """Poison every slot behind the first `rows`, free the pages that are empty now, and forget what was pending."""
        pages = self._pages.get(sequence, [])
        if pages:
            self._points.poison(self.store, self.slots(sequence, len(pages) * PAGE)[rows:])
        needed = -(-rows // PAGE)
        self._free.extend(pages[needed:])
        del pages[needed:]
        self._pending[sequence] = 0

    def _grow(self, pages: int) -> None:
        first = self.store.shape[1] // PAGE
        more = np.full((self.store.shape[0], pages * PAGE, self.store.shape[2]), np.nan, np.float32)
        self.store = np.concatenate([self.store, more], axis=1)
        self.positions = np.concatenate([self.positions, np.zeros(pages * PAGE, np.int32)])
        fresh = range(first, first + pages)
        self._free[:0] = [*fresh[::2], *fresh[1::2][::-1]]  # taken from the end: odd pages upwards, then even ones downwards
