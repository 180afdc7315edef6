"""Rotary position tables (rule M6): YaRN frequencies, and cos and sin as correctly rounded float32 of their exact real values.

The tables are inputs of the op `rope` and part of the golden contract. A frequency is the real number
theta^(-2i/D), interpolated by YaRN; an angle is position * frequency, never rounded to float32; a table entry is
RN32(m cos(angle)) or RN32(m sin(angle)). float64 decides nearly all of them (Ziv's test), decimal arithmetic the rest, so
the bits do not depend on libm or SIMD. Engines that build angles in float32 differ from these tables by about
2**-25 * angle: an engine under test receives the tables or is judged with that allowance.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal, getcontext
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import LIBM
from spec.config import Config, Yarn
from spec.exact import Float, Wide, nearest32_decimal, precision, two_sum

POSITION_MAX = 1 << 26  # position * (26 bits of a frequency) is exact in float64
KEPT_MAX = 1 << 14  # positions whose rows are kept; later ones are computed at each call
FREQUENCY_DIGITS = 60  # for the two float64 words of a frequency, 32 digits
GUARD_DIGITS = 20  # covers positions up to 2**26 and the few dozen roundings of a Taylor series


class Rotary:
    """The tables of one configuration: `tables(positions)`, P -> (cos, sin), each [T, rope_dim / 2]."""

    position_max = POSITION_MAX

    def __init__(self, config: Config) -> None:
        self._config = config
        with precision(FREQUENCY_DIGITS):
            exact = frequencies(config)
            self._high = np.array([float(f) for f in exact])
            self._low = np.array([float(f - Decimal(float(f))) for f in exact])
            self._factor = float(table_factor(config.yarn))
        self._kept: tuple[Float, Float] = self._compute(np.arange(64))

    def tables(self, positions: NDArray[np.integer]) -> tuple[Float, Float]:
        """Raises ValueError for a position below 0 or from POSITION_MAX on."""
        if not len(positions):
            return self._compute(positions)
        first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= POSITION_MAX:
            raise ValueError(f"position is {first if first < 0 else last}, but must be between 0 and {POSITION_MAX - 1}")
        if last >= KEPT_MAX:
            return self._compute(positions)
        if last >= len(self._kept[0]):
            more = self._compute(np.arange(len(self._kept[0]), 1 << last.bit_length()))
            self._kept = (np.concatenate([self._kept[0], more[0]]), np.concatenate([self._kept[1], more[1]]))
        return self._kept[0][positions], self._kept[1][positions]

    def _compute(self, positions: NDArray[np.integer]) -> tuple[Float, Float]:
        """The angle is a pair of float64: a frequency is cut into 26 + 27 bits, whose products with a position are exact."""
        position = positions.astype(np.float64)[:, None]
        head = _upper_bits(self._high)
        angle, rest = two_sum(position * head, position * (self._high - head))
        rest = rest + position * self._low
        cos, sin = np.cos(angle), np.sin(angle)
        # first order in `rest` < 2**-25; its square and the roundings are below LIBM, which libm itself never uses up
        error = np.full(angle.shape, 2 * LIBM * self._factor)
        return (
            self._round((cos - sin * rest) * self._factor, error, positions, decimal_cos),
            self._round((sin + cos * rest) * self._factor, error * np.minimum(angle, 1.0), positions, decimal_sin),
        )

    def _round(self, y: Wide, error: Wide, positions: NDArray[np.integer], function: Callable[[Decimal], Decimal]) -> Float:
        low, high = (y - error).astype(np.float32), (y + error).astype(np.float32)
        for row, pair in np.argwhere(low != high):
            high[row, pair] = nearest32_decimal(partial(entry, self._config, int(positions[row]), int(pair), function))
        return high + np.float32(0)


class CarriedTables:
    """Tables that came with the weights (Config.rope_table_len): read, never computed."""

    def __init__(self, cos: Float, sin: Float) -> None:
        """cos, sin [n, D/2]"""
        self._cos, self._sin = cos, sin
        self.position_max = len(cos)

    def tables(self, positions: NDArray[np.integer]) -> tuple[Float, Float]:
        """Raises ValueError for a position that the tables do not have."""
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < self.position_max:
            raise ValueError(f"positions must be between 0 and {self.position_max - 1}, the length of the carried tables")
        return self._cos[positions], self._sin[positions]


def frequencies(config: Config) -> list[Decimal]:
    """theta^(-2i/D) for i < D/2, under YaRN freq * (1 - ramp) + freq / factor * ramp, to the current decimal precision."""
    log_theta = Decimal(config.rope_theta).ln()
    plain = [(Decimal(-2 * i) / config.rope_dim * log_theta).exp() for i in range(config.rope_dim // 2)]
    yarn = config.yarn
    if yarn is None or yarn.factor <= 1:
        return plain
    low, high = ramp_limits(config, yarn)
    ramps = [min(max((i - low) / (high - low), Decimal(0)), Decimal(1)) for i in range(len(plain))]
    return [f * (1 - ramp) + f / Decimal(yarn.factor) * ramp for f, ramp in zip(plain, ramps, strict=True)]


def ramp_limits(config: Config, yarn: Yarn) -> tuple[Decimal, Decimal]:
    """Pairs between which the ramp rises: floor(D(beta_fast)) >= 0 and ceil(D(beta_slow)) <= rope_dim - 1 (not rope_dim/2 - 1),
    D(b) = rope_dim ln(original_len / (2 pi b)) / (2 ln theta); 0.001 apart if equal."""
    with precision(FREQUENCY_DIGITS):

        def pair(beta: float) -> Decimal:
            """The pair that turns `beta` times over the original length; pi in it keeps it off the integers."""
            ratio = yarn.original_len / (2 * pi(FREQUENCY_DIGITS) * Decimal(beta))
            return config.rope_dim * ratio.ln() / (2 * Decimal(config.rope_theta).ln())

        low = max(pair(yarn.beta_fast).to_integral_value(ROUND_FLOOR), Decimal(0))
        high = min(pair(yarn.beta_slow).to_integral_value(ROUND_CEILING), Decimal(config.rope_dim - 1))
        return low, high + Decimal("0.001") if low == high else high


def table_factor(yarn: Yarn | None) -> Decimal:
    """m(factor, mscale) / m(factor, mscale_all_dim), or m(factor, 1) if either is 0; m(s, a) = 0.1 a ln s + 1, and 1 for s <= 1."""
    if yarn is None or yarn.factor <= 1:
        return Decimal(1)
    log_factor = Decimal(yarn.factor).ln()

    def mscale(weight: float) -> Decimal:
        return Decimal("0.1") * Decimal(weight) * log_factor + 1

    if not yarn.mscale or not yarn.mscale_all_dim:
        return mscale(1.0)
    return mscale(yarn.mscale) / mscale(yarn.mscale_all_dim)


def entry(config: Config, position: int, pair: int, function: Callable[[Decimal], Decimal], digits: int) -> tuple[Decimal, Decimal]:
    """One table entry and its error bound, 10**-digits times the factor: the guard digits cover everything inside."""
    with precision(digits + GUARD_DIGITS):
        factor = table_factor(config.yarn)
        angle = position * _frequencies_at(config, digits + GUARD_DIGITS)[pair]
        return factor * function(angle), factor * Decimal(10) ** -digits


@cache
def _frequencies_at(config: Config, digits: int) -> tuple[Decimal, ...]:
    with precision(digits):
        return tuple(frequencies(config))


def decimal_cos(angle: Decimal) -> Decimal:
    """Absolute error about (angle + 40) units of the current precision, as for decimal_sin."""
    return _alternating(Decimal(1), 0, _reduced(angle))


def decimal_sin(angle: Decimal) -> Decimal:
    reduced = _reduced(angle)
    return _alternating(reduced, 1, reduced)


def _alternating(first: Decimal, order: int, x: Decimal) -> Decimal:
    """The Taylor series first - first x^2 / ((order + 1)(order + 2)) + ...; terms grow to at most 12 for |x| <= pi, then fall."""
    digits = getcontext().prec
    total, term = first, first
    while term and term.adjusted() > -digits - 5:
        term = -term * x * x / ((order + 1) * (order + 2))
        total += term
        order += 2
    return total


def _reduced(angle: Decimal) -> Decimal:
    """The angle less a multiple of 2 pi, in [-pi, pi]; more digits of pi make up for those of the multiple."""
    digits = getcontext().prec + GUARD_DIGITS
    with precision(digits):
        turn = 2 * pi(digits)
        reduced = angle - (angle / turn).to_integral_value(ROUND_HALF_EVEN) * turn
    return +reduced


@cache
def pi(digits: int) -> Decimal:
    """Machin: 16 atan(1/5) - 4 atan(1/239), in integers with 10 guard digits."""
    unit: int = 10 ** (digits + 10)

    def arctan_inverse(n: int) -> int:
        power = total = unit // n
        k = 1
        while power:
            power //= -n * n
            k += 2
            total += power // k
        return total

    with precision(digits + 20):
        return Decimal(16 * arctan_inverse(5) - 4 * arctan_inverse(239)).scaleb(-(digits + 10))


def _upper_bits(value: Wide) -> Wide:
    """The leading 26 bits of each value: its last 27 bits are cleared."""
    return (value.view(np.int64) & ~np.int64((1 << 27) - 1)).view(np.float64)
