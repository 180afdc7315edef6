"""What passes between a supervisor and its worker: sealed shared memory for arrays, small fixed messages on a socket. No policy here.

Two memfds: the supervisor writes requests into one (pickle, with array bytes out of band), the worker writes records into the other. A record
is JSON with array descriptors and then the arrays, because the worker runs untrusted native code and nothing that comes back may execute;
every number in it is checked against the memory that holds it. Records are appended one per step and counted in the header, so that what was
answered before a crash survives it. A memfd has no name, so nothing is left behind, and it is sealed against shrinking, so that a worker
cannot make the supervisor's mapping fault.
"""

from __future__ import annotations

import fcntl
import json
import marshal
import math
import mmap
import os
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from spec.engine import Departure, Description, Generation, Profile, Round
from spec.script import Answer, Failure, OpCall

ALIGNMENT = 64  # bytes: a cache line, and what SIMD loads want
FIRST_SIZE = 1 << 20  # bytes of a new arena; most cases fit, so that most workers never grow it
ANSWERS_BYTES_MAX = 1 << 33  # of one job: more than any session of a model that a specification in NumPy can follow
JSON_BYTES_MAX = 1 << 26
RETURN_ABOVE = 1 << 24  # bytes of records beyond which the pages go back to the kernel after a job
_KINDS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
DTYPES = {name: np.dtype(name) for name in _KINDS.split()}  # numbers only: nothing that holds a reference
NAMES = {dtype: name for name, dtype in DTYPES.items()}

LOAD, CALLS, SCRIPT, TREE, TREES = range(1, 6)

REQUEST = struct.Struct("<BxxxxxxxQQ")  # kind, job, bytes of the request
DONE = struct.Struct("<Q")  # job
HEADER = struct.Struct("<QqQQ")  # job, step, time at which the step began (monotonic ns), bytes of finished records
RECORDS_AT = 4096
_RECORD = struct.Struct("<QQ")  # bytes of the record, bytes of its JSON
_CANARY_AT = 64
_CANARY = bytes(range(256)) * 4  # between the header and the records: nobody writes here, and a stray write seldom misses it
_ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_REQUEST_HEAD = struct.Struct("<QQ")  # bytes of the pickle, number of buffers


T = TypeVar("T")


class TransportError(Exception):
    """Bytes from the other side that cannot be what they should be."""


class Arena:
    """A mapping of a memfd that both sides may grow and nobody can shrink."""

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        self.descriptor = descriptor
        self._protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self.memory = self._map()

    @classmethod
    def create(cls, name: str) -> Arena:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, FIRST_SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(descriptor, writable=True)

    def reach(self, size: int) -> None:
        """Make the mapping at least `size` bytes; the file grows where it is shorter. Views of the old mapping stay valid."""
        if size <= len(self.memory):
            return
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, max(size, 2 * len(self.memory)))
        self._unmap()
        self.memory = self._map()

    def release_pages(self) -> None:
        """Give the memory back to the kernel; the mapping stays and reads as zeros."""
        self.memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        self._unmap()
        os.close(self.descriptor)

    def _map(self) -> mmap.mmap:
        return mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size, mmap.MAP_SHARED, self._protection)

    def _unmap(self) -> None:
        try:
            self.memory.close()
        except BufferError:  # an array still looks at it; the mapping goes when the array does
            return


# Supervisor -> worker: pickle, arrays out of band. The worker trusts its supervisor.


def write_request(arena: Arena, payload: object) -> int:
    """Put `payload` into the arena and return how many bytes it takes."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(payload, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    table_at = _REQUEST_HEAD.size
    body_at = table_at + 16 * len(views)
    place = _padded(body_at + len(body))
    table = []
    for view in views:
        table += [place, view.nbytes]
        place = _padded(place + view.nbytes)
    arena.reach(place)
    memory = arena.memory
    _REQUEST_HEAD.pack_into(memory, 0, len(body), len(views))
    struct.pack_into(f"<{len(table)}Q", memory, table_at, *table)
    memory[body_at : body_at + len(body)] = body
    for view, at in zip(views, table[::2], strict=True):
        memory[at : at + view.nbytes] = view
    return place


def read_request(arena: Arena, size: int) -> Any:
    """The payload that `write_request` put there. Its arrays are copies: an engine may keep what it was given."""
    arena.reach(size)
    memory = memoryview(arena.memory)
    body_size, count = _REQUEST_HEAD.unpack_from(memory, 0)
    table = struct.unpack_from(f"<{2 * count}Q", memory, _REQUEST_HEAD.size)
    body_at = _REQUEST_HEAD.size + 16 * count
    buffers = [bytearray(memory[at : at + length]) for at, length in zip(table[::2], table[1::2], strict=True)]
    return pickle.loads(memory[body_at : body_at + body_size], buffers=buffers)


def write_calls(arena: Arena, calls: Sequence[OpCall]) -> int:
    """The same for calls, without pickle's cost per array: the many small cases of a campaign are sent this way."""
    table: list[Any] = []
    placed: list[NDArray[Any]] = []
    place = 0
    for call in calls:
        inputs = []
        for name, array in call.inputs.items():
            inputs.append((name, array.dtype.str, array.shape, place))
            placed.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
            place += _padded(array.nbytes)
        params = {name: value if type(value) in (int, float) else value.item() for name, value in call.params.items()}  # type: ignore[union-attr]
        table.append((call.op, inputs, params, dict(call.outputs), tuple(call.hazards)))
    body = marshal.dumps(table)
    first = _padded(_REQUEST_HEAD.size + len(body))
    arena.reach(first + place)
    memory = arena.memory
    _REQUEST_HEAD.pack_into(memory, 0, len(body), len(placed))
    memory[_REQUEST_HEAD.size : _REQUEST_HEAD.size + len(body)] = body
    at = first
    for array in placed:
        memory[at : at + array.nbytes] = array  # type: ignore[call-overload]
        at += _padded(array.nbytes)
    return first + place


def read_calls(arena: Arena, size: int) -> list[OpCall]:
    """The calls that `write_calls` put there. Their arrays are views of the arena: the engine gets copies of them."""
    arena.reach(size)
    memory = arena.memory
    body_size, _ = _REQUEST_HEAD.unpack_from(memory, 0)
    first = _padded(_REQUEST_HEAD.size + body_size)
    calls = []
    for op, inputs, params, outputs, hazards in marshal.loads(memory[_REQUEST_HEAD.size : _REQUEST_HEAD.size + body_size]):
        arrays = {name: np.ndarray(shape, dtype, memory, first + place) for name, dtype, shape, place in inputs}
        calls.append(OpCall(op, arrays, params, outputs, frozenset(hazards)))
    return calls


# Worker -> supervisor: records


class RecordWriter:
    """The worker's side: the step in progress, and records one after the other."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._job = 0
        self._step = 0
        self._began = 0
        self._used = 0

    def begin(self, job: int, now_ns: int) -> None:
        self._job, self._used = job, 0
        self.step(-1, now_ns)

    def step(self, number: int, now_ns: int) -> None:
        self._step, self._began = number, now_ns
        self._mark()

    def append(self, meta: Mapping[str, Any], arrays: list[NDArray[Any]]) -> None:
        """Add one record; `meta` is JSON. Raises TransportError where the records of the job grow beyond all measure."""
        sizes = [array.nbytes for array in arrays]
        places: list[int] = []
        end = 0
        for size in sizes:
            places.append(end)
            end = _padded(end + size)
        described = [[NAMES[array.dtype], array.shape, place] for array, place in zip(arrays, places, strict=True)]
        text = _ENCODE({**meta, "arrays": described}).encode("ascii")
        first = _padded(_RECORD.size + len(text))
        total = first + end
        if self._used + total > ANSWERS_BYTES_MAX or len(text) > JSON_BYTES_MAX:
            raise TransportError(
                f"the answers of one job take {self._used + total} bytes, but at most {ANSWERS_BYTES_MAX} are brought back"
            )
        start = RECORDS_AT + self._used
        self._arena.reach(start + total)
        memory = self._arena.memory
        _RECORD.pack_into(memory, start, total, len(text))
        memory[start + _RECORD.size : start + _RECORD.size + len(text)] = text
        for array, place in zip(arrays, places, strict=True):
            at = start + first + place
            memory[at : at + array.nbytes] = np.ascontiguousarray(array)  # type: ignore[call-overload]
        self._used += total
        self._mark()

    def _mark(self) -> None:
        HEADER.pack_into(self._arena.memory, 0, self._job, self._step, self._began, self._used)


@dataclass(frozen=True)
class Marks:
    """The header of the records: which step of which job is in progress, since when, and how many bytes are complete."""

    job: int
    step: int
    began_ns: int
    used: int


def set_canary(arena: Arena) -> None:
    """Prepare a records arena, by the supervisor."""
    arena.memory[_CANARY_AT : _CANARY_AT + len(_CANARY)] = _CANARY


def read_marks(arena: Arena) -> Marks:
    return Marks(*HEADER.unpack_from(arena.memory, 0))


def read_records(arena: Arena, used: int) -> list[tuple[dict[str, Any], list[NDArray[Any]]]]:
    """The complete records, copied out. Raises TransportError for anything that does not add up."""
    if arena.memory[_CANARY_AT : _CANARY_AT + len(_CANARY)] != _CANARY:
        raise TransportError("something wrote where no records are")
    if RECORDS_AT + used > len(arena.memory):
        if used > ANSWERS_BYTES_MAX or RECORDS_AT + used > os.fstat(arena.descriptor).st_size:
            raise TransportError(f"{used} bytes of records are announced, but the memory ends before")
        arena.reach(RECORDS_AT + used)
    memory = memoryview(arena.memory)
    try:
        records = []
        start, stop = RECORDS_AT, RECORDS_AT + used
        while start < stop:
            record, start = _record(memory, start, stop)
            records.append(record)
        return records
    finally:
        memory.release()


def _record(memory: memoryview, start: int, stop: int) -> tuple[tuple[dict[str, Any], list[NDArray[Any]]], int]:
    if start + _RECORD.size > stop:
        raise TransportError("a record is cut off")
    total, text_size = _RECORD.unpack_from(memory, start)
    first = _padded(_RECORD.size + text_size)
    if not first <= total <= stop - start or text_size > JSON_BYTES_MAX:
        raise TransportError("the sizes of a record do not fit its memory")
    text = bytes(memory[start + _RECORD.size : start + _RECORD.size + text_size])
    try:
        meta = json.loads(text)
        arrays = [_array(memory[start + first : start + total], *descriptor) for descriptor in meta.pop("arrays")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise TransportError(f"a record cannot be read: {problem}") from None
    return (meta, arrays), start + total


def _array(memory: memoryview, dtype: str, shape: list[int], place: int) -> NDArray[Any]:
    kind = DTYPES[dtype]
    if not all(type(extent) is int and extent >= 0 for extent in [*shape, place]) or len(shape) > 8:
        raise TransportError("an array has an impossible shape")
    size = kind.itemsize * math.prod(shape)
    if place + size > len(memory):
        raise TransportError("an array lies outside its record")
    return np.frombuffer(bytearray(memory[place : place + size]), kind).reshape(shape)


# Answers and descriptions as records


def pack_answer(answer: Answer) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """`answer` as JSON and arrays; indices in the JSON point into the list."""
    arrays: list[NDArray[Any]] = []

    def index(array: NDArray[Any]) -> int:
        arrays.append(array)
        return len(arrays) - 1

    meta: dict[str, Any] = {}
    if answer.logits is not None:
        meta["logits"] = index(answer.logits)
    if answer.cache is not None:
        meta["cache"] = index(answer.cache)
    if answer.taps:
        meta["taps"] = [[name, layer, index(array)] for (name, layer), array in answer.taps.items()]
    if answer.outputs is not None:
        meta["outputs"] = {name: index(array) for name, array in answer.outputs.items()}
    if answer.generations is not None:
        meta["generations"] = [[g.tokens, [[r.tokens, r.parents, r.path, r.bonus] for r in g.rounds]] for g in answer.generations]
    if answer.drafted:
        meta["drafted"] = [[sequence, list(history)] for sequence, history in answer.drafted]
    if answer.failure is not None:
        meta["failure"] = pack_failure(answer.failure)
    return meta, arrays


def unpack_answer(meta: dict[str, Any], arrays: list[NDArray[Any]]) -> Answer:
    """The inverse of `pack_answer`. Raises TransportError."""

    def read() -> Answer:
        answer = Answer()
        if "logits" in meta:
            answer.logits = arrays[meta["logits"]]
        if "cache" in meta:
            answer.cache = arrays[meta["cache"]]
        answer.taps = {(_text(name), _int(layer)): arrays[i] for name, layer, i in meta.get("taps", [])}
        if "outputs" in meta:
            answer.outputs = {name: arrays[i] for name, i in meta["outputs"].items()}
        if "generations" in meta:
            answer.generations = [
                Generation(_ints(tokens), tuple(Round(_ints(t), _ints(p), _ints(path), _int(bonus)) for t, p, path, bonus in rounds))
                for tokens, rounds in meta["generations"]
            ]
        answer.drafted = [(_int(sequence), _ints(history)) for sequence, history in meta.get("drafted", [])]
        answer.failure = unpack_failure(meta.get("failure"))
        return answer

    return checked(read)


def pack_failure(failure: Failure) -> list[Any]:
    return [failure.kind, failure.message, failure.signal]


def unpack_failure(value: Any) -> Failure | None:
    """The inverse of `pack_failure`, and None for None. Raises TransportError."""

    def read() -> Failure | None:
        if value is None:
            return None
        kind, message, signal = value
        return Failure(_text(kind), _text(message), _int(signal))

    return checked(read)


def pack_description(description: Description) -> dict[str, Any]:
    sets = {name: sorted(getattr(description, name)) for name in ("capabilities", "ops", "taps")}
    departures = [[departure.field, departure.value, departure.reason] for departure in description.departures]
    return {
        "name": description.name,
        "version": description.version,
        "profile": vars(description.profile),
        "departures": departures,
        **sets,
    }


def unpack_description(meta: dict[str, Any]) -> Description:
    """The inverse of `pack_description`. Raises TransportError."""

    def read() -> Description:
        sets = [frozenset(_text(item) for item in meta[name]) for name in ("capabilities", "ops", "taps")]
        departures = tuple(Departure(_text(name), value, _text(reason)) for name, value, reason in meta["departures"])
        return Description(_text(meta["name"]), _text(meta["version"]), Profile(**meta["profile"]), sets[0], sets[1], sets[2], departures)

    return checked(read)


def checked(read: Callable[[], T]) -> T:
    """`read()`, with every way in which wrong data can fail turned into TransportError."""
    try:
        return read()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as problem:
        raise TransportError(f"an answer cannot be read: {type(problem).__name__}: {problem}") from None


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} where text should be")
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} where an integer should be")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(_int(value) for value in values)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
