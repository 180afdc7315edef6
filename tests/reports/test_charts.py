"""Pictures: signs that do not need colour, and data that are not what they should be."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports import charts


def tree(**more: object) -> str:
    return charts.tree(
        {"tokens": [7, 8, 9, 10], "parents": [-1, 0, 0, 1], "path": [0, 1], "expected_path": [0, 2], "guilty": [2]} | more, "t"
    )


def edges(svg: str) -> list[str]:
    return re.findall(r'class="edge (\w+)"', svg)


def test_each_edge_says_who_accepted_it() -> None:
    assert edges(tree()) == ["engine", "ought", "draft"]
    assert edges(tree(expected_path=[0, 1, 3])) == ["both", "draft", "ought"]


def test_without_a_path_of_the_specification_the_paths_are_the_same() -> None:
    assert edges(tree(expected_path=[])) == ["both", "draft", "draft"]


@pytest.mark.parametrize(("guilty", "marks"), [([2], 1), (2, 1), ([1, 3], 2), ([], 0), (-1, 0), (None, 0), ("2", 1), ([99], 0)])
def test_guilty_nodes_carry_a_cross(guilty: object, marks: int) -> None:
    assert tree(guilty=guilty).count("✕ ") == marks


@pytest.mark.parametrize(
    "round_",
    [
        {},
        {"tokens": [1], "parents": []},
        {"tokens": [1, 2], "parents": [-1]},
        {"tokens": [1], "parents": [0]},
        {"tokens": [1], "parents": [-2]},
        {"tokens": "x", "parents": "x"},
    ],
)
def test_what_is_no_tree_is_not_drawn(round_: dict[str, object]) -> None:
    assert charts.tree(round_, "t") == ""


@given(st.lists(st.integers(0, 30), min_size=0, max_size=40))
def test_nodes_of_one_depth_never_overlap(back: list[int]) -> None:
    parents = [-1] + [max(0, i - b) for i, b in enumerate(back)]
    depth, row, rows = charts._layout(parents)
    assert rows >= 1 and all(0 <= r < rows for r in row)
    places = sorted(zip(depth, row, strict=True))
    assert all(a[0] != b[0] or b[1] - a[1] >= 1 for a, b in itertools.pairwise(places))


@pytest.mark.parametrize(
    ("share", "step"), [(0.0, 0), (1e-9, 1), (1e-4, 1), (0.05, 4), (1.0, 6), (math.nextafter(1.0, 2.0), 7), (math.inf, 7), (math.nan, 7)]
)
def test_the_step_above_the_bound_begins_right_above_1(share: float, step: int) -> None:
    assert charts.heat_step(share) == step


def test_a_trace_marks_what_is_above_its_bound() -> None:
    points = charts.trace_points([["a", 0, 1e-7, 0.5], ["b", 0, 0.0, 0.0], ["c", 1, 1e308, 1e308], ["d", 1, float("nan"), 1.0000001]])
    assert points[2][2:] == (math.inf, math.inf)
    svg = charts.trace(points, ("c", 1))
    assert svg.count('class="over"') == svg.count('class="mark"') == 2 and svg.count('class="tap guilty"') == 1
    assert "first above its bound: c, layer 1" in svg and svg.count('class="dot zero"') == 1
    numbers = re.findall(r' (?:x|y|width|height|cx|cy)="([^"]+)"', svg)
    assert all(math.isfinite(float(n)) and float(n) >= 0 for n in numbers)


def test_a_long_trace_shows_the_worst_tap_of_each_layer() -> None:
    trace = [[f"t{i % 20}", i // 20, 1e-6, 5.0 if i == 333 else 0.1] for i in range(800)]
    points = charts.trace_points(trace)
    assert len(points) == 40 and points[16] == ("t13", 16, 1e-6, 5.0)


def test_a_trace_of_one_point_is_no_picture() -> None:
    assert charts.trace([("out", -1, 1.0, 9.0)], ("out", -1)) == ""
