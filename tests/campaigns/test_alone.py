"""What only one way of looking finds: for each relation and each hazard a planted bug that it kills, and that no other one kills over the same cases.

Relations are judged on an engine that shows no taps; beside them stands the check that needs no reference either: the engine's own loop, with and
without drafts, must give the same tokens. Cases, seeds and plants are fixed, and the honest engine passes all of it, so that a kill is never an alarm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache

import pytest

from campaigns.case import Case, GenerateCase, OpCase, SessionCase, TreeCase
from campaigns.discover import SESSION_HAZARDS
from campaigns.hazards import HAZARDS
from campaigns.isolation import Supervisor
from campaigns.isolation.inprocess import InProcess
from campaigns.materialise import session_script
from campaigns.plan import PLAN_HAZARDS
from campaigns.relations import RECIPES
from campaigns.trial import Bench, patience
from impls.blocked import BlockedEngine
from impls.planted import fresh
from impls.planted.mutants import OVERRIDES, PLANTS
from impls.registry import resolve
from oracles.judgement import FINDINGS
from oracles.relations import BITS, CLOSE, TOKENS
from spec.engine import Engine
from spec.script import Script
from spec.taps import all_tap_names

# ---- relations -----------------------------------------------------------------------------------------------------------------------

ALONE = {
    "chain": "level-shortcut",
    "siblings": "next-row-mask",
    "rejected": "all-accepted",
    "decode": "split-bf16",
    "numbers": "table-of-three",
    "chunks": "short-prefix",
    "alone": "first-key-lost",
    "prefill": "H05",
    "budget": "bfs-numbers",
}
EQUALITY = {"numbers": BITS, "budget": TOKENS} | dict.fromkeys(
    ("chain", "siblings", "rejected", "decode", "chunks", "alone", "prefill"), CLOSE
)
TOKENS_CHECK = "tokens"

# Two trees with an accepted path of three nodes and a rejected branch: its end is at depth 2, and at depth 3 in the last round.
BRANCH = ((0, 0), (1, 1), (0, 1), (2, 0))
DEEP = ((0, 0), (1, 1), (0, 1), (0, 0))
SESSIONS = (
    SessionCase("tiny", (), 1, "ordinary", ((6, 1), (5, 2)), ((BRANCH, BRANCH), (DEEP, DEEP)), generate=GenerateCase("random", 3, 80, -1, 6, 3, 3, -1)),
    SessionCase(
        "tiny", (), 3, "ordinary", ((7, 9), (6, 8)), ((BRANCH, DEEP), (BRANCH, BRANCH), (DEEP, DEEP)),
        generate=GenerateCase("random", 7, 80, -1, 6, 3, 3, -1),
    ),
)  # fmt: skip


def without_taps(plant: str, relation: str) -> Engine:
    """Logits and tokens only; for trees also the engine's account of its rounds."""
    if relation == "budget":
        return BlockedEngine(OVERRIDES.get(plant), hidden_taps=frozenset(all_tap_names()))
    return resolve(f"blind+blocked:{plant}" if plant else "blind+blocked")


def broken(plant: str, relation: str, case: SessionCase) -> bool:
    """What the relation alone says: the golden model's logits are not looked at."""
    outcome = Bench(InProcess(without_taps(plant, relation))).outcome(dataclasses.replace(case, relation=relation))
    related = [j for j in outcome.judgements if j.tap == f"relation {relation}"]
    assert related, f"the relation {relation} judged nothing"
    return any(j.verdict in FINDINGS for j in related)


def streams_differ(plant: str, case: SessionCase) -> bool:
    """The engine's own loop with drafts against its own loop without, token by token."""
    assert case.generate is not None
    plain = dataclasses.replace(case.generate, drafter="none")
    scripts: list[Script] = [session_script(dataclasses.replace(case, rounds=(), generate=loop)) for loop in (case.generate, plain)]
    worker = InProcess(without_taps(plant, TOKENS_CHECK))
    streams = [worker.script(script).answers[-1].generations for script in scripts]
    assert all(stream is not None and all(one.tokens for one in stream) for stream in streams)
    drafted, own = ([one.tokens for one in stream or ()] for stream in streams)
    return drafted != own


@cache
def killers(plant: str) -> frozenset[str]:
    """Every check without a reference that finds the plant on one of the sessions."""
    found = {relation for relation in RECIPES if any(broken(plant, relation, case) for case in SESSIONS)}
    return frozenset(found | ({TOKENS_CHECK} if any(streams_differ(plant, case) for case in SESSIONS) else set()))


@pytest.mark.parametrize("relation", RECIPES)
def test_a_relation_kills_a_plant_that_nothing_else_without_a_reference_kills(relation: str) -> None:
    assert killers(ALONE[relation]) == {relation}


def test_the_honest_engine_passes_every_check_without_a_reference() -> None:
    assert killers("") == frozenset()


def test_the_token_check_is_no_dead_one() -> None:
    assert any(streams_differ("H17", case) for case in SESSIONS)


@pytest.mark.parametrize("relation", RECIPES)
def test_every_relation_declares_its_kind_of_equality(relation: str) -> None:
    assert RECIPES[relation][0].equality == EQUALITY[relation]


# ---- hazards -------------------------------------------------------------------------------------------------------------------------

SEEDS = (1, 2, 3)
ADDS = tuple(OpCase("add", (("N", 3), ("T", 5)), (), "ordinary", seed) for seed in SEEDS)
ROOTS = ((), ())  # plain decoding
PLAIN = tuple(SessionCase("tiny", (), 1, "ordinary", ((5, seed), (7, seed + 9)), (ROOTS, ROOTS)) for seed in SEEDS)
CHUNKED = tuple(dataclasses.replace(case, chunk=2) for case in PLAIN)
OF_SESSIONS = (*SESSION_HAZARDS, *sorted(PLAN_HAZARDS))

KILLED: dict[str, tuple[str, Sequence[Case]]] = {
    "poison": ("lane-before", ADDS),
    "fence": ("lanes-behind", ADDS),
    "guard": ("far-tile", ADDS),
    "views": ("K04", ADDS),
    "freed": ("kept-plan", CHUNKED),
    "repeat": ("tuned-late", PLAIN),
    "fork": ("E04", PLAIN),
    "evict": ("longest-plan", PLAIN),
    "orphan": ("fork-not-counted", PLAIN),
    "late": ("decode-after-prefill", PLAIN),
    "interleaved": ("dense-rows", PLAIN),
}

CONTAINED_IN = {"fork": {"orphan"}, "evict": {"orphan"}}  # an orphan is a copy whose source is evicted: it sees what either sees


def alarm(plant: str, case: Case, hazard: str) -> bool:
    """In a worker of its own, which a read behind a fence may end."""
    assert isinstance(case, OpCase | SessionCase)
    given = dataclasses.replace(case, hazards=(hazard,) if hazard else ())
    engine = f"blocked:{plant}" if plant else "blocked"
    if hazard == "fence":
        with Supervisor(engine, deadline_s=patience()) as supervisor:
            return Bench(supervisor).outcome(given).verdict in FINDINGS
    return Bench(InProcess(resolve(engine))).outcome(given).verdict in FINDINGS


@pytest.mark.parametrize("hazard", KILLED)
def test_a_plant_is_found_with_one_hazard_and_not_without(hazard: str) -> None:
    plant, cases = KILLED[hazard]
    others = HAZARDS if hazard in HAZARDS and cases is ADDS else OF_SESSIONS
    assert hazard in others
    found = {name for name in ("", *others) if any(alarm(plant, case, name) for case in cases)}
    assert found - CONTAINED_IN.get(hazard, set()) == {hazard}


def test_every_hazard_has_its_plant() -> None:
    assert set(KILLED) == {*HAZARDS, *PLAN_HAZARDS}
    assert all(plant in PLANTS or plant in fresh.FRESH for plant, _ in KILLED.values())


ANY_CASE: dict[str, Callable[[str], Case]] = {
    "op": lambda hazard: OpCase(
        "tree_attention", (("C", 6), ("H", 2), ("S", 9), ("T", 3)), (("kv_rank", 4), ("scale", 0.5)), "ordinary", 1, (hazard,)
    ),
    "tree": lambda hazard: TreeCase(8, 2, 5, 3, 2, 0, 80, 0, 1, (hazard,)),
    "session": lambda hazard: dataclasses.replace(SESSIONS[0], hazards=(hazard,), chunk=3),
}


@pytest.mark.parametrize("kind", ANY_CASE)
@pytest.mark.parametrize("hazard", [*HAZARDS, *sorted(PLAN_HAZARDS)])
def test_any_hazard_goes_with_any_case(hazard: str, kind: str) -> None:
    """What a hazard has nothing to do with (the rows of a batch, in an operation) it leaves as it is."""
    outcome = Bench(InProcess(resolve("blocked"))).outcome(ANY_CASE[kind](hazard))
    assert outcome.judgements
    assert outcome.verdict not in FINDINGS


def test_hazards_can_be_combined() -> None:
    every = tuple(name for name in (*HAZARDS, *sorted(PLAN_HAZARDS)))
    outcome = Bench(InProcess(resolve("blocked"))).outcome(dataclasses.replace(SESSIONS[0], hazards=every))
    assert outcome.verdict not in FINDINGS
