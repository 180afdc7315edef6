"""The kernels on the CPU: `EmulatedDevice` compiles the same device code with a C++ compiler and runs it by emulator/emulator.hpp.

What this shows: indices, barriers, edges, ties, and the host code of this folder, judged like any engine where there is no GPU. What it
cannot show: the GPU's arithmetic, its memory model, its speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.cuda.device import GUARD_BYTES, POISON, Array, OutOfBounds, Shape
from impls.cuda.source import FOLDER, expanded, kernel_names
from impls.native import build as native_build
from spec.engine import EngineError

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-w")


class EmulatedDevice:
    """`impls.cuda.device.Device` on NumPy arrays. `seed` 0: threads run in order; else in an order drawn after every barrier.

    Buffers are poisoned and guarded. Raises native_build.NoCompiler or BuildError at construction.
    """

    def __init__(self, *, seed: int = 0, source: str | None = None) -> None:
        self._function = _library(source if source is not None else expanded())
        self._seed = seed
        self._guarded: list[NDArray[np.uint8]] = []
        self._recorded: list[tuple[str, Sequence[int], int, Sequence[Any], int]] | None = None  # while a graph is captured
        self.processors = 4
        self.shared_max = 232_448  # of sm_90
        self.warpgroups = True
        self.clusters = False

    def empty(self, shape: Shape, dtype: Any) -> Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        whole = np.full(size + 2 * GUARD_BYTES, POISON, np.uint8)
        start = -whole.ctypes.data % 128
        self._guarded.append(whole[start + size : start + size + GUARD_BYTES // 2])
        return whole[start : start + size].view(dtype).reshape(shape)

    def zeros(self, shape: Shape, dtype: Any) -> Array:
        out = self.empty(shape, dtype)
        out.fill(0)
        return out

    def upload(self, values: NDArray[Any]) -> Array:
        out = self.empty(values.shape, values.dtype)
        out[...] = values
        return out

    def download(self, array: Array) -> NDArray[Any]:
        return np.array(array)

    def check_guards(self) -> None:
        """Raises OutOfBounds if any buffer made since the last call has been overrun."""
        guarded, self._guarded = self._guarded, []
        if any((guard != POISON).any() for guard in guarded):
            raise OutOfBounds("a kernel wrote behind the end of one of its buffers")

    def launch(self, kernel: str, grid: Sequence[int], threads: int, arguments: Sequence[Any], shared_bytes: int = 0) -> None:
        """Raises EngineError for a barrier that not all threads reach, too much shared memory, or arguments that do not fit."""
        if self._recorded is not None:
            self._recorded.append((kernel, tuple(grid), threads, tuple(arguments), shared_bytes))
            return
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        message = ctypes.create_string_buffer(256)
        x, y, z = (*grid, 1, 1)[:3]
        if self._function(kernel.encode(), x, y, z, threads, shared_bytes, pointers, len(values), self._seed, message, 256):
            raise EngineError(message.value.decode())

    def captured(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """As CupyDevice.captured: launches are kept with their arguments, and nothing runs before the first replay."""
        recorded: list[tuple[str, Sequence[int], int, Sequence[Any], int]] = []
        self._recorded = recorded
        try:
            result = body()
        finally:
            self._recorded = None

        def replay() -> None:
            for launched in recorded:
                self.launch(*launched)

        return replay, result

    def synchronise(self) -> None: ...


def _value(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, np.int64):
        return ctypes.c_int64(int(argument))
    if isinstance(argument, np.generic):
        raise TypeError(f"an argument is {argument.dtype}, but only int64 scalars have a width of their own")
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int32(argument)


@lru_cache(maxsize=64)
def _library(source: str) -> Any:
    """The compiled emulation of `source`, from the cache folder of the native engine."""
    compiler = native_build.find_compiler()
    emulator = FOLDER / "emulator"
    listing = " ".join(f"X({name})" for name in kernel_names(emulated=True))
    text = (
        f'#include "{emulator / "emulator.hpp"}"\n{source}\n#define PARITREE_KERNEL_LIST(X) {listing}\n'
        f'#include "{emulator / "emulator.cpp"}"\n'
    )
    flags = (*FLAGS, *architecture_flags())
    parts = [text, *flags, *compiler, native_build.compiler_version(compiler), platform.machine()]
    parts += [(emulator / name).read_text() for name in ("emulator.hpp", "emulator.cpp")]
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()
    folder = native_build.cache_folder()
    path = folder / f"paritree-cuda-emulated-{digest}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as making:
            code, made = Path(making) / "kernels.cpp", Path(making) / path.name
            code.write_text(text)
            answer = subprocess.run([*compiler, *flags, str(code), "-o", str(made)], capture_output=True, text=True, check=False)
            if answer.returncode:
                raise native_build.BuildError(f"the emulation of the kernels does not compile:\n{answer.stderr.strip()[-4000:]}")
            os.replace(made, path)
    function = ctypes.CDLL(str(path)).paritree_emulate
    function.argtypes = (
        ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_int,
        ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint,
    )  # fmt: skip
    function.restype = ctypes.c_int
    return function


def architecture_flags() -> tuple[str, ...]:
    """FMA in hardware where the processor has it: fmaf is a slow library call otherwise. The results are the same."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    return ("-mfma",) if " fma " in flags else ()
