"""Merging stores: a union, whatever the order, however often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from store_samples import finding, new_run

from reports.merge import merge
from reports.store import Store, StoreError


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two shards of one night, and the night before."""
    out = []
    for shard, (campaign, started) in enumerate([("night", 10.0), ("night", 11.0), ("before", 1.0)]):
        store = Store.create_or_open(tmp_path / f"shard{shard}")
        run_id = new_run(store, run_id=f"run{shard}", campaign=campaign, started=started)
        with store.writer(run_id, "w0") as writer:
            for i in range(shard + 1):
                writer.add_trial({"engine": "native", "case_id": f"{shard}.{i}", "verdict": "EXACT"})
        name, _ = store.report_finding(finding(run_id, case="[1,2]" if shard else "[1]", minimal=True, hits=shard + 1))
        if shard < 2:
            store.report_finding(finding(run_id, output="probs"))
        capsule = store.capsule_folder(name)
        capsule.mkdir()
        (capsule / "case.json").write_text(str(shard))
        store.finish_run(run_id, {"finished": started + 5})
        store.close()
        out.append(tmp_path / f"shard{shard}")
    return out


def content(store: Store) -> dict[str, Any]:
    seen: dict[str, Any] = {"runs": store.runs(), "findings": store.findings(), "sightings": store.sightings()}
    seen["events"] = sorted(map(str, store.events()))
    seen["trials"] = store.table("trials").sort_values("case_id").to_dict("records")
    return seen


def test_a_merge_is_the_union(shards: list[Path], tmp_path: Path) -> None:
    merged = merge(shards, tmp_path / "all")
    assert len(merged.table("trials")) == 6 and len(merged.table("runs")) == 3
    by_output = {row["output"]: row for row in merged.findings()}
    old, new = by_output["o_latent"], by_output["probs"]
    assert (old["hits"], old["first_run"], old["last_run"], old["status"], old["case"]) == (6, "run2", "run1", "known", "[1]")
    assert (new["hits"], new["first_run"], new["status"]) == (2, "run0", "new")
    assert (merged.capsule_folder(old["finding_id"]) / "case.json").read_text() == "0"


def test_order_and_repetition_change_nothing(shards: list[Path], tmp_path: Path) -> None:
    once = content(merge(shards, tmp_path / "a"))
    assert content(merge(shards[::-1], tmp_path / "b")) == once
    assert content(merge(shards[:2], tmp_path / "a")) == once
    assert content(merge([tmp_path / "a", shards[0]], tmp_path / "c")) == once


def test_yesterdays_news_is_known_after_merging_with_today(shards: list[Path], tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "later")
    new_run(store, run_id="today", started=100.0)
    merged = merge([*shards, tmp_path / "later"], tmp_path / "all")
    assert {row["status"] for row in merged.findings()} == {"known"}


def test_the_target_may_not_be_a_source(shards: list[Path]) -> None:
    with pytest.raises(StoreError, match="the target among the sources"):
        merge(shards, shards[1])


def test_a_source_that_is_no_store_is_refused_before_anything_is_written(shards: list[Path], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        merge([*shards, tmp_path / "nowhere"], tmp_path / "all")
    assert not (tmp_path / "all").exists()
