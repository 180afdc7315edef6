"""The specification itself behind the engine seam: the engine that every judge must pass, and a live example of the protocol.

It computes nothing of its own: operations are the records of spec/ops, sessions are `spec.model.GoldenSession`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from spec.config import Config
from spec.engine import PROFILES, Description, EngineError, Unsupported
from spec.model import GoldenModel, GoldenSession
from spec.ops import OPS
from spec.taps import all_tap_names
from spec.weights import Provider, Weights

# One rounding per operation lies inside every float32 profile; this one is the narrowest that ships.
PROFILE = dataclasses.replace(PROFILES["float32-strict"], flush_to_zero=False, batch_invariant=True)
CAPABILITIES = frozenset({"run_op", "forward", "taps", "commit", "cache_rows", "fork", "evict", "generate", "generate_tree", "sampling"})


class GoldenEngine:
    """`spec.engine.Engine` over the specification."""

    def describe(self) -> Description:
        return Description("golden", "1", PROFILE, CAPABILITIES, frozenset(OPS), frozenset(all_tap_names()))

    def run_op(
        self, op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float], outputs: Mapping[str, NDArray[Any]]
    ) -> None:
        """Raises Unsupported for an unknown operation, EngineError for inputs that the specification refuses or a wrong output."""
        record = OPS.get(op)
        if record is None:
            raise Unsupported(f"there is no operation {op!r}; there are {', '.join(OPS)}")
        try:
            values = record.function(inputs, params)
        except KeyError as problem:
            raise EngineError(f"{op}: {problem.args[0]!r} is missing") from problem
        except (ValueError, IndexError) as problem:
            raise EngineError(f"{op}: {problem}") from problem
        for name, value in values.items():
            output = outputs.get(name)
            if output is None:
                raise EngineError(f"{op}: output {name} is missing")
            if output.shape != value.shape or output.dtype != value.dtype:
                raise EngineError(f"{op}: {name} is {output.dtype} {list(output.shape)}, but must be {value.dtype} {list(value.shape)}")
            output[...] = value

    def open(self, config: Config, weights: Provider | Weights) -> GoldenSession:
        return GoldenModel(config, weights).open()
