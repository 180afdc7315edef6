"""Capsules: complete or absent, runnable without paritree, and never executed when opened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from campaigns import capsule, fingerprint, hazards
from campaigns import repro as repro_program
from campaigns.capsule import ARRAYS, CASE, PROGRAM, README, REPRO, Capsule, CapsuleError
from campaigns.case import Case, GenerateCase, OpCase, SessionCase, TreeCase
from campaigns.isolation import InProcess, Supervisor
from campaigns.repro_cpp import ELEMENTS_MAX, program
from campaigns.trial import Bench
from impls import blocked
from impls.native import build
from oracles.judgement import Judgement, Verdict
from spec.script import OpCall

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FAILS, PASSES, DAMAGED, NOT_LOADABLE = 1, 0, 2, 4


def written(folder: Path, plant: str, case: Case, runs: int = 1) -> Capsule:
    bench = Bench(InProcess(blocked.engine(plant)))
    found = fingerprint.first(f"blocked:{plant}", list(bench.outcome(case).judgements))
    assert found is not None, f"{plant} does not show itself on {case}"
    capsule.write(folder, f"blocked:{plant}", bench, case, found[1], finding_id="F-1", runs=runs)
    return capsule.read(folder)


def repro(folder: Path, *arguments: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, str(folder / REPRO), *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=120
    )


CASES = {  # a plant, and a case of each kind that shows it
    "Z33": OpCase("swiglu", (("N", 3), ("T", 2)), (), "ordinary", 0, ("poison", "freed", "views")),
    "Z08": TreeCase(2, 1, 2, 0, 1, 0, 0, 0, 0),
    "Z22": SessionCase("tiny", (), 0, "ordinary", ((2, 0),), ((((0, 0), (1, 1)),),)),
    "Z09": SessionCase("tiny", (), 0, "large-scores", ((1, 0),), ()),
    "Z18": SessionCase("tiny", (), 0, "ordinary", ((3, 1),), (), generate=GenerateCase("noisy", 0, 100, -1, 3, 3, 6, -1)),
    # an answer of the wrong shape; an input laid out column by column; drafts of a history that was never emitted
    "E08": SessionCase("tiny", (), 0, "ordinary", ((1, 0),), (), hazards=("orphan",)),
    "Z40": OpCase("best_first_tree", (("K", 2), ("L", 2)), (("budget", 1), ("root", 0)), "lattice", 1, ("views",)),
    "C08": SessionCase("tiny", (), 0, "ordinary", ((1, 0),), (), generate=GenerateCase("chain", 0, 50, -1, 1, 1, 2, -1)),
    "stray-write": OpCase("add", (("N", 3), ("T", 1)), (), "ordinary", 0, ("guard",)),
}


@pytest.mark.parametrize("plant", sorted(CASES))
def test_repro_fails_on_the_plant_and_passes_on_the_honest_engine(plant: str, tmp_path: Path) -> None:
    folder = tmp_path / "F-1"
    made = written(folder, plant, CASES[plant])
    assert made.case == CASES[plant]
    again = repro(folder)
    assert again.returncode == FAILS, again.stdout + again.stderr
    assert "fails again" in again.stdout
    honest = repro(folder, "--engine", "impls.blocked:BlockedEngine")
    assert honest.returncode == PASSES, honest.stdout + honest.stderr


def test_repro_imports_nothing_of_the_campaign() -> None:
    source = (ROOT / "campaigns" / "repro.py").read_text()
    assert "campaigns" not in source and "oracles" not in source and "reports" not in source


def test_repro_needs_numpy_and_the_engine_only(tmp_path: Path) -> None:
    """A foreign engine, in a process that cannot import any room of paritree."""
    folder = tmp_path / "F-1"
    written(folder, "Z33", CASES["Z33"])
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "swish.py").write_text(
        "import numpy as np\n"
        "class Engine:\n"
        "    def run_op(self, op, inputs, params, outputs):\n"
        "        outputs['out'][...] = inputs['gate'] * inputs['up']\n"
    )
    blocked_rooms = tmp_path / "sitecustomize.py"
    blocked_rooms.write_text(
        "import sys\nfor room in ('spec', 'impls', 'campaigns', 'oracles', 'reports'):\n    sys.modules[room] = None\n"
    )
    again = repro(folder, "--engine", "swish:Engine", path=f"{alone}{os.pathsep}{tmp_path}")
    assert again.returncode == FAILS, again.stdout + again.stderr


def test_an_engine_that_cannot_be_loaded_is_exit_4(tmp_path: Path) -> None:
    written(tmp_path / "F-1", "Z08", CASES["Z08"])
    for engine in ("./nowhere.so", "no_such_module:Engine"):
        ended = repro(tmp_path / "F-1", "--engine", engine)
        assert ended.returncode == NOT_LOADABLE
        assert "cannot be loaded" in ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", [CASE, ARRAYS])
def test_a_capsule_cut_in_half_gives_one_sentence(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "F-1"
    written(folder, "Z08", CASES["Z08"])
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(CapsuleError, match=str(folder)) as problem:
        capsule.read(folder)
    assert "\n" not in str(problem.value)
    if name == ARRAYS:
        ended = repro(folder)
        assert ended.returncode == DAMAGED
        assert "damaged or cut" in ended.stderr and "Traceback" not in ended.stderr


def test_a_folder_without_a_case_is_no_capsule(tmp_path: Path) -> None:
    with pytest.raises(CapsuleError, match="no case.json"):
        capsule.read(tmp_path)


def test_opening_a_capsule_executes_nothing_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "F-1"
    written(folder, "Z08", CASES["Z08"])
    (folder / REPRO).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    (folder / "spec.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    capsule.read(folder)
    assert not (tmp_path / "executed").exists()


def test_a_newer_capsule_replaces_an_older_one_whole(tmp_path: Path) -> None:
    folder = tmp_path / "F-1"
    written(folder, "Z08", CASES["Z08"])
    (folder / "left over").write_text("")
    made = written(folder, "Z22", CASES["Z22"])
    assert made.case == CASES["Z22"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([CASE, ARRAYS, README, REPRO])
    assert [path.name for path in tmp_path.iterdir()] == ["F-1"]  # no temporary folder stays


def test_the_readme_says_what_where_and_how(tmp_path: Path) -> None:
    written(tmp_path / "F-1", "Z22", CASES["Z22"])
    text = (tmp_path / "F-1" / README).read_text()
    for words in (
        "DEFECT",
        "compact",
        "K1",
        "blocked:Z22",
        "prompts of 2 tokens",
        "trees of 2 nodes",
        "python repro.py",
        "paritree replay",
    ):
        assert words in text, words


def has_compiler() -> bool:
    try:
        build.find_compiler()
    except build.NoCompiler:
        return False
    return True


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_a_c_abi_engine_gets_a_c_plus_plus_program_and_a_ctypes_repro(tmp_path: Path) -> None:
    folder = tmp_path / "F-1"
    case = OpCase("tree_mask", (("M", 3),), (("prefix_len", 0),), "ordinary", 3)
    with Supervisor("native:position-index", deadline_s=60.0) as supervisor:
        bench = Bench(supervisor)
        outcome = next(
            o
            for seed in range(20)
            if (o := bench.outcome(OpCase(case.op, case.dims, case.params, "ordinary", seed))).verdict == Verdict.DEFECT
        )
        found = outcome.worst
        assert found is not None
        capsule.write(folder, "native:position-index", bench, outcome.case, found, finding_id="F-1")
    assert repro(folder).returncode == FAILS
    honest = str(build.library())
    assert repro(folder, "--engine", honest).returncode == PASSES
    binary = tmp_path / "repro"
    command = [*build.find_compiler(), "-std=c++20", "-Wall", "-Wextra", "-Werror", str(folder / PROGRAM), "-ldl", "-o", str(binary)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    assert subprocess.run([str(binary)], capture_output=True).returncode == FAILS
    assert subprocess.run([str(binary), honest], capture_output=True).returncode == PASSES
    assert subprocess.run([str(binary), str(tmp_path / "none.so")], capture_output=True).returncode == NOT_LOADABLE


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_a_session_of_a_c_abi_engine_is_run_by_ctypes(tmp_path: Path) -> None:
    for plant, case in (("compact-first", CASES["Z22"]), ("bonus-parent", CASES["Z18"])):
        folder = tmp_path / plant
        with Supervisor(f"native:{plant}", deadline_s=60.0) as supervisor:
            bench = Bench(supervisor)
            found = fingerprint.first("native", list(bench.outcome(case).judgements))
            assert found is not None, plant
            capsule.write(folder, f"native:{plant}", bench, case, found[1], finding_id="F-1")
        again = repro(folder)
        assert again.returncode == FAILS, again.stdout + again.stderr
        honest = repro(folder, "--engine", str(build.library()))
        assert honest.returncode == PASSES, honest.stdout + honest.stderr


def test_inputs_too_long_for_a_source_are_left_to_repro_py() -> None:
    call = OpCall("add", {"a": np.zeros(ELEMENTS_MAX + 1, np.float32)}, {}, {"out": ((1,), "float32")})
    assert "use repro.py" in program(call, Judgement(Verdict.DEFECT, "N1", "add", "out", "ops"), "x.so")


def test_a_crash_is_seen_again_by_repro(tmp_path: Path) -> None:
    """The engine aborts the child; the parent reports the signal as a failure."""
    shutil.copy(HERE / "toy_engine.py", tmp_path / "toy_crash.py")
    folder = tmp_path / "F-1"
    written(folder, "Z33", OpCase("swiglu", (("N", 3), ("T", 2)), (), "ordinary", 0))
    (tmp_path / "wrong").write_text("crash")
    source = (tmp_path / "toy_crash.py").read_text().replace('if op != "add":', "if False:").replace('inputs["a"] + inputs["b"]', "0")
    (tmp_path / "toy_crash.py").write_text(source)
    again = repro(folder, "--engine", "toy_crash:Engine", path=str(tmp_path))
    assert again.returncode == FAILS
    assert "signal 6" in again.stdout


def test_a_hang_is_seen_again_by_repro(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(
        "import time\nclass Engine:\n    def run_op(self, op, inputs, params, outputs):\n        time.sleep(60)\n"
    )
    folder = tmp_path / "F-1"
    written(folder, "Z33", CASES["Z33"])
    again = repro(folder, "--engine", "sleeper:Engine", "--timeout", "3", path=str(tmp_path))
    assert again.returncode == FAILS
    assert "no answer within 3 s" in again.stdout


def in_a_worker(folder: Path, engine: str, case: Case, wanted: Verdict, **more: Any) -> None:
    """The capsule of a case that ends its process, or needs one in which nothing else has run."""
    with Supervisor(engine, deadline_s=60.0) as supervisor:
        bench = Bench(supervisor)
        for one in more.get("earlier", ()):
            bench.outcome(one)
        found = fingerprint.first(engine, list(bench.outcome(case).judgements))
        assert found is not None and found[1].verdict == wanted
        supervisor.restart()
        capsule.write(folder, engine, bench, case, found[1], finding_id="F-1", **more)


def test_an_engine_that_exits_without_a_word_is_seen_again_by_repro(tmp_path: Path) -> None:
    """Exit status 0 and no message: the child has not told that it came to an end."""
    folder = tmp_path / "F-1"
    in_a_worker(folder, "blocked:exits", SessionCase("tiny", (), 0, "ordinary", ((2, 0), (2, 1)), ()), Verdict.CRASHED)
    again = repro(folder)
    assert again.returncode == FAILS, again.stdout + again.stderr
    assert "exit status 0, without an answer" in again.stdout
    honest = repro(folder, "--engine", "impls.blocked:BlockedEngine")
    assert honest.returncode == PASSES, honest.stdout + honest.stderr


def test_repro_runs_the_earlier_cases_in_one_engine_and_in_order(tmp_path: Path) -> None:
    """The plant routes each batch by the ids of the one before: alone the case is right."""
    folder = tmp_path / "F-1"
    case = SessionCase("tiny", (), 0, "ordinary", ((3, 0),), ())
    earlier = (TreeCase(2, 1, 2, 0, 1, 0, 0, 0, 0), SessionCase("tiny", (), 0, "ordinary", ((3, 5),), ()))
    in_a_worker(folder, "blocked:F18", case, Verdict.DEFECT, earlier=earlier)
    made = capsule.read(folder)
    assert (made.case, made.earlier) == (case, earlier)
    assert "only after 2 earlier cases" in (folder / README).read_text()
    again = repro(folder)
    assert again.returncode == FAILS, again.stdout + again.stderr
    plan = json.loads(json.dumps(made.plan))
    assert [len(block["steps"]) > 0 for block in plan["earlier"]] == [True, True]
    assert plan["earlier"][1]["weights"] == plan["weights"]  # one session for both, as in the worker
    honest = repro(folder, "--engine", "impls.blocked:BlockedEngine")
    assert honest.returncode == PASSES, honest.stdout + honest.stderr


def test_repro_goes_on_after_what_a_black_box_does_not_do(tmp_path: Path) -> None:
    """Pages that two sequences share are freed twice in the first case; in the second two sequences get the same one. The engine shows no cache."""
    folder = tmp_path / "F-1"
    earlier = SessionCase("tiny", (), 0, "ordinary", ((4, 0),), ((((0, 0),),),), hazards=("orphan",))
    case = SessionCase("tiny", (), 0, "ordinary", ((4, 0), (3, 1)), (((), ((0, 0),)),))
    in_a_worker(folder, "blind+blocked:fork-not-counted", case, Verdict.DEFECT, earlier=(earlier,))
    again = repro(folder)
    assert again.returncode == FAILS, again.stdout + again.stderr
    (tmp_path / "seen_from_outside.py").write_text("from impls.blind import engine\n\ndef made():\n    return engine('blocked')\n")
    honest = repro(folder, "--engine", "seen_from_outside:made", path=f"{ROOT}{os.pathsep}{tmp_path}")
    assert honest.returncode == PASSES, honest.stdout + honest.stderr


def test_repro_counts_how_often_a_finding_shows(tmp_path: Path) -> None:
    folder = tmp_path / "F-1"
    made = written(folder, "Z09", CASES["Z09"], runs=4)
    assert made.plan["runs"] == 4
    again = repro(folder)
    assert again.returncode == FAILS
    assert "fails again: 4 of 4 runs" in again.stdout
    honest = repro(folder, "--engine", "impls.blocked:BlockedEngine")
    assert honest.returncode == PASSES
    assert "does not fail: 0 of 4 runs" in honest.stdout


def test_repro_lays_inputs_out_as_the_worker_does() -> None:
    """Strides, alignment and the page behind: the layout is the condition under which some engines fail."""
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    for names in ((), ("views",), ("fence",), ("poison",), ("views", "poison")):
        for index in range(3):
            ours, theirs = hazards.placed(source, frozenset(names), index), repro_program.placed(source, set(names), index)
            assert ours.strides == theirs.strides
            assert np.array_equal(ours, theirs)
            assert not theirs.flags.writeable
