"""One writer's rows on their way to Parquet: buffered, then a part per some thousand rows or some seconds.

A kill loses the rows of the last seconds, never a part, and never a finding (those go through `Store.report_finding`). Judgements and
coverage are summed per group before they are written: a session has hundreds of taps, and the page needs their maxima.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from reports.cells import AXES, Cell
from reports.errors import StoreError, from_os_error
from reports.parts import write_part, write_table
from reports.schema import CELLS, COVERAGE, FINDING_VERDICTS, JUDGEMENTS, MUTATION, TRIALS, Column, clean

ROWS_PER_PART = 2_000  # about 50 kB: small enough to lose, large enough to compress
SECONDS_PER_PART = 5.0  # what a kill may cost
COMPACT_AT = 32  # small parts of one table; keeps a long night at a few dozen files per writer
ROWS_PER_COMPACTED = 200_000  # larger parts are left alone, so that each row is rewritten a few times at most
FULL_ROWS_PER_GROUP = 50  # judgements in full per group: enough to see the pattern; the aggregate counts all

_JUDGEMENT_NAMES = frozenset(c.name for c in JUDGEMENTS)
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "trials": TRIALS,
    "judgements": JUDGEMENTS,
    "coverage": COVERAGE,
    "cells": CELLS,
    "mutation": MUTATION,
}
_SUMS = {"coverage": ("trials", "findings"), "cells": ("trees", "findings")}  # tables of sums, and their columns that add up
_Group = tuple[str, str, str, str, int, str, str]


@dataclass
class _Sum:
    judgements: int = 0
    trials: int = 0
    checked: int = 0
    share_max: float = 0.0
    share_sum: float = 0.0
    finite: int = 0
    worst_case: str = ""


@dataclass
class Writer:
    """Made by `Store.writer`; belongs to one process and one thread. Use as a context manager, or call `close`."""

    parts: Path
    run_id: str
    writer_id: str
    _rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    _sums: dict[_Group, _Sum] = field(default_factory=dict)
    _last_case: dict[_Group, str] = field(default_factory=dict)
    _in_full: dict[_Group, int] = field(default_factory=dict)
    _cells: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)
    _crossed: dict[tuple[str, Cell], list[int]] = field(default_factory=dict)
    _small: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    _token: str = field(default_factory=lambda: os.urandom(4).hex())  # a restarted writer never overwrites its predecessor's parts
    _part: int = 0
    _buffered: int = 0
    _flushed_at: float = field(default_factory=time.monotonic)
    _closed: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def add_trial(self, row: Mapping[str, Any]) -> None:
        """One case on one engine. Columns: reports.schema.TRIALS. Raises ValueError for a row that does not fit."""
        self._add("trials", TRIALS, row)

    def add_mutation(self, row: Mapping[str, Any]) -> None:
        """One mutant (or benign variant). Columns: reports.schema.MUTATION."""
        self._add("mutation", MUTATION, row)

    def add_coverage(self, row: Mapping[str, Any]) -> None:
        """`engine`, `region`, `value` and the `trials` (default 1) and `findings` to add to that cell; `trials=0` declares a cell."""
        given = clean("coverage", COVERAGE, {"trials": 1} | dict(row))
        cell = self._cells.setdefault((given["engine"], given["region"], given["value"]), [0, 0])
        cell[0] += given["trials"]
        cell[1] += given["findings"]
        self._tick()

    def add_cell(self, engine: str, cell: Cell, *, failing: bool = False) -> None:
        """One draft tree in a cell of the crossed coverage (reports/cells.py). Raises ValueError for a class that its axis does not have."""
        for (axis, classes), word in zip(AXES.items(), cell, strict=True):
            if word not in classes:
                raise ValueError(f"the axis {axis} of the coverage has no class {word!r}; it has {', '.join(classes)}")
        sums = self._crossed.setdefault((engine, cell), [0, 0])
        sums[0] += 1
        sums[1] += failing
        self._tick()

    def add_judgement(self, row: Mapping[str, Any]) -> None:
        """Fields of a Judgement, with `engine` and `case_id`. Judgements of one trial must come one after another."""
        if not row.keys() <= _JUDGEMENT_NAMES:
            raise ValueError(f"judgements has no column {sorted(row.keys() - _JUDGEMENT_NAMES)[0]!r}")
        try:
            verdict = row["verdict"]
            group = (
                row["engine"],
                row.get("rung", ""),
                row.get("op", ""),
                row.get("tap", ""),
                row.get("layer", -1),
                row.get("rule", ""),
                verdict,
            )
        except KeyError as missing:
            raise ValueError(f"a judgement needs its column {missing}") from None
        case_id, share = row.get("case_id", ""), float(row.get("share", 0.0))
        sums = self._sums.setdefault(group, _Sum())
        sums.judgements += 1
        sums.checked += row.get("checked", 0)
        if self._last_case.get(group) != case_id:
            self._last_case[group] = case_id
            sums.trials += 1
        if math.isfinite(share):
            sums.share_sum += share
            sums.finite += 1
        if not sums.worst_case or share > sums.share_max or (math.isnan(share) and not math.isnan(sums.share_max)):
            sums.share_max, sums.worst_case = (math.inf if math.isnan(share) else share), case_id
        if verdict in FINDING_VERDICTS and self._in_full.get(group, 0) < FULL_ROWS_PER_GROUP:
            self._in_full[group] = self._in_full.get(group, 0) + 1
            self._add("judgements", JUDGEMENTS, {"judgements": 1, "trials": 1, "share_max": share, **row, "form": "finding"})
        else:
            self._tick()

    def flush(self) -> None:
        """Everything added so far is in complete parts when this returns.

        Raises StoreError (disk full, not writable); the rows stay buffered, so that a later flush can still write them.
        """
        self._drain_groups()
        for table, rows in self._rows.items():
            if rows:
                name = self._name()
                try:
                    write_part(self.parts / table, name, table, rows)
                except OSError as problem:
                    raise from_os_error(self.parts / table, problem) from None
                rows.clear()
                self._small[table].append(name)
                if len(self._small[table]) >= COMPACT_AT:
                    self._compact(table)
        self._buffered = 0
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Flush, and leave one part per table where there were many. Idempotent."""
        if self._closed:
            return
        self.flush()
        for table in _COLUMNS:
            self._compact(table)
        self._closed = True

    def _add(self, table: str, columns: tuple[Column, ...], row: Mapping[str, Any]) -> None:
        if self._closed:
            raise StoreError(self.parts, f"writer {self.writer_id} is closed", "an open writer", "ask the store for another")
        identity = {"run_id": self.run_id, "writer": self.writer_id}
        self._rows[table].append(clean(table, columns, {**row, **identity, "time": time.time()}))
        self._tick()

    def _tick(self) -> None:
        self._buffered += 1
        if (
            self._buffered >= ROWS_PER_PART * 4
            or time.monotonic() - self._flushed_at > SECONDS_PER_PART
            or len(self._rows["trials"]) >= ROWS_PER_PART
            or len(self._rows["judgements"]) >= ROWS_PER_PART
        ):
            self.flush()

    def _drain_groups(self) -> None:
        identity = {"run_id": self.run_id, "writer": self.writer_id}
        for (engine, rung, op, tap, layer, rule, verdict), sums in self._sums.items():
            row = {
                "engine": engine,
                "rung": rung,
                "op": op,
                "tap": tap,
                "layer": layer,
                "rule": rule,
                "verdict": verdict,
                "form": "aggregate",
                "judgements": sums.judgements,
                "trials": sums.trials,
                "checked": sums.checked,
                "share_max": sums.share_max,
                "share_mean": sums.share_sum / sums.finite if sums.finite else 0.0,
                "case_id": sums.worst_case,
                "token": -1,
                "time": time.time(),
            }
            self._rows["judgements"].append(clean("judgements", JUDGEMENTS, row | identity))
        self._sums.clear()
        for (engine, region, value), (trials, findings) in self._cells.items():
            row = {"engine": engine, "region": region, "value": value, "trials": trials, "findings": findings}
            self._rows["coverage"].append(clean("coverage", COVERAGE, row | identity))
        self._cells.clear()
        for (engine, cell), (trees, findings) in self._crossed.items():
            row = dict(zip(AXES, cell, strict=True)) | {"engine": engine, "trees": trees, "findings": findings}
            self._rows["cells"].append(clean("cells", CELLS, row | identity))
        self._crossed.clear()

    def _name(self) -> str:
        self._part += 1
        safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in f"{self.run_id}-{self.writer_id}")
        return f"{safe}-{self._token}-{self._part:06d}.parquet"

    def _compact(self, table: str) -> None:
        """This writer's small parts as one. A crash in between leaves both; readers skip what the new part says it replaces."""
        names = self._small[table]
        if len(names) < 2:
            return
        folder = self.parts / table
        try:
            data = [pq.read_table(folder / name, partitioning=None) for name in names]
            merged = _summed(pa.concat_tables(data), table)
            name = self._name()
            write_table(folder, name, table, merged, replaces=names)
            for old in names:
                (folder / old).unlink(missing_ok=True)
        except OSError as problem:
            raise from_os_error(folder, problem) from None
        self._small[table] = [name] if len(merged) < ROWS_PER_COMPACTED else []


def _summed(data: pa.Table, table: str) -> pa.Table:
    """Rows of a table of sums that say the same of one cell become one row: a night touches the same cells in each of its parts."""
    if table not in _SUMS:
        return data
    keys = [name for name in data.column_names if name not in _SUMS[table]]
    sums = data.group_by(keys, use_threads=False).aggregate([(name, "sum") for name in _SUMS[table]])
    return sums.rename_columns([name.removesuffix("_sum") for name in sums.column_names]).select(data.column_names)
