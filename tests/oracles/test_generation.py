"""The engine's own loop: trees, paths, lengths and tokens; each mistake under its rule, each honest loop without a finding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from conftest import findings, judge_of, run, session_case

from campaigns.case import GenerateCase
from impls.blocked.engine import BlockedEngine
from impls.golden import GoldenEngine
from oracles.ball import arithmetic
from oracles.generation import Rerun, explained, explained_draw, path_problem, round_problem
from oracles.judgement import Judgement, Verdict
from oracles.sampled import Draw, due
from spec.engine import Generation, Profile, Round
from spec.sampling import Sampling
from spec.script import Answer, Generate, Script, Trace
from spec.tree import best_first_tree, draft_table

CASES = {
    "noisy": GenerateCase("noisy", 1, 60, 1, 8, 4, 9, -1),
    "stop": GenerateCase("noisy", 3, 70, -1, 8, 4, 9, 4),
    "chain": GenerateCase("chain", 3, 70, -1, 4, 4, 9, -1),
    "random": GenerateCase("random", 2, 60, 2, 6, 3, 7, -1),
    "none": GenerateCase("none", 3, 70, -1, 4, 4, 7, -1),
}


@lru_cache(maxsize=16)
def loop(name: str, golden: bool = False) -> tuple[Script, Trace]:
    engine: Any = GoldenEngine() if golden else BlockedEngine()
    return run(engine, case=session_case(generate=CASES[name]))


def judged(name: str, change: Callable[[list[Generation]], list[Generation]] = lambda g: g, **more: Any) -> list[Judgement]:
    script, trace = loop(name)
    last = trace.answers[-1]
    assert last.generations is not None
    answers = [*trace.answers[:-1], dataclasses.replace(last, generations=change(list(last.generations)))]
    return [j for j in judge_of().judge(script, Trace(trace.description, answers), **more) if j.rung == "whole loop"]


def first(name: str, change: Callable[[Generation], Generation], **more: Any) -> Judgement:
    """The first finding after sequence 0 was changed."""
    return findings(judged(name, lambda g: [change(g[0]), *g[1:]], **more))[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("golden", [False, True])
def test_an_honest_loop_is_exact(name: str, golden: bool) -> None:
    script, trace = loop(name, golden)
    judgements = [j for j in judge_of().judge(script, trace) if j.rung == "whole loop"]
    assert {j.verdict for j in judgements} == {Verdict.EXACT}
    assert {j.tap for j in judgements} == ({"length", "stream"} if name == "none" else {"tree", "path", "length", "stream"})
    assert sum(j.checked for j in judgements if j.tap == "stream") == sum(len(g.tokens) for g in trace.answers[-1].generations or ())


# ---- tokens ---------------------------------------------------------------------------------------------------------------
def other_token(place: int) -> Callable[[Generation], Generation]:
    def change(generation: Generation) -> Generation:
        tokens = list(generation.tokens)
        tokens[place] = (tokens[place] + 1) % 96
        return Generation(tuple(tokens))

    return change


def test_a_wrong_token_is_a_statistical_defect_at_its_place_and_the_rest_is_still_judged() -> None:
    found = first("none", other_token(2))
    assert (found.verdict, found.rule, found.tap, found.index) == (Verdict.DEFECT, "L1", "stream", (0, 2))
    assert "after the same history" in found.message and "statistical" in found.message


def test_the_caller_can_explain_a_token_by_running_its_history_with_taps() -> None:
    asked: list[tuple[int, ...]] = []

    def explain(history: tuple[int, ...]) -> Rerun:
        asked.append(history)
        return Rerun([Judgement(Verdict.TIE, "L1", "argmax", "token", "prefill")])

    first("none", other_token(2), explain=explain)
    assert asked == []  # beyond the statistical bound there is nothing to explain


@pytest.mark.parametrize(
    ("rerun", "verdict"),
    [
        ([Judgement(Verdict.TIE, "L1", "argmax", "token", "prefill")], Verdict.TIE),
        ([Judgement(Verdict.DEFECT, "C3", "softmax", "probs", "prefill", message="probs[1] is wrong")], Verdict.DEFECT),
        ([Judgement(Verdict.EXACT, "L1", "argmax", "token", "prefill")], Verdict.UNVERIFIED),
    ],
)
def test_the_rerun_with_taps_decides_what_rounding_may_have_done(rerun: list[Judgement], verdict: Verdict) -> None:
    found, reason = explained(rerun, "nothing is known")
    assert found is verdict
    assert ("probs[1] is wrong" in reason) == (verdict is Verdict.DEFECT)


def test_another_draw_is_explained_by_the_engines_own_proven_logits_alone() -> None:
    """The golden row and the engine's differ by rounding, and the token is the draw from the engine's: with the noise that is prescribed, and no other."""
    sampling = Sampling(temperature=0.7, seed=5)
    row = np.random.default_rng(0).standard_normal(12).astype(np.float32)
    draw = Draw(row, (3, 4, 5), 2, 0)
    golden = due(sampling, draw)
    own = row.copy()
    own[golden] -= 3.0
    found = due(sampling, Draw(own, (3, 4, 5), 2, 0))
    assert found != golden
    passed = Judgement(Verdict.WITHIN_BOUND, "N2", "matmul", "logits", "prefill")

    def verdict(judgements: list[Judgement], logits: np.ndarray | None, token: int) -> Verdict:
        return explained_draw(Rerun(judgements, logits), sampling, draw, token, "nothing is known")[0]

    assert verdict([passed], own, found) is Verdict.TIE
    assert verdict([passed], own, (found + 1) % 12) is Verdict.UNVERIFIED
    assert verdict([passed], row, found) is Verdict.UNVERIFIED
    assert verdict([passed], None, found) is Verdict.UNVERIFIED
    assert verdict([passed, Judgement(Verdict.UNVERIFIED, "N2", "matmul", "logits", "prefill")], own, found) is Verdict.UNVERIFIED
    assert verdict([passed, Judgement(Verdict.DEFECT, "C3", "softmax", "probs", "prefill")], own, found) is Verdict.DEFECT


# ---- lengths ------------------------------------------------------------------------------------------------------------------
def test_a_stream_that_ends_early_breaks_l2() -> None:
    found = first("none", lambda g: Generation(g.tokens[:-2]))
    assert (found.rule, found.tap) == ("L2", "length") and "without a stop token" in found.message


def test_a_stream_that_runs_over_its_limit_breaks_a4() -> None:
    found = first("none", lambda g: Generation((*g.tokens, 1)))
    assert (found.rule, found.tap) == ("A4", "length") and "max_new" in found.message


def test_a_token_after_a_stop_breaks_a4() -> None:
    script, trace = loop("stop")
    step = script.steps[-1]
    assert isinstance(step, Generate) and step.limits.stop_tokens
    generations = trace.answers[-1].generations
    assert generations is not None
    which = next(i for i, g in enumerate(generations) if g.tokens[-1] in step.limits.stop_tokens and len(g.tokens) < step.limits.max_new)

    def change(all_of_them: list[Generation]) -> list[Generation]:
        all_of_them[which] = Generation((*all_of_them[which].tokens, 1))
        return all_of_them

    assert any(j.rule == "A4" and "after a stop token" in j.message for j in findings(judged("stop", change)))


def test_a_token_outside_the_vocabulary_is_malformed() -> None:
    assert first("none", lambda g: Generation((*g.tokens[:-1], 96))).verdict is Verdict.MALFORMED


def test_too_few_sequences_are_malformed() -> None:
    script, trace = loop("none")
    answers = [*trace.answers[:-1], Answer(generations=[])]
    assert findings(judge_of().judge(script, Trace(trace.description, answers)))[0].verdict is Verdict.MALFORMED


# ---- rounds ---------------------------------------------------------------------------------------------------------------------
def with_round(number: int, change: Callable[[Round], Round]) -> Callable[[Generation], Generation]:
    def apply(generation: Generation) -> Generation:
        rounds = list(generation.rounds)
        rounds[number] = change(rounds[number])
        return dataclasses.replace(generation, rounds=tuple(rounds))

    return apply


def test_a_node_in_another_place_breaks_t3() -> None:
    def swap(ran: Round) -> Round:
        tokens = list(ran.tokens)
        siblings = [i for i, p in enumerate(ran.parents) if p == 0]
        tokens[siblings[0]], tokens[siblings[1]] = tokens[siblings[1]], tokens[siblings[0]]
        return dataclasses.replace(ran, tokens=tuple(tokens))

    found = first("random", with_round(0, swap))
    assert (found.op, found.rule) == ("best_first_tree", "T3") and "sequence 0, round 0" in found.message


def test_a_tree_with_fewer_nodes_breaks_t5() -> None:
    found = first("random", with_round(0, lambda r: dataclasses.replace(r, tokens=r.tokens[:-1], parents=r.parents[:-1], path=(0,))))
    assert found.rule == "T5"


def test_a_tree_of_shifted_drafter_rows_breaks_t1() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 30)).astype(np.float32)
    tree = best_first_tree(draft_table(np.roll(logits, -1, 0), 6), 9, 6)
    ran = Round(tuple(tree.tokens.tolist()), tuple(tree.parents.tolist()), (0,), 7)
    rule, problem, _ = round_problem(logits, ran, np.array([9], np.int32), 6, arithmetic(Profile()))
    assert rule == "T1" and "shifted by 1" in problem


def test_another_root_breaks_c1() -> None:
    assert first("random", with_round(0, lambda r: dataclasses.replace(r, tokens=((r.tokens[0] + 1) % 96, *r.tokens[1:])))).rule == "C1"


def test_a_loop_that_shows_no_rounds_is_unverified_for_trees() -> None:
    judgements = judged("random", lambda g: [Generation(x.tokens) for x in g])
    assert [j.verdict for j in judgements if j.tap == "tree"] == [Verdict.UNVERIFIED] and not findings(judgements)


TREE = Round((5, 6, 7, 8), (-1, 0, 0, 2), (0, 2, 3), 9)


def test_paths_are_walks_and_end_where_no_child_is_the_bonus() -> None:
    assert path_problem(TREE) is None
    early = path_problem(dataclasses.replace(TREE, path=(0, 2), bonus=8))
    assert early is not None and early[0] == "A1" and "its child 3" in early[1]
    assert path_problem(dataclasses.replace(TREE, path=(0, 3)))[0] == "A1"  # type: ignore[index]
    assert path_problem(dataclasses.replace(TREE, path=(2, 3)))[0] == "V1"  # type: ignore[index]
    assert path_problem(dataclasses.replace(TREE, path=(0, 9)))[0] == "A1"  # type: ignore[index]
    assert path_problem(dataclasses.replace(TREE, parents=(-1, 0, 0, 3)))[0] == "T6"  # type: ignore[index]


def test_tokens_that_are_not_those_of_the_rounds_break_a4() -> None:
    found = first(
        "noisy",
        with_round(
            0, lambda r: dataclasses.replace(r, bonus=(r.bonus + 1) % 96 if not _is_child(r, (r.bonus + 1) % 96) else (r.bonus + 2) % 96)
        ),
    )
    assert found.rule in ("A4", "C1", "T3", "T5")  # the next root, or the stream


def _is_child(ran: Round, token: int) -> bool:
    return any(parent == ran.path[-1] and ran.tokens[i] == token for i, parent in enumerate(ran.parents))


def test_nodes_may_trade_places_only_within_the_error_of_their_log_probabilities() -> None:
    """logZ is shared by a depth: an engine whose logZ is one ulp off may order nodes of different depths differently."""
    logits = np.array([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]], np.float32)
    table = draft_table(logits, 3)
    tree = best_first_tree(table, 9, 3)
    ran = Round(tuple(tree.tokens.tolist()), tuple(tree.parents.tolist()), (0,), 7)
    a, history = arithmetic(Profile()), np.array([9], np.int32)
    assert round_problem(logits, ran, history, 3, a) == ("T3", "", 0.0)
    worse = dataclasses.replace(ran, tokens=(9, 0, 1, 2), parents=(-1, 0, 0, 0))
    rule, problem, _ = round_problem(logits, worse, history, 3, a)
    assert rule == "T3" and "still waiting" in problem
