"""The mutation score: plants found, localised, minimised, reproduced; benign variants flagged. The measure of the judge, in every report.

A plant counts as found when a check of its engine has a finding, as localised when the first finding names one of its expected operations or
rules, and as reproduced when the capsule's repro.py fails again in a fresh process.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.repro import FAILS_AGAIN
from campaigns.runner import EngineResult, NotLoadable, Options, check_engine, machine
from impls.planted import Plant
from impls.registry import BLIND
from reports.schema import SEARCH_S
from reports.store import Store

REPRO_S = 120.0  # a fresh process with NumPy and the engine; a hang costs the program's own limit
SAMPLE_MINIMISE_S = 15.0  # per plant of a nightly sample
SAMPLE_LEFT_S = 15.0  # no further plant is begun with less; nine of ten are found within three seconds
SAMPLE_SHOW_S = 3.0  # of what is left for a plant, to show it again in a fresh process
SAMPLE_REPRO_LEAST_S = 5.0  # for repro.py where the time of a sample is over: NumPy and the engine take one on an idle core
HANG_S = 5.0  # of repro.py, for plants that hang

_EMPTY_ROW = "changes rows that see no key, and a row of a session sees at least itself"
_ALL_GONE = "changes rows of logits that are all -inf, which no finite weights give"
_OUTPUT = "writes beside, or not all of, the caller's output of a single operation; the arrays of a session are the engine's own"
_INT4 = "changes int4_matmul, and the weights of a session cross the seam as float32"
NO_BLIND_ANSWER = {
    **dict.fromkeys(("Z12", "A18", "A19", "J03", "empty-uniform"), _EMPTY_ROW),
    **dict.fromkeys(("D15", "J07"), _ALL_GONE),
    **dict.fromkeys(("F14", "stray-write", "far-tile", "argmax-stray"), _OUTPUT),
    **dict.fromkeys(("A22", "int4-scale-mantissa"), _INT4),
    "bfs-numbers": "numbers the nodes of the right tree in another order, on which neither tokens nor accepted lengths depend",
}
"""Plants that change no logit, no token and no accepted length of any session, with the reason: misses of a black box like any others."""


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
    searched: float = 0.0  # seconds that the search took
    verdict: str = ""
    message: str = ""
    case: str = ""  # the minimum
    battery: dict[str, bool] = field(default_factory=dict)  # fixed rule -> passes, on the minimum


COLUMNS = frozenset(column.name for column in dataclasses.fields(Score)) - {"verdict", "message", "case", "battery"}


def measured(plant: Plant, run_id: str, options: Options) -> Score:
    """One check of one plant, stopped at its first finding, which is minimised and reproduced. Raises NotLoadable.

    `options.until` leaves SAMPLE_SHOW_S for the replay in a fresh process.
    """
    searching = dataclasses.replace(options, stop_at_first=True, jobs=1, until=options.until - SAMPLE_SHOW_S)
    result = check_engine(plant.engine, run_id, searching)
    finding = first_finding(result, plant.expected_ops)
    base: dict[str, Any] = {
        "mutant": plant.name,
        "benign": False,
        "source": plant.source,
        "defect_class": plant.bug_class,
        "expected_op": ", ".join(plant.expected_ops),
        "stated_nodes": plant.smallest_nodes,
        "trials": result.trials,
        "searched": min(result.seconds, options.seconds or math.inf),
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
        reproduced=folder is not None
        and reproduces(
            folder, hangs=row["verdict"] == "HUNG", limit=min(REPRO_S, max(SAMPLE_REPRO_LEAST_S, options.until - time.monotonic()))
        ),
        minimal_nodes=row["nodes"] if row["minimal"] else -1,
        seconds=result.first_finding_s,
        checks=row["checks"],
        finding_id=name,
        verdict=row["verdict"],
        message=row["message"],
        case=row["case"],
        battery=finding.get("battery", {}),
    )


def first_finding(result: EngineResult, expected: Sequence[str]) -> dict[str, Any] | None:
    """The first finding; among those of one batch one at the right place, because they were met at the same moment."""
    events = list(result.findings.values())
    right = [event for event in events if set(event["fingerprint"][2:4]) & set(expected)]
    return next(iter([*right, *events]), None)


def is_localised(row: Mapping[str, Any], expected: Sequence[str]) -> bool:
    """By the finding, or by the location that it got when it was minimised: the engine's own loop has no taps, the rounds that it ran have."""
    location = json.loads(row["bisect"] or "{}")
    return bool({row["op"], row["rule"], row["output"], location.get("op", "")} & set(expected))


def reproduces(folder: Path, *, hangs: bool = False, limit: float = REPRO_S) -> bool:
    """repro.py in a fresh process, outside of this one's working directory and path; `limit` in seconds."""
    timeout = ["--timeout", str(HANG_S)] if hangs else []
    try:
        ended = subprocess.run([sys.executable, str(folder / "repro.py"), *timeout], capture_output=True, timeout=limit, cwd=folder)
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == FAILS_AGAIN


def blind(plant: Plant) -> Plant:
    """The plant in an engine that shows logits and tokens only: there is no op to name, only the phase, so every place counts as right."""
    return dataclasses.replace(plant, engine=BLIND + plant.engine)


def key_of(mutant: str, mode: str, seed: int, kind: str) -> str:
    """A plant of the native engine may have the name of one in Python: same defect, other engine."""
    return f"{'native:' if kind == 'native' else ''}{mutant} {mode} seed {seed}"


def done(results: Path) -> dict[str, dict[str, Any]]:
    """Records by key; the last one of a key stands. A line that was cut by a kill is left out."""
    out: dict[str, dict[str, Any]] = {}
    for line in results.read_text("utf-8").splitlines() if results.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        out[key_of(record["mutant"], record["mode"], record["seed"], record["kind"])] = record
    return out


def campaign(
    plants: Sequence[Plant], options: Options, results: Path, *, mode: str = "taps", at_once: int = 1, say: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Every plant that `results` (JSON lines) does not hold yet, `at_once` of them side by side on a core each; a line and a row of the store
    for each as soon as it is known."""
    known = done(results)
    waiting = [plant for plant in plants if key_of(plant.name, mode, options.seed, plant.kind) not in known]
    results.parent.mkdir(parents=True, exist_ok=True)
    with Store.create_or_open(options.store) as store:
        run_id = store.start_run(
            {"purpose": "mutation", "command": options.command, "seed": str(options.seed), "budget": options.budget, "machine": machine()}
        )
        trials = 0
        with (
            store.writer(run_id, f"mutation-{os.getpid()}") as writer,
            ThreadPoolExecutor(at_once) as pool,
            results.open("a", encoding="utf-8") as file,
        ):

            def one(plant: Plant) -> dict[str, Any]:
                began = time.monotonic()
                try:
                    score = dataclasses.asdict(measured(blind(plant) if mode == "blind" else plant, run_id, options))
                except NotLoadable as problem:
                    return {"mutant": plant.name, "error": str(problem)}
                return score | {"mode": mode, "seed": options.seed, "kind": plant.kind, "wall_s": round(time.monotonic() - began, 2)}

            for future in as_completed([pool.submit(one, plant) for plant in waiting]):
                record = future.result()
                if "error" in record:
                    say(f"{record['mutant']}: cannot be loaded: {record['error']}")
                    continue
                trials += record["trials"]
                writer.add_mutation({name: record[name] for name in COLUMNS})
                writer.flush()
                file.write(json.dumps(record) + "\n")
                file.flush()
                known[key_of(record["mutant"], mode, options.seed, record["kind"])] = record
                say(f"{in_words(record)} ({record['wall_s']} s)")
        store.finish_run(run_id, {"stopped": "complete", "trials": trials})
    return [known[key] for plant in plants if (key := key_of(plant.name, mode, options.seed, plant.kind)) in known]


def nightly_sample(
    options: Options, seconds: float, library: Sequence[Plant], say: Callable[[Score], None] = lambda score: None
) -> list[Score]:
    """As many plants of the library as `seconds` allow, one on each core: first those that this store never tried, then those tried longest ago.

    Each is measured anew, as if nothing were known of it. Plants that cannot be loaded on this machine are passed over. Every plant of the library
    is a row of the store, so that the page can name those that no night has reached.
    """
    until = time.monotonic() + seconds
    scores: list[Score] = []
    lock = threading.Lock()
    with Store.create_or_open(options.store) as store:
        last = last_measured(store)
        waiting = iter(sorted(library, key=lambda plant: last.get(plant.name, -1.0)))
        run_id = store.start_run(
            {
                "purpose": "mutation",
                "command": options.command,
                "seed": str(options.seed),
                "budget": f"{seconds:.0f} s",
                "machine": machine(),
            }
        )
        with store.writer(run_id, "mutation-sample") as writer:

            def one_core() -> None:
                while True:
                    with lock:
                        left = until - time.monotonic()
                        plant = next(waiting, None) if left >= (SAMPLE_LEFT_S if scores else SAMPLE_SHOW_S) else None
                    if plant is None:
                        return
                    each = dataclasses.replace(
                        options,
                        seconds=SEARCH_S,
                        reserve=0.0,
                        trials=10**9,
                        minimise=True,
                        minimise_seconds=min(SAMPLE_MINIMISE_S, left / 2),
                        until=until,
                        not_reproduced=tuple(row["finding_id"] for row in store.findings()),
                    )
                    try:
                        score = measured(plant, run_id, each)
                    except NotLoadable:
                        continue
                    with lock:
                        scores.append(score)
                        writer.add_mutation({name: value for name, value in dataclasses.asdict(score).items() if name in COLUMNS})
                        writer.flush()  # a night that is killed goes on behind this plant
                        say(score)

            for plant in library:
                if plant.name not in last:
                    writer.add_mutation(_unmeasured(plant))
            writer.flush()
            cores = options.jobs or os.cpu_count() or 1
            with ThreadPoolExecutor(cores) as pool:
                for future in [pool.submit(one_core) for _ in range(cores)]:
                    future.result()
        store.finish_run(run_id, {"stopped": "budget", "trials": sum(score.trials for score in scores)})
    return scores


def last_measured(store: Store) -> dict[str, float]:
    """Plant -> when it was tried last (0: by a store older than this column), or -1 where it is only known to be in the library."""
    out: dict[str, float] = {}
    for row in store.arrow("mutation").to_pylist():
        if not row["benign"]:
            when = row["time"] if row["trials"] else -1.0
            out[row["mutant"]] = max(out.get(row["mutant"], -1.0), when)
    return out


def _unmeasured(plant: Plant) -> dict[str, Any]:
    return {
        "mutant": plant.name,
        "source": plant.source,
        "defect_class": plant.bug_class,
        "expected_op": ", ".join(plant.expected_ops),
        "stated_nodes": plant.smallest_nodes,
        "seconds": -1.0,
    }


def in_words(record: Mapping[str, Any]) -> str:
    if not record["found"]:
        return f"{record['mutant']}: NOT FOUND in {record['trials']} trials (expected {record['expected_op']})"
    place = "localised" if record["localised"] else f"NOT LOCALISED (expected {record['expected_op']})"
    again = "reproduced" if record["reproduced"] else "NOT REPRODUCED"
    size = f"{record['minimal_nodes']} nodes (stated {record['stated_nodes']}), {record['checks']} checks"
    return f"{record['mutant']}: found in {record['found_op']} after {record['seconds']:.1f} s, {place}, {size}, {again}"


# ---- engines that are right ----------------------------------------------------------------------------------------------------------


def benign_trials(
    engines: Sequence[str], trials: int, options: Options, *, at_once: int, each: int = 2500, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """`trials` over engines that are right, in pieces of about `each` with a seed of their own: what every trial ended with. A finding is a
    false alarm."""
    pieces = max(len(engines), math.ceil(trials / each))
    with Store.create_or_open(options.store) as store:
        run_id = store.start_run(
            {
                "purpose": "false-alarms",
                "command": options.command,
                "seed": str(options.seed),
                "budget": f"{trials} trials",
                "machine": machine(),
            }
        )
        totals: dict[str, Any] = {
            "trials": 0,
            "frozen_mix_sessions": 0,
            "by_kind": {},
            "verdicts": {},
            "false_alarms": [],
            "not_loadable": [],
        }

        def one(number: int) -> EngineResult | str:
            engine = engines[number % len(engines)]
            share = trials // pieces + (number < trials % pieces)
            try:
                return check_engine(
                    engine,
                    run_id,
                    dataclasses.replace(options, trials=share, jobs=1, seed=options.seed + number, minimise=False, stop_at_first=False),
                )
            except NotLoadable as problem:
                return f"{engine}: {problem}"

        by_engine: dict[str, list[EngineResult]] = {}
        with ThreadPoolExecutor(at_once) as pool:
            for future in as_completed([pool.submit(one, number) for number in range(pieces)]):
                result = future.result()
                if isinstance(result, str):
                    totals["not_loadable"].append(result)
                    continue
                by_engine.setdefault(result.engine, []).append(result)
                totals["trials"] += result.trials
                totals["frozen_mix_sessions"] += result.frozen
                for name, counts in (("by_kind", result.by_kind), ("verdicts", result.verdicts)):
                    for key, count in counts.items():
                        totals[name][key] = totals[name].get(key, 0) + count
                totals["false_alarms"] += [
                    {"engine": result.engine, "message": event["message"], "case": event["case"]} for event in result.findings.values()
                ]
                say(f"{result.engine}: {result.trials} trials, {len(result.findings)} alarms, {result.seconds:.1f} s")
        with store.writer(run_id, "false-alarms") as writer:
            for engine, parts in sorted(by_engine.items()):
                alarms = [event for part in parts for event in part.findings.values()]
                writer.add_mutation(
                    {
                        "mutant": engine,
                        "benign": True,
                        "defect_class": "benign",
                        "found": bool(alarms),
                        "minimal_nodes": -1,
                        "stated_nodes": -1,
                        "found_op": alarms[0]["fingerprint"][2] if alarms else "",
                        "seconds": -1.0,
                        "trials": sum(part.trials for part in parts),
                        "finding_id": alarms[0]["finding_id"] if alarms else "",
                    }
                )
        store.finish_run(run_id, {"stopped": "complete", "trials": totals["trials"]})
    total = max(1, totals["trials"])
    totals["sessions"] = totals["by_kind"].get("session", 0)
    totals["rates"] = {name: totals["verdicts"].get(name, 0) / total for name in ("UNVERIFIED", "WARNING", "TIE", "UNSUPPORTED")}
    return totals
