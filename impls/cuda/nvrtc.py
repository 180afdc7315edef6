"""Compilation with NVRTC of the wheel nvidia-cuda-nvrtc-cu12, by ctypes: what CuPy for CUDA 12 would compile at run time. Nothing is executed."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from impls.native.build import BuildError


def find_library() -> Path | None:
    """libnvrtc of the installed wheel, None without it."""
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    found = [path for place in spec.submodule_search_locations for path in Path(place).glob("lib/libnvrtc.so.*")]
    return found[0] if found else None


def check(source: str, architectures: Sequence[str]) -> list[str]:
    """One line per architecture; without the wheel a line that says so. Raises BuildError with the compiler's log."""
    path = find_library()
    if path is None:
        return ["NVRTC: not compiled, the wheel nvidia-cuda-nvrtc-cu12 (extra cuda12) is not installed"]
    library = ctypes.CDLL(str(path))
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    version = f"NVRTC {major.value}.{minor.value}"
    return [f"{version} sm_{architecture}: {_compiled(library, source, architecture, version)} bytes" for architecture in architectures]


def _compiled(library: Any, source: str, architecture: str, version: str) -> int:
    """Size of the cubin."""
    program = ctypes.c_void_p()
    _checked(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None))
    try:
        options = [f"-arch=sm_{architecture}".encode(), b"-std=c++17"]
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status:
            size = ctypes.c_size_t()
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise BuildError(f"{version}, sm_{architecture}: {log.value.decode(errors='replace')[-4000:]}")
        cubin = ctypes.c_size_t()
        _checked(library, library.nvrtcGetCUBINSize(program, ctypes.byref(cubin)))
        return cubin.value
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _checked(library: Any, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise BuildError(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}")
