"""Every rule that names an executable example is true; ids are complete and in use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spec.rules import RULES, UnknownRule, rule

ROOT = Path(__file__).parents[2]

FAMILIES = {"T": 8, "C": 7, "V": 3, "A": 6, "S": 5, "K": 7, "D": 5, "L": 3, "M": 11, "N": 6}


def test_every_family_is_complete() -> None:
    assert set(RULES) == {f"{letter}{number}" for letter, count in FAMILIES.items() for number in range(1, count + 1)}
    assert all(key == entry.id for key, entry in RULES.items())


@pytest.mark.parametrize("name", [name for name, entry in RULES.items() if entry.check is not None])
def test_the_example_of_a_rule_is_true(name: str) -> None:
    check = RULES[name].check
    assert check is not None
    assert check() is True


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_written_for_a_reader(name: str) -> None:
    entry = RULES[name]
    assert entry.statement.endswith(".")
    assert entry.example
    assert entry.source


def test_rules_are_found_whatever_their_case() -> None:
    assert rule("t3") is RULES["T3"]
    with pytest.raises(UnknownRule, match="there is no rule 'Z9': choose one of T1, T2"):
        rule("Z9")


def test_records_quote_rules_that_exist() -> None:
    """An op record lists its rules in `rules=(..)`; an unknown id there would reach the reports."""
    quoted: dict[str, set[str]] = {}
    for path in sorted((ROOT / "spec" / "ops").glob("*.py")):
        for listing in re.findall(r"rules=\(([^)]*)\)", path.read_text(encoding="utf-8")):
            quoted[path.name] = set(re.findall(r'"([^"]+)"', listing))
    assert len(quoted) >= 5
    assert {name: unknown for name, ids in quoted.items() if (unknown := ids - set(RULES))} == {}
