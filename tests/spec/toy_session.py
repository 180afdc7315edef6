"""A session that is right by inspection: no model, the next-token logits are a hash of the history.

It keeps committed tokens and pending rows per sequence, and refuses what the seam forbids: a position that is not P + depth, a
parent of another sequence, rows on top of uncommitted ones, a path that does not ascend. Logits are small integers, so that
equal maxima are common (A1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec.engine import Drafter, Float, Generation, Int, Limits, Rows, TapSink


class ToySession:
    def __init__(self, seed: int, vocab: int, levels: int = 16) -> None:
        self.seed, self.vocab, self.levels = seed, vocab, levels
        self.committed: dict[int, list[int]] = {}
        self.pending: dict[int, list[int]] = {}
        self.batches: list[Rows] = []

    def logits_after(self, history: Sequence[int]) -> Float:
        key = f"{self.seed}/{','.join(map(str, history))}".encode()
        draws = hashlib.shake_128(key).digest(self.vocab)
        return (np.frombuffer(draws, np.uint8) % self.levels).astype(np.float32)

    def forward(self, rows: Rows, want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> Float:
        self.batches.append(rows)
        histories: list[list[int]] = []
        for i, (sequence, token, position, parent) in enumerate(
            zip(rows.sequence.tolist(), rows.token.tolist(), rows.position.tolist(), rows.parent.tolist(), strict=True)
        ):
            assert -1 <= parent < i
            assert parent == -1 or rows.sequence[parent] == sequence
            histories.append([*(histories[parent] if parent >= 0 else self.committed.setdefault(sequence, [])), token])
            assert position == len(histories[-1]) - 1
        for sequence in set(rows.sequence.tolist()):
            assert not self.pending.get(sequence)
            self.pending[sequence] = rows.token[rows.sequence == sequence].tolist()
        chosen = [self.logits_after(history) for history, wanted in zip(histories, want_logits.tolist(), strict=True) if wanted]
        return np.array(chosen, np.float32).reshape(-1, self.vocab)

    def commit(self, sequence: int, path: Int) -> None:
        indices = path.tolist()
        assert indices == sorted(set(indices))
        self.committed[sequence] += [self.pending[sequence][index] for index in indices]
        self.pending[sequence] = []

    def cache_rows(self, sequence: int, layer: int) -> Float:
        return np.array(self.committed[sequence], np.float32)[:, None]

    def evict(self, sequence: int) -> None:
        del self.committed[sequence], self.pending[sequence]

    def fork(self, source: int, target: int) -> None:
        self.committed[target] = list(self.committed[source])

    def generate(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits) -> list[Generation]:
        raise NotImplementedError

    def close(self) -> None:
        self.committed.clear()
