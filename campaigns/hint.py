"""A hint: which known defect, planted in our own engine, gives the same wrong output on the same case. Never a verdict.

The question is asked where the judge places the finding: of the guilty array (a tap of a step, an output of an operation), how much of the engine's
deviation from our honest engine does a plant leave? The residual is that share: 0 explains all of it, 1 none. The plant's deviation may be taken times a
constant: a scale that is wrong by another factor is the same mistake. A plant that deviates before the guilty array, where the engine does not, has
another place, and pays for it. Small inputs fit many defects: what fits on the finding's minimal case is asked again on a few random cases beside it, where
the judge places the finding there.

Where no known defect fits, the ways in which kernels go wrong anywhere are tried at each named point of our engine (campaigns/hint_family.py).

Nothing is named unless one plant fits clearly, or several that are in one place (a named point, an operation), or of one class. What leaves a part of
the deviation, and less than anything elsewhere, is named as alike. A catalogue names only what is in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.case import Case, CaseError, OpCase, SessionCase, TreeCase, kind_of
from campaigns.hint_family import FAMILY
from campaigns.isolation.inprocess import InProcess
from campaigns.materialise import op_call, session_script, tree_job
from campaigns.probes import PROBES
from campaigns.trial import Bench, Worker
from impls.blocked import BlockedEngine, Overrides
from impls.planted import Plant
from impls.planted.mutants import OVERRIDES, PLANTS
from oracles.judgement import FINDINGS, Judgement
from spec.config import Config
from spec.script import Answer
from spec.taps import taps_of_layer

Array = NDArray[Any]
Place = tuple[int, str, int]  # step, name of the array, layer
Evidence = Mapping[Place, Array]  # in data order

FITS = 2.0**-4  # of the deviation: other orders of summation are far below, what merely goes the same way far above
CLEAR = 4.0  # the best plant elsewhere must be this many times worse
ALIKE = 0.72  # half of the squares: not the same defect, but one of the same kind; of the library's own, none in another place came so near
ALIKE_TIMES = 0.5  # the same where it took a constant: some multiple of anything leaves less than all
ALIKE_CLEAR = 1.25
NOTHING_LIKE = 0.95
ASKED_AGAIN = {
    "session": 16,
    "tree": 32,
    "op": 64,
}  # plants with the smallest residuals are asked about other cases, as many as take a second
WORTH_ASKING = 0.75  # of those that leave less than this
DIFFERENT = 2.0**-18  # relative: float32 engines differ by less in any tap of a small model, defects that are found by more
FAR = 4.0  # a deviation counts up to this many times the array's size: one wild element is no better evidence than one wrong row
TELLING = 6  # numbers that deviate: fewer are a multiple of anything
MULTIPLE = 32.0  # a larger constant makes a defect of rounding errors
LEFT_OUT = frozenset("ji")  # crashes, hangs and races are not run beside us
FAILED = "failed"
FAILURES = ("unsupported", "raised", "malformed", "flaky", "crashed", "hung")


@dataclass(frozen=True)
class Hint:
    """`plant` "" is unknown. `residual`: of the best one; `others`: plants that fit as well, at the same place or of the same class; `by_class`: they
    are in different places, so that the class is all that is said; `alike`: it is not the same defect, only the nearest by far."""

    plant: str
    residual: float
    others: tuple[str, ...]
    text: str
    by_class: bool = False
    alike: bool = False


@dataclass(frozen=True)
class Share:
    """What a plant leaves of the deviation on one case: as it is, and times the best constant; `telling`: that many numbers are no multiple by chance."""

    plain: float
    multiple: float
    telling: bool


@dataclass(frozen=True)
class Fit:
    """`shares`: on the finding's case, then on the cases beside it."""

    plant: Plant
    shares: tuple[Share, ...]

    @property
    def times(self) -> bool:
        """A constant counts: two cases have enough numbers to tell it."""
        return sum(one.telling for one in self.shares) >= 2

    @property
    def residual(self) -> float:
        """Over all cases; where two can tell a constant, times a constant, over those in which it is none by chance."""
        if self.times:
            left = [min(one.plain, one.multiple) for one in self.shares if one.telling or one.plain == one.multiple]
        else:
            left = [one.plain for one in self.shares]
        return float(np.sqrt(np.mean(np.square(left))))

    @property
    def first(self) -> float:
        """On the finding's case, as it is or times a constant: who is asked about others."""
        return min(self.shares[0].plain, self.shares[0].multiple)


def library(without: Iterable[str] = ()) -> list[Plant]:
    """The plants that can be run beside us."""
    gone = set(without)
    return [plant for plant in PLANTS.values() if plant.bug_class[0] not in LEFT_OUT and plant.name not in gone]


def hint(bench: Bench, case: Case, plants: Sequence[Plant]) -> Hint:
    """Runs of the engine, of ours and of each plant. Raises CaseError."""
    found = next((j for j in bench.outcome(case).judgements if j.verdict in FINDINGS), None)
    if found is None:
        return Hint("", 1.0, (), "unknown: the case passes")
    fits = fitted(bench, case, found, plants)
    if plants and not fits:
        return Hint("", 1.0, (), "unknown: the outputs do not differ from those of our engine")
    if fits and fits[0].residual <= FITS:
        return told(fits)
    placed = [plant for plant, _ in FAMILY.values() if {found.op, found.rule} & set(plant.expected_ops)]
    anywhere = fitted(bench, case, found, placed or [plant for plant, _ in FAMILY.values()])
    return told(sorted([*fits, *anywhere], key=lambda fit: fit.residual))


def told(fits: Sequence[Fit]) -> Hint:
    """What may be said of fits, best first."""
    if not fits:
        return Hint("", 1.0, (), "unknown: nothing was tried")
    best = fits[0]
    left = f"leaves {best.residual:.2g} of the deviation"
    if best.residual > NOTHING_LIKE:
        return Hint("", best.residual, (), f"unknown: none of {len(fits)} known defects and general ways comes near")
    if best.residual > (ALIKE_TIMES if best.times else ALIKE):
        return Hint("", best.residual, (), f"unknown; nearest is {best.plant.name}, which {left}")
    same = best.residual <= FITS
    limit = max(best.residual * CLEAR, FITS) if same else best.residual * ALIKE_CLEAR
    rivals = [fit.plant for fit in fits[1:] if fit.residual <= limit]
    elsewhere = [plant for plant in rivals if not _same_place(plant, best.plant)]
    names = tuple(plant.name for plant in rivals)
    also = f"; so do {', '.join(names)}" if names else ""
    source = f" ({best.plant.source})" if best.plant.source else ""
    if not elsewhere:
        how = "looks like" if same else "is no known defect, but resembles"
        text = f"{how} {best.plant.name}{source}: {best.plant.trigger}; it {left}{also}"
        return Hint(best.plant.name, best.residual, names, text, alike=not same)
    if same and all(plant.bug_class == best.plant.bug_class for plant in rivals):
        text = f"looks like a defect of class {best.plant.bug_class}: {best.plant.name} {left}{also}"
        return Hint(best.plant.name, best.residual, names, text, by_class=True)
    return Hint("", best.residual, (), f"unknown: {best.plant.name} and {elsewhere[0].name} fit equally well")


def overrides(plant: Plant) -> Overrides:
    """The functions of a plant of the blocked engine, by named point."""
    return FAMILY[plant.name][1] if plant.name in FAMILY else OVERRIDES.get(plant.name, {})


def _same_place(one: Plant, other: Plant) -> bool:
    return bool(overrides(one).keys() & overrides(other).keys()) or bool(set(one.expected_ops) & set(other.expected_ops))


def fitted(bench: Bench, case: Case, found: Judgement, plants: Sequence[Plant]) -> list[Fit]:
    """Best first; empty where the engine's deviation cannot be measured. Raises CaseError."""
    ours = Bench(InProcess(BlockedEngine()))
    engine, honest = evidence(bench.worker, case), evidence(ours.worker, case)
    at = _guilty(engine, honest, found)
    if at is None:
        return []
    first = []
    for plant in plants:
        planted = _evidence_of(plant, case)
        if planted is not None:
            own = share(engine, planted, honest, at)
            first.append(Fit(plant, () if own is None else (own,)))
    first.sort(key=lambda fit: (fit.first, fit.residual))
    close = [fit for fit in first[: ASKED_AGAIN[kind_of(case)]] if fit.first <= WORTH_ASKING]
    if not close:
        return first
    again = {fit.plant.name: list(fit.shares) for fit in close}
    for other in beside(case):
        try:
            engine, honest = evidence(bench.worker, other), evidence(ours.worker, other)
            judged = next((j for j in bench.outcome(other).judgements if j.verdict in FINDINGS), None)
        except (CaseError, ValueError):
            continue
        at = None if judged is None else _guilty(engine, honest, judged)
        for fit in close:
            planted = _evidence_of(fit.plant, other)
            left = Share(1.0, 1.0, False) if planted is None else share(engine, planted, honest, at)
            again[fit.plant.name] += [] if left is None else [left]
    asked = [Fit(fit.plant, tuple(again[fit.plant.name])) for fit in close]
    rest = [fit for fit in first if fit.plant.name not in again]
    return [*sorted(asked, key=lambda fit: fit.residual), *rest]


def beside(case: Case) -> list[Case]:
    """A few random cases like this one, which differ in values and, for sessions, in sizes."""
    if isinstance(case, OpCase):
        plain = dataclasses.replace(case, regime="ordinary") if case.regime in PROBES else case  # a probe has the numbers of one question
        seeds = [dataclasses.replace(plain, seed=case.seed + 101 * number) for number in (1, 2)]
        return [*seeds, *(other for one in seeds for other in _larger(one) if _can_be(other))]
    if isinstance(case, TreeCase):
        return [
            dataclasses.replace(case, seed=case.seed + 101 * more, vocab=case.vocab + more, budget=case.budget + more) for more in (0, 1, 3)
        ]
    if not isinstance(case, SessionCase):
        return []
    moved = [
        dataclasses.replace(case, prompts=tuple((length + more, seed + 7 * (more + 1)) for length, seed in case.prompts)) for more in (0, 2)
    ]
    if case.generate is not None:
        loop = case.generate
        moved = [dataclasses.replace(one, generate=dataclasses.replace(loop, seed=loop.seed + 13)) for one in moved]
    return [*moved, dataclasses.replace(moved[1], weights_seed=case.weights_seed + 1)]


def _larger(case: OpCase) -> list[OpCase]:
    """More rows; more of everything."""
    grown = [tuple((name, size + 8 * (name in names or not names)) for name, size in case.dims) for names in (("T", "M", "L"), ())]
    return [dataclasses.replace(case, dims=dims) for dims in grown if dims != case.dims]


def _can_be(case: OpCase) -> bool:
    """Dimensions may depend on each other and on parameters."""
    try:
        op_call(case)
    except (CaseError, ValueError, KeyError, IndexError):
        return False
    return True


# ---- evidence ------------------------------------------------------------------------------------------------------------------------


def _evidence_of(plant: Plant, case: Case) -> Evidence | None:
    """None where the plant cannot be run on the case; whatever it raises is its own, hence the wide except. Without fences, which end the process."""
    if isinstance(case, OpCase | TreeCase | SessionCase):
        case = dataclasses.replace(case, hazards=tuple(name for name in case.hazards if name != "fence"))
    try:
        with np.errstate(all="ignore"):
            return evidence(InProcess(BlockedEngine(overrides(plant))), case)
    except Exception:
        return None


def evidence(worker: Worker, case: Case) -> Evidence:
    """Everything that an engine answers, in data order. Raises CaseError."""
    out: dict[Place, Array] = {}
    if isinstance(case, OpCase):
        call = op_call(case)
        _outputs(out, 0, call.op, worker.calls([call])[0])
    elif isinstance(case, TreeCase):
        (made,) = worker.trees([tree_job(case)])
        for step, (call, answer) in enumerate(made):
            _outputs(out, step, call.op, answer)
    elif isinstance(case, SessionCase):
        script = session_script(case, worker.description.departures)
        for step, answer in enumerate(worker.script(script).answers):
            _of_step(out, step, answer, script.config)
    return out


def _outputs(out: dict[Place, Array], step: int, op: str, answer: Answer) -> None:
    for name, value in (answer.outputs or {}).items():
        out[step, name, -1] = value
    if answer.failure is not None:
        out[step, FAILED, -1] = np.array([FAILURES.index(answer.failure.kind)])


def _of_step(out: dict[Place, Array], step: int, answer: Answer, config: Config) -> None:
    for name, layer in _data_order(config):
        if (name, layer) in answer.taps:
            out[step, name, layer] = answer.taps[name, layer]
    if answer.logits is not None and (step, "logits", config.layers) not in out:
        out[step, "logits", config.layers] = answer.logits
    if answer.cache is not None:
        for layer, rows in enumerate(answer.cache):
            out[step, "cache", layer] = rows
    for sequence, generation in enumerate(answer.generations or ()):
        for number, made in enumerate(generation.rounds):
            out[step, f"tree {number}", sequence] = np.array([made.tokens, made.parents])
            out[step, f"path {number}", sequence] = np.array([*made.path, made.bonus])
        out[step, "stream", sequence] = np.array(generation.tokens)
    if answer.failure is not None:
        out[step, FAILED, -1] = np.array([FAILURES.index(answer.failure.kind)])


@lru_cache(maxsize=64)
def _data_order(config: Config) -> tuple[tuple[str, int], ...]:
    return tuple((tap.name, layer) for layer in range(-1, config.layers + 1) for tap in taps_of_layer(config, layer))


def _guilty(engine: Evidence, honest: Evidence, found: Judgement) -> Place | None:
    """The array that the judge names if the engine deviates there from our engine, else the first in which it does."""
    named: Place = (found.step, found.tap, found.layer)
    if named in engine and named in honest and deviation(engine[named], honest[named], honest[named]) > 0:
        return named
    return first_difference(engine, honest)


def first_difference(one: Evidence, honest: Evidence) -> Place | None:
    """In data order; an array that only one of the two has is a difference."""
    for place, value in one.items():
        if place not in honest or deviation(value, honest[place], honest[place]) > DIFFERENT:
            return place
    return next((place for place in honest if place not in one), None)


def share(engine: Evidence, planted: Evidence, honest: Evidence, at: Place | None) -> Share | None:
    """The plant's distance to the engine in the array `at` and in all before it, over the engine's own deviation in `at`. `at` None: the judge finds
    nothing here, which says something of a plant that goes wrong where the engine does not, and nothing (None) of any other."""
    if at is None:
        place = first_difference(planted, honest)
        right = place is not None and _between(engine, honest, honest, place) <= DIFFERENT
        return Share(1.0, 1.0, False) if right else None
    own = _between(engine, honest, honest, at)
    before = 0.0
    for place in engine:
        if place == at:
            break
        before += _between(honest, planted, honest, place) ** 2  # one engine: exactly 0 where the plant has no part
    plain = _between(engine, planted, honest, at)
    factor, nearest, telling = _multiple(engine, planted, honest, at)
    return Share(
        min(1.0, float(np.sqrt(plain**2 + before)) / own), min(1.0, float(np.sqrt(nearest**2 + factor**2 * before)) / own), telling
    )


def _multiple(engine: Evidence, planted: Evidence, honest: Evidence, at: Place) -> tuple[float, float, bool]:
    """The best multiple of the plant's deviation in the array `at`, the distance that it leaves, and whether enough numbers deviate to tell. 1 and the
    plain distance where there are no numbers to multiply."""
    plain = _between(engine, planted, honest, at)
    if not all(at in one for one in (engine, planted, honest)):
        return 1.0, plain, False
    found, other, right = engine[at], planted[at], honest[at]
    if found.dtype.kind != "f" or not found.shape == other.shape == right.shape:
        return 1.0, plain, False
    with np.errstate(invalid="ignore"):
        target, along = (one.astype(np.float64) - right.astype(np.float64) for one in (found, other))
    if not (np.isfinite(target) & np.isfinite(along)).all() or not along.any():
        return 1.0, plain, False
    factor = float(np.vdot(along, target) / np.vdot(along, along))
    if abs(factor) > MULTIPLE:
        return 1.0, plain, False
    return factor, deviation(target, factor * along, right, np.inf), bool(np.count_nonzero(target) >= TELLING)


def _between(one: Evidence, other: Evidence, honest: Evidence, place: Place) -> float:
    if place not in one or place not in other:
        return 0.0 if (place in one) == (place in other) else FAR
    return deviation(one[place], other[place], honest.get(place, one[place]))


def deviation(one: Array, other: Array, size: Array, far_away: float = FAR) -> float:
    """Root mean square of the differences in units of the finite values of `size`; of integers the share that differs, as a root. Another shape is FAR,
    and so is an element that is a number in one of the two only."""
    if one.shape != other.shape:
        return FAR
    if not one.size:
        return 0.0
    if one.dtype.kind != "f" or other.dtype.kind != "f":
        return float(np.sqrt(np.mean(one != other)))
    finite = size[np.isfinite(size)].astype(np.float64)
    scale = float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        far = np.abs(one.astype(np.float64) - other.astype(np.float64)) / (scale or 1.0)
    far = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.where(np.isfinite(far), np.minimum(far, far_away), FAR))
    return float(np.sqrt(np.mean(np.square(far))))
