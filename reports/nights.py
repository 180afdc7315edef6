"""What a user of nightly campaigns asks next: the trend over the nights, the score per class of defect, and the slowest cases.

Pure reading and counting, from the tables that `reports.page_data` has read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import pyarrow as pa

from reports.cells import AXES, Cell, Crossed, reachable
from reports.schema import SEARCH_S

NIGHTS_MAX = 30  # on the page, newest first
SLOWEST_MAX = 10


@dataclass
class Night:
    """A campaign with the purpose nightly. `cells`: of the crossed coverage, hit in this night, hit for the first time in this store, and hit so
    far; `sampled`, `sample_found`: plants of the mutation library, tonight; `plants`, `plants_found`: the newest measure of each until then."""

    campaign: str
    started: float
    ended: str
    trials: int = 0
    unverified: int = 0
    findings: int = 0
    first_met: int = 0
    sampled: int = 0
    sample_found: int = 0
    plants: int = 0
    plants_found: int = 0
    cells_hit: int = 0
    cells_new: int = 0
    cells_so_far: int = 0


@dataclass
class ClassScore:
    """Planted defects of one class by their newest measure; dates in seconds since 1970, 0 where there is none."""

    name: str
    found: int = 0
    elsewhere: int = 0  # of `found`: not at the operation where they were planted
    missed: list[str] = field(default_factory=list)
    unsampled: list[str] = field(default_factory=list)  # with those that were not met in a search of less than SEARCH_S
    oldest: float = 0.0
    newest: float = 0.0

    @property
    def measured(self) -> int:
        return self.found + len(self.missed)

    @property
    def plants(self) -> int:
        return self.measured + len(self.unsampled)


def dated(mutation: pd.DataFrame, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table `mutation`, oldest first; `time` of rows from before that column is the start of their run."""
    started = {run["run_id"]: float(run["started"]) for run in history}
    rows: list[dict[str, Any]] = [{str(k): v for k, v in row.items()} for row in mutation.to_dict("records")]
    for row in rows:
        row["time"] = float(row["time"]) or started.get(row["run_id"], 0.0)
        row["cut"] = not row["found"] and 0 < float(row["searched"]) < SEARCH_S
        row["measured"] = not row["cut"] and (bool(row["benign"] or row["found"]) or int(row["trials"]) > 0)
    return sorted(rows, key=lambda row: row["time"])


def newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest measure of each mutant; where there is none, that it is in the library."""
    out: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["measured"] or row["mutant"] not in out:
            out[row["mutant"]] = row
    return list(out.values())


def scores(rows: list[dict[str, Any]]) -> list[ClassScore]:
    """One per class, by name; `rows`: of `newest`."""
    by_class: dict[str, ClassScore] = {}
    for row in rows:
        if row["benign"]:
            continue
        score = by_class.setdefault(row["defect_class"], ClassScore(row["defect_class"]))
        if not row["measured"]:
            score.unsampled.append(row["mutant"])
            continue
        score.newest = max(score.newest, row["time"])
        score.oldest = min(score.oldest or row["time"], row["time"])
        if row["found"]:
            score.found += 1
            score.elsewhere += not row["localised"]
        else:
            score.missed.append(row["mutant"])
    return [by_class[name] for name in sorted(by_class)]


def whole(parts: list[ClassScore]) -> ClassScore:
    """All classes as one."""
    dates = [part for part in parts if part.measured]
    return ClassScore(
        "all",
        sum(part.found for part in parts),
        sum(part.elsewhere for part in parts),
        [name for part in parts for name in part.missed],
        [name for part in parts for name in part.unsampled],
        min((part.oldest for part in dates), default=0.0),
        max((part.newest for part in dates), default=0.0),
    )


def summed(cells: pa.Table) -> pd.DataFrame:
    """One row per run, engine and cell. A month of nights on many cores is millions of rows of a few words, so words are numbers until then."""
    keys = ["run_id", "engine", *AXES]
    for name in keys:
        cells = cells.set_column(cells.schema.get_field_index(name), name, cells.column(name).dictionary_encode())
    frame: pd.DataFrame = cells.select([*keys, "trees"]).to_pandas()
    sums = frame.groupby(keys, as_index=False, observed=True)[["trees"]].sum()
    for name in ("run_id", "engine"):  # these are compared and joined with those of other tables
        sums[name] = sums[name].astype(str)
    return sums


def crossed(cells: pd.DataFrame) -> Crossed | None:
    """None where the store has no row of the table `cells`: written before that table, or by campaigns without sessions. `cells`: of `summed`."""
    if cells.empty:
        return None
    by_engine = _by(cells, "engine")
    return Crossed(sum(by_engine.values(), Counter()), {engine: sum(map(reachable, hit)) for engine, hit in by_engine.items()})


def nights(
    history: list[dict[str, Any]], tables: dict[str, pd.DataFrame], findings: list[dict[str, Any]], mutation: list[dict[str, Any]]
) -> list[Night]:
    """Newest first. `history`: oldest first; `mutation`: of `dated`."""
    campaign_of = {run["run_id"]: run["campaign"] for run in history if run["purpose"] == "nightly"}
    out: dict[str, Night] = {}
    for run in history:
        if run["run_id"] in campaign_of:
            out.setdefault(run["campaign"], Night(run["campaign"], float(run["started"]), ""))
            out[run["campaign"]].ended = (run["stopped"] or "finished") if run["finished"] else "no end recorded"
    trials = tables["trials"]
    sums = trials.groupby(["run_id", "verdict"], as_index=False).size() if len(trials) else pd.DataFrame()
    for row in _records(sums):
        if row["run_id"] in campaign_of:
            night = out[campaign_of[row["run_id"]]]
            night.trials += int(row["size"])
            night.unverified += int(row["size"]) * (row["verdict"] == "UNVERIFIED")
    for finding in findings:
        for campaign in {campaign_of[run_id] for run_id in finding["met_in"] if run_id in campaign_of}:
            out[campaign].findings += 1
        if finding["first_run"] in campaign_of:
            out[campaign_of[finding["first_run"]]].first_met += 1
    _cells_of(out, campaign_of, tables["cells"])
    ordered = sorted(out.values(), key=lambda night: night.started)
    known: dict[str, bool] = {}
    left = [row for row in mutation if row["measured"] and not row["benign"]]
    ends = [*(night.started for night in ordered[1:]), float("inf")]
    for night, end in zip(ordered, ends, strict=False):
        while left and left[0]["time"] < end:
            row = left.pop(0)
            known[row["mutant"]] = bool(row["found"])
            if row["time"] >= night.started:
                night.sampled += 1
                night.sample_found += bool(row["found"])
        night.plants, night.plants_found = len(known), sum(known.values())
    return ordered[::-1]


def _cells_of(out: dict[str, Night], campaign_of: dict[str, str], cells: pd.DataFrame) -> None:
    by_run = {run_id: set(hit) for run_id, hit in _by(cells, "run_id").items()}
    so_far: set[Cell] = set()
    for run_id in [run_id for run_id in by_run if run_id not in campaign_of]:
        so_far |= by_run.pop(run_id)  # other campaigns into the same store have no place in the order of nights: what they hit is not new
    by_campaign: dict[str, set[Cell]] = {}
    for run_id, hit in by_run.items():
        by_campaign.setdefault(campaign_of[run_id], set()).update(hit)
    for night in sorted(out.values(), key=lambda night: night.started):
        hit = by_campaign.get(night.campaign, set())
        night.cells_hit, night.cells_new = len(hit), len(hit - so_far)
        so_far |= hit
        night.cells_so_far = len(so_far)


def slowest(trials: pd.DataFrame) -> list[dict[str, Any]]:
    """The slowest trials, with their case where the store kept it."""
    if trials.empty:
        return []
    names = ["engine", "kind", "rung", "verdict", "duration_ms", "case_id", "case", "seed"]
    return _records(trials.nlargest(SLOWEST_MAX, "duration_ms")[names])


def _by(cells: pd.DataFrame, column: str) -> dict[str, Counter[Cell]]:
    sums = cells.groupby([column, *AXES], as_index=False, observed=True)["trees"].sum()
    out: dict[str, Counter[Cell]] = {}
    for key, trees, *cell in zip(*(sums[name].to_list() for name in (column, "trees", *AXES)), strict=True):
        out.setdefault(str(key), Counter())[tuple(cell)] = int(trees)
    return out


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
