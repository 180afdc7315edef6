"""One pass over all rows of a session: each tap compared, one judgement per tap, layer and rung, and which rows carry a proof."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles import diagnosis
from oracles.ball import Arithmetic, Ball, Wide, arithmetic, zeros_if_none
from oracles.cached import judge_cache
from oracles.compare import LARGE, TIGHT, Equal, Near, judge_equal, near_judgement, shares
from oracles.history import Batch, History
from oracles.judgement import FINDINGS, Judgement, Verdict
from oracles.ops import add, argmax, o_latent, route
from oracles.stacks import OVER_KEYS, Stack, Stacks
from oracles.suspicion import suspect
from oracles.walk import Ids, JudgeModel, inputs_of, walk
from spec.engine import Profile
from spec.formats import ROUNDED
from spec.script import Trace
from spec.taps import ATTENTION, DENSE, EMBED, HEAD, RESIDUAL, SPARSE, all_tap_names

OF_EXPERTS = frozenset({"expert_weights", "expert_gate", "expert_up", "expert_act", "expert_out", "ffn_out"})
RULES: Mapping[str, str] = {"embed": "M1", "attn_residual": "N4", "ffn_residual": "N4"}
OP_OF_TAP: Mapping[str, str] = {tap.name: tap.op for group in (EMBED, ATTENTION, DENSE, SPARSE, RESIDUAL, HEAD) for tap in group}


@dataclass(eq=False)
class Walked:
    """One pass over all rows: the judgements, and which rows carry a proof. A `Taps` of `oracles.walk`."""

    model: JudgeModel
    history: History
    trace: Trace
    profile: Profile
    statistics: bool = False
    judgements: list[Judgement] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = len(self.history)
        self.arithmetic: Arithmetic = arithmetic(self.profile, self.statistics)
        self.proven = np.ones(rows, np.bool_)  # rows whose taps were all given (or tightly composed) and passed
        self.logits: NDArray[np.float32] = np.zeros((0, self.model.config.vocab), np.float32)
        self.ids: dict[int, Ids] = {}
        self._undecided: dict[int, NDArray[np.bool_]] = {}
        self._seen: dict[str, Ball] = {}  # exact inputs of the current layer, for diagnosis
        self.cache: list[tuple[Ball, Ball]] = []
        self._rungs_of_rows = list(self.history.rungs.items())
        of_wanted = {rung: np.flatnonzero(np.isin(self.history.wanted, rows)) for rung, rows in self.history.rungs.items()}
        self._rungs_of_wanted = [(rung, at) for rung, at in of_wanted.items() if len(at)]
        if not rows:
            return
        self.answers = [self.trace.answers[batch.step] for batch in self.history.batches]
        self._stack = Stacks(self.model.config, self.history, self.answers, self._malformed)
        self.tapped = any(answer.taps for answer in self.answers)
        if self.tapped:
            h = self.history
            walk(self.model, h.token, h.position, h.visible, h.wanted, self, self.arithmetic)
            self._judge_choice()
        else:
            self.proven[:] = False
            self.logits = self._answered_logits()
        self.judgements += judge_cache(self)

    def seen(self, name: str) -> Ball:
        """What the walk read at tap `name` of the current layer."""
        return self._seen[name]

    # ---- what the walk asks ---------------------------------------------------------------------------------
    def has(self, name: str, layer: int) -> bool:
        return self._stack.given(name, layer)

    def meet(self, name: str, layer: int, predicted: Ball) -> Ball:
        if name in OF_EXPERTS and layer in self._undecided and predicted.rad is not None:
            rows = self._undecided[layer]
            predicted.rad = np.where(rows.reshape(-1, *[1] * (predicted.mid.ndim - 1)), np.inf, predicted.rad)
        stack = self._stack(name, layer)
        met = predicted if stack is None else self._compare(name, layer, predicted, stack)
        self._seen[name] = met
        if name == "k_rope":
            self.cache.append((self._seen["latent"], met))
        if stack is None and name == "logits":
            raise AssertionError("logits are part of every answer")
        return met

    def choose(self, layer: int, predicted: Ball) -> Ids:
        c = self.model.config
        bias = self.model.bias(layer)

        rule = route.rule_of(c)
        expected = rule.choose(predicted.mid.astype(np.float32), bias)
        certain = np.ones(len(expected), np.bool_)
        if predicted.rad is not None:
            certain = rule.is_forced(predicted, bias, expected)
        stack = self._stack("expert_ids", layer)
        if stack is None or stack.present is not None:
            self._undecided[layer] = ~certain
            self.proven &= certain
            self.ids[layer] = expected
            return expected
        own = stack.values
        valid = ((own >= 0) & (own < c.experts)).all(-1, keepdims=True)
        due = expected
        if self.arithmetic.any_tie and predicted.rad is None:
            tied = rule.is_tied(predicted.mid.astype(np.float32), bias, np.where(valid, own, expected))
            due = np.where(valid & tied[:, None], own, expected)
        equal = Equal(route.in_order_of(own, due), "M8")
        if predicted.rad is None:
            self._equal("expert_ids", layer, own, equal)
        else:
            explained = rule.is_explained(predicted, bias, own)
            self._ids_without_scores(layer, own, expected, certain, explained)
        self.ids[layer] = np.where(valid, own, expected)
        return self.ids[layer]

    # ---- taps -------------------------------------------------------------------------------------------------
    def _malformed(self, judgement: Judgement, batch: Batch) -> None:
        self._add(judgement)
        self.proven[batch.start : batch.start + batch.count] = False

    def _answered_logits(self) -> NDArray[np.float32]:
        parts = [answer.logits for answer in self.answers if answer.logits is not None and len(answer.logits)]
        return np.concatenate(parts) if parts else self.logits

    def _compare(self, name: str, layer: int, predicted: Ball, stack: Stack) -> Ball:
        where = None
        if name == "scores":
            where = np.broadcast_to(self.history.visible[:, None], predicted.mid.shape)
        if stack.present is not None:
            rows = stack.present.reshape(-1, *[1] * (predicted.mid.ndim - 1))
            where = np.broadcast_to(rows if where is None else where & rows, predicted.mid.shape)
        rule = RULES.get(name, "N2")
        if rule == "N4" and not (
            add.one_rounding(self.arithmetic.at(name, "add"))
            and all(self.has(*source) for source in inputs_of(self.model.config, name, layer))
        ):
            rule = "N2"
        near = Near(predicted, rule, where)
        share = shares(stack.values, near)
        self._judge_rows(name, layer, stack, near, share)
        if name in ("latent", "k_rope"):
            self._judge_format(name, layer, stack)
        if name == "probs":
            self._judge_padding(layer)
        if stack.present is None:
            return Ball(stack.values)
        rad = np.zeros(predicted.mid.shape) if predicted.rad is None else predicted.rad
        return Ball(np.where(rows, stack.values, predicted.mid), np.where(rows, 0.0, rad))

    def _judge_rows(self, name: str, layer: int, stack: Stack, near: Near, share: Wide) -> None:
        """One judgement per rung: of the first failing step if there is one, else of the worst row."""
        history = self.history
        of_wanted = name == "logits"
        flat = share.reshape(len(share), -1)
        worst = flat.max(1, initial=0.0)
        blunt = self._blunt(name, layer, near)
        failing = worst > 1
        if failing.any():
            self.proven[history.wanted[failing] if of_wanted else failing] = False
        op = OP_OF_TAP[name] if name != "ffn_out" or not self.model.config.is_dense(layer) else "matmul"
        for rung, at in self._rungs_of_wanted if of_wanted else self._rungs_of_rows:
            rows = at
            if failing[at].any():
                rows = at[failing[at]]
                steps = history.step[history.wanted[rows] if of_wanted else rows]
                rows = rows[steps == steps[0]]
            row = int(rows[worst[rows].argmax()])
            own = int(history.wanted[row]) if of_wanted else row
            index = (row, *_unravel(int(flat[row].argmax()), share.shape[1:]))
            judgement = near_judgement(
                stack.values, near, index, float(worst[row]), len(at) * flat.shape[1], shown=self._shown(name, index, own), op=op, tap=name,
                rung=rung, layer=layer, step=int(history.step[own]), token=int(history.row[own]),
            )  # fmt: skip
            if judgement.verdict in FINDINGS:
                judgement = diagnosis.refine(judgement, self, name, layer, near, stack.values, failing, own, index)
            elif blunt is not None and blunt[at].any():
                judgement = self._unverified(judgement, name, layer, int(blunt[at].sum()), len(at))
            elif self.statistics:
                where = None if near.where is None else near.where[at]
                judgement = suspect(judgement, stack.values[at], Near(near.ball[at], near.rule, where))
            self._add(judgement)

    def _blunt(self, name: str, layer: int, near: Near) -> NDArray[np.bool_] | None:
        """Rows whose composed radius is too large to prove anything; None if every input was given."""
        missing = [source for source in inputs_of(self.model.config, name, layer) if not self.has(*source)]
        rad = near.ball.rad
        if not missing or rad is None:
            return None
        rad = np.broadcast_to(rad, near.ball.mid.shape)
        fused = self._fused(name, layer)
        if (
            fused
        ):  # one operation, tree_attention: what its last product may lose by itself is local, as in any product; the rest is composed
            rad = np.maximum(rad - self._of_last_product(), 0.0)
        if near.where is not None:
            rad = np.where(near.where, rad, 0.0)
        flat = near.ball.mid.reshape(len(rad), -1)
        with np.errstate(invalid="ignore", over="ignore"):
            size = np.sqrt(np.mean(np.square(flat), 1))
            share = rad.reshape(len(rad), -1).max(1, initial=0.0)
            loose = ~(share <= (LARGE if fused else TIGHT) * size)
            large: NDArray[np.bool_] = ~(share <= LARGE * size)
        self.proven[self.history.wanted[loose] if name == "logits" else loose] = False
        return large

    def _fused(self, name: str, layer: int) -> bool:
        """Whether `name` is the output of fused attention whose every input was given: probs, or scores and probs, never left it."""
        if name != "o_latent" or self.has("probs", layer) or not self.has("latent", layer):
            return False
        return self.has("scores", layer) or all(self.has(one, layer) for one in ("q_absorb", "q_rope", "k_rope"))

    def _of_last_product(self) -> Any:
        """The radius of o_latent if the probabilities were as predicted."""
        terms = self.history.visible.sum(-1)[:, None, None]
        weights = Ball(self._seen["probs"].mid)
        return zeros_if_none(o_latent.bound(weights, self._seen["latent"], terms, self.arithmetic.at("o_latent")).rad)

    def _unverified(self, judgement: Judgement, name: str, layer: int, count: int, rows: int) -> Judgement:
        region = self._region(name, layer)
        text = f"{name}, layer {layer}: without the taps {region} the bound is a large share of the row in {count} of {rows} rows; nothing is proven"
        return dataclasses.replace(judgement, verdict=Verdict.UNVERIFIED, message=text)

    def _region(self, name: str, layer: int) -> str:
        """Names of the taps between here and the last ones that were given, at most six."""
        missing: dict[str, None] = {}
        queue = [(name, layer)]
        while queue and len(missing) < 6:
            for source in inputs_of(self.model.config, *queue.pop(0)):
                if not self.has(*source) and source[0] not in missing:
                    missing[source[0]] = None
                    queue.append(source)
        return ", ".join(sorted(missing, key=all_tap_names().index))

    def _shown(self, name: str, index: tuple[int, ...], own: int) -> tuple[int, ...]:
        """The position inside the engine's own tap: rows of the batch, columns of its keys."""
        history = self.history
        if name == "logits":
            return (index[0] - history.batches[int(history.batch[own])].wanted_start, *index[1:])
        if name in OVER_KEYS:
            return (int(history.row[own]), index[1], history.column_of(own, index[2]))
        return (int(history.row[own]), *index[1:])

    def _judge_padding(self, layer: int) -> None:
        """Columns past a row's own keys must weigh exactly 0, too (C3)."""
        for batch, answer in zip(self.history.batches, self.answers, strict=True):
            found = answer.taps.get(("probs", layer))
            if found is None or found.ndim != 3 or found.shape[2] != batch.columns:
                continue
            for span in batch.spans:
                extra = found[span.rows, :, len(span.keys) :]
                if extra.size and (extra != 0).any():
                    row, head, column = (int(i) for i in np.argwhere(extra != 0)[0])
                    value = float(extra[row, head, column])
                    index = (int(span.rows[row]), head, len(span.keys) + column)
                    text = f"probs[{', '.join(map(str, index))}], layer {layer}, is {value:.6g}, but must be exactly 0: no key stands there (C3)"
                    verdict = Verdict.DEFECT if np.isfinite(value) else Verdict.NONFINITE
                    self.proven[batch.start + span.rows] = False
                    rung = self.history.rung_of(batch.start)
                    self._add(
                        Judgement(
                            verdict, "C3", "softmax", "probs", rung, layer, batch.step, index[0], index, value, share=np.inf, message=text
                        )
                    )
                    break

    def _judge_format(self, name: str, layer: int, stack: Stack) -> None:
        """What a cache row holds is a number of the cache's format (M11)."""
        cache_format = self.model.config.cache_format
        if cache_format == "float32":
            return
        strange = np.isfinite(stack.values) & (ROUNDED[cache_format](stack.values) != stack.values)
        if stack.present is not None:
            strange &= stack.present[:, None]
        if not strange.any():
            return
        own, column = (int(i) for i in np.argwhere(strange)[0])
        value, row = float(stack.values[own, column]), int(self.history.row[own])
        self.proven[strange.any(1)] = False
        text = f"{name}[{row}, {column}], layer {layer}, is {value:.9g}, which is no {cache_format}, the format of the cache (M11)"
        self._add(
            Judgement(
                Verdict.DEFECT, "M11", OP_OF_TAP[name], name, self.history.rung_of(own), layer, int(self.history.step[own]), row, (row, column), value,
                share=np.inf, message=text,
            )
        )  # fmt: skip

    def _equal(self, name: str, layer: int, found: NDArray[Any], equal: Equal, of_wanted: bool = False) -> None:
        """A decision, per rung."""
        history = self.history
        rows = history.wanted if of_wanted else np.arange(len(history))
        wrong = (found != equal.values).reshape(len(found), -1).any(1)
        self.proven[rows[wrong]] = False
        for rung, at in self._rungs_of_wanted if of_wanted else self._rungs_of_rows:
            bad = at[wrong[at]]
            place: dict[str, Any] = {"op": OP_OF_TAP[name], "tap": name, "rung": rung, "layer": layer}
            if not len(bad):
                size = int(found[at].size)
                self._add(Judgement(Verdict.EXACT, equal.rule, step=int(history.step[rows[at[0]]]), checked=size, **place))
                continue
            row = int(bad[0])
            own = int(rows[row])
            judged = judge_equal(found[row : row + 1], Equal(equal.values[row : row + 1], equal.rule), **place)
            batch = history.batches[int(history.batch[own])]
            first = row - batch.wanted_start if of_wanted else int(history.row[own])
            index = (first, *judged.index[1:])
            shown = ", ".join(map(str, index))
            text = f"{name}[{shown}], layer {layer}, is {int(judged.found)}, but must be {int(judged.expected)} ({equal.rule})"
            self._add(
                Judgement(
                    judged.verdict, equal.rule, step=batch.step, token=int(history.row[own]), index=index, found=judged.found,
                    expected=judged.expected, share=np.inf, checked=int(found[at].size), message=text, **place,
                )
            )  # fmt: skip

    def _ids_without_scores(self, layer: int, own: Ids, expected: Ids, certain: NDArray[np.bool_], explained: NDArray[np.bool_]) -> None:
        """Expert ids where the scores are only known within balls: right if forced, wrong if no scores in the balls explain them."""
        same = (np.sort(own, -1) == np.sort(expected, -1)).all(-1)
        explained = same | explained
        self._equal("expert_ids", layer, own, Equal(np.where((certain | ~explained)[:, None], route.in_order_of(own, expected), own), "M8"))
        open_rows = ~certain & explained
        self.proven &= ~open_rows
        for rung, at in self._rungs_of_rows:
            if open_rows[at].any():
                row = int(at[open_rows[at]][0])
                text = (
                    f"expert_ids, layer {layer}: without router_scores the choice is open in {int(open_rows[at].sum())} of {len(at)} rows"
                )
                step, token = int(self.history.step[row]), int(self.history.row[row])
                self._add(Judgement(Verdict.UNVERIFIED, "M8", "route", "expert_ids", rung, layer, step, token, message=text))

    # ---- logits and argmax ------------------------------------------------------------------------------
    def _judge_choice(self) -> None:
        """The answer's logits are the tap's, bit for bit; the argmax is exact on them."""
        last = self.model.config.layers
        self.logits = self._answered_logits()
        stack = self._stack("logits", last)
        if stack is not None and stack.values.shape == self.logits.shape and any(("logits", last) in a.taps for a in self.answers):
            given, tapped = self.logits.view(np.uint32), np.ascontiguousarray(stack.values, np.float32).view(np.uint32)
            if (given != tapped).any():
                row, token = (int(i) for i in np.argwhere(given != tapped)[0])
                own = int(self.history.wanted[row])
                text = f"logits[{row}, {token}] of the answer is {self.logits[row, token]:.9g}, but the tap says {stack.values[row, token]:.9g} (N4)"
                rung = self.history.rung_of(own)
                self._add(
                    Judgement(
                        Verdict.DEFECT, "N4", "matmul", "logits", rung, last, int(self.history.step[own]), int(self.history.row[own]),
                        found=float(self.logits[row, token]), expected=float(stack.values[row, token]), share=np.inf, message=text,
                    )
                )  # fmt: skip
        chosen = self._stack("argmax", last)
        if chosen is not None and chosen.present is None and len(chosen.values) == len(self.logits):
            self._equal("argmax", last, chosen.values, Equal(argmax.choice(self.logits, chosen.values), "A1"), of_wanted=True)

    def _add(self, judgement: Judgement) -> None:
        self.judgements.append(judgement)


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """np.unravel_index for one small index, without its overhead."""
    index: list[int] = []
    for extent in reversed(shape):
        flat, rest = divmod(flat, extent)
        index.append(rest)
    return tuple(reversed(index))
