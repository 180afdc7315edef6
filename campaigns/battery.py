"""A case on an engine, and the arrays that a user without paritree would compare: outputs of operations, logits, emitted tokens, beside the golden ones.

The inputs of what is compared differ between the two: an operation of a chain is compared on the engine's own inputs, logits on the same tokens, and
the tap in which our verdict is with the golden tap of the same row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from campaigns.bisect import golden_answers
from campaigns.case import Case, OpCase, SessionCase, TreeCase
from campaigns.materialise import op_call, op_call_of, session_script, tree_job
from campaigns.trial import Bench, golden_model
from oracles.answers import replay_golden
from oracles.battery import Pair, verdicts
from oracles.judgement import FINDINGS, Judgement
from spec.loops import greedy
from spec.ops import OPS
from spec.script import Answer, Forward, Generate, OpCall, Script, Step


@dataclass
class Compared:
    """`whole`: the engine answered everything that was compared; if not, every fixed rule fails as well. `words`: what was compared."""

    pairs: list[Pair] = field(default_factory=list)
    logits: list[Pair] = field(default_factory=list)
    tokens: list[Pair] = field(default_factory=list)
    whole: bool = True
    words: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Nothing was compared: a rule that passes says nothing then."""
        return self.whole and not (self.pairs or self.logits or self.tokens)

    def verdicts(self) -> Mapping[str, bool]:
        passed = verdicts(self.pairs, self.logits, self.tokens)
        return passed if self.whole else dict.fromkeys(passed, False)


def compared(bench: Bench, case: Case, guilty: Judgement | None = None) -> Compared:
    """Runs the case once. Raises CaseError. Operations that the golden function refuses are left out. `guilty`: a judgement of a session, whose tap is
    compared as well, so that the rules are asked about the array that our verdict is about."""
    out = Compared()
    if isinstance(case, OpCase):
        call = op_call(case)
        _calls(out, [call], bench.worker.calls([call]))
    elif isinstance(case, TreeCase):
        (made,) = bench.worker.trees([tree_job(case)])
        _calls(out, [call for call, _ in made], [answer for _, answer in made])
    elif isinstance(case, SessionCase):
        script = session_script(case, bench.worker.description.departures)
        answers = bench.worker.script(script).answers
        _session(out, script, answers)
        if guilty is not None:
            _tap(out, script, answers, guilty)
    return out


def beside(bench: Bench, case: Case) -> tuple[list[Judgement], Compared]:
    """Our judgements of a case, and the fixed rules' arrays. Raises CaseError."""
    judgements = list(bench.outcome(case).judgements)
    return judgements, compared(bench, case, next((j for j in judgements if j.verdict in FINDINGS), None))


def _tap(out: Compared, script: Script, answers: Sequence[Answer], guilty: Judgement) -> None:
    place = (guilty.tap, guilty.layer)
    if guilty.step >= len(answers) or place not in answers[guilty.step].taps:
        return
    golden = golden_answers(script)[guilty.step].taps.get(place)
    if golden is None:
        return
    out.pairs.append((answers[guilty.step].taps[place], golden))
    out.words.append(f"the tap {guilty.tap}, layer {guilty.layer}, of step {guilty.step + 1}")


def recorded(op: str, params: Mapping[str, int | float], inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Compared:
    """The same for a user's own tensors. Raises CaseError for inputs that do not fit the operation."""
    out = Compared()
    call = op_call_of(op, inputs, params)
    _calls(out, [call], [Answer(outputs={name: np.asarray(value) for name, value in outputs.items()})])
    return out


def _calls(out: Compared, calls: Sequence[OpCall], answers: Sequence[Answer]) -> None:
    for call, answer in zip(calls, answers, strict=False):
        if answer.outputs is None or answer.failure is not None:
            out.whole = False
            continue
        try:
            golden = OPS[call.op].function(call.inputs, call.params)
        except (ValueError, ArithmeticError, IndexError):
            continue
        out.whole &= golden.keys() <= answer.outputs.keys()
        out.pairs += [(answer.outputs[name], value) for name, value in golden.items() if name in answer.outputs]
        out.words += [f"{call.op}.{name}" for name in golden if name in answer.outputs]
        if call.op == "argmax" and "ids" in answer.outputs:
            out.tokens.append((answer.outputs["ids"], golden["ids"]))


def _session(out: Compared, script: Script, answers: Sequence[Answer]) -> None:
    """Logits of all batches that were answered, and the streams of the engine's own loop against plain greedy decoding."""
    model = golden_model(script.config, script.weights)
    answered: list[Step] = []
    found = []
    for step, answer in zip(script.steps, answers, strict=False):
        if answer.failure is not None and answer.failure.kind != "unsupported":
            break
        if isinstance(step, Generate):
            golden = greedy(model.open(), list(step.prompts), step.limits)
            for stream, due in zip(answer.generations or [], golden, strict=False):
                out.tokens.append((np.array(stream.tokens, np.int64), np.array(due.tokens, np.int64)))
            out.words.append("the streams of its own loop")
            continue
        if isinstance(step, Forward) and step.want_logits.any():
            if answer.logits is None:
                break
            found.append(answer.logits)
        answered.append(step)
    out.whole = len(answers) == len(script.steps) and not any(a.failure is not None and a.failure.kind != "unsupported" for a in answers)
    due_logits = replay_golden(model, answered)
    if found:
        pair = (np.concatenate(found), due_logits)
        out.pairs.append(pair)
        out.logits.append(pair)
        out.words.insert(0, f"the logits of {len(pair[0])} rows")
