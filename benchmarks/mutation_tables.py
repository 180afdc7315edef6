"""The mutation score as tables, from the results files alone: per class what was found with taps, at the right operation and blind, and what fixed
rules notice on the same cases. `python -m benchmarks.mutation --summary` prints them and keeps docs/judge.md in step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oracles.battery import NAMES

RESULTS = Path(__file__).parent / "results" / "mutation.jsonl"
MANUAL = Path(__file__).parents[1] / "docs" / "judge.md"
BEGIN, END = "<!-- per class: written by benchmarks.mutation --summary -->\n", "<!-- end of per class -->\n"

Record = Mapping[str, Any]


def per_class(records: Iterable[Record]) -> str:
    """A Markdown table: a row per class and one for all. "x/y": x of the y plants that were run, or of the y minimal cases with an answer to compare;
    an em dash where there is none."""
    rows = list(records)
    taps, blind = ([record for record in rows if record["mode"] == mode] for mode in ("taps", "blind"))
    lines = ["| class | with taps | right op | blind | " + " | ".join(NAMES) + " |", "|---|" + "---|" * (3 + len(NAMES))]
    for name in [*sorted({record["defect_class"] for record in rows}), "all"]:
        own, unseen = ([record for record in part if name in ("all", record["defect_class"])] for part in (taps, blind))
        found = [record for record in own if record["found"]]
        cells = [_share(len(found), len(own)), _share(_sum(found, "localised"), len(found)), _share(_sum(unseen, "found"), len(unseen))]
        cells += [_share(*noticed(found, rule)) for rule in NAMES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def noticed(found: Sequence[Record], rule: str) -> tuple[int, int]:
    """(how many minimal cases a fixed rule notices, of how many it can be asked about)."""
    asked = [record["battery"][rule] for record in found if rule in record.get("battery", {})]
    return sum(not passes for passes in asked), len(asked)


def written(manual: str, table: str) -> str:
    """The text of the manual page with the table between its two marks. Raises ValueError where it lacks them."""
    before, begin, rest = manual.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return before + begin + table + end + after


def _sum(records: Sequence[Record], column: str) -> int:
    return sum(bool(record[column]) for record in records)


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole}" if whole else "–"
