"""Plants on the blocked engine's draft table, tree builder, acceptance walk and stream rules."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.blocked.points import Float, RankPath, Site
from impls.planted.planting import ACCEPT, STREAM, TABLE, TREE, also, bf16, plant
from spec.engine import Limits

Order = Callable[[int], list[RankPath]]
Table = Sequence[Sequence[float]]


# The table


@plant("C07", "draft_row", "c", "C07 ikawrakow/ik_llama.cpp/pull/2296", (*TABLE, "T1"), "two depths", nodes=1)
def table_shifted_by_one_slot(site: Site, depth: int) -> int:
    """The block is seeded one position early: depth d reads what belongs to depth d - 1."""
    return max(0, int(site.honest(depth)) - 1)


@plant("tree07", "log_prob", "c", "7 sgl-project/sglang/pull/29907", TABLE, "seven candidates", nodes=7)
def width_capped(site: Site, values: Float, normaliser: np.float32) -> Float:
    out: Float = site.honest(values, normaliser)
    out[6:] = -np.inf
    return out


@plant("tree09", "log_prob", "c", "9 liranringel/ddtree", TABLE, "a candidate of -inf", nodes=1, needs=["minus infinity"])
def minus_infinity_as_a_candidate(site: Site, values: Float, normaliser: np.float32) -> Float:
    out: Float = np.maximum(site.honest(values, normaliser), np.finfo(np.float32).min)
    return out


@plant("tree08", "candidates", "c", "8 z-lab/dflash", TABLE, "two logits that differ by less than 2^-8", nodes=1)
def candidates_of_bf16_logits(site: Site, row: Float, width: int) -> NDArray[np.int64]:
    out: NDArray[np.int64] = site.honest(bf16(row), width)
    return out


@also("tree08", "log_prob")
def _log_probs_of_bf16_logits(site: Site, values: Float, normaliser: np.float32) -> Float:
    out: Float = site.honest(bf16(values), normaliser)
    return out


@plant("logz-bf16", "log_normaliser", "c", "8 hao-ai-lab/JetSpec", TABLE, "one row", nodes=1)
def normaliser_in_bf16(site: Site, row: Float) -> np.float32:
    return np.float32(bf16(np.array([site.honest(row)]))[0])


@plant("D08", "log_normaliser", "c", "D08 ml-explore/mlx-examples/pull/1291", TABLE, "two depths", nodes=1)
def normalised_over_all_positions(site: Site, row: Float) -> np.float32:
    """The sum runs over all positions so far, not over the vocabulary of this one."""
    own: np.float32 = site.honest(row)
    site.memory["normaliser"] = np.logaddexp(own, site.memory.get("normaliser", np.float32(-np.inf)))
    return np.float32(site.memory["normaliser"])


@plant("top-k-ties", "candidates", "c", "I08 Pushkinist/rMLX/issues/373", TABLE, "two equal logits", nodes=1, needs=["ties"])
def last_of_equal_candidates(site: Site, row: Float, width: int) -> NDArray[np.int64]:
    return len(row) - 1 - np.argsort(-row[::-1], kind="stable")[:width]


@plant("tree18", "token_ids", "c", "18 sgl-project/sglang/pull/29907", TABLE, "a candidate of the upper half of the vocabulary", nodes=1)
def ids_of_padded_shards(site: Site, columns: NDArray[np.int64], vocab: int) -> NDArray[np.int64]:
    """Columns of two shards, the first padded by one, are used as token ids."""
    return np.minimum(columns + (columns >= (vocab + 1) // 2), vocab - 1)


@plant("tree11", "candidates", "j", "11 jroth1111/ddtree-mlx", (*TABLE, *TREE), "a budget of at least the vocabulary", nodes=1)
def selection_of_everything_fails(site: Site, row: Float, width: int) -> NDArray[np.int64]:
    return np.argpartition(-row, width)[:width][np.argsort(-row[np.argpartition(-row, width)[:width]], kind="stable")]


# The order


@plant(
    "tree01", "heap_key", "c", "1 warpfront/hipfire/blob/2ce82ba/ddtree.rs", TREE, "[[-1, -1], [0, -5]], budget 2", nodes=2, needs=["ties"]
)
def ties_first_in_first_out(site: Site, value: Any, ranks: RankPath, pushed: int) -> Any:
    return (-value, pushed)


@plant("tree02", "heap_key", "c", "2 Luce-Org/lucebox/blob/8305b6c/ddtree.cpp", TREE, "two equal scores", nodes=3, needs=["ties"])
def ties_left_to_the_heap(site: Site, value: Any, ranks: RankPath, pushed: int) -> Any:
    """Only scores are compared; this library's heap pops the newest of equals."""
    return (-value, -pushed)


@plant("Z13", "heap_key", "c", "C11 openvinotoolkit/openvino.genai/pull/3451", TREE, "two equal scores", nodes=2, needs=["ties"])
def ties_the_other_way(site: Site, value: Any, ranks: RankPath, pushed: int) -> Any:
    return (-value, tuple(-rank for rank in ranks))


@plant("C11", "heap_key", "c", "C11 openvinotoolkit/openvino.genai/pull/3451", TREE, "several equal scores", nodes=2, needs=["ties"])
def ties_by_address(site: Site, value: Any, ranks: RankPath, pushed: int) -> Any:
    """An address is as good as a hash of the path."""
    return (-value, hash((ranks, 17)))


@plant("Z15", "node_budget", "c", "19 sgl-project/sglang/pull/29907", TREE, "a budget of 1", nodes=1)
def root_counted_in_the_budget(site: Site, budget: int, depth_max: int) -> int:
    return max(0, budget - 1)


@plant("Z16", "path_score", "c", "5 hao-ai-lab/JetSpec", TREE, "a deep node that beats its parent's sibling alone", nodes=2)
def score_of_the_last_step_only(site: Site, parent_score: Any, value: float) -> Any:
    return site.honest(0, value)


@plant("tree05", "path_score", "c", "5 sgl-project/sglang/pull/29907", TREE, "a child within 0.2 of a sibling", nodes=2)
def bonus_on_every_child(site: Site, parent_score: Any, value: float) -> Any:
    return site.honest(parent_score, value + (0.2 if parent_score else 0.0))


@plant("tree03", "select", "c", "3 Luce-Org/lucebox/blob/8305b6c/ddtree.cpp", TREE, "three depths, a chain that scores badly", nodes=2)
def chain_seeded_first(site: Site, order: Order, log_probs: Table, budget: int) -> list[RankPath]:
    chain = [(0,) * depth for depth in range(1, min(len(log_probs), budget) + 1) if all(log_probs[:depth])]
    rest = (path for path in order(budget + len(chain)) if path not in chain)
    return [*chain, *itertools.islice(rest, max(0, budget - len(chain)))]


@plant("tree04", "select", "c", "4 sgl-project/sglang/pull/29907", TREE, "q = [[.5, .45], [.5, .4]], budget 2", nodes=2)
def chain_for_small_budgets(site: Site, order: Order, log_probs: Table, budget: int) -> list[RankPath]:
    if budget <= len(log_probs) and all(log_probs[:budget]):
        return [(0,) * depth for depth in range(1, budget + 1)]
    return order(budget)


@plant("tree06", "select", "c", "6 sgl-project/sglang/pull/29907", TREE, "one depth, a second candidate 2 nats behind, budget 2", nodes=2)
def branches_stopped_early(site: Site, order: Order, log_probs: Table, budget: int) -> list[RankPath]:
    if not log_probs or not log_probs[0] or budget < 1:
        return order(budget)
    limit = log_probs[0][0] - math.log(budget) - 1

    def goes_on(path: RankPath) -> bool:
        return not any(path) or sum(log_probs[depth][rank] for depth, rank in enumerate(path)) >= limit

    return list(itertools.takewhile(goes_on, order(budget)))


@plant("jetspec-eager", "select", "c", "DDTREE:T3 hao-ai-lab/JetSpec", TREE, "two candidates at two depths", nodes=2)
def children_expanded_eagerly(site: Site, order: Order, log_probs: Table, budget: int) -> list[RankPath]:
    """All children of a popped node join the tree at once."""
    paths: list[RankPath] = []
    heap: list[tuple[float, int, RankPath]] = [(0.0, 0, ())]
    while heap and len(paths) < budget:
        cost, _, path = heapq.heappop(heap)
        for rank, value in enumerate(log_probs[len(path)] if len(path) < len(log_probs) else ()):
            paths.append((*path, rank))
            heapq.heappush(heap, (cost - value, len(paths), paths[-1]))
    return paths[:budget]


@plant("bfs-numbers", "select", "c", "DDTREE:T3 sgl-project/sglang/pull/29907", TREE, "a deep node before a sibling", nodes=3)
def numbered_level_by_level(site: Site, order: Order, log_probs: Table, budget: int) -> list[RankPath]:
    return sorted(order(budget), key=len)


@plant("depth-cap", "select", "c", "C02 NVIDIA/TensorRT-LLM/issues/10323", TREE, "a node at the last depth", nodes=2)
def last_depth_never_used(site: Site, order: Order, log_probs: Table, budget: int) -> list[RankPath]:
    """The tables of the last layer are never reached, unless it is the first."""
    deep = len(log_probs) - 1 if len(log_probs) > 1 else 1
    return [path for path in order(4 * budget + 4) if len(path) <= deep][:budget]


@plant("C02", "parent_numbers", "j", "C02 NVIDIA/TensorRT-LLM/issues/10323", TREE, "children of the root and no grandchildren", nodes=1)
def next_layer_assumed_to_exist(site: Site, paths: Sequence[RankPath]) -> list[int]:
    layers = [[p for p in paths if len(p) == depth] for depth in range(1, max(map(len, paths), default=0) + 1)]
    if layers:
        assert layers[1] is not None  # raises IndexError: there is no second layer
    out: list[int] = site.honest(paths)
    return out


@plant("tree12", "select", "j", "12 sgl-project/sglang/tree/514ea1f3e", TREE, "fewer paths than the budget", nodes=1)
def exactly_as_many_nodes_as_the_budget(site: Site, order: Order, log_probs: Table, budget: int) -> list[RankPath]:
    buffer = np.empty(budget, np.object_)
    buffer[:] = order(budget)  # raises ValueError when the shapes differ
    return list(buffer)


@plant(
    "tree47",
    "select",
    "j",
    "47 sgl-project/sglang/blob/main/sgl-kernel/csrc/speculative/eagle_utils.cu",
    TREE,
    "a budget of 32",
    nodes=32,
    needs=["long"],
)
def launch_fails_for_large_budgets(site: Site, order: Order, log_probs: Table, budget: int) -> list[RankPath]:
    """One thread a node, and a block has 32 threads here (1024 there)."""
    if budget >= 32:
        raise RuntimeError("invalid configuration argument")
    return order(budget)


@plant("parent-off", "parent_numbers", "c", "28 patrickbdevaney/dflash-caddtree-integrations", TREE, "a node of depth 2", nodes=2)
def parents_count_from_the_first_child(site: Site, paths: Sequence[RankPath]) -> list[int]:
    """Numbers without the root (0 is the first child) land in a table with the root."""
    return [max(0, parent - 1) for parent in site.honest(paths)]


@plant("token-off", "node_token", "c", "28 patrickbdevaney/dflash-caddtree-integrations", TREE, "two candidates", nodes=1)
def token_of_the_next_rank(site: Site, ids: Sequence[Sequence[int]], ranks: RankPath) -> int:
    row = ids[len(ranks) - 1]
    return row[min(ranks[-1] + 1, len(row) - 1)]


# Acceptance


@plant(
    "Z14",
    "child_of",
    "c",
    "C05 SafeAILab/EAGLE/commit/80cd31ec4bff57a660e45cac576372e38b2a76d4",
    ACCEPT,
    "an accepted child that does not follow its sibling",
    nodes=3,
    needs=["tree"],
)
def next_sibling_is_the_next_node(site: Site, node: int, token: int, tokens: Sequence[int], parents: Sequence[int]) -> int:
    child = next((n for n in range(node + 1, len(tokens)) if parents[n] == node), -1)
    while child >= 0 and tokens[child] != token:
        child = child + 1 if child + 1 < len(tokens) and parents[child + 1] == node else -1
    return child


@plant("tree13", "child_of", "d", "13 sgl-project/sglang/pull/27509", ACCEPT, "an accepted draft of token 0", nodes=1)
def token_zero_taken_for_padding(site: Site, node: int, token: int, tokens: Sequence[int], parents: Sequence[int]) -> int:
    return -1 if token == 0 else int(site.honest(node, token, tokens, parents))


@plant("tree28", "deciding_row", "d", "28 patrickbdevaney/dflash-caddtree-integrations", ACCEPT, "root with one child", nodes=1)
def decided_by_the_next_row(site: Site, node: int, parents: Sequence[int]) -> int:
    return min(node + 1, len(parents) - 1)


@plant("Z17", "accepted", "d", "D01 vllm-project/vllm/pull/2658", ACCEPT, "a miss, then a match, along a chain", nodes=2)
def matches_counted_instead_of_the_leading_run(
    site: Site, path: list[int], tokens: Sequence[int], parents: Sequence[int], target: Sequence[int]
) -> list[int]:
    matches = sum(tokens[node] == target[parents[node]] for node in range(1, len(tokens)))
    out = list(path)
    while len(out) <= matches and out[-1] in parents:
        out.append(parents.index(out[-1]))
    return out


@plant("last-draft-lost", "accepted", "d", "41 openvinotoolkit/openvino.genai/pull/3396", ACCEPT, "one accepted draft", nodes=1)
def accepted_without_the_last(
    site: Site, path: list[int], tokens: Sequence[int], parents: Sequence[int], target: Sequence[int]
) -> list[int]:
    """Indices with the root meet tokens without it: the last draft falls off. Lossless, only slower."""
    return path[:-1] if len(path) > 1 else path


@plant("tree31", "accepted", "d", "31 rmagur1203/vllm-ddtree", ACCEPT, "a first child that is no match", nodes=1)
def first_child_accepted_unseen(
    site: Site, path: list[int], tokens: Sequence[int], parents: Sequence[int], target: Sequence[int]
) -> list[int]:
    """A draft at the head of the tree is accepted as if its row had been causal."""
    return path if len(path) > 1 or len(tokens) < 2 else [0, 1]


@plant("Z18", "bonus", "d", "39 sgl-project/sglang/pull/15360", ACCEPT, "one accepted draft", nodes=1)
def bonus_from_the_parent_row(site: Site, path: Sequence[int], parents: Sequence[int], target: Sequence[int]) -> int:
    return target[max(0, parents[path[-1]])]


@plant("D11", "bonus", "d", "D11 Luce-Org/lucebox/commit/181ca78a4baab812376e1197f28b0e334de7d463", ACCEPT, "an accepted leaf", nodes=0)
def sentinel_at_a_leaf(site: Site, path: Sequence[int], parents: Sequence[int], target: Sequence[int]) -> int:
    return target[path[-1]] if path[-1] in parents else -1


@plant("bonus-last-row", "bonus", "d", "39 sgl-project/sglang/pull/26866", ACCEPT, "root with one child that is no match", nodes=1)
def bonus_from_the_last_row(site: Site, path: Sequence[int], parents: Sequence[int], target: Sequence[int]) -> int:
    """The stride is the number of drafts, not the width of the accepted path."""
    return target[-1]


# The stream


@plant("tree55", "emitted", "d", "55 z-lab/dflash/pull/76", STREAM, "an accepted draft that is token 1", nodes=1, needs=["generate"])
def mask_token_removed_by_value(site: Site, path: Sequence[int], tokens: Sequence[int], bonus: int) -> list[int]:
    """Accepted drafts equal to the mask token (1 here) are taken for unfilled slots."""
    *drafts, last = site.honest(path, tokens, bonus)
    return [*(token for token in drafts if token != 1), last]


@plant(
    "Z19",
    "stream_end",
    "d",
    "D06 LostRuins/koboldcpp/issues/1276",
    STREAM,
    "a stop token in the middle of a path",
    nodes=1,
    needs=["generate", "stop"],
)
def stop_tested_on_the_last_token_only(site: Site, stream: Sequence[int], fresh: int, limits: Limits) -> int | None:
    end: int | None = site.honest(stream, min(fresh, 1), limits)
    return end


@plant(
    "D07",
    "stream_end",
    "d",
    "D07 sgl-project/sglang/pull/33758",
    STREAM,
    "a stop token in the round that reaches the limit",
    nodes=1,
    needs=["generate", "stop"],
)
def limit_tested_before_the_stop(site: Site, stream: Sequence[int], fresh: int, limits: Limits) -> int | None:
    end: int | None = site.honest(stream, fresh, limits)
    return limits.max_new if len(stream) >= limits.max_new else end


@plant(
    "tree57", "stream_end", "d", "57 unslothai/llama.cpp/pull/224", STREAM, "a path longer than what is left", nodes=1, needs=["generate"]
)
def last_path_not_cut(site: Site, stream: Sequence[int], fresh: int, limits: Limits) -> int | None:
    end: int | None = site.honest(stream, fresh, limits)
    return end if end is None or end < limits.max_new else len(stream)


@plant("stop-exclusive", "stream_end", "d", "D06 LostRuins/koboldcpp/issues/1276", STREAM, "a stop token", needs=["generate", "stop"])
def stop_token_not_emitted(site: Site, stream: Sequence[int], fresh: int, limits: Limits) -> int | None:
    end: int | None = site.honest(stream, fresh, limits)
    return end - 1 if end is not None and stream[end - 1] in limits.stop_tokens else end


@plant("C08", "draft_history", "c", "C08 warpfront/hipfire/pull/483", (*TREE, *TABLE, "T1", "D1"), "one round", nodes=1, needs=["generate"])
def root_replaced_by_the_mask_token(site: Site, history: list[int]) -> list[int]:
    """Block slot 0 carries the mask token (0 here), not the root: lossless, lower acceptance."""
    return [*history[:-1], 0]


@plant(
    "E02",
    "draft_history",
    "e",
    "E02 ikawrakow/ik_llama.cpp/pull/2222",
    (*TREE, *TABLE, "T1", "D3"),
    "two rounds",
    nodes=1,
    needs=["generate", "rounds"],
)
def history_of_the_round_before(site: Site, history: list[int]) -> list[int]:
    """The drafter's context is overwritten too late: it drafts from what it knew a round ago."""
    seen: list[list[int]] = site.memory.setdefault("histories", [])
    before = [old for old in seen if len(old) < len(history) and old == history[: len(old)]]
    seen.append(list(history))
    return max(before, key=len, default=history)
