"""The draft tree against second forms: a global sort over all rank paths, recursive masks, a recursive walk; and real bugs by hand.

`row N` in a test's docstring is a bug of a public implementation (DDTree bug table), at the smallest size that shows it.
"""

from __future__ import annotations

import itertools
import pickle
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.ops import OPS
from spec.tree import (
    BUDGET_MAX,
    DraftTable,
    Tree,
    TreeError,
    accept_greedy,
    best_first_tree,
    check_structure,
    compact,
    cut,
    draft_table,
    positions,
    visibility,
)

INF = float("inf")
many = settings(deadline=None, max_examples=300, derandomize=True)


def table_of(log_probs: list[list[float]]) -> DraftTable:
    """Token ids differ from ranks, so that a mix-up shows: id = 100 * (depth + 1) + 7 * rank."""
    values = np.array(log_probs, np.float32).reshape(len(log_probs), -1)
    depth, rank = np.indices(values.shape)
    return DraftTable((100 * (depth + 1) + 7 * rank).astype(np.int32), values)


def paths(log_probs: list[list[float]], budget: int) -> list[tuple[int, ...]]:
    return list(best_first_tree(table_of(log_probs), root=1, budget=budget).ranks[1:])


def logs(probabilities: list[list[float]]) -> list[list[float]]:
    with np.errstate(divide="ignore"):
        values: list[list[float]] = np.log(np.array(probabilities)).tolist()
    return values


def sorted_paths(table: DraftTable, budget: int) -> list[tuple[tuple[int, ...], Fraction]]:
    """The definition, without a heap: every rank path, sorted by (-exact sum, path); paths over -inf do not exist."""
    rows = table.log_probs.tolist()
    every = []
    for depth in range(1, len(rows) + 1):
        for path in itertools.product(*(range(len(row)) for row in rows[:depth])):
            terms = [rows[d][r] for d, r in enumerate(path)]
            if -INF not in terms:
                every.append((path, sum(map(Fraction, terms), Fraction(0))))
    return sorted(every, key=lambda item: (-item[1], item[0]))[:budget]


def assert_is_the_sorted_tree(table: DraftTable, budget: int) -> Tree:
    tree = best_first_tree(table, root=5, budget=budget)
    expected = sorted_paths(table, budget)
    number = {(): 0} | {path: i for i, (path, _) in enumerate(expected, 1)}
    assert list(tree.ranks) == [(), *(path for path, _ in expected)]
    assert tree.tokens.tolist() == [5, *(int(table.ids[len(path) - 1, path[-1]]) for path, _ in expected)]
    assert tree.parents.tolist() == [-1, *(number[path[:-1]] for path, _ in expected)]
    assert tree.depths.tolist() == [0, *(len(path) for path, _ in expected)]
    assert tree.scores.tolist() == [0.0, *(float(score) for _, score in expected)]
    assert tree.count == len(expected)
    for values in (tree.tokens, tree.parents, tree.depths):
        assert values.dtype == np.int32
    return tree


@st.composite
def tables(draw: st.DrawFn, entries: st.SearchStrategy[float]) -> DraftTable:
    depths, width = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    rows = [sorted((draw(entries) for _ in range(width)), reverse=True) for _ in range(depths)]
    return table_of(rows) if rows else DraftTable(np.zeros((0, width), np.int32), np.zeros((0, width), np.float32))


TIED = st.sampled_from([0.0, -0.0, -0.5, -1.0, -1.0, -1.5, -2.0, -INF])
WIDE = st.sampled_from([0.0, -(2.0**-40), -(2.0**-24), -1.0, -1.0 - 2.0**-23, -3.0e38, -1e-45, -64.0])


@many
@given(tables(TIED), st.integers(0, 60))
def test_the_tree_is_the_first_b_of_all_paths_sorted(table: DraftTable, budget: int) -> None:
    assert assert_is_the_sorted_tree(table, budget).exact_in_double


@many
@given(tables(WIDE), st.integers(0, 60))
def test_the_order_is_exact_where_a_double_sum_would_round(table: DraftTable, budget: int) -> None:
    assert_is_the_sorted_tree(table, budget)


def test_a_sum_that_a_double_rounds_is_found_and_ordered_exactly() -> None:
    """-1 - 2**-53 is below -1, by one bit too many for a double: it would tie the two and take the path (0, 0) before (1)."""
    assert -1.0 - 2.0**-53 == -1.0 > -1.0 - 2.0**-52
    for step, exact in ((2.0**-52, True), (2.0**-53, False), (2.0**-140, False)):
        rows = [[-1.0, -1.0], [-step, -step]]
        assert best_first_tree(table_of(rows), root=0, budget=3).exact_in_double == exact
        assert paths(rows, 3) == [(0,), (1,), (0, 0)]


def test_a_score_of_zero_is_positive_zero() -> None:
    scores = best_first_tree(table_of([[0.0, -0.0], [-0.0, -1.0]]), root=0, budget=4).scores
    assert (scores == 0).all()
    assert not np.signbit(scores).any()


def test_tables_of_language_model_logits_are_exact_in_double() -> None:
    """T2 may demand the exact sum, because a double gives it: checked with rationals."""
    rng = np.random.default_rng(3)
    for depths, vocab, budget in ((7, 1000, 64), (15, 4000, 128)):
        logits = (15 + 4 * rng.standard_normal((depths, vocab))).astype(np.float32)
        table = draft_table(logits, budget)
        tree = best_first_tree(table, root=0, budget=budget)
        assert tree.exact_in_double
        for path, score in zip(tree.ranks, tree.scores.tolist(), strict=True):
            assert Fraction(score) == sum(Fraction(float(table.log_probs[d, r])) for d, r in enumerate(path))


@many
@given(tables(TIED), st.integers(0, 40), st.integers(0, 20))
def test_a_larger_budget_only_appends(table: DraftTable, budget: int, more: int) -> None:
    small, large = (best_first_tree(table, root=0, budget=b) for b in (budget, budget + more))
    kept = small.count + 1
    assert large.ranks[:kept] == small.ranks
    assert large.parents[:kept].tolist() == small.parents.tolist()


@many
@given(tables(TIED), st.integers(0, 60))
def test_structure_of_a_tree(table: DraftTable, budget: int) -> None:
    """T6, and DDTREE 1.4: siblings in rank order, a node of ranks r needs sum_j prod_{i<=j} (r_i + 1) <= B."""
    tree = best_first_tree(table, root=0, budget=budget)
    assert check_structure(tree.parents, tree.tokens) == tree.depths.tolist()
    ranks_under: dict[int, list[int]] = {}
    for node in range(1, tree.count + 1):
        path = tree.ranks[node]
        assert tree.ranks[tree.parents[node]] == path[:-1]
        assert sum(itertools.accumulate((r + 1 for r in path), lambda a, b: a * b)) <= budget
        ranks_under.setdefault(int(tree.parents[node]), []).append(path[-1])
    assert all(ranks == list(range(len(ranks))) for ranks in ranks_under.values())


# Front end: logits -> table


@settings(many, max_examples=100)
@given(
    st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, 1.5, -3.25, 20.125, -INF]), min_size=5, max_size=5), min_size=1, max_size=3),
    st.integers(1, 7),
)
def test_candidates_and_log_probs_against_mpmath(rows: list[list[float]], budget: int) -> None:
    table = draft_table(np.array(rows, np.float32), budget)
    assert table.ids.shape == table.log_probs.shape == (len(rows), min(budget, 5))
    for row, ids, log_probs in zip(rows, table.ids.tolist(), table.log_probs.tolist(), strict=True):
        assert ids == sorted(range(5), key=lambda token: (-row[token], token))[:budget]
        finite = [x for x in row if x > -INF]
        if not finite:
            assert log_probs == [-INF] * len(ids)
            continue
        with mpmath.workdps(60):
            log_z = np.float32(mpmath.log(mpmath.fsum(mpmath.exp(x) for x in finite)))
        assert log_probs == [float(np.float32(row[token]) - log_z) for token in ids]


def test_negative_zero_ties_with_zero() -> None:
    assert draft_table(np.array([[-0.0, 0.0, -0.0]], np.float32), 3).ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("value", [INF, float("nan")])
def test_logits_outside_the_domain_are_refused(value: float) -> None:
    with pytest.raises(TreeError, match=r"T8: the logit of token 1 at depth 2") as refusal:
        draft_table(np.array([[0, 0], [0, value]], np.float32), 2)
    assert refusal.value.rule == "T8"


def test_a_row_of_minus_infinity_ends_the_depth() -> None:
    logits = np.array([[0, 1], [-INF, -INF], [0, 1]], np.float32)
    assert best_first_tree(draft_table(logits, 8), root=0, budget=8).ranks == ((), (0,), (1,))


def test_row_8_candidates_are_ranked_on_float32_not_bfloat16() -> None:
    """20 and 20.03 are one bfloat16 value: on bf16 token 0 would come first."""
    assert draft_table(np.array([[20.0, 20.03]], np.float32), 2).ids.tolist() == [[1, 0]]


@pytest.mark.parametrize(("vocab", "budget"), [(4, 8), (4, 4), (1, 3), (40, 30)])
def test_rows_10_and_11_as_many_candidates_as_the_vocabulary(vocab: int, budget: int) -> None:
    table = draft_table(np.zeros((1, vocab), np.float32), budget)
    assert table.ids.tolist() == [list(range(min(vocab, budget)))]


# Builder: the bug table by hand


def test_rows_1_and_2_ties_go_by_rank_path() -> None:
    """A first-in-first-out heap, or one that compares scores only, takes (0), (1)."""
    assert paths([[-1, -1], [0, -5]], 2) == [(0,), (0, 0)]


def test_row_3_no_chain_seed() -> None:
    assert paths([[-0.7, -0.7], [-3.0, -3.0], [-3.0, -3.0]], 3) == [(0,), (1,), (0, 0)]


def test_row_4_no_chain_when_the_budget_is_at_most_the_depth() -> None:
    assert paths(logs([[0.5, 0.45], [0.5, 0.4]]), 2) == [(0,), (1,)]


def test_row_5_no_depth_bonus() -> None:
    assert paths(logs([[0.5, 0.2, 0.19], [0.35, 0.3, 0.0]]), 3) == [(0,), (1,), (2,)]


def test_row_6_no_early_stop_on_branches() -> None:
    assert len(paths(logs([[0.9, 0.05, 0.03]] * 2), 9)) == 9


def test_row_7_no_width_cap() -> None:
    assert paths([[-2.0] * 8], 8) == [(rank,) for rank in range(8)]


def test_row_9_minus_infinity_is_no_node() -> None:
    tree = best_first_tree(draft_table(np.array([[0, -INF, -INF, -INF]], np.float32), 4), root=0, budget=4)
    assert (tree.count, tree.scores.tolist()) == (1, [0.0, 0.0])


@pytest.mark.parametrize(
    ("depths", "width", "budget", "count"), [(1, 2, 3, 2), (2, 2, 100, 6), (3, 1, 2, 2), (0, 4, 4, 0), (2, 0, 4, 0), (2, 3, 0, 0)]
)
def test_row_12_a_tree_may_be_smaller_than_its_budget(depths: int, width: int, budget: int, count: int) -> None:
    """N = min(B, sum of K**d)."""
    table = DraftTable(np.zeros((depths, width), np.int32), np.zeros((depths, width), np.float32))
    tree = best_first_tree(table, root=4, budget=budget)
    assert tree.count == count == min(budget, sum(width**d for d in range(1, depths + 1)))
    assert (tree.tokens[0], tree.parents[0]) == (4, -1)


def test_row_13_token_zero_is_a_token() -> None:
    tree = best_first_tree(DraftTable(np.array([[0, 3]], np.int32), np.array([[-0.5, -1.0]], np.float32)), root=0, budget=2)
    assert tree.tokens.tolist() == [0, 0, 3]
    assert tree.count == 2


def test_row_18_candidates_are_ids_of_the_whole_vocabulary() -> None:
    logits = np.full((1, 1000), -5, np.float32)
    logits[0, 999] = 5
    assert draft_table(logits, 1).ids.tolist() == [[999]]


def test_row_47_a_budget_above_one_thousand() -> None:
    rng = np.random.default_rng(0)
    table = draft_table(rng.standard_normal((4, 40)).astype(np.float32), 1200)
    tree = best_first_tree(table, root=0, budget=1200)
    assert tree.count == 1200
    assert (np.diff(tree.scores) <= 0).all()


@pytest.mark.parametrize("budget", [-1, BUDGET_MAX + 1, 10**9])
def test_row_58_budgets_out_of_range_are_refused(budget: int) -> None:
    with pytest.raises(TreeError, match=f"T5: budget is {budget}"):
        best_first_tree(table_of([[-1.0]]), root=0, budget=budget)
    with pytest.raises(TreeError, match=f"T5: budget is {budget}"):
        draft_table(np.zeros((1, 2), np.float32), budget)


@pytest.mark.parametrize(
    ("rows", "rule", "message"),
    [
        ([[float("nan")]], "T8", r"log_probs\[0, 0\] is nan"),
        ([[0.0, float("nan")]], "T8", r"log_probs\[0, 1\] is nan"),
        ([[-1.0, -2.0], [INF, -1.0]], "T8", r"log_probs\[1, 0\] is inf"),
        ([[-2.0, -1.0]], "T4", r"log_probs\[0\] ascends"),
        ([[-INF, -1.0]], "T4", r"log_probs\[0\] ascends"),
    ],
)
def test_tables_outside_the_domain_are_refused(rows: list[list[float]], rule: str, message: str) -> None:
    with pytest.raises(TreeError, match=message) as refusal:
        best_first_tree(table_of(rows), root=0, budget=4)
    assert refusal.value.rule == rule
    copy = pickle.loads(pickle.dumps(refusal.value))
    assert (str(copy), copy.rule) == (str(refusal.value), rule)


def test_a_table_of_two_shapes_is_refused() -> None:
    with pytest.raises(TreeError, match="must have one shape"):
        best_first_tree(DraftTable(np.zeros((1, 2), np.int32), np.zeros((1, 3), np.float32)), root=0, budget=1)


def test_a_log_prob_above_zero_keeps_the_tree_closed() -> None:
    """An engine's own rounding may leave one: a child then scores above its parent and still comes after it."""
    assert paths([[-1.0, -2.0], [2.0**-20, -5.0]], 3) == [(0,), (0, 0), (1,)]


# Positions and visibility


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 12))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def ancestors(parents: list[int], node: int) -> set[int]:
    return {node} if node == 0 else {node} | ancestors(parents, parents[node])


@many
@given(parent_lists(), st.integers(0, 6), st.one_of(st.none(), st.integers(1, 8)))
def test_a_row_sees_the_prefix_and_its_ancestors(parents: list[int], prefix_len: int, window: int | None) -> None:
    seen = visibility(parents, prefix_len, window=window)
    depth = [len(ancestors(parents, node)) - 1 for node in range(len(parents))]
    assert seen.shape == (len(parents), prefix_len + len(parents))
    assert positions(check_structure(parents), prefix_len).tolist() == [prefix_len + d for d in depth]
    for node, key in itertools.product(range(len(parents)), range(prefix_len + len(parents))):
        key_position = key if key < prefix_len else prefix_len + depth[key - prefix_len]
        wanted = key < prefix_len or key - prefix_len in ancestors(parents, node)
        wanted &= window is None or prefix_len + depth[node] - key_position < window
        assert seen[node, key] == wanted


def test_rows_25_and_27_positions_follow_depth_not_slot() -> None:
    assert positions(check_structure([-1, 0, 0, 2]), 4).tolist() == [4, 5, 5, 6]


def test_row_46_masks_wider_than_a_machine_word() -> None:
    """70 siblings: each sees the root and itself."""
    seen = visibility([-1] + [0] * 70, 0)
    assert seen[:, 0].all()
    assert np.array_equal(seen[:, 1:], np.eye(71, dtype=bool)[:, 1:])


def test_a_window_counts_positions_not_slots() -> None:
    """Node 3 is a child of node 2, two slots behind the root but one position: window 2 keeps its parent, slot P + 2."""
    assert visibility([-1, 0, 0, 2], 1, window=2)[3].tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, 0, 2], [-1, -1], [-1, 0, 3, 0], [-1, -2]])
def test_row_45_malformed_parents_are_refused(parents: list[int]) -> None:
    with pytest.raises(TreeError) as refusal:
        visibility(parents, 0)
    assert refusal.value.rule == "T6"


def test_a_token_twice_under_one_parent_is_refused() -> None:
    check_structure([-1, 0, 1], [4, 4, 4])
    with pytest.raises(TreeError, match="T6: nodes 1 and 2 are both token 4 under parent 0"):
        check_structure([-1, 0, 0], [4, 4, 4])
    with pytest.raises(TreeError, match="2 tokens, but 3 parents"):
        check_structure([-1, 0, 0], [4, 5])


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(TreeError, match="C3: window is 0"):
        visibility([-1], 3, window=0)


# Acceptance


def walk(tokens: list[int], parents: list[int], target: list[int], node: int = 0) -> tuple[list[int], int]:
    """A1 as a recursion over the children of a node."""
    for child in range(len(tokens)):
        if parents[child] == node and tokens[child] == target[node]:
            path, bonus = walk(tokens, parents, target, child)
            return [node, *path], bonus
    return [node], target[node]


@st.composite
def verified_trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Few tokens, so that the walk goes deep and the same token occurs in several branches."""
    tokens, parents = [draw(st.integers(0, 3))], [-1]
    for _ in range(draw(st.integers(0, 14))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 3))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents, [draw(st.integers(0, 3)) for _ in tokens]


@many
@given(verified_trees())
def test_acceptance_is_the_recursive_walk(case: tuple[list[int], list[int], list[int]]) -> None:
    tokens, parents, target = case
    accepted = accept_greedy(tokens, parents, target)
    path, bonus = walk(tokens, parents, target)
    assert (list(accepted.path), accepted.bonus) == (path, bonus)
    assert accepted == accept_greedy(*(np.array(values, np.int32) for values in case))


def test_row_28_row_i_judges_the_children_of_i() -> None:
    assert accept_greedy([7, 3], [-1, 0], [3, 9]).path == (0, 1)
    assert accept_greedy([7, 3], [-1, 0], [9, 3]).path == (0,)


def test_row_39_the_bonus_is_the_choice_of_the_last_accepted_row() -> None:
    accepted = accept_greedy([7, 1, 2, 3], [-1, 0, 0, 2], [2, 50, 3, 60])
    assert (accepted.path, accepted.bonus) == ((0, 2, 3), 60)


def test_row_56_the_order_of_siblings_does_not_matter_to_the_walk() -> None:
    assert accept_greedy([7, 2, 1], [-1, 0, 0], [1, 8, 9]) == accept_greedy([7, 9, 1], [-1, 0, 0], [1, 0, 9])


def test_acceptance_needs_one_target_per_node() -> None:
    with pytest.raises(TreeError, match="V1: there are 1 target ids, but 2 nodes"):
        accept_greedy([7, 3], [-1, 0], [3])


# Compaction


@many
@given(st.integers(0, 5), st.sets(st.integers(0, 7)), st.integers(0, 3))
def test_compaction_is_a_gather(prefix_len: int, kept: set[int], beyond: int) -> None:
    """K1, K2, K7: row P + j of the result is row P + path[j]; an in-order move in place gives the same."""
    path = sorted(kept)
    rows = np.arange((prefix_len + 8 + beyond) * 2, dtype=np.float32).reshape(-1, 2)
    before = rows.copy()
    out = compact(rows, prefix_len, path)
    assert out.shape == (prefix_len + len(path), 2)
    assert np.array_equal(rows, before)
    for j, index in enumerate(path):
        before[prefix_len + j] = before[prefix_len + index]
    assert np.array_equal(out, before[: prefix_len + len(path)])


def test_rows_16_and_37_path_rows_not_the_first_rows() -> None:
    assert compact(np.array([10, 20, 21, 22]), 1, [0, 2]).tolist() == [10, 20, 22]


@pytest.mark.parametrize("path", [[0, 0], [2, 1], [-1], [0, 3], [3]])
def test_row_38_paths_out_of_order_or_range_are_refused(path: list[int]) -> None:
    with pytest.raises(TreeError, match="K1: path holds"):
        compact(np.arange(5), 2, path)


def test_a_prefix_longer_than_the_cache_is_refused() -> None:
    with pytest.raises(TreeError, match="K1: prefix_len is 3, but the cache holds 2 rows"):
        compact(np.arange(2), 3, [])


# The emitted stream


@many
@given(st.lists(st.integers(0, 4), max_size=10), st.sets(st.integers(0, 4)), st.integers(0, 12))
def test_cut_keeps_the_first_stop_and_the_limit(tokens: list[int], stops: set[int], max_new: int) -> None:
    stop_at = [i + 1 for i, token in enumerate(tokens) if token in stops]
    assert cut(tokens, tuple(stops), max_new) == tuple(tokens[: min([max_new, *stop_at])])


def test_rows_55_and_57_cut_by_rule_not_by_value() -> None:
    assert cut([9, 0, 9, 4], (), 3) == (9, 0, 9)


# The same functions as operations: fixed widths, padded with -1


def test_the_operations_pad_to_fixed_widths() -> None:
    """C4: buffers of B + 1 rows whatever N is; token 0 is a node, -1 is none."""
    table = {"ids": np.array([[4, 0]], np.int32), "log_probs": np.array([[-0.5, -1.0]], np.float32)}
    tree = OPS["best_first_tree"].function(table, {"budget": 4, "root": 7})
    assert {name: values.tolist() for name, values in tree.items()} == {
        "tokens": [7, 4, 0, -1, -1],
        "parents": [-1, 0, 0, -1, -1],
        "depths": [0, 1, 1, -1, -1],
        "count": [2],
    }
    walked = {"tokens": [7, 4, 0], "parents": [-1, 0, 0], "target": [0, 8, 9]}
    accepted = OPS["accept"].function({name: np.array(values, np.int32) for name, values in walked.items()}, {})
    assert {name: values.tolist() for name, values in accepted.items()} == {"path": [0, 2, -1], "length": [2], "bonus": [9]}


@pytest.mark.parametrize("prefix_len", [0, 3])
def test_the_mask_operation_gives_positions_and_bytes(prefix_len: int) -> None:
    mask = OPS["tree_mask"].function({"parents": np.array([-1, 0, 0], np.int32)}, {"prefix_len": prefix_len})
    assert mask["positions"].tolist() == [prefix_len, prefix_len + 1, prefix_len + 1]
    assert mask["visible"].dtype == np.uint8
    assert mask["visible"].tolist() == [[1] * prefix_len + row for row in ([1, 0, 0], [1, 1, 0], [1, 0, 1])]
    with pytest.raises(TreeError, match="T6"):
        OPS["tree_mask"].function({"parents": np.array([-1, 2, 0], np.int32)}, {"prefix_len": prefix_len})


def test_the_compaction_operation_keeps_nothing_for_an_empty_path() -> None:
    """K3: a round may be dropped as a whole."""
    cache = np.arange(8, dtype=np.float32).reshape(4, 2)
    out = OPS["compact"].function({"cache": cache, "path": np.array([], np.int32)}, {"prefix_len": 3})["out"]
    assert np.array_equal(out, cache[:3])
