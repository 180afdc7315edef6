"""One trial: a case on one engine. Materialise, run in the worker, judge. The engine's failures become judgements here.

Cases go to the worker in batches of one kind; an outcome never depends on the batch it was in, only on its case, unless the engine keeps
state between calls (which replays in a fresh worker show).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from campaigns.case import Case, CaseError, OpCase, SessionCase, TreeCase, to_json
from campaigns.isolation import Deadline
from campaigns.isolation.chain import TreeJob
from campaigns.materialise import op_call, session_script, tree_job, weights_for
from campaigns.operands import REFUSED
from campaigns.probes import PROBE, PROBES
from campaigns.relations import twin
from oracles.answers import of_failure
from oracles.audit import judge_height, judge_precision
from oracles.generation import Explain, Rerun
from oracles.judge import judge_op
from oracles.judgement import RUNGS, Judgement, Verdict, worst
from oracles.relations import judge_relation
from oracles.session import SessionJudge
from spec.config import Config
from spec.engine import Description, Profile
from spec.loops import prefill_rows
from spec.model import GoldenModel
from spec.ops import OPS
from spec.sampling import SamplingError
from spec.script import Answer, Failure, Forward, OpCall, Script, Trace, WeightsKey
from spec.tree import TreeError

VERDICT_OF_FAILURE = {
    "unsupported": Verdict.UNSUPPORTED,
    "raised": Verdict.MALFORMED,  # the engine's own error on a legal input: an answer that is none
    "malformed": Verdict.MALFORMED,
    "flaky": Verdict.FLAKY,
    "crashed": Verdict.CRASHED,
    "hung": Verdict.HUNG,
}


UNJUDGEABLE = frozenset({Verdict.MALFORMED, Verdict.FLAKY, Verdict.CRASHED, Verdict.HUNG, Verdict.UNSUPPORTED, Verdict.NONFINITE})
PROVEN = frozenset({Verdict.EXACT, Verdict.WITHIN_BOUND, Verdict.TIE})
REFUSAL = "refusal"  # the output's name in a judgement of inputs that must be refused
FIRST_STEP_S = 30.0  # of a kind, until one was seen: kernels that compile at first use; longer makes an early hang expensive


def patience() -> Deadline:
    """The deadline of a campaign's steps."""
    return Deadline(first_s=FIRST_STEP_S)


class Worker(Protocol):
    """What a trial needs of campaigns.isolation.Supervisor."""

    @property
    def description(self) -> Description: ...

    def calls(self, calls: Sequence[OpCall]) -> list[Answer]: ...

    def trees(self, jobs: Sequence[TreeJob]) -> list[list[tuple[OpCall, Answer]]]: ...

    def script(self, script: Script) -> Trace: ...


@dataclass(frozen=True)
class Outcome:
    """What one trial showed; `seconds` is the engine and the judge together, shared evenly over a batch."""

    case: Case
    judgements: tuple[Judgement, ...]
    seconds: float

    @property
    def worst(self) -> Judgement | None:
        return worst(list(self.judgements))

    @property
    def verdict(self) -> Verdict:
        found = self.worst
        return Verdict.UNVERIFIED if found is None else found.verdict

    @property
    def rungs(self) -> tuple[str, ...]:
        """Every rung that the trial reached, in order of the ladder."""
        reached = {judgement.rung for judgement in self.judgements}
        return tuple(rung for rung in RUNGS if rung in reached)


def takes_views(worker: Worker) -> bool:
    """Whether an engine takes strided inputs: "no" is an answer, given once, and not a finding per operation."""
    call = op_call(OpCase("add", (("N", 3), ("T", 2)), (), "ordinary", 0, ("views",)))
    (answer,) = worker.calls([call])
    return answer.failure is None or answer.failure.kind != "unsupported"


class Bench:
    """One engine in its worker, and the judge. Raises CaseError for a case that cannot be materialised."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def outcomes(self, cases: Sequence[Case]) -> list[Outcome]:
        """In order of `cases`; operations of one batch share one trip to the worker, and so do trees."""
        began = time.perf_counter()
        of_ops = iter(self._ops([case for case in cases if isinstance(case, OpCase)]))
        of_trees = iter(self._trees([case for case in cases if isinstance(case, TreeCase)]))
        judged: list[list[Judgement]] = []
        for case in cases:
            try:
                if isinstance(case, OpCase):
                    judged.append(next(of_ops))
                elif isinstance(case, TreeCase):
                    judged.append(next(of_trees))
                else:
                    judged.append(self._judgements(case))
            except Exception as problem:
                problem.add_note(f"case: {to_json(case)}")  # an error of ours: the message leads to the case that shows it
                raise
        each = (time.perf_counter() - began) / max(1, len(cases))
        return [Outcome(case, tuple(judgements), each) for case, judgements in zip(cases, judged, strict=True)]

    def outcome(self, case: Case) -> Outcome:
        return self.outcomes([case])[0]

    def _judgements(self, case: Case) -> list[Judgement]:
        if isinstance(case, SessionCase):
            return self._session(case)
        raise CaseError(f"a {type(case).__name__} is judged from its file, not run on an engine: use `paritree judge`")

    def _ops(self, cases: Sequence[OpCase]) -> list[list[Judgement]]:
        if not cases:
            return []
        calls = [op_call(case) for case in cases]
        answers = self.worker.calls(calls)
        profile = self.worker.description.profile
        return [_judged_op(case, call, answer, profile) for case, call, answer in zip(cases, calls, answers, strict=True)]

    def _trees(self, cases: Sequence[TreeCase]) -> list[list[Judgement]]:
        if not cases:
            return []
        profile = self.worker.description.profile
        return [
            [judgement for step, (call, answer) in enumerate(made) for judgement in judged_call(call, answer, profile, step)]
            for made in self.worker.trees([tree_job(case) for case in cases])
        ]

    def _session(self, case: SessionCase) -> list[Judgement]:
        script = session_script(case, self.worker.description.departures)
        trace = self.worker.script(script)
        judge = session_judge(script.config, script.weights)
        judgements = judge.judge(script, trace, explain=explainer(self.worker, script, judge))
        if case.relation and trace.failure is None:
            relation, other = twin(case, self.worker.description.departures)
            again = self.worker.script(other)
            if again.failure is not None:
                judgements.append(of_failure(again.failure, None, len(script.steps)))
            related = judge_relation(relation, (script, trace), (other, again), trace.description.profile, judge.prepared)
            if any(j.verdict is Verdict.UNVERIFIED for j in related) and again.failure is None:
                related = proven_by_taps(related, trace.description, [*judgements, *judge.judge(other, again)])
            judgements += related
        return judgements


def _judged_op(case: OpCase, call: OpCall, answer: Answer, profile: Profile) -> list[Judgement]:
    """A probe is judged by the declared arithmetic, everything else by the operation's bound; a failed probe says which of the two lied."""
    if case.regime == REFUSED:
        return judged_refusal(call, answer)
    judgements = judged_call(call, answer, profile, 0)
    if case.regime not in PROBES or answer.outputs is None or any(j.verdict in UNJUDGEABLE for j in judgements):
        return judgements
    return (judge_precision if case.regime == PROBE else judge_height)(call, answer.outputs, profile)


def judged_refusal(call: OpCall, answer: Answer) -> list[Judgement]:
    """Inputs that the rules exclude: an error is the right answer, outputs are a defect, and a crash or hang is one as well.

    Raises CaseError for inputs that the specification accepts.
    """
    try:
        OPS[call.op].function(call.inputs, call.params)
    except TreeError as refusal:
        rule, why = refusal.rule, refusal.message
    except SamplingError as refusal:
        rule, why = "S1", str(refusal)
    else:
        raise CaseError(f"{call.op}: the inputs lie inside its domain, so that there is nothing to refuse")
    if answer.failure is not None and answer.failure.kind == "raised":
        return [Judgement(Verdict.EXACT, rule, call.op, REFUSAL, RUNGS[0], checked=1)]
    if answer.failure is not None:
        return [judged_failure(answer.failure, call.op, 0)]
    message = f"{call.op} answers, but must refuse its inputs ({rule}): {why}"
    return [Judgement(Verdict.DEFECT, rule, call.op, REFUSAL, RUNGS[0], share=float("inf"), checked=1, message=message)]


def judged_call(call: OpCall, answer: Answer, profile: Profile, step: int) -> list[Judgement]:
    """The judgements of one operation; a failure is one judgement."""
    if answer.failure is not None:
        return [judged_failure(answer.failure, call.op, step)]
    if answer.outputs is None:
        return [judged_failure(Failure("malformed", f"{call.op} returned no outputs"), call.op, step)]
    return judge_op(call, answer.outputs, profile, step=step)


def judged_failure(failure: Failure, op: str, step: int) -> Judgement:
    verdict = VERDICT_OF_FAILURE[failure.kind]
    signal = f" (signal {failure.signal})" if failure.signal else ""
    return Judgement(verdict, f"engine {failure.kind}", op, "call", RUNGS[0], step=step, message=f"{failure.message}{signal}")


def proven_by_taps(related: list[Judgement], description: Description, runs: list[Judgement]) -> list[Judgement]:
    """Two runs whose every operation is within its certified bound differ by rounding alone: what the statistical bound leaves open of their
    relation is then proven. `runs`: the judgements of both, of which none may be a finding or open."""
    if not description.taps or any(j.verdict not in PROVEN for j in runs):
        return related
    return [
        dataclasses.replace(j, verdict=Verdict.WITHIN_BOUND, message="") if j.verdict is Verdict.UNVERIFIED and j.checked else j
        for j in related
    ]


def explainer(worker: Worker, script: Script, judge: SessionJudge) -> Explain:
    """For a token of the engine's own loop that is not the golden one: the engine runs its history again, with taps, and is judged."""

    def explain(history: tuple[int, ...]) -> Rerun:
        rows, want = prefill_rows([np.array(history, np.int32)])
        again = Script(script.config, script.weights, (Forward(rows, want, "prefill"),))
        trace = worker.script(again)
        logits = trace.answers[0].logits if trace.answers else None
        return Rerun(judge.judge(again, trace), logits[-1] if logits is not None and len(logits) else None)

    return explain


@lru_cache(maxsize=8)
def session_judge(config: Config, key: WeightsKey) -> SessionJudge:
    """One per weight set, which takes some megabytes in canonical form."""
    return SessionJudge(GoldenModel(config, weights_for(config, key)))


def golden_model(config: Config, key: WeightsKey) -> GoldenModel:
    return session_judge(config, key).model
