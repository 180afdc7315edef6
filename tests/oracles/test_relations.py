"""Relations: honest engines keep them, and each kills planted defects without any second opinion (which of them alone: campaigns/test_alone.py)."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from campaigns.case import CaseError, GenerateCase, SessionCase
from campaigns.isolation.inprocess import InProcess
from campaigns.materialise import session_script
from campaigns.relations import RECIPES, twin
from campaigns.trial import Bench, session_judge
from impls.planted.mutants import PLANTS
from impls.registry import resolve
from oracles.judgement import FINDINGS, Judgement, Verdict
from oracles.relations import BITS, judge_relation
from spec.script import Answer, Failure, Forward, Generate

ROUNDS = (
    (((0, 0), (1, 1), (2, 1), (0, 1)), ((0, 1),)),
    (((0, 1), (0, 0), (1, 1), (0, 0)), ((0, 0), (1, 1), (2, 0))),
)
CASE = SessionCase("tiny", (), 1, "ordinary", ((5, 1), (9, 2)), ROUNDS, generate=GenerateCase("random", 3, 80, -1, 6, 3, 6, -1))


@cache
def judged(engine: str, relation: str) -> tuple[Judgement, ...]:
    """What the relation alone says; taps and the golden model's logits are not looked at."""
    outcome = Bench(InProcess(resolve(engine))).outcome(dataclasses.replace(CASE, relation=relation))
    return tuple(j for j in outcome.judgements if j.tap == f"relation {relation}")


def killed(engine: str) -> set[str]:
    return {name for name in RECIPES if any(j.verdict in FINDINGS for j in judged(engine, name))}


@pytest.mark.parametrize(
    "engine", ["golden", "blocked", "blind+blocked", "blocked:batch-dispatch", "blocked:slots-reversed", "blocked:tf32"]
)
def test_an_honest_engine_keeps_every_relation(engine: str) -> None:
    assert killed(engine) == set()
    assert all(judged(engine, name) for name in RECIPES)


KILLS = {
    "chain": "Z07",  # a tile below the diagonal is taken as causal
    "siblings": "Z22",  # the first slots are kept instead of the accepted ones
    "rejected": "Z25",  # a rejected row stays visible
    "decode": "H22",
    "numbers": "E03",  # rows of another sequence of the same length
    "chunks": "H17",
    "alone": "shared-dropped",  # the shared expert is added to the first row of a batch only
    "prefill": "H05",
    "budget": "bfs-numbers",  # nodes are numbered by depth instead of by score
}


@pytest.mark.parametrize("relation", KILLS)
def test_each_relation_kills_a_planted_defect_without_a_reference(relation: str) -> None:
    plant = PLANTS[KILLS[relation]]
    engine = plant.engine if relation == "budget" else f"blind+{plant.engine}"
    (judgement,) = [j for j in judged(engine, relation) if j.verdict in FINDINGS]
    assert judgement.rule == RECIPES[relation][0].rule
    assert judgement.message


def test_recipes_cover_what_the_registry_says() -> None:
    assert set(KILLS) == set(RECIPES)
    with pytest.raises(CaseError, match="there is no relation 'mirror': choose one of chain, siblings"):
        twin(dataclasses.replace(CASE, relation="mirror"))
    with pytest.raises(CaseError, match="needs the engine's own loop"):
        twin(dataclasses.replace(CASE, relation="budget", generate=None))


@pytest.mark.parametrize("drafter", ["random", "noisy", "table", "chain", "dflash", "edge"])
def test_a_smaller_budget_nests_for_every_drafter(drafter: str) -> None:
    """An honest engine, twelve seeds: the second run gets the drafts of the first, whatever the drafter knows of the budget."""
    bench = Bench(InProcess(resolve("blocked")))
    for seed in range(12):
        loop = GenerateCase(drafter, seed, 80, -1, 7, 3, 6, -1)
        case = SessionCase("tiny", (), 0, "ordinary", ((3, seed), (2, seed + 1)), (), generate=loop, relation="budget")
        related = [j for j in bench.outcome(case).judgements if j.tap == "relation budget"]
        assert [j.verdict for j in related] == [Verdict.EXACT], related[0].message


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "budget"])
def test_a_twin_is_another_script_with_rows_that_match(name: str) -> None:
    base = session_script(dataclasses.replace(CASE, generate=None))
    relation, other = twin(dataclasses.replace(CASE, relation=name))
    assert not any(isinstance(step, Generate) for step in other.steps)
    assert other.config == base.config
    first, second = (InProcess(resolve("golden")).script(script) for script in (base, other))
    (judgement,) = judge_relation(relation, (base, first), (other, second), first.description.profile, None)
    assert judgement.verdict is Verdict.EXACT  # golden bits depend on the tokens that a row sees, and on nothing else
    assert judgement.checked >= 3 * base.config.vocab
    shapes = [[len(step.rows) for step in script.steps if isinstance(step, Forward)] for script in (base, other)]
    assert (shapes[0] == shapes[1]) == (relation.equality == BITS or name == "siblings")


def test_without_a_model_a_difference_in_rounding_is_open() -> None:
    base = session_script(dataclasses.replace(CASE, generate=None))
    relation, other = twin(dataclasses.replace(CASE, relation="chunks"))
    worker = InProcess(resolve("blocked"))
    first, second = worker.script(base), worker.script(other)
    (judgement,) = judge_relation(relation, (base, first), (other, second), first.description.profile, None)
    assert judgement.verdict is Verdict.UNVERIFIED
    assert "without a model of this size no bound is known" in judgement.message


def test_a_profile_that_claims_invariance_is_held_to_bits() -> None:
    base = session_script(dataclasses.replace(CASE, generate=None))
    relation, other = twin(dataclasses.replace(CASE, relation="chunks"))
    worker = InProcess(resolve("blocked"))
    first, second = worker.script(base), worker.script(other)
    profile = dataclasses.replace(first.description.profile, batch_invariant=True)
    (judgement,) = judge_relation(relation, (base, first), (other, second), profile, None)
    assert judgement.verdict is Verdict.DEFECT
    assert "bit for bit" in judgement.message


def test_a_value_that_is_no_number_is_named_as_such() -> None:
    base = session_script(dataclasses.replace(CASE, generate=None))
    relation, other = twin(dataclasses.replace(CASE, relation="alone"))
    worker = InProcess(resolve("golden"))
    first, second = worker.script(base), worker.script(other)
    logits = next(answer.logits for answer in first.answers if answer.logits is not None and len(answer.logits))
    logits[0, 3] = np.nan
    model = session_judge(base.config, base.weights).prepared
    (judgement,) = judge_relation(relation, (base, first), (other, second), first.description.profile, model)
    assert judgement.verdict is Verdict.NONFINITE
    assert judgement.index[1] == 3


def test_a_step_that_fails_in_the_second_run_only_is_a_finding() -> None:
    """The rows that were answered agree, and then an engine refuses what it did before."""
    base = session_script(dataclasses.replace(CASE, generate=None))
    relation, other = twin(dataclasses.replace(CASE, relation="decode"))
    worker = InProcess(resolve("golden"))
    first, second = worker.script(base), worker.script(other)
    last = max(number for number, step in enumerate(other.steps) if isinstance(step, Forward))
    refused = Answer(failure=Failure("raised", "no room"))
    cut = dataclasses.replace(second, answers=[*second.answers[:last], refused])
    (judgement,) = judge_relation(
        relation, (base, first), (other, cut), first.description.profile, session_judge(base.config, base.weights).prepared
    )
    assert judgement.verdict is Verdict.MALFORMED
    assert judgement.message == f"run the other way only, step {last} (forward): no room"
    unsupported = Answer(failure=Failure("unsupported", "not offered"))
    cut = dataclasses.replace(second, answers=[*second.answers[:last], unsupported])
    assert all(
        j.verdict is not Verdict.MALFORMED for j in judge_relation(relation, (base, first), (other, cut), first.description.profile, None)
    )


def test_a_step_that_fails_and_lets_the_session_go_on_ends_the_comparison() -> None:
    """A malformed answer of a forward does not end a session: the commit behind it has nothing to commit."""
    base = session_script(dataclasses.replace(CASE, generate=None))
    relation, other = twin(dataclasses.replace(CASE, relation="numbers"))
    worker = InProcess(resolve("golden"))
    first, second = worker.script(base), worker.script(other)
    at = [number for number, step in enumerate(other.steps) if isinstance(step, Forward)][1]
    answers = [Answer(failure=Failure("malformed", "3 rows")) if number == at else answer for number, answer in enumerate(second.answers)]
    (judgement,) = judge_relation(
        relation, (base, first), (other, dataclasses.replace(second, answers=answers)), first.description.profile, None
    )
    assert (judgement.verdict, judgement.message) == (Verdict.MALFORMED, f"run the other way only, step {at} (forward): 3 rows")
