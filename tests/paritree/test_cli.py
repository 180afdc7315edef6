"""The command line: exit codes, one JSON document, and no traceback for a user's mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from campaigns import nightly
from campaigns.case import OpCase, SessionCase, to_json
from campaigns.mutation import Score
from campaigns.runner import EngineResult, Options
from paritree import cli

ROOT = Path(__file__).parent.parent.parent
CLEAN, FINDINGS, USAGE, NOT_LOADABLE, NOTHING, SKIP = 0, 1, 2, 3, 5, 125
HEAVY = {"numpy", "pandas", "pyarrow", "hypothesis", "campaigns", "spec", "oracles", "reports", "impls"}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code, out, _ = run(capsys, *words, "--json")
    return code, json.loads(out)


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    program = "import sys; from paritree.cli import main; main(['--help']); print(sorted(m for m in sys.modules if '.' not in m))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == CLEAN, ended.stderr
    for command in (
        "check",
        "judge",
        "nightly",
        "replay",
        "shrink",
        "bisect",
        "report",
        "merge",
        "engines",
        "tree-profile",
        "explain",
        "doctor",
    ):
        assert re.search(rf"^    {command}\s", ended.stdout, re.MULTILINE), command
    loaded = set(json.loads(ended.stdout.splitlines()[-1].replace("'", '"')))
    assert loaded & HEAVY == set()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chekc"], "invalid choice: 'chekc'"),
        (["check"], "check needs an engine"),
        (["check", "blocked", "--frob"], "unrecognized arguments: --frob"),
        (["check", "blocked", "--budget", "soon"], "'soon' is no budget"),
        (["check", "blocked", "--trials", "0"], "no whole number of at least 1"),
        (["check", "blocked", "--certify", ","], "',' names nothing"),
        (["check", "blocked", "--certify", "speed"], "there is no property 'speed'"),
        (["check", "blocked", "--certify", "determinism", "--report", "x.html"], "--report has no meaning beside --certify"),
        (["check", "blocked", "--certify", "determinism", "--stop-at-first"], "--stop-at-first has no meaning beside --certify"),
        (["check", "blocked", "--certify", "determinism", "--trials", "5"], "--trials has no meaning beside --certify"),
        (["nightly", "--engine", "blocked", "--budget", "500"], "nightly shares out time"),
        (["nightly", "blocked", "--report", "."], "--report .: a folder: name a file"),
        (["check", "blocked", "--junit", "/dev/null/x.xml"], "/dev/null is a file: name a file in a folder that can be written"),
        (["judge", "nowhere.safetensors"], "no such file"),
        (["judge", "x", "--param", "eps"], "give KEY=NUMBER"),
        (["replay", "F-00000000", "--store", "nowhere"], "nowhere is no store"),
        (["explain", "T99"], "there is no rule 'T99'"),
        (["report", "--store", "nowhere"], "no such folder"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert code == USAGE
    assert said in err
    assert out == ""


def test_an_unknown_engine_is_exit_3_with_a_hint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "check", "blokced", "--store", str(tmp_path / "store"))
    assert code == NOT_LOADABLE
    assert "did you mean 'blocked'" in err


def test_errors_are_a_document_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, body = document(capsys, "check", "blokced", "--store", str(tmp_path / "store"))
    assert code == body["exit_code"] == NOT_LOADABLE


def test_explain_prints_statement_example_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "T3", "k1")
    assert code == CLEAN
    assert "example" in out and "source" in out and out.index("T3") < out.index("K1")
    assert len(document(capsys, "explain")[1]) > 30


def test_doctor_and_engines_answer_as_documents(capsys: pytest.CaptureFixture[str]) -> None:
    code, body = document(capsys, "doctor")
    assert code in (CLEAN, FINDINGS)
    assert {fact["name"] for fact in body["facts"]} >= {"Python", "C++ compiler", "shared memory"}
    code, body = document(capsys, "engines", "blocked")
    assert code == CLEAN
    assert "run_op" in body["engines"][0]["capabilities"]


# A check from the first finding to its replay


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(store, finding) of a check of a planted engine."""
    store = str(tmp_path_factory.mktemp("cli") / "store")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment["GITHUB_STEP_SUMMARY"] = f"{store}.md"
    words = (
        f"check blocked:Z33 --store {store} --trials 60 --jobs 1 --json --report {store}.html --junit {store}.xml --stop-at-first".split()
    )
    ended = subprocess.run([sys.executable, "-m", "paritree.cli", *words], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert ended.returncode == FINDINGS, ended.stderr
    body = json.loads(ended.stdout)
    (finding,) = body["engines"][0]["findings"]
    assert finding["minimal"]
    assert Path(body["report"]).read_text().startswith("<!doctype html>")
    for form in ("xml", "md"):
        assert finding["finding_id"] in Path(f"{store}.{form}").read_text(), form
    return store, finding["finding_id"]


def test_a_finding_replays_on_its_engine_and_passes_on_the_honest_one(broken: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    store, finding = broken
    code, body = document(capsys, "replay", finding, "--store", store)
    assert (code, body["status"]) == (FINDINGS, "reproduced")
    assert run(capsys, "replay", finding, "--store", store, "--engine", "blocked")[0] == CLEAN
    assert run(capsys, "replay", f"{store}/findings/{finding}")[0] == FINDINGS


def test_replay_bisect_speaks_the_language_of_git(broken: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    store, finding = broken
    codes = [
        run(capsys, "replay", finding, "--store", store, "--bisect", "--engine", e)[0] for e in ("blocked", "blocked:Z33", "./none.so")
    ]
    assert codes == [CLEAN, FINDINGS, SKIP]


def test_bisect_names_the_operation_and_the_first_bad_build(broken: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    store, finding = broken
    code, body = document(capsys, "bisect", finding, "--store", store, "--builds", "golden", "blocked", "blocked:Z33", "blocked:Z33")
    assert code == FINDINGS
    assert body["note"].startswith(("swiglu", "moe"))  # whichever operation of the wrong gate was met first
    assert body["first_bad_build"] == "blocked:Z33"
    assert run(capsys, "bisect", finding, "--store", store, "--engine", "blocked")[0] == CLEAN


def test_a_damaged_capsule_is_one_sentence_and_exit_2(broken: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, finding = broken
    source = Path(store) / "findings" / finding
    for name in ("case.json", "arrays.safetensors"):
        for file in source.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        code, _, err = run(capsys, "replay", str(tmp_path))
        assert code == USAGE
        assert len(err.strip().splitlines()) == 1


def test_shrink_takes_a_case_file_and_writes_a_capsule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = OpCase("swiglu", (("N", 17), ("T", 5)), (), "extreme", 12345, ("poison",))
    (tmp_path / "mine.json").write_text(to_json(case))
    words = ["shrink", str(tmp_path / "mine.json"), "--engine", "blocked:Z33", "--out", str(tmp_path / "capsule")]
    code, body = document(capsys, *words)
    assert code == FINDINGS
    assert body["case"]["dims"] == [["N", 1], ["T", 1]]
    assert (tmp_path / "capsule" / "repro.py").is_file()
    assert run(capsys, "shrink", str(tmp_path / "mine.json"), "--engine", "blocked")[0] == CLEAN


def test_a_case_without_an_engine_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.json").write_text(to_json(SessionCase("tiny", (), 0, "ordinary", ((1, 0),), ())))
    code, _, err = run(capsys, "replay", str(tmp_path / "mine.json"))
    assert code == USAGE and "give --engine" in err


def test_report_and_merge_work_on_the_store(broken: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, _ = broken
    code, body = document(capsys, "merge", store, "--into", str(tmp_path / "both"))
    assert (code, body["findings"]) == (CLEAN, 1)
    code, body = document(capsys, "report", "--store", str(tmp_path / "both"), "--out", str(tmp_path / "page.html"))
    assert code == CLEAN and Path(body["report"]).is_file()


# Judging a user's tensors


def dump(path: Path, wrong: float, **metadata: str) -> str:
    x, w = np.eye(3, dtype=np.float32), np.arange(6, dtype=np.float32).reshape(3, 2)
    out = x @ w
    out[2, 1] += np.float32(wrong)
    save_file({"inputs.x": x, "inputs.w": w, "outputs.out": out}, str(path), metadata)
    return str(path)


def test_judge_tells_right_from_wrong_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "judge", dump(tmp_path / "right", 0.0, op="matmul"))[0] == CLEAN
    code, body = document(capsys, "judge", dump(tmp_path / "wrong", 1e-3), "--op", "matmul")
    assert code == FINDINGS
    assert body["judgements"][0]["index"] == [2, 1]
    assert run(capsys, "judge", dump(tmp_path / "coarse", 1e-3), "--op", "matmul", "--profile", "bf16-f32acc")[0] == CLEAN


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the operation is not named"),
        (["--op", "mutmal"], "no operation 'mutmal'"),
        (["--op", "matmul", "--profile", "fp3"], "no profile 'fp3'"),
    ],
)
def test_judge_says_what_it_lacks(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "judge", dump(tmp_path / "dump", 0.0), *words)
    assert code == USAGE and said in err


# Settings


def test_settings_come_from_paritree_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paritree.toml").write_text('[paritree]\nengines = ["blokced"]\nstore = "mine"\n')
    code, _, err = run(capsys, "check")
    assert code == NOT_LOADABLE and "blokced" in err
    assert (tmp_path / "mine").is_dir()


@pytest.mark.parametrize(
    ("text", "said"),
    [("[paritree]\nstroe = 'x'", "no setting 'stroe'"), ("[paritree]\ntrials = 'many'", "must be of type int"), ("[paritree", "repair it")],
)
def test_a_wrong_paritree_toml_is_named(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paritree.toml").write_text(text)
    code, _, err = run(capsys, "explain", "T3")
    assert code == USAGE and said in err


def test_an_internal_error_is_exit_4_and_says_how_to_see_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken_rule(name: str) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("spec.rules.rule", broken_rule)
    code, _, err = run(capsys, "explain", "T3")
    assert code == 4
    assert "internal error: ZeroDivisionError: ours" in err and "--debug" in err


@pytest.mark.parametrize(
    ("text", "budget"),
    [("90s", (90.0, None)), ("30m", (1800.0, None)), ("2h", (7200.0, None)), ("1d", (86400.0, None)), ("5000", (None, 5000))],
)
def test_a_budget_is_time_or_trials(text: str, budget: tuple[float | None, int | None]) -> None:
    assert cli.budget_of(text) == budget


# Nights


def plant(name: str, *, found: bool, searched: float) -> Score:
    place = "route" if found else ""
    return Score(name, False, "a report", "f: routing", "route", place, found, found, found, 0, 0, 0.5, 7, 30, "", searched)


@pytest.fixture
def night(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A night that is over at once: one finding stands and was not replayed; of three plants one was found. What it was given."""
    given: dict[str, Any] = {}
    row = {
        "finding_id": "F-1",
        "engine": "mine",
        "verdict": "DEFECT",
        "op": "add",
        "rule": "",
        "rung": "ops",
        "status": "known",
        "message": "off by one",
    }
    tally = {"judgements": 1, "checked": 10, "unverified": 0, "verdicts": {"EXACT": 5}}

    def at_once(engines: list[str], options: Options, seconds: float, progress: Any) -> nightly.Night:
        given.update(engines=engines, options=options, seconds=seconds)
        sample = (plant("Z27", found=True, searched=2.0), plant("Z28", found=False, searched=60.0), plant("Z29", found=False, searched=9.0))
        results = [EngineResult("mine", trials=5, tallies={"ops": tally})]
        return nightly.Night("run-1", results, [row], frozenset(), sample, frozenset({"F-1"}), 12)

    monkeypatch.setattr(nightly, "nightly", at_once)
    return given


def test_a_night_says_what_it_found_what_had_to_wait_and_how_the_judge_did(
    night: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "nightly", "mine", "--engine", "mine", "--budget", "10m")
    assert code == FINDINGS
    assert night["engines"] == ["mine"]
    assert 0 < night["seconds"] <= 600  # what was spent until here is part of the budget
    assert "known     F-1 mine DEFECT add (ops) (not replayed tonight: no time): off by one" in out
    assert "the judge itself: 1 of 3 planted defects found tonight, 1 at the right place" in out
    assert "Z28 (f: routing): missed in 60 s" in out
    assert "Z29 (f: routing): the score allows 60 s, not found in 9 s" in out


def test_a_night_is_a_document_too(night: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, body = document(capsys, "nightly", "mine", "--budget", "10m")
    assert code == body["exit_code"] == FINDINGS
    assert (body["findings"]["known"], body["not_replayed"], body["seed"]) == (["F-1"], ["F-1"], 12)
    assert [(one["mutant"], one["found"], one["searched"]) for one in body["sample"]] == [
        ("Z27", True, 2.0),
        ("Z28", False, 60.0),
        ("Z29", False, 9.0),
    ]
