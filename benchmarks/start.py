"""How soon the command line answers. Run: `python -m benchmarks.start`.

`paritree --help` in a fresh process, over and over: the median of the processor time, which a busy machine changes least, and of the wall time.
Target: 200 ms. Writes benchmarks/results/start.json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPEATS = 15
TARGET_MS = 200.0
RESULT = Path(__file__).parent / "results" / "start.json"


def main() -> int:
    processor, wall = [], []
    for _ in range(REPEATS):
        before, began = os.times(), time.perf_counter()
        subprocess.run([sys.executable, "-m", "paritree.cli", "--help"], check=True, stdout=subprocess.DEVNULL)
        wall.append((time.perf_counter() - began) * 1e3)
        after = os.times()
        processor.append((after.children_user + after.children_system - before.children_user - before.children_system) * 1e3)
    body = {
        "command": "python -m benchmarks.start",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end",
        "processor_ms_median": round(statistics.median(processor), 1),
        "wall_ms_median": round(statistics.median(wall), 1),
        "target_ms": TARGET_MS,
        "target_met": statistics.median(processor) <= TARGET_MS,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
