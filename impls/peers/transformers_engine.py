"""Hugging Face transformers (DeepseekV3ForCausalLM, DeepseekV2ForCausalLM; torch on the CPU, float32) behind the seam.

Weight map: `state`, the library's state dict from the spec's weights. Forward pass: one call per sequence with the library's own DynamicCache; a
chain goes in as any user would send it, a tree with a 4-D mask and explicit positions. Tap map: `_Recorder`, module hooks, and inside attention,
router and experts the arguments and results of the torch functions that run there. Attention is the expanded form, so `q_absorb` and `o_latent`
do not exist. Rotated parts come out half-split where the library rotates interleaved pairs; taps and cache are put back into the spec's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from impls.peers.sequences import Span, check_path, refuse_unfamiliar, spans_of
from spec.config import Config
from spec.engine import Departure, Description, Drafter, EngineError, Float, Generation, Int, Limits, Profile, Rows, TapSink, Unsupported
from spec.taps import all_tap_names
from spec.weights import Provider, checked_tensor, weight_shapes

ATTENTION = ("eager", "sdpa")
# rotary angles: position.float() * inv_freq, whose float32 power, reciprocal and YaRN blend are some 30 roundings (theta up to 1e5, ramps of a
# tenth and more); torch.topk takes any of equal scores
PROFILE = Profile("torch-float32", angle_roundings=32.0, ties="any")
CAPABILITIES = frozenset({"forward", "taps", "commit", "cache_rows", "fork", "evict"})
NEVER = frozenset({"q_absorb", "o_latent", "argmax"})
IN_ATTENTION = frozenset({"scores", "probs"})  # seen only where attention is eager
KNOWN = frozenset({"scoring", "group_score", "norm_top_k", "denominator_eps", "latent_eps", "rope_layout", "tied", "attention_bias"})
DEPARTURES = (
    Departure("latent_eps", 1e-6, "q_a_layernorm and kv_a_layernorm are built with the class default, whatever rms_norm_eps says"),
    Departure("denominator_eps", 1e-20, "a constant in the router"),
)


class TransformersEngine:
    """`spec.engine.Engine`. `attention`: the library's implementation, one of ATTENTION."""

    def __init__(self, attention: str = ATTENTION[0]) -> None:
        torch.set_num_threads(1)
        self._attention = attention

    def describe(self) -> Description:
        taps = frozenset(all_tap_names()) - NEVER - (frozenset() if self._attention == "eager" else IN_ATTENTION)
        version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        return Description(f"transformers:{self._attention}", version, PROFILE, CAPABILITIES, frozenset(), taps, DEPARTURES)

    def run_op(
        self, op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float], outputs: Mapping[str, NDArray[Any]]
    ) -> None:
        raise Unsupported("transformers is driven as a whole model; the engine torch-ops offers torch's operations")

    def open(self, config: Config, weights: Provider) -> TransformersSession:
        """Raises Unsupported for what the classes cannot represent, WeightError for a bad tensor."""
        return TransformersSession(config, build(config, weights, self._attention), self._attention)


# The model


def refuse(config: Config) -> None:
    """Raises Unsupported, with the reason."""
    c = config
    refuse_unfamiliar(c, KNOWN, "transformers")
    if c.attention_bias and not c.q_rank:
        raise Unsupported("q_proj never has a bias; attention_bias without query compression has none to put it in")
    if c.latent_norm_eps != 1e-6:
        raise Unsupported(f"the norms of the latents have eps 1e-6 whatever the configuration says, not {c.latent_norm_eps:g}")
    if c.yarn is not None and c.yarn.factor < 1:
        raise Unsupported(
            f"a YaRN factor of {c.yarn.factor:g} compresses positions here; the specification leaves them as they are up to 1"
        )
    if c.first_dense == c.layers:
        raise Unsupported("a model without a sparse layer is not what these classes are for")
    if not c.shared_experts:
        raise Unsupported("both classes always add a shared expert")
    if c.scoring == "sigmoid":
        if c.groups > 1 and c.group_score == "max":
            raise Unsupported("DeepseekV3 ranks groups by the sum of their two best, not by the best")
        if c.experts // c.groups < 2:
            raise Unsupported("DeepseekV3 takes the two best of every group, and fails for groups of one expert")
        if c.norm_top_k and c.denominator_eps != 1e-20:
            raise Unsupported(f"the router adds 1e-20 to the denominator, not {c.denominator_eps:g}")
        return
    if c.norm_top_k:
        raise Unsupported("DeepseekV2 reads norm_topk_prob and does not use it: weights are never renormalised")
    if c.groups > 1 and c.group_score != "max":
        raise Unsupported("DeepseekV2 ranks groups by their best, not by the sum of two")
    if c.rope_layout != "interleaved":
        raise Unsupported("DeepseekV2 rotates interleaved pairs only")
    if c.hidden % c.heads:
        raise Unsupported(f"DeepseekV2Config demands that hidden ({c.hidden}) is a multiple of heads ({c.heads})")


def library_config(config: Config, attention: str) -> Any:
    """The library's configuration object of a `config` that is not refused."""
    c = config
    refuse(c)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    positions = 1 << 18
    if c.yarn is not None:
        y = c.yarn
        positions = max(1, int(y.original_len * y.factor))
        rope = {
            "rope_type": "yarn", "rope_theta": c.rope_theta, "original_max_position_embeddings": y.original_len, "factor": y.factor,
            "beta_fast": y.beta_fast, "beta_slow": y.beta_slow, "mscale": y.mscale, "mscale_all_dim": y.mscale_all_dim,
        }  # fmt: skip
    shared: dict[str, Any] = {
        "vocab_size": c.vocab, "hidden_size": c.hidden, "intermediate_size": max(1, c.dense_dim), "moe_intermediate_size": c.expert_dim,
        "num_hidden_layers": c.layers, "first_k_dense_replace": c.first_dense, "num_attention_heads": c.heads, "num_key_value_heads": c.heads,
        "q_lora_rank": c.q_rank or None, "kv_lora_rank": c.kv_rank, "qk_nope_head_dim": c.nope_dim, "qk_rope_head_dim": c.rope_dim,
        "v_head_dim": c.v_dim, "n_routed_experts": c.experts, "num_experts_per_tok": c.top_k, "n_group": c.groups, "topk_group": c.top_groups,
        "n_shared_experts": c.shared_experts, "norm_topk_prob": c.norm_top_k, "routed_scaling_factor": c.routed_scale,
        "rms_norm_eps": c.rms_eps, "rope_parameters": rope, "max_position_embeddings": positions, "tie_word_embeddings": c.tied,
        "attention_bias": c.attention_bias, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if c.scoring == "sigmoid":
        made = DeepseekV3Config(**shared, rope_interleave=c.rope_layout == "interleaved", num_mtp_layers=0)
    else:
        made = DeepseekV2Config(**shared, topk_method="group_limited_greedy" if c.groups > 1 else "greedy")
    made._attn_implementation = attention
    made._experts_implementation = "eager"  # the default grouped_mm exists for other devices and dtypes
    return made


def build(config: Config, weights: Provider, attention: str = ATTENTION[0]) -> Any:
    """The library's model in float32, every parameter and buffer of the router set. Raises Unsupported, WeightError, EngineError."""
    cls = DeepseekV3ForCausalLM if config.scoring == "sigmoid" else DeepseekV2ForCausalLM
    with torch.random.fork_rng(devices=[]):
        model = cls(library_config(config, attention)).eval()
    held = model.state_dict()
    with torch.no_grad():
        missing = set(held)
        for name, value in state(config, weights):
            if name not in held or tuple(held[name].shape) != value.shape:
                found = list(held[name].shape) if name in held else "nothing"
                raise EngineError(f"transformers has {found} as {name!r}, but the weight map gives {list(value.shape)}")
            held[name].copy_(torch.from_numpy(value))
            missing.discard(name)
    if missing:
        raise EngineError(f"the weight map does not set {sorted(missing)[0]!r}")
    return model


_LAYER: Mapping[str, str] = {
    "q_a_bias": "self_attn.q_a_proj.bias", "kv_a_bias": "self_attn.kv_a_proj_with_mqa.bias", "o_bias": "self_attn.o_proj.bias",
    "attn_norm": "input_layernorm.weight", "q": "self_attn.q_proj.weight", "q_a": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight", "q_b": "self_attn.q_b_proj.weight", "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight", "o": "self_attn.o_proj.weight", "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight", "router": "mlp.gate.weight",
    "router_bias": "mlp.gate.e_score_correction_bias", "expert_down": "mlp.experts.down_proj",
    "shared_gate": "mlp.shared_experts.gate_proj.weight", "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}  # fmt: skip


def state(config: Config, weights: Provider) -> Iterator[tuple[str, Float]]:
    """(state-dict name, float32 [out, in]) of every tensor: kv_b whole (per head keys, then values), gate and up of the experts fused."""
    shapes = weight_shapes(config)

    def tensor(name: str) -> Float:
        return checked_tensor(name, shapes[name], weights)

    yield "model.embed_tokens.weight", _private(tensor("embed"))
    yield "model.norm.weight", _private(tensor("norm"))
    yield "lm_head.weight", _private(tensor("embed") if config.tied else tensor("head").T)
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        for name, stored in _LAYER.items():
            if f"{layer}.{name}" in shapes:
                value = tensor(f"{layer}.{name}")
                yield at + stored, _private(value if value.ndim == 1 else value.swapaxes(-1, -2))
        keys, values = tensor(f"{layer}.w_kc"), tensor(f"{layer}.w_vc").transpose(0, 2, 1)  # [H,n,R], [H,v,R]
        yield at + "self_attn.kv_b_proj.weight", _private(np.concatenate([keys, values], 1).reshape(-1, config.kv_rank))
        if not config.is_dense(layer):
            fused = np.concatenate([tensor(f"{layer}.expert_gate"), tensor(f"{layer}.expert_up")], 2)  # [E,hidden,2F]
            yield at + "mlp.experts.gate_up_proj", _private(fused.transpose(0, 2, 1))


def _private(value: NDArray[Any]) -> Float:
    return np.array(value, np.float32, order="C")


# Sessions


@dataclass(eq=False)
class _Sequence:
    cache: Any  # DynamicCache: committed rows, then pending ones
    committed: int = 0
    pending: int = 0


class TransformersSession:
    """`spec.engine.Session`: one model, one DynamicCache per sequence."""

    def __init__(self, config: Config, model: Any, attention: str) -> None:
        self._config, self._model, self._attention = config, model, attention
        self._sequences: dict[int, _Sequence] = {}
        # V3 rotates interleaved pairs into half-split order
        self._half_split = config.scoring == "sigmoid" and config.rope_layout == "interleaved"
        self._recorder = _Recorder(config, model)

    def forward(self, rows: Rows, want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> Float:
        """Logits [wanted, V]. Raises EngineError for rows out of range."""
        c = self._config
        spans = spans_of(c, rows)
        logits = np.zeros((len(rows), c.vocab), np.float32)
        gathered: dict[tuple[str, int], list[NDArray[Any]]] = {}
        for span in spans:
            sequence = self._sequences.setdefault(span.sequence, _Sequence(DynamicCache(config=self._model.config)))
            self._keep(sequence, np.arange(sequence.committed))
            with torch.no_grad(), self._recorder.recording(bool(taps)):
                out = self._model(
                    torch.from_numpy(span.tokens.astype(np.int64))[None], position_ids=torch.from_numpy(span.positions.astype(np.int64))[None],
                    attention_mask=self._mask(span, sequence.committed), past_key_values=sequence.cache, use_cache=True,
                )  # fmt: skip
            sequence.pending = len(span.rows)
            logits[span.rows] = out.logits[0].numpy()
            for key, array in self._recorder.arrays.items():
                gathered.setdefault(key, []).append(array)
        for (name, layer), parts in gathered.items():
            if name in taps:
                sink(name, layer, self._joined(name, spans, parts, want_logits))
        return logits[want_logits]

    def _mask(self, span: Span, committed: int) -> torch.Tensor | None:
        """None for a chain: the library's own causal mask. A tree: [1, 1, M, P + M], boolean for sdpa, additive for eager, which would add a boolean
        mask as the numbers 0 and 1."""
        if span.is_chain:
            return None
        visible = torch.from_numpy(np.concatenate([np.ones((len(span.rows), committed), np.bool_), span.ancestors], 1))[None, None]
        if self._attention == "sdpa":
            return visible
        return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)

    def _joined(self, name: str, spans: list[Span], parts: list[NDArray[Any]], want_logits: NDArray[np.bool_]) -> NDArray[Any]:
        """The rows of all spans in batch order; taps over keys get as many columns as the longest span has."""
        if name in IN_ATTENTION:
            width = max(part.shape[2] for part in parts)
            parts = [np.pad(part, ((0, 0), (0, 0), (0, width - part.shape[2]))) for part in parts]
        if name in ("q_rope", "k_rope") and self._half_split:
            parts = [interleaved(part) for part in parts]
        out = np.empty((sum(len(span.rows) for span in spans), *parts[0].shape[1:]), parts[0].dtype)
        for span, part in zip(spans, parts, strict=True):
            out[span.rows] = part
        return np.ascontiguousarray(out[want_logits]) if name == "logits" else out

    # Cache

    def commit(self, sequence: int, path: Int) -> None:
        """K1-K3. Raises EngineError for a path that does not ascend within the pending rows."""
        own = self._known(sequence)
        check_path(path.tolist(), own.pending)
        self._keep(own, np.concatenate([np.arange(own.committed), own.committed + path]))
        own.committed += len(path)

    def cache_rows(self, sequence: int, layer: int) -> Float:
        own = self._known(sequence)
        held = own.cache.layers[layer] if layer < len(own.cache.layers) else None
        if held is None or not held.is_initialized:
            return np.zeros((0, self._config.cache_dim), np.float32)
        latent, rotated = held.keys[0, 0, : own.committed].numpy(), held.values[0, 0, : own.committed].numpy()
        return np.concatenate([latent, interleaved(rotated) if self._half_split else rotated], 1)

    def evict(self, sequence: int) -> None:
        self._known(sequence)
        del self._sequences[sequence]

    def fork(self, source: int, target: int) -> None:
        own = self._known(source)
        if target in self._sequences:
            raise EngineError(f"sequence {target} exists: evict it before it becomes a fork of {source}")
        copy = _Sequence(DynamicCache(config=self._model.config), own.committed)
        if own.committed:
            for layer, held in enumerate(own.cache.layers):
                copy.cache.update(held.keys[:, :, : own.committed].clone(), held.values[:, :, : own.committed].clone(), layer)
        self._sequences[target] = copy

    def generate(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits) -> list[Generation]:
        raise Unsupported("transformers has no loop with draft trees of its own; drive it by forward and commit")

    def close(self) -> None:
        self._sequences.clear()
        self._recorder.close()
        self._model = None

    def _known(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise EngineError(f"there is no sequence {sequence}; there are {sorted(self._sequences)}")
        return self._sequences[sequence]

    def _keep(self, own: _Sequence, rows: NDArray[Any]) -> None:
        """Only these rows stay in the cache; nothing is pending afterwards."""
        index = torch.from_numpy(rows.astype(np.int64))
        for held in own.cache.layers:
            if held.is_initialized and held.keys.numel():
                held.keys, held.values = held.keys[:, :, index], held.values[:, :, index]
        own.pending = 0


def interleaved(half_split: NDArray[Any]) -> NDArray[Any]:
    """[..., D] evens then odds -> pairs side by side."""
    half = half_split.shape[-1] // 2
    return np.ascontiguousarray(np.stack([half_split[..., :half], half_split[..., half:]], -1).reshape(half_split.shape))


# Taps


class _Functions(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
    """Shows the torch functions that run inside attention, router and experts to the recorder; changes nothing."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._recorder.inside is not None:
            self._recorder.function(getattr(func, "__name__", ""), args, result)
        return result


class _Recorder:
    """Hooks of one model. `arrays` holds the taps of the last forward pass, rows first. `inside`: (block, layer) that is running."""

    def __init__(self, config: Config, model: Any) -> None:
        self._config = config
        self._handles: list[Any] = []
        self._active = False
        self.arrays: dict[tuple[str, int], NDArray[Any]] = {}
        self.inside: tuple[str, int] | None = None
        self._linear: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the experts: gate and up, then down, expert by expert
        self._install(model)

    def recording(self, active: bool) -> Any:
        """A context manager: `arrays` is fresh and filled where `active`."""
        self.arrays, self.inside, self._linear, self._active = {}, None, [], active
        return _Functions(self) if active else torch.no_grad()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _install(self, model: Any) -> None:
        c, last = self._config, self._config.layers
        inner = model.model
        self._out(inner.embed_tokens, "embed", -1)
        self._out(inner.norm, "final_norm", last)
        self._out(model.lm_head, "logits", last)
        for number, layer in enumerate(inner.layers):
            attention, block = layer.self_attn, layer.mlp
            self._out(layer.input_layernorm, "attn_norm", number)
            if c.q_rank:
                self._out(attention.q_a_proj, "q_a", number)
                self._out(attention.q_a_layernorm, "q_a_norm", number)
            self._out(attention.q_b_proj if c.q_rank else attention.q_proj, "q", number, (c.heads, c.nope_dim + c.rope_dim))
            self._out(attention.kv_a_proj_with_mqa, "kv_a", number)
            self._out(attention.kv_a_layernorm, "latent", number)
            self._in(attention.o_proj, "o_heads", number, (c.heads, c.v_dim))
            self._out(attention.o_proj, "attn_out", number)
            self._in(layer.post_attention_layernorm, "attn_residual", number)
            self._out(layer.post_attention_layernorm, "ffn_norm", number)
            self._within(attention, "attention", number)
            if c.is_dense(number):
                self._gated(block, "", number)
            else:
                self._gated(block.shared_experts, "shared_", number)
                self._out(block.shared_experts, "shared_out", number)
                self._within(block.gate, "router", number)
                self._within(block.experts, "experts", number)
            self._out(block, "ffn_out", number)
            self._out(layer, "ffn_residual", number)

    def _gated(self, block: Any, prefix: str, layer: int) -> None:
        self._out(block.gate_proj, f"{prefix}gate", layer)
        self._out(block.up_proj, f"{prefix}up", layer)
        self._in(block.down_proj, f"{prefix}act", layer)

    def _out(self, module: Any, name: str, layer: int, shape: tuple[int, ...] = ()) -> None:
        self._handles.append(module.register_forward_hook(lambda _, given, result: self._take(name, layer, result, shape)))

    def _in(self, module: Any, name: str, layer: int, shape: tuple[int, ...] = ()) -> None:
        self._handles.append(module.register_forward_pre_hook(lambda _, given: self._take(name, layer, given[0], shape)))

    def _within(self, module: Any, block: str, layer: int) -> None:
        finish: Callable[[int, Any, Any], None] | None = {"router": self._routed, "experts": self._mixed}.get(block)

        def begin(_: Any, given: Any) -> None:
            self.inside = (block, layer) if self._active else None

        def end(_: Any, given: Any, result: Any) -> None:
            if self._active and finish is not None:
                finish(layer, given, result)
            self.inside = None

        self._handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def _take(self, name: str, layer: int, tensor: torch.Tensor, shape: tuple[int, ...] = ()) -> None:
        if self._active:
            array = tensor.detach()[0].numpy()
            self.arrays[name, layer] = np.array(array.reshape(len(array), *shape) if shape else array)

    def function(self, name: str, args: Any, result: Any) -> None:
        """A torch function ran inside `self.inside`."""
        assert self.inside is not None
        block, layer = self.inside
        if block == "attention" and name == "softmax":
            self.arrays["scores", layer] = _rows_first(args[0])
            self.arrays["probs", layer] = _rows_first(result)
        elif block == "attention" and name in ("matmul", "scaled_dot_product_attention") and ("q_rope", layer) not in self.arrays:
            self._rotated(layer, args[0], args[1] if name != "matmul" else args[1].transpose(2, 3))
        elif block == "router" and name in ("sigmoid", "softmax"):
            self.arrays["router_scores", layer] = np.array(result.detach().numpy())
        elif block == "experts" and name == "linear":
            self._linear.append((args[0].detach(), result.detach()))

    def _rotated(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        """query [1,H,M,n+D], key [1,H,S,n+D]: the rotated parts; the key's is the same for every head."""
        n = self._config.nope_dim
        self.arrays["q_rope", layer] = _rows_first(query[..., n:])
        self.arrays["k_rope", layer] = np.array(key[0, 0, key.shape[2] - query.shape[2] :, n:].detach().numpy())

    def _routed(self, layer: int, given: Any, result: Any) -> None:
        logits, weights, ids = result
        self.arrays["router_logits", layer] = np.array(logits.detach().numpy())
        self.arrays["expert_weights", layer] = np.array(weights.detach().numpy())
        self.arrays["expert_ids", layer] = ids.numpy().astype(np.int32)

    def _mixed(self, layer: int, given: Any, result: Any) -> None:
        """Two products per chosen expert, in order of the experts; the rows of one expert by place in the choice, then by token."""
        c = self._config
        ids = given[1].numpy()  # (T,K)
        wide = {"expert_gate": c.expert_dim, "expert_up": c.expert_dim, "expert_act": c.expert_dim, "expert_out": c.hidden}
        out = {name: np.zeros((*ids.shape, width), np.float32) for name, width in wide.items()}
        calls = iter(self._linear)
        for expert in np.unique(ids):
            place, token = np.nonzero(expert == ids.T)
            (_, fused), (act, down) = next(calls), next(calls)
            out["expert_gate"][token, place] = fused[:, : c.expert_dim].numpy()
            out["expert_up"][token, place] = fused[:, c.expert_dim :].numpy()
            out["expert_act"][token, place] = act.numpy()
            out["expert_out"][token, place] = down.numpy()
        self._linear = []
        self.arrays |= {(name, layer): array for name, array in out.items()}


def _rows_first(tensor: torch.Tensor) -> NDArray[Any]:
    """[1,H,M,X] -> [M,H,X]."""
    return np.ascontiguousarray(tensor.detach()[0].transpose(0, 1).numpy())
