"""A finding to its smallest case: the reducer, Hypothesis where that leaves a large one; then the location and the capsule.

Works for crashes and hangs as well: the worker is replaced, and a hang costs a short deadline of its own. What an engine keeps between cases
must not decide a check, so that sessions get a fresh worker each; a finding that shows only after earlier cases is minimised with them, and
one that shows only sometimes is tried several times a check. The stored finding stands from the start; whatever ends this early leaves it as
it was.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from campaigns import battery, bisect, capsule, fingerprint, histories
from campaigns.case import Case, CaseError, SessionCase, case_id, from_json, to_json
from campaigns.discover import batch_strategy, diet_of
from campaigns.fingerprint import Fingerprint
from campaigns.isolation import Deadline, Supervisor
from campaigns.reduce import nodes_of, reduced
from campaigns.shrink import shrunk
from campaigns.starts import starts
from campaigns.trial import Bench, patience, takes_views
from oracles.judgement import Judgement, Verdict
from reports.store import Store

HANG_DEADLINE_S = 0.5  # ten times the longest step of a small case; a hang that is none costs one check
SECONDS = 60.0  # per finding
CHECKS_MAX = 120  # runs of the engine per finding
CONFIRMING = 1  # of these, to see the smallest case fail in a fresh worker
LARGE_NODES = 8  # what the reducer leaves larger Hypothesis tries; run before it, it cost 18 checks and saved nothing
FRESH_MAX_S = 1.0  # a worker that starts faster than this is replaced before each session
TRIES = 4  # runs of a case per check, where a finding shows only sometimes
AGAIN = 5  # runs of the minimum in fresh workers; they are no part of the search, and not among its checks
RUNS = 20  # of the smallest case of such a finding: how often it fails is part of what is told


@dataclasses.dataclass(frozen=True)
class Minimum:
    """`judgement`: the first finding of `case`; `checks`: runs of the engine that it took. `earlier`: cases that must have run before it in the
    same engine. `failed` of `runs` runs failed; 1 of 1 where every run does."""

    case: Case
    judgement: Judgement
    checks: int
    seconds: float
    earlier: tuple[Case, ...] = ()
    failed: int = 1
    runs: int = 1

    @property
    def nodes(self) -> int:
        return histories.total_nodes(self.earlier, self.case)


def deadline_of(wanted: Fingerprint) -> Deadline:
    """A hang costs its deadline at each check, so that it gets a short one."""
    return Deadline(HANG_DEADLINE_S, first_s=HANG_DEADLINE_S) if wanted.verdict == "HUNG" else patience()


class Checker:
    """Whether cases fail with the wanted fingerprint; `runs` counts. A finding that shows sometimes has the verdict FLAKY, and any verdict at the
    same place stands for it."""

    def __init__(self, supervisor: Supervisor, wanted: Fingerprint, *, tries: int = 1) -> None:
        self.wanted, self.tries, self.runs = wanted, tries, 0
        self.always_fresh = False  # for operations and trees as well
        self._supervisor = supervisor
        self._bench = Bench(supervisor)
        began = time.monotonic()
        supervisor.restart()
        self._quick = time.monotonic() - began < FRESH_MAX_S

    def fails(self, case: Case) -> bool:
        return self.fails_after((), case)

    def fails_after(self, earlier: Sequence[Case], case: Case) -> bool:
        """A case that cannot be materialised does not fail."""
        return any(self.failure(earlier, case) is not None for _ in range(self.tries))

    def failure(self, earlier: Sequence[Case], case: Case, *, fresh: bool = False) -> Judgement | None:
        """The finding of one run of `case` behind `earlier`."""
        if fresh or earlier or self.always_fresh or (self._quick and isinstance(case, SessionCase)):
            self._supervisor.restart()
        self.runs += 1
        try:
            for one in earlier:
                self._bench.outcome(one)
            found = fingerprint.first(self.wanted.engine, list(self._bench.outcome(case).judgements))
        except CaseError:
            return None
        return found[1] if found is not None and self.same(found[0]) else None

    def seen_again(self, case: Case) -> bool:
        """In fresh workers: at once, or in one of a few where it shows only sometimes."""
        return any(self.failure((), case, fresh=True) is not None for _ in range(TRIES))

    def same(self, found: Fingerprint) -> bool:
        if self.wanted.verdict == "FLAKY":
            return found[2:] == self.wanted[2:]
        return found == self.wanted


def minimum(
    engine: str,
    case: Case,
    wanted: Fingerprint,
    *,
    earlier: Sequence[Case] = (),
    choices: bytes = b"",
    kind: str = "",
    size: str = "full",
    hazards: bool = True,
    checkpoint: str = "",
    preset: str = "",
    seconds: float = SECONDS,
) -> Minimum | None:
    """The smallest case found in about `seconds`; None where `case` does not fail (any more), alone or behind the cases `earlier`."""
    began = time.monotonic()
    with Supervisor(engine, deadline_s=deadline_of(wanted)) as supervisor:
        checker = Checker(supervisor, wanted, tries=TRIES if wanted.verdict == "FLAKY" else 1)

        def left() -> float:
            return max(1.0, seconds - (time.monotonic() - began))

        def checks_left() -> int:
            return max(0, CHECKS_MAX - CONFIRMING - checker.runs) // checker.tries

        def smaller(best: Case) -> Case:
            best, _ = reduced(best, checker.fails, guilty=wanted.guilty, rung=wanted.rung, checks_max=checks_left(), seconds=left())
            if choices and nodes_of(best) > LARGE_NODES and checks_left():
                diet = diet_of(supervisor.description, hazards=hazards, views=takes_views(supervisor), checkpoint=checkpoint, preset=preset)
                strategy = batch_strategy(diet, kind, size)
                best, _ = shrunk(best, strategy, [choices], checker.fails, left(), checks_left())
            return best

        if any(checker.failure((), case) is not None for _ in range(RUNS if wanted.verdict == "FLAKY" else 1)):
            needed: list[Case] = []
            best = smaller(case)
            if not checker.always_fresh and not checker.seen_again(best):
                checker.always_fresh = True  # that minimum hangs on what ran before; now each check is by itself
                best = smaller(case) if checker.fails(case) else case
        elif earlier and checker.fails_after(earlier, case):
            most = histories.total_nodes(earlier, case)
            alone = next((one for one in starts(case, wanted.rung) if nodes_of(one) <= most and checker.fails(one)), None)
            if alone is not None:  # one case that needs no other is the better one
                needed, best = [], smaller(alone)
            else:
                needed, best, _ = histories.small(
                    earlier, case, checker.fails_after, guilty=wanted.guilty, rung=wanted.rung, checks_max=checks_left(), seconds=left()
                )
        else:
            return None
        return _confirmed(checker, needed, best, case, earlier, began)


def _confirmed(checker: Checker, needed: Sequence[Case], best: Case, case: Case, earlier: Sequence[Case], began: float) -> Minimum | None:
    """The minimum, seen again in fresh workers; the case as it was found where the minimum does not fail any more. What fails in some of these
    runs only is run more often, and says so, whatever it was taken for."""
    checks = checker.runs
    for before, one in ((needed, best), ((), case), (earlier, case)):
        found = [checker.failure(before, one, fresh=True) for _ in range(AGAIN)]
        if None in found or checker.wanted.verdict == "FLAKY":
            found += [checker.failure(before, one, fresh=True) for _ in range(RUNS - AGAIN)]
        failures = [judgement for judgement in found if judgement is not None]
        if failures:
            judgement, runs = failures[0], len(found) if len(found) > AGAIN else 1
            if runs > 1:
                message = f"fails in {len(failures)} of {runs} runs in a fresh process: {judgement.message}"
                judgement = dataclasses.replace(judgement, verdict=Verdict.FLAKY, message=message)
            return Minimum(one, judgement, checks, time.monotonic() - began, tuple(before), len(failures) if runs > 1 else 1, runs)
    return None


def minimised(job: Mapping[str, Any]) -> dict[str, Any]:
    """One finding of the store, minimised and written back. The event for the runner."""
    wanted = Fingerprint(*job["fingerprint"])
    case = from_json(job["case"])
    earlier = tuple(from_json(line) for line in job.get("history", ()))
    smallest = minimum(
        job["engine"], case, wanted, earlier=earlier, choices=bytes.fromhex(job.get("choices", "")), kind=job.get("kind", ""),
        size=job.get("size", "full"), hazards=job.get("hazards", True), checkpoint=job.get("checkpoint", ""), preset=job.get("preset", ""),
        seconds=job.get("seconds", SECONDS),
    )  # fmt: skip
    if smallest is None:
        return {"finding_id": job["finding_id"], "fingerprint": list(wanted), "minimal": False, "note": "the case does not fail any more"}
    with Supervisor(job["engine"], deadline_s=deadline_of(wanted)) as supervisor, Store.create_or_open(job["store"]) as store:
        bench = Bench(supervisor)
        changes = described(bench, smallest, wanted)
        note = str(changes.get("bisect", {}).get("note", ""))
        folder = store.capsule_folder(job["finding_id"])
        supervisor.restart()  # the arrays of a capsule are those of an engine in which nothing else has run
        capsule.write(
            folder, job["engine"], bench, smallest.case, smallest.judgement, finding_id=job["finding_id"], located=note,
            earlier=smallest.earlier, runs=smallest.runs,
        )  # fmt: skip
        changes["capsule"] = f"findings/{job['finding_id']}"
        store.update_finding(job["finding_id"], changes)
        fixed = {} if wanted.verdict in ("CRASHED", "HUNG") or smallest.earlier else dict(battery.compared(bench, smallest.case).verdicts())
    return {
        "finding_id": job["finding_id"], "fingerprint": list(wanted), "minimal": True, "case": to_json(smallest.case), "nodes": smallest.nodes,
        "history": [to_json(one) for one in smallest.earlier],
        "checks": smallest.checks, "seconds": smallest.seconds, "message": smallest.judgement.message, "layer": smallest.judgement.layer,
        "op": smallest.judgement.op, "tap": smallest.judgement.tap, "located": note, "battery": fixed,
    }  # fmt: skip


def described(bench: Bench, smallest: Minimum, wanted: Fingerprint) -> dict[str, Any]:
    """The columns of the finding that a minimum fills."""
    j, case = smallest.judgement, smallest.case
    changes: dict[str, Any] = {
        "case": to_json(case), "case_id": case_id(case), "minimal": True, "nodes": smallest.nodes, "checks": smallest.checks,
        "layer": j.layer, "step": j.step, "token": j.token, "index": list(j.index), "found": j.found, "expected": j.expected, "bound": j.bound,
        "share": j.share, "message": j.message, "rule": j.rule, "tree": bisect.tree_column(case, j),
    }  # fmt: skip
    if not j.op:
        del changes["rule"]  # it belongs to the fingerprint of a finding without an op
    if wanted.verdict not in ("CRASHED", "HUNG", "FLAKY") and not smallest.earlier:
        location = bisect.located(bench, case)
        if location is not None:
            changes |= {"bisect": bisect.bisect_column(location), "trace": bisect.trace_column(location)}
    return changes
