"""The blocked engine's session: ragged batches through the layers, a paged cache, and its own decoding loops.

Rows of one sequence form a span: they share a page table and a visibility mask. Dense products run over all rows at once,
attention span by span, experts grouped by expert. Dimension letters as in points.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.blocked import ops, tree
from impls.blocked.cache import PagedCache
from impls.blocked.points import Float, Int, Overrides, Points, Span, with_overrides
from spec.config import Config
from spec.engine import Drafter, EngineError, Generation, Limits, Round, Rows, TapSink, Unsupported
from spec.sampling import Sampling
from spec.weights import Provider, checked, is_large


class BlockedSession:
    """`spec.engine.Session` on float32 NumPy. Weights are copied at construction: the caller may overwrite its own."""

    def __init__(self, config: Config, weights: Provider, overrides: Overrides) -> None:
        self._config = config
        self._overrides = overrides
        self._points: Points = with_overrides(overrides)
        p = self._points
        if is_large(config):
            raise Unsupported("this engine keeps all weights in memory, which a model of this size does not allow")
        self._weights: dict[str, Float] = {
            name: np.array(p.operand(value), np.float32, order="C") for name, value in checked(config, weights)
        }
        self._head = self._weights["head"] if not config.tied else np.ascontiguousarray(p.operand(self._weights["embed"].T))
        self._scale = np.float32(p.softmax_scale(config))
        self._frequencies = p.rope_frequencies(config)
        self._magnitude = p.rope_magnitude(config)
        self._tables = self._carried_tables if config.rope_table_len else self._computed_tables
        self._cache = PagedCache(p, config.layers, config.cache_dim, config.kv_rank)

    # Rows

    def forward(self, rows: Rows, want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> Float:
        """Logits [wanted, V]. Raises EngineError, before anything changes, for tokens, positions or parents out of range."""
        if len(rows) == 0:
            return np.zeros((0, self._config.vocab), np.float32)
        self._check(rows)
        spans, positions = self._spans(rows)
        cos, sin = self._tables(positions)

        def emit(name: str, layer: int, value: NDArray[Any]) -> None:
            if name in taps:
                sink(name, layer, value)

        stream = self._weights["embed"][rows.token]  # (T,N)
        emit("embed", -1, stream)
        for layer in range(self._config.layers):
            stream = self._attention_block(layer, stream, spans, cos, sin, emit)
            stream = self._feed_forward_block(layer, stream, emit)
        return self._logits(stream, want_logits, emit)

    def _computed_tables(self, positions: Int) -> tuple[Float, Float]:
        return self._points.rope_tables(positions, self._frequencies, self._magnitude)

    def _carried_tables(self, positions: Int) -> tuple[Float, Float]:
        """Rows of the tables that came with the weights. Raises EngineError for a position that they lack."""
        if positions.max() >= self._config.rope_table_len:
            raise EngineError(f"position {positions.max()} is beyond the carried rotary tables of {self._config.rope_table_len}")
        return self._weights["rope_cos"][positions], self._weights["rope_sin"][positions]

    def _check(self, rows: Rows) -> None:
        if rows.token.min() < 0 or rows.token.max() >= self._config.vocab:
            raise EngineError(f"tokens must be between 0 and {self._config.vocab - 1}")
        if rows.position.min() < 0:
            raise EngineError("positions must not be negative")
        numbers = np.arange(len(rows))
        bad = (rows.parent < -1) | (rows.parent >= numbers) | ((rows.parent >= 0) & (rows.sequence[rows.parent] != rows.sequence))
        if bad.any():
            raise EngineError(f"parent of row {int(np.argmax(bad))} must be an earlier row of its sequence, or -1")

    def _spans(self, rows: Rows) -> tuple[list[Span], Int]:
        """The spans in order of their first row, and the absolute positions of all rows [T]."""
        spans = []
        positions = np.empty(len(rows), np.int32)
        for sequence in dict.fromkeys(rows.sequence.tolist()):
            at = np.flatnonzero(rows.sequence == sequence)
            row = self._points.table_row(sequence)
            prefix_len = self._cache.committed(row)
            local = {index: node for node, index in enumerate(at.tolist())} | {-1: -1}
            parents = [local[parent] for parent in rows.parent[at].tolist()]
            node = np.arange(len(at), dtype=np.int32)
            positions[at] = self._points.position(prefix_len, node, rows.position[at] - np.int32(prefix_len))
            slots = self._cache.reserve(row, len(at))
            self._cache.positions[slots[prefix_len:]] = positions[at]
            seen = self._points.visible(parents, prefix_len)
            if window := self._config.window:
                seen = seen & self._points.in_window(positions[at], self._cache.positions[slots], window)
            spans.append(Span(at, prefix_len, slots, seen))
        return spans, positions

    def _attention_block(self, layer: int, stream: Float, spans: list[Span], cos: Float, sin: Float, emit: TapSink) -> Float:
        """stream + attention(norm(stream)), [T,N]."""
        p, c = self._points, self._config
        rows = len(stream)
        x = self._norm(layer, "attn_norm", stream, emit)
        if c.q_rank:
            x_q = self._norm(layer, "q_a_norm", self._product(layer, "q_a", x, emit), emit)
            q = p.gemm("q", x_q, self._of(layer, "q_b"))
        else:
            q = self._biased(layer, "q", p.gemm("q", x, self._of(layer, "q")))
        q = q.reshape(rows, c.heads, c.nope_dim + c.rope_dim)  # (T,H,n+D)
        emit("q", layer, q)
        kv = self._product(layer, "kv_a", x, emit)  # (T,R+D)
        latent = ops.rms_norm(p, kv[:, : c.kv_rank], self._of(layer, "kv_a_norm"), p.norm_eps(c, "latent"))  # (T,R)
        latent = p.to_cache(c.cache_format, latent)
        emit("latent", layer, latent)
        half = c.rope_layout == "half"
        q_rope = p.rotate("q", q[:, :, c.nope_dim :], cos, sin, half)  # (T,H,D)
        emit("q_rope", layer, q_rope)
        k_rope = p.to_cache(c.cache_format, p.rotate("k", kv[:, None, c.kv_rank :], cos, sin, half)[:, 0])  # (T,D)
        emit("k_rope", layer, k_rope)
        q_absorb = p.absorb(q[:, :, : c.nope_dim], self._of(layer, "w_kc"))  # (T,H,R)
        emit("q_absorb", layer, q_absorb)
        new_rows = np.concatenate([latent, k_rope], axis=1)  # (T,C)
        o_latent = self._attend(layer, np.concatenate([q_absorb, q_rope], axis=2), new_rows, spans, emit)  # (T,H,R)
        emit("o_latent", layer, o_latent)
        o_heads = p.unabsorb(o_latent, self._of(layer, "w_vc"))  # (T,H,v)
        emit("o_heads", layer, o_heads)
        out = self._biased(layer, "o", p.gemm("attn_out", o_heads.reshape(rows, c.heads * c.v_dim), self._of(layer, "o")))
        emit("attn_out", layer, out)
        stream = p.residual(stream, out)
        emit("attn_residual", layer, stream)
        return stream

    def _attend(self, layer: int, q: Float, new_rows: Float, spans: list[Span], emit: TapSink) -> Float:
        """Write the new cache rows, then attend span by span: q [T,H,C] -> [T,H,R]."""
        p, c = self._points, self._config
        keys_max = max(len(span.slots) for span in spans)
        raw = np.zeros((*q.shape[:2], keys_max), np.float32)  # (T,H,S)
        probs = np.zeros_like(raw)
        out = np.full((*q.shape[:2], c.kv_rank), np.nan, np.float32)  # NaN: a row that no span fills shows
        for span in spans:
            self._cache.store[layer, span.slots[span.prefix_len :]] = new_rows[span.at]
        for span in p.batch(spans):
            keys = self._cache.store[layer, span.slots]  # (S,C)
            scores = ops.scores(p, q[span.at], keys, self._scale)
            weights = ops.softmax(p, scores, span.seen, span.prefix_len)
            out[span.at] = ops.o_latent(p, weights, keys[:, : c.kv_rank])
            raw[span.at, :, : len(keys)] = scores[:, :, :keys_max]
            probs[span.at, :, : len(keys)] = weights[:, :, :keys_max]
        emit("scores", layer, raw)
        emit("probs", layer, probs)
        return out

    def _feed_forward_block(self, layer: int, stream: Float, emit: TapSink) -> Float:
        """stream + feed_forward(norm(stream)), [T,N]."""
        x = self._norm(layer, "ffn_norm", stream, emit)
        if self._config.is_dense(layer):
            out = self._gated(layer, "", x, emit)
        else:
            out = self._mixture(layer, x, emit)
            emit("ffn_out", layer, out)
        stream = self._points.residual(stream, out)
        emit("ffn_residual", layer, stream)
        return stream

    def _gated(self, layer: int, prefix: str, x: Float, emit: TapSink) -> Float:
        """down(silu(gate(x)) * up(x)) of the dense block (prefix "") or of the shared expert ("shared_")."""
        gate = self._product(layer, f"{prefix}gate", x, emit)
        up = self._product(layer, f"{prefix}up", x, emit)
        act = self._points.swiglu(gate, up)
        emit(f"{prefix}act", layer, act)
        name = f"{prefix}out" if prefix else "ffn_out"
        out = self._points.gemm(name, act, self._of(layer, f"{prefix}down"))
        emit(name, layer, out)
        return out

    def _mixture(self, layer: int, x: Float, emit: TapSink) -> Float:
        """Routed experts and the shared one, [T,N]."""
        p, c = self._points, self._config
        logits = p.gemm("router_logits", x, self._of(layer, "router"))
        emit("router_logits", layer, logits)
        scores = ops.router_scores(p, logits, c.scoring == "softmax")
        emit("router_scores", layer, scores)
        bias = self._of(layer, "router_bias") if c.scoring == "sigmoid" else np.zeros(c.experts, np.float32)
        ids, weights = ops.route(
            p, scores, bias, top_k=c.top_k, groups=c.groups, top_groups=c.top_groups, group_score_max=c.group_score == "max",
            norm_top_k=c.norm_top_k, routed_scale=c.routed_scale, denominator_eps=c.denominator_eps,
            denominator_clamp=c.denominator_clamp, group_fill_zero=c.group_fill == "zero",
        )  # fmt: skip
        emit("expert_ids", layer, ids)
        emit("expert_weights", layer, weights)
        routed = ops.experts(p, x, ids, *(self._of(layer, f"expert_{name}") for name in ("gate", "up", "down")))
        for name, value in routed.items():
            emit(f"expert_{name}", layer, value)
        shared = self._gated(layer, "shared_", x, emit) if c.shared_experts else np.zeros_like(x)
        return p.combine(weights, routed["out"], p.shared_output(shared))

    def _logits(self, stream: Float, want_logits: NDArray[np.bool_], emit: TapSink) -> Float:
        p, c = self._points, self._config
        x = ops.rms_norm(p, stream, self._weights["norm"], p.norm_eps(c, "final_norm"))
        emit("final_norm", c.layers, x)
        logits = p.gemm("logits", x[p.wanted_rows(want_logits)], self._head)
        emit("logits", c.layers, logits)
        emit("argmax", c.layers, p.argmax(logits))
        return logits

    def _of(self, layer: int, name: str) -> Float:
        return self._weights[f"{layer}.{name}"]

    def _product(self, layer: int, name: str, x: Float, emit: TapSink) -> Float:
        out = self._biased(layer, name, self._points.gemm(name, x, self._of(layer, name)))
        emit(name, layer, out)
        return out

    def _biased(self, layer: int, name: str, product: Float) -> Float:
        """product + the bias of the weight, where the model has one."""
        bias = self._weights.get(f"{layer}.{name}_bias")
        return product if bias is None else product + bias

    def _norm(self, layer: int, name: str, x: Float, emit: TapSink) -> Float:
        out = ops.rms_norm(self._points, x, self._of(layer, name), self._points.norm_eps(self._config, name))
        emit(name, layer, out)
        return out

    # Cache

    def commit(self, sequence: int, path: Int) -> None:
        """K1-K3. Raises EngineError for a path that does not ascend within the pending rows."""
        self._cache.commit(self._points.table_row(sequence), path.tolist())

    def cache_rows(self, sequence: int, layer: int) -> Float:
        return self._cache.rows(self._points.table_row(sequence), layer)

    def evict(self, sequence: int) -> None:
        self._cache.evict(self._points.table_row(sequence))

    def fork(self, source: int, target: int) -> None:
        self._cache.fork(self._points.table_row(source), self._points.table_row(target))

    def free_slots(self) -> int:
        return self._cache.free_slots()

    def close(self) -> None:
        self._weights.clear()

    # Loops

    def generate(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits) -> list[Generation]:
        """The engine's own loop on a cache of its own; without a drafter every tree is its root alone."""
        return self._decode(prompts, drafter, budget, limits, None)

    def sample(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits, sampling: Sampling) -> list[Generation]:
        """`generate` with drawn tokens. Raises EngineError for a row that is no distribution."""
        return self._decode(prompts, drafter, budget, limits, sampling)

    def _decode(
        self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits, sampling: Sampling | None
    ) -> list[Generation]:
        if any(len(prompt) == 0 for prompt in prompts):
            raise EngineError("a prompt needs at least one token")
        inner = BlockedSession(self._config, self._weights.__getitem__, self._overrides)
        streams = [_Stream(number, prompt.tolist(), limits, sampling) for number, prompt in enumerate(prompts)]
        if limits.max_new > 0 and streams:
            inner._prefill(streams)
        while active := [stream for stream in streams if stream.end is None]:
            inner._round(active, drafter, budget)
        return [stream.generation(drafter is not None) for stream in streams]

    def _prefill(self, streams: Sequence[_Stream]) -> None:
        batch = [(s.number, s.history, list(range(-1, len(s.history) - 1)), list(range(len(s.history)))) for s in streams]
        for stream, (choice, logits) in zip(streams, self._choose(batch), strict=True):
            self._cache.commit(self._points.table_row(stream.number), range(len(stream.history)))
            drawn = self._drawn(stream, [stream.history[-1]], [-1], logits[-1:])
            stream.emit(self._points, [choice[-1] if drawn is None else drawn[0]])

    def _round(self, streams: Sequence[_Stream], drafter: Drafter | None, budget: int) -> None:
        """One tree of each stream in one batch, then acceptance and commit."""
        p = self._points
        trees = [self._draft(stream, drafter, budget) for stream in streams]
        batch = []
        for stream, draft in zip(streams, trees, strict=True):
            prefix_len = len(stream.history) - 1
            batch.append((stream.number, draft.tokens, draft.parents, [prefix_len + depth for depth in draft.depths]))
        for stream, draft, (choice, logits) in zip(streams, trees, self._choose(batch), strict=True):
            drawn = self._drawn(stream, draft.tokens, draft.parents, logits)
            path, bonus = tree.accept(p, draft.tokens, draft.parents, choice if drawn is None else drawn)
            stream.rounds.append(Round(tuple(draft.tokens), tuple(draft.parents), tuple(path), bonus))
            fresh = stream.emit(p, p.emitted(path, draft.tokens, bonus))
            self._cache.commit(p.table_row(stream.number), path[:fresh])

    def _draft(self, stream: _Stream, drafter: Drafter | None, budget: int) -> tree.DraftTree:
        root = stream.history[-1]
        if drafter is None:
            return tree.DraftTree([root], [-1], [0])
        p = self._points
        logits = drafter.draft(stream.number, np.array(p.draft_history(stream.history), np.int32))
        return tree.best_first_tree(p, *tree.draft_table(p, logits, budget), budget, root)

    def _drawn(self, stream: _Stream, tokens: list[int], parents: list[int], logits: Float) -> list[int] | None:
        """The token drawn for each row, with the history of its own path; None for greedy streams. Row 0 stands at the stream's last token."""
        p, sampling = self._points, stream.sampling
        if sampling is None:
            return None
        paths: list[list[int]] = []
        out = []
        for token, parent, row in zip(tokens, parents, logits, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
            seen = p.seen_tokens(stream.history[:-1], paths[-1])
            position = len(stream.history) - 1 + len(paths[-1])
            chances = p.law(sampling, row, seen, stream.prompt_len)
            out.append(p.draw(chances, p.noise(sampling.seed, stream.number, position, len(row))))
        return out

    def _choose(self, batch: Sequence[tuple[int, list[int], list[int], list[int]]]) -> list[tuple[list[int], Float]]:
        """The argmax and the logits of every row, per sequence. batch: (sequence, tokens, parents, positions) of each."""
        sizes = [len(tokens) for _, tokens, _, _ in batch]
        starts = np.cumsum([0, *sizes])
        parents = [np.where(np.array(own) < 0, -1, np.array(own) + start) for (_, _, own, _), start in zip(batch, starts, strict=False)]
        rows = Rows(
            sequence=np.repeat(np.array([number for number, _, _, _ in batch], np.int32), sizes),
            token=np.concatenate([np.array(tokens, np.int32) for _, tokens, _, _ in batch]),
            position=np.concatenate([np.array(positions, np.int32) for _, _, _, positions in batch]),
            parent=np.concatenate(parents).astype(np.int32),
        )
        logits = self.forward(rows, np.ones(len(rows), np.bool_), frozenset(), lambda name, layer, value: None)
        choice = self._points.argmax(logits).tolist()
        return [(choice[start : start + size], logits[start : start + size]) for start, size in zip(starts, sizes, strict=False)]


class _Stream:
    """One sequence of a loop: the cache holds all of `history` but its last token, the root. `end`: emitted tokens once it is done."""

    def __init__(self, number: int, prompt: list[int], limits: Limits, sampling: Sampling | None) -> None:
        self.number = number
        self.history = prompt
        self.prompt_len = len(prompt)
        self.limits = limits
        self.sampling = sampling
        self.rounds: list[Round] = []
        self.end: int | None = 0 if limits.max_new <= 0 else None

    def emit(self, p: Points, tokens: Sequence[int]) -> int:
        """Append what a round emits, cut at the end of the stream (A4); how many tokens were kept."""
        before = len(self.history)
        self.history.extend(tokens)
        self.end = p.stream_end(self.history[self.prompt_len :], len(tokens), self.limits)
        if self.end is not None:
            del self.history[self.prompt_len + self.end :]
        return len(self.history) - before

    def generation(self, with_rounds: bool) -> Generation:
        return Generation(tuple(self.history[self.prompt_len :]), tuple(self.rounds) if with_rounds else ())
