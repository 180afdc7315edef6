"""The named points of the blocked engine: small functions in one table, each of which a plant or a variant may replace.

`Points` is the table: one field per point, its signature as type, its honest meaning as the default function, whose docstring
is the contract. The engine calls `points.name(...)` and never asks whether a point was replaced. A replacement takes the
honest function's arguments after a `Site`, which gives it the honest function and a memory that lives as long as the session
(for a single `run_op`: as long as the call).

Dimension letters: T rows, K contracted, N out, H heads, S keys, W keys of one tile, R kv_rank, C cache_dim, D rope_dim,
E experts, F expert_dim, V vocab, L depths.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.blocked import sampling
from spec.config import Config, yarn_mscale
from spec.engine import Limits
from spec.sampling import Sampling

Float = NDArray[np.float32]
Int = NDArray[np.int32]
Bool = NDArray[np.bool_]
RankPath = tuple[int, ...]
State = tuple[Float, Float]
"""Softmax state of a set of keys: running maximum and sum of exp(score - maximum), each [T,H,1]."""

PAGE = 4  # rows a page; small, so that short sequences already cross pages
TILE = 16  # keys a tile; small, so that short sequences already rescale
ONE, ZERO = np.float32(1), np.float32(0)
_EXACT_BITS = 149  # every finite float32 is a multiple of 2**-149


@dataclass(frozen=True)
class Span:
    """The rows of one sequence in a batch: n pending rows behind P committed ones."""

    at: NDArray[np.int64]  # [n], their indices in the batch
    prefix_len: int
    slots: NDArray[np.int64]  # [P + n], physical cache slots in logical order
    seen: Bool  # [n, P + n]


# Inputs, outputs, dense products and norms


def operand(array: NDArray[Any]) -> NDArray[Any]:
    """An input of `run_op` or a weight as the kernels read it: same values, whatever its strides."""
    return array


def write(output: NDArray[Any], value: NDArray[Any]) -> None:
    """Fill the caller's output of `run_op`."""
    output[...] = value


def gemm(site: str, x: Float, w: Float) -> Float:
    """x [T,K] @ w [K,N]. `site` is the tap that the product feeds ("op" in run_op)."""
    out: Float = x @ w
    return out


def group_scales(scales: Float, groups: int) -> Float:
    """The scales [G,N] of int4 weights, one row per group of 32 contracted weights."""
    return scales


def mean_square(x: Float) -> Float:
    """mean(x^2) along the last axis, [T,1]."""
    out: Float = np.mean(np.square(x), axis=-1, keepdims=True)
    return out


def norm_eps(config: Config, site: str) -> float:
    """The eps of the norm that feeds tap `site`; the two latent norms have their own (rule M2)."""
    return config.latent_norm_eps if site in ("q_a_norm", "latent") else config.rms_eps


def inverse_root(square: Float, eps: float) -> Float:
    """1 / sqrt(mean square + eps)."""
    out: Float = ONE / np.sqrt(square + np.float32(eps))
    return out


def apply_gain(normalised: Float, gain: Float) -> Float:
    """y = normalised * gain."""
    return normalised * gain


def sigmoid(x: Float) -> Float:
    """1 / (1 + exp(-x)), from exp(-|x|) so that nothing overflows."""
    decay = np.exp(-np.abs(x))
    out: Float = (np.where(x >= 0, ONE, decay) / (ONE + decay)).astype(np.float32, copy=False)
    return out


def swiglu(gate: Float, up: Float) -> Float:
    """silu(gate) * up."""
    return gate * sigmoid(gate) * up


def residual(stream: Float, delta: Float) -> Float:
    """stream + delta, one rounding."""
    return stream + delta


# Rotary embedding


def rope_frequencies(config: Config) -> NDArray[np.float64]:
    """Radians per position of each rotated pair, [D/2], with the YaRN ramp between extrapolation and interpolation (rule M6)."""
    dim, theta = config.rope_dim, config.rope_theta
    base = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    yarn = config.yarn
    if yarn is None or yarn.factor <= 1:
        return base
    low, high = yarn_range(config)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return base * (1 - ramp) + base / yarn.factor * ramp


def yarn_range(config: Config) -> tuple[float, float]:
    """The pair indices between which YaRN goes over from unchanged to interpolated frequencies."""
    assert config.yarn is not None
    dim, yarn = config.rope_dim, config.yarn

    def pair(turns: float) -> float:
        return dim * math.log(yarn.original_len / (2 * math.pi * turns)) / (2 * math.log(config.rope_theta))

    low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), dim - 1)
    return float(low), float(high) if high != low else high + 0.001


def rope_magnitude(config: Config) -> float:
    """The factor on cos and sin: mscale(factor, mscale) / mscale(factor, mscale_all_dim) (rule M6)."""
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if not (yarn.mscale and yarn.mscale_all_dim):
        return yarn_mscale(yarn.factor, 1.0)
    return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)


def rope_tables(positions: Int, frequencies: NDArray[np.float64], magnitude: float) -> tuple[Float, Float]:
    """cos and sin, [T,D/2], of float64 angles, rounded once."""
    angles = positions[:, None].astype(np.float64) * frequencies  # (T,D/2)
    return (np.cos(angles) * magnitude).astype(np.float32), (np.sin(angles) * magnitude).astype(np.float32)


def rotate(site: str, x: Float, cos: Float, sin: Float, half_layout: bool) -> Float:
    """Rotate pairs of x [T,H,D]: (2i, 2i+1), or (i, i + D/2) in the half layout. `site`: "q", "k" or "op"."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    half = x.shape[-1] // 2
    first, second = (x[..., :half], x[..., half:]) if half_layout else (x[..., 0::2], x[..., 1::2])
    out = np.empty_like(x)
    left, right = (out[..., :half], out[..., half:]) if half_layout else (out[..., 0::2], out[..., 1::2])
    left[...] = first * cos - second * sin
    right[...] = first * sin + second * cos
    return out


# Attention


def position(prefix_len: int, node: Int, depth: Int) -> Int:
    """Absolute positions of the pending rows of one sequence: P + depth (C2). `node` is the row's index among them, its slot."""
    return np.int32(prefix_len) + depth


def visible(parents: Sequence[int], prefix_len: int) -> Bool:
    """bool [n, P + n]: the prefix and ancestors-or-self (C3). `parents` are indices among the n pending rows, -1: none."""
    count = len(parents)
    seen = np.zeros((count, prefix_len + count), np.bool_)
    seen[:, :prefix_len] = True
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] = seen[parent]
        seen[row, prefix_len + row] = True
    return seen


def in_window(rows: Int, keys: Int, window: int) -> Bool:
    """bool [n, P + n]: keys at positions above p - window, for rows at positions `rows` [n] and keys at positions `keys` [P + n] (M10)."""
    seen: Bool = keys[None, :] > rows[:, None] - np.int32(window)
    return seen


def to_cache(cache_format: str, row: Float) -> Float:
    """Latents or rotated keys as they enter the cache, rounded to its format once (M11)."""
    if cache_format == "float16":
        half: Float = row.astype(np.float16).astype(np.float32)
        return half
    if cache_format == "bfloat16":  # 8 bits of the fraction in [1/2, 1)
        fraction, exponent = np.frexp(row)
        rounded: Float = np.ldexp(np.rint(np.ldexp(fraction, 8)), exponent - 8).astype(np.float32)
        return rounded
    return row


def batch(spans: list[Span]) -> list[Span]:
    """The spans of a batch as the attention kernel reads them: keys through `slots`, the mask from `seen`, results to rows `at`."""
    return spans


def softmax_scale(config: Config) -> float:
    """The factor on every score, YaRN's mscale squared included (rule M5)."""
    return config.softmax_scale


def absorb(q_nope: Float, w_kc: Float) -> Float:
    """q_nope [T,H,n] through the key up-projection w_kc [H,n,R] -> [T,H,R]."""
    out: Float = np.matmul(q_nope.transpose(1, 0, 2), w_kc)
    return out.transpose(1, 0, 2)


def unabsorb(o_latent: Float, w_vc: Float) -> Float:
    """o_latent [T,H,R] through the value up-projection w_vc [H,R,v] -> [T,H,v]."""
    out: Float = np.matmul(o_latent.transpose(1, 0, 2), w_vc)
    return out.transpose(1, 0, 2)


def load_tile(keys: Float, start: int, stop: int, tile: int) -> Float:
    """Rows start..stop of `keys` [S,C], at most `tile` of them: [W,C]."""
    return keys[start:stop]


def score(q: Float, keys: Float, scale: np.float32) -> Float:
    """(q [T,H,C] . keys [W,C]) * scale -> [T,H,W]."""
    rows, heads, width = q.shape
    return (q.reshape(rows * heads, width) @ keys.T * scale).reshape(rows, heads, len(keys))


def mask_tile(scores: Float, seen: Bool, first_key: int, tile: int) -> Float:
    """scores [T,H,W] with -inf where `seen` [T,W] is False. `first_key` is the tile's first column."""
    return np.where(seen[:, None, :], scores, np.float32(-np.inf))


def key_parts(prefix_len: int, key_count: int) -> list[tuple[int, int]]:
    """The [start, stop) ranges of keys whose softmax states are found apart and then merged: the prefix, the pending rows."""
    return [part for part in ((0, prefix_len), (prefix_len, key_count)) if part[0] < part[1]]


def key_tile() -> int:
    """Keys per tile of the online softmax."""
    return TILE


def peak_start() -> float:
    """The running maximum before the first key."""
    return -math.inf


def exponential(x: Float) -> Float:
    """exp(x) of non-positive x."""
    return np.exp(x)


def rescale(old_peak: Float, new_peak: Float) -> Float:
    """exp(old - new): the factor on a sum whose running maximum rose; 0 while there was no key."""
    return np.exp(old_peak - np.where(np.isneginf(new_peak), ZERO, new_peak))


def row_sum(weights: Float) -> Float:
    """The sum of a tile's weights [T,H,W] -> [T,H,1]."""
    out: Float = weights.sum(axis=-1, keepdims=True)
    return out


def merge(states: list[State]) -> list[State]:
    """From the softmax state of each part of the keys, the state that the part's weights are made with: that of all keys."""
    peak, total = states[0]
    for part_peak, part_total in states[1:]:
        new_peak = np.maximum(peak, part_peak)
        total = total * rescale(peak, new_peak) + part_total * rescale(part_peak, new_peak)
        peak = new_peak
    return [(peak, total)] * len(states)


def normalise(weights: Float, total: Float) -> Float:
    """weights [T,H,S] / total [T,H,1]; a row that saw no key (total 0) is all 0."""
    safe: Float = np.where(total > 0, total, ONE).astype(np.float32, copy=False)
    return weights / safe


def value_tile(values: Float, start: int, stop: int) -> Float:
    """Rows start..stop of the latents [S,R], the values of the tile's keys."""
    return values[start:stop]


# Experts


def group_scores(choice: Float, use_max: bool) -> Float:
    """choice [T,G,E/G] -> the score of each group [T,G]: the sum of its two best, or its best."""
    out: Float = choice.max(axis=-1) if use_max else np.partition(choice, -2, axis=-1)[..., -2:].sum(axis=-1)
    return out


def best(values: Float, count: int) -> NDArray[np.int64]:
    """Column indices [T,count] by (value descending, index ascending)."""
    return np.argsort(-values, axis=-1, kind="stable")[:, :count]


def drop_groups(choice: Float, kept: Bool) -> Float:
    """choice [T,G,E/G] with -inf in groups that `kept` [T,G] leaves out."""
    return np.where(kept[:, :, None], choice, np.float32(-np.inf))


def zero_groups(choice: Float, kept: Bool) -> Float:
    """choice [T,G,E/G] with 0 in groups that `kept` [T,G] leaves out, which beats negative choices."""
    return np.where(kept[:, :, None], choice, ZERO)


def biased(scores: Float, bias: Float) -> Float:
    """What experts are chosen by: scores [T,E] + bias [E]."""
    return scores + bias


def mixing_scores(scores: Float, choice: Float, bias: Float, ids: NDArray[np.int64]) -> Float:
    """What experts are mixed by [T,top_k]: the scores without bias at the chosen ids."""
    return np.take_along_axis(scores, ids, axis=-1)


def mixing_weights(picked: Float, norm_top_k: bool, routed_scale: float, eps: float) -> Float:
    """picked [T,top_k] / (their sum + eps) where norm_top_k, times routed_scale."""
    if norm_top_k:
        picked = picked / (picked.sum(axis=-1, keepdims=True) + np.float32(eps))
    return picked * np.float32(routed_scale)


def clamped_weights(picked: Float, norm_top_k: bool, routed_scale: float, eps: float, clamp: float) -> Float:
    """picked [T,top_k] / max(their sum + eps, clamp) where norm_top_k, times routed_scale."""
    if norm_top_k:
        picked = picked / np.maximum(picked.sum(axis=-1, keepdims=True) + np.float32(eps), np.float32(clamp))
    return picked * np.float32(routed_scale)


def expert_rows(expert: int, experts: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of the flat (token, choice) pairs that chose `expert` of `experts`, those that it computes: all."""
    return rows


def expert_index(expert: int, experts: int) -> int:
    """The slice of the expert weights that `expert` reads: its own."""
    return expert


def expert_order(experts: Sequence[int]) -> Sequence[int]:
    """The order in which the chosen experts run."""
    return experts


def shared_output(shared: Float) -> Float:
    """The shared expert's output [T,N] as it enters the sum."""
    return shared


def combine(weights: Float, experts: Float, shared: Float) -> Float:
    """sum_k weights [T,K] * experts [T,K,N] + shared [T,N]."""
    total = shared
    for choice in range(weights.shape[1]):
        total = total + weights[:, choice, None] * experts[:, choice]
    return total


def argmax(logits: Float) -> Int:
    """The index of the largest logit of each row, the lowest among equals (A1)."""
    out: Int = np.argmax(logits, axis=-1).astype(np.int32)
    return out


def wanted_rows(want_logits: Bool) -> NDArray[np.intp]:
    """The batch rows whose logits are returned, in row order."""
    return np.flatnonzero(want_logits)


# Cache


def row_slots(pages: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Physical slots of the logical `rows` of a sequence whose page table is `pages`."""
    return pages[rows // PAGE] * PAGE + rows % PAGE


def table_row(sequence: int) -> int:
    """The row of the page table that holds a sequence: numbers are names, each has a row of its own (C6)."""
    return sequence


def keep(path: Sequence[int], pending: int) -> Sequence[int]:
    """The pending rows, in order, that a commit moves behind the prefix: those of the accepted path (K1)."""
    return path


def committed_len(prefix_len: int, kept: int, pending: int) -> int:
    """The length after a commit: P + len(path) (K2)."""
    return prefix_len + kept


def move(store: Float, target: NDArray[np.int64], source: NDArray[np.int64], kv_rank: int) -> None:
    """store[:, target] = store[:, source] for all layers, read before written; `store` is [layers, slots, C]."""
    store[:, target] = store[:, source]


def poison(store: Float, slots: NDArray[np.int64]) -> None:
    """Fill freed slots with NaN, so that a read of them shows."""
    store[:, slots] = np.nan


def shared_pages(pages: Sequence[int], length: int) -> Sequence[int]:
    """The pages that a fork shares with its source: none, everything is copied."""
    return ()


def forgotten(length: int) -> int:
    """How many rows of an evicted sequence are dropped: all."""
    return length


# The draft tree


def draft_row(depth: int) -> int:
    """The row of the drafter's logits that belongs to `depth` >= 1 (T1)."""
    return depth - 1


def candidates(row: Float, width: int) -> NDArray[np.int64]:
    """The `width` best ids of logits [V] by (logit descending, id ascending) (T4)."""
    return np.argsort(-row, kind="stable")[:width]


def token_ids(columns: NDArray[np.int64], vocab: int) -> NDArray[np.int64]:
    """Token ids of columns of the drafter's logits: the columns themselves, global to the vocabulary (T4)."""
    return columns


def table_width(budget: int, vocab: int) -> int:
    """K = min(B, V) candidates per depth (T4)."""
    return min(budget, vocab)


def log_normaliser(row: Float) -> np.float32:
    """log sum exp of logits [V], finite or -inf, in float32; -inf for a row without a candidate."""
    peak = row.max()
    if np.isneginf(peak):
        return np.float32(-np.inf)
    return np.float32(peak + np.log(np.exp(row - peak).sum(dtype=np.float32)))


def log_prob(values: Float, normaliser: np.float32) -> Float:
    """fp32(logit - logZ) (T2); -inf where the logit is."""
    return np.where(np.isneginf(values), np.float32(-np.inf), values - (normaliser if np.isfinite(normaliser) else ZERO))


def path_score(parent_score: Any, value: float) -> Any:
    """Score of a rank path from its parent's and its own log-probability: the exact sum, an integer of 2**-149 units (T2)."""
    return parent_score + int(math.ldexp(value, _EXACT_BITS))


def heap_key(value: Any, ranks: RankPath, pushed: int) -> Any:
    """Pop order: score descending, then rank path ascending (T3). `pushed` counts the pushes before this one."""
    return (-value, ranks)


def node_budget(budget: int, depth_max: int) -> int:
    """Nodes without the root (T5)."""
    return budget


def select(order: Callable[[int], list[RankPath]], log_probs: Sequence[Sequence[float]], budget: int) -> list[RankPath]:
    """The rank paths of the tree in node order: the first `budget` of the best-first order (T5, T7). order(n): its first n."""
    return order(budget)


def parent_numbers(paths: Sequence[RankPath]) -> list[int]:
    """The parent of each rank path (the root's children first have parent 0), by node number; paths[i] is node i + 1."""
    number = {path: index for index, path in enumerate(paths, start=1)}
    return [number[path[:-1]] if len(path) > 1 else 0 for path in paths]


def node_token(ids: Sequence[Sequence[int]], ranks: RankPath) -> int:
    """The token of the node at `ranks`."""
    return ids[len(ranks) - 1][ranks[-1]]


# Acceptance and the loop


def child_of(node: int, token: int, tokens: Sequence[int], parents: Sequence[int]) -> int:
    """The child of `node` that holds `token`, or -1."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return -1


def deciding_row(node: int, parents: Sequence[int]) -> int:
    """The row of the tree forward that decides among the children of `node`: its own (V1)."""
    return node


def accepted(path: list[int], tokens: Sequence[int], parents: Sequence[int], target: Sequence[int]) -> list[int]:
    """The accepted path, from the path of the walk."""
    return path


def bonus(path: Sequence[int], parents: Sequence[int], target: Sequence[int]) -> int:
    """The bonus token: the choice of the row of the last accepted node (A3)."""
    return target[path[-1]]


def emitted(path: Sequence[int], tokens: Sequence[int], bonus: int) -> list[int]:
    """What a round emits: the accepted drafts, then the bonus."""
    return [*(tokens[node] for node in path[1:]), bonus]


def stream_end(stream: Sequence[int], fresh: int, limits: Limits) -> int | None:
    """Tokens after which `stream`, whose last `fresh` tokens are new, ends: at the first stop, inclusive, and the limit (A4); None: goes on."""
    for index in range(len(stream) - fresh, min(len(stream), limits.max_new)):
        if stream[index] in limits.stop_tokens:
            return index + 1
    return limits.max_new if len(stream) >= limits.max_new else None


def draft_history(history: list[int]) -> list[int]:
    """What the drafter is shown: the prompt and everything emitted, the root last."""
    return history


@dataclass(frozen=True)
class Points:
    """The table of named points; see the default functions for what each one means."""

    operand: Callable[[NDArray[Any]], NDArray[Any]] = operand
    write: Callable[[NDArray[Any], NDArray[Any]], None] = write
    gemm: Callable[[str, Float, Float], Float] = gemm
    group_scales: Callable[[Float, int], Float] = group_scales
    mean_square: Callable[[Float], Float] = mean_square
    norm_eps: Callable[[Config, str], float] = norm_eps
    inverse_root: Callable[[Float, float], Float] = inverse_root
    apply_gain: Callable[[Float, Float], Float] = apply_gain
    sigmoid: Callable[[Float], Float] = sigmoid
    swiglu: Callable[[Float, Float], Float] = swiglu
    residual: Callable[[Float, Float], Float] = residual
    rope_frequencies: Callable[[Config], NDArray[np.float64]] = rope_frequencies
    rope_magnitude: Callable[[Config], float] = rope_magnitude
    rope_tables: Callable[[Int, NDArray[np.float64], float], tuple[Float, Float]] = rope_tables
    rotate: Callable[[str, Float, Float, Float, bool], Float] = rotate
    position: Callable[[int, Int, Int], Int] = position
    visible: Callable[[Sequence[int], int], Bool] = visible
    in_window: Callable[[Int, Int, int], Bool] = in_window
    to_cache: Callable[[str, Float], Float] = to_cache
    batch: Callable[[list[Span]], list[Span]] = batch
    softmax_scale: Callable[[Config], float] = softmax_scale
    absorb: Callable[[Float, Float], Float] = absorb
    unabsorb: Callable[[Float, Float], Float] = unabsorb
    load_tile: Callable[[Float, int, int, int], Float] = load_tile
    score: Callable[[Float, Float, np.float32], Float] = score
    mask_tile: Callable[[Float, Bool, int, int], Float] = mask_tile
    key_parts: Callable[[int, int], list[tuple[int, int]]] = key_parts
    key_tile: Callable[[], int] = key_tile
    peak_start: Callable[[], float] = peak_start
    exponential: Callable[[Float], Float] = exponential
    rescale: Callable[[Float, Float], Float] = rescale
    row_sum: Callable[[Float], Float] = row_sum
    merge: Callable[[list[State]], list[State]] = merge
    normalise: Callable[[Float, Float], Float] = normalise
    value_tile: Callable[[Float, int, int], Float] = value_tile
    group_scores: Callable[[Float, bool], Float] = group_scores
    best: Callable[[Float, int], NDArray[np.int64]] = best
    drop_groups: Callable[[Float, Bool], Float] = drop_groups
    zero_groups: Callable[[Float, Bool], Float] = zero_groups
    biased: Callable[[Float, Float], Float] = biased
    mixing_scores: Callable[[Float, Float, Float, NDArray[np.int64]], Float] = mixing_scores
    mixing_weights: Callable[[Float, bool, float, float], Float] = mixing_weights
    clamped_weights: Callable[[Float, bool, float, float, float], Float] = clamped_weights
    expert_rows: Callable[[int, int, NDArray[np.int64]], NDArray[np.int64]] = expert_rows
    expert_index: Callable[[int, int], int] = expert_index
    expert_order: Callable[[Sequence[int]], Sequence[int]] = expert_order
    shared_output: Callable[[Float], Float] = shared_output
    combine: Callable[[Float, Float, Float], Float] = combine
    argmax: Callable[[Float], Int] = argmax
    wanted_rows: Callable[[Bool], NDArray[np.intp]] = wanted_rows
    row_slots: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]] = row_slots
    table_row: Callable[[int], int] = table_row
    keep: Callable[[Sequence[int], int], Sequence[int]] = keep
    committed_len: Callable[[int, int, int], int] = committed_len
    move: Callable[[Float, NDArray[np.int64], NDArray[np.int64], int], None] = move
    poison: Callable[[Float, NDArray[np.int64]], None] = poison
    shared_pages: Callable[[Sequence[int], int], Sequence[int]] = shared_pages
    forgotten: Callable[[int], int] = forgotten
    draft_row: Callable[[int], int] = draft_row
    candidates: Callable[[Float, int], NDArray[np.int64]] = candidates
    token_ids: Callable[[NDArray[np.int64], int], NDArray[np.int64]] = token_ids
    table_width: Callable[[int, int], int] = table_width
    log_normaliser: Callable[[Float], np.float32] = log_normaliser
    log_prob: Callable[[Float, np.float32], Float] = log_prob
    path_score: Callable[[Any, float], Any] = path_score
    heap_key: Callable[[Any, RankPath, int], Any] = heap_key
    node_budget: Callable[[int, int], int] = node_budget
    select: Callable[[Callable[[int], list[RankPath]], Sequence[Sequence[float]], int], list[RankPath]] = select
    parent_numbers: Callable[[Sequence[RankPath]], list[int]] = parent_numbers
    node_token: Callable[[Sequence[Sequence[int]], RankPath], int] = node_token
    child_of: Callable[[int, int, Sequence[int], Sequence[int]], int] = child_of
    deciding_row: Callable[[int, Sequence[int]], int] = deciding_row
    accepted: Callable[[list[int], Sequence[int], Sequence[int], Sequence[int]], list[int]] = accepted
    bonus: Callable[[Sequence[int], Sequence[int], Sequence[int]], int] = bonus
    emitted: Callable[[Sequence[int], Sequence[int], int], list[int]] = emitted
    stream_end: Callable[[Sequence[int], int, Limits], int | None] = stream_end
    draft_history: Callable[[list[int]], list[int]] = draft_history
    seen_tokens: Callable[[list[int], list[int]], list[int]] = sampling.seen_tokens
    law: Callable[[Sampling, Float, list[int], int], sampling.Wide] = sampling.law
    noise: Callable[[int, int, int, int], sampling.Wide] = sampling.noise
    draw: Callable[[sampling.Wide, sampling.Wide], int] = sampling.draw


HONEST = Points()


@dataclass(frozen=True)
class Site:
    """What a replacement gets before the arguments of its point."""

    honest: Callable[..., Any]
    memory: dict[Any, Any] = field(default_factory=dict)  # one for all points of a session


Overrides = Mapping[str, Callable[..., Any]]
"""Point name -> replacement(site, *arguments of the point)."""


class PointError(ValueError):
    """An override names no point."""


def with_overrides(overrides: Overrides) -> Points:
    """The honest table with the named points replaced, over a fresh memory. Raises PointError."""
    if not overrides:
        return HONEST
    unknown = set(overrides) - {f.name for f in dataclasses.fields(Points)}
    if unknown:
        raise PointError(f"there is no point {sorted(unknown)[0]!r}; the table is impls.blocked.points.Points")
    memory: dict[Any, Any] = {}
    bound = {name: partial(function, Site(getattr(HONEST, name), memory)) for name, function in overrides.items()}
    return dataclasses.replace(HONEST, **bound)


def catalogue() -> dict[str, tuple[str, str]]:
    """Name -> (signature, contract) of every point."""
    return {
        f.name: (str(inspect.signature(getattr(HONEST, f.name))), inspect.getdoc(getattr(HONEST, f.name)) or "")
        for f in dataclasses.fields(Points)
    }
