"""The DFlash drafter as equations: target features in, the marginals of a block out (rules D1-D5, T1).

A drafter reads the target's residual stream after a few layers, for committed tokens only, and guesses a whole block at once:
slot 0 holds the root, the other slots the mask token, and attention inside the block is not causal. It borrows the target's
embedding and head. Each step is one canonical operation (spec/arithmetic.py), so that the bits do not depend on when context
arrives or in which pieces. Names: S = block_size, L = S - 1 depths, P = context length = committed tokens, G = key-value heads,
J = heads / G, D = head_dim, n = number of target layers read. Not here: how a tree is made of the marginals (spec/tree.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import Mask, Prepared, add, matmul, prepare, rms_norm, rope, softmax, swiglu
from spec.config import Config, ConfigError
from spec.engine import EngineError, Float, Int, Rows
from spec.loops import FEATURE_TAP
from spec.model import GoldenModel, Tap
from spec.products import halves
from spec.rotary import Rotary
from spec.taps import Tap as TapRecord
from spec.weights import Weights, checked_tensor, philox


class ContextError(EngineError):
    """A drafter whose context is not exactly the committed tokens (D3); the message says how many there are and should be."""


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes of a drafter for one target. `target_layers` belongs to the checkpoint: there is no formula for it (D2)."""

    target: Config
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    block_size: int  # S, slot 0 included
    mask_token: int
    target_layers: tuple[int, ...]
    rms_eps: float = 1e-6
    rope_theta: float = 1e6
    window: int | None = None  # context keys farther than this from a query, in positions, are not seen; None: all are

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "head_dim", "ffn_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads is {self.kv_heads}, but must divide heads ({self.heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, but pairs are rotated: give an even number")
        if not 0 <= self.mask_token < self.target.vocab:
            raise ConfigError(f"mask_token is {self.mask_token}, but must be between 0 and {self.target.vocab - 1}")
        if not self.target_layers or any(not 0 <= layer < self.target.layers for layer in self.target_layers):
            raise ConfigError(f"target_layers is {self.target_layers}, but must name layers between 0 and {self.target.layers - 1}")
        if self.window is not None and self.window < self.block_size:
            raise ConfigError(f"window is {self.window}, but the block of {self.block_size} must fit into it")


def weight_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Row-major [in, out]; `fc` takes the features of all target layers side by side."""
    c, hidden = config, config.target.hidden
    shapes: dict[str, tuple[int, ...]] = {"fc": (len(c.target_layers) * hidden, hidden), "hidden_norm": (hidden,)}
    for layer in range(c.layers):
        own = {
            "attn_norm": (hidden,),
            "q": (hidden, c.heads * c.head_dim),
            "k": (hidden, c.kv_heads * c.head_dim),
            "v": (hidden, c.kv_heads * c.head_dim),
            "q_norm": (c.head_dim,),
            "k_norm": (c.head_dim,),
            "o": (c.heads * c.head_dim, hidden),
            "ffn_norm": (hidden,),
            "gate": (hidden, c.ffn_dim),
            "up": (hidden, c.ffn_dim),
            "down": (c.ffn_dim, hidden),
        }
        shapes |= {f"{layer}.{name}": shape for name, shape in own.items()}
    return shapes | {"norm": (hidden,)}


def random_weights(config: DFlashConfig, seed: int) -> dict[str, Float]:
    """Philox values keyed by (seed, tensor name), std fan_in^-1/2 for matrices; gains are random, because ones test nothing."""
    out = {}
    for name, shape in weight_shapes(config).items():
        draw = philox("dflash", seed, name).standard_normal(shape)
        out[name] = (1 + 0.3 * draw if len(shape) == 1 else draw * shape[0] ** -0.5).astype(np.float32)
    return out


TAPS = (
    TapRecord("fc", "matmul", ("C", "hidden")),  # C = context rows that are new
    TapRecord("context", "rms_norm", ("C", "hidden")),
    TapRecord("context_k_norm", "rms_norm", ("C", "kv_heads", "head_dim")),  # from here on once per layer
    TapRecord("context_k", "rope", ("C", "kv_heads", "head_dim")),
    TapRecord("context_v", "matmul", ("C", "kv_heads", "head_dim")),
    TapRecord("embed", "embed", ("S", "hidden")),
    TapRecord("attn_norm", "rms_norm", ("S", "hidden")),
    TapRecord("q_norm", "rms_norm", ("S", "heads", "head_dim")),
    TapRecord("q", "rope", ("S", "heads", "head_dim")),
    TapRecord("k_norm", "rms_norm", ("S", "kv_heads", "head_dim")),
    TapRecord("k", "rope", ("S", "kv_heads", "head_dim")),
    TapRecord("v", "matmul", ("S", "kv_heads", "head_dim")),
    TapRecord("scores", "scores", ("kv_heads", "S*J", "P+S")),  # row s * J + j: slot s, query head g * J + j
    TapRecord("probs", "softmax", ("kv_heads", "S*J", "P+S")),
    TapRecord("heads", "matmul", ("S", "heads", "head_dim")),
    TapRecord("attn_out", "matmul", ("S", "hidden")),
    TapRecord("attn_residual", "add", ("S", "hidden")),
    TapRecord("ffn_norm", "rms_norm", ("S", "hidden")),
    TapRecord("act", "swiglu", ("S", "ffn_dim")),
    TapRecord("ffn_out", "matmul", ("S", "hidden")),
    TapRecord("ffn_residual", "add", ("S", "hidden")),
    TapRecord("final_norm", "rms_norm", ("L", "hidden")),
    TapRecord("logits", "matmul", ("L", "vocab")),
)


class Context:
    """Keys and values of the committed tokens of one sequence, per drafter layer; rows are appended and never change (D3)."""

    def __init__(self, config: DFlashConfig) -> None:
        empty = np.zeros((0, config.kv_heads, config.head_dim), np.float32)
        self.keys = [empty] * config.layers
        self.values = [empty] * config.layers

    @property
    def length(self) -> int:
        """P."""
        return len(self.keys[0])


@dataclass(frozen=True, eq=False)
class _Layer:
    attn_norm: Float
    q: Prepared
    k: Prepared
    v: Prepared
    q_norm: Float
    k_norm: Float
    o: Prepared
    ffn_norm: Float
    gate_up: Prepared
    down: Prepared


class DFlash:
    """A drafter's weights, with the target whose embedding and head it uses. Raises WeightError for a tensor that cannot be used."""

    def __init__(self, config: DFlashConfig, weights: Weights, target: GoldenModel) -> None:
        if target.config != config.target:
            raise ConfigError("the drafter is made for another target: config.target differs from the model's configuration")
        tensors = {name: checked_tensor(name, shape, weights.__getitem__) for name, shape in weight_shapes(config).items()}
        self.config = config
        self.target = target
        # Rotary reads the size, the base and the scaling of the rotated part; a drafter rotates whole heads, without YaRN
        self.rotary = Rotary(dataclasses.replace(config.target, rope_dim=config.head_dim, rope_theta=config.rope_theta, yarn=None))
        self.fc = prepare(tensors["fc"])
        self.hidden_norm, self.norm = tensors["hidden_norm"], tensors["norm"]
        self.layers = [_layer(tensors, number) for number in range(config.layers)]

    # ---- equations ----------------------------------------------------------------------------------------------
    def extend(self, context: Context, features: Float, tap: Tap) -> None:
        """Append the tokens whose target features [C, n * hidden] these are. One f = norm(fc(features)) serves every layer."""
        c = self.config
        at = np.arange(context.length, context.length + len(features))  # absolute (D4)
        tap("fc", -1, projected := matmul(features, self.fc))
        tap("context", -1, f := rms_norm(projected, self.hidden_norm, c.rms_eps))
        for number, layer in enumerate(self.layers):
            key, value = self._keys_values(number, layer, f, at, tap, "context_")
            context.keys[number] = np.concatenate([context.keys[number], key])
            context.values[number] = np.concatenate([context.values[number], value])

    def draft(self, context: Context, root: int, tap: Tap) -> Float:
        """The marginals [L, V] of the positions after the root, which stands at P; the context stays as it is.

        Row d-1 belongs to depth d: a mask slot predicts its own position, and slot 0 predicts nothing (T1).
        """
        c, S = self.config, self.config.block_size
        block = np.full(S, c.mask_token, np.int32)
        block[0] = root  # the anchor (D1)
        at = np.arange(context.length, context.length + S)
        x = self.target.embed[block]  # (S,hidden)
        tap("embed", -1, x)
        for number, layer in enumerate(self.layers):
            tap("attn_norm", number, h := rms_norm(x, layer.attn_norm, c.rms_eps))
            tap("attn_out", number, attended := self._attention(number, layer, h, at, context, tap))
            tap("attn_residual", number, x := add(x, attended))
            tap("ffn_norm", number, h := rms_norm(x, layer.ffn_norm, c.rms_eps))
            tap("act", number, act := swiglu(*halves(matmul(h, layer.gate_up))))
            tap("ffn_out", number, down := matmul(act, layer.down))
            tap("ffn_residual", number, x := add(x, down))
        tap("final_norm", c.layers, last := rms_norm(x[1:], self.norm, c.rms_eps))
        tap("logits", c.layers, logits := self.target.head(last))
        return logits

    def _attention(self, number: int, layer: _Layer, h: Float, at: NDArray[np.intp], context: Context, tap: Tap) -> Float:
        """Every slot sees every context key (inside the window) and every slot of the block, later ones too (D5)."""
        c, S, G = self.config, len(h), self.config.kv_heads
        tap("q_norm", number, normed := rms_norm(matmul(h, layer.q).reshape(S, c.heads, c.head_dim), layer.q_norm, c.rms_eps))
        tap("q", number, query := self._rotated(normed, at))
        own_key, own_value = self._keys_values(number, layer, h, at, tap, "")
        keys = np.concatenate([context.keys[number], own_key])  # (P+S,G,D)
        values = np.concatenate([context.values[number], own_value])
        grouped = query.reshape(S, G, -1, c.head_dim).transpose(1, 0, 2, 3).reshape(G, -1, c.head_dim)  # (G,S*J,D)
        tap("scores", number, scores := matmul(grouped, keys.transpose(1, 2, 0), c.head_dim**-0.5))
        visible = np.repeat(self._visible(at, len(keys)), c.heads // G, axis=0)  # (S*J,P+S)
        tap("probs", number, probs := softmax(scores, visible[None]))
        out = matmul(probs, values.transpose(1, 0, 2))  # (G,S*J,D)
        heads = out.reshape(G, S, -1, c.head_dim).transpose(1, 0, 2, 3).reshape(S, c.heads, c.head_dim)
        tap("heads", number, heads)
        return matmul(heads.reshape(S, -1), layer.o)

    def _visible(self, at: NDArray[np.intp], keys: int) -> Mask:
        seen: Mask = np.ones((len(at), keys), np.bool_)
        if self.config.window is not None:
            seen[:] = at[:, None] - np.arange(keys)[None, :] < self.config.window
        return seen

    def _keys_values(self, number: int, layer: _Layer, x: Float, at: NDArray[np.intp], tap: Tap, prefix: str) -> tuple[Float, Float]:
        c = self.config
        shape = (len(x), c.kv_heads, c.head_dim)
        tap(prefix + "k_norm", number, normed := rms_norm(matmul(x, layer.k).reshape(shape), layer.k_norm, c.rms_eps))
        tap(prefix + "k", number, key := self._rotated(normed, at))
        tap(prefix + "v", number, value := matmul(x, layer.v).reshape(shape))
        return key, value

    def _rotated(self, x: Float, at: NDArray[np.intp]) -> Float:
        cos, sin = self.rotary.tables(at)
        return rope(x, cos[:, None], sin[:, None], True)


def _layer(tensors: Mapping[str, Float], number: int) -> _Layer:
    own = {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{number}.")}
    return _Layer(
        attn_norm=own["attn_norm"],
        q=prepare(own["q"]),
        k=prepare(own["k"]),
        v=prepare(own["v"]),
        q_norm=own["q_norm"],
        k_norm=own["k_norm"],
        o=prepare(own["o"]),
        ffn_norm=own["ffn_norm"],
        gate_up=prepare(np.concatenate([own["gate"], own["up"]], axis=1)),
        down=prepare(own["down"]),
    )


# ---- drafters for spec/loops.py ---------------------------------------------------------------------------------


class DFlashDrafter:
    """`spec.engine.FeatureDrafter`: keeps one context per sequence, and extends it by what the loop has committed."""

    def __init__(self, model: DFlash) -> None:
        self.model = model
        self._contexts: dict[int, Context] = {}

    @property
    def block_len(self) -> int:
        """L; the block stays as wide as the drafter's, whatever the budget of the tree (D5)."""
        return self.model.config.block_size - 1

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.model.config.target_layers

    def observe(self, sequence: int, features: Float) -> None:
        self.model.extend(self._contexts.setdefault(sequence, Context(self.model.config)), features, _nobody)

    def draft(self, sequence: int, history: Int) -> Float:
        """Raises ContextError unless exactly the tokens before the root were observed (D3)."""
        context = self._contexts.get(sequence) or Context(self.model.config)
        if context.length != len(history) - 1:
            raise ContextError(
                f"sequence {sequence}: the context holds {context.length} tokens, but {len(history) - 1} are committed: every one of them, once"
            )
        return self.model.draft(context, int(history[-1]), _nobody)

    def evict(self, sequence: int) -> None:
        self._contexts.pop(sequence, None)


class ReplayedDFlashDrafter:
    """`spec.engine.Drafter` without state: runs the golden target over the history for its features at each draft.

    For engines whose loop asks for drafts but hands out no features, and as the form without a cache.
    """

    def __init__(self, model: DFlash) -> None:
        self.model = model

    @property
    def block_len(self) -> int:
        return self.model.config.block_size - 1

    def draft(self, sequence: int, history: Int) -> Float:
        context = Context(self.model.config)
        self.model.extend(context, target_features(self.model.target, self.model.config.target_layers, history[:-1]), _nobody)
        return self.model.draft(context, int(history[-1]), _nobody)


def target_features(target: GoldenModel, layers: Sequence[int], tokens: Int) -> Float:
    """[len(tokens), n * hidden]: the residual stream after each of `layers`, in list order, before the final norm (D2)."""
    taken: dict[int, Float] = {}

    def sink(name: str, layer: int, array: NDArray[Any]) -> None:
        taken[layer] = array.copy()

    index = np.arange(len(tokens), dtype=np.int32)
    rows = Rows(np.zeros_like(index), np.asarray(tokens, np.int32), index, index - 1)
    target.open().forward(rows, np.zeros(len(tokens), np.bool_), frozenset({FEATURE_TAP}), sink)
    if not len(tokens):
        return np.zeros((0, len(layers) * target.config.hidden), np.float32)
    return np.concatenate([taken[layer] for layer in layers], axis=1)


def _nobody(name: str, layer: int, array: NDArray[Any]) -> None:
    """Nobody listens."""


def tiny_dflash(target: GoldenModel, seed: int, **overrides: Any) -> DFlash:
    """A small drafter with the coincidences broken: two key-value heads of three queries each, a head_dim of its own, no two sizes equal."""
    c = target.config
    config = DFlashConfig(
        target=c, layers=2, heads=6, kv_heads=2, head_dim=14, ffn_dim=44, block_size=5, mask_token=c.vocab - 2,
        target_layers=tuple(dict.fromkeys((c.layers - 1, 0))), rope_theta=2.0e5,
    )  # fmt: skip
    config = dataclasses.replace(config, **overrides)
    return DFlash(config, random_weights(config, seed), target)
