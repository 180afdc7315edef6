"""What judging costs: `python -m benchmarks.judge` prints milliseconds of the fastest of many runs, engine time not included.

A session: about 40 rows of the `tiny` preset with all taps, prefill in chunks, trees, plain decoding and cache read-back, judged with and
without the golden pass that its tokens are compared with. A tree case: the five operations of one round, vocabulary 100, budget 16.
Single operations: sizes of a small op case. One BLAS thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

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
from spec.script import Forward, OpCall
from spec.tree import accept_greedy, best_first_tree, draft_table

REPEATS = 30
TREE = ((0, 0), (1, 1), (0, 0), (2, 1), (0, 0))
CASE = SessionCase(
    "tiny", (), 0, "ordinary", ((9, 1), (5, 2)), ((TREE, TREE[:3]), ((), ()), (TREE[:2], TREE[:2]), (TREE[:3], ())), chunk=4, mixed=True
)


def fastest_ms(function: Callable[[], Any], repeats: int = REPEATS) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
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


def main() -> None:
    profile = Profile()
    for engine in ("golden", "blocked"):
        rows, whole, cached = session(engine)
        print(f"session of {rows} rows, all taps, {engine:8} {whole:7.2f} ms, golden logits known {cached:7.2f} ms")
    calls = tree_calls()
    print(
        f"tree case, {len(calls)} operations       {fastest_ms(lambda: [judge_op(call, outputs, profile) for call, outputs in calls]):7.3f} ms"
    )
    for call, outputs in small_calls():
        print(f"{call.op:32} {fastest_ms(lambda: judge_op(call, outputs, profile), 100):7.3f} ms")  # noqa: B023  (called at once)


if __name__ == "__main__":
    main()
