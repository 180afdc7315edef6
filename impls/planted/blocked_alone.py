"""Plants that one way of looking finds and all others pass over: each falls to one relation alone, or to one hazard alone.

tests/campaigns/test_alone.py runs every relation (and every hazard) on each of them. Relations are nine ways of running a session twice
(campaigns/relations.py); hazards are unfriendly ways of handing over the same numbers (campaigns/hazards.py).
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from impls.blocked.points import PAGE, Bool, Float, Site, Span
from impls.planted.planting import ANY, CACHE, MASK, SCORES, SOFTMAX, bf16, plant

READ = ("o_latent", *SCORES, *SOFTMAX, "C6", "C7")
LANES = 4  # words that go through a register at once
TILE_WORDS = 64  # of a tile that is addressed by column -1


# One relation alone


@plant(
    "level-shortcut",
    "visible",
    "b",
    "B14 PaddlePaddle/FastDeploy/pull/3514",
    MASK,
    "a node of depth 3, and two of depth 1",
    nodes=4,
    needs=["tree"],
)
def whole_levels_far_above_unmasked(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """`chain`: tiles hold a level of the tree; those two levels and more above a row count as below the diagonal, and skip the mask."""
    seen: Bool = site.honest(parents, prefix_len)
    depth = np.zeros(len(parents), np.int64)
    for row, parent in enumerate(parents):
        depth[row] = depth[parent] + 1 if parent >= 0 else 0
    seen[:, prefix_len:] |= depth[:, None] - 2 >= depth[None, :]
    return seen


@plant("next-row-mask", "visible", "c", "C01 NVIDIA/TensorRT-LLM/pull/12962", MASK, "root with two children", nodes=2, needs=["tree"])
def row_of_the_next_sibling(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """`siblings`: a gather of mask rows by rank is one off where the next row has the same parent: a node sees its sibling, not itself."""
    seen: Bool = site.honest(parents, prefix_len)
    for row in range(len(parents) - 1):
        if parents[row] == parents[row + 1] >= 0:
            seen[row] = seen[row + 1]
    return seen


@plant(
    "all-accepted",
    "committed_len",
    "d",
    "D02 vllm-project/vllm/pull/9730",
    CACHE,
    "a tree of one node that is accepted",
    nodes=1,
    needs=["rounds"],
)
def last_row_lost_when_all_is_accepted(site: Site, prefix_len: int, kept: int, pending: int) -> int:
    """`rejected`: drafts that are all accepted leave the row of the last one out, because it normally comes with the bonus token."""
    return prefix_len + kept - (1 if prefix_len and kept == pending > 1 else 0)


@plant(
    "split-bf16",
    "normalise",
    "g",
    "G06 deepseek-ai/FlashMLA/commit/c7590278ce1bfb86440e514c697bc4190aecd19c",
    SOFTMAX,
    "one row and nine keys",
)
def long_decode_hands_over_bf16(site: Site, weights: Float, total: Float) -> Float:
    """`decode`: one row over more than two pages of keys takes the split kernel, whose probabilities go through bf16."""
    out: Float = site.honest(weights, total)
    return bf16(out) if out.shape[0] == 1 and out.shape[2] > 2 * PAGE else out


@plant(
    "table-of-three",
    "table_row",
    "e",
    "E04 Luce-Org/lucebox/pull/371",
    (*CACHE, *READ, "commit", "forward", "fork"),
    "two sequences with numbers above 1",
    needs=["sequences"],
)
def page_table_of_three_rows(site: Site, sequence: int) -> int:
    """`numbers`: the page table has three rows, and larger numbers share the last one."""
    return min(sequence, 2)


@plant("short-prefix", "visible", "e", "E10 ModelTC/LightLLM/pull/477", MASK, "a prompt in two chunks, the first shorter than a page")
def prefix_below_a_page_forgotten(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """`chunks`: the prefix is looked up in whole pages, and one that fills none counts as empty."""
    seen: Bool = site.honest(parents, prefix_len)
    if prefix_len < PAGE:
        seen[:, :prefix_len] = False
    return seen


@plant(
    "first-key-lost",
    "batch",
    "h",
    "H14 flashinfer-ai/flashinfer/pull/4382",
    (*MASK, *SCORES),
    "two sequences in a batch",
    needs=["sequences"],
)
def later_requests_start_one_key_late(site: Site, spans: list[Span]) -> list[Span]:
    """`alone`: key offsets of the requests after the first come from a sum that was shifted twice, so that their first key is not read."""
    out = spans[:1]
    for span in spans[1:]:
        seen = span.seen.copy()
        seen[:, 0] = False
        out.append(dataclasses.replace(span, seen=seen))
    return out


# One hazard alone. `prefill` falls to H05, `budget` to bfs-numbers, the hazards `views` and `fork` to K04 and E04,
# `orphan` and `late` to the fresh plants fork-not-counted and decode-after-prefill.


def _allocation(array: NDArray[np.generic]) -> tuple[int, int]:
    """Address and size of the memory that an array was cut from."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner.ctypes.data, owner.nbytes


@plant(
    "lane-before",
    "operand",
    "h",
    "H21 ModelTC/LightLLM/pull/1460",
    ANY,
    "an operand of two rows behind other memory",
    needs=["op"],
)
def column_before_the_first_times_zero(site: Site, array: NDArray[np.generic]) -> NDArray[np.generic]:
    """`poison`: column -1 is read and weighted by 0: harmless, unless what lies there is no number. Only inside of the allocation."""
    out = np.array(array)
    start, _ = _allocation(array)
    if out.dtype == np.float32 and array.flags.c_contiguous and len(array) > 1 and array.ctypes.data - start >= out.itemsize:
        out.flat[0] += np.float32(0) * np.float32(ctypes.c_float.from_address(array.ctypes.data - out.itemsize).value)
    return out


@plant(
    "lanes-behind",
    "operand",
    "h",
    "H08 flashinfer-ai/flashinfer/pull/2308",
    ANY,
    "an operand whose size is no multiple of 4 words",
    needs=["op"],
)
def vector_load_behind_the_last_word(site: Site, array: NDArray[np.generic]) -> NDArray[np.generic]:
    """`fence`: the last load is as wide as the others; what it brings too much is thrown away."""
    if array.flags.c_contiguous and array.size % LANES:
        ctypes.string_at(array.ctypes.data + array.nbytes, array.itemsize)
    return array


@plant(
    "far-tile",
    "write",
    "h",
    "C06 Luce-Org/lucebox/commit/6ed0014c462ee3cb4cc04127c50d30bce3e5ac08",
    ANY,
    "an output of five rows",
    needs=["op"],
)
def tile_of_a_negative_column(site: Site, output: NDArray[np.generic], value: NDArray[np.generic]) -> None:
    """`guard`: column -1 of a tail becomes a tile before the output, which is cleared. Only inside of the allocation: else it would hurt others."""
    site.honest(output, value)
    start, _ = _allocation(output)
    stray = output.ctypes.data - TILE_WORDS * output.itemsize
    if output.ndim and len(output) % 4 and start <= stray:
        ctypes.memset(stray, 0, output.itemsize)


@plant(
    "kept-plan",
    "wanted_rows",
    "k",
    "K06 numpy/numpy/issues/9647",
    ("matmul", "forward", "V1", "C4", "C6"),
    "two chunks of a prompt of one size",
)
def plan_keeps_the_callers_buffer(site: Site, want_logits: Bool) -> NDArray[np.intp]:
    """`freed`: a plan is found again by the contents of its mask, but holds the caller's buffer instead of a copy."""
    out: NDArray[np.intp] = site.honest(site.memory.setdefault(("plan", want_logits.tobytes()), want_logits))
    return out


@plant(
    "tuned-late",
    "gemm",
    "i",
    "I01 vllm-project/vllm/issues/4112",
    ("matmul", "moe", "forward", "generate", "engine flaky"),
    "the same session twice",
    needs=["repeats"],
)
def another_kernel_from_the_second_call_on(site: Site, name: str, x: Float, w: Float) -> Float:
    """`repeat`: a shape is tuned at its first call, and from then on summed in another order: right twice, and not the same."""
    tuned = (name, x.shape, w.shape) in site.memory
    site.memory[name, x.shape, w.shape] = True
    out: Float = site.honest(name, x[:, ::-1], w[::-1]) if tuned else site.honest(name, x, w)
    return out


@plant(
    "dense-rows",
    "batch",
    "h",
    "B20 sgl-project/sglang/pull/22688",
    READ,
    "rows of two sequences that take turns in a batch",
    needs=["sequences"],
)
def rows_of_a_request_taken_as_one_block(site: Site, spans: list[Span]) -> list[Span]:
    """`interleaved`: only the first row of a request is looked up, and the others are taken to follow it."""
    rows = sum(len(span.at) for span in spans)
    return [dataclasses.replace(span, at=np.minimum(span.at[0] + np.arange(len(span.at)), rows - 1)) for span in spans]


@plant(
    "longest-plan",
    "batch",
    "k",
    "B05 flashinfer-ai/flashinfer/pull/1028",
    MASK,
    "a prompt of two tokens after a longer one",
    needs=["evict"],
)
def last_rows_of_the_longest_plan(site: Site, spans: list[Span]) -> list[Span]:
    """`evict`: the mask of the longest prefill so far stays in the plan, and a shorter one reads its last rows, which see everything."""
    if any(span.prefix_len for span in spans):
        return spans
    rows = sum(len(span.at) for span in spans)
    longest = site.memory["longest"] = max(rows, site.memory.get("longest", 0))
    return spans if rows == longest else [dataclasses.replace(span, seen=np.ones_like(span.seen)) for span in spans]
