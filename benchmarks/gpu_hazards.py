"""Hazards and plants that need more than one call: stale state under graph replay, streams out of order, an error that sticks. A part of benchmarks/gpu.py.

    python -m benchmarks.gpu_hazards [--emulated]

`graph_plants`: bugs in the host code of the native engine that act where a graph is replayed; each has to be found, at the tap where it acts,
and not without graphs. `sticky`: a kernel with an illegal address under a supervised campaign; the worker is replaced, the finding is kept,
and no other operation is blamed. `streams`: inputs produced late on a stream of their own, and the plant that launches elsewhere.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import gpu_trials
from benchmarks.gpu_sessions import FINDINGS
from campaigns.case import SessionCase, to_json
from campaigns.isolation import InProcess, Supervisor
from campaigns.strategies import op_cases, session_cases
from campaigns.trial import Bench, patience

# two sequences, rounds of one shape, each time another tree: parents of the nodes 1, 2, ... Both need a second
# page of 16 rows in each of the first rounds and give it back, so that they swap pages.
TREES = (
    ((0, 0, 0, 0), (0, 1, 2)),
    ((0, 1, 2, 3), (0, 0, 1)),
    ((0, 1, 1, 3), (0, 0, 0)),
    ((0, 0, 1, 2), (0, 1, 1)),
    ((0, 1, 2, 0), (0, 0, 1)),
)
REPLAYED = SessionCase(
    "tiny", (), 1, "ordinary", ((9, 3), (11, 4)),
    tuple(tuple(tuple((parent, rank) for rank, parent in enumerate(parents)) for parents in pair) for pair in 2 * TREES),
)  # fmt: skip
DRAWN_MAX = 60  # sessions of the default generator in which a plant may be met


def graph_plants(path: str, processes: int) -> list[dict[str, Any]]:
    """Every plant of the host code in a process of its own. `path`: the engine built with `build.PLANTED`."""
    from impls.cuda.plants import HOST_PLANTS

    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        return list(pool.imap(_graph_plant, [(path, plant.name) for plant in HOST_PLANTS], chunksize=1))


def _graph_plant(job: tuple[str, str]) -> dict[str, Any]:
    """`caught` and `localised` on REPLAYED; `drawn`: how many sessions of the generator it took, None if DRAWN_MAX did not meet it."""
    path, name = job
    from impls.cuda.plants import HOST_PLANTS
    from impls.native.adapter import load_library

    plant = next(plant for plant in HOST_PLANTS if plant.name == name)
    os.environ |= {
        "PARITREE_CUDA_PLANT": name,
        "PARITREE_CUDA_POISON": "1",
        "PARITREE_CUDA_PRECISION": "float32",
        "PARITREE_CUDA_GRAPH": "0",
    }
    engine = load_library(path)
    quiet = not _found(engine, REPLAYED)
    os.environ["PARITREE_CUDA_GRAPH"] = "1"
    found = _found(engine, REPLAYED)
    return {
        "plant": name, "kind": plant.kind, "op": "tree_attention", "caught": bool(found), "localised": bool(found) and found[0][0] in plant.taps,
        "quiet_without_graphs": quiet, "first": found[0] if found else None, "drawn": _drawn(engine),
    }  # fmt: skip


def _found(engine: Any, case: SessionCase) -> list[tuple[str, str, str]]:
    """(tap, verdict, message) of every finding, in data order."""
    judgements = Bench(InProcess(engine)).outcome(case).judgements
    return [(j.tap, j.verdict.name, j.message[:200]) for j in judgements if j.verdict.name in FINDINGS]


def _drawn(engine: Any) -> int | None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as with_seed

    bench = Bench(InProcess(engine))  # one process: graphs of earlier cases are replayed by later ones
    met: list[int] = []
    count = 0

    @settings(max_examples=DRAWN_MAX, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @with_seed(1)
    @given(session_cases("full"))
    def trial(case: SessionCase) -> None:
        nonlocal count
        count += 1
        if not met and any(j.verdict.name in FINDINGS for j in bench.outcome(case).judgements):
            met.append(count)

    trial()
    return met[0] if met else None


def sticky(engine: str, trials: int = 60) -> dict[str, Any]:
    """A campaign in a supervised worker on an engine with an illegal address in one operation, drawn among three healthy ones."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as with_seed

    found: collections.Counter[str] = collections.Counter()
    ran: collections.Counter[str] = collections.Counter()
    after = 0  # healthy trials since the first finding
    first: dict[str, str] = {}
    with Supervisor(engine, deadline_s=patience()) as worker:
        bench = Bench(worker)

        @settings(max_examples=trials, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        @with_seed(3)
        @given(op_cases("full", ("embed", "add", "rms_norm", "swiglu")))
        def trial(case: Any) -> None:
            nonlocal after
            ran[case.op] += 1
            bad = [j for j in bench.outcome(case).judgements if j.verdict.name in FINDINGS]
            if bad:
                found[f"{case.op} {bad[0].verdict.name}"] += 1
                first.setdefault("case", to_json(case))
                first.setdefault("message", bad[0].message[:300])
            elif first:
                after += 1

        trial()
        restarts = worker.restarts - 1
    blamed = sorted({key.split()[0] for key in found})
    return {
        "engine": engine, "trials": dict(sorted(ran.items())), "findings": dict(found), "workers_replaced": restarts,
        "clean_trials_after_the_first_finding": after, "blamed": blamed, "holds": blamed == ["embed"] and restarts > 0 and after > 0, "first": first,
    }  # fmt: skip


def streams(trials: int, processes: int) -> dict[str, Any]:
    """Judged operations on the delayed device, and whether the launches that go astray are found."""
    return {
        "trials": gpu_trials.parallel("streams", trials, processes, seed=7),
        "plant": {"plant": "launches-astray", "caught": _astray()},
    }


def _astray() -> bool:
    from impls.cuda.device import DelayedDevice
    from impls.cuda.engine import CudaEngine

    tally = gpu_trials.draw_and_judge(CudaEngine(DelayedDevice(astray=True), name="cuda:astray"), 1, 40, ("add", "rms_norm", "swiglu"))
    return bool(tally.findings)


def main(arguments: Sequence[str] | None = None) -> int:
    from impls.cuda import build

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_hazards", description=__doc__)
    parser.add_argument("--emulated", action="store_true", help="on the CPU: no streams")
    chosen = parser.parse_args(arguments)
    report: dict[str, Any] = {
        "graph_plants": graph_plants(str(build.library(emulated=chosen.emulated, defines=(build.PLANTED,))), 2),
        "sticky": sticky("cuda:emulated:wild-address" if chosen.emulated else "cuda:wild-address"),
    }
    if not chosen.emulated:
        report["streams"] = streams(400, 4)
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
