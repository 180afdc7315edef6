"""A black box seen through its drafter: histories must be its stream, and a round accepts what the spec's tree accepts, ties of rounding left open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oracles.ball import arithmetic
from oracles.drafted import judge_drafted
from oracles.judgement import Judgement
from spec.drafters import TableDrafter
from spec.engine import Limits, Profile
from spec.script import Generate

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
