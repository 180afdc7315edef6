"""python benchmarks/report.py

Measures the page of an invented store of 20,000 trials on three engines of 61 layers with 40 findings: seconds (best and median of five, with
the store already on disk, import excluded) and bytes; and the store itself: rows per second written, seconds per durable finding.
Writes benchmarks/results/report.json.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from reports.page import write_report
from reports.store import Store
from reports.synthetic import fill

TRIALS, ENGINES, FINDINGS, LAYERS, REPEATS = 20_000, 3, 40, 61, 5


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder) / "store", trials=TRIALS, engines=ENGINES, findings=FINDINGS, layers=LAYERS)
        page_s = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            page = write_report(Path(folder) / "store", Path(folder) / "report.html")
            page_s.append(time.perf_counter() - started)
        text = page.read_bytes()
        result = {
            "command": "python benchmarks/report.py",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
            "trials": TRIALS,
            "engines": ENGINES,
            "findings": FINDINGS,
            "layers": LAYERS,
            "page_seconds_best": round(min(page_s), 3),
            "page_seconds_median": round(statistics.median(page_s), 3),
            "page_bytes": len(text),
            "page_bytes_gzip": len(gzip.compress(text)),
            **write_speed(Path(folder) / "speed"),
        }
    out = Path(__file__).parent / "results" / "report.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def write_speed(path: Path) -> dict[str, float]:
    """Trials and judgements through a writer, parts included; findings through report_finding, each synced to the disk."""
    store = Store.create_or_open(path)
    run_id = store.start_run({"engines": [{"name": "e"}]})
    started = time.perf_counter()
    with store.writer(run_id, "w0") as writer:
        for i in range(TRIALS):
            writer.add_trial({"engine": "e", "case_id": str(i), "verdict": "EXACT", "rung": "ops", "checked": 100})
    trials_s = time.perf_counter() - started
    judgement = {
        "engine": "e",
        "rung": "decode",
        "op": "matmul",
        "tap": "q",
        "rule": "bound",
        "verdict": "WITHIN_BOUND",
        "share": 0.1,
        "checked": 100,
    }
    started = time.perf_counter()
    with store.writer(run_id, "w1") as writer:
        for i in range(10 * TRIALS):
            writer.add_judgement(judgement | {"layer": i % 61, "case_id": str(i // 61)})
    judgements_s = time.perf_counter() - started
    finding = {"run_id": run_id, "engine": "e", "verdict": "DEFECT", "op": "matmul", "case": "{}"}
    started = time.perf_counter()
    for i in range(300):
        store.report_finding(finding | {"output": str(i)})
    findings_s = time.perf_counter() - started
    store.close()
    return {
        "trials_per_second": round(TRIALS / trials_s),
        "judgements_per_second": round(10 * TRIALS / judgements_s),
        "milliseconds_per_durable_finding": round(1000 * findings_s / 300, 3),
    }


if __name__ == "__main__":
    main()
