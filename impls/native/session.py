"""A session of a library with the C ABI: batches in, logits and taps out, and the library's own decoding loop.

Callbacks run on the calling thread. What they raise is kept, the engine is told to stop, and the exception leaves the call
unchanged.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from impls.native import abi, tensors
from spec.config import Config
from spec.engine import Description, Drafter, EngineError, Float, Generation, Int, Limits, Round, Rows, TapSink, Unsupported
from spec.sampling import Sampling, as_parameters

if TYPE_CHECKING:
    from impls.native.adapter import Library

_SHAPES = tuple(ctypes.c_int64 * ndim for ndim in range(9))
_NO_TAP = abi.TapFn()
_NO_DRAFT = abi.DraftFn()


class Raised:
    """The first exception of a callback, carried across the C frames."""

    def __init__(self) -> None:
        self._exception: BaseException | None = None

    def guard(self, function: Callable[..., None], *arguments: Any) -> int:
        """The status of a callback. After an exception the callback is not run again, whatever the engine does."""
        if self._exception is not None:
            return abi.FAILED
        try:
            function(*arguments)
        except BaseException as problem:  # also KeyboardInterrupt: nothing may unwind through the engine's frames
            self._exception = problem
            return abi.FAILED
        return abi.OK

    def reraise(self) -> None:
        if self._exception is not None:
            exception, self._exception = self._exception, None
            raise exception


class LibrarySession:
    """`spec.engine.Session`. Usable in a `with` statement; closed when collected at the latest."""

    finalizer: weakref.finalize[Any, Any] | None = None

    def __init__(self, library: Library, handle: int, config: Config, description: Description, alive: object, lending: Raised) -> None:
        """`alive` is kept as long as the session: memory that was lent to the engine when it was opened, and the callback that lends more.
        `lending` holds what that callback raised."""
        self._lending = lending
        self._alive = alive
        self._library = library
        self._handle: int | None = handle
        self._config = config
        self._description = description

    def forward(
        self,
        rows: Rows,
        want_logits: NDArray[np.bool_],
        taps: frozenset[str],
        sink: TapSink,
        *,
        first_layer: int = 0,
        hidden: Float | None = None,
    ) -> Float:
        """Logits [wanted, vocab]. Only taps whose values the next operation consumed as they are, whole, reach the sink."""
        count = len(rows)
        columns = [tensors.int32(name, getattr(rows, name), count) for name in ("sequence", "token", "position", "parent")]
        want = np.ascontiguousarray(want_logits, np.bool_)
        if want.shape != (count,):
            raise EngineError(f"want_logits has shape {list(want.shape)}, but the batch has {count} rows")
        unknown = taps - self._description.taps
        if unknown:
            raise Unsupported(f"{self._description.name} has no tap {sorted(unknown)[0]!r}")
        logits = np.full((int(want.sum()), self._config.vocab), np.nan, np.float32)
        logits_tensor, owners = tensors.whole_tensor("logits", logits)
        hidden_tensor = None
        if hidden is not None:
            hidden_tensor, more = tensors.whole_tensor("hidden", hidden)
            owners += more
        raised = Raised()
        push = abi.TapFn(lambda user, tap: raised.guard(_forward_tap, taps, sink, tap)) if taps else _NO_TAP
        args = abi.ForwardArgs(
            ctypes.sizeof(abi.ForwardArgs),
            1,
            count,
            *(tensors.address(column) for column in columns),
            tensors.address(want),
            ctypes.pointer(logits_tensor),
            ",".join(sorted(taps)).encode(),
            push,
            None,
            first_layer,
            ctypes.pointer(hidden_tensor) if hidden_tensor is not None else None,
        )
        status = self._function("paritree_forward")(self._open_handle(), ctypes.byref(args))
        del owners
        raised.reraise()
        self._lending.reraise()
        self._library.check(status, "paritree_forward")
        return logits

    def commit(self, sequence: int, path: Int) -> None:
        kept = tensors.int32("path", path)
        self._call("paritree_commit", sequence, tensors.address(kept), len(kept))

    def cache_rows(self, sequence: int, layer: int) -> Float:
        count = ctypes.c_int64(-1)
        self._call("paritree_cache_rows", sequence, layer, None, ctypes.byref(count))
        if count.value < 0:
            raise EngineError(f"paritree_cache_rows set row_count to {count.value}, but must set the number of committed rows")
        rows = np.full((count.value, self._config.cache_dim), np.nan, np.float32)
        tensor, owners = tensors.whole_tensor("rows", rows)
        self._call("paritree_cache_rows", sequence, layer, ctypes.byref(tensor), ctypes.byref(count))
        del owners
        if count.value != len(rows):
            raise EngineError(f"paritree_cache_rows first said {len(rows)} rows, then {count.value}")
        return rows

    def evict(self, sequence: int) -> None:
        self._call("paritree_evict", sequence)

    def fork(self, source: int, target: int) -> None:
        self._call("paritree_fork", source, target)

    def free_slots(self) -> int:
        """Cache rows that can still be stored."""
        slots = ctypes.c_int64(-1)
        self._call("paritree_free_slots", ctypes.byref(slots))
        return slots.value

    def generate(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits) -> list[Generation]:
        """Raises Unsupported without the capability `generate`, or `generate_tree` where there is a drafter."""
        return self._decode(prompts, drafter, budget, limits, {})

    def sample(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits, sampling: Sampling) -> list[Generation]:
        """Raises Unsupported without the capability `sampling`, or as `generate`."""
        if "sampling" not in self._description.capabilities:
            raise Unsupported(f"{self._description.name} does not list the capability 'sampling'")
        return self._decode(prompts, drafter, budget, limits, as_parameters(sampling))

    def _decode(
        self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits, sampling: Mapping[str, int | float]
    ) -> list[Generation]:
        needed = "generate" if drafter is None else "generate_tree"
        if needed not in self._description.capabilities:
            raise Unsupported(f"{self._description.name} does not list the capability {needed!r}")
        arrays = [tensors.int32(f"prompt {number}", prompt) for number, prompt in enumerate(prompts)]
        pointers = (ctypes.c_void_p * len(arrays))(*(tensors.address(array) for array in arrays))
        lengths = (ctypes.c_int64 * len(arrays))(*(len(array) for array in arrays))
        stops = tensors.int32("stop_tokens", limits.stop_tokens)
        raised = Raised()
        emitted = _Emitted(len(arrays))
        emit = abi.EmitFn(lambda user, emission: raised.guard(emitted.take, emission.contents))
        pairs, owners = tensors.parameters(sampling)
        draft = _NO_DRAFT if drafter is None else abi.DraftFn(self._draft_callback(drafter, raised))
        args = abi.GenerateArgs(
            ctypes.sizeof(abi.GenerateArgs),
            0,
            len(arrays),
            pointers,
            lengths,
            draft,
            None,
            0 if drafter is None else drafter.block_len,
            budget,
            limits.max_new,
            tensors.address(stops),
            len(stops),
            emit,
            None,
            None,
            pairs,
        )
        status = self._function("paritree_generate")(self._open_handle(), ctypes.byref(args))
        del owners  # kept until here: `pairs` points into them
        raised.reraise()
        self._lending.reraise()
        self._library.check(status, "paritree_generate")
        return emitted.generations()

    def close(self) -> None:
        self._handle = None
        if self.finalizer is not None:
            self.finalizer()

    def __enter__(self) -> LibrarySession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _draft_callback(self, drafter: Drafter, raised: Raised) -> Callable[..., int]:
        shape = (drafter.block_len, self._config.vocab)

        def draft(sequence: int, history: Any, count: int, target: Any) -> None:
            tokens = np.array(history[:count], np.int32)
            logits = np.ascontiguousarray(drafter.draft(sequence, tokens))
            if logits.shape != shape or logits.dtype != np.float32:
                raise EngineError(f"the drafter answered {logits.dtype} {list(logits.shape)}, but float32 {list(shape)} is needed")
            ctypes.memmove(target, tensors.address(logits), logits.nbytes)

        return lambda user, *arguments: raised.guard(draft, *arguments)

    def _open_handle(self) -> int:
        if self._handle is None:
            raise EngineError("this session is closed: open another one")
        return self._handle

    def _function(self, symbol: str) -> Any:
        return self._library.function(symbol)

    def _call(self, symbol: str, *arguments: Any) -> None:
        self._library.check(self._function(symbol)(self._open_handle(), *arguments), symbol)


class _Emitted:
    """What paritree_generate reported, by prompt."""

    def __init__(self, prompts: int) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(prompts)]
        self._rounds: list[list[Round]] = [[] for _ in range(prompts)]

    def take(self, emission: abi.Emission) -> None:
        if emission.struct_size < ctypes.sizeof(abi.Emission):
            raise EngineError(f"an emission has struct_size {emission.struct_size}, but must have at least {ctypes.sizeof(abi.Emission)}")
        number = emission.sequence
        if not 0 <= number < len(self._tokens):
            raise EngineError(f"an emission is of sequence {number}, but there are {len(self._tokens)} prompts")
        for name in ("token_count", "node_count", "path_count"):
            if getattr(emission, name) < 0:
                raise EngineError(f"an emission has {name} {getattr(emission, name)}, but counts are not negative")
        self._tokens[number] += emission.tokens[: emission.token_count]
        if emission.node_count:
            nodes = emission.node_count
            self._rounds[number].append(
                Round(
                    tuple(emission.node_tokens[:nodes]),
                    tuple(emission.node_parents[:nodes]),
                    tuple(emission.path[: emission.path_count]),
                    emission.bonus,
                )
            )

    def generations(self) -> list[Generation]:
        return [Generation(tuple(tokens), tuple(rounds)) for tokens, rounds in zip(self._tokens, self._rounds, strict=True)]


def _forward_tap(wanted: frozenset[str], sink: TapSink, pointer: int) -> None:
    (
        struct_size, layer, name_at, data, device_type, _, ndim, code, bits, lanes, shape_at, strides_at, byte_offset,
        handoff, partial_sum, shard_axis, _, _, _,
    ) = abi.TAP_LAYOUT.unpack(ctypes.string_at(pointer, abi.TAP_LAYOUT.size))  # fmt: skip
    if struct_size < abi.TAP_LAYOUT.size:
        raise EngineError(f"a tap has struct_size {struct_size}, but must have at least {abi.TAP_LAYOUT.size}")
    name = ctypes.string_at(name_at).decode()
    if name not in wanted:
        raise EngineError(f"the engine pushed tap {name!r}, which was not asked for")
    if handoff or partial_sum or shard_axis >= 0:
        return  # not what the next operation consumed, or not whole: the judge composes the region instead
    dtype = tensors.DTYPES.get((code, bits)) if lanes == 1 else None
    if dtype is None or device_type != abi.CPU or not 0 <= ndim < len(_SHAPES):
        raise EngineError(
            f"tap {name!r} of layer {layer} has dtype code {code}, {bits} bits, {lanes} lanes, {ndim} dimensions on device type {device_type}, "
            "but must be float32, int32 or uint8 in CPU memory"
        )
    shape = tuple(_SHAPES[ndim].from_address(shape_at)) if ndim else ()
    strides = tuple(_SHAPES[ndim].from_address(strides_at)) if strides_at and ndim else None
    if any(size < 0 for size in shape) or (not data and 0 not in shape):
        raise EngineError(f"tap {name!r} of layer {layer} has shape {list(shape)} and {'no data' if not data else 'data'}")
    sink(name, layer, tensors.copied((data or 0) + byte_offset, shape, strides, dtype))
