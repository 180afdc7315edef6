"""The ledger of a margin: its entries add up, an honest engine's are rounding, a planted bug's are at its own operation."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import honest, judge_of, run

from impls.blocked.engine import BlockedEngine
from impls.planted import blocked_attention, blocked_layers  # noqa: F401  (they register)
from impls.planted.planting import OVERRIDES
from oracles.ledger import Ledger, explain_margin
from spec.script import Forward, Script, Trace


def ledger(script: Script, trace: Trace, phase: str = "tree", row: int = 2) -> Ledger:
    step = next(number for number, s in enumerate(script.steps) if isinstance(s, Forward) and s.phase == phase)
    logits = trace.answers[step].logits
    assert logits is not None
    first, second = (int(i) for i in np.argsort(-logits[row], kind="stable")[:2])
    return explain_margin(judge_of().prepared, script, trace, step, row, first, second)


@pytest.mark.parametrize("hidden", [frozenset(), frozenset({"scores", "probs", "ffn_norm"})])
def test_entries_add_up_to_the_margin_of_the_engine(hidden: frozenset[str]) -> None:
    script, trace = honest(hidden=hidden)
    book = ledger(script, trace)
    assert book.reference + book.booked == pytest.approx(book.own, abs=1e-12)
    step = next(number for number, s in enumerate(script.steps) if isinstance(s, Forward) and s.phase == "tree")
    logits = trace.answers[step].logits
    assert logits is not None and book.own == float(logits[2, book.first]) - float(logits[2, book.second])
    assert hidden.isdisjoint({entry.tap for entry in book.entries})


def test_an_honest_engine_books_rounding_only() -> None:
    book = ledger(*honest())
    assert 0 < max(abs(entry.shift) for entry in book.entries) < 1e-5


@pytest.mark.parametrize(("plant", "op"), [("Z01", "scores"), ("tree20", "softmax")])
def test_a_bug_is_booked_at_its_own_operation(plant: str, op: str) -> None:
    """No row of the engine's is right from there on, and still all other entries are rounding."""
    script, trace = run(BlockedEngine(OVERRIDES[plant]))
    book = ledger(script, trace)
    guilty = [entry for entry in book.entries if entry.op == op]
    others = [entry for entry in book.entries if entry.op != op]
    assert max(abs(entry.shift) for entry in guilty) > 1e-2 > 1e-5 > max(abs(entry.shift) for entry in others)
    assert book.largest(1)[0].op == op


def test_a_row_without_logits_has_no_ledger() -> None:
    script, trace = honest()
    step = next(number for number, s in enumerate(script.steps) if isinstance(s, Forward) and not s.want_logits.all())
    row = int(np.flatnonzero(~script.steps[step].want_logits)[0])  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="gives no logits"):
        explain_margin(judge_of().prepared, script, trace, step, row, 0, 1)
