"""The page: what it says, what it never says, and that nothing in a store can break it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from html_check import Document, Element, assert_sound
from store_samples import finding, new_run

from reports import page_data
from reports.page import render, summary, write_report
from reports.schema import FINDINGS, MUTATION, RUNGS, RUNS, TRIALS, VERDICTS
from reports.store import Store, StoreError
from reports.synthetic import fill

HOSTILE = "</script></style><img src=x onerror=alert(1)>\"'`&amp;{{7*7}}{% raw %}\u202e\x00<!--"


@pytest.fixture(scope="module")
def invented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("invented") / "store", trials=400)


def load(path: Path) -> page_data.Page:
    with Store.create_or_open(path, readonly=True) as store:
        return page_data.load(store)


def page_text(path: Path, out: Path) -> str:
    return write_report(path, out / "report.html").read_text("utf-8")


def by_class(document: Document, name: str) -> list[Element]:
    return [e for e in document.elements if name in e.attributes.get("class", "").split()]


def words_of(text: str) -> str:
    return " ".join(text.split())


# ---- the page of an ordinary night ----------------------------------------------------------------------------------------------------


def test_the_page_of_an_invented_night(invented: Path, tmp_path: Path) -> None:
    text = page_text(invented, tmp_path)
    document = assert_sound(text)
    sections = [e.attributes["id"] for e in document.elements if e.tag == "h2"]
    assert sections == [
        "ladder",
        "verdicts",
        "findings",
        "heat",
        "coverage",
        "mutation",
        "nights",
        "slowest",
        "history",
        "words",
        "meaning",
    ]
    (headline,) = [words_of(e.text) for e in document.elements if e.tag == "h1"]
    assert headline == "✕6 open findings in 400 trials"
    (ladder,) = by_class(document, "ladder")
    states = [e.attributes["class"] for e in document.elements if e.tag == "li" and "ol" in e.inside]
    assert states == ["pass", "pass", "pass", "first", "later", "later"]
    assert all(rung in ladder.text for rung in RUNGS)
    articles = [e for e in document.elements if e.tag == "article"]
    assert len(articles) == 6
    assert [a.attributes["data-status"] for a in articles] == ["new", "new", "new", "flaky", "known", "known"]
    assert sum("tree" in e.attributes.get("class", "") for e in document.elements if e.tag == "svg") == 4
    assert sum("trace" in e.attributes.get("class", "") for e in document.elements if e.tag == "svg") == 4
    assert (
        sum("guilty" in e.attributes.get("class", "") and "node" in e.attributes["class"] for e in document.elements if e.tag == "g") == 4
    )
    assert "5 of 6 planted defects found (83.3 %)" in text
    assert "none in 1,100 trials on engines known to be right" in text


def test_the_embedded_data_are_those_of_the_page(invented: Path, tmp_path: Path) -> None:
    document = assert_sound(page_text(invented, tmp_path))
    (data,) = [e.text for e in document.elements if e.attributes.get("id") == "report-data"]
    assert json.loads(data) == summary(load(invented))
    body = json.loads(data)
    assert (body["trials"], body["engines"][0]["first_failing_rung"], len(body["findings"])) == (400, "tree verify", 6)


def test_the_page_is_a_function_of_the_store(invented: Path) -> None:
    assert render(load(invented)) == render(load(invented))


def test_every_finding_of_the_table_links_to_its_section(invented: Path, tmp_path: Path) -> None:
    document = assert_sound(page_text(invented, tmp_path))
    rows = [e.attributes["data-id"] for e in document.elements if e.tag == "tr" and "data-id" in e.attributes]
    assert sorted(rows) == sorted(e.attributes["id"] for e in document.elements if e.tag == "article")
    assert all(re.fullmatch("F-[0-9a-f]{8}", row) for row in rows)


def test_a_crossed_cell_is_above_the_bound_and_no_other(invented: Path, tmp_path: Path) -> None:
    document = assert_sound(page_text(invented, tmp_path))
    in_map = [e for e in by_class(document, "cross") if "figure" in e.inside and "span" not in e.inside]
    above = [e for e in by_class(document, "h7") if "figure" in e.inside and "span" not in e.inside]
    assert len(in_map) == len(above) == 1


# ---- odd states -----------------------------------------------------------------------------------------------------------------------


def one_run(path: Path, trials: list[dict[str, Any]], findings: list[dict[str, Any]] | None = None, **run: Any) -> page_data.Page:
    store = Store.create_or_open(path)
    run_id = new_run(store, **run)
    with store.writer(run_id, "w0") as writer:
        for i, trial in enumerate(trials):
            writer.add_trial({"engine": "native", "case_id": str(i), "rung": "ops"} | trial)
    for row in findings or []:
        store.report_finding(finding(run_id, **row))
    store.finish_run(run_id, {"stopped": "complete"})
    store.close()
    page = load(path)
    assert_sound(render(page))
    return page


def test_an_empty_store_has_a_page(tmp_path: Path) -> None:
    Store.create_or_open(tmp_path / "store").close()
    page = load(tmp_path / "store")
    text = render(page)
    assert_sound(text)
    assert page.state == "none" and "No trials: nothing was checked" in text


def test_no_trials_is_not_a_pass(tmp_path: Path) -> None:
    page = one_run(tmp_path / "s", [])
    assert (page.state, page.headline) == ("none", "No trials: nothing was checked")


@pytest.mark.parametrize("verdict", ["UNSUPPORTED", "UNVERIFIED"])
def test_only_unsupported_or_unverified_is_not_a_pass(tmp_path: Path, verdict: str) -> None:
    page = one_run(tmp_path / "s", [{"verdict": verdict}] * 5)
    assert (page.state, page.headline) == ("none", "Nothing was verified in 5 trials")
    assert page.engines[0].ladder[0].state == verdict.lower()


def test_a_clean_run_is_good_and_shows_what_was_not_proven(tmp_path: Path) -> None:
    page = one_run(tmp_path / "s", [{"verdict": "EXACT"}] * 1999 + [{"verdict": "UNVERIFIED"}])
    assert (page.state, page.headline) == ("good", "No open findings in 2,000 trials")
    text = render(page)
    assert "0.050 %" in text and "1 of 2,000 trials" in text
    assert "99.950 %" in text


def test_a_crash_alone_is_a_finding_on_its_rung(tmp_path: Path) -> None:
    crash = {
        "verdict": "CRASHED",
        "rung": "prefill",
        "op": "",
        "rule": "",
        "found": 0,
        "expected": 0,
        "bound": 0,
        "share": 0,
        "message": "Signal 11",
    }
    page = one_run(tmp_path / "s", [{"verdict": "CRASHED", "rung": "prefill"}], [crash])
    assert [r.state for r in page.engines[0].ladder] == ["absent", "first", "absent", "absent", "absent", "absent"]
    assert "the engine&#39;s process ended at o_latent. Signal 11" in render(page)


def test_three_engines_are_three_ladders(tmp_path: Path) -> None:
    fill(tmp_path / "s", trials=300, engines=3, findings=9)
    text = page_text(tmp_path / "s", tmp_path)
    document = assert_sound(text)
    assert len(by_class(document, "ladder")) == 3 and len(by_class(document, "heat")) == 3
    assert "9 open findings on 3 engines in 300 trials" in text


def test_each_engine_is_shown_by_its_newest_campaign(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "s")
    for engine, started, trials in [("a", 1.0, 5), ("b", 2.0, 7), ("a", 3.0, 11)]:
        run_id = new_run(store, engines=[{"name": engine}], started=started)
        with store.writer(run_id, "w") as writer:
            for i in range(trials):
                writer.add_trial({"engine": engine, "case_id": str(i), "verdict": "EXACT"})
        store.finish_run(run_id, {})
    store.close()
    page = load(tmp_path / "s")
    assert {e.name: e.trials for e in page.engines} == {"a": 11, "b": 7}
    assert len(page.history) == 3


def test_shards_of_a_campaign_count_together(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "s")
    for shard in range(3):
        run_id = new_run(store, campaign="night", started=10.0 + shard)
        with store.writer(run_id, "w") as writer:
            writer.add_trial({"engine": "native", "case_id": str(shard), "verdict": "EXACT"})
    store.close()
    page = load(tmp_path / "s")
    assert page.trials == 3 and len(page.runs) == 3
    assert sum("has no end" in problem for problem in page.problems) == 3


def test_engines_that_are_wrong_on_purpose_are_not_under_test(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "s")
    run_id = new_run(store, purpose="mutation", engines=[{"name": "planted"}])
    store.report_finding(finding(run_id, engine="planted"))
    with store.writer(run_id, "w") as writer:
        writer.add_trial({"engine": "planted", "case_id": "1", "verdict": "DEFECT"})
        writer.add_mutation({"mutant": "m", "found": True})
    store.close()
    page = load(tmp_path / "s")
    assert (page.engines, page.findings, page.planted_findings, len(page.mutation)) == ([], [], 1, 1)
    assert_sound(render(page))


def test_false_alarms_are_counted_where_engines_are_right(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "s")
    run_id = new_run(store, purpose="false-alarms")
    with store.writer(run_id, "w") as writer:
        for i in range(40):
            writer.add_trial({"engine": "native", "case_id": str(i), "verdict": "DEFECT" if i == 3 else "EXACT"})
        writer.add_mutation({"mutant": "benign", "benign": True, "trials": 60})
    store.close()
    assert load(tmp_path / "s").alarms.sentence == "1 in 100 trials on engines known to be right (1.0 %)"


def test_the_ledger_closes_findings_and_a_broken_one_is_named(tmp_path: Path) -> None:
    page = one_run(tmp_path / "s", [{"verdict": "DEFECT"}], [{}])
    name = page.findings[0]["finding_id"]
    (tmp_path / "s" / "ledger.toml").write_text(f'[{name}]\nstate = "wontfix"\nnote = "by <design>"\nuntil = 2027-01-01\n')
    page = load(tmp_path / "s")
    assert page.open_findings == [] and "by &lt;design&gt;" in render(page)
    (tmp_path / "s" / "ledger.toml").write_text("[")
    page = load(tmp_path / "s")
    assert len(page.open_findings) == 1 and any("broken TOML" in problem for problem in page.problems)


def test_torn_parts_are_named_on_the_page(tmp_path: Path) -> None:
    one_run(tmp_path / "s", [{"verdict": "EXACT"}])
    (tmp_path / "s" / "parts" / "trials" / "torn.parquet").write_bytes(b"PAR1")
    assert "trials/torn.parquet was left out" in render(load(tmp_path / "s"))


# ---- numbers ----------------------------------------------------------------------------------------------------------------------------


def test_no_rounding_to_nothing_or_all(tmp_path: Path) -> None:
    tiny = {"found": 1.0 + 2**-23, "expected": 1.0, "bound": 2**-24, "share": 1.0000002}
    trials = [{"verdict": "EXACT", "checked": 10**9}] * 19_999 + [{"verdict": "UNVERIFIED", "unverified": 1}]
    text = render(one_run(tmp_path / "s", trials, [tiny]))
    assert "1.00000012" in text and "1.19e-07" in text and "1.0000002 × the bound" in text
    assert "0.0050 %" in text and "99.9950 %" in text and "&lt;0.0001 %" in text
    document = assert_sound(text)
    for meter in by_class(document, "verdict"):
        assert meter.text in VERDICTS
    rates = [e.text for e in document.elements if e.tag == "td" and e.text.endswith("%")]
    assert rates == ["99.9950 %", "0.0050 %"]


@pytest.mark.parametrize(
    ("found", "expected", "says"),
    [
        (-0.0, 0.0, ["-0", "the sign of zero"]),
        (math.nan, 1.0, ["NaN", "not a number"]),
        (math.inf, 1.0, ["inf"]),
        (1e-40, 0.0, ["1e-40"]),
        (16777217.0, 16777216.0, ["16777217", "16777216"]),
    ],
)
def test_a_divergence_is_always_visible(tmp_path: Path, found: float, expected: float, says: list[str]) -> None:
    row = {"found": found, "expected": expected, "bound": 1e-50, "share": math.inf}
    text = render(one_run(tmp_path / "s", [{"verdict": "DEFECT"}], [row]))
    assert all(f">{word}<" in text for word in says)


# ---- what a store may hold ------------------------------------------------------------------------------------------------------------


def test_hostile_words_in_every_column_stay_words(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "s")
    skip = {"run_id", "campaign", "engines", "purpose", "finding_id", "status", "writer"}
    words = {c.name: HOSTILE for c in RUNS if c.type == "string" and c.name not in skip}
    run_id = new_run(store, **words | {"engines": [{"name": HOSTILE, "version": HOSTILE, "profile": HOSTILE, "description": HOSTILE}]})
    with store.writer(run_id, HOSTILE) as writer:
        writer.add_trial({c.name: HOSTILE for c in TRIALS if c.type == "string" and c.name not in skip})
        writer.add_trial({"engine": HOSTILE, "case_id": "1", "verdict": "EXACT", "rung": "ops"})
        writer.add_mutation({c.name: HOSTILE for c in MUTATION if c.type == "string" and c.name not in skip})
        writer.add_coverage({"engine": HOSTILE, "region": HOSTILE, "value": HOSTILE, "findings": 1})
        for verdict in ("WITHIN_BOUND", "DEFECT"):
            names = dict.fromkeys(("rung", "op", "tap", "rule", "message", "case_id"), HOSTILE)
            writer.add_judgement(names | {"engine": HOSTILE, "verdict": verdict, "share": 3.0, "layer": 1})
    row = {c.name: HOSTILE for c in FINDINGS if c.type == "string" and c.name not in skip | {"first_run", "last_run"}}
    row |= {"run_id": run_id, "found": 1.0, "expected": 2.0, "bound": 0.5, "share": 2.0}
    tree = [
        {"title": HOSTILE, "tokens": [1, 2], "parents": [-1, 0], "path": [0, 1], "guilty": 1},
        HOSTILE,
        {"tokens": HOSTILE, "parents": HOSTILE},
    ]
    row |= {"tree": tree, "trace": [[HOSTILE, 1, 0.5, 3.0], HOSTILE, [1], {"tap": HOSTILE, "layer": 2, "relative_error": 0, "share": 0}]}
    name, _ = store.report_finding(row | {"bisect": {HOSTILE: HOSTILE, "steps": [1]}, "index": [HOSTILE]})
    (tmp_path / "s" / "ledger.toml").write_text(
        f"[{name}]\nstate = 'wontfix'\nnote = '''{HOSTILE.replace(chr(0), '').replace(chr(39), '')}'''\n"
    )
    (tmp_path / "s" / "parts" / "trials" / "<img src=x onerror=alert(1)>.parquet").write_bytes(b"")
    store.close()
    text = render(load(tmp_path / "s"))
    document = assert_sound(text)
    assert "{{7*7}}" in document.elements[0].text and "&lt;img src=x" in text
    assert sum(e.tag == "script" for e in document.elements) == 2


@pytest.mark.parametrize(
    "junk",
    ["{", "[]", "[1,2]", '{"a": 1}', "null", "NaN", "[NaN]", '[{"tokens": [1], "parents": [5]}]', '[{"tokens": [1,2], "parents": [-1]}]'],
)
def test_broken_json_in_a_finding_leaves_a_page(tmp_path: Path, junk: str) -> None:
    one_run(tmp_path / "s", [{"verdict": "DEFECT"}], [{"tree": junk, "trace": junk, "bisect": junk, "index": junk, "case": junk}])


def test_a_deep_chain_and_a_wide_star_are_drawn(tmp_path: Path) -> None:
    many = 3_000
    chain = {"tokens": [1] * many, "parents": [*range(-1, many - 1)], "path": [*range(many)], "guilty": many - 1}
    star = {"tokens": [1] * many, "parents": [-1] + [0] * (many - 1), "path": [0], "guilty": 3}
    page = one_run(tmp_path / "s", [{"verdict": "DEFECT"}], [{"tree": [chain, star]}])
    assert f"of {many} nodes are drawn" in render(page)


def test_thousands_of_findings_stay_under_2_mb_and_are_counted(tmp_path: Path) -> None:
    fill(tmp_path / "s", trials=100, findings=1_500, layers=61)
    text = page_text(tmp_path / "s", tmp_path)
    document = assert_sound(text)
    rows = sum("data-id" in e.attributes for e in document.elements if e.tag == "tr")
    articles = sum(e.tag == "article" for e in document.elements)
    assert 0 < articles < rows < 1_500
    assert f"{1_500 - rows:,} more findings are in the store" in text and f"{rows - articles} findings of the table have no section" in text


def test_a_word_of_a_megabyte_does_not_break_the_page(tmp_path: Path) -> None:
    big = "x" * 1_000_000
    one_run(
        tmp_path / "s",
        [{"verdict": "DEFECT"}],
        [{"message": big, "case": big, "replay": big, "bisect": {"note": big}}],
        command=big,
        machine=big,
        note=big,
    )


def test_a_model_of_61_layers_on_three_engines_fits(tmp_path: Path) -> None:
    fill(tmp_path / "s", trials=200, engines=3, findings=3, layers=61)
    document = assert_sound(page_text(tmp_path / "s", tmp_path))
    assert len(by_class(document, "heat")) == 3


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    Store.create_or_open(tmp_path / "s").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        write_report(tmp_path / "s", tmp_path / "file" / "report.html")
    with pytest.raises(StoreError, match="no such folder"):
        write_report(tmp_path / "nowhere", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
