"""A row's distribution and a token's draw against independent forms: one fraction at a time, mpmath, Philox written out."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.sampling import COIN, NOISE, Sampling, SamplingError, gumbel_argmax, keyed_uniforms, probabilities, scaled_logits

many = settings(deadline=None, max_examples=200, derandomize=True)
INF = float("inf")


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# Second forms


def law_by_fractions(s: Sampling, logits: list[float], history: list[int], prompt_len: int) -> set[int]:
    """The support, by comparing exact exponentials with 60 digits; every step token by token."""
    z = {token: value for token, value in enumerate(logits) if value > -INF}
    for token, bias in s.logit_bias:
        if token in z:
            z[token] = z[token] + bias
    for token in z:
        if token in history and s.repetition_penalty != 1:
            z[token] = z[token] / s.repetition_penalty if z[token] > 0 else z[token] * s.repetition_penalty
    for token in z:
        count = history[prompt_len:].count(token)
        if count:
            z[token] = z[token] - s.frequency_penalty * count
            z[token] = z[token] - s.presence_penalty
    if s.temperature == 0:
        return {min(token for token in z if z[token] == max(z.values()))}
    z = {token: value / s.temperature for token, value in z.items() if value > -INF}
    with mpmath.workdps(60):
        mass = {token: mpmath.exp(mpmath.mpf(value) - mpmath.mpf(max(z.values()))) for token, value in z.items()}
        mass = {token: m for token, m in mass.items() if m >= mpmath.mpf(s.min_p)}
        ranked = sorted(mass, key=lambda token: (-z[token], token))
        if s.top_k:
            kth = z[ranked[min(s.top_k, len(ranked)) - 1]]
            ranked = [t for t in ranked if z[t] >= kth] if s.top_k_ties == "all" else ranked[: s.top_k]
        if s.top_p < 1:
            total = sum(mass[t] for t in ranked)
            cut = next((i for i in range(1, len(ranked)) if sum(mass[t] for t in ranked[:i]) >= mpmath.mpf(s.top_p) * total), len(ranked))
            ranked = ranked[:cut]
    return set(ranked)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """One block of Philox4x64-10 (Salmon et al. 2011)."""
    low64 = 2**64 - 1
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & low64, (left >> 64) ^ c3 ^ k1, left & low64
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & low64, (k1 + 0xBB67AE8584CAA73B) & low64
    return [c0, c1, c2, c3]


@many
@given(
    logits=st.lists(st.sampled_from([-INF, -3.0, -1.0, 0.0, 0.5, 1.0, 1.0, 2.25]), min_size=1, max_size=7),
    history=st.lists(st.integers(0, 6), max_size=9),
    prompt_len=st.integers(0, 4),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        top_k=st.integers(0, 8),
        top_p=st.sampled_from([1.0, 0.9, 0.5, 0.25, 1e-9]),
        min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        presence_penalty=st.sampled_from([0.0, 0.5, -0.25]),
        frequency_penalty=st.sampled_from([0.0, 0.2]),
        logit_bias=st.sampled_from([(), ((0, 1.5),), ((0, -INF),)]),
        top_k_ties=st.sampled_from(["lowest", "all"]),
    ),
)
def test_the_support_is_that_of_the_second_form(logits: list[float], history: list[int], prompt_len: int, sampling: Sampling) -> None:
    history = [token % len(logits) for token in history]
    expected = (
        law_by_fractions(sampling, logits, history, prompt_len)
        if any(v > -INF and not (t == 0 and (0, -INF) in sampling.logit_bias) for t, v in enumerate(logits))
        else None
    )
    if expected is None:
        with pytest.raises(SamplingError, match="finite or -inf, and hold at least one"):
            scaled_logits(sampling, row(*logits), history, prompt_len)
        return
    z = scaled_logits(sampling, row(*logits), history, prompt_len)
    assert set(np.flatnonzero(z > -INF).tolist()) == expected
    assert math.isclose(probabilities(z).sum(), 1.0, rel_tol=2.0**-50)  # V <= 7 quotients, each rounded once


def test_steps_by_hand_in_their_order() -> None:
    """S1: bias 1, then /2 for the repetition, then -0.5 * 2 and -0.25, then /0.5; the prompt counts for repetition only."""
    s = Sampling(temperature=0.5, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((1, 1.0),))
    z = scaled_logits(s, row(4.0, 3.0, -1.0), [0, 1, 1, 2], prompt_len=1)
    assert z.tolist() == [4.0, ((3 + 1) / 2 - 2 * 0.5 - 0.25) / 0.5, (-1 * 2 - 0.5 - 0.25) / 0.5]


def test_the_default_leaves_a_row_as_it_is() -> None:
    logits = np.linspace(-3, 3, 11).astype(np.float32)
    assert scaled_logits(Sampling(), logits, [1, 2, 3], 1).tolist() == logits.astype(np.float64).tolist()


def test_top_k_ties_by_both_conventions() -> None:
    logits = row(1, 2, 2, 2, 0)
    assert (scaled_logits(Sampling(top_k=2), logits, [], 0) > -INF).tolist() == [False, True, True, False, False]
    assert (scaled_logits(Sampling(top_k=2, top_k_ties="all"), logits, [], 0) > -INF).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(("count", "share", "kept"), [(4, 0.5, 2), (4, 0.75, 3), (4, 0.7500001, 4), (10, 0.1, 2), (8, 0.125, 1)])
def test_equal_masses_are_cut_exactly(count: int, share: float, kept: int) -> None:
    """0.1 as a double is a little above a tenth, so that one of ten equal tokens does not reach it."""
    assert kept == next(n for n in range(1, count + 1) if n >= Fraction(share) * count)
    z = scaled_logits(Sampling(top_p=share), np.full(count, 0.3, np.float32), [], 0)
    assert np.flatnonzero(z > -INF).tolist() == list(range(kept))


def test_top_p_decides_what_float64_cannot() -> None:
    """The mass of the first token is within an ulp of the limit, from both sides; decided as 60 digits decide."""
    kept = set()
    for gap in range(1, 40):
        logits = row(0.0, -gap / 8, -gap / 4)
        with mpmath.workdps(60):
            powers = [mpmath.exp(mpmath.mpf(float(value))) for value in logits]
            share = powers[0] / sum(powers)
            for limit in (float(share), math.nextafter(float(share), 0), math.nextafter(float(share), 1)):
                z = scaled_logits(Sampling(top_p=limit), logits, [], 0)
                assert (z[1] > -INF) == bool(share < mpmath.mpf(limit))
                kept.add(bool(z[1] > -INF))
    assert kept == {True, False}


def test_min_p_decides_what_float64_cannot() -> None:
    kept = set()
    for gap in range(1, 60):
        logits = row(0.0, -gap / 16)
        with mpmath.workdps(60):
            share = mpmath.exp(mpmath.mpf(float(logits[1])))
            for limit in (float(share), math.nextafter(float(share), 1)):
                z = scaled_logits(Sampling(min_p=limit), logits, [], 0)
                assert (z[1] > -INF) == bool(share >= mpmath.mpf(limit))
                kept.add(bool(z[1] > -INF))
    assert kept == {True, False}


# Noise


@pytest.mark.parametrize(("seed", "sequence", "position", "purpose"), [(0, 0, 0, NOISE), (7, 3, 100, COIN), (2**64 - 1, 2, 2**40, NOISE)])
def test_the_noise_is_philox_written_out(seed: int, sequence: int, position: int, purpose: int) -> None:
    """S3: any port can make these numbers: word i % 4 of block i // 4 + 1."""
    words = [philox((seed, position), (block + 1, sequence, purpose, 0)) for block in range(3)]
    expected = [((word >> 12) * 2 + 1) / 2**53 for block in words for word in block][:11]
    assert keyed_uniforms(seed, sequence, position, 11, purpose).tolist() == expected


def test_a_longer_vocabulary_keeps_the_noise_of_the_first_tokens() -> None:
    assert np.array_equal(keyed_uniforms(5, 0, 9, 1000)[:10], keyed_uniforms(5, 0, 9, 10))


def test_seeds_sequences_positions_and_purposes_are_independent_streams() -> None:
    streams = {
        keyed_uniforms(*key[:3], 4, key[3]).tobytes() for key in [(0, 0, 1, 0), (1, 0, 1, 0), (0, 1, 1, 0), (0, 0, 2, 0), (0, 0, 1, 1)]
    }
    assert len(streams) == 5


def test_draws_follow_the_distribution() -> None:
    """Deterministic by its seed; 6 sigma of a binomial count."""
    z = scaled_logits(Sampling(temperature=0.7), row(0.0, 1.0, -1.0, 0.5, -INF), [], 0)
    draws = 4000
    counts = Counter(gumbel_argmax(z, keyed_uniforms(1, 0, position, 5)) for position in range(draws))
    for token, share in enumerate(probabilities(z).tolist()):
        assert abs(counts[token] - draws * share) <= 6 * math.sqrt(draws * share * (1 - share))


@many
@given(st.lists(st.tuples(st.floats(-50, 50), st.integers(0, 2**52 - 1)), min_size=2, max_size=5), st.integers(0, 8), st.booleans())
def test_the_largest_key_wins_exactly(pairs: list[tuple[float, int]], ulps: int, forge: bool) -> None:
    """Keys forged to agree within a few ulps of float64, where a float64 argmax is a coin toss."""
    uniforms = np.array([(2 * k + 1) * 2.0**-53 for _, k in pairs])
    z = np.array([value for value, _ in pairs])
    if forge:
        z[1] = z[0] - math.log(-math.log(uniforms[0])) + math.log(-math.log(uniforms[1]))
        for _ in range(ulps):
            z[1] = math.nextafter(z[1], INF if ulps % 2 else -INF)
    with mpmath.workdps(80):
        keys = [mpmath.mpf(a) - mpmath.log(-mpmath.log(mpmath.mpf(u))) for a, u in zip(z.tolist(), uniforms.tolist(), strict=True)]
    assert gumbel_argmax(z, uniforms) == keys.index(max(keys))


def test_equal_keys_go_to_the_lower_id() -> None:
    assert gumbel_argmax(np.array([-9.0, 1.0, 1.0]), np.array([0.5, 0.25, 0.25])) == 1


def test_forged_near_ties_reach_the_decimal_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    import spec.sampling as module

    calls = []
    honest = module._beats
    monkeypatch.setattr(module, "_beats", lambda *args: calls.append(args) or honest(*args))
    u = np.array([0.3125, 0.8125])
    gumbel_argmax(np.array([0.0, math.log(-math.log(u[1])) - math.log(-math.log(u[0]))]), u)
    assert len(calls) == 1


def test_temperature_to_zero_is_greedy_with_penalties() -> None:
    s = Sampling(temperature=0.0, repetition_penalty=2.0)
    z = scaled_logits(s, row(3.0, 2.0, 2.0), [0], 1)
    assert z.tolist() == [-INF, 0.0, -INF]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, but must be finite and at least 0"),
        ({"top_p": 0.0}, "top_p is 0.0, but must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"logit_bias": ((1, 2.0), (1, 3.0))}, "one pair per token"),
        ({"seed": -1}, "seed is -1"),
        ({"top_k_ties": "first"}, "top_k_ties is 'first'"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
    ],
)
def test_parameters_outside_the_domain_are_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(SamplingError, match=text):
        Sampling(**fields)  # type: ignore[arg-type]


def test_rows_that_are_no_distribution_are_refused() -> None:
    for bad in (row(1.0, math.nan), row(1.0, INF), row(-INF, -INF)):
        with pytest.raises(SamplingError, match="must be finite or -inf"):
            scaled_logits(Sampling(), bad, [], 0)
    with pytest.raises(SamplingError, match="logit_bias names token 9, but the vocabulary has 2"):
        scaled_logits(Sampling(logit_bias=((9, 1.0),)), row(1.0, 2.0), [], 0)
    with pytest.raises(SamplingError, match="use 0 for greedy"):
        scaled_logits(Sampling(temperature=1e-308), row(1e30, 2.0), [], 0)
