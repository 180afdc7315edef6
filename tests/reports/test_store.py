"""The store: what goes in comes out, what is torn stays out, and each error says what to do."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from store_samples import example, finding, new_run, part_files

from reports import parts, writer
from reports.schema import FINDINGS, MUTATION, RUNS, TRIALS
from reports.store import Store, StoreError, finding_id


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create_or_open(tmp_path / "store")


# ---- bulk rows ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["trials", "mutation"])
def test_a_row_comes_back_as_it_went_in(store: Store, table: str) -> None:
    columns = {"trials": TRIALS, "mutation": MUTATION}[table]
    run_id = new_run(store)
    with store.writer(run_id, "w0") as out:
        rows = [{c.name: example(c, salt) for c in columns if c.name not in ("run_id", "writer", "time")} for salt in range(3)]
        for row in rows:
            {"trials": out.add_trial, "mutation": out.add_mutation}[table](row)
    back = store.table(table)
    assert back[list(rows[0])].to_dict("records") == rows
    assert set(back["run_id"]) == {run_id} and set(back["writer"]) == {"w0"}


def test_an_empty_table_still_has_its_columns(store: Store) -> None:
    assert list(store.table("trials").columns) == [c.name for c in TRIALS]


def test_infinities_and_nan_survive(store: Store) -> None:
    run_id = new_run(store)
    store.report_finding(finding(run_id, found=math.nan, expected=-math.inf, bound=-0.0, share=math.inf))
    (back,) = store.findings()
    assert (
        math.isnan(back["found"])
        and math.copysign(1.0, back["bound"]) == -1.0
        and back["expected"] == -math.inf
        and back["share"] == math.inf
    )


def test_judgements_are_summed_per_group(store: Store) -> None:
    with store.writer(new_run(store), "w0") as out:
        for case, share in [("a", 0.25), ("a", 0.5), ("b", math.inf), ("c", 0.75)]:
            base = {"engine": "e", "rung": "ops", "op": "matmul", "tap": "q", "layer": 2, "rule": "M1", "verdict": "WITHIN_BOUND"}
            out.add_judgement(base | {"share": share, "checked": 10, "case_id": case})
    (row,) = store.table("judgements").to_dict("records")
    assert (row["form"], row["judgements"], row["trials"], row["checked"]) == ("aggregate", 4, 3, 40)
    assert (row["share_max"], row["share_mean"], row["case_id"]) == (math.inf, 0.5, "b")


def test_a_nan_share_counts_as_the_worst(store: Store) -> None:
    with store.writer(new_run(store), "w0") as out:
        for case, share in [("a", math.nan), ("b", 3.0)]:
            out.add_judgement({"engine": "e", "verdict": "WARNING", "share": share, "case_id": case})
    (row,) = store.table("judgements").to_dict("records")
    assert row["share_max"] == math.inf and row["case_id"] == "a"


def test_finding_judgements_are_also_kept_in_full_up_to_a_cap(store: Store) -> None:
    with store.writer(new_run(store), "w0") as out:
        for i in range(writer.FULL_ROWS_PER_GROUP + 7):
            out.add_judgement({"engine": "e", "verdict": "DEFECT", "share": 2.0, "case_id": str(i), "index": (i, 1), "found": 1.5})
    table = store.table("judgements")
    full, sums = table[table["form"] == "finding"], table[table["form"] == "aggregate"]
    assert len(full) == writer.FULL_ROWS_PER_GROUP and full["index"].iloc[3] == "[3, 1]" and full["found"].iloc[0] == 1.5
    assert sums["judgements"].sum() == writer.FULL_ROWS_PER_GROUP + 7


def test_coverage_is_summed_and_a_cell_can_be_declared(store: Store) -> None:
    with store.writer(new_run(store), "w0") as out:
        out.add_coverage({"engine": "e", "region": "depth", "value": "9", "trials": 0})
        for found in (0, 1):
            out.add_coverage({"engine": "e", "region": "depth", "value": "3", "findings": found})
    cells = {row["value"]: (row["trials"], row["findings"]) for row in store.table("coverage").to_dict("records")}
    assert cells == {"9": (0, 0), "3": (2, 1)}


def test_a_closed_writer_says_so(store: Store) -> None:
    out = store.writer(new_run(store), "w0")
    out.close()
    out.close()
    with pytest.raises(StoreError, match="w0 is closed"):
        out.add_trial({"engine": "e", "case_id": "1", "verdict": "EXACT"})


# ---- parts --------------------------------------------------------------------------------------------------------------------------


def _trials(out: writer.Writer, count: int, start: int = 0) -> None:
    for i in range(start, start + count):
        out.add_trial({"engine": "e", "case_id": str(i), "verdict": "EXACT"})


def test_many_parts_become_one_and_no_row_is_lost_or_doubled(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "COMPACT_AT", 4)
    out = store.writer(new_run(store), "w0")
    for i in range(11):
        _trials(out, 3, 3 * i)
        out.flush()
        assert sorted(store.table("trials")["case_id"].astype(int)) == list(range(3 * i + 3))
    out.close()
    assert len(part_files(store.path, "trials")) == 1
    assert sorted(store.table("trials")["case_id"].astype(int)) == list(range(33))


def test_a_crash_between_compacting_and_deleting_doubles_nothing(store: Store, tmp_path: Path) -> None:
    out = store.writer(new_run(store), "w0")
    for i in range(3):
        _trials(out, 2, 2 * i)
        out.flush()
    shutil.copytree(store.path / "parts" / "trials", tmp_path / "old")
    out.close()
    for path in (tmp_path / "old").iterdir():
        shutil.copy(path, store.path / "parts" / "trials" / path.name)
    assert len(part_files(store.path, "trials")) == 4
    assert sorted(store.table("trials")["case_id"].astype(int)) == list(range(6))


def test_torn_and_foreign_files_are_left_out_and_named(store: Store) -> None:
    run_id = new_run(store)
    with store.writer(run_id, "w0") as out:
        _trials(out, 5)
    folder = store.path / "parts" / "trials"
    whole = part_files(store.path, "trials")[0].read_bytes()
    for cut in (0, 4, len(whole) // 2, len(whole) - 1):
        (folder / f"torn-{cut}.parquet").write_bytes(whole[:cut])
    (folder / "notes.txt").write_text("hello")
    shutil.copy(part_files(store.path, "runs")[0], folder / "other.parquet")
    (folder / f"{parts.TEMPORARY}elsewhere-1-x.parquet").write_bytes(b"PAR1")
    assert len(store.table("trials")) == 5
    reasons = dict(store.ignored["trials"])
    assert len(reasons) == 7
    assert all(reasons[f"torn-{cut}.parquet"].startswith("torn") for cut in (0, 4, len(whole) // 2, len(whole) - 1))
    assert "not a part of trials" in reasons["other.parquet"] and reasons["notes.txt"].startswith("foreign")


def test_a_flipped_byte_never_raises(store: Store) -> None:
    with store.writer(new_run(store), "w0") as out:
        _trials(out, 200)
    (path,) = part_files(store.path, "trials")
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        assert len(store.table("trials")) in (0, 200)


def test_sweep_removes_what_dead_writers_left_and_nothing_else(store: Store) -> None:
    folder = store.path / "parts" / "trials"
    host = os.uname().nodename
    dead = folder / f"{parts.TEMPORARY}{host}-{2**22 + 5}-a.parquet"  # above the largest pid that Linux gives
    alive = folder / f"{parts.TEMPORARY}{host}-{os.getpid()}-a.parquet"
    old, young = folder / f"{parts.TEMPORARY}elsewhere-1-a.parquet", folder / f"{parts.TEMPORARY}elsewhere-2-a.parquet"
    for path in (dead, alive, old, young):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    assert set(store.sweep()) == {dead, old}
    assert alive.exists() and young.exists()


def test_a_restarted_writer_keeps_its_predecessors_rows(store: Store) -> None:
    run_id = new_run(store)
    for start in (0, 2):
        with store.writer(run_id, "w0") as out:
            _trials(out, 2, start)
    assert sorted(store.table("trials")["case_id"]) == ["0", "1", "2", "3"]


def test_rows_of_the_last_seconds_are_written_without_a_flush(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SECONDS_PER_PART", 0.0)
    out = store.writer(new_run(store), "w0")
    _trials(out, 1)
    assert len(store.table("trials")) == 1


def test_a_full_disk_is_named_and_the_rows_wait(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    out = store.writer(new_run(store), "w0")
    _trials(out, 2)

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", no_space)
        with pytest.raises(StoreError, match="the disk is full.*free some space"):
            out.flush()
    assert store.table("trials").empty and not store.ignored["trials"]
    out.close()
    assert len(store.table("trials")) == 2


# ---- runs and findings --------------------------------------------------------------------------------------------------------------


def test_a_run_is_completed_and_kept_once(store: Store) -> None:
    run_id = new_run(store, started=1000.0)
    store.finish_run(run_id, {"finished": 1060.0, "trials": 12, "stopped": "budget"})
    (row,) = store.runs()
    assert row == store.table("runs").to_dict("records")[0]
    assert (row["duration_s"], row["trials"], row["stopped"], row["seed"], row["campaign"]) == (60.0, 12, "budget", "7", run_id)
    assert list(row) == [c.name for c in RUNS]


def test_the_same_fingerprint_is_one_finding(store: Store) -> None:
    run_id = new_run(store)
    first = store.report_finding(finding(run_id))
    second = store.report_finding(finding(run_id, layer=9, token=1, case_id="bb", case="{}", message="elsewhere"))
    assert first == second == (finding_id(finding(run_id)), "new")
    (row,) = store.findings()
    assert (row["hits"], row["layer"], row["case_id"], row["message"]) == (2, 1, "aa", "row 3 reads a rejected branch")
    assert list(row) == [c.name for c in FINDINGS]


@pytest.mark.parametrize("part", ["engine", "verdict", "op", "output", "rung"])
def test_each_part_of_the_fingerprint_separates(store: Store, part: str) -> None:
    run_id = new_run(store)
    names = {store.report_finding(finding(run_id, **{part: value}))[0] for value in ("CRASHED", "HUNG")}
    assert len(names) == 2


def test_without_an_op_the_rule_separates() -> None:
    assert finding_id(finding("r", op="", rule="K1")) != finding_id(finding("r", op="", rule="K2"))
    assert finding_id(finding("r", rule="K1")) == finding_id(finding("r", rule="K2"))


def test_a_minimal_case_replaces_one_that_is_not_and_never_the_reverse(store: Store) -> None:
    run_id = new_run(store)
    store.report_finding(finding(run_id))
    store.report_finding(finding(run_id, case_id="min", case="[]", minimal=True, nodes=2))
    store.report_finding(finding(run_id, case_id="large", case="[1,2,3]", nodes=40))
    (row,) = store.findings()
    assert (row["case_id"], row["minimal"], row["nodes"], row["hits"]) == ("min", True, 2, 3)


def test_status_over_three_campaigns(store: Store) -> None:
    first = new_run(store, started=1.0)
    name, _ = store.report_finding(finding(first))
    second = new_run(store, started=2.0)
    assert store.findings()[0]["status"] == "known"
    assert store.record_replay(name, second, 0, 3) == "fixed"
    assert store.report_finding(finding(second, case_id="bb", case="[2]"))[1] == "changed"
    third = new_run(store, started=3.0)
    assert store.record_replay(name, third, 1, 3) == "flaky"
    row = store.findings()[0]
    assert (row["case_id"], row["reproduced"], row["attempts"], row["first_run"], row["last_run"]) == ("bb", 1, 3, first, third)
    assert [e["kind"] for e in store.events() if e["finding_id"]] == ["new", "fixed", "changed", "flaky"]


def test_shards_of_one_campaign_agree_that_it_is_new(store: Store) -> None:
    first, second = (new_run(store, started=t, campaign="night") for t in (1.0, 2.0))
    assert store.report_finding(finding(first))[1] == "new"
    assert store.report_finding(finding(second))[1] == "new"


def test_a_campaign_of_another_engine_ages_nothing(store: Store) -> None:
    store.report_finding(finding(new_run(store)))
    new_run(store, engines='[{"name": "other", "version": "2"}]')
    assert store.findings()[0]["status"] == "new"


def test_update_sets_facts_and_keeps_the_life(store: Store) -> None:
    name, _ = store.report_finding(finding(new_run(store)))
    store.update_finding(name, {"capsule": f"findings/{name}", "bisect": {"by": "commit", "first_bad": "abc"}, "minimal": True})
    row = store.findings()[0]
    assert (row["bisect"], row["minimal"], row["hits"]) == ('{"by": "commit", "first_bad": "abc"}', True, 1)
    with pytest.raises(ValueError, match="verdict of a finding cannot be changed"):
        store.update_finding(name, {"verdict": "EXACT"})
    with pytest.raises(StoreError, match="no finding F-0"):
        store.update_finding("F-0", {"nodes": 1})


def test_a_finding_needs_a_run(store: Store) -> None:
    with pytest.raises(StoreError, match="no run 'nowhere'.*start_run"):
        store.report_finding(finding("nowhere"))
    assert store.findings() == []


def test_threads_and_a_forked_child_report_side_by_side(store: Store) -> None:
    run_id = new_run(store)
    store.report_finding(finding(run_id))
    child = os.fork()
    if child == 0:  # pragma: no cover
        store.report_finding(finding(run_id))
        os._exit(0)
    threads = [threading.Thread(target=lambda: [store.report_finding(finding(run_id)) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert store.findings()[0]["hits"] == 22


# ---- opening ------------------------------------------------------------------------------------------------------------------------


def test_reopened_read_only_it_shows_all_and_takes_nothing(store: Store) -> None:
    run_id = new_run(store)
    store.report_finding(finding(run_id))
    reader = Store.create_or_open(store.path, readonly=True)
    assert len(reader.findings()) == 1 and len(reader.runs()) == 1
    for write in (lambda: new_run(reader), lambda: reader.writer(run_id, "w"), reader.sweep):
        with pytest.raises(StoreError, match="opened read-only"):
            write()


def test_a_folder_that_cannot_be_written_is_read_with_its_newest_commits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.report_finding(finding(new_run(store)))
    assert (store.path / "campaign.sqlite-wal").stat().st_size > 0
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with Store.create_or_open(store.path, readonly=True) as reader:
        assert len(reader.findings()) == 1


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreError, match="not writable, but expected a writable folder"):
        Store.create_or_open(tmp_path / "store")


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    (tmp_path / "other").mkdir()
    with sqlite3.connect(tmp_path / "other" / "campaign.sqlite") as database:
        database.execute("CREATE TABLE songs (name TEXT)")
    for path, readonly, message in [
        (tmp_path / "file", False, "found|a file, but expected a folder"),
        (tmp_path / "photos", False, "other files and without campaign.sqlite"),
        (tmp_path / "photos", True, "a folder without campaign.sqlite"),
        (tmp_path / "missing", True, "no such folder"),
        (tmp_path / "other", False, "a database of something else"),
        (tmp_path / "other", True, "a database of something else"),
    ]:
        with pytest.raises(StoreError, match=message):
            Store.create_or_open(path, readonly)
    assert not (tmp_path / "missing").exists() and list((tmp_path / "photos").iterdir()) == [tmp_path / "photos" / "cat.png"]


def test_a_store_that_holds_only_the_ledger_is_taken(tmp_path: Path) -> None:
    (tmp_path / "ledger.toml").write_text("")
    assert Store.create_or_open(tmp_path).ledger() == {}


def test_a_newer_schema_is_refused(store: Store) -> None:
    store.close()
    with sqlite3.connect(store.path / "campaign.sqlite") as database:
        database.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    with pytest.raises(StoreError, match="schema 99.*update paritree"):
        Store.create_or_open(store.path)


@pytest.mark.parametrize("readonly", [False, True])
def test_a_damaged_database_is_named_with_a_way_out(store: Store, readonly: bool) -> None:
    store.close()
    (store.path / "campaign.sqlite").write_bytes(b"this is not a database" * 500)
    with pytest.raises(StoreError, match=r"damaged.*\.recover"):
        Store.create_or_open(store.path, readonly)


def test_a_full_database_is_named(store: Store) -> None:
    run_id = new_run(store)
    with store.transaction() as database:
        (pages,) = database.execute("PRAGMA page_count").fetchone()
    store._connection().execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="the disk is full"):
        for i in range(2000):
            store.report_finding(finding(run_id, output=f"tap{i}", message="x" * 2000))
    assert all(row["hits"] == 1 for row in store.findings())


def test_the_ledger_is_read_and_its_mistakes_are_named(store: Store) -> None:
    path = store.path / "ledger.toml"
    path.write_text('[F-00000001]\nstate = "wontfix"\nnote = "by design"\n')
    assert store.ledger()["F-00000001"]["note"] == "by design"
    path.write_text('[F-00000001]\nstate = "whatever"\n')
    with pytest.raises(StoreError, match="F-00000001"):
        store.ledger()
    path.write_text("[F-00000001\n")
    with pytest.raises(StoreError, match="broken TOML"):
        store.ledger()


def test_an_engine_is_named_once_it_is_loaded(store: Store) -> None:
    first = new_run(store, started=1.0, engines=[{"spec": "./e.so"}])
    store.add_engine(first, {"spec": "./e.so", "name": "native", "version": "1"})
    assert store.report_finding(finding(first))[1] == "new"
    second = new_run(store, started=2.0, engines=[{"spec": "./e.so"}, {"spec": "./other.so"}])
    assert store.findings()[0]["status"] == "new"  # not known to be the same engine yet
    for version in ("1", "2"):  # two shards of the run
        store.add_engine(second, {"spec": "./e.so", "name": "native", "version": version})
    assert store.findings()[0]["status"] == "known"
    assert json.loads(store.runs()[1]["engines"]) == [{"spec": "./other.so"}, {"spec": "./e.so", "name": "native", "version": "2"}]
    assert store.table("runs")["engines"].iloc[1] == store.runs()[1]["engines"]
