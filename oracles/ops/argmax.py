"""The greedy choice, redone on the engine's own logits: the lowest id among equal maxima (A1). No tolerance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.ball import Arithmetic
from oracles.compare import Equal, Expected
from oracles.ops.record import Arrays, Params


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    return {"ids": Equal(choice(inputs["logits"], outputs["ids"]), "A1")}


def choice(logits: NDArray[Any], found: NDArray[Any]) -> NDArray[Any]:
    """[T]; a row with NaN has no argmax, so whatever was found there stands."""
    best = logits.argmax(-1)
    top = np.take_along_axis(logits, best[:, None], -1)[:, 0]
    nan = np.isnan(top)  # argmax stops at a NaN
    return np.where(nan, found, best) if nan.any() else best
