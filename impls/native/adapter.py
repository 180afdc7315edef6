"""Any shared library with the C ABI of include/paritree.h as a `spec.engine.Engine`, whatever subset it implements.

`load_library(path)` checks what can be checked before the first call: symbols, ABI version, struct sizes, the description.
A missing symbol is `Unsupported`; an error status is `EngineError` with the library's own words; an exception of a
callback (weights, taps, drafter) stops the engine and comes out of the call unchanged.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.native import abi, tensors
from impls.native.session import LibrarySession, Raised
from spec.config import Config, as_parameters
from spec.engine import PROFILES, Description, EngineError, Profile, Unsupported
from spec.ops import OPS
from spec.taps import all_tap_names
from spec.weights import EXPERT_STACKS, Provider, WeightError, checked_tensor, is_large, tensor_shape, weight_shapes

CALLS_MAX = 512  # signatures of run_op kept; a fuzzer rarely repeats older ones
GUARD_BYTES = 64  # before and after a workspace, and after a description; one cache line keeps the alignment
GUARD = b"\xa5" * GUARD_BYTES
POISON = 0xFF  # every float32, int32 and bfloat16 of these bytes is NaN or -1


class EngineLoadError(Exception):
    """A library that cannot be an engine: which, what was found, what is expected, and what to do."""

    def __init__(self, path: str, found: str, expected: str, remedy: str) -> None:
        super().__init__(f"{path}: {found}, but {expected}: {remedy}")
        self.path, self.found, self.expected, self.remedy = path, found, expected, remedy

    def __reduce__(self) -> tuple[type[EngineLoadError], tuple[str, str, str, str]]:
        return EngineLoadError, (self.path, self.found, self.expected, self.remedy)


def load_library(path: str | Path, *, name: str | None = None) -> LibraryEngine:
    """The engine in the shared library at `path`; `name` replaces the name that it gives itself. Raises EngineLoadError."""
    return LibraryEngine(Library(str(path)), name)


def native(plant: str | None = None, *, sanitize: bool = False) -> LibraryEngine:
    """paritree's own native engine, compiled at first use; with a planted bug if `plant` is given.

    Raises impls.native.build.NoCompiler or BuildError.
    """
    from impls.native import build

    return load_library(build.library(plant=plant, sanitize=sanitize), name=f"native:{plant}" if plant else None)


class Library:
    """The symbols of a shared library, and its statuses as exceptions."""

    def __init__(self, path: str) -> None:
        self.path = path
        if not os.path.isfile(path):
            raise EngineLoadError(
                path, "there is no such file", "the path of a shared library is needed", "check the spelling, or build it first"
            )
        try:
            self._library = ctypes.CDLL(os.path.abspath(path))
        except OSError as problem:
            raise EngineLoadError(
                path,
                f"the loader says '{problem}'",
                "a shared library of this machine's architecture is needed",
                "build it with -shared -fPIC",
            ) from None
        self._functions: dict[str, Any] = {}
        for symbol, (result, arguments) in abi.SIGNATURES.items():
            function = getattr(self._library, symbol, None)
            if function is not None:
                function.restype, function.argtypes = result, arguments
                self._functions[symbol] = function
        missing = [symbol for symbol in abi.REQUIRED if symbol not in self._functions]
        if missing:
            raise EngineLoadError(
                path,
                f"symbol {missing[0]} is missing",
                "every engine exports it",
                'declare it extern "C" and keep it visible (see paritree.h)',
            )
        version = self.function("paritree_abi_version")()
        if version != abi.ABI_VERSION:
            raise EngineLoadError(
                path, f"it speaks ABI {version}", f"this paritree speaks ABI {abi.ABI_VERSION}", "build it with this paritree.h"
            )

    def has(self, symbol: str) -> bool:
        return symbol in self._functions

    def function(self, symbol: str) -> Any:
        """The function. Raises Unsupported where the library does not export it."""
        function = self._functions.get(symbol)
        if function is None:
            raise Unsupported(f"{os.path.basename(self.path)} does not export {symbol}")
        return function

    def last_error(self) -> str:
        if "paritree_last_error" not in self._functions:
            return "no message: the library has no paritree_last_error"
        message = self._functions["paritree_last_error"]()
        return message.decode(errors="replace") if message else "no message"

    def check(self, status: int, what: str) -> None:
        """Raises Unsupported or EngineError unless `status` is OK."""
        if status == abi.OK:
            return
        if status == abi.UNSUPPORTED:
            raise Unsupported(self.last_error())
        if status in (abi.INVALID, abi.FAILED):
            raise EngineError(self.last_error())
        raise EngineError(f"{what} returned status {status}, but a status is 0, 1, 2 or 3: {self.last_error()}")


class LibraryEngine:
    """`spec.engine.Engine`. `run_op` may be called from several threads; calls of one engine then wait for each other."""

    def __init__(self, library: Library, name: str | None = None) -> None:
        self._library = library
        self._description = _described(library, name)
        self._calls: dict[Any, _Call] = {}
        self._lock = threading.Lock()

    def describe(self) -> Description:
        return self._description

    def run_op(
        self, op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float], outputs: Mapping[str, NDArray[Any]]
    ) -> None:
        """Fill `outputs`. The workspace is poisoned before the call; raises EngineError if the engine wrote past its end."""
        # names, dtypes and numbers of dimensions decide the structs; sizes, strides, values and pointers are filled in at each run
        key = (
            op,
            tuple([(n, a.dtype, a.ndim) for n, a in inputs.items()]),
            tuple([(n, a.dtype, a.ndim) for n, a in outputs.items()]),
            tuple([(n, type(v)) for n, v in params.items()]),
        )
        with self._lock:
            call = self._calls.get(key)
            if call is None:
                if len(self._calls) >= CALLS_MAX:
                    self._calls.clear()
                call = self._calls[key] = _Call(self._library, op, inputs, params, outputs)
            call.run(inputs, params, outputs)

    def open(
        self,
        config: Config,
        weights: Provider | Mapping[str, NDArray[np.float32]],
        *,
        options: Mapping[str, int | float] | None = None,
    ) -> LibrarySession:
        """`options`: parameters of this engine's own, beside those of the configuration. `stream_experts` 1, which a large model sets,
        asks the engine to fetch experts one at a time, as "3.expert_gate/17", also after this call.

        Raises whatever the provider raises, WeightError for an unusable tensor, EngineError or Unsupported.
        """
        provider = weights.__getitem__ if isinstance(weights, Mapping) else weights
        function = self._library.function("paritree_open")
        raised = Raised()
        chosen = ({"stream_experts": 1} if is_large(config) else {}) | dict(options or {})
        lent = _LentWeights(config, provider, raised, streams=bool(chosen.get("stream_experts")))
        callback = abi.WeightFn(lent)
        params, owners = tensors.parameters(as_parameters(config) | chosen)
        args = abi.OpenArgs(ctypes.sizeof(abi.OpenArgs), 0, params, callback, None, None, abi.Device(abi.CPU, 0), None)
        handle = ctypes.c_void_p()
        status = function(ctypes.byref(args), ctypes.byref(handle))
        del owners
        lent.take_back()
        raised.reraise()
        self._library.check(status, "paritree_open")
        if not handle.value:
            raise EngineError("paritree_open returned OK, but no session")
        session = LibrarySession(self._library, handle.value, config, self._description, (lent, callback), raised)
        if self._library.has("paritree_close"):
            session.finalizer = weakref.finalize(session, self._library.function("paritree_close"), handle.value)
        return session


class _LentWeights:
    """The weight callback. Every tensor is lent in one buffer, which turns to NaN when a loan is over and lives as long as the
    session: an engine that keeps a pointer computes with NaN instead of with memory that happens to be intact."""

    def __init__(self, config: Config, provider: Provider, raised: Raised, *, streams: bool) -> None:
        """`streams`: expert stacks are not lent whole."""
        self._config = config
        self._provider = provider
        self._raised = raised
        self._whole = {
            name: shape for name, shape in weight_shapes(config).items() if not (streams and name.rpartition(".")[2] in EXPERT_STACKS)
        }
        largest = [math.prod(shape) for shape in self._whole.values()]
        self._buffer = np.empty(max(*largest, config.hidden * config.expert_dim), np.float32)
        self._lent = self._buffer[:0]
        self._owners: list[Any] = []

    def __call__(self, user: int | None, name: bytes, tensor: Any) -> int:
        return self._raised.guard(self._lend, name.decode(), tensor)

    def take_back(self) -> None:
        self._lent.fill(np.nan)

    def _lend(self, name: str, tensor: Any) -> None:
        self.take_back()
        try:
            shape = tensor_shape(self._config, name)
        except KeyError:
            raise WeightError(f"the engine asks for weight {name!r}, which this configuration does not have") from None
        if "/" not in name and name not in self._whole:
            raise Unsupported(f"weight {name!r} is too large to be lent whole: ask for one expert at a time, {name}/0")
        value = checked_tensor(name, shape, self._provider)
        self._lent = self._buffer[: value.size].reshape(value.shape)
        self._lent[...] = value
        self._owners = tensors.describe(tensor.contents, name, self._lent)
        tensor.contents.data = tensors.address(self._lent)


class _Call:
    """One run_op signature: all structs made once; sizes, strides, values and data pointers at each run."""

    def __init__(
        self,
        library: Library,
        op: str,
        inputs: Mapping[str, NDArray[Any]],
        params: Mapping[str, int | float],
        outputs: Mapping[str, NDArray[Any]],
    ) -> None:
        self._library = library
        self._function = library.function("paritree_run_op")
        self._owners: list[Any] = [op.encode()]
        in_tensors, self._inputs = self._operands(inputs)
        out_tensors, self._outputs = self._operands(outputs)
        pairs, owners = tensors.parameters(params)
        self._params = list(pairs.items[: len(params)]) if params else []
        self._owners += owners
        self._call = abi.OpCall(
            ctypes.sizeof(abi.OpCall),
            1,
            self._owners[0],
            in_tensors,
            len(inputs),
            pairs,
            out_tensors,
            len(outputs),
            None,
            0,
            abi.Device(abi.CPU, 0),
        )
        self._reference = ctypes.byref(self._call)
        self._asks_workspace = library.has("paritree_run_op_workspace")
        self._workspace: NDArray[np.uint8] | None = None
        self._shapes: Any = None  # of the run that the workspace was made for

    def run(self, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float], outputs: Mapping[str, NDArray[Any]]) -> None:
        for operand, array in zip(self._inputs, inputs.values(), strict=True):
            operand.point_to(array)
        for operand, (name, array) in zip(self._outputs, outputs.items(), strict=True):
            if not array.flags.writeable:
                raise EngineError(f"output {name} is read-only: pass an array that can be written")
            operand.point_to(array)
        for item, value in zip(self._params, params.values(), strict=True):
            if item.kind:
                item.value.d = value
            else:
                item.value.i = value
        if self._asks_workspace:
            shapes = ([a.shape for a in inputs.values()], [a.shape for a in outputs.values()], list(params.values()))
            if shapes != self._shapes:
                self._workspace = self._make_workspace()
                self._shapes = shapes
        if self._workspace is not None:
            self._workspace.fill(POISON)
        status = self._function(self._reference)
        if status != abi.OK:
            self._library.check(status, "paritree_run_op")
        if self._workspace is not None:
            self._check_guards()

    def _operands(self, arrays: Mapping[str, NDArray[Any]]) -> tuple[Any, list[tensors.Operand]]:
        named = (abi.NamedTensor * len(arrays))()
        self._owners.append(named)
        for item, name in zip(named, arrays, strict=True):
            item.name = name.encode()
            self._owners.append(item.name)
        return named, [tensors.Operand(item.tensor, name, array) for item, (name, array) in zip(named, arrays.items(), strict=True)]

    def _make_workspace(self) -> NDArray[np.uint8] | None:
        """The usable part of a guarded buffer, None where the engine wants none."""
        self._call.workspace, self._call.workspace_bytes = None, 0
        wanted = ctypes.c_uint64()
        self._library.check(
            self._library.function("paritree_run_op_workspace")(self._reference, ctypes.byref(wanted)), "paritree_run_op_workspace"
        )
        if wanted.value == 0:
            return None
        memory = np.frombuffer(bytearray(wanted.value + 3 * GUARD_BYTES), np.uint8)
        start = GUARD_BYTES + -tensors.address(memory) % GUARD_BYTES
        self._before = memory[start - GUARD_BYTES : start]
        self._after = memory[start + wanted.value : start + wanted.value + GUARD_BYTES]
        self._before[:] = self._after[:] = np.frombuffer(GUARD, np.uint8)
        usable = memory[start : start + wanted.value]
        self._call.workspace, self._call.workspace_bytes = tensors.address(usable), wanted.value
        return usable

    def _check_guards(self) -> None:
        for where, guard in (("before the start", self._before), ("past the end", self._after)):
            if guard.tobytes() != GUARD:
                guard[:] = np.frombuffer(GUARD, np.uint8)
                raise EngineError(f"the engine wrote {where} of its workspace of {self._call.workspace_bytes} bytes")


# ---- the description ------------------------------------------------------------------------------------------------


def _described(library: Library, name: str | None) -> Description:
    size = ctypes.sizeof(abi.DescriptionStruct)
    memory = ctypes.create_string_buffer(bytes(size) + GUARD)
    answer = abi.DescriptionStruct.from_buffer(memory)
    answer.struct_size = size
    status = library.function("paritree_describe")(ctypes.byref(answer))
    if status != abi.OK:
        raise EngineLoadError(
            library.path,
            f"paritree_describe returned status {status} ({library.last_error()})",
            "it must return 0",
            "build it with this paritree.h",
        )
    if memory.raw[size : size + GUARD_BYTES] != GUARD or answer.struct_size != size:
        raise EngineLoadError(
            library.path,
            f"paritree_describe changed struct_size or wrote past the {size} bytes of the description",
            "it may fill those fields only",
            "build it with this paritree.h",
        )
    for field in ("name", "version", "capabilities", "ops", "taps"):
        if getattr(answer, field) is None:
            raise EngineLoadError(library.path, f"{field} of the description is NULL", "it must be a string", 'set it; "" means none')
    capabilities = _listed(answer.capabilities)
    for capability in sorted(capabilities):
        symbols = abi.CAPABILITY_SYMBOLS.get(capability)
        if symbols is None:
            known = ", ".join(abi.CAPABILITY_SYMBOLS)
            raise EngineLoadError(
                library.path, f"it lists the capability {capability!r}", f"there are only {known}", "remove it or correct the spelling"
            )
        missing = [symbol for symbol in symbols if not library.has(symbol)]
        if missing:
            raise EngineLoadError(
                library.path,
                f"it lists the capability {capability!r}",
                f"does not export {missing[0]}",
                "export it or remove the capability",
            )
    return Description(
        name=name or answer.name.decode(),
        version=answer.version.decode(),
        profile=_profile(library.path, answer),
        capabilities=capabilities,
        ops=_listed(answer.ops),
        taps=_listed(answer.taps),
    )


def _listed(text: bytes) -> frozenset[str]:
    return frozenset(part.strip() for part in text.decode().split(",") if part.strip())


def _profile(path: str, answer: abi.DescriptionStruct) -> Profile:
    """A named profile with the fields that differ; a name of its own starts from the defaults."""
    name = answer.profile_name.decode() if answer.profile_name else "float32-any-order"
    base = PROFILES.get(name, Profile(name=name))
    values: dict[str, Any] = dict(tensors.read_parameters(answer.profile))
    block = values.pop("height_block", None)
    known = {f.name: type(getattr(base, f.name)) for f in dataclasses.fields(Profile) if f.name not in ("name", "height", "per_op")}
    per_op = tuple(_of_operation(path, key, values.pop(key), known) for key in sorted(values) if "." in key)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise EngineLoadError(
            path,
            f"its profile has {unknown[0]!r}",
            f"a profile has only {', '.join(known)} and height_block",
            "remove it or correct the spelling",
        )
    fields: dict[str, Any] = {key: known[key](value) for key, value in values.items()}
    if block is not None:
        fields["height"] = f"blocked:{int(block)}" if block else "any"
    return dataclasses.replace(base, **fields, per_op=(*base.per_op, *per_op))


def _of_operation(path: str, key: str, value: Any, known: Mapping[str, type]) -> tuple[str, str, Any]:
    """`matmul.u_input`: a field of one operation or tap."""
    name, _, field = key.partition(".")
    if name not in OPS and name not in all_tap_names():
        raise EngineLoadError(path, f"its profile has {key!r}", f"{name!r} is no operation and no tap", "correct the spelling")
    if field == "height_block":
        return name, "height", f"blocked:{int(value)}" if value else "any"
    if field not in known:
        raise EngineLoadError(
            path, f"its profile has {key!r}", f"a profile has only {', '.join(known)} and height_block", "remove it or correct the spelling"
        )
    return name, field, known[field](value)
