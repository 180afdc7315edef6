"""Rows for tests of the store and of the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reports.schema import Column
from reports.store import Store

ENGINES = json.dumps([{"name": "native", "version": "1.2", "profile": "float32-any-order"}])


def new_run(store: Store, **more: Any) -> str:
    return store.start_run({"engines": ENGINES, "command": "paritree check ./libengine.so", "seed": 7} | more)


def finding(run_id: str, **more: Any) -> dict[str, Any]:
    base = {
        "run_id": run_id,
        "engine": "native",
        "verdict": "DEFECT",
        "op": "o_latent",
        "rule": "M7",
        "output": "o_latent",
        "rung": "tree verify",
        "layer": 1,
        "token": 3,
        "found": 0.1251,
        "expected": 0.125,
        "bound": 3e-6,
        "share": 33.3,
        "case_id": "aa",
        "case": '{"kind":"session","rounds":[[[0,1]]]}',
        "message": "row 3 reads a rejected branch",
    }
    return base | more


def example(column: Column, salt: int) -> Any:
    """A value of the column's type that differs from its empty value."""
    return {"string": f"{column.name}-ü{salt}", "int": salt + 5, "float": salt + 0.5, "bool": True}[column.type]


def part_files(path: Path, table: str) -> list[Path]:
    return sorted((path / "parts" / table).glob("*.parquet"))
