"""The native engine draws the golden tokens: its Philox, penalties, truncation and walk against the specification, and two plants."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from campaigns.case import GenerateCase, SessionCase
from campaigns.isolation import InProcess
from campaigns.trial import Bench
from impls.native import LibraryEngine, build, native
from oracles.judgement import FINDINGS, Verdict
from spec.config import preset
from spec.drafters import RandomDrafter, TableDrafter
from spec.engine import EngineError, Limits, Unsupported
from spec.model import GoldenModel
from spec.sampling import Sampling, as_parameters
from spec.weights import philox, random_weights

CONFIG = preset("tiny")
WEIGHTS = random_weights(CONFIG, 3)


@cache
def engine(plant: str | None = None) -> LibraryEngine:
    try:
        return native(plant)
    except build.NoCompiler as problem:
        pytest.skip(str(problem))


@cache
def model() -> GoldenModel:
    return GoldenModel(CONFIG, WEIGHTS)


def prompts_of(seed: int, lengths: tuple[int, ...]) -> list[np.ndarray]:
    return [philox("native sampling", seed, i).integers(0, CONFIG.vocab, n).astype(np.int32) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=2**64 - 1),
        Sampling(temperature=2.0, top_k=5, seed=1),
        Sampling(temperature=1.5, top_k=5, top_k_ties="all", min_p=0.01, seed=2),
        Sampling(temperature=1.0, top_p=0.6, repetition_penalty=1.3, seed=3),
        Sampling(temperature=0.8, frequency_penalty=-1.5, presence_penalty=0.7, seed=2**40),
        Sampling(temperature=1.0, logit_bias=((5, 4.0), (0, -np.inf)), seed=4),
        Sampling(temperature=0.0, frequency_penalty=0.9, seed=5),
    ],
    ids=range(7),
)
def test_native_draws_the_golden_tokens(sampling: Sampling) -> None:
    """Two keys of these draws are never so near that rounding of the logits could turn them: the margins are thousands of ulps."""
    for seed, lengths in enumerate([(4,), (1, 6), (3, 2, 5)]):
        prompts = prompts_of(seed, lengths)
        drafter = RandomDrafter(seed, CONFIG.vocab, 3)
        with engine().open(CONFIG, WEIGHTS) as session:
            for given, budget in ((None, 0), (drafter, 0), (drafter, 20)):
                found = session.sample(prompts, given, budget, Limits(8), sampling)
                assert found == model().open().sample(prompts, given, budget, Limits(8), sampling)


def test_greedy_generation_is_what_it_was() -> None:
    prompts = prompts_of(9, (3, 4))
    with engine().open(CONFIG, WEIGHTS) as session:
        assert session.generate(prompts, None, 0, Limits(6)) == model().open().generate(prompts, None, 0, Limits(6))


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ({"temperature": -1.0}, "temperature is -1, but must be finite and at least 0"),
        ({"top_p": 0.0}, "top_p is 0, but must be above 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty is"),
        ({"heat": 1.0}, "sampling has no field heat"),
        ({"logit_bias:96": 1.0}, "logit_bias names token 96, but the vocabulary has 96"),
    ],
)
def test_parameters_outside_the_domain_are_refused(pairs: dict[str, float], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import impls.native.session as module

    monkeypatch.setattr(module, "as_parameters", lambda sampling: as_parameters(sampling) | pairs)
    with engine().open(CONFIG, WEIGHTS) as session, pytest.raises(EngineError, match=text):
        session.sample(prompts_of(0, (2,)), None, 0, Limits(2), Sampling())


def test_a_library_without_the_capability_says_so() -> None:
    with engine().open(CONFIG, WEIGHTS) as session:
        described = session._description
        session._description = type(described)(described.name, described.version, described.profile, described.capabilities - {"sampling"})
        with pytest.raises(Unsupported, match="does not list the capability 'sampling'"):
            session.sample(prompts_of(0, (2,)), None, 0, Limits(2), Sampling())


# Plants


def loop_findings(plant: str | None, case: GenerateCase) -> list[Any]:
    session = SessionCase("tiny", (), 0, "ordinary", ((5, 1), (3, 2)), (), generate=case)
    judgements = Bench(InProcess(engine(plant))).outcome(session).judgements
    assert {j.verdict for j in judgements if j.rung == "whole loop"} <= {Verdict.EXACT, *FINDINGS}
    return [j for j in judgements if j.verdict in FINDINGS]


@pytest.mark.parametrize(
    ("plant", "case", "rule"),
    [
        ("sampled-greedy", GenerateCase("none", 1, 0, -1, 0, 1, 8, -1, (("temperature", 2.0),)), "A2"),
        ("stale-penalties", GenerateCase("noisy", 6, 100, -1, 8, 4, 16, -1, (("temperature", 0.7), ("frequency_penalty", -2.0))), "A6"),
    ],
)
def test_a_planted_sampler_is_named(plant: str, case: GenerateCase, rule: str) -> None:
    assert loop_findings(None, case) == []
    found = loop_findings(plant, case)
    assert [(j.rule, j.op) for j in found] == [(rule, "generate")]


def test_stale_penalties_at_their_smallest_trigger() -> None:
    """A tree of one node that is accepted: token 7 stands 30 nats above the others and loses 20 each time it is said, so that it is said twice;
    without the node in the history, a third time."""
    sampling = Sampling(temperature=0.0, frequency_penalty=20.0, logit_bias=((7, 30.0),))
    prompt = prompts_of(0, (3,))
    right = model().open().sample(prompt, None, 0, Limits(3), sampling)[0].tokens
    assert right[:2] == (7, 7) != right[1:]
    table = np.full((1, CONFIG.vocab), -20.0, np.float32)
    table[0, 7] = 20.0
    tokens = []
    for plant in (None, "stale-penalties"):
        with engine(plant).open(CONFIG, WEIGHTS) as session:
            tokens.append(session.sample(prompt, TableDrafter.of_array(table), 1, Limits(3), sampling)[0].tokens)
    assert tokens == [right, (7, 7, 7)]
