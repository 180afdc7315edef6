"""How far honest rounding moves logits: a statistical bound for engines that show no taps. It is no proof, and verdicts say so.

The rounding model of the local bounds (`Ball.std`, order-averaged) is sampled: every operation of a float64 walk gets noise of its own
standard deviation, so that a sample sees what first-order adjoints would, and the second order too. Measured with adjoints,
the actual error of honest variants is about a sixth of 6 sigma (NUMERICS 5.1); sigma is estimated from a few samples, pooled over each row, and
therefore doubled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from oracles.ball import THIRD, Ball, Wide, arithmetic
from oracles.ops.route import rule_of
from oracles.walk import Ids, JudgeModel, walk
from spec.engine import Profile
from spec.formats import ROUNDED, UNIT_ROUNDOFF
from spec.weights import philox

SAMPLES = 8
FEWER = (1, 2, 4)  # samples after which a caller that needs no more may stop
CACHE_SAMPLES = 2  # of a row's noise before it enters the cache, pooled over its elements
KEPT = 2
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
        return np.where(self.decided[at, None], self.raw_shares(logits, at), 0.0)

    def raw_shares(self, logits: NDArray[np.float32], at: NDArray[np.intp]) -> Wide:
        """The same with the rows that are not decided."""
        return shares_of(logits[at] - self.reference[at], self.bound[at])

    def margin_bound(self, row: int, first: int, second: int) -> float:
        """Of the difference of two logits of one row; infinite where the row is not decided, 0 where every engine computes both exactly."""
        return float(np.hypot(self.bound[row, first], self.bound[row, second])) if self.decided[row] else float("inf")


def shares_of(difference: Wide, bound: Wide) -> Wide:
    """|difference| / bound; where the bound is 0, 0 for no difference and infinite for any; infinite for NaN and infinity."""
    size = np.abs(difference)
    share: Wide = np.divide(size, bound, out=np.where(size == 0, 0.0, np.inf), where=bound > 0)
    return np.where(np.isfinite(size), share, np.inf)


def log_total(logits: Wide) -> Wide:
    """log sum exp over the last axis, which stays."""
    top = logits.max(-1, keepdims=True)
    total: Wide = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return total


Enough = Callable[["Noise", float], bool]
"""(noise so far, part) -> whether all that the caller compares stays within `part` of its bounds, in rows that are not decided as well."""


def noise(model: JudgeModel, rows: Rows, profile: Profile, *, log_probs: bool = False, enough: Enough | None = None) -> Noise:
    """`log_probs`: of log-probabilities instead of logits, for engines that show nothing else.

    `enough` is asked after 1, 2 and 4 samples, with part = sqrt(n / SAMPLES): SAMPLES sigma^2 is a sum of squares of which the first n are known,
    so that no bound of all samples is below that part of the bound so far. What is within it is within the bound of all samples as well.
    """
    drawn = _drawn(model, rows, profile, log_probs)
    for count in FEWER if enough is not None else ():
        drawn.grow(count)
        found = drawn.noise()
        if enough is not None and enough(found, math.sqrt(min(1.0, drawn.count / SAMPLES))):
            return found
    drawn.grow(SAMPLES)
    return drawn.noise()


def _drawn(model: JudgeModel, rows: Rows, profile: Profile, log_probs: bool) -> _Drawn:
    """The samples of the last few sessions are kept: a relation is held against the noise of the session that it was made from."""
    key = (id(model), profile, log_probs, *(part.tobytes() for part in (rows.token, rows.position, rows.visible, rows.wanted)))
    if key not in _KEPT:
        while len(_KEPT) >= KEPT:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[key] = _Drawn(model, rows, profile, log_probs)
    return _KEPT[key]


class _Drawn:
    """A walk without noise and the samples so far."""

    def __init__(self, model: JudgeModel, rows: Rows, profile: Profile, log_probs: bool) -> None:
        self.model, self.rows, self.profile, self.log_probs = model, rows, profile, log_probs
        self.count = 0
        self._arithmetic = arithmetic(profile, True, True)
        self._cached = self._rounding() if UNIT_ROUNDOFF[model.config.cache_format] else None
        self._plain = Sampler(model, None, cached=self._cached)
        self._logits, self._reference = self._walked(self._plain)
        self._square = np.zeros(self._reference.shape)
        self._cache_square = [np.zeros(part.shape) for part in self._plain.cache]
        self._drift = [np.zeros(margin.shape) for margin in self._plain.margins]

    def _rounding(self) -> CacheRounding:
        """How far each element of the cache may be off before it is rounded, from samples of a model that rounds nothing there."""
        form = self.model.config.cache_format
        smooth = Sampler(self.model, None, cached=CacheRounding(form, self.rows.visible, smooth=True))
        self._walked(smooth)
        assert smooth.cached is not None
        reach = {tap: np.zeros(value.shape) for tap, value in smooth.cached.before.items()}
        for sample in range(CACHE_SAMPLES):
            cached = CacheRounding(form, self.rows.visible, smooth=True)
            self._walked(Sampler(self.model, philox("cache noise", sample), smooth.ids, cached=cached))
            for tap, value in cached.before.items():
                reach[tap] += np.square(value - smooth.cached.before[tap]) / CACHE_SAMPLES
        pooled = {tap: np.maximum(square, np.mean(square, -1, keepdims=True)) for tap, square in reach.items()}
        return CacheRounding(form, self.rows.visible, {tap: SIGMAS * ESTIMATE * np.sqrt(square) for tap, square in pooled.items()})

    def _walked(self, sampler: Sampler) -> tuple[Wide, Wide]:
        """(logits, what is compared)."""
        r = self.rows
        logits = walk(self.model, r.token, r.position, r.visible, r.wanted, sampler, self._arithmetic).mid
        return logits, logits - log_total(logits) if self.log_probs else logits

    def grow(self, count: int) -> None:
        """At least `count` samples."""
        for sample in range(self.count, count):
            sampler = Sampler(self.model, philox("noise", sample), self._plain.ids, cached=self._cached)
            self._square += np.square(self._walked(sampler)[1] - self._reference)
            for total, part, exact in zip(self._cache_square, sampler.cache, self._plain.cache, strict=True):
                total += np.square(part - exact)
            for total, margin, exact in zip(self._drift, sampler.margins, self._plain.margins, strict=True):
                # a margin is infinite where every expert is chosen, in each sample alike: no rounding moves it
                total += np.square(np.subtract(margin, exact, out=np.zeros(exact.shape), where=np.isfinite(exact)))
        self.count = max(self.count, count)

    def noise(self) -> Noise:
        profile, rows = self.profile.widest, self.rows
        bound = _bound(self._reference, self._square / self.count, profile)
        if self.log_probs:
            # log sum exp: exp and log of the profile, a sum in any order (its standard error), |log Z| <= largest logit + log V
            vocab = self._logits.shape[-1]
            bound = bound + profile.u_accumulate * (
                2 * profile.exp_ulp
                + SIGMAS * math.sqrt(vocab)
                + 2 * profile.log_ulp * np.abs(log_total(self._logits))
                + np.abs(self._logits)
            )
        near = np.zeros(len(rows.token), np.bool_)
        for margin, drift, level in zip(self._plain.margins, self._drift, self._plain.level, strict=True):
            near |= (margin <= SIGMAS * ESTIMATE * np.sqrt(drift / self.count)) & ~(level & (profile.ties == "lowest"))
        decided = ~(near | (rows.visible & near[None, :]).any(1))
        cache = tuple(
            (exact, _bound(exact, total / self.count, profile)) for exact, total in zip(self._plain.cache, self._cache_square, strict=True)
        )
        return Noise(self._reference, bound, decided[rows.wanted], cache, decided)


_KEPT: dict[tuple[object, ...], _Drawn] = {}


def _bound(reference: Wide, variance: Wide, profile: Profile) -> Wide:
    """From the mean squares of the samples' deviations; no element counts as quieter than its row, and each is rounded once on the way out.

    A sum of products that are all exactly zero is zero in every engine, in any order: its bound is 0.
    """
    sigma = np.sqrt(variance)
    pooled = np.sqrt(np.mean(variance, -1, keepdims=True))
    last_rounding = np.abs(reference) * max(profile.u_accumulate, profile.u_output)
    bound = SIGMAS * ESTIMATE * np.maximum(sigma, pooled) + last_rounding
    return np.where((reference == 0) & (variance == 0), 0.0, bound)


@dataclass(eq=False)
class CacheRounding:
    """Numbers that enter a cache of 16 bits are rounded once (M11), and every engine rounds the same way: noise moves a number to a neighbour only
    where it may cross the middle between two, within `reach` of the walk without noise. Such elements are open: they get the noise of a rounding, and
    with them, in later layers, all elements of the rows that see one. All others are what the walk without noise has.

    `smooth`: nothing is rounded, to find out how far noise reaches. `before`: what the last walk had before rounding, by (tap, layer).
    """

    cache_format: str
    visible: NDArray[np.bool_]
    reach: Mapping[tuple[str, int], Wide] = field(default_factory=dict)
    smooth: bool = False
    before: dict[tuple[str, int], Wide] = field(default_factory=dict)
    _open: dict[tuple[str, int], NDArray[np.bool_]] = field(default_factory=dict)

    def enter(self, tap: tuple[str, int], predicted: Ball, generator: np.random.Generator | None) -> Wide:
        # as oracles.walk.rounded has it in its std
        of_rounding = UNIT_ROUNDOFF[self.cache_format] * np.abs(predicted.mid) * math.sqrt(THIRD)
        value = predicted.mid
        if generator is not None and predicted.std is not None:
            own = np.sqrt(np.maximum(np.square(predicted.std) - np.square(of_rounding), 0.0))
            value = value + own * generator.standard_normal(value.shape)
        self.before[tap] = value
        if self.smooth:
            return value
        if tap not in self._open:  # by the first walk, which has no noise
            reach = self.reach[tap]
            crossed = [open_.any(-1) for (_, layer), open_ in self._open.items() if layer < tap[1]]
            shaken = (self.visible & np.any(crossed, 0)[None, :]).any(1) if crossed else np.zeros(len(value), np.bool_)
            self._open[tap] = (self._rounded(value - reach) != self._rounded(value + reach)) | shaken[:, None]
        sharp = self._rounded(value)
        if not self._open[tap].any():
            return sharp
        if generator is not None:
            value = value + of_rounding * generator.standard_normal(value.shape)
        return np.where(self._open[tap], value, sharp)

    def _rounded(self, value: Wide) -> Wide:
        return ROUNDED[self.cache_format](value.astype(np.float32)).astype(np.float64)


@dataclass(eq=False)
class Sampler:
    """A `Taps`: adds noise of each ball's std, or nothing without a generator. Experts follow `ids` where they are given."""

    model: JudgeModel
    generator: np.random.Generator | None
    given: dict[int, Ids] | None = None
    ids: dict[int, Ids] = field(default_factory=dict)
    margins: list[Wide] = field(default_factory=list)
    level: list[NDArray[np.bool_]] = field(default_factory=list)  # per layer: rows of router logits that are all 0, a tie in every engine
    cache: list[Wide] = field(default_factory=list)
    cached: CacheRounding | None = None  # of a cache that rounds
    _latent: Wide | None = None

    def has(self, name: str, layer: int) -> bool:
        return True

    def meet(self, name: str, layer: int, predicted: Ball) -> Ball:
        value = predicted.mid
        if name == "router_scores" and self.level[-1].any():  # exp(0) = 1 and 1 / 2 are exact, and equal logits of a softmax stay equal
            predicted = Ball(value, predicted.rad, None if predicted.std is None else np.where(self.level[-1][:, None], 0.0, predicted.std))
        if self.cached is not None and name in ("latent", "k_rope"):
            value = self.cached.enter((name, layer), predicted, self.generator)
        elif self.generator is not None and predicted.std is not None:
            value = value + predicted.std * self.generator.standard_normal(value.shape)
        if name == "router_logits":
            self.level.append((value == 0).all(-1))
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
