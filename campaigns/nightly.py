"""The nightly campaign: every known minimum first, then discovery with what is left of the budget; what changed since last night."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from campaigns.mutation import Score, nightly_sample
from campaigns.runner import (
    EngineResult,
    Options,
    Progress,
    Shards,
    check_engine,
    loaded_or_not,
    refuse_nothing_loaded,
    run_row,
    silent,
    told,
)
from impls.planted.mutants import PLANTS
from reports.store import Store

SAMPLE_SHARE = 0.05  # of the night, for a rotating sample of the mutation library: 90 s of half an hour, about eight plants
SAMPLE_MIN_S = 20.0  # a shorter night has no time for it
DISCOVERY_MIN_S = 5.0  # even after a long replay, so that a short budget still looks for something new
TRIALS_MAX = 10**9  # discovery ends by the clock
STATUSES = ("new", "reopened", "changed", "flaky", "known", "fixed")


@dataclass(frozen=True)
class Night:
    """`findings`: rows of the store that this run met or replayed, with their status now; `accepted`: ids that the ledger excuses."""

    run_id: str
    results: list[EngineResult]
    findings: list[dict[str, Any]]
    accepted: frozenset[str]
    sample: tuple[Score, ...] = ()  # plants of the mutation library that the judge was tried on tonight

    def by_status(self) -> dict[str, list[dict[str, Any]]]:
        return {status: [row for row in self.findings if row["status"] == status] for status in STATUSES}

    @property
    def failing(self) -> list[dict[str, Any]]:
        """What makes the night red: everything that fails and that no ledger entry accepts."""
        return [row for row in self.findings if row["status"] != "fixed" and row["finding_id"] not in self.accepted]


def nightly(engines: Sequence[str], options: Options, seconds: float, progress: Progress = silent) -> Night:
    """`seconds` for everything, shared evenly over the engines. Raises as `campaigns.runner.check` does."""
    with Store.create_or_open(options.store) as store:
        run_id = store.start_run(run_row(engines, options))
    results: list[EngineResult] = []
    stopped = "error"
    sample_s = SAMPLE_SHARE * seconds if SAMPLE_SHARE * seconds >= SAMPLE_MIN_S else 0.0
    try:
        for engine in engines:
            share = (seconds - sample_s) / len(engines)
            results.append(loaded_or_not(engine, partial(_one, engine, run_id, options, share, progress), told(engines, progress)))
        refuse_nothing_loaded(results)
        stopped = "budget"
    except KeyboardInterrupt:
        stopped = "interrupted"
        raise
    finally:
        with Store.create_or_open(options.store) as store:
            store.finish_run(run_id, {"stopped": stopped, "trials": sum(result.trials for result in results)})
    sample = nightly_sample(options, sample_s, list(PLANTS.values())) if sample_s else []
    with Store.create_or_open(options.store, readonly=True) as store:
        met = {row["finding_id"] for row in store.sightings() if row["run_id"] == run_id}
        findings = [row for row in store.findings() if row["finding_id"] in met]
        accepted = frozenset(store.ledger())
    return Night(run_id, results, findings, accepted, tuple(sample))


def _one(engine: str, run_id: str, options: Options, seconds: float, progress: Progress) -> EngineResult:
    began = time.monotonic()
    gone: list[str] = []
    with Shards(1) as shards:
        shards.send(0, {"do": "replay", "engine": engine, "store": options.store, "run_id": run_id})
        for number, event in shards.events({0}):
            if event["event"] == "replayed":
                for one in event["replays"]:
                    progress(engine, {"event": "replay", **one})
                gone = [one["finding_id"] for one in event["replays"] if one.get("reproduced") == 0]
                shards.idle(number)
    left = max(DISCOVERY_MIN_S, seconds - (time.monotonic() - began))
    searching = dataclasses.replace(options, seconds=left, trials=TRIALS_MAX, not_reproduced=tuple(gone))
    return check_engine(engine, run_id, searching, progress)
