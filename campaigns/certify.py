"""`paritree check ENGINE --certify determinism,batch-invariance`: properties that an engine may claim, tried on sessions of the frozen generator.

A certificate says what was tried, how often, whether every bit was equal, and where the first difference is. It is evidence for the sizes that
were tried, not a proof; one difference is a proof that the property does not hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from campaigns.case import Case, CaseError, SessionCase, to_json
from campaigns.discover import Discovery, diet_of
from campaigns.materialise import session_script
from campaigns.relations import RECIPES, twin
from campaigns.trial import Outcome, Worker
from oracles.judgement import FINDINGS
from oracles.relations import judge_relation
from spec.engine import Description
from spec.script import Answer, Trace

Array = NDArray[Any]

SESSIONS = 24  # three batches: all presets and most weight regimes
FRESH_EVERY = 8  # sessions; a fresh process costs a second
SAME, FRESH = "again, in the same process", "again, in a fresh process"
INVARIANCE = (
    "alone",
    "chunks",
    "siblings",
    "rejected",
    "numbers",
    "chain",
    "decode",
    "prefill",
)  # every way in which the batch of a row can differ


@dataclass
class Way:
    """One way of running a session a second time. `runs`: pairs that were compared, of which `equal` in every bit; `values`: scalars in them; `first`:
    the first difference in words, "" where there is none; `case` shows it. Not tried again after that."""

    name: str
    words: str
    runs: int = 0
    equal: int = 0
    values: int = 0
    first: str = ""
    case: str = ""

    def met(self, values: int, difference: str, case: SessionCase) -> None:
        """One more pair of runs. A pair in which nothing was answered is no pair."""
        if values or difference:
            self.runs += 1
            self.values += values
            self.equal += not difference
        if difference:
            self.first, self.case = difference, to_json(case)


@dataclass
class Certificate:
    """`sessions`: drawn for it; `ways`: what was tried, and how often."""

    name: str
    summary: str
    ways: dict[str, Way]
    sessions: int = 0

    @property
    def runs(self) -> int:
        return sum(way.runs for way in self.ways.values())

    @property
    def values(self) -> int:
        return sum(way.values for way in self.ways.values())

    @property
    def broken(self) -> Way | None:
        """The first way that shows a difference."""
        return next((way for way in self.ways.values() if way.first), None)

    @property
    def first(self) -> str:
        return "" if self.broken is None else f"{self.broken.name}: {self.broken.first}"

    @property
    def case(self) -> str:
        return "" if self.broken is None else self.broken.case

    @property
    def holds(self) -> bool:
        return self.runs > 0 and self.broken is None

    def plain(self) -> dict[str, Any]:
        totals = {"runs": self.runs, "values": self.values, "first": self.first, "case": self.case, "holds": self.holds}
        ways = [dataclasses.asdict(way) for way in self.ways.values()]
        return {"name": self.name, "summary": self.summary, "sessions": self.sessions, "ways": ways} | totals


class RestartableWorker(Worker, Protocol):
    """What a certificate needs of campaigns.isolation.Supervisor."""

    def restart(self) -> None: ...


def certify(worker: RestartableWorker, names: Sequence[str], *, sessions: int = SESSIONS, seed: int = 0) -> list[Certificate]:
    """One certificate per property; each way stops at its first difference. Raises CaseError for an unknown property, or an engine without sessions."""
    unknown = [name for name in names if name not in PROPERTIES]
    if unknown:
        raise CaseError(f"there is no property {unknown[0]!r}: choose one of {', '.join(PROPERTIES)}")
    out = []
    for name in names:
        summary, ways, _ = PROPERTIES[name]
        out.append(Certificate(name, summary, {way: Way(way, words) for way, words in ways.items()}))
    for number, case in enumerate(drawn(worker.description, sessions, seed)):
        for certificate in out:
            waiting = [way for way in certificate.ways.values() if not way.first]
            if waiting:
                certificate.sessions += 1
                PROPERTIES[certificate.name][2](worker, case, waiting, number % FRESH_EVERY == 0)
    return out


def drawn(description: Description, count: int, seed: int) -> list[SessionCase]:
    """Sessions of full size, without hazards and without the relations of ordinary campaigns. Raises CaseError."""
    diet = dataclasses.replace(
        diet_of(description, hazards=False), ops=(), trees=False, mix=(("session", 1.0),), relations=("",), session_hazards=()
    )
    if not diet.sessions:
        raise CaseError(f"{description.name} offers no sessions (forward and commit): there is nothing to certify")
    cases: list[SessionCase] = []

    def keep(batch: Sequence[Case]) -> list[Outcome]:
        cases.extend(case for case in batch if isinstance(case, SessionCase))
        return [Outcome(case, (), 0.0) for case in batch]

    discovery = Discovery(diet, seed, keep, lambda outcome: False, trials_expected=0)
    while len(cases) < count:
        discovery.step()
    return cases[:count]


def _determinism(worker: RestartableWorker, case: SessionCase, ways: Sequence[Way], fresh: bool) -> None:
    """The same session twice in one process, and now and then in a fresh one."""
    script = session_script(case, worker.description.departures)
    first = worker.script(script)
    for way in ways:
        if way.name == FRESH:
            if not fresh:
                continue
            worker.restart()
        way.met(*_compared(first, worker.script(script)), case)


def _compared(first: Trace, again: Trace) -> tuple[int, str]:
    """Scalars that were compared, and the first difference."""
    values = 0
    for step, (one, two) in enumerate(zip(first.answers, again.answers, strict=False)):
        if (one.failure is None) != (two.failure is None):
            failure = one.failure or two.failure
            assert failure is not None
            return values, f"step {step} was answered in one of the runs only: {failure.message}"
        for name, value in _values(one).items():
            other = _values(two).get(name)
            values += value.size
            if other is None or value.shape != other.shape:
                return values, f"{name} of step {step} has shape {list(value.shape)}, then {'none' if other is None else list(other.shape)}"
            if value.tobytes() != other.tobytes():
                at = tuple(np.argwhere(_bits(value) != _bits(other))[0])
                index = ", ".join(map(str, at))
                return values, f"{name}[{index}] of step {step} is {value[at]!s}, then {other[at]!s}"
    if len(first.answers) != len(again.answers) or (first.failure is None) != (again.failure is None):
        return values, "one of the runs ended early"
    return values, ""


def _bits(value: Array) -> Array:
    return np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")


def _values(answer: Answer) -> Mapping[str, Array]:
    """Everything that an answer holds, in data order."""
    out: dict[str, Array] = {f"{name}, layer {layer}, ": value for (name, layer), value in answer.taps.items()}
    if answer.logits is not None:
        out["logits"] = answer.logits
    if answer.cache is not None:
        out["the cache"] = answer.cache
    for number, generation in enumerate(answer.generations or ()):
        out[f"the stream of sequence {number}"] = np.array(generation.tokens, np.int64)
        for turn, made in enumerate(generation.rounds):
            out[f"round {turn} of sequence {number}"] = np.array([*made.tokens, *made.parents, *made.path, made.bonus], np.int64)
    return out


def _batch_invariance(worker: RestartableWorker, case: SessionCase, ways: Sequence[Way], fresh: bool) -> None:
    """The same tokens in other batches: alone, in chunks, in another order, without neighbours, one by one. Every logit bit for bit."""
    claimed = dataclasses.replace(worker.description.profile, batch_invariant=True)
    script = session_script(dataclasses.replace(case, generate=None), worker.description.departures)
    first = worker.script(script)
    for way in ways:
        relation, other = twin(dataclasses.replace(case, generate=None, relation=way.name), worker.description.departures)
        again = worker.script(other)
        for judgement in judge_relation(relation, (script, first), (other, again), claimed, None):
            difference = judgement.message if judgement.verdict in FINDINGS else ""
            way.met(judgement.checked, difference, dataclasses.replace(case, relation=way.name))


Examine = Callable[[RestartableWorker, SessionCase, Sequence[Way], bool], None]
PROPERTIES: Mapping[str, tuple[str, Mapping[str, str], Examine]] = {
    "determinism": (
        "the same session gives the same bits, in one process and in a fresh one",
        {SAME: "taps, logits, cache and streams", FRESH: f"the same, one session in {FRESH_EVERY}"},
        _determinism,
    ),
    "batch-invariance": (
        "the bits of a row do not depend on the other rows of its batch",
        {name: RECIPES[name][0].statement for name in INVARIANCE},
        _batch_invariance,
    ),
}
