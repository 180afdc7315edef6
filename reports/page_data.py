"""A store as page data: what the page and the summaries say, before it becomes HTML, XML or text. Pure reading and counting.

Scope: for each engine the newest campaign that ran it. Runs whose purpose is "mutation" or "false-alarms" judge the judge: their engines are
wrong (or right) on purpose, so they count in the mutation score and in the false alarms, not among the engines under test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from reports import nights, numbers
from reports.cells import Crossed
from reports.nights import ClassScore, Night
from reports.schema import FINDING_VERDICTS, JUDGE_PURPOSES, PASSING_VERDICTS, RUNGS, STATUSES, VERDICTS, from_json
from reports.store import Store, StoreError, engine_names

# Rows of the heat map in data order; what is not listed follows by name.
OP_ORDER = [
    "embed",
    "rms_norm",
    "matmul",
    "rope",
    "q_absorb",
    "scores",
    "softmax",
    "o_latent",
    "tree_attention",
    "o_heads",
    "router_scores",
    "route",
    "swiglu",
    "moe",
    "combine",
    "add",
    "argmax",
    "draft_table",
    "best_first_tree",
    "tree_mask",
    "accept",
    "compact",
]


@dataclass
class Rung:
    """`state`: pass, first (the first that fails), later (fails too), unverified, unsupported or absent."""

    name: str
    state: str
    trials: int = 0
    failing: int = 0
    unverified: int = 0
    checked: int = 0


@dataclass
class Cell:
    """The largest share of the bound of one op in one layer."""

    op: str
    layer: str
    share: float
    judgements: int
    checked: int
    tap: str


@dataclass
class HeatMap:
    ops: list[str]
    layers: list[str]
    cells: dict[tuple[str, str], Cell]

    @property
    def closest(self) -> list[Cell]:
        """The cells with the largest shares."""
        return sorted((c for c in self.cells.values() if c.share > 0), key=lambda c: -c.share)[:8]


@dataclass
class EngineData:
    name: str
    version: str = ""
    profile: str = ""
    description: str = ""
    trials: int = 0
    checked: int = 0
    unverified: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    ladder: list[Rung] = field(default_factory=list)
    heat: HeatMap | None = None
    seconds: float = 0.0

    @property
    def first_failing(self) -> str:
        return next((rung.name for rung in self.ladder if rung.state == "first"), "")


@dataclass
class Alarms:
    """False alarms on engines known to be right. `trials` 0: not measured."""

    trials: int = 0
    alarms: int = 0

    @property
    def sentence(self) -> str:
        if not self.trials:
            return "not measured in this store"
        if self.alarms:
            rate = numbers.rate(self.alarms, self.trials)
            return f"{numbers.count(self.alarms)} in {numbers.plural(self.trials, 'trial')} on engines known to be right ({rate})"
        limit = numbers.below(self.trials)
        return f"none in {numbers.plural(self.trials, 'trial')} on engines known to be right: below {limit} with 95 % confidence"


@dataclass
class Region:
    name: str
    reached: list[tuple[str, int, int]]  # value, trials, findings
    never: list[str]


@dataclass
class Page:
    engines: list[EngineData]
    findings: list[dict[str, Any]]
    runs: list[dict[str, Any]]  # of the scope, oldest first
    history: list[dict[str, Any]]  # all runs, newest first
    alarms: Alarms
    coverage: list[Region]
    cells: Crossed | None  # of the scope; None where nothing was crossed
    mutation: list[dict[str, Any]]  # newest measure per mutant
    score: list[ClassScore]  # per class of planted defects, with those that were not measured yet
    nights: list[Night]  # newest first
    slowest: list[dict[str, Any]]  # trials of the scope
    planted_findings: int  # findings on engines that are wrong on purpose; listed in the mutation table only
    problems: list[str]  # of the store: torn files, a broken ledger, an unfinished run
    store: str

    @property
    def trials(self) -> int:
        return sum(engine.trials for engine in self.engines)

    @property
    def verdicts(self) -> dict[str, int]:
        return {v: n for v in VERDICTS if (n := sum(engine.verdicts.get(v, 0) for engine in self.engines))}

    @property
    def passed(self) -> int:
        return sum(n for v, n in self.verdicts.items() if v in PASSING_VERDICTS)

    @property
    def checked(self) -> int:
        return sum(engine.checked for engine in self.engines)

    @property
    def unverified_scalars(self) -> int:
        return sum(engine.unverified for engine in self.engines)

    @property
    def planted(self) -> ClassScore:
        """The mutation score of all classes."""
        return nights.whole(self.score)

    @property
    def score_sentence(self) -> str:
        """How many of the planted defects that were measured were found, and how many were not sampled yet."""
        planted = self.planted
        if not planted.plants:
            return "not measured in this store"
        later = f"; {numbers.count(len(planted.unsampled))} not yet sampled" if planted.unsampled else ""
        if not planted.measured:
            return f"none measured{later}"
        return f"{numbers.count(planted.found)} of {numbers.plural(planted.measured, 'planted defect')} found{later}"

    @property
    def cells_sentence(self) -> str:
        """How much of the crossed coverage was hit, and how much of that for the first time by the newest night; empty where nothing was crossed."""
        if self.cells is None:
            return ""
        rate = numbers.rate(self.cells.hit, self.cells.cells)
        first = f", {numbers.count(self.nights[0].cells_new)} in the newest night for the first time" if len(self.nights) > 1 else ""
        return f"{numbers.count(self.cells.hit)} of {numbers.count(self.cells.cells)} reachable cells hit ({rate}){first}"

    @property
    def open_findings(self) -> list[dict[str, Any]]:
        """All but fixed, accepted, wontfix and duplicate ones."""
        return [f for f in self.findings if f["status"] != "fixed" and not f["ledger"]]

    @property
    def status_counts(self) -> dict[str, int]:
        return {s: n for s in STATUSES if (n := sum(f["status"] == s for f in self.findings))}

    @property
    def state(self) -> str:
        """bad: open findings; none: nothing was proven; good."""
        if self.open_findings:
            return "bad"
        return "good" if self.passed else "none"

    @property
    def headline(self) -> str:
        trials = numbers.plural(self.trials, "trial")
        if self.open_findings:
            engines = {f["engine"] for f in self.open_findings}
            on = f" on {numbers.plural(len(engines), 'engine')}" if len(self.engines) > 1 else ""
            return f"{numbers.plural(len(self.open_findings), 'open finding')}{on} in {trials}"
        if not self.trials:
            return "No trials: nothing was checked"
        if not self.passed:
            return f"Nothing was verified in {trials}"
        return f"No open findings in {trials}"

    @property
    def subline(self) -> str:
        """Where each engine first leaves the specification, or how much was not proven."""
        said: dict[str, list[str]] = {}
        for engine in self.engines:
            said.setdefault(_place(engine), []).append(engine.name)
        if not said or list(said) == ["no trials"]:
            return ""
        if len(self.engines) == 1:
            (what,) = said
            return what[:1].upper() + what[1:] + "."
        return "; ".join(f"{', '.join(names)}: {what}" for what, names in said.items()) + "."

    @property
    def unverified_sentence(self) -> str:
        """Always shown, whatever its size."""
        trials = self.verdicts.get("UNVERIFIED", 0)
        return f"{numbers.count(trials)} of {numbers.plural(self.trials, 'trial')}" if self.trials else "no trials"

    @property
    def unverified_scalars_sentence(self) -> str:
        whole = self.checked + self.unverified_scalars
        return f"{numbers.rate(self.unverified_scalars, whole)} of {numbers.plural(whole, 'scalar')}" if whole else "no scalars compared"


def _place(engine: EngineData) -> str:
    if engine.first_failing:
        return f"the first rung that fails is {engine.first_failing}"
    if not engine.trials:
        return "no trials"
    if not any(engine.verdicts.get(v) for v in PASSING_VERDICTS):
        return ", ".join(f"{numbers.count(n)} {v}" for v, n in sorted(engine.verdicts.items()))
    passing = [rung.name for rung in engine.ladder if rung.state == "pass"]
    return f"no rung fails; verified: {', '.join(passing) or 'none'}"


def load(store: Store) -> Page:
    """Everything that a page says of `store`. Raises StoreError only where the store itself cannot be read."""
    history = store.runs()
    tables = {name: store.arrow(name).to_pandas() for name in ("trials", "judgements", "coverage", "mutation")}
    tables["cells"] = nights.summed(store.arrow("cells"))
    problems = [f"{table}/{name} was left out: {reason}" for table, files in store.ignored.items() for name, reason in files]
    judge_runs = {run["run_id"] for run in history if run["purpose"] in JUDGE_PURPOSES}
    alarm_runs = {run["run_id"] for run in history if run["purpose"] == "false-alarms"}
    scope = _scope([run for run in history if run["run_id"] not in judge_runs], tables["trials"])
    trials = _in_scope(tables["trials"], scope)
    judgements = _in_scope(tables["judgements"], scope)
    findings, planted = _findings(store, scope, judge_runs, problems)
    engines = [_engine(name, history, scope[name], trials, judgements, findings) for name in sorted(scope)]
    dated = nights.dated(tables["mutation"], history)
    newest = nights.newest(dated)
    used = set().union(*scope.values()) if scope else set()
    runs = [run for run in history if run["run_id"] in used]
    problems += [f"run {run['run_id']} has no end: it is still running, or was killed" for run in runs if not run["finished"]]
    for run in runs or [run for run in history if run["run_id"] not in judge_runs][-1:]:
        missing = [str(e.get("spec", "?")) for e in _json(run["engines"], []) if isinstance(e, dict) and "name" not in e]
        if missing and run["finished"]:
            problems.append(f"not loaded: {', '.join(missing)}")
    return Page(
        engines=engines,
        findings=findings,
        runs=runs,
        history=history[::-1],
        alarms=_alarms(tables, alarm_runs),
        coverage=_coverage(_in_scope(tables["coverage"], scope)),
        cells=nights.crossed(_in_scope(tables["cells"], scope)),
        mutation=_mutation([row for row in newest if row["measured"]]),
        score=nights.scores(newest),
        nights=nights.nights(history, tables, findings, dated),
        slowest=nights.slowest(trials),
        planted_findings=planted,
        problems=problems,
        store=store.path.resolve().name,
    )


def _scope(runs: list[dict[str, Any]], trials: pd.DataFrame) -> dict[str, set[str]]:
    """engine -> the runs of the newest campaign that ran it."""
    pairs = {(name, run["run_id"]) for run in runs for name in engine_names(run)}
    known = {run["run_id"]: run for run in runs}
    counted = trials[["engine", "run_id"]].drop_duplicates() if len(trials) else trials
    pairs |= {(engine, run_id) for engine, run_id in zip(counted["engine"], counted["run_id"], strict=True) if run_id in known}
    newest: dict[str, tuple[float, str]] = {}
    for engine, run_id in pairs:
        newest[engine] = max(newest.get(engine, (-1.0, "")), (known[run_id]["started"], known[run_id]["campaign"]))
    return {engine: {r for e, r in pairs if e == engine and known[r]["campaign"] == campaign} for engine, (_, campaign) in newest.items()}


def _in_scope(table: pd.DataFrame, scope: dict[str, set[str]]) -> pd.DataFrame:
    if table.empty:
        return table
    pairs = pd.DataFrame([(engine, run) for engine, runs in scope.items() for run in runs], columns=["engine", "run_id"])
    return table.merge(pairs, on=["engine", "run_id"], how="inner") if len(pairs) else table.iloc[:0]


def _engine(
    name: str, history: list[dict[str, Any]], runs: set[str], trials: pd.DataFrame, judgements: pd.DataFrame, findings: list[dict[str, Any]]
) -> EngineData:
    own, judged = trials[trials["engine"] == name], judgements[judgements["engine"] == name]
    data = EngineData(name)
    for run in history:
        if run["run_id"] in runs:
            for entry in _json(run["engines"], []):
                if isinstance(entry, dict) and entry.get("name") == name:
                    data.version = str(entry.get("version", ""))
                    profile = entry.get("profile", "")
                    data.profile = str(profile.get("name", "")) if isinstance(profile, dict) else str(profile)
                    data.description = str(entry.get("description", "") or "")
    data.trials, data.checked, data.unverified = len(own), int(own["checked"].sum()), int(own["unverified"].sum())
    data.seconds = float(own["duration_ms"].sum()) / 1000
    data.verdicts = {str(v): int(n) for v, n in own["verdict"].value_counts().items()}
    data.ladder = _ladder(own, judged, [f for f in findings if f["engine"] == name and runs & f["met_in"]])
    data.heat = _heat(judged)
    return data


def _ladder(trials: pd.DataFrame, judgements: pd.DataFrame, findings: list[dict[str, Any]]) -> list[Rung]:
    """Where a trial lists its rungs, it counts on each; a judgement that is a finding counts even if the trial's verdict is of another rung."""
    reached: dict[str, int] = {}
    for rungs, number in trials["rungs"].where(trials["rungs"] != "", trials["rung"]).value_counts().items():
        for word in {part.strip() for part in str(rungs).split(";")}:
            reached[word] = reached.get(word, 0) + int(number)
    by_verdict = {(r["rung"], r["verdict"]): int(r["size"]) for r in _records(trials.groupby(["rung", "verdict"], as_index=False).size())}
    sums = judgements[judgements["form"] == "aggregate"]
    seen = {
        (r["rung"], r["verdict"]): int(r["checked"]) for r in _records(sums.groupby(["rung", "verdict"])["checked"].sum().reset_index())
    }
    ladder, failed = [], False
    for name in RUNGS:
        verdicts = {v for (r, v) in by_verdict if r == name} | {v for (r, v) in seen if r == name}
        bad = bool(verdicts & FINDING_VERDICTS) or any(f["rung"] == name for f in findings)
        rung = Rung(
            name,
            "absent",
            trials=reached.get(name, 0),
            failing=sum(int(n) for (r, v), n in by_verdict.items() if r == name and v in FINDING_VERDICTS),
            unverified=sum(int(n) for (r, v), n in by_verdict.items() if r == name and v == "UNVERIFIED"),
            checked=sum(n for (r, v), n in seen.items() if r == name and v != "UNVERIFIED"),
        )
        if bad:
            rung.state, failed = ("later" if failed else "first"), True
        elif verdicts & PASSING_VERDICTS:
            rung.state = "pass"
        elif "UNVERIFIED" in verdicts or "WARNING" in verdicts:
            rung.state = "unverified"
        elif verdicts:
            rung.state = "unsupported"
        ladder.append(rung)
    return ladder


def _heat(judgements: pd.DataFrame) -> HeatMap | None:
    """UNSUPPORTED and UNVERIFIED judgements have no bound that says anything, so they are not in it."""
    rows = judgements[
        (judgements["form"] == "aggregate") & ~judgements["verdict"].isin(["UNSUPPORTED", "UNVERIFIED"]) & (judgements["op"] != "")
    ]
    if rows.empty:
        return None
    column = rows["layer"].astype(str).where(rows["rung"] != "ops", "op").where((rows["rung"] == "ops") | (rows["layer"] >= 0), "in")
    grouped = rows.assign(column=column).groupby(["op", "column", "tap"])[["share_max", "judgements", "checked"]]
    by_tap = grouped.agg({"share_max": "max", "judgements": "sum", "checked": "sum"}).reset_index()
    cells: dict[tuple[str, str], Cell] = {}
    for row in _records(by_tap):
        op, layer, tap, share, judged, checked = (row[n] for n in ("op", "column", "tap", "share_max", "judgements", "checked"))
        old = cells.get((op, layer))
        if old is None:
            cells[op, layer] = Cell(op, layer, float(share), int(judged), int(checked), tap)
        else:
            worst = (float(share), tap) if share > old.share else (old.share, old.tap)
            cells[op, layer] = Cell(op, layer, worst[0], old.judgements + int(judged), old.checked + int(checked), worst[1])
    ops = sorted({op for op, _ in cells}, key=lambda op: (OP_ORDER.index(op) if op in OP_ORDER else len(OP_ORDER), op))
    layers = sorted({layer for _, layer in cells}, key=lambda layer: {"op": -2, "in": -1}.get(layer, int(layer) if layer.isdigit() else 0))
    return HeatMap(ops, layers, cells)


def _findings(store: Store, scope: dict[str, set[str]], judge_runs: set[str], problems: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Findings of the engines under test, the newest news and the most severe first; and how many belong to planted engines."""
    try:
        ledger = store.ledger()
    except StoreError as problem:
        ledger = {}
        problems.append(f"the ledger was not read: {problem}")
    met: dict[str, set[str]] = {}
    for seen in store.sightings():
        if seen["hits"] or seen["reproduced"]:
            met.setdefault(seen["finding_id"], set()).add(seen["run_id"])
    rows, planted = [], 0
    for row in store.findings():
        runs = met.get(row["finding_id"], {row["last_run"]})
        if runs <= judge_runs:
            planted += 1
            continue
        row["met_in"] = runs
        row["in_scope"] = bool(runs & scope.get(row["engine"], set()))
        row["ledger"] = ledger.get(row["finding_id"], {})
        for name, empty in (("tree", []), ("trace", []), ("bisect", {}), ("index", [])):
            row[name] = _json(row[name], empty)
        rows.append(row)
    rows.sort(key=_urgency)
    return rows, planted


def _urgency(row: dict[str, Any]) -> tuple[bool, int, int, int, str]:
    """Open before decided; then news, severity, and the place on the ladder."""

    def place(words: tuple[str, ...], word: str) -> int:
        return words.index(word) if word in words else len(words)

    severity = VERDICTS.index(row["verdict"]) if row["verdict"] in VERDICTS else -1
    return (bool(row["ledger"]), place(STATUSES, row["status"]), -severity, place(RUNGS, row["rung"]), row["finding_id"])


def _alarms(tables: dict[str, pd.DataFrame], runs: set[str]) -> Alarms:
    trials, mutation = tables["trials"], tables["mutation"]
    own = trials[trials["run_id"].isin(runs)]
    benign = mutation[mutation["benign"].astype(bool)]
    alarms = int(own["verdict"].isin(list(FINDING_VERDICTS)).sum()) + int(benign["found"].astype(bool).sum())
    return Alarms(len(own) + int(benign["trials"].clip(lower=1).sum()), alarms)


def _coverage(cells: pd.DataFrame) -> list[Region]:
    if cells.empty:
        return []
    sums = cells.groupby(["region", "value"])[["trials", "findings"]].sum().reset_index()
    by_region: dict[str, list[dict[str, Any]]] = {}
    for row in _records(sums):
        by_region.setdefault(row["region"], []).append(row)
    regions = []
    for region, rows in sorted(by_region.items()):
        rows.sort(key=lambda row: _natural(row["value"]))
        reached = [(row["value"], int(row["trials"]), int(row["findings"])) for row in rows if row["trials"] > 0]
        regions.append(Region(region, reached, [row["value"] for row in rows if row["trials"] == 0]))
    return regions


def _natural(text: str) -> tuple[int, float, str]:
    """Numbers by size, then words."""
    try:
        number = float(text)
    except ValueError:
        return (1, 0.0, text)
    return (0, number, text) if math.isfinite(number) else (1, 0.0, text)


def _mutation(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Missed ones first, benign ones last."""
    return sorted(rows, key=lambda r: (bool(r["benign"]), bool(r["found"]), bool(r["localised"]), str(r["defect_class"]), str(r["mutant"])))


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def _json(text: str, empty: Any) -> Any:
    """JSON from a store may be cut or of another kind; then there is nothing to show."""
    body = from_json(text)
    return body if isinstance(body, type(empty)) else ([body] if isinstance(empty, list) and isinstance(body, dict) else empty)
