"""JUnit, job summary, workflow commands, terminal."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from store_samples import finding, new_run

from reports import page_data, summaries
from reports.__main__ import main
from reports.store import Store
from reports.synthetic import fill

HOSTILE = "a|b`c`\n</failure>]]>&<b>\x00\x1b[31m\ud800::error::,% {x}"


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("night") / "store", trials=300)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> page_data.Page:
    store = Store.create_or_open(tmp_path_factory.mktemp("hostile") / "store")
    run_id = new_run(store, engines=[{"name": HOSTILE, "version": HOSTILE}])
    names = dict.fromkeys(("engine", "op", "rule", "output", "message", "replay", "case", "case_id"), HOSTILE)
    store.report_finding(finding(run_id, **names))
    page = page_data.load(store)
    store.close()
    return page


def test_junit_counts_open_findings_as_failures(night: Path) -> None:
    root = ElementTree.fromstring(summaries.junit(summaries.page_of(night)))
    (suite,) = root
    tests = suite.findall("testcase")
    assert [t.get("name") for t in tests][:2] == ["ops", "prefill"]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("12", "6", "0")
    assert sum(t.find("failure") is not None for t in tests) == 6
    failure = next(t for t in tests if t.find("failure") is not None)
    properties = {p.get("name"): p.get("value") for p in failure.iter("property")}
    assert properties["finding_id"] in (failure.get("name") or "") and "paritree replay" in (failure.find("failure").text or "")  # type: ignore[union-attr]


def test_junit_of_a_rung_that_fails_without_a_finding_fails(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "s")
    run_id = new_run(store)
    with store.writer(run_id, "w") as writer:
        writer.add_trial({"engine": "native", "case_id": "1", "verdict": "DEFECT", "rung": "decode"})
        writer.add_trial({"engine": "native", "case_id": "2", "verdict": "EXACT", "rung": "ops"})
    (suite,) = ElementTree.fromstring(summaries.junit(page_data.load(store)))
    outcome = {t.get("name"): [c.tag for c in t] for t in suite}
    assert outcome["decode"] == ["failure"] and outcome["ops"] == [] and outcome["prefill"] == ["skipped"]


def test_fixed_and_decided_findings_do_not_fail(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "s")
    run_id = new_run(store, started=1.0)
    fixed, _ = store.report_finding(finding(run_id))
    decided, _ = store.report_finding(finding(run_id, output="other"))
    store.record_replay(fixed, new_run(store, started=2.0), 0, 5)
    (tmp_path / "s" / "ledger.toml").write_text(f'[{decided}]\nstate = "accepted"\n')
    page = page_data.load(store)
    root = ElementTree.fromstring(summaries.junit(page))
    assert root.get("failures") == "0" and page.state == "none"
    assert summaries.workflow_commands(page) == []


def test_hostile_words_stay_inside_their_form(hostile: page_data.Page) -> None:
    root = ElementTree.fromstring(summaries.junit(hostile))
    assert len(root.findall("testsuite")) == 1
    table = [line for line in summaries.github_summary(hostile).splitlines() if line.startswith("| F-")]
    assert len(table) == 1 and len(re.findall(r"(?<!\\)\|", table[0])) == 8
    assert "<b>" not in table[0].rsplit("`", 2)[0]
    (command,) = summaries.workflow_commands(hostile)
    assert "\n" not in command and command.count("::error") == 2  # the first is ours, the second is text behind the message's ::
    assert re.fullmatch(r"::error title=[^:,\n]*::[^\n]*", command)
    assert "\x1b" not in summaries.text(hostile) and "\x00" not in summaries.text(hostile)


def test_a_job_summary_is_capped_and_counts_the_rest(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "s")
    run_id = new_run(store)
    for i in range(1_400):
        store.report_finding(finding(run_id, output=f"tap{i}", message="é" * 600, replay="r" * 500))
    text = summaries.github_summary(page_data.load(store))
    rows = sum(line.startswith("| F-") for line in text.splitlines())
    assert len(text.encode()) <= summaries.SUMMARY_BYTES and 0 < rows < 1_400
    assert f"{1_400 - rows:,} more findings in the HTML report" in text


def test_at_most_ten_commands_news_first(tmp_path: Path) -> None:
    fill(tmp_path / "s", trials=50, findings=30)
    commands = summaries.workflow_commands(summaries.page_of(tmp_path / "s"))
    assert len(commands) == summaries.ANNOTATIONS_MAX
    assert all(command.startswith("::error title=F-") and " new " in command for command in commands)


def test_a_log_gets_plain_lines_with_the_unverified_share(night: Path) -> None:
    stream = io.StringIO()
    summaries.show(summaries.page_of(night), stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "paritree: 6 open findings in 300 trials"
    assert any(re.match(r"  UNVERIFIED +\d+(\.\d+)? % \(\d+ of 300 trials; 0\.\d+ % of [\d,]+ scalars\)", line) for line in lines)
    assert any(
        line.split() == ["tree", "verify", "first", "failure", *line.split()[4:]]
        for line in lines
        if line.strip().startswith("tree verify")
    )
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_colour_unless_it_declines(night: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    page = summaries.page_of(night)
    summaries.show(page, coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    summaries.show(page, plain)
    assert "\x1b[" in coloured.getvalue() and "\x1b[" not in plain.getvalue()
    for stream in (coloured, plain):
        assert all(f["finding_id"] in stream.getvalue() for f in page.findings)


def test_the_command_writes_all_forms(night: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    junit = tmp_path / "made" / "j.xml"
    arguments = [str(night), "-o", str(tmp_path / "r.html"), "--junit", str(junit), "--summary", str(summary), "--annotations"]
    assert main(arguments) == 0
    assert (tmp_path / "r.html").read_text("utf-8").startswith("<!doctype html>")
    ElementTree.parse(junit)
    assert summary.read_text("utf-8").startswith("before\n## ")
    captured = capsys.readouterr()
    assert "::error" in captured.out and "6 open findings" in captured.err


def test_the_command_names_what_is_no_store(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "reports", str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert process.returncode == 2 and "a folder without campaign.sqlite" in process.stderr and "Traceback" not in process.stderr
