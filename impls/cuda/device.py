"""Where kernels run: the few things that the host code of this folder asks of a device. CuPy on a GPU here, the emulator in emulate.py.

Arrays are whatever the device gives (cupy.ndarray or numpy.ndarray); both have shape, dtype, strides, slicing and reshape.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from impls.cuda.source import expanded, kernel_names
from impls.native import build as native_build
from spec.engine import Unsupported

Array = Any
Shape = tuple[int, ...]
SHARED_DEFAULT = 48 * 1024  # a kernel that wants more dynamic shared memory has to say so once
GUARD_BYTES = 256  # behind every buffer of a checking device
POISON = 0xFF  # float32 NaN, int32 -1


class Device(Protocol):
    """`launch` is asynchronous and in order; `download` waits. Arguments: arrays (their address), None (a null pointer), int (32 bits),
    float (32 bits), and NumPy scalars as they are."""

    processors: int
    shared_max: int  # bytes of shared memory that one block may have
    warpgroups: bool  # kernels of tree_attention_sm90.cuh are there
    clusters: bool  # and those of them whose blocks see each other's shared memory

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Uninitialised; a checking device fills it with poison."""
        ...

    def zeros(self, shape: Shape, dtype: Any) -> Array: ...

    def upload(self, values: NDArray[Any]) -> Array: ...

    def download(self, array: Array) -> NDArray[Any]: ...

    def launch(self, kernel: str, grid: Sequence[int], threads: int, arguments: Sequence[Any], shared_bytes: int = 0) -> None: ...


class OutOfBounds(Exception):
    """A kernel wrote behind the end of a buffer."""


class CupyDevice:
    """One CUDA device through CuPy. `checking`: buffers are full of poison, with guard words behind them that `check_guards` looks at."""

    def __init__(self, *, checking: bool = False, source: str | None = None) -> None:
        """`source`: device code in place of kernels.cuh. Raises Unsupported without CuPy or without a device."""
        try:
            import cupy
        except ImportError as problem:
            raise Unsupported(f"CuPy cannot be imported ({problem}): install paritree[cuda13] or paritree[cuda12]") from None
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as problem:
            raise Unsupported(f"there is no CUDA device: {problem}") from None
        if count == 0:
            raise Unsupported("there is no CUDA device")
        self._cupy = cupy
        self._checking = checking
        capability = cupy.cuda.Device().compute_capability
        self.warpgroups = self.clusters = capability == "90"
        self._module = cupy.RawModule(path=str(_cubin(source or expanded(), f"sm_{capability}{'a' if self.warpgroups else ''}")))
        self._kernels: dict[str, Any] = {}
        self._guarded: list[Any] = []
        attributes = cupy.cuda.Device().attributes
        self.processors: int = attributes["MultiProcessorCount"]
        self.shared_max: int = attributes["MaxSharedMemoryPerBlockOptin"]

    def empty(self, shape: Shape, dtype: Any) -> Array:
        if not self._checking:
            return self._cupy.empty(shape, dtype)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        whole = self._cupy.full(size + GUARD_BYTES, POISON, np.uint8)
        self._guarded.append(whole[size:])
        return whole[:size].view(dtype).reshape(shape)

    def zeros(self, shape: Shape, dtype: Any) -> Array:
        out = self.empty(shape, dtype)
        out.fill(0)
        return out

    def upload(self, values: NDArray[Any]) -> Array:
        out = self.empty(values.shape, values.dtype)
        if values.size:
            out.set(np.ascontiguousarray(values))
        return out

    def download(self, array: Array) -> NDArray[Any]:
        out: NDArray[Any] = self._cupy.asnumpy(array)
        return out

    def check_guards(self) -> None:
        """Raises OutOfBounds if any buffer made since the last call has been overrun."""
        guarded, self._guarded = self._guarded, []
        if guarded and not bool((self._cupy.concatenate(guarded) == POISON).all()):
            raise OutOfBounds("a kernel wrote behind the end of one of its buffers")

    def launch(self, kernel: str, grid: Sequence[int], threads: int, arguments: Sequence[Any], shared_bytes: int = 0) -> None:
        function = self._kernels.get(kernel)
        if function is None:
            function = self._kernels[kernel] = self._module.get_function(kernel)
        if shared_bytes > SHARED_DEFAULT and function.max_dynamic_shared_size_bytes < shared_bytes:
            function.max_dynamic_shared_size_bytes = shared_bytes
        shape = (*grid, 1, 1)[:3]
        function(shape, (threads,), tuple(map(_argument, arguments)), shared_mem=shared_bytes)

    def captured(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What `body` launches, as one CUDA graph to replay, and what it returned. Its arguments are those of now; what they point to is read at each
        replay. Buffers that `body` makes and drops may be given out again: use the results before asking for other memory."""
        stream = self._cupy.cuda.Stream(non_blocking=True)
        self._cupy.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture()
            result = body()
            graph = stream.end_capture()

        def replay() -> None:
            self._cupy.cuda.get_current_stream().synchronize()
            graph.launch(stream)
            stream.synchronize()

        return replay, result

    def synchronise(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


DELAY_CYCLES = 400_000  # about 0.2 ms: longer than the work of a small operation, so that reading too early shows
_DELAY = 'extern "C" __global__ void delay(long long cycles) { const long long start = clock64(); while (clock64() - start < cycles) {} }'


class DelayedDevice(CupyDevice):
    """Hazard: uploads are produced late, on a stream of their own, and everything else runs on a second one that waits for them by events.

    Neither waits for the default stream. A launch that goes there, or host code that relies on its being in order, meets poison. `astray`: the
    planted bug, launches on the default stream.
    """

    def __init__(self, *, astray: bool = False, source: str | None = None) -> None:
        super().__init__(checking=True, source=source)
        self._producer = self._cupy.cuda.Stream(non_blocking=True)
        self._consumer = self._cupy.cuda.Stream(non_blocking=True)
        self._delay = self._cupy.RawKernel(_DELAY, "delay")
        self._staged: list[tuple[Any, Array]] = []  # alive until the copies are over
        self._astray = astray

    def empty(self, shape: Shape, dtype: Any) -> Array:
        with self._consumer:
            return super().empty(shape, dtype)

    def zeros(self, shape: Shape, dtype: Any) -> Array:
        with self._consumer:
            return super().zeros(shape, dtype)

    def upload(self, values: NDArray[Any]) -> Array:
        out = self.empty(values.shape, values.dtype)
        if not values.size:
            return out
        staged = self._cupy.cuda.alloc_pinned_memory(values.nbytes)  # pageable memory would make the host wait, and hide what is tested
        host = np.frombuffer(staged, values.dtype, values.size).reshape(values.shape)
        host[...] = values
        self._producer.wait_event(self._consumer.record())  # after the poison
        with self._producer:
            self._delay((1,), (1,), (np.int64(DELAY_CYCLES),))
            out.set(host, stream=self._producer)
        self._consumer.wait_event(self._producer.record())
        self._staged.append((host, out))
        return out

    def download(self, array: Array) -> NDArray[Any]:
        with self._consumer:
            out = super().download(array)
        self._staged.clear()  # the stream is idle, so that no copy reads them any more
        return out

    def check_guards(self) -> None:
        with self._consumer:
            super().check_guards()

    def launch(self, kernel: str, grid: Sequence[int], threads: int, arguments: Sequence[Any], shared_bytes: int = 0) -> None:
        with self._cupy.cuda.Stream.null if self._astray else self._consumer:
            super().launch(kernel, grid, threads, arguments, shared_bytes)

    def synchronise(self) -> None:
        self._consumer.synchronize()


def _cubin(text: str, architecture: str) -> Path:
    """The compiled kernels, by CuPy's NVRTC, from the cache folder. CuPy's own path has no word for sm_90a."""
    from cupy.cuda import nvrtc

    version = ".".join(map(str, nvrtc.getVersion()))
    digest = hashlib.blake2b("\0".join((text, architecture, version)).encode(), digest_size=10).hexdigest()
    path = native_build.cache_folder() / f"paritree-cuda-{digest}.cubin"
    if not path.exists():
        program = nvrtc.createProgram(text, "kernels.cu", [], [])
        try:
            nvrtc.compileProgram(program, [f"-arch={architecture}", "-std=c++17"])
        except nvrtc.NVRTCError as problem:
            raise native_build.BuildError(f"NVRTC {version}, {architecture}: {problem}\n{nvrtc.getProgramLog(program)}") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
            made = Path(folder) / path.name
            made.write_bytes(nvrtc.getCUBIN(program))
            os.replace(made, path)
    return path


def _argument(value: Any) -> Any:
    if value is None:
        return np.uint64(0)
    if isinstance(value, bool | int):
        return np.int32(value)
    if isinstance(value, float):
        return np.float32(value)
    return value


__all__ = ["Array", "CupyDevice", "DelayedDevice", "Device", "OutOfBounds", "kernel_names"]
