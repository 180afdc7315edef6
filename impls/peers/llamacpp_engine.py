"""llama.cpp on the CPU (the library inside the `xllamacpp` wheel) behind the seam: prefill, decode, token trees, cache, nearly every tap.

Weight map: `gguf_weights`, a float32 GGUF in a temporary folder. Forward pass: `llama_decode` with a float32 cache and without flash attention,
both of which the library's defaults are not (`Options`). Trees: every leaf of a tree is a sequence id of llama.cpp; a node carries the ids of the
leaves below it, and a commit moves one leaf's rows to the sequence. Tap map: TAPS, tensors of the compute graph by name, copied in the evaluation
callback. Only the tap `scores` is not a tensor of the graph: it is `kq` times the softmax scale, the first product inside llama.cpp's softmax.
"""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.peers import gguf_weights
from impls.peers import llama_library as llama
from impls.peers.sequences import Span, check_descends, check_path, spans_of
from spec.config import Config
from spec.engine import Departure, Description, Drafter, EngineError, Float, Generation, Int, Limits, Profile, Rows, TapSink, Unsupported
from spec.weights import Provider

# ggml: float32 products and sums in any order, exp by polynomial, 1/sqrtf, the angle of pair i by i multiplications with theta^(-2/D)
PROFILE = Profile("llama.cpp-float32", angle_roundings=8.0, angle_roundings_per_pair=4.0)
DEPARTURES = (Departure("denominator_clamp", gguf_weights.CLAMP, "the sum of the chosen scores is clamped before the division"),)
CAPABILITIES = frozenset({"forward", "taps", "commit", "cache_rows", "fork", "evict"})
SEQUENCES_MAX = 128  # ids of llama.cpp: sequences of ours, and the leaves of every tree in a batch
POSITIONS_END = -1  # llama.cpp: to the end

# name of the graph tensor (without "-layer") -> (tap, axes that bring NumPy's view of it to the tap's order)
TAPS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "attn_norm": ("attn_norm", (2, 3)), "kv_cmpr_pe": ("kv_a", (2, 3)), "kv_cmpr": ("latent", (2, 3)), "q_pe": ("q_rope", (1, 2, 3)),
    "k_pe": ("k_rope", (1, 3)), "q_nope_absorbed": ("q_absorb", (2, 1, 3)), "kq": ("scores", (2, 1, 3)), "kq_soft_max": ("probs", (2, 1, 3)),
    "kqv": ("o_latent", (2, 1, 3)), "kqv_mla": ("o_heads", (2, 1, 3)), "attn_out": ("attn_out", (2, 3)), "ffn_inp": ("attn_residual", (2, 3)),
    "ffn_norm": ("ffn_norm", (2, 3)), "ffn_out": ("ffn_out", (2, 3)), "l_out": ("ffn_residual", (2, 3)),
    "ffn_moe_logits": ("router_logits", (2, 3)), "ffn_moe_probs": ("router_scores", (2, 3)), "ffn_moe_topk": ("expert_ids", (2, 3)),
    "ffn_moe_gate": ("expert_gate", (1, 2, 3)), "ffn_moe_up": ("expert_up", (1, 2, 3)), "ffn_moe_swiglu": ("expert_act", (1, 2, 3)),
    "ffn_moe_down": ("expert_out", (1, 2, 3)), "ffn_shexp": ("shared_out", (2, 3)), "result_norm": ("final_norm", (2, 3)),
    "result_output": ("logits", (2, 3)),
}  # fmt: skip
DENSE = {"ffn_gate": "gate", "ffn_up": "up", "ffn_swiglu": "act"}
SHARED = {"ffn_gate": "shared_gate", "ffn_up": "shared_up", "ffn_swiglu": "shared_act"}
WEIGHTS = ("ffn_moe_weights", "ffn_moe_weights_norm", "ffn_moe_weights_scaled")  # the last one that a configuration has is what is mixed
OFFERED = frozenset(
    {tap for tap, _ in TAPS.values()} | set(DENSE.values()) | set(SHARED.values()) | {"embed", "q_a", "q_a_norm", "q", "expert_weights"}
)


@dataclass(frozen=True)
class Options:
    """What a caller of llama.cpp can get wrong. The defaults here are exact float32; llama.cpp's own are type_k F16 and flash attention auto."""

    type_k: int = llama.TYPE_F32
    flash_attention: int = llama.FLASH_OFF
    yarn_betas: bool = True  # False: trust the file, as llama.cpp's own tools do
    cells: int = 1024  # rows of the cache, of all sequences together
    threads: int = 1


VARIANTS: Mapping[str, Options] = {
    "flash-attention": Options(flash_attention=llama.FLASH_ON),
    "f16-cache": Options(type_k=llama.TYPE_F16),
    "q8-cache": Options(type_k=llama.TYPE_Q8_0),
    "defaults": Options(type_k=llama.TYPE_F16, flash_attention=llama.FLASH_AUTO, yarn_betas=False),
}
"""Settings that are not float32, under a float32 profile: what a caller gets who trusts the library's defaults."""


class LlamaCppEngine:
    """`spec.engine.Engine`. Raises LibraryMismatch where the wheel is of another build than `llama_library` describes, EngineError where a tiny
    model with a tree does not give the relations that it must."""

    def __init__(self, options: Options | None = None, *, name: str = "llama.cpp") -> None:
        self._library = llama.load()
        self._options = options or Options()
        self._name = name
        check_tree(self)

    def describe(self) -> Description:
        return Description(self._name, f"xllamacpp {llama.package_version()}", PROFILE, CAPABILITIES, frozenset(), OFFERED, DEPARTURES)

    def run_op(
        self, op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float], outputs: Mapping[str, NDArray[Any]]
    ) -> None:
        raise Unsupported("llama.cpp is driven as a whole model; its operations are checked as taps")

    def open(self, config: Config, weights: Provider) -> LlamaCppSession:
        """Raises Unsupported for what a GGUF cannot say, WeightError for a bad tensor, EngineError where the library refuses the file."""
        return LlamaCppSession(self._library, config, weights, self._options)


def check_tree(engine: LlamaCppEngine) -> None:
    """The start-up self-check: two leaves of a small tree must give the logits of their two chains. A structure with a shifted boolean
    computes everything right but this (`kv_unified`). Raises EngineError."""
    from spec.config import preset
    from spec.weights import random_tensor

    config = preset("tiny", denominator_clamp=gguf_weights.CLAMP)
    rows = {
        "tree": ((5, 7, 9, 11), (-1, 0, 0, 1)),
        "chain of the first leaf": ((5, 7, 11), (-1, 0, 1)),
        "chain of the second leaf": ((5, 9), (-1, 0)),
    }
    last: dict[str, Float] = {}
    session = engine.open(config, lambda name: random_tensor(config, 0, name))
    with contextlib.closing(session):
        for sequence, (what, (tokens, parents)) in enumerate(rows.items()):
            batch = Rows(
                np.full(len(tokens), sequence, np.int32), np.array(tokens, np.int32),
                np.array([0, 1, 1, 2] if what == "tree" else range(len(tokens)), np.int32), np.array(parents, np.int32),
            )  # fmt: skip
            last[what] = session.forward(batch, np.ones(len(tokens), np.bool_), frozenset(), lambda name, layer, array: None)
    for what, leaf in (("chain of the first leaf", 3), ("chain of the second leaf", 2)):
        difference = np.abs(last["tree"][leaf] - last[what][-1]).max()
        # the same products in another order: 2**-10 of a logit of order one is thousands of float32 roundings
        if not difference < 2.0**-10:
            raise EngineError(f"self-check: the leaf of a tree differs from the {what} by {difference:.2g}: is the context's layout right?")


@dataclass(eq=False)
class _Pending:
    """Rows of the last batch of a sequence. `leaf_ids[node]` is an id of llama.cpp whose rows are the path to the node; `ids` are freed with it."""

    parents: tuple[int, ...]
    start: int  # position of the first row
    leaf_ids: list[int]
    ids: list[int]
    cells: list[int]


@dataclass(eq=False)
class _Sequence:
    base: int  # id of llama.cpp that holds the committed rows and nothing else
    end: int = -1  # position of the last committed row
    cells: list[int] = field(default_factory=list)  # of the committed rows, in logical order
    pending: _Pending | None = None


class LlamaCppSession:
    """`spec.engine.Session`: one model and one context of llama.cpp."""

    def __init__(self, library: Any, config: Config, weights: Provider, options: Options) -> None:
        self._library, self._config, self._options = library, config, options
        self._free_ids = list(range(SEQUENCES_MAX - 1, -1, -1))
        self._sequences: dict[int, _Sequence] = {}
        self._model = self._context = None
        self._recorder = _Recorder(library, config)
        self._folder = tempfile.TemporaryDirectory(prefix="paritree-gguf-")
        try:
            path = Path(self._folder.name) / "model.gguf"
            gguf_weights.write(path, config, weights)
            parameters = library.llama_model_default_params()
            parameters.gpu_layers = 0
            self._model = library.llama_model_load_from_file(str(path).encode(), parameters)
            if not self._model:
                raise EngineError("llama.cpp did not load the GGUF of this configuration")
            self._context = library.llama_init_from_model(self._model, self._context_parameters())
            if not self._context:
                raise EngineError("llama.cpp did not make a context for this configuration")
        except BaseException:
            self.close()
            raise
        self._memory = library.llama_get_memory(self._context)

    def _context_parameters(self) -> Any:
        p = self._library.llama_context_default_params()
        p.n_ctx = p.n_batch = p.n_ubatch = p.n_outputs_max = self._options.cells
        p.n_threads = p.n_threads_batch = self._options.threads
        p.type_k = p.type_v = self._options.type_k
        p.flash_attention = self._options.flash_attention
        p.n_seq_max, p.kv_unified = SEQUENCES_MAX, True
        yarn = self._config.yarn
        if yarn is not None and self._options.yarn_betas:  # the loader never reads these keys of a deepseek2 file
            p.yarn_beta_fast, p.yarn_beta_slow = yarn.beta_fast, yarn.beta_slow
        p.eval_callback = self._recorder.address
        return p

    # Rows

    def forward(self, rows: Rows, want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> Float:
        """Logits [wanted, V]. Raises EngineError for rows out of range, Unsupported for positions with a gap or too many leaves."""
        spans = spans_of(self._config, rows)
        if not spans:
            return np.zeros((0, self._config.vocab), np.float32)
        if len(rows) > self._options.cells:
            raise Unsupported(f"a batch of {len(rows)} rows does not fit in {self._options.cells} cells")
        tags: list[list[int]] = [[] for _ in range(len(rows))]
        for span in spans:
            self._admit(span, tags)
        cells = self._decode(rows, tags, taps)
        for span in spans:
            pending = self._sequences[span.sequence].pending
            assert pending is not None
            pending.cells = [cells[row] for row in span.rows.tolist()]
        logits = self._logits(len(rows))
        self._emit(spans, want_logits, taps, sink)
        return logits[want_logits]

    def _admit(self, span: Span, tags: list[list[int]]) -> None:
        """Drop what was pending, and give every row the ids of the leaves below it; a chain is an ordinary use of llama.cpp: the base id alone."""
        sequence = self._sequences.get(span.sequence)
        if sequence is None:
            sequence = self._sequences[span.sequence] = _Sequence(self._new_id())
        self._drop_pending(sequence)
        start = int(span.positions[0])
        depth = span.ancestors.sum(1) - 1
        if (sequence.cells and start != sequence.end + 1) or (span.positions != start + depth).any():
            raise Unsupported("llama.cpp keeps positions without gaps: a row must stand one after its parent or after the committed rows")
        if span.is_chain:
            ids = [sequence.base]
            below = [[sequence.base]] * len(span.parents)
            owned: list[int] = []
        else:
            ids = owned = [self._new_id() for _ in span.leaves]
            above = span.ancestors
            below = [[i for i, leaf in zip(ids, span.leaves, strict=True) if above[leaf, node]] for node in range(len(span.parents))]
            for leaf_id in ids:
                self._library.llama_memory_seq_cp(self._memory, sequence.base, leaf_id, -1, -1)
        for row, of_row in zip(span.rows.tolist(), below, strict=True):
            tags[row] = of_row
        sequence.pending = _Pending(span.parents, start, [of_row[0] for of_row in below], owned, [])

    def _decode(self, rows: Rows, tags: list[list[int]], taps: frozenset[str]) -> list[int]:
        """Run the batch; the cache cell of every row."""
        batch = self._library.llama_batch_init(len(rows), 0, max(len(of_row) for of_row in tags))
        try:
            batch.n_tokens = len(rows)
            for i, of_row in enumerate(tags):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(rows.token[i]), int(rows.position[i]), len(of_row), 1
                for j, leaf_id in enumerate(of_row):
                    batch.seq_id[i][j] = leaf_id
            self._recorder.begin(bool(taps))
            status = self._library.llama_decode(self._context, batch)
        finally:
            self._library.llama_batch_free(batch)
        if status:
            raise EngineError(f"llama_decode returned {status}")
        if self._recorder.problem is not None:
            raise self._recorder.problem
        if len(self._recorder.cells) != len(rows):
            raise EngineError(f"llama.cpp split a batch of {len(rows)} rows; only one of {len(self._recorder.cells)} was seen")
        return self._recorder.cells

    def _logits(self, count: int) -> Float:
        vocab = self._config.vocab
        return np.stack(
            [np.ctypeslib.as_array(self._library.llama_get_logits_ith(self._context, i), (vocab,)) for i in range(count)]
        ).copy()

    # Taps

    def _emit(self, spans: list[Span], want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> None:
        for (name, layer), array in self._recorder.arrays.items():
            if name not in taps:
                continue
            if name in ("scores", "probs"):
                array = self._by_key(spans, array, is_weight=name == "probs")
            elif name == "logits":
                array = array[want_logits]
            sink(name, layer, np.ascontiguousarray(array))

    def _by_key(self, spans: list[Span], by_cell: Float, *, is_weight: bool) -> Float:
        """[T, H, cells] -> [T, H, S]: the cells of a row's own sequence in logical order. Weight on any other cell goes into one more column, which
        a judge refuses: nothing is hidden by the reordering. Scores of other cells are masked later and mean nothing."""
        keys = {}
        for span in spans:
            sequence = self._sequences[span.sequence]
            assert sequence.pending is not None
            keys[span.sequence] = sequence.cells + sequence.pending.cells
        out = np.zeros((*by_cell.shape[:2], max(len(cells) for cells in keys.values()) + 1), np.float32)
        left = by_cell.copy()
        for span in spans:
            cells = keys[span.sequence]
            out[span.rows, :, : len(cells)] = by_cell[span.rows][:, :, cells]
            left[np.ix_(span.rows, np.arange(left.shape[1]), np.array(cells, np.intp))] = 0
        stray = left.sum(-1) if is_weight else np.zeros(left.shape[:2], np.float32)
        if not stray.any():
            return out[:, :, :-1]
        out[:, :, -1] = stray
        return out

    # Cache

    def commit(self, sequence: int, path: Int) -> None:
        """K1-K3. Raises EngineError for a path that does not ascend, Unsupported for one that is no path from the prefix down."""
        own = self._known(sequence)
        pending = own.pending
        kept = path.tolist()
        if pending is None:
            check_path(kept, 0)
            return
        check_path(kept, len(pending.parents))
        check_descends(kept, pending.parents)
        end = pending.start + len(kept)
        if not pending.ids:
            self._remove(own.base, end)
        elif kept:
            self._library.llama_memory_seq_cp(self._memory, pending.leaf_ids[kept[-1]], own.base, pending.start, end)
        for leaf_id in pending.ids:
            self._release(leaf_id)
        own.cells += [pending.cells[node] for node in kept]
        if kept:
            own.end = end - 1
        own.pending = None

    def cache_rows(self, sequence: int, layer: int) -> Float:
        """The rows as they lie in llama.cpp's own cache, [P, C]."""
        own = self._known(sequence)
        return self._recorder.cache(layer, own.cells)

    def evict(self, sequence: int) -> None:
        own = self._known(sequence)
        self._drop_pending(own)
        self._release(own.base)
        del self._sequences[sequence]
        if not self._sequences:  # the next rows go to the first cells again, so that equal sessions give equal bits
            self._library.llama_memory_clear(self._memory, False)

    def fork(self, source: int, target: int) -> None:
        own = self._known(source)
        if target in self._sequences:
            raise EngineError(f"sequence {target} exists: evict it before it becomes a fork of {source}")
        if own.pending is not None and not own.pending.ids and own.pending.cells:
            raise Unsupported("a fork between a batch and its commit; commit first")
        copy = _Sequence(self._new_id(), own.end, list(own.cells))
        self._library.llama_memory_seq_cp(self._memory, own.base, copy.base, -1, -1)
        self._sequences[target] = copy

    def generate(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits) -> list[Generation]:
        raise Unsupported("llama.cpp has no loop with draft trees of its own; drive it by forward and commit")

    def close(self) -> None:
        if self._context:
            self._library.llama_free(self._context)
        if self._model:
            self._library.llama_model_free(self._model)
        self._context = self._model = None
        self._folder.cleanup()

    def _known(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise EngineError(f"there is no sequence {sequence}; there are {sorted(self._sequences)}")
        return self._sequences[sequence]

    def _drop_pending(self, sequence: _Sequence) -> None:
        if sequence.pending is not None:
            if not sequence.pending.ids:
                self._remove(sequence.base, sequence.pending.start)
            for leaf_id in sequence.pending.ids:
                self._release(leaf_id)
            sequence.pending = None

    def _new_id(self) -> int:
        if not self._free_ids:
            raise Unsupported(f"more than {SEQUENCES_MAX} sequences and leaves at once")
        return self._free_ids.pop()

    def _release(self, number: int) -> None:
        self._remove(number, 0)
        self._free_ids.append(number)

    def _remove(self, number: int, start: int) -> None:
        if not self._library.llama_memory_seq_rm(self._memory, number, start, POSITIONS_END):
            raise EngineError(f"llama.cpp did not remove positions from {start} on of sequence id {number}")


class _Recorder:
    """The evaluation callback: copies tensors of the graph by name, and learns which cells the rows of a batch were written to."""

    def __init__(self, library: Any, config: Config) -> None:
        self._library, self._config = library, config
        self.callback = llama.EvalCallback(self._visit)  # kept: C holds its address
        self.address = ctypes.cast(self.callback, ctypes.c_void_p)
        self.arrays: dict[tuple[str, int], NDArray[Any]] = {}
        self.cells: list[int] = []
        self.problem: BaseException | None = None
        self._caches: dict[int, int] = {}  # layer -> address of the ggml tensor that is the cache
        self._queries: dict[int, int] = {}
        self._record = False

    def begin(self, record: bool) -> None:
        """Before a batch. `record`: copy taps; without, only the first cache write is looked at, so that the graph runs in one piece."""
        self.arrays, self.cells, self.problem, self._queries = {}, [], None, {}
        self._record = record

    def cache(self, layer: int, cells: list[int]) -> Float:
        """float32 [len(cells), C], copied out of the library's memory. Raises Unsupported for a cache of another type."""
        width = self._config.cache_dim
        if layer not in self._caches:
            return np.zeros((0, width), np.float32)
        tensor = _tensor(self._caches[layer])
        if tensor.type != llama.TYPE_F32:
            raise Unsupported("the cache of this context is not float32")
        rows: Float = _array(tensor).reshape(-1, width)[cells]
        return rows

    def _visit(self, address: int, ask: bool, _: int) -> bool:
        """True where the value is wanted (asked before the node runs) and where evaluation is to go on. Must not raise through C."""
        try:
            tensor = _tensor(address)
            name = tensor.name.decode()
            if name.startswith("cache_k_l") and self._library.ggml_op_name(tensor.op) == b"SET_ROWS":
                if not ask:
                    self._learn_cells(tensor)
                return True
            if ask:
                return self._record
            if self._record:
                self._take(name, tensor)
        except BaseException as problem:
            self.problem = self.problem or problem
        return True

    def _learn_cells(self, tensor: llama.Tensor) -> None:
        base = tensor.view_src or tensor.src[2]
        layer = int(_tensor(base).name.decode().removeprefix("cache_k_l"))
        self._caches[layer] = base
        if layer == 0:
            self.cells += [int(cell) for cell in _array(_tensor(tensor.src[1])).reshape(-1)]

    def _take(self, name: str, tensor: llama.Tensor) -> None:
        stem, _, number = name.partition("-")
        sources = [_tensor(source).name.decode() for source in tensor.src if source]
        if stem.startswith("node_") and sources and any(source.startswith("kqv_out-") for source in sources):
            stem, number = "attn_out", next(source for source in sources if source.startswith("kqv_out-")).partition("-")[2]
        if stem == "embd" or (not number and name == "embd"):
            self.arrays["embed", -1] = _array(tensor)[0, 0]
            return
        if stem in ("result_norm", "result_output"):
            number = str(self._config.layers)
        if not number.isdigit():
            return  # a view or a permutation of a tensor that has its own name
        layer = int(number)
        if stem == "q":
            self._take_query(layer, tensor)
        elif stem in DENSE:
            names = DENSE if self._config.is_dense(layer) else SHARED
            self.arrays[names[stem], layer] = _array(tensor)[0, 0]
        elif stem in WEIGHTS:
            self.arrays["expert_weights", layer] = _array(tensor).reshape(-1, self._config.top_k)
        elif stem in TAPS:
            tap, axes = TAPS[stem]
            found = _array(tensor)
            rest = tuple(axis for axis in range(llama.DIMENSIONS) if axis not in axes)
            array = found.transpose(*rest, *axes).reshape([found.shape[axis] for axis in axes])
            if tap == "scores":
                array = array * np.float32(self._config.softmax_scale)
            self.arrays[tap, layer] = array

    def _take_query(self, layer: int, tensor: llama.Tensor) -> None:
        """Three tensors of one layer are called q: after q_a, after its norm, and whole; a reshape repeats the last."""
        c = self._config
        seen = self._queries[layer] = self._queries.get(layer, 0) + 1
        names = ("q_a", "q_a_norm", "q") if c.q_rank else ("q",)
        if seen <= len(names):
            array = _array(tensor)[0, 0]
            self.arrays[names[seen - 1], layer] = array if names[seen - 1] != "q" else array.reshape(-1, c.heads, c.nope_dim + c.rope_dim)


def _tensor(address: int) -> llama.Tensor:
    return ctypes.cast(address, ctypes.POINTER(llama.Tensor)).contents


_DTYPES = {llama.TYPE_F32: np.float32, llama.TYPE_I32: np.int32, llama.TYPE_I64: np.int64}


def _array(tensor: llama.Tensor) -> NDArray[Any]:
    """A private copy, axes reversed: NumPy's last axis is ggml's first. Raises Unsupported for a quantised tensor."""
    if tensor.type not in _DTYPES:
        raise Unsupported(f"{tensor.name.decode()} has ggml type {tensor.type}, which is no float32 and no integer")
    dtype = np.dtype(_DTYPES[tensor.type])
    shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
    if 0 in shape:
        return np.zeros(shape, dtype)
    size = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = (ctypes.c_char * size).from_address(tensor.data)
    return np.ndarray(shape, dtype, memory, 0, strides).copy()
