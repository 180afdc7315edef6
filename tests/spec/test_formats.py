"""Formats by exhaustive enumeration: every bit pattern has the value that its definition says, and rounding finds the nearest of them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from spec import formats
from spec.formats import FormatError
from spec.weights import philox

# name -> (exponent bits, fraction bits, decode, encode); bias 2**(e-1) - 1
BINARY = {
    "float16": (5, 10, formats.from_float16, formats.to_float16),
    "bfloat16": (8, 7, formats.from_bfloat16, formats.to_bfloat16),
    "e4m3": (4, 3, formats.from_e4m3, formats.to_e4m3),
}


def defined(code: int, exponent_bits: int, fraction_bits: int) -> Fraction:
    """sign * 2^(e - bias) * 1.f, or 2^(1 - bias) * 0.f; of a code whose exponent is not reserved."""
    bias = 2 ** (exponent_bits - 1) - 1
    fraction, exponent = code % 2**fraction_bits, code >> fraction_bits & 2**exponent_bits - 1
    sign = -1 if code >> (fraction_bits + exponent_bits) else 1
    if exponent == 0:
        return sign * Fraction(fraction, 2**fraction_bits) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(fraction, 2**fraction_bits)) * Fraction(2) ** (exponent - bias)


@pytest.mark.parametrize("name", BINARY)
def test_every_pattern_has_the_value_of_its_definition_and_comes_back(name: str) -> None:
    exponent_bits, fraction_bits, decode, encode = BINARY[name]
    codes = np.arange(2 ** (1 + exponent_bits + fraction_bits))
    values = decode(codes)
    reserved = 2**exponent_bits - 1
    special = (codes >> fraction_bits & reserved) == reserved if name != "e4m3" else (codes & 127) == 127
    assert np.isfinite(values[~special]).all() and not np.isfinite(values[special]).any()
    for code in codes[~special].tolist():
        assert Fraction(float(values[code])) == defined(code, exponent_bits, fraction_bits)
    assert np.array_equal(encode(values[~special]), codes[~special])


@pytest.mark.parametrize("name", BINARY)
def test_rounding_is_to_the_nearest_and_to_even_at_midpoints(name: str) -> None:
    """Between all neighbours: the midpoint, and the float32 on both sides of it (every midpoint is a float32)."""
    exponent_bits, fraction_bits, decode, encode = BINARY[name]
    codes = np.arange(2 ** (exponent_bits + fraction_bits) - 1)
    lower, upper = decode(codes), decode(codes + 1)
    inside = np.isfinite(lower) & np.isfinite(upper)
    codes, lower, upper = codes[inside], lower[inside].astype(np.float64), upper[inside].astype(np.float64)
    middle = ((lower + upper) / 2).astype(np.float32)
    if name != "bfloat16":  # whose smallest midpoint is as small as float32 gets, and exact
        assert (middle.astype(np.float64) * 2 == lower + upper).all()
    assert np.array_equal(encode(middle), codes + codes % 2)
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
    assert np.array_equal(encode(below), codes) and np.array_equal(encode(above), codes + 1)
    assert np.array_equal(encode(-below) & (2 ** (exponent_bits + fraction_bits) - 1), codes)


def test_what_lies_beyond_a_format() -> None:
    assert formats.from_float16(formats.to_float16(np.float32([65519.996, 65520, 1e9]))).tolist() == [65504, np.inf, np.inf]
    assert formats.from_bfloat16(formats.to_bfloat16(np.float32([3.4e38, -np.inf]))).tolist() == [np.inf, -np.inf]
    assert formats.from_e4m3(formats.to_e4m3(np.float32([447, 449, -1e9]))).tolist() == [448, 448, -448]
    for name, (_, _, decode, encode) in BINARY.items():
        assert np.isnan(decode(encode(np.float32([np.nan])))).all(), name


def test_int4_words_hold_every_value_at_every_place() -> None:
    for place in range(formats.WORD):
        values = np.zeros((8, 16), np.int64)
        values[place] = np.arange(-8, 8)
        words = formats.packed_int4(values)
        assert words.shape == (1, 16) and np.array_equal(formats.unpacked_int4(words), values)
        assert np.array_equal(words[0].view(np.uint32), (np.arange(-8, 8) & 15).astype(np.uint32) << np.uint32(4 * place))
    with pytest.raises(FormatError, match=r"needs values of -8\.\.7"):
        formats.packed_int4(np.full((8, 1), 8))


@pytest.mark.parametrize("decode", [formats.from_bfloat16, formats.from_float16])
def test_an_int4_weight_is_exact_for_every_16_bit_scale(decode: object) -> None:
    """Every finite scale whose products neither overflow nor underflow, times each of the 16 values, is a float32."""
    scales = np.asarray(decode(np.arange(65536)))  # type: ignore[operator]
    scales = scales[np.isfinite(scales) & (np.abs(scales) < 2.0**120)]
    products = np.arange(-8, 8)[:, None] * scales.astype(np.float64)
    assert np.array_equal(products.astype(np.float32).astype(np.float64), products)


def test_a_scale_of_too_many_bits_is_refused() -> None:
    words = formats.packed_int4(np.full((32, 1), 7))
    with pytest.raises(FormatError, match=r"the scale of group 0, column 0, has more than 20 bits"):
        formats.dequantised_int4(words, np.float32([[1 + 2.0**-23]]))
    assert formats.dequantised_int4(words, np.float32([[1.5]]))[0, 0] == 10.5


def test_fp8_products_are_exact_in_float64_block_by_block() -> None:
    draw = philox("fp8 blocks")
    bits = draw.integers(0, 256, (130, 300)).astype(np.uint8)
    bits[(bits & 127) == 127] = 0
    scales = draw.standard_normal((2, 3)).astype(np.float32)
    value = formats.dequantised_fp8(bits, scales)
    for row, column in ((0, 0), (127, 128), (128, 127), (129, 299), (5, 256)):
        product = Fraction(float(formats.from_e4m3(bits[row, column]))) * Fraction(float(scales[row // 128, column // 128]))
        assert Fraction(float(value[row, column])) == product
    with pytest.raises(FormatError, match=r"scales have shape \[2, 2\], but 130 x 300 weights in blocks of 128 need \[2, 3\]"):
        formats.dequantised_fp8(bits, scales[:, :2])


def test_quantising_stays_within_half_a_step() -> None:
    weights = philox("quantised").standard_normal((64, 40)).astype(np.float32)
    words, scales = formats.quantised_int4(weights)
    error = np.abs(formats.dequantised_int4(words, scales) - weights)
    clipped = np.repeat(scales, 32, 0) * (0.5 + 8 * 2.0**-8)  # a bfloat16 scale may be 2**-8 below largest / 7
    assert (error <= clipped).all()
    bits, block_scales = formats.quantised_fp8(weights)
    assert (
        np.abs(formats.dequantised_fp8(bits, block_scales) - weights) <= np.abs(weights) * 2.0**-4 + block_scales.max() * 2.0**-10
    ).all()
