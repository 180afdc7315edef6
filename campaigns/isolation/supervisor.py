"""The supervisor: runs jobs in a worker and turns whatever happens to it into answers.

A worker that crashes or hangs is buried and the next job gets a new one (a fork of the zygote: milliseconds). Answers that were complete
before are kept, the step in progress is named, and the calls after it go on in the new worker. Only an engine that cannot be loaded (again)
is an exception.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from campaigns.isolation import transport, validate
from campaigns.isolation.chain import TreeChain, TreeJob
from campaigns.isolation.deadline import Deadline, fixed
from campaigns.isolation.errors import EngineLoadError, UnknownEngine, load_error
from campaigns.isolation.execute import OPENING, label
from campaigns.isolation.transport import Arena, TransportError
from campaigns.isolation.worker import RESOLVER, STACK_SIGNAL, WEIGHTS, Loading
from campaigns.isolation.zygote import IsolationError, Zygote
from impls import registry
from spec.engine import Description
from spec.script import Answer, Failure, OpCall, Script, Trace
from spec.weights import is_large

LOAD_S = 120.0  # importing torch or compiling a kernel library at first use takes tens of seconds
BATCH_BYTES = 64 << 20  # of inputs per round trip: bounds the shared memory of a long list of calls
OUTPUT_BYTES = 8192  # the tail of what the engine printed; a sanitizer's report of one error fits
STACK_WAIT_S = 0.2  # for a hung worker to print where it is
CLOSE_WAIT_S = 0.5  # for a worker whose channel is closed to end by itself

STARVED_SHARE = 0.25  # of the time that its threads want to run; a worker that gets less is slow because the machine is busy
STARVED_LOOK_S = 0.05  # several time slices of a busy machine
PATIENCE = 4  # times the deadline for such a worker: 1 / STARVED_SHARE
CHAIN_MAX = 5  # calls of one tree chain
LARGE_S = 300.0  # a step of a layer in full width takes 2 to 30 s on a busy laptop: it is held up by memory, and by making weights
KIND = {
    transport.CALLS: "calls",
    transport.SCRIPT: "script",
    transport.TREE: "tree",
    transport.TREES: "tree",
}  # a step of either is a link of a chain

Records = list[tuple[dict[str, Any], list[Any]]]


@dataclass(frozen=True)
class _Outcome:
    """What a job brought: complete records, and why it ended early (None: it did not).

    `damaged`: the records cannot be read. `retired`: the worker stopped after its last record, because the engine's process is of no use any more.
    """

    records: Records
    death: Failure | None
    damaged: bool = False
    retired: bool = False


class Supervisor:
    """One engine in a worker. `deadline_s` is the time for one step (call, script step, link of a chain), fixed or adaptive.

    `cold`: start workers as new interpreters instead of forks, for libraries that must be there from the start (sanitizers) or dislike forks; the
    zygote touches no GPU, so that a forked worker may. `zygote`: share one among several supervisors.
    `environment` is set in the worker before it loads the engine, `load_s` bounds that loading, and `resolver` and `weights` name functions
    ("module:name"): engine name -> engine, and (config, key) -> weights.
    Raises EngineLoadError or UnknownEngine where the engine cannot be loaded, IsolationError where our own machinery fails.
    """

    def __init__(
        self,
        engine_spec: str,
        *,
        deadline_s: float | Deadline,
        cold: bool = False,
        load_s: float = LOAD_S,
        resolver: str = RESOLVER,
        weights: str = WEIGHTS,
        environment: Mapping[str, str] | None = None,
        zygote: Zygote | None = None,
    ) -> None:
        self.deadline = deadline_s if isinstance(deadline_s, Deadline) else fixed(deadline_s)
        self.restarts = 0
        self._load_s = load_s
        self._cold = cold
        self._loading = Loading(engine_spec, resolver, weights, dict(environment or {}), ())
        self._owned_zygote = Zygote() if zygote is None else None
        self._zygote = zygote or self._owned_zygote or Zygote()
        self._worker: _Worker | None = None
        self._last = "loading"
        try:
            if resolver == RESOLVER:
                registry.prepare(engine_spec)  # compile before a deadline runs, and before several workers would do it at once
            self.description: Description = self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the worker; None between a crash and the next job."""
        return None if self._worker is None else self._worker.pid

    def restart(self) -> None:
        """A fresh worker: no session, no state, nothing that earlier jobs left in the process."""
        self._bury()
        self._start()

    def close(self) -> None:
        self._bury()
        if self._owned_zygote is not None:
            self._owned_zygote.close()

    # Jobs

    def calls(self, calls: Sequence[OpCall]) -> list[Answer]:
        """One answer per call, in order. A call that ends the worker is answered by "crashed" or "hung"; the others are not affected."""
        answers: list[Answer] = []
        count_max = len(calls)
        while len(answers) < len(calls):
            batch = _batch(calls[len(answers) : len(answers) + count_max])
            outcome = self._run(transport.CALLS, batch, len(batch), partial(_name, batch))
            found, fit = _answers_to(batch, outcome.records)
            whole = fit and not outcome.damaged
            if whole and outcome.death is None and (len(found) == len(batch) or (outcome.retired and found)):
                answers += found
            elif whole and outcome.death is not None and len(found) < len(batch):
                answers += [*found, Answer(failure=outcome.death)]
            elif len(batch) > 1:
                self._bury()
                count_max = 1  # nothing tells which call did it: ask again one by one, in a fresh worker
            else:
                self._bury()
                answers.append(Answer(failure=outcome.death or Failure("crashed", f"{batch[0].op} damaged the memory of the worker")))
                count_max = len(calls)
        return answers

    def script(self, script: Script) -> Trace:
        """The trace of a whole script; its `failure` says why it ended early, if the worker did.

        Raises IsolationError where the weights of the script cannot be made.
        """
        outcome = self._run(transport.SCRIPT, script, len(script.steps), lambda step: label(script, step))
        answers: list[Answer] = []
        failure = outcome.death
        ended = outcome.retired or failure is not None
        try:
            for meta, arrays in outcome.records:
                if "unprepared" in meta:
                    raise IsolationError(validate.text_of(meta["unprepared"]))
                if "trace_failure" in meta:
                    ended = True
                    failure = failure or transport.unpack_failure(meta["trace_failure"])
                else:
                    answers.append(transport.unpack_answer(meta, arrays))
        except TransportError:
            ended = False
        if not ended or outcome.damaged or len(answers) > len(script.steps):
            self._bury()
            failure = failure or Failure("crashed", "the engine damaged the memory of the worker")
        return Trace(self.description, answers[: len(script.steps)], failure)

    def trees(self, jobs: Sequence[TreeJob]) -> list[list[tuple[OpCall, Answer]]]:
        """`tree` for each job, in one trip while all goes well. After anything else every job is run again on its own, in a fresh worker."""
        if len(jobs) < 2:
            return [self.tree(job) for job in jobs]
        outcome = self._run(transport.TREES, list(jobs), CHAIN_MAX * len(jobs), lambda step: f"call {step} of {len(jobs)} trees")
        if outcome.death is None and not outcome.damaged and not outcome.retired:
            made = [_chained(job, records) for records in [iter(outcome.records)] for job in jobs]
            if all(calls is not None for calls in made):
                return [calls for calls in made if calls is not None]
        self._bury()
        return [self.tree(job) for job in jobs]

    def tree(self, job: TreeJob) -> list[tuple[OpCall, Answer]]:
        """Every call of the chain that was made, with its answer. Calls are derived again here, from the job and the answers."""
        chain = TreeChain(job)
        names = ["draft_table", "best_first_tree", "tree_mask", "accept", "compact"]
        outcome = self._run(transport.TREE, job, len(names), lambda step: names[step] if 0 <= step < len(names) else "tree")
        made: list[tuple[OpCall, Answer]] = []
        for record in outcome.records:
            call = chain.next_call()
            if call is None:
                break
            found, fit = _answers_to([call], [record])
            answer = found[0] if fit else Answer(failure=Failure("crashed", f"{call.op} damaged the memory of the worker"))
            if not fit:
                self._bury()
            chain.take(answer)
            made.append((call, answer))
        failure = outcome.death or (Failure("crashed", "the worker's memory is damaged") if outcome.damaged else None)
        if failure is None:
            return made
        call = chain.next_call()
        if call is not None:
            made.append((call, Answer(failure=failure)))
        elif made:  # every call was answered, and the end came before the worker could say so
            made[-1] = (made[-1][0], Answer(failure=failure))
        return made

    # The worker's life

    def _start(self) -> Description:
        self._worker = _Worker(self._zygote, self._loading.environment, cold=self._cold)
        self.restarts += 1
        loading = Loading(self._loading.engine, self._loading.resolver, self._loading.weights, self._loading.environment, _path())
        outcome = self._job(self._worker, transport.LOAD, loading, 1, self._load_s, lambda step: "loading the engine")
        engine = self._loading.engine
        try:
            if outcome.death is not None:
                raise load_error(engine, outcome.death.message)
            meta = outcome.records[0][0]
            if "unknown" in meta:
                raise UnknownEngine(validate.text_of(meta["unknown"]))
            if "load_error" in meta:
                raise EngineLoadError(*map(validate.text_of, transport.checked(lambda: list(meta["load_error"])[:4])))
            if "error" in meta:
                raise load_error(engine, validate.text_of(meta["error"]))
            return validate.description(transport.unpack_description(transport.checked(lambda: meta["description"])))
        except (EngineLoadError, UnknownEngine):
            self._bury()
            raise
        except (TransportError, IndexError, TypeError, validate.Malformed) as problem:
            self._bury()
            raise load_error(engine, f"loading it damaged the worker: {problem}") from None

    def _run(self, kind: int, payload: object, steps: int, name: Callable[[int], str]) -> _Outcome:
        if self._worker is None:
            self._start()
        assert self._worker is not None
        first = self._cold and self._worker.jobs == 1
        large = isinstance(payload, Script) and is_large(payload.config)
        limit_s = LARGE_S if large else self.deadline.first_s if first else self.deadline.limit_s(KIND[kind])
        began = time.monotonic()
        outcome = self._job(self._worker, kind, payload, steps, limit_s, name)
        if outcome.death is None and not large:
            self.deadline.observe(KIND[kind], time.monotonic() - began)
        elif outcome.death is not None and outcome.death.kind == "hung" and not large:
            self.deadline.hung(KIND[kind])
        self._last = name(max(0, len(outcome.records) - 1))
        return outcome

    def _job(self, worker: _Worker, kind: int, payload: object, steps: int, limit_s: float, name: Callable[[int], str]) -> _Outcome:
        """Send one job and wait for its end."""
        if worker.ended():
            return _Outcome([], self._death(worker, f"between jobs, after {self._last}; next was {name(0)}", "died", limit_s))
        worker.send(kind, payload)
        opening_s = max(self.deadline.first_s, limit_s) if kind == transport.SCRIPT else limit_s
        end = worker.wait(steps, limit_s, opening_s)
        marks = worker.marks()
        ours = marks.job == worker.jobs
        try:
            records = transport.read_records(worker.records, marks.used) if ours else []
            damaged = not ours and (end == "done" or marks.job != worker.jobs - 1)  # the job before: it died before it began this one
        except TransportError:
            records, damaged = [], True
        if end != "done":
            step = marks.step if ours else 0
            return _Outcome(records, self._death(worker, f"in {name(step)}", end, opening_s if step == OPENING else limit_s), damaged)
        if marks.used > transport.RETURN_ABOVE:
            worker.records.release_pages()
            transport.set_canary(worker.records)
        if records and "retired" in records[-1][0]:
            self._bury()
            return _Outcome(records[:-1], None, damaged, retired=True)
        return _Outcome(records, None, damaged)

    def _death(self, worker: _Worker, where: str, end: str, limit_s: float) -> Failure:
        """Bury the worker and say how it ended; `end` is what `_Worker.wait` saw."""
        if end == "hung":
            worker.ask_for_stack()
        code = worker.end(self._zygote)
        self._worker = None
        number = 0
        if end == "hung":
            message = f"no answer for {limit_s:.3g} s {where}"
        elif end == "closed":
            message = f"the engine closed or overwrote the worker's channel {where}"
        elif code is None:
            message = f"the worker is lost {where}"
        elif code >= 0:
            message = f"the process ended with exit status {code} {where}"
        else:
            number = -code
            message = f"{_signal_name(number)} {where}"
            if number == signal.SIGKILL:
                message += " (not killed by us: did memory run out?)"
        printed = validate.text_of(worker.output.decode("utf-8", "backslashreplace").strip()[-validate.TEXT_MAX :])
        return Failure("hung" if end == "hung" else "crashed", f"{message}\n{printed}" if printed else message, number)

    def _bury(self) -> None:
        if self._worker is not None:
            self._worker.end(self._zygote)
            self._worker = None


def _chained(job: TreeJob, records: Iterator[Any]) -> list[tuple[OpCall, Answer]] | None:
    """The calls of one chain, derived again from its answers, which are taken from `records`; None where an answer does not fit."""
    chain = TreeChain(job)
    made: list[tuple[OpCall, Answer]] = []
    while (call := chain.next_call()) is not None:
        record = next(records, None)
        found, fit = _answers_to([call], [record] if record is not None else [])
        if not fit or not found:
            return None
        chain.take(found[0])
        made.append((call, found[0]))
    return made


class _Worker:
    """The supervisor's end of one worker process."""

    def __init__(self, zygote: Zygote, environment: Mapping[str, str], *, cold: bool) -> None:
        self.jobs = 0
        self.output = b""
        self.requests = Arena.create("paritree-requests")
        self.records = Arena.create("paritree-records")
        transport.set_canary(self.records)
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._printed, printed_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._printed, False)
        self._pidfd = -1
        try:
            descriptors = (theirs.fileno(), self.requests.descriptor, self.records.descriptor, printed_end)
            child = zygote.spawn(descriptors, environment, cold=cold)
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(printed_end)
        self.pid, self._pidfd = child.pid, child.pidfd
        self._channel_descriptor = self.channel.fileno()
        self._poller, self._end_poller = select.poll(), select.poll()
        self._end_poller.register(self._pidfd, select.POLLIN)
        for descriptor in (self._channel_descriptor, self._pidfd, self._printed):
            self._poller.register(descriptor, select.POLLIN)

    def send(self, kind: int, payload: object) -> None:
        """Hand over a job. A worker that is gone is noticed by `wait`."""
        self.jobs += 1
        self.output = b""
        write: Any = transport.write_calls if kind == transport.CALLS else transport.write_request
        size = write(self.requests, payload)
        self._sent_ns = time.monotonic_ns()
        with contextlib.suppress(OSError):
            self.channel.send(transport.REQUEST.pack(kind, self.jobs, size))

    def wait(self, steps: int, limit_s: float, opening_s: float) -> str:
        """ "done", "hung" (a step took longer than `limit_s`, opening a session longer than `opening_s`), "died" or "closed" (the channel)."""
        last_ns = self._sent_ns + int(1e9 * PATIENCE * (opening_s + limit_s * steps))  # holds even where the worker damages its marks
        left_s = limit_s
        while left_s > 0:
            ready = dict(self._poller.poll(math.ceil(1e3 * left_s)))
            if self._printed in ready:
                self._drain()
            if self._channel_descriptor in ready:
                end = self._hear()
                if end:
                    return end
            elif self._pidfd in ready:
                return "died"
            left_s = min(self._left_s(limit_s, opening_s), (last_ns - time.monotonic_ns()) / 1e9)
        return "hung"

    def _left_s(self, limit_s: float, opening_s: float) -> float:
        """Until the step in progress counts as hung."""
        marks, now_ns = self.marks(), time.monotonic_ns()
        believable = marks.job == self.jobs and self._sent_ns <= marks.began_ns <= now_ns
        took_s = (now_ns - (marks.began_ns if believable else self._sent_ns)) / 1e9
        step_s = opening_s if believable and marks.step == OPENING else limit_s
        if took_s >= step_s and self._starved():
            step_s *= PATIENCE
        return step_s - took_s

    def _starved(self) -> bool:
        """The worker's threads want to run and do not get to, so that the clock says nothing about them. A deadlock wants nothing."""
        before = self._scheduled()
        time.sleep(STARVED_LOOK_S)
        after = self._scheduled()
        ran, waited = (late - early for late, early in zip(after, before, strict=True))
        return waited > 0 and ran < STARVED_SHARE * (ran + waited)

    def _scheduled(self) -> tuple[int, int]:
        """Nanoseconds that all threads have run, and that they have waited for a core."""
        ran = waited = 0
        for thread in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):  # the thread has ended, or this kernel does not say
                of_thread = thread.read_text(encoding="ascii").split()
                ran, waited = ran + int(of_thread[0]), waited + int(of_thread[1])
        return ran, waited

    def marks(self) -> transport.Marks:
        return transport.read_marks(self.records)

    def ended(self) -> bool:
        """The process is gone."""
        return bool(self._end_poller.poll(0))

    def ask_for_stack(self) -> None:
        """Let a hung worker print where it is."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, STACK_SIGNAL)
            poller = select.poll()
            poller.register(self._printed, select.POLLIN)
            while poller.poll(STACK_WAIT_S * 1e3) and self._drain():
                continue

    def end(self, zygote: Zygote) -> int | None:
        """Kill what is left, and return the exit code (negative: a signal; None: it could not be had)."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        code = zygote.reap(self.pid)
        self._drain()
        self._close()
        return code

    def _hear(self) -> str:
        """One message of the channel: "done", "closed", or "" for an old one."""
        try:
            data = self.channel.recv(64, socket.MSG_DONTWAIT)
        except OSError:
            data = b""
        if len(data) == transport.DONE.size:
            (job,) = transport.DONE.unpack(data)
            if job == self.jobs:
                return "done"
            if job < self.jobs:
                return ""
        if not data and self._end_poller.poll(CLOSE_WAIT_S * 1e3):
            return "died"
        return "closed"

    def _drain(self) -> bool:
        """Take what the engine printed; False at the end of the pipe."""
        while True:
            try:
                data = os.read(self._printed, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                with contextlib.suppress(KeyError):
                    self._poller.unregister(self._printed)
                return False
            self.output = (self.output + data)[-OUTPUT_BYTES:]

    def _close(self) -> None:
        self.channel.close()
        self.requests.close()
        self.records.close()
        os.close(self._printed)
        if self._pidfd >= 0:
            os.close(self._pidfd)


def _path() -> tuple[str, ...]:
    return tuple(sys.path)


def _batch(calls: Sequence[OpCall]) -> Sequence[OpCall]:
    """As many of the first calls as share one round trip; at least one."""
    size = 0
    for count, call in enumerate(calls):
        size += sum(array.nbytes for array in call.inputs.values())
        if size > BATCH_BYTES and count:
            return calls[:count]
    return calls


def _name(calls: Sequence[OpCall], step: int) -> str:
    return calls[min(max(step, 0), len(calls) - 1)].op


def _answers_to(calls: Sequence[OpCall], records: Records) -> tuple[list[Answer], bool]:
    """The leading answers that have the outputs asked for, and whether that was all of them."""
    answers: list[Answer] = []
    for (meta, arrays), call in zip(records, calls, strict=False):
        try:
            answer = transport.unpack_answer(meta, arrays)
        except TransportError:
            return answers, False
        if answer.failure is None and not _fills(call, answer.outputs or {}):
            return answers, False
        answers.append(answer)
    return answers, True


def _fills(call: OpCall, outputs: Mapping[str, NDArray[Any]]) -> bool:
    """The outputs are exactly those that the call asked for."""
    if outputs.keys() != call.outputs.keys():
        return False
    return all(outputs[name].shape == shape and outputs[name].dtype == dtype for name, (shape, dtype) in call.outputs.items())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
