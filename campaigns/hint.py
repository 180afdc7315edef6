"""A hint: which known defect, planted in our own engine, gives the same wrong output on the same case. Never a verdict.

The residual is the distance of a plant's output to the engine's, in units of the engine's distance to the golden output: 0 explains the whole
deviation, 1 none of it. Nothing is named unless one plant, or several that are in the same place, fits clearly: a catalogue names only what is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from campaigns.battery import Compared, compared
from campaigns.case import Case, CaseError, OpCase
from campaigns.isolation.inprocess import InProcess
from campaigns.trial import Bench
from impls.planted import Plant
from impls.planted.mutants import PLANTS
from impls.registry import resolve

FITS = 2.0**-6  # of the deviation: rounding of another order of evaluation is far below, another defect far above
CLEAR = 4.0  # the best plant of another place must be this many times worse
LEFT_OUT = frozenset("ji")  # crashes, hangs and races are not run beside us


@dataclass(frozen=True)
class Hint:
    """`plant` "" is unknown. `residual`: of the best one; `others`: plants of the same place that fit as well."""

    plant: str
    residual: float
    others: tuple[str, ...]
    text: str


def library(without: Iterable[str] = ()) -> list[Plant]:
    """The plants that can be run beside us."""
    gone = set(without)
    return [plant for plant in PLANTS.values() if plant.bug_class[0] not in LEFT_OUT and plant.name not in gone]


def hint(bench: Bench, case: Case, plants: Sequence[Plant]) -> Hint:
    """One run of the engine, and one of each plant that can show the case. Raises CaseError."""
    engine = compared(bench, case)
    own = _deviation(engine)
    if own is None or not np.isfinite(own) or own == 0:
        return Hint("", 1.0, (), "unknown: the outputs are incomplete, not finite, or not wrong in a way that can be measured")
    fits: list[tuple[float, Plant]] = []
    for plant in plants:
        if isinstance(case, OpCase) and not _may_show(plant, case.op):
            continue
        try:
            planted = compared(Bench(InProcess(resolve(plant.engine))), case)
        except (CaseError, ValueError, RuntimeError, IndexError, ArithmeticError):
            continue
        fits.append((_distance(engine, planted) / own, plant))
    fits.sort(key=lambda fit: fit[0])
    if not fits or fits[0][0] > FITS:
        best = f"; nearest is {fits[0][1].name}, which leaves {fits[0][0]:.2g} of the deviation" if fits else ""
        return Hint("", fits[0][0] if fits else 1.0, (), f"unknown{best}")
    residual, first = fits[0]
    limit = max(residual * CLEAR, FITS)
    same = [plant for share, plant in fits[1:] if share <= limit and set(plant.expected_ops) & set(first.expected_ops)]
    elsewhere = [plant.name for share, plant in fits[1:] if share <= limit and not set(plant.expected_ops) & set(first.expected_ops)]
    if elsewhere:
        return Hint("", residual, (), f"unknown: {first.name} and {elsewhere[0]} fit equally well")
    text = f"looks like {first.name} ({first.source}): {first.trigger}; it leaves {residual:.2g} of the deviation"
    return Hint(first.name, residual, tuple(plant.name for plant in same), text)


def _may_show(plant: Plant, op: str) -> bool:
    """Operations of a case that a plant cannot touch need no run: regions may hold the guilty operation."""
    return not set(plant.expected_ops) or op in plant.expected_ops or op in ("tree_attention", "moe")


def _deviation(one: Compared) -> float | None:
    """Of the found arrays from the golden ones; None where something is missing."""
    if not one.whole or not (one.pairs or one.tokens):
        return None
    return float(np.sqrt(sum(_squared(found, golden) for found, golden in (*one.pairs, *one.tokens))))


def _distance(one: Compared, other: Compared) -> float:
    first, second = ([found for found, _ in (*c.pairs, *c.tokens)] for c in (one, other))
    if not other.whole or len(first) != len(second):
        return float("inf")
    return float(np.sqrt(sum(_squared(a, b) for a, b in zip(first, second, strict=True))))


def _squared(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        return float("inf")
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(a == b, 0.0, a.astype(np.float64) - b.astype(np.float64))
    return float(np.square(difference).sum()) if np.isfinite(difference).all() else float("inf")
