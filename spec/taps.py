"""The taps of a forward pass: name, op, shape. T = rows of the batch, S = key columns (see below).

Layer -1: before the first layer; layer = config.layers: after the last one. Key columns of `scores` and `probs` are the
cache of the row's own sequence in logical order: its P committed rows, then its pending rows of this batch in batch
order. S is the largest such count in the batch; columns that a row does not see are unspecified in `scores` and exactly 0
in `probs`.
"""

from __future__ import annotations

from dataclasses import dataclass

from spec.config import Config


@dataclass(frozen=True)
class Tap:
    name: str
    op: str  # record in spec/ops
    dims: tuple[str, ...]
    dtype: str = "float32"


# In data order: the first alarm in this order is the location, later ones may be consequences.
ATTENTION = (
    Tap("attn_norm", "rms_norm", ("T", "hidden")),
    Tap("q_a", "matmul", ("T", "q_rank")),
    Tap("q_a_norm", "rms_norm", ("T", "q_rank")),
    Tap("q", "matmul", ("T", "heads", "nope_dim+rope_dim")),
    Tap("kv_a", "matmul", ("T", "kv_rank+rope_dim")),
    Tap("latent", "rms_norm", ("T", "kv_rank")),
    Tap("q_rope", "rope", ("T", "heads", "rope_dim")),
    Tap("k_rope", "rope", ("T", "rope_dim")),
    Tap("q_absorb", "q_absorb", ("T", "heads", "kv_rank")),
    Tap("scores", "scores", ("T", "heads", "S")),
    Tap("probs", "softmax", ("T", "heads", "S")),
    Tap("o_latent", "o_latent", ("T", "heads", "kv_rank")),
    Tap("o_heads", "o_heads", ("T", "heads", "v_dim")),
    Tap("attn_out", "matmul", ("T", "hidden")),
    Tap("attn_residual", "add", ("T", "hidden")),
    Tap("ffn_norm", "rms_norm", ("T", "hidden")),
)
DENSE = (
    Tap("gate", "matmul", ("T", "dense_dim")),
    Tap("up", "matmul", ("T", "dense_dim")),
    Tap("act", "swiglu", ("T", "dense_dim")),
    Tap("ffn_out", "matmul", ("T", "hidden")),
)
SPARSE = (
    Tap("router_logits", "matmul", ("T", "experts")),
    Tap("router_scores", "router_scores", ("T", "experts")),
    Tap("expert_ids", "route", ("T", "top_k"), "int32"),
    Tap("expert_weights", "route", ("T", "top_k")),
    Tap("expert_gate", "matmul", ("T", "top_k", "expert_dim")),
    Tap("expert_up", "matmul", ("T", "top_k", "expert_dim")),
    Tap("expert_act", "swiglu", ("T", "top_k", "expert_dim")),
    Tap("expert_out", "matmul", ("T", "top_k", "hidden")),
    Tap("shared_gate", "matmul", ("T", "shared_experts*expert_dim")),
    Tap("shared_up", "matmul", ("T", "shared_experts*expert_dim")),
    Tap("shared_act", "swiglu", ("T", "shared_experts*expert_dim")),
    Tap("shared_out", "matmul", ("T", "hidden")),
    Tap("ffn_out", "combine", ("T", "hidden")),
)
RESIDUAL = (Tap("ffn_residual", "add", ("T", "hidden")),)
EMBED = (Tap("embed", "embed", ("T", "hidden")),)
HEAD = (
    Tap("final_norm", "rms_norm", ("T", "hidden")),
    Tap("logits", "matmul", ("T", "vocab")),  # only rows that want logits
    Tap("argmax", "argmax", ("T",), "int32"),  # the same rows
)


def taps_of_layer(config: Config, layer: int) -> tuple[Tap, ...]:
    """Taps of `layer` in data order; -1 and config.layers are the embedding and the head."""
    if layer == -1:
        return EMBED
    if layer == config.layers:
        return HEAD
    attention = ATTENTION if config.q_rank else tuple(t for t in ATTENTION if t.name not in ("q_a", "q_a_norm"))
    if config.is_dense(layer):
        return attention + DENSE + RESIDUAL
    sparse = SPARSE if config.shared_experts else tuple(t for t in SPARSE if not t.name.startswith("shared_"))
    return attention + sparse + RESIDUAL


def all_tap_names() -> tuple[str, ...]:
    """Every tap name once, in data order."""
    names: dict[str, None] = {}
    for group in (EMBED, ATTENTION, DENSE, SPARSE, RESIDUAL, HEAD):
        names |= dict.fromkeys(tap.name for tap in group)
    return tuple(names)
