"""Tokens against the spec's: TIE only behind a chain of checked taps, DEFECT only beyond what rounding can do, UNVERIFIED between."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import altered, findings, honest, judge_of, run

from campaigns.isolation.inprocess import InProcess
from impls.blocked.engine import BlockedEngine
from impls.planted.benign import VARIANTS
from oracles.judgement import Verdict
from oracles.noise import FEWER, SAMPLES, Noise, Rows, noise
from oracles.session import SessionJudge
from oracles.tokens import decide, margins, proof_chain
from spec.engine import Profile
from spec.engine import Rows as EngineRows
from spec.model import GoldenModel
from spec.script import Answer, Forward, Script, WeightsKey
from spec.taps import all_tap_names
from spec.weights import random_weights

F = np.float32
ALL = frozenset(all_tap_names())


def test_equal_tokens_are_exact_for_every_rung() -> None:
    script, trace = honest()
    of_tokens = {j.rung: j for j in judge_of().judge(script, trace) if j.tap == "token"}
    assert set(of_tokens) == {"prefill", "decode", "tree verify"}
    assert all(j.verdict is Verdict.EXACT and j.rule == "L1" for j in of_tokens.values())
    assert sum(j.checked for j in of_tokens.values()) == sum(int(s.want_logits.sum()) for s in script.steps if isinstance(s, Forward))


def twin_model() -> GoldenModel:
    """Head columns in pairs that agree but for a few units of the last place: every decision is nearly a tie."""
    model = judge_of().model
    weights = {name: value.copy() for name, value in model.weights.items()}
    head = weights["head"]
    half = head.shape[1] // 2
    head[:, half : 2 * half] = head[:, :half] * (1 + 1e-7 * np.random.default_rng(0).standard_normal((1, half))).astype(F)
    return GoldenModel(model.config, weights)


def twin_trace(hidden: frozenset[str]) -> tuple[SessionJudge, object, object]:
    model = twin_model()
    script, _ = honest()
    engine = BlockedEngine(hidden_taps=hidden)
    return SessionJudge(model), script, InProcess(engine, weights=lambda config, key: model.weights).script(script)


def test_a_near_tie_behind_checked_taps_is_a_tie_with_both_margins() -> None:
    judge, script, trace = twin_trace(frozenset())
    ties = [j for j in judge.judge(script, trace) if j.tap == "token" and j.verdict is not Verdict.EXACT]  # type: ignore[arg-type]
    assert ties and {j.verdict for j in ties} == {Verdict.TIE}
    assert "in the engine" in ties[0].message and "in the spec" in ties[0].message and "ulp" in ties[0].message
    assert "every operation behind it was checked" in ties[0].message
    assert "rounding moved the margin from -" in ties[0].message and "most of it at" in ties[0].message


def test_the_same_near_tie_of_a_black_box_is_unverified() -> None:
    judge, script, trace = twin_trace(ALL)
    judgements = judge.judge(script, trace)  # type: ignore[arg-type]
    other = [j for j in judgements if j.tap == "token" and j.verdict is not Verdict.EXACT]
    assert other and {j.verdict for j in other} == {Verdict.UNVERIFIED} and all(0 <= j.share <= 1 for j in other)
    assert not findings(judgements)


def test_a_token_far_from_the_specs_is_a_statistical_defect() -> None:
    script, trace = honest(hidden=ALL)
    step = next(number for number, s in enumerate(script.steps) if isinstance(s, Forward) and s.phase == "decode")

    def change(answers: list[Answer]) -> None:
        logits = answers[step].logits
        assert logits is not None
        logits[0, logits[0].argmin()] = logits[0].max() + F(1)

    found = [j for j in findings(judge_of().judge(script, altered(trace, change))) if j.tap == "token"]
    assert found and found[0].verdict is Verdict.DEFECT and "statistical" in found[0].message and found[0].share > 1


def test_a_proof_needs_every_row_that_is_seen() -> None:
    history = SimpleNamespace(visible=np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]], np.bool_))
    walked = SimpleNamespace(history=history, proven=np.array([True, False, True, True]))
    assert proof_chain(walked).tolist() == [True, False, False, True]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("margin", "chained", "limit", "verdict"),
    [
        (1.0, True, None, Verdict.TIE),
        (1.0, False, 0.5, Verdict.DEFECT),
        (0.4, False, 0.5, Verdict.UNVERIFIED),
        (9.0, False, float("inf"), Verdict.UNVERIFIED),
        (9.0, False, None, Verdict.UNVERIFIED),
    ],
)
def test_the_verdict_on_another_token(margin: float, chained: bool, limit: float | None, verdict: Verdict) -> None:
    assert decide(margin, chained, limit)[0] is verdict


def test_margins_are_told_from_both_sides_and_in_ulps() -> None:
    own, golden = np.array([1.0, 1.0 + 2.0**-22], F), np.array([1.0 + 2.0**-23, 1.0], F)
    assert margins(own, golden) == "margin 2.38e-07 in the engine, 1.19e-07 (1.0 ulp) the other way in the spec"


# ---- the statistical bound -----------------------------------------------------------------------------------------------
def chain(tokens: list[int]) -> Rows:
    count = len(tokens)
    return Rows(np.array(tokens), np.arange(count), np.tri(count, dtype=np.bool_), np.arange(count))


@pytest.mark.parametrize("variant", ["sequential", "pairwise", "split-k", "N03", "fast-exp", "N10"])
def test_honest_variants_stay_far_inside_the_statistical_bound(variant: str) -> None:
    entry = VARIANTS[variant]
    script, trace = run(BlockedEngine(entry.points, profile=entry.profile, hidden_taps=ALL))
    judgements = [j for j in judge_of().judge(script, trace) if j.tap == "logits"]
    assert judgements and all(0.01 < j.share < 0.6 for j in judgements)


def test_the_reference_is_the_model_itself() -> None:
    """The float64 walk behind the bound and the golden model agree to float32 accuracy, row by row."""
    tokens = [5, 17, 3, 80, 41]
    judge = judge_of()
    bound = noise(judge.prepared, chain(tokens), Profile())
    golden = judge.model.sequence_logits(np.array(tokens, np.int32))
    assert float(np.abs(golden - bound.reference).max()) < 2e-5 < float(bound.bound.max()) * 10
    assert bound.shares(golden, np.arange(5)).max() < 0.5


def test_the_bound_grows_with_the_unit_roundoff() -> None:
    judge, rows = judge_of(), chain([5, 17, 3])
    fine, coarse = noise(judge.prepared, rows, Profile()), noise(judge.prepared, rows, Profile(u_accumulate=2.0**-20))
    assert 8 < float(np.median(coarse.bound / fine.bound)) < 32


def test_a_router_near_tie_bounds_nothing() -> None:
    """Experts 0 and 1 get one router column: honest rounding decides between them, so no logit of such a row is held against the bound."""
    model = judge_of().model
    weights = {name: value.copy() for name, value in model.weights.items()}
    weights["1.router"][:, 1] = weights["1.router"][:, 0]
    weights["1.router_bias"][:] = 0
    weights["1.router"][:, 2:] *= F(1e-3)
    weights["1.router_bias"][:2] = [5, 5]
    weights["1.router_bias"][2] = 5
    weights["1.router"][:, 2] = weights["1.router"][:, 0]
    twin = SessionJudge(GoldenModel(model.config, weights))
    bound = noise(twin.prepared, chain([5, 17, 3]), Profile())
    assert not bound.decided.any()
    assert bound.shares(np.full(bound.reference.shape, 1e9, F), np.arange(3)).max() == 0
    assert bound.margin_bound(0, 1, 2) == float("inf")


def test_a_few_samples_give_the_verdict_of_all() -> None:
    """The first n of SAMPLES squares are part of their sum: no final bound is below sqrt(n / SAMPLES) of an early one."""
    judge, rows = judge_of(), chain([5, 17, 3, 80, 41])
    seen: list[tuple[Noise, float]] = []

    def never(found: Noise, part: float) -> bool:
        seen.append((found, part))
        return False

    final = noise(judge.prepared, rows, Profile(), enough=never)
    assert [part for _, part in seen] == pytest.approx([np.sqrt(n / SAMPLES) for n in FEWER])
    assert all((final.bound >= part * early.bound).all() for early, part in seen)
    assert noise(judge.prepared, rows, Profile(), enough=lambda found, part: True).bound.tobytes() == final.bound.tobytes(), "drawn already"
    again = noise(judge.prepared, chain([5, 17, 3, 80, 42]), Profile(), enough=lambda found, part: True)
    assert again.bound.shape == final.bound.shape
    assert again.bound.tobytes() != noise(judge.prepared, chain([5, 17, 3, 80, 42]), Profile()).bound.tobytes(), "one sample was enough"


def test_a_router_that_takes_every_expert_is_decided_without_a_warning() -> None:
    """No margin: infinity in every sample, which no subtraction may meet."""
    config = dataclasses.replace(judge_of().model.config, top_k=judge_of().model.config.experts)
    model = GoldenModel(config, random_weights(config, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bound = noise(SessionJudge(model).prepared, chain([5, 17, 3]), Profile())
    assert bound.decided.all()


def test_equal_sums_of_zeros_are_exact_and_the_lowest_is_due() -> None:
    """A head column of zeros gives 0 in any order of summation: another choice among equal ones is wrong, whatever was checked before."""
    model = judge_of().model
    weights = {name: value.copy() for name, value in model.weights.items()}
    weights["head"][:, [7, 9]] = 0
    bound = noise(SessionJudge(GoldenModel(model.config, weights)).prepared, chain([5, 17, 3]), Profile())
    assert not bound.bound[:, [7, 9]].any() and (np.delete(bound.bound, [7, 9], 1) > 0).all()
    assert bound.margin_bound(0, 7, 9) == 0 < bound.margin_bound(0, 7, 8)
    logits = bound.reference.astype(F)
    assert bound.shares(logits, np.arange(3)).max() < 1
    logits[1, 9] = 1e-30
    assert bound.shares(logits, np.arange(3)).max() == np.inf
    assert decide(0.0, False, bound.margin_bound(0, 7, 9))[0] is Verdict.DEFECT
    assert decide(0.0, False, bound.margin_bound(0, 7, 8))[0] is Verdict.UNVERIFIED


@pytest.mark.parametrize("cache_format", ["bfloat16", "float16"])
def test_a_cache_of_16_bits_is_rounded_and_not_blurred(cache_format: str) -> None:
    """Every engine rounds a number to the same neighbour unless noise may carry it over the middle, so rows without such a number are held to the noise of
    float32; an engine that truncates to bfloat16 instead is far outside."""
    config = dataclasses.replace(judge_of().model.config, cache_format=cache_format)
    judge = SessionJudge(GoldenModel(config, random_weights(config, 0)))
    rows = chain([5, 17, 3, 80, 41])
    golden = judge.model.sequence_logits(rows.token.astype(np.int32))
    bound = noise(judge.prepared, rows, Profile())
    assert bound.shares(golden, np.arange(5)).max() < 1
    alone = [float(np.median(noise(judge.prepared, chain([token]), Profile()).bound)) for token in range(8)]
    assert sum(size < 2e-5 for size in alone) >= 3, alone
    step = Forward(
        EngineRows(np.zeros(5, np.int32), rows.token.astype(np.int32), np.arange(5, dtype=np.int32), np.arange(-1, 4, dtype=np.int32)),
        np.ones(5, np.bool_),
        "prefill",
    )
    script = Script(config, WeightsKey(0), (step,))

    def truncated(site: object, form: str, row: np.ndarray) -> np.ndarray:
        return (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    for points, verdict in (({}, Verdict.UNVERIFIED), ({"to_cache": truncated}, Verdict.DEFECT)):
        trace = InProcess(BlockedEngine(points, hidden_taps=ALL), weights=lambda c, key: judge.model.weights).script(script)
        of_logits = next(j for j in judge.judge(script, trace) if j.tap == "logits")
        assert of_logits.verdict is verdict
