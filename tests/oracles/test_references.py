"""The float64 references at extreme inputs, against 60-digit arithmetic: an oracle that is wrong there condemns honest engines."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest

from oracles.ball import Ball, arithmetic
from oracles.ops import draft_table, rms_norm, router_scores, softmax, swiglu
from spec.engine import Profile

A = arithmetic(Profile())
F = np.float32
EXTREMES = [0.0, -0.0, 1e-38, -1e-30, 1e-8, -3.0, 17.5, -80.0, 88.0, -88.7, 90.0, -104.0, 700.0, -700.0, 1e4, -1e4]
RELATIVE = 2.0**-45  # float64 and its libm, with room: about 2**-20 of the tightest radius


def close(found: float, exact: Any) -> bool:
    return bool(abs(mpmath.mpf(found) - exact) <= RELATIVE * abs(exact) + mpmath.mpf(2) ** -1000)


@pytest.fixture(autouse=True)
def digits() -> Any:
    with mpmath.workdps(60):
        yield


@pytest.mark.parametrize("value", EXTREMES)
def test_sigmoid(value: float) -> None:
    x = np.array([[value]], F)
    assert close(float(router_scores.bound(Ball(x), False, A).mid[0, 0]), 1 / (1 + mpmath.exp(-mpmath.mpf(float(x[0, 0])))))


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("up", [1.0, -1e15, 1e-20])
def test_swiglu(value: float, up: float) -> None:
    gate, other = np.array([[value]], F), np.array([[up]], F)
    exact = mpmath.mpf(float(gate[0, 0])) / (1 + mpmath.exp(-mpmath.mpf(float(gate[0, 0])))) * mpmath.mpf(float(other[0, 0]))
    assert close(float(swiglu.bound(Ball(gate), Ball(other), A).mid[0, 0]), exact)


@pytest.mark.parametrize(
    "row", [[0, 0, 0], [-6e4, -6e4 + 3, -5.9e4], [3e38, 3e38, -3e38], [-1e5, 80, 79.5], [1e-30, -1e-30, 0], [1000, 1000.001, 999]]
)
def test_softmax(row: list[float]) -> None:
    s = np.array([[row]], F)
    with np.errstate(all="ignore"):
        found = softmax.bound(Ball(s), np.ones((1, 1, 3), np.bool_), A)
    powers = [mpmath.exp(mpmath.mpf(float(v)) - mpmath.mpf(float(s.max()))) for v in s[0, 0]]
    assert all(close(float(found.mid[0, 0, j]), powers[j] / sum(powers)) for j in range(3))
    assert found.rad is not None and np.isfinite(found.rad).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1.0, 1e15])
def test_rms_norm(scale: float) -> None:
    x, gain = np.array([[1, -2, 3.5]], F) * F(scale), np.array([1, 0.5, -2], F)
    found = rms_norm.bound(Ball(x), Ball(gain), float(F(1e-6)), A)
    mean = sum(mpmath.mpf(float(v)) ** 2 for v in x[0]) / 3 + mpmath.mpf(float(F(1e-6)))
    assert all(close(float(found.mid[0, j]), mpmath.mpf(float(gain[j])) * mpmath.mpf(float(x[0, j])) / mpmath.sqrt(mean)) for j in range(3))


@pytest.mark.parametrize("row", [[0.0], [20, 19, -40], [-1e4, -1e4, 1e4], [float("-inf"), 3, 2.5], [30000, 29999.5, 0]])
def test_log_softmax(row: list[float]) -> None:
    logits = np.array([row], F)
    ids = np.arange(len(row))[None]
    ball = draft_table.log_softmax(logits, ids, A)
    finite = [mpmath.mpf(float(v)) for v in logits[0] if np.isfinite(v)]
    log_total = mpmath.log(sum(mpmath.exp(v - max(finite)) for v in finite)) + max(finite)
    for token, value in enumerate(logits[0]):
        if np.isneginf(value):
            assert ball.mid[0, token] == -np.inf and ball.rad is not None and ball.rad[0, token] == 0
        else:
            exact = mpmath.mpf(float(value)) - log_total
            assert abs(mpmath.mpf(float(ball.mid[0, token])) - exact) <= mpmath.mpf(2) ** -40 * (1 + abs(exact))


def test_a_square_that_overflows_float32_is_called_open_and_not_wrong() -> None:
    x, gain = np.array([[1e20, 1.0]], F), np.ones(2, F)
    ball = rms_norm.bound(Ball(x), Ball(gain), 1e-6, A)
    assert ball.overflow is not None and ball.overflow.all()
