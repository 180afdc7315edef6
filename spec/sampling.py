"""Sampling: which distribution a row of logits stands for, and how one token is drawn from it (rules S1-S5, A6).

The distribution is softmax(z), where z is made from the row by float64 operations in a fixed order, each rounded once (S1), so
that z has the same bits everywhere. Every decision on z - what min-p and top-p keep, which token has the largest z + noise - is
that of the exact real numbers: float64 decides where its error cannot matter, decimal arithmetic decides the rest. So sampled
tokens are golden as greedy ones are. How a tree is walked with such draws is in spec/schemes.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import LIBM
from spec.exact import UNIT64, Float, Wide, precision

TOP_K_TIES = ("lowest", "all")
SEED_MAX = 2**64 - 1
DIGITS_MAX = 1600  # of a comparison; equal numbers are told apart by algebra first, so that the first 40 digits nearly always decide
NOISE, COIN = 0, 1  # purposes: independent streams at one position


class SamplingError(ValueError):
    """Sampling parameters or logits outside the domain; the message names the field, what was found and what is accepted."""


@dataclass(frozen=True)
class Sampling:
    """Fields as in vLLM and the OpenAI protocol. The defaults leave softmax(logits) as it is; temperature 0 is greedy.

    Penalties count tokens: repetition those of the prompt and everything after it, presence and frequency those after the
    prompt only, both with the path of the node (A6).
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    top_k_ties: str = "lowest"  # llama.cpp, SGLang: exactly k, lowest ids first; "all": every equal of the k-th (transformers, vLLM)
    seed: int = 0

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, accepted: str) -> None:
            if not ok:
                raise SamplingError(f"{name} is {getattr(self, name)!r}, but must be {accepted}")

        check("temperature", 0 <= self.temperature < math.inf, "finite and at least 0 (0: greedy)")
        check("top_k", self.top_k >= 0, "at least 0 (0: all)")
        check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "finite and above 0")
        check("presence_penalty", math.isfinite(self.presence_penalty), "finite")
        check("frequency_penalty", math.isfinite(self.frequency_penalty), "finite")
        check("logit_bias", all(t >= 0 and b < math.inf for t, b in self.logit_bias), "pairs (token, bias below +inf)")
        check("logit_bias", len({t for t, _ in self.logit_bias}) == len(self.logit_bias), "one pair per token")
        check("top_k_ties", self.top_k_ties in TOP_K_TIES, f"one of {', '.join(TOP_K_TIES)}")
        check("seed", 0 <= self.seed <= SEED_MAX, f"between 0 and {SEED_MAX}")


def as_parameters(sampling: Sampling) -> dict[str, int | float]:
    """The flat (key, int | double) pairs that cross the C ABI."""
    out: dict[str, int | float] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_k_ties_all": int(sampling.top_k_ties == "all"),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": sampling.seed,
    }
    return out | {f"logit_bias:{token}": float(bias) for token, bias in sampling.logit_bias}


def scaled_logits(sampling: Sampling, logits: Float, history: Sequence[int], prompt_len: int) -> Wide:
    """z [V], float64, -inf for tokens that cannot be drawn; the row's distribution is softmax(z) (S1).

    `history` is everything before the token that is drawn: prompt, emitted tokens, and the path of the node (A6). Order: bias,
    repetition, frequency, presence, temperature, min-p, top-k, top-p. Temperature 0 leaves the best token alone (S2).
    Raises SamplingError for NaN, +inf, or a row of -inf only.
    """
    z = penalised(sampling, logits, history, prompt_len)
    if np.isnan(z).any() or (z == np.inf).any() or not (z > -np.inf).any():
        raise SamplingError("a row of logits must be finite or -inf, and hold at least one finite number")
    if sampling.temperature == 0:
        only = np.full(len(z), -np.inf)
        only[z.argmax()] = 0.0  # argmax takes the lowest index (A1)
        return only
    with np.errstate(over="ignore"):  # a tiny temperature: +-inf, refused or masked below
        z = z / sampling.temperature
    if (z == np.inf).any() or not (z > -np.inf).any():
        raise SamplingError(f"temperature {sampling.temperature} takes a logit out of float64: use 0 for greedy")
    _keep_min_p(z, sampling.min_p)
    _keep_top_k(z, sampling.top_k, sampling.top_k_ties)
    _keep_top_p(z, sampling.top_p)
    return z


def probabilities(z: Wide) -> Wide:
    """softmax(z) in float64, within some units of 2**-53 of each value; for laws and coins, where no golden decision hangs on it."""
    weights = np.exp(z - z.max())
    shares: Wide = weights / weights.sum()
    return shares


def gumbel_argmax(z: Wide, uniforms: Wide) -> int:
    """The index of the largest z - log(-log(u)), exactly, lowest index first: a draw from softmax(z) where u are uniform (S3).

    The keys of two candidates are equal only where z and u are; or z_i - z_j is a logarithm of a ratio of logarithms of
    dyadic numbers, which no float64 is known to be, and the comparison gives up with ArithmeticError.
    """
    support = np.flatnonzero(z > -np.inf)
    if len(support) == 1:
        return int(support[0])
    noise = -np.log(-np.log(uniforms[support]))
    keys = z[support] + noise
    # log(u) is off by LIBM relative, so that the outer log is off by LIBM and by its own LIBM relative; then one addition
    error = LIBM * (1 + 2 * np.abs(noise)) + 2 * UNIT64 * (np.abs(z[support]) + np.abs(noise))
    best = int(keys.argmax())
    near = support[keys + error >= keys[best] - error[best]]
    winner = int(near[0])
    for rival in near[1:].tolist():
        if _beats(float(z[rival]), float(uniforms[rival]), float(z[winner]), float(uniforms[winner])):
            winner = rival
    return winner


def keyed_uniforms(seed: int, sequence: int, position: int, count: int, purpose: int = NOISE) -> Wide:
    """[count] numbers in (0, 1): (2 k + 1) 2**-53, k the upper 52 bits of word i of Philox4x64-10 (S3).

    Key (seed, position); counter (i // 4 + 1, sequence, purpose, 0), word i % 4. `position` is the absolute position of the token
    that is drawn, so that sequential and tree decoding, whatever their rounds, use the same numbers for the same token.
    """
    bits = np.random.Philox(key=np.array([seed, position], np.uint64), counter=np.array([0, sequence, purpose, 0], np.uint64))
    words: NDArray[np.uint64] = bits.random_raw(count)
    uniforms: Wide = ((words >> np.uint64(11)) | np.uint64(1)).astype(np.float64) * 2.0**-53
    return uniforms


# The steps of S1, each in place where it only removes tokens


def penalised(sampling: Sampling, logits: Float, history: Sequence[int], prompt_len: int) -> Wide:
    """[V] after bias and penalties, before temperature and truncation; arguments as `scaled_logits`."""
    z = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        if token >= len(z):
            raise SamplingError(f"logit_bias names token {token}, but the vocabulary has {len(z)}")
        z[token] += bias
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.asarray(history, np.int64))
        z[seen] = np.where(z[seen] > 0, z[seen] / sampling.repetition_penalty, z[seen] * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in sorted(Counter(history[prompt_len:]).items()):
            z[token] -= sampling.frequency_penalty * count
            z[token] -= sampling.presence_penalty
    return z


def _keep_min_p(z: Wide, min_p: float) -> None:
    """Tokens whose probability is at least min_p times the largest: z - max >= log(min_p)."""
    if not min_p:
        return
    gap, limit = z - z.max(), math.log(min_p)
    error = LIBM * abs(limit) + UNIT64 * np.where(z > -np.inf, np.abs(gap), 0)
    dropped = gap < limit
    for token in np.flatnonzero((np.abs(gap - limit) <= 2 * error) & (z > -np.inf)).tolist():
        dropped[token] = not _reaches_share(Fraction(float(z[token])) - Fraction(float(z.max())), min_p)
    z[dropped] = -np.inf


def _keep_top_k(z: Wide, top_k: int, ties: str) -> None:
    if not 0 < top_k < len(z):
        return
    order = np.argsort(-z, kind="stable")  # descending, lowest id first among equals
    if ties == "lowest":
        z[order[top_k:]] = -np.inf
    else:
        z[z < z[order[top_k - 1]]] = -np.inf


def _keep_top_p(z: Wide, top_p: float) -> None:
    """The shortest head of the tokens, by (z descending, id ascending), whose mass reaches top_p: a token stays while the mass before
    it is below top_p."""
    if top_p == 1:
        return
    order = np.argsort(-z, kind="stable")
    order = order[z[order] > -np.inf]
    values = z[order]
    gaps = values[0] - values
    weights = np.exp(-gaps)
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    total = float(weights.sum())
    # per weight: exp is off by LIBM, and by the rounding of its argument; the sums by one unit per term
    error = float((weights * (LIBM + gaps * UNIT64)).sum()) + (len(weights) + 2) * UNIT64 * total
    margin = before - top_p * total
    kept = margin < 0
    for rank in np.flatnonzero(np.abs(margin) <= 2 * error).tolist():
        kept[rank] = not _mass_reaches([float(value) for value in values], rank, top_p)
    z[order[~kept]] = -np.inf


# Comparisons of exact real numbers


def _sign(evaluate: Callable[[int], tuple[Decimal, Decimal]]) -> int:
    """The sign of a number that is not 0; evaluate(digits) -> (value, bound of its error)."""
    digits = 40
    while digits <= DIGITS_MAX:
        with precision(digits):
            value, error = evaluate(digits)
            if abs(value) > error:
                return 1 if value > 0 else -1
        digits *= 2
    raise ArithmeticError(f"two keys agree to {DIGITS_MAX} digits, though they are not known to be equal")


def _beats(z: float, u: float, other_z: float, other_u: float) -> bool:
    """z - log(-log u) > other_z - log(-log other_u), that is, -log(u) e^-z < -log(other_u) e^-other_z."""
    if z == other_z or u == other_u:
        return (z, u) > (other_z, other_u)

    def difference(digits: int) -> tuple[Decimal, Decimal]:
        keys = [Decimal(a) - (-Decimal(b).ln()).ln() for a, b in ((z, u), (other_z, other_u))]
        # near u = 1 the logarithm -log u >= 2**-53 has lost nothing: Decimal.ln is correctly rounded
        scale = 1 + abs(Decimal(z)) + abs(Decimal(other_z)) + 100
        return keys[0] - keys[1], scale * Decimal(10) ** (2 - digits)

    return _sign(difference) > 0


def _reaches_share(gap: Fraction, share: float) -> bool:
    """e^gap >= share, gap <= 0 < share. Equal only for gap 0 and share 1: e to a rational power other than 0 is irrational."""
    if gap == 0 or share == 1:
        return gap == 0

    def difference(digits: int) -> tuple[Decimal, Decimal]:
        exact = Decimal(gap.numerator) / Decimal(gap.denominator)
        limit = Decimal(share).ln()
        return exact - limit, (1 + abs(exact) + abs(limit)) * Decimal(10) ** (2 - digits)

    return _sign(difference) > 0


def _mass_reaches(values: list[float], rank: int, share: float) -> bool:
    """sum of e^v over the first `rank` values >= share * sum over all; values descend, 0 < share < 1.

    Equality needs, for each distinct value, the same share of its copies in the head, because powers of e with distinct rational
    exponents are linearly independent over the rationals (Lindemann-Weierstrass); in a head that means all values are equal.
    """
    if values[0] == values[-1]:
        return rank >= Fraction(share) * len(values)
    if rank == 0:
        return False

    def difference(digits: int) -> tuple[Decimal, Decimal]:
        powers = [(Decimal(value) - Decimal(values[0])).exp() for value in values]
        total = sum(powers, Decimal(0))
        gap = Decimal(values[0]) - Decimal(values[-1])
        return sum(powers[:rank], Decimal(0)) - Decimal(share) * total, total * (gap + 2 * len(values) + 2) * Decimal(10) ** (1 - digits)

    return _sign(difference) > 0
