"""Tree decoding emits the autoregressive stream bit for bit (L1), on a toy session that is right by inspection and on the golden model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.config import preset
from spec.drafters import ChainDrafter, NoisyTargetDrafter, RandomDrafter, TableDrafter
from spec.engine import Drafter, Generation, Int, Limits, Rows
from spec.loops import BadLogits, Recording, ddtree, decode_rows, generation, greedy, prefill_rows, tree_rows
from spec.model import GoldenModel
from spec.tree import DraftTable, TreeError, best_first_tree, cut
from spec.weights import philox, random_weights
from tests.spec.toy_session import ToySession

VOCAB = 24
many = settings(deadline=None, max_examples=150, derandomize=True)


def prompts_of(seed: int, lengths: tuple[int, ...], vocab: int = VOCAB) -> list[Int]:
    return [philox("prompt", seed, i).integers(0, vocab, length).astype(np.int32) for i, length in enumerate(lengths)]


def drafter_of(kind: str, seed: int, golden: list[list[int]], prompts: list[Int], grid: float, vocab: int = VOCAB) -> Drafter:
    sequences = tuple(map(tuple, golden))
    lengths = tuple(len(prompt) for prompt in prompts)
    if kind == "random":
        return RandomDrafter(seed, vocab, 4, grid=grid)
    if kind == "chain":
        return ChainDrafter(seed, vocab, 4, sequences)
    if kind == "table":
        draws = philox("table", seed)  # about three candidates a row, the others are masked (T8); ties everywhere
        return TableDrafter.of_array(
            np.where(draws.random((vocab, 3, vocab)) < 3 / vocab, draws.integers(0, 3, (vocab, 3, vocab)), -np.inf)
        )
    return NoisyTargetDrafter(seed, sequences, lengths, vocab, 5, acceptance=0.7, grid=grid, bf16=seed % 2 == 0)


def golden_tokens(session: ToySession, prompts: list[Int], max_new: int) -> list[list[int]]:
    """The definition of greedy decoding, without rows or caches."""
    histories = [prompt.tolist() for prompt in prompts]
    for history in histories:
        for _ in range(max_new):
            logits = session.logits_after(history).tolist()
            history.append(logits.index(max(logits)))
    return histories


@dataclasses.dataclass
class Played:
    prompts: list[Int]
    limits: Limits
    budget: int
    sequential: list[Recording]
    tree: list[Recording]


def play(seed: int, lengths: tuple[int, ...], kind: str, budget: int, max_new: int, stop_index: int | None, grid: float) -> Played:
    """Both loops on fresh toy sessions. `stop_index`: the stop token is the one that sequence 0 emits there."""
    prompts = prompts_of(seed, lengths)
    golden = golden_tokens(ToySession(seed, VOCAB), prompts, max_new + 14)
    stops = () if stop_index is None else (golden[0][lengths[0] + stop_index],)
    limits = Limits(max_new, stops)
    sessions = ToySession(seed, VOCAB), ToySession(seed, VOCAB)
    sequential = greedy(sessions[0], prompts, limits)
    tree = ddtree(sessions[1], prompts, drafter_of(kind, seed, golden, prompts, grid), budget, limits)
    for i, history in enumerate(golden):
        expected = cut(history[lengths[i] :], stops, max_new)
        for session, recordings in zip(sessions, (sequential, tree), strict=True):
            assert recordings[i].tokens == expected
            assert session.committed.get(i, []) == history[: lengths[i] + len(expected) - 1] * bool(expected)
            assert recordings[i].logits.shape[0] == len(expected)
            for j, row in enumerate(recordings[i].logits):
                assert np.array_equal(row, session.logits_after(history[: lengths[i] + j]))
    return Played(prompts, limits, budget, sequential, tree)


@many
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    kind=st.sampled_from(["random", "chain", "table", "noisy"]),
    budget=st.integers(0, 20),
    max_new=st.integers(0, 14),
    stop_index=st.one_of(st.none(), st.integers(0, 13)),
    grid=st.sampled_from([0.0, 0.5, 4.0]),
)
def test_tree_decoding_is_sequential_decoding(
    seed: int, lengths: tuple[int, ...], kind: str, budget: int, max_new: int, stop_index: int | None, grid: float
) -> None:
    """L1, A4, K1, K2: tokens, logits and the cache are those of the definition, for every drafter, budget, stop and limit."""
    played = play(seed, lengths, kind, budget, max_new, stop_index, grid)
    for recording in played.tree:
        replayed = list(recording.tokens[:1])
        for turn in recording.rounds:
            assert turn.tokens[0] == replayed[-1]
            assert len(turn.tokens) == len(turn.parents) <= budget + 1
            assert turn.path[0] == 0
            assert all(turn.parents[child] == node for node, child in itertools.pairwise(turn.path))
            replayed += [*(turn.tokens[node] for node in turn.path[1:]), turn.bonus]
        assert cut(replayed, played.limits.stop_tokens, max_new) == recording.tokens
        assert all(not turn.rounds for turn in played.sequential)


def test_the_sessions_reach_what_they_are_meant_to_reach() -> None:
    """Without these the property above would prove little."""
    reached: Counter[str] = Counter()
    for seed in range(40):
        played = play(seed, (3, 1, 5), "noisy", 12, 11, 5 if seed % 2 else None, 0.0)
        reached["one round longer"] += len({len(recording.rounds) for recording in played.tree}) > 1
        for recording in played.tree:
            for turn in recording.rounds:
                reached["branch accepted"] += turn.path != tuple(range(len(turn.path)))
                reached["path of 3"] += len(turn.path) >= 3
                reached["nothing accepted"] += len(turn.path) == 1
            emitted = 1 + sum(len(turn.path) for turn in recording.rounds)
            if emitted > len(recording.tokens):
                reached["stop inside a path" if recording.tokens[-1] in played.limits.stop_tokens else "limit inside a path"] += 1
        masked = play(seed, (2,), "table", 30, 3, None, 0.0)
        reached["fewer nodes than the budget"] += any(len(turn.tokens) - 1 < masked.budget for turn in masked.tree[0].rounds)
    for region in (
        "branch accepted",
        "path of 3",
        "nothing accepted",
        "stop inside a path",
        "limit inside a path",
        "fewer nodes than the budget",
        "one round longer",
    ):
        assert reached[region] > 0, region


def test_a_good_drafter_saves_rounds() -> None:
    """Acceptance 1 and a chain: every round emits block_len + 1 tokens."""
    prompts = prompts_of(1, (4,))
    golden = golden_tokens(ToySession(1, VOCAB), prompts, 30)
    recording = ddtree(ToySession(1, VOCAB), prompts, drafter_of("chain", 1, golden, prompts, 0.0), 4, Limits(16))[0]
    assert [len(turn.path) for turn in recording.rounds] == [5, 5, 5]


def test_finished_sequences_leave_the_batch() -> None:
    """Rows of a sequence that has emitted its stop token would be wasted, and would move its cache."""
    prompts = prompts_of(8, (2, 3))
    golden = golden_tokens(ToySession(8, VOCAB), prompts, 6)
    stop = next(token for token in golden[0][3:] if token not in golden[1][3:])
    session = ToySession(8, VOCAB)
    recordings = greedy(session, prompts, Limits(6, (stop,)))
    assert len(recordings[0].tokens) < len(recordings[1].tokens) == 6
    assert [len(rows) for rows in session.batches] == [5] + [2] * (len(recordings[0].tokens) - 1) + [1] * (6 - len(recordings[0].tokens))


def test_a_first_token_that_stops_costs_no_round() -> None:
    prompts = prompts_of(2, (3,))
    first = golden_tokens(ToySession(2, VOCAB), prompts, 1)[0][-1]
    session = ToySession(2, VOCAB)
    recording = ddtree(session, prompts, RandomDrafter(0, VOCAB, 3), 8, Limits(9, (first,)))[0]
    assert (recording.tokens, recording.rounds, len(session.batches)) == ((first,), (), 1)


def test_nothing_asked_nothing_run() -> None:
    session = ToySession(0, VOCAB)
    recordings = greedy(session, prompts_of(0, (3, 2)), Limits(0))
    assert [recording.tokens for recording in recordings] == [(), ()]
    assert session.batches == []
    assert greedy(session, [], Limits(5)) == []


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        greedy(ToySession(0, VOCAB), [np.array([1], np.int32), np.array([], np.int32)], Limits(3))


def test_nan_logits_choose_nothing() -> None:
    class Broken(ToySession):
        def logits_after(self, history: object) -> np.ndarray:
            return np.array([0.0, np.nan], np.float32)

    with pytest.raises(BadLogits, match="the logit of token 1 in row 0 is NaN"):
        greedy(Broken(0, 2), [np.array([1], np.int32)], Limits(3))


def test_logits_of_another_shape_are_refused() -> None:
    class Broken(ToySession):
        def forward(self, *arguments: object) -> np.ndarray:
            return np.zeros((2, self.vocab), np.float32)

    with pytest.raises(BadLogits, match=r"logits are float32 \[2, 24\], but 1 rows"):
        greedy(Broken(0, VOCAB), [np.array([1], np.int32)], Limits(3))


def test_a_drafter_outside_the_domain_is_refused() -> None:
    drafter = TableDrafter.of_array(np.full((1, VOCAB), np.nan))
    with pytest.raises(TreeError, match="T8"):
        ddtree(ToySession(0, VOCAB), prompts_of(0, (2,)), drafter, 3, Limits(3))


def test_a_generation_is_a_recording_without_logits() -> None:
    recording = Recording((1, 2), (), np.zeros((2, 3), np.float32))
    assert generation(recording) == Generation((1, 2), ())


def as_lists(rows: Rows) -> list[list[int]]:
    return [rows.sequence.tolist(), rows.token.tolist(), rows.position.tolist(), rows.parent.tolist()]


def test_batches_by_hand() -> None:
    """C1, C2, C6: unequal requests, parents are rows of the batch."""
    rows, want = prefill_rows([np.array([5, 6], np.int32), np.array([7], np.int32)])
    assert as_lists(rows) == [[0, 0, 1], [5, 6, 7], [0, 1, 0], [-1, 0, -1]]
    assert want.tolist() == [False, True, True]
    assert as_lists(decode_rows([3, 1], [8, 9], [4, 2])) == [[3, 1], [8, 9], [4, 2], [-1, -1]]
    table = DraftTable(np.array([[1, 2], [3, 4]], np.int32), np.array([[-1, -1], [0, -5]], np.float32))
    trees = [best_first_tree(table, root=8, budget=2), best_first_tree(table, root=9, budget=3)]
    rows = tree_rows([3, 1], trees, [4, 2])
    assert as_lists(rows) == [[3, 3, 3, 1, 1, 1, 1], [8, 1, 3, 9, 1, 3, 2], [4, 5, 6, 2, 3, 4, 3], [-1, 0, 1, -1, 3, 4, 3]]


# The golden model: canonical bits do not notice batch, chunk or tree


@functools.cache
def model_of(name: str, twins: bool) -> GoldenModel:
    """`twins`: every second column of the head is a copy of the one before it, so that each argmax is an exact tie (A1, N5)."""
    config = preset(name)
    weights = random_weights(config, 11)
    if twins:
        head = "embed" if config.tied else "head"
        columns = weights[head] if config.tied else weights[head].T
        columns[1::2] = columns[::2]
    return GoldenModel(config, weights)


@pytest.mark.parametrize("kind", ["random", "chain", "table", "noisy"])
@pytest.mark.parametrize(("name", "twins"), [("tiny", False), ("small", False), ("tiny-softmax", False), ("tiny", True)])
def test_golden_tree_decoding_is_golden_sequential_decoding(name: str, twins: bool, kind: str) -> None:
    """L1, V2, K1, K7: the same tokens from bit-equal logits, and a bit-equal cache; both equal one forward over the final sequence."""
    model = model_of(name, twins)
    vocab, layers = model.config.vocab, model.config.layers
    for seed, (budget, max_new, stop_index, grid) in enumerate([(9, 9, 6, 0.0), (4, 7, None, 1.0), (20, 8, 3, 4.0)]):
        prompts = prompts_of(seed, (5, 1, 9)[: seed + 1], vocab)
        free = greedy(model.open(), prompts, Limits(max_new + 5))
        golden = [[*prompt.tolist(), *recording.tokens] for prompt, recording in zip(prompts, free, strict=True)]
        limits = Limits(max_new, () if stop_index is None else (free[0].tokens[stop_index],))
        sessions = model.open(), model.open()
        sequential = greedy(sessions[0], prompts, limits)
        tree = ddtree(sessions[1], prompts, drafter_of(kind, seed, golden, prompts, grid, vocab), budget, limits)
        for i, (one, other) in enumerate(zip(sequential, tree, strict=True)):
            assert one.tokens == other.tokens == cut(free[i].tokens, limits.stop_tokens, max_new)
            assert np.array_equal(one.logits.view(np.uint32), other.logits.view(np.uint32))
            sequence = [*prompts[i].tolist(), *one.tokens]
            at_once = model.sequence_logits(sequence[:-1])[len(prompts[i]) - 1 :]
            assert np.array_equal(one.logits.view(np.uint32), at_once.view(np.uint32))
            for layer in range(layers):
                cached = [session.cache_rows(i, layer).view(np.uint32) for session in sessions]
                assert cached[0].shape[0] == len(sequence) - 1
                assert np.array_equal(*cached)
            if twins:
                assert all(token % 2 == 0 for token in one.tokens)


def test_a_session_generates_by_these_loops() -> None:
    model = model_of("tiny", False)
    prompts = prompts_of(4, (6, 2), model.config.vocab)
    drafter = RandomDrafter(1, model.config.vocab, 4)
    session = model.open()
    by_tree = session.generate(prompts, drafter, 6, Limits(5))
    assert by_tree == [generation(recording) for recording in ddtree(model.open(), prompts, drafter, 6, Limits(5))]
    sequential = session.generate(prompts, None, 6, Limits(5))
    assert [one.tokens for one in sequential] == [one.tokens for one in by_tree]
    assert all(one.rounds == () for one in sequential)
    assert all(one.rounds for one in by_tree)
