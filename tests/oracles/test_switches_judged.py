"""The judge knows every switch: an engine that honours it passes, one that does not is named at the operation that the switch belongs to."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from campaigns.case import SessionCase
from campaigns.isolation.inprocess import InProcess
from campaigns.plan import session_script
from campaigns.weights import weights_for
from impls.blocked.engine import BlockedEngine
from impls.golden import GoldenEngine
from impls.registry import resolve
from oracles.ball import INFLATE
from oracles.judgement import Verdict
from oracles.session import SessionJudge
from oracles.walk import JudgeModel
from spec.model import GoldenModel
from tests.oracles.conftest import ROUNDS, findings

GROUPS = (("groups", 4), ("top_groups", 2), ("top_k", 3), ("first_dense", 0))
SWITCHES: dict[str, tuple[tuple[tuple[str, Any], ...], str, str]] = {
    # overrides, regime of the weights, and the op of the first finding where an engine does not know the last override
    "window": ((("window", 2),), "ordinary", "softmax"),
    "biases": ((("attention_bias", True),), "ordinary", "matmul"),
    "biases without query compression": ((("q_rank", 0), ("attention_bias", True)), "ordinary", "matmul"),
    "bfloat16 cache": ((("cache_format", "bfloat16"),), "ordinary", "rms_norm"),
    "float16 cache": ((("cache_format", "float16"),), "ordinary", "rms_norm"),
    "clamped sum": ((("denominator_clamp", 1.75),), "ordinary", "route"),
    "dropped groups count as 0": ((*GROUPS, ("group_fill", "zero")), "negative-bias", "route"),
    "carried tables": ((("rope_table_len", 64),), "ordinary", ""),
}


def case_of(name: str) -> SessionCase:
    overrides, regime, _ = SWITCHES[name]
    return SessionCase("tiny", overrides, 0, regime, ((5, 1), (3, 2)), ROUNDS, chunk=3)


def judge_of(case: SessionCase, keep: bool | None = None) -> SessionJudge:
    script = session_script(case)
    weights = weights_for(script.config, script.weights)
    judge = SessionJudge(GoldenModel(script.config, weights))
    if keep is not None:
        judge.prepared = JudgeModel(script.config, weights, judge.model.rotary, keep=keep)
    return judge


@pytest.mark.parametrize("engine", [BlockedEngine(), GoldenEngine()], ids=["blocked", "golden"])
@pytest.mark.parametrize("name", SWITCHES)
def test_an_engine_that_honours_a_switch_passes(name: str, engine: Any) -> None:
    case = case_of(name)
    script = session_script(case)
    judged = judge_of(case).judge(script, InProcess(engine).script(script))
    assert not findings(judged)
    assert Verdict.UNVERIFIED not in {j.verdict for j in judged}


def test_a_product_may_be_stored_before_its_bias_is_added() -> None:
    """Found by a campaign over honest engines: the product, rounded to float16, cancels against the bias, and the sum is small."""
    nine = ((0, 0), (1, 0), (2, 1), (3, 1), (4, 0), (5, 0), (6, 0), (7, 0), (8, 1))
    case = SessionCase("small", (("attention_bias", True),), 1, "faint-router", ((2, 582), (17, 777)), ((nine, ()), (nine, ())), chunk=4)
    script = session_script(case)
    trace = InProcess(resolve("blocked:fp16-out")).script(script)
    assert not findings(judge_of(case).judge(script, trace))


@pytest.mark.parametrize("name", [name for name, (_, _, op) in SWITCHES.items() if op])
def test_an_engine_that_ignores_a_switch_is_named(name: str) -> None:
    case = case_of(name)
    ignorant = session_script(dataclasses.replace(case, overrides=case.overrides[:-1]))
    trace = InProcess(BlockedEngine()).script(ignorant)
    found = findings(judge_of(case).judge(session_script(case), trace))
    assert found and found[0].op == SWITCHES[name][2], found[0].message


def test_a_number_that_the_cache_format_lacks_is_named_although_it_is_close() -> None:
    """One ulp of float32 away from a bfloat16 number: far inside the bound of the rounding, and no bfloat16."""
    case = case_of("bfloat16 cache")
    script = session_script(case)
    trace = InProcess(BlockedEngine()).script(script)
    first = trace.answers[0]
    latent = np.array(first.taps["latent", 0])
    latent[1, 2] = np.nextafter(latent[1, 2], np.float32(np.inf))
    first.taps["latent", 0] = latent
    found = next(j for j in findings(judge_of(case).judge(script, trace)))
    assert (found.rule, found.tap, found.layer, found.index) == ("M11", "latent", 0, (1, 2))


@pytest.mark.parametrize("name", ["window", "biases", "dropped groups count as 0"])
def test_fetched_matrices_give_the_judgements_of_kept_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in blocks of columns, whose bounds may only be tighter (an underflow allowance goes by the largest weight of its block)."""
    monkeypatch.setattr("oracles.matrices.COLUMNS", 5)
    case = case_of(name)
    script = session_script(case)
    trace = InProcess(BlockedEngine()).script(script)
    kept, fetched = (judge_of(case, keep).judge(script, trace) for keep in (True, False))
    assert [(j.tap, j.layer, j.step, j.verdict) for j in kept] == [(j.tap, j.layer, j.step, j.verdict) for j in fetched]
    # a share is |answer - mid| / rad; INFLATE covers what float64 may lose of mid and of rad, each a part of rad
    np.testing.assert_allclose(
        [j.share for j in fetched], [j.share for j in kept], rtol=INFLATE - 1, atol=INFLATE - 1
    )  # allowances of 2**-126 beside bounds of 2**-30
