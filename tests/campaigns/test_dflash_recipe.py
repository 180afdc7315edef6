"""The DFlash recipe: plain data, the drafts of the spec's drafter, and loops that engines run with it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from campaigns.case import GenerateCase, SessionCase
from campaigns.dflash import DFlashRecipe
from campaigns.isolation import InProcess
from campaigns.plan import generate_step, session_script
from campaigns.trial import Bench
from campaigns.weights import weights_for
from impls.blocked import BlockedEngine
from impls.golden import GoldenEngine
from oracles.judgement import Verdict
from spec.config import preset
from spec.dflash import DFlashDrafter, target_features, tiny_dflash
from spec.model import GoldenModel
from spec.script import WeightsKey

RECIPE = DFlashRecipe(preset("tiny"), WeightsKey(2), 5, 4)


def test_a_recipe_is_plain_data() -> None:
    RECIPE.draft(0, np.array([1, 2], np.int32))
    copy = pickle.loads(pickle.dumps(RECIPE))
    assert copy == RECIPE
    assert len(pickle.dumps(RECIPE)) < 2000
    assert (copy.block_len, copy.vocab) == (4, 96)


def test_its_drafts_are_those_of_the_drafter_that_observes() -> None:
    target = GoldenModel(RECIPE.config, weights_for(RECIPE.config, RECIPE.weights))
    drafter = DFlashDrafter(tiny_dflash(target, 5, block_size=5))
    history = np.array([7, 1, 9, 30], np.int32)
    drafter.observe(0, target_features(target, drafter.feature_layers, history[:-1]))
    drafted = RECIPE.draft(3, history)
    assert np.array_equal(drafted.view(np.uint32), drafter.draft(0, history).view(np.uint32))
    drafted[:] = 0
    assert RECIPE.draft(3, history).any(), "a draft is the caller's own"


@pytest.mark.parametrize("sampling", [(), (("temperature", 1.0),)])
@pytest.mark.parametrize("engine", [GoldenEngine(), BlockedEngine()], ids=["golden", "blocked"])
def test_engines_loop_with_a_dflash_drafter(engine: GoldenEngine | BlockedEngine, sampling: tuple[tuple[str, float], ...]) -> None:
    loop = GenerateCase("dflash", 5, 0, -1, 30, 4, 8, -1, sampling)
    case = SessionCase("tiny", (), 2, "ordinary", ((5, 1), (3, 2)), (), generate=loop)
    assert generate_step(session_script(case).config, case).drafter == RECIPE
    judgements = [j for j in Bench(InProcess(engine)).outcome(case).judgements if j.rung == "whole loop"]
    assert {j.tap for j in judgements} == {"tree", "path", "length", "stream"}
    assert {j.verdict for j in judgements} == {Verdict.EXACT}
