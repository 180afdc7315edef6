"""Engines that nobody here wrote, behind the seam: llama.cpp, transformers, torch's own operations, mlx-lm, a subprocess, a URL.

One file per peer holds its weight map, its forward pass and its tap map. A peer refuses (`Unsupported`) what it cannot represent and declares
what it computes differently by design (`Departure`); nothing is approximated silently. No peer's package is imported before it is named.

    transformers, transformers:eager, transformers:sdpa    the attention path of transformers
    llama.cpp, llama.cpp:defaults                          exact float32 settings, or the library's own defaults
    torch-ops, mlx
    command:python server.py                               a subprocess, docs/subprocess-protocol.md
    http://host:port, https://...                          an OpenAI-compatible server: tokens and log-probs only
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from spec.engine import Engine

PACKAGES: dict[str, tuple[str, ...]] = {
    "transformers": ("torch", "transformers"),
    "llama.cpp": ("xllamacpp", "gguf"),
    "torch-ops": ("torch",),
    "mlx": ("mlx", "mlx_lm"),
}
NAMES = (*PACKAGES, "command", "http", "https")


class PeerMissing(RuntimeError):
    """The packages of a peer are not installed; the message is the command that installs them."""


class UnknownVariant(LookupError):
    """A peer has no variant of this name."""


def unavailable(name: str) -> str:
    """Empty, or why the peer cannot be loaded here."""
    missing = [package for package in PACKAGES.get(name, ()) if importlib.util.find_spec(package) is None]
    extra = {"llama.cpp": "llama", "mlx": "mlx"}.get(name, "peers")
    return f"{', '.join(missing)} not installed: pip install 'paritree[{extra}]'" if missing else ""


def installed() -> tuple[str, ...]:
    return tuple(name for name in PACKAGES if not unavailable(name))


def engine(name: str, variant: str | None) -> Engine:
    """The peer `name`, one of NAMES. Raises PeerMissing, UnknownVariant, and whatever the peer raises while it loads."""
    problem = unavailable(name)
    if problem:
        raise PeerMissing(problem)
    return _MAKERS[name](name, variant)


def _transformers(name: str, variant: str | None) -> Engine:
    from impls.peers.transformers_engine import ATTENTION, TransformersEngine

    if variant not in (None, *ATTENTION):
        raise UnknownVariant(f"transformers has no variant {variant!r}: choose one of {', '.join(ATTENTION)}")
    return TransformersEngine(variant or ATTENTION[0])


def _llamacpp(name: str, variant: str | None) -> Engine:
    from impls.peers.llamacpp_engine import VARIANTS, LlamaCppEngine

    if variant not in (None, *VARIANTS):
        raise UnknownVariant(f"llama.cpp has no variant {variant!r}: choose one of {', '.join(VARIANTS)}")
    return LlamaCppEngine() if variant is None else LlamaCppEngine(VARIANTS[variant], name=f"{name}:{variant}")


def _torch_ops(name: str, variant: str | None) -> Engine:
    from impls.peers.torch_ops import TorchOps

    return TorchOps()


def _mlx(name: str, variant: str | None) -> Engine:
    from impls.peers.mlx_engine import MlxEngine

    return MlxEngine()


def _command(name: str, variant: str | None) -> Engine:
    from impls.peers.subprocess_engine import SubprocessEngine

    if not variant:
        raise UnknownVariant("an engine in a subprocess is named with its command line: command:python server.py")
    return SubprocessEngine(variant)


def _url(name: str, variant: str | None) -> Engine:
    from impls.peers.blackbox_engine import BlackBoxEngine

    return BlackBoxEngine(f"{name}:{variant or ''}")


_MAKERS: dict[str, Callable[[str, str | None], Engine]] = {
    "transformers": _transformers, "llama.cpp": _llamacpp, "torch-ops": _torch_ops, "mlx": _mlx, "command": _command, "http": _url, "https": _url,
}  # fmt: skip
