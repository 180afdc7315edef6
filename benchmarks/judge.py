"""What judging costs: `python -m benchmarks.judge` prints milliseconds of the fastest of many runs, engine time not included.

A session: about 40 rows of the `tiny` preset with all taps, prefill in chunks, trees, plain decoding and cache read-back, judged with and
without the golden pass that its tokens are compared with. A tree case: the five operations of one round, vocabulary 100, budget 16.
Single operations: sizes of a small op case. One BLAS thread.

The target is a ratio: checking every tap of a session (a prefill of 17 tokens, a tree of 8 nodes; golden pass included) may take 12 times as long as
the same session in plain float32 NumPy. Both sides alternate in one process; the minimum of each counts, in processor time, which a busy machine
changes least. Writes benchmarks/results/judge.json.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.canonical import CONFIGS, TREE_DEPTHS, TREE_PARENTS, rows_of, whole_models
from campaigns.case import SessionCase
from campaigns.isolation.inprocess import InProcess
from campaigns.plan import session_script
from campaigns.weights import weights_for
from impls.registry import resolve
from oracles.judge import judge_op
from oracles.judgement import FINDINGS
from oracles.session import SessionJudge
from spec.engine import Profile
from spec.model import GoldenModel
from spec.ops import OPS
from spec.script import Commit, Forward, OpCall, Script, WeightsKey
from spec.tree import accept_greedy, best_first_tree, draft_table

REPEATS = 30
TARGET = 12.0  # all-tap check over plain forward
WORKLOAD = "session 17 + tree 8"
RESULT = Path(__file__).parent / "results" / "judge.json"
TREE = ((0, 0), (1, 1), (0, 0), (2, 1), (0, 0))
CASE = SessionCase(
    "tiny", (), 0, "ordinary", ((9, 1), (5, 2)), ((TREE, TREE[:3]), ((), ()), (TREE[:2], TREE[:2]), (TREE[:3], ())), chunk=4, mixed=True
)


def fastest_ms(function: Callable[[], Any], repeats: int = REPEATS) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        function()
        best = min(best, time.process_time() - start)
    return best * 1e3


def session(engine: str) -> tuple[int, float, float]:
    """(rows, ms, ms with the golden logits already known)."""
    script = session_script(CASE)
    trace = InProcess(resolve(engine)).script(script)
    model = GoldenModel(script.config, weights_for(script.config, script.weights))
    judge = SessionJudge(model)
    assert not [j for j in judge.judge(script, trace) if j.verdict in FINDINGS]
    rows = sum(len(step.rows) for step in script.steps if isinstance(step, Forward))

    def cold() -> None:
        judge.forget()
        judge.judge(script, trace)

    whole = fastest_ms(cold)
    return rows, whole, fastest_ms(lambda: judge.judge(script, trace))


def all_tap_ratio(name: str) -> dict[str, float]:
    """The workload of benchmarks/canonical.py, every tap of the blocked engine judged, over the plain forward."""
    config = CONFIGS[name]
    weights = WeightsKey(0)
    model = GoldenModel(config, weights_for(config, weights))
    index = np.arange(25, dtype=np.int32)
    tokens = np.random.default_rng(2).integers(0, config.vocab, 25).astype(np.int32)
    first = Forward(rows_of(tokens[:17], index[:17], index[:17] - 1), np.ones(17, np.bool_), "prefill")
    tree = Forward(rows_of(tokens[17:], 17 + TREE_DEPTHS, TREE_PARENTS), np.ones(8, np.bool_), "tree")
    script = Script(config, weights, (first, Commit(0, index[:17]), tree))
    trace = InProcess(resolve("blocked")).script(script)
    judge = SessionJudge(model)
    judgements = judge.judge(script, trace)
    assert judgements and not [j for j in judgements if j.verdict in FINDINGS]
    plain, _ = whole_models(config)[WORKLOAD]
    best = [float("inf"), float("inf")]
    for _ in range(REPEATS):
        for side, function in enumerate((plain, lambda: judge.judge(script, trace))):
            judge.forget()
            start = time.process_time()
            function()
            best[side] = min(best[side], time.process_time() - start)
    return {"plain_ms": best[0] * 1e3, "check_ms": best[1] * 1e3, "ratio": best[1] / best[0]}


def call_of(op: str, inputs: dict[str, Any], params: dict[str, int | float]) -> tuple[OpCall, dict[str, Any]]:
    outputs = OPS[op].function(inputs, params)
    return OpCall(op, inputs, params, {name: (value.shape, str(value.dtype)) for name, value in outputs.items()}), outputs


def tree_calls() -> list[tuple[OpCall, dict[str, Any]]]:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((7, 100)) * 3).astype(np.float32)
    table = draft_table(logits, 16)
    tree = best_first_tree(table, 5, 16)
    target = rng.integers(0, 100, len(tree.tokens)).astype(np.int32)
    target[0] = tree.tokens[1]
    path = np.array(accept_greedy(tree.tokens, tree.parents, target).path, np.int32)
    cache = rng.standard_normal((9 + len(tree.tokens), 24)).astype(np.float32)
    return [
        call_of("draft_table", {"logits": logits}, {"budget": 16}),
        call_of("best_first_tree", {"ids": table.ids, "log_probs": table.log_probs}, {"budget": 16, "root": 5}),
        call_of("tree_mask", {"parents": tree.parents}, {"prefix_len": 9}),
        call_of("accept", {"tokens": tree.tokens, "parents": tree.parents, "target": target}, {}),
        call_of("compact", {"cache": cache, "path": path}, {"prefix_len": 9}),
    ]


def small_calls() -> list[tuple[OpCall, dict[str, Any]]]:
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    visible = (rng.random((9, 25)) < 0.6).astype(np.uint8)
    return [
        call_of("matmul", {"x": normal(9, 48), "w": normal(48, 30)}, {}),
        call_of("rms_norm", {"x": normal(9, 48), "gain": normal(48)}, {"eps": 1e-6}),
        call_of("scores", {"q": normal(9, 3, 24), "keys": normal(25, 24)}, {"scale": 0.2}),
        call_of("softmax", {"scores": normal(9, 3, 25), "visible": visible}, {}),
        call_of("tree_attention", {"q": normal(9, 3, 24), "cache": normal(25, 24), "visible": visible}, {"kv_rank": 16, "scale": 0.2}),
        call_of("swiglu", {"gate": normal(9, 72), "up": normal(9, 72)}, {}),
        call_of("add", {"a": normal(9, 48), "b": normal(9, 48)}, {}),
    ]


def main() -> int:
    profile = Profile()
    ratios = {name: all_tap_ratio(name) for name in CONFIGS}
    for name, one in ratios.items():
        print(
            f"all-tap check, {name:10} {one['check_ms']:7.2f} ms, plain forward {one['plain_ms']:.2f} ms, ratio {one['ratio']:.1f} of at most {TARGET:.0f}"
        )
    sessions = {}
    for engine in ("golden", "blocked"):
        rows, whole, cached = session(engine)
        sessions[engine] = {"rows": rows, "check_ms": whole, "check_ms_golden_logits_known": cached}
        print(f"session of {rows} rows, all taps, {engine:8} {whole:7.2f} ms, golden logits known {cached:7.2f} ms")
    calls = tree_calls()
    tree_ms = fastest_ms(lambda: [judge_op(call, outputs, profile) for call, outputs in calls])
    print(f"tree case, {len(calls)} operations       {tree_ms:7.3f} ms")
    operations = {}
    for call, outputs in small_calls():
        operations[call.op] = fastest_ms(lambda: judge_op(call, outputs, profile), 100)  # noqa: B023  (called at once)
        print(f"{call.op:32} {operations[call.op]:7.3f} ms")
    body = {
        "command": "OPENBLAS_NUM_THREADS=1 python -m benchmarks.judge",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end",
        "target_ratio": TARGET,
        "target_met": all(one["ratio"] <= TARGET for one in ratios.values()),
        "all_tap_check": ratios,
        "sessions": sessions,
        "tree_case_ms": tree_ms,
        "operations_ms": operations,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(body, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
