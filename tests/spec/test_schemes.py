"""Sampled tree decoding: with keyed noise its tokens are those of sequential sampling, whatever the tree (A2, A6, S3, S4)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from spec.drafters import RandomDrafter
from spec.engine import Drafter, Float, Int, Limits, Session
from spec.loops import Recording, ddtree, sequential
from spec.sampling import COIN, Sampling, gumbel_argmax, keyed_uniforms, scaled_logits
from spec.schemes import EXACT, LOSSY, Decider, Greedy, KeyedChance, LossyError, Place, Sampler, sample_and_match, scheme, target_only_coin
from spec.tree import cut
from spec.weights import philox
from tests.spec.test_loops import VOCAB, drafter_of, golden_tokens, model_of, prompts_of
from tests.spec.toy_session import ToySession

SESSIONS = 240
FIELDS: dict[str, tuple[object, ...]] = {
    "temperature": (0.3, 1.0, 2.5, 0.0),
    "top_k": (0, 0, 3, 8),
    "top_p": (1.0, 1.0, 0.9, 0.6),
    "min_p": (0.0, 0.0, 0.05),
    "repetition_penalty": (1.0, 1.3),
    "presence_penalty": (0.0, 1.0),
    "frequency_penalty": (0.0, 0.7),
    "logit_bias": ((), ((2, 3.0), (5, -np.inf))),
}


def random_sampling(draws: np.random.Generator, seed: int) -> Sampling:
    return Sampling(seed=seed, **{name: options[int(draws.integers(len(options)))] for name, options in FIELDS.items()})  # type: ignore[arg-type]


def sampled_by_definition(session: ToySession, prompt: Int, sampling: Sampling, sequence: int, max_new: int) -> list[int]:
    """One token after the other, without loops, rows or schemes."""
    history = prompt.tolist()
    for _ in range(max_new):
        z = scaled_logits(sampling, session.logits_after(history), history, len(prompt))
        history.append(gumbel_argmax(z, keyed_uniforms(sampling.seed, sequence, len(history), VOCAB)))
    return history[len(prompt) :]


def test_tree_tokens_are_sequential_tokens_at_any_temperature() -> None:
    """Must show: hundreds of random sessions, all sampling fields, all drafters, stops and limits in mid-path; and the cache."""
    reached: Counter[str] = Counter()
    for seed in range(SESSIONS):
        draws = philox("sampled session", seed)
        sampling = random_sampling(draws, seed)
        lengths = tuple(int(n) for n in draws.integers(1, 6, int(draws.integers(1, 4))))
        prompts = prompts_of(seed, lengths)
        session = ToySession(seed, VOCAB, levels=int(draws.choice([4, 16])))
        max_new = int(draws.integers(1, 14))
        free = [sampled_by_definition(session, prompt, sampling, i, max_new + 6) for i, prompt in enumerate(prompts)]
        stops = (free[0][int(draws.integers(max_new))],) if seed % 3 == 0 else ()
        golden = [[*prompt.tolist(), *tokens] for prompt, tokens in zip(prompts, free, strict=True)]
        drafter = drafter_of(("random", "chain", "table", "noisy")[seed % 4], seed, golden, prompts, 0.5)
        sessions = [ToySession(seed, VOCAB, session.levels) for _ in range(2)]
        one = sequential(sessions[0], prompts, Limits(max_new, stops), Sampler(sampling))
        other = ddtree(sessions[1], prompts, drafter, int(draws.integers(0, 20)), Limits(max_new, stops), Sampler(sampling))
        for i, (plain, tree) in enumerate(zip(one, other, strict=True)):
            assert plain.tokens == tree.tokens == cut(free[i], stops, max_new)
            assert np.array_equal(plain.logits, tree.logits)
            assert sessions[0].committed[i] == sessions[1].committed[i] == golden[i][: lengths[i] + len(plain.tokens) - 1]
            for turn in tree.rounds:
                reached["branch accepted"] += turn.path != tuple(range(len(turn.path)))
                reached["path of 3"] += len(turn.path) >= 3
            if 1 + sum(len(turn.path) for turn in tree.rounds) > len(tree.tokens):
                reached["cut in a path by " + ("a stop" if tree.tokens[-1] in stops else "the limit")] += 1
        reached["not greedy"] += sampling.temperature > 0 and [r.tokens for r in one] != [
            r.tokens for r in sequential(ToySession(seed, VOCAB, session.levels), prompts, Limits(max_new, stops))
        ]
    for region in ("branch accepted", "path of 3", "cut in a path by a stop", "cut in a path by the limit", "not greedy"):
        assert reached[region] >= 20, (region, reached)


def test_golden_models_sample_the_same_tokens_from_bit_equal_logits() -> None:
    for name in ("tiny", "small"):
        model = model_of(name, False)
        vocab = model.config.vocab
        for seed in range(4):
            prompts = prompts_of(seed, (5, 2)[: 1 + seed % 2], vocab)
            sampler = Sampler(Sampling(temperature=0.8, top_p=0.95, frequency_penalty=0.3, seed=seed))
            sessions = model.open(), model.open()
            one = sequential(sessions[0], prompts, Limits(8), sampler)
            golden = [[*p.tolist(), *r.tokens] for p, r in zip(prompts, one, strict=True)]
            drafter = drafter_of("noisy", seed, golden, prompts, 0.0, vocab)
            other = ddtree(sessions[1], prompts, drafter, 9, Limits(8), sampler)
            assert any(len(turn.path) > 1 for recording in other for turn in recording.rounds)
            for i, (plain, tree) in enumerate(zip(one, other, strict=True)):
                assert plain.tokens == tree.tokens
                assert np.array_equal(plain.logits.view(np.uint32), tree.logits.view(np.uint32))
                for layer in range(model.config.layers):
                    caches = [s.cache_rows(i, layer).view(np.uint32) for s in sessions]
                    assert np.array_equal(*caches)


def test_noise_keyed_by_the_round_would_give_other_tokens() -> None:
    """The property above is not vacuous: key the noise by the slot of the node, as a port would, and streams part."""

    @dataclasses.dataclass(frozen=True)
    class BySlot(KeyedChance):
        offset: int = 0

        def token(self, z: np.ndarray, place: Place) -> int:
            return super().token(z, Place(place.sequence, place.position + self.offset))

    parted = 0
    for seed in range(12):
        prompts = prompts_of(seed, (3,))
        one = sequential(ToySession(seed, VOCAB), prompts, Limits(9), Sampler(Sampling(seed=seed)))
        other = ddtree(
            ToySession(seed, VOCAB),
            prompts,
            RandomDrafter(seed, VOCAB, 4),
            8,
            Limits(9),
            Sampler(Sampling(seed=seed), chance=BySlot(seed, 1)),
        )
        parted += one[0].tokens != other[0].tokens
    assert parted >= 10


def test_penalties_see_the_path_and_not_the_uncle() -> None:
    """A6: history [7]; the path 1, 1 makes token 1 worse at each step, so that the walk ends where a raw walk goes on."""

    class Fixed(ToySession):
        def logits_after(self, history: Sequence[int]) -> Float:
            return np.array([0.0, 1.0], np.float32)

    class Ones:
        block_len = 3

        def draft(self, sequence: int, history: Int) -> Float:
            return np.tile(np.array([0.0, 9.0], np.float32), (3, 1))

    limits, prompt = Limits(4), [np.array([0], np.int32)]
    raw = ddtree(Fixed(0, 2), prompt, Ones(), 3, limits, Sampler(Sampling(temperature=0)))
    assert raw[0].tokens == (1, 1, 1, 1)
    penalised = Sampler(Sampling(temperature=0, frequency_penalty=0.6))
    assert sequential(Fixed(0, 2), prompt, limits, penalised)[0].tokens == (1, 1, 0, 1)  # 1 - .6 k against 0 - .6 k'
    tree = ddtree(Fixed(0, 2), prompt, Ones(), 3, limits, penalised)[0]
    assert tree.tokens == (1, 1, 0, 1)
    assert tree.rounds[0].path == (0, 1)


def first_turn(sampled: bool, stopped: bool) -> tuple[list[Int], Decider, Limits, Drafter]:
    """A turn of tree decoding whose last round is cut in the middle of its path."""
    model = model_of("tiny", False)
    vocab = model.config.vocab
    for seed in range(20):
        prompts = prompts_of(seed, (4, 2), vocab)
        decider = Sampler(Sampling(temperature=1.2, seed=seed)) if sampled else Greedy()
        free = sequential(model.open(), prompts, Limits(12), decider)
        new = [i for i in range(1, 5) if free[0].tokens[i] not in free[0].tokens[:i]]
        limits = Limits(8, (free[0].tokens[new[-1]],) if stopped and new else ())
        golden = [[*p.tolist(), *r.tokens] for p, r in zip(prompts, free, strict=True)]
        drafter = drafter_of("chain", seed, golden, prompts, 0.0, vocab)
        (one, _) = ddtree(model.open(), prompts, drafter, 4, limits, decider)
        if 1 + sum(len(turn.path) for turn in one.rounds) > len(one.tokens) and (one.tokens[-1] in limits.stop_tokens) == stopped:
            return prompts, decider, limits, drafter
    raise AssertionError("no cut in mid-path among 20 seeds")


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_decoding_goes_on_after_a_stop_as_on_a_fresh_session(sampled: bool, stopped: bool) -> None:
    """A4: after a cut in mid-path the cache is that of the cut stream, so that a second turn equals one on a fresh session, bit for bit."""
    model = model_of("tiny", False)
    prompts, decider, limits, drafter = first_turn(sampled, stopped)
    second = RandomDrafter(1, model.config.vocab, 3)

    def by_tree(session: Session, turns: list[Int], cached: list[int] | None) -> list[Recording]:
        return ddtree(session, turns, second, 6, Limits(5), decider, cached=cached)

    def by_step(session: Session, turns: list[Int], cached: list[int] | None) -> list[Recording]:
        return sequential(session, turns, Limits(5), decider, cached=cached)

    for loop in (by_tree, by_step):
        session = model.open()
        first = ddtree(session, prompts, drafter, 4, limits, decider)
        turns = [np.array([*p, *r.tokens, 5, 7], np.int32) for p, r in zip(prompts, first, strict=True)]
        cached = [len(turn) - 3 for turn in turns]  # the last token of the first turn has no cache row yet
        for fresh, continued in zip(loop(model.open(), turns, None), loop(session, turns, cached), strict=True):
            assert fresh.tokens == continued.tokens
            assert np.array_equal(fresh.logits.view(np.uint32), continued.logits.view(np.uint32))


def test_a_prompt_that_is_cached_as_a_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens of prompt 0 are cached, but must be between 0 and 1"):
        sequential(ToySession(0, VOCAB), prompts_of(0, (2,)), Limits(3), cached=[2])


def test_the_coin_never_takes_what_has_no_mass() -> None:
    """The children hold all the mass: the residual is empty and is never drawn from, for the largest coin as well."""

    class LastCoin(KeyedChance):
        def pick(self, weights: np.ndarray, place: Place) -> int:
            return int(np.flatnonzero(weights)[-1])

    z = np.array([0.0, 1.0, -np.inf])
    assert target_only_coin(z, [1, 0], [0.5, 0.5], LastCoin(0), Place(0, 3)) == (0, True)


def test_a_keyed_pick_is_the_inverse_of_the_cumulative_weights() -> None:
    weights = np.array([0.25, 0.0, 0.5, 0.25])
    chance = KeyedChance(3)
    for position in range(200):
        (u,) = keyed_uniforms(3, 1, position, 1, COIN).tolist()
        assert chance.pick(weights, Place(1, position)) == (0 if u < 0.25 else 2 if u < 0.75 else 3)


def test_coin_and_noise_are_independent_at_one_position() -> None:
    """A recovery draw that reuses the coin's number is biased (vllm-project/vllm #54282)."""
    assert keyed_uniforms(0, 0, 5, 1, COIN)[0] != keyed_uniforms(0, 0, 5, 1)[0]


def test_lossy_schemes_are_known_by_name_and_never_by_default() -> None:
    assert Sampler(Sampling()).scheme is sample_and_match
    assert scheme("sample-and-match") is sample_and_match
    for name in LOSSY:
        with pytest.raises(LossyError, match=f"{name} changes the target's law"):
            scheme(name)
        assert scheme(name, allow_lossy=True) is LOSSY[name]
    with pytest.raises(KeyError, match="there is no acceptance scheme 'swor'"):
        scheme("swor")
    assert not set(EXACT) & set(LOSSY)


def test_temperature_zero_is_greedy_under_every_exact_scheme() -> None:
    prompts = prompts_of(6, (3, 4))
    golden = golden_tokens(ToySession(6, VOCAB), prompts, 8)
    for accept in EXACT.values():
        drafter = drafter_of("noisy", 6, golden, prompts, 0.0)
        recordings = ddtree(ToySession(6, VOCAB), prompts, drafter, 9, Limits(8), Sampler(Sampling(temperature=0), accept))
        assert [list(r.tokens) for r in recordings] == [h[len(p) :] for h, p in zip(golden, prompts, strict=True)]
