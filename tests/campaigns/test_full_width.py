"""Layers in full width: what a campaign asks of them, and that nothing of gigabytes is kept or written. The runs themselves are
benchmarks/full_width.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from campaigns.discover import diet_of
from campaigns.plan import session_script
from campaigns.runner import TRIALS, Options, fitted
from campaigns.strategies import full_width_sessions, session_batches
from campaigns.weights import WeightsKeyError, weights_for
from impls.golden import GoldenEngine
from spec.config import preset
from spec.script import Forward, WeightsKey
from spec.weights import FetchedWeights, checked, is_large, random_weights

LAYER = "kimi-k2-layer"


@settings(max_examples=5, database=None, deadline=None)
@given(full_width_sessions(LAYER))
def test_a_session_in_full_width_is_two_tokens_of_one_sequence(case: object) -> None:
    script = session_script(case)  # type: ignore[arg-type]
    forwards = [step for step in script.steps if isinstance(step, Forward)]
    assert [(step.phase, len(step.rows)) for step in forwards] == [("prefill", 1), ("decode", 1)]
    assert is_large(script.config) and script.config.hidden == 7168 and script.config.experts == 384


def test_a_campaign_of_a_large_preset_asks_for_sessions_alone_and_for_one() -> None:
    description = GoldenEngine().describe()
    assert diet_of(description, preset=LAYER).shares() == {"session": 1.0}
    assert set(diet_of(description, preset="tiny").shares()) == {"op", "tree", "session"}
    options = Options("store", preset=LAYER, jobs=4)
    assert dataclasses.replace(options, trials=1, jobs=1, minimise=False) == fitted(options)
    assert fitted(dataclasses.replace(options, trials=3)).trials == 3
    assert fitted(Options("store", preset="tiny")) == Options("store", preset="tiny", trials=TRIALS)


@settings(max_examples=5, database=None, deadline=None)
@given(session_batches("full", 8, only=LAYER))
def test_batches_of_a_large_preset_hold_one_session(batch: list[object]) -> None:
    assert len(batch) == 1


def test_weights_of_a_large_model_are_made_at_each_access() -> None:
    config = preset(LAYER)
    weights = weights_for(config, WeightsKey(2))
    assert isinstance(weights, FetchedWeights)
    expert = weights["0.expert_down/383"]
    assert expert.shape == (2048, 7168) and weights["0.expert_down/383"] is not expert
    assert np.array_equal(weights["0.expert_down/383"][:2], expert[:2])
    with pytest.raises(KeyError):
        weights["0.expert_down/384"]
    with pytest.raises(ValueError, match="all weights together take more than 1024 MiB"):
        list(checked(config, weights.__getitem__))
    with pytest.raises(WeightsKeyError, match="not 'tied-experts'"):
        weights_for(config, WeightsKey(0, "tied-experts"))


def test_fetched_weights_are_those_of_the_provider() -> None:
    config = preset("tiny")
    held = random_weights(config, 1)
    fetched = FetchedWeights(config, held.__getitem__)
    assert list(fetched) == list(held) and len(fetched) == len(held)
    assert all(np.array_equal(fetched[name], held[name]) for name in held)
    assert np.array_equal(fetched["1.expert_up/3"], held["1.expert_up"][3])
