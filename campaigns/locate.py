"""How a fresh process finds an engine without paritree: the record that goes into a capsule for repro.py.

{"kind": "abi", "path"} or {"kind": "python", "module", "attribute", "arguments", "search"}; the forms of names are those of impls.registry.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from impls.registry import BLIND, GROUP, LIBRARY_SUFFIXES

HERE = str(Path(__file__).resolve().parent.parent)  # where our own engines are imported from


def locator(engine: str) -> dict[str, Any]:
    """A name that fits no form is kept as a module: repro.py then says that it cannot be loaded, and asks for --engine."""
    if engine.startswith(BLIND):
        return _python("impls.blind:engine", [engine.removeprefix(BLIND)])
    name, _, variant = engine.partition(":")
    if name == "native":
        from impls.native import build

        return {"kind": "abi", "path": str(build.library(plant=variant or None))}
    if name == "golden":
        return _python("impls.golden:GoldenEngine")
    if name == "blocked":
        return _python("impls.blocked:engine", [variant] if variant else [])
    if os.sep in engine or engine.endswith(LIBRARY_SUFFIXES):
        return {"kind": "abi", "path": os.path.abspath(engine)}
    for point in entry_points(group=GROUP):
        if point.name == engine:
            return _python(point.value)
    return _python(engine)


def _python(path: str, arguments: list[str] | None = None) -> dict[str, Any]:
    module, _, attribute = path.partition(":")
    return {"kind": "python", "module": module, "attribute": attribute, "arguments": arguments or [], "search": [HERE, os.getcwd()]}
