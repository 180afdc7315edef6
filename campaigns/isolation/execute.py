"""Run calls, scripts and tree cases on an engine and bring back answers. No isolation here: this is what happens inside the worker.

Whatever the engine does short of ending the process becomes an Answer: an exception is "raised", Unsupported is "unsupported", an answer of
the wrong kind or a write outside an output is "malformed", two equal calls with different bits are "flaky". Nothing is judged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns import hazards
from campaigns.isolation import validate
from campaigns.isolation.chain import TreeChain, TreeJob
from campaigns.isolation.validate import Malformed
from spec.config import Config
from spec.engine import Description, Drafter, Engine, Limits, Rows, SamplingSession, Session, Unsupported
from spec.script import Answer, CacheRows, Commit, Evict, Failure, Fork, Forward, Generate, OpCall, Script, Step, Trace, WeightsKey
from spec.taps import all_tap_names
from spec.weights import Array

WeightsProvider = Callable[[Config, WeightsKey], Mapping[str, Array]]


class PreparationError(RuntimeError):
    """Something of ours failed before the engine was asked: no answer, and no failure of the engine."""


Answering = Engine | Any
"""An engine by shape. Everything but `describe` is optional: what is missing is answered by "unsupported"."""

OPENING = -1  # the step number while a session is being opened
DRAFTED_MAX = 256  # calls of a drafter that are noted per step: four sequences of 64 rounds
SESSIONS_OPEN = 2  # a campaign alternates between few weight sets; each open session holds one


class Progress:
    """What the runner is told on the way: a step begins, an answer is there. This one ignores it all; the worker's writes shared memory."""

    def started(self, step: int) -> None:
        """`step` counts calls, steps of a script or links of a tree chain from 0; OPENING before them."""

    def finished(self, answer: Answer) -> None:
        """`answer` to the step that started last is complete."""


QUIET = Progress()


def describe(engine: Answering) -> Description:
    """The engine's own description, checked. Raises Malformed, or whatever `engine.describe` raises."""
    return validate.description(engine.describe())


def failure_of(problem: BaseException) -> Failure:
    """The failure that an exception out of an engine's call amounts to."""
    if isinstance(problem, Unsupported):
        return Failure("unsupported", validate.text_of(problem))
    if isinstance(problem, Malformed):
        return Failure("malformed", str(problem))
    return Failure("raised", validate.described(problem))


# Operations


def run_calls(engine: Answering, calls: Sequence[OpCall], progress: Progress = QUIET) -> list[Answer]:
    """One answer per call, in order; a failed call does not stop the next."""
    answers = []
    for step, call in enumerate(calls):
        answers.append(_reported(progress, step, partial(run_call, engine, call)))
    return answers


def run_trees(engine: Answering, jobs: Sequence[TreeJob], progress: Progress = QUIET) -> None:
    """One chain after another; steps are counted through."""
    made = 0
    for job in jobs:
        made += len(run_tree(engine, job, progress, made))


def run_tree(engine: Answering, job: TreeJob, progress: Progress = QUIET, first_step: int = 0) -> list[tuple[OpCall, Answer]]:
    """Every call of the chain that was made, with its answer."""
    chain = TreeChain(job)
    made: list[tuple[OpCall, Answer]] = []
    while (call := chain.next_call()) is not None:
        answer = _reported(progress, first_step + len(made), partial(run_call, engine, call))
        chain.take(answer)
        made.append((call, answer))
    return made


def run_call(engine: Answering, call: OpCall) -> Answer:
    """One `run_op` on private copies of the inputs and poisoned, guarded outputs. Twice where "repeat" asks for it."""
    answer = _run_once(engine, call)
    if "repeat" in call.hazards and answer.failure is None:
        again = _run_once(engine, call)
        answer.failure = again.failure or _difference(answer, again, "two equal calls")
    return answer


def _run_once(engine: Answering, call: OpCall) -> Answer:
    contiguous = bool(getattr(engine, "contiguous_only", False))
    inputs = {name: hazards.placed(a, call.hazards, i, contiguous_only=contiguous) for i, (name, a) in enumerate(call.inputs.items())}
    outputs = {name: hazards.guarded_output(shape, dtype, call.hazards) for name, (shape, dtype) in call.outputs.items()}
    given = {name: output.array for name, output in outputs.items()}
    try:
        run_op = getattr(engine, "run_op", None)
        if run_op is None:
            raise Unsupported("the engine has no run_op")
        run_op(call.op, dict(inputs), dict(call.params), given)
    except BaseException as problem:
        return Answer(failure=failure_of(problem))
    for name, output in outputs.items():
        if (where := output.violation()) is not None:
            return Answer(failure=Failure("malformed", f"{call.op} wrote outside output {name!r}: {where}"))
        if given.get(name) is not output.array:
            return Answer(failure=Failure("malformed", f"{call.op} replaced output {name!r}; it must fill the array that it was given"))
    for name, source in call.inputs.items():
        if inputs[name].tobytes() != source.tobytes():
            return Answer(failure=Failure("malformed", f"{call.op} changed its input {name!r}"))
    if "freed" in call.hazards:
        for array in inputs.values():
            hazards.spoil(array)
    return Answer(outputs={name: output.read() for name, output in outputs.items()})


# Scripts


def run_script(engine: Answering, script: Script, weights_provider: WeightsProvider, progress: Progress = QUIET) -> Trace:
    """Open a session, run every step, close it."""
    sessions = Sessions(engine, weights_provider, keep=1)
    try:
        return sessions.run(script, progress)
    finally:
        sessions.close()


class Sessions:
    """Open sessions of one engine by (config, weights), the least recently used closed first.

    A session whose state is in doubt (a step failed, eviction is not offered) is closed and opened anew by the next script.
    """

    def __init__(self, engine: Answering, weights_provider: WeightsProvider, *, keep: int = SESSIONS_OPEN) -> None:
        self._engine = engine
        self._weights_provider = weights_provider
        self._keep = keep
        self._description = describe(engine)
        self._open: OrderedDict[tuple[Config, WeightsKey], Session] = OrderedDict()

    def run(self, script: Script, progress: Progress = QUIET) -> Trace:
        """The trace of `script`; the session stays open and empty where that is possible. Raises PreparationError where weights are missing."""
        progress.started(OPENING)
        try:
            session = self._session(script)
        except PreparationError:
            raise
        except BaseException as problem:
            return Trace(self._description, [], _at("open", failure_of(problem)))
        run = _Run(session, script, self._description)
        answers: list[Answer] = []
        for step in range(len(script.steps)):
            answer = _reported(progress, step, partial(run.step, step))
            answers.append(answer)
            if run.ended:
                break
        clean = not run.ended and run.evict_all()
        if not clean:
            self._close(script)
        failure = None
        if "repeat" in script.hazards and not run.ended:
            failure = self._repeat(script, answers, progress)
        return Trace(self._description, answers, failure)

    def close(self) -> None:
        while self._open:
            _quietly(self._open.popitem()[1])

    def _repeat(self, script: Script, first: list[Answer], progress: Progress) -> Failure | None:
        progress.started(OPENING)
        try:
            run = _Run(self._session(script), script, self._description)
        except PreparationError:
            raise
        except BaseException as problem:
            return _at("open, second time", failure_of(problem))
        found: Failure | None = None
        for step, before in enumerate(first):
            progress.started(step)
            again = run.step(step)
            found = _difference(before, again, f"{label(script, step)}: two equal runs")
            if found or run.ended:
                break
        if found or run.ended or not run.evict_all():
            self._close(script)
        return found

    def _session(self, script: Script) -> Session:
        key = (script.config, script.weights)
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        while len(self._open) >= self._keep:
            _quietly(self._open.popitem(last=False)[1])
        if not hasattr(self._engine, "open"):
            raise Unsupported("the engine has no open")
        try:
            weights = self._weights_provider(script.config, script.weights)
        except Exception as problem:
            raise PreparationError(f"the weights {script.weights} cannot be made: {validate.described(problem)}") from problem

        contiguous = bool(getattr(self._engine, "contiguous_only", False))

        def provider(name: str) -> Array:
            tensor = (np.ascontiguousarray(weights[name]) if contiguous else weights[name]).view()
            tensor.flags.writeable = False
            return tensor

        session = self._engine.open(script.config, provider)
        if session is None:
            raise Malformed("open() returned None, but must return a session")
        self._open[key] = session
        return session

    def _close(self, script: Script) -> None:
        session = self._open.pop((script.config, script.weights), None)
        if session is not None:
            _quietly(session)


class _Watched:
    """A drafter that notes the history of each call: a black box shows its rounds by what it asks."""

    def __init__(self, inner: Drafter, calls: list[tuple[int, tuple[int, ...]]]) -> None:
        self._inner, self._calls = inner, calls

    @property
    def block_len(self) -> int:
        return self._inner.block_len

    def draft(self, sequence: int, history: NDArray[np.int32]) -> NDArray[np.float32]:
        if len(self._calls) < DRAFTED_MAX:
            self._calls.append((int(sequence), tuple(np.asarray(history).tolist())))
        return self._inner.draft(sequence, history)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Run:
    """One pass over the steps of a script. `ended`: a step failed in a way that leaves the session's state in doubt."""

    def __init__(self, session: Session, script: Script, description: Description) -> None:
        self.ended = False
        self._session = session
        self._script = script
        self._taps = frozenset(all_tap_names()) & description.taps if script.taps else frozenset[str]()
        self._samples = "sampling" in description.capabilities
        self._live: set[int] = set()

    def step(self, number: int) -> Answer:
        step = self._script.steps[number]
        answer = Answer()
        try:
            self._make(step, answer)
        except BaseException as problem:
            answer.failure = failure_of(problem)
            kind = answer.failure.kind
            # reading back and the engine's own loop leave the sequences as they are, so that the steps after them still mean something
            self.ended = kind == "raised" or (kind == "unsupported" and not isinstance(step, (CacheRows, Generate)))
        return answer

    def _make(self, step: Step, answer: Answer) -> None:
        match step:
            case Forward():
                self._forward(step, answer)
            case Commit(sequence, path):
                with self._lent({"path": path}) as lent:
                    self._session.commit(sequence, lent["path"])
            case CacheRows(sequence):
                layers = [self._session.cache_rows(sequence, layer) for layer in range(self._script.config.layers)]
                answer.cache = validate.cache(layers, self._script.config)
            case Evict(sequence):
                self._session.evict(sequence)
                self._live.discard(sequence)
            case Fork(source, target):
                self._live.add(target)
                self._session.fork(source, target)
            case Generate(prompts, drafter, budget, limits, sampling):
                private = Limits(limits.max_new, limits.stop_tokens)
                if drafter is not None:
                    drafter = _Watched(drafter, answer.drafted)
                with self._lent({str(i): prompt for i, prompt in enumerate(prompts)}) as lent:
                    if sampling is None:
                        value = self._session.generate(list(lent.values()), drafter, budget, private)
                    elif self._samples and isinstance(self._session, SamplingSession):
                        value = self._session.sample(list(lent.values()), drafter, budget, private, sampling)
                    else:
                        raise Unsupported("this engine does not draw tokens with prescribed noise: it lacks the capability `sampling`")
                answer.generations = validate.generations(value, step, self._script.config)

    def _forward(self, step: Forward, answer: Answer) -> None:
        config, rows = self._script.config, step.rows
        self._live |= set(rows.sequence.tolist())
        wanted = int(np.count_nonzero(step.want_logits))
        sink = validate.Taps(config, self._taps, len(rows), wanted)
        answer.taps = sink.arrays
        batch = {"sequence": rows.sequence, "token": rows.token, "position": rows.position, "parent": rows.parent, "want": step.want_logits}
        with self._lent(batch) as lent:
            private = Rows(lent["sequence"], lent["token"], lent["position"], lent["parent"])
            value = self._session.forward(private, lent["want"], self._taps, sink)
        answer.logits = validate.logits(value, wanted, config)
        if sink.problem is not None:
            raise Malformed(sink.problem)

    def _lent(self, arrays: Mapping[str, NDArray[Any]]) -> _Lent:
        return _Lent(arrays, self._script.hazards)

    def evict_all(self) -> bool:
        """Leave the session without sequences. False where the engine cannot do that."""
        try:
            for sequence in sorted(self._live):
                self._session.evict(sequence)
        except BaseException:
            return False
        self._live.clear()
        return True


class _Lent:
    """Private copies of small integer arrays for one call: laid out by the hazards, checked and (under "freed") overwritten afterwards."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], active: frozenset[str]) -> None:
        self._arrays = arrays
        self._active = active
        self._copies = {name: hazards.placed(array, active, 2) for name, array in arrays.items()}  # 2: every second element

    def __enter__(self) -> dict[str, NDArray[Any]]:
        return dict(self._copies)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        for name, array in self._arrays.items():
            if self._copies[name].tobytes() != array.tobytes():
                raise Malformed(f"the engine changed its input {name!r}")
            if "freed" in self._active:
                hazards.spoil(self._copies[name])


def label(script: Script, step: int) -> str:
    """A step in words: `step 3 of 12 (forward, tree)`."""
    if not 0 <= step < len(script.steps):
        return "open"
    made = script.steps[step]
    phase = f", {made.phase}" if isinstance(made, Forward) else ""
    return f"step {step + 1} of {len(script.steps)} ({type(made).__name__.lower()}{phase})"


# Helpers


def _reported(progress: Progress, step: int, make: Callable[[], Answer]) -> Answer:
    progress.started(step)
    answer = make()
    progress.finished(answer)
    return answer


def _at(where: str, failure: Failure) -> Failure:
    return Failure(failure.kind, f"{where}: {failure.message}", failure.signal)


def _difference(first: Answer, second: Answer, what: str) -> Failure | None:
    """The first array, list or failure in which two answers to the same question differ, as a flaky failure."""
    kinds = [answer.failure.kind if answer.failure else "no failure" for answer in (first, second)]
    if kinds[0] != kinds[1]:
        return Failure("flaky", f"{what} ended differently: {kinds[0]}, then {kinds[1]}")
    ours, theirs = dict(_arrays(first)), dict(_arrays(second))
    for name, array in ours.items():
        other = theirs.get(name)
        if other is None or other.shape != array.shape:
            return Failure(
                "flaky", f"{what} gave {name} of shape {list(array.shape)}, then {'nothing' if other is None else list(other.shape)}"
            )
        if array.tobytes() != other.tobytes():
            at = int(np.flatnonzero(_bits(array) != _bits(other))[0])
            index = [int(i) for i in np.unravel_index(at, array.shape)]
            return Failure("flaky", f"{what} gave {name}{index} = {array[tuple(index)]!s}, then {other[tuple(index)]!s}")
    if first.generations != second.generations:
        return Failure("flaky", f"{what} generated different tokens or rounds")
    return None


def _arrays(answer: Answer) -> Iterator[tuple[str, NDArray[Any]]]:
    if answer.logits is not None:
        yield "logits", answer.logits
    if answer.cache is not None:
        yield "cache", answer.cache
    for (name, layer), array in answer.taps.items():
        yield f"{name}, layer {layer}, ", array
    yield from (answer.outputs or {}).items()


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").ravel()


def _quietly(session: Session) -> None:
    """Close a session; an engine that cannot is left to the end of its process."""
    try:
        session.close()
    except BaseException:
        return
