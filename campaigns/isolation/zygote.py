"""The zygote: a small process with NumPy, the spec and the rooms' own modules imported, which forks a worker in milliseconds.

It runs no engine code and talks to one runner over a socket pair. When the runner goes away, however it goes (the socket ends, the parent
death signal, another parent id), the zygote kills every worker with its whole process group and ends. Workers also die with the zygote.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

PRELOADED = ("numpy", "spec.model", "spec.ops", "impls.registry", "campaigns.weights", "campaigns.isolation.worker")
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")  # a process with threads must not fork
MESSAGE_MAX = 1 << 16  # bytes; only an environment is ever long
LOOK_AGAIN_MS = 1000  # how often a quiet zygote checks that its parent is still there
REAP_S = 5.0  # a process killed but still there after this long hangs in the kernel (a driver), and waiting longer does not help
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from campaigns.isolation.{module} import {main}; {main}(sys.argv)"


class IsolationError(RuntimeError):
    """Our own machinery failed; nothing is known about the engine."""


# In the runner


@dataclass(frozen=True)
class Child:
    """A worker process: its id, and a pidfd that becomes readable when it ends (the caller closes it)."""

    pid: int
    pidfd: int


class Zygote:
    """The runner's handle. Usable from several threads, not across a fork of the runner. Starts on first use, and again if it was killed."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise IsolationError(f"workers need Linux (memfd, pidfd), and this is {sys.platform}: use campaigns.isolation.InProcess")
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def spawn(self, descriptors: tuple[int, int, int, int], environment: Mapping[str, str], *, cold: bool) -> Child:
        """Start a worker on (control, requests, records, output): a fork of the zygote, or (cold) a new interpreter in `environment`."""
        reply, pidfds = self._ask({"do": "exec", "environment": dict(environment)} if cold else {"do": "fork"}, descriptors)
        return Child(reply["pid"], pidfds[0])

    def reap(self, pid: int) -> int | None:
        """Kill what is left of the worker's process group and return its exit code (negative: the signal); None if it cannot be killed."""
        try:
            code = self._ask({"do": "reap", "pid": pid}, ())[0]["code"]
        except IsolationError:
            return None  # the zygote was killed, and the worker with it
        return None if code is None else int(code)

    def close(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            if self._process is not None and self._owner == os.getpid():
                self._process.wait()
            self._channel = self._process = None

    def _ask(self, message: dict[str, Any], descriptors: tuple[int, ...]) -> tuple[dict[str, Any], list[int]]:
        if os.getpid() != self._owner:
            raise IsolationError("a zygote belongs to the process that made it: make another one after a fork")
        with self._lock:
            channel = self._started()
            try:
                socket.send_fds(channel, [json.dumps(message).encode()], descriptors)
                data, received, _, _ = socket.recv_fds(channel, MESSAGE_MAX, 1)
            except OSError as problem:
                raise IsolationError(f"the zygote does not answer: {problem}") from None
        if not data:
            raise IsolationError("the zygote ended; was it killed?")
        return json.loads(data), list(received)

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None and self._channel is not None:
            return self._channel
        if self._channel is not None:
            self._channel.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # the death signal follows the *thread* that starts the process, so it is only asked for where that is the main one
        dies_with_parent = threading.current_thread() is threading.main_thread()
        arguments = [str(theirs.fileno()), json.dumps(sys.path), str(os.getpid()), str(int(dies_with_parent))]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(module="zygote", main="main"), *arguments],
                env={**dict.fromkeys(THREADS, "1"), **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in the terminal is for the runner
            )
        self._channel = ours
        return ours


# In the zygote


def main(arguments: list[str]) -> NoReturn:
    """`zygote CHANNEL PATH PARENT DIES_WITH_PARENT`: serve until the runner is gone."""
    channel = socket.socket(fileno=int(arguments[1]))
    parent = int(arguments[3])
    server = _Server(channel, parent)
    signal.signal(signal.SIGTERM, lambda *_: server.leave())
    prctl = ctypes.CDLL(None).prctl
    if int(arguments[4]):
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what an engine leaves behind becomes ours to end
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for module in PRELOADED:
        with contextlib.suppress(Exception):  # what cannot be imported here is missed, and reported, by the worker that needs it
            importlib.import_module(module)
    server.run()


class _Server:
    def __init__(self, channel: socket.socket, parent: int) -> None:
        self._channel = channel
        self._parent = parent
        self._workers: set[int] = set()

    def run(self) -> NoReturn:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while True:
            ready = poller.poll(LOOK_AGAIN_MS)
            if os.getppid() != self._parent:
                self.leave()
            if ready:
                data, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE_MAX, 4)
                if not data:
                    self.leave()
                self._answer(json.loads(data), list(descriptors))

    def leave(self) -> NoReturn:
        """Kill every worker and everything that workers left behind, and end."""
        for pid in self._workers:
            _kill_group(pid)
        give_up = time.monotonic() + REAP_S
        while time.monotonic() < give_up:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    for orphan in _children():
                        _kill_group(orphan)
                    time.sleep(0.001)
            except ChildProcessError:
                break
        os._exit(0)

    def _answer(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if message["do"] == "reap":
            self._reply({"code": self._reap(message["pid"])})
            return
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker(self._channel, descriptors, zygote, message.get("environment"))
        self._workers.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._reply({"pid": pid}, (pidfd,))
        os.close(pidfd)

    def _reap(self, pid: int) -> int | None:
        if pid not in self._workers:
            return None
        _kill_group(pid)  # before waiting: until then nobody else can have this id
        if not _ends_within(pid, REAP_S):
            return None
        _, status = os.waitpid(pid, 0)
        self._workers.discard(pid)
        self._reap_orphans()
        return os.waitstatus_to_exitcode(status)

    def _reap_orphans(self) -> None:
        """Forget ended processes that were a worker's, not ours."""
        for orphan in _children():
            if orphan not in self._workers:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan, os.WNOHANG)

    def _reply(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(OSError):  # the runner is gone: the next look at the channel says so
            socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _ends_within(pid: int, seconds: float) -> bool:
    pidfd = os.pidfd_open(pid)
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(1e3 * seconds))
    finally:
        os.close(pidfd)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as listing:
            return [int(word) for word in listing.read().split()]
    except OSError:
        return []


# In the worker, between its birth and `serve`


def _become_worker(channel: socket.socket, descriptors: list[int], zygote: int, environment: dict[str, str] | None) -> NoReturn:
    """`environment` None: go on in this fork; otherwise start over in a new interpreter with these variables added."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != zygote:
            os._exit(0)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")  # when memory runs out, the engine goes, not the runner
        control, requests, records, output = descriptors
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        channel.close()
        if environment is not None:
            for descriptor in (control, requests, records):
                os.set_inheritable(descriptor, True)
            names = ",".join(map(str, (control, requests, records)))
            arguments = [sys.executable, "-c", _BOOT.format(module="zygote", main="cold_worker"), names, json.dumps(sys.path)]
            os.execve(sys.executable, arguments, {**os.environ, **environment})
        _serve(control, requests, records)
    except BaseException as problem:
        os.write(2, f"paritree: the worker's own code failed: {type(problem).__name__}: {problem}\n".encode())
    finally:
        os._exit(70)  # EX_SOFTWARE


def cold_worker(arguments: list[str]) -> NoReturn:
    """`worker CONTROL,REQUESTS,RECORDS PATH`: what a cold worker runs."""
    control, requests, records = map(int, arguments[1].split(","))
    try:
        _serve(control, requests, records)
    except BaseException as problem:
        os.write(2, f"paritree: the worker's own code failed: {type(problem).__name__}: {problem}\n".encode())
    finally:
        os._exit(70)


def _serve(control: int, requests: int, records: int) -> NoReturn:
    from campaigns.isolation.worker import serve  # numpy and all: already there in a fork, and imported by a cold worker

    serve(control, requests, records)
