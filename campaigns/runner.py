"""Campaigns on one machine: shards over the cores, progress, the ladder, findings minimised, everything in the store.

The runner holds no engine and judges nothing. Each shard is a process of its own (campaigns.shard) that ends with the runner; a finding is
in the store before the runner hears of it, so that a kill of anything loses the running batch and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from oracles.judgement import FINDINGS, RUNGS
from reports.store import Store, StoreError
from spec.config import preset
from spec.weights import is_large

TRIALS = 10_000  # per engine; with the frozen mix 1,500 of them are sessions of at least 24 rows
MINIMISE_MAX = 12  # findings per engine and check: of a gross defect the first rungs show it, the rest are its consequences
MINIMISE_S = 60.0
MINIMISE_LEAST_S = 2.0  # with less a finding stays as it was met; the next campaign that meets it minimises it
MINIMISE_TAIL_S = 2.0  # to start two workers, locate the defect and write the capsule
THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # sizes are small: more threads are slower
CLOSE_S = 10.0
GRACE_S = 4.0  # behind `until`, for a loaded machine; then shards are killed, so that an engine that hangs does not hold a night up
CLOSING_S = 1.5  # for the last batch and to put a shard's rows in order


class NotLoadable(Exception):
    """The engine cannot be loaded; the message is the worker's."""


class ShardError(RuntimeError):
    """A shard ended with an error of ours; the message says which."""


@dataclass(frozen=True)
class Options:
    """`seconds`: of discovery per engine (None: until `trials`); `jobs`: shards (None: one per core).

    `until`: of time.monotonic(), which is one clock for all processes of a machine: discovery and minimising are cut to end by then.
    """

    store: str
    trials: int = TRIALS
    seconds: float | None = None
    jobs: int | None = None
    seed: int = 0
    hazards: bool = True
    checkpoint: str = ""
    preset: str = ""
    minimise: bool = True
    minimise_seconds: float = MINIMISE_S
    reserve: float = 0.0  # of `seconds`: a shard that met something new leaves them for minimising
    until: float = math.inf
    stop_at_first: bool = False
    purpose: str = "check"
    command: str = ""
    campaign: str = ""
    budget: str = ""
    commit: str = ""
    not_reproduced: tuple[str, ...] = ()  # findings whose stored case passed this time: met again, they are "changed"


@dataclass
class EngineResult:
    """One engine's part of a check."""

    engine: str
    trials: int = 0
    frozen: int = 0
    failing: int = 0
    seconds: float = 0.0
    by_kind: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, int] = field(default_factory=dict)  # of trials
    tallies: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)  # finding_id -> last event
    first_finding_s: float = -1.0
    nothing: str = ""
    not_loaded: str = ""  # why; set only where other engines of the check were verified

    @property
    def first_failing_rung(self) -> str:
        """The first rung of the ladder with a finding; empty where there is none."""
        for rung in RUNGS:
            if any(str(verdict) in self.tallies.get(rung, {}).get("verdicts", {}) for verdict in FINDINGS):
                return rung
        return ""

    @property
    def unverified_share(self) -> float:
        """Of the compared scalars."""
        unverified = sum(t["unverified"] for t in self.tallies.values())
        total = unverified + sum(t["checked"] for t in self.tallies.values())
        return unverified / total if total else 0.0

    @property
    def verified(self) -> int:
        """Scalars that were compared with a verdict other than UNVERIFIED."""
        return int(sum(t["checked"] for t in self.tallies.values()))

    def plain(self) -> dict[str, Any]:
        return {
            "engine": self.engine, "trials": self.trials, "frozen_mix_sessions": self.frozen, "failing_trials": self.failing, "seconds": round(self.seconds, 3),
            "by_kind": self.by_kind, "verdicts": self.verdicts, "ladder": self.tallies, "first_failing_rung": self.first_failing_rung, "checked": self.verified,
            "unverified_share": self.unverified_share, "findings": list(self.findings.values()), "nothing": self.nothing, "not_loaded": self.not_loaded,
        }  # fmt: skip


Progress = Callable[[str, Mapping[str, Any]], None]
"""(engine, event) -> None; events are those of campaigns.shard."""


def silent(engine: str, event: Mapping[str, Any]) -> None:
    """No progress."""


def check(engines: Sequence[str], options: Options, progress: Progress = silent) -> tuple[str, list[EngineResult]]:
    """(run_id, one result per engine). Raises NotLoadable, ShardError, StoreError; the run in the store says why it stopped.

    An engine that cannot be loaded keeps no other from being checked: NotLoadable only where none could be loaded.
    """
    with Store.create_or_open(options.store) as store:
        run_id = store.start_run(run_row(engines, options))
    results: list[EngineResult] = []
    stopped = "error"
    try:
        for engine in engines:
            results.append(loaded_or_not(engine, partial(check_engine, engine, run_id, options, progress), told(engines, progress)))
        refuse_nothing_loaded(results)
        stopped = "complete" if options.seconds is None else "budget"
    except KeyboardInterrupt:
        stopped = "interrupted"
        raise
    finally:
        with Store.create_or_open(options.store) as store:
            store.finish_run(run_id, {"stopped": stopped, "trials": sum(result.trials for result in results)})
    return run_id, results


def loaded_or_not(engine: str, run: Callable[[], EngineResult], progress: Progress) -> EngineResult:
    """What `run` gives; where the engine cannot be loaded, a result that says so."""
    try:
        return run()
    except NotLoadable as problem:
        progress(engine, {"event": "not loaded", "message": str(problem)})
        return EngineResult(engine, not_loaded=str(problem))


def told(engines: Sequence[str], progress: Progress) -> Progress:
    """Of an only engine that cannot be loaded the error tells; of one among several, `progress`."""
    return progress if len(engines) > 1 else silent


def refuse_nothing_loaded(results: Sequence[EngineResult]) -> None:
    """Raises NotLoadable where not one engine could be loaded."""
    if results and all(result.not_loaded for result in results):
        raise NotLoadable("; ".join(dict.fromkeys(result.not_loaded for result in results)))


def run_row(engines: Sequence[str], options: Options) -> dict[str, Any]:
    return {
        "purpose": options.purpose, "engines": [{"spec": engine} for engine in engines], "command": options.command, "seed": str(options.seed),
        "budget": options.budget or f"{options.trials} trials", "machine": machine(), "paritree": _version(), "commit": options.commit,
        **({"campaign": options.campaign} if options.campaign else {}),
    }  # fmt: skip


def check_engine(engine: str, run_id: str, options: Options, progress: Progress = silent) -> EngineResult:
    """Discovery on all shards; the new findings are minimised one by one, each on whichever shard is done with its part."""
    options = fitted(options)
    count = options.jobs or os.cpu_count() or 1
    began = time.monotonic()
    result = EngineResult(engine)
    waiting: list[dict[str, Any]] = []
    handed_out = 0
    with Shards(count) as shards:
        quota, rest = divmod(options.trials, count)
        for number in range(count):
            shards.send(number, {
                "do": "discover", "engine": engine, "store": options.store, "run_id": run_id, "writer": f"{safe(engine)}-{number}",
                "trials": quota + (number < rest), "seconds": options.seconds, "until": options.until - CLOSING_S, "reserve": options.reserve, "seed": options.seed * 1_000_003 + number,
                "hazards": options.hazards, "checkpoint": options.checkpoint, "preset": options.preset, "stop_at_first": options.stop_at_first,
                "not_reproduced": options.not_reproduced,
            })  # fmt: skip
        progress_of: dict[int, Mapping[str, Any]] = {}

        def minimise_next(number: int) -> bool:
            """Hand the shard the finding on the lowest rung that waits, as long as there is time."""
            nonlocal handed_out
            left = options.until - time.monotonic() - MINIMISE_TAIL_S
            if not options.minimise or not waiting or handed_out == MINIMISE_MAX or left < MINIMISE_LEAST_S:
                return False
            event = min(waiting, key=_rung_first)
            waiting.remove(event)
            handed_out += 1
            shards.send(number, {
                "do": "minimise", "engine": engine, "store": options.store, "run_id": run_id, "hazards": options.hazards, "checkpoint": options.checkpoint,
                "preset": options.preset, "seconds": min(options.minimise_seconds, left),
                **{key: event[key] for key in ("finding_id", "fingerprint", "case", "choices", "kind", "size", "history")},
            })  # fmt: skip
            return True

        counted: set[int] = set()
        for number, event in shards.events(set(range(count)), options.until + GRACE_S):
            kind = event["event"]
            if kind == "progress":
                progress_of[number] = event
                progress(
                    engine,
                    {
                        "event": "progress",
                        **{key: sum(int(e[key]) for e in progress_of.values()) for key in ("trials", "frozen", "failing")},
                    },
                )
            elif kind == "finding":
                held = result.findings.get(event["finding_id"])
                if held is None:
                    progress(engine, event)
                if held is None or (event["note"] == "" and held["note"] != ""):  # now it has a case that fails on its own
                    result.findings[event["finding_id"]] = dict(event)
                    waiting = [other for other in waiting if other["finding_id"] != event["finding_id"]]
                    if event["minimise"]:
                        waiting.append(event)
                        for free in shards.free[:1]:
                            minimise_next(free)
            elif kind == "minimised":
                result.findings[event["finding_id"]] |= event | {"event": "finding"}
                progress(engine, event)
            elif kind == "discovered":
                _merge(result, event)
                counted.add(number)
                result.seconds = time.monotonic() - began
            elif kind == "nothing":
                result.nothing = event["reason"]
            if kind in ("discovered", "nothing", "minimised") and not minimise_next(number):
                shards.idle(number)
        for number in shards.cut - counted:  # its verdicts are in the store; of these counts the last ones that it told
            for name in ("trials", "frozen", "failing"):
                setattr(result, name, getattr(result, name) + int(progress_of.get(number, {}).get(name, 0)))
            result.seconds = time.monotonic() - began
    return result


def _rung_first(event: Mapping[str, Any]) -> tuple[int, bool]:
    order = {rung: index for index, rung in enumerate(RUNGS)}
    return order.get(event["fingerprint"][4], len(order)), event["kind"] != "op"


def fitted(options: Options) -> Options:
    """A layer in full width: one session on one core, unless less than the usual number of trials is asked for; and no shrinking, which
    would take hours for a case that is the smallest already."""
    if not options.preset or not is_large(preset(options.preset)):
        return options
    trials = options.trials if options.trials < TRIALS else 1
    return dataclasses.replace(options, trials=trials, jobs=1, minimise=False)


def _merge(result: EngineResult, event: Mapping[str, Any]) -> None:
    for name in ("trials", "frozen", "failing"):
        setattr(result, name, getattr(result, name) + int(event[name]))
    for sums, counts in ((result.by_kind, event["by_kind"]), (result.verdicts, event["verdicts"])):
        for name, trials in counts.items():
            sums[name] = sums.get(name, 0) + trials
    for rung in RUNGS:
        if rung in event["tallies"]:
            part = event["tallies"][rung]
            whole = result.tallies.setdefault(rung, {"judgements": 0, "checked": 0, "unverified": 0, "verdicts": {}})
            for name in ("judgements", "checked", "unverified"):
                whole[name] += part[name]
            for verdict, trials in part["verdicts"].items():
                whole["verdicts"][verdict] = whole["verdicts"].get(verdict, 0) + trials
    if event["first_finding_s"] >= 0 and (result.first_finding_s < 0 or event["first_finding_s"] < result.first_finding_s):
        result.first_finding_s = event["first_finding_s"]


class Shards:
    """Shard processes and their event streams; all end when this closes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.cut: set[int] = set()
        self._busy: set[int] = set()
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, **THREADS, "PYTHONPATH": path}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "campaigns.shard"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env=environment,
                process_group=0,  # Ctrl-C on a terminal reaches the runner alone, which ends them
            )
            for _ in range(count)
        ]

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):  # it has ended already
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(0.1 if kind is not None else CLOSE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def send(self, number: int, job: Mapping[str, Any]) -> None:
        stdin = self._processes[number].stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # it has ended: its last event, or its exit code, says why
            stdin.write(json.dumps(job) + "\n")
            stdin.flush()
        self._busy.add(number)

    @property
    def free(self) -> list[int]:
        """Shards that have no job."""
        return [number for number in range(self.count) if number not in self._busy]

    def idle(self, number: int) -> None:
        self._busy.discard(number)

    def events(self, busy: set[int], until: float = math.inf) -> Iterator[tuple[int, dict[str, Any]]]:
        """(shard, event) until no shard is busy. Raises NotLoadable, StoreError, or ShardError when a shard ends in the middle of a job.

        `until`: of time.monotonic(); shards that are busy then (an engine that hangs, or loads for long) are killed and named in `cut`. What they
        found is in the store.
        """
        self._busy = set(busy)
        buffers: dict[int, bytes] = {}
        while self._busy:
            if (left := until - time.monotonic()) <= 0:
                for number in self._busy:
                    self._processes[number].kill()
                self.cut |= self._busy
                self._busy = set()
                return
            files = {self._file(number): number for number in self._busy}
            for descriptor in select.select(list(files), [], [], min(1.0, left))[0]:
                number = files[descriptor]
                data = os.read(descriptor, 1 << 20)
                if not data:
                    code = self._processes[number].wait()
                    raise ShardError(f"shard {number} ended with exit status {code} in the middle of a job; its last lines are above")
                *lines, buffers[number] = (buffers.get(number, b"") + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["event"] == "not loadable":
                        raise NotLoadable(event["message"])
                    if event["event"] == "store":
                        raise StoreError(*event["problem"])
                    if event["event"] == "error":
                        raise ShardError(event["message"])
                    yield number, event

    def _file(self, number: int) -> int:
        stdout = self._processes[number].stdout
        assert stdout is not None
        return stdout.fileno()


def safe(engine: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in os.path.basename(engine))


def _version() -> str:
    try:
        return version("paritree")
    except PackageNotFoundError:
        return "not installed"


def machine() -> str:
    """Processor, cores and system in words."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
