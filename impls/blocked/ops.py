"""The operations of the blocked engine, composed from named points: what one kernel of a real engine would do.

float32 throughout. Attention finds the softmax state tile by tile with a running maximum, part by part of the keys, merges the
parts, and only then makes the weights that multiply the latents: the tap `probs` is what `o_latent` really consumes.
Dimension letters as in points.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.blocked.points import Bool, Float, Int, Points, State
from spec.formats import GROUP, unpacked_int4

Arrays = Mapping[str, NDArray[Any]]


def rms_norm(p: Points, x: Float, gain: Float, eps: float) -> Float:
    """gain * x / sqrt(mean(x^2) + eps), [T,N]."""
    return p.apply_gain(x * p.inverse_root(p.mean_square(x), eps), gain)


def scores(p: Points, q: Float, keys: Float, scale: np.float32) -> Float:
    """q [T,H,C] against keys [S,C], tile by tile -> [T,H,S]."""
    tile, count = p.key_tile(), len(keys)
    out = np.empty((q.shape[0], q.shape[1], count), np.float32)
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        out[:, :, start:stop] = p.score(q, p.load_tile(keys, start, stop, tile), scale)
    return out


def softmax(p: Points, raw: Float, seen: Bool, prefix_len: int) -> Float:
    """Weights [T,H,S] of scores [T,H,S]; 0 where `seen` [T,S] is False; a row that sees nothing is all 0."""
    tile, count = p.key_tile(), raw.shape[-1]
    masked, probs = np.empty_like(raw), np.zeros_like(raw)
    parts = p.key_parts(prefix_len, count)
    states: list[State] = []
    for part in parts:
        peak = np.full((*raw.shape[:2], 1), p.peak_start(), np.float32)
        total = np.zeros_like(peak)
        for start in range(*part, tile):
            stop = min(start + tile, part[1])
            block = p.mask_tile(raw[:, :, start:stop], seen[:, start:stop], start, tile)
            masked[:, :, start:stop] = block[:, :, : stop - start]
            new_peak = np.maximum(peak, block.max(axis=-1, keepdims=True))
            total = total * p.rescale(peak, new_peak) + p.row_sum(_weights(p, block, new_peak))
            peak = new_peak
        states.append((peak, total))
    for (start, stop), (peak, total) in zip(parts, p.merge(states) if states else [], strict=True):
        probs[:, :, start:stop] = p.normalise(_weights(p, masked[:, :, start:stop], peak), total)
    return probs


def _weights(p: Points, masked: Float, peak: Float) -> Float:
    """exp(score - peak); a peak of -inf (no key yet) gives 0, not exp(-inf + inf)."""
    return p.exponential(masked - np.where(np.isneginf(peak), np.float32(0), peak))


def o_latent(p: Points, probs: Float, latent: Float) -> Float:
    """probs [T,H,S] @ latent [S,R], tile by tile -> [T,H,R]."""
    rows, heads, count = probs.shape
    tile = p.key_tile()
    flat = probs.reshape(rows * heads, count)
    out = np.zeros((rows * heads, latent.shape[1]), np.float32)
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        out += flat[:, start:stop] @ p.value_tile(latent, start, stop)
    return out.reshape(rows, heads, latent.shape[1])


def router_scores(p: Points, logits: Float, use_softmax: bool) -> Float:
    """Sigmoid of each logit, or softmax over all experts, [T,E]."""
    if not use_softmax:
        return p.sigmoid(logits)
    weights = p.exponential(logits - logits.max(axis=-1, keepdims=True))
    out: Float = weights / weights.sum(axis=-1, keepdims=True)
    return out


def route(
    p: Points, scores: Float, bias: Float, *, top_k: int, groups: int, top_groups: int, group_score_max: bool, norm_top_k: bool,
    routed_scale: float, denominator_eps: float, denominator_clamp: float = 0.0, group_fill_zero: bool = False,
) -> tuple[Int, Float]:  # fmt: skip
    """ids and weights, [T,top_k], by (biased score descending, id ascending) among the best groups (rule M8)."""
    choice = p.biased(scores, bias)  # (T,E)
    allowed = choice
    if groups > 1:
        grouped = choice.reshape(len(choice), groups, -1)  # (T,G,E/G)
        kept = np.zeros((len(choice), groups), np.bool_)
        np.put_along_axis(kept, p.best(p.group_scores(grouped, group_score_max), top_groups), True, axis=-1)
        allowed = (p.zero_groups if group_fill_zero else p.drop_groups)(grouped, kept).reshape(choice.shape)
    ids = p.best(allowed, top_k)
    picked = p.mixing_scores(scores, choice, bias, ids)
    if denominator_clamp:
        return ids.astype(np.int32), p.clamped_weights(picked, norm_top_k, routed_scale, denominator_eps, denominator_clamp)
    return ids.astype(np.int32), p.mixing_weights(picked, norm_top_k, routed_scale, denominator_eps)


def int4_matmul(p: Points, x: Float, packed: Int, scales: Float) -> Float:
    """x [T,32G] with int4 weights, dequantised in float32 before the product -> [T,N]."""
    weights = unpacked_int4(packed).astype(np.float32)  # (32G,N)
    return p.gemm("op", x, weights * np.repeat(p.group_scales(scales, len(scales)), GROUP, axis=0))


def experts(p: Points, x: Float, ids: Int, gate: Float, up: Float, down: Float) -> dict[str, Float]:
    """SwiGLU of every chosen expert, rows grouped by expert: gate, up, act [T,K,F] and out [T,K,N]."""
    rows, top_k = ids.shape
    width = gate.shape[2]
    out = {name: np.zeros((rows * top_k, width), np.float32) for name in ("gate", "up", "act")}
    out["out"] = np.zeros((rows * top_k, down.shape[2]), np.float32)
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    chosen, starts = np.unique(flat[order], return_index=True)
    members = dict(zip(chosen.tolist(), np.split(order, starts[1:]), strict=True))
    for expert in p.expert_order(list(members)):
        pairs = p.expert_rows(expert, len(gate), members[expert])
        index = p.expert_index(expert, len(gate))
        tokens = x[pairs // top_k]
        out["gate"][pairs] = p.gemm("expert_gate", tokens, gate[index])
        out["up"][pairs] = p.gemm("expert_up", tokens, up[index])
        out["act"][pairs] = p.swiglu(out["gate"][pairs], out["up"][pairs])
        out["out"][pairs] = p.gemm("expert_out", out["act"][pairs], down[index])
    return {name: value.reshape(rows, top_k, -1) for name, value in out.items()}
