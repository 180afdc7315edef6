"""The nightly campaign: every known minimum first, then discovery with what is left of the budget; what changed since last night.

The budget is for everything: replays get at most half of an engine's time and go on next night where they ended, a shard that meets something new
leaves time to make it small, and what one engine does not use is for the next. The last part is for the judge itself: a rotating sample of the
mutation library. Each night of a store draws from a seed of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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
from impls.native.build import NoCompiler, find_compiler
from impls.planted import Plant
from impls.planted.mutants import PLANTS
from impls.planted.native_plants import PLANTS as NATIVE_PLANTS
from reports.store import Store

SAMPLE_SHARE = 0.05  # of the night, for a rotating sample of the mutation library: 90 s of half an hour, about twenty plants
SAMPLE_LEAST_S, SAMPLE_SHARE_MAX = 20.0, 0.2  # a short night still tries a few, but gives no more than a fifth of its time
SAMPLE_MIN_S = 8.0  # a night of less than 40 s tries none
REPLAY_SHARE = 0.5  # of an engine's time, for known findings; those that wait come first next night
RESERVE_SHARE, RESERVE_MAX_S = 0.25, 300.0  # of an engine's time, to make small what is new
PAGE_S = 1.5  # to read a store of some nights and write its page
DISCOVERY_MIN_S = 5.0  # even after a long replay, so that a short budget still looks for something new
TRIALS_MAX = 10**9  # discovery ends by the clock
STATUSES = ("new", "reopened", "changed", "flaky", "known", "fixed")


@dataclass(frozen=True)
class Night:
    """`findings`: rows of the store that this run met or replayed, with their status now, and those that stand and `waiting` had no time for;
    `accepted`: ids that the ledger excuses."""

    run_id: str
    results: list[EngineResult]
    findings: list[dict[str, Any]]
    accepted: frozenset[str]
    sample: tuple[Score, ...] = ()  # plants of the mutation library that the judge was tried on tonight
    waiting: frozenset[str] = frozenset()
    seed: int = 0

    def by_status(self) -> dict[str, list[dict[str, Any]]]:
        return {status: [row for row in self.findings if row["status"] == status] for status in STATUSES}

    @property
    def failing(self) -> list[dict[str, Any]]:
        """What makes the night red: everything that fails and that no ledger entry accepts."""
        return [row for row in self.findings if row["status"] != "fixed" and row["finding_id"] not in self.accepted]


def nightly(engines: Sequence[str], options: Options, seconds: float, progress: Progress = silent) -> Night:
    """`seconds` for everything, shared evenly over the engines. Raises as `campaigns.runner.check` does."""
    until = time.monotonic() + seconds
    with Store.create_or_open(options.store) as store:
        store.sweep()
        options = dataclasses.replace(options, seed=options.seed + sum(run["purpose"] == "nightly" for run in store.runs()))
        run_id = store.start_run(run_row(engines, options))
        accepted = frozenset(store.ledger())  # a ledger that cannot be read ends the night before it begins
    results: list[EngineResult] = []
    waiting: set[str] = set()
    stopped = "error"
    sample_s = sample_seconds(seconds)
    try:
        for number, engine in enumerate(engines):
            share = (until - sample_s - time.monotonic()) / (len(engines) - number)
            run = partial(_one, engine, run_id, options, share, progress, waiting)
            results.append(loaded_or_not(engine, run, told(engines, progress)))
        refuse_nothing_loaded(results)
        stopped = "budget"
    except KeyboardInterrupt:
        stopped = "interrupted"
        raise
    finally:
        with Store.create_or_open(options.store) as store:
            store.finish_run(run_id, {"stopped": stopped, "trials": sum(result.trials for result in results)})
    sample: list[Score] = []
    if sample_s:

        def tried(score: Score) -> None:
            progress("the judge", {"event": "plant", "plant": score.mutant, "found": score.found, "localised": score.localised})

        sample = nightly_sample(options, max(SAMPLE_MIN_S, until - time.monotonic()), library(), tried)
    with Store.create_or_open(options.store, readonly=True) as store:
        met = {row["finding_id"] for row in store.sightings() if row["run_id"] == run_id}
        rows = store.findings()
    left = frozenset(row["finding_id"] for row in rows if row["finding_id"] in waiting - met and row["status"] != "fixed")
    findings = [row for row in rows if row["finding_id"] in met | left]
    return Night(run_id, results, findings, accepted, tuple(sample), left, options.seed)


def sample_seconds(seconds: float) -> float:
    """Of a night, for the judge itself; 0 where it is too short for one plant."""
    share = min(max(SAMPLE_SHARE * seconds, SAMPLE_LEAST_S), SAMPLE_SHARE_MAX * seconds)
    return share if share >= SAMPLE_MIN_S else 0.0


def library() -> list[Plant]:
    """Every plant that this machine can load (those in C++ need a compiler), the classes in turn, so that each is sampled from the first nights on."""
    plants = list(PLANTS.values())
    with contextlib.suppress(NoCompiler):
        find_compiler()
        plants += NATIVE_PLANTS.values()
    by_class: dict[str, list[Plant]] = {}
    for plant in plants:
        by_class.setdefault(plant.bug_class, []).append(plant)
    return [plant for turn in itertools.zip_longest(*by_class.values()) for plant in turn if plant is not None]


def _one(engine: str, run_id: str, options: Options, seconds: float, progress: Progress, waiting: set[str]) -> EngineResult:
    until = time.monotonic() + seconds
    gone: list[str] = []
    with Shards(1) as shards:
        job = {"do": "replay", "engine": engine, "store": options.store, "run_id": run_id, "seconds": REPLAY_SHARE * seconds}
        shards.send(0, job)
        for number, event in shards.events({0}):
            if event["event"] == "replayed":
                for one in event["replays"]:
                    progress(engine, {"event": "replay", **one})
                gone = [one["finding_id"] for one in event["replays"] if one.get("reproduced") == 0]
                waiting |= set(event["waiting"])
                shards.idle(number)
    left = max(DISCOVERY_MIN_S, until - time.monotonic())
    searching = dataclasses.replace(
        options, seconds=left, reserve=min(RESERVE_SHARE * left, RESERVE_MAX_S), until=time.monotonic() + left, trials=TRIALS_MAX,
        not_reproduced=tuple(gone),
    )  # fmt: skip
    return check_engine(engine, run_id, searching, progress)
