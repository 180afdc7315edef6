"""The trend over the nights, the score per class with what was not sampled, and the slowest trials; as page data and on the page."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reports import page_data, writer
from reports.cells import Cell, every
from reports.merge import merge
from reports.page import mutation_sentence, render, summary
from reports.schema import SEARCH_S
from reports.store import Store
from tests.reports.html_check import assert_sound
from tests.reports.store_samples import finding, new_run

DAY = 86_400.0
FIRST = 1_790_000_000.0


class Nights:
    """A store of nights, a day apart, on a clock of its own."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store.create_or_open(path)
        self.now = FIRST
        monkeypatch.setattr(writer, "time", SimpleNamespace(time=lambda: self.now, monotonic=time.monotonic))

    def night(self, number: int, verdicts: dict[str, int], cells: list[Cell], plants: list[dict[str, Any]], **more: Any) -> str:
        self.now = FIRST + number * DAY
        run_id = new_run(self.store, run_id=f"night-{number}", started=self.now, purpose="nightly", **more)
        with self.store.writer(run_id, "w") as rows:
            for verdict, count in verdicts.items():
                for trial in range(count):
                    rows.add_trial(
                        {"engine": "native", "case_id": f"{verdict}{trial}", "verdict": verdict, "rung": "ops", "duration_ms": 10.0 + trial}
                    )
            for cell in cells:
                rows.add_cell("native", cell)
        self.now += 60.0
        if plants:
            judge = new_run(self.store, run_id=f"judge-{number}", started=self.now, purpose="mutation", engines=[])
            with self.store.writer(judge, "w") as rows:
                for plant in plants:
                    rows.add_mutation(plant)
        self.store.finish_run(run_id, {"finished": self.now, "stopped": "budget"})
        return run_id

    def page(self) -> page_data.Page:
        return page_data.load(self.store)


def plant(name: str, defect: str, **more: Any) -> dict[str, Any]:
    """`more` empty: a plant of the library that was not measured."""
    return {"mutant": name, "defect_class": defect, "expected_op": "route", "seconds": -1.0, "source": "a report"} | more


def found(name: str, defect: str, **more: Any) -> dict[str, Any]:
    return plant(name, defect, found=True, localised=True, reproduced=True, seconds=0.5, searched=0.6, trials=30) | more


def missed(name: str, defect: str, searched: float) -> dict[str, Any]:
    return plant(name, defect, trials=500, searched=searched)


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    one, two, three, four = every()[:4]
    out = Nights(tmp_path / "store", monkeypatch)
    library = [plant(name, name[0]) for name in ("a1", "a2", "b1", "b2", "b3")]
    first = out.night(0, {"EXACT": 95, "UNVERIFIED": 5}, [one, one, two], [*library, found("a1", "a"), missed("b1", "b", SEARCH_S)])
    out.store.report_finding(finding(first))
    second = out.night(1, {"EXACT": 50}, [two, three, four], [found("b1", "b", localised=False), missed("b2", "b", 12.0)])
    out.store.report_finding(finding(second))
    return out


def test_the_trend_says_what_each_night_added(nights: Nights) -> None:
    second, first = nights.page().nights
    assert (first.trials, first.unverified, first.findings, first.first_met) == (100, 5, 1, 1)
    assert (second.trials, second.unverified, second.findings, second.first_met) == (50, 0, 1, 0)
    assert (first.cells_hit, first.cells_new, first.cells_so_far) == (2, 2, 2)
    assert (second.cells_hit, second.cells_new, second.cells_so_far) == (3, 2, 4)
    assert (first.sample_found, first.sampled, first.plants_found, first.plants) == (1, 2, 1, 2)
    assert (second.sample_found, second.sampled, second.plants_found, second.plants) == (1, 1, 2, 2)  # 12 s are no measure of a miss


def test_the_score_per_class_has_found_missed_and_not_yet_sampled_with_dates(nights: Nights) -> None:
    a, b = nights.page().score
    assert (a.name, a.found, a.missed, a.unsampled, a.plants) == ("a", 1, [], ["a2"], 2)
    assert (b.name, b.found, b.elsewhere, b.missed, sorted(b.unsampled)) == ("b", 1, 1, [], ["b2", "b3"])
    assert (a.oldest, a.newest, b.newest) == (FIRST + 60, FIRST + 60, FIRST + DAY + 60)
    nights.night(2, {"EXACT": 1}, [], [missed("a1", "a", SEARCH_S)])
    assert nights.page().score[0].missed == ["a1"]  # the newest measure counts


def test_the_page_shows_them(nights: Nights) -> None:
    page = nights.page()
    text = render(page)
    document = assert_sound(text)
    tables = {e.attributes["aria-label"]: " ".join(e.text.split()) for e in document.elements if e.attributes.get("role") == "region"}
    assert "2026-09-22" in tables["Trend over the nights"] and "5.0 %" in tables["Trend over the nights"]
    score = tables["Mutation score per class"]
    assert "all52 1 elsewhere03" in score  # plants, found, missed, not yet sampled
    assert "3 plants that were not found and not yet searched for 60 s" in score
    assert mutation_sentence(page.mutation, 3).startswith("2 of 2 planted defects found") and "3 not yet sampled." in text
    assert summary(page)["mutation"] == {"plants": 5, "measured": 2, "found": 2}
    assert summary(page)["cells"] == {"hit": 3, "reachable": len(every())}  # of the newest campaign


def test_a_killed_night_is_in_the_trend(nights: Nights) -> None:
    new_run(nights.store, run_id="killed", started=FIRST + 2 * DAY, purpose="nightly")
    assert [night.ended for night in nights.page().nights] == ["no end recorded", "budget", "budget"]


def test_merged_stores_have_one_trend(nights: Nights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Nights(tmp_path / "other", monkeypatch)
    other.night(3, {"EXACT": 7}, [every()[0], every()[9]], [found("a2", "a")])
    with merge([nights.store.path, other.store.path], tmp_path / "both") as both:
        page = page_data.load(both)
    assert [night.trials for night in page.nights] == [7, 50, 100]
    assert (page.nights[0].cells_new, page.nights[0].cells_so_far, page.nights[0].plants_found) == (1, 5, 3)
    assert page.score[0].unsampled == []


def test_rows_from_before_the_dates_take_the_start_of_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Nights(tmp_path / "s", monkeypatch)
    out.now = 0.0
    run = new_run(out.store, started=FIRST, purpose="mutation", engines=[])
    with out.store.writer(run, "w") as rows:
        rows.add_mutation(missed("a1", "a", 0.0))  # nor did they say how long they searched
    (score,) = out.page().score
    assert (score.missed, score.newest) == (["a1"], FIRST)


def test_the_slowest_trials_come_with_their_case(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "s")
    with store.writer(new_run(store), "w") as rows:
        for trial in range(30):
            case = '{"kind":"op"}' if trial == 29 else ""
            rows.add_trial({"engine": "native", "case_id": f"c{trial}", "verdict": "EXACT", "duration_ms": float(trial), "case": case})
    page = page_data.load(store)
    assert [row["case_id"] for row in page.slowest] == [f"c{trial}" for trial in range(29, 19, -1)]
    text = render(page)
    assert "{&#34;kind&#34;:&#34;op&#34;}" in text and "Slowest trials" in text
