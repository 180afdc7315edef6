"""Numbers on a page: rounding never makes nothing of something, nor all of almost all."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports import numbers


@given(st.integers(1, 10**12), st.data())
def test_a_rate_is_0_or_100_only_if_it_is(whole: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, whole) | st.sampled_from([0, 1, whole - 1, whole]))
    text = numbers.rate(part, whole)
    assert (text == "0 %") == (part == 0)
    assert (text == "100 %") == (part == whole)
    shown = float(text.strip("<> %"))
    assert 0 < part < whole or shown in (0, 100)
    if 0 < part < whole:
        assert 0 < shown < 100
        exact = 100 * part / whole
        # At least two significant digits of the distance to the nearer end, so at most 10 % of that distance is lost.
        assert text[0] in "<>" or abs(shown - exact) <= 0.1 * min(exact, 100 - exact) + 1e-9


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (1, 3, "33.3 %"),
        (1, 20_000, "0.0050 %"),
        (19_999, 20_000, "99.9950 %"),
        (999, 1000, "99.90 %"),
        (1, 10**9, "<0.0001 %"),
        (10**9 - 1, 10**9, ">99.9999 %"),
        (0, 0, "–"),
    ],
)
def test_rates_that_people_read(part: int, whole: int, text: str) -> None:
    assert numbers.rate(part, whole) == text


@given(st.floats(), st.floats())
def test_two_numbers_that_differ_are_written_differently(a: float, b: float) -> None:
    found, expected = numbers.pair(a, b)
    same = (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    assert (found == expected) == same


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_difference_is_0_only_if_there_is_none(a: float, b: float) -> None:
    text = numbers.difference(a, b)
    assert (text == "0") == (a == b and math.copysign(1, a) == math.copysign(1, b))


@given(st.floats(min_value=0))
def test_a_share_keeps_its_side_of_1_and_of_0(share: float) -> None:
    text = numbers.share(share)
    if math.isinf(share):
        assert text == "∞"
        return
    shown = float(text.replace(",", ""))
    assert (shown > 1, shown < 1, shown == 0) == (share > 1, share < 1, share == 0)


def test_a_share_that_is_no_number_is_never_small() -> None:
    assert numbers.share(math.nan) == "∞" and numbers.times(math.nan) == "beyond any bound"


@given(st.integers(1, 10**7))
def test_the_limit_of_a_rate_without_events_is_not_rounded_down(trials: int) -> None:
    limit = float(numbers.below(trials).removesuffix(" %")) / 100
    # Were the rate at the limit, a run without events would have at most 5 % chance; 1e-9 covers the float of this check.
    assert (1 - limit) ** trials <= 0.05 * (1 + 1e-9) + 1e-9
    assert limit <= 1.2 * (1 - 0.05 ** (1 / trials)) + 1e-12


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (1e-5, "under 1 ms"),
        (0.084, "84 ms"),
        (3.21, "3.2 s"),
        (245, "4 min 5 s"),
        (7_380, "2 h 3 min"),
        (-1, "–"),
        (math.nan, "–"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert numbers.duration(seconds) == text


@given(st.integers(0, 10**15))
def test_counts_keep_every_digit(number: int) -> None:
    assert int(re.sub(",", "", numbers.count(number))) == number
