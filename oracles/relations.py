"""Two runs of one engine that must agree: rows that see the same tokens have the same logits, whatever was beside them.

Each relation declares its kind of equality. BITS: shapes, rows and expert counts are the same in both runs (or the profile claims batch invariance,
which turns CLOSE into BITS). CLOSE: both runs may round differently: each is allowed the statistical bound of `oracles.noise` (two of them, by the
triangle inequality), and rows that honest rounding may route to other experts are left open. Without a model of the engine's size no bound is known:
then only bits are judged and everything else is UNVERIFIED, with the largest difference that was seen. TOKENS: trees are integers, built from the
drafter's logits, which are ours: their nodes must be equal.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.answers import of_failure
from oracles.compare import close_number
from oracles.generation import RUNG
from oracles.history import History, replay
from oracles.judgement import FINDINGS, Judgement, Verdict
from oracles.noise import Noise, Rows, noise, shares_of
from oracles.walk import JudgeModel
from spec.engine import Profile
from spec.script import Answer, Commit, Evict, Fork, Forward, Generate, Script, Step, Trace

BITS, CLOSE, TOKENS = "bit for bit", "within rounding", "token for token"


@dataclass(frozen=True)
class Relation:
    """`rule`: what is broken where it does not hold; `equality`: BITS, CLOSE or TOKENS; `statement` completes "must hold: ..."."""

    name: str
    rule: str
    equality: str
    statement: str


@dataclass(frozen=True, eq=False)
class Run:
    """The rows with logits of one run: what each sees, and its logits [rows, V]."""

    history: History
    logits: NDArray[np.float32]
    contexts: tuple[bytes, ...]


def judge_relation(
    relation: Relation, first: tuple[Script, Trace], second: tuple[Script, Trace], profile: Profile, model: JudgeModel | None
) -> list[Judgement]:
    """One judgement: of logits, or for TOKENS of the trees. Empty where the first run answered nothing comparable: its failures are the business of the
    session's own judge. Where what was answered agrees, a step that fails in the second run only is the judgement: it is the same session."""
    related = _related(relation, first, second, profile, model)
    if any(judgement.verdict in FINDINGS for judgement in related):
        return related
    failed = _second_failure(relation, first[1], second)
    return related if failed is None else [failed]


def _related(
    relation: Relation, first: tuple[Script, Trace], second: tuple[Script, Trace], profile: Profile, model: JudgeModel | None
) -> list[Judgement]:
    if relation.equality == TOKENS:
        return _streams(relation, first, second)
    one, two = _run(*first), _run(*second)
    if one is None or two is None:
        return []
    pairs = _pairs(one, two, relation.equality == BITS)
    fields: dict[str, Any] = {"op": "forward", "tap": f"relation {relation.name}", "checked": len(pairs) * one.logits.shape[1]}
    if not len(pairs) or one.logits.shape[1] != two.logits.shape[1]:
        text = f"the relation {relation.name} compares nothing here"
        return [Judgement(Verdict.UNVERIFIED, relation.rule, rung="decode", message=text, **fields)]
    a, b = one.logits[pairs[:, 0]], two.logits[pairs[:, 1]]
    if relation.equality == BITS or profile.batch_invariant:
        return [_bits(relation, one, pairs, a, b, fields)]
    bound = None
    if model is not None:
        h = one.history
        with np.errstate(invalid="ignore"):
            difference = a.astype(np.float64) - b.astype(np.float64)
        difference = np.where(_same_bits(a, b), 0.0, difference)

        def enough(found: Noise, part: float) -> bool:
            return bool(shares_of(difference, 2 * found.bound[pairs[:, 0]]).max() <= part)

        bound = noise(model, Rows(h.token, h.position, h.visible, h.wanted), profile, enough=enough)
    return [_close(relation, one, pairs, a, b, bound, fields)]


def _second_failure(relation: Relation, first: Trace, second: tuple[Script, Trace]) -> Judgement | None:
    """Of the first step of the second run that the engine refused or failed, where the first run went through."""
    script, trace = second
    if first.failure is not None or any(_failed(answer) for answer in first.answers):
        return None
    for number, (step, answer) in enumerate(zip(script.steps, trace.answers, strict=False)):
        if answer.failure is not None and _failed(answer):
            failed = of_failure(answer.failure, step, number)
            return dataclasses.replace(failed, tap=f"relation {relation.name}", message=f"run the other way only, {failed.message}")
    return None


def _failed(answer: Answer) -> bool:
    return answer.failure is not None and answer.failure.kind != "unsupported"


def _pairs(one: Run, two: Run, same_shapes: bool) -> NDArray[np.intp]:
    """[n, 2] rows of both runs that see the same tokens. With the same batches a row is itself: two sequences with equal tokens lie elsewhere."""
    if same_shapes:
        return np.array(
            [(row, row) for row, context in enumerate(one.contexts) if two.contexts[row : row + 1] == (context,)], np.intp
        ).reshape(-1, 2)
    place = {context: row for row, context in enumerate(two.contexts)}
    return np.array([(row, place[context]) for row, context in enumerate(one.contexts) if context in place], np.intp).reshape(-1, 2)


def _run(script: Script, trace: Trace) -> Run | None:
    """None where a batch has no finite answer of the right shape."""
    answered: list[tuple[int, Step]] = []
    for number, (step, answer) in enumerate(zip(script.steps, trace.answers, strict=False)):
        if answer.failure is None:
            answered.append((number, step))
        elif isinstance(step, Forward | Commit | Fork | Evict):
            break  # what follows would need its effect
    parts = []
    for number, step in answered:
        if isinstance(step, Forward):
            logits = trace.answers[number].logits
            wanted = int(np.count_nonzero(step.want_logits))
            if wanted and (logits is None or logits.shape != (wanted, script.config.vocab)):
                return None
            if wanted and logits is not None:
                parts.append(logits)
    history = replay(answered)
    if not parts or len(history.wanted) != sum(len(part) for part in parts):
        return None
    return Run(history, np.concatenate(parts), tuple(_context(history, int(row)) for row in history.wanted))


def _context(history: History, row: int) -> bytes:
    """The tokens that a row sees, by position: all that its logits may depend on."""
    seen = np.flatnonzero(history.visible[row])
    order = np.argsort(history.position[seen], kind="stable")
    out: bytes = history.token[seen[order]].astype(np.int32).tobytes()
    return out


def _bits(relation: Relation, run: Run, pairs: NDArray[np.intp], a: Any, b: Any, fields: dict[str, Any]) -> Judgement:
    wrong = (np.ascontiguousarray(a).view(np.uint32) != np.ascontiguousarray(b).view(np.uint32)).any(1)
    if not wrong.any():
        return Judgement(Verdict.EXACT, relation.rule, rung=_rung(run, int(pairs[0, 0])), **fields)
    at = int(np.flatnonzero(wrong)[0])
    column = int(np.flatnonzero(a[at].view(np.uint32) != b[at].view(np.uint32))[0])
    return _defect(relation, run, int(pairs[at, 0]), column, float(a[at, column]), float(b[at, column]), 0.0, "bit for bit", fields)


def _close(
    relation: Relation, run: Run, pairs: NDArray[np.intp], a: Any, b: Any, bound: Noise | None, fields: dict[str, Any]
) -> Judgement:  # fmt: skip
    with np.errstate(invalid="ignore"):
        difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    same_bits = _same_bits(a, b)
    difference = np.where(same_bits, 0.0, np.where(np.isfinite(difference), difference, np.inf))
    if bound is None:
        worst = float(difference.max(initial=0.0))
        verdict = Verdict.EXACT if same_bits.all() else Verdict.UNVERIFIED
        text = "" if verdict is Verdict.EXACT else f"the runs differ by at most {worst:.2g}; without a model of this size no bound is known"
        return Judgement(verdict, relation.rule, rung=_rung(run, int(pairs[0, 0])), message=text, **fields)
    limit = 2 * bound.bound[pairs[:, 0]]
    decided = bound.decided[pairs[:, 0]]
    share = np.where(decided[:, None], shares_of(difference, limit), 0.0)
    at, column = (int(i) for i in np.unravel_index(int(share.argmax()), share.shape))
    top = float(share[at, column])
    if top > 1:
        how = f"within {limit[at, column]:.1g}, statistical"
        return _defect(
            relation, run, int(pairs[at, 0]), column, float(a[at, column]), float(b[at, column]), float(limit[at, column]), how, fields
        )
    open_rows = int((~decided).sum())
    text = "the runs agree within the statistical bound, which is no proof" + (
        f"; {open_rows} rows may route otherwise" if open_rows else ""
    )
    verdict = Verdict.EXACT if same_bits.all() else Verdict.UNVERIFIED
    return Judgement(
        verdict,
        relation.rule,
        rung=_rung(run, int(pairs[at, 0])),
        share=top,
        message=text if verdict is Verdict.UNVERIFIED else "",
        **fields,
    )


def _same_bits(a: Any, b: Any) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)
    return same


def _rung(run: Run, row: int) -> str:
    return run.history.rung_of(int(run.history.wanted[row]))


def _defect(
    relation: Relation, run: Run, row: int, column: int, found: float, due: float, limit: float, how: str, fields: dict[str, Any]
) -> Judgement:
    history = run.history
    own = int(history.wanted[row])
    step, of_batch = int(history.step[own]), int(history.row[own])
    text = (
        f"the logit of token {column} in row {of_batch} of step {step} is {close_number(found, due)}, and {close_number(due, found)} when the same "
        f"tokens are run the other way ({how}): {relation.statement} ({relation.rule})"
    )
    share = abs(found - due) / limit if limit and np.isfinite(found - due) else float("inf")
    verdict = Verdict.DEFECT if np.isfinite(found) else Verdict.NONFINITE
    return Judgement(
        verdict, relation.rule, rung=_rung(run, row), step=step, token=of_batch, index=(row - _first(history, own), column), found=found, expected=due,
        bound=limit, share=share, message=text, **fields,
    )  # fmt: skip


def _first(history: History, row: int) -> int:
    return history.batches[int(history.batch[row])].wanted_start


# ---- nesting in the budget -----------------------------------------------------------------------------------------------------------


def _streams(relation: Relation, first: tuple[Script, Trace], second: tuple[Script, Trace]) -> list[Judgement]:
    """The smaller tree of the first round is the beginning of the larger one (T3, T5); a stream that differs is left to the tokens' judge."""
    one, two = (_generations(*run) for run in (first, second))
    if one is None or two is None:
        return []
    (number, large), (_, small) = one, two
    fields: dict[str, Any] = {"op": "best_first_tree", "tap": "relation budget", "rung": RUNG, "step": number, "checked": len(large)}
    for sequence, (more, less) in enumerate(zip(large, small, strict=False)):
        if not more.rounds or not less.rounds or more.tokens[:1] != less.tokens[:1]:
            continue
        a, b = more.rounds[0], less.rounds[0]
        count = len(b.tokens)
        if a.tokens[:count] != b.tokens or a.parents[:count] != b.parents:
            text = f"sequence {sequence}: the tree of the smaller budget, {list(b.tokens)}, does not begin the larger one, {list(a.tokens)} ({relation.rule})"
            return [Judgement(Verdict.DEFECT, relation.rule, token=sequence, share=float("inf"), message=text, **fields)]
    return [Judgement(Verdict.EXACT, relation.rule, **fields)]


def _generations(script: Script, trace: Trace) -> tuple[int, list[Any]] | None:
    for number, (step, answer) in enumerate(zip(script.steps, trace.answers, strict=False)):
        if isinstance(step, Generate) and answer.generations is not None and answer.failure is None:
            return number, answer.generations
    return None
