"""Trials per second through generator, worker, specification and judge. Run: `python -m benchmarks.throughput [ENGINE]` (about 1 min).

One shard's work without the store, kind by kind, on the frozen mix. Rates are per core: CPU seconds of the shard and of its worker together, so
that a busy machine does not change them much; wall time stands beside. Targets: 1,000 tree trials/s and 15 sessions/s per core.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from campaigns.discover import Discovery, diet_of
from campaigns.isolation import Supervisor
from campaigns.trial import Bench, Outcome, patience, takes_views
from oracles.judgement import FINDINGS

TRIALS = {"op": 6000, "tree": 6000, "session": 400}
WARM = {"op": 500, "tree": 500, "session": 20}  # weights, strategies and pages made once
TARGETS = {"tree": 1000.0, "session": 15.0}  # per core and second: 10,000 trials of the mix in about two minutes on two cores
RESULT = Path(__file__).parent / "results" / "throughput.json"


def cpu_s(supervisor: Supervisor) -> float:
    """Of this process and of the worker."""
    worker = psutil.Process(supervisor.pid).cpu_times() if supervisor.pid is not None else None
    return time.process_time() + (worker.user + worker.system if worker is not None else 0.0)


def measured(engine: str, kind: str) -> dict[str, Any]:
    findings = 0

    def record(outcome: Outcome) -> bool:
        nonlocal findings
        findings += any(j.verdict in FINDINGS for j in outcome.judgements)
        return False

    with Supervisor(engine, deadline_s=patience()) as supervisor:
        diet = dataclasses.replace(diet_of(supervisor.description, views=takes_views(supervisor)), mix=((kind, 1.0),))
        discovery = Discovery(diet, 1, Bench(supervisor).outcomes, record, trials_expected=1)
        while discovery.trials < WARM[kind]:
            discovery.step()
        before, began, cpu = discovery.trials, time.perf_counter(), cpu_s(supervisor)
        while discovery.trials < before + TRIALS[kind]:
            discovery.step()
        trials, wall_s, spent_s = discovery.trials - before, time.perf_counter() - began, cpu_s(supervisor) - cpu
    rate = trials / spent_s
    result = {"trials": trials, "per_core_s": round(rate, 1), "per_wall_s": round(trials / wall_s, 1), "findings": findings}
    if kind in TARGETS:
        result |= {"target_per_core_s": TARGETS[kind], "target_met": rate >= TARGETS[kind]}
    return result


def main() -> None:
    engine = sys.argv[1] if len(sys.argv) > 1 else "native"
    body = {
        "command": f"python -m benchmarks.throughput {engine}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} at the start",
        "engine": engine,
        **{kind: measured(engine, kind) for kind in TRIALS},
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
