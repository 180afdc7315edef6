"""Exact decisions: what must be equal is equal, ties included, and the smallest wrong answer is named with its rule."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from oracles.ball import Ball, arithmetic
from oracles.judge import judge_op
from oracles.judgement import Judgement, Verdict
from oracles.ops.best_first_tree import tree_problem
from oracles.ops.route import Rule
from spec.engine import PROFILES, Profile
from spec.script import OpCall
from spec.tree import DraftTable, best_first_tree, draft_table

F, I = np.float32, np.int32
Array = NDArray[Any]


def judged(
    op: str, inputs: dict[str, Array], params: dict[str, float], profile: Profile | None = None, **outputs: Array
) -> dict[str, Judgement]:
    call = OpCall(op, inputs, params, {name: (value.shape, str(value.dtype)) for name, value in outputs.items()})
    return {j.tap: j for j in judge_op(call, outputs, profile or Profile())}


def ints(*values: int) -> Array:
    return np.array(values, I)


# ---- copies and single roundings ------------------------------------------------------------------------------------
def test_embedding_rows_are_copies() -> None:
    table = np.arange(12, dtype=F).reshape(4, 3)
    inputs = {"table": table, "ids": ints(2, 0)}
    assert judged("embed", inputs, {}, out=table[[2, 0]])["out"].verdict is Verdict.EXACT
    found = table[[2, 0]]
    found[1, 2] = np.nextafter(found[1, 2], F(9))
    wrong = judged("embed", inputs, {}, out=found)["out"]
    assert (wrong.verdict, wrong.rule, wrong.index) == (Verdict.DEFECT, "M1", (1, 2))


def test_embedding_may_round_to_bfloat16_where_that_is_declared() -> None:
    table, found = np.full((1, 1), 1 + 2.0**-10, F), np.ones((1, 1), F)
    inputs = {"table": table, "ids": ints(0)}
    assert judged("embed", inputs, {}, out=found)["out"].verdict is Verdict.DEFECT
    assert judged("embed", inputs, {}, PROFILES["bf16-f32acc"], out=found)["out"].verdict is Verdict.WITHIN_BOUND


def test_a_sum_rounds_once() -> None:
    a, b = np.array([[1.0, 3.0]], F), np.array([[2.0**-24, 1e-3]], F)
    assert judged("add", {"a": a, "b": b}, {}, out=a + b)["out"].verdict is not Verdict.DEFECT
    wrong = judged("add", {"a": a, "b": b}, {}, out=np.nextafter(a + b, F(9)))["out"]
    assert (wrong.verdict, wrong.rule) == (Verdict.DEFECT, "N4")


def test_compaction_moves_bits_even_of_nan_and_minus_zero() -> None:
    cache = np.array([[1.0], [2.0], [np.nan], [-0.0], [5.0]], F)
    inputs = {"cache": cache, "path": ints(0, 2)}
    right = cache[[0, 1, 3]]
    inputs["path"] = ints(0, 2)
    assert judged("compact", inputs, {"prefix_len": 1}, out=right)["out"].verdict is Verdict.EXACT
    zero = right.copy()
    zero[2] = 0.0
    assert judged("compact", inputs, {"prefix_len": 1}, out=zero)["out"].rule == "K1"
    changed = right.copy()
    changed[0] = 7
    below = judged("compact", inputs, {"prefix_len": 1}, out=changed)["out"]
    assert (below.verdict, below.rule) == (Verdict.DEFECT, "K7")


def test_a_path_that_does_not_ascend_must_be_refused() -> None:
    wrong = judged("compact", {"cache": np.zeros((3, 1), F), "path": ints(1, 0)}, {"prefix_len": 0}, out=np.zeros((2, 1), F))["out"]
    assert (wrong.verdict, wrong.rule) == (Verdict.DEFECT, "K1") and "must refuse" in wrong.message


# ---- argmax ---------------------------------------------------------------------------------------------------------
def test_the_lowest_of_equal_maxima_wins() -> None:
    logits = np.array([[0, 5, 5, 1], [-0.0, 0.0, -1, -1]], F)
    assert judged("argmax", {"logits": logits}, {}, ids=ints(1, 0))["ids"].verdict is Verdict.EXACT
    wrong = judged("argmax", {"logits": logits}, {}, ids=ints(1, 1))["ids"]
    assert (wrong.verdict, wrong.rule, wrong.token) == (Verdict.DEFECT, "A1", 1)


# ---- routing --------------------------------------------------------------------------------------------------------
ROUTE = {"top_k": 2, "groups": 1, "top_groups": 1, "group_score_max": 0, "norm_top_k": 1, "routed_scale": 1.0, "denominator_eps": 0.0}


def route(scores: list[float], bias: list[float], ids: list[int], params: dict[str, float]) -> dict[str, Judgement]:
    s, found = np.array([scores], F), np.array([ids], I)
    chosen = np.take_along_axis(s, np.clip(found, 0, s.shape[1] - 1), 1)
    weights = (chosen / chosen.sum(1, keepdims=True)).astype(F)
    return judged("route", {"scores": s, "bias": np.array(bias, F)}, params, ids=found, weights=weights)


def test_equal_experts_go_to_the_lower_index() -> None:
    scores, bias = [0.5, 0.25, 0.5, 0.5], [0.0] * 4
    assert route(scores, bias, [0, 2], ROUTE)["ids"].verdict is Verdict.EXACT
    wrong = route(scores, bias, [0, 3], ROUTE)["ids"]
    assert (wrong.verdict, wrong.rule, wrong.found, wrong.expected) == (Verdict.DEFECT, "M8", 3, 2)


def test_experts_are_a_set() -> None:
    found = route([0.5, 0.25, 0.75, 0.5], [0.0] * 4, [0, 2], ROUTE)
    assert {j.verdict for j in found.values()} <= {Verdict.EXACT, Verdict.WITHIN_BOUND}
    assert route([0.5, 0.25, 0.75, 0.5], [0.0] * 4, [2, 2], ROUTE)["ids"].verdict is Verdict.DEFECT


def test_the_sum_of_score_and_bias_is_rounded_to_float32_before_it_is_compared() -> None:
    """1 + 2**-25 and 1 are one float32: a tie, so that the lower index wins."""
    params = ROUTE | {"top_k": 1}
    assert route([2.0**-26, 2.0**-25], [1.0, 1.0], [0], params)["ids"].verdict is Verdict.EXACT
    assert route([2.0**-26, 2.0**-25], [1.0, 1.0], [1], params)["ids"].verdict is Verdict.DEFECT


def test_groups_count_by_their_two_best_or_by_their_best() -> None:
    scores, bias = [0.9, 0.0, 0.5, 0.5], [0.0] * 4
    two = ROUTE | {"top_k": 1, "groups": 2, "top_groups": 1}
    assert route(scores, bias, [2], two)["ids"].verdict is Verdict.EXACT
    assert route(scores, bias, [0], two)["ids"].verdict is Verdict.DEFECT
    assert route(scores, bias, [0], two | {"group_score_max": 1})["ids"].verdict is Verdict.EXACT


def test_dropped_groups_are_minus_infinity_and_not_zero() -> None:
    params = ROUTE | {"groups": 2, "top_groups": 1}
    assert route([0.1, 0.2, 0.3, 0.4], [-1.0] * 4, [3, 2], params)["ids"].verdict is Verdict.EXACT
    assert route([0.1, 0.2, 0.3, 0.4], [-1.0] * 4, [0, 1], params)["ids"].verdict is Verdict.DEFECT


def test_weights_are_judged_beside_the_experts_that_were_chosen() -> None:
    found = route([0.5, 0.25, 0.75, 0.5], [0.0] * 4, [1, 0], ROUTE)
    assert found["ids"].verdict is Verdict.DEFECT
    assert found["weights"].verdict is Verdict.WITHIN_BOUND


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_forced_choices_hold_for_every_score_in_the_balls_and_explained_ones_for_some(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from([1, 2, 3]))
    experts = groups * data.draw(st.integers(2, 3))
    top_groups = data.draw(st.integers(1, groups))
    rule = Rule(data.draw(st.integers(1, top_groups * experts // groups)), groups, top_groups, data.draw(st.booleans()))
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    mid, rad = rng.random((1, experts)), rng.random((1, experts)) * 10.0 ** -data.draw(st.integers(0, 4))
    bias = (rng.standard_normal(experts) * 0.2).astype(F)
    middle = rule.choose(mid.astype(F), bias)
    forced = bool(rule.is_forced(Ball(mid, rad), bias, middle)[0])
    for _ in range(10):
        scores = (mid + rad * rng.uniform(-1, 1, mid.shape)).astype(F)
        ids = rule.choose(scores, bias)
        assert rule.is_explained(Ball(mid, rad), bias, ids)[0]
        if forced:
            assert set(ids[0].tolist()) == set(middle[0].tolist())


def test_a_choice_that_no_score_in_the_balls_gives_is_not_explained() -> None:
    rule = Rule(1, 1, 1, False)
    ball = Ball(np.array([[0.9, 0.1]]), np.full((1, 2), 0.1))
    assert not rule.is_explained(ball, np.zeros(2, F), np.array([[1]]))[0]
    assert rule.is_forced(ball, np.zeros(2, F), np.array([[0]]))[0]


# ---- draft table ----------------------------------------------------------------------------------------------------
def test_candidates_follow_logits_and_then_ids() -> None:
    logits = np.array([[1, 3, 3, 2]], F)
    table = draft_table(logits, 3)
    right = judged("draft_table", {"logits": logits}, {"budget": 3}, ids=table.ids, log_probs=table.log_probs)
    assert right["ids"].verdict is Verdict.EXACT
    swapped = judged("draft_table", {"logits": logits}, {"budget": 3}, ids=np.array([[2, 1, 3]], I), log_probs=table.log_probs)["ids"]
    assert (swapped.verdict, swapped.rule, swapped.index) == (Verdict.DEFECT, "T4", (0, 0))


def test_a_candidate_of_minus_infinity_stays_one() -> None:
    logits = np.array([[0, -np.inf]], F)
    table = draft_table(logits, 2)
    assert all(
        j.verdict in (Verdict.EXACT, Verdict.WITHIN_BOUND)
        for j in judged("draft_table", {"logits": logits}, {"budget": 2}, ids=table.ids, log_probs=table.log_probs).values()
    )
    finite = table.log_probs.copy()
    finite[0, 1] = -1e30
    assert judged("draft_table", {"logits": logits}, {"budget": 2}, ids=table.ids, log_probs=finite)["log_probs"].verdict is Verdict.DEFECT


# ---- best-first tree ------------------------------------------------------------------------------------------------
def tree_outputs(table: DraftTable, root: int, budget: int) -> dict[str, Array]:
    tree = best_first_tree(table, root, budget)
    out = {name: np.full(budget + 1, -1, I) for name in ("tokens", "parents", "depths")}
    for name in out:
        out[name][: tree.count + 1] = getattr(tree, name)
    return out | {"count": ints(tree.count)}


def test_first_in_first_out_is_another_tree_on_a_tie() -> None:
    """Row 1 of the bug table: lp = [[-1, -1], [0, -5]], B = 2; the paper takes {(0), (0, 0)}."""
    table = DraftTable(np.array([[0, 1], [0, 1]], I), np.array([[-1, -1], [0, -5]], F))
    inputs, params = {"ids": table.ids, "log_probs": table.log_probs}, {"budget": 2.0, "root": 7.0}
    right = tree_outputs(table, 7, 2)
    assert all(j.verdict is Verdict.EXACT for j in judged("best_first_tree", inputs, params, **right).values())
    fifo = {"tokens": ints(7, 0, 1), "parents": ints(-1, 0, 0), "depths": ints(0, 1, 1), "count": ints(2)}
    for profile in (Profile(), Profile(float32_scores=True)):  # an exact tie has no band
        found = judged("best_first_tree", inputs, params, profile, **fifo)
        assert found["tokens"].verdict is Verdict.DEFECT and found["tokens"].rule == "T3"


def test_float32_sums_get_a_band_only_where_they_are_declared() -> None:
    """Two paths whose exact sums differ by less than a float32 rounding of the sum."""
    tiny = F(2.0**-24)
    table = DraftTable(np.array([[0, 1], [0, 1]], I), np.array([[-1.0, -1.5], [-1.0, -5]], F))
    table.log_probs[1, 0] = F(-0.5) - tiny  # sum -1.5 - 2**-24: float32 rounds it to -1.5, a tie with (1)
    inputs, params = {"ids": table.ids, "log_probs": table.log_probs}, {"budget": 2.0, "root": 7.0}
    other = {"tokens": ints(7, 0, 0), "parents": ints(-1, 0, 1), "depths": ints(0, 1, 2), "count": ints(2)}
    assert not np.array_equal(tree_outputs(table, 7, 2)["parents"], other["parents"])
    assert judged("best_first_tree", inputs, params, **other)["tokens"].verdict is Verdict.DEFECT
    banded = judged("best_first_tree", inputs, params, Profile(float32_scores=True), **other)["tokens"]
    assert banded.verdict is Verdict.WITHIN_BOUND and 0 < banded.share <= 1


def test_padding_past_the_last_node_is_minus_one() -> None:
    table = draft_table(np.zeros((1, 2), F), 4)
    inputs, params = {"ids": table.ids, "log_probs": table.log_probs}, {"budget": 4.0, "root": 1.0}
    right = tree_outputs(table, 1, 4)
    right["tokens"][-1] = 0
    assert judged("best_first_tree", inputs, params, **right)["tokens"].verdict is Verdict.DEFECT


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_any_two_nodes_that_trade_places_are_noticed_unless_their_scores_agree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = draft_table((rng.standard_normal((3, 4)) * 3).astype(F), 6)
    inputs, params = {"ids": table.ids, "log_probs": table.log_probs}, {"budget": 6.0, "root": 0.0}
    right = tree_outputs(table, 0, 6)
    for first, second in itertools.combinations(range(1, 7), 2):
        tokens = right["tokens"].copy()
        tokens[[first, second]] = tokens[[second, first]]
        if not np.array_equal(tokens, right["tokens"]):
            assert judged("best_first_tree", inputs, params, **(right | {"tokens": tokens}))["tokens"].verdict is Verdict.DEFECT


def test_a_tree_within_the_radius_of_its_table_is_accepted_with_its_share() -> None:
    ids, table = np.array([[0, 1], [0, 1]], I), np.array([[-1.0, -1.25], [-0.25, -3]], F)  # (0, 0) and (1) tie at -1.25
    tokens, parents = ints(9, 0, 1, 0), ints(-1, 0, 0, 1)
    assert tree_problem(tokens, parents, ids, table, np.zeros((2, 2)), False).problem
    assert not tree_problem(tokens, parents, ids, table, np.full((2, 2), 1e-6), False).problem


# ---- mask and acceptance ------------------------------------------------------------------------------------------------
def test_positions_follow_depth_and_not_the_slot() -> None:
    inputs, params = {"parents": ints(-1, 0, 0)}, {"prefix_len": 2.0}
    seen = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], np.uint8)
    right = judged("tree_mask", inputs, params, positions=ints(2, 3, 3), visible=seen)
    assert all(j.verdict is Verdict.EXACT for j in right.values())
    slots = judged("tree_mask", inputs, params, positions=ints(2, 3, 4), visible=seen)["positions"]
    assert (slots.verdict, slots.rule, slots.index) == (Verdict.DEFECT, "C2", (2,))
    causal = seen.copy()
    causal[2, 3] = 1
    sibling = judged("tree_mask", inputs, params, positions=ints(2, 3, 3), visible=causal)["visible"]
    assert (sibling.verdict, sibling.rule, sibling.index) == (Verdict.DEFECT, "C3", (2, 3))


def test_a_mask_for_parents_that_are_no_tree_must_be_refused() -> None:
    found = judged(
        "tree_mask", {"parents": ints(-1, 2, 0)}, {"prefix_len": 0.0}, positions=ints(0, 1, 1), visible=np.zeros((3, 3), np.uint8)
    )
    assert found["positions"].rule == "T6" and found["positions"].verdict is Verdict.DEFECT


def test_acceptance_walks_to_the_end_and_pads() -> None:
    inputs = {"tokens": ints(5, 6, 7, 8), "parents": ints(-1, 0, 0, 2), "target": ints(7, 1, 8, 3)}
    right = judged("accept", inputs, {}, path=ints(0, 2, 3, -1), length=ints(3), bonus=ints(3))
    assert all(j.verdict is Verdict.EXACT for j in right.values())
    short = judged("accept", inputs, {}, path=ints(0, 2, -1, -1), length=ints(2), bonus=ints(8))
    assert [short[name].verdict for name in ("path", "length", "bonus")] == [Verdict.DEFECT] * 3
    assert short["bonus"].rule == "A3"


@pytest.mark.parametrize("profile", [Profile(), PROFILES["bf16-f32acc"]])
def test_no_profile_softens_an_exact_decision(profile: Profile) -> None:
    arithmetic(profile)
    wrong = judged("argmax", {"logits": np.array([[1.0, np.nextafter(F(1), F(2))]], F)}, {}, profile, ids=ints(0))["ids"]
    assert wrong.verdict is Verdict.DEFECT
