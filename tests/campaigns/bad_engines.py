"""Engines that misbehave in every way that an engine can, for the tests of the isolation. Loaded in workers as "bad_engines:Name".

Each does one thing wrong and `add` right otherwise, so that a test can see that the calls around the bad one survive.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from campaigns.isolation.chain import RECORDS
from spec.config import Config
from spec.engine import Description, Drafter, Generation, Limits, Profile, Round, Rows, Unsupported
from spec.taps import all_tap_names

ALL = frozenset({"run_op", "forward", "taps", "commit", "cache_rows", "fork", "evict", "generate"})


class Adder:
    """A right engine with one operation; the misbehaviour of the others happens for the parameter `trigger`."""

    def describe(self) -> Description:
        return Description(type(self).__name__, "1", capabilities=frozenset({"run_op"}), ops=frozenset({"add"}))

    def run_op(self, op: str, inputs: Mapping[str, Any], params: Mapping[str, Any], outputs: Any) -> Any:
        if op != "add":
            raise Unsupported(f"no {op}")
        np.add(inputs["a"], inputs["b"], out=outputs["out"])
        if params.get("trigger"):
            return self.misbehave(inputs, outputs)
        return None

    def misbehave(self, inputs: Any, outputs: Any) -> Any:
        return None


class Segfault(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        ctypes.string_at(0)


class Abort(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        os.write(2, b"terminate called after throwing an instance of 'int'\n")
        os.abort()


class Hang(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        while True:
            time.sleep(1)


class DeafHang(Adder):
    """Hangs with every signal blocked."""

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            time.sleep(1)


class ExitZero(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        os._exit(0)


class SystemExits(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        sys.exit("I am done")


class Interrupts(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        raise KeyboardInterrupt


class Prints(Adder):
    """More than a pipe holds, to both streams, with bytes that are no text."""

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        os.write(1, b"\xff\xfe\x00garbage\n" * 100_000)
        print("{} \x1b[31m" * 1000)
        sys.stderr.write("\udcff" * 10)


class ClosesEverything(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        os.closerange(0, 1000)


class WritesEverywhere(Adder):
    """Garbage into every open descriptor, its own control channel included."""

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b"12345678" * 2)
            except OSError:
                continue
        time.sleep(60)


class Forks(Adder):
    """Returns in two processes."""

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        os.fork()


class LeavesProcess(Adder):
    """Starts a process that outlives the call and keeps all descriptors."""

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)


class LeavesDaemon(Adder):
    """The same, in a session of its own."""

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)


class LateCrash(Adder):
    """Answers, and crashes when nobody is looking."""

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSEGV)).start()


class StickyError(Adder):
    """After the first error every call of the process fails, as on a GPU."""

    broken = False

    def run_op(self, op: str, inputs: Mapping[str, Any], params: Mapping[str, Any], outputs: Any) -> Any:
        self.broken = self.broken or bool(params["trigger"])
        if self.broken:
            raise RuntimeError("CUDA error 700: an illegal memory access was encountered")
        return super().run_op(op, inputs, params, outputs)


class Slow(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        time.sleep(1.0)


class Spins(Adder):
    """Hangs at full speed."""

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        while True:
            pass


class LeaksDescriptors(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        try:
            while True:
                os.dup(2)
        except OSError:
            return


class LeaksMemory(Adder):
    def __init__(self) -> None:
        self.leaked: list[Any] = []

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        self.leaked.append(np.ones(1 << 18))


class Recurses(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> Any:
        return self.misbehave(inputs, outputs)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text for you")


class RaisesUnprintable(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        raise UnprintableError


class RaisesSurrogates(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        raise RuntimeError("\udc80\x00" + "long" * 100_000)


class WritesPastEnd(Adder):
    """One element after the output, by its address."""

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        out = outputs["out"]
        ctypes.memset(out.ctypes.data + out.nbytes, 0, 4)


class WritesBeforeStart(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        ctypes.memset(outputs["out"].ctypes.data - 2, 0, 1)


class ReadsFarPastEnd(Adder):
    """A vector load after the last row; the value is not used."""

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        a = inputs["a"]
        ctypes.string_at(a.ctypes.data + a.nbytes, 64)


class WritesInput(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        ctypes.memset(inputs["a"].ctypes.data, 0xFF, 4)


class ReplacesOutput(Adder):
    def misbehave(self, inputs: Any, outputs: Any) -> None:
        outputs["out"] = inputs["a"] + inputs["b"]


class ReadsPastEnd(Adder):
    """Adds the element after its first input to the first result; harmless where zeros lie there."""

    def run_op(self, op: str, inputs: Mapping[str, Any], params: Mapping[str, Any], outputs: Any) -> None:
        a = inputs["a"]
        np.add(a, inputs["b"], out=outputs["out"])
        outputs["out"].flat[0] += ctypes.c_float.from_address(a.ctypes.data + a.nbytes).value


class IgnoresStrides(Adder):
    """Reads its input as if it were contiguous (K03, K04)."""

    def run_op(self, op: str, inputs: Mapping[str, Any], params: Mapping[str, Any], outputs: Any) -> None:
        a = inputs["a"]
        flat = np.ctypeslib.as_array(ctypes.cast(a.ctypes.data, ctypes.POINTER(ctypes.c_float)), (a.size,))
        np.add(flat.reshape(a.shape), inputs["b"], out=outputs["out"])


class KeepsReference(Adder):
    """Reads its first caller's array at every call, as an engine does that caches an operand by reference (K06, K11)."""

    kept: Any = None

    def run_op(self, op: str, inputs: Mapping[str, Any], params: Mapping[str, Any], outputs: Any) -> None:
        self.kept = inputs["a"] if self.kept is None else self.kept
        np.add(self.kept, inputs["b"], out=outputs["out"])


class Counts(Adder):
    """Another answer at every call."""

    calls = 0

    def run_op(self, op: str, inputs: Mapping[str, Any], params: Mapping[str, Any], outputs: Any) -> None:
        self.calls += 1
        outputs["out"][...] = self.calls


class Pid(Adder):
    """Answers its process id and the number of threads that OpenMP may use."""

    def run_op(self, op: str, inputs: Mapping[str, Any], params: Mapping[str, Any], outputs: Any) -> None:
        outputs["out"][...] = [os.getpid(), int(os.environ["OMP_NUM_THREADS"])]


def damage_records() -> None:
    """Overwrite every shared mapping that this process may write: what a stray pointer of an engine could do."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            if "paritree-records" in line and " rw-s " in line:
                start, stop = (int(word, 16) for word in line.split()[0].split("-"))
                ctypes.memset(start, 0x41, min(stop - start, 1 << 16))


class DamagesRecords(Adder):
    """Leaves the worker's answers in ruins, in every kind of job."""

    def misbehave(self, inputs: Any, outputs: Any) -> None:
        damage_records()

    def run_op(self, op: str, inputs: Mapping[str, Any], params: Mapping[str, Any], outputs: Any) -> Any:
        if op == "draft_table":
            damage_records()
        return super().run_op(op, inputs, params, outputs)

    def open(self, config: Config, weights: Any) -> Any:
        damage_records()
        raise RuntimeError


# Engines that cannot be loaded


class LoadRaises:
    def __init__(self) -> None:
        raise OSError("libengine.so: undefined symbol: pt_open")


class LoadSegfaults:
    def __init__(self) -> None:
        ctypes.string_at(0)


class LoadHangs:
    def __init__(self) -> None:
        time.sleep(600)


class DescribesNothing:
    def describe(self) -> Any:
        return None


class DescribesOddProfile:
    def describe(self) -> Any:
        return Description("odd", "1", Profile(u_accumulate=float("nan")))


class DescribesOddOperation:
    def describe(self) -> Any:
        return Description("odd", "1", Profile(per_op=(("matmul", "u_input", "half"),)))


# Sessions


class SessionEngine:
    """A toy model: logits are token ids and positions, the cache holds tokens. Sequences, pending rows and commits are real."""

    session: type[ToySession]

    def describe(self) -> Description:
        return Description(type(self).__name__, "1", capabilities=ALL, taps=frozenset(all_tap_names()))

    def open(self, config: Config, weights: Any) -> Any:
        return self.session(config, weights)


class ToySession:
    """Rows of sequence s: committed in `kept[s]`, pending in `pending[s]`."""

    def __init__(self, config: Config, weights: Any) -> None:
        self.config = config
        self.weight = float(weights("norm")[0])
        self.kept: dict[int, list[int]] = {}
        self.pending: dict[int, list[int]] = {}
        self.forwards = 0

    def forward(self, rows: Rows, want_logits: Any, taps: frozenset[str], sink: Any) -> Any:
        self.forwards += 1
        for sequence, token in zip(rows.sequence.tolist(), rows.token.tolist(), strict=True):
            self.pending.setdefault(sequence, []).append(token)
        if "embed" in taps:
            sink("embed", -1, np.repeat(rows.token[:, None], self.config.hidden, 1).astype(np.float32))
        logits = np.zeros((len(rows), self.config.vocab), np.float32)
        logits[np.arange(len(rows)), (rows.token + rows.position) % self.config.vocab] = self.weight
        return logits[want_logits]

    def commit(self, sequence: int, path: Any) -> None:
        pending = self.pending.pop(sequence)
        self.kept.setdefault(sequence, []).extend(pending[int(i)] for i in path)

    def cache_rows(self, sequence: int, layer: int) -> Any:
        return np.repeat(np.array(self.kept.get(sequence, []), np.float32)[:, None], self.config.cache_dim, 1)

    def evict(self, sequence: int) -> None:
        self.kept.pop(sequence, None)
        self.pending.pop(sequence, None)

    def fork(self, source: int, target: int) -> None:
        self.kept[target] = list(self.kept[source])

    def generate(self, prompts: Sequence[Any], drafter: Drafter | None, budget: int, limits: Limits) -> Any:
        return [Generation(tuple(int(p[-1]) for _ in range(limits.max_new)), (Round((1,), (-1,), (0,), 2),)) for p in prompts]

    def close(self) -> None:
        return None


class Toy(SessionEngine):
    session = ToySession


def session_engine(name: str, **methods: Any) -> type[SessionEngine]:
    """A toy engine whose session has other methods."""
    return type(name, (SessionEngine,), {"session": type(name + "Session", (ToySession,), methods)})


LogitsNone = session_engine("LogitsNone", forward=lambda self, *_: None)
LogitsDouble = session_engine("LogitsDouble", forward=lambda self, *args: ToySession.forward(self, *args).astype(np.float64))
LogitsWide = session_engine("LogitsWide", forward=lambda self, *args: np.zeros((1, 3), np.float32))
ForwardRaises = session_engine("ForwardRaises", forward=lambda self, *_: 1 // 0)
NoEvict = session_engine("NoEvict", evict=property(lambda self: (_ for _ in ()).throw(Unsupported("no evict"))))
CacheRagged = session_engine(
    "CacheRagged", cache_rows=lambda self, sequence, layer: np.zeros((layer + 1, self.config.cache_dim), np.float32)
)
NoGenerate = session_engine("NoGenerate", generate=property(lambda self: (_ for _ in ()).throw(Unsupported("no loop"))))
TokenMinusOne = session_engine("TokenMinusOne", generate=lambda self, prompts, *_: [Generation((3, -1))] * len(prompts))
TokenFloat = session_engine("TokenFloat", generate=lambda self, prompts, *_: [Generation((1.5,))] * len(prompts))  # type: ignore[arg-type]
TokenTrue = session_engine("TokenTrue", generate=lambda self, prompts, *_: [Generation((True,))] * len(prompts))
TooFew = session_engine("TooFew", generate=lambda self, prompts, *_: [])
GeneratesNone = session_engine("GeneratesNone", generate=lambda self, *_: None)
Endless = session_engine("Endless", generate=lambda self, prompts, *_: [Generation((1,) * 100_000)] * len(prompts))
NumpyTokens = session_engine(
    "NumpyTokens",
    generate=lambda self, prompts, *_: [Generation(np.array([1, 2], np.int64), ())] * len(prompts),  # type: ignore[arg-type]
)


class Stateful(SessionEngine):
    """Logits that depend on how often the session was used: a stale buffer."""

    class session(ToySession):
        def forward(self, *args: Any) -> Any:
            return ToySession.forward(self, *args) + np.float32(self.forwards)


class BadTaps(SessionEngine):
    """One of each: unknown name, wrong layer, wrong shape, given twice."""

    class session(ToySession):
        def forward(self, rows: Rows, want_logits: Any, taps: frozenset[str], sink: Any) -> Any:
            kind = int(rows.token[0])
            good = np.zeros((len(rows), self.config.hidden), np.float32)
            if kind == 0:
                sink("no_such_tap", 0, good)
            elif kind == 1:
                sink("embed", 7, good)
            elif kind == 2:
                sink("embed", -1, good[:, :3])
            elif kind == 3:
                sink("embed", -1, good)
                sink("embed", -1, good)
            elif kind == 4:
                sink("embed", -1, None)
            return np.zeros((int(want_logits.sum()), self.config.vocab), np.float32)


class CrashAtThird(SessionEngine):
    """The third forward pass of a session segfaults."""

    class session(ToySession):
        def forward(self, *args: Any) -> Any:
            if self.forwards == 2:
                ctypes.string_at(0)
            return ToySession.forward(self, *args)


class OpensSlowly(SessionEngine):
    """Opening takes longer than a step may."""

    session = ToySession

    def open(self, config: Config, weights: Any) -> Any:
        time.sleep(1.0)
        return super().open(config, weights)


class AsksForMore(SessionEngine):
    """Wants a weight that no configuration has."""

    def open(self, config: Config, weights: Any) -> Any:
        return weights("no_such_weight")


# Trees


class GoldenTree:
    """The golden tree operations, with `spoil` between them and the caller."""

    def describe(self) -> Description:
        return Description(type(self).__name__, "1", capabilities=frozenset({"run_op"}), ops=frozenset(RECORDS))

    def run_op(self, op: str, inputs: Mapping[str, Any], params: Mapping[str, Any], outputs: Any) -> None:
        found = RECORDS[op].function(inputs, params)
        self.spoil(op, found)
        for name, value in found.items():
            outputs[name][...] = value

    def spoil(self, op: str, found: dict[str, Any]) -> None:
        return None


class NoTable(GoldenTree):
    def spoil(self, op: str, found: dict[str, Any]) -> None:
        if op == "draft_table":
            raise Unsupported("no table")


class TreeCrashes(GoldenTree):
    def spoil(self, op: str, found: dict[str, Any]) -> None:
        if op == "tree_mask":
            ctypes.string_at(0)


class TreeRaises(GoldenTree):
    def spoil(self, op: str, found: dict[str, Any]) -> None:
        if op == "tree_mask":
            raise RuntimeError("no mask today")


class TreeCountTooLarge(GoldenTree):
    def spoil(self, op: str, found: dict[str, Any]) -> None:
        if op == "best_first_tree":
            found["count"] = np.array([1000], np.int32)


class TreeNotClosed(GoldenTree):
    def spoil(self, op: str, found: dict[str, Any]) -> None:
        if op == "best_first_tree":
            found["parents"][1] = 4


class TreePathDown(GoldenTree):
    def spoil(self, op: str, found: dict[str, Any]) -> None:
        if op == "accept":
            found["path"], found["length"] = found["path"][::-1], np.array([len(found["path"])], np.int32)
