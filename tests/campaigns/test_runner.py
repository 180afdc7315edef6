"""Campaigns end to end: shards, the store, the ladder, nights, and a kill in the middle. Engines are small, budgets are trials."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from campaigns import nightly, runner
from campaigns.capsule import read
from campaigns.case import OpCase, to_json
from campaigns.fingerprint import Fingerprint
from campaigns.isolation import Supervisor
from campaigns.replay import replayed, stored
from campaigns.runner import NotLoadable, Options, check, check_engine
from campaigns.trial import patience
from oracles.judgement import RUNGS
from reports.store import Store, StoreError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the toy engine as module `toy_under_test`; write `wrong` into it to break the engine."""
    folder = tmp_path / "toy"
    folder.mkdir()
    shutil.copy(HERE / "toy_engine.py", folder / "toy_under_test.py")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    monkeypatch.syspath_prepend(str(folder))
    yield folder


ENGINE = "toy_under_test:Engine"


def options(tmp_path: Path, **changes: object) -> Options:
    return Options(**{"store": str(tmp_path / "store"), "trials": 200, "jobs": 1, "minimise_seconds": 20.0, **changes})  # type: ignore[arg-type]


def test_an_honest_engine_climbs_the_whole_ladder(tmp_path: Path) -> None:
    run_id, (result,) = check(["blocked"], options(tmp_path, trials=120, jobs=2))
    assert result.findings == {} and result.failing == 0
    assert result.first_failing_rung == ""
    assert result.trials >= 120 and result.frozen > 0
    assert list(result.tallies) == [rung for rung in RUNGS if rung in result.tallies]
    assert {"ops", "prefill", "tree verify", "accept and commit"} <= set(result.tallies)
    assert result.verified > 100_000
    with Store.create_or_open(tmp_path / "store", readonly=True) as store:
        assert len(store.table("trials")) == result.trials
        assert (store.table("judgements").judgements.sum()) == sum(t["judgements"] for t in result.tallies.values())
        (run,) = store.runs()
        assert (run["run_id"], run["stopped"], run["trials"]) == (run_id, "complete", result.trials)
        coverage = store.table("coverage")
        assert (coverage.trials == 0).any() and (coverage.trials > 0).any()  # cells are declared, and some are reached


def test_a_defect_is_found_minimised_located_and_kept(tmp_path: Path, toy: Path) -> None:
    (toy / "wrong").write_text("wrong")
    said: list[str] = []
    _, (result,) = check([ENGINE], options(tmp_path), lambda engine, event: said.append(event["event"]))
    (finding,) = result.findings.values()
    assert finding["minimal"]
    assert said.index("finding") < said.index("minimised")
    assert result.first_failing_rung == "ops"
    with Store.create_or_open(tmp_path / "store", readonly=True) as store:
        (row,) = store.findings()
        folder = store.path / row["capsule"]
    assert (row["engine"], row["verdict"], row["op"], row["output"], row["status"]) == ("toy", "DEFECT", "add", "out", "new")
    assert row["hits"] == result.failing
    smallest = read(folder).case
    assert isinstance(smallest, OpCase)
    assert dict(smallest.dims) == {"N": 1, "T": 1} and smallest.hazards == () and smallest.seed == 0
    ended = subprocess.run([sys.executable, str(folder / "repro.py")], capture_output=True, text=True)
    assert ended.returncode == 1, ended.stdout + ended.stderr


def test_a_second_check_counts_a_known_finding_and_does_not_minimise_it_again(tmp_path: Path, toy: Path) -> None:
    (toy / "wrong").write_text("wrong")
    check([ENGINE], options(tmp_path))
    said: list[str] = []
    _, (result,) = check([ENGINE], options(tmp_path), lambda engine, event: said.append(event["event"]))
    (finding,) = result.findings.values()
    assert (finding["note"], "minimised" in said) == ("known", False)
    with Store.create_or_open(tmp_path / "store", readonly=True) as store:
        (row,) = store.findings()
    assert row["status"] == "known" and row["minimal"]


def test_what_was_not_made_small_in_time_is_made_small_by_the_next_campaign(
    tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (toy / "wrong").write_text("wrong")
    monkeypatch.setattr(runner, "GRACE_S", 600.0)  # for a machine that needs long to load
    (late,) = check([ENGINE], options(tmp_path, until=time.monotonic()))[1]
    assert late.trials > 0  # whatever loading took, something is searched
    (finding,) = late.findings.values()
    assert "minimal" not in finding
    (result,) = check([ENGINE], options(tmp_path))[1]
    (again,) = result.findings.values()
    assert again["minimal"] and again["finding_id"] == finding["finding_id"]


def test_an_engine_that_hangs_does_not_hold_a_campaign_up(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call hangs; its deadline is half a minute away. The campaign's time is over before, and nothing stays behind."""
    (toy / "wrong").write_text("hang")
    monkeypatch.setattr(runner, "GRACE_S", 0.5)
    below: list[psutil.Process] = []
    started = runner.Shards.__init__

    def noted(shards: runner.Shards, count: int) -> None:
        started(shards, count)
        below.extend(psutil.Process().children(recursive=True))

    monkeypatch.setattr(runner.Shards, "__init__", noted)
    (result,) = check([ENGINE], options(tmp_path, until=time.monotonic() + 4))[1]
    assert (result.trials, result.findings) == (0, {})
    assert below and not psutil.wait_procs(below, timeout=30)[1]


def test_a_shard_that_met_something_new_leaves_time_to_make_it_small(tmp_path: Path, toy: Path) -> None:
    (toy / "wrong").write_text("wrong")
    (result,) = check([ENGINE], options(tmp_path, trials=10**9, seconds=600.0, reserve=600.0))[1]
    (finding,) = result.findings.values()
    assert finding["minimal"]
    assert 0 < result.trials < 5000  # it ended long before its 600 s


def test_nights_tell_new_known_and_fixed_and_the_ledger_excuses(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly, "DISCOVERY_MIN_S", 0.5)
    monkeypatch.setattr(runner, "GRACE_S", 600.0)  # for a machine that needs long to load
    statuses, red = [], []
    for mode in ("wrong", "wrong", ""):
        (toy / "wrong").write_text(mode)
        night = nightly.nightly([ENGINE], options(tmp_path, purpose="nightly"), 0.5)
        (row,) = night.findings
        statuses.append(row["status"])
        red.append(bool(night.failing))
        (tmp_path / "store" / "ledger.toml").write_text(f'[{row["finding_id"]}]\nstate = "accepted"\nnote = "by design"\n')
    assert statuses == ["new", "known", "fixed"]
    assert red == [True, False, False]  # the second night fails as well, but the ledger accepts it


def test_a_failure_that_needs_an_earlier_case_is_said_to_and_minimised_with_it(tmp_path: Path, toy: Path) -> None:
    """Wrong from the second call on: the case alone passes in a fresh worker, but not after another. The capsule holds both."""
    (toy / "wrong").write_text("second call")
    _, (result,) = check([ENGINE], options(tmp_path, trials=60))
    (finding,) = result.findings.values()
    assert (finding["note"], finding["minimal"], len(finding["history"])) == ("needs history", True, 1)
    with Store.create_or_open(tmp_path / "store", readonly=True) as store:
        (row,) = store.findings()
        folder = store.path / row["capsule"]
    capsule = read(folder)
    assert [dict(case.dims) for case in (*capsule.earlier, capsule.case) if isinstance(case, OpCase)] == [{"N": 1, "T": 1}] * 2
    ended = subprocess.run([sys.executable, str(folder / "repro.py")], capture_output=True, text=True)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    again = stored(row["finding_id"], str(tmp_path / "store"))
    with Supervisor(ENGINE, deadline_s=patience()) as supervisor:
        assert replayed(supervisor, again.case, again.wanted, 2, earlier=again.earlier).status == "reproduced"
        assert replayed(supervisor, again.case, again.wanted, 2).status == "passes"


def test_a_case_that_fails_alone_takes_the_place_of_one_that_needs_its_history(tmp_path: Path, toy: Path) -> None:
    (toy / "wrong").write_text("second call, or narrow")
    notes: list[str] = []
    _, (result,) = check([ENGINE], options(tmp_path, trials=400), lambda engine, event: notes.append(event.get("note", "")))
    (finding,) = result.findings.values()
    assert (finding["note"], finding["minimal"]) == ("", True)
    with Store.create_or_open(tmp_path / "store", readonly=True) as store:
        (row,) = store.findings()
    assert dict(json.loads(row["case"])["dims"])["N"] < 5


def test_an_engine_that_cannot_be_loaded_ends_the_run_and_the_store_says_error(tmp_path: Path) -> None:
    with pytest.raises(NotLoadable, match="did you mean 'blocked'"):
        check(["blokced"], options(tmp_path))
    with Store.create_or_open(tmp_path / "store", readonly=True) as store:
        assert [run["stopped"] for run in store.runs()] == ["error"]


def test_an_engine_that_cannot_be_loaded_keeps_no_other_from_being_checked(tmp_path: Path, toy: Path) -> None:
    _, (missing, checked) = check(["blokced", ENGINE], options(tmp_path, trials=20))
    assert "did you mean 'blocked'" in missing.not_loaded
    assert not missing.trials
    assert checked.trials >= 20
    assert not checked.not_loaded


def test_a_disk_that_fills_up_is_one_error_of_the_store(tmp_path: Path, toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`/proc` stands for the full disk: a folder that exists and in which nobody, root included, can make a file."""
    with Store.create_or_open(tmp_path / "store"):
        pass
    shutil.rmtree(tmp_path / "store" / "parts" / "trials")
    (tmp_path / "store" / "parts" / "trials").symlink_to("/proc")
    with pytest.raises(StoreError, match="parts/trials"):
        check([ENGINE], options(tmp_path, trials=20))
    assert "Traceback" not in capfd.readouterr().err


def test_a_store_that_is_none_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "holiday.jpg").write_text("")
    with pytest.raises(StoreError, match="other files"):
        check(["blocked"], options(tmp_path))


def test_crashes_of_the_engine_are_findings_and_end_nothing(tmp_path: Path, toy: Path) -> None:
    (toy / "wrong").write_text("crash")
    _, (result,) = check([ENGINE], options(tmp_path, trials=40))
    (finding,) = result.findings.values()
    assert finding["fingerprint"][1] == "CRASHED"
    assert finding["minimal"]
    assert result.trials >= 40


def test_a_killed_runner_leaves_the_finding_and_no_process(tmp_path: Path, toy: Path) -> None:
    (toy / "wrong").write_text("wrong")
    program = f"from campaigns.runner import *\ncheck([{ENGINE!r}], Options(store={str(tmp_path / 'store')!r}, trials=10**9, jobs=2))"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        findings = []
        while not findings:
            assert process.poll() is None
            time.sleep(0.2)
            with contextlib.suppress(StoreError), Store.create_or_open(tmp_path / "store", readonly=True) as store:  # not made yet
                findings = store.findings()
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 2
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive, alive
    with Store.create_or_open(tmp_path / "store") as store:  # sound, and open for the next run
        assert [row["op"] for row in store.findings()] == ["add"]
        assert store.runs()[0]["finished"] == 0


def test_an_interrupt_of_the_terminal_ends_in_one_sentence(tmp_path: Path, toy: Path) -> None:
    """Ctrl-C goes to the whole foreground group; the shards are not in it."""
    words = ["check", ENGINE, "--trials", "1000000000", "--jobs", "2", "--store", str(tmp_path / "store")]
    process = subprocess.Popen(
        [sys.executable, "-m", "paritree.cli", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a runner in the background may have it ignored, and children inherit that
    )  # fmt: skip
    try:
        below = []
        while len(below) < 3:  # two shards and what they start
            assert process.poll() is None
            time.sleep(0.05)
            below = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said.endswith("paritree: interrupted; what was found is in the store\n") and "Traceback" not in said
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive, alive


# Replays


def test_replays_run_in_fresh_workers_and_compare_fingerprints(toy: Path) -> None:
    case = OpCase("add", (("N", 2), ("T", 1)), (), "ordinary", 0)
    wanted = Fingerprint("toy", "DEFECT", "add", "out", "ops")
    with Supervisor(ENGINE, deadline_s=patience()) as supervisor:
        statuses = []
        for mode in ("wrong", "", "crash"):
            (toy / "wrong").write_text(mode)
            statuses.append(replayed(supervisor, case, wanted, 2).status)
    assert statuses == ["reproduced", "passes", "changed"]


def test_a_case_file_can_be_replayed(tmp_path: Path) -> None:
    case = OpCase("add", (("N", 2), ("T", 1)), (), "ordinary", 0)
    (tmp_path / "mine.json").write_text(to_json(case))
    found = stored(str(tmp_path / "mine.json"), "nowhere")
    assert (found.case, found.wanted, found.engine_spec) == (case, None, "")


def test_one_engine_result_is_plain_data(tmp_path: Path) -> None:
    import json

    with Store.create_or_open(tmp_path / "store") as store:
        run_id = store.start_run({})
    plain = check_engine("blocked", run_id, options(tmp_path, trials=20)).plain()
    assert json.loads(json.dumps(plain)) == plain
    assert runner.machine()
