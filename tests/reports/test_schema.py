"""Words shared with the judges, and rows that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oracles import judgement
from reports import schema


def test_verdicts_and_rungs_are_those_of_the_judges() -> None:
    assert tuple(str(v) for v in judgement.Verdict) == schema.VERDICTS
    assert {str(v) for v in judgement.FINDINGS} == set(schema.FINDING_VERDICTS)
    assert judgement.RUNGS == schema.RUNGS


def test_every_column_is_explained_and_named_once() -> None:
    for table, columns in [*schema.TABLES.items(), ("findings", schema.FINDINGS)]:
        names = [c.name for c in columns]
        assert len(set(names)) == len(names), table
        assert all(c.meaning and c.type in schema.EMPTY for c in columns), table


def test_the_manual_holds_the_tables() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "store.md").read_text("utf-8")
    assert schema.to_markdown() in manual, "docs/store.md drifted: paste the output of python -m reports --schema under 'Tables'"


def test_an_unknown_column_is_named() -> None:
    with pytest.raises(ValueError, match="trials has no column 'verdcit'"):
        schema.clean("trials", schema.TRIALS, {"verdcit": "EXACT"})


def test_a_missing_required_column_is_named() -> None:
    with pytest.raises(ValueError, match="needs its column 'verdict'"):
        schema.clean("trials", schema.TRIALS, {"engine": "e", "case_id": "1"})


@pytest.mark.parametrize("value", ["many", 2**63, float("nan"), [1]])
def test_a_value_of_another_type_is_named(value: object) -> None:
    with pytest.raises(ValueError, match="trials.checked is"):
        schema.clean("trials", schema.TRIALS, {"engine": "e", "case_id": "1", "verdict": "EXACT", "checked": value})


def test_numpy_scalars_lists_and_huge_seeds_are_taken() -> None:
    row = schema.clean("findings", schema.FINDINGS, {"index": [np.int64(2), 1], "layer": np.int32(4)}, partial=True)
    assert row == {"index": "[2, 1]", "layer": 4}
    assert schema.clean("trials", schema.TRIALS, {"seed": 2**100}, partial=True) == {"seed": str(2**100)}


def test_a_lone_surrogate_stays_readable() -> None:
    assert schema.clean("runs", schema.RUNS, {"note": "a\udc80b"}, partial=True) == {"note": "a\\udc80b"}
