"""How a draft tree is accepted: greedily, by one of two sampling schemes that keep the target's law, or by a named lossy mode (A1-A3, A6, S4, S5).

A scheme decides at one node; `accept` walks. Randomness comes through `Chance`, so that the same code runs on keyed noise and
under exact enumeration (oracles/law.py). Draft trees are deterministic: no scheme may treat a child as if it had been sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spec.exact import Float, Wide
from spec.sampling import COIN, Sampling, gumbel_argmax, keyed_uniforms, probabilities, scaled_logits
from spec.tree import Acceptance, Tree, accept_greedy


class LossyError(ValueError):
    """A scheme that changes the target's law was asked for without saying so."""


@dataclass(frozen=True)
class Place:
    """Whose token is drawn, and at which absolute position of the sequence it will stand: the key of the noise (S3)."""

    sequence: int
    position: int


class Chance(Protocol):
    """Independent draws; two calls with the same place and method give the same answer where the source is keyed."""

    def token(self, z: Wide, place: Place) -> int:
        """A token of softmax(z)."""
        ...

    def pick(self, weights: Wide, place: Place) -> int:
        """An index with a probability in proportion to its weight; never one of weight 0."""
        ...


@dataclass(frozen=True)
class KeyedChance:
    """Philox noise keyed by (seed, sequence, position), whatever was drawn before (S3)."""

    seed: int

    def token(self, z: Wide, place: Place) -> int:
        return gumbel_argmax(z, keyed_uniforms(self.seed, place.sequence, place.position, len(z)))

    def pick(self, weights: Wide, place: Place) -> int:
        (uniform,) = keyed_uniforms(self.seed, place.sequence, place.position, 1, COIN).tolist()
        ends = np.cumsum(weights)
        index = int(np.searchsorted(ends, uniform * ends[-1], side="right"))
        return min(index, int(np.flatnonzero(weights)[-1]))


class Scheme(Protocol):
    """One decision: z [V] is the target's row at a node, `children` the tokens of its children by rank, `proposal` their drafted
    probabilities. Returns the token at this place, and whether the walk goes on through the child that holds it."""

    def __call__(self, z: Wide, children: Sequence[int], proposal: Sequence[float], chance: Chance, place: Place) -> tuple[int, bool]: ...


# Schemes that keep the law (A2)


def sample_and_match(z: Wide, children: Sequence[int], proposal: Sequence[float], chance: Chance, place: Place) -> tuple[int, bool]:
    """Draw from the target, go on where a child holds the token. With keyed noise the tokens are those of sequential decoding."""
    token = chance.token(z, place)
    return token, token in children


def target_only_coin(z: Wide, children: Sequence[int], proposal: Sequence[float], chance: Chance, place: Place) -> tuple[int, bool]:
    """One coin chooses a child by its target mass, or none; then an independent draw from the target without the children."""
    return threshold_coin(z, children, proposal, chance, place)


def threshold_coin(
    z: Wide,
    children: Sequence[int],
    proposal: Sequence[float],
    chance: Chance,
    place: Place,
    *,
    single: float = 1.0,
    accumulated: float = 1.0,
) -> tuple[int, bool]:
    """The coin with the two thresholds of SGLang, which accept more than the target allows as soon as one is below 1 (lossy).

    A child is taken where coin <= (mass of the children so far) / accumulated, or at once where its own mass reaches `single`.
    """
    if not children:
        return chance.token(z, place), False
    mass = probabilities(z)[list(children)]
    ends = np.minimum(np.cumsum(mass) / accumulated, 1.0)
    sure = np.flatnonzero(mass >= single)
    if len(sure):
        ends[sure[0] :] = 1.0
    rest = z.copy()
    rest[list(children)] = -np.inf
    open_share = 1.0 - float(ends[-1]) if (rest > -np.inf).any() else 0.0
    taken = chance.pick(np.array([*np.diff(ends, prepend=0.0), open_share]), place)
    return (children[taken], True) if taken < len(children) else (chance.token(rest, place), False)


EXACT: dict[str, Scheme] = {"sample-and-match": sample_and_match, "target-only-coin": target_only_coin}


# Lossy modes: known by name, never a default


def leviathan(z: Wide, children: Sequence[int], proposal: Sequence[float], chance: Chance, place: Place) -> tuple[int, bool]:
    """min(1, p/q) child by child, then the residual max(p - q, 0). Right for children sampled from q; these were not."""
    p = probabilities(z)
    for token, q in zip(children, proposal, strict=True):
        accept = min(1.0, p[token] / q) if q > 0 else 1.0
        if chance.pick(np.array([accept, 1.0 - accept]), place) == 0:
            return token, True
        p[token] = max(p[token] - q, 0.0)
        p /= p.sum()
    with np.errstate(divide="ignore"):
        return chance.token(np.log(p), place), False


def typical(
    z: Wide,
    children: Sequence[int],
    proposal: Sequence[float],
    chance: Chance,
    place: Place,
    *,
    threshold: float = 0.3,
    alpha: float = 0.09,
) -> tuple[int, bool]:
    """Medusa: the first child whose target mass exceeds min(threshold, alpha * exp(-entropy)), without any draw."""
    p = probabilities(z)
    positive = p[p > 0]
    limit = min(threshold, alpha * float(np.exp((positive * np.log(positive)).sum())))
    for token in children:
        if p[token] > limit:
            return token, True
    return chance.token(z, place), False


def lossy_threshold(z: Wide, children: Sequence[int], proposal: Sequence[float], chance: Chance, place: Place) -> tuple[int, bool]:
    """`threshold_coin` with both thresholds at 0.5."""
    return threshold_coin(z, children, proposal, chance, place, single=0.5, accumulated=0.5)


LOSSY: dict[str, Scheme] = {"leviathan": leviathan, "typical": typical, "target-only-threshold": lossy_threshold}


def scheme(name: str, *, allow_lossy: bool = False) -> Scheme:
    """The named scheme. Raises LossyError for a lossy one that is not allowed, KeyError for an unknown name."""
    if name in LOSSY and not allow_lossy:
        raise LossyError(f"{name} changes the target's law: say allow_lossy=True, or choose one of {', '.join(EXACT)}")
    known = EXACT | LOSSY
    if name not in known:
        raise KeyError(f"there is no acceptance scheme {name!r}: choose one of {', '.join(known)}")
    return known[name]


# The walk


class Decider(Protocol):
    """Accepts a path of a tree of any size, the root alone included. `history` is the prompt and everything emitted, the root last;
    `logits` [N + 1, V]."""

    def accept(self, sequence: int, history: Sequence[int], prompt_len: int, tree: Tree, logits: Float) -> Acceptance: ...


@dataclass(frozen=True)
class Greedy:
    """The argmax of each row, lowest id among equals (A1)."""

    def accept(self, sequence: int, history: Sequence[int], prompt_len: int, tree: Tree, logits: Float) -> Acceptance:
        return accept_greedy(tree.tokens, tree.parents, logits.argmax(axis=1))


@dataclass(frozen=True)
class Sampler:
    """Draws from each row's distribution with the history of the node's own path (A6)."""

    sampling: Sampling
    scheme: Scheme = sample_and_match
    chance: Chance | None = None  # None: keyed by the seed of `sampling`

    def accept(self, sequence: int, history: Sequence[int], prompt_len: int, tree: Tree, logits: Float) -> Acceptance:
        """Raises SamplingError for a row that is no distribution."""
        chance = self.chance or KeyedChance(self.sampling.seed)
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        path, context = [0], list(history)
        while True:
            node = path[-1]
            children = [child for child in range(node + 1, len(parents)) if parents[child] == node]
            z = scaled_logits(self.sampling, logits[node], context, prompt_len)
            proposal = [float(np.exp(tree.scores[child] - tree.scores[node])) for child in children]
            place = Place(sequence, len(context))
            token, accepted = self.scheme(z, [tokens[child] for child in children], proposal, chance, place)
            if not accepted:
                return Acceptance(tuple(path), token)
            path.append(next(child for child in children if tokens[child] == token))
            context.append(token)
