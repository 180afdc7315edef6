"""Tokens and logits against the golden model: equal, a tie that rounding explains, open, or wrong. Never on inequality alone.

The golden logits come from one pass, because golden bits do not depend on batching. A row whose taps, and those of every row that it
sees, were given and passed can differ only by rounding: its other token is a TIE. Without that chain the difference is held against
the statistical bound (`oracles.noise`): beyond it the verdict is DEFECT, labelled statistical; within it UNVERIFIED.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oracles.judgement import FINDINGS, Judgement, Verdict
from oracles.ledger import Ledger, explain_margin
from oracles.noise import Noise, Rows, noise
from oracles.statistical import judge_cache, judge_logits
from spec.script import Script, Step

if TYPE_CHECKING:
    from oracles.session import SessionJudge
    from oracles.walked import Walked

Logits = NDArray[np.float32]


def judge_tokens(judge: SessionJudge, script: Script, answered: list[tuple[int, Step]], walked: Walked) -> list[Judgement]:
    """Per rung: the logits by the statistical bound if the engine shows no taps, and the greedy tokens of all rows with logits."""
    golden = judge.golden_logits(script, answered)
    own, history = walked.logits, walked.history
    if own.shape != golden.shape:
        text = f"logits have {own.shape[-1]} columns, but the vocabulary has {golden.shape[-1]} tokens"
        return [Judgement(Verdict.MALFORMED, "M9", "matmul", "logits", next(iter(history.rungs)), message=text)]
    found, due = own.argmax(-1), golden.argmax(-1)
    differs = found != due
    log_probs = "log_probs" in walked.trace.description.capabilities  # a constant per row: tokens and margins are those of the logits
    chained = proof_chain(walked)[history.wanted]
    bound = None
    # what no chain of taps proves is held against the statistical bound, unless the location of a mistake is known already
    statistical = not walked.tapped or (not chained.all() and not any(j.verdict in FINDINGS for j in walked.judgements))
    if statistical or (differs & ~chained).any():
        session = Rows(history.token, history.position, history.visible, history.wanted)
        whole = np.arange(len(history.wanted))
        # a margin or a cache row needs the bound itself; of logits alone it is enough to know that they are within it
        few = not differs.any() and not history.cache_reads
        bound = noise(
            judge.prepared, session, walked.profile, log_probs=log_probs,
            enough=(lambda found, part: bool(found.raw_shares(own, whole).max() <= part)) if few else None,
        )  # fmt: skip
    out = [] if walked.tapped or bound is None else judge_cache(walked, bound)
    for rung, rows in history.rungs.items():
        at = np.flatnonzero(np.isin(history.wanted, rows))
        if not len(at):
            continue
        if statistical and bound is not None and not chained[at].all():
            out.append(judge_logits(walked, own, bound, at, rung, judge.model.config.layers))
        place: dict[str, Any] = {"op": "argmax", "tap": "token", "rung": rung, "layer": judge.model.config.layers}
        bad = at[differs[at]]
        if not len(bad):
            out.append(Judgement(Verdict.EXACT, "L1", step=int(history.step[history.wanted[at[0]]]), checked=len(at), **place))
            continue
        judged = [_differing(walked, own, golden, int(row), bool(chained[row]), bound, len(at), place) for row in bad]
        chosen = next((j for j in judged if j.verdict is Verdict.DEFECT), judged[0])
        if chosen.verdict is Verdict.TIE:
            book = explain_margin(judge.prepared, script, walked.trace, chosen.step, chosen.token, int(chosen.found), int(chosen.expected))
            chosen = dataclasses.replace(chosen, message=f"{chosen.message}; {booked(book)}")
        out.append(chosen)
    return out


def booked(book: Ledger) -> str:
    """The ledger in a sentence: which roundings moved the margin."""
    parts = ", ".join(f"{entry.tap} of layer {entry.layer} {entry.shift:+.2g}" for entry in book.largest(3))
    return f"rounding moved the margin from {book.reference:.3g} to {book.own:.3g}, most of it at {parts}"


def proof_chain(walked: Walked) -> NDArray[np.bool_]:
    """[T]: rows that passed, and that see only rows that passed."""
    return walked.proven & ~(walked.history.visible & ~walked.proven[None, :]).any(1)


def _differing(
    walked: Walked, own: Logits, golden: Logits, row: int, chained: bool, bound: Noise | None, checked: int, place: dict[str, Any]
) -> Judgement:  # fmt: skip
    history = walked.history
    at = int(history.wanted[row])
    found, due = int(own[row].argmax()), int(golden[row].argmax())
    margin = float(golden[row, due]) - float(golden[row, found])
    where = f"row {int(history.row[at])} of step {int(history.step[at])} chooses token {found}, the spec {due}"
    verdict, reason, limit = decide(margin, chained, None if bound is None else bound.margin_bound(row, found, due))
    return Judgement(
        verdict, "L1", step=int(history.step[at]), token=int(history.row[at]), index=(row,), found=float(found), expected=float(due),
        bound=limit, share=margin / limit if limit else 0.0, checked=checked, message=f"{where}: {margins(own[row], golden[row])}; {reason}", **place,
    )  # fmt: skip


def decide(margin: float, chained: bool, limit: float | None) -> tuple[Verdict, str, float]:
    """(verdict, why, bound) for another token than the spec's, whose golden margin is `margin`. A limit of 0: both logits are exact in every engine."""
    if chained:
        return Verdict.TIE, "every operation behind it was checked and passed, so rounding chose", 0.0
    if limit == 0:
        return (
            Verdict.DEFECT,
            "both logits are sums of exact zeros, which no rounding moves, and of equal ones the lowest token is due",
            0.0,
        )
    if limit is not None and margin > limit:
        return Verdict.DEFECT, f"honest rounding moves this margin by at most {limit:.2g} (statistical)", limit
    if limit is not None and np.isfinite(limit):
        return (
            Verdict.UNVERIFIED,
            f"honest rounding may move this margin by {limit:.2g} (statistical), and not every operation was checked",
            limit,
        )
    return Verdict.UNVERIFIED, "honest rounding may route it to other experts, and not every operation was checked", 0.0


def margins(own: Logits, golden: Logits) -> str:
    """Both margins between the two tokens, and the gap in ulps of the larger logit."""
    found, due = int(own.argmax()), int(golden.argmax())
    own_margin = float(own[found]) - float(own[due])
    return f"margin {own_margin:.3g} in the engine, {golden_margin(golden, found, due)} the other way in the spec"


def golden_margin(golden: Logits, found: int, due: int) -> str:
    """`1.2e-06 (3.0 ulp)`, the gap of two float32 logits in units of the last place of the larger one."""
    gap = float(golden[due]) - float(golden[found])
    return f"{gap:.3g} ({gap / float(np.spacing(np.abs(golden[due]))):.1f} ulp)"
