"""The blocked engine behind the seam: describe, run_op, open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.blocked import ops, tree
from impls.blocked.cache import check_path
from impls.blocked.model import BlockedSession
from impls.blocked.points import Overrides, Points, with_overrides
from spec.config import Config
from spec.engine import Description, EngineError, Profile, Unsupported
from spec.ops.sample import sampling_of
from spec.taps import all_tap_names
from spec.weights import Provider

Inputs = Mapping[str, NDArray[Any]]
Params = Mapping[str, int | float]
Outputs = dict[str, Any]
CAPABILITIES = frozenset({"run_op", "forward", "taps", "commit", "cache_rows", "fork", "evict", "generate", "generate_tree", "sampling"})


class BlockedEngine:
    """`spec.engine.Engine`. `points` replaces named points (impls/blocked/points.py); `hidden_taps` and `hidden_ops` are not
    offered."""

    def __init__(
        self,
        points: Overrides | None = None,
        *,
        name: str = "blocked",
        profile: Profile | None = None,
        hidden_taps: frozenset[str] = frozenset(),
        hidden_ops: frozenset[str] = frozenset(),
    ) -> None:
        self._overrides: Overrides = points or {}
        self._description = Description(
            name=name,
            version="1",
            profile=profile or Profile(),
            capabilities=CAPABILITIES,
            ops=frozenset(_OPS) - hidden_ops,
            taps=frozenset(all_tap_names()) - hidden_taps,
        )
        with_overrides(self._overrides)  # an unknown point shows here, not at the first call

    def describe(self) -> Description:
        return self._description

    def run_op(self, op: str, inputs: Inputs, params: Params, outputs: Mapping[str, NDArray[Any]]) -> None:
        """Fill `outputs`. Raises Unsupported for an unknown op, EngineError for inputs outside the op's rules."""
        if op not in self._description.ops:
            raise Unsupported(f"{self._description.name} has no op {op!r}")
        points = with_overrides(self._overrides)
        found = _OPS[op](points, {name: points.operand(value) for name, value in inputs.items()}, params)
        for name, value in found.items():
            if np.shape(value) != outputs[name].shape:
                raise EngineError(f"{op}: output {name} is {list(outputs[name].shape)}, but the result is {list(np.shape(value))}")
            points.write(outputs[name], value)

    def open(self, config: Config, weights: Provider) -> BlockedSession:
        """A session on a copy of the weights. Raises WeightError for a tensor that is missing, misshapen or not finite."""
        return BlockedSession(config, weights, self._overrides)


def _rms_norm(p: Points, i: Inputs, a: Params) -> Outputs:
    return {"out": ops.rms_norm(p, i["x"], i["gain"], a["eps"])}


def _scores(p: Points, i: Inputs, a: Params) -> Outputs:
    return {"out": ops.scores(p, i["q"], i["keys"], np.float32(a["scale"]))}


def _softmax(p: Points, i: Inputs, a: Params) -> Outputs:
    return {"out": ops.softmax(p, i["scores"], i["visible"] != 0, 0)}


def _o_latent(p: Points, i: Inputs, a: Params) -> Outputs:
    weighted = (i["probs"] != 0).any(axis=(0, 1))
    return {"out": ops.o_latent(p, i["probs"], np.where(weighted[:, None], i["latent"], np.float32(0)))}


def _tree_attention(p: Points, i: Inputs, a: Params) -> Outputs:
    """Columns that no row sees may hold anything, NaN included."""
    seen = i["visible"] != 0
    keys = np.where(seen.any(axis=0)[:, None], i["cache"], np.float32(0))
    weights = ops.softmax(p, ops.scores(p, i["q"], keys, np.float32(a["scale"])), seen, 0)
    return {"out": ops.o_latent(p, weights, keys[:, : int(a["kv_rank"])])}


def _route(p: Points, i: Inputs, a: Params) -> Outputs:
    ids, weights = ops.route(
        p, i["scores"], i["bias"], top_k=int(a["top_k"]), groups=int(a["groups"]), top_groups=int(a["top_groups"]),
        group_score_max=bool(a["group_score_max"]), norm_top_k=bool(a["norm_top_k"]), routed_scale=a["routed_scale"],
        denominator_eps=a["denominator_eps"], denominator_clamp=a.get("denominator_clamp", 0.0),
        group_fill_zero=bool(a.get("group_fill_zero")),
    )  # fmt: skip
    return {"ids": ids, "weights": weights}


def _embed(p: Points, i: Inputs, a: Params) -> Outputs:
    ids = i["ids"]
    if len(ids) and (ids.min() < 0 or ids.max() >= len(i["table"])):
        raise EngineError(f"embed: ids must be between 0 and {len(i['table']) - 1}")
    return {"out": i["table"][ids]}


def _sample(p: Points, i: Inputs, a: Params) -> Outputs:
    sampling, prompt_len, vocab = sampling_of(a), int(a["prompt_len"]), i["logits"].shape[1]
    ids = []
    for row, history, sequence in zip(i["logits"], i["history"].tolist(), i["sequences"].tolist(), strict=True):
        committed = history[: history.index(-1)] if -1 in history else history
        if committed and not 0 <= min(committed) <= max(committed) < vocab:
            raise EngineError(f"sample: tokens of a history must be between 0 and {vocab - 1}")
        seen = p.seen_tokens(committed, [])
        ids.append(p.draw(p.law(sampling, row, seen, prompt_len), p.noise(sampling.seed, sequence, len(committed), vocab)))
    return {"ids": np.array(ids, np.int32)}


def _draft_table(p: Points, i: Inputs, a: Params) -> Outputs:
    ids, log_probs = tree.draft_table(p, i["logits"], int(a["budget"]))
    return {"ids": ids, "log_probs": log_probs}


def _best_first_tree(p: Points, i: Inputs, a: Params) -> Outputs:
    budget = int(a["budget"])
    found = tree.best_first_tree(p, i["ids"], i["log_probs"], budget, int(a["root"]))
    rows = len(found.tokens)
    if rows > budget + 1:
        raise EngineError(f"best_first_tree: {rows} nodes do not fit in {budget + 1}")
    out: Outputs = {"count": np.array([rows - 1], np.int32)}
    for name, values in (("tokens", found.tokens), ("parents", found.parents), ("depths", found.depths)):
        out[name] = np.full(budget + 1, -1, np.int32)
        out[name][:rows] = values
    return out


def _tree_mask(p: Points, i: Inputs, a: Params) -> Outputs:
    parents, prefix_len = i["parents"].tolist(), int(a["prefix_len"])
    depths = np.array(tree.node_depths(parents), np.int32)
    node = np.arange(len(parents), dtype=np.int32)
    return {"positions": p.position(prefix_len, node, depths), "visible": p.visible(parents, prefix_len).astype(np.uint8)}


def _accept(p: Points, i: Inputs, a: Params) -> Outputs:
    path, bonus = tree.accept(p, i["tokens"].tolist(), i["parents"].tolist(), i["target"].tolist())
    padded = np.full(len(i["tokens"]), -1, np.int32)
    padded[: len(path)] = path
    return {"path": padded, "length": np.array([len(path)], np.int32), "bonus": np.array([bonus], np.int32)}


def _compact(p: Points, i: Inputs, a: Params) -> Outputs:
    """On a copy of the cache as one layer whose slots are logical rows."""
    prefix_len, path, pending = int(a["prefix_len"]), i["path"].tolist(), len(i["cache"]) - int(a["prefix_len"])
    check_path(path, pending)
    store = i["cache"][None].copy()
    kept = np.array(p.keep(path, pending), np.int64)
    p.move(store, prefix_len + np.arange(len(kept)), prefix_len + kept, store.shape[2])
    out = np.full((prefix_len + len(path), store.shape[2]), np.nan, np.float32)
    rows = min(p.committed_len(prefix_len, len(kept), pending), len(out))
    out[:rows] = store[0, :rows]
    return {"out": out}


_OPS: dict[str, Callable[[Points, Inputs, Params], Outputs]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "matmul": lambda p, i, a: {"out": p.gemm("op", i["x"], i["w"])},
    "rope": lambda p, i, a: {"out": p.rotate("op", i["x"], i["cos"], i["sin"], bool(a["half_layout"]))},
    "q_absorb": lambda p, i, a: {"out": p.absorb(i["q_nope"], i["w_kc"])},
    "scores": _scores,
    "softmax": _softmax,
    "o_latent": _o_latent,
    "o_heads": lambda p, i, a: {"out": p.unabsorb(i["o_latent"], i["w_vc"])},
    "tree_attention": _tree_attention,
    "router_scores": lambda p, i, a: {"out": ops.router_scores(p, i["logits"], bool(a["softmax"]))},
    "route": _route,
    "swiglu": lambda p, i, a: {"out": p.swiglu(i["gate"], i["up"])},
    "moe": lambda p, i, a: {"out": ops.experts(p, i["x"], i["ids"], i["gate"], i["up"], i["down"])["out"]},
    "int4_matmul": lambda p, i, a: {"out": ops.int4_matmul(p, i["x"], i["packed"], i["scales"])},
    "combine": lambda p, i, a: {"out": p.combine(i["weights"], i["experts"], p.shared_output(i["shared"]))},
    "add": lambda p, i, a: {"out": p.residual(i["a"], i["b"])},
    "argmax": lambda p, i, a: {"ids": p.argmax(i["logits"])},
    "sample": _sample,
    "draft_table": _draft_table,
    "best_first_tree": _best_first_tree,
    "tree_mask": _tree_mask,
    "accept": _accept,
    "compact": _compact,
}
