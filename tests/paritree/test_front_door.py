"""`import paritree`: one line in a user's test, and rooms that nothing may shadow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import paritree

ROOT = Path(__file__).parent.parent.parent
X = np.array([[1.0, 2.0]], np.float32)
W = np.array([[3.0], [4.0]], np.float32)


def test_a_right_output_gives_its_judgements() -> None:
    (judgement,) = paritree.judge("matmul", {"x": X, "w": W}, {"out": X @ W})
    assert judgement.checked == 1


def test_a_wrong_output_is_an_assertion_error_with_place_and_bound() -> None:
    with pytest.raises(paritree.Divergence, match=r"out\[0, 0\] is 11.1.*but should be 11") as problem:
        paritree.judge("matmul", {"x": X, "w": W}, {"out": X @ W + np.float32(0.1)})
    assert isinstance(problem.value, AssertionError)
    assert problem.value.judgements[0].index == (0, 0)


def test_the_profile_decides_what_is_wrong() -> None:
    rounded = (X @ W) * np.float32(1 + 2.0**-9)
    with pytest.raises(paritree.Divergence):
        paritree.judge("matmul", {"x": X, "w": W}, {"out": rounded})
    paritree.judge("matmul", {"x": X, "w": W}, {"out": rounded}, profile="bf16-f32acc")


def test_masks_and_indices_of_other_dtypes_are_taken() -> None:
    judgements = paritree.judge("argmax", {"logits": np.array([[1.0, 3.0, 3.0]], np.float32)}, {"ids": np.array([1])})
    assert judgements[0].verdict == "EXACT"
    visible = np.array([[True, False]])
    paritree.judge(
        "softmax", {"scores": np.zeros((1, 1, 2), np.float32), "visible": visible}, {"out": np.array([[[1.0, 0.0]]], np.float32)}
    )


@pytest.mark.parametrize(
    ("op", "inputs", "said"),
    [
        ("mutmal", {"x": X, "w": W}, "no operation 'mutmal'"),
        ("matmul", {"x": X}, "input 'w' is missing"),
        ("rms_norm", {"x": X}, "parameter 'eps' is missing"),
    ],
)
def test_a_call_that_does_not_fit_is_a_value_error(op: str, inputs: dict[str, np.ndarray], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        paritree.judge(op, inputs, {"out": X @ W})


def test_there_are_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'jugde'"):
        _ = paritree.jugde


def in_folder(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, env=environment)


def test_a_folder_that_shadows_a_room_is_named(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "__init__.py").write_text("raise SystemExit('executed')")
    ended = in_folder(tmp_path, "import paritree")
    assert ended.returncode == 1
    assert f"{tmp_path / 'reports'} hides the package 'reports'" in ended.stderr
    assert "executed" not in ended.stderr


def test_a_folder_without_code_of_the_same_name_does_no_harm(tmp_path: Path) -> None:
    """A namespace folder loses against a package, so that `reports/` with somebody's PDFs is no problem."""
    (tmp_path / "reports").mkdir()
    ended = in_folder(tmp_path, "import paritree; print(paritree.__version__)")
    assert ended.stdout.strip() == paritree.__version__, ended.stderr


def test_import_is_cheap() -> None:
    program = "import sys, paritree; print([m for m in ('numpy', 'spec', 'campaigns', 'hypothesis') if m in sys.modules])"
    assert in_folder(ROOT, program).stdout.strip() == "[]"
