"""Weights of the spec as a GGUF file of the architecture `deepseek2`, which llama.cpp loads.

GGUF stores [out, in], and kv_b split into attn_k_b [H, R, n] and attn_v_b [H, v, R] (rule M4). Only what this file format and its loader
can say is written; everything else is refused (`refuse`), because a loader that ignores a key computes another model without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.peers.sequences import refuse_unfamiliar
from spec.config import Config
from spec.engine import Unsupported
from spec.weights import Provider, checked_tensor, weight_shapes

ARCHITECTURE = "deepseek2"
GUESSED_LAYERS: tuple[int, ...] = (26, 27)  # the loader takes these for the "lite" model without q_lora and does not read the key
CLAMP = 2.0**-14  # llama.cpp: the smallest normal float16, the least that it divides expert weights by
KNOWN = frozenset({"scoring", "group_score", "norm_top_k", "denominator_eps", "denominator_clamp", "latent_eps", "rope_layout", "tied"})
CONTEXT_MAX = 1 << 20  # tokens; written as the trained context where no YaRN section gives one

TOP = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
LAYER = {
    "attn_norm": "attn_norm.weight", "q": "attn_q.weight", "q_a": "attn_q_a.weight", "q_a_norm": "attn_q_a_norm.weight",
    "q_b": "attn_q_b.weight", "kv_a": "attn_kv_a_mqa.weight", "kv_a_norm": "attn_kv_a_norm.weight", "w_kc": "attn_k_b.weight",
    "w_vc": "attn_v_b.weight", "o": "attn_output.weight", "ffn_norm": "ffn_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight",
    "down": "ffn_down.weight", "router": "ffn_gate_inp.weight", "router_bias": "exp_probs_b.bias", "expert_gate": "ffn_gate_exps.weight",
    "expert_up": "ffn_up_exps.weight", "expert_down": "ffn_down_exps.weight", "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight", "shared_down": "ffn_down_shexp.weight",
}  # fmt: skip
AS_IT_IS = ("embed", "attn_norm", "q_a_norm", "kv_a_norm", "ffn_norm", "norm", "router_bias")


def refuse(config: Config) -> None:
    """Raises Unsupported, with the reason, for a configuration that a deepseek2 GGUF cannot express."""
    c = config
    refuse_unfamiliar(c, KNOWN, "a deepseek2 GGUF")
    sparse = c.first_dense < c.layers
    if sparse and c.norm_top_k and c.denominator_clamp != CLAMP:
        raise Unsupported(f"llama.cpp clamps the sum of the chosen scores at {CLAMP:g}, not at {c.denominator_clamp:g}")
    if c.rope_layout != "interleaved":
        raise Unsupported("a deepseek2 GGUF rotates interleaved pairs; rope_layout 'half' has no key")
    if c.latent_norm_eps != c.rms_eps:
        raise Unsupported(f"a GGUF has one norm eps; latent_eps {c.latent_norm_eps:g} differs from rms_eps {c.rms_eps:g}")
    if c.layers in GUESSED_LAYERS and c.q_rank:
        raise Unsupported(f"the loader takes {c.layers} layers for a model without q_lora and does not read q_lora_rank")
    if sparse and c.groups > c.top_groups and c.group_score == "max":
        raise Unsupported("llama.cpp ranks groups by the sum of their two best; group_score 'max' has no key")
    if sparse and not c.shared_experts:
        raise Unsupported("the loader of deepseek2 demands a shared expert")
    y = c.yarn
    if y is not None and y.factor > 1 and (y.mscale != y.mscale_all_dim or not y.mscale_all_dim):
        raise Unsupported(
            f"a GGUF has one YaRN multiplier; mscale {y.mscale:g} and mscale_all_dim {y.mscale_all_dim:g} must be equal and not 0"
        )


def write(path: Path, config: Config, weights: Provider) -> None:
    """The whole model in float32, tensors one at a time. Raises Unsupported as `refuse` does, WeightError for a bad tensor."""
    import gguf

    refuse(config)
    writer = gguf.GGUFWriter(str(path), ARCHITECTURE)
    _keys(writer, config)
    for name, tensor in tensors(config, weights):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(config: Config, weights: Provider) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """(GGUF name, float32 C-contiguous) of every tensor; [out, in] as NumPy sees it."""
    for name, shape in weight_shapes(config).items():
        value = checked_tensor(name, shape, weights)
        layer, _, kind = name.rpartition(".")
        stored = f"blk.{layer}.{LAYER[kind]}" if layer else TOP[kind]
        yield stored, np.ascontiguousarray(value if kind in AS_IT_IS else value.swapaxes(-1, -2))


def _keys(writer: Any, c: Config) -> None:
    import gguf

    y = c.yarn if c.yarn is not None and c.yarn.factor > 1 else None
    writer.add_context_length(int(y.original_len * y.factor) if y else CONTEXT_MAX)
    writer.add_vocab_size(c.vocab)
    writer.add_embedding_length(c.hidden)
    writer.add_block_count(c.layers)
    writer.add_leading_dense_block_count(c.first_dense)
    writer.add_feed_forward_length(max(1, c.dense_dim))
    writer.add_layer_norm_rms_eps(c.rms_eps)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(1)  # the absorbed form: one key and value head for all
    writer.add_q_lora_rank(c.q_rank)  # 0, not absent: the loader demands the key
    writer.add_kv_lora_rank(c.kv_rank)
    writer.add_key_length(c.kv_rank + c.rope_dim)
    writer.add_value_length(c.kv_rank)
    writer.add_key_length_mla(c.nope_dim + c.rope_dim)
    writer.add_value_length_mla(c.v_dim)
    writer.add_rope_dimension_count(c.rope_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_expert_feed_forward_length(max(1, c.expert_dim))
    writer.add_expert_count(c.experts)
    writer.add_expert_used_count(c.top_k)
    writer.add_expert_shared_count(c.shared_experts)
    writer.add_expert_weights_scale(c.routed_scale)
    writer.add_expert_weights_norm(c.norm_top_k)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if c.scoring == "sigmoid" else gguf.ExpertGatingFuncType.SOFTMAX)
    if c.groups > c.top_groups:  # all groups kept is no groups, and aborts the loader
        writer.add_expert_group_count(c.groups)
        writer.add_expert_group_used_count(c.top_groups)
    if y:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(y.factor)
        writer.add_rope_scaling_orig_ctx_len(y.original_len)
        writer.add_rope_scaling_yarn_log_mul(0.1 * y.mscale_all_dim)
        writer.add_rope_scaling_yarn_beta_fast(y.beta_fast)  # not read back for this architecture: the session sets both once more
        writer.add_rope_scaling_yarn_beta_slow(y.beta_slow)
    writer.add_tokenizer_model("none")
