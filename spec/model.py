"""The model as equations: MLA in absorbed form with a latent cache, dense or mixture-of-experts feed-forward (rules M1-M9).

T = rows of the batch, H = heads, n = nope_dim, D = rope_dim, R = kv_rank, S = keys. Every step is one operation of
spec/arithmetic.py, hence canonical: a row's bits do not depend on the other rows, the batch, the chunking or the shape of
the tree. So tree decoding equals sequential decoding and prefill equals step-by-step decoding bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import Mask, Prepared, add, check_environment, combine, matmul, rms_norm, rope, softmax, swiglu
from spec.cache import LatentCache
from spec.config import Config
from spec.engine import Drafter, EngineError, Float, Generation, Int, Limits, Rows, TapSink
from spec.formats import ROUNDED
from spec.products import Experts, Fetched, Kept, Product, Source, halves
from spec.rotary import CarriedTables, Rotary
from spec.routing import Route, router, router_scores
from spec.sampling import Sampling
from spec.weights import FetchedWeights, Provider, Weights, checked, is_large

if TYPE_CHECKING:
    from spec.schemes import Decider

Tap = Callable[[str, int, NDArray[Any]], None]
CHUNK = 256  # rows of one forward in sequence_logits: keeps scores of [T, H, S] small; the bits do not depend on it


class RowsError(EngineError):
    """A batch, path or sequence that the specification refuses; the message names the row, what was found and what is accepted."""


@dataclass(frozen=True, eq=False)
class Dense:
    gate_up: Product  # [T, hidden] -> [T, 2 * dense_dim]
    down: Product


@dataclass(frozen=True, eq=False)
class Sparse:
    router: Product  # [T, hidden] -> [T, E]
    scores: Product
    route: Route
    experts: Experts
    shared: Dense | None


@dataclass(frozen=True, eq=False)
class Layer:
    """What reads the same input stands side by side, one product for all; canonical bits do not notice."""

    attn_norm: Float
    input: Product  # [T, hidden] -> [T, (q_rank or H (n + D)) + R + D]: q_a or q, then kv_a
    q_a_norm: Float | None
    q_b: Product | None
    kv_a_norm: Float
    absorb: Product  # [T, H, n] -> [T, H, R]
    unabsorb: Product  # [T, H, R] -> [T, H, v]
    o: Product
    ffn_norm: Float
    feed_forward: Dense | Sparse


@dataclass(frozen=True, eq=False)
class Span:
    """The rows of one sequence in a batch: which they are, its cache, and what each sees of its S keys."""

    rows: slice | NDArray[np.intp]
    cache: LatentCache
    visible: Mask  # [rows, S]


class GoldenModel:
    """Weights prepared once for canonical products, or, for a large model, fetched for each use: the bits are the same.

    Raises WeightError for a missing, misshapen or non-finite tensor, of a large model when it is met.
    """

    def __init__(self, config: Config, weights: Weights | Provider, *, keep: bool | None = None) -> None:
        """`keep`: whether matrices are kept (None: unless the model is large)."""
        check_environment()
        self.config = config
        provider = weights.__getitem__ if isinstance(weights, Mapping) else weights
        keep = not is_large(config) if keep is None else keep
        self.weights: Weights = dict(checked(config, provider)) if keep else FetchedWeights(config, provider)
        """As they were given: the judge recomputes from them."""
        source: Source = Kept(self.weights) if keep else Fetched(self.weights.__getitem__)
        self.rotary: Rotary | CarriedTables = (
            CarriedTables(self.weights["rope_cos"], self.weights["rope_sin"]) if config.rope_table_len else Rotary(config)
        )
        self.rotate = partial(rope, half_layout=config.rope_layout == "half")
        self.to_cache = ROUNDED[config.cache_format]
        self.embed = self.weights["embed"]
        self.layers = [self._layer(source, layer) for layer in range(config.layers)]
        self.norm = self.weights["norm"]
        self.head = source.transposed("embed") if config.tied else source.product(("head",))

    def open(self) -> GoldenSession:
        return GoldenSession(self)

    def sequence_logits(self, tokens: Sequence[int] | Int) -> Float:
        """The logits [len, vocab] of one causal forward over a whole sequence from position 0: those of every decoding of it."""
        session, ids = self.open(), np.asarray(tokens, np.int32)
        logits = np.empty((len(ids), self.config.vocab), np.float32)
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            index = np.arange(len(chunk), dtype=np.int32)
            rows = Rows(np.zeros_like(index), chunk, start + index, index - 1)
            logits[start : start + len(chunk)] = session.forward(rows, np.ones(len(chunk), np.bool_), frozenset(), _no_sink)
            session.commit(0, index)
        return logits

    # ---- equations ----------------------------------------------------------------------------------------------
    def forward(self, tokens: Int, positions: Int, spans: Sequence[Span], want_logits: Mask, tap: Tap) -> Float:
        config, last = self.config, self.config.layers
        cos, sin = self.rotary.tables(positions)
        h = self.embed[tokens]  # (T,hidden)
        tap("embed", -1, h)
        for number, layer in enumerate(self.layers):
            x = rms_norm(h, layer.attn_norm, config.rms_eps)
            tap("attn_norm", number, x)
            h = add(h, self.attention(number, layer, x, cos, sin, spans, tap))
            tap("attn_residual", number, h)
            x = rms_norm(h, layer.ffn_norm, config.rms_eps)
            tap("ffn_norm", number, x)
            block = layer.feed_forward
            y = self.dense(number, block, x, tap) if isinstance(block, Dense) else self.sparse(number, block, x, tap)
            tap("ffn_out", number, y)
            h = add(h, y)
            tap("ffn_residual", number, h)
        x = rms_norm(h, self.norm, config.rms_eps)
        tap("final_norm", last, x)
        logits = self.head(x[want_logits])  # (wanted,vocab)
        tap("logits", last, logits)
        tap("argmax", last, argmax(logits))
        return logits

    def attention(self, number: int, layer: Layer, x: Float, cos: Float, sin: Float, spans: Sequence[Span], tap: Tap) -> Float:
        """Queries absorbed into the latent space, [q_nope w_kc | q_rope], meet cache rows [latent | k_rope]; values are the latents."""
        c, T = self.config, len(x)
        joined = layer.input(x)
        q, kv = joined[:, : -c.cache_dim], joined[:, -c.cache_dim :]  # (T,q_rank or H*(n+D)), (T,R+D)
        if layer.q_b is not None and layer.q_a_norm is not None:
            tap("q_a", number, q)
            q = rms_norm(q, layer.q_a_norm, c.latent_norm_eps)
            tap("q_a_norm", number, q)
            q = layer.q_b(q)
        q = q.reshape(T, c.heads, c.nope_dim + c.rope_dim)
        tap("q", number, q)
        tap("kv_a", number, kv)
        latent = self.to_cache(rms_norm(kv[:, : c.kv_rank], layer.kv_a_norm, c.latent_norm_eps))
        tap("latent", number, latent)
        q_rope = self.rotate(q[..., c.nope_dim :], cos[:, None], sin[:, None])
        tap("q_rope", number, q_rope)
        k_rope = self.to_cache(self.rotate(kv[:, c.kv_rank :], cos, sin))
        tap("k_rope", number, k_rope)
        q_absorb = layer.absorb(q[..., : c.nope_dim])  # (T,H,R)
        tap("q_absorb", number, q_absorb)

        query = np.concatenate([q_absorb, q_rope], axis=-1)  # (T,H,R+D)
        cache_rows = np.concatenate([latent, k_rope], axis=-1)  # (T,R+D)
        S = max(span.visible.shape[1] for span in spans)
        scores, probs = np.zeros((T, c.heads, S), np.float32), np.zeros((T, c.heads, S), np.float32)
        o_latent = np.empty((T, c.heads, c.kv_rank), np.float32)
        for span in spans:
            rows, keys = span.rows, span.visible.shape[1]
            span.cache.extend(number, cache_rows[rows])
            own = attention_scores(query[rows], span.cache.keys(number), c.softmax_scale)
            weights = softmax(own, span.visible[:, None])
            scores[rows, :, :keys], probs[rows, :, :keys] = own, weights
            o_latent[rows] = attention_values(weights, span.cache.latents(number))
        tap("scores", number, scores)
        tap("probs", number, probs)
        tap("o_latent", number, o_latent)
        o_heads = layer.unabsorb(o_latent)  # (T,H,v)
        tap("o_heads", number, o_heads)
        out = layer.o(o_heads.reshape(T, -1))
        tap("attn_out", number, out)
        return out

    def dense(self, number: int, block: Dense, x: Float, tap: Tap, prefix: str = "") -> Float:
        """down(silu(gate) * up)"""
        gate, up = halves(block.gate_up(x))
        tap(prefix + "gate", number, gate)
        tap(prefix + "up", number, up)
        act = swiglu(gate, up)
        tap(prefix + "act", number, act)
        return block.down(act)

    def sparse(self, number: int, block: Sparse, x: Float, tap: Tap) -> Float:
        """sum_k weight_k * expert_k(x) + shared(x), summed as one operation."""
        logits = block.router(x)
        tap("router_logits", number, logits)
        scores = block.scores(logits)
        tap("router_scores", number, scores)
        ids, weights = block.route(scores)
        tap("expert_ids", number, ids)
        tap("expert_weights", number, weights)
        gate, up, act, experts = block.experts(x, ids)
        tap("expert_gate", number, gate)
        tap("expert_up", number, up)
        tap("expert_act", number, act)
        tap("expert_out", number, experts)
        if block.shared is None:
            return combine(weights, experts, None)
        shared = self.dense(number, block.shared, x, tap, "shared_")
        tap("shared_out", number, shared)
        return combine(weights, experts, shared)

    def _layer(self, source: Source, number: int) -> Layer:
        c, at = self.config, f"{number}."

        def biased(*names: str) -> Product:
            full = tuple(at + name for name in names)
            return source.product(full, tuple(name + "_bias" for name in full) if c.attention_bias else ())

        return Layer(
            attn_norm=self.weights[at + "attn_norm"],
            input=biased("q_a" if c.q_rank else "q", "kv_a"),
            q_a_norm=self.weights[at + "q_a_norm"] if c.q_rank else None,
            q_b=source.product((at + "q_b",)) if c.q_rank else None,
            kv_a_norm=self.weights[at + "kv_a_norm"],
            absorb=source.heads(at + "w_kc"),
            unabsorb=source.heads(at + "w_vc"),
            o=biased("o"),
            ffn_norm=self.weights[at + "ffn_norm"],
            feed_forward=_dense(source, at) if c.is_dense(number) else self._sparse(source, number),
        )

    def _sparse(self, source: Source, number: int) -> Sparse:
        c, at = self.config, f"{number}."
        return Sparse(
            router=source.product((at + "router",)),
            scores=partial(router_scores, scoring_softmax=c.scoring == "softmax"),
            route=router(c, self.weights[at + "router_bias"] if c.scoring == "sigmoid" else None),
            experts=source.experts(number),
            shared=_dense(source, at + "shared_") if c.shared_experts else None,
        )


# ---- parts that op records share --------------------------------------------------------------------------------
def attention_scores(query: Float, keys: Float | Prepared, scale: float) -> Float:
    """query [T, H, C], keys [C, S] (transposed rows) -> scale * q.k as one operation, [T, H, S]; every key, visible or not."""
    T, H, C = query.shape
    return matmul(query.reshape(T * H, C), keys, scale).reshape(T, H, keys.shape[1])


def attention_values(probs: Float, latents: Float | Prepared) -> Float:
    """probs [T, H, S], latents [S, R] -> sum_s p_s c_s, [T, H, R]."""
    T, H, S = probs.shape
    return matmul(probs.reshape(T * H, S), latents).reshape(T, H, latents.shape[1])


def argmax(logits: Float) -> Int:
    """The lowest index among equal maxima (A1); the first NaN if there is one."""
    ids: Int = np.argmax(logits, axis=-1).astype(np.int32)
    return ids


def _dense(source: Source, prefix: str) -> Dense:
    return Dense(source.product((prefix + "gate", prefix + "up")), source.product((prefix + "down",)))


def _no_sink(name: str, layer: int, array: NDArray[Any]) -> None:
    """Nobody listens."""


# ---- session ----------------------------------------------------------------------------------------------------
class GoldenSession:
    """A model with its cache: `spec.engine.Session`. A new batch drops rows of its sequences that are still pending."""

    def __init__(self, model: GoldenModel) -> None:
        self.model = model
        self._caches: dict[int, LatentCache] = {}

    def forward(self, rows: Rows, want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> Float:
        """Logits [number of True, vocab]. Raises RowsError before anything changes."""
        config = self.model.config
        self._check(rows, want_logits)
        if not len(rows):
            return np.zeros((0, config.vocab), np.float32)

        def tap(name: str, layer: int, array: NDArray[Any]) -> None:
            if name in taps:
                sink(name, layer, np.ascontiguousarray(array))

        spans = [self._span(rows, int(sequence)) for sequence in dict.fromkeys(rows.sequence.tolist())]
        return self.model.forward(rows.token, rows.position, spans, want_logits, tap)

    def commit(self, sequence: int, path: Int) -> None:
        """Keep the pending rows named by `path`, a chain of parents from the prefix on, and drop the others (K1-K3)."""
        cache = self._cache(sequence)
        indices = np.asarray(path).tolist()
        before = -1
        for index in indices:
            if not before < index < len(cache.parents):
                raise RowsError(f"path {indices} of sequence {sequence} must ascend within its {len(cache.parents)} pending rows")
            if cache.parents[index] != before:
                raise RowsError(f"path {indices} of sequence {sequence}: row {index} has parent {cache.parents[index]}, not {before}")
            before = index
        cache.commit(np.asarray(indices, np.intp))

    def cache_rows(self, sequence: int, layer: int) -> Float:
        if not 0 <= layer < self.model.config.layers:
            raise RowsError(f"layer is {layer}, but must be between 0 and {self.model.config.layers - 1}")
        return self._cache(sequence).committed(layer)

    def evict(self, sequence: int) -> None:
        self._cache(sequence)
        del self._caches[sequence]

    def fork(self, source: int, target: int) -> None:
        """`target` starts with the committed rows of `source`; pending rows stay behind."""
        if target in self._caches:
            raise RowsError(f"sequence {target} exists: evict it before it becomes a fork of {source}")
        self._caches[target] = self._cache(source).copy()

    def generate(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits) -> list[Generation]:
        """Decodes on fresh sequences of its own: those of this session stay as they are."""
        return self._decoded(prompts, drafter, budget, limits, None)

    def sample(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits, sampling: Sampling) -> list[Generation]:
        """`generate` with drawn tokens (S1-S3)."""
        from spec.schemes import Sampler

        return self._decoded(prompts, drafter, budget, limits, Sampler(sampling))

    def _decoded(
        self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits, decider: Decider | None
    ) -> list[Generation]:
        from spec import loops  # imports the session's protocol, not this file; late, because only these methods need it

        session = self.model.open()
        if drafter is None:
            return [loops.generation(recording) for recording in loops.sequential(session, prompts, limits, decider)]
        return [loops.generation(recording) for recording in loops.ddtree(session, prompts, drafter, budget, limits, decider)]

    def close(self) -> None:
        self._caches.clear()

    def _cache(self, sequence: int) -> LatentCache:
        if sequence not in self._caches:
            raise RowsError(f"there is no sequence {sequence}; there are {sorted(self._caches)}")
        return self._caches[sequence]

    def _span(self, rows: Rows, sequence: int) -> Span:
        """Visibility over the committed prefix and the ancestors-or-self inside the batch (C3), within the window by position (M10)."""
        index = np.flatnonzero(rows.sequence == sequence)
        if sequence not in self._caches:
            self._caches[sequence] = LatentCache(self.model.config)
        cache = self._caches[sequence]
        local = np.full(len(rows), -1)
        local[index] = np.arange(len(index))
        parents = [int(local[parent]) if parent >= 0 else -1 for parent in rows.parent[index].tolist()]
        cache.start(parents, rows.position[index])
        visible = np.concatenate([np.ones((len(index), cache.length), np.bool_), ancestors(parents)], axis=1)
        if window := self.model.config.window:
            visible &= in_window(rows.position[index], cache.positions, window)
        return Span(slice(None) if len(index) == len(rows) else index, cache, visible)

    def _check(self, rows: Rows, want_logits: NDArray[np.bool_]) -> None:
        count = len(rows)
        for name, array in (
            ("sequence", rows.sequence),
            ("position", rows.position),
            ("parent", rows.parent),
            ("want_logits", want_logits),
        ):
            if np.shape(array) != (count,):
                raise RowsError(f"{name} has shape {list(np.shape(array))}, but the batch has {count} rows")
        vocab, position_max = self.model.config.vocab, self.model.rotary.position_max
        for i, (token, position, parent) in enumerate(zip(rows.token.tolist(), rows.position.tolist(), rows.parent.tolist(), strict=True)):
            if not 0 <= token < vocab:
                raise RowsError(f"row {i} has token {token}, but must be between 0 and {vocab - 1}")
            if not 0 <= position < position_max:
                raise RowsError(f"row {i} has position {position}, but must be between 0 and {position_max - 1}")
            if not -1 <= parent < i:
                raise RowsError(f"row {i} has parent {parent}, but must be -1 or an earlier row")
            if parent >= 0 and rows.sequence[parent] != rows.sequence[i]:
                raise RowsError(f"row {i} of sequence {rows.sequence[i]} has a parent in sequence {rows.sequence[parent]}")


def in_window(rows: NDArray[np.integer], keys: NDArray[np.integer], window: int) -> Mask:
    """[T, S]: keys at positions above p - window, by position and not by slot: two nodes of one depth are equally far away."""
    return np.asarray(keys[None, :] > rows[:, None] - window)


def ancestors(parents: Sequence[int]) -> Mask:
    """[M, M]: whether column j is row i itself or one of its ancestors."""
    if list(parents) == list(range(-1, len(parents) - 1)):
        return np.tri(len(parents), dtype=np.bool_)
    seen = np.eye(len(parents), dtype=np.bool_)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen
