"""Canonical float32: each function returns the correctly rounded float32 of the exact real value of the operation.

All rounding of the specification lives here. A function evaluates in float64, bounds the error of that evaluation, and
accepts where both ends of the interval round to the same float32 (Ziv's test); the few other elements are redone exactly
(spec/exact.py). The bits therefore do not depend on BLAS, threads, SIMD, batch, or language, as long as float64 is IEEE 754
with round to nearest.

Why each allowance is safe. Products of two float32 are exact in float64 (48 of 53 bits, exponents within range), so a
fused multiply-add changes nothing and a sum of n products in any order is off by at most (n - 1) * UNIT64 * sum|terms|
(Jeannerod and Rump: no higher-order term for round to nearest). `LIBM` = 2**-46 relative is 128 ulp of float64, far above
every exp, log, sin, cos in use (1 to 4 ulp). Each allowance includes the rounding of `y - error` and `y + error` and of the
error term itself. No float64 under- or overflow can occur: squares of float32 lie between 2**-298 and 2**256.

Conventions. Every zero result is +0. Overflow gives infinity as in IEEE 754. A result that depends on a NaN or an infinity
is NaN, except: -inf scores and logits weigh exactly 0 in softmax and log_sum_exp, sigmoid takes its limits, and add and
multiply are the IEEE operations. Parameters (eps, scale) are taken as their float32 value. No exception for any value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from spec.exact import UNIT64, Float, Wide, as_decimal, as_fraction, exact_sum, nearest32, nearest32_decimal, nearest32_root, round_sums

Mask = NDArray[np.bool_]
Index = tuple[NDArray[np.intp], ...]
Redo = Callable[[Index], Float]

LIBM = 2.0**-46  # relative allowance for one float64 exp or log: 128 ulp, while real libraries stay within 4
SLACK = 1 + 2.0**-20  # covers the roundings inside the bounds themselves, of relative size (K + 10) * 2**-53 for K < 2**30
BLOCK = 256  # longer dots are summed in blocks: the bound grows with BLOCK + K / BLOCK instead of K
CACHED = 1 << 14  # elements per block of the rounding test: its temporaries of 8 bytes fit the second-level cache
ROWS_MIN = 64  # rows of a product that are not cut further: fewer cost BLAS its blocking
REFINE_MIN = 1 << 16  # candidates * K from which a product of magnitudes costs less than exact sums
GATHER_MAX = 1 << 20  # float64 elements gathered at once when dots are redone: 8 MiB

Function = TypeVar("Function", bound=Callable[..., Any])


class NotIEEE(ArithmeticError):
    """This process does not compute in IEEE 754 with round to nearest; the message names what it does instead."""


def check_environment() -> None:
    """Raises NotIEEE where subnormals are flushed or the rounding mode is not to nearest.

    A library built with -ffast-math can switch the calling thread to flush-to-zero at load time.
    """
    if np.array([2.0**-149]).astype(np.float32).view(np.int32)[0] != 1 or (np.array([2.0**-126], np.float32) * np.float32(0.5))[0] == 0:
        raise NotIEEE("this thread flushes subnormal numbers to zero: look for a library loaded before, built with -ffast-math")
    one, below_half, tie = np.array([1.0, -1.0]), 0.75 * 2.0**-52, 2.0**-53
    if (one * (1 + below_half) != one * (1 + 2.0**-52)).any() or (one + one * tie != one).any():
        raise NotIEEE("float64 does not round to nearest in this thread: something has changed the rounding mode")


def _quiet(function: Function) -> Function:
    """Overflow to infinity and NaN are results here, not accidents."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")(function)


# ---- dot products -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Prepared:
    """A float32 matrix [..., K, N] with what matmul needs of it, for matrices that are used again and again.

    wide: float64 copy [..., K, N]; column_bound [..., N]: upper bound of the column norms times the error factor of a dot.
    """

    value: Float
    wide: Wide
    column_bound: Wide

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


def prepare(matrix: Float) -> Prepared:
    return prepare_wide(matrix, matrix.astype(np.float64))


def prepare_wide(matrix: Float, wide: Wide) -> Prepared:
    """For a caller who keeps the float64 copy, `wide`, of a matrix that grows."""
    return Prepared(matrix, wide, np.sqrt(_column_squares(wide)) * _dot_factor(matrix.shape[-2]))


def prepare_joined(*matrices: Float) -> Prepared:
    """[K, N1], [K, N2], ... side by side: one product instead of several; the bits of each column stay what they are."""
    return prepare(np.concatenate(matrices, axis=-1))


def row_bounds(wide: Wide) -> Wide:
    """The column bounds of `wide` transposed: [S, K] -> [S]."""
    return np.asarray(np.sqrt(np.vecdot(wide, wide)) * _dot_factor(wide.shape[-1]))


@_quiet
def matmul(a: Float, b: Float | Prepared, scale: float | None = None, where: Mask | None = None) -> Float:
    """a [..., M, K] @ b [..., K, N], times float32(scale) if given, as one operation.

    Where `where` [..., M, N] is false the result is 0 and costs nothing. |error| <= factor * |a|_2 |b|_2 by
    Cauchy-Schwarz: two norms instead of a second product.
    """
    if a.ndim == 2 and len(b.shape) == 2 and len(a) * b.shape[1] > 2 * CACHED and len(a) > ROWS_MIN:
        whole = b if isinstance(b, Prepared) else prepare(b)
        step = max(ROWS_MIN, CACHED // b.shape[1])
        parts = [slice(start, start + step) for start in range(0, len(a), step)]
        return np.concatenate([matmul(a[part], whole, scale, None if where is None else where[part]) for part in parts])
    wide = a.astype(np.float64)
    row_norm = np.sqrt(np.vecdot(wide, wide))
    if isinstance(b, Prepared) or a.shape[-1] <= 2 * BLOCK:
        prepared = b if isinstance(b, Prepared) else prepare(b)
        value, column_bound = prepared.value, prepared.column_bound
        y = _product(wide, prepared.wide)
    else:
        value = b
        y, squares = _streamed_product(wide, b)
        column_bound = np.sqrt(squares) * _dot_factor(a.shape[-1])
    if scale is not None:
        factor = float(np.float32(scale))
        y *= factor
        row_norm *= abs(factor)

    def redo(at: Index) -> Float:
        scaled = wide if scale is None else wide * float(np.float32(scale))  # exact: 24 + 24 bits
        return _redo_dots(y, scaled, value, at)

    return _settle(y, row_norm[..., None], column_bound[..., None, :], redo, where)


@_quiet
def grouped_matmul(a: Float, experts: Prepared, ids: NDArray[np.int32]) -> Float:
    """Row p of a [P, K] times matrix ids[p] of the stack [E, K, N]: one BLAS call per matrix in use."""
    wide = a.astype(np.float64)
    row_norm = np.sqrt(np.vecdot(wide, wide))
    order = np.argsort(ids, kind="stable")
    grouped, sorted_ids = wide[order], ids[order]
    product = np.empty((len(ids), experts.shape[-1]))
    starts = [0, *(np.flatnonzero(sorted_ids[1:] != sorted_ids[:-1]) + 1).tolist(), len(ids)]
    for start, stop in itertools.pairwise(starts):
        if start < stop:
            product[start:stop] = _product(grouped[start:stop], experts.wide[sorted_ids[start]])
    y = np.empty_like(product)
    y[order] = product

    def redo(at: Index) -> Float:
        return _rounded_in_chunks(at, wide.shape[-1], lambda part: wide[part[0]] * experts.value[ids[part[0]], :, part[1]])

    return _settle(y, row_norm[:, None], experts.column_bound[ids], redo)


def _dot_factor(depth: int) -> float:
    """(terms + 6) * UNIT64: the sum, the scale, y -+ error, and the rounding of the norms."""
    terms = depth if depth <= 2 * BLOCK else BLOCK + -(-depth // BLOCK)
    return (terms + 6) * UNIT64 * SLACK


def _column_squares(wide: Wide) -> Wide:
    """Sum of squares over axis -2; the axis is contiguous for a transposed view."""
    if wide.strides[-2] < wide.strides[-1]:
        columns = np.swapaxes(wide, -1, -2)
        return np.asarray(np.vecdot(columns, columns))
    return np.asarray(np.einsum("...kn,...kn->...n", wide, wide))


def _product(a: Wide, b: Wide) -> Wide:
    """a @ b, a deep one as a sum over blocks of the contracted axis, left to right."""
    if a.shape[-1] <= 2 * BLOCK:
        return np.asarray(a @ b)
    total: Wide = a[..., :BLOCK] @ b[..., :BLOCK, :]
    for start in range(BLOCK, a.shape[-1], BLOCK):
        total += a[..., start : start + BLOCK] @ b[..., start : start + BLOCK, :]
    return total


def _streamed_product(a: Wide, b: Float) -> tuple[Wide, Wide]:
    """(product, column squares), widening one block of rows of `b` at a time so that it stays in the cache."""
    total: Wide | None = None
    squares: Wide | None = None
    for start in range(0, a.shape[-1], BLOCK):
        block = b[..., start : start + BLOCK, :].astype(np.float64)
        product, square = a[..., start : start + BLOCK] @ block, _column_squares(block)
        total, squares = (product, square) if total is None or squares is None else (total + product, squares + square)
    assert total is not None and squares is not None
    return total, squares


def _redo_dots(y: Wide, a: Wide, b: Float, at: Index) -> Float:
    """Exact dots of the elements `at` of a @ b; elements of `a` have at most 48 bits (a float32 times the scale).

    Many candidates mean that Cauchy-Schwarz is loose here (cancellation, outliers): |a| |b| sorts most of them out first.
    """
    rows = np.broadcast_to(a, (*y.shape[:-1], a.shape[-1]))
    columns = np.swapaxes(np.broadcast_to(b, (*y.shape[:-2], *b.shape[-2:])), -1, -2)
    if len(at[0]) * a.shape[-1] > REFINE_MIN:
        wanted, column = np.unique(at[-1], return_inverse=True)  # not all of b: in float64 a matrix of a large model is gigabytes
        magnitude = np.abs(a) @ np.abs(b[..., wanted]).astype(np.float64)
        bound = magnitude[(*at[:-1], column)] * (a.shape[-1] + 6) * UNIT64 * SLACK
        return _settle(y[at], bound, 1.0, lambda part: _exact_dots(rows, columns, tuple(axis[part[0]] for axis in at)))
    return _exact_dots(rows, columns, at)


def _exact_dots(rows: Wide, columns: Float, at: Index) -> Float:
    """rows [..., M, K], columns [..., N, K]: the correctly rounded dot of each (..., m, n) in `at`."""

    def terms(part: Index) -> Wide:
        row, column = rows[part[:-1]], columns[(*part[:-2], part[-1])].astype(np.float64)
        head = row.astype(np.float32).astype(np.float64)
        tail = row - head  # 48 bits = 24 + 24, so that all products are exact
        return np.concatenate([head * column, tail * column], axis=1) if tail.any() else head * column

    return _rounded_in_chunks(at, rows.shape[-1], terms)


def _rounded_in_chunks(at: Index, width: int, terms: Callable[[Index], Wide]) -> Float:
    """round_sums of terms(part of at), at most GATHER_MAX terms at a time."""
    step = max(1, GATHER_MAX // max(width, 1))
    parts = [tuple(axis[start : start + step] for axis in at) for start in range(0, len(at[0]), step)]
    return np.concatenate([round_sums(terms(part)) for part in parts])


# ---- element-wise -----------------------------------------------------------------------------------------------
@_quiet
def add(a: Float, b: Float) -> Float:
    """One IEEE addition is already canonical, but for the sign of zero."""
    return np.asarray((a + b) + np.float32(0))


@_quiet
def sigmoid(x: Float) -> Float:
    """1 / (1 + e^-x). Relative error of this form: LIBM + 2 UNIT64 on both sides, since 1 + e^-x has no cancellation.

    Never a midpoint of two float32 but at x = 0, where it is 1/2 (Lindemann): the exact evaluation ends.
    """
    y = 1 / (1 + np.exp(-x.astype(np.float64)))  # exp overflows to infinity below -709, where the result rounds to 0 anyway

    def redo(at: Index) -> Float:
        return np.array([nearest32_decimal(partial(_logistic, as_fraction(value), Fraction(1))) for value in x[at]], np.float32)

    return _settle(y, y, 2 * LIBM, redo)


@_quiet
def swiglu(gate: Float, up: Float) -> Float:
    """gate * sigmoid(gate) * up as one operation. The numerator is exact; relative error LIBM + 3 UNIT64."""
    wide = gate.astype(np.float64)
    y = wide * up.astype(np.float64) / (1 + np.exp(-wide))  # where exp overflows, |y| < 2**256 * e**-709, the result rounds to 0

    def redo(at: Index) -> Float:
        pairs = [(as_fraction(g), as_fraction(u)) for g, u in zip(gate[at], up[at], strict=True)]
        return np.array([nearest32_decimal(partial(_logistic, g, g * u)) for g, u in pairs], np.float32)

    return _settle(y, y, 2 * LIBM, redo)


def _logistic(x: Fraction, factor: Fraction, digits: int) -> tuple[Decimal, Decimal]:
    """factor / (1 + e^-x) and its error: five roundings, and e^-x moves by |x| relative errors of x."""
    value = as_decimal(factor) / (1 + as_decimal(-x).exp())
    return value, abs(value) * (8 + int(abs(x))) * Decimal(10) ** (1 - digits)


@_quiet
def rope(x: Float, cos: Float, sin: Float, half_layout: bool) -> Float:
    """Rotate x [..., D] by tables [..., D/2] that broadcast against it; the output keeps the layout of the input.

    interleaved pairs (2i, 2i+1); half_layout pairs (i, i + D/2): a' = a cos - b sin, b' = b cos + a sin. Both products are
    exact, so the one addition is within UNIT64 relative.
    """
    wide, c, s = x.astype(np.float64), cos.astype(np.float64), sin.astype(np.float64)
    half = x.shape[-1] // 2
    first = (..., slice(0, half)) if half_layout else (..., slice(0, None, 2))
    second = (..., slice(half, None)) if half_layout else (..., slice(1, None, 2))
    y = np.empty_like(wide)
    a, b = wide[first], wide[second]
    np.subtract(a * c, b * s, out=y[first])
    np.add(b * c, a * s, out=y[second])

    def redo(at: Index) -> Float:
        terms = np.empty((*x.shape, 2))
        terms[(*first, 0)], terms[(*first, 1)] = a * c, -(b * s)
        terms[(*second, 0)], terms[(*second, 1)] = b * c, a * s
        return round_sums(terms[at])

    return _settle(y, y, 4 * UNIT64, redo)


# ---- rows -------------------------------------------------------------------------------------------------------
@_quiet
def rms_norm(x: Float, gain: Float, eps: float) -> Float:
    """gain * x / sqrt(mean(x^2) + eps) over the last axis, N elements, eps as float32. 0/0 (eps 0, zero row) is NaN.

    The sum has positive terms only: (N/2 + 8) UNIT64 relative in all; float64 sqrt and division are correctly rounded.
    """
    wide, n, epsilon = x.astype(np.float64), x.shape[-1], float(np.float32(eps))
    root = np.sqrt(np.vecdot(wide, wide) / n + epsilon)[..., None]
    y = wide * gain.astype(np.float64) / root
    # root - root is 0, or NaN for a row with an infinity, whose finite elements would otherwise come out as 0
    relative = (root - root) + (n / 2 + 8) * UNIT64 * SLACK

    def redo(at: Index) -> Float:
        out = np.empty(len(at[0]), np.float32)
        for i, index in enumerate(zip(*at, strict=True)):
            row = wide[index[:-1]]
            product = as_fraction(x[index]) * as_fraction(gain[index[-1]])
            mean_square = exact_sum((row * row).tolist()) / n + as_fraction(epsilon)
            out[i] = nearest32_root(product * product / mean_square, 1 if product > 0 else -1)
        return out

    return _settle(y, y, relative, redo)


@_quiet
def softmax(scores: Float, visible: Mask) -> Float:
    """e^(s_j - m) / sum over visible j, along the last axis of length n; `visible` broadcasts against `scores`.

    Invisible and -inf scores weigh exactly 0; a row that sees nothing else is all 0; NaN or +inf makes its row NaN.
    Relative error 2 LIBM + (n + |d| + 8) UNIT64 with d = s_j - m; beyond |d| = 128 the result is below 2**-184 and rounds
    to 0 whatever its error, so |d| counts as 128. A weight is a midpoint of two float32 never (Lindemann-Weierstrass),
    unless all visible scores are equal, and then 1/n is none either.
    """
    wide = np.where(visible, scores, -np.inf).astype(np.float64)
    top = wide.max(axis=-1, keepdims=True, initial=-np.inf)
    wide -= np.where(top == -np.inf, 0.0, top)
    power = np.exp(wide, out=wide)
    total = power.sum(axis=-1, keepdims=True)
    y = power / np.where(total == 0, 1.0, total)

    def redo(at: Index) -> Float:
        seen = np.broadcast_to(visible, scores.shape)
        out = np.empty(len(at[0]), np.float32)
        for i, index in enumerate(zip(*at, strict=True)):
            row = scores[index[:-1]][seen[index[:-1]]].tolist()
            own = as_fraction(scores[index])
            gaps = [as_fraction(value) - own for value in row if value != -np.inf]
            out[i] = nearest32_decimal(partial(_inverse_power_sum, gaps))
        return out

    return _settle(y, y, 2 * LIBM + (y.shape[-1] + 136 + 8) * UNIT64, redo, visible)


def _power_sum(exponents: list[Fraction], digits: int) -> tuple[Decimal, Decimal]:
    """sum of e^x and its relative error: each power moves by |x| relative errors of x, each addition by one."""
    near = [x for x in exponents if x > -5000]  # the others add less than 10**-2000 of the largest power each
    total = sum((as_decimal(x).exp() for x in near), Decimal(0))
    spread = max((int(abs(x)) for x in near), default=0)
    return total, (len(exponents) + spread + 8) * (Decimal(10) ** (1 - digits) + Decimal(10) ** -1900)


def _inverse_power_sum(exponents: list[Fraction], digits: int) -> tuple[Decimal, Decimal]:
    total, relative = _power_sum(exponents, digits)
    return 1 / total, 2 * relative / total


@_quiet
def log_sum_exp(logits: Float) -> Float:
    """log(sum over the last axis of e^logit), [..., V] -> [...]. -inf weighs 0; all -inf gives -inf; NaN or +inf gives NaN.

    m + log(sum e^(x - m)), absolute error: the sum's relative LIBM + (V + 136) UNIT64, the log's LIBM, one addition. Never a
    midpoint of two float32 unless a single logit is finite (Lindemann-Weierstrass), and then it is that float32.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    wide = rows.astype(np.float64)
    top = wide.max(axis=-1, initial=-np.inf)
    empty = top == -np.inf
    shift = np.where(empty, 0.0, top)
    log = np.log(np.exp(wide - shift[:, None]).sum(axis=-1))
    y = shift + log
    # terms with x - m below -128 add less than 2**-184 each and need no relative accuracy
    error = (LIBM + (rows.shape[-1] + 136) * UNIT64) + LIBM * log + 4 * UNIT64 * np.abs(y)

    def redo(at: Index) -> Float:
        out = np.empty(len(at[0]), np.float32)
        for i, row in enumerate(at[0]):
            own = as_fraction(top[row])
            gaps = [as_fraction(value) - own for value in rows[row].tolist() if value != -np.inf]
            out[i] = nearest32_decimal(partial(_shifted_log_power_sum, gaps, own))
        return out

    settled = _settle(y, error, 1.0, redo)
    return np.where(empty, np.float32(-np.inf), settled).reshape(logits.shape[:-1])


def _shifted_log_power_sum(exponents: list[Fraction], shift: Fraction, digits: int) -> tuple[Decimal, Decimal]:
    total, relative = _power_sum(exponents, digits)
    log, start = total.ln(), as_decimal(shift)
    return start + log, 2 * relative + (abs(log) + abs(start) + abs(start + log)) * Decimal(10) ** (1 - digits)


@_quiet
def log_probs(logits: Float) -> Float:
    """RN32(logit - logZ) with logZ = RN32(log_sum_exp) (rule T2): two roundings by definition, the second an IEEE one."""
    return np.asarray((logits - log_sum_exp(logits)[..., None]) + np.float32(0))


# ---- mixture of experts -----------------------------------------------------------------------------------------
@_quiet
def top_k_weights(scores: Float, scale: float, renormalise: bool, denominator_eps: float, denominator_clamp: float = 0.0) -> Float:
    """scores [T, K] of the chosen experts -> scale * score, or scale * score / max(sum of scores + denominator_eps, denominator_clamp).

    A clamp of 0 is none. 0/0 is NaN.
    """
    factor, epsilon, clamp = np.float32(scale), float(np.float32(denominator_eps)), float(np.float32(denominator_clamp))
    if not renormalise:
        return np.asarray(np.where(np.isfinite(scores), scores * factor, np.nan) + np.float32(0), np.float32)  # one IEEE multiplication
    wide = scores.astype(np.float64)
    total = wide.sum(axis=-1, keepdims=True) + epsilon
    if clamp:
        total = np.maximum(total, clamp)  # moves no further than its argument: the same error
    magnitude = np.abs(wide).sum(axis=-1, keepdims=True) + abs(epsilon)
    y = wide * np.float64(factor) / total  # the numerator is exact
    error = y * ((scores.shape[-1] + 6) * UNIT64 * SLACK * (1 + magnitude / np.abs(total)))
    # the denominator cancels only for scores of both signs, which no router gives but a caller may: redo such rows
    if (weak := np.abs(total) < magnitude * 2.0**-30).any():
        y, error = np.where(weak, 0.0, y), np.where(weak, np.inf, error)

    def redo(at: Index) -> Float:
        out = np.empty(len(at[0]), np.float32)
        for i, index in enumerate(zip(*at, strict=True)):
            denominator = exact_sum(wide[index[:-1]].tolist()) + as_fraction(epsilon)
            if clamp:
                denominator = max(denominator, as_fraction(clamp))
            out[i] = nearest32(as_fraction(scores[index]) * as_fraction(factor) / denominator) if denominator else np.nan
        return out

    return _settle(y, error, 1.0, redo)


@_quiet
def combine(weights: Float, experts: Float, shared: Float | None) -> Float:
    """sum_k weights[t, k] * experts[t, k, :] + shared[t, :] as one operation: K + 1 exact terms in any order."""
    terms = weights.astype(np.float64)[..., None] * experts.astype(np.float64)  # (T,K,N)
    y, error = terms.sum(axis=1), np.abs(terms).sum(axis=1)
    if shared is not None:
        y += shared
        error += np.abs(shared)
    error *= (weights.shape[-1] + 6) * UNIT64 * SLACK

    def redo(at: Index) -> Float:
        chosen = terms[at[0], :, at[1]]
        return round_sums(chosen if shared is None else np.concatenate([chosen, shared[at].astype(np.float64)[:, None]], axis=1))

    return _settle(y, error, 1.0, redo)


# ---- rounding ---------------------------------------------------------------------------------------------------
def _settle(y: Wide, magnitude: Wide, factor: Wide | float, redo: Redo, where: Mask | None = None) -> Float:
    """float32 of y where y -+ magnitude * factor round alike; redo(indices) decides the rest.

    Both broadcast against y, and their sign does not matter. A NaN or an infinity in y or in the product means a NaN result,
    and where `where` is false the result is 0. Large arrays go block by block, so that temporaries stay in the cache.
    """
    if y.size <= CACHED:
        return _settle_block(y, magnitude * factor, redo, where)
    out = np.empty(y.shape, np.float32)
    step = max(1, CACHED * len(y) // y.size)
    for start in range(0, len(y), step):
        rows = slice(start, start + step)

        def redo_rows(at: Index, start: int = start) -> Float:
            return redo((at[0] + start, *at[1:]))

        error = _rows_of(magnitude, y, rows) * _rows_of(factor, y, rows)
        out[rows] = _settle_block(y[rows], error, redo_rows, None if where is None else _rows_of(where, y, rows))
    return out


def _settle_block(y: Wide, error: Wide, redo: Redo, where: Mask | None) -> Float:
    """Rounding is monotonic, so equal ends enclose the rounding of the exact value."""
    low = (y - error).astype(np.float32)
    high = (y + error).astype(np.float32)
    differs = low != high  # true for NaN
    if where is not None:
        differs &= where
    if differs.any():
        at = np.nonzero(differs)
        defined = np.isfinite(y[at]) & ~np.isnan(low[at]) & ~np.isnan(high[at])
        if not defined.all():
            high[tuple(axis[~defined] for axis in at)] = np.nan
            at = tuple(axis[defined] for axis in at)
        if len(at[0]):
            high[at] = redo(at)
    if where is not None:
        np.copyto(high, np.float32(0), where=~where)
    high += np.float32(0)  # -0 becomes +0: the real number zero has one representation
    return high


def _rows_of(value: Any, y: Wide, rows: slice) -> Any:
    """The rows of what broadcasts against y; whole where it has no such axis."""
    return value[rows] if np.ndim(value) == y.ndim and len(value) == len(y) else value
