"""Low-precision formats as raw bits: their exact values, rounding into them, and the weights that are made of bits and scales.

numpy has no bfloat16, float8 or int4, so a tensor of these is an integer array plus the name of its format. Every finite value of
float16, bfloat16 and e4m3 is a float32; a value times its scale is exact in float64 (at most 24 + 11 bits), and in float32 where the
scale is a bfloat16 or float16 number, as int4 checkpoints store it. A float32 scale (fp8 checkpoints) needs up to 28 bits: there the
weight is RN32 of the exact product, one rounding, as DeepSeek's own dequantisation does it. Rounding is to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.exact import Float, Wide

Bits = NDArray[np.integer[Any]]
GROUP = 32  # weights along the contracted axis that share an int4 scale
WORD = 8  # int4 weights in a 32-bit word, the first in the lowest bits
FP8_BLOCK = 128  # rows and columns that share an fp8 scale
E4M3_MAX = 448.0


class FormatError(ValueError):
    """Bits, scales or values that a format does not have; the message says what was found and what is accepted."""


# Values of bits


def from_float16(bits: Bits) -> Float:
    return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)


def from_bfloat16(bits: Bits) -> Float:
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_e4m3(bits: Bits) -> Float:
    """OCP float8 e4m3 ("fn"): bias 7, subnormals, no infinities; 0x7f and 0xff are NaN."""
    return _E4M3[np.asarray(bits, np.uint8)]


def _e4m3_values() -> Float:
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, np.ldexp(fraction / 8.0, -6), np.ldexp(1 + fraction / 8.0, exponent - 7))
    size[(code & 127) == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


_E4M3 = _e4m3_values()


# Rounding into a format


def to_float16(x: Float) -> NDArray[np.uint16]:
    """Overflow gives infinity, as in IEEE 754."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16).view(np.uint16)


def to_bfloat16(x: Float) -> NDArray[np.uint16]:
    """Overflow gives infinity; a NaN stays one."""
    word = np.ascontiguousarray(x, np.float32).view(np.uint32)
    even = (word >> np.uint32(16)) & np.uint32(1)
    rounded = ((word + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), (word >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40), rounded)


def to_e4m3(x: Float) -> NDArray[np.uint8]:
    """Values beyond E4M3_MAX become E4M3_MAX (saturation, as quantisers do); a NaN stays one."""
    size = np.minimum(np.abs(np.asarray(x, np.float64)), E4M3_MAX)
    upper = np.searchsorted(_E4M3[:127].astype(np.float64), size)  # the first code that is not below
    upper = np.minimum(upper, 126)
    lower = np.maximum(upper - 1, 0)
    above, below = _E4M3[upper] - size, size - _E4M3[lower]
    code = np.where((above < below) | ((above == below) & (upper % 2 == 0)), upper, lower)
    code = np.where(np.isnan(x), 127, code)
    return np.asarray(code | (np.signbit(x).astype(np.int64) << 7), np.uint8)


def exact(x: Float) -> Float:
    """float32 itself: nothing is rounded."""
    return x


def rounded_float16(x: Float) -> Float:
    return from_float16(to_float16(x))


def rounded_bfloat16(x: Float) -> Float:
    return from_bfloat16(to_bfloat16(x))


ROUNDED: Mapping[str, Callable[[Float], Float]] = {"float32": exact, "bfloat16": rounded_bfloat16, "float16": rounded_float16}
"""Format of a cache or of weights -> the float32 value of the nearest number of the format. In the order of Config.cache_format."""
UNIT_ROUNDOFF: Mapping[str, float] = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest relative error of a rounding from float32, of numbers in the normal range: half a unit in the last place of 8 and 11 bits."""
SMALLEST_STEP: Mapping[str, float] = {"float32": 0.0, "bfloat16": 2.0**-133, "float16": 2.0**-24}
"""Distance of neighbours below the normal range: half of it is the largest error there."""


# fp8 weights


def dequantised_fp8(bits: Bits, scales: Float, block: int = FP8_BLOCK) -> Wide:
    """bits [M, N] and scales [ceil(M / block), ceil(N / block)] -> the exact products, float64 [M, N]. Raises FormatError.

    Round them to float32 once for weights (RN32).
    """
    rows, columns = bits.shape
    expected = (-(-rows // block), -(-columns // block))
    if scales.shape != expected:
        raise FormatError(
            f"scales have shape {list(scales.shape)}, but {rows} x {columns} weights in blocks of {block} need {list(expected)}"
        )
    spread = np.repeat(np.repeat(scales.astype(np.float64), block, 0)[:rows], block, 1)[:, :columns]
    return np.asarray(from_e4m3(bits) * spread)


def quantised_fp8(weights: Float, block: int = FP8_BLOCK) -> tuple[NDArray[np.uint8], Float]:
    """(bits, scales) of [M, N]; a scale is the largest magnitude of its block over E4M3_MAX, and 1 for a block of zeros."""
    rows, columns = weights.shape
    down, across = -(-rows // block), -(-columns // block)
    padded = np.zeros((down * block, across * block), np.float32)
    padded[:rows, :columns] = np.abs(weights)
    largest = padded.reshape(down, block, across, block).max(axis=(1, 3))
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(E4M3_MAX)).astype(np.float32)
    spread = np.repeat(np.repeat(scales, block, 0)[:rows], block, 1)[:, :columns]
    return to_e4m3((weights / spread).astype(np.float32)), scales


# int4 weights in groups


def packed_int4(values: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
    """[K, N] integers of -8..7 -> [K / 8, N] words: nibble i of a word is row 8 w + i, two's complement. Raises FormatError."""
    if len(values) % WORD or values.min(initial=0) < -8 or values.max(initial=0) > 7:
        raise FormatError(
            f"int4 needs values of -8..7 and a multiple of {WORD} rows; found {values.min()}..{values.max()}, {len(values)} rows"
        )
    nibbles = (values.astype(np.int64) & 15).reshape(-1, WORD, *values.shape[1:]).astype(np.uint32)
    words = np.zeros((len(nibbles), *values.shape[1:]), np.uint32)
    for index in range(WORD):
        words |= nibbles[:, index] << np.uint32(4 * index)
    return words.view(np.int32)


def unpacked_int4(words: NDArray[np.int32]) -> NDArray[np.int8]:
    """The inverse of packed_int4: [K / 8, N] -> [K, N]."""
    raw = np.ascontiguousarray(words).view(np.uint32)
    nibbles = np.stack([(raw >> np.uint32(4 * index)) & np.uint32(15) for index in range(WORD)], 1).astype(np.int8)
    signed = np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.int8)
    return signed.reshape(-1, *words.shape[1:])


def dequantised_int4(words: NDArray[np.int32], scales: Float) -> Float:
    """words [K / 8, N] and scales [K / 32, N] -> float32 weights [K, N], exact. Raises FormatError.

    A product of 4 bits and the scale is a float32 for every bfloat16 and float16 scale, which is what checkpoints hold. For another
    scale it may not be one, and then there is no exact float32 weight.
    """
    groups, columns = scales.shape
    if words.shape != (groups * GROUP // WORD, columns):
        raise FormatError(
            f"{groups} groups of {GROUP} x {columns} need words {[groups * GROUP // WORD, columns]}, found {list(words.shape)}"
        )
    exact_products = unpacked_int4(words).astype(np.float64) * np.repeat(scales.astype(np.float64), GROUP, 0)
    weights = exact_products.astype(np.float32)
    if not (weights == exact_products).all():
        row, column = (int(i) for i in np.argwhere(weights != exact_products)[0])
        raise FormatError(f"the scale of group {row // GROUP}, column {column}, has more than 20 bits: use a bfloat16 or float16 number")
    return weights


def quantised_int4(weights: Float) -> tuple[NDArray[np.int32], Float]:
    """(words, scales) of [K, N], symmetric: a scale is the bfloat16 nearest to the largest magnitude of its group / 7; 1 for zeros."""
    rows, columns = weights.shape
    if rows % GROUP:
        raise FormatError(f"int4 in groups of {GROUP} needs a multiple of {GROUP} rows, found {rows}")
    groups = weights.reshape(-1, GROUP, columns)
    largest = np.abs(groups).max(1)
    scales = rounded_bfloat16(np.where(largest == 0, np.float32(1), largest / np.float32(7)).astype(np.float32))
    values = np.clip(np.rint(groups / scales[:, None]), -8, 7).astype(np.int8)
    return packed_int4(values.reshape(rows, columns)), scales
