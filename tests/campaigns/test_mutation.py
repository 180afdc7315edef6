"""The mutation score: what is measured is kept, a rerun goes on, a nightly sample rotates; two bugs in one engine do not slip into each other."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from campaigns import fingerprint, mutation
from campaigns.case import Case
from campaigns.discover import Discovery, diet_of
from campaigns.fingerprint import Fingerprint
from campaigns.isolation.inprocess import InProcess
from campaigns.mutation import Score, campaign, done, nightly_sample
from campaigns.reduce import nodes_of, reduced
from campaigns.runner import NotLoadable, Options
from campaigns.trial import Bench, Outcome
from impls.blocked import BlockedEngine
from impls.planted import Plant
from impls.planted.mutants import OVERRIDES, PLANTS
from reports.store import Store

SOME = [PLANTS[name] for name in ("Z01", "Z08", "Z22", "tree01")]


def fake_score(plant: Plant, *, found: bool = True) -> Score:
    return Score(
        plant.name, False, plant.source, plant.bug_class, ", ".join(plant.expected_ops), plant.expected_ops[0] if found else "", found, found, found,
        plant.smallest_nodes if found else -1, plant.smallest_nodes, 0.5 if found else -1.0, 7, 100, "F-1" if found else "",
    )  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    def fake(plant: Plant, run_id: str, options: Options) -> Score:
        asked.append(plant.engine)
        if plant.name == "Z22":
            raise NotLoadable("no such engine")
        return fake_score(plant)

    monkeypatch.setattr(mutation, "measured", fake)
    return asked


def run(tmp_path: Path, plants: list[Plant], **more: Any) -> list[dict[str, Any]]:
    options = Options(store=str(tmp_path / "store"), seconds=1.0)
    return campaign(plants, options, tmp_path / "results.jsonl", say=lambda text: None, **more)


def test_a_rerun_measures_only_what_is_missing(tmp_path: Path, measured: list[str]) -> None:
    assert [record["mutant"] for record in run(tmp_path, SOME[:2])] == ["Z01", "Z08"]
    assert [record["mutant"] for record in run(tmp_path, SOME)] == ["Z01", "Z08", "tree01"]
    assert measured == ["blocked:Z01", "blocked:Z08", "blocked:Z22", "blocked:tree01"]


def test_a_line_that_was_cut_is_measured_again(tmp_path: Path, measured: list[str]) -> None:
    run(tmp_path, SOME[:2])
    path = tmp_path / "results.jsonl"
    path.write_text(path.read_text()[:-20])
    assert list(done(path)) == ["Z01 taps seed 0"]
    run(tmp_path, SOME[:2])
    assert measured[2:] == ["blocked:Z08"]


def test_black_boxes_are_kept_apart(tmp_path: Path, measured: list[str]) -> None:
    run(tmp_path, SOME[:1])
    run(tmp_path, SOME[:1], mode="blind")
    assert measured == ["blocked:Z01", "blind+blocked:Z01"]
    assert sorted(done(tmp_path / "results.jsonl")) == ["Z01 blind seed 0", "Z01 taps seed 0"]


def test_rows_reach_the_store(tmp_path: Path, measured: list[str]) -> None:
    run(tmp_path, SOME)
    with Store.create_or_open(tmp_path / "store", readonly=True) as store:
        assert sorted(store.arrow("mutation").to_pandas()["mutant"]) == ["Z01", "Z08", "tree01"]


def test_a_nightly_sample_goes_on_where_the_last_one_ended(tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 20))  # 20 s per plant
    monkeypatch.setattr(mutation, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    options = Options(store=str(tmp_path / "store"))
    library = [PLANTS[name] for name in ("Z01", "Z08", "tree01")]
    first = nightly_sample(options, 60.0, library)
    second = nightly_sample(options, 60.0, library)
    assert [score.mutant for score in first] == ["Z01", "Z08"]
    assert [score.mutant for score in second] == ["tree01", "Z01"]


# ---- decoys: two bugs in one engine --------------------------------------------------------------------------------------------------

DECOYS = [("Z33", "Z34"), ("tree01", "Z15"), ("Z35", "G13"), ("top-k-last", "Z29"), ("Z20", "F10"), ("parent-off", "Z18")]


@pytest.mark.parametrize(("first", "second"), DECOYS)
def test_each_of_two_bugs_is_minimised_to_its_own_place(first: str, second: str) -> None:
    """No slippage: a minimum that fails for the other bug would name the other bug's place."""
    engine = BlockedEngine(OVERRIDES[first] | OVERRIDES[second], name="decoy")
    bench = Bench(InProcess(engine))
    met: dict[Fingerprint, Case] = {}

    def is_new(outcome: Outcome) -> bool:
        found = fingerprint.first("decoy", list(outcome.judgements))
        if found is not None:
            met.setdefault(found[0], outcome.case)
        return False

    diet = dataclasses.replace(diet_of(engine.describe(), hazards=False), sessions=False, mix=(("op", 0.7), ("tree", 0.3)))
    discovery = Discovery(diet, 5, bench.outcomes, is_new, trials_expected=10_000)
    while discovery.trials < 800:
        discovery.step()
    places = [set(PLANTS[name].expected_ops) for name in (first, second)]
    assert all(any(wanted.guilty in place for wanted in met) for place in places), list(met)
    for wanted, case in random.Random(0).sample(sorted(met.items()), min(3, len(met))):

        def fails(one: Case, wanted: Fingerprint = wanted) -> bool:
            found = fingerprint.first("decoy", list(bench.outcome(one).judgements))
            return found is not None and found[0] == wanted

        smallest, checks = reduced(case, fails, guilty=wanted.guilty, checks_max=80)
        found = fingerprint.first("decoy", list(bench.outcome(smallest).judgements))
        assert found is not None
        assert found[0] == wanted
        assert checks <= 80
        assert nodes_of(smallest) <= nodes_of(case)


def test_a_record_is_one_line_of_json(tmp_path: Path, measured: list[str]) -> None:
    run(tmp_path, SOME[:1])
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["mode"] == "taps"
