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
from campaigns.relations import twin
from campaigns.trial import Outcome, Worker
from oracles.judgement import FINDINGS
from oracles.relations import judge_relation
from spec.engine import Description
from spec.script import Answer, Trace

Array = NDArray[Any]

SESSIONS = 24  # three batches: all presets and most weight regimes
FRESH_EVERY = 8  # sessions; a fresh process costs a second
INVARIANCE = ("alone", "chunks", "siblings", "rejected", "numbers")  # what a row's batch may differ in, in every way that a session offers


@dataclass
class Certificate:
    """`runs`: pairs of runs that were compared; `values`: scalars in them; `first`: the first difference in words, "" where there is none."""

    name: str
    summary: str
    sessions: int = 0
    runs: int = 0
    values: int = 0
    first: str = ""
    case: str = ""

    @property
    def holds(self) -> bool:
        return self.runs > 0 and not self.first

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"holds": self.holds}


class RestartableWorker(Worker, Protocol):
    """What a certificate needs of campaigns.isolation.Supervisor."""

    def restart(self) -> None: ...


def certify(worker: RestartableWorker, names: Sequence[str], *, sessions: int = SESSIONS, seed: int = 0) -> list[Certificate]:
    """One certificate per property; each stops at its first difference. Raises CaseError for an unknown property, or an engine without sessions."""
    unknown = [name for name in names if name not in PROPERTIES]
    if unknown:
        raise CaseError(f"there is no property {unknown[0]!r}: choose one of {', '.join(PROPERTIES)}")
    out = [Certificate(name, PROPERTIES[name][0]) for name in names]
    for number, case in enumerate(drawn(worker.description, sessions, seed)):
        for certificate in out:
            if not certificate.first:
                certificate.sessions += 1
                PROPERTIES[certificate.name][1](worker, case, certificate, number % FRESH_EVERY == 0)
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


def _determinism(worker: RestartableWorker, case: SessionCase, certificate: Certificate, fresh: bool) -> None:
    """The same session twice in one process, and now and then in a fresh one."""
    script = session_script(case, worker.description.departures)
    first = worker.script(script)
    for again_fresh in (False, True) if fresh else (False,):
        if again_fresh:
            worker.restart()
        _compare(first, worker.script(script), case, certificate, "in a fresh process" if again_fresh else "in the same process")
        if certificate.first:
            return


def _compare(first: Trace, again: Trace, case: SessionCase, certificate: Certificate, where: str) -> None:
    certificate.runs += 1
    for step, (one, two) in enumerate(zip(first.answers, again.answers, strict=False)):
        for name, value in _values(one).items():
            other = _values(two).get(name)
            certificate.values += value.size
            if other is not None and (value.shape != other.shape or value.tobytes() != other.tobytes()):
                text = f"{name} of step {step} differs from its first run {where}"
                if value.shape == other.shape:
                    at = np.argwhere(_bits(value) != _bits(other))[0]
                    index = ", ".join(map(str, at))
                    text += f": [{index}] is {value[tuple(at)]!r}, then {other[tuple(at)]!r}"
                certificate.first, certificate.case = text, to_json(case)
                return
    if len(first.answers) != len(again.answers) or (first.failure is None) != (again.failure is None):
        certificate.first, certificate.case = f"one of two runs ended early {where}", to_json(case)


def _bits(value: Array) -> Array:
    return np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")


def _values(answer: Answer) -> Mapping[str, Array]:
    """Everything that an answer holds, in data order."""
    out: dict[str, Array] = {f"{name}, layer {layer},": value for (name, layer), value in answer.taps.items()}
    if answer.logits is not None:
        out["logits"] = answer.logits
    if answer.cache is not None:
        out["the cache"] = answer.cache
    for number, generation in enumerate(answer.generations or ()):
        out[f"the stream of sequence {number}"] = np.array(generation.tokens, np.int64)
    return out


def _batch_invariance(worker: RestartableWorker, case: SessionCase, certificate: Certificate, fresh: bool) -> None:
    """The same tokens in other batches: alone, in chunks, in another order, without neighbours. Every logit bit for bit."""
    claimed = dataclasses.replace(worker.description.profile, batch_invariant=True)
    script = session_script(dataclasses.replace(case, generate=None), worker.description.departures)
    first = worker.script(script)
    for name in INVARIANCE:
        relation, other = twin(dataclasses.replace(case, generate=None, relation=name), worker.description.departures)
        again = worker.script(other)
        for judgement in judge_relation(relation, (script, first), (other, again), claimed, None):
            certificate.runs += 1
            certificate.values += judgement.checked
            if judgement.verdict in FINDINGS:
                certificate.first, certificate.case = f"{name}: {judgement.message}", to_json(dataclasses.replace(case, relation=name))
                return


Examine = Callable[[RestartableWorker, SessionCase, Certificate, bool], None]
PROPERTIES: Mapping[str, tuple[str, Examine]] = {
    "determinism": ("the same session gives the same bits, in one process and in a fresh one", _determinism),
    "batch-invariance": ("the bits of a row do not depend on the other rows of its batch", _batch_invariance),
}
