"""Taps of all batches joined into one array per (tap, layer); what is not an array of the right shape is reported and left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.history import Batch, History
from oracles.judgement import Judgement, Verdict
from spec.config import Config
from spec.script import Answer
from spec.taps import Tap, taps_of_layer

OVER_KEYS = ("scores", "probs")  # taps whose last axis is keys: stacked by global key


@dataclass(frozen=True, eq=False)
class Stack:
    """One tap over all rows (or all rows with logits). `present` is None where every batch gave it, else [T]."""

    values: NDArray[Any]
    present: NDArray[np.bool_] | None


Report = Callable[[Judgement, Batch], None]


class Stacks:
    """`stacks(name, layer)` joins on first use and keeps the result; `report` gets each malformed tap once, when it is met."""

    def __init__(self, config: Config, history: History, answers: list[Answer], report: Report) -> None:
        self._config = config
        self._history = history
        self._answers = answers
        self._report = report
        self._kept: dict[tuple[str, int], Stack | None] = {}
        self._taps = {layer: {tap.name: tap for tap in taps_of_layer(config, layer)} for layer in range(-1, config.layers + 1)}
        self._extents: dict[str, int] = {}

    def __call__(self, name: str, layer: int) -> Stack | None:
        key = (name, layer)
        if key not in self._kept:
            self._kept[key] = self._joined(self._taps[layer][name], layer)
        return self._kept[key]

    def given(self, name: str, layer: int) -> bool:
        """Whether every batch gave the tap."""
        stack = self(name, layer)
        return stack is not None and stack.present is None

    def _joined(self, tap: Tap, layer: int) -> Stack | None:
        history = self._history
        key = (tap.name, layer)
        of_wanted = tap.name in ("logits", "argmax")
        tail = tuple(self._extent(word) for word in tap.dims[1:])
        dtype = np.dtype(tap.dtype)
        parts: list[NDArray[Any] | None] = []
        missing = False
        for batch, answer in zip(history.batches, self._answers, strict=True):
            count = len(batch.wanted) if of_wanted else batch.count
            found = answer.taps.get(key)
            shape = (count, tail[0], batch.columns) if tap.name in OVER_KEYS else (count, *tail)
            if found is not None and (found.shape != shape or found.dtype != dtype):
                self._report(malformed(tap, layer, batch, found, shape, history), batch)
                found = None
            if found is None and tap.name == "logits":
                found = answer.logits
            if found is None and not count:
                found = np.zeros(shape, dtype)
            missing |= found is None
            parts.append(found)
        if all(part is None or not len(part) for part in parts) or (missing and of_wanted):
            return None
        present = None
        if missing:
            present = np.repeat(np.array([part is not None for part in parts]), [batch.count for batch in history.batches])
        if tap.name in OVER_KEYS:
            return Stack(self._by_key(parts, tail[0]), present)
        if missing:
            parts = [np.zeros((b.count, *tail), dtype) if part is None else part for b, part in zip(history.batches, parts, strict=True)]
        return Stack(np.concatenate([part for part in parts if part is not None]), present)

    def _by_key(self, parts: list[NDArray[Any] | None], heads: int) -> NDArray[np.float32]:
        """[T, H, T]: column c of a row is the key keys[c] of its span; zero where a row has no column."""
        history = self._history
        values = np.zeros((len(history), heads, len(history)), np.float32)
        for batch, part in zip(history.batches, parts, strict=True):
            if part is not None:
                for span in batch.spans:
                    values[batch.start + span.rows[:, None], :, span.keys] = part[span.rows, :, : len(span.keys)].transpose(0, 2, 1)
        return values

    def _extent(self, word: str) -> int:
        """Elements along a dimension word of spec/taps.py; 0 for S, which differs by batch."""
        if word not in self._extents:
            total = 0
            for part in word.split("+"):
                product = 1
                for factor in part.split("*"):
                    product *= 0 if factor == "S" else int(getattr(self._config, factor))
                total += product
            self._extents[word] = total
        return self._extents[word]


def malformed(tap: Tap, layer: int, batch: Batch, found: NDArray[Any], shape: tuple[int, ...], history: History) -> Judgement:
    """Too many key columns are a matter of the cache's length (K2), anything else of the batch (C4)."""
    more = tap.name in OVER_KEYS and found.ndim == 3 and found.shape[2] > shape[2]
    text = f"{tap.name}, layer {layer}, of step {batch.step} is {found.dtype} {list(found.shape)}, but must be {tap.dtype} {list(shape)}"
    if more:
        text += f": a row has at most {batch.columns} keys, committed and pending ones"
    rule = "K2" if more else "C4"
    rung = history.rung_of(batch.start)
    return Judgement(Verdict.MALFORMED, rule, tap.op, tap.name, rung, layer, batch.step, share=np.inf, message=f"{text} ({rule})")
