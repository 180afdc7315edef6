"""What torch needs for the same attention on the same GPU: SDPA with heads folded into rows, compiled flex_attention, and cuBLAS with a
softmax in between. A part of benchmarks/gpu.py.

Every peer computes softmax(scale * q . cache) @ cache[:, :512] over visible keys, from the same arrays as the kernels. A peer that fails
is recorded with its error.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu_timing import HEADS, RANK, SCALE, SHAPES, WIDTH


def all_peers(log: Callable[[str], None]) -> list[dict[str, Any]]:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    out = []
    for prefix, nodes in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(prefix)
            q = torch.randn(nodes, HEADS, WIDTH, device="cuda", dtype=dtype)
            cache = torch.randn(prefix + nodes, WIDTH, device="cuda", dtype=dtype)
            visible = random_visibility(torch, prefix, nodes)
            for name, make in (
                ("cuBLAS + softmax + cuBLAS", by_products),
                ("SDPA, heads folded", by_sdpa),
                ("flex_attention, compiled", by_flex),
            ):
                row: dict[str, Any] = {"name": name, "dtype": str(dtype).removeprefix("torch."), "prefix": prefix, "nodes": nodes}
                try:
                    call = make(torch, q, cache, visible)
                    right = reference(torch, q, cache, visible)
                    found = call()[: right.shape[0]].double()
                    row["error"] = float(torch.linalg.norm(found - right) / torch.linalg.norm(right))
                    row["median_us"] = time_torch(torch, call)
                    row["graph_us"] = time_torch(torch, captured(torch, call))
                    log(
                        f"{name:28s} {row['dtype']:9s} prefix {prefix}, nodes {nodes}: {row['median_us']:10.1f} us, in a graph {row['graph_us']:10.1f} us, error {row['error']:.1e}"
                    )
                except Exception as problem:  # whatever a peer raises is its answer
                    row["failure"] = f"{type(problem).__name__}: {str(problem)[:300]}"
                    log(f"{name:28s} {row['dtype']:9s} prefix {prefix}, nodes {nodes}: {row['failure'][:120]}")
                out.append(row)
                torch.cuda.empty_cache()
    return out


def random_visibility(torch: Any, prefix: int, nodes: int) -> Any:
    rng = np.random.default_rng(nodes)
    seen = np.zeros((nodes, prefix + nodes), bool)
    seen[:, :prefix] = True
    for row in range(nodes):
        if row:
            parent = int(rng.integers(max(0, row - 12), row))
            seen[row, prefix:] = seen[parent, prefix:]
        seen[row, prefix + row] = True
    return torch.from_numpy(seen).cuda()


def reference(torch: Any, q: Any, cache: Any, visible: Any) -> Any:
    """float64, row 0 only: [1, H, R]."""
    scores = torch.einsum("hc,sc->hs", q[0].double(), cache.double()) * float(np.float32(SCALE))
    weights = torch.softmax(scores.masked_fill(~visible[0], float("-inf")), -1)
    return (weights @ cache[:, :RANK].double())[None]


def by_products(torch: Any, q: Any, cache: Any, visible: Any) -> Callable[[], Any]:
    rows, heads = q.shape[:2]

    def call() -> Any:
        scores = (q.reshape(rows * heads, WIDTH) @ cache.T).view(rows, heads, -1).mul_(SCALE)
        weights = torch.softmax(scores.masked_fill_(~visible[:, None], float("-inf")), -1)
        return (weights.view(rows * heads, -1) @ cache[:, :RANK]).view(rows, heads, RANK)

    return call


def by_sdpa(torch: Any, q: Any, cache: Any, visible: Any) -> Callable[[], Any]:
    rows, heads = q.shape[:2]
    mask = visible[:, None].expand(rows, heads, visible.shape[1]).reshape(1, 1, rows * heads, -1)
    k, v = cache[None, None], cache[None, None, :, :RANK]
    folded = q.reshape(1, 1, rows * heads, WIDTH)

    def call() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=SCALE).view(rows, heads, RANK)

    return call


def by_flex(torch: Any, q: Any, cache: Any, visible: Any) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, heads = q.shape[:2]
    folded = q.reshape(1, 1, rows * heads, WIDTH)
    k, v = cache[None, None].contiguous(), cache[None, None, :, :RANK].contiguous()

    def seen(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return visible[row // heads, key]

    block_mask = create_block_mask(seen, 1, 1, rows * heads, cache.shape[0], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Any:
        return compiled(folded, k, v, block_mask=block_mask, scale=SCALE).view(rows, heads, RANK)

    return call


def captured(torch: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph, as the kernels are timed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay  # type: ignore[no-any-return]


def time_torch(torch: Any, call: Callable[[], Any], repeats: int = 10) -> float:
    """Median microseconds between events."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    spans = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        spans.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(spans)
