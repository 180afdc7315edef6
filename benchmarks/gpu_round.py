"""One round of draft trees in the native CUDA engine beside transformers on the same GPU, the same weights and the same rows.

    python -m benchmarks.gpu_round [--models small-v3,tiny] [--precisions float32,bf16] [--profile]

Ours: one round (tree from draft logits on the device, verify, accept, compaction), launch by launch and as a CUDA graph. Theirs: the same
tree rows through DeepseekV3ForCausalLM with a StaticCache of exactly prefix + rows and a 4-D mask, captured as a torch.cuda.CUDAGraph with the
argmax; building, accepting and compacting a tree are not in their time. The decode step of one token is the case of one row. Times are
medians of event pairs; `round_us` is the clock from the first launch to the records on the host. A part of benchmarks/gpu.py.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.config import Config, Yarn, preset
from spec.engine import Rows
from spec.weights import philox, random_weights

REPEATS, EAGER_REPEATS = 30, 6
ROWS, PREFIXES = (1, 16, 64), (256, 2048)
EXPERTS = ("grouped_mm", "batched_mm")  # what transformers has without a loop that asks the host
# DeepSeek-V3 with its own head dimensions, narrower and shorter; a quarter of the experts chosen, so that 64 rows reach all of them
SMALL = Config(
    vocab=32_768, hidden=1024, layers=8, first_dense=1, heads=16, q_rank=768, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128, dense_dim=2816,
    experts=16, top_k=4, expert_dim=512, shared_experts=1, groups=4, top_groups=2, routed_scale=2.5, latent_eps=1e-6, rms_eps=1e-6,
    yarn=Yarn(factor=40.0, original_len=4096, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
MODELS = {"small-v3": SMALL, "tiny": dataclasses.replace(preset("tiny"), latent_eps=1e-6, rms_eps=1e-6)}


class RoundArgs(ctypes.Structure):
    """`paritree_cuda_round` of impls/cuda/host/measure.cpp."""

    _fields_ = (
        ("session", ctypes.c_void_p), ("sequence", ctypes.c_int32), ("root", ctypes.c_int32), ("block_len", ctypes.c_int64),
        ("budget", ctypes.c_int64), ("repeats", ctypes.c_int64), ("logits", ctypes.c_void_p), ("device_us", ctypes.c_void_p),
        ("round_us", ctypes.c_void_p), ("whole_us", ctypes.c_void_p), ("graph", ctypes.c_int32), ("reserved", ctypes.c_int32),
        ("tokens", ctypes.c_void_p), ("parents", ctypes.c_void_p), ("targets", ctypes.c_void_p), ("count", ctypes.c_int64),
        ("path_count", ctypes.c_int64), ("replays", ctypes.c_int64),
    )  # fmt: skip


@dataclasses.dataclass
class Tree:
    """The rows of a round: tokens, parents and targets (the engine's argmax) [N]."""

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    targets: NDArray[np.int32]


class Ours:
    """A session of the native engine with committed prefixes, one sequence each."""

    def __init__(self, path: str, precision: str, config: Config, weights: Any) -> None:
        os.environ["PARITREE_CUDA_PRECISION"] = precision
        os.environ["PARITREE_CUDA_POISON"] = ""
        from impls.native.adapter import load_library

        self._library = ctypes.CDLL(path)
        self._measure = self._library.paritree_cuda_measure_round
        self._measure.restype, self._measure.argtypes = ctypes.c_char_p, (ctypes.POINTER(RoundArgs),)
        self._config = config
        self._session = load_library(path).open(config, weights.__getitem__, options={"stream_experts": 0})

    def prefill(self, sequence: int, tokens: NDArray[np.int32]) -> None:
        count = len(tokens)
        rows = Rows(np.full(count, sequence, np.int32), tokens, np.arange(count, dtype=np.int32), np.arange(-1, count - 1, dtype=np.int32))
        self._session.forward(rows, np.zeros(count, np.bool_), frozenset(), lambda *_: None)
        self._session.commit(sequence, np.arange(count, dtype=np.int32))

    def round(self, sequence: int, root: int, rows: int, *, graph: bool, repeats: int = REPEATS) -> tuple[dict[str, Any], Tree]:
        """Medians in microseconds, and the tree. Raises RuntimeError with the engine's words."""
        depth = min(15, max(1, rows - 1))
        logits = (3 * philox("round", sequence, rows).standard_normal((depth, self._config.vocab))).astype(np.float32)
        times = {name: np.zeros(repeats) for name in ("device_us", "round_us", "whole_us")}
        tokens, parents, targets = (np.zeros(rows, np.int32) for _ in range(3))
        args = RoundArgs(
            session=self._session._handle, sequence=sequence, root=root, block_len=depth, budget=rows - 1, repeats=repeats,
            logits=logits.ctypes.data, graph=int(graph), tokens=tokens.ctypes.data, parents=parents.ctypes.data, targets=targets.ctypes.data,
            **{name: value.ctypes.data for name, value in times.items()},
        )  # fmt: skip
        problem = self._measure(ctypes.byref(args))
        if problem:
            raise RuntimeError(problem.decode())
        if args.count != rows:
            raise RuntimeError(f"the tree has {args.count} rows, not {rows}")
        medians: dict[str, Any] = {name: round(float(np.median(value)), 1) for name, value in times.items()}
        return medians | {"replays": args.replays, "accepted": args.path_count}, Tree(tokens, parents, targets)

    def close(self) -> None:
        self._session.close()


class Theirs:
    """DeepseekV3ForCausalLM on the GPU."""

    def __init__(self, config: Config, weights: Any, precision: str, experts: str) -> None:
        import torch

        from impls.peers.transformers_engine import build

        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        self._torch = torch
        model = build(config, weights.__getitem__, "sdpa")
        model.config._experts_implementation = experts
        self.model = model.to("cuda", torch.bfloat16 if precision == "bf16" else torch.float32).eval()

    def round(self, prefix: NDArray[np.int32], tree: Tree) -> dict[str, Any]:
        """Times, and the argmax and the gap between the two best logits of each row."""
        torch = self._torch
        from transformers import StaticCache

        rows, length = len(tree.tokens), len(prefix)
        cache = StaticCache(config=self.model.config, max_cache_len=length + rows)
        visible, depth = visibility(tree.parents)
        mask = np.concatenate([np.ones((rows, length), np.bool_), visible], 1)
        tokens = torch.from_numpy(tree.tokens.astype(np.int64))[None].cuda()
        positions = torch.from_numpy(length + depth)[None].cuda()
        seen = torch.from_numpy(mask)[None, None].cuda()
        additive = torch.zeros(seen.shape, dtype=self.model.dtype, device="cuda").masked_fill(~seen, torch.finfo(self.model.dtype).min)
        with torch.no_grad():
            self.model(torch.from_numpy(prefix.astype(np.int64))[None].cuda(), past_key_values=cache, use_cache=True)

            def rewind() -> None:
                for layer in cache.layers:
                    layer.cumulative_length.fill_(length)

            def call() -> Any:
                out = self.model(tokens, attention_mask=additive, position_ids=positions, past_key_values=cache, use_cache=True)
                return out.logits[0], out.logits[0].argmax(-1)

            found: dict[str, Any] = {"eager_us": round(timed(torch, call, rewind, EAGER_REPEATS), 1)}
            rewind()
            logits, ids = call()
            best = torch.topk(logits.float(), 2, dim=-1).values
            try:
                replay = captured(torch, call, rewind)
                found["graph_us"] = round(timed(torch, replay, rewind), 1)
            except Exception as problem:  # a row that cannot be captured must not lose the others
                found["graph_failure"] = f"{type(problem).__name__}: {problem}"[:300]
        return found | {"argmax": ids.cpu().numpy(), "gap": (best[:, 0] - best[:, 1]).cpu().numpy()}


def visibility(parents: NDArray[np.int32]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """[N, N] and the depth of each node."""
    visible, depth = np.eye(len(parents), dtype=np.bool_), np.zeros(len(parents), np.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
            depth[node] = depth[parent] + 1
    return visible, depth


def captured(torch: Any, call: Callable[[], Any], rewind: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            rewind()
            call()
    torch.cuda.current_stream().wait_stream(stream)
    rewind()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay  # type: ignore[no-any-return]


def timed(torch: Any, call: Callable[[], Any], rewind: Callable[[], None], repeats: int = REPEATS) -> float:
    """Median microseconds between events around `call`; `rewind` runs before them."""
    spans = []
    for number in range(repeats + 3):
        rewind()
        torch.cuda.synchronize()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        if number >= 3:
            spans.append(start.elapsed_time(stop) * 1e3)
    return float(statistics.median(spans))


def agreement(tree: Tree, argmax: NDArray[Any], gap: NDArray[Any]) -> dict[str, Any]:
    """Rows whose target is the same, and of the others the largest gap between the peer's two best logits: a tie if it is small."""
    differ = tree.targets != argmax
    return {
        "rows_equal": int((~differ).sum()),
        "rows": len(differ),
        "largest_gap_of_others": float(gap[differ].max()) if differ.any() else 0.0,
    }


Log = Callable[[str], None]
Found = dict[tuple[int, int], tuple[dict[str, Any], Tree]]  # (prefix, rows) -> the row of the report, the tree


def measured(
    path: str, models: Sequence[str], precisions: Sequence[str], log: Log, *, profile: bool = False, output: Path | None = None
) -> list[dict[str, Any]]:
    """One row for each model, precision, prefix and number of tree rows."""
    table: list[dict[str, Any]] = []
    for model in models:
        config = MODELS[model]
        weights = random_weights(config, 1)
        prefixes = {length: philox("prefix", length).integers(0, config.vocab, length).astype(np.int32) for length in PREFIXES}
        for precision in precisions:
            found = our_rounds(Ours(path, precision, config, weights), prefixes, log, profile)
            for experts in EXPERTS:
                try:
                    add_peer(Theirs(config, weights, precision, experts), experts, prefixes, found, log, profile)
                except Exception as problem:
                    log(f"transformers {experts}: {type(problem).__name__}: {problem}"[:300])
            for row, _ in found.values():
                row |= {"model": model, "precision": precision, "ratio": ratio(row)}
                row["rows_per_second"] = round(1e6 * row["rows"] / row["graph"]["device_us"])
                log(f"{model} {precision} prefix {row['prefix']} rows {row['rows']}: ratio {row['ratio']}")
                table.append(row)
            if output is not None:
                output.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")  # a run that is cut short keeps what it has
    return table


def our_rounds(ours: Ours, prefixes: dict[int, NDArray[np.int32]], log: Log, profile: bool) -> Found:
    found: Found = {}
    for length, prefix in prefixes.items():
        ours.prefill(length, prefix)
        root = int(prefix[-1])
        for rows in ROWS:
            plain, tree = ours.round(length, root, rows, graph=False)
            graph, again = ours.round(length, root, rows, graph=True)
            same = all(np.array_equal(getattr(tree, name), getattr(again, name)) for name in ("tokens", "parents", "targets"))
            found[length, rows] = {"prefix": length, "rows": rows, "plain": plain, "graph": graph, "same": same}, tree
            log(f"ours, prefix {length} rows {rows}: plain {plain}  graph {graph}  equal {same}")
            if profile and rows != 16:
                kernels(partial(ours.round, length, root, rows, graph=False, repeats=10), log)
    ours.close()
    return found


def add_peer(theirs: Theirs, experts: str, prefixes: dict[int, NDArray[np.int32]], found: Found, log: Log, profile: bool) -> None:
    import torch

    for (length, rows), (row, tree) in found.items():
        try:
            peer = theirs.round(prefixes[length], tree)
            peer |= agreement(tree, peer.pop("argmax"), peer.pop("gap"))
        except Exception as problem:
            peer = {"failure": f"{type(problem).__name__}: {problem}"[:300]}
        row.setdefault("transformers", {})[experts] = peer
        log(f"transformers {experts}, prefix {length} rows {rows}: {peer}")
        if profile and rows == ROWS[-1] and length == PREFIXES[-1]:
            kernels(partial(theirs.round, prefixes[length], tree), log)
    del theirs
    gc.collect()
    torch.cuda.empty_cache()


def ratio(row: dict[str, Any]) -> float | None:
    """Their best time in a graph over ours in a graph; above 1 ours is faster."""
    best = [peer["graph_us"] for peer in row.get("transformers", {}).values() if "graph_us" in peer]
    return round(min(best) / row["graph"]["device_us"], 2) if best else None


def kernels(call: Callable[[], Any], log: Log) -> None:
    """Device time by kernel, the largest first."""
    import torch

    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        entries = sorted(profiler.key_averages(), key=lambda entry: -entry.self_device_time_total)
        total = sum(entry.self_device_time_total for entry in entries)
        for entry in entries[:22]:
            log(
                f"    {entry.self_device_time_total / max(total, 1e-9):6.1%} {entry.self_device_time_total / max(entry.count, 1):9.1f} us x {entry.count:5d}  {entry.key[:90]}"
            )
    except Exception as problem:
        log(f"    no profile: {type(problem).__name__}: {problem}"[:300])


def main(arguments: Sequence[str] | None = None) -> int:
    from impls.cuda import build

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_round", description=__doc__)
    parser.add_argument("--models", default="small-v3,tiny")
    parser.add_argument("--precisions", default="float32,bf16")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--profile", action="store_true", help="device time by kernel")
    chosen = parser.parse_args(arguments)
    table = measured(
        str(build.library()),
        chosen.models.split(","),
        chosen.precisions.split(","),
        lambda text: print(text, flush=True),
        profile=chosen.profile,
        output=chosen.output,
    )
    print(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
