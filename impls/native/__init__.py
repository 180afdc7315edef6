"""The native engine: C++17 without a framework behind the C ABI of include/paritree.h, and the adapter for any such library.

Importing this package compiles and loads nothing. `impls.native.build` compiles; its `NoCompiler` says that it cannot.
"""

from __future__ import annotations

from impls.native.adapter import EngineLoadError, LibraryEngine, load_library, native
from impls.native.session import LibrarySession

__all__ = ["EngineLoadError", "LibraryEngine", "LibrarySession", "load_library", "native"]
