"""Sessions for the judge: a small script, the traces of honest engines on it, and one number changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from campaigns.case import GenerateCase, SessionCase
from campaigns.isolation.inprocess import InProcess
from campaigns.plan import session_script
from campaigns.weights import weights_for
from impls.blocked.engine import BlockedEngine
from oracles.judgement import FINDINGS, Judgement
from oracles.session import SessionJudge
from spec.model import GoldenModel
from spec.script import Answer, CacheRows, Script, Trace

ROUNDS = (
    (((0, 0), (1, 1), (0, 0), (2, 1), (0, 0)), ((0, 1), (1, 0), (1, 0))),  # paths [0, 2] and [0, 1]: rows are rejected
    ((), ()),  # plain decoding
    (((0, 1), (0, 1)), ((1, 0), (1, 1))),
)


def session_case(preset: str = "tiny", generate: GenerateCase | None = None, hazards: tuple[str, ...] = ()) -> SessionCase:
    return SessionCase(
        preset, (), 0, "ordinary", ((5, 1), (3, 2)), ROUNDS if generate is None else (), chunk=3, generate=generate, hazards=hazards
    )


@lru_cache(maxsize=8)
def judge_of(preset: str = "tiny") -> SessionJudge:
    script = session_script(session_case(preset))
    return SessionJudge(GoldenModel(script.config, weights_for(script.config, script.weights)))


@lru_cache(maxsize=32)
def honest(preset: str = "tiny", hidden: frozenset[str] = frozenset(), cache: bool = True) -> tuple[Script, Trace]:
    """The blocked engine's trace, float32 NumPy with its own orders of summation; do not change its arrays."""
    return run(BlockedEngine(hidden_taps=hidden), preset, cache)


def run(engine: BlockedEngine, preset: str = "tiny", cache: bool = True, case: SessionCase | None = None) -> tuple[Script, Trace]:
    script = session_script(case or session_case(preset))
    if not cache:
        script = dataclasses.replace(script, steps=tuple(step for step in script.steps if not isinstance(step, CacheRows)))
    return script, InProcess(engine).script(script)


def altered(trace: Trace, change: Callable[[list[Answer]], None]) -> Trace:
    """A copy of the trace with private arrays, changed."""
    answers = [
        dataclasses.replace(
            answer,
            logits=None if answer.logits is None else answer.logits.copy(),
            cache=None if answer.cache is None else answer.cache.copy(),
            taps={key: np.array(value) for key, value in answer.taps.items()},
        )
        for answer in trace.answers
    ]
    change(answers)
    return Trace(trace.description, answers, trace.failure)


def findings(judgements: list[Judgement]) -> list[Judgement]:
    return [judgement for judgement in judgements if judgement.verdict in FINDINGS]
