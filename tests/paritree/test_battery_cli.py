"""`paritree judge --battery`: a case, a finding (by id, or as its capsule) and a dump, and one clear sentence for everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from campaigns.case import Case, OpCase, RecordedCase, SessionCase, TreeCase, to_json
from oracles.battery import NAMES
from paritree import cli

CLEAN, FINDINGS, USAGE, NOT_LOADABLE = 0, 1, 2, 3
OP = OpCase("swiglu", (("N", 5), ("T", 2)), (), "ordinary", 1)
TREE = TreeCase(8, 2, 4, 3, 2, 0, 80, 0, 1)
SESSION = SessionCase("tiny", (), 0, "ordinary", ((3, 1),), ((((0, 1), (1, 0)),),))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["judge", "--battery", *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def case_file(folder: Path, case: Case) -> str:
    path = folder / "case.json"
    path.write_text(to_json(case))
    return str(path)


def dump(folder: Path, *, factor: float = 1.0, name: str = "dump.safetensors", **metadata: str) -> str:
    x, w = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 2), np.float32)
    save_file({"inputs.x": x, "inputs.w": w, "outputs.out": x @ w * np.float32(factor)}, folder / name, metadata)
    return str(folder / name)


@pytest.mark.parametrize(
    ("case", "good", "bad", "compared"),
    [
        (OP, "blocked", "blocked:Z33", "swiglu.out"),
        (TREE, "blocked", "blocked:Z15", "best_first_tree.tokens"),
        (SESSION, "blocked", "blocked:Z01", "the logits of 4 rows"),
    ],
)
def test_a_case_of_each_kind(
    case: Case, good: str, bad: str, compared: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    path = case_file(tmp_path, case)
    code, out, _ = run(capsys, path, "--engine", good)
    assert code == CLEAN
    assert compared in out.splitlines()[-1]
    code, out, _ = run(capsys, path, "--engine", bad, "--json")
    body = json.loads(out)
    assert code == body["exit_code"] == FINDINGS
    assert set(body["battery"]) == set(NAMES if case is SESSION else NAMES[:-1])
    assert not body["battery"]["KernelBench"]
    assert any(compared == word for word in body["compared"])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A store with one finding, and its row."""
    from campaigns import runner
    from reports.store import Store

    path = tmp_path_factory.mktemp("battery") / "store"
    options = runner.Options(store=str(path), seconds=30.0, trials=400, jobs=1, stop_at_first=True, minimise_seconds=1.0)
    runner.check(["blocked:Z33"], options, lambda *_: None)
    with Store.create_or_open(path, readonly=True) as opened:
        return str(path), opened.findings()[0]


def test_a_finding_by_its_id_and_as_its_capsule(store: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    path, row = store
    by_id = run(capsys, row["finding_id"], "--store", path)
    assert by_id[0] == FINDINGS
    assert by_id[1].startswith("paritree          fails   DEFECT: ")
    assert run(capsys, str(Path(path) / row["capsule"])) == by_id
    assert run(capsys, str(Path(path) / row["capsule"] / "case.json")) == by_id
    healed = run(capsys, row["finding_id"], "--store", path, "--engine", "blocked")
    assert healed[0] == CLEAN


def test_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, dump(tmp_path, op="matmul"))
    assert (code, out.splitlines()[-1]) == (CLEAN, "compared with golden values: matmul.out")
    code, out, _ = run(capsys, dump(tmp_path, factor=1 + 1e-4, op="matmul"))
    said = {line[:17].strip(): line[18:24].strip() for line in out.splitlines()[:-1]}
    assert code == FINDINGS
    assert (said["paritree"], said["numpy"], said["cosine"]) == ("fails", "fails", "passes")


def test_the_tap_of_our_verdict_is_compared_where_logits_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two equal tokens: whatever the scale, the softmax of equal scores is the same; the scores are not."""
    two = SessionCase("tiny", (), 0, "ordinary", ((1, 1),), ())
    code, out, _ = run(capsys, case_file(tmp_path, two), "--engine", "blocked:Z01")
    assert code == FINDINGS
    assert out.splitlines()[-1] == "compared with golden values: the logits of 1 rows, the tap scores, layer 0, of step 1"
    assert "numpy             fails" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{case}"], USAGE, "does not say which engine it is about: give --engine"),
        (["{case}", "--engine", "nosuch"], NOT_LOADABLE, "there is no engine 'nosuch'"),
        (["{case}", "--engine", "blocked", "--op", "matmul"], USAGE, "--op has no meaning here: a case names its operation"),
        (["{case}", "--engine", "blocked", "--profile", "tf32"], USAGE, "--profile has no meaning here"),
        (["{broken}", "--engine", "blocked"], USAGE, "broken.json: not a case: broken JSON at character 13; was the file cut? (--battery takes"),
        (["{other}", "--engine", "blocked"], USAGE, "other.json: not a case: kind is None, but must be one of op, tree, session, recorded"),
        (["{binary}", "--engine", "blocked"], USAGE, "not a case: it is no text (--battery takes a case file, a finding, a capsule or a dump"),
        (["{recorded}", "--engine", "blocked"], USAGE, "a RecordedCase is judged from its file"),
        (["{folder}"], USAGE, "no case.json; a capsule is a folder that `paritree check` wrote under findings/"),
        (["F-12345678", "--store", "{folder}/none"], USAGE, "no such file or folder, and {folder}/none is no store"),
        (["{dump}", "--engine", "blocked"], USAGE, "--engine has no meaning here: a dump holds its outputs, no engine is run"),
        (["{unnamed}"], USAGE, "the operation is not named: give --op, or metadata `op`"),
        (["{dump}", "--op", "nosuch"], USAGE, "there is no operation 'nosuch': choose one of accept, add"),
        (["{dump}", "--profile", "nosuch"], USAGE, "there is no profile 'nosuch'"),
        (["{folder}/nothing.safetensors"], USAGE, "nothing.safetensors: no such file"),
    ],
)  # fmt: skip
def test_what_is_none_of_them_is_one_sentence(
    words: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    names = {
        "case": case_file(tmp_path, OP), "folder": str(tmp_path), "dump": dump(tmp_path, op="matmul"),
        "unnamed": dump(tmp_path, name="unnamed.safetensors"),
    }  # fmt: skip
    for name, content in {"broken": b'{"kind":"op",', "other": b'{"a":1}', "binary": b"\xff\xfe\x00"}.items():
        (tmp_path / f"{name}.json").write_bytes(content)
        names[name] = str(tmp_path / f"{name}.json")
    (tmp_path / "recorded.json").write_text(to_json(RecordedCase("matmul", (), "00", "x.safetensors")))
    names["recorded"] = str(tmp_path / "recorded.json")
    if "{folder}" in words:  # a folder that is no capsule
        names["folder"] = str(tmp_path / "empty")
        (tmp_path / "empty").mkdir()
    ended, out, err = run(capsys, *(word.format(**names) for word in words))
    assert (ended, out) == (code, "")
    assert message.format(**names) in err
    assert len(err.strip().splitlines()) == 1
