"""Int4 products: what honest kernels may do, in float32 and under the profile int4-g32, and what they may not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from oracles.judge import judge_op
from oracles.judgement import FINDINGS
from spec.engine import PROFILES
from spec.formats import dequantised_int4, quantised_int4, rounded_bfloat16, unpacked_int4
from spec.script import OpCall
from spec.weights import philox

F = np.float32
ROWS, GROUPS, COLUMNS = 5, 4, 9


def call() -> OpCall:
    draw = philox("int4")
    words, scales = quantised_int4(draw.standard_normal((32 * GROUPS, COLUMNS)).astype(F))
    inputs = {"x": draw.standard_normal((ROWS, 32 * GROUPS)).astype(F), "packed": words, "scales": scales}
    return OpCall("int4_matmul", inputs, {}, {"out": ((ROWS, COLUMNS), "float32")})


def by_weights(x: np.ndarray, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return x @ dequantised_int4(packed, scales)


def by_groups(x: np.ndarray, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The scale meets the sum of a group, as kernels with integer or tensor-core products do it."""
    parts = np.einsum("tgk,gkn->tgn", x.reshape(ROWS, GROUPS, 32), unpacked_int4(packed).reshape(GROUPS, 32, -1).astype(F))
    out = np.zeros((ROWS, COLUMNS), F)
    for group in range(GROUPS):
        out += parts[:, group].astype(F) * scales[group]
    return out


def in_bfloat16(x: np.ndarray, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Marlin in small: activations and dequantised weights in bfloat16, float32 sums, a bfloat16 result."""
    return rounded_bfloat16(rounded_bfloat16(x) @ rounded_bfloat16(dequantised_int4(packed, scales)))


def next_group(x: np.ndarray, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return by_weights(x, packed, np.roll(scales, 1, axis=0))


def offset_by_one(x: np.ndarray, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """A zero point of 7 instead of 8."""
    return x @ (dequantised_int4(packed, scales) + np.repeat(scales, 32, 0))


def high_nibble_first(x: np.ndarray, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    rows = unpacked_int4(packed).reshape(-1, 8, COLUMNS)[:, ::-1].reshape(-1, COLUMNS)
    return x @ (rows.astype(F) * np.repeat(scales, 32, 0))


def is_wrong(kernel: Callable[..., np.ndarray], profile: str) -> bool:
    made = call()
    return any(j.verdict in FINDINGS for j in judge_op(made, {"out": kernel(**made.inputs).astype(F)}, PROFILES[profile]))


@pytest.mark.parametrize("profile", ["float32-any-order", "int4-g32"])
@pytest.mark.parametrize("kernel", [by_weights, by_groups])
def test_float32_kernels_pass(kernel: Callable[..., np.ndarray], profile: str) -> None:
    assert not is_wrong(kernel, profile)


def test_a_kernel_in_bfloat16_passes_under_its_own_profile_only() -> None:
    assert not is_wrong(in_bfloat16, "int4-g32")
    assert is_wrong(in_bfloat16, "float32-any-order")


@pytest.mark.parametrize("profile", ["float32-any-order", "int4-g32"])
@pytest.mark.parametrize("kernel", [next_group, offset_by_one, high_nibble_first])
def test_wrong_scales_offsets_and_orders_fail_under_both(kernel: Callable[..., np.ndarray], profile: str) -> None:
    assert is_wrong(kernel, profile)
