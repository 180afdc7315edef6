"""Engines by name: every form of a name, and what each wrong one is told."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from impls import peers, registry
from impls.golden import GoldenEngine
from impls.native import build
from impls.registry import EngineLoadError, UnknownEngine, known_engines, prepare, resolve
from spec.config import preset
from spec.engine import Engine, EngineError, Unsupported
from spec.ops import OPS
from spec.weights import random_weights

MINE = """
class Mine:
    def describe(self): ...
    def run_op(self, op, inputs, params, outputs): ...
    def open(self, config, weights): ...

def make():
    return Mine()

instance = Mine()

class Namespace:
    Inner = Mine

class NoOpen:
    def describe(self): ...
    def run_op(self, op, inputs, params, outputs): ...

class Fails:
    def __init__(self): raise RuntimeError("no device")

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "engine_of_a_user.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "engine_of_a_user", raising=False)
    return "engine_of_a_user"


@pytest.mark.parametrize("name", ["Mine", "make", "instance", "Namespace.Inner"])
def test_a_class_a_function_and_an_object_of_the_current_folder(module: str, name: str) -> None:
    engine = resolve(f"{module}:{name}")
    assert type(engine).__name__ == "Mine"
    assert isinstance(engine, Engine)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Fails", "loading it raised RuntimeError: no device"),
        ("NoOpen", "NoOpen has no method open"),
        ("number", "int has no method describe"),
        ("Absent", "loading it raised AttributeError"),
    ],
)
def test_what_is_no_engine_cannot_be_loaded(module: str, name: str, message: str) -> None:
    with pytest.raises(EngineLoadError, match=message):
        resolve(f"{module}:{name}")


def test_a_module_that_does_not_exist_cannot_be_loaded() -> None:
    with pytest.raises(EngineLoadError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        resolve("no_such_module:Engine")


def test_an_entry_point_is_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (
        EntryPoint("theirs", "impls.golden:GoldenEngine", registry.GROUP),
        EntryPoint("gone", "no_such_module:Engine", registry.GROUP),
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else ())
    assert isinstance(resolve("theirs"), GoldenEngine)
    assert known_engines() == ("golden", "blocked", "native", *peers.installed(), "gone", "theirs")
    with pytest.raises(EngineLoadError, match="No module named 'no_such_module'"):
        resolve("gone")
    with pytest.raises(
        UnknownEngine, match=r"there is no engine 'theirz' \(did you mean 'theirs'\?\): known are golden, blocked, native, gone"
    ):
        resolve("theirz")


@pytest.mark.parametrize("spec", ["./nothing.so", "folder/engine", "engine.dylib"])
def test_a_path_is_a_library(spec: str) -> None:
    with pytest.raises(EngineLoadError, match="no such file"):
        resolve(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nativ", r"there is no engine 'nativ' \(did you mean 'native'\?\)"),
        ("", "there is no engine ''"),
        ("golden:Z01", "the specification has no variants"),
        ("blocked:nothing", "'nothing' of the blocked engine"),
        ("native:nothing", "there is no plant 'nothing' of the native engine: choose one of .*bonus-parent"),
    ],
)
def test_an_unknown_name_lists_those_that_exist(spec: str, message: str) -> None:
    with pytest.raises(UnknownEngine, match=message):
        resolve(spec)


def test_without_a_compiler_the_native_engine_cannot_be_loaded_and_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITREE_CXX", "no-such-compiler")
    for function in (resolve, prepare):
        with pytest.raises(EngineLoadError, match="there is no such program") as caught:
            function("native")
        assert isinstance(caught.value.__cause__, build.NoCompiler)


def test_our_engines_by_name() -> None:
    assert resolve("golden").describe().name == "golden"
    assert resolve("blocked").describe().name == "blocked"
    try:
        build.find_compiler()
    except build.NoCompiler as problem:
        pytest.skip(str(problem))
    prepare("native")
    prepare("golden")
    assert resolve("native").describe().name == "native"


def test_importing_the_registry_imports_no_engine() -> None:
    code = "import sys, impls.registry; print([n for n in sys.modules if n.startswith(('impls.blocked', 'impls.golden', 'impls.native.build'))])"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert answer.stdout.strip() == "[]"


# ---- the specification as an engine ---------------------------------------------------------------------------------


def test_the_specification_is_an_engine_of_every_operation() -> None:
    engine = GoldenEngine()
    assert isinstance(engine, Engine)
    assert engine.describe().ops == set(OPS)
    out = np.full((1, 2), np.nan, np.float32)
    engine.run_op("add", {"a": np.array([[1, 2]], np.float32), "b": np.array([[3, 4]], np.float32)}, {}, {"out": out})
    np.testing.assert_array_equal(out, [[4, 6]])


def test_the_specification_refuses_as_an_engine_does() -> None:
    engine = GoldenEngine()
    x, out = np.ones((1, 2), np.float32), np.ones((2, 2), np.float32)
    with pytest.raises(Unsupported, match="there is no operation 'dropout'"):
        engine.run_op("dropout", {}, {}, {})
    for inputs, outputs, message in (
        ({"a": x}, {"out": out}, "add: 'b' is missing"),
        ({"a": x, "b": x}, {}, "add: output out is missing"),
        ({"a": x, "b": x}, {"out": out}, r"add: out is float32 \[2, 2\], but must be float32 \[1, 2\]"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.run_op("add", inputs, {}, outputs)
    with pytest.raises(EngineError, match="T6"):
        engine.run_op("tree_mask", {"parents": np.array([0], np.int32)}, {"prefix_len": 0}, {})


def test_a_session_of_the_specification_opens_from_a_provider() -> None:
    config = preset("tiny")
    session = GoldenEngine().open(config, random_weights(config, 0).__getitem__)
    assert session.model.config == config


def test_the_cuda_engine_is_named_and_says_what_it_needs() -> None:
    with pytest.raises(UnknownEngine, match="there is no plant 'nothing'"):
        resolve("cuda:nothing")
    try:
        engine = resolve("cuda")
    except EngineLoadError as problem:
        assert "cuda:emulated" in str(problem)
    else:
        assert engine.describe().name == "cuda"


def test_the_native_cuda_engine_is_named_and_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownEngine, match="use cuda-native or cuda-native:emulated"):
        resolve("cuda-native:nothing")
    monkeypatch.setenv("PARITREE_NVCC", "no-such-nvcc")
    with pytest.raises(EngineLoadError, match="no CUDA compiler was found.*cuda-native:emulated"):
        resolve("cuda-native")
    try:
        prepare("cuda-native:emulated")
    except EngineLoadError as problem:
        pytest.skip(str(problem))
    assert resolve("cuda-native:emulated").describe().name == "cuda-native:emulated"
