"""python -m benchmarks.full_width: one layer of a real model in full width, checked end to end: seconds, and memory of all processes together.

Each preset is a run of its own of `paritree check native --preset NAME`: one sequence, one prefilled and one decoded token, every tap of
the layer compared over all its columns (the judge is fast enough, so that none is sampled). Memory is the largest sum, over samples
0.1 s apart, of the resident set sizes of the command and all its children; pages that they share count several times, so that it is an
upper bound. Seconds are wall time; processor seconds are those of the judge's side, whose processes the command waits for: the rest is other load,
and the engine in its worker. Targets: 6 GB and 180 s.
Writes results/full_width.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from campaigns.runner import machine

PRESETS = ("kimi-k2-layer", "kimi-k2.5-dense-layer", "deepseek-v3-layer")
SAMPLE_S = 0.1
TARGET_BYTES, TARGET_S = 6e9, 180.0
OUT = Path(__file__).parent / "results" / "full_width.json"


class Memory(threading.Thread):
    """Samples a process and its children until it ends."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self.resident = 0
        self.samples = 0

    def run(self) -> None:
        while self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
            resident = 0
            for process in self._tree():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    resident += process.memory_info().rss
            self.resident = max(self.resident, resident)
            self.samples += 1
            time.sleep(SAMPLE_S)

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._process, *self._process.children(recursive=True)]
        except psutil.Error:
            return []


def measured(preset: str, engine: str) -> dict[str, Any]:
    """One run. Raises RuntimeError where the command does not end as it should."""
    with tempfile.TemporaryDirectory() as store:
        before, began = os.times(), time.perf_counter()
        command = [sys.executable, "-m", "paritree.cli", "check", engine, "--preset", preset, "--store", store, "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        memory = Memory(process.pid)
        memory.start()
        text, _ = process.communicate()
        seconds = time.perf_counter() - began
        after = os.times()
        memory.join()
    if process.returncode:
        raise RuntimeError(f"{preset}: paritree check ended with {process.returncode}: {text[-500:]}")
    (result,) = json.loads(text)["engines"]
    values = {rung: {"compared": tally["checked"], "unverified": tally["unverified"]} for rung, tally in result["ladder"].items()}
    processor_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "preset": preset, "engine": engine, "seconds": round(seconds, 1), "processor_s": round(processor_s, 1), "peak_rss_bytes": memory.resident,
        "samples": memory.samples, "load": round(os.getloadavg()[0], 1), "verdicts": result["verdicts"], "values": values,
        "findings": len(result["findings"]),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--engine", default="native")
    options = parser.parse_args()
    rows = []
    for preset in options.presets:
        row = measured(preset, options.engine)
        rows.append(row)
        peak = row["peak_rss_bytes"]
        met = peak < TARGET_BYTES and row["seconds"] < TARGET_S and not row["findings"]
        print(
            f"{preset}: {row['seconds']} s ({row['processor_s']} s of processor time), {peak / 1e9:.2f} GB, {row['findings']} findings: {'met' if met else 'MISSED'}",
            flush=True,
        )
    body = {
        "command": "python -m benchmarks.full_width",
        "machine": machine(),
        "target_bytes": TARGET_BYTES,
        "target_s": TARGET_S,
        "runs": rows,
    }
    OUT.write_text(json.dumps(body, indent=1) + "\n", "utf-8")
    return 1 if any(row["findings"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
