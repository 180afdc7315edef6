"""An engine in a process of its own, over stdin and stdout: for engines that are not Python and have no C ABI.

docs/subprocess-protocol.md is the contract; `subprocess_server` is a sample server. The process is started once per engine and ends when its stdin
closes. What it prints on stderr is shown when it fails.
"""

from __future__ import annotations

import ctypes
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from impls.peers import messages
from spec.config import Config, as_parameters
from spec.engine import (
    PROFILES,
    Departure,
    Description,
    Drafter,
    EngineError,
    Float,
    Generation,
    Int,
    Limits,
    Profile,
    Round,
    Rows,
    TapSink,
    Unsupported,
)  # fmt: skip
from spec.weights import Provider, checked

END_WAIT_S = 2.0  # for a process whose stdin was closed
STDERR_BYTES = 2000  # the tail that an error shows
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_FORMATS = {"float32": "F32", "int32": "I32", "uint8": "U8"}


class SubprocessEngine:
    """`spec.engine.Engine`. `command` is split as a shell would, without a shell. Raises EngineError where the process does not describe itself."""

    def __init__(self, command: str) -> None:
        self._process = _Process(command)
        try:
            answer, _ = self._process.ask("describe", protocol=messages.VERSION)
            self._description = _description(answer)
        except BaseException:
            self._process.close()
            raise

    def describe(self) -> Description:
        return self._description

    def run_op(
        self, op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float], outputs: Mapping[str, NDArray[Any]]
    ) -> None:
        """Raises Unsupported and EngineError as the process answers."""
        due = {name: {"shape": list(array.shape), "dtype": _FORMATS[str(array.dtype)]} for name, array in outputs.items()}
        _, found = self._process.ask("run_op", inputs, op=op, params=dict(params), outputs=due)
        for name, array in outputs.items():
            if name not in found or found[name].shape != array.shape or found[name].dtype != array.dtype:
                what = f"{found[name].dtype} {list(found[name].shape)}" if name in found else "nothing"
                raise EngineError(f"{op}: output {name} is {what}, but must be {array.dtype} {list(array.shape)}")
            array[...] = found[name]

    def open(self, config: Config, weights: Provider) -> SubprocessSession:
        """Weights go through a safetensors file that exists while the session is open."""
        return SubprocessSession(self._process, config, weights)

    def close(self) -> None:
        self._process.close()


class SubprocessSession:
    """`spec.engine.Session`."""

    def __init__(self, process: _Process, config: Config, weights: Provider) -> None:
        self._process, self._config = process, config
        self._folder = tempfile.TemporaryDirectory(prefix="paritree-weights-")
        try:
            path = Path(self._folder.name) / "weights.safetensors"
            save_file({name: np.ascontiguousarray(value) for name, value in checked(config, weights)}, path)
            answer, _ = process.ask("open", parameters=as_parameters(config), weights=str(path))
            self._number = int(answer.get("session", 0))
        except BaseException:
            self._folder.cleanup()
            raise

    def forward(self, rows: Rows, want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> Float:
        batch: dict[str, NDArray[Any]] = {
            "sequence": rows.sequence, "token": rows.token, "position": rows.position, "parent": rows.parent,
            "want_logits": want_logits.astype(np.uint8),
        }  # fmt: skip
        _, found = self._process.ask("forward", batch, session=self._number, taps=sorted(taps))
        logits = found.pop("logits", None)
        for name, array in found.items():
            tap, _, layer = name.removeprefix("tap/").rpartition("/")
            if not layer.lstrip("-").isdigit():
                raise EngineError(f"forward answered an array {name!r}; taps are named tap/NAME/LAYER")
            sink(tap, int(layer), array)
        return np.zeros((0, self._config.vocab), np.float32) if logits is None else logits

    def commit(self, sequence: int, path: Int) -> None:
        self._process.ask("commit", session=self._number, sequence=sequence, path=path.tolist())

    def cache_rows(self, sequence: int, layer: int) -> Float:
        _, found = self._process.ask("cache_rows", session=self._number, sequence=sequence, layer=layer)
        if "rows" not in found:
            raise EngineError("cache_rows answered no array `rows`")
        return found["rows"]

    def evict(self, sequence: int) -> None:
        self._process.ask("evict", session=self._number, sequence=sequence)

    def fork(self, source: int, target: int) -> None:
        self._process.ask("fork", session=self._number, source=source, target=target)

    def generate(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits) -> list[Generation]:
        """The process asks for draft logits while it generates; each question is answered from `drafter`."""
        asked: dict[str, Any] = {
            "prompts": [prompt.tolist() for prompt in prompts],
            "budget": budget,
            "max_new": limits.max_new,
            "stop_tokens": list(limits.stop_tokens),
        }
        answer, _ = self._process.ask(
            "generate", drafter=drafter, session=self._number, block_len=drafter.block_len if drafter else 0, **asked
        )  # fmt: skip
        return [_generation(one) for one in answer.get("generations", [])]

    def close(self) -> None:
        try:
            self._process.ask("close", session=self._number)
        finally:
            self._folder.cleanup()


class _Process:
    """The process and the conversation with it, one question at a time."""

    def __init__(self, command: str) -> None:
        words = shlex.split(command)
        if not words:
            raise EngineError("the command line is empty")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self._asked = 0
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, preexec_fn=_end_with_parent
            )
        except OSError as problem:
            self._errors.close()
            raise EngineError(f"{words[0]!r} cannot be started: {problem}") from None

    def ask(
        self, what: str, arrays: messages.Arrays | None = None, drafter: Drafter | None = None, **fields: Any
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """The answer. Raises Unsupported or EngineError as it says, and EngineError where there is none."""
        self._asked += 1
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            messages.write(self._process.stdin, {"id": self._asked, "do": what, **fields}, arrays)
            while True:
                answer, found = messages.read(self._process.stdout)
                if answer.get("id") != self._asked:
                    raise messages.ProtocolError(f"the answer has id {answer.get('id')!r}, but the question has {self._asked}")
                if "draft" not in answer:
                    break
                if drafter is None:
                    raise messages.ProtocolError("the process asks for a draft where there is no drafter")
                history = np.array(answer["draft"]["history"], np.int32)
                logits = drafter.draft(int(answer["draft"]["sequence"]), history)
                messages.write(self._process.stdin, {"id": self._asked, "do": "drafted"}, {"logits": logits})
        except (messages.ProtocolError, OSError, KeyError, TypeError, ValueError) as problem:
            raise EngineError(f"{what}: {problem}{self._ending()}") from None
        if "unsupported" in answer:
            raise Unsupported(str(answer["unsupported"]))
        if "error" in answer:
            raise EngineError(str(answer["error"]))
        return answer, found

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _ending(self) -> str:
        """How the process ended, if it did, and the tail of its stderr."""
        try:
            code = self._process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            return ""
        size = self._errors.seek(0, 2)
        self._errors.seek(max(0, size - STDERR_BYTES))
        text = self._errors.read().decode("utf-8", "replace").strip()
        how = f"signal {-code}" if code < 0 else f"code {code}"
        return f"; the process ended with {how}" + (f": {text}" if text else "")


def _end_with_parent() -> None:
    """In the child: a worker that is killed takes its engine with it. Only Linux has this; elsewhere the closed stdin ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _description(answer: Mapping[str, Any]) -> Description:
    """Raises EngineError for a description that lacks something or names an unknown profile field."""
    try:
        if answer.get("protocol") != messages.VERSION:
            raise EngineError(f"the process speaks protocol {answer.get('protocol')!r}, this paritree {messages.VERSION}")
        profile = answer.get("profile", {})
        known = PROFILES[profile] if isinstance(profile, str) else Profile(**profile)
        capabilities, ops, taps = (frozenset(map(str, answer.get(name, ()))) for name in ("capabilities", "ops", "taps"))
        departures = tuple(Departure(*departure) for departure in answer.get("departures", ()))
        return Description(str(answer["name"]), str(answer["version"]), known, capabilities, ops, taps, departures)
    except (KeyError, TypeError) as problem:
        raise EngineError(f"the process describes itself wrongly: {type(problem).__name__}: {problem}") from None


def _generation(answer: Any) -> Generation:
    try:
        rounds = tuple(
            Round(tuple(tokens), tuple(parents), tuple(path), bonus) for tokens, parents, path, bonus in answer.get("rounds", ())
        )
        return Generation(tuple(answer["tokens"]), rounds)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise EngineError(f"a generation cannot be read: {type(problem).__name__}: {problem}") from None
