"""Exact enumeration over whole decoding loops: the two exact schemes keep the law to float64 rounding, every wrong one is far off (A2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from oracles import law
from oracles.law import TOTAL_VARIATION_EXACT, LawError, Stream, autoregressive_law, emitted_law, total_variation
from spec import schemes
from spec.drafters import TableDrafter
from spec.engine import Float, Limits
from spec.loops import ddtree, sequential
from spec.sampling import Sampling, probabilities, scaled_logits
from spec.schemes import EXACT, LOSSY, Chance, Place, Sampler, Scheme, leviathan, sample_and_match
from spec.tree import Acceptance, Tree
from spec.weights import philox
from tests.spec.toy_session import ToySession

VOCAB, DEPTH = 3, 2
PROMPT = [1]
WRONG = 0.05


class SmallSession(ToySession):
    """Rows of about one nat, so that no token dominates."""

    def logits_after(self, history: Sequence[int]) -> Float:
        return super().logits_after(history) / np.float32(8)


def drafter(seed: int) -> TableDrafter:
    """One table per last token, drawn independently of the target."""
    return TableDrafter.of_array(philox("law", seed).integers(-8, 8, (VOCAB, DEPTH, VOCAB)) / 4)


def emitted(seed: int, scheme: Scheme, sampling: Sampling, budget: int, max_new: int, stops: tuple[int, ...] = ()) -> dict[Stream, float]:
    def run(chance: Chance) -> Stream:
        decider = Sampler(sampling, scheme, chance)
        return ddtree(SmallSession(seed, VOCAB), [np.array(PROMPT, np.int32)], drafter(seed), budget, Limits(max_new, stops), decider)[
            0
        ].tokens

    return emitted_law(run)


def target(seed: int, sampling: Sampling, max_new: int, stops: tuple[int, ...] = ()) -> dict[Stream, float]:
    return autoregressive_law(SmallSession(seed, VOCAB).logits_after, sampling, PROMPT, max_new, stops)


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.6, top_k=2),
    Sampling(top_p=0.8, frequency_penalty=0.7),
    Sampling(repetition_penalty=1.5, presence_penalty=-0.4, logit_bias=((0, 0.5),)),
    Sampling(temperature=0.0),
]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_exact_schemes_emit_the_autoregressive_law(name: str, sampling: Sampling) -> None:
    """Must show: total variation below 1e-12, over whole loops of two rounds and more, with trees of 2 and 6 nodes and a stop token."""
    for seed in range(2):
        for budget in (2, 6):
            for stops in ((), (2,)):
                found = emitted(seed, EXACT[name], sampling, budget, 4, stops)
                expected = target(seed, sampling, 4, stops)
                assert math.isclose(math.fsum(found.values()), 1.0, rel_tol=TOTAL_VARIATION_EXACT)
                assert total_variation(found, expected) < TOTAL_VARIATION_EXACT


def test_sequential_sampling_emits_the_law_too() -> None:
    def run(chance: Chance) -> Stream:
        return sequential(SmallSession(1, VOCAB), [np.array(PROMPT, np.int32)], Limits(4), Sampler(Sampling(), chance=chance))[0].tokens

    assert total_variation(emitted_law(run), target(1, Sampling(), 4)) < TOTAL_VARIATION_EXACT


# Wrong schemes, each shown far off


def residual_with_children(z: np.ndarray, children: Sequence[int], q: Sequence[float], chance: Chance, place: Place) -> tuple[int, bool]:
    """The coin, whose recovery draw forgets to leave the children out."""
    mass = probabilities(z)[list(children)]
    if not children:
        return chance.token(z, place), False
    taken = chance.pick(np.array([*mass, max(0.0, 1 - mass.sum())]), place)
    return (children[taken], True) if taken < len(children) else (chance.token(z, place), False)


def retry_each_child(z: np.ndarray, children: Sequence[int], q: Sequence[float], chance: Chance, place: Place) -> tuple[int, bool]:
    """A fresh coin per child against its plain mass, instead of the mass among what is left."""
    p = probabilities(z)
    for token in children:
        if chance.pick(np.array([p[token], 1 - p[token]]), place) == 0:
            return token, True
    return sample_and_match(z, (), (), chance, place)


def always_the_best_child(z: np.ndarray, children: Sequence[int], q: Sequence[float], chance: Chance, place: Place) -> tuple[int, bool]:
    return (children[0], True) if children else (chance.token(z, place), False)


WRONG_SCHEMES: dict[str, Scheme] = {
    **LOSSY,
    "residual with children": residual_with_children,
    "retry each child": retry_each_child,
    "draft first": always_the_best_child,
}


@pytest.mark.parametrize("name", WRONG_SCHEMES)
def test_wrong_schemes_are_far_off(name: str) -> None:
    """Must show: above 0.05, in the mean over 6 random targets and drafters, two tokens emitted by one tree of 3 nodes."""
    distances = [total_variation(emitted(seed, WRONG_SCHEMES[name], Sampling(), 3, 3), target(seed, Sampling(), 3)) for seed in range(6)]
    assert np.mean(distances) > WRONG, distances


def test_penalties_of_the_committed_history_only_are_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A6 broken: every node of a round is penalised for what was emitted before the round."""
    sampling = Sampling(frequency_penalty=2.0)
    committed = 0

    class Stale(Sampler):
        def accept(self, sequence: int, history: Sequence[int], prompt_len: int, tree: Tree, logits: Float) -> Acceptance:
            nonlocal committed
            committed = len(history)
            return super().accept(sequence, history, prompt_len, tree, logits)

    def run(seed: int, kind: type[Sampler]) -> dict[Stream, float]:
        def once(chance: Chance) -> Stream:
            session = SmallSession(seed, VOCAB)
            return ddtree(session, [np.array(PROMPT, np.int32)], drafter(seed), 3, Limits(3), kind(sampling, chance=chance))[0].tokens

        return emitted_law(once)

    assert total_variation(run(0, Sampler), target(0, sampling, 3)) < TOTAL_VARIATION_EXACT
    expected = [target(seed, sampling, 3) for seed in range(6)]
    monkeypatch.setattr(schemes, "scaled_logits", lambda s, row, history, n: scaled_logits(s, row, history[:committed], n))
    assert np.mean([total_variation(run(seed, Stale), expected[seed]) for seed in range(6)]) > WRONG


def test_leviathan_by_hand() -> None:
    """One child of target mass 1/2 drafted with q = 1/2: accepted always, so that it is emitted with probability 1 instead of 1/2."""

    def run(chance: Chance) -> Stream:
        token, accepted = leviathan(np.log([0.25, 0.5, 0.25]), [1], [0.5], chance, Place(0, 0))
        return (token, int(accepted))

    assert emitted_law(run) == {(1, 1): 1.0}


# The enumeration itself


def test_enumeration_of_two_dice_by_hand() -> None:
    def run(chance: Chance) -> Stream:
        first = chance.pick(np.array([1.0, 0.0, 3.0]), Place(0, 0))
        return (first, chance.token(np.array([0.0, 0.0]), Place(0, 1)) if first else 9)

    assert emitted_law(run) == {(0, 9): 0.25, (2, 0): 0.375, (2, 1): 0.375}


def test_total_variation_by_hand() -> None:
    assert total_variation({(0,): 0.5, (1,): 0.5}, {(0,): 0.25, (2,): 0.75}) == 0.75
    assert total_variation({(0,): 1.0}, {(0,): 1.0}) == 0.0


def test_enumerations_that_are_not_tiny_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law, "RUNS_MAX", 26)

    def run(chance: Chance) -> Stream:
        return tuple(chance.token(np.zeros(3), Place(0, i)) for i in range(3))

    with pytest.raises(LawError, match="more than 26 outcomes"):
        emitted_law(run)
