"""Which operation moved a decision: the shift of a margin between two tokens, booked operation by operation.

The book is kept by substitution in data order: a float64 walk takes the engine's own numbers for the first k taps and computes the rest, so
that entry k is what tap k, and nothing else, did to the margin. The entries add up to the whole shift without a remainder of higher
order, and the last margin is the engine's own. A first-order adjoint gives the same entries to 1e-6 (NUMERICS 5.2) and needs a reverse pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracles.ball import Ball, arithmetic
from oracles.history import History, replay
from oracles.ops.route import rule_of
from oracles.stacks import Stacks
from oracles.walk import Ids, JudgeModel, walk
from spec.engine import Profile
from spec.script import Script, Trace
from spec.taps import taps_of_layer

PROFILE = Profile()  # radii are computed and not used


@dataclass(frozen=True)
class Entry:
    """What the numbers that the engine gave at one tap did to the margin. Without taps before it, the region up to it is booked here."""

    tap: str
    layer: int
    op: str
    shift: float  # of the margin, in units of a logit


@dataclass(frozen=True)
class Ledger:
    """`reference` + the shifts = `own`, but for the rounding of float64. Margins are logit(first) - logit(second)."""

    first: int
    second: int
    reference: float  # the margin in the float64 model
    own: float  # the margin in the engine
    entries: tuple[Entry, ...]  # in data order

    @property
    def booked(self) -> float:
        return sum(entry.shift for entry in self.entries)

    def largest(self, count: int = 5) -> tuple[Entry, ...]:
        return tuple(sorted(self.entries, key=lambda entry: -abs(entry.shift))[:count])


def explain_margin(model: JudgeModel, script: Script, trace: Trace, step: int, row: int, first: int, second: int) -> Ledger:
    """The ledger of logits `first` and `second` of batch row `row` of forward step `step`.

    One walk per tap that the engine gave. Raises ValueError for a step or row without logits.
    """
    answered = [(n, s) for n, (s, a) in enumerate(zip(script.steps, trace.answers, strict=False)) if a.failure is None]
    history = replay(answered)
    batch = next((b for b in history.batches if b.step == step), None)
    if batch is None or row not in batch.wanted:
        raise ValueError(f"step {step} gives no logits of row {row}")
    place = batch.wanted_start + int(np.flatnonzero(batch.wanted == row)[0])
    answers = [trace.answers[b.step] for b in history.batches]
    stacks = Stacks(script.config, history, answers, lambda judgement, where: None)
    given = [
        (tap, layer)
        for layer in range(-1, script.config.layers + 1)
        for tap in taps_of_layer(script.config, layer)
        if tap.name != "argmax" and stacks.given(tap.name, layer)
    ]

    def margin(taken: int) -> float:
        logits = Substituted.logits(model, history, stacks, frozenset((tap.name, layer) for tap, layer in given[:taken]))
        return float(logits[place, first] - logits[place, second])

    margins = [margin(taken) for taken in range(len(given) + 1)]
    entries = [
        Entry(tap.name, layer, tap.op, after - before) for (tap, layer), before, after in zip(given, margins, margins[1:], strict=False)
    ]
    return Ledger(first, second, margins[0], margins[-1], tuple(entries))


@dataclass(eq=False)
class Substituted:
    """A `Taps`: the engine's numbers at the taps in `taken`, real numbers everywhere else."""

    model: JudgeModel
    stacks: Stacks
    taken: frozenset[tuple[str, int]]

    @classmethod
    def logits(cls, model: JudgeModel, history: History, stacks: Stacks, taken: frozenset[tuple[str, int]]) -> NDArray[np.float64]:
        a = arithmetic(PROFILE, False, True)
        return walk(model, history.token, history.position, history.visible, history.wanted, cls(model, stacks, taken), a).mid

    def has(self, name: str, layer: int) -> bool:
        return True

    def meet(self, name: str, layer: int, predicted: Ball) -> Ball:
        stack = self.stacks(name, layer) if (name, layer) in self.taken else None
        return Ball(predicted.mid if stack is None else stack.values)

    def choose(self, layer: int, predicted: Ball) -> Ids:
        c = self.model.config
        stack = self.stacks("expert_ids", layer) if ("expert_ids", layer) in self.taken else None
        if stack is not None:
            ids: Ids = np.clip(stack.values, 0, c.experts - 1).astype(np.int64)
            return ids
        return rule_of(c).choose(predicted.mid, self.model.bias(layer))
