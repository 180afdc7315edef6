"""Honest engines that round differently from the golden bits: each within the profile that it declares, none to be flagged.

Functions on the same named points as the plants. An alarm on one of these is a false alarm: BUGZOO section 5 measures ten of
them (N01-N10), the others are what GPU kernels, BLAS libraries and compilers do as well.

int4 weights are left out: the seam's profiles do not declare quantised weights, so no honest engine can say it has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from impls.blocked.points import ONE, PAGE, ZERO, Float, Site, State
from impls.planted.planting import bf16
from spec.engine import PROFILES, Profile
from spec.taps import all_tap_names

Function = TypeVar("Function", bound=Callable[..., Any])
BUCKET = 8  # rows a batch is padded to
BLOCK = 128  # terms summed one after the other in the variant that declares its height


@dataclass(frozen=True)
class Variant:
    """A legal rearrangement. `hidden_taps`: taps that do not exist in it, because the step is done another way; `hidden_ops` likewise."""

    name: str
    summary: str
    profile: Profile = field(default_factory=Profile)
    hidden_taps: frozenset[str] = frozenset()
    hidden_ops: frozenset[str] = frozenset()
    points: dict[str, Callable[..., Any]] = field(default_factory=dict)


VARIANTS: dict[str, Variant] = {}


def variant(
    name: str,
    *points: str,
    summary: str = "",
    profile: Profile | None = None,
    hidden_taps: Sequence[str] = (),
    hidden_ops: Sequence[str] = (),
) -> Callable[[Function], Function]:
    """The decorated function replaces `points` in variant `name`; the first use of a name describes it."""

    def register(function: Function) -> Function:
        entry = VARIANTS.setdefault(name, Variant(name, summary, profile or Profile(), frozenset(hidden_taps), frozenset(hidden_ops)))
        entry.points.update(dict.fromkeys(points, function))
        return function

    return register


def _cut(length: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, length, step)] or [slice(0, 0)]


# Orders of summation


@variant("N01", "gemm", summary="the hidden dimension reversed: another order in every product")
def _reversed_terms(site: Site, name: str, x: Float, w: Float) -> Float:
    out: Float = np.ascontiguousarray(x[:, ::-1]) @ np.ascontiguousarray(w[::-1])
    return out


@variant("N01", "mean_square")
def _reversed_squares(site: Site, x: Float) -> Float:
    out: Float = site.honest(x[..., ::-1])
    return out


@variant("interleaved", "gemm", summary="two accumulators, even and odd terms")
def _even_and_odd(site: Site, name: str, x: Float, w: Float) -> Float:
    out: Float = x[:, ::2] @ w[::2] + x[:, 1::2] @ w[1::2]
    return out


@variant("split-k", "gemm", summary="split-K in blocks of 8 terms, added in order")
def _split_k(site: Site, name: str, x: Float, w: Float) -> Float:
    total: Float = np.zeros((len(x), w.shape[1]), np.float32)
    for part in _cut(len(w), 8):
        total = total + x[:, part] @ w[part]
    return total


@variant("split-k-reversed", "gemm", summary="split-K in blocks of 16 terms, the last one first, as atomics may add them")
def _split_k_reversed(site: Site, name: str, x: Float, w: Float) -> Float:
    total: Float = np.zeros((len(x), w.shape[1]), np.float32)
    for part in reversed(_cut(len(w), 16)):
        total = total + x[:, part] @ w[part]
    return total


def _tree_sum(parts: list[Float]) -> Float:
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)] + parts[len(parts) & ~1 :]
    return parts[0]


@variant("pairwise", "gemm", summary="a balanced tree over blocks of 4 terms")
def _pairwise(site: Site, name: str, x: Float, w: Float) -> Float:
    return _tree_sum([x[:, part] @ w[part] for part in _cut(len(w), 4)])


@variant(
    f"height-{BLOCK}",
    "gemm",
    summary="blocks of 128 terms, then a balanced tree, declared",
    profile=Profile(f"height-{BLOCK}", height=f"blocked:{BLOCK}"),
)
def _declared_height(site: Site, name: str, x: Float, w: Float) -> Float:
    return _tree_sum([x[:, part] @ w[part] for part in _cut(len(w), BLOCK)])


@variant(f"height-{BLOCK}", "score")
def _declared_height_of_scores(site: Site, q: Float, keys: Float, scale: np.float32) -> Float:
    return _tree_sum([np.asarray(site.honest(q[..., part], keys[:, part], ONE)) for part in _cut(keys.shape[1], BLOCK)]) * scale


@variant("sequential", "gemm", summary="one term after the other, no FMA: the naive loop")
def _sequential(site: Site, name: str, x: Float, w: Float) -> Float:
    total: Float = np.zeros((len(x), w.shape[1]), np.float32)
    for term in range(len(w)):
        total = total + x[:, term, None] * w[term]
    return total


@variant("compensated", "gemm", summary="Kahan summation of blocks")
def _compensated(site: Site, name: str, x: Float, w: Float) -> Float:
    total: Float = np.zeros((len(x), w.shape[1]), np.float32)
    lost: Float = np.zeros_like(total)
    for part in _cut(len(w), 8):
        term = x[:, part] @ w[part] - lost
        new = total + term
        lost = (new - total) - term
        total = new
    return total


@variant("N05", "gemm", summary="float64 accumulation, rounded once, as a chain of FMAs nearly gives")
def _wide(site: Site, name: str, x: Float, w: Float) -> Float:
    exact: NDArray[np.float64] = x.astype(np.float64) @ w.astype(np.float64)
    return exact.astype(np.float32)


@variant("N05", "score")
def _wide_scores(site: Site, q: Float, keys: Float, scale: np.float32) -> Float:
    return (q.astype(np.float64) @ keys.T.astype(np.float64) * float(scale)).astype(np.float32)


@variant("N05", "rotate")
def _wide_rotation(site: Site, name: str, x: Float, cos: Float, sin: Float, half_layout: bool) -> Float:
    wide: NDArray[np.float64] = site.honest(name, x.astype(np.float64), cos.astype(np.float64), sin.astype(np.float64), half_layout)
    return wide.astype(np.float32)


@variant("N05", "mean_square")
def _wide_squares(site: Site, x: Float) -> Float:
    out: Float = np.mean(np.square(x.astype(np.float64)), axis=-1, keepdims=True).astype(np.float32)
    return out


@variant("einsum", "gemm", summary="einsum instead of BLAS")
def _einsum(site: Site, name: str, x: Float, w: Float) -> Float:
    out: Float = np.einsum("tk,kn->tn", x, w)
    return out


# Shapes of products


@variant("N08", "gemm", summary="rows padded to buckets of 8 with zeros")
def _padded_rows(site: Site, name: str, x: Float, w: Float) -> Float:
    out: Float = np.concatenate([x, np.zeros((-len(x) % BUCKET, x.shape[1]), np.float32)]) @ w
    return out[: len(x)]


@variant("N09", "gemm", summary="every row multiplied alone: a matrix-vector kernel")
def _row_by_row(site: Site, name: str, x: Float, w: Float) -> Float:
    out: Float = np.empty((len(x), w.shape[1]), np.float32)
    for row in range(len(x)):
        out[row] = x[row] @ w
    return out


@variant("N07", "gemm", summary="experts run token by token, everything else batched")
def _experts_token_by_token(site: Site, name: str, x: Float, w: Float) -> Float:
    out: Float = _row_by_row(site, name, x, w) if name.startswith("expert_") else site.honest(name, x, w)
    return out


@variant("column-shards", "gemm", summary="two tensor-parallel shards of the columns, gathered")
def _column_shards(site: Site, name: str, x: Float, w: Float) -> Float:
    half = w.shape[1] // 2
    return np.concatenate([x @ np.ascontiguousarray(w[:, :half]), x @ np.ascontiguousarray(w[:, half:])], axis=1)


@variant("row-shards", "gemm", summary="two tensor-parallel shards of the rows of a weight, reduced")
def _row_shards(site: Site, name: str, x: Float, w: Float) -> Float:
    half = len(w) // 2
    out: Float = x[:, half:] @ w[half:] + x[:, :half] @ w[:half]
    return out


@variant("batch-dispatch", "gemm", summary="another kernel from 8 rows on")
def _dispatch_by_rows(site: Site, name: str, x: Float, w: Float) -> Float:
    return _split_k(site, name, x, w) if len(x) >= 8 else _row_by_row(site, name, x, w)


@variant("heads-apart", "score", summary="attention scores head by head")
def _heads_apart(site: Site, q: Float, keys: Float, scale: np.float32) -> Float:
    heads = [site.honest(q[:, head : head + 1], keys, scale) for head in range(q.shape[1])]
    return np.concatenate(heads, axis=1)


# Attention


@variant("N02", "key_tile", summary="online softmax with tiles of 4 keys")
def _tiles_of_four(site: Site) -> int:
    return 4


@variant("tile-1", "key_tile", summary="online softmax key by key")
def _tiles_of_one(site: Site) -> int:
    return 1


@variant("tile-64", "key_tile", summary="tiles of 64 keys")
def _tiles_of_sixty_four(site: Site) -> int:
    return 64


@variant("N03", "key_parts", summary="split-KV in two halves")
def _two_halves(site: Site, prefix_len: int, key_count: int) -> list[tuple[int, int]]:
    return [(start, stop) for start, stop in ((0, key_count // 2), (key_count // 2, key_count)) if start < stop]


@variant("split-kv-many", "key_parts", summary="split-KV in parts of 5 keys")
def _many_parts(site: Site, prefix_len: int, key_count: int) -> list[tuple[int, int]]:
    return [(start, min(start + 5, key_count)) for start in range(0, key_count, 5)]


@variant("one-part", "key_parts", summary="no split-KV")
def _one_part(site: Site, prefix_len: int, key_count: int) -> list[tuple[int, int]]:
    return [(0, key_count)] if key_count else []


@variant("merge-reversed", "merge", summary="parts merged from the last to the first")
def _merged_from_the_end(site: Site, states: list[State]) -> list[State]:
    out: list[State] = site.honest(states[::-1])
    return out


@variant("merge-reversed", "key_parts")
def _parts_to_merge(site: Site, prefix_len: int, key_count: int) -> list[tuple[int, int]]:
    return _many_parts(site, prefix_len, key_count)


@variant("N04", "exponential", summary="exp2 with log2(e) folded in")
def _exp2(site: Site, x: Float) -> Float:
    out: Float = np.exp2(x * np.float32(math.log2(math.e)))
    return out


@variant("N04", "rescale")
def _rescale_by_exp2(site: Site, old_peak: Float, new_peak: Float) -> Float:
    return _exp2(site, old_peak - np.where(np.isneginf(new_peak), ZERO, new_peak))


@variant("fast-exp", "exponential", summary="exp off by two units in the last place, inside the declared four; exp(0) = 1")
def _fast_exp(site: Site, x: Float) -> Float:
    exact: Float = site.honest(x)
    off = exact * np.float32(1 + 2.0**-22)
    return np.where((x == 0) | (x < -80), exact, off).astype(np.float32)


@variant("scale-on-query", "score", summary="the softmax scale multiplied into the query")
def _scaled_query(site: Site, q: Float, keys: Float, scale: np.float32) -> Float:
    out: Float = site.honest(q * scale, keys, ONE)
    return out


@variant("row-sum-reversed", "row_sum", summary="the softmax sum from the last key to the first")
def _sum_from_the_end(site: Site, weights: Float) -> Float:
    out: Float = site.honest(weights[..., ::-1])
    return out


@variant("reciprocal", "normalise", summary="softmax weights multiplied by the reciprocal of the sum")
def _by_the_reciprocal(site: Site, weights: Float, total: Float) -> Float:
    return weights * (ONE / np.where(total > 0, total, ONE).astype(np.float32))


@variant(
    "N10",
    "absorb",
    summary="expanded keys: the key up-projection is applied to the cache, not to the query",
    hidden_taps=("q_absorb",),
    hidden_ops=("q_absorb",),
)
def _carry_the_query(site: Site, q_nope: Float, w_kc: Float) -> Float:
    """q_nope travels in the place of the absorbed query, which does not exist here; too narrow a place: absorbed after all."""
    site.memory["w_kc"] = w_kc if w_kc.shape[1] <= w_kc.shape[2] else None
    if site.memory["w_kc"] is None:
        out: Float = site.honest(q_nope, w_kc)
        return out
    return np.pad(q_nope, ((0, 0), (0, 0), (0, w_kc.shape[2] - w_kc.shape[1])))


@variant("N10", "score")
def _expanded_scores(site: Site, q: Float, keys: Float, scale: np.float32) -> Float:
    w_kc = site.memory.get("w_kc")
    if w_kc is None:
        out: Float = site.honest(q, keys, scale)
        return out
    nope, rank = w_kc.shape[1:]
    expanded = np.einsum("sr,hnr->hsn", keys[:, :rank], w_kc)  # (H,W,n)
    dots = np.matmul(q[:, :, None, :nope], expanded.transpose(0, 2, 1)[None])[:, :, 0]  # (T,H,W)
    return np.asarray((dots + q[:, :, rank:] @ keys[:, rank:].T) * scale, np.float32)


@variant("slots-reversed", "row_slots", summary="rows of a page from its end; physical slots are nobody's business")
def _pages_from_their_end(site: Site, pages: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return pages[rows // PAGE] * PAGE + (PAGE - 1 - rows % PAGE)


@variant(
    "fused-attention",
    "key_parts",
    summary="one kernel from query to latent output: no scores and no weights to see",
    hidden_taps=("scores", "probs"),
    hidden_ops=("scores", "softmax", "o_latent"),
)
def _halves_in_one_kernel(site: Site, prefix_len: int, key_count: int) -> list[tuple[int, int]]:
    return _two_halves(site, prefix_len, key_count)


# Pointwise operations


@variant("silu-divided", "swiglu", summary="gate / (1 + exp(-gate)) * up")
def _silu_divided(site: Site, gate: Float, up: Float) -> Float:
    with np.errstate(over="ignore"):
        decay: Float = np.exp(-gate)
    return gate / (ONE + decay) * up


@variant("silu-tanh", "swiglu", summary="silu by tanh, declared", profile=Profile("float32-tanh", tanh_silu=True))
def _silu_by_tanh(site: Site, gate: Float, up: Float) -> Float:
    half = np.float32(0.5)
    out: Float = gate * (half + half * np.tanh(half * gate)) * up
    return out


@variant("sigmoid-divided", "sigmoid", summary="the router's 1 / (1 + exp(-x)), whatever the sign")
def _sigmoid_divided(site: Site, x: Float) -> Float:
    with np.errstate(over="ignore"):
        decay: Float = np.exp(-x)
        return ONE / (ONE + decay)


@variant("norm-divided", "inverse_root", summary="reciprocal square root one unit in the last place high, as the hardware's")
def _rough_inverse_root(site: Site, square: Float, eps: float) -> Float:
    out: Float = np.nextafter(site.honest(square, eps), np.float32(np.inf))
    return out


@variant("norm-einsum", "mean_square", summary="the sum of squares as a dot product, divided by multiplication")
def _squares_as_a_dot(site: Site, x: Float) -> Float:
    out: Float = np.einsum("...k,...k->...", x, x)[..., None] * np.float32(1 / x.shape[-1])
    return out


@variant("fma-rope", "rotate", summary="rotation with one fused multiply-add an element")
def _fused_rotation(site: Site, name: str, x: Float, cos: Float, sin: Float, half_layout: bool) -> Float:
    """x0 c - fl(x1 s) with the first product unrounded: float64 holds a product of two float32 exactly."""
    half = x.shape[-1] // 2
    first, second = (x[..., :half], x[..., half:]) if half_layout else (x[..., 0::2], x[..., 1::2])
    wide, sin = cos[:, None, :].astype(np.float64), sin[:, None, :]
    out = np.empty_like(x)
    left, right = (out[..., :half], out[..., half:]) if half_layout else (out[..., 0::2], out[..., 1::2])
    left[...] = first * wide - second * sin
    right[...] = second * wide + first * sin
    return out


# Experts


@variant("N06", "combine", summary="experts in reverse, the shared one first")
def _combined_in_reverse(site: Site, weights: Float, experts: Float, shared: Float) -> Float:
    out: Float = site.honest(weights[:, ::-1], experts[:, ::-1], shared)
    return out


@variant("N06", "expert_order")
def _experts_in_reverse(site: Site, experts: Sequence[int]) -> Sequence[int]:
    return experts[::-1]


@variant("shared-last", "combine", summary="the shared expert added last")
def _shared_last(site: Site, weights: Float, experts: Float, shared: Float) -> Float:
    out: Float = site.honest(weights, experts, np.zeros_like(shared)) + shared
    return out


@variant("combine-dot", "combine", summary="the mixture as one matrix product per row")
def _combined_as_a_product(site: Site, weights: Float, experts: Float, shared: Float) -> Float:
    out: Float = np.matmul(weights[:, None, :], experts)[:, 0] + shared
    return out


@variant("scale-first", "mixing_weights", summary="routed_scale before the division by the sum")
def _scaled_before_the_division(site: Site, picked: Float, norm_top_k: bool, routed_scale: float, eps: float) -> Float:
    scaled = picked * np.float32(routed_scale)
    return scaled / (picked.sum(axis=-1, keepdims=True) + np.float32(eps)) if norm_top_k else scaled


@variant(
    "fused-experts",
    "gemm",
    summary="one kernel for all experts: only their outputs to see",
    hidden_taps=("expert_gate", "expert_up", "expert_act"),
)
def _experts_in_one_kernel(site: Site, name: str, x: Float, w: Float) -> Float:
    return _split_k(site, name, x, w) if name.startswith("expert_") else np.asarray(site.honest(name, x, w))


@variant("black-box", "gemm", summary="logits and tokens only", hidden_taps=all_tap_names())
def _nothing_to_see(site: Site, name: str, x: Float, w: Float) -> Float:
    return _reversed_terms(site, name, x, w)


# The draft tree


@variant(
    "float32-scores",
    "path_score",
    summary="path scores summed in float32, declared",
    profile=Profile("float32-scores", float32_scores=True),
)
def _float32_path_score(site: Site, parent_score: Any, value: float) -> Any:
    return np.float32(np.float32(parent_score) + np.float32(value))


@variant("log-softmax", "log_normaliser", summary="log-sum-exp in float64, rounded once")
def _wide_normaliser(site: Site, row: Float) -> np.float32:
    top = row.max()
    return np.float32(top if np.isneginf(top) else top + np.log(np.exp(row.astype(np.float64) - top).sum()))


# Other formats, each under its own profile


def _rounded_to(bits: int) -> Callable[[Float], Float]:
    """Nearest value with `bits` explicit bits of fraction, ties to even."""
    drop = 23 - bits

    def rounded(x: Float) -> Float:
        raw = np.ascontiguousarray(x).view(np.uint32)
        return ((raw + np.uint32((1 << (drop - 1)) - 1) + ((raw >> drop) & 1)) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)).view(
            np.float32
        )

    return rounded


_tf32 = _rounded_to(10)


@variant("tf32", "gemm", summary="operands of dense products rounded to TF32", profile=PROFILES["tf32"])
def _tf32_product(site: Site, name: str, x: Float, w: Float) -> Float:
    out: Float = site.honest(name, _tf32(x), _tf32(w))
    return out


@variant("tf32", "score")
def _tf32_scores(site: Site, q: Float, keys: Float, scale: np.float32) -> Float:
    out: Float = site.honest(_tf32(q), _tf32(keys), scale)
    return out


@variant(
    "bf16-in",
    "gemm",
    summary="operands of dense products rounded to bf16, float32 accumulation",
    profile=Profile("bf16-in", u_input=2.0**-8),
)
def _bf16_product(site: Site, name: str, x: Float, w: Float) -> Float:
    out: Float = site.honest(name, bf16(x), bf16(w))
    return out


@variant("bf16-out", "gemm", summary="results of dense products stored as bf16", profile=PROFILES["bf16-f32acc"])
def _bf16_result(site: Site, name: str, x: Float, w: Float) -> Float:
    return bf16(site.honest(name, x, w))


@variant("bf16-out", "apply_gain")
def _bf16_norm(site: Site, normalised: Float, gain: Float) -> Float:
    return bf16(site.honest(normalised, gain))


@variant("fp16-out", "gemm", summary="results of dense products stored as fp16 where it holds them", profile=PROFILES["fp16-f32acc"])
def _fp16_result(site: Site, name: str, x: Float, w: Float) -> Float:
    """Beyond the normal range of fp16 the result stays float32: an honest engine scales there."""
    exact: Float = site.honest(name, x, w)
    size = np.abs(exact)
    inside = (size < 60000) & (size > 2.0**-14)
    return np.where(inside, np.where(inside, exact, ZERO).astype(np.float16).astype(np.float32), exact).astype(np.float32)


@variant("flush", "gemm", summary="subnormal results of products flushed to zero")
def _flushed(site: Site, name: str, x: Float, w: Float) -> Float:
    exact: Float = site.honest(name, x, w)
    return np.where(np.abs(exact) < 2.0**-126, ZERO, exact).astype(np.float32)


@variant("flush", "exponential")
def _flushed_exp(site: Site, x: Float) -> Float:
    exact: Float = site.honest(x)
    return np.where(exact < 2.0**-126, ZERO, exact).astype(np.float32)


@variant("strict", "key_parts", summary="one softmax over all keys at once, under the strict profile", profile=PROFILES["float32-strict"])
def _single_part(site: Site, prefix_len: int, key_count: int) -> list[tuple[int, int]]:
    return [(0, key_count)] if key_count else []


@variant("strict", "key_tile")
def _single_tile(site: Site) -> int:
    return 1 << 20
