"""Rotary tables against mpmath, the published ramp limits, and rotation by complex numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from functools import partial

import mpmath
import numpy as np
import pytest

from spec import exact, rotary
from spec.arithmetic import rope
from spec.config import Config, Yarn, preset
from spec.rotary import Rotary, decimal_cos, decimal_sin, entry, ramp_limits
from spec.weights import philox

POSITIONS = np.array([*range(0, 150, 7), 1, 2, 4096, 16383, 16384, 131072, 5_000_011, (1 << 26) - 1])
CASES: dict[str, Config] = {
    "plain": preset("tiny", yarn=None),
    "tiny": preset("tiny"),
    "mscale differs": preset("small", rope_dim=12),
    "mscale absent": preset("tiny", yarn=Yarn(factor=8.0, original_len=128, mscale=0.0, mscale_all_dim=1.0)),
    "factor below 1": preset("tiny", yarn=Yarn(factor=0.5, original_len=128, mscale=0.7)),
    "ramp beyond the last pair": preset("tiny", rope_theta=100.0, yarn=Yarn(factor=4.0, original_len=4096)),
    "K2.5": preset("tiny", rope_dim=64, rope_theta=50000.0, yarn=Yarn(factor=64.0, original_len=4096)),
}


def frequencies(config: Config) -> list[mpmath.mpf]:
    """theta^(-2i/D) and YaRN, written from the paper's formulas in mpmath."""
    theta, dim = mpmath.mpf(config.rope_theta), config.rope_dim
    plain = [theta ** (-mpmath.mpf(2 * i) / dim) for i in range(dim // 2)]
    yarn = config.yarn
    if yarn is None or yarn.factor <= 1:
        return plain

    def pair(beta: float) -> mpmath.mpf:
        return dim * mpmath.log(yarn.original_len / (2 * mpmath.pi * beta)) / (2 * mpmath.log(theta))

    low, high = max(int(mpmath.floor(pair(yarn.beta_fast))), 0), min(int(mpmath.ceil(pair(yarn.beta_slow))), dim - 1)
    width = mpmath.mpf(high - low) if high != low else mpmath.mpf(1) / 1000
    ramps = [min(max((i - low) / width, mpmath.mpf(0)), mpmath.mpf(1)) for i in range(dim // 2)]
    return [f * (1 - r) + f / yarn.factor * r for f, r in zip(plain, ramps, strict=True)]


def factor(yarn: Yarn | None) -> mpmath.mpf:
    if yarn is None or yarn.factor <= 1:
        return mpmath.mpf(1)
    m = [mpmath.mpf(weight) / 10 * mpmath.log(yarn.factor) + 1 for weight in (yarn.mscale, yarn.mscale_all_dim)]
    return m[0] / m[1] if yarn.mscale and yarn.mscale_all_dim else mpmath.log(yarn.factor) / 10 + 1


def rounded(x: mpmath.mpf) -> float:
    """Nearest float32 by distance; table entries are no ties."""
    middle = np.float32(float(x))
    candidates = [np.nextafter(middle, np.float32(-9)), middle, np.nextafter(middle, np.float32(9))]
    return float(min(candidates, key=lambda c: abs(mpmath.mpf(float(c)) - x)))


@pytest.mark.parametrize("name", CASES)
def test_tables_are_the_rounded_cos_and_sin(name: str) -> None:
    config = CASES[name]
    cos, sin = Rotary(config).tables(POSITIONS)
    with mpmath.workprec(260):
        m, exact_frequencies = factor(config.yarn), frequencies(config)
        for row, position in enumerate(POSITIONS.tolist()):
            for i, frequency in enumerate(exact_frequencies):
                assert cos[row, i] == rounded(m * mpmath.cos(position * frequency))
                assert sin[row, i] == rounded(m * mpmath.sin(position * frequency))


def test_the_exact_path_gives_the_same_entries() -> None:
    config = CASES["mscale differs"]
    cos, sin = Rotary(config).tables(POSITIONS)
    for row, position in enumerate(POSITIONS.tolist()):
        for i in range(config.rope_dim // 2):
            assert cos[row, i] == exact.nearest32_decimal(partial(entry, config, position, i, decimal_cos))
            assert sin[row, i] == exact.nearest32_decimal(partial(entry, config, position, i, decimal_sin))


@pytest.mark.parametrize("bits", [24, 28])
def test_cos_and_sin_as_bad_as_the_allowance_change_nothing(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the allowance at 2**-bits and errors of that size planted, many entries are doubtful; the tables stay what they are."""
    expected = Rotary(CASES["tiny"]).tables(POSITIONS)
    draw = philox("bad libm", bits)

    def bad(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: function(x) * (1 + draw.uniform(-1, 1, x.shape) * 2.0**-bits)

    monkeypatch.setattr(rotary, "LIBM", 2.0**-bits)
    monkeypatch.setattr(np, "cos", bad(np.cos))
    monkeypatch.setattr(np, "sin", bad(np.sin))
    for actual, wanted in zip(Rotary(CASES["tiny"]).tables(POSITIONS), expected, strict=True):
        assert np.array_equal(actual, wanted)


@pytest.mark.parametrize("digits", [40, 100])
def test_decimal_cos_and_sin_keep_their_digits(digits: int) -> None:
    with mpmath.workdps(digits + 30), exact.precision(digits):
        for text in ("0", "0.1", "3.14159", "-2.5", "1234567.25", "65000000.123", "1e-9"):
            x = mpmath.mpf(text)
            unit = mpmath.mpf(10) ** (1 - digits) * (abs(x) + 40)  # the bound of decimal_cos
            assert abs(mpmath.mpf(str(decimal_cos(Decimal(text)))) - mpmath.cos(x)) <= unit
            assert abs(mpmath.mpf(str(decimal_sin(Decimal(text)))) - mpmath.sin(x)) <= unit
        assert abs(mpmath.mpf(str(rotary.pi(digits))) - mpmath.pi) < mpmath.mpf(10) ** -digits


@pytest.mark.parametrize(
    ("theta", "factor", "beta_fast", "limits"),
    [(50000.0, 64.0, 32.0, (8, 20)), (10000.0, 40.0, 32.0, (10, 23)), (50000.0, 32.0, 1.0, (19, 20))],
    ids=["Kimi-K2.5", "DeepSeek-V3", "Kimi-K2"],
)
def test_the_ramp_of_published_models(theta: float, factor: float, beta_fast: float, limits: tuple[int, int]) -> None:
    config = preset("tiny", rope_dim=64, rope_theta=theta, yarn=Yarn(factor=factor, original_len=4096, beta_fast=beta_fast))
    assert config.yarn is not None
    assert ramp_limits(config, config.yarn) == limits


def test_equal_ramp_limits_are_a_thousandth_apart() -> None:
    config = preset("tiny", rope_dim=8, yarn=Yarn(factor=4.0, original_len=4))  # both limits fall below 0
    assert config.yarn is not None
    assert ramp_limits(config, config.yarn) == (0, Decimal("0.001"))


def test_the_softmax_scale_of_published_models() -> None:
    """Six digits as published; mscale counts twice (rule M5)."""
    for yarn_factor, published in ((64.0, 0.144680), (32.0, 0.130861), (40.0, 0.135234)):
        config = preset("tiny", nope_dim=128, rope_dim=64, yarn=Yarn(factor=yarn_factor, original_len=4096))
        assert round(config.softmax_scale, 6) == published
        assert math.isclose(config.softmax_scale, 192**-0.5 * (0.1 * math.log(yarn_factor) + 1) ** 2, rel_tol=2.0**-50)


def test_rows_do_not_depend_on_what_was_asked_before() -> None:
    config = CASES["tiny"]
    grown = Rotary(config)
    for positions in (np.array([3, 900]), np.array([20000, 2]), np.array([5000, 64, 63])):
        for actual, expected in zip(grown.tables(positions), Rotary(config).tables(positions[::-1]), strict=True):
            assert np.array_equal(actual, expected[::-1])


@pytest.mark.parametrize("position", [-1, 1 << 26])
def test_positions_out_of_range_are_refused(position: int) -> None:
    with pytest.raises(ValueError, match="position is"):
        Rotary(CASES["tiny"]).tables(np.array([0, position]))


def test_position_zero_turns_nothing() -> None:
    cos, sin = Rotary(CASES["tiny"]).tables(np.array([0]))
    assert (cos == 1).all()
    assert not sin.any()
    x = philox("rope").standard_normal((1, 8)).astype(np.float32)
    assert np.array_equal(rope(x, cos, sin, False), x)


def test_interleaved_pairs_turn_as_complex_numbers_and_half_layout_is_a_permutation() -> None:
    x = philox("rope").standard_normal((5, 3, 8)).astype(np.float32)
    cos, sin = Rotary(CASES["tiny"]).tables(np.array([0, 1, 5, 77, 3000]))
    turned = (x[..., 0::2] + 1j * x[..., 1::2].astype(np.complex128)) * (cos + 1j * sin.astype(np.complex128))[:, None]
    expected = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    actual = rope(x, cos[:, None], sin[:, None], False)
    # float32 rounding of the result, 2**-24 relative, beside which complex128 is exact
    assert (np.abs(actual - expected) <= 2.0**-24 * (1 + 2.0**-20) * np.abs(expected)).all()
    split = np.concatenate([np.arange(0, 8, 2), np.arange(1, 8, 2)])
    assert np.array_equal(rope(x[..., split], cos[:, None], sin[:, None], True), actual[..., split])
