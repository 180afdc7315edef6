"""The page for machines and terminals: JUnit XML, a Markdown job summary, annotations, and lines of text. All from page data."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

from reports import numbers, words
from reports.errors import from_os_error
from reports.page_data import EngineData, Page, load
from reports.store import Store

SUMMARY_BYTES = 900_000  # a job summary above 1,024 KiB is refused as a whole
ANNOTATIONS_MAX = 10  # per step; further ones are dropped by the service
LINES_MAX = 25  # findings on a terminal; the page has all
# What XML 1.0 cannot hold, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def page_of(store_path: str | os.PathLike[str]) -> Page:
    """Page data of a store. Raises StoreError."""
    with Store.create_or_open(store_path, readonly=True) as store:
        return load(store)


def write_text(path: str | os.PathLike[str], text: str, *, append: bool = False) -> None:
    """Makes the folder, as for the page. Raises StoreError where the file cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a" if append else "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as problem:
        raise from_os_error(path, problem) from None


# ---- JUnit ----------------------------------------------------------------------------------------------------------------------------


def junit(page: Page) -> str:
    """One suite per engine: a test per rung and a test per finding. Failures are the open findings, and rungs that fail without one."""
    root = ElementTree.Element("testsuites", name="paritree")
    for engine in page.engines:
        own = [f for f in page.findings if f["engine"] == engine.name]
        suite = ElementTree.SubElement(root, "testsuite", name=_xml(f"paritree.{engine.name}"))
        explained = {f["rung"] for f in own if f in page.open_findings}
        tests = [*_rung_tests(engine, explained), *(_finding_test(f) for f in own)]
        suite.extend(tests)
        suite.set("tests", str(len(tests)))
        for kind, plural in (("failure", "failures"), ("skipped", "skipped")):
            suite.set(plural, str(sum(test.find(kind) is not None for test in tests)))
        suite.set("errors", "0")
        suite.set("time", f"{engine.seconds:.3f}")
    for name in ("tests", "failures", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _rung_tests(engine: EngineData, explained: set[str]) -> Iterator[ElementTree.Element]:
    for rung in engine.ladder:
        test = ElementTree.Element("testcase", classname=_xml(f"paritree.{engine.name}.ladder"), name=rung.name, time="0")
        if rung.state in ("first", "later") and rung.name not in explained:
            message = f"{numbers.count(rung.failing)} of {numbers.plural(rung.trials, 'trial')} failed"
            ElementTree.SubElement(test, "failure", type=words.RUNG_WORD[rung.state], message=message)
        elif rung.state in ("unverified", "unsupported", "absent"):
            ElementTree.SubElement(test, "skipped", message=words.RUNG_WORD[rung.state])
        yield test


def _finding_test(finding: dict[str, Any]) -> ElementTree.Element:
    name = " ".join(
        part for part in (finding["finding_id"], finding["verdict"], finding["op"] or finding["rule"], finding["output"]) if part
    )
    test = ElementTree.Element("testcase", classname=_xml(f"paritree.{finding['engine']}.findings"), name=_xml(name), time="0")
    properties = ElementTree.SubElement(test, "properties")
    for key in ("finding_id", "status", "rung", "case_id"):
        ElementTree.SubElement(properties, "property", name=key, value=_xml(str(finding[key])))
    if finding["ledger"]:
        ElementTree.SubElement(test, "skipped", message=_xml(f"ledger: {finding['ledger']['state']}"))
    elif finding["status"] != "fixed":
        failure = ElementTree.SubElement(test, "failure", type=_xml(finding["verdict"]), message=_xml(words.sentence(finding)))
        failure.text = _xml("\n".join(line for line in (words.sentence(finding), finding["replay"], finding["case"][:10_000]) if line))
    return test


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


# ---- job summary and annotations ------------------------------------------------------------------------------------------------------


def github_summary(page: Page) -> str:
    """Markdown under SUMMARY_BYTES; findings that do not fit are counted."""
    sign = {"bad": "❌", "good": "✅", "none": "⚠️"}[page.state]
    lines = [f"## {sign} {_markdown(page.headline)}", ""]
    if page.subline:
        lines += [_markdown(page.subline), ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {label} | {_markdown(text)} |" for label, text in _facts(page)]
    for engine in page.engines:
        lines += [
            "",
            f"### {_markdown(engine.name)} {_markdown(engine.version)}",
            "",
            "| rung | | trials | failing | unverified |",
            "|---|---|---:|---:|---:|",
        ]
        for rung in engine.ladder:
            counts = " | ".join(numbers.count(n) for n in (rung.trials, rung.failing, rung.unverified))
            lines.append(f"| {rung.name} | {words.RUNG_WORD[rung.state]} | {counts} |")
    text = "\n".join(lines) + "\n"
    if page.findings:
        head = "\n### Findings\n\n| finding | status | verdict | rung | op | what | replay |\n|---|---|---|---|---|---|---|\n"
        rows, room = [], SUMMARY_BYTES - len((text + head).encode()) - 200
        for finding in page.findings:
            row = _finding_row(finding)
            room -= len(row.encode())
            if room < 0:
                break
            rows.append(row)
        text += head + "".join(rows)
        if left := len(page.findings) - len(rows):
            text += f"\n{numbers.plural(left, 'more finding')} in the HTML report.\n"
    return text


def _finding_row(f: dict[str, Any]) -> str:
    replay = _code(f["replay"]) if f["replay"] else ""
    status = f["status"] + (f" ({f['ledger']['state']})" if f["ledger"] else "")
    words_ = [f["finding_id"], status, f["verdict"], f["rung"], f["op"] or f["rule"], words.clip(words.sentence(f), 500)]
    return "| " + " | ".join([*(_markdown(str(word)) for word in words_), replay]) + " |\n"


def workflow_commands(page: Page) -> list[str]:
    """Workflow commands, at most ten, the most urgent first: errors for news, warnings for what is known or flaky."""
    out = []
    for finding in page.open_findings[:ANNOTATIONS_MAX]:
        level = "error" if finding["status"] in ("new", "reopened", "changed") else "warning"
        title = f"{finding['finding_id']} {finding['status']} {finding['verdict']} on {finding['engine']}"
        out.append(f"::{level} title={_property(title)}::{_data(words.clip(words.sentence(finding), 1_000))}")
    return out


def _markdown(text: str) -> str:
    """One cell of a table: nothing in it may be markup."""
    flat = " ".join(text.split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#@!])", r"\\\1", flat)


def _code(text: str) -> str:
    """A code span inside a table; backticks and bars would end it."""
    flat = " ".join(text.split()).replace("`", "'").replace("|", "\\|")
    return f"`{flat}`"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# ---- terminal -------------------------------------------------------------------------------------------------------------------------


def show(page: Page, stream: TextIO) -> None:
    """On a terminal with rich tables; plain lines in a log, in a pipe, or under NO_COLOR or TERM=dumb."""
    if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        _show_rich(page, stream)
    else:
        stream.write(text(page))


def text(page: Page) -> str:
    """Plain lines: what, how sure, where on the ladder, which findings, what to do next."""
    lines = [f"paritree: {page.headline}"]
    if page.subline:
        lines.append(f"  {page.subline}")
    lines += [f"  {label:<16}{value}" for label, value in _facts(page)]
    for engine in page.engines:
        lines.append(f"  ladder of {engine.name} {engine.version}".rstrip())
        for rung in engine.ladder:
            lines.append(f"    {rung.name:<18}{words.RUNG_WORD[rung.state]:<15}{_counts(rung)}".rstrip())
    for finding in page.open_findings[:LINES_MAX]:
        guilty = " ".join(part for part in (finding["rung"], finding["op"] or finding["rule"]) if part)
        lines.append(f"  {finding['finding_id']}  {finding['status']:<8} {finding['verdict']:<10} {guilty}")
        lines.append(f"      {_one_line(words.sentence(finding))}")
        if finding["replay"]:
            lines.append(f"      {_one_line(finding['replay'])}")
    if (more := len(page.open_findings) - LINES_MAX) > 0:
        lines.append(f"  and {numbers.plural(more, 'more finding')}: see the HTML report")
    lines += [f"  note: {_one_line(problem)}" for problem in page.problems[:8]]
    return "".join(_printable(line) + "\n" for line in lines)


def _facts(page: Page) -> list[tuple[str, str]]:
    big = numbers.rate(page.verdicts.get("UNVERIFIED", 0), page.trials)
    verdicts = ", ".join(f"{numbers.count(n)} {v}" for v, n in page.verdicts.items())
    facts = [
        ("engines", ", ".join(f"{e.name} {e.version} ({e.profile or 'no profile'})" for e in page.engines)),
        ("verdicts", verdicts),
        ("UNVERIFIED", f"{big} ({page.unverified_sentence}; {page.unverified_scalars_sentence})"),
        ("findings", ", ".join(f"{numbers.count(n)} {s}" for s, n in page.status_counts.items()) or "none"),
        ("false alarms", page.alarms.sentence),
        ("mutation score", page.score_sentence if page.score else ""),
        ("coverage", page.cells_sentence),
    ]
    return [(label, value) for label, value in facts if value]


def _counts(rung: Any) -> str:
    parts = [numbers.plural(rung.trials, "trial")] if rung.trials else []
    parts += [f"{numbers.count(rung.failing)} failing"] if rung.failing else []
    parts += [f"{numbers.count(rung.unverified)} unverified"] if rung.unverified else []
    return ", ".join(parts)


def _one_line(value: str) -> str:
    """No line breaks and no control characters: an engine's message may not move the cursor."""
    return words.clip(_printable(" ".join(value.split())), 600)


def _printable(value: str) -> str:
    return "".join(c if c.isprintable() else " " for c in value)


def _show_rich(page: Page, stream: TextIO) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    colour = {"bad": "red", "good": "green", "none": "yellow"}
    console = Console(file=stream, highlight=False)
    console.print(Text("paritree: ").append(page.headline, f"bold {colour[page.state]}"))
    if page.subline:
        console.print(Text(_one_line(page.subline)))
    facts = Table.grid(padding=(0, 2))
    for label, value in _facts(page):
        facts.add_row(Text(label, "dim"), Text(_one_line(value)))
    console.print(facts)
    style = {"pass": "green", "first": "bold red", "later": "red", "unverified": "yellow"}
    for engine in page.engines:
        ladder = Table(
            title=Text(_one_line(f"{engine.name} {engine.version}")), title_justify="left", box=None, header_style="dim", padding=(0, 2)
        )
        for name in ("rung", "", "trials", "failing", "unverified"):
            ladder.add_column(name, justify="left" if name in ("rung", "") else "right")
        for rung in engine.ladder:
            sign = f"{words.RUNG_SIGN[rung.state] or '·'} {words.RUNG_WORD[rung.state]}"
            counts = [numbers.count(n) if n else "" for n in (rung.trials, rung.failing, rung.unverified)]
            ladder.add_row(Text(rung.name), Text(sign, style.get(rung.state, "dim")), *counts)
        console.print(ladder)
    if page.open_findings:
        for finding in page.open_findings[:LINES_MAX]:
            guilty = " ".join(part for part in (finding["rung"], finding["op"] or finding["rule"]) if part)
            head = (
                Text(finding["finding_id"], "bold")
                .append(f"  {finding['status']}  ", "")
                .append(finding["verdict"], "red")
                .append(f"  {guilty}", "dim")
            )
            console.print(head)
            console.print(Padding(Text(_one_line(words.sentence(finding))), (0, 0, 0, 4)))
            if finding["replay"]:
                console.print(Padding(Text(_one_line(finding["replay"]), "cyan"), (0, 0, 0, 4)))
        if (more := len(page.open_findings) - LINES_MAX) > 0:
            console.print(Text(f"and {numbers.plural(more, 'more finding')}: see the HTML report", "dim"))
    for problem in page.problems[:8]:
        console.print(Text(f"note: {_one_line(problem)}", "yellow"))
