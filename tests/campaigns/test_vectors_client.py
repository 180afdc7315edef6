"""The sample client in plain C++: built as its first lines say, it drives the native engine to a clean check, and planted ones to the right rule."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from impls.native import build
from paritree import cli

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "docs" / "clients" / "vectors_client.cpp"
SUITE = ROOT / "vectors"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler = build.find_compiler()
    except build.BuildError as problem:
        pytest.skip(str(problem))
    out = tmp_path_factory.mktemp("client") / "vectors_client"
    command = [*compiler, "-std=c++17", *WARNINGS, "-I", str(ROOT / "impls/native/include"), str(SOURCE), "-ldl", "-o", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return out


def ran(client: Path, plant: str | None, place: Path, suite: Path = SUITE) -> subprocess.CompletedProcess[str]:
    return subprocess.run([client, suite, build.library(plant=plant), place], capture_output=True, text=True, timeout=120)


def checked(capsys: pytest.CaptureFixture[str], place: Path, *words: str) -> tuple[int, str]:
    code = cli.main(["vectors", "check", str(SUITE), "--outputs", str(place), *words])
    return code, capsys.readouterr().out


def test_it_uses_nothing_but_the_standard_library_and_the_header() -> None:
    included = set(re.findall(r"#include [<\"]([^>\"]+)", SOURCE.read_text()))
    assert {name for name in included if "." in name} == {"dlfcn.h", "sys/stat.h", "paritree.h"}


def test_the_native_engine_passes(client: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = ran(client, None, tmp_path / "out")
    count = len(json.loads((SUITE / "manifest.json").read_text())["vectors"])
    assert (ended.returncode, ended.stdout) == (0, f"{count} vectors, 0 unsupported, 0 failed\n"), ended.stderr
    code, out = checked(capsys, tmp_path / "out", "--json")
    body = json.loads(out)
    assert code == body["exit_code"] == 0
    assert body["engine"] == "native"
    assert {vector["verdict"] for vector in body["vectors"]} == {"EXACT", "WITHIN_BOUND"}
    session = next(vector for vector in body["vectors"] if vector["id"] == "session-sigmoid")
    assert {"scores", "probs", "expert_ids", "cache", "logits", "path"} <= {j["tap"] for j in session["judgements"]}


@pytest.mark.parametrize(
    ("plant", "rule", "vectors"),
    [
        ("gemm-tail-stale", "N2", {"op-matmul-1", "op-q_absorb-1", "session-sigmoid", "session-softmax"}),
        ("compact-first", "K1", {"op-compact-1", "tree-ties", "tree-near", "tree-wide", "session-sigmoid", "session-softmax"}),
        ("heap-fifo", "T3", {"op-best_first_tree-2", "tree-ties", "tree-near"}),
        ("bonus-parent", "A3", {"op-accept-1", "tree-ties", "session-sigmoid"}),
    ],
)
def test_a_planted_engine_fails_and_the_rule_is_named(
    client: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], plant: str, rule: str, vectors: set[str]
) -> None:
    assert ran(client, plant, tmp_path / "out").returncode == 0
    code, out = checked(capsys, tmp_path / "out", "--json")
    failing = {vector["id"]: vector["rule"] for vector in json.loads(out)["vectors"] if vector["verdict"] in ("DEFECT", "NONFINITE")}
    assert code == 1
    assert vectors <= set(failing)
    assert set(failing.values()) == {rule}
    code, out = checked(capsys, tmp_path / "out")
    assert code == 1
    assert f"what the rules say: paritree explain {rule}" in out


def test_an_engine_that_dies_leaves_the_outputs_before_it(client: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """mask-crash dies at a batch of 7 rows; nothing says how it ended but the missing files."""
    assert ran(client, "mask-crash", tmp_path / "out").returncode < 0
    code, out = checked(capsys, tmp_path / "out")
    assert code == 1
    assert "is missing: the engine wrote nothing for" in out


def test_what_is_no_engine_and_what_is_no_suite_are_told_apart(client: Path, tmp_path: Path) -> None:
    usage = subprocess.run([client], capture_output=True, text=True)
    assert (usage.returncode, usage.stderr) == (2, "usage: vectors_client SUITE ENGINE.so OUTPUTS\n")
    other = subprocess.run([client, SUITE, tmp_path / "none.so", tmp_path / "out"], capture_output=True, text=True)
    assert other.returncode == 3
    nowhere = subprocess.run([client, tmp_path, build.library(), tmp_path / "out"], capture_output=True, text=True)
    assert (nowhere.returncode, "manifest.json cannot be read" in nowhere.stderr) == (4, True)


def test_export_and_check_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vectors", "export", str(tmp_path / "suite"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hash"] == json.loads((SUITE / "manifest.json").read_text())["hash"]
    assert cli.main(["vectors", "check", str(tmp_path / "suite")]) == 2
    assert "no such folder; run your engine" in capsys.readouterr().err
    assert cli.main(["vectors", "export", str(tmp_path / "other"), "--suite", "large"]) == 2
    assert "there is no suite 'large': choose one of small" in capsys.readouterr().err
