"""The mutation score: plants found, localised, minimised, reproduced; benign variants flagged. The measure of the judge, in every report.

A plant counts as found when a check of its engine has a finding, as localised when the first finding names one of its expected operations or
rules, and as reproduced when the capsule's repro.py fails again in a fresh process.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.repro import FAILS_AGAIN
from campaigns.runner import EngineResult, NotLoadable, Options, check_engine
from impls.planted import Plant
from reports.store import Store

REPRO_S = 120.0  # a fresh process with NumPy and the engine; a hang costs the program's own limit
HANG_S = 5.0  # of repro.py, for plants that hang


@dataclass(frozen=True)
class Score:
    """One plant (or benign variant): what the check showed. Columns of the store's table `mutation`."""

    mutant: str
    benign: bool
    source: str
    defect_class: str
    expected_op: str
    found_op: str
    found: bool
    localised: bool
    reproduced: bool
    minimal_nodes: int
    stated_nodes: int
    seconds: float
    checks: int
    trials: int
    finding_id: str


def measured(plant: Plant, run_id: str, options: Options) -> Score:
    """One check of one plant, stopped at its first finding, which is minimised and reproduced."""
    result = check_engine(plant.engine, run_id, dataclasses.replace(options, stop_at_first=True, jobs=options.jobs or 1))
    finding = first_finding(result, plant.expected_ops)
    base: dict[str, Any] = {
        "mutant": plant.name,
        "benign": False,
        "source": plant.source,
        "defect_class": plant.bug_class,
        "expected_op": ", ".join(plant.expected_ops),
        "stated_nodes": plant.smallest_nodes,
        "trials": result.trials,
    }
    if finding is None:
        return Score(
            **base, found_op="", found=False, localised=False, reproduced=False, minimal_nodes=-1, seconds=-1.0, checks=0, finding_id=""
        )
    name = str(finding["finding_id"])
    with Store.create_or_open(options.store, readonly=True) as store:
        row = next(row for row in store.findings() if row["finding_id"] == name)
        folder = store.path / row["capsule"] if row["capsule"] else None
    return Score(
        **base,
        found_op=row["op"] or row["rule"],
        found=True,
        localised=is_localised(row, plant.expected_ops),
        reproduced=folder is not None and reproduces(folder, hangs=row["verdict"] == "HUNG"),
        minimal_nodes=row["nodes"] if row["minimal"] else -1,
        seconds=result.first_finding_s,
        checks=row["checks"],
        finding_id=name,
    )


def first_finding(result: EngineResult, expected: Sequence[str]) -> dict[str, Any] | None:
    """The first finding; among those of one batch one at the right place, because they were met at the same moment."""
    events = list(result.findings.values())
    right = [event for event in events if set(event["fingerprint"][2:4]) & set(expected)]
    return next(iter([*right, *events]), None)


def is_localised(row: Mapping[str, Any], expected: Sequence[str]) -> bool:
    return bool({row["op"], row["rule"], row["output"]} & set(expected))


def reproduces(folder: Path, *, hangs: bool = False) -> bool:
    """repro.py in a fresh process, outside of this one's working directory and path."""
    timeout = ["--timeout", str(HANG_S)] if hangs else []
    try:
        ended = subprocess.run([sys.executable, str(folder / "repro.py"), *timeout], capture_output=True, timeout=REPRO_S, cwd=folder)
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == FAILS_AGAIN


def false_alarm(engine: str, name: str, run_id: str, options: Options) -> Score:
    """A benign variant: `found` is a false alarm. Raises NotLoadable."""
    result = check_engine(engine, run_id, dataclasses.replace(options, stop_at_first=True, minimise=False, jobs=options.jobs or 1))
    finding = first_finding(result, ())
    return Score(
        mutant=name,
        benign=True,
        source="",
        defect_class="benign",
        expected_op="",
        found_op="" if finding is None else str(finding["fingerprint"][2]),
        found=finding is not None,
        localised=False,
        reproduced=False,
        minimal_nodes=-1,
        stated_nodes=-1,
        seconds=result.first_finding_s,
        checks=0,
        trials=result.trials,
        finding_id="" if finding is None else str(finding["finding_id"]),
    )


def campaign(plants: Sequence[Plant], variants: Sequence[tuple[str, str]], options: Options, say: Any = print) -> list[Score]:
    """Every plant, then every benign variant ((name, engine)); rows go to the store one by one."""
    with Store.create_or_open(options.store) as store:
        run_id = store.start_run(
            {"purpose": "mutation", "command": options.command, "seed": str(options.seed), "budget": f"{options.trials} trials"}
        )
        scores: list[Score] = []
        with store.writer(run_id, "mutation") as writer:
            for plant in plants:
                began = time.monotonic()
                try:
                    score = measured(plant, run_id, options)
                except NotLoadable as problem:
                    say(f"{plant.name}: cannot be loaded: {problem}")
                    continue
                scores.append(score)
                writer.add_mutation(dataclasses.asdict(score))
                writer.flush()
                say(f"{in_words(score)} ({time.monotonic() - began:.1f} s)")
            for name, engine in variants:
                score = false_alarm(engine, name, run_id, options)
                scores.append(score)
                writer.add_mutation(dataclasses.asdict(score))
                say(in_words(score))
        store.finish_run(run_id, {"stopped": "complete", "trials": sum(score.trials for score in scores)})
    return scores


def in_words(score: Score) -> str:
    if score.benign:
        return f"{score.mutant}: {'FALSE ALARM in ' + score.found_op if score.found else 'clean'} after {score.trials} trials"
    if not score.found:
        return f"{score.mutant}: NOT FOUND in {score.trials} trials (expected {score.expected_op})"
    place = "localised" if score.localised else f"NOT LOCALISED (expected {score.expected_op})"
    again = "reproduced" if score.reproduced else "NOT REPRODUCED"
    return f"{score.mutant}: found in {score.found_op}, {place}, {score.minimal_nodes} nodes (stated {score.stated_nodes}), {score.checks} checks, {again}"
