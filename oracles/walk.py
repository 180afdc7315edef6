"""The model as equations over balls (M1-M9), every row at once. What happens at a tap is the caller's: compare it with the engine's,
perturb it, record it.

T = all rows of a session, H = heads, n = nope_dim, D = rope_dim, R = kv_rank; keys are rows, too: [T, T] says who sees whom.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from oracles.ball import INFLATE, Arithmetic, Ball, Wide, concatenate
from oracles.matrices import Fetched, Kept, Matrices
from oracles.ops import add, combine, o_latent, q_absorb, rms_norm, rope, router_scores, scores, softmax, swiglu
from oracles.ops.embed import row_ball
from oracles.ops.route import weights as route_weights
from spec.config import Config
from spec.formats import SMALLEST_STEP, UNIT_ROUNDOFF
from spec.model import in_window
from spec.rotary import CarriedTables, Rotary, frequencies, table_factor
from spec.weights import Weights, is_large

Ids = NDArray[np.int64]


class Taps(Protocol):
    """Who meets the walk at each tap."""

    def meet(self, name: str, layer: int, predicted: Ball) -> Ball:
        """What the next operation reads: the engine's own numbers as an exact leaf, or the prediction."""
        ...

    def choose(self, layer: int, predicted: Ball) -> Ids:
        """[T, top_k] experts, from router scores."""
        ...

    def has(self, name: str, layer: int) -> bool:
        """Whether `meet` gives an exact leaf for every row: without it both algebraic forms of attention are honest."""
        ...


class JudgeModel:
    """Weights as exact balls: made once per model and read by every session, or fetched for each product where the model is large."""

    def __init__(self, config: Config, weights: Weights, rotary: Rotary | CarriedTables | None = None, *, keep: bool | None = None) -> None:
        """`keep`: whether matrices are kept (None: unless the model is large)."""
        self.config = config
        keep = not is_large(config) if keep is None else keep
        self.matrices: Matrices = Kept(weights, config.tied) if keep else Fetched(weights, config.tied)
        self.carried = bool(config.rope_table_len)
        self.rotary = rotary or (CarriedTables(weights["rope_cos"], weights["rope_sin"]) if self.carried else Rotary(config))
        self.frequencies: Wide = np.array([float(f) for f in frequencies(config)])
        self.table_factor = float(table_factor(config.yarn))
        self.embed = weights["embed"]
        self.eps = float(np.float32(config.rms_eps))
        self.latent_eps = float(np.float32(config.latent_norm_eps))
        self.scale = float(np.float32(config.softmax_scale))
        self.routed_scale = float(np.float32(config.routed_scale))
        self.denominator_eps = float(np.float32(config.denominator_eps))
        self.denominator_clamp = float(np.float32(config.denominator_clamp))

    def bias(self, layer: int) -> NDArray[np.float32]:
        """The routing bias as float32, zeros where the router has none."""
        if self.config.scoring != "sigmoid":
            return np.zeros(self.config.experts, np.float32)
        return self.matrices.vector(f"{layer}.router_bias").mid.astype(np.float32)


def walk(
    model: JudgeModel,
    token: NDArray[np.int64],
    position: NDArray[np.int64],
    visible: NDArray[np.bool_],
    wanted: NDArray[np.intp],
    taps: Taps,
    a: Arithmetic,
) -> Ball:
    """The logits of the `wanted` rows, as the taps left them. Radii of long regions may overflow: they say nothing anyway."""
    with np.errstate(all="ignore"):
        return _walk(model, token, position, visible, wanted, taps, a)


def _walk(
    model: JudgeModel, token: NDArray[np.int64], position: NDArray[np.int64], visible: NDArray[np.bool_], wanted: NDArray[np.intp], taps: Taps,
    a: Arithmetic,
) -> Ball:  # fmt: skip
    c, last = model.config, model.config.layers
    cos, sin = (table.astype(np.float64) for table in model.rotary.tables(position))
    table = None if model.carried else rope.table_radius(position[:, None] * model.frequencies, model.table_factor, a.at("rope"))
    if c.window:
        visible = visible & in_window(position, position, c.window)
    x = taps.meet("embed", -1, row_ball(model.embed[token], a.at("embed")))
    for layer in range(last):
        h = taps.meet(
            "attn_norm", layer, rms_norm.bound(x, model.matrices.vector(f"{layer}.attn_norm"), model.eps, a.at("attn_norm", "rms_norm"))
        )
        out = attention(model, layer, h, cos, sin, visible, taps, a, table)
        x = taps.meet("attn_residual", layer, add.bound(x, out, a.at("attn_residual", "add")))
        h = taps.meet(
            "ffn_norm", layer, rms_norm.bound(x, model.matrices.vector(f"{layer}.ffn_norm"), model.eps, a.at("ffn_norm", "rms_norm"))
        )
        block = feed_forward(model, layer, h, "", taps, a) if c.is_dense(layer) else sparse(model, layer, h, taps, a)
        x = taps.meet("ffn_residual", layer, add.bound(x, taps.meet("ffn_out", layer, block), a.at("ffn_residual", "add")))
    h = taps.meet("final_norm", last, rms_norm.bound(x, model.matrices.vector("norm"), model.eps, a.at("final_norm", "rms_norm")))
    return taps.meet("logits", last, model.matrices.head(h[wanted], a.at("logits", "matmul")))


def attention(
    model: JudgeModel, layer: int, h: Ball, cos: Wide, sin: Wide, visible: NDArray[np.bool_], taps: Taps, a: Arithmetic,
    table: Wide | None = None,
) -> Ball:  # fmt: skip
    c, rows, matrices, at = model.config, h.mid.shape[0], model.matrices, f"{layer}."

    def biased(x: Ball, name: str, tap: str = "") -> Ball:
        return matrices.product(x, at + name, a.at(tap or name, "matmul"), f"{at}{name}_bias" if c.attention_bias else "")

    def meet(name: str, predicted: Ball) -> Ball:
        return taps.meet(name, layer, predicted)

    if c.q_rank:
        q = meet("q_a", biased(h, "q_a"))
        q = meet("q_a_norm", rms_norm.bound(q, matrices.vector(at + "q_a_norm"), model.latent_eps, a.at("q_a_norm", "rms_norm")))
        q = matrices.product(q, at + "q_b", a.at("q", "matmul"))
    else:
        q = biased(h, "q")
    q = meet("q", q.reshape(rows, c.heads, c.nope_dim + c.rope_dim))
    kv = meet("kv_a", biased(h, "kv_a"))
    normed = rms_norm.bound(kv[:, : c.kv_rank], matrices.vector(at + "kv_a_norm"), model.latent_eps, a.at("latent", "rms_norm"))
    latent = meet("latent", rounded(normed, c.cache_format))
    half = c.rope_layout == "half"
    q_rope = meet(
        "q_rope",
        rope.bound(
            q[..., c.nope_dim :], cos[:, None], sin[:, None], half, a.at("q_rope", "rope"), None if table is None else table[:, None]
        ),
    )
    k_rope = meet("k_rope", rounded(rope.bound(kv[:, c.kv_rank :], cos, sin, half, a.at("k_rope", "rope"), table), c.cache_format))
    q_nope = q[..., : c.nope_dim]
    absorbed = meet("q_absorb", matrices.heads(q_nope, at + "w_kc", a.at("q_absorb")))
    own = scores.bound(concatenate([absorbed, q_rope], -1), concatenate([latent, k_rope], -1), model.scale, a.at("scores"))
    if not taps.has("q_absorb", layer):
        own = expanded_scores(own, q_nope, q_rope, latent, k_rope, matrices.whole(at + "w_kc"), model.scale, a.widest)
    own = meet("scores", own)
    probs = meet("probs", softmax.bound(own, visible[:, None], a.at("probs", "softmax")))
    values = meet("o_latent", o_latent.bound(probs, latent, visible.sum(-1)[:, None, None], a.at("o_latent")))
    heads = matrices.heads(values, at + "w_vc", a.at("o_heads"))
    if not taps.has("o_latent", layer):
        heads = expanded_values(heads, probs, latent, matrices.whole(at + "w_vc"), a.widest)
    heads = meet("o_heads", heads)
    return meet("attn_out", biased(heads.reshape(rows, -1), "o", "attn_out"))


def rounded(x: Ball, cache_format: str) -> Ball:
    """x rounded to the format of the cache, once (M11): rad + u (|x| + rad) + half the smallest step. Float32 caches round nothing.

    The engine rounds its own float32 value, which the judge knows within `rad`: so the midpoint is not rounded.
    """
    unit = UNIT_ROUNDOFF[cache_format]
    if not unit:
        return x
    rad = unit * x.upper + SMALLEST_STEP[cache_format]
    std = None if x.std is None else np.sqrt(np.square(x.std) + np.square(unit * x.mid) / 3)
    return Ball(x.mid, rad * INFLATE if x.rad is None else (x.rad + rad) * INFLATE, std, x.overflow)


def expanded_scores(
    absorbed: Ball, q_nope: Ball, q_rope: Ball, latent: Ball, k_rope: Ball, w_kc: Ball, scale: float, a: Arithmetic
) -> Ball:  # fmt: skip
    """Keys expanded by w_kc before the dot: gamma(n + R + D + 2) scale (|q_n||w_kc||c| + |q_r||k_r|) bounds both associations."""
    terms = q_nope.mid.shape[-1] + latent.mid.shape[-1] + k_rope.mid.shape[-1]
    reach = q_absorb.per_head(q_nope.upper, w_kc.absolute) @ latent.upper.T + q_rope.upper @ k_rope.upper.T
    rad = ((1 + a.gamma(terms + scores.EXTRA)) * (1 + a.input_growth) ** 2 - 1) * reach * abs(scale) * INFLATE
    inherited = absorbed.rad if absorbed.rad is not None else np.zeros(())
    return Ball(absorbed.mid, rad + inherited, absorbed.std, absorbed.overflow)


def expanded_values(absorbed: Ball, probs: Ball, latent: Ball, w_vc: Ball, a: Arithmetic) -> Ball:
    """Values expanded by w_vc before the sum over keys: gamma(S + R) p |c||w_vc|."""
    terms = latent.mid.shape[0] + latent.mid.shape[1]
    rows, heads, keys = probs.mid.shape
    reach = (probs.upper.reshape(-1, keys) @ latent.upper).reshape(rows, heads, -1)
    rad = ((1 + a.gamma(terms)) * (1 + a.input_growth) ** 2 - 1) * q_absorb.per_head(reach, w_vc.absolute) * INFLATE
    inherited = absorbed.rad if absorbed.rad is not None else np.zeros(())
    return Ball(absorbed.mid, rad + inherited, absorbed.std, absorbed.overflow)


def feed_forward(model: JudgeModel, layer: int, h: Ball, prefix: str, taps: Taps, a: Arithmetic) -> Ball:
    """down(silu(gate) * up); its last tap is the caller's, because a dense layer calls it `ffn_out`."""

    matrices, at = model.matrices, f"{layer}.{prefix}"
    gate = taps.meet(prefix + "gate", layer, matrices.product(h, at + "gate", a.at(prefix + "gate", "matmul")))
    up = taps.meet(prefix + "up", layer, matrices.product(h, at + "up", a.at(prefix + "up", "matmul")))
    act = taps.meet(prefix + "act", layer, swiglu.bound(gate, up, a.at(prefix + "act", "swiglu")))
    return matrices.product(act, at + "down", a.at("shared_out" if prefix else "ffn_out", "matmul"))


def sparse(model: JudgeModel, layer: int, h: Ball, taps: Taps, a: Arithmetic) -> Ball:
    """sum_k weight_k * expert_k(h) + shared(h)"""
    c, matrices, at = model.config, model.matrices, f"{layer}."

    def meet(name: str, predicted: Ball) -> Ball:
        return taps.meet(name, layer, predicted)

    logits = meet("router_logits", matrices.product(h, at + "router", a.at("router_logits", "matmul")))
    chances = meet("router_scores", router_scores.bound(logits, c.scoring == "softmax", a.at("router_scores")))
    ids = taps.choose(layer, chances)
    mix = route_weights(
        chances, ids, model.routed_scale, c.norm_top_k, model.denominator_eps, a.at("expert_weights", "route"), model.denominator_clamp
    )
    mix = meet("expert_weights", mix)
    gate = meet("expert_gate", matrices.experts(h, at + "expert_gate", ids, a.at("expert_gate", "matmul")))
    up = meet("expert_up", matrices.experts(h, at + "expert_up", ids, a.at("expert_up", "matmul")))
    act = meet("expert_act", swiglu.bound(gate, up, a.at("expert_act", "swiglu")))
    experts = meet("expert_out", matrices.experts(act, at + "expert_down", ids, a.at("expert_out", "matmul")))
    shared = meet("shared_out", feed_forward(model, layer, h, "shared_", taps, a)) if c.shared_experts else None
    return combine.bound(mix, experts, shared, a.at("ffn_out", "combine"))


Inputs = Callable[[str, int], tuple[tuple[str, int], ...]]

_INPUTS: dict[str, tuple[str, ...]] = {
    "attn_norm": ("residual",), "q_a": ("attn_norm",), "q_a_norm": ("q_a",), "q": ("q_a_norm",), "kv_a": ("attn_norm",), "latent": ("kv_a",),
    "q_rope": ("q",), "k_rope": ("kv_a",), "q_absorb": ("q",), "scores": ("q_absorb", "q_rope", "latent", "k_rope"), "probs": ("scores",),
    "o_latent": ("probs", "latent"), "o_heads": ("o_latent",), "attn_out": ("o_heads",), "attn_residual": ("residual", "attn_out"),
    "ffn_norm": ("attn_residual",), "gate": ("ffn_norm",), "up": ("ffn_norm",), "act": ("gate", "up"), "router_logits": ("ffn_norm",),
    "router_scores": ("router_logits",), "expert_ids": ("router_scores",), "expert_weights": ("router_scores", "expert_ids"),
    "expert_gate": ("ffn_norm", "expert_ids"), "expert_up": ("ffn_norm", "expert_ids"), "expert_act": ("expert_gate", "expert_up"),
    "expert_out": ("expert_act",), "shared_gate": ("ffn_norm",), "shared_up": ("ffn_norm",), "shared_act": ("shared_gate", "shared_up"),
    "shared_out": ("shared_act",), "ffn_residual": ("attn_residual", "ffn_out"), "final_norm": ("residual",), "logits": ("final_norm",),
    "argmax": ("logits",),
}  # fmt: skip


def inputs_of(config: Config, name: str, layer: int) -> tuple[tuple[str, int], ...]:
    """The taps that the operation behind a tap reads, as (name, layer)."""
    if name == "embed":
        return ()
    if name == "ffn_out":
        names: tuple[str, ...] = ("act",) if config.is_dense(layer) else ("expert_weights", "expert_out")
        if not config.is_dense(layer) and config.shared_experts:
            names = (*names, "shared_out")
    elif name == "q" and not config.q_rank:
        names = ("attn_norm",)
    else:
        names = _INPUTS[name]
    residual = ("embed", -1) if layer == 0 else ("ffn_residual", layer - 1)
    return tuple(residual if source == "residual" else (source, layer) for source in names)
