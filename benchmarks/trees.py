"""python -m benchmarks.trees: how many draft trees the spec makes and judges per second on this machine.

One trial is what a tree case costs without an engine: draft logits -> table -> best-first tree -> positions and mask ->
acceptance -> compaction of a small cache. Also given: the builder alone, on a finished table. Prints, and writes
benchmarks/results/trees.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec.drafters import RandomDrafter
from spec.engine import Float, Int
from spec.tree import DraftTable, accept_greedy, best_first_tree, compact, draft_table, positions, visibility

RESULTS = Path(__file__).parent / "results" / "trees.json"
BUDGETS = (8, 32, 256)
VOCAB, DEPTHS, PREFIX_LEN, WIDTH = 96, 6, 24, 24  # those of the preset `tiny`
ROOT = 1
CASES = 200  # distinct inputs of one pass
REPEATS = 5  # passes; the median is reported


def main() -> None:
    logits = [RandomDrafter(seed, VOCAB, DEPTHS).draft(0, np.array([seed, 1, 2], np.int32)) for seed in range(CASES)]
    rows = []
    for budget in BUDGETS:
        tables = [draft_table(values, budget) for values in logits]
        sizes = [best_first_tree(table, ROOT, budget).count + 1 for table in tables]
        rng = np.random.default_rng(budget)
        targets = [rng.integers(0, VOCAB, size).astype(np.int32) for size in sizes]
        caches = [np.zeros((PREFIX_LEN + size, WIDTH), np.float32) for size in sizes]
        trials = per_second(trial, list(zip(logits, targets, caches, strict=True)), budget)
        builds = per_second(build, [(table,) for table in tables], budget)
        rows.append({"budget": budget, "trials_per_s": trials, "builds_per_s": builds})
        print(f"B = {budget:4d}: {trials:8.0f} trials/s, {builds:8.0f} builds/s")
    setting = {"vocab": VOCAB, "depths": DEPTHS, "prefix_len": PREFIX_LEN, "cases": CASES, "repeats": REPEATS}
    machine = {"processor": platform.machine(), "python": platform.python_version(), "numpy": np.__version__}
    report = {"command": "python -m benchmarks.trees", "setting": setting, "machine": machine, "median": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def trial(budget: int, logits: Float, target: Int, cache: Float) -> None:
    tree = best_first_tree(draft_table(logits, budget), ROOT, budget)
    positions(tree.depths, PREFIX_LEN)
    visibility(tree.parents, PREFIX_LEN)
    compact(cache, PREFIX_LEN, accept_greedy(tree.tokens, tree.parents, target).path)


def build(budget: int, table: DraftTable) -> None:
    best_first_tree(table, ROOT, budget)


def per_second(function: Callable[..., None], cases: Sequence[tuple[Any, ...]], budget: int) -> float:
    """Calls per second in one thread: median over REPEATS passes."""
    rates = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for case in cases:
            function(budget, *case)
        rates.append(len(cases) / (time.perf_counter() - start))
    return round(statistics.median(rates))


if __name__ == "__main__":
    main()
