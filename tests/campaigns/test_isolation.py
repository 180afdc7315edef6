"""Whatever an engine does is an answer; the calls around it survive, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bad_engines
import numpy as np
import psutil
import pytest

from campaigns.isolation import EngineLoadError, InProcess, IsolationError, Supervisor, TreeJob, UnknownEngine, Zygote, transport
from campaigns.isolation.chain import TreeChain, target_ids
from campaigns.isolation.deadline import Deadline
from campaigns.isolation.transport import Arena, RecordWriter, TransportError, read_marks, read_records
from spec.config import preset
from spec.engine import Limits, Rows
from spec.script import Answer, CacheRows, Commit, Evict, Fork, Forward, Generate, OpCall, Script, Trace, WeightsKey

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers need memfd and pidfd")

INSTANCE = "campaigns.isolation.worker:instance"
PATIENT_S = 60.0  # for what must answer: far above any stall of a busy machine
SHORT_S = 0.5  # for what must hang: the test waits this long
GONE_S = 20.0  # for a killed process to disappear from the process table
TINY = preset("tiny")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as shared:
        yield shared


def supervisor(name: str, zygote: Zygote | None, deadline_s: float = PATIENT_S, **options: Any) -> Supervisor:
    return Supervisor(f"bad_engines:{name}", deadline_s=deadline_s, resolver=INSTANCE, zygote=zygote, **options)


def add_call(trigger: int = 0, count: int = 4, *active: str) -> OpCall:
    a = np.arange(count, dtype=np.float32)[None]
    return OpCall("add", {"a": a, "b": a + 1}, {"trigger": trigger}, {"out": ((1, count), "float32")}, frozenset(active))


def is_right(answer: Answer) -> bool:
    return answer.failure is None and answer.outputs is not None and answer.outputs["out"].tolist() == [[1.0, 3.0, 5.0, 7.0]]


def gone(pid: int) -> bool:
    """The process ends within reason. A zombie that its parent has not looked at yet has ended."""
    limit = time.monotonic() + GONE_S
    while time.monotonic() < limit:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


# One bad call among good ones: (engine, kind, signal, part of the message)

BAD = [
    ("Segfault", "crashed", signal.SIGSEGV, "SIGSEGV in add"),
    ("Abort", "crashed", signal.SIGABRT, "terminate called after throwing"),
    ("ExitZero", "crashed", 0, "the process ended with exit status 0 in add"),
    ("Hang", "hung", 0, "no answer for 0.5 s in add"),
    ("DeafHang", "hung", 0, "no answer for 0.5 s in add"),
    ("Spins", "hung", 0, "no answer for 0.5 s in add"),
    ("ClosesEverything", "crashed", 0, "in add"),
    ("WritesEverywhere", "crashed", 0, "in add"),
    ("SystemExits", "raised", 0, "SystemExit: I am done (bad_engines.py:"),
    ("Interrupts", "raised", 0, "KeyboardInterrupt"),
    ("Recurses", "raised", 0, "RecursionError"),
    ("RaisesUnprintable", "raised", 0, "whose text raises ValueError"),
    ("RaisesSurrogates", "raised", 0, "RuntimeError: \\udc80\\x00long"),
    ("WritesPastEnd", "malformed", 0, "add wrote outside output 'out': byte 0 past its end"),
    ("WritesBeforeStart", "malformed", 0, "add wrote outside output 'out': byte 2 before its start"),
    ("WritesInput", "malformed", 0, "add changed its input 'a'"),
    ("ReplacesOutput", "malformed", 0, "add replaced output 'out'"),
]


@pytest.mark.parametrize(("engine", "kind", "number", "text"), BAD, ids=[bad[0] for bad in BAD])
def test_one_bad_call_is_named_and_its_neighbours_are_answered(zygote: Zygote, engine: str, kind: str, number: int, text: str) -> None:
    with supervisor(engine, zygote, SHORT_S if kind == "hung" else PATIENT_S) as isolated:
        answers = isolated.calls([add_call(), add_call(1), add_call(), add_call()])
    assert [is_right(answer) for answer in answers] == [True, False, True, True]
    failure = answers[1].failure
    assert failure is not None
    assert (failure.kind, failure.signal) == (kind, number)
    assert text in failure.message and len(failure.message) < 5000


@pytest.mark.parametrize("engine", ["Prints", "Forks", "LeavesProcess", "LeavesDaemon", "LeaksDescriptors", "LeaksMemory"])
def test_bad_manners_spoil_no_answer(zygote: Zygote, engine: str) -> None:
    with supervisor(engine, zygote) as isolated:
        for _ in range(3):
            assert all(map(is_right, isolated.calls([add_call(), add_call(1), add_call()])))
        assert isolated.restarts == 1


def test_a_hang_says_where_it_hangs(zygote: Zygote) -> None:
    with supervisor("Hang", zygote, SHORT_S) as isolated:
        failure = isolated.calls([add_call(1)])[0].failure
    assert failure is not None and "in misbehave" in failure.message


def test_a_crash_after_the_answer_is_charged_to_the_gap_between_jobs(zygote: Zygote) -> None:
    with supervisor("LateCrash", zygote) as isolated:
        assert is_right(isolated.calls([add_call(1)])[0])
        assert isolated.pid is not None and gone(isolated.pid)
        failure = isolated.calls([add_call()])[0].failure
        assert failure is not None and failure.kind == "crashed" and failure.signal == signal.SIGSEGV
        assert "SIGSEGV between jobs, after add; next was add" in failure.message
        assert is_right(isolated.calls([add_call()])[0])


def test_an_error_that_sticks_to_the_process_is_charged_to_the_first_call_only(zygote: Zygote) -> None:
    with supervisor("StickyError", zygote) as isolated:
        answers = isolated.calls([add_call(), add_call(1), add_call(), add_call(1), add_call()])
        assert [is_right(answer) for answer in answers] == [True, False, True, False, True]
        assert answers[1].failure is not None and answers[1].failure.kind == "raised"
        assert isolated.restarts == 3


def test_a_read_past_an_input_is_seen_at_a_fence_only(zygote: Zygote) -> None:
    with supervisor("ReadsFarPastEnd", zygote) as isolated:
        plain, fenced, after = isolated.calls([add_call(1), add_call(1, 4, "fence"), add_call()])
    assert is_right(plain) and is_right(after)
    assert fenced.failure is not None and fenced.failure.signal == signal.SIGSEGV


def test_a_worker_that_the_machine_starves_gets_more_time(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    with supervisor("Slow", zygote, SHORT_S) as isolated:
        assert isolated.calls([add_call(1)])[0].failure is not None
        isolated.calls([add_call()])
        worker = isolated._worker
        assert worker is not None
        looks = iter([(0, 0), (1, 10)])  # 1 ns run, 10 ns waited for a core
        monkeypatch.setattr(worker, "_scheduled", lambda: next(looks))
        assert is_right(isolated.calls([add_call(1)])[0])


def test_an_operation_that_is_not_offered_is_unsupported(zygote: Zygote) -> None:
    with supervisor("Adder", zygote) as isolated:
        failure = isolated.calls([OpCall("rope", {}, {}, {})])[0].failure
    assert failure is not None and (failure.kind, failure.message) == ("unsupported", "no rope")


def test_isolated_and_in_process_answers_are_equal(zygote: Zygote) -> None:
    calls = [add_call(0, count, *active) for count in (0, 1, 5, 1000) for active in ((), ("views", "freed", "poison", "guard", "repeat"))]
    with supervisor("Adder", zygote) as isolated, InProcess(bad_engines.Adder()) as inside:
        assert isolated.description == inside.description
        for ours, theirs in zip(isolated.calls(calls), inside.calls(calls), strict=True):
            assert ours.failure is None and theirs.failure is None
            assert ours.outputs["out"].tobytes() == theirs.outputs["out"].tobytes()
            assert ours.outputs["out"].shape == theirs.outputs["out"].shape


def test_arrays_larger_than_the_arena_make_it_grow(zygote: Zygote) -> None:
    with supervisor("Adder", zygote) as isolated:
        for count in (1 << 20, 4, 5 << 20, 4):  # 20 MiB: beyond what is kept between jobs
            answer = isolated.calls([add_call(0, count)])[0]
            assert answer.outputs is not None
            assert np.array_equal(answer.outputs["out"][0], 2 * np.arange(count, dtype=np.float32) + 1)


def test_strided_and_odd_inputs_arrive_as_they_are(zygote: Zygote) -> None:
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)
    call = OpCall("add", {"a": wide[:, ::2], "b": wide.T[:3, :].T}, {"trigger": np.int64(0)}, {"out": ((4, 3), "float32")})  # type: ignore[dict-item]
    with supervisor("Adder", zygote) as isolated:
        answer = isolated.calls([call])[0]
    assert answer.outputs is not None and np.array_equal(answer.outputs["out"], wide[:, ::2] + wide[:, :3])


def test_a_restart_is_a_new_process_and_loses_the_state(zygote: Zygote) -> None:
    with supervisor("Counts", zygote) as isolated:
        values = [isolated.calls([add_call()])[0].outputs["out"][0, 0] for _ in range(2)]
        before = isolated.pid
        isolated.restart()
        values.append(isolated.calls([add_call()])[0].outputs["out"][0, 0])
        assert values == [1, 2, 1]
        assert isolated.pid != before and before is not None and gone(before)


def test_the_environment_of_a_worker_is_its_own(zygote: Zygote) -> None:
    with supervisor("Pid", zygote, environment={"OMP_NUM_THREADS": "3"}) as isolated:
        pid, threads = isolated.calls([add_call(0, 2)])[0].outputs["out"][0].tolist()
        assert (pid, threads) == (isolated.pid, 3)
    assert os.environ.get("OMP_NUM_THREADS") != "3"


def test_a_cold_worker_is_a_new_interpreter_with_the_same_verdicts(zygote: Zygote) -> None:
    with supervisor("Segfault", zygote, cold=True, environment={"FROM_BIRTH": "1"}) as isolated:
        assert isolated.pid is not None
        assert "cold_worker" in " ".join(psutil.Process(isolated.pid).cmdline())
        assert psutil.Process(isolated.pid).environ()["FROM_BIRTH"] == "1"  # what a preloaded sanitizer needs
        answers = isolated.calls([add_call(), add_call(1), add_call()])
    assert [is_right(answer) for answer in answers] == [True, False, True]
    assert answers[1].failure is not None and answers[1].failure.signal == signal.SIGSEGV


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("LoadRaises", "bad_engines:LoadRaises: OSError: libengine.so: undefined symbol: pt_open"),
        ("LoadSegfaults", "SIGSEGV in loading the engine"),
        ("LoadHangs", "no answer for 0.5 s in loading the engine"),
        ("DescribesNothing", "describe() returned a NoneType, but must return a spec.engine.Description"),
        ("DescribesOddProfile", "profile.u_accumulate is 'nan'"),
        ("DescribesOddOperation", "profile.per_op of matmul, u_input, is 'half'"),
        ("NoSuchEngine", "AttributeError"),
    ],
)
def test_an_engine_that_cannot_be_loaded_says_why(zygote: Zygote, engine: str, text: str) -> None:
    with pytest.raises(EngineLoadError) as caught:
        supervisor(engine, zygote, load_s=SHORT_S if engine == "LoadHangs" else PATIENT_S)
    assert text in str(caught.value)


def test_the_registry_is_the_default_resolver_and_its_errors_come_through(zygote: Zygote) -> None:
    with Supervisor("golden", deadline_s=PATIENT_S, zygote=zygote) as isolated:
        assert isolated.description.name == "golden"
    with pytest.raises(UnknownEngine, match="did you mean 'golden'"):
        Supervisor("goldn", deadline_s=PATIENT_S, zygote=zygote)
    with pytest.raises(EngineLoadError) as caught:
        Supervisor("./no/such/library.so", deadline_s=PATIENT_S, zygote=zygote)
    assert caught.value.path == "./no/such/library.so" and caught.value.remedy


# Nothing is left behind


def test_many_restarts_leak_neither_descriptors_nor_processes(zygote: Zygote) -> None:
    with supervisor("Segfault", zygote) as isolated:
        isolated.calls([add_call(1)])
        us, parent = psutil.Process(), psutil.Process(psutil.Process(isolated_pid(isolated)).ppid())
        before = (us.num_fds(), parent.num_fds(), len(parent.children(recursive=True)))
        for _ in range(25):
            isolated.calls([add_call(1)])
        isolated.restart()
        isolated.calls([add_call(1)])
        isolated_pid(isolated)
        assert (us.num_fds(), parent.num_fds(), len(parent.children(recursive=True))) == before


def isolated_pid(isolated: Supervisor) -> int:
    """The worker's process, started if there is none."""
    isolated.calls([add_call()])
    assert isolated.pid is not None
    return isolated.pid


@pytest.mark.parametrize("engine", ["LeavesProcess", "LeavesDaemon"])
def test_what_an_engine_started_ends_with_the_supervisor(engine: str) -> None:
    with supervisor(engine, None) as isolated:
        isolated.calls([add_call(1)])
        left = [child.pid for child in psutil.Process(isolated.pid).children()]
        assert len(left) == 1
    assert gone(left[0])


RUNNER = """
    import sys, time
    import numpy as np
    from campaigns.isolation import Supervisor
    from spec.script import OpCall

    a = np.zeros((1, 4), np.float32)
    call = OpCall("add", {"a": a, "b": a}, {"trigger": 1}, {"out": ((1, 4), "float32")})
    with Supervisor("bad_engines:LeavesProcess", deadline_s=600, resolver="campaigns.isolation.worker:instance") as other:
        other.calls([call])
        with Supervisor("bad_engines:Hang", deadline_s=600, resolver="campaigns.isolation.worker:instance") as hanging:
            print("ready", flush=True)
            hanging.calls([call])
"""


def test_a_killed_runner_leaves_no_process() -> None:
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), str(Path(__file__).parent)])
    runner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUNNER)], stdout=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        assert runner.stdout is not None and runner.stdout.readline() == b"ready\n"
        family = [child.pid for child in psutil.Process(runner.pid).children(recursive=True)]
        assert len(family) == 5  # two zygotes, two workers, one process that an engine left
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    assert all(gone(pid) for pid in family)


def test_a_killed_zygote_takes_its_workers_along_and_is_replaced() -> None:
    with supervisor("Adder", None) as isolated:
        worker = isolated_pid(isolated)
        psutil.Process(psutil.Process(worker).ppid()).kill()
        assert gone(worker)
        failure = isolated.calls([add_call()])[0].failure
        assert failure is not None and failure.kind == "crashed" and "the worker is lost" in failure.message
        assert is_right(isolated.calls([add_call()])[0])


def test_a_supervisor_outlives_the_thread_that_made_it() -> None:
    made: list[Supervisor] = []
    thread = threading.Thread(target=lambda: made.append(supervisor("Adder", None)))
    thread.start()
    thread.join()
    with made[0] as isolated:
        time.sleep(0.05)
        assert is_right(isolated.calls([add_call()])[0])


def test_a_zygote_is_not_used_across_a_fork(zygote: Zygote) -> None:
    zygote._owner -= 1  # as a child of this process would see it
    try:
        with pytest.raises(IsolationError, match="make another one after a fork"):
            supervisor("Adder", zygote)
    finally:
        zygote._owner += 1


# Scripts


def rows(tokens: list[int], sequence: int = 0, start: int = 0) -> Rows:
    count = len(tokens)
    return Rows(
        np.full(count, sequence, np.int32),
        np.array(tokens, np.int32),
        np.arange(start, start + count, dtype=np.int32),
        np.arange(-1, count - 1, dtype=np.int32),
    )


def forward(tokens: list[int], phase: str = "prefill", **place: int) -> Forward:
    return Forward(rows(tokens, **place), np.ones(len(tokens), np.bool_), phase)


def all_of(count: int) -> Commit:
    return Commit(0, np.arange(count, dtype=np.int32))


PROMPTS = (np.array([5, 6], np.int32), np.array([7], np.int32))
LOOP = Generate(PROMPTS, None, 4, Limits(3))
STEPS = (
    forward([1, 2, 3]),
    all_of(3),
    forward([4, 5], "tree", start=3),
    Commit(0, np.array([0], np.int32)),
    CacheRows(0),
    Fork(0, 1),
    CacheRows(1),
    LOOP,
)


def script(*steps: Any, active: tuple[str, ...] = ()) -> Script:
    return Script(TINY, WeightsKey(3), steps, hazards=frozenset(active))


def kinds(trace: Trace) -> list[str]:
    return [answer.failure.kind if answer.failure else "" for answer in trace.answers]


@pytest.mark.parametrize("active", [(), ("views", "freed", "poison", "guard"), ("repeat",)])
def test_a_script_brings_back_logits_taps_cache_and_tokens(zygote: Zygote, active: tuple[str, ...]) -> None:
    with supervisor("Toy", zygote) as isolated:
        trace = isolated.script(script(*STEPS, active=active))
    assert trace.failure is None and kinds(trace) == [""] * len(STEPS)
    first, cache, forked, loop = (trace.answers[i] for i in (0, 4, 6, 7))
    assert first.logits is not None and first.logits.shape == (3, TINY.vocab)
    assert first.taps["embed", -1][:, 0].tolist() == [1, 2, 3]
    assert cache.cache is not None and cache.cache.shape == (TINY.layers, 4, TINY.cache_dim)
    assert cache.cache[0, :, 0].tolist() == [1, 2, 3, 4]
    assert forked.cache is not None and forked.cache.tobytes() == cache.cache.tobytes()
    assert loop.generations is not None
    assert [g.tokens for g in loop.generations] == [(6, 6, 6), (7, 7, 7)]
    assert loop.generations[0].rounds[0].bonus == 2


def test_a_session_stays_open_and_is_empty_for_the_next_script(zygote: Zygote) -> None:
    with supervisor("Toy", zygote) as isolated, InProcess(bad_engines.Toy()) as inside:
        for runner in (isolated, inside):
            for _ in range(2):
                trace = runner.script(script(*STEPS))
                assert trace.answers[4].cache is not None and trace.answers[4].cache.shape[1] == 4


def test_an_engine_without_eviction_gets_a_new_session_for_each_script(zygote: Zygote) -> None:
    with supervisor("NoEvict", zygote) as isolated:
        for _ in range(2):
            trace = isolated.script(script(*STEPS, active=("repeat",)))
            assert trace.failure is None
            assert trace.answers[4].cache is not None and trace.answers[4].cache.shape[1] == 4
        assert kinds(isolated.script(script(forward([1]), Evict(0), forward([1])))) == ["", "unsupported"]


SCRIPT_FAILURES = [
    ("LogitsNone", (forward([1]),), "logits is a NoneType, but must be a NumPy array float32 [1, 96]"),
    ("LogitsDouble", (forward([1]),), "logits is float64 [1, 96], but must be float32 [1, 96]"),
    ("LogitsWide", (forward([1]),), "logits is float32 [1, 3], but must be float32 [1, 96]"),
    ("CacheRagged", (forward([1]), all_of(1), CacheRows(0)), "cache_rows has [1, 2] rows in layers 0 to 1"),
    ("TokenMinusOne", (LOOP,), "generate[0].tokens[1] is -1, but must be between 0 and 95"),
    ("TokenFloat", (LOOP,), "generate[0].tokens[0] is a float (1.5), but must be an integer"),
    ("TokenTrue", (LOOP,), "generate[0].tokens[0] is a bool (True), but must be an integer"),
    ("TooFew", (LOOP,), "generate returned 0 sequences, but there are 2 prompts"),
    ("GeneratesNone", (LOOP,), "generate is a NoneType, but must be a sequence"),
    ("Endless", (LOOP,), "generate[0].tokens has 100000 items"),
    ("BadTaps", (forward([0]),), "there is no tap 'no_such_tap' in layer 0"),
    ("BadTaps", (forward([1]),), "the layer of tap 'embed' is 7, but must be between -1 and 2"),
    ("BadTaps", (forward([2]),), "tap 'embed' of layer -1 is float32 [1, 3], but must be float32 [1, 48]"),
    ("BadTaps", (forward([3]),), "tap 'embed' of layer -1 was given twice in one forward pass"),
    ("BadTaps", (forward([4]),), "tap 'embed' of layer -1 is a NoneType"),
]


@pytest.mark.parametrize(("engine", "steps", "text"), SCRIPT_FAILURES, ids=[f"{f[0]}-{i}" for i, f in enumerate(SCRIPT_FAILURES)])
def test_an_answer_of_the_wrong_kind_is_malformed(engine: str, steps: tuple[Any, ...], text: str) -> None:
    with InProcess(getattr(bad_engines, engine)()) as inside:
        failure = inside.script(script(*steps)).answers[-1].failure
    assert failure is not None and failure.kind == "malformed" and text in failure.message


def test_tokens_of_numpy_become_plain_integers() -> None:
    with InProcess(bad_engines.NumpyTokens()) as inside:
        generations = inside.script(script(LOOP)).answers[0].generations
    assert generations is not None and generations[0].tokens == (1, 2) and type(generations[0].tokens[0]) is int


def test_a_step_that_raised_ends_the_trace_there(zygote: Zygote) -> None:
    with supervisor("ForwardRaises", zygote) as isolated:
        trace = isolated.script(script(*STEPS))
        assert kinds(trace) == ["raised"] and trace.failure is None
        assert "ZeroDivisionError" in trace.answers[0].failure.message


def test_a_loop_that_is_not_offered_does_not_end_the_trace(zygote: Zygote) -> None:
    with supervisor("NoGenerate", zygote) as isolated:
        assert kinds(isolated.script(script(LOOP, forward([1])))) == ["unsupported", ""]


def test_a_crash_keeps_the_steps_before_it_and_names_its_own(zygote: Zygote) -> None:
    steps = (forward([1]), all_of(1), forward([2], "decode", start=1), all_of(1), forward([3, 4], "tree", start=2), all_of(1))
    with supervisor("CrashAtThird", zygote) as isolated:
        for _ in range(2):
            trace = isolated.script(script(*steps))
            assert kinds(trace) == [""] * 4
            assert trace.answers[2].logits is not None
            assert trace.failure is not None and trace.failure.signal == signal.SIGSEGV
            assert trace.failure.message.startswith("SIGSEGV in step 5 of 6 (forward, tree)")


def test_opening_a_session_does_not_count_as_a_step(zygote: Zygote) -> None:
    deadline = Deadline(SHORT_S, first_s=PATIENT_S, factor=0.0)
    deadline.observe("script", SHORT_S)
    with Supervisor("bad_engines:OpensSlowly", deadline_s=deadline, resolver=INSTANCE, zygote=zygote) as isolated:
        assert isolated.script(script(*STEPS)).failure is None


def test_a_stale_buffer_is_flaky_under_repeat(zygote: Zygote) -> None:
    steps = (forward([1]), all_of(1))
    with supervisor("Stateful", zygote) as isolated:
        assert isolated.script(script(*steps)).failure is None
        failure = isolated.script(script(*steps, active=("repeat",))).failure
    assert failure is not None and failure.kind == "flaky"
    assert failure.message.startswith("step 1 of 2 (forward, prefill): two equal runs gave logits[0, 0] = ")


def test_an_engine_of_operations_only_does_not_support_scripts(zygote: Zygote) -> None:
    with supervisor("Adder", zygote) as isolated:
        failure = isolated.script(script(*STEPS)).failure
    assert failure is not None and (failure.kind, failure.message) == ("unsupported", "open: the engine has no open")


def test_weights_that_are_missing_are_the_engines_failure_to_open(zygote: Zygote) -> None:
    with supervisor("AsksForMore", zygote) as isolated:
        failure = isolated.script(script(*STEPS)).failure
    assert failure is not None and failure.kind == "raised" and failure.message.startswith("open: KeyError: 'no_such_weight'")


def test_weights_of_ours_that_cannot_be_made_are_not_charged_to_the_engine(zygote: Zygote) -> None:
    unknown = Script(TINY, WeightsKey(3, "no such regime"), STEPS)
    with supervisor("Toy", zygote) as isolated:
        with pytest.raises(IsolationError, match="the weights .* cannot be made: .*no such regime"):
            isolated.script(unknown)
        assert isolated.script(script(*STEPS)).failure is None


def test_a_script_of_a_worker_that_damages_its_records_is_a_crash(zygote: Zygote) -> None:
    with supervisor("DamagesRecords", zygote) as isolated:
        trace = isolated.script(script(*STEPS))
        assert trace.failure is not None and (trace.failure.kind, trace.answers) == ("crashed", [])
        assert "damaged the memory" in trace.failure.message
        made = isolated.tree(tree_job())
        assert made[0][1].failure is not None and made[0][1].failure.kind == "crashed"
        answers = isolated.calls([add_call(), add_call(1), add_call()])
        assert [is_right(answer) for answer in answers] == [True, False, True]
        assert answers[1].failure is not None and answers[1].failure.message == "add damaged the memory of the worker"


# Trees


def tree_job(**changes: Any) -> TreeJob:
    rng = np.random.default_rng(7)
    fields = {
        "logits": np.round(rng.standard_normal((3, 12)) * 8).astype(np.float32) / 4,
        "budget": 6,
        "root": 3,
        "prefix_len": 4,
        "cache_rows": rng.standard_normal((11, 5)).astype(np.float32),
        "follow": 70,
        "seed": 1,
    }
    return TreeJob(**{**fields, **changes})


CHAIN = ["draft_table", "best_first_tree", "tree_mask", "accept", "compact"]


def test_a_right_chain_runs_to_its_end_on_its_own_outputs(zygote: Zygote) -> None:
    with supervisor("GoldenTree", zygote) as isolated, InProcess(bad_engines.GoldenTree()) as inside:
        for budget in (0, 1, 6):
            made, twin = isolated.tree(tree_job(budget=budget)), inside.tree(tree_job(budget=budget))
            assert [call.op for call, _ in made] == CHAIN
            assert all(answer.failure is None for _, answer in made)
            for (call, answer), (call_inside, answer_inside) in zip(made, twin, strict=True):
                assert {n: a.tobytes() for n, a in call.inputs.items()} == {n: a.tobytes() for n, a in call_inside.inputs.items()}
                assert {n: a.tobytes() for n, a in answer.outputs.items()} == {n: a.tobytes() for n, a in answer_inside.outputs.items()}


def test_an_operation_that_is_not_offered_is_replaced_by_the_golden_one(zygote: Zygote) -> None:
    with supervisor("NoTable", zygote) as isolated, supervisor("GoldenTree", zygote) as whole:
        made, golden = isolated.tree(tree_job()), whole.tree(tree_job())
    assert [answer.failure.kind if answer.failure else "" for _, answer in made] == ["unsupported", "", "", "", ""]
    assert made[4][1].outputs["out"].tobytes() == golden[4][1].outputs["out"].tobytes()


@pytest.mark.parametrize(
    ("engine", "length", "kind"),
    [
        ("TreeCrashes", 3, "crashed"),
        ("TreeRaises", 3, "raised"),
        ("TreeCountTooLarge", 2, ""),
        ("TreeNotClosed", 2, ""),
        ("TreePathDown", 4, ""),
    ],
)
def test_a_chain_ends_where_its_output_can_no_longer_be_an_input(zygote: Zygote, engine: str, length: int, kind: str) -> None:
    with supervisor(engine, zygote) as isolated:
        made = isolated.tree(tree_job())
    assert [call.op for call, _ in made] == CHAIN[:length]
    last = made[-1][1]
    assert (last.failure.kind if last.failure else "") == kind
    assert all(answer.failure is None for _, answer in made[:-1])


def test_a_job_with_too_few_cache_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_rows has 3 rows, but prefix_len 4 and budget 6 need 11"):
        TreeChain(tree_job(cache_rows=np.zeros((3, 5), np.float32)))


def test_targets_follow_children_as_often_as_asked() -> None:
    tokens, parents = np.array([3, 1, 2, 1, 5], np.int32), np.array([-1, 0, 0, 1, 1], np.int32)
    children = {0: {1, 2}, 1: {1, 5}}
    for seed in range(40):
        always, never = (target_ids(tokens, parents, 7, follow, seed) for follow in (100, 0))
        assert all(int(always[node]) in children[node] for node in children)
        assert not any(int(never[node]) in children[node] for node in children)
        assert {*always.tolist(), *never.tolist()} <= set(range(7))
    shorter = target_ids(tokens[:4], parents[:4], 7, 0, 3)
    assert shorter[[0, 2, 3]].tolist() == target_ids(tokens, parents, 7, 0, 3)[[0, 2, 3]].tolist()  # node 1 has lost a child


# What a damaged worker may send


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create("test")
    transport.set_canary(made)
    yield made
    made.close()


def written(arena: Arena) -> int:
    writer = RecordWriter(arena)
    writer.begin(1, 0)
    answer = Answer(outputs={"out": np.arange(6, dtype=np.float32).reshape(2, 3)}, taps={("embed", -1): np.zeros((1, 2), np.float32)})
    writer.append(*transport.pack_answer(answer))
    return read_marks(arena).used


def test_a_record_comes_back_as_it_was_written(arena: Arena) -> None:
    ((meta, arrays),) = read_records(arena, written(arena))
    answer = transport.unpack_answer(meta, arrays)
    assert answer.outputs["out"].tolist() == [[0, 1, 2], [3, 4, 5]] and answer.taps["embed", -1].shape == (1, 2)
    answer.outputs["out"][0, 0] = 9  # a private copy


def test_no_damage_to_a_record_does_more_than_raise_transport_error(arena: Arena) -> None:
    used = written(arena)
    rng = np.random.default_rng(0)
    whole = bytes(arena.memory[4096 : 4096 + used])
    refused = 0
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(0, 160)] = rng.integers(0, 256)
        arena.memory[4096 : 4096 + used] = bytes(damaged)
        try:
            for meta, arrays in read_records(arena, used):
                transport.unpack_answer(meta, arrays)
        except TransportError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize("used", [1, 2**63, 2**40, 4])
def test_sizes_beyond_the_memory_are_refused(arena: Arena, used: int) -> None:
    written(arena)
    with pytest.raises(TransportError):
        read_records(arena, used)


def test_shared_memory_cannot_be_made_smaller(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.descriptor, 1)


@pytest.mark.parametrize(
    "text", ['{"arrays":[["object",[1],0]]}', '{"arrays":[["float32",[-1],0]]}', '{"arrays":[["float32",[1],-4]]}', "[]", "nonsense"]
)
def test_odd_descriptors_are_refused(arena: Arena, text: str) -> None:
    body = text.encode()
    total = 64 * -(-(16 + len(body)) // 64)
    arena.memory[4096 : 4096 + 16 + len(body)] = transport._RECORD.pack(total, len(body)) + body
    with pytest.raises(TransportError):
        read_records(arena, total)


# Deadlines


def test_a_deadline_follows_the_median_but_not_below_its_floor() -> None:
    deadline = Deadline(0.5, first_s=9.0)
    assert deadline.limit_s("calls") == 9.0
    for _ in range(20):
        deadline.observe("calls", 0.001)
    assert deadline.limit_s("calls") == 0.5 and deadline.limit_s("script") == 9.0
    for _ in range(200):
        deadline.observe("calls", 0.1)
    assert deadline.limit_s("calls") == pytest.approx(2.0)


def test_a_kind_that_only_hangs_loses_patience_and_gets_it_back_where_a_job_ends() -> None:
    deadline = Deadline(2.0, first_s=30.0)
    limits = []
    for _ in range(4):
        limits.append(deadline.limit_s("tree"))
        deadline.hung("tree")
    assert limits == [30.0, 7.5, 2.0, 2.0]
    assert deadline.limit_s("script") == 30.0
    deadline.observe("tree", 1.0)
    assert deadline.limit_s("tree") == 20.0
    deadline.hung("tree")
    assert deadline.limit_s("tree") == 20.0


def test_a_deadline_without_a_floor_is_refused() -> None:
    with pytest.raises(ValueError, match="0 < floor_s <= first_s"):
        Deadline(0.0)


def test_an_adaptive_deadline_catches_a_hang_after_quick_cases(zygote: Zygote) -> None:
    deadline = Deadline(SHORT_S, first_s=PATIENT_S)
    with Supervisor("bad_engines:Hang", deadline_s=deadline, resolver=INSTANCE, zygote=zygote) as isolated:
        assert is_right(isolated.calls([add_call()])[0])
        failure = isolated.calls([add_call(1)])[0].failure
    assert failure is not None and failure.kind == "hung" and failure.message.startswith("no answer for 0.5 s in add")


@pytest.mark.parametrize("engine", ["GoldenTree", "NoTable", "TreeCrashes", "TreeRaises", "TreeCountTooLarge"])
def test_a_batch_of_trees_answers_as_its_trees_do_alone(zygote: Zygote, engine: str) -> None:
    jobs = [tree_job(budget=budget) for budget in (3, 0, 6)]
    with supervisor(engine, zygote) as isolated:
        together = isolated.trees(jobs)
        alone = [isolated.tree(job) for job in jobs]
    assert len(together) == len(jobs)
    for made, twin in zip(together, alone, strict=True):
        assert [call.op for call, _ in made] == [call.op for call, _ in twin]
        for (_, answer), (_, other) in zip(made, twin, strict=True):
            assert (answer.failure is None) == (other.failure is None)
            assert (answer.failure.kind if answer.failure else "") == (other.failure.kind if other.failure else "")
            assert (answer.outputs or {}).keys() == (other.outputs or {}).keys()
            assert all(np.array_equal(answer.outputs[name], other.outputs[name]) for name in answer.outputs or {})  # type: ignore[index]
