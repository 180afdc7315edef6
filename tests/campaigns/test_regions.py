"""Coverage: each of the twelve regions is reached on purpose, by predicates that say no as well; every cell that is meant to be reached is."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest

from campaigns import coverage
from campaigns.case import Case, GenerateCase, OpCase, SessionCase, TreeCase
from campaigns.discover import Discovery, diet_of
from campaigns.regions import REGIONS, beside, regions
from campaigns.trial import Outcome
from impls.registry import resolve

PLAIN = SessionCase("tiny", (), 0, "ordinary", ((3, 1),), ())
OP = OpCase("matmul", (("K", 11), ("N", 11), ("T", 11)), (), "ordinary", 0)

WITNESSES: dict[int, tuple[Case, Case]] = {
    # region: (a case in it, its neighbour outside)
    1: (dataclasses.replace(OP, dims=(("K", 17), ("N", 11), ("T", 11))), OP),
    2: (dataclasses.replace(PLAIN, overrides=(("rope_dim", 4),)), PLAIN),
    3: (dataclasses.replace(PLAIN, rounds=(((),), ((),))), PLAIN),
    4: (dataclasses.replace(PLAIN, prompts=((1, 1),)), PLAIN),
    5: (dataclasses.replace(OP, hazards=("views",)), OP),
    6: (dataclasses.replace(OP, hazards=("poison",)), OP),
    7: (dataclasses.replace(OP, regime="extreme"), OP),
    8: (dataclasses.replace(PLAIN, prompts=((3, 1), (5, 1))), dataclasses.replace(PLAIN, prompts=((3, 1), (3, 2)))),
    9: (dataclasses.replace(PLAIN, rounds=((((0, 0), (1, 0)),),)), dataclasses.replace(PLAIN, rounds=((((0, 0), (0, 0)),),))),
    10: (dataclasses.replace(PLAIN, prompts=((33, 1),)), dataclasses.replace(PLAIN, prompts=((32, 1),))),
    11: (dataclasses.replace(PLAIN, regime="tied-experts"), PLAIN),
    12: (
        dataclasses.replace(PLAIN, generate=GenerateCase("chain", 0, 80, -1, 4, 3, 6, 2)),
        dataclasses.replace(PLAIN, generate=GenerateCase("chain", 0, 80, -1, 4, 3, 6, -1)),
    ),
}


@pytest.mark.parametrize("number", REGIONS)
def test_a_region_knows_its_cases(number: int) -> None:
    inside, outside = WITNESSES[number]
    assert number in regions(inside)
    assert number not in regions(outside)


def test_tree_cases_have_regions_as_well() -> None:
    assert {4, 11} <= regions(TreeCase(5, 2, 1, 3, 1, 0, 80, 0, 0))
    assert 9 in regions(TreeCase(5, 2, 4, 3, 1, -1, 80, 0, 0))


@pytest.mark.parametrize(("value", "expected"), [(15, True), (16, True), (17, True), (14, False), (129, True), (1, False)])
def test_a_boundary_has_two_sides(value: int, expected: bool) -> None:
    assert beside(value) == expected


def test_the_generator_reaches_every_region_and_every_declared_cell() -> None:
    """Cases are drawn, not run. The numbers of an ordinary check are an order of magnitude larger."""
    met: Counter[coverage.Cell] = Counter()

    def drawn(cases: Sequence[Case]) -> list[Outcome]:
        for case in cases:
            met.update(coverage.cells(case))
        return [Outcome(case, (), 0.0) for case in cases]

    diet = diet_of(resolve("blocked").describe())
    discovery = Discovery(diet, 11, drawn, lambda outcome: False)
    while discovery.trials < 2500:
        discovery.step()
    reached = {number for number in REGIONS if met[(coverage.BUGZOO, f"{number:02d} {REGIONS[number]}")] >= 10}
    assert reached == set(REGIONS)
    ops = {
        cell
        for cell in coverage.declared()
        if cell[0] in ("op", "weights", "size mod 16", "tree shape", "accepted path", "rounds", "hazard")
    }
    assert ops - met.keys() == set()


def test_shapes_are_declared_with_the_words_that_cases_give() -> None:
    trees = ((), ((0, 1),), ((0, 1), (1, 0)), ((0, 1), (0, 1), (0, 0), (0, 0)), tuple((n, 0) for n in range(5)))
    for length in (1, 15, 16, 17, 20):
        case = dataclasses.replace(PLAIN, prompts=((length, 1),), rounds=tuple((tree,) for tree in trees))
        given = {cell for cell in coverage.cells(case) if cell[0] == coverage.SHAPE}
        assert given
        assert given <= coverage.declared()
