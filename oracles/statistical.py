"""What an engine without taps still shows, its logits and cache rows, against the statistical bound (`oracles.noise`).

Beyond the bound the verdict is DEFECT, labelled statistical; within it nothing is proven, and the verdict is UNVERIFIED.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oracles.compare import close_number
from oracles.diagnosis import cache_rule, is_rejected
from oracles.judgement import Judgement, Verdict
from oracles.noise import Noise

if TYPE_CHECKING:
    from oracles.walked import Walked

Logits = NDArray[np.float32]


def judge_logits(walked: Walked, own: Logits, bound: Noise, at: NDArray[np.intp], rung: str, layer: int) -> Judgement:
    """A black box: every logit against the float64 model, within the statistical bound."""
    history = walked.history
    share = bound.shares(own, at)
    worst = share.max(1)
    failing = np.flatnonzero(worst > 1)
    if len(failing):  # of the first failing step
        steps = history.step[history.wanted[at[failing]]]
        failing = failing[steps == steps[0]]
        local = int(failing[worst[failing].argmax()])
    else:
        local = int(worst.argmax())
    row, token = int(at[local]), int(share[local].argmax())
    own_row = int(history.wanted[row])
    index = (row - history.batches[int(history.batch[own_row])].wanted_start, token)
    value, due, limit = float(own[row, token]), float(bound.reference[row, token]), float(bound.bound[row, token])
    rule = "V2" if rung == "tree verify" else "L1"
    fields: dict[str, Any] = {
        "op": "forward", "tap": "logits", "rung": rung, "layer": layer, "step": int(history.step[own_row]), "token": int(history.row[own_row]),
        "index": index, "found": value, "expected": due, "bound": limit, "share": float(share[local, token]), "checked": int(share.size),
    }  # fmt: skip
    name = f"logits[{index[0]}, {token}]"
    if len(failing):
        verdict = Verdict.DEFECT if np.isfinite(value) else Verdict.NONFINITE
        text = f"{name} is {close_number(value, due)}, but should be {close_number(due, value)} within {limit:.1g} (statistical, {rule})"
        return Judgement(verdict, rule, message=text, **fields)
    open_rows = int((~bound.decided[at]).sum())
    text = "logits lie within the statistical bound, which is no proof" + (f"; {open_rows} rows may route otherwise" if open_rows else "")
    return Judgement(Verdict.UNVERIFIED, rule, message=text, **fields)


def judge_cache(walked: Walked, bound: Noise) -> list[Judgement]:
    """Per layer: the rows that CacheRows answered, of the rows that the commits kept (K1, K7)."""
    history = walked.history
    return [_layer(walked, bound, layer) for layer in range(len(bound.cache))] if history.cache_reads else []


def _layer(walked: Walked, bound: Noise, layer: int) -> Judgement:
    history, (reference, limit) = walked.history, bound.cache[layer]
    layers, worst, checked = walked.model.config.layers, 0.0, 0
    for step, kept in history.cache_reads.items():
        found = walked.trace.answers[step].cache
        if found is None or found.shape != (layers, len(kept), reference.shape[1]) or found.dtype != np.float32:
            continue  # a matter of its length (K2)
        share = np.abs(found[layer] - reference[kept]) / limit[kept]
        share = np.where(bound.cache_decided[kept, None], np.where(np.isfinite(share), share, np.inf), 0.0)
        checked += share.size
        worst = max(worst, float(share.max(initial=0.0)))
        if worst <= 1:
            continue
        at = int(np.flatnonzero(share.max(1) > 1)[0])
        column, own = int(share[at].argmax()), int(kept[at])
        rule = cache_rule(history, step, own, at, len(kept))
        near = [int(g) for g in range(len(history)) if g != own and (np.abs(found[layer, at] - reference[g]) <= limit[g]).all()]
        hint = (
            f": this is row {int(history.row[near[0]])} of step {int(history.step[near[0]])}{is_rejected(history, near[0])}" if near else ""
        )
        value, due = float(found[layer, at, column]), float(reference[own, column])
        name, radius = f"cache[{layer}, {at}, {column}]", float(limit[own, column])
        text = f"{name} is {close_number(value, due)}, but should be {close_number(due, value)} within {radius:.1g}{hint} (statistical, {rule})"
        return Judgement(
            Verdict.DEFECT if np.isfinite(value) else Verdict.NONFINITE, rule, "compact", "cache", "accept and commit", layer, step, at,
            (layer, at, column), value, due, radius, worst, checked, text,
        )  # fmt: skip
    text = "cache rows lie within the statistical bound, which is no proof"
    step = max(history.cache_reads)
    return Judgement(
        Verdict.UNVERIFIED, "K1", "compact", "cache", "accept and commit", layer, step, share=worst, checked=checked, message=text
    )
