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

from campaigns.case import OpCase, TreeCase, to_json
from campaigns.isolation import InProcess
from campaigns.isolation.execute import run_call
from campaigns.materialise import op_call
from campaigns.operands import REGIMES
from campaigns.strategies import op_cases, tree_cases
from campaigns.trial import Bench, judged_call
from oracles.judgement import Judgement
from spec.engine import Engine
from spec.ops import OPS
from spec.script import Answer, OpCall

CLEAN = ("EXACT", "WITHIN_BOUND", "UNSUPPORTED")
HAZARDS = ("poison", "views", "freed", "repeat", "guard")


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

    def note(self, label: str, op: str, judgements: Sequence[Judgement]) -> None:
        """One trial."""
        self.trials[op] += 1
        for judgement in judgements:
            verdict = judgement.verdict.name
            self.verdicts[f"{op} {verdict}"] += 1
            name = f"{op}.{judgement.tap}"
            if np.isfinite(judgement.share):
                self.largest[name] = max(float(judgement.share), self.largest.get(name, 0.0))
            if verdict not in CLEAN:
                self.findings.append((label, op, verdict, judgement.message[:300]))

    def judge_sampled(self, engine: Engine, call: OpCall, label: str, seed: int) -> None:
        """One trial; only rows and columns drawn by `seed` are judged, where the op has a rule for it (SAMPLED)."""
        answer = run_call(engine, call)
        if answer.failure is None and answer.outputs is not None:
            call, outputs = sampled(call, answer.outputs, seed)
            answer = Answer(outputs=outputs)
        self.note(label, call.op, judged_call(call, answer, engine.describe().profile, 0))


def draw_and_judge(engine: Engine, seed: int, count: int, ops: Sequence[str]) -> Tally:
    """`count` drawn cases with their hazards and refusals: operations, and where all of them are drawn also chains of a draft tree."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as with_seed
    from hypothesis import strategies as st

    tally = Tally()
    bench = Bench(InProcess(engine))
    operations, trees = op_cases("full", tuple(ops), hazards=HAZARDS), tree_cases("full", hazards=HAZARDS)

    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @with_seed(seed)
    @given(st.integers(0, 3).flatmap(lambda n: operations if n else trees) if len(ops) == len(OPS) else operations)
    def trial(case: OpCase | TreeCase) -> None:
        tally.note(to_json(case), case.op if isinstance(case, OpCase) else "tree", bench.outcome(case).judgements)

    trial()
    return tally


# Sizes of Kimi K2 (DeepSeek-V3 shapes, 64 heads, latent 512 + 64, 384 experts), one layer's worth at a time; each entry: dims, params
Sizes = tuple[dict[str, int], dict[str, float]]
ROUTE = {"top_k": 8, "group_score_max": 0, "norm_top_k": 1, "routed_scale": 2.827, "denominator_eps": 1e-20}
SAMPLE = {
    "temperature": 0.8, "top_k": 0, "top_k_ties_all": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "seed": 0x9E3779B97F4A7C1, "prompt_len": 7,
}  # fmt: skip
SAMPLE_RULES: tuple[dict[str, float], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 50, "repetition_penalty": 1.2},
    {"top_k": 50, "top_p": 0.95, "presence_penalty": 0.3},
    {"min_p": 0.05},
)
ATTENTION = {"kv_rank": 512, "scale": 0.1352337788608801}
PRODUCTION: dict[str, tuple[Sizes, ...]] = {
    "tree_attention": tuple(({"T": t, "H": h, "S": s, "C": 576}, ATTENTION) for t, h, s in ((65, 64, 1089), (17, 64, 4113), (3, 8, 700), (1, 64, 2050))),
    "rms_norm": tuple(({"T": 65, "N": n}, {"eps": 1e-6}) for n in (7168, 1536, 512)),
    "matmul": tuple(({"T": t, "K": k, "N": n}, {}) for t, k, n in ((1, 7168, 576), (65, 7168, 576), (65, 1536, 3072), (300, 1024, 1000))),
    "int4_matmul": tuple(({"T": t, "G": g, "N": n}, {}) for t, g, n in ((1, 224, 576), (9, 64, 2048), (65, 48, 576))),
    "rope": (({"T": 65, "H": 64, "half": 32}, {"half_layout": 0}), ({"T": 65, "H": 64, "half": 32}, {"half_layout": 1})),
    "q_absorb": (({"T": 65, "H": 64, "n": 128, "R": 512}, {}), ({"T": 1, "H": 64, "n": 128, "R": 512}, {})),
    "o_heads": (({"T": 65, "H": 64, "R": 512, "v": 128}, {}),),
    "scores": (({"T": 2, "H": 64, "C": 576, "S": 4160}, {"scale": 0.1352337788608801}),),
    "softmax": (({"T": 2, "H": 64, "S": 4160}, {}),),
    "o_latent": (({"T": 2, "H": 64, "S": 1088, "R": 512}, {}),),
    "router_scores": (({"T": 65, "E": 384}, {"softmax": 0}), ({"T": 65, "E": 160}, {"softmax": 1})),
    "route": (({"T": 65, "E": 384}, ROUTE | {"groups": 1, "top_groups": 1}), ({"T": 65, "E": 256}, ROUTE | {"groups": 8, "top_groups": 4})),
    "swiglu": (({"T": 65, "N": 2048}, {}),),
    "moe": (({"T": 9, "E": 16, "K": 8, "N": 512, "F": 256}, {}),),
    "combine": (({"T": 17, "K": 8, "N": 7168}, {}),),
    "add": (({"T": 65, "N": 7168}, {}),),
    "argmax": (({"T": 5, "V": 163_840}, {}),),
    "sample": tuple(({"T": 5, "V": 163_840, "J": 40}, SAMPLE | rule) for rule in SAMPLE_RULES),
    "draft_table": (({"L": 15, "V": 163_840}, {"budget": 512}), ({"L": 7, "V": 163_840}, {"budget": 64}), ({"L": 4, "V": 163_840}, {"budget": 1024})),
    "best_first_tree": tuple(({"L": l, "K": k}, {"budget": k, "root": 7}) for l, k in ((15, 512), (15, 64), (16, 1024))),
    "tree_mask": (({"M": 513}, {"prefix_len": 4096}), ({"M": 1025}, {"prefix_len": 100})),
    "accept": (({"M": 513}, {}), ({"M": 1025}, {})),
    "compact": (({"S": 4161, "C": 576, "J": 12}, {"prefix_len": 4096}),),
    "embed": (({"V": 1000, "N": 7168, "T": 65}, {}),),
}  # fmt: skip

# Axes of the tensors that are drawn together: rows, then columns or heads
SAMPLED: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "tree_attention": ({"q": 0, "visible": 0, "out": 0}, {"q": 1, "out": 1}),
    "rms_norm": ({"x": 0, "out": 0}, {}),
    "matmul": ({"x": 0, "out": 0}, {"w": 1, "out": 1}),
    "int4_matmul": ({"x": 0, "out": 0}, {"packed": 1, "scales": 1, "out": 1}),
    "q_absorb": ({"q_nope": 0, "out": 0}, {"q_nope": 1, "w_kc": 0, "out": 1}),
    "o_heads": ({"o_latent": 0, "out": 0}, {"o_latent": 1, "w_vc": 0, "out": 1}),
    "scores": ({"q": 0, "out": 0}, {"q": 1, "out": 1}),
    "softmax": ({"scores": 0, "visible": 0, "out": 0}, {"scores": 1, "out": 1}),
    "o_latent": ({"probs": 0, "out": 0}, {"probs": 1, "out": 1}),
    "combine": ({"weights": 0, "experts": 0, "shared": 0, "out": 0}, {}),
    "argmax": ({"logits": 0, "ids": 0}, {}),
    "draft_table": ({"logits": 0, "ids": 0, "log_probs": 0}, {}),
}
ROWS_JUDGED, COLUMNS_JUDGED = 3, 4  # columns: heads, or 16 times as many columns of a matrix


def sampled(call: OpCall, outputs: dict[str, Any], seed: int) -> tuple[OpCall, dict[str, Any]]:
    """The same call restricted to drawn rows and heads or columns, always with the first and the last row."""
    if call.op not in SAMPLED:
        return call, outputs
    rng = np.random.default_rng(seed)
    inputs, results = dict(call.inputs), dict(outputs)
    for number, axes in enumerate(SAMPLED[call.op]):
        if not axes:
            continue
        name, axis = next(iter(axes.items()))
        size = (inputs | results)[name].shape[axis]
        wanted = ROWS_JUDGED if number == 0 else COLUMNS_JUDGED * (16 if call.op in ("matmul", "int4_matmul") else 1)
        index = np.unique(np.concatenate([[0, size - 1], rng.integers(0, size, wanted)]))
        for tensor, own_axis in axes.items():
            for group in (inputs, results):
                if tensor in group:
                    group[tensor] = np.ascontiguousarray(np.take(group[tensor], index, own_axis))
    shapes = {name: (results[name].shape, dtype) for name, (_, dtype) in call.outputs.items()}
    return OpCall(call.op, inputs, call.params, shapes, call.hazards), results


def judge_production(engine: Engine, seed: int, count: int, ops: Sequence[str] = tuple(PRODUCTION)) -> Tally:
    """`count` trials at production sizes, the ops and their sizes in turn, regimes and operands by seed."""
    tally = Tally()
    sizes = [(op, dims, params) for op in ops for dims, params in PRODUCTION[op]]
    for number in range(count):
        op, dims, params = sizes[(number + seed) % len(sizes)]
        regime = REGIMES[(number // len(sizes) + seed) % len(REGIMES)]
        case = OpCase(op, tuple(sorted(dims.items())), tuple(sorted(params.items())), regime, 1000 * seed + number)
        tally.judge_sampled(engine, op_call(case), to_json(case), 1 + number)
    return tally


def judge_wide_attention(engine: Engine, seed: int, count: int) -> Tally:
    """Attention of production width on few rows and keys: the sizes at which the tiled kernels run, small enough for the emulator."""
    tally = Tally()
    rng = np.random.default_rng(seed)
    for number in range(count):
        dims = {"T": int(rng.integers(1, 6)), "H": int(rng.integers(1, 6)), "S": int(rng.choice([31, 33, 65, 150, 300])), "C": 576}
        case = OpCase(
            "tree_attention", tuple(sorted(dims.items())), tuple(sorted(ATTENTION.items())), REGIMES[number % len(REGIMES)], number
        )
        tally.note(to_json(case), case.op, judged_call(op_call(case), run_call(engine, op_call(case)), engine.describe().profile, 0))
    return tally


Job = tuple[str | None, int, int, tuple[str, ...], str]


def _worker(job: Job) -> Tally:
    from impls.cuda.engine import engine

    variant, seed, count, ops, kind = job
    if kind == "production":
        return judge_production(engine(variant), seed, count, ops)
    if kind == "wide":
        return judge_wide_attention(engine(variant), seed, count)
    return draw_and_judge(engine(variant), seed, count, ops)


def parallel(
    variant: str | None, trials: int, processes: int, ops: Sequence[str] = tuple(OPS), *, seed: int = 0, kind: str = "drawn"
) -> dict[str, Any]:
    """`trials` judged operations over `processes` processes. `kind`: "drawn", "production" or "wide"."""
    began = time.perf_counter()
    share = -(-trials // processes)
    jobs: list[Job] = [(variant, 1000 * seed + number, share, tuple(ops), kind) for number in range(processes)]
    total = Tally()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for tally in pool.imap_unordered(_worker, jobs):
            total.add(tally)
    return summary(total, time.perf_counter() - began)


def paged_findings(engine: Any) -> list[tuple[str, str, str, str]]:
    """The paged checks of the named suite: run_op has no page table, so that only they show a wrong look-up."""
    from tests.impls.test_cuda_suite import attention_pages, attention_production_width_pages

    out = []
    for check in (attention_pages, attention_production_width_pages):
        try:
            check(engine.kernels)
        except AssertionError as problem:
            out.append((check.__name__, "tree_attention", "DEFECT", str(problem)[:200]))
    return out


def _plant_worker(name: str) -> dict[str, Any]:
    """A plant is caught if an operation is found wrong, localised if it is the planted one and the others drawn with it are clean."""
    from impls.cuda.engine import engine
    from impls.cuda.plants import named

    plant = named(name)
    bad = engine(name)
    try:
        tally = draw_and_judge(bad, 1, 150, (plant.op, "add", "embed", "swiglu"))
        if plant.op == "tree_attention":
            tally.add(judge_wide_attention(bad, 1, 40))
            tally.findings += paged_findings(bad)
        found = sorted({op for _, op, _, _ in tally.findings})
        first = tally.findings[0] if tally.findings else None
        return {"plant": name, "kind": plant.kind, "op": plant.op, "caught": bool(found), "localised": found == [plant.op], "first": first}
    except Exception as problem:  # a sticky error of the device ends this process only
        return {"plant": name, "kind": plant.kind, "op": plant.op, "caught": True, "localised": False, "first": repr(problem)[:300]}


def parallel_plants(processes: int) -> list[dict[str, Any]]:
    """Every plant in a process of its own."""
    from impls.cuda.plants import PLANTS

    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        return list(pool.imap(_plant_worker, [plant.name for plant in PLANTS], chunksize=1))


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
