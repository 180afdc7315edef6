"""paritree: give it an inference engine; it tells, with proof, where the engine leaves the specification."""

from __future__ import annotations

__version__ = "0.1.0"
