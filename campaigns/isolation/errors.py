"""Errors of this package that name the user's engine."""

from __future__ import annotations


class EngineLoadError(RuntimeError):
    """The engine cannot be loaded; the message is the worker's own."""
