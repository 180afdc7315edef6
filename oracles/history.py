"""What a script means for the cache: replayed without a model, for the steps that an engine answered.

Every row of every batch gets a global number, in the order of the script. A row sees the committed rows of its sequence and its
ancestors-or-self in the batch (C3); a commit keeps rows (K1), drops the others (K3), and changes nothing before (K7). So the
whole session is one set of rows with one visibility matrix, and can be judged in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spec.script import CacheRows, Commit, Evict, Fork, Forward, Step

RUNG_OF_PHASE = {"prefill": "prefill", "decode": "decode", "tree": "tree verify"}
Index = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Span:
    """The rows of one sequence in one batch, and the key columns of their `scores` and `probs`: committed, then pending."""

    sequence: int
    rows: Index  # in the batch
    committed: Index  # global rows
    keys: Index  # global rows: column c of these rows is keys[c]


@dataclass(frozen=True, eq=False)
class Batch:
    """One Forward step. Its rows have the global numbers start .. start + len."""

    step: int
    start: int
    count: int
    wanted: Index  # batch rows with logits
    wanted_start: int  # number of the first of them among all rows with logits
    spans: tuple[Span, ...]
    columns: int  # S, the largest number of keys


@dataclass(eq=False)
class History:
    """T = all rows, in script order."""

    token: NDArray[np.int64]  # [T]
    position: NDArray[np.int64]  # [T]
    sequence: NDArray[np.int64]  # [T]
    parent: NDArray[np.int64]  # [T], global, -1: the committed prefix
    step: NDArray[np.int64]  # [T]
    row: NDArray[np.int64]  # [T], row of its batch
    batch: NDArray[np.int64]  # [T], index into batches
    visible: NDArray[np.bool_]  # [T, T]
    wanted: Index  # global rows with logits
    rungs: dict[str, Index]  # rung -> global rows
    batches: list[Batch] = field(default_factory=list)
    cache_reads: dict[int, Index] = field(default_factory=dict)  # step -> the committed rows that CacheRows must return
    commits: list[tuple[int, int, Index, Index]] = field(default_factory=list)  # (step, sequence, pending rows, kept rows), global

    def __len__(self) -> int:
        return len(self.token)

    def rung_of(self, row: int) -> str:
        """The rung of a global row."""
        return next(rung for rung, rows in self.rungs.items() if row in rows)

    def span_of(self, row: int) -> Span:
        """The span of a global row."""
        batch = self.batches[int(self.batch[row])]
        return next(span for span in batch.spans if span.sequence == self.sequence[row])

    def column_of(self, row: int, key: int) -> int:
        """Column of global key `key` in the taps of global row `row`, -1 if it has none."""
        at = np.flatnonzero(self.span_of(row).keys == key)
        return int(at[0]) if len(at) else -1


def replay(steps: list[tuple[int, Step]]) -> History:
    """`steps`: (number, step) of the script that were answered. Raises ValueError for a commit or a fork of what does not exist: a
    script is planned by us, so this is our bug."""
    forwards = [(number, step) for number, step in steps if isinstance(step, Forward)]
    total = sum(len(step.rows) for _, step in forwards)

    def joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int64]:
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    counts = [len(step.rows) for _, step in forwards]
    history = History(
        token=joined([step.rows.token for _, step in forwards]),
        position=joined([step.rows.position for _, step in forwards]),
        sequence=joined([step.rows.sequence for _, step in forwards]),
        parent=np.full(total, -1, np.int64),
        step=np.repeat(np.array([number for number, _ in forwards], np.int64), counts),
        row=joined([np.arange(count, dtype=np.int32) for count in counts]),
        batch=np.repeat(np.arange(len(forwards)), counts),
        visible=np.zeros((total, total), np.bool_),
        wanted=np.zeros(0, np.intp),
        rungs={},
    )
    committed: dict[int, list[int]] = {}
    pending: dict[int, list[int]] = {}
    rungs: dict[str, list[NDArray[np.int64]]] = {}
    start = wanted_start = 0
    for number, step in steps:
        if isinstance(step, Forward):
            batch = _add_batch(history, number, step, start, wanted_start, committed, pending)
            rungs.setdefault(RUNG_OF_PHASE[step.phase], []).append(np.arange(start, start + batch.count))
            history.batches.append(batch)
            start += batch.count
            wanted_start += len(batch.wanted)
        elif isinstance(step, Commit):
            rows = pending.pop(step.sequence)
            kept = [rows[index] for index in step.path.tolist()]
            committed[step.sequence].extend(kept)
            history.commits.append((number, step.sequence, np.array(rows, np.intp), np.array(kept, np.intp)))
        elif isinstance(step, CacheRows):
            history.cache_reads[number] = np.array(committed[step.sequence], np.intp)
        elif isinstance(step, Evict):
            committed.pop(step.sequence)
            pending.pop(step.sequence, None)
        elif isinstance(step, Fork):
            committed[step.target] = list(committed[step.source])
    history.rungs = {rung: np.concatenate(parts) for rung, parts in rungs.items()}
    history.wanted = np.concatenate([batch.start + batch.wanted for batch in history.batches]) if history.batches else history.wanted
    return history


def _add_batch(
    history: History,
    number: int,
    step: Forward,
    start: int,
    wanted_start: int,
    committed: dict[int, list[int]],
    pending: dict[int, list[int]],
) -> Batch:
    visible = history.visible
    spans = []
    columns = 0
    for sequence in dict.fromkeys(step.rows.sequence.tolist()):
        rows = np.flatnonzero(step.rows.sequence == sequence)
        before = np.array(committed.setdefault(sequence, []), np.intp)
        own = start + rows
        pending[sequence] = own.tolist()  # a new batch drops rows that are still pending
        spans.append(Span(sequence, rows, before, np.concatenate([before, own])))
        columns = max(columns, len(before) + len(rows))
        visible[np.ix_(own, before)] = True
    for row, parent in enumerate(step.rows.parent.tolist()):
        own_row = start + row
        if parent >= 0:
            history.parent[own_row] = start + parent
            visible[own_row] = visible[start + parent]
        visible[own_row, own_row] = True
    return Batch(number, start, len(step.rows), np.flatnonzero(step.want_logits), wanted_start, tuple(spans), columns)
