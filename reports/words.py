"""What the words on a page mean, and a finding in one sentence."""

from __future__ import annotations

import math
from typing import Any

from reports import numbers

VERDICT_MEANING = {
    "EXACT": "Equal bit for bit, or the exact decision on the engine's own scores.",
    "WITHIN_BOUND": "Inside the certified bound: the declared arithmetic explains the difference.",
    "TIE": "Another token than the specification's, and proven to be a tie: every step before it passed and the margin is explained.",
    "UNSUPPORTED": "The engine says that it does not do this. An answer, not a failure.",
    "UNVERIFIED": "Nothing could be proven either way. Never counted as passed.",
    "WARNING": "A statistic looks odd (drift, acceptance length). No proof, so no finding.",
    "FLAKY": "The same case gave different answers in repeated runs.",
    "MALFORMED": "An answer that is no answer: wrong shape, type, token range or count.",
    "NONFINITE": "NaN or infinity where the specification has a number.",
    "DEFECT": "Outside the certified bound, or a wrong exact decision: proof, relative to the declared profile.",
    "HUNG": "No answer before the deadline.",
    "CRASHED": "The engine's process ended.",
}
STATUS_MEANING = {
    "new": "met for the first time by this campaign",
    "reopened": "met again after it had been fixed",
    "changed": "the stored case no longer fails, but another one with the same fingerprint does",
    "flaky": "the stored case failed in some replays and not in others",
    "known": "met by an earlier campaign and not fixed since",
    "fixed": "the stored case was replayed and no longer fails",
}
RUNG_WORD = {
    "pass": "passes",
    "first": "first failure",
    "later": "fails too",
    "unverified": "unverified",
    "unsupported": "unsupported",
    "absent": "not run",
}
RUNG_SIGN = {"pass": "✓", "first": "✕", "later": "✕", "unverified": "?", "unsupported": "–", "absent": ""}
GLOSSARY = {
    "Trial": "One case on one engine, however many tensors of it were compared.",
    "Case": "A recipe of one line: sizes, seeds, trees, steps. The arrays follow from it.",
    "Tap": "A tensor inside the model that the engine showed: scores, o_latent, expert_ids, ...",
    "Bound": "The largest difference that the engine's declared arithmetic (its profile) explains, derived for each element.",
    "Share of the bound": "|found − expected| / bound. Above 1 the engine is outside what its arithmetic explains.",
    "Profile": "The arithmetic that the engine declares: formats, accumulation, accuracy of exp and rsqrt. Undeclared means strict float32.",
    "Rung": "A step of the ladder: single operations, prefill, decode, tree verification, acceptance and commit, the whole loop.",
    "Finding": "All failures with the same engine, verdict, operation, output and rung. Its F- number is the same in every report.",
    "Checks": "Runs of the engine that minimising the case took.",
    "Mutation score": "Of defects planted on purpose, after bugs that really happened, the part that was found.",
    "False alarm": "A finding on an engine that is known to be right.",
    "Capsule": "The folder of a finding: case, arrays, a README and a script that shows it again with numpy and the engine alone.",
}


def sentence(finding: dict[str, Any]) -> str:
    """Where, what, how far off, and what the judge said of it."""
    where = []
    if finding["layer"] >= 0:
        where.append(f"layer {finding['layer']}")
    if finding["token"] >= 0:
        where.append(f"row {finding['token']}")
    place = f"In {', '.join(where)}: " if where else ""
    name = finding["output"] or finding["op"] or finding["rule"] or "the answer"
    op = f" (op {finding['op']})" if finding["op"] and finding["op"] != name else ""
    index = f"[{', '.join(map(str, finding['index']))}]" if finding["index"] else ""
    message = clip(finding["message"].strip())
    over = f" ({numbers.times(finding['share'])})" if math.isfinite(finding["share"]) and finding["share"] > 0 else ""
    if "should be" in message:  # the judge's own sentence has the numbers already
        return f"{message.rstrip('.')}{over}." if over not in message else message
    if finding["verdict"] in ("CRASHED", "HUNG", "FLAKY", "MALFORMED") or not has_numbers(finding):
        what = {
            "CRASHED": "the engine's process ended",
            "HUNG": "the engine gave no answer before the deadline",
            "FLAKY": "the same case gives different answers",
            "MALFORMED": "the answer has the wrong form",
            "NONFINITE": "the answer is not finite",
        }.get(finding["verdict"], "the answer is wrong")
        start = f"{place}{what} at {name}{op}"
    else:
        found, expected = numbers.pair(finding["found"], finding["expected"])
        within = f" within {numbers.value(finding['bound'], 3)}" if finding["bound"] > 0 else ""
        start = f"{place}{name}{index}{op} is {found}, but should be {expected}{within}{over}"
    start = start if start.startswith(name) else start[:1].upper() + start[1:]
    return f"{start}. {message}" if message and message not in start else f"{start}."


def clip(text: str, limit: int = 2_000) -> str:
    """A message may be a whole log; its beginning says what happened."""
    return text if len(text) <= limit else text[:limit] + " …"


def has_numbers(finding: dict[str, Any]) -> bool:
    """Whether found and expected were given: both are +0 where they were not."""
    return any(number != 0.0 or math.copysign(1.0, number) < 0 for number in (finding["found"], finding["expected"], finding["bound"]))


def tone(verdict: str) -> str:
    """good, warn or bad: the class of a verdict."""
    if verdict in ("EXACT", "WITHIN_BOUND", "TIE"):
        return "good"
    return "warn" if verdict in ("UNSUPPORTED", "UNVERIFIED", "WARNING") else "bad"
