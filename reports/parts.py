"""Parquet parts: complete or not there.

A part is written under a temporary name, synced, then renamed, so a reader never meets half a part under its final name. Each file has one
writer. A compacted part names in its metadata the parts that it replaces; a reader skips those, so a crash between writing the new part and
deleting the old ones doubles nothing.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from reports.schema import SCHEMA, TABLES, Column, empty_value

TEMPORARY = ".tmp-"
_ARROW = {"string": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
_META_TABLE, _META_SCHEMA, _META_REPLACES = b"paritree.table", b"paritree.schema", b"paritree.replaces"


@dataclass
class Reading:
    """`ignored`: (file name, reason) of what lies in the folder but is not a complete part of this table."""

    table: pa.Table
    ignored: list[tuple[str, str]] = field(default_factory=list)


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    return pa.schema([(column.name, _ARROW[column.type]) for column in columns])


def write_part(folder: Path, name: str, table: str, rows: list[dict[str, Any]]) -> Path:
    """Durable when it returns. Raises OSError."""
    schema = arrow_schema(TABLES[table])
    return write_table(folder, name, table, pa.Table.from_pylist(rows, schema=schema))


def write_table(folder: Path, name: str, table: str, data: pa.Table, replaces: Sequence[str] = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    meta = {_META_TABLE: table.encode(), _META_SCHEMA: str(SCHEMA).encode(), _META_REPLACES: json.dumps(list(replaces)).encode()}
    temporary = folder / f"{TEMPORARY}{socket.gethostname()}-{os.getpid()}-{name}"
    final = folder / name
    try:
        with open(temporary, "wb") as stream:
            pq.write_table(data.replace_schema_metadata(meta), stream, compression="zstd")
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(temporary, final)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    return final


def sync_folder(folder: Path) -> None:
    """Makes a rename survive a power loss, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_parts(folder: Path, table: str) -> Reading:
    """All complete parts of `table`, in name order. Torn and foreign files are left out and named, never an error."""
    for _ in range(3):
        try:
            return _read_once(folder, table)
        except FileNotFoundError:  # a writer compacted between the listing and the reading: list again
            continue
    return _read_once(folder, table)


def _read_once(folder: Path, table: str) -> Reading:
    schema = arrow_schema(TABLES[table])
    found: dict[str, pa.Table] = {}
    replaced: set[str] = set()
    ignored: list[tuple[str, str]] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(TEMPORARY):
            ignored.append((path.name, "temporary: being written, or its writer was killed (sweep removes it)"))
        elif path.suffix != ".parquet" or not path.is_file():
            ignored.append((path.name, "foreign: not a Parquet part"))
        else:
            try:
                data = pq.read_table(path, partitioning=None)
                meta = data.schema.metadata or {}
                if meta.get(_META_TABLE) != table.encode():
                    ignored.append((path.name, f"foreign: not a part of {table}"))
                    continue
                if int(meta[_META_SCHEMA]) > SCHEMA:
                    ignored.append((path.name, f"schema {meta[_META_SCHEMA].decode()}, this paritree reads up to {SCHEMA}"))
                    continue
                found[path.name] = conform(data, TABLES[table])
                replaced |= set(json.loads(meta[_META_REPLACES]))
            except FileNotFoundError:
                raise
            except (pa.ArrowException, OSError, ValueError, KeyError) as problem:
                ignored.append((path.name, f"torn: {str(problem).splitlines()[0] if str(problem) else type(problem).__name__}"))
    kept = [data for name, data in found.items() if name not in replaced]
    return Reading(pa.concat_tables(kept) if kept else schema.empty_table(), ignored)


def conform(data: pa.Table, columns: Sequence[Column]) -> pa.Table:
    """Columns that an older writer did not know get their empty value; raises ArrowInvalid for a wrong type."""
    arrays = []
    for column in columns:
        kind = _ARROW[column.type]
        if column.name in data.column_names:
            arrays.append(data.column(column.name).cast(kind))
        else:
            arrays.append(pa.array([empty_value(column)] * len(data), kind))
    return pa.Table.from_arrays(arrays, schema=arrow_schema(columns))
