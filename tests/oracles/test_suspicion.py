"""Warnings: what the bound lets through and rounding does not explain; never more than a warning, and not for honest code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import altered, findings, honest, judge_of
from numpy.typing import NDArray

from oracles.judge import judge_op
from oracles.judgement import FINDINGS, Judgement, Verdict
from spec.engine import Profile
from spec.script import Answer, Forward, OpCall

F = np.float32


def judged(op: str, inputs: dict[str, Any], params: dict[str, float], out: NDArray[Any], statistics: bool = True) -> Judgement:
    call = OpCall(op, inputs, params, {"out": (out.shape, "float32")})
    return judge_op(call, {"out": out}, Profile(), statistics=statistics)[0]


def product(seed: int, terms: int = 1024) -> tuple[dict[str, Any], NDArray[Any]]:
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((12, terms)).astype(F), rng.standard_normal((terms, 9)).astype(F)
    return {"x": x, "w": w}, x @ w


def test_one_output_in_bfloat16_is_suspicious_though_inside_the_bound_of_a_long_dot() -> None:
    inputs, out = product(1)
    found = out.copy()
    at = np.unravel_index(int(np.abs(out).argmin()), out.shape)
    found[at] += F(6e-4)
    assert judged("matmul", inputs, {}, found, statistics=False).verdict is Verdict.WITHIN_BOUND
    warned = judged("matmul", inputs, {}, found)
    assert warned.verdict is Verdict.WARNING and warned.index == tuple(at) and "standard deviations" in warned.message
    assert warned.verdict not in FINDINGS


def test_a_common_factor_below_one_rounding_is_drift() -> None:
    rng = np.random.default_rng(2)
    x, gain = rng.standard_normal((64, 48)).astype(F), (1 + 0.1 * rng.standard_normal(48)).astype(F)
    wide = x.astype(np.float64)
    found = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + float(F(1e-6))) * gain * (1 + 2.0**-22)).astype(F)
    warned = judged("rms_norm", {"x": x, "gain": gain}, {"eps": 1e-6}, found)
    assert warned.verdict is Verdict.WARNING and "share a relative error" in warned.message


@pytest.mark.parametrize("seed", range(8))
def test_honest_code_is_not_suspected(seed: int) -> None:
    inputs, out = product(seed)
    assert judged("matmul", inputs, {}, out).verdict is Verdict.WITHIN_BOUND
    rng = np.random.default_rng(seed)
    x, gain = rng.standard_normal((40, 48)).astype(F), np.ones(48, F)
    norm = x / np.sqrt((x * x).mean(-1, keepdims=True, dtype=F) + F(1e-6)) * gain
    assert judged("rms_norm", {"x": x, "gain": gain}, {"eps": 1e-6}, norm).verdict is Verdict.WITHIN_BOUND


def test_sessions_are_suspected_on_request_only() -> None:
    script, trace = honest()
    assert not [j for j in judge_of().judge(script, trace, statistics=True) if j.verdict is Verdict.WARNING]
    step = next(number for number, s in enumerate(script.steps) if isinstance(s, Forward) and s.phase == "tree")

    def change(answers: list[Answer]) -> None:
        tap = answers[step].taps["logits", 2]
        tap[2, 5] += F(1e-5)
        answers[step].logits = tap

    moved = altered(trace, change)
    assert not findings(judge_of().judge(script, moved))
    (warned,) = [j for j in judge_of().judge(script, moved, statistics=True) if j.verdict is Verdict.WARNING]
    assert (warned.tap, warned.layer, warned.rung) == ("logits", 2, "tree verify")


def test_a_defect_stays_a_defect() -> None:
    inputs, out = product(3)
    out[2, 2] += F(1)
    assert judged("matmul", inputs, {}, out).verdict is Verdict.DEFECT
