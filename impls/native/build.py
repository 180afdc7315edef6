"""python -m impls.native.build [--sanitize] [--plant NAME]: compile the native engine into a content-hashed cache and print its path.

The library is compiled at first use. Its name is the hash of sources, flags and compiler version, so an edit, another
compiler and a plant each get a file of their own and nothing is ever stale. Objects are cached the same way; a plant
recompiles only the sources that mention it. Files are made in a temporary folder and published by `os.replace`, under a
lock, so that many processes may start at once. Without a compiler `NoCompiler` is raised and callers go on without this engine.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
FLAGS = ("-std=c++17", "-fno-fast-math", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
OPTIMISED = ("-O2",)
SANITIZED = ("-O0", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CANDIDATES = ("c++", "g++", "clang++")
PLANT_PREFIX = "PARITREE_PLANT_"


class BuildError(Exception):
    """The compiler refused a source; the message holds the command and what the compiler said."""


class NoCompiler(BuildError):
    """There is no C++ compiler; the message says how to get one."""


class UnknownPlant(BuildError):
    """No source mentions this plant; the message lists those that exist."""


def library(*, sanitize: bool = False, plant: str | None = None) -> Path:
    """The path of the compiled library, made now if it is not in the cache.

    Raises NoCompiler, UnknownPlant, or BuildError.
    """
    compiler = find_compiler()
    flags = (*FLAGS, *(SANITIZED if sanitize else OPTIMISED), *shlex.split(os.environ.get("PARITREE_CXXFLAGS", "")))
    macro = _macro(plant) if plant is not None else None
    sources = sorted(SOURCES.glob("*.cpp"))
    identity = (*compiler, compiler_version(compiler), *flags)
    keys = {source: _object_key(source, identity, macro) for source in sources}
    name = f"paritree-native{'-' + plant if plant else ''}{'-sanitize' if sanitize else ''}-{_digest(*keys.values())}.so"
    return _published(cache_folder() / name, lambda target: _link(identity, compiler, flags, keys, macro, target))


def plant_names() -> tuple[str, ...]:
    """Every plant that the sources know, as build and registry spell it ("mask-tile")."""
    found = {match for source in _texts() for match in re.findall(rf"#ifn?def {PLANT_PREFIX}(\w+)", source)}
    return tuple(sorted(name.lower().replace("_", "-") for name in found))


def cache_folder() -> Path:
    """PARITREE_CACHE, or ~/.cache/paritree (XDG_CACHE_HOME is respected)."""
    named = os.environ.get("PARITREE_CACHE")
    if named:
        return Path(named) / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paritree" / "native"


def find_compiler() -> tuple[str, ...]:
    """The command of PARITREE_CXX, CXX, or the first of c++, g++, clang++ on the PATH. Raises NoCompiler."""
    for variable in ("PARITREE_CXX", "CXX"):
        command = shlex.split(os.environ.get(variable, ""))
        if command:
            if shutil.which(command[0]) is None:
                raise NoCompiler(
                    f"{variable} is {os.environ[variable]!r}, but there is no such program: set it to a C++17 compiler or unset it"
                )
            return tuple(command)
    for candidate in CANDIDATES:
        if shutil.which(candidate):
            return (candidate,)
    raise NoCompiler(
        f"no C++ compiler was found (PARITREE_CXX, CXX, {', '.join(CANDIDATES)}): install one, `apt-get install g++`, "
        "`dnf install gcc-c++` or `xcode-select --install`; everything but the engine 'native' works without it"
    )


@functools.lru_cache(maxsize=8)
def compiler_version(compiler: tuple[str, ...]) -> str:
    """The first line of --version. Raises NoCompiler where the command does not run."""
    try:
        answer = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise NoCompiler(f"{shlex.join(compiler)} --version failed: {problem}; set PARITREE_CXX to a C++17 compiler") from None
    return answer.stdout.partition("\n")[0]


def sanitizer_preload() -> str:
    """LD_PRELOAD of a Python process that loads a sanitized library. Raises BuildError.

    The C++ library comes along because the sanitizer looks up `throw` when the process starts, before Python has loaded any C++.
    """
    compiler = find_compiler()

    def installed(*names: str) -> Path:
        for name in names:
            answer = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
            path = Path(answer.stdout.strip())
            if path.is_absolute() and path.exists():
                return path.resolve()
        raise BuildError(f"{shlex.join(compiler)} has no {names[0]}: install it (`apt-get install libasan8`) or build without --sanitize")

    return f"{installed('libasan.so', 'libclang_rt.asan.so')} {installed('libstdc++.so', 'libc++.so')}"


# ---- from sources to a library --------------------------------------------------------------------------------------


def _link(
    identity: Sequence[str], compiler: tuple[str, ...], flags: Sequence[str], keys: dict[Path, str], macro: str | None, target: Path
) -> None:
    def compiled(source: Path) -> Path:
        define = [f"-D{macro}"] if macro and macro in _text_with_includes(source) else []

        def make(out: Path) -> None:
            _run([*compiler, *flags, *define, "-c", str(source), "-o", str(out)])
            if _object_key(source, identity, macro) != keys[source]:  # else the object would lie under the key of another text, for ever
                raise BuildError(f"{source}, or a header that it includes, changed while it was compiled: build again")

        return _published(cache_folder() / "objects" / f"{source.stem}-{keys[source]}.o", make)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compiled, keys))
    _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(target)])


def _published(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made by make(temporary file) if it does not exist; one process makes it and the others wait."""
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f".{path.name}.lock").touch()
    except OSError as problem:
        raise BuildError(
            f"the cache {path.parent} cannot be written ({problem.strerror}): set PARITREE_CACHE to a folder that can be written"
        ) from None
    with _lock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
                made = Path(folder) / path.name
                make(made)
                os.replace(made, path)
    return path


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel frees it when the process dies
        yield


def _run(command: Sequence[str]) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise BuildError(
            f"{shlex.join(command)}\nended with status {answer.returncode}:\n{answer.stderr.strip()}\n"
            "If these are warnings of a newer compiler, set PARITREE_CXXFLAGS=-Wno-error and report them"
        )


def _macro(plant: str) -> str:
    if plant not in plant_names():
        raise UnknownPlant(f"there is no plant {plant!r} of the native engine: choose one of {', '.join(plant_names())}")
    return PLANT_PREFIX + plant.upper().replace("-", "_")


def _object_key(source: Path, identity: Sequence[str], macro: str | None) -> str:
    text = _text_with_includes(source)
    return _digest(*identity, text, macro if macro and macro in text else "")


def _text_with_includes(source: Path) -> str:
    """The source and every header of ours that it includes, directly or not, each once."""
    seen: dict[Path, str] = {}

    def visit(path: Path) -> None:
        if path in seen:
            return
        seen[path] = path.read_text()
        for name in re.findall(r'^#include "([^"]+)"', seen[path], re.MULTILINE):
            visit(SOURCES / name)

    visit(source)
    return "\n".join(seen.values())


def _texts() -> list[str]:
    return [path.read_text() for pattern in ("*.cpp", "*.hpp") for path in sorted(SOURCES.glob(pattern))]


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m impls.native.build", description="Compile the native engine and print its path.")
    parser.add_argument("--sanitize", action="store_true", help="address and undefined-behaviour sanitizers; prints how to load it")
    parser.add_argument("--plant", metavar="NAME", help=f"with a planted bug: {', '.join(plant_names())}")
    chosen = parser.parse_args(arguments)
    try:
        print(library(sanitize=chosen.sanitize, plant=chosen.plant))
        if chosen.sanitize:
            print(f"run Python with LD_PRELOAD='{sanitizer_preload()}' ASAN_OPTIONS=detect_leaks=0", file=sys.stderr)
    except BuildError as problem:
        print(problem, file=sys.stderr)
        return 2 if isinstance(problem, UnknownPlant) else 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
