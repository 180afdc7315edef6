"""An engine seen from outside only: logits and tokens. Taps, single operations, the cache and the engine's own account of its rounds are hidden.

`blind+ENGINE` in the registry. It measures what a judge can say of a black box, and is no engine of its own: every answer that is left is the
inner engine's, unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.registry import BLIND, resolve
from spec.config import Config
from spec.engine import Description, Drafter, Engine, Float, Generation, Int, Limits, Rows, SamplingSession, Session, TapSink, Unsupported
from spec.sampling import Sampling
from spec.weights import Provider

HIDDEN = frozenset({"run_op", "taps", "cache_rows", "free_slots", "generate_tree"})


def engine(name: str) -> BlindEngine:
    """The engine that the registry knows as `name`, seen from outside. Raises as `impls.registry.resolve`."""
    return BlindEngine(resolve(name))


class BlindEngine:
    """`spec.engine.Engine` around another one."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.contiguous_only = bool(getattr(inner, "contiguous_only", False))

    def describe(self) -> Description:
        shown = self._inner.describe()
        capabilities = shown.capabilities - HIDDEN | ({"hidden_trees"} if "generate_tree" in shown.capabilities else set[str]())
        return dataclasses.replace(shown, name=BLIND + shown.name, capabilities=capabilities, ops=frozenset[str](), taps=frozenset[str]())

    def run_op(
        self, op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float], outputs: Mapping[str, NDArray[Any]]
    ) -> None:
        raise Unsupported("a black box runs no single operation")

    def open(self, config: Config, weights: Provider) -> BlindSession:
        return BlindSession(self._inner.open(config, weights))


class BlindSession:
    """`spec.engine.SamplingSession` around another session."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner

    def forward(self, rows: Rows, want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> Float:
        return self._inner.forward(rows, want_logits, frozenset(), sink)

    def commit(self, sequence: int, path: Int) -> None:
        self._inner.commit(sequence, path)

    def cache_rows(self, sequence: int, layer: int) -> Float:
        raise Unsupported("a black box does not show its cache")

    def evict(self, sequence: int) -> None:
        self._inner.evict(sequence)

    def fork(self, source: int, target: int) -> None:
        self._inner.fork(source, target)

    def generate(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits) -> list[Generation]:
        return [dataclasses.replace(generation, rounds=()) for generation in self._inner.generate(prompts, drafter, budget, limits)]

    def sample(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits, sampling: Sampling) -> list[Generation]:
        """Raises Unsupported where the inner engine does not draw tokens."""
        if not isinstance(self._inner, SamplingSession):
            raise Unsupported("the engine behind the black box does not draw tokens with prescribed noise")
        made = self._inner.sample(prompts, drafter, budget, limits, sampling)
        return [dataclasses.replace(generation, rounds=()) for generation in made]

    def close(self) -> None:
        self._inner.close()
