"""Hazards: the same numbers handed over in a less friendly way. None of them changes what a right engine answers.

Arrays in, arrays out; nothing here knows an engine or an operation. Outputs are always poisoned and fenced by guard words, and
inputs are always private copies, so that an engine can damage nothing but its own case. A hazard adds to that:

    poison  inputs lie between margins of poison, so that a read outside them brings NaN or an absurd index
    fence   inputs and outputs end where an unreadable page begins, so that a read or write past them ends the process
    guard   the guard zones grow from 16 words to 4096, so that a whole stray tile is seen
    views   inputs are strided or offset views; for an engine that takes contiguous arrays only, arrays off their alignment
    freed   inputs are overwritten as soon as the call has returned, before the outputs are read
    repeat  the same call is made twice and must give the same bits

Names that are not in this table (fork, evict, orphan, late, interleaved: campaigns/plan.py) are planned into a script and are no business of an
array; stale masks and plans, and neighbours, come with the rounds and sequences of any session. Hazards go with any case and with each other, and each
has a planted bug that it alone shows (tests/campaigns/test_alone.py).
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

HAZARDS: Mapping[str, str] = {
    "poison": "inputs between margins of NaN and absurd integers",
    "fence": "an unreadable page right after inputs and outputs",
    "guard": "wide guard zones around outputs",
    "views": "strided and offset inputs, or contiguous ones off their alignment",
    "freed": "inputs overwritten after the call, before outputs are read",
    "repeat": "the same call twice, bit for bit equal",
}

GUARD_INT = -7777777  # no token, index, count or position is ever this number
POISON_FLOAT_BITS = 0x7FC0DEAD  # a quiet NaN whose payload tells "never written" from a NaN that was computed
POISON_BYTE = 0xA5  # neither 0 nor 1, so no boolean
GUARD_WORDS = 16  # one cache line: catches the off-by-one and costs nothing
WIDE_GUARD_WORDS = 4096  # 16 KiB: a stray tile of 64 x 64 words
ALIGNMENT = 64  # bytes; zones and margins are whole cache lines, so that what lies between keeps the allocator's alignment
MARGIN = 256  # bytes of poison on either side of an input: four vector loads past the end still see it
GAP = 3  # elements between rows of a padded view: odd, so that rows fall off every alignment

_GUARD = np.int32(GUARD_INT).tobytes() * (WIDE_GUARD_WORDS + 2)  # the longest zone, which "views" moves by an element
_GUARD_BYTES = np.frombuffer(_GUARD, np.uint8)


def poison(array: Array) -> None:
    """Overwrite `array` with values that no right answer contains."""
    if array.dtype == np.float32:
        array.view(np.uint32)[...] = POISON_FLOAT_BITS
    elif array.dtype.kind == "f":
        array[...] = np.nan
    elif array.dtype.itemsize == 1:
        array.view(np.uint8)[...] = POISON_BYTE
    elif array.dtype.kind == "u":
        array[...] = np.iinfo(array.dtype).max
    else:
        array[...] = GUARD_INT


def unwritten(array: Array) -> NDArray[np.bool_]:
    """Which elements still hold the poison of `poison`, bit for bit."""
    fresh = np.empty(1, array.dtype)
    poison(fresh)
    bits = np.dtype(f"u{array.dtype.itemsize}")
    same: NDArray[np.bool_] = np.ascontiguousarray(array).view(bits).reshape(array.shape) == fresh.view(bits)[0]
    return same


class Guarded(NamedTuple):
    """A poisoned output. `array` was made from the bytes of `buffer` between `start` and `stop`; guard words fill the rest."""

    array: Array
    buffer: NDArray[np.uint8]
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def violation(self) -> str | None:
        """Where the guard words changed, in bytes from the output's end or start; None if they did not."""
        tail = self.buffer[self.stop :]
        if tail.tobytes() != _GUARD[: len(tail)]:
            at = int(np.flatnonzero(tail != _GUARD_BYTES[: len(tail)])[0])
            return f"byte {at} past its end"
        head = self.buffer[: self.start]
        if head.tobytes() != _GUARD[: len(head)]:
            at = int(np.flatnonzero(head != _GUARD_BYTES[: len(head)])[-1])
            return f"byte {self.start - at} before its start"
        return None

    def read(self) -> Array:
        """A copy of what was written, from the buffer: an engine can change the shape of an array object in place."""
        return self.buffer[self.start : self.stop].view(self.dtype).reshape(self.shape).copy()


def guarded_output(shape: tuple[int, ...], dtype: str, hazards: frozenset[str] = frozenset()) -> Guarded:
    """A poisoned array of `shape`; under "views" aligned to its element only."""
    kind = np.dtype(dtype)
    start = 4 * (WIDE_GUARD_WORDS if "guard" in hazards else GUARD_WORDS)
    stop = start + kind.itemsize * math.prod(shape)
    buffer = np.empty(stop + start, np.uint8)
    if "fence" in hazards:
        buffer = _fenced(stop)
    elif "views" in hazards:
        buffer = np.empty(stop + start + kind.itemsize, np.uint8)
        start, stop = start + kind.itemsize, stop + kind.itemsize
    buffer[:start] = _GUARD_BYTES[:start]
    buffer[stop:] = _GUARD_BYTES[: len(buffer) - stop]
    array = buffer[start:stop].view(kind).reshape(shape)
    poison(array)
    return Guarded(array, buffer, start, stop, shape, kind)


def placed(source: Array, hazards: frozenset[str], index: int = 0, *, contiguous_only: bool = False) -> Array:
    """A private copy of the input `source`, read-only, laid out as the hazards say. `index` (its place among the inputs) picks the view."""
    if "views" in hazards and not contiguous_only:
        copy = _view(source, index)
    elif "fence" in hazards:
        copy = _fenced(source.nbytes).view(source.dtype).reshape(source.shape)
        copy[...] = source
    elif "views" in hazards or "poison" in hazards:
        copy = _embedded(source, source.itemsize if "views" in hazards else 0)
    else:
        copy = np.array(source, order="C")
    copy.flags.writeable = False
    return copy


def spoil(array: Array) -> None:
    """Overwrite an array that `placed` made: what happens to a caller's buffer once the call is over."""
    array.flags.writeable = True  # legal: the memory is ours
    poison(array)


def _view(source: Array, index: int) -> Array:
    """One of three views with equal values: padded rows, column-major, every second element. Gaps hold poison."""
    if source.ndim == 0 or source.size == 0:
        return source.copy()
    kind = index % 3
    if kind == 1 and source.ndim > 1:
        return np.array(source, order="F")
    if kind == 2 or source.ndim == 1:
        wide = np.empty((*source.shape[:-1], 2 * source.shape[-1]), source.dtype)
        poison(wide)
        copy = wide[..., 1::2]
    else:
        wide = np.empty((*source.shape[:-1], source.shape[-1] + GAP), source.dtype)
        poison(wide)
        copy = wide[..., 1 : 1 + source.shape[-1]]
    copy[...] = source
    return copy


def _embedded(source: Array, shift: int) -> Array:
    """A contiguous copy between margins of poison, `shift` bytes off the alignment that an allocation has."""
    start = MARGIN + shift
    buffer = np.empty(start + source.nbytes + MARGIN - shift, np.uint8)
    poison(buffer[: len(buffer) // source.itemsize * source.itemsize].view(source.dtype))
    copy = buffer[start : start + source.nbytes].view(source.dtype).reshape(source.shape)
    copy[...] = source
    return copy


def _fenced(size: int) -> NDArray[np.uint8]:
    """Writable bytes [size] whose end is the start of a page that can be neither read nor written."""
    page = mmap.PAGESIZE
    whole = mmap.mmap(-1, -(-size // page) * page + page)
    memory = np.frombuffer(whole, np.uint8)
    stop = len(memory) - page
    address: int = memory.__array_interface__["data"][0]
    _protect(address + stop, page)
    return memory[stop - size : stop]


@functools.cache
def _mprotect() -> Any:
    """Looked up at first use: `import` only defines."""
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _protect(address: int, size: int) -> None:
    if _mprotect()(address, size, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
