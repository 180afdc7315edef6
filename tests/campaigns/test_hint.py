"""Hints: a known defect is named where it fits clearly, its kind where it is alike, and nothing where nothing fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from campaigns.case import Case, OpCase, SessionCase
from campaigns.hint import ALIKE_TIMES, FITS, Fit, Hint, Share, beside, deviation, hint, library, share, told
from campaigns.hint_family import FAMILY
from campaigns.isolation.inprocess import InProcess
from campaigns.trial import Bench
from impls.blocked import BlockedEngine
from impls.planted.mutants import OVERRIDES, PLANTS
from impls.registry import resolve

SESSION = SessionCase("tiny", (), 0, "ordinary", ((3, 1),), ((((0, 1), (1, 0)),),))
SWIGLU = OpCase("swiglu", (("N", 3), ("T", 2)), (), "ordinary", 4)
SOME = ("Z02", "A14", "Z04", "Z08", "sibling-visible", "Z22", "Z33", "G07", "Z31", "F10", "tf32-unsaid")


def of(engine: str, case: Case, plants: Sequence[str] = SOME) -> Hint:
    return hint(Bench(InProcess(resolve(engine))), case, [PLANTS[name] for name in plants])


def test_the_defect_itself_leaves_nothing() -> None:
    found = of("blocked:sibling-visible", SESSION)
    assert (found.plant, found.residual, found.alike) == ("sibling-visible", 0.0, False)
    assert found.text.startswith("looks like sibling-visible (BUGZOO B14, https://github.com/PaddlePaddle/FastDeploy/pull/3514): ")


def test_the_same_mistake_with_another_constant_is_the_same_mistake() -> None:
    """Three softmax scales that are wrong by three factors."""
    found = of("blocked:Z01", SESSION)
    assert found.plant == "A14"
    assert found.residual < FITS / 100


def test_an_engine_that_passes_has_no_hint() -> None:
    found = of("golden", SESSION)
    assert (found.plant, found.text) == ("", "unknown: the case passes")


def test_where_no_known_defect_fits_a_general_way_may() -> None:
    found = of("blocked:G13", SESSION)
    assert found.plant == "residual, fp16"
    assert found.text == "looks like residual, fp16: rounded to float16; it leaves 0 of the deviation"


def test_where_nothing_fits_nothing_is_named() -> None:
    found = of("blocked:G07", SWIGLU, ("Z33", "tf32-unsaid"))
    assert found.plant == ""
    assert found.text.startswith("unknown; nearest is ")
    assert found.residual > ALIKE_TIMES


def test_an_operation_and_a_general_way_in_it() -> None:
    engine = BlockedEngine(FAMILY["swiglu, last row empty"][1])
    found = hint(Bench(InProcess(engine)), SWIGLU, [PLANTS["Z33"]])
    assert found.plant == "swiglu, last row empty"


@pytest.mark.parametrize("name", ["apply_gain of bf16", "normalise, factor", "visible, no first key", "position, one less"])
def test_a_general_way_is_told_from_the_others(name: str) -> None:
    """Each leaves nothing of itself, and no other place leaves as little."""
    found = hint(Bench(InProcess(BlockedEngine(FAMILY[name][1]))), SESSION, [])
    assert name in (found.plant, *found.others)


def test_the_library_leaves_out_what_cannot_run_beside_us() -> None:
    names = {plant.name for plant in library(without=("Z01",))}
    assert "Z01" not in names
    assert not names & {"segfault", "hang", "race"}
    assert names <= OVERRIDES.keys()


# ---- what may be said of residuals ---------------------------------------------------------------------------------------------------


def fit(name: str, *left: float, telling: bool = True) -> Fit:
    return Fit(PLANTS[name], tuple(Share(1.0, one, telling) if telling else Share(one, 0.0, False) for one in left))


def test_two_that_fit_in_different_places_are_unknown_unless_they_are_of_one_class() -> None:
    place = told([fit("Z22", 0, 0), fit("Z33", 0, 0)])
    assert (place.plant, place.text) == ("", "unknown: Z22 and Z33 fit equally well")
    kind = told([fit("Z33", 0, 0), fit("G13", 0, 0)])
    assert (kind.plant, kind.by_class) == ("Z33", True)
    assert kind.text == "looks like a defect of class g: norm, SwiGLU, quantisation, precision: Z33 leaves 0 of the deviation; so do G13"


def test_what_leaves_a_part_is_alike_only_if_nothing_elsewhere_comes_near() -> None:
    assert told([fit("Z33", 0.4, 0.4), fit("Z22", 0.9, 0.9)]).alike
    assert told([fit("Z33", 0.4, 0.4), fit("Z22", 0.45, 0.45)]).plant == ""
    assert told([fit("Z33", 0.6, 0.6)]).text == "unknown; nearest is Z33, which leaves 0.6 of the deviation"
    assert told([fit("Z33", 1, 1), fit("Z22", 1, 1)]).text == "unknown: none of 2 known defects and general ways comes near"
    assert told([fit("Z33", 0.6, 0.6, telling=False)]).alike
    assert told([fit("Z33", 0.8, 0.8, telling=False)]).plant == ""


def test_multiples_count_where_two_cases_can_tell() -> None:
    assert fit("Z33", 0.0, 0.0).residual == 0
    assert fit("Z33", 0.5, 0.5, telling=False).residual == 0.5
    assert fit("Z33", 0.5, 0.5, telling=False).first == 0


def test_a_plant_that_deviates_before_the_guilty_array_pays_for_it() -> None:
    x = np.linspace(1, 2, 8, dtype=np.float32)
    honest = {(0, "a", 0): x, (0, "b", 0): x}
    engine = {(0, "a", 0): x, (0, "b", 0): x * 2}
    same = {(0, "a", 0): x, (0, "b", 0): x * 3}
    upstream = {(0, "a", 0): x * 3, (0, "b", 0): x * 3}
    at = (0, "b", 0)
    found = share(engine, same, honest, at)
    assert found is not None
    assert found.telling
    assert found.plain == pytest.approx(1)
    assert found.multiple == pytest.approx(0, abs=1e-7)
    before = share(engine, upstream, honest, at)
    assert before is not None
    assert before.multiple == 1.0
    assert share(engine, {(0, "a", 0): x}, honest, at) == Share(1.0, 1.0, False)  # it gives no such array


def test_where_the_judge_finds_nothing_a_plant_must_not_be_wrong_alone() -> None:
    x = np.ones(4, np.float32)
    honest = {(0, "a", 0): x}
    assert share(honest, honest, honest, None) is None
    assert share(honest, {(0, "a", 0): x * 2}, honest, None) == Share(1.0, 1.0, False)
    assert share({(0, "a", 0): x * 3}, {(0, "a", 0): x * 2}, honest, None) is None  # both differ from ours, by what the judge allows


def test_a_defect_is_no_multiple_of_rounding_errors() -> None:
    x = np.linspace(1, 2, 8, dtype=np.float32)
    honest, engine, rounded = ({(0, "a", 0): x * np.float32(factor)} for factor in (1, 2, 1 + 2**-10))
    found = share(engine, rounded, honest, (0, "a", 0))
    assert found is not None
    assert found.multiple == found.plain > 0.99


def test_deviations_of_numbers_integers_and_what_is_neither() -> None:
    x = np.array([3.0, 4.0], np.float32)
    size = np.array([1.0, 1.0], np.float32)
    assert deviation(x, x, size) == 0
    assert deviation(x, x + 1, size) == 1
    assert deviation(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 9]), np.array([1, 2, 3, 4])) == 0.5
    bad = np.array([np.nan, 4.0], np.float32)
    assert deviation(bad, bad, size) == 0
    assert deviation(bad, x, size) > 2
    assert deviation(x, x[:1], size) == 4
    assert deviation(x[:0], x[:0], size) == 0


def test_cases_beside_one_differ_from_it_and_can_be_run() -> None:
    params = (
        ("denominator_eps", 1e-20), ("group_score_max", 0), ("groups", 2), ("norm_top_k", 0), ("routed_scale", 1.0), ("top_groups", 1), ("top_k", 1),
    )  # fmt: skip
    route = OpCase("route", (("E", 6), ("T", 1)), params, "ordinary", 0)
    for case in (SESSION, SWIGLU, route):
        others = beside(case)
        assert len(others) >= 3
        assert case not in others


def test_what_is_asked_beside_a_probe_is_no_probe() -> None:
    probe = OpCase("scores", (("C", 1), ("H", 1), ("S", 1), ("T", 1)), (("scale", 1.0),), "probe", 0)
    assert {other.regime for other in beside(probe) if isinstance(other, OpCase)} == {"ordinary"}
    found = of("blocked:K13", probe, ())
    assert found.plant in ("score, factor", "load_tile, factor")
