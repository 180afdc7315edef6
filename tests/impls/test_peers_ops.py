"""torch's operations under the judge: every operation that is offered, in every regime; ties as torch breaks them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from campaigns.case import OpCase
from campaigns.isolation.inprocess import InProcess
from campaigns.strategies import op_cases
from campaigns.trial import Bench
from impls import peers
from impls.registry import resolve
from oracles.judgement import FINDINGS, Verdict
from spec.engine import Engine, Unsupported

REPRODUCIBLE = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), max_examples=200)


@pytest.fixture(scope="module")
def engine() -> Engine:
    if reason := peers.unavailable("torch-ops"):
        pytest.skip(reason)
    return resolve("torch-ops")


def test_drawn_operations_have_no_finding(engine: Engine) -> None:
    bench = Bench(InProcess(engine))
    seen: set[str] = set()

    @REPRODUCIBLE
    @given(op_cases("full", tuple(sorted(engine.describe().ops))))
    def run(case: OpCase) -> None:
        outcome = bench.outcome(case)
        seen.add(case.op)
        assert not [j.message for j in outcome.judgements if j.verdict in FINDINGS]

    run()
    assert seen == engine.describe().ops


def test_equal_choices_may_go_to_any_expert_and_unequal_ones_not(engine: Engine) -> None:
    """torch.topk breaks ties as it likes; under its profile that is right, and under the strict rule it is not."""
    from dataclasses import replace

    from campaigns.materialise import op_call
    from oracles.judge import judge_op

    case = OpCase(
        "route",
        (("E", 12), ("T", 5)),
        (
            ("denominator_eps", 0.0), ("group_score_max", 0), ("groups", 1), ("norm_top_k", 1), ("routed_scale", 1.5), ("top_groups", 1), ("top_k", 4),
        ),
        "ties",
        3,
    )  # fmt: skip
    call = op_call(case)
    scores, bias = np.full((5, 12), 0.5, np.float32), np.zeros(12, np.float32)
    scores[:, 7] = 0.75
    call = replace(call, inputs={"scores": scores, "bias": bias})
    outputs = {name: np.zeros(shape, dtype) for name, (shape, dtype) in call.outputs.items()}
    engine.run_op("route", call.inputs, call.params, outputs)
    profile = engine.describe().profile
    assert {j.verdict for j in judge_op(call, outputs, profile)} <= {Verdict.EXACT, Verdict.WITHIN_BOUND}
    strict = {j.tap: j.verdict for j in judge_op(call, outputs, replace(profile, ties="lowest"))}
    assert strict["ids"] is (Verdict.EXACT if (np.sort(outputs["ids"], -1) == [0, 1, 2, 7]).all() else Verdict.DEFECT)
    outputs["ids"][2] = [0, 1, 2, 3]  # without the only larger one
    assert {j.tap: j.verdict for j in judge_op(call, outputs, profile)}["ids"] is Verdict.DEFECT


def test_draft_trees_are_not_torchs(engine: Engine) -> None:
    with pytest.raises(Unsupported, match="no operation of torch"):
        engine.run_op("best_first_tree", {}, {}, {})
