"""Run a stored case again, each time in a fresh worker: does it still fail, with the same fingerprint?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns import fingerprint
from campaigns.capsule import CapsuleError, history, read
from campaigns.case import Case, CaseError, from_json
from campaigns.fingerprint import Fingerprint
from campaigns.isolation import Supervisor
from campaigns.trial import Bench, Outcome, patience
from oracles.judgement import FINDINGS
from reports.store import DATABASE, Store, StoreError
from reports.store import fingerprint as store_fingerprint

ATTEMPTS = 3  # a defect that fails half of the time passes three replays once in eight; `nightly` keeps the sum over the nights


@dataclass(frozen=True)
class Stored:
    """A case to replay; `wanted` is None for a bare case file, then any finding counts. `engine_spec` as recorded, or empty. `earlier`: cases that
    must have run before it in the same engine."""

    case: Case
    wanted: Fingerprint | None
    engine_spec: str
    finding_id: str
    earlier: tuple[Case, ...] = ()


@dataclass(frozen=True)
class Replay:
    reproduced: int
    attempts: int
    outcome: Outcome  # of the last attempt
    changed: bool  # it fails, but with another fingerprint

    @property
    def status(self) -> str:
        if self.reproduced == self.attempts:
            return "reproduced"
        return "flaky" if self.reproduced else "changed" if self.changed else "passes"


def stored(name: str, store: str) -> Stored:
    """`name`: a finding's id in `store`, a capsule's folder, or a file with one case line.

    Raises CapsuleError, CaseError or StoreError with one sentence.
    """
    path = Path(name)
    if path.is_dir():
        capsule = read(path)
        f = capsule.finding
        wanted = Fingerprint(f["engine"], f["verdict"], f["op"] or f["rule"], f["output"], f["rung"])
        return Stored(capsule.case, wanted, str(f.get("engine_spec", "")), str(f["id"]), capsule.earlier)
    if path.is_file():
        if path.name == "case.json" and (path.parent / "arrays.safetensors").is_file():
            return stored(str(path.parent), store)
        try:
            return Stored(from_json(path.read_text("utf-8")), None, "", "")
        except UnicodeDecodeError:
            raise CaseError(f"{path}: not a case: it is no text") from None
    if not (Path(store) / DATABASE).exists():
        raise CapsuleError(
            f"{name}: no such file or folder, and {store} is no store: give a finding's id with --store, a capsule or a case file"
        )
    with Store.create_or_open(store, readonly=True) as opened:
        rows = {row["finding_id"]: row for row in opened.findings()}
        earlier = history(opened.capsule_folder(name)) if name in rows else ()
    if name not in rows:
        raise StoreError(store, f"no finding {name}", "the id of a finding", f"choose one of {', '.join(sorted(rows)) or '(none)'}")
    row = rows[name]
    return Stored(from_json(row["case"]), Fingerprint(*store_fingerprint(row)), _spec_of(row), name, earlier)


def _spec_of(row: Mapping[str, Any]) -> str:
    words = str(row["replay"]).split()
    return words[words.index("--engine") + 1] if "--engine" in words[:-1] else ""


def replayed(
    supervisor: Supervisor,
    case: Case,
    wanted: Fingerprint | None,
    attempts: int = ATTEMPTS,
    *,
    earlier: Sequence[Case] = (),
    until: float = float("inf"),
) -> Replay:
    """Every attempt in a fresh worker, behind the cases `earlier`. The engine's name is left out of the comparison: another build may call itself otherwise.

    `until`: of time.monotonic(), after which no attempt but the first is begun; `Replay.attempts` says how many were made.
    """
    reproduced, made, changed = 0, 0, False
    outcome: Outcome | None = None
    for number in range(attempts):
        if number and time.monotonic() > until:
            break
        supervisor.restart()
        made += 1
        bench = Bench(supervisor)
        for one in earlier:
            bench.outcome(one)
        outcome = bench.outcome(case)
        found = fingerprint.first(supervisor.description.name, list(outcome.judgements))
        same = found is not None and (wanted is None or found[0][1:] == wanted[1:] or wanted.verdict == "FLAKY")
        reproduced += same
        changed |= found is not None and not same
    assert outcome is not None, "attempts must be at least 1"
    return Replay(reproduced, made, outcome, changed)


def fails_again(supervisor: Supervisor, case: Case, wanted: Fingerprint) -> bool:
    return bool(replayed(supervisor, case, wanted, 1).reproduced)


def replayed_findings(job: Mapping[str, Any]) -> dict[str, Any]:
    """Findings of the job's engine in the store, replayed and recorded: those not fixed, and once more those that were.

    `seconds` of the job: as many as this allows, at least one, those first that were replayed longest ago, so that the nights take turns.
    `waiting`: ids of those that were left for another night.
    """
    began = time.monotonic()
    until = began + job.get("seconds", float("inf"))
    replays: list[dict[str, Any]] = []
    waiting: list[str] = []
    with Supervisor(job["engine"], deadline_s=patience()) as supervisor, Store.create_or_open(job["store"]) as store:
        for row in in_turn(store, supervisor.description.name):
            if replays and time.monotonic() > until:
                waiting.append(row["finding_id"])
                continue
            try:
                wanted = Fingerprint(*store_fingerprint(row))
                earlier = history(store.capsule_folder(row["finding_id"]))
                result = replayed(supervisor, from_json(row["case"]), wanted, job.get("attempts", ATTEMPTS), earlier=earlier, until=until)
            except CaseError as problem:
                replays.append({"finding_id": row["finding_id"], "status": row["status"], "note": str(problem)})
                continue
            status = store.record_replay(row["finding_id"], job["run_id"], result.reproduced, result.attempts)
            replays.append({
                "finding_id": row["finding_id"], "status": status, "before": row["status"], "reproduced": result.reproduced, "attempts": result.attempts,
                "verdict": row["verdict"], "op": row["op"], "rung": row["rung"], "message": row["message"],
                "unverified": result.outcome.verdict not in FINDINGS and not result.outcome.judgements,
            })  # fmt: skip
    return {"replays": replays, "waiting": waiting}


def in_turn(store: Store, engine: str) -> list[dict[str, Any]]:
    """The findings of an engine: open ones before fixed ones, and of each kind the one first whose last replay is the oldest."""
    started = {run["run_id"]: float(run["started"]) for run in store.runs()}
    last: dict[str, float] = {}
    for seen in store.sightings():
        if seen["attempts"]:
            last[seen["finding_id"]] = max(last.get(seen["finding_id"], 0.0), started.get(seen["run_id"], 0.0))
    rows = [row for row in store.findings() if row["engine"] == engine]
    return sorted(rows, key=lambda row: (row["status"] == "fixed", last.get(row["finding_id"], 0.0)))
