"""A DFlash drafter as a recipe: plain data that crosses process walls, and draws on a golden target where it is asked.

The features are those of the golden model, recomputed from the history at each draft, because an engine's own loop hands out none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from campaigns.weights import weights_for
from spec.config import Config
from spec.dflash import ReplayedDFlashDrafter, tiny_dflash
from spec.engine import Float, Int
from spec.model import GoldenModel
from spec.script import WeightsKey

KEPT = 4096  # drafts; the engine's loop and the judge ask for the same histories


@dataclass(frozen=True)
class DFlashRecipe:
    """`spec.engine.Drafter`: `spec.dflash.tiny_dflash` of this seed on the golden model of these weights."""

    config: Config
    weights: WeightsKey
    seed: int
    block_len: int

    @property
    def vocab(self) -> int:
        return self.config.vocab

    def draft(self, sequence: int, history: Int) -> Float:
        return _drafted(self, tuple(np.asarray(history).tolist())).copy()


@lru_cache(maxsize=KEPT)
def _drafted(recipe: DFlashRecipe, history: tuple[int, ...]) -> Float:
    return _drafter(recipe).draft(0, np.array(history, np.int32))


@lru_cache(maxsize=8)
def _drafter(recipe: DFlashRecipe) -> ReplayedDFlashDrafter:
    target = GoldenModel(recipe.config, weights_for(recipe.config, recipe.weights))
    return ReplayedDFlashDrafter(tiny_dflash(target, recipe.seed, block_size=recipe.block_len + 1))
