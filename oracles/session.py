"""A whole session of an engine: every row of every batch judged stacked, in one pass, each operation from the engine's own inputs.

Where the engine gave a tap, it is compared and becomes the input of what follows, so that one mistake raises one alarm. Where it gave
none, balls compose over the region. The first alarm in the order (step, data order) is the location.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracles.answers import missing_answer, of_failure, replay_golden, rung_of
from oracles.generation import Explain, judge_generate
from oracles.history import replay
from oracles.judgement import Judgement, Verdict
from oracles.tokens import judge_tokens
from oracles.walk import JudgeModel
from oracles.walked import Walked
from spec.model import GoldenModel, in_window
from spec.script import Commit, Evict, Fork, Forward, Generate, Script, Step, Trace


class SessionJudge:
    """The judge of one model. Keep it as long as the model: weights are widened once, golden logits of the last script are kept."""

    def __init__(self, model: GoldenModel) -> None:
        self.model = model
        self.prepared = JudgeModel(model.config, model.weights, model.rotary)
        self._golden: tuple[Script, int, NDArray[np.float32]] | None = None

    def judge(self, script: Script, trace: Trace, *, explain: Explain | None = None, statistics: bool = False) -> list[Judgement]:
        """Judgements ordered by (step, data order). `explain` reruns the engine with taps at a history (see `oracles.generation`);
        `statistics`: taps that pass may still be a WARNING (oracles/suspicion.py)."""
        answered: list[tuple[int, Step]] = []
        judgements: list[Judgement] = []
        for number, (step, answer) in enumerate(zip(script.steps, trace.answers, strict=False)):
            if answer.failure is not None:
                judgements.append(of_failure(answer.failure, step, number))
            elif (missing := missing_answer(step, answer)) is not None:
                judgements.append(Judgement(Verdict.MALFORMED, "C4", "", "answer", rung_of(step), step=number, message=missing))
                if isinstance(step, Forward | Commit | Fork | Evict):
                    break
            else:
                answered.append((number, step))
                continue
            if answer.failure is not None and isinstance(step, Forward | Commit | Fork | Evict):
                break  # what follows would need its effect
        if trace.failure is not None:
            number = len(trace.answers)
            step_or_none = script.steps[number] if number < len(script.steps) else None
            judgements.append(of_failure(trace.failure, step_or_none, number))
        history = replay(answered)
        if window := self.model.config.window:
            history.visible &= in_window(history.position, history.position, window)
        walked = Walked(self.prepared, history, trace, trace.description.profile, statistics)
        judgements += walked.judgements
        if len(history.wanted):
            judgements += judge_tokens(self, script, answered, walked)
        for number, step in answered:
            if isinstance(step, Generate):
                judgements += judge_generate(self, step, trace.answers[number], number, trace.description.profile, explain)
        return sorted(judgements, key=lambda j: j.step)  # stable: data order within a step

    def forget(self) -> None:
        """Drop the golden logits that are kept."""
        self._golden = None

    def golden_logits(self, script: Script, answered: list[tuple[int, Step]]) -> NDArray[np.float32]:
        """[wanted rows, vocab], golden bits; the last script's are kept."""
        if self._golden is None or self._golden[0] is not script or self._golden[1] != len(answered):
            self._golden = (script, len(answered), replay_golden(self.model, [step for _, step in answered]))
        return self._golden[2]


def judge_session(
    model: GoldenModel | SessionJudge, script: Script, trace: Trace, *, explain: Explain | None = None, statistics: bool = False
) -> list[Judgement]:
    """`SessionJudge(model).judge(script, trace)`; pass the SessionJudge itself to judge many traces of one model."""
    judge = model if isinstance(model, SessionJudge) else SessionJudge(model)
    return judge.judge(script, trace, explain=explain, statistics=statistics)
