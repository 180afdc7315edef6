"""The line protocol: an engine in a process is judged like the engine itself, and whatever a process does wrong is an error with its reason."""

from __future__ import annotations

import io
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from campaigns.case import GenerateCase, OpCase, SessionCase
from campaigns.isolation.inprocess import InProcess
from campaigns.trial import Bench
from impls.peers import messages
from impls.peers.subprocess_engine import SubprocessEngine
from impls.peers.subprocess_server import config_of
from impls.registry import EngineLoadError, UnknownEngine, resolve
from oracles.judgement import FINDINGS
from spec.config import PRESETS, as_parameters
from spec.engine import EngineError, Unsupported

TREE = ((0, 1), (1, 0), (0, 1))
SESSION = SessionCase(
    "tiny", (), 0, "ordinary", ((4, 1), (2, 2)), ((TREE, ()),), generate=GenerateCase("random", 3, 50, -1, 4, 2, 4, -1),
    hazards=("fork", "evict"),
)  # fmt: skip


@pytest.fixture(scope="module")
def blocked() -> Iterator[SubprocessEngine]:
    engine = resolve(f"command:{shlex.quote(sys.executable)} -m impls.peers.subprocess_server blocked")
    assert isinstance(engine, SubprocessEngine)
    yield engine
    engine.close()


def test_a_session_through_the_pipe_gives_the_judgements_of_the_engine_itself(blocked: SubprocessEngine) -> None:
    found = [Bench(InProcess(engine)).outcome(SESSION).judgements for engine in (blocked, resolve("blocked"))]
    assert found[0] == found[1]
    assert found[0] and not {j.verdict for j in found[0]} & FINDINGS


def test_an_operation_through_the_pipe_is_verified(blocked: SubprocessEngine) -> None:
    case = OpCase("rope", (("H", 2), ("T", 3), ("half", 2)), (("half_layout", 1.0),), "ordinary", 5)
    assert Bench(InProcess(blocked)).outcome(case).judgements == Bench(InProcess(resolve("blocked"))).outcome(case).judgements


def test_what_the_engine_refuses_comes_back_as_its_own_answer(blocked: SubprocessEngine) -> None:
    with pytest.raises(Unsupported, match="no op 'fft'"):
        blocked.run_op("fft", {}, {}, {})
    with pytest.raises(EngineError, match="ids must be between 0 and 1"):
        blocked.run_op(
            "embed", {"table": np.zeros((2, 1), np.float32), "ids": np.array([7], np.int32)}, {}, {"out": np.zeros((1, 1), np.float32)}
        )


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_configuration_survives_the_flat_pairs(name: str) -> None:
    sent = as_parameters(PRESETS[name])
    assert as_parameters(config_of(sent)) == sent


def process(tmp_path: Path, body: str) -> str:
    """A command line that runs `body` as a server; `say(text)` writes a line."""
    script = tmp_path / "server.py"
    script.write_text(
        "import json, sys\n"
        "def say(text):\n    sys.stdout.write(text + '\\n'); sys.stdout.flush()\n"
        "DESCRIBED = json.dumps({'id': 1, 'protocol': 1, 'name': 'x', 'version': '0'})\n"
        "sys.stdin.buffer.readline()\n" + textwrap.dedent(body)
    )
    return f"command:{shlex.quote(sys.executable)} {shlex.quote(str(script))}"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("sys.exit('no weights here')", "ended with code 1: no weights here"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with signal 11"),
        ("say('hello')", "is no line of JSON"),
        ("say('[1]')", "is no line of JSON with an object"),
        ("say(json.dumps({'id': 2}))", "the answer has id 2, but the question has 1"),
        ("say(json.dumps({'id': 1, 'payload': -1}))", "payload is -1"),
        ("say(json.dumps({'id': 1, 'payload': 99}))", "ended after 0 of 99 bytes"),
        ("say(json.dumps({'id': 1, 'payload': 9}) + '\\n12345678')", "is no safetensors file"),
        ("say(json.dumps({'id': 1, 'protocol': 2}))", "speaks protocol 2, this paritree 1"),
        ("say(json.dumps({'id': 1, 'protocol': 1, 'name': 'x'}))", "describes itself wrongly: KeyError: 'version'"),
        (
            "say(json.dumps({'id': 1, 'protocol': 1, 'name': 'x', 'version': '0', 'profile': {'speed': 3}}))",
            "unexpected keyword argument 'speed'",
        ),
        ("say(json.dumps({'id': 1, 'draft': {}}))", "asks for a draft where there is no drafter"),
    ],
)
def test_a_process_that_cannot_describe_itself_is_not_loaded(tmp_path: Path, body: str, reason: str) -> None:
    with pytest.raises(EngineLoadError) as failed:
        resolve(process(tmp_path, body))
    assert reason in str(failed.value)


def test_a_process_that_dies_in_the_middle_of_a_call_says_so(tmp_path: Path) -> None:
    engine = resolve(process(tmp_path, "say(DESCRIBED); sys.stdin.buffer.readline(); sys.exit('out of cheese')"))
    with pytest.raises(EngineError, match="run_op: .*ended with code 1: out of cheese"):
        engine.run_op("add", {}, {}, {})


def test_a_missing_or_misshapen_output_is_named(tmp_path: Path) -> None:
    engine = resolve(process(tmp_path, "say(DESCRIBED); sys.stdin.buffer.readline(); say(json.dumps({'id': 2}))"))
    with pytest.raises(EngineError, match=r"output out is nothing, but must be float32 \[2\]"):
        engine.run_op("add", {}, {}, {"out": np.zeros(2, np.float32)})


def test_a_command_that_does_not_exist_and_an_empty_one_are_named() -> None:
    with pytest.raises(EngineLoadError, match="'./no-such-engine' cannot be started"):
        resolve("command:./no-such-engine")
    with pytest.raises(UnknownEngine, match="command:python server.py"):
        resolve("command:")


def test_an_array_of_another_dtype_is_no_message() -> None:
    stream = io.BytesIO()
    messages.write(stream, {"id": 1}, {"x": np.zeros(2, np.float64)})
    stream.seek(0)
    with pytest.raises(messages.ProtocolError, match="array 'x' is float64"):
        messages.read(stream)
