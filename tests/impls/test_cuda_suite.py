"""The 27 named checks of the DDTree kernels against NumPy: nine of the tree builder, nine of tree-verify attention, nine of greedy accept.

Each runs on the emulator, and on a GPU with `-m gpu`. The references below are written for this file from the definitions: brute force over
all rank paths, softmax in float64, a walk in plain Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from impls.cuda.kernels import Kernels, Pages
from tests.impls.cuda_devices import DEVICES, device_of

Check = Callable[[Kernels], None]
SCALE = 0.125


@pytest.fixture(scope="module", params=DEVICES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(device_of(request.param))


# References


def brute_force(ids: NDArray[Any], log_probs: NDArray[Any], budget: int, root: int) -> tuple[list[int], list[int], list[int]]:
    """tokens, parents, depths of the first `budget` of all rank paths by (exact score descending, path ascending)."""
    depth_max, width = log_probs.shape
    ranks = [[r for r in range(width) if log_probs[d, r] > -np.inf] for d in range(depth_max)]
    paths = [path for d in range(1, depth_max + 1) for path in itertools.product(*ranks[:d])]
    score = {path: sum(Fraction(float(log_probs[d, r])) for d, r in enumerate(path)) for path in paths}
    order = sorted(paths, key=lambda path: (-score[path], path))[:budget]
    number = {path: i + 1 for i, path in enumerate(order)} | {(): 0}
    tokens = [root] + [int(ids[len(path) - 1, path[-1]]) for path in order]
    return tokens, [-1] + [number[path[:-1]] for path in order], [0] + [len(path) for path in order]


def attention(q: NDArray[Any], cache: NDArray[Any], seen: NDArray[Any], kv_rank: int) -> NDArray[np.float64]:
    """float64, a row that sees nothing is 0."""
    out = np.zeros((*q.shape[:2], kv_rank))
    for t, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        keys = cache[seen[t]].astype(np.float64)
        if len(keys):
            scores = keys @ q[t, h].astype(np.float64) * SCALE
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ keys[:, :kv_rank] / weights.sum()
    return out


def walk(tokens: list[int], parents: list[int], target: list[int]) -> tuple[list[int], int]:
    path = [0]
    while True:
        wanted = target[path[-1]]
        child = [i for i in range(1, len(tokens)) if parents[i] == path[-1] and tokens[i] == wanted]
        if not child:
            return path, wanted
        path.append(child[0])


# The tree builder


def built(k: Kernels, log_probs: NDArray[Any], budget: int, root: int = 5) -> None:
    depth_max, width = log_probs.shape
    ids = np.array([[100 * d + (7 * r + 3) % 97 for r in range(width)] for d in range(depth_max)], np.int32).reshape(depth_max, width)
    status = k.device.zeros((1,), np.int32)
    found = k.best_first_tree(k.device.upload(ids), k.device.upload(log_probs.astype(np.float32)), budget, root, status)
    tokens, parents, depths, count = map(k.device.download, found)
    right = brute_force(ids, log_probs.astype(np.float32), budget, root)
    assert int(k.device.download(status)[0]) == 0
    assert int(count[0]) == len(right[0]) - 1
    for name, own, expected in zip(("tokens", "parents", "depths"), (tokens, parents, depths), right, strict=True):
        assert own[: len(expected)].tolist() == expected, name
        assert (own[len(expected) :] == -1).all(), name


def table(seed: int, depth_max: int, width: int, grid: float = 0.0) -> NDArray[np.float32]:
    steps = np.abs(np.random.default_rng(seed).standard_normal((depth_max, width)))
    if grid:
        steps = np.floor(steps / grid) * grid
    return (-np.cumsum(steps, axis=1)).astype(np.float32)


def builder_ordinary(k: Kernels) -> None:
    built(k, table(1, 4, 6), 40)


def builder_exact_ties(k: Kernels) -> None:
    built(k, table(2, 4, 5, grid=0.5), 60)


def builder_all_equal(k: Kernels) -> None:
    built(k, np.zeros((3, 4), np.float32), 50)


def builder_fewer_nodes_than_budget(k: Kernels) -> None:
    built(k, table(3, 2, 3), 64)


def builder_one_candidate(k: Kernels) -> None:
    built(k, table(4, 6, 1), 9)


def builder_hopeless_candidates(k: Kernels) -> None:
    values = table(5, 3, 5)
    values[0, 3:] = values[1, 2:] = values[2, 0:] = -np.inf
    built(k, values, 20)


def builder_sums_below_a_float32_ulp(k: Kernels) -> None:
    steps = np.floor(np.random.default_rng(6).random((3, 6)) * 8) * 2.0**-18
    values = -np.cumsum(steps, axis=1)
    values[0] -= 4096
    built(k, values.astype(np.float32), 60)


def builder_wide_range_of_magnitudes(k: Kernels) -> None:
    built(k, (table(7, 3, 6) * np.array([[1e-6], [1.0], [1e5]])).astype(np.float32), 60)


def builder_nested_budgets(k: Kernels) -> None:
    for budget in (1, 2, 31, 32, 33):
        built(k, table(8, 4, 5, grid=0.25), budget)


# Tree-verify attention


def attended(
    k: Kernels, rows: int, heads: int, prefix: int, kv_rank: int, rope_dim: int, *, page: int = 0, seed: int = 0, empty: bool = False
) -> None:
    """Random queries, cache and tree; pages of `page` rows in shuffled order if it is not 0."""
    rng = np.random.default_rng(seed)
    width, keys = kv_rank + rope_dim, prefix + rows
    q, cache = rng.standard_normal((rows, heads, width)).astype(np.float32), rng.standard_normal((keys, width)).astype(np.float32)
    parents = np.array([-1, *(int(rng.integers(max(0, i - 3), i)) for i in range(1, rows))], np.int32)
    positions, bits, visible = k.tree_mask(k.device.upload(parents), prefix, k.device.zeros((1,), np.int32))
    seen = k.device.download(visible).astype(bool)
    for row in range(rows):  # the mask itself, from its definition
        expected, node = {row}, row
        while parents[node] >= 0:
            node = int(parents[node])
            expected.add(node)
        assert np.flatnonzero(seen[row, prefix:]).tolist() == sorted(expected)
        assert int(k.device.download(positions)[row]) == prefix + len(expected) - 1
    if empty:
        bits = k.device.upload(np.zeros((rows, -(-rows // 32)), np.uint32))
        seen[:, prefix:] = False
    store, pages = cache, None
    if page:
        count = -(-keys // page)
        order = rng.permutation(count + 2)[:count]
        store = np.full(((count + 2) * page, width), np.nan, np.float32)
        for row in range(keys):
            store[order[row // page] * page + row % page] = cache[row]
        pages = Pages(k.device.upload(order.astype(np.int32)), page)
    out = k.tree_attention(k.device.upload(q), k.device.upload(store), bits, prefix, keys, kv_rank, SCALE, pages=pages)
    right = attention(q, cache, seen, kv_rank)
    # gamma(width + 2) of the scores' absolute sums moves a weight, gamma(keys) the sum over keys: N1
    unit = 2.0**-24
    score_error = (width + 2) * unit * SCALE * np.abs(q).max() * np.abs(cache).max() * width
    bound = (2 * score_error + (2 * keys + 40) * unit) * np.abs(cache).max() * 2
    assert np.abs(k.device.download(out) - right).max() <= bound


def attention_small(k: Kernels) -> None:
    attended(k, 5, 3, 9, 16, 8)


def attention_without_prefix(k: Kernels) -> None:
    attended(k, 7, 2, 0, 16, 8, seed=1)


def attention_one_row(k: Kernels) -> None:
    attended(k, 1, 4, 33, 16, 8, seed=2)


def attention_mask_of_two_words(k: Kernels) -> None:
    attended(k, 33, 1, 3, 8, 4, seed=3)


def attention_pages(k: Kernels) -> None:
    attended(k, 5, 2, 30, 16, 8, page=16, seed=4)


def attention_rows_that_see_nothing(k: Kernels) -> None:
    attended(k, 4, 2, 0, 16, 8, seed=5, empty=True)


def attention_production_width(k: Kernels) -> None:
    attended(k, 3, 3, 40, 512, 64, seed=6)


def attention_production_width_pages(k: Kernels) -> None:
    attended(k, 2, 5, 70, 512, 64, page=16, seed=7)


def attention_production_width_splits(k: Kernels) -> None:
    attended(k, 2, 2, 300, 512, 64, seed=8)


# Greedy accept


def accepted(k: Kernels, tokens: list[int], parents: list[int], target: list[int]) -> None:
    status = k.device.zeros((1,), np.int32)
    arrays = [k.device.upload(np.array(values, np.int32)) for values in (tokens, parents, target)]
    path, length, bonus = map(k.device.download, k.accept(*arrays, status))
    right, right_bonus = walk(tokens, parents, target)
    assert int(k.device.download(status)[0]) == 0
    assert path[: length[0]].tolist() == right and (path[length[0] :] == -1).all()
    assert int(bonus[0]) == right_bonus


def accept_nothing(k: Kernels) -> None:
    accepted(k, [1, 2, 3], [-1, 0, 0], [9, 9, 9])


def accept_whole_chain(k: Kernels) -> None:
    accepted(k, [1, 2, 3, 4], [-1, 0, 1, 2], [2, 3, 4, 8])


def accept_root_alone(k: Kernels) -> None:
    accepted(k, [7], [-1], [3])


def accept_second_sibling(k: Kernels) -> None:
    accepted(k, [1, 2, 3, 4, 5], [-1, 0, 0, 2, 2], [3, 0, 5, 0, 6])


def accept_same_token_under_other_parents(k: Kernels) -> None:
    accepted(k, [1, 2, 3, 2, 2], [-1, 0, 0, 1, 2], [3, 2, 2, 9, 4])


def accept_node_numbers_interleave(k: Kernels) -> None:
    accepted(k, [0, 5, 6, 5, 6, 5, 6], [-1, 0, 0, 2, 1, 4, 3], [5, 6, 5, 6, 5, 7, 8])


def accept_target_of_a_rejected_node(k: Kernels) -> None:
    accepted(k, [1, 2, 3, 4], [-1, 0, 1, 1], [2, 4, 9, 9])


def accept_full_budget(k: Kernels) -> None:
    rng = np.random.default_rng(9)
    parents = [-1, *(int(rng.integers(max(0, i - 4), i)) for i in range(1, 600))]
    born: dict[int, int] = {}
    tokens = [0]
    for parent in parents[1:]:
        born[parent] = born.get(parent, 0) + 1
        tokens.append(10 * (parent % 7) + born[parent])
    target = [-5] * 600
    for node in range(599, 0, -1):
        target[parents[node]] = tokens[node]
    accepted(k, tokens, parents, target)


def accept_then_compact(k: Kernels) -> None:
    """The rows of the accepted path move to the end of the prefix in every layer, and nothing below changes."""
    tokens, parents, target = [1, 2, 3, 4, 5, 6], [-1, 0, 0, 2, 2, 4], [3, 0, 5, 0, 6, 9]
    arrays = [k.device.upload(np.array(values, np.int32)) for values in (tokens, parents, target)]
    path, length, _ = k.accept(*arrays, k.device.zeros((1,), np.int32))
    store = np.random.default_rng(3).standard_normal((2, 10, 24)).astype(np.float32)
    on_device = k.device.upload(store)
    k.compact_layers(on_device, path, length, 4)
    right = np.array(store)
    for j, node in enumerate(walk(tokens, parents, target)[0]):
        right[:, 4 + j] = store[:, 4 + node]
    kept = 4 + int(k.device.download(length)[0])
    assert np.array_equal(k.device.download(on_device)[:, :kept], right[:, :kept])


CHECKS: tuple[Check, ...] = (
    builder_ordinary, builder_exact_ties, builder_all_equal, builder_fewer_nodes_than_budget, builder_one_candidate, builder_hopeless_candidates,
    builder_sums_below_a_float32_ulp, builder_wide_range_of_magnitudes, builder_nested_budgets,
    attention_small, attention_without_prefix, attention_one_row, attention_mask_of_two_words, attention_pages, attention_rows_that_see_nothing,
    attention_production_width, attention_production_width_pages, attention_production_width_splits,
    accept_nothing, accept_whole_chain, accept_root_alone, accept_second_sibling, accept_same_token_under_other_parents,
    accept_node_numbers_interleave, accept_target_of_a_rejected_node, accept_full_budget, accept_then_compact,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_kernels_agree_with_numpy(kernels: Kernels, check: Check) -> None:
    check(kernels)
    kernels.device.check_guards()  # type: ignore[attr-defined]


def test_the_suite_has_27_checks() -> None:
    assert len(CHECKS) == 27 == len(set(CHECKS))
