"""Answers that are none, and the reference for those that are: failures as judgements, the golden pass over a script."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracles.history import RUNG_OF_PHASE
from oracles.judgement import Judgement, Verdict
from spec.model import GoldenModel
from spec.script import Answer, CacheRows, Commit, Evict, Failure, Fork, Forward, Generate, Step


def of_failure(failure: Failure, step: Step | None, number: int) -> Judgement:
    verdicts = {
        "unsupported": Verdict.UNSUPPORTED, "raised": Verdict.MALFORMED, "malformed": Verdict.MALFORMED, "flaky": Verdict.FLAKY,
        "crashed": Verdict.CRASHED, "hung": Verdict.HUNG,
    }  # fmt: skip
    what = type(step).__name__.lower() if step is not None else "the end of the session"
    message = f"step {number} ({what}): {failure.message}" + (f" (signal {failure.signal})" if failure.signal else "")
    rule = f"engine {failure.kind}"
    return Judgement(verdicts.get(failure.kind, Verdict.MALFORMED), rule, what, "call", rung_of(step), step=number, message=message)


def rung_of(step: Step | None) -> str:
    if isinstance(step, Forward):
        return RUNG_OF_PHASE[step.phase]
    return "whole loop" if isinstance(step, Generate) else "accept and commit"


def missing_answer(step: Step, answer: Answer) -> str | None:
    """What the answer lacks, in words; None if it can be judged."""
    if isinstance(step, Forward):
        wanted = int(np.count_nonzero(step.want_logits))
        if wanted and (
            answer.logits is None or answer.logits.ndim != 2 or len(answer.logits) != wanted or answer.logits.dtype != np.float32
        ):
            found = "nothing" if answer.logits is None else f"{answer.logits.dtype} {list(answer.logits.shape)}"
            return f"forward answered {found}, but must answer float32 logits of {wanted} rows"
    if isinstance(step, CacheRows) and answer.cache is None:
        return "cache_rows answered nothing, but must answer the committed rows"
    if isinstance(step, Generate) and (answer.generations is None or len(answer.generations) != len(step.prompts)):
        return f"generate answered {len(answer.generations or ())} sequences, but was given {len(step.prompts)} prompts"
    return None


def replay_golden(model: GoldenModel, steps: list[Step]) -> NDArray[np.float32]:
    """Golden bits do not depend on batching, so that one pass over the script is the reference for every engine."""
    session = model.open()
    logits = [np.zeros((0, model.config.vocab), np.float32)]
    for step in steps:
        if isinstance(step, Forward):
            logits.append(session.forward(step.rows, step.want_logits, frozenset(), lambda name, layer, array: None))
        elif isinstance(step, Commit):
            session.commit(step.sequence, step.path)
        elif isinstance(step, Evict):
            session.evict(step.sequence)
        elif isinstance(step, Fork):
            session.fork(step.source, step.target)
    return np.concatenate(logits)
