"""Cases on an engine in this process, judged: the findings, none of which an honest engine has."""

from __future__ import annotations

from functools import lru_cache

from campaigns.case import OpCase, SessionCase, TreeCase
from campaigns.isolation.execute import run_calls, run_script, run_tree
from campaigns.materialise import op_call, session_script, tree_job, weights_for
from campaigns.operands import REFUSED
from campaigns.trial import judged_refusal
from impls.blocked import BlockedEngine
from oracles.judge import judge_op
from oracles.judgement import FINDINGS, Judgement
from oracles.session import SessionJudge, judge_session
from spec.config import Config
from spec.model import GoldenModel
from spec.script import WeightsKey


@lru_cache(maxsize=64)
def judge_of(config: Config, key: WeightsKey) -> SessionJudge:
    return SessionJudge(GoldenModel(config, weights_for(config, key)))


def findings(judgements: list[Judgement]) -> list[Judgement]:
    return [judgement for judgement in judgements if judgement.verdict in FINDINGS]


def judged_op(engine: BlockedEngine, case: OpCase) -> list[Judgement]:
    call = op_call(case)
    (answer,) = run_calls(engine, [call])
    if case.regime == REFUSED:
        return findings(judged_refusal(call, answer))
    assert answer.failure is None and answer.outputs is not None, (case, answer.failure)
    return findings(judge_op(call, answer.outputs, engine.describe().profile))


def judged_tree(engine: BlockedEngine, case: TreeCase) -> list[Judgement]:
    out: list[Judgement] = []
    for call, answer in run_tree(engine, tree_job(case)):
        assert answer.failure is None and answer.outputs is not None, (case, answer.failure)
        out += findings(judge_op(call, answer.outputs, engine.describe().profile))
    return out


def judged_session(engine: BlockedEngine, case: SessionCase) -> list[Judgement]:
    script = session_script(case)
    return findings(judge_session(judge_of(script.config, script.weights), script, run_script(engine, script, weights_for)))
