"""The bookkeeping of a script: who sees whom, which rows a commit keeps, which columns belong to which keys."""

from __future__ import annotations

import numpy as np

from oracles.history import replay
from spec.engine import Rows
from spec.script import CacheRows, Commit, Evict, Fork, Forward, Step


def forward(sequence: list[int], position: list[int], parent: list[int], phase: str = "prefill", want: list[int] | None = None) -> Forward:
    columns = [np.array(values, np.int32) for values in (sequence, list(range(len(sequence))), position, parent)]
    wanted = np.isin(np.arange(len(sequence)), range(len(sequence)) if want is None else want)
    return Forward(Rows(columns[0], columns[1], columns[2], columns[3]), wanted, phase)


def path(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


STEPS: list[Step] = [
    forward([0, 0, 1], [0, 1, 0], [-1, 0, -1], want=[1]),  # rows 0, 1 of sequence 0, row 2 of sequence 1
    Commit(0, path(0, 1)),
    Commit(1, path(0)),
    forward([0, 0, 1, 0], [2, 3, 1, 3], [-1, 0, -1, 0], "tree"),  # rows 3, 4, 6 are a tree of sequence 0; 5 is sequence 1
    Commit(0, path(0, 2)),  # keeps 3 and 6
    CacheRows(0),
    Fork(0, 2),
    forward([2, 0], [4, 4], [-1, -1], "decode"),  # rows 7 and 8
    Evict(0),
    forward([0], [0], [-1]),  # row 9: sequence 0 again, from nothing
]


def history() -> tuple[list[tuple[int, Step]], object]:
    numbered = list(enumerate(STEPS))
    return numbered, replay(numbered)


def sees(row: int) -> list[int]:
    return np.flatnonzero(replay(list(enumerate(STEPS))).visible[row]).tolist()


def test_a_row_sees_the_prefix_and_its_ancestors_and_itself() -> None:
    assert sees(1) == [0, 1]
    assert sees(2) == [2]
    assert sees(4) == [0, 1, 3, 4]
    assert sees(6) == [0, 1, 3, 6]  # not its sibling, row 4
    assert sees(5) == [2, 5]


def test_a_commit_keeps_its_path_and_a_fork_shares_it() -> None:
    told = replay(list(enumerate(STEPS)))
    assert told.cache_reads == {5: told.cache_reads[5]} and told.cache_reads[5].tolist() == [0, 1, 3, 6]
    assert sees(7) == [0, 1, 3, 6, 7]
    assert sees(8) == [0, 1, 3, 6, 8]


def test_an_evicted_sequence_starts_from_nothing() -> None:
    assert sees(9) == [9]


def test_columns_are_the_committed_rows_and_then_the_pending_ones() -> None:
    told = replay(list(enumerate(STEPS)))
    assert told.span_of(6).keys.tolist() == [0, 1, 3, 4, 6]
    assert told.column_of(6, 6) == 4 and told.column_of(6, 2) == -1
    assert told.batches[1].columns == 5


def test_rows_know_their_step_their_place_and_their_rung() -> None:
    told = replay(list(enumerate(STEPS)))
    assert told.step.tolist() == [0, 0, 0, 3, 3, 3, 3, 7, 7, 9]
    assert told.row.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 0]
    assert told.parent.tolist() == [-1, 0, -1, -1, 3, -1, 3, -1, -1, -1]
    assert {rung: rows.tolist() for rung, rows in told.rungs.items()} == {
        "prefill": [0, 1, 2, 9],
        "tree verify": [3, 4, 5, 6],
        "decode": [7, 8],
    }
    assert told.wanted.tolist() == [1, 3, 4, 5, 6, 7, 8, 9]
    assert told.batches[1].wanted_start == 1


def test_a_batch_drops_rows_that_were_still_pending() -> None:
    steps: list[Step] = [forward([0, 0], [0, 1], [-1, 0]), forward([0], [0], [-1]), Commit(0, path(0)), CacheRows(0)]
    assert replay(list(enumerate(steps))).cache_reads[3].tolist() == [2]
