"""The page: one HTML file from a store alone. It opens offline, fetches nothing, runs no code but its own script (held by a hash), and stays
under 2 MB whatever the store holds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from reports import charts, nights, numbers, words
from reports.cells import AXES, MEANING
from reports.errors import from_os_error
from reports.page_data import EngineData, Page, load
from reports.schema import RUNGS, SEARCH_S, STATUSES, VERDICTS
from reports.store import Store, engine_names

PAGE_BYTES = 2_000_000  # a page that can be mailed
SECTION_BYTES = 1_000_000  # for the sections of findings; the rest is for the tables
HEAT_BYTES = 500_000
ROWS_MAX = 600  # rows of the table of findings, about 600 bytes each
CASE_MAX = 12_000  # characters of a case on the page
TREES_MAX = 3  # rounds drawn per finding
COVERAGE_MAX, CELLS_MAX = 120, 40  # regions, and cells per region
MUTATION_MAX = 400
EMPTIEST_MAX = 15  # cells of the crossed coverage


def write_report(store_path: str | os.PathLike[str], out_html: str | os.PathLike[str]) -> Path:
    """Writes the page of a store and returns its path. Raises StoreError: no store, damaged, the page cannot be written."""
    with Store.create_or_open(store_path, readonly=True) as store:
        return write_page(load(store), out_html)


def write_page(page: Page, out_html: str | os.PathLike[str]) -> Path:
    """The same from page data that is loaded already. A reader never meets half a page."""
    text, out = render(page), Path(out_html)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=out.parent, prefix=".report-", delete=False) as stream:
            stream.write(text)
        os.chmod(stream.name, 0o644)
        os.replace(stream.name, out)
    except OSError as problem:
        raise from_os_error(out, problem) from None
    return out


def render(page: Page) -> str:
    """The page as text, under PAGE_BYTES: a store that holds more than a page can is shown in part, and the page says what it leaves out."""
    for scale in (1.0, 0.6, 0.3, 0.1):
        text = _render(page, scale)
        if len(text.encode()) < PAGE_BYTES:
            break
    return text


def _render(page: Page, scale: float) -> str:
    environment = _environment()
    script = _source("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections, detailed = _sections(page, environment.get_template("finding.html"), int(SECTION_BYTES * scale))
    rows = page.findings[: int(ROWS_MAX * scale)]
    heats, left_out_heats = _heats(page, int(HEAT_BYTES * scale))
    return environment.get_template("page.html").render(
        page=page,
        style=Markup(environment.get_template("style.css").render()),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        sections=Markup("".join(sections)),
        detailed=detailed,
        rows=rows,
        left_out_rows=len(page.findings) - len(rows),
        left_out_sections=len(rows) - len(detailed),
        decided=sum(bool(f["ledger"]) for f in page.findings),
        heats=heats,
        left_out_heats=left_out_heats,
        heat_legend=charts.HEAT_LEGEND,
        facts=_facts(page),
        unverified_big=numbers.rate(page.verdicts.get("UNVERIFIED", 0), page.trials),
        alarms_big=numbers.count(page.alarms.alarms) if page.alarms.trials else numbers.NONE,
        score_big=numbers.rate(page.planted.found, page.planted.measured),
        mutation_sentence=mutation_sentence(page.mutation, sum(len(part.unsampled) for part in page.score)),
        mutation_result=_mutation_result,
        mutation_max=int(MUTATION_MAX * scale),
        score=[*page.score, nights.whole(page.score)] if len(page.score) > 1 else page.score,
        nights_max=nights.NIGHTS_MAX,
        search_s=SEARCH_S,
        case_max=CASE_MAX,
        axes=AXES,
        axis_meaning=MEANING,
        apart=page.cells.apart if page.cells is not None else [],
        emptiest=page.cells.emptiest(EMPTIEST_MAX) if page.cells is not None else [],
        coverage_max=int(COVERAGE_MAX * scale),
        cells_max=CELLS_MAX,
        data=Markup(_embedded(summary(page))),
    )


def summary(page: Page) -> dict[str, Any]:
    """The page for machines: also what `paritree check --json` may print."""
    return {
        "headline": page.headline,
        "state": page.state,
        "trials": page.trials,
        "checked": page.checked,
        "unverified_trials": page.verdicts.get("UNVERIFIED", 0),
        "unverified_scalars": page.unverified_scalars,
        "verdicts": page.verdicts,
        "cells": {"hit": page.cells.hit, "reachable": page.cells.cells} if page.cells is not None else None,
        "mutation": {
            "plants": sum(part.plants for part in page.score),
            "measured": sum(part.measured for part in page.score),
            "found": sum(part.found for part in page.score),
        },
        "false_alarms": {"alarms": page.alarms.alarms, "trials": page.alarms.trials},
        "engines": [
            {
                "name": engine.name,
                "version": engine.version,
                "profile": engine.profile,
                "trials": engine.trials,
                "first_failing_rung": engine.first_failing,
                "ladder": {rung.name: rung.state for rung in engine.ladder},
            }
            for engine in page.engines
        ],
        "findings": [
            {name: f[name] for name in ("finding_id", "status", "engine", "verdict", "op", "rule", "output", "rung", "layer", "hits")}
            for f in page.findings[:ROWS_MAX]
        ],
        "problems": page.problems[:50],
    }


def mutation_sentence(rows: list[dict[str, Any]], unsampled: int = 0) -> str:
    """How many planted defects were found, localised and made small, and how many were not sampled yet."""
    planted = [row for row in rows if not row["benign"]]
    benign = [row for row in rows if row["benign"]]
    found = [row for row in planted if row["found"]]
    minimised = [row for row in found if row["minimal_nodes"] >= 0]
    stated = [row for row in minimised if row["stated_nodes"] >= 0]
    parts = []
    if planted:
        score = numbers.rate(len(found), len(planted))
        parts.append(f"{len(found)} of {numbers.plural(len(planted), 'planted defect')} found ({score})")
        parts.append(f"{sum(bool(row['localised']) for row in found)} of them at the operation where they were planted")
    if minimised:
        again = sum(bool(row["reproduced"]) for row in minimised)
        parts.append(f"{len(minimised)} minimised, of which {again} shown again from their capsule")
    if stated:
        small = sum(row["minimal_nodes"] <= row["stated_nodes"] for row in stated)
        parts.append(f"{small} of {len(stated)} at the size stated by hand or below")
    if benign:
        alarms = sum(bool(row["found"]) for row in benign)
        parts.append(f"{alarms} of {numbers.plural(len(benign), 'benign variant')} raised a false alarm")
    if unsampled:
        parts.append(f"{numbers.count(unsampled)} not yet sampled")
    return "; ".join(parts) + "."


def _mutation_result(row: dict[str, Any]) -> tuple[str, str]:
    if row["benign"]:
        return ("false alarm", "bad") if row["found"] else ("benign, silent", "good")
    if not row["found"]:
        return ("missed", "bad")
    return ("found", "good") if row["localised"] else ("found elsewhere", "warn")


def _sections(page: Page, template: Template, left: int) -> tuple[list[str], set[str]]:
    """A section per finding, the most urgent first, as long as there is room."""
    out: list[str] = []
    names: set[str] = set()
    for finding in page.findings[:ROWS_MAX]:
        text = template.render(f=finding, many=len(page.engines) > 1, case_max=CASE_MAX, **_pictures(finding))
        left -= len(text.encode())
        if left < 0:
            break
        out.append(text)
        names.add(finding["finding_id"])
    return out, names


def _pictures(finding: dict[str, Any]) -> dict[str, Any]:
    rounds = [r for r in finding["tree"] if isinstance(r, dict)]
    # The rounds with a guilty node first: the others are context.
    chosen = sorted(rounds, key=lambda r: r.get("guilty", -1) in (-1, []))[:TREES_MAX]
    trees = [
        (str(r.get("title", "")), charts.tree(r, str(r.get("title", ""))), charts.tree_note(r))
        for r in rounds
        if any(r is c for c in chosen)
    ]
    points = charts.trace_points(finding["trace"])
    over = next((p for p in points if not p[3] <= 1.0), None)
    if len(points) < len(finding["trace"]):
        note = ": the worst tap of each layer"
    else:
        note = (
            f": first above its bound at {over[0]}, layer {over[1]} ({numbers.times(over[3])})" if over else ": no tap is above its bound"
        )
    return {
        "trees": [(title, Markup(svg), note) for title, svg, note in trees if svg],
        "more_trees": max(0, len(rounds) - TREES_MAX),
        "trace_svg": Markup(charts.trace(points, (finding["output"], finding["layer"]))),
        "trace_note": note,
        "points": points,
        "bisect": [
            (key.replace("_", " "), item if isinstance(item, str) else json.dumps(item))
            for key, item in finding["bisect"].items()
            if key not in ("by", "note") and item not in ("", None)
        ],
    }


def _heats(page: Page, left: int) -> tuple[list[tuple[EngineData, Markup]], list[str]]:
    """The error map per engine as long as there is room, and the engines that got none."""
    out: list[tuple[EngineData, Markup]] = []
    left_out = []
    for engine in page.engines:
        if engine.heat is not None:
            svg = charts.heat_map(engine.heat, engine.name)
            left -= len(svg) + 40 * len(engine.heat.cells)  # the table below it has the same cells
            if left < 0:
                left_out.append(engine.name)
            else:
                out.append((engine, Markup(svg)))
    return out, left_out


def _facts(page: Page) -> list[tuple[str, str]]:
    """Where, when and how, from the runs in scope; what was not recorded is not listed."""
    if not page.runs:
        return []
    first, last = page.runs[0], page.runs[-1]
    spent = sum(run["duration_s"] for run in page.runs)
    ended = max(run["finished"] for run in page.runs)
    elapsed = ended - first["started"] if ended else 0.0
    took = numbers.duration(elapsed) if ended else ""
    if len(page.runs) > 1:
        took += f" ({len(page.runs)} runs, {numbers.duration(spent)} together)"

    def distinct(name: str) -> str:
        return ", ".join(dict.fromkeys(str(run[name]) for run in page.runs if run[name]))

    described: dict[str, list[str]] = {}
    for engine in page.engines:
        if engine.description:
            described.setdefault(engine.description, []).append(engine.name)
    alone = len(page.engines) == 1
    engines = "; ".join(what if alone else f"{', '.join(names)}: {what}" for what, names in described.items())
    facts = [
        ("Started", numbers.when(first["started"])),
        ("Duration", took),
        ("Purpose", distinct("purpose")),
        ("Commit", distinct("commit")),
        ("Seed", distinct("seed")),
        ("Budget", distinct("budget")),
        ("Ended", distinct("stopped")),
        ("Machine", distinct("machine")),
        ("paritree", distinct("paritree")),
        ("Engine" if alone else "Engines", engines),
        ("Note", distinct("note")),
        ("Command", last["command"]),
    ]
    return [(label, text) for label, text in facts if text]


def _embedded(body: dict[str, Any]) -> str:
    """JSON that cannot end the script element, nor hold what JSON has no word for."""
    return json.dumps(body, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sort_number(value: float) -> str:
    return "1e999" if not math.isfinite(value) else repr(float(value))


def _clip(value: Any) -> Any:
    """A store may hold a word of a megabyte; a page need not."""
    if isinstance(value, str) and not isinstance(value, Markup) and len(value) > CASE_MAX:
        return value[:CASE_MAX] + "…"
    return value


@cache
def _source(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text("utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clip,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "count": numbers.count,
        "plural": numbers.plural,
        "share": numbers.share,
        "times": numbers.times,
        "value3": lambda value: numbers.value(value, 3),
        "when": numbers.when,
        "day": numbers.day,
        "duration": numbers.duration,
        "tone": words.tone,
        "sentence": words.sentence,
        "has_numbers": words.has_numbers,
        "sort_number": _sort_number,
    }
    environment.globals |= {
        "rate": numbers.rate,
        "pair": numbers.pair,
        "difference": numbers.difference,
        "engine_names": engine_names,
        "verdict_names": VERDICTS,
        "verdict_meaning": words.VERDICT_MEANING,
        "status_meaning": words.STATUS_MEANING,
        "rung_word": words.RUNG_WORD,
        "rung_sign": words.RUNG_SIGN,
        "glossary": words.GLOSSARY,
        "status_rank": {name: i for i, name in enumerate(STATUSES)},
        "verdict_rank": {name: -i for i, name in enumerate(VERDICTS)},
        "rung_rank": {name: i for i, name in enumerate(RUNGS)},
    }
    return environment
