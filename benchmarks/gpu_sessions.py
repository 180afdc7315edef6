"""Judged sessions and operations of the native CUDA engine in float32, TF32 and bfloat16, in parallel processes that share one GPU. A part of benchmarks/gpu.py.

A session is prompts, rounds of explicit trees, commits, forks and evictions, read back and judged tap by tap against the golden model,
and in every fourth one the engine's own loop; half of the sessions run as CUDA graphs. The precision of a process is fixed when it loads
the library.
"""

from __future__ import annotations

import collections
import ctypes
import multiprocessing
import os
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks import gpu_trials
from campaigns.case import SessionCase, to_json
from campaigns.isolation import InProcess
from campaigns.strategies import session_cases
from campaigns.trial import Bench

PROVEN = ("EXACT", "WITHIN_BOUND", "TIE")
FINDINGS = ("MALFORMED", "NONFINITE", "DEFECT", "CRASHED", "HUNG", "FLAKY")
TOKENS = ("token", "stream")  # of forward passes, of the engine's own loop


@dataclass
class SessionTally:
    sessions: int = 0
    verdicts: collections.Counter[str] = field(default_factory=collections.Counter)
    sessions_with: collections.Counter[str] = field(default_factory=collections.Counter)  # verdict -> sessions that have one
    generations: int = 0  # sessions with the engine's own loop
    under_graphs: int = 0  # sessions run with PARITREE_CUDA_GRAPH
    replays: int = 0  # of graphs
    tokens: int = 0  # compared with the specification's, in forward passes and own loops
    token_verdicts: collections.Counter[str] = field(
        default_factory=collections.Counter
    )  # judgements of tokens, each over one rung of a session
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    unverified: collections.Counter[str] = field(default_factory=collections.Counter)  # "operation tap" -> judgements

    def add(self, other: SessionTally) -> None:
        self.sessions += other.sessions
        self.generations += other.generations
        self.under_graphs += other.under_graphs
        self.replays += other.replays
        self.tokens += other.tokens
        self.token_verdicts.update(other.token_verdicts)
        self.verdicts.update(other.verdicts)
        self.sessions_with.update(other.sessions_with)
        self.findings += other.findings
        self.unverified.update(other.unverified)


def _worker(job: tuple[str, str, int, int]) -> SessionTally:
    """Every second job runs its sessions as CUDA graphs, half of those with work that comes late."""
    path, precision, seed, count = job
    os.environ["PARITREE_CUDA_PRECISION"] = precision
    os.environ["PARITREE_CUDA_POISON"] = "1"
    os.environ["PARITREE_CUDA_GRAPH"] = str(seed % 2)
    os.environ["PARITREE_CUDA_DELAY"] = str(int(seed % 4 == 3))
    from impls.native.adapter import load_library

    replays = ctypes.CDLL(path).paritree_cuda_replays
    replays.restype = ctypes.c_int64
    before = replays()
    tally = judged_sessions(load_library(path), seed, count)
    tally.under_graphs = tally.sessions if seed % 2 else 0
    tally.replays = replays() - before
    return tally


def _operations_worker(job: tuple[str, str, int, int]) -> gpu_trials.Tally:
    path, precision, seed, count = job
    os.environ["PARITREE_CUDA_PRECISION"] = precision
    from impls.native.adapter import load_library
    from spec.ops import OPS

    return gpu_trials.draw_and_judge(load_library(path), seed, count, tuple(OPS))


def judged_sessions(engine: Any, seed: int, count: int) -> SessionTally:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as with_seed

    tally = SessionTally()
    bench = Bench(InProcess(engine))

    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @with_seed(seed)
    @given(session_cases("full"))
    def trial(case: SessionCase) -> None:
        judgements = bench.outcome(case).judgements
        tally.sessions += 1
        tally.generations += case.generate is not None
        seen = set()
        for judgement in judgements:
            verdict = judgement.verdict.name
            tally.verdicts[verdict] += 1
            seen.add(verdict)
            if judgement.tap in TOKENS:
                tally.tokens += judgement.checked
                tally.token_verdicts[verdict] += 1
            if verdict == "UNVERIFIED":
                tally.unverified[f"{judgement.op} {judgement.tap}"] += 1
            if verdict in FINDINGS and len(tally.findings) < 20:
                tally.findings.append((to_json(case), verdict, f"{judgement.op} {judgement.tap}: {judgement.message[:300]}"))
        tally.sessions_with.update(seen)

    trial()
    return tally


def ties(tally: SessionTally) -> float:
    """Judgements of tokens that end in a TIE, as a share of the tokens compared; each stands for one differing token or more."""
    return tally.token_verdicts["TIE"] / max(1, tally.tokens)


def parallel(path: str, precision: str, sessions: int, processes: int, seed: int = 0) -> dict[str, Any]:
    began = time.perf_counter()
    share = -(-sessions // (2 * processes))
    jobs = [(path, precision, 1000 * seed + number, share) for number in range(2 * processes)]
    total = SessionTally()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for tally in pool.imap_unordered(_worker, jobs):
            total.add(tally)
    return {
        "precision": precision,
        "sessions": total.sessions,
        "with_own_loop": total.generations,
        "under_graphs": total.under_graphs,
        "replays": total.replays,
        "tokens": total.tokens,
        "token_judgements": dict(sorted(total.token_verdicts.items())),
        "tie_rate": ties(total),
        "judgements": dict(sorted(total.verdicts.items())),
        "sessions_with": dict(sorted(total.sessions_with.items())),
        "unverified": dict(total.unverified.most_common()),
        "findings": len(total.findings),
        "first_findings": total.findings[:20],
        "seconds": round(time.perf_counter() - began, 1),
    }


def parallel_operations(path: str, precision: str, trials: int, processes: int, seed: int = 0) -> dict[str, Any]:
    """Trials of operations and trees through the C ABI's run_op."""
    began = time.perf_counter()
    share = -(-trials // processes)
    jobs = [(path, precision, 1000 * seed + number, share) for number in range(processes)]
    total = gpu_trials.Tally()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for tally in pool.imap_unordered(_operations_worker, jobs):
            total.add(tally)
    return {
        "precision": precision,
        "trials": sum(total.trials.values()),
        "by_op": dict(sorted(total.trials.items())),
        "verdicts": dict(sorted(total.verdicts.items())),
        "findings": len(total.findings),
        "first_findings": total.findings[:20],
        "largest_share": {name: round(share, 4) for name, share in sorted(total.largest.items())},
        "seconds": round(time.perf_counter() - began, 1),
    }
