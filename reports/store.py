"""The store: a folder that a campaign writes, and that pages, summaries and pandas read. Nothing in it is ever executed.

    campaign.sqlite          state: runs, findings (one row per fingerprint, with its life), sightings, events
    parts/<table>/*.parquet  append-only rows: runs, trials, judgements, coverage, cells, mutation
    findings/<id>/           capsules, written by campaigns
    ledger.toml              the user's decisions about findings; only read

Columns and units: reports/schema.py and docs/store.md. A finding is durable when `report_finding` returns.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from reports.errors import StoreError, from_os_error, from_sqlite_error
from reports.life import Sighting, status_after
from reports.parts import TEMPORARY, read_parts, sync_folder, write_part
from reports.schema import FINDINGS, JUDGE_PURPOSES, RUNS, SCHEMA, TABLES, Column, clean, empty_value, from_json
from reports.writer import Writer

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

DATABASE = "campaign.sqlite"
LEDGER = "ledger.toml"
BUSY_MS = 30_000  # a shard on a slow disk syncs in seconds; longer means a stuck process
STALE_TEMPORARY_S = 3_600.0  # a part is written in well under a second; an hour covers a suspended machine
# No declared type for floats: SQLite has neither NaN nor -0.0, so these two are stored as words, which a REAL column would convert.
_SQL = {"string": "TEXT", "int": "INTEGER", "float": "", "bool": "INTEGER"}


def fingerprint(finding: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """(engine, verdict, op or rule, output, rung): findings with the same one are one finding."""
    guilty = finding.get("op") or finding.get("rule") or ""
    return (str(finding["engine"]), str(finding["verdict"]), str(guilty), str(finding.get("output") or ""), str(finding.get("rung") or ""))


def finding_id(finding: Mapping[str, Any]) -> str:
    """F- and eight hexadecimal digits: the same fingerprint has the same id on each machine, so links stay valid."""
    return "F-" + hashlib.blake2b("\x1f".join(fingerprint(finding)).encode("utf-8", "backslashreplace"), digest_size=4).hexdigest()


class Store:
    """Open with `create_or_open`; close it, or use it as a context manager. Safe to share between threads and after fork."""

    def __init__(self, path: Path, *, readonly: bool) -> None:
        self.path, self.readonly = path, readonly
        self.ignored: dict[str, list[tuple[str, str]]] = {}  # table -> (file, reason), as of the last `table` call
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None
        self._owner = 0
        self._copy: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def create_or_open(cls, path: str | os.PathLike[str], readonly: bool = False) -> Store:
        """Raises StoreError: not a store, not writable, disk full, a newer schema, a damaged database."""
        store = cls(Path(path), readonly=readonly)
        root = store.path
        if root.exists() and not root.is_dir():
            raise StoreError(root, "a file", "a folder", "name the folder of the store")
        is_new = not (root / DATABASE).exists()
        if is_new and readonly:
            found = "no such folder" if not root.exists() else f"a folder without {DATABASE}"
            raise StoreError(root, found, "a store", "name the folder that a campaign wrote")
        if is_new and root.exists() and any(p.name not in (LEDGER, "findings", "parts") for p in root.iterdir()):
            raise StoreError(
                root, f"a folder with other files and without {DATABASE}", "a store or an empty folder", "give another --store"
            )
        try:
            if not readonly:
                for folder in [root / "findings", *(root / "parts" / table for table in TABLES)]:
                    folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise from_os_error(root, problem) from None
        with store._errors():
            store._check_schema()
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._database is not None and self._owner == os.getpid():
                self._database.close()
            self._database = None
            if self._copy is not None:
                self._copy.cleanup()
                self._copy = None

    # ---- runs ----------------------------------------------------------------------------------------------------------------------

    def start_run(self, run: Mapping[str, Any]) -> str:
        """Columns: reports.schema.RUNS; all are optional. Returns the run_id (drawn where not given)."""
        started = float(run.get("started") or time.time())
        drawn = time.strftime("%Y%m%d-%H%M%S-", time.gmtime(started)) + os.urandom(3).hex()
        run_id = str(run.get("run_id") or drawn)
        row = clean("runs", RUNS, {"campaign": run_id, **run, "run_id": run_id, "started": started})
        with self.transaction() as database:
            insert(database, "runs", row)
            self._age(database, row)
            _event(database, run_id, "run started", "", row["command"])
        self._run_part(row, "start")
        return run_id

    def add_engine(self, run_id: str, engine: Mapping[str, Any]) -> None:
        """An engine of the run, as it describes itself: {"name", "version", "profile", "description", "spec"}; may be told again.

        A campaign knows the names of its engines only once they are loaded, so `start_run` may list {"spec": "./engine.so"} alone; the same
        spec here replaces that entry. What was new for an earlier campaign of this engine is known from here on.
        """
        with self.transaction() as database:
            run = self._run(database, run_id)
            listed = from_json(run["engines"])
            others = [e for e in listed if not _is_same_engine(e, engine)] if isinstance(listed, list) else []
            run = clean("runs", RUNS, run | {"engines": [*others, dict(engine)]})
            insert(database, "runs", run)
            self._age(database, run | {"engines": json.dumps([{"name": str(engine["name"])}])})
        self._run_part(run, "start")

    def finish_run(self, run_id: str, result: Mapping[str, Any]) -> None:
        """Completes the run's row with `result` (columns of RUNS); `finished` and `duration_s` are filled in where not given."""
        with self.transaction() as database:
            row = dict(self._run(database, run_id))
            finished = float(result.get("finished") or time.time())
            row |= clean("runs", RUNS, {**result, "finished": finished}, partial=True)
            row["run_id"] = run_id
            if not result.get("duration_s"):
                row["duration_s"] = max(0.0, finished - row["started"])
            if "findings" not in result:
                count = "SELECT COUNT(*) FROM sightings WHERE run_id = ? AND (hits > 0 OR reproduced > 0)"
                row["findings"] = int(database.execute(count, (run_id,)).fetchone()[0])
            insert(database, "runs", row)
            _event(database, run_id, "run finished", "", row["stopped"])
        self._run_part(row, "finish")

    def runs(self) -> list[dict[str, Any]]:
        """Oldest first."""
        return self._rows("SELECT * FROM runs ORDER BY started, run_id", RUNS)

    def writer(self, run_id: str, writer_id: str) -> Writer:
        """A writer of bulk rows; one per process, none shared."""
        self._refuse_readonly()
        return Writer(self.path / "parts", run_id, writer_id)

    # ---- findings ------------------------------------------------------------------------------------------------------------------

    def report_finding(self, finding: Mapping[str, Any]) -> tuple[str, str]:
        """(finding_id, status). Durable before it returns: a commit that is synced to the disk.

        Needs `run_id`, `engine`, `verdict`, `case`; other columns: reports.schema.FINDINGS. One row per fingerprint: reporting it again
        adds `hits` (default 1). What the row says of its case is replaced only where the news is better: a minimal case in the place of
        one that is not, or another case of a finding that is reopened or changed. The same case again only adds facts.
        """
        run_id = str(finding.get("run_id") or "")
        given = {k: v for k, v in finding.items() if k not in ("run_id", "finding_id", "status")}
        row = clean("findings", FINDINGS, given)
        name = row["finding_id"] = finding_id(row)
        row["hits"] = max(1, row["hits"])
        now = time.time()
        with self.transaction() as database:
            self._run(database, run_id)
            old = one(database, "SELECT * FROM findings WHERE finding_id = ?", (name,), FINDINGS)
            _sight(database, name, run_id, hits=row["hits"])
            status = status_of(database, name)
            if old is None:
                stored = row | {"first_run": run_id, "first_seen": row["first_seen"] or now}
            else:
                better = (row["minimal"] and not old["minimal"]) or (status != old["status"] and status in ("reopened", "changed"))
                told = {k: v for k, v in row.items() if v != _EMPTIES[k]} if row["case_id"] == old["case_id"] else {}
                stored = old | (row if better else told)
                stored["minimal"] = row["minimal"] if better else old["minimal"] or row["minimal"]
                stored |= {k: old[k] for k in ("first_run", "first_seen")}
                stored["engine_version"] = row["engine_version"] or old["engine_version"]
            stored |= {"status": status, "last_run": run_id, "last_seen": row["last_seen"] or now, "hits": _hits(database, name)}
            insert(database, "findings", stored)
            if old is None or old["status"] != status:
                _event(database, run_id, status, name, stored["message"])
        return name, status

    def update_finding(self, name: str, changes: Mapping[str, Any]) -> None:
        """Sets columns of a finding (a smaller case, its capsule, bisect, tree, trace, ...); durable. Fingerprint and life stay."""
        fixed = {"finding_id", "engine", "verdict", "op", "output", "rung", "status", "first_run", "first_seen", "hits"}
        if held := fixed & changes.keys():
            raise ValueError(f"{sorted(held)[0]} of a finding cannot be changed")
        row = clean("findings", FINDINGS, changes, partial=True)
        with self.transaction() as database:
            old = one(database, "SELECT * FROM findings WHERE finding_id = ?", (name,), FINDINGS)
            if old is None:
                raise StoreError(
                    self.path, f"no finding {name}", "the id of a finding", "see the list in the report, or `Store.findings()`"
                )
            if not old["op"] and row.get("rule", old["rule"]) != old["rule"]:
                raise ValueError("rule of a finding without an op belongs to its fingerprint and cannot be changed")
            insert(database, "findings", old | row)

    def record_replay(self, name: str, run_id: str, reproduced: int, attempts: int) -> str:
        """The stored case of a finding failed again in `reproduced` of `attempts` replays. Returns the status."""
        if not 0 <= reproduced <= attempts:
            raise ValueError(f"reproduced is {reproduced}, but should be in 0..{attempts}")
        with self.transaction() as database:
            old = one(database, "SELECT * FROM findings WHERE finding_id = ?", (name,), FINDINGS)
            if old is None:
                raise StoreError(
                    self.path, f"no finding {name}", "the id of a finding", "see the list in the report, or `Store.findings()`"
                )
            self._run(database, run_id)
            _sight(database, name, run_id, reproduced=reproduced, attempts=attempts)
            status = status_of(database, name)
            new = old | {"status": status, "reproduced": reproduced, "attempts": attempts}
            if reproduced:
                new |= {"last_run": run_id, "last_seen": time.time()}
            insert(database, "findings", new)
            if old["status"] != status:
                _event(database, run_id, status, name, f"{reproduced} of {attempts} replays failed again")
        return status

    def findings(self) -> list[dict[str, Any]]:
        """One dict per fingerprint, columns of reports.schema.FINDINGS; first seen first."""
        return self._rows("SELECT * FROM findings ORDER BY first_seen, finding_id", FINDINGS)

    def sightings(self) -> list[dict[str, Any]]:
        """finding_id, run_id, hits, reproduced, attempts: what each run saw of each finding."""
        with self._errors(), self._lock:
            cursor = self._connection().execute("SELECT * FROM sightings ORDER BY run_id, finding_id")
            return [dict(row) for row in cursor]

    def events(self) -> list[dict[str, Any]]:
        """time, run_id, kind, finding_id, text; oldest first."""
        with self._errors(), self._lock:
            return [dict(row) for row in self._connection().execute("SELECT time, run_id, kind, finding_id, text FROM events ORDER BY id")]

    def capsule_folder(self, name: str) -> Path:
        """Where the capsule of a finding lies (or will)."""
        return self.path / "findings" / name

    # ---- reading -------------------------------------------------------------------------------------------------------------------

    def arrow(self, name: str) -> pa.Table:
        """All complete parts of a table. Torn and foreign files are left out and named in `self.ignored[name]`."""
        if name not in TABLES:
            raise ValueError(f"no table {name!r}; there are {', '.join(TABLES)}")
        try:
            reading = read_parts(self.path / "parts" / name, name)
        except OSError as problem:
            raise from_os_error(self.path / "parts" / name, problem) from None
        self.ignored[name] = reading.ignored
        return reading.table

    def table(self, name: str) -> pd.DataFrame:
        """The same as a DataFrame; of `runs` the newest row per run."""
        frame: pd.DataFrame = self.arrow(name).to_pandas()
        if name == "runs":
            frame = frame.sort_values(["started", "finished"]).drop_duplicates("run_id", keep="last").reset_index(drop=True)
        return frame

    def ledger(self) -> dict[str, dict[str, Any]]:
        """finding_id -> the user's decision: {"state": accepted | duplicate | wontfix, "of", "until", "note"}. Empty without a file."""
        path = self.path / LEDGER
        if not path.exists():
            return {}
        try:
            body = tomllib.loads(path.read_text("utf-8"))
        except OSError as problem:
            raise from_os_error(path, problem) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
            raise StoreError(path, f"broken TOML ({problem})", "one [F-...] table per finding", "repair that line") from None
        for name, entry in body.items():
            if not isinstance(entry, dict) or entry.get("state") not in ("accepted", "duplicate", "wontfix"):
                expected = 'a table with state = "accepted", "duplicate" or "wontfix"'
                raise StoreError(path, f"[{name}] is {entry!r:.60}", expected, "see docs/store.md")
        return body

    def sweep(self) -> list[Path]:
        """Removes temporary files whose writer is dead (or that are older than an hour, from another machine). Returns them."""
        self._refuse_readonly()
        removed = []
        for path in sorted((self.path / "parts").glob(f"*/{TEMPORARY}*")):
            try:
                if _is_stray(path):
                    path.unlink(missing_ok=True)
                    removed.append(path)
            except OSError as problem:
                raise from_os_error(path, problem) from None
        return removed

    # ---- SQLite --------------------------------------------------------------------------------------------------------------------

    def _refuse_readonly(self) -> None:
        if self.readonly:
            raise StoreError(self.path, "opened read-only", "a writable store", "open it without readonly=True")

    def _connection(self) -> sqlite3.Connection:
        if self._database is not None and self._owner != os.getpid():
            _OF_PARENTS.append(self._database)
            self._database = None
        if self._database is None:
            self._database = self._open_readonly() if self.readonly else self._open_writable()
            self._database.row_factory = sqlite3.Row
            self._owner = os.getpid()
        return self._database

    def _open_writable(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path / DATABASE, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
        database.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
        return database

    def _open_readonly(self) -> sqlite3.Connection:
        """A WAL database in a folder that cannot be written is read from a copy, so that its newest commits are seen too."""
        source = self.path / DATABASE
        if os.access(self.path, os.W_OK) and os.access(source, os.W_OK):
            return sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_MS / 1000, check_same_thread=False)
        self._copy = tempfile.TemporaryDirectory(prefix="paritree-store-")
        for name in (DATABASE, DATABASE + "-wal"):
            if (self.path / name).exists():
                shutil.copyfile(self.path / name, Path(self._copy.name) / name)
        return sqlite3.connect(Path(self._copy.name) / DATABASE, check_same_thread=False)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            raise from_sqlite_error(self.path / DATABASE, problem) from None
        except OSError as problem:
            raise from_os_error(self.path, problem) from None

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction; all or nothing."""
        self._refuse_readonly()
        with self._errors(), self._lock:
            database = self._connection()
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")

    def _check_schema(self) -> None:
        database = self._connection()
        has_meta = database.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'meta'").fetchone()
        if not has_meta:
            if self.readonly or database.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise StoreError(self.path / DATABASE, "a database of something else", "a paritree store", "give another --store")
            self._create()
        (found,) = database.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() or ("0",)
        if int(found) > SCHEMA:
            expected = f"at most {SCHEMA}"
            raise StoreError(
                self.path, f"a store of schema {found}", expected, "update paritree, or read it with the version that wrote it"
            )

    def _create(self) -> None:
        with self.transaction() as database:
            database.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
            database.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA),))
            for table, columns in (("runs", RUNS), ("findings", FINDINGS)):
                body = ", ".join(f'"{c.name}" {_SQL[c.type]}{" PRIMARY KEY" if i == 0 else ""}' for i, c in enumerate(columns))
                database.execute(f"CREATE TABLE IF NOT EXISTS {table} ({body})")
            database.execute(
                "CREATE TABLE IF NOT EXISTS sightings (finding_id TEXT, run_id TEXT, hits INTEGER DEFAULT 0, reproduced INTEGER DEFAULT 0,"
                " attempts INTEGER DEFAULT 0, PRIMARY KEY (finding_id, run_id))"
            )
            database.execute(
                "CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, time REAL, run_id TEXT, kind TEXT, finding_id TEXT, text TEXT)"
            )
        sync_folder(self.path)

    def _rows(self, query: str, columns: tuple[Column, ...]) -> list[dict[str, Any]]:
        with self._errors(), self._lock:
            return [_typed(row, columns) for row in self._connection().execute(query)]

    def _run(self, database: sqlite3.Connection, run_id: str) -> dict[str, Any]:
        row = one(database, "SELECT * FROM runs WHERE run_id = ?", (run_id,), RUNS)
        if row is None:
            raise StoreError(self.path, f"no run {run_id!r}", "a run_id that start_run returned", "call start_run first")
        return row

    def _run_part(self, row: dict[str, Any], stage: str) -> None:
        safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in row["run_id"])
        try:
            write_part(self.path / "parts" / "runs", f"{safe}-{stage}.parquet", "runs", [row])
        except OSError as problem:
            raise from_os_error(self.path / "parts" / "runs", problem) from None

    def _age(self, database: sqlite3.Connection, run: Mapping[str, Any]) -> None:
        """What was new, reopened or changed for an earlier campaign of these engines is known to this one."""
        for engine in [] if run["purpose"] in JUDGE_PURPOSES else engine_names(run):
            query = (
                "SELECT f.finding_id FROM findings f JOIN runs r ON r.run_id = f.last_run"
                " WHERE f.engine = ? AND f.status IN ('new', 'reopened', 'changed') AND r.campaign != ?"
            )
            for (name,) in database.execute(query, (engine, run["campaign"])).fetchall():
                database.execute("UPDATE findings SET status = 'known' WHERE finding_id = ?", (name,))


def engine_names(run: Mapping[str, Any]) -> list[str]:
    """Names of the engines of a run's row."""
    engines = from_json(run["engines"])
    if not isinstance(engines, list):
        return []
    return [str(e["name"]) if isinstance(e, dict) else str(e) for e in engines if not isinstance(e, dict) or "name" in e]


def _is_same_engine(entry: Any, engine: Mapping[str, Any]) -> bool:
    if not isinstance(entry, dict):
        return False
    return entry.get("name") == engine["name"] or (entry.get("name") is None and entry.get("spec") == engine.get("spec"))


def insert(database: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> None:
    names = ", ".join(f'"{name}"' for name in row)
    database.execute(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({', '.join('?' * len(row))})", tuple(map(_storable, row.values())))


def _storable(value: Any) -> Any:
    if isinstance(value, float) and (math.isnan(value) or (value == 0.0 and math.copysign(1.0, value) < 0)):
        return str(value)  # "nan", "-0.0"
    return value


def _event(database: sqlite3.Connection, run_id: str, kind: str, name: str, text: str) -> None:
    values = (time.time(), run_id, kind, name, text)
    database.execute("INSERT INTO events (time, run_id, kind, finding_id, text) VALUES (?, ?, ?, ?, ?)", values)


def _sight(database: sqlite3.Connection, name: str, run_id: str, *, hits: int = 0, reproduced: int = 0, attempts: int = 0) -> None:
    database.execute("INSERT OR IGNORE INTO sightings (finding_id, run_id) VALUES (?, ?)", (name, run_id))
    database.execute(
        "UPDATE sightings SET hits = hits + ?, reproduced = reproduced + ?, attempts = attempts + ? WHERE finding_id = ? AND run_id = ?",
        (hits, reproduced, attempts, name, run_id),
    )


def status_of(database: sqlite3.Connection, name: str, *, later_campaign: bool = False) -> str:
    """Sightings summed per campaign, in the order of the campaigns' starts."""
    query = (
        "SELECT SUM(s.hits) AS hits, SUM(s.reproduced) AS reproduced, SUM(s.attempts) AS attempts, MIN(r.started) AS started"
        " FROM sightings s JOIN runs r USING (run_id) WHERE s.finding_id = ? GROUP BY r.campaign ORDER BY started, r.campaign"
    )
    seen = [Sighting(row["hits"], row["reproduced"], row["attempts"]) for row in database.execute(query, (name,))]
    return status_after(seen, later_campaign=later_campaign)


def _hits(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute("SELECT SUM(hits) FROM sightings WHERE finding_id = ?", (name,)).fetchone()[0])


def one(database: sqlite3.Connection, query: str, values: tuple[Any, ...], columns: tuple[Column, ...]) -> dict[str, Any] | None:
    row = database.execute(query, values).fetchone()
    return None if row is None else _typed(row, columns)


def _typed(row: sqlite3.Row, columns: tuple[Column, ...]) -> dict[str, Any]:
    present = set(row.keys())
    out: dict[str, Any] = {}
    for column in columns:
        value = row[column.name] if column.name in present else empty_value(column)
        if column.type == "float":
            out[column.name] = float(value)
        else:
            out[column.name] = bool(value) if column.type == "bool" else value
    return out


_OF_PARENTS: list[sqlite3.Connection] = []  # a connection may neither be used nor closed across a fork
_EMPTIES = {column.name: empty_value(column) for column in FINDINGS}


def _is_stray(path: Path) -> bool:
    """The name says host and process: .tmp-<host>-<pid>-<part>."""
    rest = path.name.removeprefix(TEMPORARY)
    here = socket.gethostname() + "-"
    if rest.startswith(here):
        pid = rest.removeprefix(here).split("-", 1)[0]
        if pid.isdigit():
            return not _is_alive(int(pid))
    return time.time() - path.stat().st_mtime > STALE_TEMPORARY_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


__all__ = ["Store", "StoreError", "Writer", "engine_names", "finding_id", "fingerprint"]
