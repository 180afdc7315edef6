"""Judged trials of the CUDA engine, in parallel processes that share one GPU. A part of benchmarks/gpu.py.

Every process draws its own cases (Hypothesis, keyed by its seed), runs each on the device and judges it on a CPU core by
oracles.judge.judge_op, so that generation, kernels and judging overlap.
"""

from __future__ import annotations

import collections
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from campaigns.case import OpCase, to_json
from campaigns.materialise import op_call
from campaigns.strategies import op_cases
from oracles.judge import judge_op
from spec.engine import Engine, Unsupported
from spec.ops import OPS
from spec.script import OpCall

CLEAN = ("EXACT", "WITHIN_BOUND")
GUARD = -123456789  # of int32 outputs before a call


@dataclass
class Tally:
    """Trials and verdicts by operation; findings as (case, output, verdict, message)."""

    trials: collections.Counter[str] = field(default_factory=collections.Counter)
    verdicts: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[tuple[str, str, str, str]] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)  # output -> largest share of a bound

    def add(self, other: Tally) -> None:
        self.trials.update(other.trials)
        self.verdicts.update(other.verdicts)
        self.findings += other.findings
        for name, share in other.largest.items():
            self.largest[name] = max(share, self.largest.get(name, 0.0))

    def judge(self, engine: Engine, call: OpCall, label: str) -> None:
        """One trial."""
        outputs = {
            name: np.full(shape, np.nan if dtype == "float32" else (0xA5 if dtype == "uint8" else GUARD), dtype)
            for name, (shape, dtype) in call.outputs.items()
        }
        self.trials[call.op] += 1
        try:
            engine.run_op(call.op, call.inputs, call.params, outputs)
        except Unsupported:
            self.verdicts[f"{call.op} UNSUPPORTED"] += 1
            return
        except Exception as problem:  # an engine's own error on a legal case is a finding
            self.verdicts[f"{call.op} RAISED"] += 1
            self.findings.append((label, call.op, "RAISED", repr(problem)[:300]))
            return
        for judgement in judge_op(call, outputs, engine.describe().profile):
            verdict = judgement.verdict.name
            self.verdicts[f"{call.op} {verdict}"] += 1
            name = f"{call.op}.{judgement.tap}"
            if np.isfinite(judgement.share):
                self.largest[name] = max(float(judgement.share), self.largest.get(name, 0.0))
            if verdict not in CLEAN:
                self.findings.append((label, call.op, verdict, judgement.message[:300]))


def draw_and_judge(engine: Engine, seed: int, count: int, ops: Sequence[str]) -> Tally:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as with_seed

    tally = Tally()

    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @with_seed(seed)
    @given(op_cases("full", tuple(ops)))
    def trial(case: OpCase) -> None:
        tally.judge(engine, op_call(case), to_json(case))

    trial()
    return tally


def _worker(job: tuple[str | None, int, int, tuple[str, ...]]) -> Tally:
    from impls.cuda.engine import engine

    variant, seed, count, ops = job
    return draw_and_judge(engine(variant), seed, count, ops)


def parallel(variant: str | None, trials: int, processes: int, ops: Sequence[str] = tuple(OPS), seed: int = 0) -> dict[str, Any]:
    """`trials` judged operations over `processes` processes."""
    began = time.perf_counter()
    share = -(-trials // processes)
    jobs = [(variant, 1000 * seed + number, share, tuple(ops)) for number in range(processes)]
    total = Tally()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for tally in pool.imap_unordered(_worker, jobs):
            total.add(tally)
    return summary(total, time.perf_counter() - began)


def summary(tally: Tally, seconds: float) -> dict[str, Any]:
    return {
        "trials": sum(tally.trials.values()),
        "by_op": dict(sorted(tally.trials.items())),
        "verdicts": dict(sorted(tally.verdicts.items())),
        "findings": len(tally.findings),
        "first_findings": tally.findings[:20],
        "largest_share_of_bound": {name: round(share, 4) for name, share in sorted(tally.largest.items())},
        "seconds": round(seconds, 1),
    }
