"""Cases as lines of JSON: round trips, stable names, and one sentence for everything that is no case."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaigns.case import Case, CaseError, GenerateCase, OpCase, SessionCase, TreeCase, case_id, from_json, to_json
from campaigns.plan import hit_path, tree_parents
from campaigns.strategies import op_cases, session_cases, tree_cases
from spec.tree import check_path, check_structure

OP = OpCase("add", (("N", 3), ("T", 2)), (), "ordinary", 7, ("poison",))
SESSION = SessionCase(
    "tiny", (("yarn", (8.0, 16, 32.0, 1.0, 0.707, 1.3)),), 1, "ordinary", ((3, 5),), ((((0, 1), (1, 0)),),), 2, False,
    GenerateCase("noisy", 1, 80, -1, 4, 3, 5, 2), ("fork",),
)  # fmt: skip


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.one_of(op_cases(), tree_cases(), session_cases()))
def test_a_case_survives_its_line(case: Case) -> None:
    line = to_json(case)
    assert "\n" not in line
    assert from_json(line) == case
    assert case_id(from_json(line)) == case_id(case)


def test_the_name_of_a_case_is_the_same_on_every_machine() -> None:
    assert case_id(OP) == "e21a6afd12596ac9"


def test_a_session_with_everything_survives_its_line() -> None:
    assert from_json(to_json(SESSION)) == SESSION


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (to_json(SESSION)[:70], "was the file cut"),
        ("[]", "kind is 'list'"),
        ('{"kind":"spell"}', "kind is 'spell'"),
        (to_json(OP).replace('"schema":1', '"schema":9'), "schema 9"),
        (to_json(OP).replace('"seed":7,', ""), "lacks its field 'seed'"),
        (to_json(OP).replace('"seed"', '"sede"'), "no field 'sede'"),
        (json.dumps({**json.loads(to_json(SESSION)), "generate": 3}), "GenerateCase needs an object"),
    ],
)
def test_what_is_no_case_says_why(text: str, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        from_json(text)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), max_size=12), st.data())
def test_any_part_of_a_tree_is_a_tree(nodes: list[tuple[int, int]], data: st.DataObject) -> None:
    kept = tuple(node for node in nodes if data.draw(st.booleans()))
    parents = tree_parents(kept)
    check_structure(parents)
    path = hit_path(kept, parents)
    check_path(path, len(parents))
    assert (parents[path[1:]] == path[:-1]).all()


def test_tree_cases_of_one_seed_have_one_name() -> None:
    case = TreeCase(3, 2, 4, 0, 1, 0, 50, 0, 1)
    assert case_id(case) == case_id(TreeCase(*np.array([3, 2, 4, 0, 1, 0, 50, 0, 1]).tolist()))
