"""Plants on the attention side of the blocked engine: scale, rotary tables, positions, masks, tiles, merged states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from impls.blocked.points import PAGE, TILE, Bool, Float, Int, Site, Span, State
from impls.planted.planting import MASK, POSITION, ROPE, SCORES, SOFTMAX, bf16, plant
from spec.config import Config, Yarn, yarn_mscale

Wide = NDArray[np.float64]
BUCKET = 8  # rows a padded tree is rounded up to


# Softmax scale


@plant("Z01", "softmax_scale", "a", "A01 flashinfer-ai/flashinfer/pull/787", SCORES, "two keys")
def scale_in_base_two(site: Site, config: Config) -> float:
    return float(site.honest(config) * math.log(2))


@plant("Z02", "softmax_scale", "a", "A04 onnxruntime/mobius/pull/548", SCORES, "YaRN, two keys", needs=["yarn"])
def scale_without_mscale(site: Site, config: Config) -> float:
    return float((config.nope_dim + config.rope_dim) ** -0.5)


@plant("A03", "softmax_scale", "a", "A03 NVIDIA/Megatron-LM/issues/1429", SCORES, "mscale != mscale_all_dim", needs=["yarn", "mscale"])
def scale_from_the_other_mscale(site: Site, config: Config) -> float:
    yarn = config.yarn and dataclasses.replace(config.yarn, mscale_all_dim=config.yarn.mscale)
    return float(site.honest(dataclasses.replace(config, yarn=yarn)))


@plant("A06", "softmax_scale", "a", "A06 AI-Hypercomputer/maxtext/issues/1370", SCORES, "two keys")
def scale_inverted(site: Site, config: Config) -> float:
    return float(1 / site.honest(config))


@plant("A14", "softmax_scale", "a", "A14 huggingface/optimum-intel/pull/1877", SCORES, "two keys")
def scale_of_the_absorbed_width(site: Site, config: Config) -> float:
    return float(config.cache_dim**-0.5)


@plant("K13", "score", "k", "K13 cupy/cupy/issues/6940", SCORES, "one key")
def scale_read_as_the_wrong_scalar(site: Site, q: Float, keys: Float, scale: np.float32) -> Float:
    """A double where the kernel takes a float32: it reads the low half."""
    low_half = np.array([scale], np.float64).view(np.float32)[0]
    out: Float = site.honest(q, keys, low_half)
    return out


# Rotary tables


@plant("Z03", "rope_magnitude", "a", "A05 kekzl/imp/pull/880", ROPE, "YaRN, position 0", needs=["yarn"])
def mscale_on_the_tables_too(site: Site, config: Config) -> float:
    yarn = config.yarn
    return float(site.honest(config) * (yarn_mscale(yarn.factor, yarn.mscale_all_dim) if yarn else 1))


@plant("Z04", "rotate", "a", "A07 ikawrakow/ik_llama.cpp/pull/2099", ROPE, "position 1")
def key_in_the_other_layout(site: Site, name: str, x: Float, cos: Float, sin: Float, half_layout: bool) -> Float:
    out: Float = site.honest(name, x, cos, sin, half_layout != (name == "k"))
    return out


@plant("A02", "rotate", "a", "A02 flashinfer-ai/flashinfer/pull/793", ROPE, "position 1")
def key_rotated_twice(site: Site, name: str, x: Float, cos: Float, sin: Float, half_layout: bool) -> Float:
    once: Float = site.honest(name, x, cos, sin, half_layout)
    twice: Float = site.honest(name, once, cos, sin, half_layout)
    return twice if name == "k" else once


@plant("A09", "rope_tables", "a", "A09 ModelTC/LightLLM/pull/672", ROPE, "position 1")
def tables_through_bf16(site: Site, positions: Int, frequencies: Wide, magnitude: float) -> tuple[Float, Float]:
    cos, sin = site.honest(positions, frequencies, magnitude)
    return bf16(cos), bf16(sin)


@plant("A10", "rope_tables", "a", "A10 flashinfer-ai/flashinfer/pull/619", ROPE, "two rows of a prompt")
def position_of_the_block_start(site: Site, positions: Int, frequencies: Wide, magnitude: float) -> tuple[Float, Float]:
    block = np.arange(len(positions)) // 4 * 4
    cos, sin = site.honest(positions[block], frequencies, magnitude)
    return cos, sin


@plant(
    "yarn-off",
    "rope_frequencies",
    "a",
    "A15 deepseek-ai/DeepSeek-V3/blob/main/inference/model.py",
    ROPE,
    "YaRN, position 1",
    needs=["yarn"],
)
def yarn_off_for_short_contexts(site: Site, config: Config) -> Wide:
    """DeepSeek's own file interpolates only when the context limit exceeds the original length."""
    out: Wide = site.honest(dataclasses.replace(config, yarn=None))
    return out


@plant(
    "yarn-betas",
    "rope_frequencies",
    "a",
    "A05 ggml-org/llama.cpp/blob/master/src/llama-model.cpp",
    ROPE,
    "beta_fast 1",
    needs=["yarn", "betas"],
)
def yarn_with_default_betas(site: Site, config: Config) -> Wide:
    """The loader does not read the betas of the file."""
    default = config.yarn and dataclasses.replace(config.yarn, beta_fast=Yarn.beta_fast, beta_slow=Yarn.beta_slow)
    out: Wide = site.honest(dataclasses.replace(config, yarn=default))
    return out


# Positions


@plant("Z08", "position", "b", "25 warpfront/hipfire/pull/72", POSITION, "root with two children", nodes=2, needs=["tree"])
def position_by_node_index(site: Site, prefix_len: int, node: Int, depth: Int) -> Int:
    return np.int32(prefix_len) + node


@plant("A11", "position", "b", "A11 flashinfer-ai/flashinfer/pull/847", POSITION, "two rows of a prompt")
def position_argument_ignored(site: Site, prefix_len: int, node: Int, depth: Int) -> Int:
    """The kernel takes the length of the cache less one, right for one row only."""
    return np.full_like(node, prefix_len + len(node) - 1)


@plant("C01", "position", "c", "C01 NVIDIA/TensorRT-LLM/pull/12962", POSITION, "root with two children", nodes=2, needs=["tree"])
def position_from_the_row_before(site: Site, prefix_len: int, node: Int, depth: Int) -> Int:
    """One more than the previous row's position, without the gather by parent."""
    return np.int32(prefix_len) + np.concatenate([depth[:1], depth[:-1] + 1])


@plant(
    "tree23",
    "position",
    "b",
    "23 rmagur1203/vllm-ddtree",
    POSITION,
    "two trees of one size but not of one shape",
    nodes=2,
    needs=["tree", "rounds"],
)
def position_of_the_captured_graph(site: Site, prefix_len: int, node: Int, depth: Int) -> Int:
    """A graph captured per number of rows replays with the depths of its first tree."""
    if prefix_len == 0:
        out: Int = site.honest(prefix_len, node, depth)
        return out
    first: Int = site.memory.setdefault(("depth", len(node)), depth.copy())
    return np.int32(prefix_len) + first


@plant(
    "tree24",
    "position",
    "b",
    "24 rmagur1203/vllm-ddtree",
    POSITION,
    "a rejection, then another round",
    nodes=1,
    needs=["rounds", "rejection"],
)
def position_from_the_optimistic_mirror(site: Site, prefix_len: int, node: Int, depth: Int) -> Int:
    """The base counts the rows of the last round as if all of them had been accepted."""
    before, rows = site.memory.get("mirror", (0, 0))
    base = before + rows if 0 < before < prefix_len < before + rows else prefix_len
    site.memory["mirror"] = (prefix_len, len(node))
    return np.int32(base) + depth


# Masks


def _branching(parents: Sequence[int]) -> bool:
    return any(parent != row - 1 for row, parent in enumerate(parents))


@plant("sibling-visible", "visible", "b", "B14 PaddlePaddle/FastDeploy/pull/3514", MASK, "root with two children", nodes=2, needs=["tree"])
def earlier_siblings_visible(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    seen: Bool = site.honest(parents, prefix_len)
    for row, parent in enumerate(parents):
        for other in range(row):
            seen[row, prefix_len + other] |= parents[other] == parent
    return seen


@plant("Z07", "visible", "b", "B14 PaddlePaddle/FastDeploy/pull/3514", MASK, "root with four children", nodes=4, needs=["tree"])
def mask_on_diagonal_tiles_only(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """Tiles of 4 columns that lie below the diagonal skip the mask: right for causal attention only."""
    seen: Bool = site.honest(parents, prefix_len)
    for row in range(len(parents)):
        seen[row, prefix_len : prefix_len + row // 4 * 4] = True
    return seen


@plant("tree20", "visible", "b", "20 sgl-project/sglang/pull/29907", MASK, "root with two children", nodes=2, needs=["tree"])
def causal_whatever_the_tree(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    return np.tri(len(parents), prefix_len + len(parents), prefix_len, dtype=np.bool_)


@plant("B18", "visible", "b", "B18 flashinfer-ai/flashinfer/pull/4199", MASK, "root with two children", nodes=2, needs=["tree"])
def causal_for_small_trees(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """The dispatch of fewer than five rows lacks the variant with a mask."""
    if len(parents) < 5:
        return causal_whatever_the_tree(site, parents, prefix_len)
    seen: Bool = site.honest(parents, prefix_len)
    return seen


@plant("B17", "visible", "b", "B17 sgl-project/sglang-jax/pull/1188", MASK, "two rows")
def root_row_never_cleared(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    seen: Bool = site.honest(parents, prefix_len)
    seen[0] = True
    return seen


@plant("C03", "visible", "c", "C03 NVIDIA/TensorRT-LLM/pull/15842", MASK, "root with one child", nodes=1)
def first_draft_without_self_edge(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    seen: Bool = site.honest(parents, prefix_len)
    if prefix_len and len(parents) > 1:
        seen[1, prefix_len + 1] = False
    return seen


@plant("C06", "visible", "c", "C06 Luce-Org/lucebox/commit/6ed0014c462ee3cb4cc04127c50d30bce3e5ac08", MASK, "two rows at position 0")
def negative_column_wraps(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """The column of the row before the first one is -1, which wraps to the end of the row."""
    seen: Bool = site.honest(parents, prefix_len)
    seen[0, prefix_len - 1] = True
    return seen


@plant("Z11", "visible", "b", "B15 trymirai/lalamo/pull/207", MASK, "root with one child", nodes=1)
def prefix_shortened_by_padding(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """The prefix length is computed from the padded number of nodes."""
    seen: Bool = site.honest(parents, prefix_len)
    if len(parents) > 1:
        seen[:, max(0, prefix_len - -len(parents) % BUCKET) : prefix_len] = False
    return seen


@plant(
    "Z39",
    "visible",
    "k",
    "B05 flashinfer-ai/flashinfer/pull/1028",
    MASK,
    "two trees of one size but not of one shape",
    nodes=2,
    needs=["tree", "rounds"],
)
def mask_captured_at_first_use(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    seen: Bool = site.honest(parents, prefix_len)
    if prefix_len:
        seen[:, prefix_len:] = site.memory.setdefault(("mask", len(parents)), seen[:, prefix_len:].copy())
    return seen


@plant("tree44", "visible", "b", "44 Luce-Org/lucebox/pull/482", MASK, "two rounds with trees of one size", nodes=0, needs=["rounds"])
def prefix_of_the_captured_graph(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """A graph captured per number of rows keeps its first kv offset: later rows of the prefix are not seen."""
    seen: Bool = site.honest(parents, prefix_len)
    if prefix_len:
        seen[:, site.memory.setdefault(("prefix", len(parents)), prefix_len) : prefix_len] = False
    return seen


@plant("tree15", "visible", "b", "15 sgl-project/sglang/pull/27509", MASK, "a row behind a prefix")
def polarity_inverted(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """An additive mask for a kernel that reads nonzero as allowed; the prefix is not in the mask."""
    seen: Bool = site.honest(parents, prefix_len)
    if prefix_len:
        seen[:, prefix_len:] = ~seen[:, prefix_len:]
    return seen


@plant(
    "tree46",
    "visible",
    "b",
    "46 sgl-project/sglang/blob/main/python/sglang/srt/speculative/eagle_utils.py",
    MASK,
    "33 rows",
    nodes=32,
    needs=["long"],
)
def mask_of_four_bytes(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """A row of the packed mask has 32 bits; later columns are lost."""
    seen: Bool = site.honest(parents, prefix_len)
    if prefix_len:
        seen[:, prefix_len + 32 :] = False
    return seen


@plant(
    "bit-order",
    "visible",
    "b",
    "DDTREE:C5 sgl-project/sglang/blob/main/python/sglang/srt/speculative/eagle_utils.py",
    MASK,
    "a row behind a prefix",
)
def bits_in_the_other_order(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    seen: Bool = site.honest(parents, prefix_len)
    if prefix_len:
        packed = np.packbits(seen[:, prefix_len:], axis=1, bitorder="little")
        seen[:, prefix_len:] = np.unpackbits(packed, axis=1, count=len(parents), bitorder="big")
    return seen


@plant("B03", "visible", "b", "B03 Luce-Org/lucebox/pull/346", MASK, "two rows")
def mask_written_with_compact_stride(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """Rows are written one behind the other, but the kernel's rows are 8 columns apart at least; row 0 is right."""
    seen: Bool = site.honest(parents, prefix_len)
    rows, width = seen.shape
    buffer = np.zeros(rows * (-(-width // 8) * 8), np.bool_)
    buffer[: seen.size] = seen.ravel()
    return buffer.reshape(rows, -1)[:, :width].copy()


@plant("H22", "visible", "h", "H22 ggml-org/llama.cpp/issues/26509", MASK, "a second chunk of a prompt, or a tree", nodes=1)
def earlier_chunks_masked(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    seen: Bool = site.honest(parents, prefix_len)
    if len(parents) > 1:
        seen[:, :prefix_len] = False
    return seen


@plant("B07", "visible", "b", "B07 flashinfer-ai/flashinfer/pull/1148", MASK, "three rows")
def key_bound_rounded_down(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """The key bound of a query tile of two rows is rounded down: the last row of an odd number loses its own key."""
    seen: Bool = site.honest(parents, prefix_len)
    if len(parents) % 2 and len(parents) > 1:
        seen[-1, -1] = False
    return seen


# The batch as attention reads it


@plant(
    "tree30", "batch", "b", "30 rmagur1203/vllm-ddtree", MASK, "two sequences with different trees", nodes=2, needs=["sequences", "tree"]
)
def masks_in_another_request_order(site: Site, spans: list[Span]) -> list[Span]:
    out = []
    for span, other in zip(spans, reversed(spans), strict=True):
        seen = span.seen.copy()
        rows = min(len(span.at), len(other.at))
        own, strange = seen[:rows, span.prefix_len : span.prefix_len + rows], other.seen[:rows, other.prefix_len :]
        own[...] = strange[:, :rows]
        out.append(dataclasses.replace(span, seen=seen))
    return out


@plant("tree29", "batch", "b", "29 rmagur1203/vllm-ddtree", MASK, "two prompts, the second of two rows", needs=["sequences"])
def mask_offset_in_elements(site: Site, spans: list[Span]) -> list[Span]:
    """The packed masks of later requests are read from an element offset where bytes are expected."""
    out = spans[:1]
    for span in spans[1:]:
        bits = np.roll(span.seen[:, span.prefix_len :], 1)
        out.append(dataclasses.replace(span, seen=np.concatenate([span.seen[:, : span.prefix_len], bits], axis=1)))
    return out


@plant(
    "E11",
    "batch",
    "e",
    "E11 ModelTC/LightLLM/pull/743",
    (*SCORES, *MASK, "C6"),
    "two sequences, the first with a prefix",
    needs=["sequences"],
)
def key_offsets_from_query_offsets(site: Site, spans: list[Span]) -> list[Span]:
    keys = np.concatenate([span.slots for span in spans])
    out, start = [], 0
    for span in spans:
        out.append(dataclasses.replace(span, slots=keys[start : start + len(span.slots)]))
        start += len(span.at)
    return out


@plant(
    "E03", "batch", "e", "E03 ikawrakow/ik_llama.cpp/pull/2260", (*SCORES, "C6", "C7"), "two sequences of one length", needs=["sequences"]
)
def slots_of_the_captured_graph(site: Site, spans: list[Span]) -> list[Span]:
    """A graph reused by shape keeps the cache slots of its first sequence; only the prefix is read through it."""
    out = []
    for span in spans:
        slots = span.slots.copy()
        if span.prefix_len:
            slots[: span.prefix_len] = site.memory.setdefault((len(span.at), span.prefix_len), slots[: span.prefix_len].copy())
        out.append(dataclasses.replace(span, slots=slots))
    return out


@plant(
    "B09",
    "batch",
    "b",
    "B09 flashinfer-ai/flashinfer/pull/942",
    ("o_latent", *SCORES, *SOFTMAX),
    "a length that is no multiple of the page",
)
def whole_last_page_loaded(site: Site, spans: list[Span]) -> list[Span]:
    """The tail check counts pages: slots behind the last row are multiplied by a weight of 0, and 0 * NaN is NaN."""
    out = []
    for span in spans:
        tail = -len(span.slots) % PAGE
        slots = np.concatenate([span.slots, span.slots[-1] + 1 + np.arange(tail)])
        seen = np.concatenate([span.seen, np.zeros((len(span.at), tail), np.bool_)], axis=1)
        out.append(dataclasses.replace(span, slots=slots, seen=seen))
    return out


@plant("H01", "batch", "h", "H01 flashinfer-ai/flashinfer/pull/810", SOFTMAX, "a length that is no multiple of the page")
def partial_page_left_out(site: Site, spans: list[Span]) -> list[Span]:
    out = []
    for span in spans:
        seen = span.seen.copy()
        seen[:, len(span.slots) // PAGE * PAGE :] = False
        out.append(dataclasses.replace(span, seen=seen))
    return out


@plant("H02", "batch", "h", "H02 flashinfer-ai/flashinfer/pull/868", ("o_latent", *SCORES, *SOFTMAX), "a prompt of one token")
def empty_requests_skipped(site: Site, spans: list[Span]) -> list[Span]:
    """A request with nothing in its cache is taken for one with nothing to do; its rows stay unwritten."""
    return [span for span in spans if span.prefix_len or len(span.at) > 1]


@plant("H17", "batch", "h", "H17 ikawrakow/ik_llama.cpp/pull/171", ("o_latent", *SCORES, *SOFTMAX), "three rows")
def odd_row_left_to_no_thread(site: Site, spans: list[Span]) -> list[Span]:
    def halved(span: Span) -> Span:
        rows = max(1, len(span.at) // 2 * 2)
        return dataclasses.replace(span, at=span.at[:rows], seen=span.seen[:rows])

    return [halved(span) for span in spans]


@plant("H19", "batch", "h", "H19 InternLM/lmdeploy/pull/4302", ("o_latent", *SCORES, *SOFTMAX), "two rows behind a prefix", nodes=1)
def first_query_row_only(site: Site, spans: list[Span]) -> list[Span]:
    """The decode kernel squeezes the query axis away: right for one new row."""
    return [dataclasses.replace(s, at=s.at[:1], seen=s.seen[:1]) if s.prefix_len else s for s in spans]


@plant(
    "H14",
    "batch",
    "h",
    "H14 flashinfer-ai/flashinfer/pull/4382",
    MASK,
    "two prompts of different lengths",
    needs=["sequences"],
)
def query_count_of_the_first_request(site: Site, spans: list[Span]) -> list[Span]:
    """Row i of a later request is reduced from the partial results at i * (rows of request 0) / (its own rows)."""
    out = spans[:1]
    for span in spans[1:]:
        rows = np.arange(len(span.at)) * len(spans[0].at) // len(span.at) % len(span.at)
        out.append(dataclasses.replace(span, seen=span.seen[rows]))
    return out


# Tiles and states of the softmax


@plant("Z05", "value_tile", "a", "H12 flashinfer-ai/flashinfer/pull/1055", ("o_latent", "tree_attention"), "17 keys", needs=["long"])
def values_advance_too_slowly(site: Site, values: Float, start: int, stop: int) -> Float:
    """The value pointer moves one row less per tile than the key pointer."""
    lag = start // TILE
    out: Float = site.honest(values, start - lag, stop - lag)
    return out


@plant("H15", "value_tile", "h", "H15 Luce-Org/lucebox/pull/348", ("o_latent", "tree_attention"), "two keys")
def probability_rows_permuted(site: Site, values: Float, start: int, stop: int) -> Float:
    """The assumed layout of a fragment is wrong: neighbouring rows of the tile change places."""
    order = np.arange(stop - start) ^ 1
    order[order == stop - start] -= 1
    out: Float = site.honest(values, start, stop)[order]
    return out


@plant("Z09", "peak_start", "b", "B01 flashinfer-ai/flashinfer/pull/4401", SOFTMAX, "raw scores below -5e4", needs=["extreme", "op"])
def finite_minus_infinity(site: Site) -> float:
    return -5e4


@plant("Z10", "mask_tile", "b", "B08 flashinfer-ai/flashinfer/pull/1206", SOFTMAX, "a part of the keys that is no multiple of the tile")
def tail_columns_not_masked(site: Site, scores: Float, seen: Bool, first_key: int, tile: int) -> Float:
    """The last tile is as wide as the others; what lies behind the keys scores 0."""
    block = site.honest(scores, seen, first_key, tile)
    return np.pad(block, ((0, 0), (0, 0), (0, tile - block.shape[2])))


@plant("B12", "mask_tile", "b", "B12 ikawrakow/ik_llama.cpp/pull/1880", SOFTMAX, "a last row that sees no key of the tile", needs=["op"])
def loop_bound_from_the_last_row(site: Site, scores: Float, seen: Bool, first_key: int, tile: int) -> Float:
    block: Float = site.honest(scores, seen & seen[-1].any(), first_key, tile)
    return block


@plant("B13", "mask_tile", "b", "B13 ikawrakow/ik_llama.cpp/pull/2069", SOFTMAX, "two rows, two layers")
def mask_overwritten_by_the_first_layer(site: Site, scores: Float, seen: Bool, first_key: int, tile: int) -> Float:
    """Scores are accumulated in the buffer of the shared mask, so that the next layer reads them as mask."""
    block: Float = site.honest(scores, seen, first_key, tile)
    seen[...] = scores.max(axis=1) > 0
    return block


@plant(
    "Z12", "normalise", "b", "B02 ikawrakow/ik_llama.cpp/issues/2344", SOFTMAX, "a first row that sees no key", needs=["empty row", "op"]
)
def first_tile_without_empty_row_guard(site: Site, weights: Float, total: Float) -> Float:
    out: Float = site.honest(weights, total)
    with np.errstate(all="ignore"):
        out[:4] = weights[:4] / total[:4]
    return out


@plant(
    "A18",
    "normalise",
    "a",
    "A18 vllm-project/vllm/issues/27491",
    SOFTMAX,
    "a row that sees no key, behind the first tile",
    needs=["empty row", "op"],
)
def no_empty_row_guard(site: Site, weights: Float, total: Float) -> Float:
    with np.errstate(all="ignore"):
        return weights / total


@plant("A19", "normalise", "a", "A19 vllm-project/vllm/pull/49294", SOFTMAX, "a row that sees no key", needs=["empty row", "op"])
def empty_rows_keep_the_buffer(site: Site, weights: Float, total: Float) -> Float:
    """A row without a key is not written; the buffer holds the row before it."""
    out: Float = site.honest(weights, total)
    for row in range(1, len(out)):
        out[row] = np.where(total[row] > 0, out[row], out[row - 1])
    return out


@plant("Z06", "merge", "a", "A16 sgl-project/sglang/issues/40903", SOFTMAX, "a prefix of unequal mass", nodes=0)
def both_states_in_base_two(site: Site, states: list[State]) -> list[State]:
    """Log-sum-exp in base 2, read as a natural logarithm, decides the share of each part."""
    return _shared_by([(peak + np.log(total)) / np.float32(math.log(2)) for peak, total in states], states)


@plant("A17", "merge", "a", "A17 vllm-project/vllm/pull/52796", SOFTMAX, "a prefix")
def prefix_state_in_base_two(site: Site, states: list[State]) -> list[State]:
    logs = [peak + np.log(total) for peak, total in states]
    return _shared_by([logs[0] / np.float32(math.log(2)), *logs[1:]] if len(logs) > 1 else logs, states)


def _shared_by(logs: list[Float], states: list[State]) -> list[State]:
    """Each part's own weights, scaled to the share that its log-sum-exp gives it."""
    top = np.maximum.reduce(logs)
    whole = sum(np.exp(log - top) for log in logs)
    return [(peak, total * whole / np.exp(log - top)) for log, (peak, total) in zip(logs, states, strict=True)]


@plant("H12", "merge", "h", "H12 flashinfer-ai/flashinfer/pull/1055", SOFTMAX, "a prefix whose best score is not the best of all")
def first_part_not_rescaled(site: Site, states: list[State]) -> list[State]:
    peak = np.maximum.reduce([part for part, _ in states])
    total = states[0][1]
    for part, part_total in states[1:]:
        total = total + part_total * np.exp(part - peak)
    return [(peak, total)] * len(states)


@plant("H07", "merge", "h", "H07 flashinfer-ai/flashinfer/pull/1614", SOFTMAX, "an odd number of heads, a prefix")
def heads_with_another_number_of_parts(site: Site, states: list[State]) -> list[State]:
    """The last of an odd number of heads is not split, but merged as if it were: its second part counts twice."""
    out: list[State] = site.honest([*states, states[-1]])[: len(states)]
    honest: list[State] = site.honest(states)
    odd = np.arange(states[0][0].shape[1])[None, :, None] == states[0][0].shape[1] - 1
    if len(states) < 2 or states[0][0].shape[1] % 2 == 0:
        return honest
    return [(h[0], np.where(odd, o[1], h[1])) for o, h in zip(out, honest, strict=True)]


@plant(
    "no-rescale",
    "rescale",
    "h",
    "H12 flashinfer-ai/flashinfer/pull/1055",
    SOFTMAX,
    "two tiles of which the second has the best score",
    needs=["long"],
)
def sums_not_rescaled(site: Site, old_peak: Float, new_peak: Float) -> Float:
    """When the running maximum rises, what was summed before keeps its old scale."""
    return np.where(np.isneginf(old_peak), np.float32(0), np.float32(1))


@plant("A13", "absorb", "a", "A13 kvcache-ai/ktransformers/commit/255c0fcf3bcde6ebb51d8f1db29890c803d44bbc", ("q_absorb",), "two heads")
def heads_not_flattened(site: Site, q_nope: Float, w_kc: Float) -> Float:
    """The key part of kv_b is cut as if rows of all heads alternated."""
    heads, nope, rank = w_kc.shape
    out: Float = site.honest(q_nope, w_kc.reshape(nope, heads, rank).transpose(1, 0, 2))
    return out


@plant(
    "H04",
    "row_slots",
    "h",
    "H04 flashinfer-ai/flashinfer/pull/3136",
    ("compact", *SCORES, "C6", "K7"),
    "17 rows",
    needs=["long"],
)
def page_number_narrowed(site: Site, pages: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The page number has 3 bits: pages 8 and up lie on others (32-bit offsets, scaled down)."""
    out: NDArray[np.int64] = site.honest(pages % 8, rows)
    return out


@plant("Z37", "row_slots", "h", "H24 ROCm/aiter/issues/2768", ("compact", *SCORES, "K7"), "17 rows", needs=["long"])
def row_offset_wraps(site: Site, pages: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row offset has 4 bits: row 16 lies on row 0 (32-bit offsets, scaled down)."""
    out: NDArray[np.int64] = site.honest(pages, rows % 16)
    return out


@plant(
    "B11",
    "in_window",
    "b",
    "B11 ml-explore/mlx-lm/pull/843",
    (*MASK, "M10"),
    "a window of 2 positions, decoding at position 3",
    needs=["window"],
)
def decode_ignores_the_window(site: Site, rows: Int, keys: Int, window: int) -> Bool:
    """A single row gets no mask; the prefill honours the window."""
    out: Bool = np.ones((1, len(keys)), np.bool_) if len(rows) == 1 else site.honest(rows, keys, window)
    return out
