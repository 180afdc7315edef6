"""What a campaign draws: every declared region is reached, the frozen mix holds, and the environment has no say."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings

from campaigns import coverage
from campaigns.case import Case, SessionCase, from_json, to_json
from campaigns.discover import Diet, Discovery, diet_of
from campaigns.isolation import InProcess
from campaigns.plan import config_of, session_script
from campaigns.strategies import MIX, OP_SHAPES, OVERRIDES, in_frozen_mix, layers_of, lengthened, rows_of
from campaigns.trial import Bench, Outcome
from impls.blocked import BlockedEngine
from oracles.judgement import FINDINGS
from spec.config import PRESETS
from spec.engine import Description

EVERYTHING = Diet(
    ops=tuple(OP_SHAPES),
    trees=True,
    sessions=True,
    loops=True,
    op_hazards=("poison", "views"),
    session_hazards=("fork", "evict"),
    samples=True,
)


class Unrun:
    """Collects the cases of a discovery and says that nothing is wrong with them."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        self.cases += cases
        return [Outcome(case, (), 0.0) for case in cases]


def discovered(trials: int, *, seed: int = 0, diet: Diet = EVERYTHING, expected: int = 10_000) -> list[Case]:
    collected = Unrun()
    discovery = Discovery(diet, seed, collected.run, lambda outcome: False, trials_expected=expected)
    while discovery.trials < trials:
        discovery.step()
    return collected.cases


@pytest.fixture(scope="module")
def mixed() -> list[Case]:
    return discovered(5000, expected=5000)


def test_every_declared_region_is_reached(mixed: list[Case]) -> None:
    reached = Counter(cell for case in mixed for cell in coverage.cells(case))
    assert sorted(coverage.declared() - reached.keys()) == []


def test_every_case_of_a_campaign_is_a_line(mixed: list[Case]) -> None:
    assert all(from_json(to_json(case)) == case for case in mixed)


def test_the_mix_is_kept(mixed: list[Case]) -> None:
    sessions = [case for case in mixed if isinstance(case, SessionCase)]
    assert abs(len(sessions) / len(mixed) - MIX["session"]) < 0.02  # batches are whole: a share is reached within one batch
    frozen = [case for case in sessions if in_frozen_mix(case)]
    assert len(frozen) >= 0.1 * len(mixed)  # so 10,000 trials hold 1,000


def test_small_cases_come_first() -> None:
    cases = discovered(600)
    first = [rows_of(case) for case in cases[:250] if isinstance(case, SessionCase)]
    later = [rows_of(case) for case in discovered(1500)[900:] if isinstance(case, SessionCase)]
    assert max(first) <= 40 < max(later)


def test_one_seed_gives_one_campaign_and_another_seed_another() -> None:
    assert discovered(200, seed=3) == discovered(200, seed=3)
    assert discovered(200, seed=3) != discovered(200, seed=4)


def test_a_hypothesis_profile_does_not_change_a_campaign() -> None:
    before = settings.get_current_profile_name()
    plain = discovered(100)
    settings.register_profile("foreign", derandomize=True, database=None, deadline=1, suppress_health_check=list(HealthCheck))
    settings.load_profile("foreign")
    try:
        assert discovered(100) == plain
    finally:
        settings.load_profile(before)


def test_full_sessions_are_lengthened_into_the_frozen_mix() -> None:
    short = SessionCase("tiny", (), 0, "ordinary", ((1, 0),), ((),))
    assert not in_frozen_mix(short)
    assert in_frozen_mix(lengthened(short))
    assert lengthened(lengthened(short)) == lengthened(short)
    assert layers_of(SessionCase("tiny", (("layers", 3),), 0, "ordinary", ((1, 0),), ())) == 3


def test_every_bundle_of_overrides_fits_a_preset() -> None:
    for bundle in OVERRIDES:
        fitting = []
        for name in PRESETS:
            try:
                config_of(SessionCase(name, bundle, 0, "ordinary", ((1, 0),), ()))
                fitting.append(name)
            except ValueError:
                continue
        assert fitting, bundle


def test_sessions_that_are_drawn_can_be_planned() -> None:
    diet = Diet(ops=(), trees=False, sessions=True, loops=True, session_hazards=("fork", "evict", "freed"), samples=True)
    cases = discovered(60, diet=diet)
    for case in cases:
        assert isinstance(case, SessionCase)
        session_script(case)


def test_an_honest_engine_passes_a_piece_of_the_mix() -> None:
    worker = InProcess(BlockedEngine())
    bench = Bench(worker)
    wrong: list[Outcome] = []

    def record(outcome: Outcome) -> bool:
        if any(j.verdict in FINDINGS for j in outcome.judgements):
            wrong.append(outcome)
        return False

    discovery = Discovery(diet_of(worker.description), 1, bench.outcomes, record, trials_expected=150)
    while discovery.trials < 150:
        discovery.step()
    assert [(o.case, o.worst) for o in wrong] == []
    assert set(discovery.done) == {"op", "tree", "session"}


def test_a_new_finding_leaves_the_batch_with_its_choices_and_a_known_one_does_not() -> None:
    met: list[Case] = []

    def first_only(outcome: Outcome) -> bool:
        met.append(outcome.case)
        return len(met) == 1

    discovery = Discovery(EVERYTHING, 0, Unrun().run, first_only)
    (fresh,) = discovery.step()
    assert fresh.outcome.case == met[0]
    assert fresh.choices
    assert discovery.step() == []


@pytest.mark.parametrize(
    ("capabilities", "kinds"),
    [
        ({"run_op"}, {"op", "tree"}),
        ({"forward", "commit"}, {"session"}),
        ({"forward"}, set()),
        (set(), set()),
    ],
)
def test_an_engine_is_asked_what_it_offers(capabilities: set[str], kinds: set[str]) -> None:
    diet = diet_of(Description("e", "1", capabilities=frozenset(capabilities)))
    assert set(diet.shares()) == kinds
    assert not kinds or sum(diet.shares().values()) == pytest.approx(1.0)


def test_an_engine_without_trees_or_loops_gets_neither() -> None:
    diet = diet_of(Description("e", "1", capabilities=frozenset({"run_op", "forward", "commit"}), ops=frozenset({"matmul"})))
    assert diet.ops == ("matmul",)
    assert not diet.trees and not diet.loops and not diet.samples
    assert "fork" not in diet.session_hazards


def test_an_engine_that_offers_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to try"):
        Discovery(diet_of(Description("e", "1")), 0, Unrun().run, lambda outcome: False).step()


@pytest.mark.parametrize("expected", [1, 10**6])
@pytest.mark.parametrize("kind", ["op", "tree", "session"])
def test_batches_of_every_kind_and_size_draw_without_running_out_of_bytes(kind: str, expected: int) -> None:
    diet = dataclasses.replace(EVERYTHING, mix=((kind, 1.0),))
    discovery = Discovery(diet, 0, Unrun().run, lambda outcome: False, trials_expected=expected)
    for _ in range(40):
        discovery.step()
    assert discovery.overruns == 0
    assert discovery.done.keys() == {kind}


BLIND = Diet(ops=(), trees=False, sessions=True, loops=True, session_hazards=("fork", "evict"), samples=True, hides_trees=True)


def test_an_engine_that_hides_its_trees_is_shown_their_edges() -> None:
    """Half of the batches are loops, with budgets on both sides of 32 and of the smallest vocabulary, some with drawn tokens."""
    cases = [case for case in discovered(600, diet=BLIND, expected=10**9) if isinstance(case, SessionCase)]
    loops = [case.generate for case in cases if not case.rounds and case.generate is not None]
    assert 0.3 < len(loops) / len(cases) < 0.7
    assert all(loop.drafter == "edge" for loop in loops)
    full = [case for case in discovered(1200, diet=BLIND, expected=1) if isinstance(case, SessionCase) and not case.rounds]
    budgets = {case.generate.budget for case in full if case.generate is not None}
    assert budgets >= {1, 2, 33, 40} and min(budgets) == 1
    sampled = sum(bool(case.generate.sampling) for case in full if case.generate is not None)
    assert 0.15 < sampled / len(full) < 0.5
    for case in full[:8]:
        session_script(case)


def test_what_needs_a_partner_meets_it_often() -> None:
    cases = [
        case for case in discovered(1500, diet=BLIND, expected=1) if isinstance(case, SessionCase) and "groups" in dict(case.overrides)
    ]
    assert sum(case.regime == "negative-bias" for case in cases) > len(cases) / 6
