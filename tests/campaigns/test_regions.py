"""Coverage: each of the twelve regions is reached on purpose, by predicates that say no as well; every cell that is meant to be reached is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from campaigns import coverage
from campaigns.case import Case, GenerateCase, OpCase, SessionCase, TreeCase
from campaigns.discover import Discovery, diet_of
from campaigns.plan import Planner, depths, session_script
from campaigns.regions import (
    CROWDED_WEIGHTS,
    EXTREME_WEIGHTS,
    LAID_OUT_WEIGHTS,
    POISONED_WEIGHTS,
    REGIONS,
    TIED_WEIGHTS,
    beside,
    regions,
)
from campaigns.trial import Outcome
from campaigns.weights import REGIMES as WEIGHT_REGIMES
from impls.registry import resolve
from reports import cells

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


def test_every_regime_of_the_weights_that_is_named_exists() -> None:
    named = EXTREME_WEIGHTS | TIED_WEIGHTS.keys() | CROWDED_WEIGHTS | LAID_OUT_WEIGHTS | POISONED_WEIGHTS
    assert named <= WEIGHT_REGIMES.keys()
    assert set(TIED_WEIGHTS.values()) == set(cells.AXES["ties"]) - {"none"}
    reached = {number for regime in named for number in regions(dataclasses.replace(PLAIN, regime=regime))}
    assert reached - regions(PLAIN) == {4, 5, 6, 7, 8, 11}


def test_tree_cases_have_regions_as_well() -> None:
    assert {4, 11} <= regions(TreeCase(5, 2, 1, 3, 1, 0, 80, 0, 0))
    assert 9 in regions(TreeCase(5, 2, 4, 3, 1, -1, 80, 0, 0))


@pytest.mark.parametrize(("value", "expected"), [(15, True), (16, True), (17, True), (14, False), (129, True), (1, False)])
def test_a_boundary_has_two_sides(value: int, expected: bool) -> None:
    assert beside(value) == expected


def test_the_generator_reaches_every_region_and_every_declared_cell() -> None:
    """Cases are drawn, not run. The numbers of an ordinary check are an order of magnitude larger."""
    met: Counter[coverage.Region] = Counter()

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
    ops = {cell for cell in coverage.declared() if cell[0] in ("op", "size mod 16", "tree shape", "accepted path", "rounds", "hazard")}
    assert ops - met.keys() == set()


@pytest.mark.parametrize("seed", [0, 5])
def test_every_region_is_reached_early(seed: int) -> None:
    """Region 10 needs full sizes, which come after the first 600 trials of a campaign; extreme weights are rare among sessions."""
    first: dict[str, int] = {}
    number = 0

    def drawn(cases: Sequence[Case]) -> list[Outcome]:
        nonlocal number
        for case in cases:
            number += 1
            words = {str(region) for region in regions(case)}
            words |= {f"{case.regime} operands"} if isinstance(case, OpCase) else set()
            words |= {"extreme weights"} if isinstance(case, SessionCase) and case.regime in EXTREME_WEIGHTS else set()
            for word in words:
                first.setdefault(word, number)
        return [Outcome(case, (), 0.0) for case in cases]

    discovery = Discovery(diet_of(resolve("blocked").describe()), seed * 1_000_003, drawn, lambda outcome: False, trials_expected=10_000)
    while discovery.trials < 1000:
        discovery.step()
    wanted = {*map(str, REGIONS), "extreme operands", "lattice operands", "extreme weights"}
    assert wanted <= first.keys()
    assert all(first[word] <= 150 for word in wanted - {"10", "extreme weights"}), first
    assert first["10"] <= 700


# ---- crossed cells ---------------------------------------------------------------------------------------------------------------------


def test_every_reachable_cell_has_a_case_in_it() -> None:
    """The rules say no to nothing that can be, and a campaign that wants a cell gets it."""
    assert [cell for cell in cells.every() if cell not in set(coverage.crossed(coverage.witness(cell)))] == []


def test_a_cell_that_cannot_be_has_no_case() -> None:
    impossible = [cell for cell in itertools.product(*cells.AXES.values()) if not cells.reachable(cell)]
    assert len(impossible) + len(cells.every()) == math.prod(len(classes) for classes in cells.AXES.values())
    with pytest.raises(ValueError, match="a tree of depth 0 has no width"):
        coverage.witness(impossible[0])


def planned(case: SessionCase) -> list[tuple[int, ...]]:
    """(depth, width, prefix, distinct prefixes, sequences, round) of each tree, read off the steps that the planner really hands in."""
    out: list[tuple[int, ...]] = []

    class Watching(Planner):
        def submit(self, number: int, tokens: Any, parents: Any, paths: Any) -> None:
            prefixes = [self.lengths[sequence] for sequence in tokens]
            for sequence in sorted(tokens):
                if self.lengths[sequence]:  # a sequence that joins late has no row yet, and brings its prompt
                    children = Counter(parents[sequence][1:].tolist())
                    tall, wide = int(depths(parents[sequence]).max()), max(children.values(), default=0)
                    out.append((tall, wide, self.lengths[sequence], len(set(prefixes)), len(prefixes), number + 1))
            super().submit(number, tokens, parents, paths)

    session_script(case, planner_of=Watching)
    return out


def in_words(tall: int, wide: int, prefix: int, distinct: int, sequences: int, round_: int) -> tuple[str, ...]:
    """The classes once more, written out."""
    depth = "0" if tall == 0 else "1" if tall == 1 else "2 to 3" if tall < 4 else "4+"
    batch = "alone" if sequences == 1 else "equal" if distinct == 1 else "unequal"
    page = {0: "0", 1: "1", 15: "15"}.get(prefix % 16, "other")
    return depth, str(wide) if wide < 3 else "3+", page, batch, str(round_) if round_ < 3 else "3+"


def test_cells_are_those_of_the_trees_that_an_engine_is_given() -> None:
    drawn: list[SessionCase] = []

    def kept(cases: Sequence[Case]) -> list[Outcome]:
        drawn.extend(dataclasses.replace(case, generate=None) for case in cases if isinstance(case, SessionCase))
        return [Outcome(case, (), 0.0) for case in cases]

    diet = dataclasses.replace(diet_of(resolve("blocked").describe()), mix=(("session", 1.0),))
    discovery = Discovery(diet, 3, kept, lambda outcome: False, trials_expected=1000)
    while discovery.trials < 500:
        discovery.step()
    assert {"late", "fork", "orphan"} <= {hazard for case in drawn for hazard in case.hazards}
    for case in drawn:
        found = list(coverage.crossed(case))
        assert all(map(cells.reachable, found)), case
        assert [(*cell[:4], cell[7]) for cell in found] == [in_words(*tree) for tree in planned(case)], case


def test_a_cell_names_what_the_weights_the_cache_and_the_hazard_are() -> None:
    case = dataclasses.replace(PLAIN, regime="tied-experts", overrides=(("cache_format", "bfloat16"),), rounds=(((),),), hazards=("views",))
    assert list(coverage.crossed(case)) == [("0", "0", "other", "alone", "bfloat16", "experts", "memory", "1")]
    two = dataclasses.replace(case, prompts=((15, 1), (15, 2)), hazards=("interleaved",))
    assert set(coverage.crossed(two)) == {("0", "0", "15", "equal", "bfloat16", "experts", "rows", "1")}
    assert list(coverage.crossed(OP)) == []
