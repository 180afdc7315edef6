"""A finding to its smallest case: Hypothesis shrinks, the reducer finishes, the location and the capsule are added, the store is updated.

Works for crashes and hangs as well: the worker is replaced, and a hang costs a short deadline of its own. The stored finding stands from the
start; whatever ends this early leaves it as it was.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from campaigns import battery, bisect, capsule, fingerprint
from campaigns.case import Case, CaseError, case_id, from_json, to_json
from campaigns.discover import batch_strategy, diet_of
from campaigns.fingerprint import Fingerprint
from campaigns.isolation import Deadline, Supervisor
from campaigns.reduce import nodes_of, reduced
from campaigns.shrink import shrunk
from campaigns.trial import Bench, patience, takes_views
from oracles.judgement import Judgement
from reports.store import Store

HANG_DEADLINE_S = 0.5  # ten times the longest step of a small case; a hang that is none costs one check
SECONDS = 60.0  # per finding; CAMPAIGNS 1.5: 140 checks in the median, 323 at most


CHECKS_MAX = 300  # runs of the engine per finding; the median needs 80, a tree that must keep two rounds over 200
SHRINK_CHECKS_MAX = 40  # of these, for Hypothesis: it finds the guilty case of a batch and its rough size


@dataclasses.dataclass(frozen=True)
class Minimum:
    """`judgement`: the first finding of `case`; `checks`: runs of the engine that it took."""

    case: Case
    judgement: Judgement
    checks: int
    seconds: float


def deadline_of(wanted: Fingerprint) -> Deadline:
    """A hang costs its deadline at each check, so that it gets a short one."""
    return Deadline(HANG_DEADLINE_S, first_s=HANG_DEADLINE_S) if wanted.verdict == "HUNG" else patience()


def checker(supervisor: Supervisor, wanted: Fingerprint) -> Any:
    """case -> whether it fails with the wanted fingerprint. A case that cannot be materialised does not."""
    bench = Bench(supervisor)

    def fails(case: Case) -> bool:
        try:
            found = fingerprint.first(wanted.engine, list(bench.outcome(case).judgements))
        except CaseError:
            return False
        return found is not None and found[0] == wanted

    return fails


def minimum(
    engine: str,
    case: Case,
    wanted: Fingerprint,
    *,
    choices: bytes = b"",
    kind: str = "",
    size: str = "full",
    hazards: bool = True,
    checkpoint: str = "",
    preset: str = "",
    seconds: float = SECONDS,
) -> Minimum | None:
    """The smallest case found in about `seconds`; None where `case` does not fail (any more)."""
    began = time.monotonic()
    with Supervisor(engine, deadline_s=deadline_of(wanted)) as supervisor:
        fails = checker(supervisor, wanted)
        if not fails(case):
            return None
        best, checks = case, 1
        if choices:
            diet = diet_of(supervisor.description, hazards=hazards, views=takes_views(supervisor), checkpoint=checkpoint, preset=preset)
            strategy = batch_strategy(diet, kind, size)
            best, made = shrunk(best, strategy, [choices], fails, seconds / 3, SHRINK_CHECKS_MAX)
            checks += made
        left = max(1.0, seconds - (time.monotonic() - began))
        best, made = reduced(best, fails, guilty=wanted.guilty, checks_max=CHECKS_MAX - checks, seconds=left)
        checks += made
        supervisor.restart()
        found = fingerprint.first(wanted.engine, list(Bench(supervisor).outcome(best).judgements))
        if found is None or found[0] != wanted:  # the minimum hangs on what ran before: the case as it was found stands
            best = case
            supervisor.restart()
            found = fingerprint.first(wanted.engine, list(Bench(supervisor).outcome(best).judgements))
        return None if found is None else Minimum(best, found[1], checks, time.monotonic() - began)


def minimised(job: Mapping[str, Any]) -> dict[str, Any]:
    """One finding of the store, minimised and written back. The event for the runner."""
    wanted = Fingerprint(*job["fingerprint"])
    case = from_json(job["case"])
    smallest = minimum(
        job["engine"], case, wanted, choices=bytes.fromhex(job.get("choices", "")), kind=job.get("kind", ""), size=job.get("size", "full"),
        hazards=job.get("hazards", True), checkpoint=job.get("checkpoint", ""), preset=job.get("preset", ""),
        seconds=job.get("seconds", SECONDS),
    )  # fmt: skip
    if smallest is None:
        return {"finding_id": job["finding_id"], "fingerprint": list(wanted), "minimal": False, "note": "the case does not fail any more"}
    with Supervisor(job["engine"], deadline_s=deadline_of(wanted)) as supervisor, Store.create_or_open(job["store"]) as store:
        bench = Bench(supervisor)
        changes = described(bench, smallest, wanted)
        note = str(changes.get("bisect", {}).get("note", ""))
        folder = store.capsule_folder(job["finding_id"])
        capsule.write(folder, job["engine"], bench, smallest.case, smallest.judgement, finding_id=job["finding_id"], located=note)
        changes["capsule"] = f"findings/{job['finding_id']}"
        store.update_finding(job["finding_id"], changes)
        fixed = {} if wanted.verdict in ("CRASHED", "HUNG") else dict(battery.compared(bench, smallest.case).verdicts())
    return {
        "finding_id": job["finding_id"], "fingerprint": list(wanted), "minimal": True, "case": to_json(smallest.case), "nodes": nodes_of(smallest.case),
        "checks": smallest.checks, "seconds": smallest.seconds, "message": smallest.judgement.message, "layer": smallest.judgement.layer,
        "op": smallest.judgement.op, "tap": smallest.judgement.tap, "located": note, "battery": fixed,
    }  # fmt: skip


def described(bench: Bench, smallest: Minimum, wanted: Fingerprint) -> dict[str, Any]:
    """The columns of the finding that a minimum fills."""
    j, case = smallest.judgement, smallest.case
    changes: dict[str, Any] = {
        "case": to_json(case), "case_id": case_id(case), "minimal": True, "nodes": nodes_of(case), "checks": smallest.checks,
        "layer": j.layer, "step": j.step, "token": j.token, "index": list(j.index), "found": j.found, "expected": j.expected, "bound": j.bound,
        "share": j.share, "message": j.message, "rule": j.rule, "tree": bisect.tree_column(case, j),
    }  # fmt: skip
    if not j.op:
        del changes["rule"]  # it belongs to the fingerprint of a finding without an op
    if wanted.verdict not in ("CRASHED", "HUNG"):
        location = bisect.located(bench, case)
        if location is not None:
            changes |= {"bisect": bisect.bisect_column(location), "trace": bisect.trace_column(location)}
    return changes
