"""Readings of answers: each line that it calls sure has a twin answer that makes it say the opposite."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from oracles.audit import rounded
from oracles.probing import (
    Ascent,
    Certainty,
    Line,
    bits_kept,
    contradicts,
    exp_lines,
    format_name,
    height_line,
    likely,
    merged,
    online_line,
    rounded_up,
    sure,
    tanh_line,
    ulp_line,
    ulps,
    unit_of,
    unknown,
)
from spec.engine import PROFILES, Profile

F = np.float32
EXACT = (1 + np.random.default_rng(0).integers(1, 2**23, 64) * 2.0**-23).astype(F).astype(np.float64)


@pytest.mark.parametrize("bits", [23, 10, -10, 7, -7, 3])
def test_the_bits_of_a_format_are_read_off_rounded_numbers(bits: int) -> None:
    assert bits_kept(EXACT, rounded(EXACT, bits)) == (bits if abs(bits) < 23 else 23)


def test_another_function_is_no_rounding() -> None:
    assert bits_kept(EXACT, EXACT * 1.5) is None


def test_units_and_names_of_formats() -> None:
    assert [unit_of(bits) for bits in (23, 10, -10, 7)] == [0, 2.0**-11, 2.0**-10, 2.0**-8]
    assert [format_name(bits) for bits in (23, -10, 7, 5)] == ["float32", "TF32 by truncation", "bfloat16", "5 bits of fraction"]


def test_a_correct_rounding_is_off_by_at_most_half_an_ulp() -> None:
    exact = np.exp(np.linspace(-3, 3, 1000))
    assert 0.25 < ulps(exact.astype(F), exact).max() <= 0.5
    assert np.isinf(ulps(np.array([np.nan], F), np.array([1.0])))[0]


def test_ulps_are_never_sure_and_never_below_what_was_seen() -> None:
    exact = np.linspace(1, 2, 100)
    line = ulp_line("rsqrt_ulp", (exact * (1 + 2.6 * 2.0**-23)).astype(F), exact, "roots", 0.5)
    assert line.certainty is Certainty.LIKELY
    assert 2.5 < line.value <= 3.5
    assert ulp_line("rsqrt_ulp", (exact * 1.1).astype(F), exact, "roots").value is None
    assert [rounded_up(x, 0.5) for x in (0.0, 0.46, 0.51, 1.0)] == [0.5, 0.5, 1.0, 1.0]


DISTANCE = np.linspace(18, 87, 500).astype(F)


def by_name(lines: list[Line]) -> dict[str, Line]:
    return {line.name: line for line in lines}


def test_exp_and_exp2_of_a_rounded_argument_are_told_apart() -> None:
    honest = by_name(exp_lines(DISTANCE, np.exp(-DISTANCE.astype(np.float64)).astype(F), "exp"))
    folded = by_name(exp_lines(DISTANCE, np.exp2(-(DISTANCE * F(np.log2(np.e))).astype(np.float64)).astype(F), "exp"))
    assert (honest["exp2_folding"].value, honest["exp2_folding"].certainty) == (False, Certainty.SURE)
    assert (folded["exp2_folding"].value, folded["exp2_folding"].certainty) == (True, Certainty.SURE)
    assert honest["exp_ulp"].value == folded["exp_ulp"].value == 1


def test_a_rough_exp_is_not_called_folded() -> None:
    rough = by_name(exp_lines(DISTANCE, (np.exp(-DISTANCE.astype(np.float64)) * (1 + 5 * 2.0**-23)).astype(F), "exp"))
    assert rough["exp2_folding"].value is None
    assert rough["exp_ulp"].value == 6
    assert by_name(exp_lines(DISTANCE, np.full(500, 0.5, F), "exp"))["exp_ulp"].value is None


def ascents(found: str) -> list[Ascent]:
    direct, chained = np.array([1, 2, 3], F), np.array([1, np.nextafter(F(2), F(3)), 3], F)
    other = np.array([1, 2.0001, 3], F)
    near = np.array([1, np.nextafter(F(2), F(1)), 3], F)
    return [Ascent((0, 1, 2, 3), {"direct": direct, "chained": chained, "other": other, "near": near}[found], direct, chained)]


def test_rescaled_weights_are_a_witness_and_their_absence_is_none() -> None:
    assert (online_line(ascents("chained"), "x").certainty, online_line(ascents("chained"), "x").value) == (Certainty.SURE, True)
    assert online_line(ascents("direct"), "x").value is None
    assert online_line(ascents("near"), "x").value is None
    assert online_line(ascents("other"), "x").certainty is Certainty.LIKELY
    assert online_line([*ascents("direct"), *ascents("chained")], "x").certainty is Certainty.SURE


def test_silu_by_tanh_loses_small_values() -> None:
    x = -np.linspace(16, 60, 50).astype(F)
    wide = x.astype(np.float64)
    assert tanh_line(x, (wide / (1 + np.exp(-wide))).astype(F)).value is False
    assert tanh_line(x, (x * (F(0.5) + F(0.5) * np.tanh(F(0.5) * x))).astype(F)).value is True
    assert tanh_line(x, x).value is None


@pytest.mark.parametrize(
    ("heights", "value", "certainty"),
    [
        ({64: 32, 256: 34, 1024: 36}, "blocked:32", Certainty.LIKELY),
        ({64: 63, 256: 255, 1024: 1023}, "any", Certainty.SURE),
        ({64: 14, 256: 38, 1024: 134}, "any", Certainty.SURE),  # split-K in order
        ({64: 18, 256: 24, 1024: 64}, "any", Certainty.SURE),
        ({16: 4}, "any", Certainty.UNKNOWN),
    ],
)
def test_heights_that_grow_like_a_chain_are_no_blocks(heights: dict[int, int], value: str, certainty: Certainty) -> None:
    line = height_line(heights, "x", "products")
    assert (line.value, line.certainty) == (value, certainty)


def test_two_places_that_were_asked_make_one_line() -> None:
    strict, loose = sure("exp2_folding", False, "softmax"), sure("exp2_folding", True, "attention")
    assert merged([strict, loose])[0].value is True
    assert merged([loose, strict])[0].certainty is Certainty.SURE
    assert merged([strict, likely("exp2_folding", False, "b")])[0].certainty is Certainty.LIKELY
    assert merged([strict, unknown("exp2_folding", "b")])[0].certainty is Certainty.LIKELY
    assert merged([loose, unknown("exp2_folding", "b")])[0].certainty is Certainty.SURE
    assert merged([likely("exp_ulp", 1.0, "a"), likely("exp_ulp", 3.0, "b")])[0].value == 3.0


@pytest.mark.parametrize(
    ("line", "changes", "expected"),
    [
        (sure("u_input", 2.0**-10, ""), {}, True),
        (sure("u_input", 2.0**-10, ""), {"u_input": 2.0**-10}, False),
        (likely("u_input", 2.0**-10, ""), {}, False),
        (sure("tanh_silu", True, ""), {}, True),
        (sure("exp2_folding", False, ""), {}, False),
        (sure("batch_invariant", False, ""), {"batch_invariant": True}, True),
        (sure("ties", "any", ""), {}, True),
        (sure("ties", "any", ""), {"ties": "any"}, False),
        (dataclasses.replace(sure("height", "any", ""), heights={64: 63}), {"height": "blocked:8"}, True),
        (dataclasses.replace(sure("height", "any", ""), heights={64: 63}), {"height": "blocked:64"}, False),
        (sure("heap ties", "first in, first out", ""), {}, False),
    ],
)
def test_only_sure_lines_contradict_and_only_where_the_profile_claims_more(line: Line, changes: dict[str, object], expected: bool) -> None:
    assert contradicts(line, dataclasses.replace(Profile(), **changes)) is expected  # type: ignore[arg-type]


def test_an_unmeasured_profile_contradicts_nothing() -> None:
    assert not any(contradicts(unknown(name, ""), PROFILES["float32-strict"]) for name in ("u_input", "height", "ties"))
