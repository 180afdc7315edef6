"""python -m benchmarks.profiles: what `paritree profile measure` says of engines whose arithmetic is known beforehand, and where it is wrong.

Engines: native, every honest variant of the blocked engine, planted liars, and the peers that are installed. A sure line is right or wrong where the
truth is known by construction (the variant's own code, the peer's settings); lines that depend on the machine's BLAS are counted apart. Prints, and
writes benchmarks/results/profiles.json.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.isolation import Supervisor
from campaigns.measure import WEIGHTS, Measured, measure
from campaigns.trial import patience
from impls import peers
from impls.blocked import BlockedEngine
from impls.blocked.points import Float, Site
from impls.planted.benign import VARIANTS
from impls.planted.blocked_profile import tf32
from impls.planted.planting import bf16
from oracles.probing import Certainty
from spec.engine import PROFILES

RESULTS = Path(__file__).parent / "results" / "profiles.json"

FLOAT32: dict[str, Any] = {
    "u_input": 0.0, "u_output": 0.0, "u_accumulate": 2.0**-24, "exp2_folding": False, "tanh_silu": False, "float32_scores": False, "flush_to_zero": False,
}  # fmt: skip
LOWEST: dict[str, Any] = {
    "ties": "lowest",
    "argmax ties": "lowest",
    "top-k ties": "lowest",
    "heap ties": "rank path",
    "angle_roundings": 0.0,
}
OURS = FLOAT32 | LOWEST
KNOWN: dict[str, dict[str, Any]] = {
    "native": OURS | {"height": "blocked:32", "online_softmax": True, "batch_invariant": True},
    "native:heap-fifo": OURS | {"heap ties": "first in, first out"},
    "golden": OURS | {"batch_invariant": True, "online_softmax": False},
    "blocked": OURS,
    "blocked:sequential": OURS | {"height": "any"},
    "blocked:split-k": OURS | {"height": "any"},
    "blocked:tf32": OURS | {"u_input": 2.0**-11},
    "blocked:bf16-in": OURS | {"u_input": 2.0**-8},
    "blocked:bf16-out": OURS | {"u_output": 2.0**-8},
    "blocked:fp16-out": OURS | {"u_output": 2.0**-11},
    "blocked:N04": OURS | {"exp2_folding": True},
    "blocked:silu-tanh": OURS | {"tanh_silu": True},
    "blocked:float32-scores": OURS | {"float32_scores": True},
    "blocked:flush": OURS | {"flush_to_zero": True},
    # liars under a float32 name
    "blocked:tf32-large": OURS | {"u_input": 2.0**-10},
    "benchmarks.profiles:tf32_unsaid": OURS | {"u_input": 2.0**-10},
    "benchmarks.profiles:bf16_accumulation_unsaid": OURS | {"u_accumulate": 2.0**-8, "u_output": 2.0**-8},
    "benchmarks.profiles:exp2_unsaid": OURS | {"exp2_folding": True},
    "torch-ops": FLOAT32 | {"ties": "any"},
    "transformers": FLOAT32 | {"ties": "any"},
    "llama.cpp": FLOAT32,
}
"""Engine -> lines that are known without asking it."""


def tf32_unsaid() -> BlockedEngine:
    """Operands cut to TF32 under a float32 name."""
    return BlockedEngine({"gemm": fast_path}, profile=PROFILES["float32-any-order"])


def fast_path(site: Site, name: str, x: Float, w: Float) -> Float:
    return np.asarray(site.honest(name, tf32(x), tf32(w)))


def bf16_accumulation_unsaid() -> BlockedEngine:
    """Every addition rounded to bfloat16 under a float32 name."""
    return BlockedEngine({"gemm": short_sums}, profile=PROFILES["float32-any-order"])


def short_sums(site: Site, name: str, x: Float, w: Float) -> Float:
    total: Float = np.zeros((len(x), w.shape[1]), np.float32)
    for term in range(len(w)):
        total = bf16(total + x[:, term, None] * w[term])
    return total


def exp2_unsaid() -> BlockedEngine:
    """exp2 of a rounded argument under a profile that excludes it."""
    return BlockedEngine(VARIANTS["N04"].points, profile=PROFILES["float32-strict"])


def main() -> None:
    names = [*KNOWN, *(f"blocked:{name}" for name in VARIANTS if f"blocked:{name}" not in KNOWN)]
    skipped = [name for name in names if peers.unavailable(name)]
    rows = [of_engine(name) for name in names if name not in skipped]
    total = {word: sum(row[word] for row in rows) for word in ("sure", "sure_known", "sure_wrong", "likely", "unknown")}
    print(f"{len(rows)} engines: {total}; skipped: {', '.join(skipped) or 'none'}")
    machine = {"processor": platform.machine(), "python": platform.python_version(), "numpy": np.__version__}
    body = {"command": "python -m benchmarks.profiles", "machine": machine, "total": total, "skipped": skipped, "engines": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def of_engine(name: str) -> dict[str, Any]:
    began = time.perf_counter()
    with Supervisor(name, deadline_s=patience(), weights=WEIGHTS) as supervisor:
        measured = measure(supervisor)
    truth = KNOWN.get(name, OURS)
    sure = {line.name: line.value for line in measured.lines if line.certainty is Certainty.SURE}
    wrong = sorted(key for key, value in sure.items() if key in truth and truth[key] != value)
    counts = {str(certainty): sum(line.certainty is certainty for line in measured.lines) for certainty in Certainty}
    print(
        f"{name:28} {counts['sure']:2} sure, {counts['likely']:2} likely, {counts['unknown']:2} unknown; wrong: {', '.join(wrong) or 'none'}",
        flush=True,
    )
    return {
        "engine": name, "version": measured.description.version, "seconds": round(time.perf_counter() - began, 1), **counts,
        "sure_known": sum(key in truth for key in sure), "sure_wrong": len(wrong), "wrong": wrong,
        "contradicts_declared": [line.name for line in measured.contradictions], "lines": plain(measured),
    }  # fmt: skip


def plain(measured: Measured) -> dict[str, str]:
    return {line.name: f"{line.value} ({line.certainty})" for line in measured.lines if line.certainty is not Certainty.UNKNOWN}


if __name__ == "__main__":
    main()
