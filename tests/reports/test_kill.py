"""kill -9 in mid-campaign: what was reported is there, what is there is whole, and the next run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from reports import parts
from reports.store import Store

CAMPAIGN = """
import sys
from reports import writer
from reports.store import Store
from store_samples import finding, new_run
writer.ROWS_PER_PART = 5  # many parts, so that a kill often lands inside one
writer.COMPACT_AT = 6
store = Store.create_or_open(sys.argv[1])
run_id = new_run(store)
rows = store.writer(run_id, "w0")
i = 0
while True:
    for _ in range(5):
        rows.add_trial({"engine": "native", "case_id": f"{run_id}/{i}", "verdict": "EXACT"})
        i += 1
    name, _ = store.report_finding(finding(run_id, output=f"tap{i % 7}"))
    print(name, run_id, i, flush=True)
"""


def test_ten_kills_lose_nothing_that_was_reported(tmp_path: Path) -> None:
    path = tmp_path / "store"
    reported: dict[str, int] = {}
    promised: dict[str, int] = {}
    root = Path(__file__).parents[2]
    for attempt in range(10):
        command = [sys.executable, "-c", CAMPAIGN, str(path)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"PYTHONPATH": f"{root}:{root}/tests/reports"}
        ) as process:
            assert process.stdout is not None
            # A different number of lines each time, so that the kills fall at different places.
            for _ in range(9 + 5 * attempt):
                name, run_id, rows = process.stdout.readline().split()
                reported[name] = reported.get(name, 0) + 1
                promised[run_id] = int(rows)
            process.send_signal(signal.SIGKILL)
            for line in process.stdout.read().splitlines():
                if len(words := line.split()) == 3:  # whole lines that were still in the pipe
                    reported[words[0]] = reported.get(words[0], 0) + 1
                    promised[words[1]] = int(words[2])
        assert process.returncode == -signal.SIGKILL
    store = Store.create_or_open(path)
    found = {row["finding_id"]: row["hits"] for row in store.findings()}
    assert found.keys() == reported.keys() and len(found) == 7
    assert all(found[name] >= count for name, count in reported.items())
    assert sum(found.values()) - sum(reported.values()) <= 10  # at most the one that each kill cut before its line was printed
    trials = store.table("trials")
    for run_id, count in promised.items():
        kept = trials["case_id"][trials["run_id"] == run_id]
        # With 5 rows per part, the rows of every printed line were flushed; none is there twice.
        assert len(kept) == len(set(kept)) and count <= len(kept) <= count + 5
    assert all(row["finished"] == 0.0 for row in store.runs()) and len(store.runs()) == 10
    assert all(reason.startswith("temporary") for _, reason in store.ignored["trials"])
    store.sweep()
    store.table("trials")
    assert store.ignored["trials"] == []
    assert not list((path / "parts").glob(f"*/{parts.TEMPORARY}*"))
