"""Expert choice (M8, N5): redone exactly on the given scores, group rule and ties included; weights within a bound.

The choice is a set: an engine may list its experts in any order, as long as each weight stands beside its expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.ball import Arithmetic, Ball, Wide, finish
from oracles.compare import Equal, Expected, Near
from oracles.ops.record import Arrays, Params
from spec.config import Config
from spec.ops.route import DEFAULTS
from spec.routing import GROUP_FILL


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    scores, found = inputs["scores"], outputs["ids"]
    given = {**DEFAULTS, **params}
    fill = 0.0 if given["group_fill_zero"] else -np.inf
    rule = Rule(int(params["top_k"]), int(params["groups"]), int(params["top_groups"]), bool(params["group_score_max"]), fill)
    ids = rule.choose(scores, inputs["bias"])
    valid = (found >= 0) & (found < scores.shape[-1])
    own = np.where(valid, found, ids)
    scale, eps, clamp = (float(np.float32(given[name])) for name in ("routed_scale", "denominator_eps", "denominator_clamp"))
    ball = weights(Ball(scores), own, scale, bool(params["norm_top_k"]), eps, a, clamp)
    if a.any_tie:
        ids = np.where(rule.is_tied(scores, inputs["bias"], own)[:, None], own, ids)
    return {"ids": Equal(in_order_of(found, ids), "M8"), "weights": Near(ball)}


@dataclass(frozen=True, slots=True)
class Rule:
    """`top_k` experts out of the `top_groups` best of `groups` groups; a group counts by its best (`by_max`) or its two best. An expert of
    another group counts as `fill`: -inf, or 0, which beats negative choices."""

    top_k: int
    groups: int
    top_groups: int
    by_max: bool
    fill: float = -np.inf

    def choose(self, scores: NDArray[Any], bias: NDArray[Any]) -> NDArray[np.int64]:
        """[T, top_k], best first: by fl32(score + bias) descending, then the lower id; of equal groups the lower one stays."""
        choice = _choice(scores, bias)
        if self.groups > 1:
            allowed = self._kept(self._rank(choice))
            choice = np.where(np.repeat(allowed, choice.shape[1] // self.groups, 1), choice, np.float32(self.fill))
        return np.argsort(-choice, -1, kind="stable")[:, : self.top_k]

    def is_forced(self, scores: Ball, bias: NDArray[Any], ids: NDArray[Any]) -> NDArray[np.bool_]:
        """[T]: `ids` is the choice for all scores within the balls: the kept groups stay ahead of the dropped ones, and the chosen experts of
        the others in kept groups. Rounding to float32 is monotone, so that the ends of the balls decide."""
        rad = 0.0 if scores.rad is None else scores.rad
        low, high = _choice(_down(scores.mid - rad), bias), _choice(_up(scores.mid + rad), bias)
        chosen = np.zeros(low.shape, np.bool_)
        np.put_along_axis(chosen, ids, True, -1)
        forced = np.ones(len(low), np.bool_)
        if self.groups > 1:
            kept = self._kept(self._rank(_choice(scores.mid.astype(np.float32), bias)))
            allowed = np.repeat(kept, low.shape[1] // self.groups, 1)
            forced = _ahead(self._rank(low), self._rank(high), kept, ~kept)
            low, high = (np.where(allowed, end, np.float32(self.fill)) for end in (low, high))
        return np.asarray(forced & _ahead(low, high, chosen, ~chosen))

    def is_explained(self, scores: Ball, bias: NDArray[Any], ids: NDArray[Any]) -> NDArray[np.bool_]:
        """[T]: some scores within the balls give the set `ids`. The witness lifts the chosen experts and lowers the others; with groups it is
        not the only possible one, so every set of distinct experts of at most `top_groups` groups counts as explained."""
        rad = 0.0 if scores.rad is None else scores.rad
        inside = np.clip(ids, 0, scores.mid.shape[1] - 1)
        ordered = np.sort(ids, -1)
        distinct = (inside == ids).all(-1) & (ordered[:, 1:] != ordered[:, :-1]).all(-1)
        if self.groups > 1 and self.fill > -np.inf:
            return np.asarray(distinct)  # experts of dropped groups may be chosen, too
        if self.groups > 1:
            of_group = np.sort(inside // (scores.mid.shape[1] // self.groups), -1)
            return np.asarray(distinct & (1 + (of_group[:, 1:] != of_group[:, :-1]).sum(-1) <= self.top_groups))
        chosen = np.zeros(scores.mid.shape, np.bool_)
        np.put_along_axis(chosen, inside, True, -1)
        witness = self.choose(np.where(chosen, _up(scores.mid + rad), _down(scores.mid - rad)), bias)
        return np.asarray(distinct & (np.sort(witness, -1) == ordered).all(-1))

    def is_tied(self, scores: NDArray[Any], bias: NDArray[Any], ids: NDArray[Any]) -> NDArray[np.bool_]:
        """[T]: `ids` is a choice that some way to break ties gives: of equal groups any may stay, of equal experts any is chosen.

        Where experts of dropped groups count as 0, they are all tied with one another: that is not explored, and nothing counts as a tie."""
        if self.groups > 1 and self.fill > -np.inf:
            return np.zeros(len(ids), np.bool_)
        choice = _choice(scores, bias)
        rank = self._rank(choice) if self.groups > 1 else np.zeros((len(choice), 1), choice.dtype)
        return np.array([self._tied(row, of_group, own) for row, of_group, own in zip(choice, rank, ids, strict=True)], np.bool_)

    def _tied(self, choice: NDArray[Any], rank: NDArray[Any], own: NDArray[Any]) -> bool:
        """One row. Groups above the cut stay, and so do those that `own` needs; the rest of the places goes to groups at the cut that offer
        nothing better than the worst of `own`."""
        if len(set(own.tolist())) != len(own):
            return False
        worst = choice[own].min()
        rest = choice.copy()
        rest[own] = -np.inf
        best_left = rest.reshape(self.groups, -1).max(-1)
        cut = np.sort(rank)[-self.top_groups] if self.groups > 1 else rank[0]
        stays = rank > cut
        stays[own // (len(choice) // self.groups)] = True
        harmless = (rank == cut) & ~stays & (best_left <= worst)
        missing = min(self.top_groups, self.groups) - int(stays.sum())
        return bool((rank[stays] >= cut).all() and (best_left[stays] <= worst).all() and 0 <= missing <= int(harmless.sum()))

    def margin(self, scores: NDArray[Any], bias: NDArray[Any]) -> NDArray[np.float64]:
        """[T]: how far the closest decision is from falling the other way: the last chosen expert, or the last kept group."""
        choice = np.asarray(scores + bias, np.float64)
        gap = np.full(len(choice), np.inf)
        if self.groups > self.top_groups:
            rank = -np.sort(-self._rank(choice), -1)
            gap = rank[:, self.top_groups - 1] - rank[:, self.top_groups]
        if self.groups > 1:
            allowed = self._kept(self._rank(choice))
            choice = np.where(np.repeat(allowed, choice.shape[1] // self.groups, 1), choice, self.fill)
        if self.top_k < choice.shape[1]:
            ordered = -np.sort(-choice, -1)
            gap = np.minimum(gap, ordered[:, self.top_k - 1] - ordered[:, self.top_k])
        return gap

    def _rank(self, choice: NDArray[Any]) -> NDArray[Any]:
        """[T, groups]: the score of each group, in the dtype of `choice`."""
        members = choice.reshape(len(choice), self.groups, -1)
        if self.by_max:
            return np.asarray(members.max(-1))
        two = np.sort(members, -1)[..., -2:]
        return np.asarray(two[..., 0] + two[..., -1])

    def _kept(self, rank: NDArray[Any]) -> NDArray[np.bool_]:
        allowed = np.zeros(rank.shape, np.bool_)
        np.put_along_axis(allowed, np.argsort(-rank, -1, kind="stable")[:, : self.top_groups], True, -1)
        return allowed


def _choice(scores: NDArray[Any], bias: NDArray[Any]) -> NDArray[np.float32]:
    choice: NDArray[np.float32] = (scores + bias).astype(np.float32, copy=False)
    return choice


def _down(values: Wide) -> NDArray[np.float32]:
    """A float32 that is not above."""
    return np.nextafter(values.astype(np.float32), np.float32(-np.inf))


def _up(values: Wide) -> NDArray[np.float32]:
    return np.nextafter(values.astype(np.float32), np.float32(np.inf))


def _ahead(low: NDArray[Any], high: NDArray[Any], first: NDArray[np.bool_], rest: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[T]: every `first` at its lowest is above every `rest` at its highest."""
    return np.asarray(np.where(first, low, np.inf).min(-1) > np.where(rest, high, -np.inf).max(-1))


def in_order_of(found: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[Any]:
    """`ids`, but in the engine's order in rows where the sets agree."""
    if found.shape != ids.shape:
        return ids
    same = (np.sort(found, -1) == np.sort(ids, -1)).all(-1, keepdims=True)
    return np.where(same, found, ids)


def rule_of(config: Config) -> Rule:
    """The rule of a configuration."""
    return Rule(config.top_k, config.groups, config.top_groups, config.group_score == "max", GROUP_FILL[config.group_fill])


def weights(scores: Ball, ids: NDArray[Any], scale: float, renormalise: bool, eps: float, a: Arithmetic, clamp: float = 0.0) -> Ball:
    """scale * s / max(sum s + eps, clamp), or scale * s; a clamp moves no further than its argument, so that it adds no error. rad = |w| (gamma(K + 4) + e_div): K - 1 additions, eps, a reciprocal and its product
    or a division, the scale. With scores of both signs the sum cancels, and its share of the error grows by sum|s| / |sum s|.

    FLUSH: each score may vanish, in the numerator and in the sum. INHERIT: numerator up, denominator down, and the reverse.
    """
    picked = Ball(np.take_along_axis(scores.mid, ids, -1))
    radius = None if scores.rad is None else np.take_along_axis(scores.rad, ids, -1)
    count = ids.shape[-1]
    if not renormalise:
        mid = picked.mid * scale
        rad: Any = a.gamma(1) * np.abs(mid)
        if radius is not None:
            rad = rad + abs(scale) * radius * (1 + a.gamma(1))
        return finish(mid, rad, np.square(mid * a.unit) / 3 if a.statistics else 0.0, a, rad_floor=a.eta * (1 + abs(scale)))
    with np.errstate(divide="ignore", invalid="ignore"):
        total = picked.mid.sum(-1, keepdims=True) + eps
        if clamp:
            total = np.maximum(total, clamp)
        size = picked.absolute.sum(-1, keepdims=True) + abs(eps)
        mid = picked.mid * scale / total
        of_sum = a.gamma(count + 1) * size / np.abs(total)
        lost = 2 * a.eta * (count + 1) * (1 + abs(scale)) / np.abs(total)
        growth = (1 + a.gamma(3)) * (1 + a.div) / (1 - np.minimum(of_sum, 0.5)) - 1
        growth = np.where(of_sum < 0.5, growth, np.inf)
        rad = np.abs(mid) * growth + lost
        if radius is not None:
            low = np.maximum(np.abs(total) - radius.sum(-1, keepdims=True), clamp)
            inherited = abs(scale) * (picked.absolute + radius) / low - np.abs(mid)
            rad = inherited + rad + inherited * growth
    variance = np.square(mid * a.unit) * (count + 3) / 3 if a.statistics else 0.0
    return finish(mid, rad, variance, a, rad_floor=2 * a.eta)
