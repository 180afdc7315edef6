"""Draft table: candidates exactly by (logit descending, id ascending) (T4), log-probabilities within the log-softmax bound (T2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.ball import INFLATE, Arithmetic, Ball
from oracles.compare import Equal, Expected, Near
from oracles.ops.record import Arrays, Params
from oracles.ops.softmax import weight_error


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    logits = inputs["logits"]
    width = min(int(params["budget"]), logits.shape[1])
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :width]
    ball = log_softmax(logits, ids, a)
    return {"ids": Equal(ids, "T4"), "log_probs": Near(ball, "T2")}


def log_softmax(logits: NDArray[Any], ids: NDArray[Any], a: Arithmetic) -> Ball:
    """logit - logZ at `ids` [L, K]; -inf logits are exactly -inf (T8).

    L = log sum e^(x - m) is off by b/(1 - b) + e_log L, with b = beta + gamma(V)(1 + beta), beta = sum p alpha, V the finite
    logits. Then either x - fl(m + L) or fl(x - m) - L: u max(d, |m + L|), with the error of L, and the last rounding u |result|.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        wide = logits.astype(np.float64)
        top = wide.max(1, keepdims=True, initial=-np.inf)
        finite = wide > -np.inf
        gap = np.where(finite, top - wide, 0.0)
        power = np.where(finite, np.exp(-gap), 0.0)
        total = power.sum(1, keepdims=True)
        log_total = np.log(total)
        alpha, _ = weight_error(np.where(finite, wide, 0.0), np.where(top == -np.inf, 0.0, top), gap, a, 0)
        beta = np.einsum("lv,lv->l", power, alpha)[:, None] / np.maximum(total, 1.0)
        count = max(1, logits.shape[1])
        of_sum = beta + a.gamma(a.roundings(count)) * (1 + beta)
        of_log = np.where(of_sum < 0.5, of_sum / (1 - np.minimum(of_sum, 0.5)), np.inf) + a.log * log_total
        picked = np.take_along_axis(wide, ids, 1)
        mid = (picked - top) - log_total
        largest = np.maximum(np.abs(picked - top), np.abs(top + log_total))
        rad = of_log + a.unit * (largest + of_log) + a.unit * (np.abs(mid) + of_log)
        rad = rad + a.output * (np.abs(mid) + rad)
        hopeless = picked == -np.inf
        mid, rad = np.where(hopeless, -np.inf, mid), np.where(hopeless, 0.0, rad * INFLATE + 2 * a.eta)
        std: Any = None
        if a.statistics:
            variance = (
                np.square(a.unit * (picked - top)) + a.unit**2 * (count / 3 + 1) + (a.exp / 2) ** 2 + np.square(a.log * log_total / 2)
            )
            std = np.where(hopeless, 0.0, np.sqrt((variance + np.square(a.unit * mid) + np.square(a.unit * largest)) / 3))
    return Ball(mid, rad, std)
