"""What the judge learned for engines that nobody here wrote: float32 rotary angles, ties, departures by design. Pairs that must pass and must fail."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from campaigns.case import CaseError, SessionCase
from campaigns.isolation import transport, validate
from campaigns.isolation.inprocess import InProcess
from campaigns.plan import session_script
from campaigns.trial import Bench
from impls.blocked.engine import BlockedEngine
from impls.golden import GoldenEngine
from oracles.ball import arithmetic
from oracles.judgement import Verdict
from oracles.ops.rope import table_radius
from oracles.ops.route import Rule
from spec.config import preset
from spec.engine import Departure, Description, Engine, Profile, departed

CASE = SessionCase("tiny", (), 0, "ordinary", ((17, 1),), ((((0, 1), (1, 0)),),))


# Rotary angles


def float32_tables(points: Any, positions: Any, frequencies: Any, magnitude: Any) -> Any:
    """cos and sin of angles formed in float32, as most engines do."""
    angle = positions.astype(np.float32)[:, None] * np.asarray(frequencies, np.float32)
    return np.cos(angle) * np.float32(magnitude), np.sin(angle) * np.float32(magnitude)


def coarse_tables(points: Any, positions: Any, frequencies: Any, magnitude: Any) -> Any:
    """Frequencies off by 2**-16: 256 roundings, more than any profile here declares."""
    return float32_tables(points, positions, np.asarray(frequencies) * (1 + 2.0**-16), magnitude)


@pytest.mark.parametrize(
    ("tables", "roundings", "verdict"),
    [
        (float32_tables, 4.0, Verdict.WITHIN_BOUND),
        (float32_tables, 0.0, Verdict.DEFECT),
        (coarse_tables, 4.0, Verdict.DEFECT),
        (coarse_tables, 300.0, Verdict.WITHIN_BOUND),
    ],
)
def test_float32_angles_pass_where_they_are_declared_and_only_there(tables: Any, roundings: float, verdict: Verdict) -> None:
    engine = BlockedEngine({"rope_tables": tables}, profile=Profile(angle_roundings=roundings))
    worst = Bench(InProcess(engine)).outcome(CASE).worst
    assert worst is not None and worst.verdict is verdict
    assert verdict is not Verdict.DEFECT or worst.op == "rope"


def test_the_radius_of_a_table_grows_with_the_angle_and_the_pair() -> None:
    angle = np.array([[0.0, 0.0], [1000.0, 1000.0]])
    assert table_radius(angle, 1.0, arithmetic(Profile())) is None
    radius = table_radius(angle, 1.0, arithmetic(Profile(angle_roundings=8.0, angle_roundings_per_pair=4.0)))
    assert radius is not None
    unit = 2.0**-24
    assert np.allclose(radius / unit, [[16, 16], [8016, 12016]])  # 16 of the entry; 8 and 8 + 4 times the angle


# Ties


def reachable(choice: Any, rule: Rule) -> set[frozenset[int]]:
    """Every choice that some order among equals gives, by trying them all: a tie is broken by an amount smaller than any difference."""
    experts, size = len(choice), len(choice) // rule.groups
    out = set()
    for order in itertools.permutations(range(experts)):
        nudged = choice * 1000.0 - np.argsort(order)  # integers stay apart
        for groups in itertools.permutations(range(rule.groups)):
            allowed = np.ones(experts, np.bool_)
            if rule.groups > 1:
                two = np.sort(choice.reshape(rule.groups, size), -1)[:, -2:]
                rank = (two[:, -1] if rule.by_max else two.sum(-1)) * 1000.0 - np.argsort(groups)
                kept = np.argsort(-rank)[: rule.top_groups]
                allowed = np.isin(np.arange(experts) // size, kept)
            out.add(frozenset(np.argsort(-np.where(allowed, nudged, -np.inf))[: rule.top_k].tolist()))
    return out


@pytest.mark.parametrize(
    "rule", [Rule(2, 1, 1, True), Rule(3, 1, 1, True), Rule(2, 3, 1, True), Rule(2, 3, 2, False), Rule(3, 2, 1, False)]
)
def test_a_tie_is_what_some_order_among_equals_gives(rule: Rule) -> None:
    for seed in range(3):
        choice = np.random.default_rng(seed).integers(0, 3, 6).astype(np.float32)
        right = reachable(choice, rule)
        for ids in itertools.combinations(range(6), rule.top_k):
            found = rule.is_tied(choice[None], np.zeros(6, np.float32), np.array([ids]))
            assert bool(found[0]) == (frozenset(ids) in right), (choice, ids)
    assert not rule.is_tied(np.zeros((1, 6), np.float32), np.zeros(6, np.float32), np.array([[1] * rule.top_k]))[0]


def test_another_word_for_ties_is_refused() -> None:
    with pytest.raises(ValueError, match="ties is 'highest'"):
        arithmetic(Profile(ties="highest"))


# Departures

EPS = Departure("latent_eps", 1e-3, "a constant in the code")


class Departing:
    """The golden engine, which always takes eps 1e-3 for the latents; it says so, or not."""

    def __init__(self, *, honest: bool) -> None:
        self._engine = GoldenEngine()
        self._honest = honest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def describe(self) -> Description:
        return replace(self._engine.describe(), departures=(EPS,) if self._honest else ())

    def open(self, config: Any, weights: Any) -> Any:
        return self._engine.open(departed(config, [EPS]), weights)


def as_engine(honest: bool) -> Engine:
    engine: Any = Departing(honest=honest)
    return engine  # type: ignore[no-any-return]


def test_a_declared_departure_is_no_finding_and_an_undeclared_one_is() -> None:
    assert Bench(InProcess(as_engine(True))).outcome(CASE).verdict is Verdict.WITHIN_BOUND
    worst = Bench(InProcess(as_engine(False))).outcome(CASE).worst
    assert worst is not None and worst.verdict is Verdict.DEFECT and worst.tap == "q_a_norm"


def test_departures_travel_from_the_worker_and_change_the_script() -> None:
    description = as_engine(True).describe()
    assert transport.unpack_description(transport.pack_description(description)) == description
    assert session_script(CASE, description.departures).config == preset("tiny", latent_eps=1e-3)
    assert session_script(CASE).config == preset("tiny")


def test_a_departure_that_no_configuration_has_is_refused() -> None:
    description = replace(as_engine(True).describe(), departures=(Departure("speed", 3, "fast"),))
    with pytest.raises(validate.Malformed, match="'speed', which is no field"):
        validate.description(description)
    with pytest.raises(CaseError, match="departures do not fit"):
        session_script(CASE, [Departure("top_k", 99, "more")])
