"""Drafters are plain data: the same bits anywhere, through pickle and JSON; they rank, tie and miss as they say."""

from __future__ import annotations

import hashlib
import json
import pickle

import numpy as np
import pytest

from spec.drafters import (
    DOMINANCE,
    STYLES,
    ChainDrafter,
    DrafterError,
    EdgeDrafter,
    NoisyTargetDrafter,
    RandomDrafter,
    TableDrafter,
    as_json,
    from_json,
    to_bf16,
)
from spec.engine import Drafter, Int
from spec.tree import TreeError, best_first_tree, draft_table
from spec.weights import philox

VOCAB = 96
GOLDEN = (tuple(range(10, 50)), tuple(range(60, 90)))
HISTORY = np.array(GOLDEN[0][:9], np.int32)

DRAFTERS: list[Drafter] = [
    RandomDrafter(7, VOCAB, 6),
    RandomDrafter(7, VOCAB, 6, grid=0.5),
    RandomDrafter(7, VOCAB, 6, bf16=True),
    TableDrafter.of_array(np.array([[0.5, -np.inf, 1 / 3], [0, 1e-45, -3e38]])),
    TableDrafter.of_array(np.arange(24).reshape(4, 2, 3)),
    NoisyTargetDrafter(3, GOLDEN, (4, 6), VOCAB, 5, 0.6, grid=0.25),
    ChainDrafter(3, VOCAB, 6, GOLDEN),
    ChainDrafter(3, VOCAB, 0),
    EdgeDrafter(3, GOLDEN, (4, 6), VOCAB, 5, 8),
]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: type(d).__name__)
def test_a_drafter_survives_pickle_and_strict_json(drafter: Drafter) -> None:
    text = json.dumps(as_json(drafter), allow_nan=False)
    drafter.draft(0, HISTORY)  # what it has cached does not travel
    for copy in (pickle.loads(pickle.dumps(drafter)), from_json(json.loads(text))):
        assert copy == drafter
        assert copy.block_len == drafter.block_len
        assert np.array_equal(copy.draft(1, HISTORY).view(np.uint32), drafter.draft(1, HISTORY).view(np.uint32))


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: type(d).__name__)
def test_drafts_are_float32_of_block_length_and_not_shared(drafter: Drafter) -> None:
    first = drafter.draft(0, HISTORY)
    assert first.dtype == np.float32
    assert first.shape == (drafter.block_len, drafter.vocab)  # type: ignore[attr-defined]
    kept = first.copy()
    first[:] = 0
    assert np.array_equal(drafter.draft(0, HISTORY.astype(np.int64)), kept)


def test_the_bits_are_pinned() -> None:
    """Exact integer arithmetic: this digest is that of every machine; stored cases depend on it."""
    bits = b"".join(drafter.draft(0, HISTORY).astype("<f4").tobytes() for drafter in DRAFTERS if not isinstance(drafter, EdgeDrafter))
    assert hashlib.blake2b(bits, digest_size=8).hexdigest() == "725906d88514940e"


def test_the_bits_at_the_edge_are_pinned() -> None:
    drafter = EdgeDrafter(3, GOLDEN, (1, 1), VOCAB, 4, 9)
    bits = b"".join(drafter.draft(0, np.array(GOLDEN[0][:count], np.int32)).astype("<f4").tobytes() for count in range(1, 30))
    assert hashlib.blake2b(bits, digest_size=8).hexdigest() == "9a70b4e956851d01"


def test_random_drafts_depend_on_seed_and_history() -> None:
    drafter = RandomDrafter(7, VOCAB, 6)
    assert not np.array_equal(drafter.draft(0, HISTORY), drafter.draft(0, HISTORY[:-1]))
    assert not np.array_equal(drafter.draft(0, HISTORY), RandomDrafter(8, VOCAB, 6).draft(0, HISTORY))
    assert np.array_equal(drafter.draft(0, HISTORY), drafter.draft(3, HISTORY))


def test_random_drafts_look_like_a_language_model() -> None:
    """Peaked and flat depths both occur, and their path scores are exact in double."""
    best = []
    for seed in range(30):
        table = draft_table(RandomDrafter(seed, VOCAB, 6).draft(0, HISTORY), 32)
        assert best_first_tree(table, root=0, budget=32).exact_in_double
        best += np.exp(table.log_probs[:, 0]).tolist()
    assert min(best) < 0.2
    assert max(best) > 0.8


@pytest.mark.parametrize(("options", "budget"), [({"grid": 0.5}, 32), ({"bf16": True}, 256)])
def test_coarse_logits_forge_exact_ties_at_the_budget_cut(options: dict[str, float], budget: int) -> None:
    """The tie-break then decides membership (T3): on the grid often; in bf16 as real engines see it."""
    at_cut = {"coarse": 0, "fine": 0}
    for seed in range(40):
        for name, drafter in (("coarse", RandomDrafter(seed, VOCAB, 6, **options)), ("fine", RandomDrafter(seed, VOCAB, 6))):  # type: ignore[arg-type]
            scores = best_first_tree(draft_table(drafter.draft(0, HISTORY), budget + 1), root=0, budget=budget + 1).scores
            at_cut[name] += scores[budget] == scores[budget + 1]
    assert at_cut["coarse"] >= 4
    assert at_cut["fine"] == 0


def ranks_of_golden(drafter: NoisyTargetDrafter, sequence: int, length: int) -> list[int]:
    logits = drafter.draft(sequence, np.array(drafter.golden[sequence][:length], np.int32))
    expected = drafter.golden[sequence][length : length + drafter.block_len]
    return [int(np.argsort(-row, kind="stable").tolist().index(token)) for row, token in zip(logits, expected, strict=False)]


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_golden_tokens_are_ranked_first_with_the_acceptance(acceptance: float) -> None:
    ranks = [r for seed in range(60) for r in ranks_of_golden(NoisyTargetDrafter(seed, GOLDEN, (4, 6), VOCAB, 5, acceptance), seed % 2, 12)]
    assert len(ranks) == 300
    share = ranks.count(0) / 300
    # six standard deviations of 300 draws
    assert abs(share - acceptance) <= 6 * (acceptance * (1 - acceptance) / 300) ** 0.5
    assert set(ranks) <= {0, 1, 2, 3, VOCAB - 1}
    assert acceptance == 1.0 or {1, 2, 3, VOCAB - 1} <= set(ranks)


def test_noise_does_not_depend_on_the_prompt() -> None:
    """Shrinking a prompt keeps the drafts: the key counts emitted tokens."""
    long = NoisyTargetDrafter(3, (GOLDEN[0],), (6,), VOCAB, 5, 0.6)
    short = NoisyTargetDrafter(3, (GOLDEN[0][2:],), (4,), VOCAB, 5, 0.6)
    assert np.array_equal(long.draft(0, np.array(GOLDEN[0][:9], np.int32)), short.draft(0, np.array(GOLDEN[0][2:9], np.int32)))


@pytest.mark.parametrize(
    ("sequence", "history"),
    [(0, [*GOLDEN[0][:8], 0]), (1, list(GOLDEN[0][:9])), (2, list(GOLDEN[0][:9])), (0, list(GOLDEN[0])), (0, [*GOLDEN[0], 1])],
    ids=["left", "of another sequence", "unknown sequence", "at the end", "past the end"],
)
def test_off_the_golden_sequence_drafts_are_random(sequence: int, history: list[int]) -> None:
    sure = NoisyTargetDrafter(3, GOLDEN, (4, 6), VOCAB, 5, 1.0)
    never = NoisyTargetDrafter(3, GOLDEN, (4, 6), VOCAB, 5, 0.0)
    tokens: Int = np.array(history, np.int32)
    assert np.array_equal(sure.draft(sequence, tokens), never.draft(sequence, tokens))


def test_a_chain_drafter_makes_a_chain_of_golden_tokens() -> None:
    drafter = ChainDrafter(3, VOCAB, 6, GOLDEN)
    logits = drafter.draft(0, HISTORY)
    tree = best_first_tree(draft_table(logits, 6), root=int(HISTORY[-1]), budget=6)
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert tree.tokens.tolist() == list(GOLDEN[0][8:15])
    top_two = np.sort(logits, axis=1)[:, -2:]
    assert (top_two[:, 1] - top_two[:, 0] >= DOMINANCE).all()


def accepted(drafter: EdgeDrafter, sequence: int, emitted: int) -> tuple[int, int]:
    """(nodes of the tree on the golden path, number of the last one)."""
    history = np.array(GOLDEN[sequence][: drafter.prompt_lens[sequence] + emitted], np.int32)
    tree = best_first_tree(draft_table(drafter.draft(sequence, history), drafter.budget), int(history[-1]), drafter.budget)
    node = reached = 0
    for token in GOLDEN[sequence][len(history) :]:
        node = next((n for n in range(1, tree.count + 1) if tree.parents[n] == node and tree.tokens[n] == token), 0)
        if not node:
            break
        reached += 1
        last = node
    return reached, last if reached else 0


def test_an_edge_drafter_leads_to_the_last_nodes_of_the_tree() -> None:
    """Half of all golden paths end among the last three nodes or just outside, and every style is met."""
    drafter = EdgeDrafter(5, GOLDEN, (1, 1), VOCAB, 4, 9)
    ends = [accepted(drafter, sequence, emitted) for sequence in (0, 1) for emitted in range(25)]
    assert sum(last >= 7 for _, last in ends) >= 15
    assert sum(reached == 0 for reached, _ in ends) >= 3
    assert {reached for reached, _ in ends} >= {0, 1, 2}
    tables = [drafter.draft(0, np.array(GOLDEN[0][:count], np.int32)) for count in range(1, 36)]
    assert any(np.isneginf(table).any() for table in tables)
    assert any(len(np.unique(table)) == 1 for table in tables), "all logits equal"
    assert any((np.isfinite(table).sum(1) == 1).any() for table in tables)
    assert len(set(STYLES)) == 7


def test_a_tie_at_the_cut_is_often_on_the_golden_path() -> None:
    tied = 0
    for seed in range(40):
        drafter = EdgeDrafter(seed, GOLDEN, (1, 1), VOCAB, 3, 8)
        history = np.array(GOLDEN[0][:1], np.int32)
        tree = best_first_tree(draft_table(drafter.draft(0, history), 8), 0, 9)
        tied += tree.count == 9 and tree.scores[8] == tree.scores[9]
    assert tied >= 5


def test_an_edge_drafter_without_a_tree_still_drafts() -> None:
    assert EdgeDrafter(1, GOLDEN, (4, 6), VOCAB, 3, 0).draft(0, HISTORY).shape == (3, VOCAB)
    assert EdgeDrafter(1, GOLDEN, (4, 6), VOCAB, 0, 4).draft(0, HISTORY).shape == (0, VOCAB)
    with pytest.raises(TreeError, match="budget"):
        EdgeDrafter(1, GOLDEN, (4, 6), VOCAB, 3, -1)


def test_a_table_per_last_token() -> None:
    drafter = TableDrafter.of_array(np.arange(24).reshape(4, 2, 3))
    assert drafter.draft(0, np.array([9, 6], np.int32)).tolist() == [[12, 13, 14], [15, 16, 17]]
    assert (drafter.block_len, drafter.vocab) == (2, 3)


def test_bfloat16_rounds_to_nearest_even() -> None:
    """Eight significant bits: 1 + 2**-8 and 1 + 3 * 2**-8 are halfway."""
    step = 2.0**-8
    values = np.array([1, 1 + step, 1 + 3 * step, 1 + step + 2**-20, -1 - step, np.inf, -np.inf], np.float32)
    assert to_bf16(values).tolist() == [1, 1, 1 + 4 * step, 1 + 2 * step, -1, np.inf, -np.inf]
    random = philox("bf16").standard_normal(1000).astype(np.float32)
    scale = np.exp2(np.floor(np.log2(np.abs(random))) - 7)
    assert np.array_equal(to_bf16(random), np.rint(random / scale) * scale)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "oracle"}, "there is no drafter 'oracle'"),
        ({}, "there is no drafter None"),
        ({"kind": "random", "seed": 1, "vocab": 4}, "missing 1 required"),
        ({"kind": "random", "seed": 1, "vocab": 4, "block_len": 2, "depth": 3}, "unexpected keyword argument 'depth'"),
        ({"kind": "random", "seed": 1, "vocab": 0, "block_len": 2}, "vocab is 0"),
        ({"kind": "random", "seed": 1, "vocab": 4, "block_len": -1}, "block_len is -1"),
        ({"kind": "random", "seed": 1, "vocab": 4, "block_len": 2, "grid": -1.0}, "grid is -1.0"),
        ({"kind": "table", "table": [1.0, 2.0]}, "table has shape"),
        ({"kind": "table", "table": [[1.0], [2.0, 3.0]]}, "table is ragged"),
        ({"kind": "chain", "seed": 1, "vocab": 4, "block_len": 2, "golden": [[1, 4]]}, r"golden\[0\] holds a token outside 0..3"),
    ],
)
def test_bad_descriptions_are_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        from_json(data)


@pytest.mark.parametrize(
    ("golden", "prompt_lens", "acceptance", "message"),
    [
        (((1, 2),), (), 0.5, "1 golden sequences, but 0 prompt_lens"),
        (((1, 2),), (3,), 0.5, r"prompt_lens\[0\] is 3"),
        (((1, 2),), (0,), 0.5, r"prompt_lens\[0\] is 0"),
        (((1, 2),), (1,), 1.5, "acceptance is 1.5"),
    ],
)
def test_bad_golden_sequences_are_refused(
    golden: tuple[tuple[int, ...], ...], prompt_lens: tuple[int, ...], acceptance: float, message: str
) -> None:
    with pytest.raises(DrafterError, match=message):
        NoisyTargetDrafter(0, golden, prompt_lens, 8, 2, acceptance)


def test_a_foreign_drafter_has_no_description() -> None:
    class Foreign:
        block_len = 1

        def draft(self, sequence: int, history: Int) -> np.ndarray:
            return np.zeros((1, 2), np.float32)

    with pytest.raises(DrafterError, match="Foreign is not one of random, table, noisy-target, chain"):
        as_json(Foreign())
