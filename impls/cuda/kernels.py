"""The kernels as functions on device arrays: grids, strides, workspaces, and which form of a kernel serves which sizes.

Nothing here touches host data. T = rows, H = heads, R = kv_rank, C = R + rope_dim, S = keys, E = experts, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from impls.cuda.device import Array, Device
from spec.engine import Unsupported
from spec.sampling import Sampling

LAUNCH_ROWS_MAX = 65535  # of the second and third dimension of a grid
WORKSPACE_MAX = 64 << 20  # bytes, of one attention call
TILED_RANK, TILED_WIDTH, TILED_KEYS = 512, 576, 64  # the largest tile of keys


class Form(NamedTuple):
    """A tiled attention kernel: its name, its shared memory (asserted in its file), the query rows and threads of a block."""

    kernel: str
    shared_bytes: int
    rows: int = 64
    threads: int = 256


TILED = Form("tree_attention_tiled_f32", 100_864)  # FMA
RESIDENT = Form("tree_attention_resident_f32", 231_936)
SPLIT16, SPLIT32 = Form("tree_attention_split16_f32", 97_792, 32), Form("tree_attention_split32_f32", 226_560, 32, 512)  # tensor cores
MMA16, MMA32 = Form("tree_attention_mma_bf16", 57_344), Form("tree_attention_mma32_bf16", 113_152)
WGMMA = Form("tree_attention_wgmma_bf16", 231_424)  # sm_90a only
WGMMA_PAIR = Form("tree_attention_wgmma_pair_bf16", 231_424)  # the same for exactly two splits
SHARED_PORTABLE = 101_376  # bytes a block on sm_120
DRAFT_BINS, DRAFT_SORT, DRAFT_CHUNK = 4096, 4096, 8192  # draft_table.cuh: of draft_table_once
SELECT_PATHS = 1024  # tree.cuh: the least capacity of best_first_select
DEPTH_MAX, BUDGET_MAX = 20, 1024  # tree.cuh
SAMPLE_CHUNK, SAMPLE_PART, SAMPLE_SCRATCH = 4096, 48, 34_688  # sampling.cuh: tokens of a chunk, bytes; asserted there
SAMPLE_BLOCKS = 4  # of the race, about, on each multiprocessor: measured on an H200, of 4, 8 and 16
ANY_KEYS, ANY_BLOCKS = 128, 4  # tree_attention_any.cuh: keys of a round; blocks for each multiprocessor
FEW_ROWS = 8
GROUPED_ROWS, GROUPED_FEW = 32, (2, 8, 16)  # moe.cuh: rows of a tile


@dataclass(frozen=True)
class Pages:
    """Row r of a sequence stands in slot table[r // size] * size + r % size."""

    table: Array  # [pages] int32, on the device
    size: int


@dataclass(frozen=True)
class Draws:
    """What a draw follows besides its row of logits: the rule, and the history of each stream, all on the device (sampling.cuh).

    `rule`: 80 bytes; `bias_tokens`, `biases`: the pairs of logit_bias; `history`: tokens of all streams; `streams` [N, 4]: first token in
    `history`, length, length of the prompt, number of the request.
    """

    rule: Array
    bias_tokens: Array
    biases: Array
    history: Array
    streams: Array


class Kernels:
    """`forms`: "fast", or "plain" for the first version of every kernel that has several."""

    def __init__(self, device: Device, forms: str = "fast") -> None:
        if forms not in ("fast", "plain"):
            raise ValueError(f"forms is {forms!r}, but must be fast or plain")
        self.device = device
        self.plain = forms == "plain"
        self._counters: Array | None = None
        self.float32_form = SPLIT32 if device.shared_max >= SPLIT32.shared_bytes else SPLIT16
        self.mma_form = WGMMA if device.warpgroups else MMA32 if device.shared_max >= MMA32.shared_bytes else MMA16

    # Rows

    def embed(self, table: Array, ids: Array) -> Array:
        out = self.device.empty((len(ids), table.shape[1]), np.float32)
        if out.size:
            self.device.launch("embed_f32", (len(ids),), 128, (table, ids, out, table.shape[1]))
        return out

    def add(self, a: Array, b: Array) -> Array:
        out = self.device.empty(a.shape, np.float32)
        self._over("add_f32", a.size, (a, b, out, np.int64(a.size)))
        return out

    def swiglu(self, gate: Array, up: Array) -> Array:
        out = self.device.empty(gate.shape, np.float32)
        self._over("swiglu_f32", gate.size, (gate, up, out, np.int64(gate.size)))
        return out

    def rope(self, x: Array, cos: Array, sin: Array, half_layout: bool, out: Array | None = None) -> Array:
        """x [T, H, D], and `out` if given, may be slices of wider rows; their last axis is contiguous."""
        rows, heads, width = x.shape
        if out is None:
            out = self.device.empty(x.shape, np.float32)
        count = rows * heads * (width // 2)
        self._over(
            "rope_f32",
            count,
            (x, _step(x, 0), _step(x, 1), cos, sin, out, _step(out, 0), _step(out, 1), rows, heads, width // 2, int(half_layout)),
        )
        return out

    def rms_norm(self, x: Array, gain: Array, eps: float, out: Array | None = None) -> Array:
        """x [T, N], and `out` if given, may be slices of wider rows."""
        if out is None:
            out = self.device.empty(x.shape, np.float32)
        if out.size:
            threads = min(256, _round_up(x.shape[1], 32))
            self.device.launch("rms_norm_f32", (x.shape[0],), threads, (x, _step(x, 0), gain, float(eps), out, _step(out, 0), x.shape[1]))
        return out

    def combine(self, weights: Array, experts: Array, shared: Array | None) -> Array:
        rows, chosen, width = experts.shape
        out = self.device.empty((rows, width), np.float32)
        if out.size:
            self.device.launch("combine_f32", (rows,), 128, (weights, experts, shared, out, chosen, width))
        return out

    # Matrix products

    def matmul(self, x: Array, w: Array, *, transposed: bool = False, scale: float = 1.0, out: Array | None = None) -> Array:
        """scale * x @ w, or x @ w.T with w [N, K]; x [T, K] may be a slice of wider rows."""
        cols = w.shape[0] if transposed else w.shape[1]
        if out is None:
            out = self.device.empty((x.shape[0], cols), np.float32)
        self._gemm(x, _step(x, 0), 0, w, _step(w, 0), 0, out, _step(out, 0), 0, x.shape[0], cols, x.shape[1], 1, transposed, scale)
        return out

    def per_head(self, x: Array, w: Array, out: Array | None = None) -> Array:
        """out[t, h] = x[t, h] @ w[h]: x [T, H, K] and `out` [T, H, N] may be slices of wider rows, w is [H, K, N]."""
        rows, heads, inner = x.shape
        cols = w.shape[2]
        if out is None:
            out = self.device.empty((rows, heads, cols), np.float32)
        self._gemm(
            x, _step(x, 0), _step(x, 1), w, cols, inner * cols, out, _step(out, 0), _step(out, 1), rows, cols, inner, heads, False, 1.0
        )
        return out

    def _gemm(
        self, a: Array, a_row: int, a_batch: int, b: Array, b_row: int, b_batch: int, c: Array, c_row: int, c_batch: int,
        rows: int, cols: int, inner: int, batches: int, transposed: bool, scale: float,
    ) -> None:  # fmt: skip
        if rows == 0 or cols == 0 or batches == 0:
            return
        arguments = (
            a, a_row, np.int64(a_batch), b, b_row, np.int64(b_batch), c, c_row, np.int64(c_batch), rows, cols, inner, float(scale),
        )  # fmt: skip
        suffix = "_nt_f32" if transposed else "_f32"
        if self.plain:
            self.device.launch(f"matmul_plain{suffix}", (-(-cols // 128), rows, batches), 128, arguments)
        elif rows <= FEW_ROWS and not transposed:
            self.device.launch("matmul_rows_f32", (-(-cols // 32), 1, batches), 256, arguments)
        else:
            self.device.launch(f"matmul_tiled{suffix}", (-(-cols // 64), -(-rows // 64), batches), 256, arguments)

    def matmul_int4(self, x: Array, packed: Array, scales: Array) -> Array:
        """x [T, K] against int4 weights in groups of 32: packed [K / 8, N] words, scales [K / 32, N] float32."""
        rows, inner = x.shape
        cols = packed.shape[1]
        if inner % 32 or packed.shape[0] * 8 != inner or scales.shape != (inner // 32, cols):
            raise ValueError(f"x {x.shape}, packed {packed.shape} and scales {scales.shape} do not fit: groups of 32 rows of K are needed")
        out = self.device.empty((rows, cols), np.float32)
        if self.plain:
            self.device.launch("matmul_int4_plain", (-(-cols // 128), rows), 128, (x, packed, scales, out, rows, cols, inner))
        else:
            self.device.launch("matmul_int4_rows", (-(-cols // 64), -(-rows // 8)), 256, (x, packed, scales, out, rows, cols, inner))
        return out

    # Attention

    def scores(self, q: Array, keys: Array, scale: float) -> Array:
        """q [T, H, C], keys [S, C] -> [T, H, S]."""
        rows, heads, width = q.shape
        return self.matmul(q.reshape(rows * heads, width), keys, transposed=True, scale=scale).reshape(rows, heads, len(keys))

    def softmax(self, scores: Array, visible: Array) -> Array:
        """scores [T, H, S], visible [T, S] uint8."""
        rows, heads, keys = scores.shape
        out = self.device.empty(scores.shape, np.float32)
        if out.size:
            self.device.launch("softmax_f32", (rows * heads,), 128, (scores, visible, out, heads, keys, keys, keys))
        return out

    def o_latent(self, probs: Array, latent: Array) -> Array:
        """probs [T, H, S], latent [S, R] (may be a slice of wider rows) -> [T, H, R]."""
        rows, heads, keys = probs.shape
        rank = latent.shape[1]
        out = self.device.empty((rows, heads, rank), np.float32)
        if out.size:
            self.device.launch(
                "o_latent_f32", (rows * heads,), 128, (probs, keys, latent, None, 1, _step(latent, 0), out, rank, keys, rank)
            )
        return out

    def pack_mask(self, visible: Array) -> tuple[Array, Array]:
        """visible [T, S] uint8 -> bits [T, ceil(S / 32)] uint32, and the keys that some row sees as bits [ceil(S / 32)]."""
        rows, keys = visible.shape
        words = -(-keys // 32)
        bits, seen = self.device.empty((rows, words), np.uint32), self.device.zeros((words,), np.uint32)
        if bits.size:
            self.device.launch("pack_mask", (rows,), 128, (visible, bits, seen, keys))
        return bits, seen

    def cast_bf16(self, x: Array) -> Array:
        """The nearest bfloat16 of each float32, as uint16."""
        out = self.device.empty(x.shape, np.uint16)
        self._over("cast_bf16", x.size, (x, out, np.int64(x.size)))
        return out

    def tree_attention(
        self, q: Array, cache: Array, bits: Array, prefix_len: int, keys: int, kv_rank: int, scale: float, *, pages: Pages | None = None,
        seen: Array | None = None,
    ) -> Array:  # fmt: skip
        """q [T, H, C] against the first `keys` rows of a cache [slots, C], both float32, or both bfloat16 as uint16 -> float32 [T, H, R].

        The first prefix_len keys are seen by every row, the others by `bits`; `seen`: bits of those that some row sees, None: all of them.
        """
        rows, heads, width = q.shape
        narrow = q.dtype == np.uint16
        out = self.device.empty((rows, heads, kv_rank), np.float32)
        if out.size == 0:
            return out
        table, size = (None, 1) if pages is None else (pages.table, pages.size)
        words = bits.shape[1]
        query_rows = rows * heads
        if self.plain:
            self.device.launch(
                "tree_attention_plain_bf16" if narrow else "tree_attention_plain_f32", (query_rows,), 128,
                (q, cache, table, size, bits, words, heads, kv_rank, width, prefix_len, keys, float(scale), out, None),
                4 * (width + 128 + 4),
            )  # fmt: skip
            return out
        if (kv_rank, width) != (TILED_RANK, TILED_WIDTH):
            splits, per_split = self.splits_of_any(query_rows, kv_rank, keys)
            part_out = self.device.empty((splits, query_rows, kv_rank), np.float32) if splits > 1 else None
            part_stat = self.device.empty((splits, query_rows, 2), np.float32) if splits > 1 else None
            columns = min(ANY_KEYS, 1 << (kv_rank - 1).bit_length())
            self.device.launch(
                "tree_attention_any_bf16" if narrow else "tree_attention_any_f32", (query_rows, splits), ANY_KEYS,
                (q, cache, table, size, bits, words, heads, kv_rank, width, prefix_len, keys, per_split, float(scale), out, part_out, part_stat, None),
                4 * (3 * ANY_KEYS + width + 4 + ANY_KEYS // columns * kv_rank),
            )  # fmt: skip
            if splits > 1:
                self.device.launch("tree_attention_any_merge", (query_rows,), 128, (part_out, part_stat, splits, query_rows, kv_rank, out))
            return out
        form = self.mma_form if narrow else self.float32_form
        splits, per_split = self.splits(query_rows, keys, form.rows)
        if form == WGMMA and splits == 2 and self.device.clusters:
            form = WGMMA_PAIR
        joined = splits == 1 or form == WGMMA_PAIR  # by the kernel itself
        part_out = part_stat = None
        if not joined:
            part_out = self.device.empty((splits, query_rows, kv_rank), np.float32)
            part_stat = self.device.empty((splits, query_rows, 2), np.float32)
        self.device.launch(
            form.kernel, (-(-query_rows // form.rows), splits), form.threads,
            (q, cache, table, size, bits, words, seen, heads, query_rows, prefix_len, keys, per_split, float(scale), out, part_out, part_stat, None),
            form.shared_bytes,
        )  # fmt: skip
        if not joined:
            self.device.launch("tree_attention_merge_f32", (query_rows,), 128, (part_out, part_stat, splits, query_rows, kv_rank, out))
        return out

    def splits_of_any(self, query_rows: int, kv_rank: int, keys: int) -> tuple[int, int]:
        """The same for sizes that have no tiled form: ANY_KEYS keys a part or more, up to some blocks for each multiprocessor."""
        wanted = max(1, ANY_BLOCKS * self.device.processors // query_rows)
        room = max(1, WORKSPACE_MAX // (4 * query_rows * (kv_rank + 2)))
        each = _round_up(-(-keys // min(wanted, room)), ANY_KEYS)
        return max(1, -(-keys // each)), each

    def splits(self, query_rows: int, keys: int, rows: int) -> tuple[int, int]:
        """(parts of the keys, keys a part): enough blocks of `rows` query rows for the device, at least two tiles a part, and workspace within
        WORKSPACE_MAX."""
        tiles = -(-query_rows // rows)
        wanted = max(1, self.device.processors // tiles)
        room = max(1, WORKSPACE_MAX // (4 * query_rows * (TILED_RANK + 2)))
        splits = max(1, min(wanted, room, -(-keys // (2 * TILED_KEYS))))
        per_split = _round_up(-(-keys // splits), TILED_KEYS)
        return max(1, -(-keys // per_split)), per_split

    # Experts

    def router_scores(self, logits: Array, over_all: bool) -> Array:
        out = self.device.empty(logits.shape, np.float32)
        if out.size:
            self.device.launch("router_scores_f32", (logits.shape[0],), 128, (logits, out, logits.shape[1], int(over_all)))
        return out

    def route(
        self, scores: Array, bias: Array | None, *, top_k: int, groups: int, top_groups: int, group_score_max: bool, norm_top_k: bool,
        routed_scale: float, denominator_eps: float, group_fill_zero: bool = False, denominator_clamp: float = 0.0,
    ) -> tuple[Array, Array]:  # fmt: skip
        rows, experts = scores.shape
        ids, weights = self.device.empty((rows, top_k), np.int32), self.device.empty((rows, top_k), np.float32)
        if rows:
            self.device.launch(
                "route_f32", (rows,), 32,
                (scores, bias, ids, weights, experts, top_k, groups, top_groups, int(group_score_max), int(norm_top_k), float(routed_scale),
                 float(denominator_eps), int(group_fill_zero), float(denominator_clamp)),
                4 * (experts + groups + top_k),
            )  # fmt: skip
        return ids, weights

    def experts(self, x: Array, ids: Array, gate: Array, up: Array, down: Array) -> dict[str, Array]:
        """gate, up, act [T, K, F] and out [T, K, N] of the chosen experts ids [T, K]."""
        rows, chosen = ids.shape
        experts = len(gate)
        pairs = rows * chosen
        starts, order = self.device.empty((experts + 1,), np.int32), self.device.empty((pairs,), np.int32)
        if pairs:
            self.device.launch("moe_group", (1,), min(1024, 32 * experts), (ids, starts, order, pairs, experts), 4 * (experts + 1))

        few = GROUPED_FEW[0] if pairs <= experts else GROUPED_FEW[1] if pairs <= GROUPED_FEW[1] * experts else GROUPED_FEW[2]

        def grouped(a: Array, divisor: int, w: Array) -> Array:
            inner, cols = w.shape[1:]
            out = self.device.empty((rows, chosen, cols), np.float32)
            if out.size and pairs <= GROUPED_ROWS * experts and not self.plain:
                tiles = min(pairs, experts) + pairs // few
                self.device.launch(
                    f"matmul_grouped_rows{few}_f32", (-(-cols // (32 if few == GROUPED_FEW[0] else 64)), tiles, 1), 256,
                    (a, divisor, w, None, starts, order, out, None, experts, cols, inner),
                )  # fmt: skip
            elif out.size:
                tiles = min(pairs, experts) + pairs // GROUPED_ROWS
                self.device.launch(
                    "matmul_grouped_f32", (-(-cols // 64), tiles), 256, (a, divisor, w, starts, order, out, experts, cols, inner)
                )
            return out

        gate_out, up_out = grouped(x, chosen, gate), grouped(x, chosen, up)
        act = self.swiglu(gate_out, up_out)
        return {"gate": gate_out, "up": up_out, "act": act, "out": grouped(act, 1, down)}

    # Trees

    def argmax(self, logits: Array) -> Array:
        rows, vocab = logits.shape
        ids = self.device.empty((rows,), np.int32)
        if not rows:
            return ids
        splits = min(64, -(-vocab // 4096))
        if self.plain or splits < 2:
            self.device.launch("argmax_f32", (rows,), 256, (logits, ids, vocab))
            return ids
        partial = self.device.empty((rows, splits), np.uint64)
        self.device.launch("argmax_split_f32", (rows, splits), 256, (logits, partial, vocab))
        self.device.launch("argmax_join", (rows,), 32, (partial, ids, splits))
        return ids

    def draws(self, sampling: Sampling, histories: Sequence[Sequence[int]], prompt_lens: Sequence[int], numbers: Sequence[int]) -> Draws:
        """One stream for each history, which is everything before the token that is drawn (A6)."""
        rule = np.zeros(10, np.float64)
        rule[:6] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        words = rule.view(np.uint64)
        words[6:] = (sampling.top_k, sampling.seed, int(sampling.top_k_ties == "all"), len(sampling.logit_bias))
        lengths = [len(history) for history in histories]
        starts = np.cumsum([0, *lengths])[:-1]
        streams = np.array([starts, lengths, prompt_lens, numbers], np.int32).T
        bias_tokens = np.array([token for token, _ in sampling.logit_bias], np.int32)
        biases = np.array([bias for _, bias in sampling.logit_bias], np.float64)
        history = np.array([token for own in histories for token in own], np.int32)
        arrays: tuple[NDArray[Any], ...] = (rule, bias_tokens, biases, history, np.ascontiguousarray(streams))
        return Draws(*map(self.device.upload, arrays))

    def sample(
        self, logits: Array, draws: Draws, status: Array, *, tokens: Array | None = None, parents: Array | None = None, count: Array | None = None
    ) -> Array:  # fmt: skip
        """ids [T] of logits [T, V], T a multiple of the streams; rows past a stream's `count` are -1. With `parents` (and `tokens`) [N, M] the M
        rows of a stream are the nodes of a tree, and a row follows the path of its node; else a stream has one row."""
        rows, vocab = logits.shape
        ids = self.device.empty((rows,), np.int32)
        if not rows:
            return ids
        nodes = 1 if parents is None else parents.shape[1]
        operands = (
            logits, draws.rule, draws.bias_tokens, draws.biases, draws.history, draws.streams, tokens, parents, count, nodes, nodes, vocab,
        )  # fmt: skip
        if self.plain:
            self.device.launch("sample_plain", (rows,), 512, (*operands, ids, status), SAMPLE_SCRATCH)
            return ids
        chunks = -(-vocab // SAMPLE_CHUNK)
        each = -(-chunks * rows // (SAMPLE_BLOCKS * self.device.processors))
        blocks = -(-chunks // each)
        parts = self.device.empty((rows, blocks, SAMPLE_PART), np.uint8)
        self.device.launch("sample_race", (blocks, rows), 256, (*operands, parts))
        self.device.launch("sample_finish", (rows,), 512, (*operands, parts, blocks, ids, status), SAMPLE_SCRATCH)
        return ids

    def draft_table(self, logits: Array, width: int, status: Array) -> tuple[Array, Array]:
        """ids and log_probs [L, width] of logits [L, V]; width <= V. Raises Unsupported above BUDGET_MAX candidates."""
        depths, vocab = logits.shape
        if width > BUDGET_MAX:
            raise Unsupported(f"{width} candidates a depth are asked for, but these kernels hold {BUDGET_MAX}")
        ids, log_probs = self.device.empty((depths, width), np.int32), self.device.empty((depths, width), np.float32)
        if depths == 0:
            return ids, log_probs
        if self.plain:
            self.device.launch("draft_table_plain", (depths,), 256, (logits, ids, log_probs, status, vocab, width))
            return ids, log_probs
        blocks = -(-vocab // DRAFT_CHUNK)
        parts = self.device.empty((depths, blocks, 2), np.float32)
        candidates = self.device.empty((depths, vocab), np.uint64)
        wide = vocab % 4 == 0 and _step(logits, 0) % 4 == 0  # every buffer begins at a multiple of 16 bytes
        self.device.launch(
            "draft_table_once", (blocks, depths), 512,
            (logits, ids, log_probs, parts, candidates, self._draft_counters(depths), status, vocab, width, int(wide)), 8 * DRAFT_SORT,
        )  # fmt: skip
        return ids, log_probs

    def _draft_counters(self, depths: int) -> Array:
        """Zero before a call of draft_table_once and zero again after it, so that it is made once."""
        if self._counters is None or len(self._counters) < depths:
            self._counters = self.device.zeros((max(depths, DEPTH_MAX), DRAFT_BINS + 2), np.uint32)
        return self._counters

    def best_first_tree(self, ids: Array, log_probs: Array, budget: int, root: int, status: Array) -> tuple[Array, Array, Array, Array]:
        """tokens, parents, depths [budget + 1] and count [1]. Raises Unsupported above BUDGET_MAX nodes or DEPTH_MAX depths."""
        depth_max, width = ids.shape
        if budget > BUDGET_MAX or depth_max > DEPTH_MAX:
            raise Unsupported(f"budget {budget} and {depth_max} depths are asked for, but these kernels hold {BUDGET_MAX} and {DEPTH_MAX}")
        tokens, parents, depths = (self.device.empty((budget + 1,), np.int32) for _ in range(3))
        count = self.device.empty((1,), np.int32)
        frontier = 72 * _round_up(budget + 1, 32)
        held = (
            depth_max * width if frontier + 4 * depth_max * width <= SHARED_PORTABLE - 1024 else 0
        )  # the kernel's own variables: below 1 KiB
        if not self.plain:
            paths = SELECT_PATHS
            while paths < 2 * budget:
                paths *= 2
            table = 4 * depth_max * width
            near = 17 * paths + table <= SHARED_PORTABLE - 1024
            self.device.launch(
                "best_first_select", (1,), 512,
                (ids, log_probs, depth_max, width, budget, root, tokens, parents, depths, count, status, int(near), paths, None),
                max(frontier, 17 * paths + (table if near else 0)),
            )  # fmt: skip
            return tokens, parents, depths, count
        self.device.launch(
            "best_first_tree", (1,), 256, (ids, log_probs, depth_max, width, budget, root, tokens, parents, depths, count, status, held, None),
            frontier + 4 * held,
        )  # fmt: skip
        return tokens, parents, depths, count

    def tree_mask(
        self, parents: Array, prefix_len: int, status: Array, *, count: Array | None = None, with_bytes: bool = True
    ) -> tuple[Array, Array, Array | None]:
        """positions [M], bits [M, ceil(M / 32)] of the tree's own columns, visible [M, P + M] uint8."""
        rows = len(parents)
        words = -(-rows // 32)
        positions, bits = self.device.empty((rows,), np.int32), self.device.empty((rows, words), np.uint32)
        visible = self.device.empty((rows, prefix_len + rows), np.uint8) if with_bytes else None
        if rows:
            self.device.launch(
                "tree_mask", (rows,), 128, (parents, count, rows, prefix_len, positions, bits, visible, status, None), 4 * words
            )
        return positions, bits, visible

    def accept(
        self, tokens: Array, parents: Array, target: Array, status: Array, *, count: Array | None = None, check: bool = True
    ) -> tuple[Array, Array, Array]:
        """path [M], length [1], bonus [1]."""
        rows = len(tokens)
        path, length, bonus = (self.device.empty((n,), np.int32) for n in (rows, 1, 1))
        threads = min(1024, _round_up(rows, 32))
        self.device.launch(
            "accept_greedy", (1,), threads, (tokens, parents, target, count, rows, int(check), path, length, bonus, status), 4 * rows
        )
        return path, length, bonus

    def compact_copy(self, cache: Array, path: Array, prefix_len: int) -> Array:
        """out [prefix_len + len(path), C]."""
        width = cache.shape[1]
        out = self.device.empty((prefix_len + len(path), width), np.float32)
        if out.size:
            self.device.launch("compact_copy", (len(out),), 128, (cache, path, out, prefix_len, width))
        return out

    def compact_layers(self, store: Array, path: Array, kept: Array, prefix_len: int, pages: Pages | None = None) -> None:
        """In place in store [layers, slots, C] (32-bit elements): rows prefix_len + path[j], j < kept[0], move to prefix_len + j."""
        layers, slots, width = store.shape
        table, size = (None, 1) if pages is None else (pages.table, pages.size)
        self.device.launch(
            "compact_layers",
            (-(-width // 64), layers),
            64,
            (store, np.int64(slots * width), table, size, path, kept, prefix_len, width, None),
        )

    def _over(self, kernel: str, count: int, arguments: tuple[object, ...]) -> None:
        """A grid-stride kernel over `count` elements."""
        if count:
            self.device.launch(kernel, (min(-(-count // 256), 32 * self.device.processors),), 256, arguments)


def _step(array: Array, axis: int) -> int:
    """Stride of an axis, in elements of four bytes."""
    return int(array.strides[axis]) // 4


def _round_up(value: int, unit: int) -> int:
    return max(unit, -(-value // unit) * unit)
