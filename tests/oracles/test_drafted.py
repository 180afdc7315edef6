"""A black box seen through its drafter: histories must be its stream, and a round accepts what the spec's tree accepts, ties of rounding left open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oracles.ball import arithmetic
from oracles.drafted import Edge, judge_drafted
from oracles.judgement import Judgement
from oracles.ops.draft_table import log_softmax
from spec.drafters import EdgeDrafter, TableDrafter
from spec.engine import Limits, Profile
from spec.script import Generate
from spec.tree import DraftTable, best_first_tree, draft_table
from spec.weights import philox

TABLE = np.full((2, 8), -9.0)
TABLE[0, [3, 4, 5]] = (2.0, 1.0, 0.0)  # depth 1: 3, then 4, then 5
TABLE[1, 6] = 3.0  # depth 2: 6
PROMPT = np.array([1, 2], np.int32)
PLACE: dict[str, Any] = {"rung": "whole loop", "step": 0}


def judged(
    stream: list[int], histories: list[tuple[int, ...]], *, budget: int = 2, table: np.ndarray[Any, Any] = TABLE
) -> Judgement | None:
    step = Generate((PROMPT,), TableDrafter.of_array(table), budget, Limits(8))
    return judge_drafted(step, [stream], [(0, history) for history in histories], PLACE, arithmetic(Profile()))


def history(stream: list[int], count: int) -> tuple[int, ...]:
    return (1, 2, *stream[:count])


def test_a_round_that_accepts_its_tree_passes() -> None:
    stream = [7, 3, 6, 0]  # the tree of two nodes is 3 and 3-6: both are accepted, 0 is the bonus
    assert judged(stream, [history(stream, 1), history(stream, 4)]) is None
    assert judged([7, 0], [history([7, 0], 1), history([7, 0], 2)]) is None


def test_a_round_that_stops_before_a_node_is_named() -> None:
    stream = [7, 3, 6]
    found = judged(stream, [history(stream, 1), history(stream, 2)])
    assert found is not None
    assert (found.rule, found.op, found.tap) == ("A1", "best_first_tree", "drafted")
    assert "round 0: it stopped before token 3 at 3, which is a node of its tree" in found.message


def test_a_round_that_accepts_what_is_no_node_is_named() -> None:
    stream = [7, 5, 0]
    found = judged(stream, [history(stream, 1), history(stream, 3)])
    assert found is not None
    assert "it accepted token 5 at 3, which is no node of its tree" in found.message
    assert judged(stream, [history(stream, 1), history(stream, 3)], budget=5) is None


def test_another_history_than_the_stream_is_named() -> None:
    found = judged([7, 3], [(1, 2, 7), (1, 2, 6, 3)])
    assert found is not None
    assert found.rule == "D3"
    assert "the drafter was given token 6 at 2, but the stream has 7" in found.message


@pytest.mark.parametrize("accepted", [True, False])
def test_a_node_at_the_edge_of_the_budget_that_rounding_may_move_is_open(accepted: bool) -> None:
    tied = TABLE.copy()
    tied[0, 4] = tied[0, 3] + tied[1, 6] - np.log(np.exp(tied[1]).sum())  # 4 alone scores what 3 and 6 do, to a bit or two
    stream = [7, 4, 0]
    assert judged(stream, [history(stream, 1), history(stream, 3 if accepted else 2)], table=tied) is None
    tied[0, 4] -= 0.01
    assert (judged(stream, [history(stream, 1), history(stream, 3 if accepted else 2)], table=tied) is None) == (not accepted)


def test_nothing_is_said_without_two_rounds() -> None:
    assert judged([7, 3], [history([7, 3], 1)]) is None
    assert judged([7, 3], []) is None


# The edge of a tree, path by path

CERTAIN = arithmetic(Profile())


def test_the_spec_tree_is_inside_and_its_first_outsider_outside() -> None:
    logits = philox("edge", 1).standard_normal((3, 12)).astype(np.float32)
    edge = Edge(logits, 7, CERTAIN)
    tree = best_first_tree(draft_table(logits, 7), 0, 9)
    assert all(edge.certainly_inside(path) and not edge.certainly_outside(path) for path in tree.ranks[1:8])
    assert all(edge.certainly_outside(path) and not edge.certainly_inside(path) for path in tree.ranks[8:])


def test_equal_logits_of_a_row_are_decided_by_the_rank_path() -> None:
    """Two equal candidates at each of two depths: the four grandchildren are tied, and of two that fit (0, 0) and (0, 1) are due."""
    logits = np.full((2, 6), -30, np.float32)
    logits[:, [2, 4]] = 1.0
    edge = Edge(logits, 4, CERTAIN)
    assert [edge.certainly_inside(path) for path in ((0, 0), (0, 1), (1, 0), (1, 1))] == [True, True, False, False]
    assert [edge.certainly_outside(path) for path in ((0, 0), (0, 1), (1, 0), (1, 1))] == [False, False, True, True]


def test_a_depth_with_one_candidate_costs_nothing_in_any_engine() -> None:
    """[[-1, -1], [0]]: (0, 0) has the score of (0) and of (1), to the bit, and comes before (1)."""
    logits = np.full((2, 6), -np.inf, np.float32)
    logits[0, [2, 4]], logits[1, 3] = 1.0, 5.0
    edge = Edge(logits, 2, CERTAIN)
    assert edge.certainly_inside((0, 0))
    assert edge.certainly_outside((1,))
    logits[1, 1] = -40.0  # lost in the sum, but no longer exact in every engine
    assert not Edge(logits, 2, CERTAIN).certainly_outside((1,))
    assert not Edge(logits, 2, CERTAIN).certainly_inside((0, 0))


def test_a_tie_of_other_terms_is_open() -> None:
    """1 + 3 and 2 + 2: equal sums of different log-probabilities, each of which may round its own way."""
    logits = np.full((2, 6), -30, np.float32)
    logits[0, :2], logits[1, 2:4] = (3.0, 2.0), (3.0, 2.0)
    edge = Edge(logits, 4, CERTAIN)
    inside = [edge.certainly_inside(path) for path in ((0, 0), (0, 1), (1, 0))]
    outside = [edge.certainly_outside(path) for path in ((0, 0), (0, 1), (1, 0))]
    assert inside == [True, False, False]
    assert outside == [False, False, False]


def test_what_is_no_candidate_has_no_rank() -> None:
    logits = np.array([[1, -np.inf, 2, -np.inf]], np.float32)
    edge = Edge(logits, 3, CERTAIN)
    assert [edge.rank(0, token) for token in range(4)] == [1, None, 0, None]
    assert edge.rank(1, 0) is None
    wide = Edge(np.arange(6, dtype=np.float32)[None], 2, CERTAIN)
    assert wide.rank(0, 3) is None, "the third of two"


@pytest.mark.parametrize("seed", range(6))
def test_any_rounding_of_the_log_probabilities_keeps_what_is_certain(seed: int) -> None:
    """Trees of tables moved within their radii hold all that is certainly inside, and nothing that is certainly outside."""
    bits = philox("certain", seed)
    drafter = EdgeDrafter(seed, (tuple(range(20)),), (1,), 20, 3, 6)
    for length in range(1, 12):
        logits = drafter.draft(0, np.arange(length, dtype=np.int32))
        edge = Edge(logits, 6, CERTAIN)
        table = draft_table(logits, 6)
        rad = log_softmax(logits, table.ids, CERTAIN).rad
        assert rad is not None
        for _ in range(4):
            values = np.take_along_axis(logits, table.ids, 1)
            moved = table.log_probs.astype(np.float64)
            for depth in range(len(moved)):  # one function of the logit per row, not decreasing; a single candidate keeps 0
                for value in np.unique(values[depth][np.isfinite(values[depth])]):
                    if np.isfinite(logits[depth]).sum() > 1:
                        at = values[depth] == value
                        moved[depth, at] += 0.99 * rad[depth][at][0] * bits.uniform(-1, 1)
                finite = np.isfinite(moved[depth])
                moved[depth, finite] = np.minimum.accumulate(moved[depth, finite])
            tree = best_first_tree(DraftTable(table.ids, moved.astype(np.float32)), 0, 6)
            inside = set(tree.ranks[1:])
            for path in best_first_tree(table, 0, 24).ranks[1:]:
                assert not (edge.certainly_inside(path) and path not in inside), (seed, length, path)
                assert not (edge.certainly_outside(path) and path in inside), (seed, length, path)
