"""Errors that name the user's engine: the classes of the registry, raised here with what the worker found."""

from __future__ import annotations

from impls.registry import EngineLoadError, UnknownEngine

__all__ = ["EngineLoadError", "UnknownEngine", "load_error"]


def load_error(engine: str, found: str) -> EngineLoadError:
    """What became of an engine that a worker could not load."""
    remedy = f"load it by hand to see more: python -c \"from impls.registry import resolve; resolve('{engine}').describe()\""
    return EngineLoadError(engine, found, "an engine must load and describe itself", remedy)
