"""Exact values behind spec/arithmetic.py: how the few results that float64 cannot round with certainty are decided.

Everything here is integer, rational or decimal arithmetic of the standard library, or error-free float64 transformations;
nothing depends on BLAS, libm or SIMD. It is slow and rarely runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Wide = NDArray[np.float64]

UNIT64 = 2.0**-53  # unit roundoff of float64
SMALLEST_EXPONENT = -149  # the spacing of subnormal float32 numbers is 2**-149
FEW = 4096  # terms up to which math.fsum is faster than the vectorised tree
DIGITS_MAX = 20000  # no value met so far needed 80; far more means that the value is a tie, which the callers rule out


def nearest32(value: Fraction) -> float:
    """The float32 nearest to a rational, ties to even, subnormals and overflow as IEEE 754; a zero result is +0."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()  # 2**(exponent-1) < magnitude < 2**(exponent+1)
    if magnitude < _power_of_two(exponent):
        exponent -= 1
    spacing = max(exponent - 23, SMALLEST_EXPONENT)
    units = round(magnitude / _power_of_two(spacing))  # Fraction rounds half to even
    if units.bit_length() + spacing > 128:
        return math.copysign(math.inf, value)
    return math.copysign(math.ldexp(units, spacing), value) if units else 0.0


def nearest32_root(square: Fraction, sign: int) -> float:
    """The float32 nearest to sign * sqrt(square), exact also for ties: the integer root keeps a sticky bit (round to odd)."""
    if square == 0:
        return 0.0
    shift = 2 * max(0, 64 + square.denominator.bit_length() - square.numerator.bit_length() // 2)
    scaled, rest = divmod(square.numerator << shift, square.denominator)
    root = math.isqrt(scaled)  # more than 60 bits, so that the sticky bit is far below every midpoint of two float32
    sticky = int(bool(rest) or root * root != scaled)
    return nearest32(sign * Fraction(2 * root + sticky, 1 << (shift // 2 + 1)))


def exact_sum(values: Iterable[float]) -> Fraction:
    """The sum without error: each fsum is the correctly rounded rest of the previous ones, until nothing is left."""
    parts = list(values)
    total = Fraction(0)
    while rest := math.fsum(parts):
        total += Fraction(rest)
        parts.append(-rest)
    return total


def nearest32_decimal(evaluate: Callable[[int], tuple[Decimal, Decimal]]) -> float:
    """The float32 nearest to a transcendental number. `evaluate(digits)` gives (value, bound of its absolute error) and runs
    with that precision as the current decimal context.

    Precision doubles until the whole interval rounds to one float32 (Ziv). It ends because the callers' values are never
    midpoints of two float32. Raises ArithmeticError if it does not.
    """
    digits = 40
    while digits <= DIGITS_MAX:
        with precision(digits):
            value, error = evaluate(digits)
        low, high = nearest32(Fraction(value) - Fraction(error)), nearest32(Fraction(value) + Fraction(error))
        if low == high:
            return low
        digits *= 2
    raise ArithmeticError(f"a value near {value:.20} is no clearer at {DIGITS_MAX} digits; it should never be a tie")


def precision(digits: int) -> AbstractContextManager[Context]:
    """Decimal operators and functions inside it round to `digits`: each has a relative error of at most 10**(1 - digits)."""
    return localcontext(Context(prec=digits, Emin=-999999, Emax=999999, traps=[]))


def two_sum(a: Wide, b: Wide) -> tuple[Wide, Wide]:
    """(s, e): s = fl(a + b), e = a + b - s exactly (Knuth), in any order of magnitudes, for round to nearest."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def round_sums(terms: Wide) -> Float:
    """Correctly rounded float32 of the sum of each row of `terms` [C, K], finite float64 taken as exact numbers.

    A tree of two_sum loses nothing: sum = root + sum of all local errors. Adding those errors costs at most
    (K + 1) * UNIT64 * (sum of their magnitudes), which is zero for integers and other sums that fit. Rows that stay
    ambiguous go to math.fsum, which is exact.
    """
    count, width = terms.shape
    if terms.size <= FEW:
        return _round_sums_one_by_one(terms)
    rest, magnitude = np.zeros(count), np.zeros(count)
    level = terms
    while level.shape[1] > 1:
        half = level.shape[1] // 2
        odd = level[:, 2 * half :]
        level, error = two_sum(level[:, :half], level[:, half : 2 * half])
        rest += error.sum(axis=1)
        magnitude += np.abs(error).sum(axis=1)
        if odd.shape[1]:
            level = np.concatenate([level, odd], axis=1)
    total = level[:, 0] if width else np.zeros(count)
    radius = (width + 8) * UNIT64 * magnitude * 1.001  # 8: the roundings of rest -+ radius, as magnitude >= |rest|; 1.001: its own
    low, high = round_pairs(total, rest - radius), round_pairs(total, rest + radius)
    if (doubtful := low != high).any():
        high[doubtful] = _round_sums_one_by_one(terms[doubtful])
    return high + np.float32(0)


def _round_sums_one_by_one(terms: Wide) -> Float:
    """(head, tail) by math.fsum: the tail is correctly rounded, hence of the right sign, which is all that round_pairs needs."""
    rows = terms.tolist()
    heads = [math.fsum(row) for row in rows]
    tails = [math.fsum([*row, -head]) for row, head in zip(rows, heads, strict=True)]
    return round_pairs(np.array(heads), np.array(tails)) + np.float32(0)


def round_pairs(head: Wide, tail: Wide) -> Float:
    """Correctly rounded float32 of head + tail.

    The pair is first rounded to odd in float64 (an inexact value takes the neighbour whose last bit is 1), which keeps the
    second rounding correct because 53 >= 24 + 2 (Boldo and Melquiond 2008). Only the sign of the small part matters.
    """
    head, tail = two_sum(head, tail)
    even = (head.view(np.int64) & 1) == 0
    odd = np.where(even & (tail != 0), np.nextafter(head, np.copysign(np.inf, tail)), head)
    result: Float = odd.astype(np.float32)
    return result


def as_fraction(value: Any) -> Fraction:
    """A NumPy or Python float as the rational that it is."""
    return Fraction(float(value))


def as_decimal(value: Fraction) -> Decimal:
    """The rational rounded to the current precision."""
    return Decimal(value.numerator) / Decimal(value.denominator)


def _power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)
