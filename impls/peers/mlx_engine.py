"""mlx-lm's deepseek_v3 on the CPU in float32 behind the seam: prefill, chunks and decode; no trees, because its rotary positions come from the cache.

Weight map: `state`. Forward pass: the library's model with its own KVCache; a single row takes its absorbed path, more rows the expanded one. Tap map:
`_Recorder` stands in for modules and keeps what goes in and out, which is all there is: the router is one compiled function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import deepseek_v3
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from impls.peers.sequences import check_descends, check_path, refuse_unfamiliar, spans_of
from spec.config import Config
from spec.engine import Departure, Description, Drafter, EngineError, Float, Generation, Int, Limits, Profile, Rows, TapSink, Unsupported
from spec.weights import Provider, checked_tensor, weight_shapes

# float32 throughout; argpartition takes any of equal scores; the angles are float32 powers, reciprocals and products
PROFILE = Profile("mlx-float32", angle_roundings=32.0, ties="any")
CAPABILITIES = frozenset({"forward", "taps", "commit", "cache_rows", "fork", "evict"})
TAPS = frozenset(
    {
        "embed", "attn_norm", "q_a", "q_a_norm", "q", "kv_a", "latent", "q_rope", "k_rope", "o_heads", "attn_out", "attn_residual", "ffn_norm", "gate",
        "up", "act", "ffn_out", "expert_ids", "expert_weights", "expert_out", "shared_gate", "shared_up", "shared_act", "shared_out", "ffn_residual",
        "final_norm", "logits",
    }
)  # fmt: skip
DEPARTURES = (
    Departure("latent_eps", 1e-6, "q_a_layernorm and kv_a_layernorm are built with 1e-6, whatever rms_norm_eps says"),
    Departure("denominator_eps", 0.0, "nothing is added to the sum of the chosen scores"),
    Departure("group_fill", "zero", "experts of dropped groups count as 0, which beats a negative choice"),
)
KNOWN = frozenset(
    {"scoring", "group_score", "group_fill", "norm_top_k", "denominator_eps", "latent_eps", "rope_layout", "tied", "attention_bias"}
)
POSITIONS_MAX = 1 << 18


class MlxEngine:
    """`spec.engine.Engine`."""

    def __init__(self) -> None:
        mx.set_default_device(mx.cpu)

    def describe(self) -> Description:
        text = f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}"
        return Description("mlx", text, PROFILE, CAPABILITIES, frozenset(), TAPS, DEPARTURES)

    def run_op(
        self, op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float], outputs: Mapping[str, NDArray[Any]]
    ) -> None:
        raise Unsupported("mlx-lm is driven as a whole model")

    def open(self, config: Config, weights: Provider) -> MlxSession:
        """Raises Unsupported for what the model class cannot represent, WeightError for a bad tensor."""
        return MlxSession(config, build(config, weights))


def refuse(config: Config) -> None:
    """Raises Unsupported, with the reason."""
    c = config
    refuse_unfamiliar(c, KNOWN, "mlx-lm")
    if c.groups > 1 and c.group_fill != "zero":
        raise Unsupported("experts of dropped groups count as 0, not as -inf")
    if c.attention_bias and not c.q_rank:
        raise Unsupported("q_proj never has a bias; attention_bias without query compression has none to put it in")
    if c.scoring != "sigmoid":
        raise Unsupported("the class has scoring_func and always takes the sigmoid")
    if c.rope_layout != "interleaved":
        raise Unsupported("the class rotates interleaved pairs only")
    if c.latent_norm_eps != 1e-6:
        raise Unsupported(f"the norms of the latents have eps 1e-6 whatever the configuration says, not {c.latent_norm_eps:g}")
    if c.norm_top_k and c.top_k == 1:
        raise Unsupported("the class renormalises the weights of two experts and more, not that of one")
    if c.norm_top_k and c.denominator_eps:
        raise Unsupported(f"nothing is added to the denominator, not {c.denominator_eps:g}")
    if c.groups > 1 and c.group_score == "max":
        raise Unsupported("the class ranks groups by the sum of their two best, not by the best")
    if c.yarn is not None and (c.yarn.factor <= 1 or not c.yarn.mscale):
        raise Unsupported("the class interpolates for a factor up to 1 as well, and takes an mscale of 0 as 0 and not as missing")


def build(config: Config, weights: Provider) -> Any:
    """The library's model with these weights. Raises Unsupported, WeightError, and ValueError for a name that the library does not have."""
    c = config
    refuse(c)
    rope, positions = None, POSITIONS_MAX
    if c.yarn is not None:
        y = c.yarn
        positions = int(y.original_len * y.factor)
        rope = {
            "type": "yarn", "original_max_position_embeddings": y.original_len, "factor": y.factor, "beta_fast": y.beta_fast,
            "beta_slow": y.beta_slow, "mscale": y.mscale, "mscale_all_dim": y.mscale_all_dim,
        }  # fmt: skip
    model = deepseek_v3.Model(
        deepseek_v3.ModelArgs(
            vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.dense_dim, moe_intermediate_size=c.expert_dim, num_hidden_layers=c.layers,
            first_k_dense_replace=c.first_dense, num_attention_heads=c.heads, num_key_value_heads=c.heads, q_lora_rank=c.q_rank or None,
            kv_lora_rank=c.kv_rank, qk_nope_head_dim=c.nope_dim, qk_rope_head_dim=c.rope_dim, v_head_dim=c.v_dim, n_routed_experts=c.experts,
            num_experts_per_tok=c.top_k, n_group=c.groups, topk_group=c.top_groups, n_shared_experts=c.shared_experts or None,
            norm_topk_prob=c.norm_top_k, routed_scaling_factor=c.routed_scale, rms_norm_eps=c.rms_eps, rope_theta=c.rope_theta, rope_scaling=rope,
            max_position_embeddings=positions,
            attention_bias=c.attention_bias,
        )
    )  # fmt: skip
    model.load_weights([(name, mx.array(value)) for name, value in state(config, weights)])
    mx.eval(model.parameters())
    return model


_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "q_a": "self_attn.q_a_proj", "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj", "kv_a": "self_attn.kv_a_proj_with_mqa", "kv_a_norm": "self_attn.kv_a_layernorm", "w_kc": "self_attn.embed_q",
    "w_vc": "self_attn.unembed_out", "o": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj", "router": "mlp.gate", "expert_gate": "mlp.switch_mlp.gate_proj", "expert_up": "mlp.switch_mlp.up_proj",
    "expert_down": "mlp.switch_mlp.down_proj", "shared_gate": "mlp.shared_experts.gate_proj", "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
}  # fmt: skip


def state(config: Config, weights: Provider) -> Iterator[tuple[str, Float]]:
    """(parameter name, float32 [out, in]); embed_q is [H, R, n], unembed_out [H, v, R], experts [E, out, in]."""
    shapes = weight_shapes(config)
    for name, shape in shapes.items():
        value = checked_tensor(name, shape, weights)
        layer, _, kind = name.rpartition(".")
        if not layer:
            if kind == "embed" and config.tied:
                yield "lm_head.weight", _private(value)
            stored = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}[kind]
            yield stored, _private(value.T if kind == "head" else value)
        elif kind == "router_bias":
            yield f"model.layers.{layer}.mlp.gate.e_score_correction_bias", _private(value)
        elif kind.endswith("_bias"):
            yield f"model.layers.{layer}.{_LAYER[kind.removesuffix('_bias')]}.bias", _private(value)
        else:
            yield f"model.layers.{layer}.{_LAYER[kind]}.weight", _private(value if value.ndim == 1 else value.swapaxes(-1, -2))


def _private(value: NDArray[Any]) -> Float:
    return np.array(value, np.float32, order="C")


@dataclass(eq=False)
class _Sequence:
    caches: list[Any]  # one KVCache per layer: committed rows, then pending ones
    committed: int = 0
    pending: int = 0


class MlxSession:
    """`spec.engine.Session`: one model, one prompt cache per sequence."""

    def __init__(self, config: Config, model: Any) -> None:
        self._config, self._model = config, model
        self._recorder = _Recorder(config, model)
        self._sequences: dict[int, _Sequence] = {}

    def forward(self, rows: Rows, want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> Float:
        """Logits [wanted, V]. Raises EngineError for rows out of range, Unsupported for trees and for positions that are not those of the cache."""
        c = self._config
        spans = spans_of(c, rows)
        logits = np.zeros((len(rows), c.vocab), np.float32)
        gathered: dict[tuple[str, int], list[NDArray[Any]]] = {}
        for span in spans:
            own = self._sequences.setdefault(span.sequence, _Sequence(make_prompt_cache(self._model)))
            self._trim(own, own.pending)
            if not span.is_chain:
                raise Unsupported("mlx-lm takes positions from its cache, so that two children of one row cannot share a batch")
            if (span.positions != own.committed + np.arange(len(span.rows))).any():
                raise Unsupported("mlx-lm counts positions from 0 without gaps")
            self._recorder.begin()
            out = self._model(mx.array(span.tokens)[None], cache=own.caches)
            own.pending = len(span.rows)
            logits[span.rows] = np.array(out[0], copy=True)
            for key, array in self._recorder.arrays().items():
                gathered.setdefault(key, []).append(array)
        for (name, layer), parts in gathered.items():
            if name in taps:
                joined = np.empty((len(rows), *parts[0].shape[1:]), parts[0].dtype)
                for span, part in zip(spans, parts, strict=True):
                    joined[span.rows] = part
                sink(name, layer, np.ascontiguousarray(joined[want_logits]) if name == "logits" else joined)
        return logits[want_logits]

    def commit(self, sequence: int, path: Int) -> None:
        """K1-K3 on a chain. Raises EngineError for a path that does not ascend, Unsupported for one that leaves out rows in the middle."""
        own = self._known(sequence)
        kept = path.tolist()
        check_path(kept, own.pending)
        check_descends(kept, range(-1, own.pending - 1))
        self._trim(own, own.pending - len(kept))
        own.committed += len(kept)
        own.pending = 0

    def cache_rows(self, sequence: int, layer: int) -> Float:
        own = self._known(sequence)
        held = own.caches[layer]
        if held.keys is None:
            return np.zeros((0, self._config.cache_dim), np.float32)
        parts = [np.array(part[0, 0, : own.committed], copy=True) for part in (held.keys, held.values)]
        return np.concatenate(parts, 1)

    def evict(self, sequence: int) -> None:
        self._known(sequence)
        del self._sequences[sequence]

    def fork(self, source: int, target: int) -> None:
        own = self._known(source)
        if target in self._sequences:
            raise EngineError(f"sequence {target} exists: evict it before it becomes a fork of {source}")
        copy = _Sequence(make_prompt_cache(self._model), own.committed)
        for held, new in zip(own.caches, copy.caches, strict=True):
            if own.committed:
                new.update_and_fetch(mx.array(held.keys[..., : own.committed, :]), mx.array(held.values[..., : own.committed, :]))
        self._sequences[target] = copy

    def generate(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits) -> list[Generation]:
        raise Unsupported("mlx-lm has no loop with draft trees; drive it by forward and commit")

    def close(self) -> None:
        self._sequences.clear()
        self._model = None

    def _known(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise EngineError(f"there is no sequence {sequence}; there are {sorted(self._sequences)}")
        return self._sequences[sequence]

    def _trim(self, own: _Sequence, count: int) -> None:
        if count:
            for held in own.caches:
                held.trim(count)
        own.pending = 0 if count == own.pending else own.pending


# Taps


class _Seen:
    """Stands where a module stood, calls it, and shows what went in and out."""

    def __init__(self, module: Any, show: Any) -> None:
        self._module, self._show = module, show

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        result = self._module(*arguments, **options)
        self._show(arguments[0], result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Recorder:
    """Keeps lazy mlx arrays of one forward pass; `arrays` evaluates them, rows first."""

    def __init__(self, config: Config, model: Any) -> None:
        self._config = config
        self._held: dict[tuple[str, int], tuple[Any, tuple[int, ...]]] = {}
        self._install(model)

    def begin(self) -> None:
        self._held = {}

    def arrays(self) -> dict[tuple[str, int], NDArray[Any]]:
        out = {}
        for (name, layer), (value, shape) in self._held.items():
            array = np.array(value[0], copy=True)  # the one sequence of the batch
            if name in ("q_rope", "k_rope"):
                array = array.transpose(1, 0, 2)  # [H,T,D]
                array = array[:, 0] if name == "k_rope" else array
            array = array.reshape(len(array), *shape) if shape else array
            out[name, layer] = np.ascontiguousarray(array.astype(np.int32) if name == "expert_ids" else array)
        return out

    def _keep(self, name: str, layer: int, value: Any, shape: tuple[int, ...] = ()) -> None:
        self._held[name, layer] = (value, shape)

    def _watch(self, owner: Any, attribute: str, layer: int, result: str = "", given: str = "", shape: tuple[int, ...] = ()) -> None:
        def show(argument: Any, answer: Any) -> None:
            if given:
                self._keep(given, layer, argument, shape)
            if result:
                self._keep(result, layer, answer, shape if not given else ())

        owner[attribute] = _Seen(owner[attribute], show)

    def _install(self, model: Any) -> None:
        c, inner = self._config, model.model
        for layer, block in enumerate(inner.layers):
            attention, ffn = block.self_attn, block.mlp
            self._watch(block, "input_layernorm", layer, "attn_norm")
            if c.q_rank:
                self._watch(attention, "q_a_proj", layer, "q_a")
                self._watch(attention, "q_a_layernorm", layer, "q_a_norm")
            self._watch(attention, "q_b_proj" if c.q_rank else "q_proj", layer, "q", shape=(c.heads, c.nope_dim + c.rope_dim))
            self._watch(attention, "kv_a_proj_with_mqa", layer, "kv_a")
            self._watch(attention, "kv_a_layernorm", layer, "latent")
            self._watch_rope(attention, layer)
            self._watch(attention, "o_proj", layer, "attn_out", "o_heads", (c.heads, c.v_dim))
            self._watch(block, "post_attention_layernorm", layer, "ffn_norm", "attn_residual")
            if c.is_dense(layer):
                self._watch_gated(ffn, "", layer)
            else:
                self._watch_choice(ffn, layer)
                self._watch(ffn, "switch_mlp", layer, "expert_out")
                if c.shared_experts:
                    self._watch_gated(ffn.shared_experts, "shared_", layer)
                    self._watch(ffn, "shared_experts", layer, "shared_out")
            self._watch(block, "mlp", layer, "ffn_out")
        for layer, block in enumerate(inner.layers):
            inner.layers[layer] = _Seen(block, lambda given, result, layer=layer: self._keep("ffn_residual", layer, result))
        self._watch(inner, "embed_tokens", -1, "embed")
        self._watch(inner, "norm", c.layers, "final_norm")
        self._watch(model, "lm_head", c.layers, "logits")

    def _watch_gated(self, block: Any, prefix: str, layer: int) -> None:
        self._watch(block, "gate_proj", layer, f"{prefix}gate")
        self._watch(block, "up_proj", layer, f"{prefix}up")
        self._watch(block, "down_proj", layer, given=f"{prefix}act")

    def _watch_rope(self, attention: Any, layer: int) -> None:
        """Called for the queries, then for the key."""

        def show(given: Any, result: Any) -> None:
            self._keep("k_rope" if ("q_rope", layer) in self._held else "q_rope", layer, result)

        attention["rope"] = _Seen(attention["rope"], show)

    def _watch_choice(self, ffn: Any, layer: int) -> None:
        def show(given: Any, result: Any) -> None:
            self._keep("expert_ids", layer, result[0])
            self._keep("expert_weights", layer, result[1])

        ffn["gate"] = _Seen(ffn["gate"], show)
