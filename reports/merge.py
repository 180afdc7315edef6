"""Stores of shards (or of several machines) into one. Merging twice, or in another order, gives the same store.

Part files have names that no other writer uses and are copied as they are; runs, sightings and events are united by their keys; a
finding's life follows from the united sightings.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reports.errors import StoreError, from_os_error
from reports.parts import TEMPORARY, sync_folder
from reports.schema import FINDINGS, JUDGE_PURPOSES, RUNS, TABLES
from reports.store import Store, engine_names, insert, one, status_of


def merge(stores: Iterable[str | os.PathLike[str]], target: str | os.PathLike[str]) -> Store:
    """Merges `stores` into `target` (made where it does not exist) and returns it, open.

    Raises StoreError: a source that is no store or is the target itself, disk full, not writable.
    """
    sources = [Path(path) for path in stores]
    for path in sources:
        if path.resolve() == Path(target).resolve():
            raise StoreError(path, "the target among the sources", "other stores", "leave it out: what the target holds is kept anyway")
    opened = [Store.create_or_open(path, readonly=True) for path in sources]
    merged = Store.create_or_open(target)
    for source in opened:
        try:
            _copy_parts(source.path, merged.path)
            _copy_capsules(source.path, merged.path)
        except OSError as problem:
            raise from_os_error(merged.path, problem) from None
        _unite(source, merged)
        source.close()
    _settle(merged)
    return merged


def _copy_parts(source: Path, target: Path) -> None:
    for table in TABLES:
        folder = target / "parts" / table
        for path in sorted((source / "parts" / table).glob("*.parquet")):
            if (folder / path.name).exists() and path.stat().st_size == (folder / path.name).stat().st_size:
                continue
            temporary = folder / f"{TEMPORARY}{os.uname().nodename}-{os.getpid()}-{path.name}"
            with open(path, "rb") as read, open(temporary, "wb") as write:
                shutil.copyfileobj(read, write)
                write.flush()
                os.fsync(write.fileno())
            os.rename(temporary, folder / path.name)
        sync_folder(folder)


def _copy_capsules(source: Path, target: Path) -> None:
    """The first capsule of a finding stays; symbolic links are not followed out of a store."""
    for folder in sorted((source / "findings").glob("F-*")):
        final = target / "findings" / folder.name
        if folder.is_dir() and not folder.is_symlink() and not final.exists():
            temporary = target / "findings" / f"{TEMPORARY}{os.getpid()}-{folder.name}"
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.copytree(folder, temporary, symlinks=True)
            os.rename(temporary, final)


def _unite(source: Store, merged: Store) -> None:
    runs, findings, sightings, events = source.runs(), source.findings(), source.sightings(), source.events()
    with merged.transaction() as database:
        for run in runs:
            old = one(database, "SELECT * FROM runs WHERE run_id = ?", (run["run_id"],), RUNS)
            insert(database, "runs", max(run, old or run, key=lambda row: float(row["finished"])))
        for row in findings:
            old = one(database, "SELECT * FROM findings WHERE finding_id = ?", (row["finding_id"],), FINDINGS)
            insert(database, "findings", row if old is None else _better(row, old))
        for seen in sightings:
            key = (seen["finding_id"], seen["run_id"])
            database.execute("INSERT OR IGNORE INTO sightings (finding_id, run_id) VALUES (?, ?)", key)
            database.execute(
                "UPDATE sightings SET hits = MAX(hits, ?), reproduced = MAX(reproduced, ?), attempts = MAX(attempts, ?)"
                " WHERE finding_id = ? AND run_id = ?",
                (seen["hits"], seen["reproduced"], seen["attempts"], *key),
            )
        for event in events:
            values = tuple(event[name] for name in ("time", "run_id", "kind", "finding_id", "text"))
            known = "SELECT 1 FROM events WHERE time = ? AND run_id = ? AND kind = ? AND finding_id = ? AND text = ?"
            if database.execute(known, values).fetchone() is None:
                database.execute("INSERT INTO events (time, run_id, kind, finding_id, text) VALUES (?, ?, ?, ?, ?)", values)


def _better(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The row with the smaller case; the same whichever comes first."""
    best = min(a, b, key=lambda row: (not row["minimal"], len(row["case"]), row["case"], -row["last_seen"], row["capsule"] == ""))
    return best | {"first_seen": min(a["first_seen"], b["first_seen"]), "last_seen": max(a["last_seen"], b["last_seen"])}


def _settle(merged: Store) -> None:
    """First and last sighting, hits and status of every finding, from the united sightings."""
    runs = {run["run_id"]: run for run in merged.runs()}
    last_campaign: dict[str, tuple[float, str]] = {}
    for run in runs.values():
        for engine in [] if run["purpose"] in JUDGE_PURPOSES else engine_names(run):
            last_campaign[engine] = max(last_campaign.get(engine, (0.0, "")), (run["started"], run["campaign"]))
    by_finding: dict[str, list[dict[str, Any]]] = {}
    for seen in merged.sightings():
        if seen["run_id"] in runs:
            by_finding.setdefault(seen["finding_id"], []).append(seen)
    with merged.transaction() as database:
        for row in database.execute("SELECT finding_id, engine FROM findings").fetchall():
            met = [s for s in by_finding.get(row["finding_id"], []) if s["hits"] or s["reproduced"]]
            if not met:
                continue
            met.sort(key=lambda s: (float(runs[s["run_id"]]["started"]), str(s["run_id"])))
            first, last = runs[met[0]["run_id"]], runs[met[-1]["run_id"]]
            newest = last_campaign.get(row["engine"], (0.0, last["campaign"]))[1]
            status = status_of(database, row["finding_id"], later_campaign=newest != last["campaign"])
            hits = sum(s["hits"] for s in met)
            database.execute(
                "UPDATE findings SET first_run = ?, last_run = ?, hits = ?, status = ? WHERE finding_id = ?",
                (first["run_id"], last["run_id"], hits, status, row["finding_id"]),
            )


__all__ = ["merge"]
