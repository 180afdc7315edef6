"""Checkpoints in Hugging Face layout (config.json + safetensors) as a lazy provider of the spec's weights.

A checkpoint stores [out, in] and one `kv_b_proj`; the spec wants row-major [in, out] and `kv_b` split into `w_kc` and `w_vc`
(rule M4): per head the first nope_dim rows are keys, the next v_dim rows are values - not all keys and then all values.
Nothing is read before it is asked for, and a tensor is dropped again after use; experts are also given one at a time, by names like
"3.expert_gate/17". How a matrix may be stored is the matter of impls/stored.py. The prefix "language_model." of Kimi-K2.5 (inferred: the
weights were not at hand) is taken off, and what belongs to its vision part is left alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.stored import COMPANIONS, FUSED, Stored
from impls.tensorfile import TensorFile, TensorFileError
from spec.config import Config, ConfigError, Yarn
from spec.weights import tensor_shape, weight_shapes

Float = NDArray[np.float32]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# spec name within a layer -> (checkpoint name within the layer, transposed)
LAYER_NAMES: dict[str, tuple[str, bool]] = {
    "attn_norm": ("input_layernorm.weight", False),
    "q": ("self_attn.q_proj.weight", True),
    "q_a": ("self_attn.q_a_proj.weight", True),
    "q_a_norm": ("self_attn.q_a_layernorm.weight", False),
    "q_b": ("self_attn.q_b_proj.weight", True),
    "kv_a": ("self_attn.kv_a_proj_with_mqa.weight", True),
    "kv_a_norm": ("self_attn.kv_a_layernorm.weight", False),
    "o": ("self_attn.o_proj.weight", True),
    "ffn_norm": ("post_attention_layernorm.weight", False),
    "gate": ("mlp.gate_proj.weight", True),
    "up": ("mlp.up_proj.weight", True),
    "down": ("mlp.down_proj.weight", True),
    "router": ("mlp.gate.weight", True),
    "router_bias": ("mlp.gate.e_score_correction_bias", False),
    "shared_gate": ("mlp.shared_experts.gate_proj.weight", True),
    "shared_up": ("mlp.shared_experts.up_proj.weight", True),
    "shared_down": ("mlp.shared_experts.down_proj.weight", True),
}
TOP_NAMES: dict[str, tuple[str, bool]] = {
    "embed": ("model.embed_tokens.weight", False),
    "norm": ("model.norm.weight", False),
    "head": ("lm_head.weight", True),
}
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "first_k_dense_replace", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "n_shared_experts", "n_group", "topk_group",
)  # fmt: skip
EXPERTS = {"expert_gate": "gate_proj", "expert_up": "up_proj", "expert_down": "down_proj"}
KV_B = "self_attn.kv_b_proj.weight"
BIASES: dict[str, str] = {
    "q_a_bias": "self_attn.q_a_proj.bias", "kv_a_bias": "self_attn.kv_a_proj_with_mqa.bias", "o_bias": "self_attn.o_proj.bias",
}  # fmt: skip
LAYER_NAMES |= {name: (stored, False) for name, stored in BIASES.items()}
LANGUAGE = "language_model."
OTHER_PARTS = ("vision_tower.", "mm_projector.", "visual.")


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be used; the message names the file, what was found, what is expected, what to do."""


class Checkpoint:
    """`config` and `tensor(name)`, a spec.weights.Provider. Raises CheckpointError when the folder cannot be opened."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_config(self.folder / "config.json")
        self.location = self._locate()  # checkpoint name -> file
        self._shapes = weight_shapes(self.config)
        self._stored = Stored(self.folder, self.location)
        self._refuse_strangers()

    def _locate(self) -> dict[str, TensorFile]:
        index = self.folder / INDEX
        if index.exists():
            names = _json_object(index).get("weight_map")
            if not isinstance(names, dict) or not names:
                raise CheckpointError(f"{index} has no weight_map: copy the file again")
            shards = sorted(set(names.values()))
        elif (self.folder / SINGLE).exists():
            names, shards = None, [SINGLE]
        else:
            raise CheckpointError(f"{self.folder} holds neither {SINGLE} nor {INDEX}: give a folder in Hugging Face layout")
        located: dict[str, TensorFile] = {}
        for shard in shards:
            if Path(shard).name != shard:
                raise CheckpointError(f"{index} names a shard outside the folder: {shard!r}")
            try:
                file = TensorFile(self.folder / shard)
            except TensorFileError as problem:
                raise CheckpointError(str(problem)) from None
            file.entries = {name.removeprefix(LANGUAGE): entry for name, entry in file.entries.items() if not name.startswith(OTHER_PARTS)}
            for name in file.entries:
                if name in located:
                    raise CheckpointError(f"tensor {name!r} is both in {located[name].path.name} and in {shard}: one of them must go")
                located[name] = file
        if names is not None:
            for full, shard in names.items():
                name = full.removeprefix(LANGUAGE)
                if full.startswith(OTHER_PARTS):
                    continue
                if name not in located or located[name].path.name != shard:
                    raise CheckpointError(f"{index} places tensor {name!r} in {shard}, but it is not there: copy the shard again")
        return located

    def _refuse_strangers(self) -> None:
        """A name that the configuration does not explain would be silently ignored: extra layers mean another config.json."""
        known = set(self.checkpoint_names())
        known |= {name + suffix for name in known if name.endswith(".weight") for suffix in COMPANIONS}
        for layer in range(self.config.first_dense, self.config.layers):
            known |= {f"model.layers.{layer}.mlp.experts.{fused}" for fused, _ in FUSED.values()}
        strangers = sorted(set(self.location) - known)
        strangers = [name for name in strangers if not name.endswith("rotary_emb.inv_freq") and not self._is_next_token_layer(name)]
        if strangers:
            more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
            raise CheckpointError(
                f"{self.location[strangers[0]].path}: tensor {strangers[0]!r}{more} is not explained by config.json: does the config belong to these weights?"
            )

    def _is_next_token_layer(self, name: str) -> bool:
        """DeepSeek-V3 ships its multi-token-prediction layer as one more layer, which every engine skips (MODEL 2.9)."""
        return name.startswith(f"model.layers.{self.config.layers}.")

    def checkpoint_names(self) -> list[str]:
        """Every tensor name that this configuration reads."""
        names: list[str] = []
        for name in self._shapes:
            layer, _, kind = name.rpartition(".")
            if kind in EXPERTS:
                names += [f"model.layers.{layer}.mlp.experts.{e}.{EXPERTS[kind]}.weight" for e in range(self.config.experts)]
            elif kind in ("w_kc", "w_vc"):
                names.append(f"model.layers.{layer}.{KV_B}")
            else:
                names.append(self._checkpoint_name(name)[0])
        return list(dict.fromkeys(names))

    def _checkpoint_name(self, name: str) -> tuple[str, bool]:
        layer, _, kind = name.rpartition(".")
        if not layer:
            return TOP_NAMES[kind]
        stored, transposed = LAYER_NAMES[kind]
        return f"model.layers.{layer}.{stored}", transposed

    def tensor(self, name: str) -> Float:
        """float32, C-contiguous, in the spec's layout; "3.expert_gate/17" is one expert's matrix. KeyError for a name that the
        configuration does not have; WeightError otherwise."""
        stack, slash, number = name.partition("/")
        shape = tensor_shape(self.config, name)
        layer, _, kind = stack.rpartition(".")
        if slash:
            return self._expert(layer, kind, int(number), shape)
        if kind in EXPERTS:
            out = np.empty(shape, np.float32)
            for e in range(shape[0]):
                out[e] = self._expert(layer, kind, e, shape[1:])
            return out
        if kind in ("w_kc", "w_vc"):
            return self._split_kv_b(layer, kind)
        stored, transposed = self._checkpoint_name(name)
        if transposed:
            return np.ascontiguousarray(self._read(stored, shape[::-1]).T)
        return np.ascontiguousarray(self._read(stored, shape))

    def _expert(self, layer: str, kind: str, number: int, shape: tuple[int, ...]) -> Float:
        stored = self._stored.expert(f"model.layers.{layer}.mlp.experts", EXPERTS[kind], number, (shape[1], shape[0]))
        return np.ascontiguousarray(stored.T)

    def _split_kv_b(self, layer: str, kind: str) -> Float:
        c = self.config
        joint = self._read(f"model.layers.{layer}.{KV_B}", (c.heads * (c.nope_dim + c.v_dim), c.kv_rank))
        per_head = joint.reshape(c.heads, c.nope_dim + c.v_dim, c.kv_rank)
        if kind == "w_kc":
            return np.ascontiguousarray(per_head[:, : c.nope_dim])
        return np.ascontiguousarray(per_head[:, c.nope_dim :].transpose(0, 2, 1))

    def _read(self, stored: str, shape: tuple[int, ...]) -> Float:
        return self._stored.matrix(stored, shape)


# ---- config.json ------------------------------------------------------------------------------------------------
def _json_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: give a folder in Hugging Face layout") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from None
    except json.JSONDecodeError as problem:
        raise CheckpointError(f"{path} is not JSON (line {problem.lineno}): copy it again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {type(data).__name__}, but must hold an object")
    return data


def read_config(path: Path) -> Config:
    """config.json of the DeepSeek-V2/V3 and Kimi-K2.x families -> Config. Raises CheckpointError."""
    data = _json_object(path)
    data = data.get("text_config", data)  # Kimi-K2.5 nests the language model
    if data.get("attention_bias") and not data.get("q_lora_rank"):
        raise CheckpointError(
            f"{path}: attention_bias is true without q_lora_rank; no engine gives q_proj a bias, so which is meant is open"
        )
    if data.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{path}: hidden_act is {data['hidden_act']!r}; the specification has silu")

    def required(key: str) -> Any:
        if key not in data:
            raise CheckpointError(f"{path} lacks {key!r}: is it the config of a DeepSeek-V2/V3 or Kimi-K2 model?")
        return data[key]

    for key in SIZES:
        if type(data.get(key)) not in (int, type(None)):
            raise CheckpointError(f"{path}: {key} is {data[key]!r}, but must be a whole number")
    scoring = data.get("scoring_func", "sigmoid" if data.get("topk_method", "noaux_tc") == "noaux_tc" else "softmax")
    try:
        return Config(
            vocab=required("vocab_size"), hidden=required("hidden_size"), layers=required("num_hidden_layers"),
            first_dense=data.get("first_k_dense_replace", 0), heads=required("num_attention_heads"), q_rank=data.get("q_lora_rank") or 0,
            kv_rank=required("kv_lora_rank"), nope_dim=required("qk_nope_head_dim"), rope_dim=required("qk_rope_head_dim"),
            v_dim=required("v_head_dim"), dense_dim=required("intermediate_size"), experts=data.get("n_routed_experts") or 0,
            top_k=data.get("num_experts_per_tok") or 0, expert_dim=data.get("moe_intermediate_size") or 0,
            shared_experts=data.get("n_shared_experts") or 0, groups=data.get("n_group") or 1, top_groups=data.get("topk_group") or 1,
            scoring=scoring, group_score="top2_sum" if scoring == "sigmoid" else "max", norm_top_k=bool(data.get("norm_topk_prob", True)),
            routed_scale=float(data.get("routed_scaling_factor", 1.0)), rms_eps=float(data.get("rms_norm_eps", 1e-6)),
            rope_theta=float(_rope_section(data).get("rope_theta", data.get("rope_theta", 10000.0))),
            rope_layout="interleaved" if data.get("rope_interleave", True) else "half", yarn=_yarn(path, _rope_section(data)),
            tied=bool(data.get("tie_word_embeddings", False)), attention_bias=bool(data.get("attention_bias", False)),
        )  # fmt: skip
    except CheckpointError:
        raise
    except (ConfigError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{path}: {problem}") from None


def _rope_section(data: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling` in older files, `rope_parameters` since transformers 5."""
    section = data.get("rope_scaling") or data.get("rope_parameters") or {}
    return section if isinstance(section, dict) else {}


def _yarn(path: Path, section: dict[str, Any]) -> Yarn | None:
    kind = section.get("rope_type", section.get("type", "default"))
    if kind in ("default", None):
        return None
    if kind != "yarn":
        raise CheckpointError(f"{path}: rope type is {kind!r}; the specification has default and yarn")
    try:
        return Yarn(
            factor=float(section["factor"]), original_len=int(section["original_max_position_embeddings"]),
            beta_fast=float(section.get("beta_fast") or 32.0), beta_slow=float(section.get("beta_slow") or 1.0),
            mscale=float(section.get("mscale") or 0.0), mscale_all_dim=float(section.get("mscale_all_dim") or 0.0),
        )  # fmt: skip
    except KeyError as missing:
        raise CheckpointError(f"{path}: the yarn section lacks {missing}") from None


def config_json(config: Config) -> dict[str, Any]:
    """The inverse of read_config, with the keys that transformers, vLLM and llama.cpp's converter ask for."""
    c = config
    rope: dict[str, Any] | None = None
    if c.yarn is not None:
        y = c.yarn
        rope = {
            "type": "yarn", "rope_type": "yarn", "factor": y.factor, "original_max_position_embeddings": y.original_len,
            "beta_fast": y.beta_fast, "beta_slow": y.beta_slow, "mscale": y.mscale, "mscale_all_dim": y.mscale_all_dim,
        }  # fmt: skip
    sigmoid = c.scoring == "sigmoid"
    return {
        "architectures": ["DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "vocab_size": c.vocab, "hidden_size": c.hidden, "num_hidden_layers": c.layers, "first_k_dense_replace": c.first_dense,
        "num_attention_heads": c.heads, "num_key_value_heads": c.heads, "q_lora_rank": c.q_rank or None, "kv_lora_rank": c.kv_rank,
        "qk_nope_head_dim": c.nope_dim, "qk_rope_head_dim": c.rope_dim, "v_head_dim": c.v_dim, "intermediate_size": c.dense_dim,
        "n_routed_experts": c.experts, "num_experts_per_tok": c.top_k, "moe_intermediate_size": c.expert_dim,
        "n_shared_experts": c.shared_experts, "n_group": c.groups, "topk_group": c.top_groups, "scoring_func": c.scoring,
        "topk_method": "noaux_tc" if sigmoid else ("greedy" if c.groups == 1 else "group_limited_greedy"), "norm_topk_prob": c.norm_top_k,
        "routed_scaling_factor": c.routed_scale, "rms_norm_eps": c.rms_eps, "rope_theta": c.rope_theta, "rope_scaling": rope,
        "rope_interleave": c.rope_layout == "interleaved", "tie_word_embeddings": c.tied, "attention_bias": c.attention_bias, "hidden_act": "silu",
        "max_position_embeddings": int(c.yarn.original_len * c.yarn.factor) if c.yarn else 4096, "torch_dtype": "float32",
    }  # fmt: skip


# ---- writing ----------------------------------------------------------------------------------------------------
def write_checkpoint(folder: str | Path, config: Config, provider: Callable[[str], Float], *, shard_bytes: int = 256 * 2**20) -> None:
    """Write weights of the spec in Hugging Face layout: per-expert names, [out, in], joint kv_b_proj, sharded with an index."""
    from safetensors.numpy import save_file

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Float]] = [{}]
    used = 0
    for name, value in _checkpoint_tensors(config, provider):
        if shards[-1] and used + value.nbytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = np.ascontiguousarray(value)
        used += value.nbytes
    (target / "config.json").write_text(json.dumps(config_json(config), indent=2) + "\n", "utf-8")
    if len(shards) == 1:
        save_file(shards[0], target / SINGLE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(value.nbytes for shard in shards for value in shard.values())
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n", "utf-8")


def _checkpoint_tensors(config: Config, provider: Callable[[str], Float]) -> list[tuple[str, Float]]:
    out: list[tuple[str, Float]] = []
    for name in weight_shapes(config):
        layer, _, kind = name.rpartition(".")
        prefix = f"model.layers.{layer}."
        if kind in EXPERTS:
            out += [(f"{prefix}mlp.experts.{e}.{EXPERTS[kind]}.weight", matrix.T) for e, matrix in enumerate(provider(name))]
        elif kind == "w_kc":
            keys, values = provider(f"{layer}.w_kc"), provider(f"{layer}.w_vc").transpose(0, 2, 1)
            out.append((prefix + KV_B, np.concatenate([keys, values], 1).reshape(-1, config.kv_rank)))
        elif kind != "w_vc":
            stored, transposed = (TOP_NAMES[kind]) if not layer else (prefix + LAYER_NAMES[kind][0], LAYER_NAMES[kind][1])
            out.append((stored, provider(name).T if transposed else provider(name)))
    return out


def main() -> None:
    """python -m impls.checkpoint DIR: write a checkpoint with seeded weights, to be loaded as a user's would be."""
    import argparse

    from spec.config import PRESETS, preset
    from spec.weights import random_tensor

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", help="is made; kept as it is when it holds a config.json already")
    parser.add_argument("--preset", default="tiny-text", choices=sorted(PRESETS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shard-bytes", type=int, default=128 * 1024, help="several shards and an index (%(default)s)")
    options = parser.parse_args()
    if (Path(options.folder) / "config.json").exists():
        Checkpoint(options.folder)
        return
    config = preset(options.preset)
    write_checkpoint(options.folder, config, lambda name: random_tensor(config, options.seed, name), shard_bytes=options.shard_bytes)


if __name__ == "__main__":
    main()
