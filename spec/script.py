"""What a worker is told to do and what it brings back: plain data, no engine and no judgement in it.

A script is planned completely before the engine runs, so the engine never steers it and one divergence does not hide
the next. `answers[i]` of a trace belongs to `steps[i]` of its script; a step that raised ends the trace there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.config import Config
from spec.engine import Description, Drafter, Generation, Int, Limits, Rows
from spec.sampling import Sampling


@dataclass(frozen=True)
class Forward:
    """One ragged batch. `phase` is "prefill", "decode" or "tree" (a batch that mixes them is named by its richest row)."""

    rows: Rows
    want_logits: NDArray[np.bool_]
    phase: str


@dataclass(frozen=True)
class Commit:
    sequence: int
    path: Int


@dataclass(frozen=True)
class CacheRows:
    """Read the committed rows of `sequence` in every layer; the answer's `cache` is [layers, len, cache_dim]."""

    sequence: int


@dataclass(frozen=True)
class Evict:
    sequence: int


@dataclass(frozen=True)
class Fork:
    source: int
    target: int


@dataclass(frozen=True)
class Generate:
    """The engine's own loop on fresh sequences 0.. of its own; `drafter` None: autoregressive; `sampling` None: greedy."""

    prompts: tuple[Int, ...]
    drafter: Drafter | None
    budget: int
    limits: Limits
    sampling: Sampling | None = None


Step = Forward | Commit | CacheRows | Evict | Fork | Generate


@dataclass(frozen=True)
class WeightsKey:
    """Which weights: seeded, then changed by `regime` ("ordinary", "tied-vocabulary", "tied-experts", ...; campaigns/weights.py),
    or a checkpoint folder."""

    seed: int
    regime: str = "ordinary"
    checkpoint: str = ""


@dataclass(frozen=True)
class Script:
    config: Config
    weights: WeightsKey
    steps: tuple[Step, ...]
    taps: bool = True  # ask for every tap that the engine offers
    hazards: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OpCall:
    """One `run_op`. Output shapes are known beforehand; outputs are poisoned (NaN, or a guard integer) before the call."""

    op: str
    inputs: Mapping[str, NDArray[Any]]
    params: Mapping[str, int | float]
    outputs: Mapping[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype)
    hazards: frozenset[str] = frozenset()


@dataclass
class Failure:
    """`kind`: "unsupported", "raised" (the engine's own error), "malformed" (an answer of the wrong kind), "crashed", "hung"."""

    kind: str
    message: str
    signal: int = 0


@dataclass
class Answer:
    """The answer to one step; fields that do not apply stay empty."""

    logits: NDArray[np.float32] | None = None
    taps: dict[tuple[str, int], NDArray[Any]] = field(default_factory=dict)  # (name, layer) -> array
    cache: NDArray[np.float32] | None = None
    generations: list[Generation] | None = None
    drafted: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # (sequence, history) of each call of the drafter
    outputs: dict[str, NDArray[Any]] | None = None  # of an OpCall
    failure: Failure | None = None


@dataclass
class Trace:
    description: Description
    answers: list[Answer]
    failure: Failure | None = None  # crash, hang, or a failure to open the session
