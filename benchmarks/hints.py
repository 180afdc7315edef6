"""python -m benchmarks.hints [--jobs 16] [--only NAME ...] [--out FILE.jsonl] [--summary]

How often the hint is right about defects outside of its library. The minimal inputs that `benchmarks.mutation` found are asked about, each once:

    python   plants of the blocked engine, with their own report taken out of the library
    native   plants of the C++ engine: another engine, so that the same report may be in the library, written by other hands
    fresh    the fifteen fresh plants, whose reports are outside of every catalogue

Right: the plant that is named may rightly be placed where the true one is (an operation or rule in common; for one that may show anywhere, its class);
wrong: it may not; unknown: none is named.
A line per plant is appended to the results, and plants that they hold are not asked about again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from campaigns.case import from_json
from campaigns.hint import LEFT_OUT, Hint, hint, library, overrides
from campaigns.hint_family import FAMILY
from campaigns.isolation import Supervisor
from campaigns.mutation import done
from campaigns.trial import Bench, patience
from impls.planted import Plant
from impls.planted.fresh import FRESH
from impls.planted.fresh import OVERRIDES as FRESH_OVERRIDES
from impls.planted.mutants import PLANTS
from impls.planted.native_plants import PLANTS as NATIVE
from impls.planted.planting import ANY

RESULTS = Path(__file__).parent / "results"
FOUND = (RESULTS / "mutation.jsonl", RESULTS / "fresh.jsonl")
OUT = RESULTS / "hints.jsonl"
SETS = {"python": PLANTS, "native": NATIVE, "fresh": FRESH}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="plants side by side, a core each")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=OUT, help="JSON lines, appended")
    parser.add_argument("--summary", action="store_true", help="print the counts of the results and write them; run nothing")
    arguments = parser.parse_args()
    known = read(arguments.out)
    if not arguments.summary:
        waiting = [(kind, name, case) for kind, name, case in minima(arguments.only) if name not in known]
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(arguments.jobs) as pool, arguments.out.open("a", encoding="utf-8") as file:
            for future in as_completed([pool.submit(asked, *each) for each in waiting]):
                record = future.result()
                known[record["mutant"]] = record
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(f"{record['mutant']}: {record['said']}: {record['text']} ({record['seconds']} s)", file=sys.stderr, flush=True)
    body = counts(known)
    arguments.out.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(body, indent=1))
    return 0


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text("utf-8").splitlines() if path.exists() else ()
    return {record["mutant"]: record for record in map(json.loads, lines)}


def minima(only: list[str]) -> list[tuple[str, str, str]]:
    """(set, plant, case line) of every plant that was found with taps and can be run beside us."""
    out = []
    for path in FOUND:
        for record in done(path).values():
            kind = next((kind for kind, plants in SETS.items() if record["mutant"] in plants), "")
            if not kind or record["mode"] != "taps" or not record["found"] or not record.get("case"):
                continue
            plant: Plant = SETS[kind][record["mutant"]]
            if plant.bug_class[0] not in LEFT_OUT and (not only or plant.name in only):
                out.append((kind, plant.name, record["case"]))
    return out


def asked(kind: str, name: str, case: str) -> dict[str, Any]:
    """One hint. Whatever goes wrong on the way leaves it unknown, and is said."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    plant: Plant = SETS[kind][name]
    gone = [other.name for other in PLANTS.values() if other.source == plant.source] if kind != "native" else []
    began = time.monotonic()
    try:
        with Supervisor(plant.engine, deadline_s=patience()) as supervisor:
            found = hint(Bench(supervisor), from_json(case), library(gone))
    except Exception as problem:
        found = Hint("", 1.0, (), f"unknown: {type(problem).__name__}: {problem}"[:300])
    named = PLANTS.get(found.plant) or (FAMILY[found.plant][0] if found.plant else None)
    right = named is not None and bool(set(named.expected_ops) & set(plant.expected_ops))
    if named is not None and set(named.expected_ops) >= set(ANY):  # a plant that may show anywhere names no place
        right = named.bug_class == plant.bug_class
    own = FRESH_OVERRIDES.get(name, {}) if kind == "fresh" else overrides(plant)
    return {
        "mutant": name, "set": kind, "said": "unknown" if named is None else "right" if right else "wrong", "hint": found.plant,
        "residual": round(found.residual, 4), "alike": found.alike, "by_class": found.by_class, "from_family": named is not None and named.name in FAMILY,
        "same_class": named is not None and named.bug_class == plant.bug_class,
        "same_point": named is not None and bool(own.keys() & overrides(named).keys()),
        "text": found.text, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def counts(known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Per set: right, wrong, unknown; of those that are named, how many by a library plant of the same class or at the same named point."""
    out: dict[str, Any] = {}
    for kind in SETS:
        records = [record for record in known.values() if record["set"] == kind]
        said = Counter(record["said"] for record in records)
        named = [record for record in records if record["said"] != "unknown"]
        out[kind] = {
            "asked": len(records), **{word: said[word] for word in ("right", "wrong", "unknown")}, "alike": sum(record["alike"] for record in named),
            "same_point": sum(record["same_point"] for record in named), "same_class": sum(record["same_class"] for record in named),
            "from_family": sum(record["from_family"] for record in named),
            "wrong_ones": sorted(record["mutant"] for record in records if record["said"] == "wrong"),
        }  # fmt: skip
    return out


if __name__ == "__main__":
    sys.exit(main())
