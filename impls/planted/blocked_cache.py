"""Plants on the blocked engine's cache: what a commit keeps, how rows move, pages that two sequences share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from impls.blocked.points import PAGE, Float, Site
from impls.planted.planting import CACHE, plant

Slots = NDArray[np.int64]


@plant("Z22", "keep", "e", "C04 sgl-project/sglang/pull/15360", CACHE, "path [0, 2]", nodes=2, needs=["tree", "rounds"])
def first_slots_kept(site: Site, path: Sequence[int], pending: int) -> Sequence[int]:
    return range(len(path))


@plant(
    "Z23",
    "keep",
    "e",
    "C10 NVIDIA/TensorRT-LLM/issues/10343",
    CACHE,
    "one draft accepted, one rejected",
    nodes=2,
    needs=["chain", "rejection"],
)
def one_row_too_many_rolled_back(site: Site, path: Sequence[int], pending: int) -> Sequence[int]:
    return path[:-1] if 1 < len(path) < pending else path


@plant("Z25", "keep", "e", "E14 ml-explore/mlx-lm/pull/1109", CACHE, "one draft rejected", nodes=1, needs=["rejection"])
def one_rejected_row_kept(site: Site, path: Sequence[int], pending: int) -> Sequence[int]:
    rejected = [row for row in range(pending) if row not in path]
    return [*path, *rejected[:1]]


@plant("E01", "keep", "e", "E01 ikawrakow/ik_llama.cpp/pull/1757", CACHE, "all drafts rejected", nodes=1, needs=["rejection"])
def no_rollback_after_an_early_end(site: Site, path: Sequence[int], pending: int) -> Sequence[int]:
    return range(pending) if len(path) == 1 else path


@plant("E17", "keep", "e", "E17 flexflow/flexflow-train/pull/714", CACHE, "a prompt of two rows")
def committed_one_slot_too_far(site: Site, path: Sequence[int], pending: int) -> Sequence[int]:
    return [min(row + 1, pending - 1) for row in path]


@plant("E15", "committed_len", "e", "E15 paiml/aprender/pull/2014", CACHE, "all drafts rejected", nodes=1, needs=["rejection"])
def length_reset_instead_of_rolled_back(site: Site, prefix_len: int, kept: int, pending: int) -> int:
    return kept if kept == 1 < pending else prefix_len + kept


@plant("E09", "committed_len", "e", "E09 InternLM/lmdeploy/pull/4685", CACHE, "one draft rejected", nodes=1, needs=["rejection"])
def length_added_twice(site: Site, prefix_len: int, kept: int, pending: int) -> int:
    return prefix_len + min(2 * kept, pending)


@plant("K2-short", "committed_len", "e", "E18 vllm-project/vllm/pull/55055", CACHE, "a second commit", nodes=0, needs=["rounds"])
def length_one_short_when_all_is_accepted(site: Site, prefix_len: int, kept: int, pending: int) -> int:
    """The token that has no row yet is subtracted although the root has one."""
    return prefix_len + kept - (1 if prefix_len and kept == pending else 0)


@plant("Z24", "move", "e", "E12 flashinfer-ai/flashinfer/pull/527", CACHE, "path [0, 2]", nodes=2, needs=["tree", "rounds"])
def rope_part_not_moved(site: Site, store: Float, target: Slots, source: Slots, kv_rank: int) -> None:
    store[:, target, :kv_rank] = store[:, source, :kv_rank]


@plant("latent-not-moved", "move", "e", "E07 sgl-project/sglang/pull/26866", CACHE, "path [0, 2]", nodes=2, needs=["tree", "rounds"])
def latent_part_not_moved(site: Site, store: Float, target: Slots, source: Slots, kv_rank: int) -> None:
    """The move of the latents is a stub; in run_op, where the row is one part, everything stays."""
    store[:, target, kv_rank:] = store[:, source, kv_rank:]


@plant(
    "Z26",
    "move",
    "e",
    "E07 sgl-project/sglang/pull/26866",
    CACHE,
    "a path across a page that is no prefix of the tree",
    nodes=2,
    needs=["tree", "rounds"],
)
def rows_beyond_the_page_not_moved(site: Site, store: Float, target: Slots, source: Slots, kv_rank: int) -> None:
    same = target // PAGE == target[:1] // PAGE
    site.honest(store, target[same], source[same], kv_rank)


@plant("move-order", "move", "e", "38 sgl-project/sglang/pull/26866", CACHE, "path [0, 2, 3]", nodes=3, needs=["tree", "chain", "rounds"])
def moved_in_place_from_the_back(site: Site, store: Float, target: Slots, source: Slots, kv_rank: int) -> None:
    for row in range(len(target) - 1, -1, -1):
        site.honest(store, target[row : row + 1], source[row : row + 1], kv_rank)


@plant("tree40", "move", "e", "40 sgl-project/sglang/pull/31215", CACHE, "path [0, 2]", nodes=2, needs=["tree", "rounds"])
def token_index_used_as_page_index(site: Site, store: Float, target: Slots, source: Slots, kv_rank: int) -> None:
    """A buffer indexed by page: whole pages move instead of rows, and a move within a page does nothing."""
    whole = store.shape[1] // PAGE * PAGE
    pages = store[:, :whole].reshape(len(store), -1, PAGE, store.shape[2])
    moved = (target != source) & (source < whole)
    pages[:, target[moved] // PAGE] = pages[:, source[moved] // PAGE]
    store[:, :whole] = pages.reshape(len(store), whole, -1)


@plant("tree36", "move", "e", "36 rmagur1203/vllm-ddtree", CACHE, "path [0, 2], two layers", nodes=2, needs=["tree", "rounds"])
def first_layer_not_compacted(site: Site, store: Float, target: Slots, source: Slots, kv_rank: int) -> None:
    """The block table of the first cache group is taken for that of all: its layers stay as they are."""
    site.honest(store[1:], target, source, kv_rank)


@plant("E05", "move", "e", "E05 Luce-Org/lucebox/pull/415", CACHE, "one commit", needs=["rounds"])
def rows_restored_from_fp16(site: Site, store: Float, target: Slots, source: Slots, kv_rank: int) -> None:
    with np.errstate(over="ignore"):
        store[:, target] = store[:, source].astype(np.float16)


@plant("K7-below", "move", "e", "E19 NVIDIA/TensorRT-LLM/pull/9693", CACHE, "a second commit", needs=["rounds"])
def row_below_the_prefix_written(site: Site, store: Float, target: Slots, source: Slots, kv_rank: int) -> None:
    """The rewind runs one row further: the slot before the first target is overwritten as well, where it is in the same page."""
    site.honest(store, target, source, kv_rank)
    if len(target) and target[0] % PAGE:
        store[:, target[0] - 1] = store[:, target[0]]


@plant(
    "E04", "shared_pages", "e", "E04 Luce-Org/lucebox/pull/371", CACHE, "a fork that goes on beside its source", needs=["fork", "rounds"]
)
def last_page_shared_by_a_fork(site: Site, pages: Sequence[int], length: int) -> Sequence[int]:
    return pages[: -(-length // PAGE)]


@plant("E08", "forgotten", "e", "E08 InternLM/lmdeploy/pull/4564", CACHE, "a sequence that comes back", needs=["evict"])
def last_row_survives_eviction(site: Site, length: int) -> int:
    return max(0, length - 1)
