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
from collections.abc import Callable
from pathlib import Path

import numpy as np

from spec.drafters import RandomDrafter
from spec.tree import accept_greedy, best_first_tree, compact, draft_table, positions, visibility

RESULTS = Path(__file__).parent / "results" / "trees.json"
BUDGETS = (8, 32, 256)
VOCAB, DEPTHS, PREFIX_LEN, WIDTH = 96, 6, 24, 24
CASES = 200  # distinct inputs of one pass
REPEATS = 5  # passes; the median is reported


def main() -> None:
    histories = [np.array([seed, 1, 2], np.int32) for seed in range(CASES)]
    logits = [RandomDrafter(seed, VOCAB, DEPTHS).draft(0, history) for seed, history in enumerate(histories)]
    rows = []
    for budget in BUDGETS:
        tables = [draft_table(values, budget) for values in logits]
        trees = [best_first_tree(table, 1, budget) for table in tables]
        rng = np.random.default_rng(budget)
        targets = [rng.integers(0, VOCAB, len(tree.tokens)).astype(np.int32) for tree in trees]
        caches = [np.zeros((PREFIX_LEN + len(tree.tokens), WIDTH), np.float32) for tree in trees]

        def trial(case: int, budget: int = budget, targets: list[np.ndarray] = targets, caches: list[np.ndarray] = caches) -> None:
            tree = best_first_tree(draft_table(logits[case], budget), 1, budget)
            positions(tree.depths, PREFIX_LEN)
            visibility(tree.parents, PREFIX_LEN)
            compact(caches[case], PREFIX_LEN, accept_greedy(tree.tokens, tree.parents, targets[case]).path)

        def build(case: int, budget: int = budget, tables: list = tables) -> None:
            best_first_tree(tables[case], 1, budget)

        rows.append({"budget": budget, "trials_per_s": per_second(trial), "builds_per_s": per_second(build)})
        print(f"B = {budget:4d}: {rows[-1]['trials_per_s']:8.0f} trials/s, {rows[-1]['builds_per_s']:8.0f} builds/s")
    RESULTS.parent.mkdir(exist_ok=True)
    setting = {"vocab": VOCAB, "depths": DEPTHS, "prefix_len": PREFIX_LEN, "cases": CASES, "repeats": REPEATS}
    machine = {"processor": platform.machine(), "python": platform.python_version(), "numpy": np.__version__}
    report = {"command": "python -m benchmarks.trees", "setting": setting, "machine": machine, "median": rows}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def per_second(trial: Callable[[int], None]) -> float:
    """Median over REPEATS passes, one thread."""
    rates = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for case in range(CASES):
            trial(case)
        rates.append(CASES / (time.perf_counter() - start))
    return round(statistics.median(rates))


if __name__ == "__main__":
    main()
