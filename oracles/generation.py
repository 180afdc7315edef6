"""The engine's own loop: trees, paths and lengths exactly, tokens by teacher forcing.

One golden forward over prompt and emitted tokens gives what the spec would have said after every prefix of the engine's own stream, so that a
differing token does not hide what follows. Draft trees are recomputed from the drafter's logits for the engine's own history.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oracles import sampled
from oracles.ball import Arithmetic, arithmetic
from oracles.drafted import judge_drafted
from oracles.judgement import FINDINGS, Judgement, Verdict
from oracles.noise import Rows, noise
from oracles.ops.best_first_tree import tree_problem
from oracles.ops.draft_table import log_softmax
from oracles.sampled import Draw
from oracles.tokens import decide, golden_margin
from spec.engine import Generation, Int, Profile, Round
from spec.loops import prefill_rows
from spec.sampling import Sampling
from spec.script import Answer, Generate
from spec.tree import TreeError, accept_greedy, best_first_tree, check_structure, cut, draft_table

if TYPE_CHECKING:
    from oracles.session import SessionJudge


@dataclass(frozen=True)
class Rerun:
    """A history once more, in a fresh session of the same engine with taps: its judgements, and the engine's own last row of logits."""

    judgements: list[Judgement]
    logits: NDArray[np.float32] | None = None  # [V]; None where the engine gave none


Explain = Callable[[tuple[int, ...]], Rerun]
"""Runs exactly this history."""
RUNG = "whole loop"
OF_TABLE = frozenset({"T1", "T2", "T4", "T8"})  # rules of the table that a tree is built from


def judge_generate(
    judge: SessionJudge, step: Generate, answer: Answer, number: int, profile: Profile, explain: Explain | None
) -> list[Judgement]:
    """In data order: trees (T), paths (A1, A3), lengths (A4, L2), tokens (L1); one judgement each, of the first sequence that fails."""
    assert answer.generations is not None
    generations = answer.generations
    vocab = judge.model.config.vocab
    for sequence, generation in enumerate(generations):
        bad = next((t for t in generation.tokens if not 0 <= t < vocab), None)
        if bad is not None:
            text = f"sequence {sequence} emitted token {bad}, but the vocabulary has {vocab}"
            return [Judgement(Verdict.MALFORMED, "T4", "generate", "stream", RUNG, step=number, message=text)]
    out = []
    if step.drafter is not None and step.budget > 0:
        out += _judge_rounds(step, generations, number, arithmetic(profile))
        if not any(generation.rounds for generation in generations) and step.sampling is None:
            place = {"rung": RUNG, "step": number}
            fault = judge_drafted(step, [g.tokens for g in generations], answer.drafted, place, arithmetic(profile))
            out += [fault] if fault is not None else []
    out.append(_judge_lengths(step, generations, number))
    out.append(_judge_tokens(judge, step, generations, number, profile, explain))
    return out


# Trees and paths


def _judge_rounds(step: Generate, generations: list[Generation], number: int, a: Arithmetic) -> list[Judgement]:
    assert step.drafter is not None
    checked = nodes = 0
    share = 0.0
    tree_fault: Judgement | None = None
    path_fault: Judgement | None = None
    missing = None
    for sequence, (prompt, generation) in enumerate(zip(step.prompts, generations, strict=True)):
        if not generation.rounds and len(generation.tokens) > 1:
            missing = sequence
        emitted = list(generation.tokens[:1])
        for round_number, ran in enumerate(generation.rounds):
            place: dict[str, Any] = {"rung": RUNG, "step": number, "token": round_number, "share": float("inf")}
            where = f"sequence {sequence}, round {round_number}"
            history = np.concatenate([np.asarray(prompt, np.int32), np.array(emitted, np.int32)])
            problem = path_problem(ran)
            if path_fault is None and problem is not None:
                path_fault = Judgement(
                    Verdict.DEFECT, problem[0], "accept", "path", message=f"{where}: {problem[1]} ({problem[0]})", **place
                )
            if tree_fault is None:
                rule, text, used = round_problem(step.drafter.draft(sequence, history), ran, history, step.budget, a)
                share = max(share, used)
                if text:
                    op = "draft_table" if rule in OF_TABLE else "best_first_tree"
                    tree_fault = Judgement(Verdict.DEFECT, rule, op, "tree", message=f"{where}: {text} ({rule})", **place)
            checked, nodes = checked + 1, nodes + len(ran.tokens)
            emitted += [*(ran.tokens[node] for node in ran.path[1:] if node < len(ran.tokens)), ran.bonus]
        if path_fault is None and generation.rounds:
            stream = cut(emitted, step.limits.stop_tokens, step.limits.max_new)
            if stream != tuple(generation.tokens):
                at = next(
                    (i for i, (x, y) in enumerate(zip(stream, generation.tokens, strict=False)) if x != y),
                    min(len(stream), len(generation.tokens)),
                )
                text = f"sequence {sequence} emitted {_at(generation.tokens, at)} at {at}, but its rounds say {_at(stream, at)} (A4)"
                path_fault = Judgement(
                    Verdict.DEFECT, "A4", "generate", "stream", RUNG, step=number, token=at, share=float("inf"), message=text
                )
    if missing is not None and not checked:
        text = f"sequence {missing} was given a drafter, but reports no rounds: trees and paths were not seen"
        return [Judgement(Verdict.UNVERIFIED, "T3", "best_first_tree", "tree", RUNG, step=number, message=text)]
    verdict = Verdict.WITHIN_BOUND if share else Verdict.EXACT
    trees = tree_fault or Judgement(verdict, "T3", "best_first_tree", "tree", RUNG, step=number, share=share, checked=nodes)
    return [trees, path_fault or Judgement(Verdict.EXACT, "A1", "accept", "path", RUNG, step=number, checked=checked)]


def _at(tokens: tuple[int, ...], index: int) -> str:
    return f"token {tokens[index]}" if index < len(tokens) else "nothing"


def round_problem(logits: NDArray[np.float32], ran: Round, history: Int, budget: int, a: Arithmetic) -> tuple[str, str, float]:
    """(rule, what is wrong or "", share of the band that was used). The tree is exact on the drafter's logits; only nodes whose scores differ by
    less than the engine's own log-probabilities may be off (T2) can stand in another order."""
    root = int(history[-1])
    if not ran.tokens or ran.tokens[0] != root:
        return "C1", f"the root is token {ran.tokens[0] if ran.tokens else 'missing'}, but the last token of the history is {root}", 0.0
    try:
        table = draft_table(np.asarray(logits, np.float32), budget)
        tree = best_first_tree(table, root, budget)
        check_structure(ran.parents, ran.tokens)
    except TreeError as problem:
        return problem.rule, problem.message, 0.0
    if tuple(tree.tokens.tolist()) == ran.tokens and tuple(tree.parents.tolist()) == ran.parents:
        return "T3", "", 0.0
    if shifted_by(logits, ran, root, budget):
        return (
            "T1",
            f"the tree is that of drafter rows shifted by {shifted_by(logits, ran, root, budget)}: row d - 1 belongs to depth d",
            0.0,
        )
    if len(ran.tokens) != len(tree.tokens):
        return "T5", f"the tree has {len(ran.tokens) - 1} nodes, but must have {tree.count} (budget {budget})", 0.0
    radius = log_softmax(np.asarray(logits, np.float32), table.ids, a).rad
    assert radius is not None
    tokens, parents = np.array(ran.tokens, np.int32), np.array(ran.parents, np.int32)
    decided = tree_problem(tokens, parents, table.ids, table.log_probs, radius, a.float32_scores)
    return decided.rule, decided.problem.removesuffix(f" ({decided.rule})"), decided.share


def shifted_by(logits: NDArray[np.float32], ran: Round, root: int, budget: int) -> int:
    """By how many rows the drafter's logits must move for the spec to build the engine's tree; 0 if none of the usual mistakes explains it."""
    depths = len(logits)
    at = np.arange(depths)
    for shift, rows in ((1, np.roll(at, -1)), (1, np.minimum(at + 1, depths - 1)), (-1, np.roll(at, 1)), (-1, np.maximum(at - 1, 0))):
        if depths > 1:
            tree = best_first_tree(draft_table(np.asarray(logits[rows], np.float32), budget), root, budget)
            if tuple(tree.tokens.tolist()) == ran.tokens and tuple(tree.parents.tolist()) == ran.parents:
                return shift
    return 0


def path_problem(ran: Round) -> tuple[str, str] | None:
    """(rule, what is wrong): the path must be the walk that its own tokens and the bonus describe, and end where no child is the bonus."""
    try:
        target = np.full(len(ran.tokens), -1, np.int32)
        if not ran.path or ran.path[0] != 0:
            return "V1", f"the path is {list(ran.path)}, but must start at the root, node 0"
        for node, following in zip(ran.path, (*ran.path[1:], None), strict=True):
            if not 0 <= node < len(ran.tokens):
                return "A1", f"the path holds node {node}, but the tree has {len(ran.tokens)}"
            target[node] = ran.bonus if following is None or not 0 <= following < len(ran.tokens) else ran.tokens[following]
        walked = accept_greedy(ran.tokens, ran.parents, target)
    except TreeError as problem:
        return problem.rule, problem.message
    if walked.path == ran.path:
        return None
    if walked.path[: len(ran.path)] == ran.path:
        return (
            "A1",
            f"the path ends at node {ran.path[-1]} with bonus {ran.bonus}, but that is the token of its child {walked.path[len(ran.path)]}",
        )
    return "A1", f"the path {list(ran.path)} is no walk from parent to child"


# Lengths and tokens


def _judge_lengths(step: Generate, generations: list[Generation], number: int) -> Judgement:
    """A4, L2, L3: cut at the first stop token, inclusive, and at max_new; nothing else ends a stream."""
    stops, limit = step.limits.stop_tokens, step.limits.max_new
    for sequence, generation in enumerate(generations):
        tokens = tuple(generation.tokens)
        text, rule = "", "A4"
        kept = cut(tokens, stops, limit)
        if kept != tokens:
            why = "after a stop token" if len(tokens) <= limit else f"more than max_new = {limit}"
            text = f"sequence {sequence} emitted {len(tokens)} tokens, {why}; {len(kept)} were due"
        elif len(tokens) < limit and not (tokens and tokens[-1] in stops):
            text, rule = f"sequence {sequence} ended after {len(tokens)} of {limit} tokens without a stop token", "L2"
        if text:
            return Judgement(
                Verdict.DEFECT, rule, "generate", "length", RUNG, step=number, token=sequence, found=float(len(tokens)), expected=float(len(kept)),
                share=float("inf"), message=f"{text} ({rule})",
            )  # fmt: skip
    return Judgement(Verdict.EXACT, "A4", "generate", "length", RUNG, step=number, checked=len(generations))


def _judge_tokens(
    judge: SessionJudge, step: Generate, generations: list[Generation], number: int, profile: Profile, explain: Explain | None
) -> Judgement:
    """L1: every emitted token is the golden argmax, or the golden draw, after the engine's own history."""
    streams = [
        np.concatenate([np.asarray(p, np.int32), np.array(g.tokens, np.int32)]) for p, g in zip(step.prompts, generations, strict=True)
    ]
    emitted = sum(len(g.tokens) for g in generations)
    if not emitted:
        return Judgement(Verdict.EXACT, "L1", "generate", "stream", RUNG, step=number)
    rows, _ = prefill_rows(streams)
    starts = np.cumsum([0, *(len(s) for s in streams)])
    want = np.zeros(len(rows), np.bool_)
    for start, prompt, generation in zip(starts, step.prompts, generations, strict=False):
        want[start + len(prompt) - 1 : start + len(prompt) - 1 + len(generation.tokens)] = True
    golden = judge.model.open().forward(rows, want, frozenset(), lambda name, layer, array: None)
    found = np.concatenate([np.array(g.tokens, np.int64) for g in generations])
    draws = _draws(step, generations, golden) if step.sampling is not None else []
    due = golden.argmax(-1) if step.sampling is None else np.array([sampled.due(step.sampling, draw) for draw in draws])
    differing = np.flatnonzero(due != found)
    if not len(differing):
        return Judgement(Verdict.EXACT, "L1", "generate", "stream", RUNG, step=number, checked=emitted)
    visible = np.tri(len(rows), dtype=np.bool_) & (rows.sequence[:, None] == rows.sequence[None, :])
    bound = noise(
        judge.prepared, Rows(rows.token.astype(np.int64), rows.position.astype(np.int64), visible, np.flatnonzero(want)), profile
    )  # fmt: skip
    lengths = np.cumsum([0, *(len(g.tokens) for g in generations)])
    judged: list[Judgement] = []
    for at in differing.tolist():
        sequence = int(np.searchsorted(lengths, at, side="right")) - 1
        place = at - int(lengths[sequence])
        if step.sampling is not None:
            rivals = [bound.margin_bound(at, int(found[at]), token) for token in range(golden.shape[1]) if token != found[at]]
            judgement = _judge_draw(
                step.sampling, draws[at], int(found[at]), int(due[at]), max(rivals, default=0.0), place, number, emitted, explain
            )
            judged.append(judgement)
            if judgement.verdict in FINDINGS:
                rule, words = sampled.explanation(step.sampling, draws, found.tolist())
                judged[-1] = dataclasses.replace(
                    judgement, rule=rule, message=f"{judgement.message}; {words} ({rule})" if words else judgement.message
                )
                break
            continue
        margin = float(golden[at, due[at]]) - float(golden[at, found[at]])
        limit = bound.margin_bound(at, int(found[at]), int(due[at]))
        verdict, reason, limit = decide(margin, False, limit)
        if verdict is Verdict.UNVERIFIED and explain is not None:
            verdict, reason = explained(
                explain(tuple(streams[sequence][: len(step.prompts[sequence]) + place].tolist())).judgements, reason
            )
        rule = _rule_of(generations[sequence], place)
        text = (
            f"sequence {sequence} emitted token {int(found[at])} at {place}, but the spec {int(due[at])} after the same history, by a margin of "
            f"{golden_margin(golden[at], int(found[at]), int(due[at]))}; {reason} ({rule})"
        )
        judged.append(
            Judgement(
                verdict, rule, "generate", "stream", RUNG, step=number, token=place, index=(sequence, place), found=float(found[at]),
                expected=float(due[at]), bound=limit, share=margin / limit if limit else 0.0, checked=emitted, message=text,
            )
        )  # fmt: skip
        if verdict in FINDINGS:
            break
    order = list(Verdict)
    return max(judged, key=lambda j: order.index(j.verdict))


def _draws(step: Generate, generations: list[Generation], golden: NDArray[np.float32]) -> list[Draw]:
    """One per emitted token, in the order of the golden rows."""
    out: list[Draw] = []
    for sequence, (prompt, generation) in enumerate(zip(step.prompts, generations, strict=True)):
        stream = (*np.asarray(prompt).tolist(), *generation.tokens)
        for place in range(len(prompt), len(stream)):
            out.append(Draw(golden[len(out)], stream[:place], len(prompt), sequence))
    return out


def _judge_draw(
    sampling: Sampling,
    draw: Draw,
    found: int,
    due: int,
    limit: float,
    place: int,
    number: int,
    emitted: int,
    explain: Explain | None = None,
) -> Judgement:
    """A token that is not the golden draw. `limit`: how far honest rounding moves `found` against any other token, at most."""
    gap = sampled.margin(sampling, draw, found)
    verdict, reason, limit = decide(gap, False, limit)
    if verdict is Verdict.UNVERIFIED and explain is not None:
        verdict, reason = explained_draw(explain(draw.history), sampling, draw, found, reason)
    text = (
        f"sequence {draw.sequence} drew token {found} at {place}, but the spec {due} after the same history with the same noise, by a margin of "
        f"{gap:.3g}; {reason} (S3)"
    )
    return Judgement(
        verdict, "S3", "generate", "stream", RUNG, step=number, token=place, index=(draw.sequence, place), found=float(found), expected=float(due),
        bound=limit, share=gap / limit if limit else 0.0, checked=emitted, message=text,
    )  # fmt: skip


def _rule_of(generation: Generation, place: int) -> str:
    """A3 for the bonus of a round, L1 for any other token."""
    reached = 1
    for ran in generation.rounds:
        reached += len(ran.path)
        if place == reached - 1:
            return "A3"
    return "L1"


def explained_draw(again: Rerun, sampling: Sampling, draw: Draw, found: int, reason: str) -> tuple[Verdict, str]:
    """A draw is a decision on a row of logits: `found` is explained where every operation behind the engine's own row passed, and the draw from that
    row, with the prescribed noise, is this token."""
    finding = next((j for j in again.judgements if j.verdict in FINDINGS), None)
    if finding is not None:
        return Verdict.DEFECT, f"the same history with taps: {finding.message}"
    if again.logits is None or any(j.verdict in (Verdict.UNVERIFIED, Verdict.UNSUPPORTED) for j in again.judgements):
        return Verdict.UNVERIFIED, reason
    if sampled.due(sampling, dataclasses.replace(draw, row=again.logits)) != found:
        return Verdict.UNVERIFIED, reason
    return Verdict.TIE, "with taps every operation behind it passed, and this is the draw from the engine's own logits, so rounding chose"


def explained(judgements: list[Judgement], reason: str) -> tuple[Verdict, str]:
    """The same history once more, with taps: a finding there is the cause; a TIE there explains the token."""
    finding = next((j for j in judgements if j.verdict in FINDINGS), None)
    if finding is not None:
        return Verdict.DEFECT, f"the same history with taps: {finding.message}"
    if any(j.tap == "token" and j.verdict is Verdict.TIE for j in judgements):
        return Verdict.TIE, "with taps every operation behind it passed, so rounding chose"
    return Verdict.UNVERIFIED, reason
