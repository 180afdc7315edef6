"""One file per operation: its bound, its exact checks. `BOUNDS` is the registry that judge_op uses."""

from __future__ import annotations

from collections.abc import Mapping

from oracles.ops import (
    accept,
    add,
    argmax,
    best_first_tree,
    combine,
    compact,
    draft_table,
    embed,
    int4_matmul,
    matmul,
    moe,
    o_heads,
    o_latent,
    q_absorb,
    rms_norm,
    rope,
    route,
    router_scores,
    sample,
    scores,
    softmax,
    swiglu,
    tree_attention,
    tree_mask,
)
from oracles.ops.record import Expect

_MODULES = (
    embed, rms_norm, matmul, rope, q_absorb, scores, softmax, o_latent, o_heads, tree_attention, router_scores, route, swiglu, moe, int4_matmul, combine,
    add, argmax, sample, draft_table, best_first_tree, tree_mask, accept, compact,
)  # fmt: skip
BOUNDS: Mapping[str, Expect] = {module.__name__.rpartition(".")[2]: module.expect for module in _MODULES}
