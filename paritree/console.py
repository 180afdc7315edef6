"""What the command line prints: progress, the ladder, nights, locations. Rounding never turns a divergence into 0 or a rate into 100 %."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oracles.judgement import FINDINGS, RUNGS, Judgement, Verdict, worst
from reports.schema import SEARCH_S

if TYPE_CHECKING:
    from campaigns.battery import Compared
    from campaigns.bisect import Location
    from campaigns.certify import Certificate
    from campaigns.measure import Measured
    from campaigns.nightly import Night
    from campaigns.runner import EngineResult
    from campaigns.tree_profile import TreeProfileReport
    from campaigns.vectors_check import Checked
    from spec.engine import Description

LINE_EVERY_S = 10.0  # in a log; on a terminal the line is rewritten
SHOWN_PER_VECTOR = 3
PASSING = (Verdict.EXACT, Verdict.WITHIN_BOUND, Verdict.TIE)


class Log:
    """Progress on stderr: one rewritten line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._said = time.monotonic()
        self._open = False

    def progress(self, engine: str, event: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        if event["event"] == "progress":
            text = f"{engine}: {event['trials']:,} trials, {event['frozen']:,} frozen-mix sessions, {event['failing']:,} failing"
            if self._terminal:
                print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
                self._open = True
            elif time.monotonic() - self._said > LINE_EVERY_S:
                self._said = time.monotonic()
                print(text, file=sys.stderr, flush=True)
            return
        self.end()
        if event["event"] == "finding":
            note = f" [{event['note']}]" if event.get("note") else ""
            print(f"{engine}: {event['finding_id']} {event['status']}{note}: {first_line(event['message'])}", file=sys.stderr, flush=True)
        elif event["event"] == "not loaded":
            print(not_checked(engine, event["message"]), file=sys.stderr, flush=True)
        elif event["event"] == "minimised":
            result = f"smallest case after {event['checks']} checks" if event["minimal"] else event["note"]
            print(f"{engine}: {event['finding_id']} {result}", file=sys.stderr, flush=True)
        elif event["event"] == "plant":
            result = "found" if event["found"] and event["localised"] else "found elsewhere" if event["found"] else "not found"
            print(f"{engine}: plant {event['plant']} {result}", file=sys.stderr, flush=True)
        elif event["event"] == "replay":
            counts = f", {event['reproduced']} of {event['attempts']} replays fail" if "reproduced" in event else ""
            print(f"{engine}: {event['finding_id']} {event['status']}{counts}", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._open:
            print(file=sys.stderr)
            self._open = False


def first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def exit_code(results: Iterable[EngineResult]) -> int:
    """1 where anything was found, 3 where an engine could not be loaded, 5 where one had nothing that could be verified, else 0."""
    every = list(results)
    if any(result.findings or result.failing for result in every):
        return 1
    if any(result.not_loaded for result in every):
        return 3
    return 5 if any(not result.verified for result in every) else 0


def ladder(result: EngineResult, store: str = "") -> str:
    """One engine: trials, a line per rung, findings, each with its command; `store`: where it is not the default."""
    if result.not_loaded:
        return not_checked(result.engine, result.not_loaded)
    where = f" --store {shlex.quote(store)}" if store else ""
    lines = [
        f"{result.engine}: {result.trials:,} trials in {result.seconds:.0f} s, {result.frozen:,} frozen-mix sessions, {result.verified:,} values compared, {percentage(result.unverified_share)} UNVERIFIED"
    ]
    if result.nothing:
        lines.append(f"  nothing to check: {result.nothing}")
    for rung in RUNGS:
        tally = result.tallies.get(rung)
        if tally is None:
            lines.append(f"  {'-':4} {rung:18} not reached")
            continue
        verdicts = tally["verdicts"]
        failing = sum(verdicts.get(str(v), 0) for v in FINDINGS)
        passing = sum(verdicts.get(str(v), 0) for v in PASSING)
        total = sum(verdicts.values())
        mark = "FAIL" if failing else "ok" if passing else "?"
        others = ", ".join(f"{name} {count:,}" for name, count in sorted(verdicts.items()) if Verdict(name) not in PASSING)
        detail = f"; {others}" if others else ""
        lines.append(
            f"  {mark:4} {rung:18} {passing:,} of {total:,} trials pass, {share(tally['unverified'], tally['unverified'] + tally['checked'])} unverified{detail}"
        )
    if result.first_failing_rung:
        lines.append(f"  first failing rung: {result.first_failing_rung}")
    for event in result.findings.values():
        lines += [f"  {event['finding_id']} {event.get('status', '')}: {first_line(event['message'])}"]
        if event.get("located"):
            lines.append(f"      at {first_line(event['located'])}")
        if event.get("note"):
            lines.append(f"      {event['note']}")
        lines.append(f"      paritree replay {event['finding_id']} --engine {shlex.quote(result.engine)}{where}")
    return "\n".join(lines)


def not_checked(engine: str, reason: str) -> str:
    return f"{engine}: not checked: {reason.removeprefix(f'{engine}: ')}"


def share(part: int, whole: int) -> str:
    """A percentage that is 0 % or 100 % only where it is exactly that."""
    return percentage(part / whole if whole else 0.0)


def percentage(value: float) -> str:
    if value <= 0:
        return "0 %"
    if value >= 1:
        return "100 %"
    return f"{min(99.99, max(0.01, 100 * value)):.2f} %"


def night(result: Night, store: str = "") -> str:
    lines = [ladder(one, store) for one in result.results]
    for status, rows in result.by_status().items():
        for row in rows:
            accepted = " (accepted in the ledger)" if row["finding_id"] in result.accepted else ""
            accepted += " (not replayed tonight: no time)" if row["finding_id"] in result.waiting else ""
            lines.append(
                f"{status:9} {row['finding_id']} {row['engine']} {row['verdict']} {row['op'] or row['rule']} ({row['rung']}){accepted}: {first_line(row['message'])}"
            )
    counts = ", ".join(f"{len(rows)} {status}" for status, rows in result.by_status().items() if rows)
    lines.append(counts or "nothing found")
    if result.sample:
        found, right = sum(score.found for score in result.sample), sum(score.localised for score in result.sample)
        lines.append(f"the judge itself: {found} of {len(result.sample)} planted defects found tonight, {right} at the right place")
        for score in result.sample:
            if not score.found:
                word = "missed" if score.searched >= SEARCH_S else f"the score allows {SEARCH_S:.0f} s, not found"
                lines.append(f"  {score.mutant} ({score.defect_class}): {word} in {score.searched:.0f} s")
    return "\n".join(lines)


def location(found: Location) -> str:
    lines = [found.sentence(), f"  {found.note}"]
    for station in found.stations:
        here = "  <- here" if (station.tap, station.layer) == (found.judgement.tap, found.judgement.layer) else ""
        lines.append(
            f"  layer {station.layer:3} {station.tap:16} relative error {station.relative_error:8.2e}  share of bound {station.share:8.2e}{here}"
        )
    if found.stations:
        lines.append(f"  the step's token {'changes' if found.token_changed else 'stays'}")
    return "\n".join(lines)


def plain_judgements(judgements: Iterable[Judgement]) -> list[dict[str, Any]]:
    return [{key: _plain(value) for key, value in dataclasses.asdict(j).items()} for j in judgements]


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return str(value) if isinstance(value, Verdict) else value


def print_judgements(judgements: list[Judgement], *, as_json: bool) -> int:
    """Exit code: 1 for a finding, 5 where nothing could be verified."""
    wrong = any(j.verdict in FINDINGS for j in judgements)
    code = 1 if wrong else 0 if any(j.verdict in PASSING for j in judgements) else 5
    if as_json:
        print(json.dumps({"exit_code": code, "judgements": plain_judgements(judgements)}))
    else:
        for j in judgements:
            print(f"{j.verdict:13} {j.tap}: {j.message or f'{j.checked:,} values, largest share of the bound {j.share:.3g}'}")
    return code


def print_battery(judgements: list[Judgement], compared: Compared, *, as_json: bool) -> int:
    """Our verdict first; the exit code is ours, too."""
    from oracles.battery import FIXED_RULES

    wrong = any(j.verdict in FINDINGS for j in judgements)
    code = 1 if wrong else 0 if any(j.verdict in PASSING for j in judgements) else 5
    fixed = {} if compared.empty else dict(compared.verdicts())
    if as_json:
        body = {"exit_code": code, "judgements": plain_judgements(judgements), "battery": fixed, "compared": compared.words}
        print(json.dumps(body))
        return code
    first = worst(judgements)
    said = "nothing was judged" if first is None else f"{first.verdict}{': ' + first.message if first.message else ''}"
    words = {rule.name: rule.words for rule in FIXED_RULES}
    print(f"{'paritree':17} {'fails' if wrong else 'passes' if code == 0 else 'open':7} {said}")
    for name, passes in fixed.items():
        print(f"{name:17} {'passes' if passes else 'fails':7} {words.get(name, 'the greedy choice of every row is the golden one')}")
    unanswered = "" if compared.whole else "; not all of it was answered, which fails every rule"
    print(f"compared with golden values: {', '.join(compared.words) or 'nothing, there is no golden value to compare with'}{unanswered}")
    return code


def certificates(engine: str, found: Sequence[Certificate]) -> str:
    """What was tried, how often, whether every bit was equal, and the first difference of each way."""
    lines = [engine]
    for one in found:
        said = "holds: every bit equal" if one.holds else "DOES NOT HOLD" if one.first else "nothing could be compared"
        lines.append(f"  {one.name}: {said}")
        lines.append(f"    {one.summary}; {one.sessions} sessions, {one.runs} pairs of runs, {one.values:,} values")
        for way in one.ways.values():
            equal = "nothing to compare" if not way.runs else "bit-equal" if not way.first else f"differs: {way.first}"
            lines.append(f"    {way.name} ({way.words}): {way.equal} of {way.runs} pairs, {way.values:,} values; {equal}")
        if one.case:
            lines.append(f"    the first difference is shown by {one.case}")
    return "\n".join(lines)


RANKED = 4  # profiles listed below the best
SHOWN = 24  # numbers that fit on a line of a terminal


def tree_profile(report: TreeProfileReport) -> str:
    """The profile, the mass lost, the smallest tree that is not the paper's, the next best profiles, and why probes gave no tree."""
    finding = report.finding
    lines = []
    if finding is None:
        lines.append(f"{report.engine}: no draft tree was seen")
    else:
        best = finding.best
        name = f"profile {best.title}, {best.match.words}: {best.profile.summary}" if best else "no named profile explains its trees"
        lines.append(f"{report.engine}: {name}")
        if best and best.profile.name != "paper":
            lines.append(f"  as in      {best.profile.source}")
        lines.append(f"  seen       {finding.trees} trees, by {report.source}")
        lines.append(
            f"  mass lost  {mass_share(finding.mass_lost_mean)} on average, {mass_share(finding.mass_lost_max)} at most, of the paper's"
        )
        if finding.departure is not None:
            small = finding.departure
            lines.append(f"  smallest   budget {small.budget}, log-probabilities {_rows(small.table.log_probs.tolist())}")
            lines.append(f"             the paper takes {_paths(small.paper.ranks)}, the engine {_paths(small.found.ranks)}")
        if best is None or best.profile.name != "paper" or finding.departure is not None:
            for other in finding.ranking[: RANKED + 1]:
                if other != best:
                    lines.append(f"  not        {other.title}: explains {other.explained} of {finding.trees} trees")
    lines += [f"  no tree    {problem}" for problem in report.problems[:RANKED]]
    if len(report.problems) > RANKED:
        lines.append(f"             and {len(report.problems) - RANKED} more")
    return "\n".join(lines)


def plain_tree_profile(report: TreeProfileReport) -> dict[str, Any]:
    finding = report.finding
    body: dict[str, Any] = {"engine": report.engine, "source": report.source, "problems": list(report.problems)}
    if finding is None:
        return body | {"trees": 0, "profile": None}
    best, small = finding.best, finding.departure
    return body | {
        "trees": finding.trees,
        "profile": best.profile.name if best else None,
        "parameter": best.profile.parameter if best else "",
        "match": best.match.name.lower() if best else "none",
        "source_of_profile": best.profile.source if best else "",
        "surrogate_mass_lost_mean": finding.mass_lost_mean,
        "surrogate_mass_lost_max": finding.mass_lost_max,
        "ranking": [{"profile": e.title, "match": e.match.name.lower(), "explained": e.explained} for e in finding.ranking],
        "smallest_departure": None
        if small is None
        else {
            "budget": small.budget,
            "log_probs": small.table.log_probs.tolist(),
            "paper": [list(path) for path in small.paper.ranks[1:]],
            "engine": [list(path) for path in small.found.ranks[1:]],
        },
    }


def mass_share(value: float) -> str:
    """A percentage that is 0 or 100 only where the value is; a negative rest of rounding is nothing."""
    if value <= 0:
        return "0 %"
    if value >= 1:
        return "100 %"
    return "< 0.01 %" if value < 1e-4 else "> 99.99 %" if value > 0.9999 else f"{100 * value:.2f} %"


def _rows(log_probs: list[list[float]]) -> str:
    if len(log_probs) * len(log_probs[0]) > SHOWN:
        return f"of {len(log_probs)} depths with {len(log_probs[0])} candidates (--json lists them)"
    return "[" + ", ".join("[" + ", ".join(f"{value:.4g}" for value in row) + "]" for row in log_probs) + "]"


def _paths(ranks: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join("(" + ",".join(map(str, path)) + ")" for path in ranks[1:]) or "nothing"


def print_vectors(author: Description, checked: Sequence[Checked], *, as_json: bool) -> int:
    """A line per vector, and below it what was found and the rule that says so. Exit code as `print_judgements`."""
    wrong = [one for one in checked if one.verdict in FINDINGS]
    code = 1 if wrong else 0 if any(j.verdict in PASSING for one in checked for j in one.judgements) else 5
    if as_json:
        vectors = [
            {"id": one.id, "kind": one.kind, "verdict": str(one.verdict), "rule": one.worst.rule if one.worst else "", "exercises": list(one.rules),
             "judgements": plain_judgements(one.judgements)} for one in checked
        ]  # fmt: skip
        print(json.dumps({"exit_code": code, "engine": author.name, "profile": author.profile.name, "vectors": vectors}))
        return code
    for one in checked:
        print(f"{one.verdict:13} {one.id}")
        told = [j for j in one.judgements if j.verdict not in PASSING]
        for j in told[:SHOWN_PER_VECTOR]:  # the first alarm in data order is the location; later ones may be its consequences
            where = "" if one.kind == "op" else f"step {j.step + 1}, "
            print(f"    {where}{j.op or j.tap}, rule {j.rule}: {j.message or j.tap}")
        if len(told) > SHOWN_PER_VECTOR:
            print(f"    and {len(told) - SHOWN_PER_VECTOR} more, perhaps consequences of these: --json lists them")
    counts = Counter(str(one.verdict) for one in checked)
    print(
        f"{author.name} {author.version} under {author.profile.name}: "
        + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    )
    rules = sorted({one.worst.rule for one in wrong if one.worst is not None and " " not in one.worst.rule})
    if rules:
        print(f"what the rules say: paritree explain {' '.join(rules)}")
    return code


def print_measured(measured: Measured, *, as_json: bool) -> int:
    """Sure lines first. Exit code: 1 where a sure line is outside the declared profile, 5 where nothing could be said."""
    declared, lines = measured.description.profile, measured.lines
    wrong = measured.contradictions
    code = 1 if wrong else 0 if any(line.value is not None for line in lines) else 5
    if as_json:
        plain = [
            {"name": line.name, "value": line.value, "certainty": str(line.certainty), "declared": getattr(declared, line.name, None),
             "contradicts": line in wrong, "evidence": line.evidence} for line in lines
        ]  # fmt: skip
        body = {"exit_code": code, "engine": measured.description.name, "declared": dataclasses.asdict(declared)}
        print(json.dumps(body | {"profile": dataclasses.asdict(measured.profile), "lines": plain}))
        return code
    print(f"{measured.description.name} {measured.description.version}, declares {declared.name}")
    for certainty in ("sure", "likely", "unknown"):
        for line in lines:
            if line.certainty != certainty:
                continue
            claimed = f" (declared {shown(getattr(declared, line.name))})" if hasattr(declared, line.name) else ""
            print(f"  {certainty:8} {line.name:16} {shown(line.value):14}{claimed}\n           {line.evidence}")
    for line in wrong:
        print(f"declares {line.name} {shown(getattr(declared, line.name))}, behaves like {shown(line.value)}: {line.evidence}")
    fields = {name: value for name, value in dataclasses.asdict(measured.profile).items() if value != getattr(type(declared)(), name)}
    print(
        "proposed: Profile("
        + ", ".join(f"{name}={shown(value) if isinstance(value, float) else repr(value)}" for name, value in fields.items())
        + ")"
    )
    return code


def shown(value: object) -> str:
    """Powers of two as such: unit roundoffs read as bits."""
    if isinstance(value, float) and 0 < value < 2.0**-6 and math.frexp(value)[0] == 0.5:
        return f"2**{math.frexp(value)[1] - 1}"
    return "?" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
