"""python -m benchmarks.mutation [--blind] [--budget-per-plant 60s] [--part 0/4] [--jobs 2] [--results FILE.jsonl] [--only NAME ...]

The mutation score: each plant is checked as a user's engine would be, by the default nightly generator that knows nothing of it, on one core until
its first finding or the end of its budget; the finding is minimised and its capsule replayed in a fresh process. `--blind` shows the judge logits
and tokens only. Results are appended plant by plant and skipped when the command runs again (`--again` measures anew).

    python -m benchmarks.mutation --summary                            the table of what is known, fixed rules beside it
    python -m benchmarks.mutation --fixed-rules --trials 2000          how often fixed rules alarm on engines that are right
    python -m benchmarks.mutation --benign --trials 200000 --jobs 16   false alarms; prints the totals as JSON (--blind: of black boxes)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.mutation_tables import MANUAL, RESULTS, noticed, per_class, written
from campaigns.battery import compared
from campaigns.case import Case
from campaigns.discover import Discovery, diet_of
from campaigns.isolation.inprocess import InProcess
from campaigns.mutation import NO_BLIND_ANSWER, benign_trials, campaign, done
from campaigns.runner import Options
from campaigns.trial import Bench, Outcome
from impls.planted import Plant
from impls.planted.benign import VARIANTS
from impls.planted.fresh import FRESH
from impls.planted.mutants import PLANTS
from impls.planted.native_plants import PLANTS as NATIVE_PLANTS
from impls.registry import BLIND, resolve
from oracles.battery import NAMES
from oracles.judgement import FINDINGS
from paritree.cli import budget_of

SUMMARY = RESULTS.with_suffix(".json")
TARGETS = {"found with taps": 0.98, "found blind": 0.90, "right op": 0.99, "minimal nodes, median": 4, "shrinking checks, largest": 120}
MINIMISE_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blind", action="store_true", help="logits and tokens only")
    parser.add_argument("--budget-per-plant", default="60s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="i/n: every n-th plant, for job arrays")
    parser.add_argument("--jobs", type=int, default=1, help="plants (or pieces of the benign run) side by side, a core each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, appended")
    parser.add_argument("--store", default="", help="folder of the store; a temporary one without it")
    parser.add_argument("--only", nargs="*", default=[], help="names of plants; with --benign, of engines")
    parser.add_argument("--kind", choices=("python", "native", "all"), default="all")
    parser.add_argument("--no-minimise", action="store_true", help="found and localised only: a quick first look")
    parser.add_argument("--again", action="store_true", help="measure also what the results hold already")
    parser.add_argument("--summary", action="store_true", help="print the table of the results and write it; run nothing")
    parser.add_argument("--fixed-rules", action="store_true", help="engines that are right: false alarms of fixed rules")
    parser.add_argument("--benign", action="store_true", help="engines that are right: count false alarms")
    parser.add_argument("--trials", type=int, default=20_000, help="of the benign run")
    arguments = parser.parse_args()
    if arguments.summary:
        return summarised(arguments.results)
    if arguments.fixed_rules:
        return fixed_rules(arguments.trials, arguments.seed)
    command = " ".join(["python -m benchmarks.mutation", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="paritree-mutation-") as folder:
        store = arguments.store or str(Path(folder) / "store")
        if arguments.benign:
            options = Options(store=store, seed=arguments.seed, command=command)
            engines = honest_engines(arguments.blind)
            if unknown := sorted(set(arguments.only) - set(engines)):
                parser.error(f"--only: {', '.join(unknown)}: no engine that is right; choose among {', '.join(engines)}")
            totals = benign_trials(arguments.only or engines, arguments.trials, options, at_once=arguments.jobs, say=log)
            print(json.dumps(totals))
            return int(bool(totals["false_alarms"] or totals["not_loadable"]))
        seconds, trials = budget_of(arguments.budget_per_plant)
        options = Options(
            store=store, seconds=seconds, trials=trials or 10**9, seed=arguments.seed, command=command, budget=arguments.budget_per_plant,
            minimise=not arguments.no_minimise, minimise_seconds=MINIMISE_S,
        )  # fmt: skip
        log(f"seed {arguments.seed}, {arguments.budget_per_plant} per plant, {arguments.jobs} side by side")
        mode = "blind" if arguments.blind else "taps"
        results = arguments.results
        plants = chosen(arguments.kind, arguments.part, arguments.only)
        if arguments.again:
            forget(results, {plant.name for plant in plants}, mode, arguments.seed)
        records = campaign(plants, options, results, mode=mode, at_once=arguments.jobs, say=log)
    print(json.dumps(totals_of(records)))
    return 0


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def chosen(kind: str, part: str, only: Sequence[str]) -> list[Plant]:
    plants: list[Plant] = [*PLANTS.values(), *NATIVE_PLANTS.values()]
    if only:
        return [plant for plant in [*plants, *FRESH.values()] if plant.name in only]
    number, parts = (int(word) for word in part.split("/"))
    return [plant for plant in plants if kind in (plant.kind, "all")][number::parts]


def honest_engines(blind: bool = False) -> list[str]:
    """No compiler is needed for any of them, but for the native engine among those that are `blind`."""
    if blind:
        return [f"{BLIND}{name}" for name in ("golden", "blocked", "native", *(f"blocked:{name}" for name in VARIANTS))]
    return ["golden", "blocked", "blind+blocked", *(f"blocked:{name}" for name in VARIANTS)]


def forget(results: Path, names: set[str], mode: str, seed: int) -> None:
    """Take the records of these plants out of the results."""
    kept = [r for r in done(results).values() if not (r["mutant"] in names and r["mode"] == mode and r["seed"] == seed)]
    if results.exists():
        results.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")


# ---- the score -----------------------------------------------------------------------------------------------------------------------


def totals_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = [r for r in records if r["found"]]
    minimal = [r["minimal_nodes"] for r in found if r["minimal_nodes"] >= 0]
    checks = [r["checks"] for r in found]
    return {
        "plants": len(records),
        "found": len(found),
        "seconds_median": round(statistics.median([r["seconds"] for r in found]), 2) if found else -1,
        "seconds_max": round(max((r["seconds"] for r in found), default=-1), 2),
        "right_op": sum(r["localised"] for r in found),
        "reproduced": sum(r["reproduced"] for r in found),
        "minimised": len(minimal),
        "nodes_median": statistics.median(minimal) if minimal else -1,
        "nodes_at_most_stated": sum(0 <= r["minimal_nodes"] <= max(r["stated_nodes"], 0) for r in found),
        "checks_median": statistics.median(checks) if checks else -1,
        "checks_max": max(checks, default=-1),
        "missed": sorted(r["mutant"] for r in records if not r["found"]),
        "elsewhere": sorted(r["mutant"] for r in found if not r["localised"]),
        "not_reproduced": sorted(r["mutant"] for r in found if not r["reproduced"]),
        "more_than_one_above": sorted(r["mutant"] for r in found if not 0 <= r["minimal_nodes"] <= max(r["stated_nodes"], 0) + 1),
        "above_stated": sorted(r["mutant"] for r in found if not 0 <= r["minimal_nodes"] <= max(r["stated_nodes"], 0)),
    }


def answering(blind: Sequence[dict[str, Any]]) -> dict[str, int]:
    """What was found of the plants that change an answer of some session; beside the score over all of them, never instead of it."""
    rest = [record for record in blind if record["mutant"] not in NO_BLIND_ANSWER]
    return {"plants": len(rest), "found": sum(record["found"] for record in rest)}


def summarised(results: Path) -> int:
    """The table per class, of both modes; also written beside the results, and that of the kept results into docs/judge.md."""
    records = list(done(results).values())
    modes = {mode: [r for r in records if r["mode"] == mode] for mode in ("taps", "blind")}
    table = per_class(records)
    print(table)
    body = {
        "command": "python -m benchmarks.mutation; python -m benchmarks.mutation --blind; python -m benchmarks.mutation --summary",
        "targets": TARGETS,
        **{mode: totals_of(rows) for mode, rows in modes.items() if rows},
        "blind, of plants that change an answer": answering(modes["blind"]),
        "fixed_rules_notice": {rule: noticed([r for r in modes["taps"] if r["found"]], rule) for rule in NAMES},
    }
    results.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(body, indent=1))
    if results.resolve() == RESULTS.resolve():
        MANUAL.write_text(written(MANUAL.read_text("utf-8"), table), "utf-8")
    return 0


# ---- fixed rules beside it -----------------------------------------------------------------------------------------------------------


def fixed_rules(trials: int, seed: int) -> int:
    """Random cases of the frozen mix on honest engines, in this process: how often each fixed rule fails. Ours counts as well."""
    engines = honest_engines()
    alarms: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for number, name in enumerate(engines):
        engine = resolve(name)
        bench = Bench(InProcess(engine))

        def run(cases: Sequence[Case], bench: Bench = bench) -> list[Outcome]:
            outcomes = bench.outcomes(cases)
            for outcome in outcomes:
                asked["paritree"] += 1
                alarms["paritree"] += outcome.verdict in FINDINGS
                for rule, passes in compared(bench, outcome.case).verdicts().items():
                    asked[rule] += 1
                    alarms[rule] += not passes
            return outcomes

        discovery = Discovery(diet_of(engine.describe(), hazards=False), seed + number, run, lambda outcome: False, trials_expected=0)
        while discovery.trials < trials / len(engines):
            discovery.step()
        log(f"{name}: {discovery.trials} trials")
    print(
        json.dumps({rule: {"alarms": alarms[rule], "trials": asked[rule], "rate": round(alarms[rule] / asked[rule], 5)} for rule in asked})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
