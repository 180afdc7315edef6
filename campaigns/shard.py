"""python -m campaigns.shard: one core's part of a campaign. Jobs come as JSON lines on stdin, events leave as JSON lines on stdout.

A process of its own, so that nothing of the runner's state or threads is shared and BLAS starts with one thread. It ends with its parent. The
engine runs in a worker below it. A new finding is in the store before its event is sent; it is minimised by a later job.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import heapq
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from campaigns import coverage, fingerprint, minimise, replay
from campaigns.case import Case, CaseError, OpCase, case_id, kind_of, to_json
from campaigns.discover import Diet, Discovery, Fresh, diet_of
from campaigns.fingerprint import Fingerprint
from campaigns.isolation import EngineLoadError, Supervisor
from campaigns.probes import audit_cases
from campaigns.strategies import in_frozen_mix
from campaigns.trial import Bench, Outcome, patience, takes_views
from impls.registry import UnknownEngine
from oracles.judgement import FINDINGS, RUNGS, Judgement, Verdict
from reports.store import Store, StoreError
from reports.store import fingerprint as store_fingerprint

EVENT_EVERY_S = 0.5
HISTORY = 48  # cases kept, to tell a failure that needs earlier cases from a flaky one
ALONE_TRIES = 60  # later cases with the fingerprint of a finding that needed its history, until one fails on its own
ALONE_S = 5.0  # a check that stops at its first finding waits this long for such a case; then the history is minimised
REPLAYS = 3  # in a fresh worker, before a new finding is believed; more are made by `nightly`
HANGS_MAX = 3  # of one op or kind, each costs a deadline; then it is left out of the diet
SAMPLE = 200  # one trial in this many keeps its case line in the store although nothing is wrong
SLOWEST = 10  # trials of each shard that keep their case line because they took longest; about SLOWEST * ln(trials / SLOWEST) lines
SEARCH_LEAST_S = 1.0  # of a campaign whose time went into loading the engine
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """SIGKILL when the runner ends, however it ends (Linux; elsewhere the end of stdin stops the shard between jobs)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@dataclass
class Tally:
    """Counts of one rung."""

    judgements: int = 0
    checked: int = 0
    unverified: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)  # of trials: the worst verdict that this rung gave

    def add(self, judgements: Sequence[Judgement]) -> None:
        self.judgements += len(judgements)
        worst = Verdict.EXACT
        order = list(Verdict)
        for judgement in judgements:
            if judgement.verdict == Verdict.UNVERIFIED:
                self.unverified += judgement.checked
            else:
                self.checked += judgement.checked
            worst = max(worst, judgement.verdict, key=order.index)
        self.verdicts[str(worst)] = self.verdicts.get(str(worst), 0) + 1

    def plain(self) -> dict[str, Any]:
        return {"judgements": self.judgements, "checked": self.checked, "unverified": self.unverified, "verdicts": self.verdicts}


class Shard:
    """Discovery on one engine, with everything written to the store."""

    def __init__(self, job: Mapping[str, Any], events: IO[str]) -> None:
        self.job, self.events = job, events
        self.engine: str = job["engine"]
        self.supervisor = Supervisor(self.engine, deadline_s=patience())
        self.bench = Bench(self.supervisor)
        self.name = self.supervisor.description.name
        self.store = Store.create_or_open(job["store"])
        self.store.add_engine(job["run_id"], engine_row(self.engine, self.supervisor.description))
        self.writer = self.store.writer(job["run_id"], job["writer"])
        self.known: dict[Fingerprint, str] = {}
        self.earlier = self._known_minima()
        self.leaning: dict[Fingerprint, int] = {}  # findings that needed their history -> tries left to meet a case that fails alone
        self.late_hits: collections.Counter[Fingerprint] = collections.Counter()
        self.history: collections.deque[Case] = collections.deque(maxlen=HISTORY)
        self.hangs: collections.Counter[str] = collections.Counter()
        self.tallies = {rung: Tally() for rung in RUNGS}
        self.counts = {"trials": 0, "frozen": 0, "failing": 0}
        self.verdicts: collections.Counter[str] = collections.Counter()  # of trials
        self.first_finding_s = -1.0
        self.began = time.monotonic()
        self.to_minimise = False  # a finding was met that is worth the time
        self.slowest: list[float] = []  # a heap: seconds of the slowest trials so far

    def _known_minima(self) -> dict[Fingerprint, dict[str, Any]]:
        """Findings of earlier runs that still stand, with their smallest case: met again they are counted, not minimised again."""
        skipped = set(self.job.get("not_reproduced", ()))
        return {
            Fingerprint(*store_fingerprint(row)): row
            for row in self.store.findings()
            if row["engine"] == self.name and row["minimal"] and row["status"] != "fixed" and row["finding_id"] not in skipped
        }

    def close(self) -> None:
        self.flush_hits()
        self.writer.close()
        self.store.close()
        self.supervisor.close()

    def say(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=self.events, flush=True)

    # ---- discovery -------------------------------------------------------------------------------------------------------------------

    def discover(self) -> None:
        """Trials until the quota or the time is used up."""
        began = said = self.began = time.monotonic()
        diet = diet_of(
            self.supervisor.description,
            hazards=self.job.get("hazards", True),
            views=takes_views(self.supervisor),
            checkpoint=self.job.get("checkpoint", ""),
            preset=self.job.get("preset", ""),
        )
        if self.job.get("writer", "").endswith("-0"):
            for region, value in sorted(coverage.declared()):
                self.writer.add_coverage({"engine": self.name, "region": region, "value": value, "trials": 0})
        if not diet.shares():
            self.say("nothing", reason="the engine offers neither operations nor sessions")
            return
        if self.job.get("writer", "").endswith("-0"):
            self.audit(began)
        quota, seconds = self.job["trials"], self.job.get("seconds") or float("inf")
        reserve = self.job.get("reserve", 0.0)
        until = max(min(began + seconds, self.job.get("until", float("inf"))), began + min(seconds, SEARCH_LEAST_S))
        discovery = Discovery(diet, self.job["seed"], self.bench.outcomes, self.record, trials_expected=quota)
        while discovery.trials < quota and time.monotonic() < until - reserve * self.to_minimise:
            for fresh in discovery.step():
                self.announce(fresh, time.monotonic() - began)
            if self.hangs:
                discovery.diet = self.without_hanging(discovery.diet)
                if not discovery.diet.shares():
                    break
            waited = time.monotonic() - began - self.first_finding_s > ALONE_S
            if self.job.get("stop_at_first") and (self.known.keys() - self.leaning.keys() or (self.known and waited)):
                break
            if time.monotonic() - said > EVENT_EVERY_S:
                said = time.monotonic()
                self.say("progress", **self.counts)
        self.flush_hits()
        self.writer.flush()
        tallies = {rung: tally.plain() for rung, tally in self.tallies.items() if tally.judgements}
        self.say(
            "discovered",
            **self.counts,
            by_kind=discovery.done,
            verdicts=dict(self.verdicts),
            tallies=tallies,
            first_finding_s=self.first_finding_s,
        )

    def audit(self, began: float) -> None:
        """The probes of the declared arithmetic, once per check; they count as trials of operations."""
        for outcome in self.bench.outcomes(audit_cases(self.supervisor.description)):
            if self.record(outcome):
                self.announce(Fresh(outcome, "full", b""), time.monotonic() - began)

    def record(self, outcome: Outcome) -> bool:
        """Write a trial; whether it is a finding with a new fingerprint."""
        case = outcome.case
        found = fingerprint.first(self.name, list(outcome.judgements))
        self.counts["trials"] += 1
        self.counts["frozen"] += in_frozen_mix(case)
        self.counts["failing"] += found is not None
        self.verdicts[str(outcome.verdict)] += 1
        name = case_id(case)
        by_rung: dict[str, list[Judgement]] = {}
        for judgement in outcome.judgements:
            by_rung.setdefault(judgement.rung, []).append(judgement)
            self.writer.add_judgement(judgement_row(self.name, name, judgement))
        for rung, judgements in by_rung.items():
            if rung in self.tallies:
                self.tallies[rung].add(judgements)
        kept = found is not None or self._is_slow(outcome.seconds) or self.counts["trials"] % SAMPLE == 1
        self.writer.add_trial(trial_row(self.name, name, outcome, kept))
        for region, value in coverage.cells(case):
            self.writer.add_coverage({"engine": self.name, "region": region, "value": value, "findings": int(found is not None)})
        if any(judgement.checked and judgement.verdict != Verdict.UNSUPPORTED for judgement in outcome.judgements):
            for cell in coverage.crossed(case):
                self.writer.add_cell(self.name, cell, failing=found is not None)
        self.history.append(case)
        if found is None:
            return False
        if found[1].verdict == Verdict.HUNG:
            self.hangs[case.op if isinstance(case, OpCase) else kind_of(case)] += 1
        if found[0] in self.known:
            self.late_hits[found[0]] += 1
            return self._may_stand_alone(found[0])
        if found[0] in self.earlier:
            row = self.earlier[found[0]]
            self.known[found[0]] = str(row["finding_id"])
            self.late_hits[found[0]] += 1
            if self.first_finding_s < 0:
                self.first_finding_s = time.monotonic() - self.began
            self.say(
                "finding", finding_id=row["finding_id"], status=row["status"], fingerprint=list(found[0]), message=row["message"], case=row["case"],
                minimise=False, note="known", nodes=row["nodes"], minimal=True,
            )  # fmt: skip
            return False
        self.known[found[0]] = ""
        return True

    def _is_slow(self, seconds: float) -> bool:
        """Whether it is among the SLOWEST trials so far: their cases are kept, so that the page can say what a night waits for."""
        if len(self.slowest) < SLOWEST:
            heapq.heappush(self.slowest, seconds)
            return True
        return heapq.heappushpop(self.slowest, seconds) < seconds

    def _may_stand_alone(self, print_: Fingerprint) -> bool:
        """Whether a case with a known fingerprint is worth a replay: so far that finding shows only after earlier cases."""
        left = self.leaning.get(print_, 0)
        if left:
            self.leaning[print_] = left - 1
        return left > 0

    def announce(self, fresh: Fresh, seconds: float) -> None:
        """Believe a new finding only after replays in fresh workers; store it; tell the runner.

        A finding that needs its history is stored as it is, and looked out for: a case that fails on its own takes its place.
        """
        outcome = fresh.outcome
        found = fingerprint.first(self.name, list(outcome.judgements))
        assert found is not None
        met, judgement = found
        print_ = met
        if met in self.leaning and not replay.fails_again(self.supervisor, outcome.case, met):
            return
        reproduced, note, earlier = self.believed(outcome.case, print_)
        case = outcome.case
        if note == "needs history":
            *earlier, case = earlier
        if note == "flaky":
            judgement = _flaky(judgement, reproduced)
            print_ = fingerprint.of(self.name, judgement)
        finding = finding_row(self.supervisor.description, judgement, case) | {
            "run_id": self.job["run_id"], "reproduced": reproduced, "attempts": REPLAYS, "replay": replay_command(self.engine, self.job["store"], ""),
        }  # fmt: skip
        name, status = self.store.report_finding(finding)
        self.store.update_finding(name, {"replay": replay_command(self.engine, self.job["store"], name)})
        self.known[print_] = self.known[met] = name
        if note == "needs history":
            self.leaning.setdefault(met, ALONE_TRIES)
        elif self.leaning.pop(met, None) is not None and note == "":
            own = (
                "layer",
                "step",
                "token",
                "index",
                "found",
                "expected",
                "bound",
                "share",
                "message",
                "case",
                "case_id",
                "nodes",
                "reproduced",
                "attempts",
            )
            self.store.update_finding(name, {key: finding[key] for key in own})
        if self.first_finding_s < 0:
            self.first_finding_s = seconds
        minimise = note != "flaky" or reproduced > 0
        self.to_minimise |= minimise
        self.say(
            "finding", finding_id=name, status=status, fingerprint=list(print_), message=judgement.message, case=to_json(case),
            minimise=minimise, note=note, choices=fresh.choices.hex(), kind=kind_of(case), size=fresh.size,
            history=[to_json(one) for one in earlier],
        )  # fmt: skip

    def believed(self, case: Case, wanted: Fingerprint) -> tuple[int, str, list[Case]]:
        """(failures in REPLAYS fresh workers, "" | "needs history" | "flaky", the cases that fail in this order where the history is needed: the
        last of them fails)."""
        reproduced = sum(replay.fails_again(self.supervisor, case, wanted) for _ in range(REPLAYS))
        if reproduced == REPLAYS:
            return reproduced, "", []
        if not reproduced:
            self.supervisor.restart()
            run: list[Case] = []
            for earlier in list(self.history):
                run.append(earlier)
                try:
                    again = fingerprint.first(self.name, list(self.bench.outcome(earlier).judgements))
                except CaseError:
                    continue
                if again is not None and again[0] == wanted:
                    return reproduced, "needs history", run
        return reproduced, "flaky", []

    def without_hanging(self, diet: Diet) -> Diet:
        """The diet without what hung too often."""
        import dataclasses

        gone = {name for name, count in self.hangs.items() if count >= HANGS_MAX}
        return dataclasses.replace(
            diet,
            ops=tuple(op for op in diet.ops if op not in gone),
            trees=diet.trees and "tree" not in gone,
            sessions=diet.sessions and "session" not in gone,
        )

    def flush_hits(self) -> None:
        """Hits of known findings, summed."""
        rows = {str(row["finding_id"]): row for row in self.store.findings()} if self.late_hits else {}
        for print_, hits in self.late_hits.items():
            row = rows.get(self.known.get(print_, ""))
            if row is not None:
                again = {name: row[name] for name in ("engine", "verdict", "op", "rule", "output", "rung", "case")}
                self.store.report_finding(again | {"run_id": self.job["run_id"], "hits": hits, "case_id": row["case_id"]})
        self.late_hits.clear()


# ---- rows of the store ---------------------------------------------------------------------------------------------------------------


def engine_row(spec: str, description: Any) -> dict[str, Any]:
    offers = ", ".join(sorted(description.capabilities)) or "nothing"
    text = f"offers {offers}; {len(description.ops)} operations, {len(description.taps)} taps"
    text += "".join(f"; by design {d.field} = {d.value}: {d.reason}" for d in description.departures)
    return {
        "spec": spec,
        "name": description.name,
        "version": description.version,
        "profile": description.profile.name,
        "description": text,
    }


def judgement_row(engine: str, case: str, j: Judgement) -> dict[str, Any]:
    row: dict[str, Any] = {
        "engine": engine, "case_id": case, "rung": j.rung, "op": j.op, "tap": j.tap, "layer": j.layer, "rule": j.rule,
        "verdict": str(j.verdict), "checked": j.checked, "share": j.share,
    }  # fmt: skip
    if j.verdict in FINDINGS:
        row |= {
            "step": j.step,
            "token": j.token,
            "index": list(j.index),
            "found": j.found,
            "expected": j.expected,
            "bound": j.bound,
            "message": j.message,
        }
    return row


def trial_row(engine: str, case: str, outcome: Outcome, with_case: bool) -> dict[str, Any]:
    worst = outcome.worst
    return {
        "engine": engine,
        "kind": kind_of(outcome.case),
        "rung": worst.rung if worst is not None and worst.verdict in FINDINGS else (outcome.rungs[-1] if outcome.rungs else ""),
        "rungs": ";".join(outcome.rungs),
        "case_id": case,
        "case": to_json(outcome.case) if with_case else "",
        "verdict": str(outcome.verdict),
        "checked": sum(j.checked for j in outcome.judgements if j.verdict != Verdict.UNVERIFIED),
        "unverified": sum(j.checked for j in outcome.judgements if j.verdict == Verdict.UNVERIFIED),
        "duration_ms": outcome.seconds * 1e3,
        "seed": str(getattr(outcome.case, "seed", getattr(outcome.case, "weights_seed", ""))),
    }


def finding_row(description: Any, j: Judgement, case: Case) -> dict[str, Any]:
    from campaigns.reduce import nodes_of

    return {
        "engine": description.name, "engine_version": description.version, "profile": description.profile.name, "verdict": str(j.verdict),
        "op": j.op, "rule": j.rule, "output": j.tap, "rung": j.rung, "layer": j.layer, "step": j.step, "token": j.token, "index": list(j.index),
        "found": j.found, "expected": j.expected, "bound": j.bound, "share": j.share, "message": j.message, "case": to_json(case),
        "case_id": case_id(case), "nodes": nodes_of(case),
    }  # fmt: skip


def replay_command(engine: str, store: str, finding: str) -> str:
    return f"paritree replay {finding or '...'} --store {store} --engine {engine}"


def _flaky(judgement: Judgement, reproduced: int) -> Judgement:
    import dataclasses

    message = f"fails in {reproduced} of {REPLAYS} replays in a fresh process: {judgement.message}"
    return dataclasses.replace(judgement, verdict=Verdict.FLAKY, message=message)


# ---- the process ---------------------------------------------------------------------------------------------------------------------


def jobs(stream: IO[str]) -> Iterator[dict[str, Any]]:
    for line in stream:
        if line.strip():
            yield json.loads(line)


def main() -> int:
    """Exit 0: told to stop, 2: the store cannot be written, 3: the engine cannot be loaded, 4: an error of ours."""
    die_with_parent()
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints goes to the log, not between the events
    random.seed(0)  # nothing draws from the global generator; if something does, it does so reproducibly
    shard: Shard | None = None
    try:
        for job in jobs(sys.stdin):
            if job["do"] == "discover":
                shard = shard or Shard(job, events)
                shard.discover()
            elif job["do"] == "replay":
                result = replay.replayed_findings(job)
                print(json.dumps({"event": "replayed", **result}), file=events, flush=True)
            elif job["do"] == "minimise":
                result = minimise.minimised(job)
                print(json.dumps({"event": "minimised", **result}), file=events, flush=True)
        return 0
    except (EngineLoadError, UnknownEngine) as problem:
        print(json.dumps({"event": "not loadable", "message": str(problem)}), file=events, flush=True)
        return 3
    except StoreError as problem:
        fields = (problem.path, problem.found, problem.expected, problem.advice)
        print(json.dumps({"event": "store", "problem": fields}), file=events, flush=True)
        return 2
    except Exception as problem:
        told = "; ".join(getattr(problem, "__notes__", ()))
        print(json.dumps({"event": "error", "message": f"{type(problem).__name__}: {problem} {told}"}), file=events, flush=True)
        traceback.print_exc()
        return 4
    finally:
        if shard is not None:
            with contextlib.suppress(StoreError):  # it has been said; a store that fails only here has lost no finding
                shard.close()


if __name__ == "__main__":
    sys.exit(main())
