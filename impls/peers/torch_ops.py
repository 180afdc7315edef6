"""torch's own operations on the CPU in float32, one by one: what a port to torch would call for each record of `spec/ops`.

Kernel level only, no session (`transformers_engine` has one). Where torch offers one function for the operation it is that function
(rms_norm, scaled_dot_product_attention, topk, silu, embedding), else the shortest composition. Operations on draft trees are not torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from spec.config import Config
from spec.engine import Description, EngineError, Profile, Session, Unsupported
from spec.weights import Provider

PROFILE = Profile("torch-float32", ties="any")
Inputs = Mapping[str, torch.Tensor]
Params = Mapping[str, int | float]
Outputs = dict[str, torch.Tensor]


class TorchOps:
    """`spec.engine.Engine` without sessions."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def describe(self) -> Description:
        return Description("torch-ops", f"torch {torch.__version__}", PROFILE, frozenset({"run_op"}), frozenset(OPS))

    def run_op(self, op: str, inputs: Mapping[str, NDArray[Any]], params: Params, outputs: Mapping[str, NDArray[Any]]) -> None:
        """Fill `outputs`. Raises Unsupported for an operation that torch does not have, EngineError for a result of another shape."""
        if op not in OPS:
            raise Unsupported(f"{op} is no operation of torch")
        given = {name: torch.from_numpy(np.array(value, order="C")) for name, value in inputs.items()}
        with torch.no_grad():
            found = OPS[op](given, params)
        for name, value in found.items():
            array = value.numpy()
            if array.shape != outputs[name].shape:
                raise EngineError(f"{op}: output {name} is {list(outputs[name].shape)}, but torch gives {list(array.shape)}")
            outputs[name][...] = array

    def open(self, config: Config, weights: Provider) -> Session:
        raise Unsupported("torch-ops has operations only; the engine transformers runs whole models")


def _embed(i: Inputs, a: Params) -> Outputs:
    if len(i["ids"]) and (int(i["ids"].min()) < 0 or int(i["ids"].max()) >= len(i["table"])):
        raise EngineError(f"embed: ids must be between 0 and {len(i['table']) - 1}")
    return {"out": F.embedding(i["ids"].long(), i["table"])}


def _rms_norm(i: Inputs, a: Params) -> Outputs:
    return {"out": F.rms_norm(i["x"], (i["x"].shape[-1],), i["gain"], float(a["eps"]))}


def _rope(i: Inputs, a: Params) -> Outputs:
    x, cos, sin = i["x"], i["cos"][:, None], i["sin"][:, None]
    if a["half_layout"]:
        first, second = x.chunk(2, dim=-1)
        return {"out": torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)}
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.complex(cos, sin)
    return {"out": torch.view_as_real(turned).flatten(-2)}


def _scores(i: Inputs, a: Params) -> Outputs:
    return {"out": torch.einsum("thc,sc->ths", i["q"], i["keys"]) * a["scale"]}


def _softmax(i: Inputs, a: Params) -> Outputs:
    """A row that sees nothing is NaN in torch; the operation defines it as 0, which a caller has to put there."""
    visible = i["visible"].bool()[:, None]
    weights = torch.softmax(i["scores"].masked_fill(~visible, -torch.inf), dim=-1)
    return {"out": torch.where(visible.any(-1, keepdim=True), weights, 0.0)}


def _o_latent(i: Inputs, a: Params) -> Outputs:
    used = (i["probs"] != 0).any(0).any(0)  # rows without weight may hold anything, NaN included: they are not handed to torch
    return {"out": i["probs"][:, :, used] @ i["latent"][used]}


def _tree_attention(i: Inputs, a: Params) -> Outputs:
    """One sequence, H query heads, one key head: the latent attention as scaled_dot_product_attention sees it."""
    visible = i["visible"].bool()
    seen = visible.any(0)
    keys = i["cache"][seen]
    query = i["q"].transpose(0, 1)[None]  # (1,H,T,C)
    shared = keys[None, None].expand(1, query.shape[1], -1, -1)
    mask = visible[:, seen][None, None]
    values = shared[..., : int(a["kv_rank"])]
    out = F.scaled_dot_product_attention(query, shared, values, attn_mask=mask, scale=float(np.float32(a["scale"])))
    return {"out": out[0].transpose(0, 1)}


def _route(i: Inputs, a: Params) -> Outputs:
    scores = i["scores"]
    choice = scores + i["bias"]
    groups = int(a["groups"])
    if groups > 1:
        grouped = choice.view(len(choice), groups, -1)
        rank = grouped.amax(-1) if a["group_score_max"] else grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, rank.topk(int(a["top_groups"]), dim=-1).indices, True)
        choice = grouped.masked_fill(~kept[..., None], 0.0 if a.get("group_fill_zero") else -torch.inf).flatten(1)
    ids = choice.topk(int(a["top_k"]), dim=-1).indices
    weights = scores.gather(1, ids)
    if a["norm_top_k"]:
        total = weights.sum(-1, keepdim=True) + float(a["denominator_eps"])
        weights = weights / total.clamp(min=float(a.get("denominator_clamp", 0.0)))
    return {"ids": ids.int(), "weights": weights * float(a["routed_scale"])}


def _moe(i: Inputs, a: Params) -> Outputs:
    ids = i["ids"].long()
    out = torch.zeros((*ids.shape, i["x"].shape[1]))
    for expert in ids.unique():
        token, place = torch.where(ids == expert)
        x = i["x"][token]
        out[token, place] = (F.silu(x @ i["gate"][expert]) * (x @ i["up"][expert])) @ i["down"][expert]
    return {"out": out}


def _combine(i: Inputs, a: Params) -> Outputs:
    return {"out": torch.einsum("tk,tkn->tn", i["weights"], i["experts"]) + i["shared"]}


OPS: Mapping[str, Callable[[Inputs, Params], Outputs]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "matmul": lambda i, a: {"out": i["x"] @ i["w"]},
    "rope": _rope,
    "q_absorb": lambda i, a: {"out": torch.einsum("thn,hnr->thr", i["q_nope"], i["w_kc"])},
    "scores": _scores,
    "softmax": _softmax,
    "o_latent": _o_latent,
    "o_heads": lambda i, a: {"out": torch.einsum("thr,hrv->thv", i["o_latent"], i["w_vc"])},
    "tree_attention": _tree_attention,
    "router_scores": lambda i, a: {"out": torch.softmax(i["logits"], -1) if a["softmax"] else torch.sigmoid(i["logits"])},
    "route": _route,
    "swiglu": lambda i, a: {"out": F.silu(i["gate"]) * i["up"]},
    "moe": _moe,
    "combine": _combine,
    "add": lambda i, a: {"out": i["a"] + i["b"]},
    "argmax": lambda i, a: {"ids": i["logits"].argmax(-1).int()},
}
