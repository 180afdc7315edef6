"""python -m benchmarks.gpu [--sections trials,timing,...] [--trials N]: everything that is claimed about a GPU, in one call, as one JSON.

Sections: `trials` (judged operations in parallel), `production` (the same at production sizes, rows and heads sampled by the judge), `plants`
(bugs in the device code and under graph replay, caught and localised), `hazards` (streams out of order, an error that sticks: gpu_hazards.py), `round` (one round
of the native engine beside transformers under CUDA graphs: gpu_round.py), `sanitizer` (memcheck, racecheck, initcheck over the named checks), `sessions` (of the native engine, in three
precisions), `native` (operations of the native engine through the C ABI, likewise), `suite` (the named checks of tests/impls/test_cuda_suite.py), `timing` (kernels beside
their floors), `peers` (torch on the same data). The report goes to $OUT/gpu.json, or to benchmarks/results/cuda-<device>.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_hazards, gpu_peers, gpu_round, gpu_sessions, gpu_timing, gpu_trials

ROOT = Path(__file__).resolve().parents[1]
SANITIZER_SECONDS = 90  # of one tool
SECTIONS = ("trials", "production", "plants", "hazards", "sessions", "native", "suite", "timing", "peers", "round", "sanitizer")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated")
    parser.add_argument("--trials", type=int, default=50_000)
    parser.add_argument("--sessions", type=int, default=2_000, help="in float32; a quarter of it in TF32 and in bfloat16 each")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--commit", default="", help="what to write as the commit where there is no git history")
    chosen = parser.parse_args(arguments)
    for name in set(chosen.sections.split(",")) - set(SECTIONS):
        parser.error(f"there is no section {name!r}: choose some of {', '.join(SECTIONS)}")
    if importlib.util.find_spec("cupy") is None:
        parser.error("CuPy and a CUDA device are needed: install paritree[cuda13] or paritree[cuda12]")
    run: dict[str, Callable[[], Any]] = {
        "trials": lambda: trials(chosen.trials, chosen.processes),
        "sessions": lambda: sessions(chosen.sessions, chosen.processes),
        "native": lambda: native(chosen.trials // 5, chosen.processes),
        "production": lambda: production(chosen.trials // 10, chosen.processes),
        "plants": lambda: planted(chosen.processes),
        "hazards": lambda: hazards(chosen.trials // 100, chosen.processes),
        "round": rounds,
        "suite": suite,
        "sanitizer": sanitizer,
        "timing": lambda: gpu_timing.all_timings(log),
        "peers": lambda: gpu_peers.all_peers(log),
    }
    report: dict[str, Any] = {"command": f"python -m benchmarks.gpu --sections {chosen.sections} --trials {chosen.trials}"}
    report["commit"] = chosen.commit or _commit()
    report["machine"] = machine()
    target = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    target.mkdir(parents=True, exist_ok=True)
    name = "gpu.json" if os.environ.get("OUT") else f"cuda-{re.sub('[^a-z0-9]+', '-', report['machine']['device'].lower())}.json"
    for section in chosen.sections.split(","):
        began = time.perf_counter()
        log(f"== {section}")
        try:
            report[section] = run[section]()
        except Exception as problem:  # one section that breaks must not lose the others
            report[section] = {"failure": f"{type(problem).__name__}: {problem}"[:2000]}
            log(report[section]["failure"])
        log(f"== {section}: {time.perf_counter() - began:.0f} s")
        (target / name).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def trials(count: int, processes: int) -> dict[str, Any]:
    """Most of them on the fast forms, the others on the plain ones and on bfloat16 attention."""
    found = {
        "cuda": gpu_trials.parallel(None, count, processes),
        "cuda:plain": gpu_trials.parallel("plain", count // 10, processes, seed=1),
        "cuda:bf16": gpu_trials.parallel("bf16", count // 50, processes, ("tree_attention",), seed=2),
    }
    for name, result in found.items():
        log(f"{name}: {result['trials']} trials, {result['findings']} findings, {result['seconds']} s")
        for finding in result["first_findings"][:8]:
            log(f"    {finding}")
    return found


def production(count: int, processes: int) -> dict[str, Any]:
    found = {
        "cuda": gpu_trials.parallel(None, count, processes, tuple(gpu_trials.PRODUCTION), kind="production", seed=3),
        "cuda:bf16": gpu_trials.parallel("bf16", count // 20, processes, ("tree_attention",), kind="production", seed=4),
        "wide": gpu_trials.parallel(None, count // 5, processes, ("tree_attention",), kind="wide", seed=5),
        "wide:bf16": gpu_trials.parallel("bf16", count // 5, processes, ("tree_attention",), kind="wide", seed=6),
    }
    for name, result in found.items():
        log(f"{name}: {result['trials']} trials at production sizes, {result['findings']} findings, {result['seconds']} s")
        for finding in result["first_findings"][:8]:
            log(f"    {finding}")
    return found


def planted(processes: int) -> dict[str, Any]:
    from impls.cuda import build

    rows = gpu_trials.parallel_plants(processes)
    rows += gpu_hazards.graph_plants(str(build.library(defines=(build.PLANTED,))), processes)
    for row in rows:
        log(f"{row['plant']:20s} {row['op']:16s} caught {row['caught']}  localised {row['localised']}  {str(row['first'])[-110:]}")
    return {
        "caught": sum(row["caught"] for row in rows),
        "localised": sum(row["localised"] for row in rows),
        "of": len(rows),
        "plants": rows,
    }


def hazards(trials: int, processes: int) -> dict[str, Any]:
    found = {"sticky": gpu_hazards.sticky("cuda:wild-address"), "streams": gpu_hazards.streams(trials, processes)}
    log(
        f"illegal address: blamed {found['sticky']['blamed']}, {found['sticky']['workers_replaced']} workers replaced, holds {found['sticky']['holds']}"
    )
    late = found["streams"]["trials"]
    log(
        f"late producers: {late['trials']} trials, {late['findings']} findings; launches astray are found: {found['streams']['plant']['caught']}"
    )
    return found


def rounds() -> list[dict[str, Any]]:
    from impls.cuda import build

    return gpu_round.measured(str(build.library()), tuple(gpu_round.MODELS), ("float32", "bf16"), log)


def sanitizer() -> dict[str, Any]:
    """compute-sanitizer over the named checks, CuPy's memory pool off, so that each buffer is an allocation of its own."""
    found: dict[str, Any] = {}
    for tool in ("memcheck", "racecheck", "initcheck"):
        began = time.perf_counter()
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu_checks"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=SANITIZER_SECONDS)
            status, text = answer.returncode, answer.stdout + answer.stderr
        except subprocess.TimeoutExpired as late:
            status, text = -1, f"{(late.stdout or b'').decode(errors='replace')[-2000:]}\nnot finished after {SANITIZER_SECONDS} s"
        lines = text.strip().splitlines()
        found[tool] = {"status": status, "seconds": round(time.perf_counter() - began, 1), "head": lines[:12], "tail": lines[-6:]}
        log(f"{tool}: status {status}, {found[tool]['seconds']} s: {lines[-1:]}")
    return found


def sessions(count: int, processes: int) -> dict[str, Any]:
    from impls.cuda import build

    began = time.perf_counter()
    path = str(build.library())
    log(f"built the native engine in {time.perf_counter() - began:.0f} s")
    found = {}
    for precision, share in (("float32", count), ("tf32", count // 4), ("bf16", count // 4)):
        found[precision] = gpu_sessions.parallel(path, precision, share, processes)
        result = found[precision]
        log(f"{precision}: {result['sessions']} sessions, {result['findings']} findings, {result['seconds']} s; {result['sessions_with']}")
        log(f"    unverified: {result['unverified']}")
        for finding in result["first_findings"][:6]:
            log(f"    {finding}")
    return found


def native(count: int, processes: int) -> dict[str, Any]:
    from impls.cuda import build

    path = str(build.library())
    found = {}
    for precision, share in (("float32", count), ("tf32", count // 4), ("bf16", count // 4)):
        result = found[precision] = gpu_sessions.parallel_operations(path, precision, share, processes)
        log(f"{precision}: {result['trials']} trials through run_op, {result['findings']} findings, {result['seconds']} s")
        for finding in result["first_findings"][:8]:
            log(f"    {finding}")
    return found


def suite() -> dict[str, Any]:
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/impls", "-k", "cuda", "--tb=short"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    tail = answer.stdout.strip().splitlines()[-30:]
    for line in tail:
        log(line)
    return {"status": answer.returncode, "tail": tail}


def machine() -> dict[str, Any]:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "device": properties["name"].decode(),
        "multiprocessors": properties["multiProcessorCount"],
        "capability": f"{properties['major']}.{properties['minor']}",
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "python": platform.python_version(),
    }


def log(text: str) -> None:
    print(text, flush=True)


def _commit() -> str:
    answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    return answer.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
