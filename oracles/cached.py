"""CacheRows: the engine's own latent | k_rope of the rows that the commits kept (K1, K2, K7), per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from oracles import diagnosis
from oracles.ball import Ball, concatenate
from oracles.compare import LARGE, Near, shares
from oracles.judgement import Judgement, Verdict

if TYPE_CHECKING:
    from oracles.walked import Walked

RUNG = "accept and commit"


def judge_cache(walked: Walked) -> list[Judgement]:
    """One judgement per layer of the rows, in the order of layers, and one of the lengths."""
    if not walked.history.cache_reads:
        return []
    layers = [_layer(walked, layer, concatenate(list(balls), -1)) for layer, balls in enumerate(walked.cache)]
    return [*layers, _lengths(walked)]


def _layer(walked: Walked, layer: int, rows: Ball) -> Judgement:
    """`rows` [T, R + D]: every row ever written. An exact copy where latent and k_rope are tapped, else within their composed bound."""
    config, reads = walked.model.config, walked.history.cache_reads
    verdict = Verdict.EXACT if rows.exact else Verdict.WITHIN_BOUND
    worst, checked = 0.0, 0
    for step, kept in reads.items():
        found = walked.trace.answers[step].cache
        if found is None or found.shape != (config.layers, len(kept), config.cache_dim) or found.dtype != np.float32:
            continue  # a matter of its length
        due = rows[kept]
        share = shares(found[layer], Near(due))
        checked += share.size
        worst = max(worst, float(share.max(initial=0.0)))
        if worst > 1:
            return diagnosis.of_cache(walked, layer, step, kept, rows, found[layer], share)
        if due.rad is not None and bool((due.rad.max(1) > LARGE * np.sqrt(np.mean(np.square(due.mid), 1))).any()):
            verdict = Verdict.UNVERIFIED
    text = "cache: without the taps latent and k_rope the bound is a large share of the rows" if verdict is Verdict.UNVERIFIED else ""
    return Judgement(verdict, "K1", "compact", "cache", RUNG, layer, max(reads), share=worst, checked=checked, message=text)


def _lengths(walked: Walked) -> Judgement:
    """K2: as many rows as were committed; the first answer that is wrong is named."""
    config, reads = walked.model.config, walked.history.cache_reads
    for step, rows in reads.items():
        found = walked.trace.answers[step].cache
        assert found is not None
        shape = (config.layers, len(rows), config.cache_dim)
        if found.shape == shape and found.dtype == np.float32:
            continue
        text = f"cache_rows of step {step} answered {found.dtype} {list(found.shape)}, but must be float32 {list(shape)} (K2)"
        of_length = found.ndim == 3 and found.shape[::2] == shape[::2]
        return Judgement(
            Verdict.DEFECT if of_length else Verdict.MALFORMED, "K2", "compact", "cache_length", RUNG, step=step,
            found=float(found.shape[1]) if of_length else 0.0, expected=float(len(rows)), share=np.inf, message=text,
        )  # fmt: skip
    return Judgement(Verdict.EXACT, "K2", "compact", "cache_length", RUNG, step=max(reads), checked=len(reads))
