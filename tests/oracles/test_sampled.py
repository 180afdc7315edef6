"""Drawn tokens in the engine's own loop: honest engines are exact, and each known mistake is found under its rule and named."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from conftest import findings, judge_of, run, session_case
from hypothesis import given, settings
from hypothesis import strategies as st

from campaigns.case import CaseError, GenerateCase
from campaigns.plan import sampling_of
from impls.blocked.engine import BlockedEngine
from impls.blocked.points import Site
from impls.golden import GoldenEngine
from oracles.judgement import Judgement, Verdict
from oracles.sampled import Draw, due, explanation, margin
from spec.sampling import Sampling
from spec.weights import philox

Override = Callable[..., Any]
HOT = (("temperature", 1.5),)
PENALISED = (("temperature", 0.7), ("frequency_penalty", 0.9), ("presence_penalty", 0.5), ("repetition_penalty", 1.4))
REPEATING = (("temperature", 0.7), ("frequency_penalty", -2.0))
TRUNCATED = (("temperature", 2.0), ("top_k", 7.0), ("top_p", 0.8), ("min_p", 0.02))
CASES = {
    "hot": GenerateCase("noisy", 1, 80, 1, 8, 4, 10, -1, HOT),
    "penalised": GenerateCase("noisy", 2, 80, -1, 8, 4, 10, 6, PENALISED),
    "repeating": GenerateCase("noisy", 6, 100, -1, 8, 4, 16, -1, REPEATING),
    "truncated": GenerateCase("random", 3, 60, 2, 6, 3, 10, -1, TRUNCATED),
    "sequential": GenerateCase("none", 4, 60, -1, 4, 4, 10, -1, PENALISED),
    "cold": GenerateCase("chain", 5, 60, -1, 4, 4, 9, -1, (("temperature", 0.0), ("frequency_penalty", 0.9))),
}
PROMPTS = ((5, 1), (3, 2), (7, 3))


def loop_judgements(engine: Any, name: str) -> list[Judgement]:
    script, trace = run(engine, case=dataclasses.replace(session_case(generate=CASES[name]), prompts=PROMPTS))
    assert trace.answers[-1].failure is None, trace.answers[-1].failure
    return [j for j in judge_of().judge(script, trace) if j.rung == "whole loop"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("engine", [GoldenEngine(), BlockedEngine()], ids=["golden", "blocked"])
def test_an_honest_sampler_is_exact(engine: Any, name: str) -> None:
    judgements = loop_judgements(engine, name)
    assert {j.verdict for j in judgements} == {Verdict.EXACT}, judgements
    assert {j.tap for j in judgements} == ({"length", "stream"} if name == "sequential" else {"tree", "path", "length", "stream"})
    assert next(j for j in judgements if j.tap == "stream").checked >= 20


def test_an_engine_that_does_not_sample_says_so() -> None:
    class Silent(BlockedEngine):
        def describe(self) -> Any:
            told = super().describe()
            return dataclasses.replace(told, capabilities=told.capabilities - {"sampling"})

    _, trace = run(Silent(), case=session_case(generate=CASES["hot"]))
    failure = trace.answers[-1].failure
    assert failure is not None
    assert failure.kind == "unsupported"
    assert "capability `sampling`" in failure.message


def greedy_law(site: Site, sampling: Sampling, row: np.ndarray, seen: list[int], prompt_len: int) -> Any:
    return np.eye(len(row))[row.argmax()]


def without(**neutral: float) -> Override:
    def law(site: Site, sampling: Sampling, row: np.ndarray, seen: list[int], prompt_len: int) -> Any:
        return site.honest(dataclasses.replace(sampling, **neutral), row, seen, prompt_len)  # type: ignore[arg-type]

    return law


MISTAKES: dict[str, tuple[str, Mapping[str, Override], str, str]] = {
    "greedy": ("hot", {"law": greedy_law}, "A2", "decoded greedily"),
    "no temperature": ("hot", {"law": without(temperature=1.0)}, "S1", "the draw without temperature"),
    "no top_k": ("truncated", {"law": without(top_k=0)}, "S2", "the draw without top_k"),
    "no top_p": ("truncated", {"law": without(top_p=1.0)}, "S2", "the draw without top_p"),
    "no penalties": (
        "penalised", {"law": without(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0)}, "A6", "without penalties",
    ),
    "stale penalties": ("repeating", {"seen_tokens": lambda site, committed, path: [*committed, path[0]]}, "A6", "did not see the last tokens"),
    "noise by slot": ("hot", {"noise": lambda site, seed, seq, position, n: site.honest(seed, seq, position - 1, n)}, "S3", "noise is that of the position before"),
    "one stream": ("hot", {"noise": lambda site, seed, seq, position, n: site.honest(seed, 0, position, n)}, "S3", "noise is that of request 0"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_known_mistake_is_a_defect_under_its_name(mistake: str) -> None:
    name, overrides, rule, words = MISTAKES[mistake]
    found = [j for j in findings(loop_judgements(BlockedEngine(overrides), name)) if j.tap == "stream"]
    assert found, mistake
    assert found[0].verdict is Verdict.DEFECT
    assert (found[0].rule, words in found[0].message) == (rule, True), found[0].message
    assert found[0].share > 1


def test_leviathan_on_the_tree_is_found() -> None:
    """DDTREE section 6, row 48: a child is taken although the draw was another token."""

    def first_child(site: Site, path: list[int], tokens: Any, parents: Any, target: Any) -> list[int]:
        return [0, 1] if len(tokens) > 1 else list(path)

    found = findings(loop_judgements(BlockedEngine({"accepted": first_child}), "hot"))
    assert any(j.verdict is Verdict.DEFECT and j.tap == "stream" for j in found)


# Margins


def draw_of(seed: int, vocab: int = 12) -> Draw:
    draws = philox("draw", seed)
    row = (2 * draws.standard_normal(vocab)).astype(np.float32)
    return Draw(row, tuple(int(t) for t in draws.integers(0, vocab, 9)), 4, int(draws.integers(3)))


SAMPLINGS = [
    Sampling(temperature=1.3, seed=1),
    Sampling(temperature=0.8, top_k=4, seed=2),
    Sampling(temperature=1.0, top_p=0.7, seed=3),
    Sampling(temperature=1.1, min_p=0.1, repetition_penalty=1.5, frequency_penalty=0.3, seed=4),
    Sampling(temperature=2.0, top_k=6, top_p=0.85, min_p=0.02, seed=5),
    Sampling(temperature=0.0, repetition_penalty=1.5, seed=6),
]


@settings(deadline=None, max_examples=150, derandomize=True)
@given(seed=st.integers(0, 10**6), index=st.integers(0, len(SAMPLINGS) - 1), share=st.sampled_from([0.3, 0.9, 0.99]))
def test_no_perturbation_below_the_margin_draws_the_token(seed: int, index: int, share: float) -> None:
    """The margin is a certificate: logits that move by less than half of it, each in the direction that favours `found` or at random, never
    give `found`."""
    sampling, draw = SAMPLINGS[index], draw_of(seed)
    golden = due(sampling, draw)
    draws = philox("perturb", seed)
    for found in range(len(draw.row)):
        gap = margin(sampling, draw, found)
        if found == golden:
            assert gap == 0
            continue
        assert gap > 0
        if math.isinf(gap):
            continue
        size = share * gap / 2
        for signs in (np.where(np.arange(len(draw.row)) == found, 1.0, -1.0), draws.choice([-1.0, 1.0], len(draw.row))):
            moved = (draw.row.astype(np.float64) + size * signs).astype(np.float32)
            assert due(sampling, dataclasses.replace(draw, row=moved)) != found


def test_the_margin_is_reached_in_a_plain_race() -> None:
    """Without truncation it is exact: moving the two tokens by a little more than half of it gives `found`."""
    sampling = SAMPLINGS[0]
    for seed in range(40):
        draw = draw_of(seed)
        golden = due(sampling, draw)
        found = (golden + 1 + seed) % len(draw.row)
        if found == golden:
            continue
        moved = draw.row.astype(np.float64)
        gap = margin(sampling, draw, found)
        moved[found] += gap * 1.001
        assert due(sampling, dataclasses.replace(draw, row=moved.astype(np.float32))) == found


def test_a_biased_out_token_has_no_margin() -> None:
    sampling = Sampling(logit_bias=((3, -math.inf),))
    assert margin(sampling, draw_of(0), 3) == math.inf


def test_an_unexplained_token_is_only_that() -> None:
    sampling, draw = SAMPLINGS[0], draw_of(1)
    explained = [token for token in range(12) if explanation(sampling, [draw], [token])[1]]
    assert 1 <= len(explained) < 8
    assert explanation(sampling, [draw, draw_of(2)], [explained[0], 99]) == ("S3", "")


def test_a_case_with_a_field_that_sampling_does_not_have_is_refused() -> None:
    for pairs, text in (((("heat", 1.0),), "heat"), ((("top_p", 0.0),), "top_p is 0.0")):
        with pytest.raises(CaseError, match=text):
            sampling_of(dataclasses.replace(CASES["hot"], sampling=pairs))
    assert sampling_of(dataclasses.replace(CASES["hot"], sampling=())) is None
