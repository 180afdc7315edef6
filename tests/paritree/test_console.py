"""Printed results: rounding hides nothing, exit codes follow the ladder."""

from __future__ import annotations

import json

import pytest

from campaigns.runner import EngineResult
from oracles.judgement import Judgement, Verdict
from paritree import console


def result(**verdicts: int) -> EngineResult:
    tally = {"judgements": 1, "checked": 10, "unverified": 0, "verdicts": verdicts}
    return EngineResult("mine", trials=sum(verdicts.values()), failing=verdicts.get("DEFECT", 0), tallies={"tree verify": tally})


def test_the_ladder_names_the_first_failing_rung() -> None:
    text = console.ladder(result(EXACT=9_999, DEFECT=1))
    assert "FAIL tree verify        9,999 of 10,000 trials pass" in text
    assert "first failing rung: tree verify" in text
    assert "ops                not reached" in text
    assert "first failing" not in console.ladder(result(EXACT=3, WITHIN_BOUND=2, TIE=1))


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 10, "0 %"), (10, 10, "100 %"), (1, 10**9, "0.01 %"), (10**9 - 1, 10**9, "99.99 %"), (1, 4, "25.00 %"), (0, 0, "0 %")],
)
def test_a_share_is_zero_or_whole_only_where_it_is(part: int, whole: int, text: str) -> None:
    assert console.share(part, whole) == text


def test_exit_codes_follow_findings_and_what_was_verified() -> None:
    nothing = EngineResult("mine", nothing="it offers nothing")
    assert console.exit_code([result(EXACT=3)]) == 0
    assert console.exit_code([result(EXACT=3), result(DEFECT=1)]) == 1
    assert console.exit_code([result(EXACT=3), nothing]) == 5
    missing = EngineResult("other", not_loaded="other: there is no compiler")
    assert console.exit_code([missing, result(EXACT=3)]) == 3
    assert console.exit_code([missing, result(DEFECT=1)]) == 1
    assert console.ladder(missing) == "other: not checked: there is no compiler"


def test_the_replay_of_a_finding_names_a_store_that_is_not_the_default() -> None:
    broken = result(DEFECT=1)
    broken.findings["F-1"] = {"finding_id": "F-1", "message": "off"}
    assert console.ladder(broken).endswith("paritree replay F-1 --engine mine")
    assert console.ladder(broken, "my store").endswith("paritree replay F-1 --engine mine --store 'my store'")


def test_judgements_without_a_finite_number_are_json() -> None:
    plain = console.plain_judgements([Judgement(Verdict.NONFINITE, "N2", "matmul", "out", "ops", found=float("nan"), share=float("inf"))])
    assert json.loads(json.dumps(plain, allow_nan=False))[0]["found"] == "nan"


def test_only_unverified_judgements_prove_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.print_judgements([Judgement(Verdict.UNVERIFIED, "N2", "matmul", "out", "ops")], as_json=False) == 5
    assert "UNVERIFIED" in capsys.readouterr().out
