"""A night: how its budget is shared, what takes turns over the nights, what makes it red. Engines are stood in for; real nights: test_runner.py."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from campaigns import mutation, nightly
from campaigns.mutation import Score, last_measured, nightly_sample
from campaigns.replay import in_turn
from campaigns.runner import EngineResult, Options
from impls.native.build import NoCompiler
from impls.planted import Plant
from impls.planted.mutants import PLANTS
from reports.schema import SEARCH_S
from reports.store import Store
from tests.campaigns.test_mutation import fake_score
from tests.reports.store_samples import finding, new_run

LIBRARY = [PLANTS[name] for name in ("Z01", "Z08", "tree01", "Z22")]


@pytest.mark.parametrize(("night", "sample"), [(7200.0, 360.0), (1800.0, 90.0), (240.0, 20.0), (60.0, 12.0), (39.0, 0.0), (5.0, 0.0)])
def test_a_night_gives_the_judge_a_share_that_it_can_afford(night: float, sample: float) -> None:
    assert nightly.sample_seconds(night) == pytest.approx(sample)


class Night:
    """What the parts of a night were given; `spent` of an engine are passed over on a clock of our own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spent: dict[str, float]) -> None:
        self.now, self.sample = 1000.0, -1.0
        self.shares: dict[str, float] = {}
        self.seeds: list[int] = []

        def one(engine: str, run_id: str, options: Options, seconds: float, progress: Any, waiting: set[str]) -> EngineResult:
            self.shares[engine] = seconds
            self.seeds.append(options.seed)
            self.now += spent.get(engine, seconds)
            return EngineResult(engine, trials=10)

        def sampled(options: Options, seconds: float, library: list[Plant], say: Any) -> list[Score]:
            self.sample = seconds
            return [fake_score(library[0])]

        monkeypatch.setattr(nightly, "_one", one)
        monkeypatch.setattr(nightly, "nightly_sample", sampled)
        monkeypatch.setattr(nightly, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_what_one_engine_leaves_is_for_the_next_and_the_judge_gets_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Night(monkeypatch, {"b": 50.0, "c": 330.0})
    night = nightly.nightly(["a", "b", "c"], Options(store=str(tmp_path / "s"), purpose="nightly"), 1000.0)
    assert seen.shares == pytest.approx({"a": 950 / 3, "b": 950 / 3, "c": 950 * 2 / 3 - 50})
    assert seen.sample == pytest.approx(1000 - 950 / 3 - 50 - 330)
    assert [score.mutant for score in night.sample] == [nightly.library()[0].name]


def test_each_night_of_a_store_has_a_seed_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Night(monkeypatch, {})
    options = Options(store=str(tmp_path / "s"), purpose="nightly", seed=7)
    assert [nightly.nightly(["a"], options, 10.0).seed for _ in range(3)] == [7, 8, 9] == seen.seeds
    with Store.create_or_open(tmp_path / "s", readonly=True) as store:
        assert [run["seed"] for run in store.runs()] == ["7", "8", "9"]


def test_a_finding_that_no_time_was_left_for_keeps_the_night_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create_or_open(tmp_path / "s")
    standing, _ = store.report_finding(finding(new_run(store)))
    store.close()
    Night(monkeypatch, {})
    real = nightly._one

    def one(engine: str, run_id: str, options: Options, seconds: float, progress: Any, waiting: set[str]) -> EngineResult:
        waiting.add(standing)
        return real(engine, run_id, options, seconds, progress, waiting)

    monkeypatch.setattr(nightly, "_one", one)
    night = nightly.nightly(["a"], Options(store=str(tmp_path / "s"), purpose="nightly"), 10.0)
    assert [row["finding_id"] for row in night.failing] == [standing] == list(night.waiting)
    (tmp_path / "s" / "ledger.toml").write_text(f'[{standing}]\nstate = "accepted"\n')
    assert nightly.nightly(["a"], Options(store=str(tmp_path / "s"), purpose="nightly"), 10.0).failing == []


def test_findings_are_replayed_in_turn(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "s")
    first = new_run(store, started=1.0)
    names = [store.report_finding(finding(first, output=output))[0] for output in ("a", "b", "c", "d")]
    store.report_finding(finding(first, engine="another"))
    for night, (number, failed) in enumerate([(0, 3), (2, 0), (1, 3)]):
        store.record_replay(names[number], new_run(store, started=10.0 + night), failed, 3)
    order = [names.index(row["finding_id"]) for row in in_turn(store, "native")]
    assert order == [3, 0, 1, 2]  # never replayed; longest ago; then; the fixed one last


# ---- the sample ------------------------------------------------------------------------------------------------------------------------


def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, **score: Any) -> list[str]:
    """The names that a sample of at most `most` plants tries."""
    tried: list[str] = []

    def fake(plant: Plant, run_id: str, options: Options) -> Score:
        tried.append(plant.name)
        if len(tried) > most:
            raise KeyboardInterrupt  # as good as a kill: what was written stays
        return fake_score(plant, **score)

    monkeypatch.setattr(mutation, "measured", fake)
    try:
        nightly_sample(Options(store=str(tmp_path / "store"), jobs=1), 1000.0, LIBRARY)
    except KeyboardInterrupt:
        return tried[:-1]
    return tried


def test_a_sample_that_is_cut_off_goes_on_behind_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled(tmp_path, monkeypatch, 1) == ["Z01"]
    assert sampled(tmp_path, monkeypatch, 2) == ["Z08", "tree01"]
    assert sampled(tmp_path, monkeypatch, 3) == ["Z22", "Z01", "Z08"]
    assert sampled(tmp_path, monkeypatch, 9) == ["tree01", "Z22", "Z01", "Z08"]


def test_the_classes_take_turns_and_no_plant_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plants = nightly.library()
    assert {plant.name for plant in plants} >= PLANTS.keys() and len({plant.engine for plant in plants}) == len(plants)
    classes = {plant.bug_class for plant in plants}
    assert {plant.bug_class for plant in plants[: len(classes)]} == classes

    def no_compiler() -> None:
        raise NoCompiler("none")

    monkeypatch.setattr(nightly, "find_compiler", no_compiler)
    assert {plant.kind for plant in nightly.library()} == {"python"}


def test_the_store_knows_the_plants_that_no_night_has_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time()
    sampled(tmp_path, monkeypatch, 1)
    with Store.create_or_open(tmp_path / "store", readonly=True) as store:
        last = last_measured(store)
        assert len(store.table("mutation")) == 5  # each plant once, and one measure
    assert last.keys() == {plant.name for plant in LIBRARY}
    assert last["Z01"] >= before and last["Z08"] == -1.0


def test_each_plant_is_measured_as_if_nothing_were_known_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create_or_open(tmp_path / "store")
    known, _ = store.report_finding(finding(new_run(store)))
    store.close()
    given: list[Options] = []

    def fake(plant: Plant, run_id: str, options: Options) -> Score:
        given.append(options)
        return fake_score(plant)

    monkeypatch.setattr(mutation, "measured", fake)
    nightly_sample(Options(store=str(tmp_path / "store"), jobs=2, minimise=False), 1000.0, LIBRARY)
    assert len(given) == len(LIBRARY)
    assert all(one.not_reproduced == (known,) and one.minimise and one.seconds == SEARCH_S for one in given)
