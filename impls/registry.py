"""Engines by name: a string in, an engine out, so that cases, stores and command lines can say which engine they mean.

    golden, blocked, native        ours
    blocked:Z08, native:mask-tile  ours with a plant or a benign variant
    cuda, cuda:bf16, cuda:emulated our CUDA kernels through CuPy; emulated: the same device code on the CPU
    cuda-native, cuda-native:emulated   the native CUDA engine (docs/cuda.md), compiled at first use; its precision: PARITREE_CUDA_PRECISION
    blind+blocked:Z08              any of these as a black box: logits and tokens only (impls/blind.py)
    transformers, llama.cpp, mlx, torch-ops, command:LINE, http://...   engines that nobody here wrote (impls/peers)
    mine                           an entry point of the group `paritree.engines`
    ./libmine.so                   a shared library with the C ABI (a slash or .so, .dylib makes it a path)
    package.module:Class           imported and called without arguments; an object that is no class or function is taken as it is

Nothing of an engine is imported before it is named.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from impls import peers
from impls.native.adapter import EngineLoadError
from spec.engine import Engine, Unsupported

__all__ = ["FORMS", "EngineLoadError", "UnknownEngine", "known_engines", "prepare", "resolve"]

FORMS = "./library.so, MODULE:CLASS, blocked:NAME, native:PLANT, cuda, cuda-native, blind+ENGINE, transformers, llama.cpp, mlx, torch-ops, command:LINE, http://..."

GROUP = "paritree.engines"
BLIND = "blind+"
LIBRARY_SUFFIXES = (".so", ".dylib")


class UnknownEngine(LookupError):
    """No engine has this name; the message lists those that exist and the forms that a name can take."""


def resolve(spec: str) -> Engine:
    """The engine named by `spec`. Raises UnknownEngine, or EngineLoadError where it exists but cannot be loaded."""
    if spec.startswith(BLIND):
        from impls.blind import engine

        return engine(spec.removeprefix(BLIND))
    name, _, variant = spec.partition(":")
    if name in _OWN:
        return _OWN[name](variant or None)
    if name == "cuda":
        return _cuda(variant or None)
    if name == "cuda-native":
        from impls.native.adapter import load_library

        return load_library(_built_cuda(variant), name=spec if variant else None)
    if name in peers.NAMES:
        return _peer(name, variant or None)
    if os.sep in spec or spec.endswith(LIBRARY_SUFFIXES):
        from impls.native.adapter import load_library

        return load_library(spec)
    point = _entry_points().get(spec)
    if point is not None:
        return _made(spec, point.load)
    if variant:
        return _made(spec, lambda: _attribute(name, variant))
    raise UnknownEngine(_unknown(spec, known_engines()))


def prepare(spec: str) -> None:
    """Do beforehand what would make the first `resolve` of `spec` slow: compile a native engine. Loads no engine.

    For a supervisor, before its workers start under a deadline. Raises as `resolve` does.
    """
    name, _, variant = spec.removeprefix(BLIND).partition(":")
    if name == "native":
        _built(variant or None)
    if name == "cuda-native":
        _built_cuda(variant)


def known_engines() -> tuple[str, ...]:
    """Our engines, the peers whose packages are installed, and the installed entry points."""
    return (*_OWN, *peers.installed(), *sorted(_entry_points()))


def _peer(name: str, variant: str | None) -> Engine:
    """Whatever a peer raises while it loads is the peer's, hence the wide except."""
    try:
        return peers.engine(name, variant)
    except peers.UnknownVariant as problem:
        raise UnknownEngine(str(problem)) from None
    except peers.PeerMissing as problem:
        raise EngineLoadError(name, str(problem), "the peer's packages must be installed", "install the extra `peers`") from None
    except Exception as problem:
        raise EngineLoadError(
            name, f"{type(problem).__name__}: {problem}", "the peer must load", "see docs/found.md and impls/peers"
        ) from problem


def _golden(variant: str | None) -> Engine:
    from impls.golden import GoldenEngine

    if variant is not None:
        raise UnknownEngine(f"there is no engine 'golden:{variant}': the specification has no variants, use 'golden'")
    return GoldenEngine()


def _blocked(variant: str | None) -> Engine:
    from impls import blocked

    try:
        return blocked.engine(variant)
    except LookupError as problem:
        raise UnknownEngine(str(problem.args[0])) from None


def _native(variant: str | None) -> Engine:
    from impls.native.adapter import load_library

    return load_library(_built(variant), name=f"native:{variant}" if variant else None)


def _cuda(variant: str | None) -> Engine:
    """Not among the known engines: most machines have no device for it."""
    from impls.cuda import engine
    from impls.native.build import BuildError

    try:
        return engine.engine(variant)
    except LookupError as problem:
        raise UnknownEngine(str(problem.args[0])) from None
    except (ImportError, Unsupported, BuildError) as problem:
        raise EngineLoadError(
            "cuda",
            str(problem),
            "CuPy and a CUDA device are needed",
            "install the extra cuda13 or cuda12; `cuda:emulated` runs the same kernels on the CPU",
        ) from None


def _built(variant: str | None) -> Path:
    from impls.native import build

    try:
        return build.library(plant=variant)
    except build.UnknownPlant as problem:
        raise UnknownEngine(str(problem)) from None
    except build.BuildError as problem:
        text = str(problem)
        found, _, advice = text.partition(": ") if "\n" not in text else (text, "", "see the compiler's message")
        raise EngineLoadError("native", found, "this engine is compiled at first use", advice) from problem


def _built_cuda(variant: str) -> Path:
    """On the device, or for the CPU as `emulated`. Not among the known engines: most machines have no device for it."""
    from impls.cuda import build
    from impls.native.build import BuildError

    if variant not in ("", "emulated"):
        raise UnknownEngine(f"there is no engine 'cuda-native:{variant}': use cuda-native or cuda-native:emulated")
    try:
        return build.library(emulated=bool(variant))
    except BuildError as problem:
        raise EngineLoadError(
            "cuda-native",
            str(problem),
            "this engine is compiled at first use",
            "`cuda-native:emulated` runs the same code on the CPU; docs/cuda.md lists what a device build needs",
        ) from None


_OWN: dict[str, Callable[[str | None], Engine]] = {"golden": _golden, "blocked": _blocked, "native": _native}


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _attribute(module_name: str, path: str) -> object:
    """`module:a.b`. The current folder is searched last, so that it cannot hide an installed module."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    found: object = importlib.import_module(module_name)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _made(spec: str, load: Callable[[], object]) -> Engine:
    """The engine that `load` gives or makes. Whatever goes wrong is the engine's, hence the wide except."""
    try:
        loaded = load()
        engine = loaded() if callable(loaded) and (isinstance(loaded, type) or not hasattr(loaded, "describe")) else loaded
    except Exception as problem:
        raise EngineLoadError(
            spec,
            f"loading it raised {type(problem).__name__}: {problem}",
            "it must import and be callable without arguments",
            "try it in Python",
        ) from problem
    if not isinstance(engine, Engine):
        missing = [method for method in ("describe", "run_op", "open") if not hasattr(engine, method)]
        raise EngineLoadError(
            spec,
            f"{type(engine).__name__} has no method {missing[0]}",
            "an engine has describe, run_op and open",
            "see spec/engine.py; a method may raise Unsupported",
        )
    return engine


def _unknown(spec: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(spec, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"there is no engine {spec!r}{hint}: known are {', '.join(known)}; other forms are {FORMS}"
