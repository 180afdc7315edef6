"""What a store holds: every table, every column, its unit and its meaning.

This file is the law for `reports.store` and the source of `docs/store.md`; a test fails when they drift apart. Verdicts and rungs are
repeated here as words because this room imports no other; a test holds them equal to `oracles.judgement`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reports.cells import AXES, MEANING

SCHEMA = 1  # a store with a higher number is refused; a lower one is read (columns it lacks get their empty value)

# In order of severity, as in oracles.judgement.
VERDICTS = (
    "EXACT",
    "WITHIN_BOUND",
    "TIE",
    "UNSUPPORTED",
    "UNVERIFIED",
    "WARNING",
    "FLAKY",
    "MALFORMED",
    "NONFINITE",
    "DEFECT",
    "HUNG",
    "CRASHED",
)
FINDING_VERDICTS = frozenset({"FLAKY", "MALFORMED", "NONFINITE", "DEFECT", "HUNG", "CRASHED"})
PASSING_VERDICTS = frozenset({"EXACT", "WITHIN_BOUND", "TIE"})
RUNGS = ("ops", "prefill", "decode", "tree verify", "accept and commit", "whole loop")
# Runs that judge the judge, on engines that are wrong (or right) on purpose; they count in the mutation score and in the false alarms.
JUDGE_PURPOSES = frozenset({"mutation", "false-alarms"})
# Of one core: the mutation score says which plants are found within it. What was searched for less, and not found, is not called missed.
SEARCH_S = 60.0
STATUSES = ("new", "reopened", "changed", "flaky", "known", "fixed")


@dataclass(frozen=True)
class Column:
    """`type`: "string", "int" (64 bits), "float" (64 bits) or "bool". A required column may not be left out of a row."""

    name: str
    type: str
    unit: str
    meaning: str
    required: bool = False


_RUN = Column("run_id", "string", "", "the run that wrote the row")
_WRITER = Column("writer", "string", "", "the process of the run that wrote the row")
_ENGINE = Column("engine", "string", "", "engine name, without version", required=True)
_TIME = Column("time", "float", "s since 1970, UTC", "when the row was added")

RUNS = (
    Column("run_id", "string", "", "names the run everywhere"),
    Column("campaign", "string", "", "shards and restarts of one campaign share it; its own run_id otherwise"),
    Column("purpose", "string", "", "check, nightly, mutation, false-alarms (engines known to be right), vectors, ..."),
    Column(
        "engines", "string", "JSON", 'list of {"name", "version", "profile", "description", "spec"}; one without a name is not (yet) loaded'
    ),
    Column("command", "string", "", "the command line, ready to paste"),
    Column("commit", "string", "", "commit of the engine under test, where known"),
    Column("paritree", "string", "", "version of paritree"),
    Column("machine", "string", "", "processor, cores, accelerator, system in words"),
    Column("seed", "string", "", "the campaign's seed"),
    Column("budget", "string", "", "as given: 2h, 5000 trials"),
    Column("started", "float", "s since 1970, UTC", "start of the run"),
    Column("finished", "float", "s since 1970, UTC", "end of the run; 0: it is running, or was killed"),
    Column("duration_s", "float", "s", "wall time"),
    Column("trials", "int", "trials", "as counted by the runner"),
    Column("findings", "int", "findings", "distinct findings that the run met"),
    Column("stopped", "string", "", "why it ended: budget, complete, interrupted, error"),
    Column("note", "string", "", "anything else, for people"),
)

TRIALS = (
    _RUN,
    _WRITER,
    _ENGINE,
    Column("kind", "string", "", "op, tree, session or recorded"),
    Column("rung", "string", "", "the rung of the verdict; the furthest rung reached where nothing is wrong"),
    Column("rungs", "string", "; between", "every rung that the trial reached; empty: only `rung`"),
    Column("case_id", "string", "", "hash of the case", required=True),
    Column("case", "string", "JSON", "the case: for findings and a sample, otherwise empty"),
    Column("verdict", "string", "", "the most severe verdict of the trial's judgements", required=True),
    Column("checked", "int", "scalars", "compared, with any verdict except UNVERIFIED"),
    Column("unverified", "int", "scalars", "of which nothing could be proven either way; not part of `checked`"),
    Column("duration_ms", "float", "ms", "engine and judge together"),
    Column("seed", "string", "", "the seed of the case"),
    Column("finding_id", "string", "", "the finding that the trial belongs to, if any"),
    _TIME,
)

JUDGEMENTS = (
    _RUN,
    _WRITER,
    Column("form", "string", "", "aggregate (all judgements of one group) or finding (one judgement, in full)"),
    _ENGINE,
    Column("rung", "string", "", "ops, prefill, decode, tree verify, accept and commit, whole loop"),
    Column("op", "string", "", "operation"),
    Column("tap", "string", "", "tap, output or decision"),
    Column("layer", "int", "", "layer of the tap; -1: none or before the first"),
    Column("rule", "string", "", "rule id or name of the bound"),
    Column("verdict", "string", "", "verdict of the group or of the judgement", required=True),
    Column("judgements", "int", "judgements", "in the group; 1 for a finding row"),
    Column("trials", "int", "trials", "that the group's judgements come from"),
    Column("checked", "int", "scalars", "compared"),
    Column("share_max", "float", "bounds", "largest |found - expected| / bound; infinite for a failed exact check"),
    Column("share_mean", "float", "bounds", "mean over the finite shares, one per judgement"),
    Column("case_id", "string", "", "the case with the largest share"),
    Column("step", "int", "", "finding rows: step of the script"),
    Column("token", "int", "", "finding rows: row of the batch; -1: none"),
    Column("index", "string", "JSON", "finding rows: position in the tap's array"),
    Column("found", "float", "", "finding rows: the engine's value"),
    Column("expected", "float", "", "finding rows: the value of the rule"),
    Column("bound", "float", "", "finding rows: the largest |found - expected| that the profile explains"),
    Column("share", "float", "bounds", "finding rows: |found - expected| / bound"),
    Column("message", "string", "", "finding rows: in words"),
    _TIME,
)

COVERAGE = (
    _RUN,
    _WRITER,
    _ENGINE,
    Column("region", "string", "", "what is varied: tree.depth, dims.width mod 32, hazard, ...", required=True),
    Column("value", "string", "", "the cell: a value or a class of values"),
    Column("trials", "int", "trials", "that were in the cell; a row with 0 declares a cell that should be reached"),
    Column("findings", "int", "trials", "of these, with a finding verdict"),
)

CELLS = (
    _RUN,
    _WRITER,
    _ENGINE,
    *(Column(axis, "string", "", f"{MEANING[axis]}; one of {', '.join(classes)}", required=True) for axis, classes in AXES.items()),
    Column("trees", "int", "trees", "draft trees in the cell: one per sequence and round of a session that was judged"),
    Column("findings", "int", "trees", "of these, in a trial with a finding verdict"),
)

MUTATION = (
    _RUN,
    _WRITER,
    Column("mutant", "string", "", "name of the planted defect, or of the benign variant", required=True),
    Column("benign", "bool", "", "a variant that is right: `found` is then a false alarm"),
    Column("source", "string", "", "where the real bug was reported"),
    Column("defect_class", "string", "", "mask, cache, routing, numerics, ..."),
    Column("expected_op", "string", "", "where the defect is"),
    Column("found_op", "string", "", "where the first finding is"),
    Column("found", "bool", "", "a finding was reported"),
    Column("localised", "bool", "", "the finding names the expected op"),
    Column("reproduced", "bool", "", "the capsule fails again in a fresh process"),
    Column("minimal_nodes", "int", "nodes", "of the minimised case; -1: not minimised"),
    Column("stated_nodes", "int", "nodes", "of the smallest case by hand; -1: not stated"),
    Column("seconds", "float", "s", "until the first finding"),
    Column("checks", "int", "runs of the engine", "that minimising took"),
    Column("trials", "int", "trials", "that were run on the mutant; 0: it is in the library and was not measured yet"),
    Column("finding_id", "string", "", "the finding"),
    Column("searched", "float", "s", "that the search took: a plant that was not found was not met in this time"),
    _TIME,
)

# Of SQLite, not of Parquet: one row per fingerprint.
FINDINGS = (
    Column("finding_id", "string", "", "F- and eight digits of the hash of the fingerprint: the same on each machine"),
    Column("engine", "string", "", "fingerprint: engine name, without version", required=True),
    Column("verdict", "string", "", "fingerprint: verdict", required=True),
    Column("op", "string", "", "fingerprint: guilty operation"),
    Column("rule", "string", "", "rule id or name of the bound; fingerprint where `op` is empty"),
    Column("output", "string", "", "fingerprint: tap, output or decision"),
    Column("rung", "string", "", "fingerprint: rung (phase)"),
    Column("status", "string", "", "new, reopened, changed, flaky, known or fixed"),
    Column("layer", "int", "", "guilty layer; -1: none"),
    Column("step", "int", "", "step of the script"),
    Column("token", "int", "", "row of the batch; -1: none"),
    Column("index", "string", "JSON", "position in the array"),
    Column("found", "float", "", "the engine's value"),
    Column("expected", "float", "", "the value of the rule"),
    Column("bound", "float", "", "the largest |found - expected| that the profile explains"),
    Column("share", "float", "bounds", "|found - expected| / bound; infinite for a failed exact check"),
    Column("message", "string", "", "in words"),
    Column("case_id", "string", "", "hash of the smallest known case"),
    Column("case", "string", "JSON", "the smallest known case", required=True),
    Column("minimal", "bool", "", "`case` went through minimising to the end"),
    Column("nodes", "int", "nodes", "of the draft trees of the smallest case, without roots; -1: the case holds no tree"),
    Column("engine_version", "string", "", "version at the last sighting"),
    Column("profile", "string", "", "declared arithmetic"),
    Column("first_run", "string", "", "run of the first sighting"),
    Column("last_run", "string", "", "run of the last sighting"),
    Column("first_seen", "float", "s since 1970, UTC", "first sighting"),
    Column("last_seen", "float", "s since 1970, UTC", "last sighting"),
    Column("hits", "int", "trials", "that met it, over all runs"),
    Column("checks", "int", "runs of the engine", "that minimising took"),
    Column("reproduced", "int", "replays", "of the last run with replays, those that failed again"),
    Column("attempts", "int", "replays", "in the last run with replays"),
    Column("capsule", "string", "path in the store", "folder of the capsule"),
    Column("replay", "string", "", "command that shows it again"),
    Column("bisect", "string", "JSON", '{"by": "commit|build|flag|tap", "first_bad", "last_good", "steps", "note"}'),
    Column("tree", "string", "JSON", 'rounds: [{"title", "tokens", "parents", "path", "expected_path", "guilty": [nodes]}]'),
    Column("trace", "string", "JSON", "[tap, layer, relative error, share of bound] in data order"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "runs": RUNS,
    "trials": TRIALS,
    "judgements": JUDGEMENTS,
    "coverage": COVERAGE,
    "cells": CELLS,
    "mutation": MUTATION,
}
FINGERPRINT = ("engine", "verdict", "op or rule", "output", "rung")
EMPTY: dict[str, Any] = {"string": "", "int": 0, "float": 0.0, "bool": False}
_MINUS_ONE = frozenset({"layer", "token", "nodes", "minimal_nodes", "stated_nodes"})


def empty_value(column: Column) -> Any:
    """What a column holds where nothing was given."""
    return -1 if column.name in _MINUS_ONE else EMPTY[column.type]


def clean(table: str, columns: tuple[Column, ...], row: Mapping[str, Any], *, partial: bool = False) -> dict[str, Any]:
    """`row` with each column present and of its type; lists and mappings in string columns become JSON.

    Raises ValueError naming the column: unknown, required but missing, or of a type that does not convert. `partial` keeps only what
    was given (an update).
    """
    known = {column.name: column for column in columns}
    for name in row:
        if name not in known:
            raise ValueError(f"{table} has no column {name!r}; it has {', '.join(known)}")
    out: dict[str, Any] = {}
    for name, column in known.items():
        value = row.get(name)
        if value is None:
            if column.required and not partial:
                raise ValueError(f"a row of {table} needs its column {name!r} ({column.meaning})")
            if not partial:
                out[name] = empty_value(column)
            continue
        try:
            out[name] = _convert(column, value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{table}.{name} is {value!r:.80}, but should be a {column.type} ({column.meaning})") from None
    return out


def _convert(column: Column, value: Any) -> Any:
    if column.type == "string":
        if isinstance(value, str):
            # A lone surrogate cannot be stored as UTF-8; it is kept readable instead of losing the row.
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        return json.dumps(value, default=_plain) if isinstance(value, dict | list | tuple) else str(value)
    if column.type == "int":
        number = int(value)
        if not -(2**63) <= number < 2**63:
            raise OverflowError
        return number
    return bool(value) if column.type == "bool" else float(value)


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays inside JSON columns."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def from_json(text: str) -> Any:
    """What a JSON column holds; None where it is empty or broken. Lone surrogates, which no file takes, become question marks."""
    try:
        body = json.loads(text) if text else None
    except json.JSONDecodeError:
        return None
    if "\\ud" in text.lower():
        body = json.loads(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))
    return body


def to_markdown() -> str:
    """The tables of docs/store.md."""
    lines = []
    for table, columns in [*TABLES.items(), ("findings", FINDINGS)]:
        where = "SQLite `campaign.sqlite`" if table == "findings" else f"Parquet `parts/{table}/`"
        lines += [f"### {table}", "", where, "", "| column | type | unit | meaning |", "|---|---|---|---|"]
        for c in columns:
            needed = " **(required)**" if c.required else ""
            lines.append(
                f"| `{c.name}` | {c.type} | {c.unit.replace('|', chr(92) + '|')} | {c.meaning.replace('|', chr(92) + '|')}{needed} |"
            )
        lines.append("")
    return "\n".join(lines)
