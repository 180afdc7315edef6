"""python -m impls.cuda.build [--check] [--emulated]: compile the CUDA engine into a content-hashed cache and print its path.

`library()` needs nvcc and cuBLAS and makes libparitree_cuda for the GPU of this machine; `library(emulated=True)` needs a C++ compiler only
and runs the same kernels on the CPU (emulator/emulator.hpp). `--check` compiles every kernel for every architecture that is claimed, with
nvcc and, where its wheel is installed, with NVRTC; nothing is executed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from impls.cuda import nvrtc
from impls.cuda.source import FOLDER, expanded, kernel_names
from impls.native import build as native_build

ARCHITECTURES = ("80", "90", "90a", "100", "120")
SHARED_MAX = 101_376  # bytes of static shared memory, and of dynamic where a kernel is not marked as larger: what sm_120 grants a block
HOST = FOLDER / "host"
NATIVE = FOLDER.parent / "native"
CXX_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-fast-math", "-ffp-contract=off")
EMULATED_FLAGS = (*CXX_FLAGS, "-DPARITREE_NO_CUBLAS", "-fno-strict-aliasing", "-w")
PLANTED = "PARITREE_PLANTED"  # compiles the bugs of the host code in; PARITREE_CUDA_PLANT names the one that acts (impls/cuda/plants.py)
JOBS = min(4, os.cpu_count() or 1)


class NoNvcc(native_build.BuildError):
    """There is no CUDA compiler; the message says how to get one."""


class Incomplete(NoNvcc):
    """There is a CUDA compiler, but no GPU to compile for, or no cuBLAS; the message says what to do."""


def find_nvcc() -> str:
    """PARITREE_NVCC, or nvcc on the PATH or under CUDA_HOME or /usr/local/cuda. Raises NoNvcc."""
    named = os.environ.get("PARITREE_NVCC")
    candidates = [named] if named else ["nvcc", f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/nvcc"]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found:
            return found
    raise NoNvcc(
        "no CUDA compiler was found (PARITREE_NVCC, nvcc, CUDA_HOME): install the CUDA toolkit 12.9 or later with cuBLAS; everything but the "
        "native CUDA engine works without it"
    )


def library(*, emulated: bool = False, defines: Sequence[str] = ()) -> Path:
    """The path of the compiled engine, made now if it is not in the cache. `defines`: macros of planted bugs. Raises NoNvcc or BuildError."""
    compiler = native_build.find_compiler()
    identity = [*compiler, native_build.compiler_version(compiler)]
    identity += ["emulated"] if emulated else [_nvcc_version(find_nvcc()), *_device_flags()]
    sources = [
        *sorted(HOST.iterdir()),
        *sorted(NATIVE.glob("*.[ch]pp")),
        NATIVE / "include" / "paritree.h",
        *sorted((FOLDER / "emulator").iterdir()),
    ]
    digest = _digest(*identity, *defines, expanded(), *(path.read_text() for path in sources))
    target = native_build.cache_folder() / f"paritree-cuda-{'emulated-engine-' if emulated else ''}{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as folder:
            made = Path(folder) / target.name
            (_link_emulated if emulated else _link_device)(
                " ".join(identity), compiler, Path(folder), made, [f"-D{name}" for name in defines]
            )
            os.replace(made, target)
    return target


def check(architectures: Sequence[str] = ARCHITECTURES) -> list[str]:
    """One line per compilation by nvcc. Raises NoNvcc, or BuildError with what the compiler said."""
    nvcc = find_nvcc()
    with tempfile.TemporaryDirectory(prefix="paritree-") as name:
        folder = Path(name)
        source = folder / "kernels.cu"
        source.write_text(expanded())

        def compiled(architecture: str) -> str:
            command = [
                nvcc,
                "-std=c++17",
                f"-arch=sm_{architecture}",
                "-cubin",
                "-Xptxas",
                "-v",
                "-o",
                str(folder / f"{architecture}.cubin"),
            ]
            report = _run([*command, str(source)])
            spills = [int(size) for size in re.findall(r"(\d+) bytes spill stores", report)]
            static = [int(size) for size in re.findall(r"(\d+) bytes smem", report)]
            if static and max(static) > SHARED_MAX:
                raise native_build.BuildError(f"sm_{architecture}: a kernel takes {max(static)} bytes of shared memory, above {SHARED_MAX}")
            return f"nvcc sm_{architecture}: {len(spills)} kernels, {sum(1 for size in spills if size)} with spills"

        with ThreadPoolExecutor(min(2, JOBS)) as pool:
            return list(pool.map(compiled, architectures))


# ---- from sources to a library ---------------------------------------------------------------------------------------


def _host_sources() -> list[Path]:
    """The engine's own C++ and what it shares with the CPU engine: everything of that but its C ABI."""
    return [*sorted(HOST.glob("*.cpp")), *(path for path in sorted(NATIVE.glob("*.cpp")) if path.name != "abi.cpp")]


def _compile_all(identity: str, folder: Path, command: Callable[[Path, Path], list[str]], sources: Sequence[Path]) -> list[str]:
    """Objects in the cache folder, made where they are missing: a planted bug changes one file of ten, and the launcher takes longest."""
    headers = (
        *HOST.glob("*.hpp"),
        *HOST.glob("*.inl"),
        *NATIVE.glob("*.hpp"),
        NATIVE / "include" / "paritree.h",
        *(FOLDER / "emulator").iterdir(),
    )
    shared = _digest(identity, expanded(), *(path.read_text() for path in sorted(headers)))

    def made(source: Path) -> str:
        text = source.read_text()
        text += (HOST / "launch.cu").read_text() if "launch.cu" in text else ""
        own = folder / f"{source.parent.name}-{source.name}.o"
        words = [word for word in command(source, own) if word != f"-D{PLANTED}" or "planted(" in text]  # host/launch.hpp
        flags = [word for word in words if word.startswith("-")]
        target = native_build.cache_folder() / f"paritree-cuda-object-{_digest(shared, text, *flags)}.o"
        if not target.exists():
            _run(words)
            os.replace(own, target)
        return str(target)

    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(made, sources))


def _link_emulated(identity: str, compiler: tuple[str, ...], folder: Path, target: Path, defines: list[str]) -> None:
    listing = " ".join(f"X({name})" for name in kernel_names(emulated=True))
    emulator = FOLDER / "emulator"
    launcher = folder / "launcher.cpp"
    launcher.write_text(
        f'#include "{emulator / "emulator.hpp"}"\n{expanded()}\n#define PARITREE_KERNEL_LIST(X) {listing}\n'
        f'#include "{emulator / "emulator.cpp"}"\n#include "{HOST / "launch.cu"}"\n'
    )
    flags = [*EMULATED_FLAGS, *native_build_architecture(), *defines]

    def command(source: Path, out: Path) -> list[str]:
        return [*compiler, *flags, "-c", str(source), "-o", str(out)]

    objects = _compile_all(identity, folder, command, [launcher, *_host_sources()])
    _run([*compiler, "-shared", *objects, "-o", str(target)])


def _link_device(identity: str, compiler: tuple[str, ...], folder: Path, target: Path, defines: list[str]) -> None:
    nvcc, architecture = find_nvcc(), _device_flags()
    device = [HOST / "launch.cu", HOST / "cublas_gemm.cu"]

    def command(source: Path, out: Path) -> list[str]:
        if source.suffix != ".cu":
            return [*compiler, *CXX_FLAGS, *defines, "-c", str(source), "-o", str(out)]
        host_flags = ",".join(("-fPIC", "-fvisibility=hidden"))
        return [nvcc, "-std=c++17", "-O3", *architecture, "-Xcompiler", host_flags, *defines, "-c", str(source), "-o", str(out)]

    try:
        _compile_all(identity, folder, command, device[1:])  # at once, before minutes are spent on the kernels
    except native_build.BuildError as problem:
        if "cublas_v2.h" in str(problem):
            raise Incomplete(
                f"{nvcc} finds no cublas_v2.h: install cuBLAS for development beside it (libcublas-dev, cuda-libraries-dev)"
            ) from None
        raise
    objects = _compile_all(identity, folder, command, [*device, *_host_sources()])
    _run([nvcc, "-shared", architecture[0], *objects, "-o", str(target), "-lcublas"])


def _device_flags() -> tuple[str, ...]:
    """-gencode and macros for PARITREE_CUDA_ARCH ("90a", "120"), or for the GPU of this machine. Raises Incomplete without either."""
    architecture = os.environ.get("PARITREE_CUDA_ARCH") or _own_architecture()
    # Hopper's own instructions need its full name, and the host part has to know that their kernels are there
    macros = ("-DPARITREE_SM90A",) if architecture == "90a" else ()
    return (f"-gencode=arch=compute_{architecture},code=sm_{architecture}", *macros)


@functools.lru_cache(maxsize=1)
def _own_architecture() -> str:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        answer = ""
    found = re.match(r"(\d+)\.(\d)\s", answer)
    if found is None:
        raise Incomplete(
            "nvidia-smi names no GPU to compile the native CUDA engine for: run on a machine with one, or say which by PARITREE_CUDA_ARCH "
            f"({', '.join(ARCHITECTURES)})"
        )
    architecture = found[1] + found[2]
    return "90a" if architecture == "90" else architecture


def native_build_architecture() -> tuple[str, ...]:
    from impls.cuda.emulate import architecture_flags

    return architecture_flags()


@functools.lru_cache(maxsize=4)
def _nvcc_version(nvcc: str) -> str:
    return _run([nvcc, "--version"])


def _run(command: Sequence[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise native_build.BuildError(
            f"{shlex.join(command)}\nended with status {answer.returncode}:\n{(answer.stderr or answer.stdout).strip()[-6000:]}"
        )
    return answer.stdout + answer.stderr


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m impls.cuda.build", description="Compile the CUDA engine and print its path.")
    parser.add_argument("--check", action="store_true", help=f"compile the kernels for sm_{', sm_'.join(ARCHITECTURES)} and keep nothing")
    parser.add_argument("--if-present", action="store_true", help="with --check: without nvcc say so and succeed")
    parser.add_argument("--emulated", action="store_true", help="the engine on the CPU, by the emulator")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.check:
            return checked(chosen.if_present)
        print(library(emulated=chosen.emulated))
    except native_build.BuildError as problem:
        print(problem, file=sys.stderr)
        return 3
    return 0


def checked(if_present: bool) -> int:
    """Compiles with nvcc and with NVRTC, each where it is there, and prints what each made; 3 without nvcc unless `if_present`. Raises BuildError."""
    status = 0
    try:
        print("\n".join(check()), flush=True)
    except NoNvcc as problem:
        print(problem, file=sys.stderr)
        status = 0 if if_present else 3
    print("\n".join(nvrtc.check(expanded(), ARCHITECTURES)))
    return status


if __name__ == "__main__":
    sys.exit(main())
