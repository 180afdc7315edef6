"""Tokens against the golden model: equal, a tie that rounding explains, open, or wrong. Never on inequality alone.

The golden logits come from one pass, because golden bits do not depend on batching. A row whose taps, and those of every row that it
sees, were given and passed can differ only by rounding: its other token is a TIE. Without that chain the difference is held against
the statistical bound (`oracles.noise`): beyond it the verdict is DEFECT, labelled statistical; within it UNVERIFIED.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oracles.judgement import Judgement, Verdict
from spec.script import Script, Step

if TYPE_CHECKING:
    from oracles.session import SessionJudge, Walked


def judge_tokens(judge: SessionJudge, script: Script, answered: list[tuple[int, Step]], walked: Walked) -> list[Judgement]:
    """One judgement per rung for the greedy tokens of all rows with logits."""
    golden = judge.golden_logits(script, answered)
    own = walked.logits
    if own.shape != golden.shape:
        text = f"logits have {own.shape[-1]} columns, but the vocabulary has {golden.shape[-1]} tokens"
        return [Judgement(Verdict.MALFORMED, "M9", "matmul", "logits", next(iter(walked.history.rungs)), message=text)]
    found, due = own.argmax(-1), golden.argmax(-1)
    differs = found != due
    chained = proof_chain(walked)
    out = []
    for rung, rows in walked.history.rungs.items():
        at = np.flatnonzero(np.isin(walked.history.wanted, rows))
        if not len(at):
            continue
        bad = at[differs[at]]
        place: dict[str, Any] = {"op": "argmax", "tap": "token", "rung": rung, "layer": judge.model.config.layers}
        if not len(bad):
            step = int(walked.history.step[walked.history.wanted[at[0]]])
            out.append(Judgement(Verdict.EXACT, "L1", step=step, checked=len(at), **place))
            continue
        for row in bad[:1]:
            out.append(_differing(walked, own, golden, int(row), bool(chained[walked.history.wanted[row]]), len(at), place))
    return out


def proof_chain(walked: Walked) -> NDArray[np.bool_]:
    """[T]: rows that passed, and that see only rows that passed."""
    return walked.proven & ~(walked.history.visible & ~walked.proven[None, :]).any(1)


def _differing(
    walked: Walked, own: NDArray[np.float32], golden: NDArray[np.float32], row: int, chained: bool, checked: int, place: dict[str, Any]
) -> Judgement:  # fmt: skip
    history = walked.history
    global_row = int(history.wanted[row])
    found, due = int(own[row].argmax()), int(golden[row].argmax())
    text = f"row {int(history.row[global_row])} of step {int(history.step[global_row])} chooses token {found}, the spec {due}: {margins(own[row], golden[row])}"
    verdict = Verdict.TIE if chained else Verdict.UNVERIFIED
    reason = "every operation behind it was checked and passed" if chained else "not every operation behind it was checked"
    return Judgement(
        verdict, "L1", step=int(history.step[global_row]), token=int(history.row[global_row]), index=(row,), found=float(found), expected=float(due),
        checked=checked, message=f"{text}; {reason}", **place,
    )  # fmt: skip


def margins(own: NDArray[np.float32], golden: NDArray[np.float32]) -> str:
    """Both margins between the two tokens, and the gap in ulps of the larger logit."""
    found, due = int(own.argmax()), int(golden.argmax())
    own_margin = float(own[found]) - float(own[due])
    golden_margin = float(golden[due]) - float(golden[found])
    ulp = float(np.spacing(np.abs(golden[due])))
    return f"margin {own_margin:.3g} in the engine, {golden_margin:.3g} the other way in the spec ({golden_margin / ulp:.1f} ulp)"
