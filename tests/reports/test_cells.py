"""The crossed coverage: what can be reached, sums that add up, the emptiest cells, and a table that survives parts, kills and merging."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from reports import cells
from reports.cells import AXES, Cell, Crossed, counted, emptiest, every
from reports.merge import merge
from reports.store import Store
from tests.reports.store_samples import new_run, part_files

PLAIN: Cell = ("1", "1", "other", "alone", "float32", "none", "none", "1")
FORKED: Cell = ("0", "0", "1", "unequal", "float16", "experts", "sequences", "3+")


def test_every_class_of_every_axis_can_be_reached() -> None:
    for place, (axis, classes) in enumerate(AXES.items()):
        assert {cell[place] for cell in every()} == set(classes), axis
    assert set(cells.MEANING) == set(AXES)


def test_the_emptiest_come_first_and_the_loneliest_corner_before_a_hole() -> None:
    full = dict.fromkeys(every(), 5)
    hole, corner = PLAIN, FORKED
    full[hole] = 0
    assert emptiest(full, 2)[0] == (hole, 0)
    assert emptiest(full, 2)[1][1] == 5
    for cell in every():
        if (cell[4], cell[5]) == (corner[4], corner[5]):
            full[cell] = 0
    first, second = emptiest(full, 2)
    assert (first[0][4], first[0][5]) == ("float16", "experts") and first[1] == second[1] == 0


def test_the_emptiest_of_an_empty_store_lie_far_apart() -> None:
    named = [cell for cell, _ in emptiest({}, 12)]
    assert len(set(named)) == 12 and named[0] == every()[0]
    for place, classes in enumerate(AXES.values()):
        assert {cell[place] for cell in named} == set(classes)


def test_every_cell_is_named_once_when_all_are_asked_for() -> None:
    some = {cell: 1 + number % 3 for number, cell in enumerate(every()) if number % 50}
    named = emptiest(some, 400)
    assert len({cell for cell, _ in named}) == 400
    assert [trees for _, trees in named] == sorted(some.get(cell, 0) for cell in every())[:400]


def test_margins_and_pairs_add_up_to_the_trees() -> None:
    crossed = Crossed(Counter({PLAIN: 3, FORKED: 4}), {})
    assert (crossed.hit, crossed.cells) == (2, len(every()))
    for margin in crossed.margins:
        assert (sum(margin.trees.values()), sum(margin.hit.values()), sum(margin.cells.values())) == (7, 2, len(every()))
    pairs = {(pair.rows, pair.columns): pair for pair in crossed.pairs}
    assert len(pairs) == len(list(itertools.combinations(AXES, 2)))
    assert all(sum(number or 0 for number in pair.trees.values()) == 7 for pair in pairs.values())
    shapes = pairs["depth", "width"]
    assert shapes.trees["0", "1"] is None and shapes.trees["0", "0"] == 4
    assert ("4+", "3+") in shapes.empty and ("0", "1") not in shapes.empty and ("1", "1") not in shapes.empty


def test_the_store_keeps_the_cells_and_merging_adds_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        store = Store.create_or_open(tmp_path / name)
        run = new_run(store, run_id=f"run-{name}")
        with store.writer(run, "w") as writer:
            for number in range(5):
                writer.add_cell("native", PLAIN, failing=number == 0)
                writer.add_cell("native", FORKED)
                writer.flush()
        assert len(part_files(tmp_path / name, "cells")) == 1
        assert len(store.table("cells")) == 2  # five parts became one, and their sums two rows
        store.close()
    with merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both") as both:
        rows, both_rows = both.table("cells"), both.arrow("cells").to_pylist()
    assert counted(both_rows) == {PLAIN: 10, FORKED: 10}
    assert rows.groupby("depth")["findings"].sum().to_dict() == {"0": 0, "1": 2}


def test_coverage_is_summed_when_parts_are_united(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")
    with store.writer(new_run(store), "w") as writer:
        writer.add_coverage({"engine": "e", "region": "depth", "value": "9", "trials": 0})
        for _ in range(4):
            writer.add_coverage({"engine": "e", "region": "depth", "value": "3"})
            writer.flush()
    rows = store.table("coverage")
    assert rows[["value", "trials"]].sort_values("value").values.tolist() == [["3", 4], ["9", 0]]


def test_a_class_that_an_axis_does_not_have_is_refused(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")
    with (
        store.writer(new_run(store), "w") as writer,
        pytest.raises(ValueError, match="depth of the coverage has no class '7'; it has 0, 1"),
    ):
        writer.add_cell("native", ("7", *PLAIN[1:]))
