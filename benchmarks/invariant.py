"""The invariant of the project: honest engines have no finding. Run: `python -m benchmarks.invariant [--trials 10000] [--seeds 1] [ENGINE ...]`.

Each engine runs the frozen mix, at least 10,000 trials with at least 1,000 frozen-mix sessions per seed; every finding would be a false alarm. The
share of values of which nothing could be proven stands beside, because an oracle that proves nothing raises no alarm either.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from campaigns.runner import Options, check

ENGINES = ("golden", "blocked", "native")
TRIALS = 10_000
FROZEN_MIN = 1_000
RESULT = Path(__file__).parent / "results" / "invariant.json"


def measured(engine: str, trials: int, seed: int, jobs: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paritree-invariant-") as folder:
        _, (result,) = check([engine], Options(store=f"{folder}/store", trials=trials, seed=seed, jobs=jobs, purpose="false-alarms"))
    return {
        "engine": engine,
        "seed": seed,
        "trials": result.trials,
        "frozen_mix_sessions": result.frozen,
        "values_compared": result.verified,
        "unverified_share": result.unverified_share,
        "false_alarms": result.failing,
        "findings": [event["message"] for event in result.findings.values()],
        "wall_s": round(result.seconds, 1),
        "holds": not result.failing and result.trials >= trials and result.frozen >= FROZEN_MIN * trials // TRIALS,
    }


def main() -> int:
    """Exit 1 where the invariant does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", default=ENGINES)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int)
    options = parser.parse_args()
    runs = []
    for seed in range(options.seeds):
        for engine in options.engines:
            runs.append(measured(engine, options.trials, seed, options.jobs))
            print(json.dumps(runs[-1]), flush=True)
    body = {
        "command": " ".join(["python -m benchmarks.invariant", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end",
        "holds": all(run["holds"] for run in runs),
        "runs": runs,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(body, indent=1) + "\n")
    return 0 if body["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
