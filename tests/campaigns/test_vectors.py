"""Golden vectors: one hash everywhere, a committed suite that is up to date, honest outputs pass, and every fault of a file has its own sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save

from campaigns.vectors import MANIFEST, VectorsError, content_hash, export, read_checked, read_manifest, read_tensors, script_of, suite_hash
from campaigns.vectors_check import Checked, check, read_author
from campaigns.vectors_suite import SUITES, session_of
from oracles.judgement import FINDINGS, Verdict
from spec.ops import OPS
from spec.script import Forward, Generate

ROOT = Path(__file__).parent.parent.parent
COMMITTED = ROOT / "vectors"
Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    export(folder)
    return folder


@pytest.fixture(scope="module")
def golden(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs of an engine that is exactly the specification."""
    out = tmp_path_factory.mktemp("golden")
    for entry in read_manifest(suite)["vectors"]:
        given = read_checked(suite, entry["file"])
        write(out, entry["id"], {k.removeprefix("golden."): v for k, v in given.items() if k.startswith("golden.")})
    return out


@pytest.fixture
def outputs(golden: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(golden, tmp_path / "outputs"))


def write(folder: Path, name: str, arrays: Arrays) -> None:
    (folder / f"{name}.safetensors").write_bytes(save({f"outputs.{key}": value for key, value in arrays.items()}))


def edit(folder: Path, name: str, change: Callable[[Arrays], None]) -> None:
    arrays = {key.removeprefix("outputs."): value for key, value in read_tensors(folder / f"{name}.safetensors").items()}
    change(arrays)
    write(folder, name, arrays)


def of(checked: list[Checked], name: str) -> Checked:
    return next(one for one in checked if one.id == name)


def failing(checked: list[Checked]) -> dict[str, tuple[Verdict, str]]:
    return {one.id: (one.verdict, one.worst.rule) for one in checked if one.verdict in FINDINGS and one.worst is not None}


# ---- the suite -------------------------------------------------------------------------------------------------------------------------


def test_the_committed_suite_is_what_export_writes(suite: Path) -> None:
    assert read_manifest(COMMITTED) == read_manifest(suite), "run `paritree vectors export vectors` and look at the difference"
    for entry in read_manifest(COMMITTED)["vectors"]:
        read_checked(COMMITTED, entry["file"])


def test_the_small_suite_is_small_enough_to_commit() -> None:
    assert sum(path.stat().st_size for path in COMMITTED.iterdir()) < 1_000_000


def test_every_operation_has_a_vector() -> None:
    assert {case.op for case in SUITES["small"].ops} == set(OPS)


def test_sessions_hold_two_rounds_and_a_loop_that_accepts_and_stops() -> None:
    for case in SUITES["small"].sessions.values():
        steps = session_of(case).steps
        assert sum(isinstance(step, Forward) and step.phase == "tree" for step in steps) >= 2
        loops = [step for step in steps if isinstance(step, Generate)]
        assert [loop.drafter is None for loop in loops] == [True, False, False]
        assert loops[2].limits.stop_tokens


def test_a_script_survives_its_file(suite: Path) -> None:
    entry = next(e for e in read_manifest(suite)["vectors"] if e["id"] == "session-sigmoid")
    script, planned = script_of(entry, read_checked(suite, entry["file"])), session_of(SUITES["small"].sessions["sigmoid"])
    assert script.config == planned.config
    assert [type(step) for step in script.steps] == [type(step) for step in planned.steps]
    assert script.steps[-1].drafter == planned.steps[-1].drafter  # type: ignore[union-attr]
    for mine, theirs in zip(script.steps, planned.steps, strict=True):
        if isinstance(mine, Forward) and isinstance(theirs, Forward):
            for word in ("sequence", "token", "position", "parent"):
                assert np.array_equal(getattr(mine.rows, word), getattr(theirs.rows, word))


def test_ties_of_the_suite_tell_orders_apart() -> None:
    """At least two candidates of the tree vectors have the same score under different ranks, and one of them did not fit the budget or came first."""
    from campaigns.vectors_suite import tree_inputs
    from spec.tree import best_first_tree, draft_table

    for tree in SUITES["small"].trees[:2]:
        built = best_first_tree(draft_table(tree_inputs(tree)["logits"], tree.budget), 0, tree.budget)
        assert len(np.unique(built.scores)) < len(built.scores)


def _simd() -> str:
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return ",".join(name for name in __cpu_dispatch__ if __cpu_features__.get(name))


def test_one_hash_whatever_the_blas_the_threads_and_the_vector_units() -> None:
    variants: dict[str, dict[str, str]] = {
        "default": {},
        "two threads": {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"},
        "Haswell": {"OPENBLAS_CORETYPE": "Haswell"},
        "Nehalem": {"OPENBLAS_CORETYPE": "Nehalem", "OPENBLAS_NUM_THREADS": "2"},
        "Prescott, SIMD off": {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": _simd()},
    }
    program = (
        "import tempfile; from pathlib import Path; from campaigns.vectors import export\n"
        "with tempfile.TemporaryDirectory() as folder: print(export(Path(folder))['hash'])"
    )
    hashes = {}
    for name, environment in variants.items():
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, cwd=ROOT, env=os.environ | environment
        )
        assert ended.returncode == 0, ended.stderr
        hashes[name] = ended.stdout.strip()
    assert set(hashes.values()) == {read_manifest(COMMITTED)["hash"]}, hashes


def test_export_keeps_a_folder_that_is_no_suite(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(VectorsError, match="not empty and holds no manifest"):
        export(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_export_replaces_an_earlier_suite_and_nothing_else(tmp_path: Path) -> None:
    export(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    before = sorted(path.name for path in tmp_path.iterdir())
    export(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_content_hash_sees_names_dtypes_shapes_and_bits() -> None:
    base = np.zeros((2, 3), np.float32)
    hashes = {
        content_hash(arrays)
        for arrays in ({"a": base}, {"b": base}, {"a": base.T}, {"a": base.view(np.int32)}, {"a": -base}, {"a": base, "b": base})
    }
    assert len(hashes) == 6


# ---- judging ---------------------------------------------------------------------------------------------------------------------------


def test_golden_outputs_pass_every_vector(suite: Path, golden: Path) -> None:
    _, checked = check(suite, golden)
    assert {one.verdict for one in checked} <= {Verdict.EXACT, Verdict.WITHIN_BOUND}
    assert len(checked) == len(read_manifest(suite)["vectors"])


def test_other_roundings_pass_because_nothing_is_compared_with_golden_floats(suite: Path, outputs: Path) -> None:
    def next_float(arrays: Arrays) -> None:
        arrays["out"] = np.nextafter(arrays["out"], np.float32(np.inf))

    edit(outputs, "op-matmul-1", next_float)
    _, checked = check(suite, outputs)
    assert of(checked, "op-matmul-1").verdict is Verdict.WITHIN_BOUND


def _add(name: str, amount: float, index: Any = 0) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        flat = arrays[name].reshape(-1)
        flat[index] += flat.dtype.type(amount)

    return change


@pytest.mark.parametrize(
    ("vector", "change", "rule"),
    [
        ("op-matmul-1", _add("out", 1e-3), "N2"),
        ("op-add-1", _add("out", 1e-6), "N4"),
        ("op-embed-1", _add("out", 1e-6), "M1"),
        ("op-argmax-2", _add("ids", 1), "A1"),
        ("op-route-2", _add("ids", 1), "M8"),
        ("op-accept-1", _add("bonus", 1), "A3"),
        ("op-compact-1", _add("out", 1e-6, -1), "K1"),
        ("tree-ties", _add("positions", 1, 1), "C2"),
        ("tree-ties", _add("visible", 1, -2), "C3"),
        ("session-sigmoid", _add("6.cache", 1e-3), "K7"),
        ("session-sigmoid", _add("3.tap.ffn_norm.1", 1e-3), "N2"),
    ],
)
def test_a_wrong_value_fails_its_vector_alone_and_names_the_rule(
    suite: Path, outputs: Path, vector: str, change: Callable[[Arrays], None], rule: str
) -> None:
    edit(outputs, vector, change)
    _, checked = check(suite, outputs)
    assert failing(checked) == {vector: (Verdict.DEFECT, rule)}


def test_a_tree_is_judged_on_the_engines_own_table(suite: Path, outputs: Path) -> None:
    """Log-probabilities that are off within the bound are nobody's fault downstream; wrong ones are the fault of the table alone."""
    edit(outputs, "tree-wide", _add("log_probs", -1e-3, 3))
    _, checked = check(suite, outputs)
    judgements = of(checked, "tree-wide").judgements
    assert {j.op for j in judgements} == {"draft_table"}
    assert failing(checked)["tree-wide"][0] is Verdict.DEFECT


def test_without_taps_a_session_is_judged_by_what_it_shows(suite: Path, outputs: Path) -> None:
    def blind(arrays: Arrays) -> None:
        for name in [name for name in arrays if ".tap." in name]:
            del arrays[name]

    edit(outputs, "session-sigmoid", blind)
    _, checked = check(suite, outputs)
    assert Verdict.UNVERIFIED in {j.verdict for j in of(checked, "session-sigmoid").judgements}
    assert not failing(checked)


# ---- faults of files -------------------------------------------------------------------------------------------------------------------


def message(checked: list[Checked], name: str) -> str:
    found = of(checked, name).worst
    assert found is not None
    return found.message


def test_a_missing_file_is_a_finding_of_its_vector(suite: Path, outputs: Path) -> None:
    (outputs / "op-rope-1.safetensors").unlink()
    _, checked = check(suite, outputs)
    assert failing(checked) == {"op-rope-1": (Verdict.MALFORMED, "engine missing")}
    assert "op-rope-1.safetensors is missing" in message(checked, "op-rope-1")


@pytest.mark.parametrize("kept", [0, 5, 40, -3])
def test_a_torn_file_is_a_finding_of_its_vector(suite: Path, outputs: Path, kept: int) -> None:
    path = outputs / "op-rope-1.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    _, checked = check(suite, outputs)
    assert failing(checked) == {"op-rope-1": (Verdict.MALFORMED, "engine torn")}
    assert "op-rope-1.safetensors" in message(checked, "op-rope-1")


@pytest.mark.parametrize(
    ("vector", "name", "change", "said"),
    [
        ("op-matmul-1", "out", lambda a: a.T, "out is float32 [9, 5], but must be float32 [5, 9]"),
        ("op-matmul-1", "out", lambda a: a.astype(np.float64), "out is float64 [5, 9], but must be float32"),
        ("tree-ties", "count", lambda a: a[:0], "count is int32 [0], but must be int32 [1]"),
        ("session-sigmoid", "0.logits", lambda a: a[1:], "logits is float32 ["),
        ("session-sigmoid", "6.cache", lambda a: a[:, :, 1:], "cache is float32 ["),
        ("session-sigmoid", "14.round.0.0.bonus", lambda a: a[:0], "bonus has 0 elements"),
        ("session-sigmoid", "3.tap.q.0", lambda a: a[:, :1], "tap 'q' of layer 0 is float32 ["),
    ],
)
def test_a_misshapen_output_says_what_was_found_and_what_is_expected(
    suite: Path, outputs: Path, vector: str, name: str, change: Callable[[NDArray[Any]], NDArray[Any]], said: str
) -> None:
    def reshape(arrays: Arrays) -> None:
        arrays[name] = np.ascontiguousarray(change(arrays[name]))

    edit(outputs, vector, reshape)
    _, checked = check(suite, outputs)
    assert set(failing(checked)) == {vector}
    assert any(said in j.message for j in of(checked, vector).judgements if j.verdict is Verdict.MALFORMED)


def test_a_missing_tensor_names_itself(suite: Path, outputs: Path) -> None:
    edit(outputs, "op-route-1", lambda arrays: arrays.pop("weights"))
    edit(outputs, "session-softmax", lambda arrays: arrays.pop("8.cache"))
    _, checked = check(suite, outputs)
    assert set(failing(checked)) == {"op-route-1", "session-softmax"}
    assert "weights is missing" in message(checked, "op-route-1")
    assert "cache is missing; outputs of step 8" in message(checked, "session-softmax")


def test_extras_are_warnings_that_guess_what_was_meant(suite: Path, outputs: Path) -> None:
    def misspell(arrays: Arrays) -> None:
        arrays["ouut"] = arrays["out"]

    edit(outputs, "op-add-1", misspell)
    shutil.copy(outputs / "op-add-1.safetensors", outputs / "op-ad-1.safetensors")
    _, checked = check(suite, outputs)
    assert not failing(checked)
    assert of(checked, "op-add-1").verdict is Verdict.WARNING
    assert "op-ad-1.safetensors belongs to no vector of the suite (should it be op-add-1.safetensors?)" in message(checked, "outputs")
    (outputs / "op-add-1.safetensors").unlink()
    write(outputs, "op-add-1", {"ouut": np.zeros((5, 13), np.float32)})
    _, checked = check(suite, outputs)
    assert any("should it be 'out'?" in j.message for j in of(checked, "op-add-1").judgements)


def test_engine_json_says_what_is_not_offered(suite: Path, outputs: Path) -> None:
    for name in ("op-moe-1", "session-softmax", "op-rope-1"):
        (outputs / f"{name}.safetensors").unlink()
    body = {
        "engine": "mine", "ops": [op for op in OPS if op != "moe"], "unsupported": {"session-softmax": "no softmax routing"}, "failed": {"op-rope-1": "no memory"},
    }  # fmt: skip
    (outputs / "engine.json").write_text(json.dumps(body))
    author, checked = check(suite, outputs)
    assert author.description.name == "mine"
    assert of(checked, "op-moe-1").verdict is of(checked, "session-softmax").verdict is Verdict.UNSUPPORTED
    assert failing(checked) == {"op-rope-1": (Verdict.MALFORMED, "engine raised")}


def test_a_tree_goes_on_with_golden_values_where_an_operation_is_not_offered(suite: Path, outputs: Path) -> None:
    def without_mask(arrays: Arrays) -> None:
        del arrays["positions"], arrays["visible"]

    edit(outputs, "tree-ties", without_mask)
    (outputs / "engine.json").write_text(json.dumps({"ops": [op for op in OPS if op != "tree_mask"]}))
    _, checked = check(suite, outputs)
    verdicts = {j.op: j.verdict for j in of(checked, "tree-ties").judgements}
    assert verdicts["tree_mask"] is Verdict.UNSUPPORTED
    assert verdicts["compact"] is Verdict.EXACT


def test_the_profile_comes_from_the_option_then_from_engine_json_then_from_the_suite(tmp_path: Path) -> None:
    assert read_author(tmp_path, "float32-any-order").description.profile.name == "float32-any-order"
    (tmp_path / "engine.json").write_text(json.dumps({"profile": {"name": "tf32", "height_block": 64, "exp_ulp": 2}}))
    declared = read_author(tmp_path, "float32-any-order").description.profile
    assert (declared.name, declared.height, declared.exp_ulp, declared.u_input) == ("tf32", "blocked:64", 2.0, 2.0**-10)
    assert read_author(tmp_path, "float32-any-order", "bf16-f32acc").description.profile.name == "bf16-f32acc"


def test_a_low_precision_engine_passes_under_its_own_profile_only(suite: Path, outputs: Path) -> None:
    from impls.planted.planting import bf16

    def rounded(arrays: Arrays) -> None:
        arrays["out"] = bf16(arrays["out"])

    edit(outputs, "op-matmul-1", rounded)
    assert failing(check(suite, outputs)[1]) == {"op-matmul-1": (Verdict.DEFECT, "N2")}
    assert not failing(check(suite, outputs, "bf16-f32acc")[1]).get("op-matmul-1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is optional: repair it or remove it"),
        ("[]", "must be an object"),
        ('{"engin": "x"}', "there is no field 'engin'"),
        ('{"profile": "fp3"}', "there is no profile 'fp3'"),
        ('{"profile": {"exp_ulps": 3}}', "a profile has no field 'exp_ulps'"),
        ('{"profile": {"exp_ulp": -1}}', "profile.exp_ulp is '-1.0'"),
        ('{"ops": "matmul"}', "must be a list of names"),
        ('{"unsupported": ["op-moe-1"]}', "must be an object of texts"),
    ],
)
def test_a_bad_engine_json_is_a_mistake_of_the_user(suite: Path, outputs: Path, text: str, said: str) -> None:
    (outputs / "engine.json").write_text(text)
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        check(suite, outputs)


def test_a_damaged_suite_is_told_apart_from_a_wrong_engine(suite: Path, golden: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(suite, tmp_path / "suite"))
    manifest = json.loads((damaged / MANIFEST).read_text())
    manifest["vectors"][0]["params"]["eps"] = 1
    (damaged / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(VectorsError, match="edited or cut"):
        check(damaged, golden)
    manifest["hash"] = suite_hash(manifest["vectors"])
    manifest["version"] = 99
    (damaged / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(VectorsError, match="version 99, this paritree reads 1"):
        check(damaged, golden)
    shutil.copy(suite / MANIFEST, damaged / MANIFEST)
    shutil.copy(suite / "op-add-1.safetensors", damaged / "op-add-2.safetensors")
    with pytest.raises(VectorsError, match="op-add-2.safetensors: its tensors are not those that were exported"):
        check(damaged, golden)
    (damaged / MANIFEST).write_text("{")
    with pytest.raises(VectorsError, match="broken JSON"):
        check(damaged, golden)
    with pytest.raises(VectorsError, match="no manifest.json"):
        check(tmp_path, golden)
    with pytest.raises(VectorsError, match="no such folder; run your engine"):
        check(suite)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_an_engine_writes_is_judged_and_never_an_error_of_ours(suite: Path, outputs: Path, seed: int) -> None:
    """Missing, reshaped, recast, shuffled, absurd: in every vector at once, trees and streams of rounds included."""
    rng = np.random.default_rng(seed)
    absurd = [-1, -2, 2**31 - 1, -(2**31), 99]

    def damage(arrays: Arrays) -> None:
        name = list(arrays)[int(rng.integers(len(arrays)))]
        value = arrays[name]
        flat = value.reshape(-1)
        match int(rng.integers(7)):
            case 0:
                del arrays[name]
            case 1 if value.dtype == np.float32 and value.size:
                flat[rng.integers(value.size)] = rng.choice([np.nan, np.inf, -np.inf, 1e38])
            case 2 if value.dtype == np.int32 and value.size:
                flat[rng.integers(value.size)] = rng.choice(absurd)
            case 3:
                arrays[name] = flat
            case 4:
                arrays[name] = value[:0]
            case 5:
                arrays[name] = np.nan_to_num(value).clip(0, 100).astype(rng.choice(["float32", "int32", "uint8", "float64"]))
            case _:
                arrays[name] = rng.permutation(flat).reshape(value.shape)

    entries = read_manifest(suite)["vectors"]
    for entry in entries:
        edit(outputs, entry["id"], damage)
        if entry["kind"] != "op":
            edit(outputs, entry["id"], damage)
    _, checked = check(suite, outputs)
    assert len(checked) == len(entries)
    assert len(failing(checked)) > len(entries) // 4
