"""The worker: the process that loads one engine and runs jobs on it until it is told to stop or the engine ends it.

It starts as a fork of the zygote, or cold as a new interpreter. Nothing here
recovers from anything: when this process dies, the supervisor says why.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from campaigns.isolation import transport, validate
from campaigns.isolation.errors import EngineLoadError, UnknownEngine
from campaigns.isolation.execute import PreparationError, Progress, Sessions, describe, run_calls, run_tree, run_trees
from campaigns.isolation.transport import Arena, RecordWriter
from spec.engine import Engine
from spec.script import Answer, Failure

RESOLVER = "impls.registry:resolve"
WEIGHTS = "campaigns.weights:weights_for"
# After an illegal address, a failed launch or an assertion on a GPU every later call in the process fails too, whatever it asks
STICKY = re.compile(r"cuda|cudnn|cublas|\bhip|nvrtc|illegal (memory )?a(ddress|ccess)|misaligned address|device-side assert", re.IGNORECASE)
STACK_SIGNAL = signal.SIGRTMAX - 1  # "print your stack": no library uses the last real-time signals


@dataclass(frozen=True)
class Loading:
    """What a fresh worker needs: how to find the engine and the weights, and the surroundings that it runs in.

    `resolver` ("module:function") turns `engine` into an object with the shape of spec.engine.Engine; `weights` names a function
    (config, key) -> mapping. `environment` is set before the engine is loaded.
    """

    engine: str
    resolver: str
    weights: str
    environment: Mapping[str, str]
    path: tuple[str, ...]


class Retired(BaseException):
    """The engine's process is of no use any more; what comes after must go to a new one."""


class Reporter(Progress):
    """Writes the step in progress and every finished answer into shared memory. Raises Retired after an error that sticks to the process."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self._pid = os.getpid()

    def started(self, step: int) -> None:
        self._writer.step(step, time.monotonic_ns())

    def finished(self, answer: Answer) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # the engine forked and returned twice: only the worker itself reports
        try:
            self._writer.append(*transport.pack_answer(answer))
        except transport.TransportError as problem:
            self._writer.append(*transport.pack_answer(Answer(failure=Failure("malformed", str(problem)))))
        if answer.failure is not None and answer.failure.kind == "raised" and STICKY.search(answer.failure.message):
            raise Retired


def named(path: str) -> Any:
    """The object that "module:name" names. Raises ImportError or AttributeError."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def instance(engine: str) -> Engine:
    """A resolver for "module:Class": the class called without arguments."""
    made: Engine = named(engine)()
    return made


def serve(control_descriptor: int, request_descriptor: int, records_descriptor: int) -> NoReturn:
    """Run jobs until the supervisor closes the channel."""
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)  # what was printed before a crash must not die in a buffer
    control = socket.socket(fileno=control_descriptor)
    requests = Arena(request_descriptor, writable=False)
    writer = RecordWriter(Arena(records_descriptor, writable=True))
    jobs = _Jobs(writer)
    while True:
        message = control.recv(transport.REQUEST.size)
        if not message:
            os._exit(0)
        kind, job, size = transport.REQUEST.unpack(message)
        writer.begin(job, time.monotonic_ns())
        read = transport.read_calls if kind == transport.CALLS else transport.read_request
        jobs.run(kind, read(requests, size))
        control.send(transport.DONE.pack(job))


def _unbuffered(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)


class _Jobs:
    """What each kind of request does."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self._reporter = Reporter(writer)
        self._engine: Engine | None = None
        self._sessions: Sessions | None = None
        self._weights = ""

    def run(self, kind: int, payload: Any) -> None:
        if kind == transport.LOAD:
            self._load(payload)
            return
        try:
            self._answer(kind, payload)
        except Retired:
            self._writer.append({"retired": True}, [])
        except PreparationError as problem:
            self._writer.append({"unprepared": validate.text_of(problem)}, [])

    def _answer(self, kind: int, payload: Any) -> None:
        assert self._engine is not None  # the supervisor loads before anything else
        if kind == transport.CALLS:
            run_calls(self._engine, payload, self._reporter)
        elif kind == transport.TREE:
            run_tree(self._engine, payload, self._reporter)
        elif kind == transport.TREES:
            run_trees(self._engine, payload, self._reporter)
        else:
            if self._sessions is None:
                self._sessions = Sessions(self._engine, named(self._weights))
            trace = self._sessions.run(payload, self._reporter)
            failure = None if trace.failure is None else transport.pack_failure(trace.failure)
            self._writer.append({"trace_failure": failure}, [])

    def _load(self, loading: Loading) -> None:
        os.environ.update(loading.environment)
        sys.path[:] = loading.path
        self._weights = loading.weights
        try:
            self._engine = named(loading.resolver)(loading.engine)
            description = describe(self._engine)
        except UnknownEngine as problem:
            self._writer.append({"unknown": validate.text_of(problem.args[0] if problem.args else problem)}, [])
        except EngineLoadError as problem:
            fields = (problem.path, problem.found, problem.expected, problem.remedy)
            self._writer.append({"load_error": [validate.text_of(field) for field in fields]}, [])
        except BaseException as problem:
            self._writer.append({"error": str(problem) if isinstance(problem, validate.Malformed) else validate.described(problem)}, [])
        else:
            self._writer.append({"description": transport.pack_description(description)}, [])
