"""The tables of the mutation score: counted from the results, and the manual says what the results say."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.mutation_tables import BEGIN, END, MANUAL, RESULTS, per_class, written
from campaigns.mutation import done
from oracles.battery import NAMES


def record(name: str, mode: str = "taps", **more: Any) -> dict[str, Any]:
    return {"mutant": name, "mode": mode, "defect_class": "b: masks", "found": True, "localised": True, "battery": {}} | more


def cells(table: str, name: str) -> dict[str, str]:
    heads, _, *rows = [[word.strip() for word in line.strip("| ").split("|")] for line in table.splitlines()]
    return next(dict(zip(heads, row, strict=True)) for row in rows if row[0] == name)


def test_counts_per_class_and_for_all() -> None:
    records = [
        record("one", battery={"numpy": False, "cosine": True}),
        record("two", localised=False, battery={"numpy": True}),
        record("three", found=False, localised=False),
        record("one", "blind", found=False),
        record("four", defect_class="c: trees", battery={"token-exact": False}),
    ]
    table = per_class(records)
    masks, trees, whole = (cells(table, name) for name in ("b: masks", "c: trees", "all"))
    assert [masks[head] for head in ("with taps", "right op", "blind", "numpy", "cosine", "torch")] == [
        "2/3",
        "1/2",
        "0/1",
        "1/2",
        "0/1",
        "–",
    ]
    assert (trees["with taps"], trees["blind"], trees["token-exact"]) == ("1/1", "–", "1/1")
    assert (whole["with taps"], whole["right op"], whole["numpy"]) == ("3/4", "2/3", "1/2")
    assert set(NAMES) < whole.keys()


def test_the_manual_holds_the_table_of_the_results() -> None:
    table = per_class(done(RESULTS).values())
    assert BEGIN + table + END in MANUAL.read_text("utf-8"), "docs/judge.md drifted: run python -m benchmarks.mutation --summary"


def test_only_what_is_between_the_marks_is_written() -> None:
    assert written(f"before\n{BEGIN}old\n{END}after\n", "new\n") == f"before\n{BEGIN}new\n{END}after\n"
    with pytest.raises(ValueError, match="lacks the lines"):
        written("nothing here", "new\n")
