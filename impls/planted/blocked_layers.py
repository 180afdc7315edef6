"""Plants on products, norms, activations, routing and experts of the blocked engine, and on which rows get logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from impls.blocked.points import Bool, Float, Site
from impls.planted.planting import ANY, ROUTE, also, bf16, plant
from spec.config import Config

Ids = NDArray[np.int64]
PRODUCTS = ("matmul", "moe")


# Products and operands


@plant("Z36", "gemm", "h", "G17 InternLM/lmdeploy/pull/3181", PRODUCTS, "a number of rows that is no multiple of 4")
def last_rows_from_a_stale_buffer(site: Site, name: str, x: Float, w: Float) -> Float:
    """Only whole tiles of 4 rows are written; the rest of the workspace is what the product of this shape left there."""
    out: Float = site.honest(name, x, w)
    whole = len(out) // 4 * 4
    stale = site.memory.get((name, out.shape), np.zeros_like(out))
    out[whole:] = stale[whole:]
    site.memory[name, out.shape] = np.roll(out, 1, axis=0)
    return out


@plant("G06", "gemm", "g", "G06 deepseek-ai/FlashMLA/commit/c7590278ce1bfb86440e514c697bc4190aecd19c", PRODUCTS, "one row")
def terms_rounded_to_bf16(site: Site, name: str, x: Float, w: Float) -> Float:
    """Each product is made in the input type and summed in float32, in the output projection only."""
    if name not in ("attn_out", "op"):
        out: Float = site.honest(name, x, w)
        return out
    return np.stack([bf16(row[:, None] * w).sum(axis=0) for row in x])


@plant("bf16-sum", "gemm", "g", "G05 sgl-project/sglang/pull/27540", PRODUCTS, "one row of eight terms")
def accumulated_in_bf16(site: Site, name: str, x: Float, w: Float) -> Float:
    """The sum of the down projection is rounded to bf16 after every block of eight terms."""
    if name not in ("ffn_out", "op"):
        out: Float = site.honest(name, x, w)
        return out
    total = np.zeros((len(x), w.shape[1]), np.float32)
    for start in range(0, len(w), 8):
        total = bf16(total + site.honest(name, x[:, start : start + 8], w[start : start + 8]))
    return total


@plant("tf32-unsaid", "gemm", "g", "G06 pytorch/pytorch/issues/67384", PRODUCTS, "one row of ordinary numbers")
def operands_cut_to_tf32(site: Site, name: str, x: Float, w: Float) -> Float:
    """Operands lose 13 bits although the profile says float32."""
    cut_x, cut_w = (np.ascontiguousarray(a).view(np.uint32) & np.uint32(0xFFFFE000) for a in (x, w))
    out: Float = site.honest(name, cut_x.view(np.float32), cut_w.view(np.float32))
    return out


@plant(
    "H20", "gemm", "h", "H20 kvcache-ai/ktransformers/commit/66453981ff7b9f3c3375af7a4563add7bba6b440", PRODUCTS, "33 terms", needs=["op"]
)
def last_block_of_terms_dropped(site: Site, name: str, x: Float, w: Float) -> Float:
    """Terms behind the last whole block of 32 are not summed when there is at least one block."""
    terms = len(w) // 32 * 32 or len(w)
    out: Float = site.honest(name, x[:, :terms], w[:terms])
    return out


@plant(
    "Z40",
    "operand",
    "k",
    "K03 cupy/cupy/issues/9233",
    ANY,  # whatever operation gets such an operand first
    "a tied head, or transposed operands",
    needs=["tied"],
)
def transposed_view_as_contiguous(site: Site, array: NDArray[np.generic]) -> NDArray[np.generic]:
    """The pointer of a transposed view is passed on without a copy: the kernel sees the original order."""
    if array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous:
        return array.ravel(order="K").reshape(array.shape)
    return array


@plant(
    "K04",
    "operand",
    "k",
    "K04 cupy/cupy/issues/7267",
    ANY,  # whatever operation gets such an operand first
    "operands that are slices",
    needs=["views", "op"],
)
def slice_as_contiguous(site: Site, array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Strides of a slice are ignored: the kernel walks over the gaps."""
    if array.flags.forc:
        return array
    packed = tuple(np.cumprod((array.itemsize, *array.shape[:0:-1]))[::-1])
    return np.lib.stride_tricks.as_strided(array, strides=packed)


# Norms and activations


@plant("Z34", "mean_square", "g", "G05 sgl-project/sglang/pull/27540", ("rms_norm",), "one row")
def squares_summed_in_bf16(site: Site, x: Float) -> Float:
    total: Float = np.zeros((*x.shape[:-1], 1), np.float32)
    for start in range(0, x.shape[-1], 8):
        total = bf16(total + np.square(x[..., start : start + 8]).sum(axis=-1, keepdims=True))
    return total / np.float32(x.shape[-1])


@plant("H05", "mean_square", "h", "H05 flashinfer-ai/flashinfer/pull/3392", ("rms_norm",), "17 rows", needs=["long"])
def norm_row_offset_wraps(site: Site, x: Float) -> Float:
    """The row offset of the statistics has 4 bits (32-bit offsets, scaled down)."""
    out: Float = site.honest(x)
    return out[np.arange(len(out)) % 16]


@plant("Z32", "norm_eps", "g", "G04 ml-explore/mlx-lm/pull/79", ("rms_norm", "M2"), "eps 1e-6, or small latents", needs=["latent eps"])
def latent_eps_ten_times(site: Site, config: Config, name: str) -> float:
    return float(site.honest(config, name)) * (10 if name == "latent" else 1)


@plant(
    "G03",
    "norm_eps",
    "g",
    "G03 huggingface/transformers/pull/44346",
    ("rms_norm", "M2"),
    "eps 1e-5, or small latents",
    needs=["latent eps"],
)
def default_eps_in_the_latent_norms(site: Site, config: Config, name: str) -> float:
    return 1e-6 if name in ("latent", "q_a_norm") else float(site.honest(config, name))


@plant("G02", "apply_gain", "g", "G02 vllm-project/vllm/pull/42379", ("rms_norm",), "one row")
def rounded_before_the_gain(site: Site, normalised: Float, gain: Float) -> Float:
    """The normalised row is cast to bf16 before the gain, in an engine that says float32."""
    out: Float = site.honest(bf16(normalised), gain)
    return out


@plant("Z33", "swiglu", "g", "G07 vllm-project/vllm/pull/29273", ("swiglu", "moe"), "one row")
def gate_and_up_exchanged(site: Site, gate: Float, up: Float) -> Float:
    out: Float = site.honest(up, gate)
    return out


@plant("G07", "swiglu", "g", "G07 vllm-project/vllm/pull/29273", ("swiglu", "moe"), "two columns")
def halves_read_as_interleaved(site: Site, gate: Float, up: Float) -> Float:
    """Halves of [gate | up] are taken where the kernel's weights are interleaved."""
    joined = np.concatenate([gate, up], axis=1)
    out: Float = site.honest(joined[:, 0::2], joined[:, 1::2])
    return out


@plant("G13", "residual", "g", "G13 SafeAILab/EAGLE/commit/4b5f9fd63cb7d7c2f97345c775e941558306e75f", ("add",), "one row")
def residual_in_fp16(site: Site, stream: Float, delta: Float) -> Float:
    with np.errstate(over="ignore"):
        return (stream + delta).astype(np.float16).astype(np.float32)


# Routing


@plant("Z35", "sigmoid", "f", "F11 ModelTC/LightLLM/pull/724", ("router_scores", "M7"), "one row")
def routing_scores_in_bf16(site: Site, x: Float) -> Float:
    return bf16(site.honest(x))


@plant("F11", "biased", "f", "F11 ModelTC/LightLLM/pull/724", ROUTE, "two biased scores that collide in bf16", needs=["ties"])
def choice_in_bf16(site: Site, scores: Float, bias: Float) -> Float:
    return bf16(site.honest(scores, bias))


@plant("bias-dropped", "biased", "f", "F09 ml-explore/mlx-lm/pull/1354", ROUTE, "a bias that changes the choice")
def bias_dropped(site: Site, scores: Float, bias: Float) -> Float:
    return scores


@plant(
    "Z27",
    "drop_groups",
    "f",
    "F01 deepseek-ai/DeepSeek-V3/commit/1398800ebfcd49c048737e8b1aae69dee46ffefc",
    ROUTE,
    "negative biased scores",
    needs=["groups"],
)
def dropped_groups_score_zero(site: Site, choice: Float, kept: Bool) -> Float:
    return choice * kept[:, :, None]


@plant("F22", "drop_groups", "f", "F22 EricLBuehler/mistral.rs/pull/1278", ROUTE, "more than one group", needs=["groups"])
def group_mask_on_the_wrong_axis(site: Site, choice: Float, kept: Bool) -> Float:
    out: Float = np.where(np.tile(kept, (1, choice.shape[2])).reshape(choice.shape), choice, np.float32(-np.inf))
    return out


@plant("Z28", "group_scores", "f", "F03 vllm-project/vllm/pull/13474", ROUTE, "more than one group", needs=["groups"])
def groups_by_their_best(site: Site, choice: Float, use_max: bool) -> Float:
    out: Float = site.honest(choice, True)
    return out


@plant("F23", "group_scores", "f", "F23 ikawrakow/ik_llama.cpp/pull/836", ROUTE, "more than one group", needs=["groups"])
def groups_by_their_mean(site: Site, choice: Float, use_max: bool) -> Float:
    out: Float = choice.mean(axis=-1)
    return out


@plant("top-k-last", "best", "f", "I08 Pushkinist/rMLX/issues/373", ROUTE, "two experts with one score at the cut", needs=["ties"])
def last_of_equals_chosen(site: Site, values: Float, count: int) -> Ids:
    out: Ids = values.shape[1] - 1 - np.argsort(-values[:, ::-1], axis=-1, kind="stable")[:, :count]
    return out


@plant("F18", "best", "f", "F18 kvcache-ai/ktransformers/pull/1646", ROUTE, "two batches of one size", needs=["rounds"])
def ids_of_the_step_before(site: Site, values: Float, count: int) -> Ids:
    """The buffer of ids is refilled before the step has used it."""
    fresh: Ids = site.honest(values, count)
    stale: Ids = site.memory.get(("ids", fresh.shape, values.shape), fresh)
    site.memory["ids", fresh.shape, values.shape] = fresh
    return stale


@plant("Z29", "mixing_scores", "f", "F09 ml-explore/mlx-lm/pull/1354", ROUTE, "a bias other than 0")
def biased_scores_as_weights(site: Site, scores: Float, choice: Float, bias: Float, ids: Ids) -> Float:
    return np.take_along_axis(choice, ids, axis=-1)


@plant("Z30", "mixing_scores", "f", "F04 flashinfer-ai/flashinfer/pull/3875", ROUTE, "a bias much larger than the score")
def bias_subtracted_again(site: Site, scores: Float, choice: Float, bias: Float, ids: Ids) -> Float:
    return np.take_along_axis(choice, ids, axis=-1) - bias[ids]


@plant("F17", "mixing_scores", "f", "F17 ikawrakow/ik_llama.cpp/pull/851", ROUTE, "a bias that changes the order")
def weights_from_the_wrong_node(site: Site, scores: Float, choice: Float, bias: Float, ids: Ids) -> Float:
    return -np.sort(-scores, axis=-1)[:, : ids.shape[1]]


@plant(
    "F05", "mixing_weights", "f", "F05 flashinfer-ai/flashinfer/pull/3803", ROUTE, "chosen scores that are all 0", needs=["extreme", "op"]
)
def denominator_without_eps(site: Site, picked: Float, norm_top_k: bool, routed_scale: float, eps: float) -> Float:
    with np.errstate(invalid="ignore"):
        out: Float = site.honest(picked, norm_top_k, routed_scale, 0.0)
    return out


@plant("F07", "mixing_weights", "f", "F07 flashinfer-ai/flashinfer/pull/2049", ROUTE, "at most two rows")
def small_batches_leave_weights_untouched(site: Site, picked: Float, norm_top_k: bool, routed_scale: float, eps: float) -> Float:
    out: Float = site.honest(picked, norm_top_k, routed_scale, eps)
    return out if len(out) > 2 else np.zeros_like(out)


@plant("F08", "mixing_weights", "f", "F08 Luce-Org/lucebox/commit/87f7a99a075f52797c9ca8e1de3b94dac9d132d5", ROUTE, "one row")
def not_renormalised(site: Site, picked: Float, norm_top_k: bool, routed_scale: float, eps: float) -> Float:
    out: Float = site.honest(picked, False, routed_scale, eps)
    return out


@plant(
    "F21",
    "mixing_weights",
    "f",
    "F21 InternLM/lmdeploy/pull/3030",
    ROUTE,
    "a configuration without renormalisation",
    needs=["softmax routing"],
)
def softmax_over_the_chosen_only(site: Site, picked: Float, norm_top_k: bool, routed_scale: float, eps: float) -> Float:
    out: Float = site.honest(picked, True, routed_scale, eps)
    return out


@plant("F24", "mixing_weights", "f", "F24 vllm-project/vllm/pull/45037", ROUTE, "five rows")
def scaled_twice_in_large_batches(site: Site, picked: Float, norm_top_k: bool, routed_scale: float, eps: float) -> Float:
    out: Float = site.honest(picked, norm_top_k, routed_scale, eps)
    return out * np.float32(routed_scale) if len(out) > 4 else out


@plant("F25", "mixing_weights", "f", "F25 sgl-project/sglang/pull/8333", ROUTE, "routed_scale other than 1")
def routed_scale_left_out(site: Site, picked: Float, norm_top_k: bool, routed_scale: float, eps: float) -> Float:
    out: Float = site.honest(picked, norm_top_k, 1.0, eps)
    return out


@plant("F27", "mixing_weights", "f", "F27 sgl-project/sglang/pull/8511", ROUTE, "five rows")
def scaled_in_small_batches_only(site: Site, picked: Float, norm_top_k: bool, routed_scale: float, eps: float) -> Float:
    out: Float = site.honest(picked, norm_top_k, routed_scale if len(picked) < 5 else 1.0, eps)
    return out


# Experts


@plant("Z38", "expert_rows", "f", "F13 vllm-project/vllm-xpu-kernels/issues/453", ("matmul", "moe", "M9"), "two rows with one expert")
def first_row_of_each_expert_only(site: Site, expert: int, experts: int, rows: Ids) -> Ids:
    return rows[:1]


@plant("F15", "expert_rows", "f", "F15 sgl-project/sglang/pull/15250", ("matmul", "moe", "M9"), "a row of the last expert")
def last_expert_taken_for_a_sentinel(site: Site, expert: int, experts: int, rows: Ids) -> Ids:
    return rows if expert < experts - 1 else rows[:0]


@plant("F16", "expert_index", "f", "F16 ModelTC/LightLLM/pull/1369", ("matmul", "moe", "M9"), "5 experts", needs=["op"])
def expert_wraps_in_the_last_block(site: Site, expert: int, experts: int) -> int:
    """Experts come in blocks of 4; in a partial last block the index wraps."""
    return expert if expert < experts // 4 * 4 else expert % 4


@plant(
    "F12",
    "expert_index",
    "f",
    "F12 vllm-project/vllm/pull/35161",
    ("matmul", "moe", "M9"),
    "a row of the last of an even number of experts",
)
def padding_reads_expert_zero(site: Site, expert: int, experts: int) -> int:
    """The last block of expert ids is taken for padding, whose id is 0."""
    return 0 if expert == experts - 1 else expert


@plant("shared-dropped", "shared_output", "f", "F19 kvcache-ai/ktransformers/pull/1686", ("combine",), "two rows")
def shared_expert_dropped_for_one_row(site: Site, shared: Float) -> Float:
    """The last row's slice of the shared buffer belongs to somebody else."""
    out = shared.copy()
    if len(out) > 1:
        out[-1] = 0
    return out


@plant("Z31", "shared_output", "f", "F26 sgl-project/sglang/pull/28237", ("combine",), "routed_scale other than 1")
def shared_expert_divided_by_the_scale(site: Site, shared: Float) -> Float:
    return shared / np.float32(site.memory.get("routed scale", 1.0))


@also("Z31", "mixing_weights")
def _remember_the_scale(site: Site, picked: Float, norm_top_k: bool, routed_scale: float, eps: float) -> Float:
    site.memory["routed scale"] = routed_scale
    out: Float = site.honest(picked, norm_top_k, routed_scale, eps)
    return out


@plant("F10", "combine", "f", "F10 ml-explore/mlx-lm/pull/508", ("combine",), "two choices")
def weights_in_another_order(site: Site, weights: Float, experts: Float, shared: Float) -> Float:
    """Weights of another variable meet the outputs: their order is not that of the ids."""
    out: Float = site.honest(np.sort(weights, axis=1), experts, shared)
    return out


# Rows that get logits


@plant(
    "H16",
    "wanted_rows",
    "h",
    "H16 Luce-Org/lucebox/commit/190f1805b54d052bb6ebf4f355b8ba3d07bd4fd3",
    ("matmul", "C6"),
    "17 rows",
    needs=["long"],
)
def row_within_its_micro_batch(site: Site, want_logits: Bool) -> NDArray[np.intp]:
    """Rows are counted within micro-batches of 16, but read from the whole batch."""
    rows: NDArray[np.intp] = site.honest(want_logits)
    return rows % 16


@plant("D14", "wanted_rows", "d", "D14 vllm-project/vllm/pull/43555", ("matmul", "V1", "C6"), "two wanted rows")
def offsets_shifted_once_too_often(site: Site, want_logits: Bool) -> NDArray[np.intp]:
    rows: NDArray[np.intp] = site.honest(want_logits)
    return np.maximum(rows - (np.arange(len(rows)) > 0), 0)


@plant("Z20", "argmax", "d", "D13 ohdearquant/lattice/issues/280", ("argmax", "A1"), "two equal maxima", needs=["ties"])
def last_of_equal_maxima(site: Site, logits: Float) -> NDArray[np.int32]:
    out: NDArray[np.int32] = (logits.shape[1] - 1 - np.argmax(logits[:, ::-1], axis=-1)).astype(np.int32)
    return out


@plant("D15", "argmax", "d", "D15 sgl-project/sglang/pull/27247", ("argmax", "A1"), "a row of -inf", needs=["minus infinity", "op"])
def sentinel_of_the_search_returned(site: Site, logits: Float) -> NDArray[np.int32]:
    """The index starts at the size of the vocabulary and only a logit above -inf replaces it."""
    out: NDArray[np.int32] = site.honest(logits)
    return np.where(np.isneginf(logits.max(axis=-1)), np.int32(logits.shape[1]), out)


@plant("D05", "argmax", "d", "D05 deepseek-ai/DeepSpec/issues/31", ("argmax", "A1"), "two logits that collide in bf16", needs=["ties"])
def argmax_of_bf16_logits(site: Site, logits: Float) -> NDArray[np.int32]:
    out: NDArray[np.int32] = site.honest(bf16(logits))
    return out


@plant(
    "A22",
    "group_scales",
    "a",
    "A22 sgl-project/sglang/pull/28418",
    ("int4_matmul", "M11"),
    "one group of 32 with the scale 1.5",
    needs=["op"],
)
def scales_rounded_to_powers_of_two(site: Site, scales: Float, groups: int) -> Float:
    """Weights were quantised with the exact scale, and are dequantised with the nearest power of two."""
    out: Float = np.exp2(np.rint(np.log2(scales))).astype(np.float32)
    return out
