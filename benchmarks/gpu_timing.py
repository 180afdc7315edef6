"""Device times of the CUDA kernels: medians of event pairs, each beside its floor. A part of benchmarks/gpu.py.

A floor is the larger of operations / rate and bytes / bandwidth, with RATES below. Short work is captured into one CUDA graph of several
calls and divided, so that the host's launches are not part of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from impls.cuda.device import Array, CupyDevice
from impls.cuda.kernels import MMA16, MMA32, RESIDENT, SPLIT16, SPLIT32, TILED, WGMMA, Draws, Kernels
from spec.sampling import Sampling

FLOAT32_RATE = 60e12  # operations a second, FMA counted twice: 132 multiprocessors x 128 lanes x 2 x 1.785 GHz
BF16_RATE = 790e12  # measured on random data, 8192^3 product of torch 2.11 on an H200
BANDWIDTH = 4.3e12  # bytes a second read plus written, measured by a large copy on an H200
REPEATS = 20
HEADS, RANK, WIDTH, SCALE = 64, 512, 576, 0.1352337788608801  # Kimi K2: (128 + 64)^-1/2 * mscale^2
VOCAB, DEPTHS = 163_840, 15
SHAPES = ((4096, 64), (32768, 256))  # prefix, nodes


@dataclass(frozen=True)
class Timing:
    """`median_us` of one call; `floor_us` with its reason; `error`: relative, against float64 on sampled rows, where it was measured."""

    name: str
    dims: str
    median_us: float
    least_us: float
    floor_us: float
    floor: str
    error: float | None = None


def time_events(cupy: Any, call: Callable[[], object], repeats: int = REPEATS, calls: int = 1) -> tuple[float, float]:
    """(median, least) microseconds of one of `calls` calls made by `call`."""
    for _ in range(3):
        call()
    cupy.cuda.Device().synchronize()
    spans = []
    for _ in range(repeats):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        spans.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3 / calls)
    return statistics.median(spans), min(spans)


def captured(cupy: Any, call: Callable[[int], object], calls: int) -> Callable[[], None]:
    """`call(0) .. call(calls - 1)` as one graph. The results stay alive with the graph, so that no buffer is reused."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        kept = [call(i) for i in range(calls)]  # makes the pool large enough: nothing may be allocated during a capture
        stream.synchronize()
        del kept
        stream.begin_capture()
        results = [call(i) for i in range(calls)]
        graph = stream.end_capture()

    def launch() -> None:
        graph.launch(cupy.cuda.get_current_stream())
        launch.results = results  # type: ignore[attr-defined]

    return launch


def all_timings(log: Callable[[str], None]) -> list[dict[str, Any]]:
    import cupy

    device = CupyDevice()
    kernels = Kernels(device)
    out: list[Timing] = []

    def note(timing: Timing) -> None:
        out.append(timing)
        ratio = timing.median_us / timing.floor_us if timing.floor_us else float("nan")
        error = "" if timing.error is None else f"  error {timing.error:.2e}"
        log(f"{timing.name:34s} {timing.dims:34s} {timing.median_us:10.1f} us  floor {timing.floor_us:9.1f}  x {ratio:6.2f}{error}")

    _attention(cupy, kernels, note)
    _trees(cupy, kernels, note)
    _sampling(cupy, kernels, note)
    _products(cupy, kernels, note)
    return [asdict(timing) for timing in out]


def _attention(cupy: Any, kernels: Kernels, note: Callable[[Timing], None]) -> None:
    rng = cupy.random.default_rng(1)
    for prefix, nodes in SHAPES:
        rows, keys = nodes, prefix + nodes
        q = rng.standard_normal((rows, HEADS, WIDTH), dtype=np.float32)
        cache = rng.standard_normal((keys, WIDTH), dtype=np.float32)
        bits = tree_bits(kernels, nodes)
        operations = 2.0 * rows * HEADS * keys * (WIDTH + RANK)
        for name, form, narrow, rate in (
            ("tree_attention f32, FMA, 99 KiB", TILED, False, FLOAT32_RATE),
            ("tree_attention f32, FMA, resident", RESIDENT, False, FLOAT32_RATE),
            ("tree_attention f32, parts, 96 KiB", SPLIT16, False, FLOAT32_RATE),
            ("tree_attention f32, parts", SPLIT32, False, FLOAT32_RATE),
            ("tree_attention bf16, mma 16 keys", MMA16, True, BF16_RATE),
            ("tree_attention bf16, mma 32 keys", MMA32, True, BF16_RATE),
            ("tree_attention bf16, wgmma", WGMMA, True, BF16_RATE),
        ):
            if form == WGMMA and not kernels.device.warpgroups:
                continue
            if narrow:
                kernels.mma_form = form
            else:
                kernels.float32_form = form
            a, b = (kernels.cast_bf16(q), kernels.cast_bf16(cache)) if narrow else (q, cache)

            def call(a: Array = a, b: Array = b, prefix: int = prefix, keys: int = keys, bits: Array = bits) -> Array:
                return kernels.tree_attention(a, b, bits, prefix, keys, RANK, SCALE)

            error = attention_error(cupy, call(), a, b, bits, prefix)
            median, least = time_events(cupy, captured(cupy, lambda i, call=call: call(), 3), 10, calls=3)
            moved = (a.nbytes + b.nbytes + 4 * rows * HEADS * RANK) / BANDWIDTH
            floor = max(operations / rate, moved) * 1e6
            note(
                Timing(name, f"prefix {prefix}, nodes {nodes}", median, least, floor, f"{operations:.3g} operations at {rate:.3g}/s", error)
            )


def tree_bits(kernels: Kernels, nodes: int) -> Array:
    """Visibility of a random tree of `nodes` rows."""
    rng = np.random.default_rng(nodes)
    parents = np.array([-1, *(int(rng.integers(max(0, i - 12), i)) for i in range(1, nodes))], np.int32)
    status = kernels.device.zeros((1,), np.int32)
    return kernels.tree_mask(kernels.device.upload(parents), 0, status, with_bytes=False)[1]


def attention_error(cupy: Any, out: Array, q: Array, cache: Array, bits: Array, prefix: int) -> float:
    """Norm of the error over the norm of the float64 result, on four rows and two heads."""

    def wide(x: Array) -> Array:
        return x.astype(np.float64) if x.dtype == np.float32 else (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    rows = sorted({0, 1, len(q) // 2, len(q) - 1})
    heads = [0, q.shape[1] - 1]
    keys = wide(cache)
    masks = cupy.asnumpy(bits)
    wrong = whole = 0.0
    for row in rows:
        seen = np.ones(len(cache), bool)
        tail = np.unpackbits(masks[row].view(np.uint8), bitorder="little")[: len(cache) - prefix].astype(bool)
        seen[prefix:] = tail
        own = keys[cupy.asarray(seen)]
        scores = wide(q[row, heads]) @ own.T * float(np.float32(SCALE))
        scores -= scores.max(axis=1, keepdims=True)
        weights = cupy.exp(scores)
        weights /= weights.sum(axis=1, keepdims=True)
        right = weights @ own[:, :RANK]
        wrong += float(cupy.linalg.norm(out[row, heads] - right)) ** 2
        whole += float(cupy.linalg.norm(right)) ** 2
    return float((wrong / whole) ** 0.5)


def _trees(cupy: Any, kernels: Kernels, note: Callable[[Timing], None]) -> None:
    device = kernels.device
    rng = cupy.random.default_rng(2)
    sets = [rng.standard_normal((DEPTHS, VOCAB), dtype=np.float32) * 2.5 for _ in range(8)]  # together more than the L2 cache
    status = device.zeros((1,), np.int32)
    read = DEPTHS * VOCAB * 4 / BANDWIDTH * 1e6
    for budget in (64, 512):

        def table(i: int, budget: int = budget) -> Any:
            return kernels.draft_table(sets[i % 8], budget, status)

        ids, log_probs = table(0)

        def tree(i: int, budget: int = budget, ids: Array = ids, log_probs: Array = log_probs) -> Any:
            return kernels.best_first_tree(ids, log_probs, budget, 7, status)

        tokens, parents, _, count = tree(0)

        def mask(i: int, parents: Array = parents, count: Array = count) -> Any:
            return kernels.tree_mask(parents, 4096, status, count=count, with_bytes=False)

        def whole(i: int, budget: int = budget) -> Any:
            own_ids, own_log_probs = kernels.draft_table(sets[i % 8], budget, status)
            own = kernels.best_first_tree(own_ids, own_log_probs, budget, 7, status)
            return own, kernels.tree_mask(own[1], 4096, status, count=own[3], with_bytes=False)

        for name, part, floor in (
            ("draft_table", table, read),
            ("best_first_tree", tree, 0.0),
            ("tree_mask", mask, 0.0),
            ("logits to mask", whole, read),
        ):
            median, least = time_events(cupy, captured(cupy, part, 8), calls=8)
            note(Timing(name, f"B {budget}, L {DEPTHS}, V {VOCAB}", median, least, floor, "the logits read once"))

        layers, slots = 61, 8192
        store = cupy.zeros((layers, slots, WIDTH), np.float32)
        # targets that follow the best child, so that the accepted path is as long as the tree is deep
        host_parents, host_tokens = device.download(parents), device.download(tokens)
        target = np.full(budget + 1, -2, np.int32)
        for node in range(budget, 0, -1):
            target[host_parents[node]] = host_tokens[node]
        targets = device.upload(target)

        def commit(
            i: int, tokens: Array = tokens, parents: Array = parents, targets: Array = targets, count: Array = count, store: Array = store
        ) -> Any:
            path, length, bonus = kernels.accept(tokens, parents, targets, status, count=count, check=False)
            kernels.compact_layers(store, path, length, 4096)
            return path, length, bonus

        accepted = int(device.download(commit(0)[1])[0])
        moved = 2 * 4 * layers * accepted * WIDTH / BANDWIDTH * 1e6
        median, least = time_events(cupy, captured(cupy, commit, 8), calls=8)
        note(
            Timing(
                "accept + compaction",
                f"B {budget}, {accepted} rows, {layers} layers",
                median,
                least,
                moved,
                "the kept rows read and written once",
            )
        )
        logits = rng.standard_normal((budget + 1, VOCAB), dtype=np.float32)
        median, least = time_events(cupy, captured(cupy, lambda i, logits=logits: kernels.argmax(logits), 2), calls=2)
        note(Timing("argmax", f"{budget + 1} x {VOCAB}", median, least, logits.nbytes / BANDWIDTH * 1e6, "the logits read once"))


def _sampling(cupy: Any, kernels: Kernels, note: Callable[[Timing], None]) -> None:
    """Draws of rows after histories of about 1,000 tokens; 65 and 513 rows are the nodes of trees."""
    rng = cupy.random.default_rng(4)
    rules = {
        "temperature 0.8": Sampling(temperature=0.8, seed=3),
        "top-p 0.9": Sampling(temperature=0.8, top_p=0.9, seed=3),
        "top-k 50": Sampling(temperature=0.8, top_k=50, seed=3),
        "penalties": Sampling(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.2, seed=3),
    }
    status = kernels.device.zeros((1,), np.int32)
    for rows in (1, 65, 513):
        logits = rng.standard_normal((rows, VOCAB), dtype=np.float32) * 2.5
        for name, sampling in rules.items():
            draws = kernels.draws(sampling, [list(range(1000 + row % 7)) for row in range(rows)], [10] * rows, list(range(rows)))

            def call(i: int, logits: Array = logits, draws: Draws = draws) -> Array:
                return kernels.sample(logits, draws, status)

            median, least = time_events(cupy, captured(cupy, call, 2), 10, calls=2)
            note(Timing(f"sample, {name}", f"{rows} x {VOCAB}", median, least, logits.nbytes / BANDWIDTH * 1e6, "the logits read once"))


def _products(cupy: Any, kernels: Kernels, note: Callable[[Timing], None]) -> None:
    rng = cupy.random.default_rng(3)
    for rows in (1, 65, 512):
        for inner, cols in ((7168, 2048), (1536, 12288)):
            x, w = rng.standard_normal((rows, inner), dtype=np.float32), rng.standard_normal((inner, cols), dtype=np.float32)
            median, least = time_events(cupy, captured(cupy, lambda i, x=x, w=w: kernels.matmul(x, w), 4), calls=4)
            floor = max(2.0 * rows * inner * cols / FLOAT32_RATE, (x.nbytes + w.nbytes) / BANDWIDTH) * 1e6
            note(Timing("matmul f32", f"{rows} x {inner} x {cols}", median, least, floor, "operations or bytes"))
    for rows in (1, 65):
        packed = (rng.random((7168 // 8, 2048)) * 2.0**32).astype(np.uint32)
        scales = cupy.full((7168 // 32, 2048), 0.0078125, np.float32)
        x = rng.standard_normal((rows, 7168), dtype=np.float32)
        median, least = time_events(
            cupy, captured(cupy, lambda i, x=x, packed=packed, scales=scales: kernels.matmul_int4(x, packed, scales), 4), calls=4
        )
        floor = max(2.0 * rows * 7168 * 2048 / FLOAT32_RATE, (packed.nbytes + scales.nbytes) / BANDWIDTH) * 1e6
        note(Timing("matmul int4", f"{rows} x 7168 x 2048", median, least, floor, "operations or bytes"))
    for rows in (1, 65):
        experts, chosen, hidden, width = 64, 8, 1024, 512
        x = rng.standard_normal((rows, hidden), dtype=np.float32)
        ids = cupy.argsort(rng.random((rows, experts)), axis=1)[:, :chosen].astype(np.int32)
        gate, up = (rng.standard_normal((experts, hidden, width), dtype=np.float32) for _ in range(2))
        down = rng.standard_normal((experts, width, hidden), dtype=np.float32)
        median, least = time_events(
            cupy, captured(cupy, lambda i, x=x, ids=ids, gate=gate, up=up, down=down: kernels.experts(x, ids, gate, up, down), 4), calls=4
        )
        touched = len(np.unique(cupy.asnumpy(ids)))
        floor = max(6.0 * rows * chosen * hidden * width / FLOAT32_RATE, 12.0 * touched * hidden * width / BANDWIDTH) * 1e6
        note(
            Timing("experts f32", f"{rows} rows, 8 of 64, 1024 x 512", median, least, floor, "operations, or the touched experts read once")
        )
