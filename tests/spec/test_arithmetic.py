"""Canonical arithmetic against a second form: 700-bit mpmath and rounding by comparing distances, on inputs chosen to be hard.

Every case runs twice: as it is, and with the float64 result declared worthless, so that the exact path decides each element.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec import arithmetic, exact
from spec.arithmetic import Prepared
from spec.weights import philox

ROOT = Path(__file__).parents[2]
INF, NAN = np.float32(np.inf), np.float32(np.nan)
TINY = np.float32(2.0**-149)
many = settings(deadline=None, max_examples=300, derandomize=True)


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    """700 bits: products of float32 span 2**-298 .. 2**256, so sums are exact."""
    with mpmath.workprec(700):
        yield


@pytest.fixture(params=["as it is", "exact path only"], autouse=True)
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "as it is":
        return
    settle = arithmetic._settle_block

    def doubtful(y, error, redo, where):  # type: ignore[no-untyped-def]
        return settle(y, np.where(np.isfinite(error) & (error != 0), np.inf, error), redo, where)

    monkeypatch.setattr(arithmetic, "_settle_block", doubtful)
    monkeypatch.setattr(arithmetic, "CACHED", 12)  # several blocks even for small arrays
    monkeypatch.setattr(exact, "FEW", 0)


# ---- the second form --------------------------------------------------------------------------------------------
def big(value: object) -> mpmath.mpf:
    return mpmath.mpf(float(value))  # type: ignore[arg-type]


def nearest(x: mpmath.mpf) -> np.float32:
    """The nearest float32 by distance, ties to the even bit pattern; zero is +0."""
    largest = np.float32(np.finfo(np.float32).max)
    if abs(x) >= big(largest) + mpmath.mpf(2) ** 103:  # the midpoint above it is a tie and goes to infinity
        return np.float32(math.copysign(math.inf, x))
    middle = np.clip(np.float64(x), -float(largest), float(largest)).astype(np.float32)
    candidates = [np.nextafter(middle, -INF), middle, np.nextafter(middle, INF)]
    candidates = [c for c in candidates if np.isfinite(c)]
    best = min(abs(big(c) - x) for c in candidates)
    near = [c for c in candidates if abs(big(c) - x) == best]
    return (near[0] if len(near) == 1 else next(c for c in near if not int(c.view(np.uint32)) & 1)) + np.float32(0)


def table(shape: tuple[int, ...], value: Callable[..., mpmath.mpf]) -> np.ndarray:
    out = np.empty(shape, np.float32)
    for index in np.ndindex(shape):
        out[index] = nearest(value(*index))
    return out


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    differs = np.argwhere(actual.view(np.uint32) != expected.view(np.uint32))
    assert not len(differs), [(tuple(i), actual[tuple(i)], expected[tuple(i)]) for i in differs[:3]]


def dot(a: np.ndarray, b: np.ndarray) -> mpmath.mpf:
    return mpmath.fsum(big(x) * big(y) for x, y in zip(a, b, strict=True))


# ---- inputs -----------------------------------------------------------------------------------------------------
def regime(name: str, shape: tuple[int, ...], *key: object) -> np.ndarray:
    draw = philox("test arithmetic", name, shape, *key)
    x = draw.standard_normal(shape)
    if name == "ordinary":
        return x.astype(np.float32)
    if name == "magnitudes":
        return np.ldexp(x, draw.integers(-140, 120, shape)).astype(np.float32)
    if name == "subnormal":
        return (draw.integers(-9, 10, shape) * 2.0**-149).astype(np.float32)
    if name == "huge":
        return (x * 2.0**126).clip(-3.4e38, 3.4e38).astype(np.float32)
    if name == "integers":
        return draw.integers(-3, 4, shape).astype(np.float32)
    assert name == "midpoints"  # few bits far apart: sums fall on or beside midpoints of two float32
    return (draw.choice([-1, 0, 1], shape) * np.ldexp(1.0, draw.choice([0, -23, -24, -25, -48, -70], shape))).astype(np.float32)


REGIMES = ("ordinary", "magnitudes", "subnormal", "huge", "integers", "midpoints")


# ---- dots -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("scale", [None, 0.3123])
def test_matmul_is_correctly_rounded(name: str, scale: float | None) -> None:
    a, b = regime(name, (5, 13), "a"), regime(name, (13, 6), "b")
    factor = big(1 if scale is None else np.float32(scale))
    expected = table((5, 6), lambda i, j: factor * dot(a[i], b[:, j]))
    assert_same_bits(arithmetic.matmul(a, b, scale), expected)
    assert_same_bits(arithmetic.matmul(a, arithmetic.prepare(b), scale), expected)
    assert_same_bits(arithmetic.matmul(a, np.asfortranarray(b), scale), expected)


def test_matmul_of_stacks_is_each_product_alone() -> None:
    a, b = regime("ordinary", (3, 4, 9), "a"), regime("midpoints", (3, 9, 5), "b")
    expected = np.stack([arithmetic.matmul(a[i], b[i]) for i in range(3)])
    assert_same_bits(arithmetic.matmul(a, b), expected)
    assert_same_bits(arithmetic.matmul(a[1], b), np.stack([arithmetic.matmul(a[1], b[i]) for i in range(3)]))
    assert_same_bits(arithmetic.matmul(a, b[1]), np.stack([arithmetic.matmul(a[i], b[1]) for i in range(3)]))


@pytest.mark.parametrize("scale", [None, 2.7e20])
@pytest.mark.parametrize("depth", [511, 701])
def test_matmul_survives_cancellation_at_large_depth(depth: int, scale: float | None) -> None:
    """Equal halves of opposite sign leave one small term, far below the a-priori bound, or exactly nothing."""
    half = depth // 2
    a, b = regime("ordinary", (2, depth), "a"), regime("ordinary", (depth, 3), "b")
    a[:, half : 2 * half], b[half : 2 * half] = -a[:, :half], b[:half]
    a[:, -1], b[-1] = np.float32(1e-12), np.array([1e-12, 0, 3], np.float32)
    factor = big(1 if scale is None else np.float32(scale))
    expected = table((2, 3), lambda i, j: factor * dot(a[i], b[:, j]))
    assert_same_bits(arithmetic.matmul(a, b, scale), expected)
    assert_same_bits(arithmetic.matmul(a, arithmetic.prepare(b), scale), expected)
    assert expected[0, 1] == 0


def test_matmul_with_an_outlier_per_row_is_correctly_rounded() -> None:
    """Cauchy-Schwarz is useless here (norms 2**100, products of order one): the product of magnitudes has to sort it out."""
    a, b = regime("ordinary", (40, 60), "a"), regime("ordinary", (60, 40), "b")
    a[:, 7], b[7] = 2.0**100, 0
    for i, j in ((0, 0), (39, 39), (17, 3)):
        assert arithmetic.matmul(a, b)[i, j] == nearest(dot(a[i], b[:, j]))


@pytest.mark.parametrize("rest", [2.0**-80, 0, -(2.0**-80)])
def test_a_rest_that_float64_loses_decides_beside_a_midpoint(rest: float) -> None:
    """(1 + 2**-12)^2 = 1 + 2**-11 + 2**-24 is a midpoint whose even neighbour is below; float64 drops a rest of 2**-80."""
    square, below, above = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-11), np.float32(1 + 2.0**-11 + 2.0**-23)
    expected = above if rest > 0 else below
    x, small = np.array([[square, 2.0**-40]], np.float32), np.float32(rest * 2.0**40)
    assert arithmetic.rope(x, np.array([[square]]), np.array([[-small]]), False)[0, 0] == expected
    assert arithmetic.combine(x, np.array([[[square], [small]]]), None)[0, 0] == expected
    assert arithmetic.combine(x[:, :1], np.array([[[square]]]), np.array([[rest]], np.float32))[0, 0] == expected
    assert arithmetic.matmul(x, np.array([[square], [small]]))[0, 0] == expected


@many
@given(st.permutations([1.0, 2.0**-24, 2.0**-60, 2.0**-120, -(2.0**-60), 0.0, 0.0]))
def test_round_sums_knows_when_its_rests_cancelled(values: list[float]) -> None:
    """1 + 2**-24 is a midpoint, and in some orders the sum of the rests loses the 2**-120 that decides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "FEW", 0)
        assert exact.round_sums(np.array([values]))[0] == np.float32(1 + 2.0**-23)


def test_ties_go_to_even_and_the_smallest_rest_breaks_them() -> None:
    a = np.array([[1, 2.0**-24, 0], [1 + 2.0**-23, 2.0**-24, 0], [1, 2.0**-24, 2.0**-149], [1, 2.0**-24, -(2.0**-149)]], np.float32)
    b = np.array([[1], [1], [2.0**-149]], np.float32)  # the rest is 2**-298
    assert_same_bits(arithmetic.matmul(a, b)[:, 0], np.array([1, 1 + 2.0**-22, 1 + 2.0**-23, 1], np.float32))


def test_where_leaves_out_what_nobody_sees() -> None:
    a, b = regime("ordinary", (4, 9), "a"), regime("ordinary", (9, 5), "b")
    b[:, 2] = NAN
    seen = philox("where").random((4, 5)) < 0.5
    seen[:, 2] = False
    expected = np.where(seen, arithmetic.matmul(a, b), np.float32(0))
    assert_same_bits(arithmetic.matmul(a, b, where=seen), expected)


def test_grouped_and_joined_products_are_the_single_ones() -> None:
    x, stack = regime("magnitudes", (7, 11), "x"), regime("ordinary", (4, 11, 5), "stack")
    ids = np.array([3, 0, 3, 3, 2, 0, 2], np.int32)
    expected = np.concatenate([arithmetic.matmul(x[p : p + 1], stack[ids[p]]) for p in range(7)])
    assert_same_bits(arithmetic.grouped_matmul(x, arithmetic.prepare(stack), ids), expected)
    joined = arithmetic.prepare_joined(stack[0], stack[1])
    assert isinstance(joined, Prepared)
    assert_same_bits(arithmetic.matmul(x, joined), np.concatenate([arithmetic.matmul(x, stack[0]), arithmetic.matmul(x, stack[1])], axis=1))
    assert arithmetic.grouped_matmul(x[:0], arithmetic.prepare(stack), ids[:0]).shape == (0, 5)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", REGIMES)
def test_combine_is_correctly_rounded(name: str, shared: bool) -> None:
    w, e, s = regime(name, (4, 3), "w"), regime(name, (4, 3, 5), "e"), regime(name, (4, 5), "s")
    expected = table((4, 5), lambda t, n: dot(w[t], e[t, :, n]) + (big(s[t, n]) if shared else 0))
    assert_same_bits(arithmetic.combine(w, e, s if shared else None), expected)


@pytest.mark.parametrize("name", REGIMES)
def test_rope_is_correctly_rounded_in_both_layouts(name: str) -> None:
    x, c, s = regime(name, (3, 2, 8), "x"), regime("ordinary", (3, 1, 4), "c"), regime(name, (3, 1, 4), "s")
    for half_layout in (False, True):
        first = [i if half_layout else 2 * i for i in range(4)]
        second = [i + 4 if half_layout else 2 * i + 1 for i in range(4)]
        expected = np.empty_like(x)
        for t, h, i in np.ndindex(3, 2, 4):
            z = mpmath.mpc(big(x[t, h, first[i]]), big(x[t, h, second[i]])) * mpmath.mpc(big(c[t, 0, i]), big(s[t, 0, i]))
            expected[t, h, first[i]], expected[t, h, second[i]] = nearest(z.real), nearest(z.imag)
        assert_same_bits(arithmetic.rope(x, c, s, half_layout), expected)


# ---- element-wise and rows --------------------------------------------------------------------------------------
EDGES = np.array(
    [0, 1, -1, 17, -17, 87.3, -87.3, -88.8, -103.9, -104.1, 104, 3e38, -3e38, TINY, -TINY, 1e-20, 1.1754944e-38, -16.635532], np.float32
)


def logistic(x: np.float32) -> mpmath.mpf:
    if x < -2000:
        return mpmath.mpf(10) ** -800  # what matters is that it is positive and rounds to 0
    return 1 / (1 + mpmath.exp(-min(big(x), mpmath.mpf(2000))))


def test_sigmoid_and_swiglu_are_correctly_rounded() -> None:
    x = np.concatenate([EDGES, regime("ordinary", (40,)) * np.float32(20), regime("magnitudes", (40,))])
    up = np.concatenate([EDGES[::-1], regime("magnitudes", (80,), "up")])
    assert_same_bits(arithmetic.sigmoid(x), table(x.shape, lambda i: logistic(x[i])))
    assert_same_bits(arithmetic.swiglu(x, up), table(x.shape, lambda i: big(x[i]) * logistic(x[i]) * big(up[i])))


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-30])
@pytest.mark.parametrize("name", REGIMES)
def test_rms_norm_is_correctly_rounded(name: str, eps: float) -> None:
    x, gain = regime(name, (4, 7), "x"), regime("ordinary", (7,), "gain")
    x[0] = 0 if eps else 1
    x[1] = 3  # with eps 0 the root is exactly 3 and the result exactly the gain
    expected = table(
        (4, 7), lambda i, j: big(gain[j]) * big(x[i, j]) / mpmath.sqrt(mpmath.fsum(big(v) ** 2 for v in x[i]) / 7 + big(np.float32(eps)))
    )
    assert_same_bits(arithmetic.rms_norm(x, gain, eps), expected)


def test_rms_norm_decides_exact_ties() -> None:
    """(1, 7) has the exact root 5: with gain 5 (1 + 2**-23) and x = 1 + 2**-23 times that, products carry 47 bits over an exact root."""
    x, gain = np.array([[1, 7]], np.float32), np.array([5 * (1 + 2.0**-22), 5], np.float32)
    assert_same_bits(arithmetic.rms_norm(x, gain, 0.0), np.array([[1 + 2.0**-22, 7]], np.float32))
    h = 3_000_001  # 7 h has 25 bits and ends in 11: a midpoint whose even neighbour is above; 5 h fits a float32
    assert 7 * h % 4 == 3
    tie = np.array([5, 5 * h], np.float32)
    assert_same_bits(arithmetic.rms_norm(x, tie, 0.0), np.array([[1, 7 * h + 1]], np.float32))
    assert_same_bits(arithmetic.rms_norm(x, tie, 1e-18), np.array([[1, 7 * h - 1]], np.float32))  # 25 + 1e-18 is 25 in float64


def softmax_at(row: np.ndarray, seen: np.ndarray, j: int) -> mpmath.mpf:
    if not seen[j] or row[j] == -INF:
        return mpmath.mpf(0)
    gaps = [big(v) - big(row[j]) for v, k in zip(row, seen, strict=True) if k and v != -INF]
    return mpmath.mpf(0) if max(gaps) > 2000 else 1 / mpmath.fsum(mpmath.exp(g) for g in gaps if g > -2000)


@pytest.mark.parametrize("name", ["ordinary", "magnitudes", "integers", "huge"])
def test_softmax_is_correctly_rounded(name: str) -> None:
    scores = regime(name, (6, 9), "s") * np.float32(1 if name == "huge" else 8)
    seen = philox("seen", name).random((6, 9)) < 0.7
    seen[0], seen[1] = False, True
    scores[2, :3], scores[3] = -INF, -INF
    assert_same_bits(arithmetic.softmax(scores, seen), table((6, 9), lambda i, j: softmax_at(scores[i], seen[i], j)))


def test_log_sum_exp_is_correctly_rounded() -> None:
    for key, factor in enumerate((0.01, 3.0, 40.0)):
        x = (regime("ordinary", (5, 11), key) * np.float32(factor)).astype(np.float32)
        x[1, :9] = -INF
        x[2] = -np.float32(math.log(11))  # the result is about 1e-8: all leading digits cancel
        x[3, 1:] = -200
        x[3, 0] = 0  # the result is e**-200 and rounds to +0
        expected = table((5,), lambda i, x=x: mpmath.log(mpmath.fsum(mpmath.exp(big(v)) for v in x[i] if v != -INF)))
        assert_same_bits(arithmetic.log_sum_exp(x), expected)
        assert_same_bits(arithmetic.log_probs(x), (x - expected[:, None]) + np.float32(0))


def test_log_sum_exp_of_one_finite_logit_is_that_logit() -> None:
    x = np.array([[-INF, 1e-40, -INF], [-INF, -INF, -INF], [3, -INF, -INF], [0, -INF, -INF]], np.float32)
    assert_same_bits(arithmetic.log_sum_exp(x), np.array([1e-40, -INF, 3, 0], np.float32))
    assert arithmetic.log_sum_exp(x[2]).shape == ()


@pytest.mark.parametrize("eps", [0.0, 1e-20])
def test_top_k_weights_are_correctly_rounded(eps: float) -> None:
    scores = np.stack(
        [arithmetic.sigmoid(regime("ordinary", (5,)) * np.float32(f)) for f in (1, 20, 60)]
        + [np.array([1, -1, 1, -1, 2.0**-60], np.float32)]
    )
    scores[0] = [1, 2.0**-60, -1, 0, 0]  # float64 sums this to 0 from the left
    expected = table(
        scores.shape,
        lambda t, k: big(scores[t, k]) * big(np.float32(2.827)) / (mpmath.fsum(big(v) for v in scores[t]) + big(np.float32(eps))),
    )
    assert_same_bits(arithmetic.top_k_weights(scores, 2.827, True, eps), expected)
    plain = table(scores.shape, lambda t, k: big(scores[t, k]) * big(np.float32(2.827)))
    assert_same_bits(arithmetic.top_k_weights(scores, 2.827, False, eps), plain)


def test_the_denominator_eps_decides_rows_that_underflowed() -> None:
    zero, tiny = np.zeros((1, 2), np.float32), np.array([[1e-30, 0]], np.float32)
    assert np.isnan(arithmetic.top_k_weights(zero, 1.0, True, 0.0)).all()
    assert_same_bits(arithmetic.top_k_weights(zero, 1.0, True, 1e-20), zero)
    assert arithmetic.top_k_weights(tiny, 1.0, True, 0.0)[0, 0] == 1
    assert arithmetic.top_k_weights(tiny, 1.0, True, 1e-20)[0, 0] < 1e-9


@pytest.mark.parametrize("bits", [26, 32])
def test_exp_and_log_as_bad_as_the_allowance_change_nothing(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With LIBM at 2**-bits and relative errors of that size planted, many elements are doubtful; the results stay what they are."""
    x, up = regime("ordinary", (200, 5)) * np.float32(5), regime("ordinary", (200, 5), "up")
    seen = up > -1

    def results() -> list[np.ndarray]:
        return [
            arithmetic.sigmoid(x),
            arithmetic.swiglu(x, up),
            arithmetic.softmax(x, seen),
            arithmetic.log_sum_exp(x),
            arithmetic.log_sum_exp(up),
        ]

    expected = results()
    draw = philox("bad libm", bits)

    def bad(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        return lambda value, out=None: function(value) * (1 + draw.uniform(-1, 1, np.shape(value)) * 2.0**-bits)

    monkeypatch.setattr(arithmetic, "LIBM", 2.0**-bits)
    monkeypatch.setattr(np, "exp", bad(np.exp))
    monkeypatch.setattr(np, "log", bad(np.log))
    for actual, wanted in zip(results(), expected, strict=True):
        assert_same_bits(actual, wanted)


# ---- conventions ------------------------------------------------------------------------------------------------
def test_zero_is_positive_everywhere() -> None:
    minus, one = np.array([[-0.0, -0.0]], np.float32), np.array([[1.0, 1.0]], np.float32)
    results = [
        arithmetic.add(minus, minus),
        arithmetic.matmul(minus, one.T),
        arithmetic.swiglu(minus, one),
        arithmetic.rms_norm(minus, one[0], 1e-6),
        arithmetic.rope(minus, one[:, :1], one[:, :1], False),
        arithmetic.combine(minus, one[:, :, None] * one[0, 0], None),
        arithmetic.top_k_weights(minus, -1.0, False, 0.0),
        arithmetic.swiglu(np.array([[-200.0]], np.float32), one[:, :1]),  # a tiny negative number rounds to zero
    ]
    for result in results:
        assert not result.any()
        assert not np.signbit(result).any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_depends_on_a_non_finite_value_is_nan_and_the_rest_is_untouched(bad: np.float32) -> None:
    x, w = regime("ordinary", (3, 6), "x"), regime("ordinary", (6, 4), "w")
    good = arithmetic.matmul(x, w)
    broken = x.copy()
    broken[1, 2] = bad
    rows = np.array([False, True, False])
    for actual, expected in (
        (arithmetic.matmul(broken, w), good),
        (arithmetic.matmul(broken, arithmetic.prepare(w)), good),
        (arithmetic.rms_norm(broken, w[:, 0], 1e-6), arithmetic.rms_norm(x, w[:, 0], 1e-6)),
        (arithmetic.top_k_weights(broken, 2.0, True, 0.0), arithmetic.top_k_weights(x, 2.0, True, 0.0)),
        (arithmetic.combine(broken, np.stack([w] * 3), None), arithmetic.combine(x, np.stack([w] * 3), None)),
    ):
        assert np.isnan(actual[rows]).all()
        assert_same_bits(actual[~rows], expected[~rows])
    column = w.copy()
    column[3, 1] = bad
    assert np.isnan(arithmetic.matmul(x, column)).all(axis=0).tolist() == [False, True, False, False]
    assert np.isnan(arithmetic.swiglu(broken, x)).sum() == 1
    assert np.isnan(arithmetic.swiglu(x, broken)).sum() == 1
    assert np.isnan(arithmetic.rope(broken, x[:, :3], x[:, 3:], True)).sum() == 2


def test_softmax_and_log_sum_exp_treat_minus_infinity_as_absent_and_hide_what_is_invisible() -> None:
    scores = np.array([[NAN, 1, 2], [INF, 1, 2], [-INF, 1, 1]], np.float32)
    hidden = np.array([False, True, True])
    assert np.isfinite(arithmetic.softmax(scores, hidden)).all()
    assert np.isnan(arithmetic.softmax(scores, ~hidden)).tolist() == [[True, False, False], [True, False, False], [False, False, False]]
    assert arithmetic.softmax(scores, np.ones(3, np.bool_))[2].tolist() == [0, 0.5, 0.5]
    assert np.isnan(arithmetic.log_sum_exp(scores)).tolist() == [True, True, False]


def test_sigmoid_of_an_infinity_is_its_limit(request: pytest.FixtureRequest) -> None:
    if "exact path only" in request.node.name:
        pytest.skip("a limit is not a real number's image; float64 has it exactly")
    assert arithmetic.sigmoid(np.array([-INF, INF, NAN], np.float32)).tolist()[:2] == [0, 1]


def test_overflow_is_infinity_by_the_rule_of_ieee() -> None:
    largest = float(np.finfo(np.float32).max)
    b = np.array([[1], [1]], np.float32)
    a = np.array([[largest, 2.0**103], [largest, 2.0**102], [-largest, -(2.0**103)]], np.float32)
    assert_same_bits(arithmetic.matmul(a, b)[:, 0], np.array([INF, largest, -INF], np.float32))


# ---- exact.py ---------------------------------------------------------------------------------------------------
@many
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_nearest32_of_a_float64_is_the_hardware_cast(x: float) -> None:
    with np.errstate(over="ignore"):
        expected = np.float64(x).astype(np.float32) + np.float32(0)
    assert_same_bits(np.array([exact.nearest32(Fraction(x))], np.float32), np.array([expected]))


@many
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from([-1, 0, 1]), st.integers(1, 400))
def test_a_rest_of_any_size_decides_beside_a_midpoint(x: float, sign: int, shift: int) -> None:
    """round_pairs and nearest32 agree on midpoint + sign * 2**-shift relative, the hardest place."""
    if x == float(np.finfo(np.float32).max):
        return
    middle = (x + float(np.nextafter(np.float32(x), INF))) / 2
    rest = sign * math.ldexp(abs(middle), -shift)
    if abs(rest) < 2.0**-1000:
        rest = 0.0
    expected = exact.nearest32(Fraction(middle) + Fraction(rest))
    assert exact.round_pairs(np.array([middle]), np.array([rest]))[0] == expected


@many
@given(st.lists(st.tuples(st.integers(-(2**48), 2**48), st.integers(-290, 200)), min_size=1, max_size=40))
def test_round_sums_is_the_rounding_of_the_exact_sum(terms: list[tuple[int, int]]) -> None:
    values = [math.ldexp(m, e) for m, e in terms]
    total = sum(map(Fraction, values), Fraction(0))
    assert exact.exact_sum(values) == total
    with np.errstate(over="ignore"):
        assert exact.round_sums(np.array([values, values[::-1]])).tolist() == [exact.nearest32(total)] * 2


@many
@given(st.integers(1, 2**24 - 1), st.integers(-60, 60), st.sampled_from([-1, 0, 1]))
def test_nearest32_root_of_a_square_near_a_midpoint(m: int, e: int, nudge: int) -> None:
    """The root (m + 1/2) 2**e is a tie when the square is exact; one part in 2**200 more or less breaks it."""
    scale = Fraction(2) ** e
    root = (2 * m + 1) * scale / 2
    square = root * root * (1 + Fraction(nudge, 1 << 200))
    expected = exact.nearest32(root * (1 + Fraction(nudge, 1 << 202)))
    assert exact.nearest32_root(square, 1) == expected
    assert exact.nearest32_root(square, -1) == -expected


# ---- independence of the machine --------------------------------------------------------------------------------
def _simd_features() -> str:
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return ",".join(name for name in __cpu_dispatch__ if __cpu_features__.get(name))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="kernel names and SIMD levels are those of x86-64")
def test_one_hash_under_every_blas_kernel_thread_count_and_simd_level(request: pytest.FixtureRequest) -> None:
    if "exact path only" in request.node.name:
        pytest.skip("subprocesses do not see the patch")
    settings_of = {
        "default": {},
        "two threads": {"OPENBLAS_NUM_THREADS": "2"},
        "Haswell": {"OPENBLAS_CORETYPE": "Haswell"},
        "Prescott": {"OPENBLAS_CORETYPE": "Prescott"},
        "SIMD off": {"NPY_DISABLE_CPU_FEATURES": _simd_features(), "OPENBLAS_CORETYPE": "Prescott"},
    }
    base = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS", "NPY_"))} | {"OPENBLAS_NUM_THREADS": "1"}
    script = str(ROOT / "tests" / "spec" / "golden_hash.py")
    hashes = {
        name: subprocess.run(
            [sys.executable, script], env=base | extra, capture_output=True, text=True, check=True, timeout=120
        ).stdout.strip()
        for name, extra in settings_of.items()
    }
    assert len(set(hashes.values())) == 1, hashes
    assert len(hashes["default"]) == 64


ENVIRONMENTS = {
    # fenv_t of glibc on x86-64: MXCSR at byte 28, 0x8040 = flush to zero and denormals are zero
    "flush": "f=ctypes.create_string_buffer(64); libm.fegetenv(f); w=int.from_bytes(f[28:32],'little')|0x8040;"
    " f[28:32]=w.to_bytes(4,'little'); libm.fesetenv(f)",
    "upward": "libm.fesetround(0x800)",
    "downward": "libm.fesetround(0x400)",
    "toward zero": "libm.fesetround(0xC00)",
    "as it is": "pass",
}


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="sets MXCSR through glibc's fenv_t")
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_thread_that_flushes_or_rounds_otherwise_is_refused(name: str, request: pytest.FixtureRequest) -> None:
    if "exact path only" in request.node.name:
        pytest.skip("subprocesses do not see the patch")
    program = f"""import ctypes
from spec.arithmetic import NotIEEE, check_environment
libm = ctypes.CDLL("libm.so.6")
{ENVIRONMENTS[name]}
try:
    check_environment()
    answer = "accepted"
except NotIEEE:
    answer = "refused"
libm.fesetround(0)
print(answer)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    assert answer == ("accepted" if name == "as it is" else "refused")
