"""How far honest rounding moves logits: a statistical bound for engines that show no taps. It is no proof, and verdicts say so.

The rounding model of the local bounds (`Ball.std`, order-averaged) is sampled: every operation of a float64 walk gets noise of its own
standard deviation, so that a sample sees what first-order adjoints would, and the second order too. Measured with adjoints,
the actual error of honest variants is about a sixth of 6 sigma (NUMERICS 5.1); sigma is estimated from a few samples, pooled over each row, and
therefore doubled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from oracles.ball import Ball, Wide, arithmetic
from oracles.ops.route import rule_of
from oracles.walk import Ids, JudgeModel, walk
from spec.engine import Profile
from spec.weights import philox

SAMPLES = 8
SIGMAS = 6.0
ESTIMATE = 2.0  # 8 samples give sigma within a factor of 2 with a probability of 99 % per element, pooling makes it better


@dataclass(frozen=True, eq=False)
class Rows:
    """What a walk needs: T rows, who sees whom, and which have logits."""

    token: NDArray[np.int64]
    position: NDArray[np.int64]
    visible: NDArray[np.bool_]
    wanted: NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Noise:
    """`reference` and `bound` [wanted, V]: logits in float64, and SIGMAS * ESTIMATE * sigma; the same for cache rows. Rows that are not `decided` may route to other
    experts under honest rounding; nothing is bounded there."""

    reference: Wide
    bound: Wide
    decided: NDArray[np.bool_]  # [wanted]
    cache: tuple[tuple[Wide, Wide], ...]  # per layer (reference, bound) of [latent | k_rope], [T, R + D]
    cache_decided: NDArray[np.bool_]  # [T]

    def shares(self, logits: NDArray[np.float32], at: NDArray[np.intp]) -> Wide:
        """[len(at), V] of the wanted rows `at`: |found - reference| / bound, 0 in rows that are not decided, infinite for NaN and infinity."""
        share: Wide = np.abs(logits[at] - self.reference[at]) / self.bound[at]
        return np.where(self.decided[at, None], np.where(np.isfinite(share), share, np.inf), 0.0)

    def margin_bound(self, row: int, first: int, second: int) -> float:
        """Of the difference of two logits of one row; infinite where the row is not decided."""
        return float(np.hypot(self.bound[row, first], self.bound[row, second])) if self.decided[row] else float("inf")


def log_total(logits: Wide) -> Wide:
    """log sum exp over the last axis, which stays."""
    top = logits.max(-1, keepdims=True)
    total: Wide = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return total


def noise(model: JudgeModel, rows: Rows, profile: Profile, *, log_probs: bool = False) -> Noise:
    """`log_probs`: of log-probabilities instead of logits, for engines that show nothing else."""
    a = arithmetic(profile, True, True)

    def walked(sampler: Sampler) -> Wide:
        logits = walk(model, rows.token, rows.position, rows.visible, rows.wanted, sampler, a).mid
        return logits - log_total(logits) if log_probs else logits

    plain = Sampler(model, None)
    reference = walked(plain)
    square = np.zeros(reference.shape)
    cache_square = [np.zeros(part.shape) for part in plain.cache]
    drift: list[list[Wide]] = []
    for sample in range(SAMPLES):
        sampler = Sampler(model, philox("noise", sample), plain.ids)
        square += np.square(walked(sampler) - reference)
        drift.append(sampler.margins)
        for total, part, exact in zip(cache_square, sampler.cache, plain.cache, strict=True):
            total += np.square(part - exact)
    bound = _bound(reference, square, profile)
    if log_probs:
        # log sum exp: exp and log of the profile, a sum in any order (its standard error), |log Z| <= largest logit + log V
        logits = walk(model, rows.token, rows.position, rows.visible, rows.wanted, Sampler(model, None), a).mid
        vocab = logits.shape[-1]
        bound = bound + profile.u_accumulate * (
            2 * profile.exp_ulp + SIGMAS * math.sqrt(vocab) + 2 * profile.log_ulp * np.abs(log_total(logits)) + np.abs(logits)
        )
    near = np.zeros(len(rows.token), np.bool_)
    for layer, margin in enumerate(plain.margins):
        spread = np.sqrt(np.mean([np.square(sample[layer] - margin) for sample in drift], 0))
        near |= margin <= SIGMAS * ESTIMATE * spread
    decided = ~(near | (rows.visible & near[None, :]).any(1))
    cache = tuple((exact, _bound(exact, total, profile)) for exact, total in zip(plain.cache, cache_square, strict=True))
    return Noise(reference, bound, decided[rows.wanted], cache, decided)


def _bound(reference: Wide, square: Wide, profile: Profile) -> Wide:
    """From the summed squares of the samples' deviations; no element counts as quieter than its row, and each is rounded once on the way out."""
    sigma = np.sqrt(square / SAMPLES)
    pooled = np.sqrt(np.mean(np.square(sigma), -1, keepdims=True))
    last_rounding = np.abs(reference) * max(profile.u_accumulate, profile.u_output)
    return np.asarray(SIGMAS * ESTIMATE * np.maximum(sigma, pooled) + last_rounding)


@dataclass(eq=False)
class Sampler:
    """A `Taps`: adds noise of each ball's std, or nothing without a generator. Experts follow `ids` where they are given."""

    model: JudgeModel
    generator: np.random.Generator | None
    given: dict[int, Ids] | None = None
    ids: dict[int, Ids] = field(default_factory=dict)
    margins: list[Wide] = field(default_factory=list)
    cache: list[Wide] = field(default_factory=list)
    _latent: Wide | None = None

    def has(self, name: str, layer: int) -> bool:
        return True

    def meet(self, name: str, layer: int, predicted: Ball) -> Ball:
        value = predicted.mid
        if self.generator is not None and predicted.std is not None:
            value = value + predicted.std * self.generator.standard_normal(value.shape)
        if name == "latent":
            self._latent = value
        elif name == "k_rope" and self._latent is not None:
            self.cache.append(np.concatenate([self._latent, value], -1))
        return Ball(value)

    def choose(self, layer: int, predicted: Ball) -> Ids:
        c = self.model.config
        rule = rule_of(c)
        bias = self.model.bias(layer)
        self.margins.append(rule.margin(predicted.mid, bias))
        self.ids[layer] = rule.choose(predicted.mid, bias) if self.given is None else self.given[layer]
        return self.ids[layer]
