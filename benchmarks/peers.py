"""How far released engines are from the specification: peer x configuration x (prefill, decode, tree), by certified bounds.

    python -m benchmarks.peers --trials 2000                  all installed peers -> benchmarks/results/peers.json, docs/agreement.md
    python -m benchmarks.peers --peer llama.cpp --trials 300  one peer, printed only

A trial is one session (prompts, decode and tree rounds with commits, cache read back) on one engine, or one operation. Needs the extra `peers`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from campaigns.case import OpCase, SessionCase, to_json
from campaigns.isolation.inprocess import InProcess
from campaigns.plan import session_script
from campaigns.strategies import op_cases
from campaigns.trial import Bench, session_judge
from impls import peers
from impls.registry import resolve
from oracles.judgement import FINDINGS, Judgement, Verdict
from oracles.walk import inputs_of
from spec.config import Config, Yarn, preset
from spec.engine import Rows, departed
from spec.script import Forward, Script, WeightsKey
from spec.taps import taps_of_layer
from spec.weights import philox

RESULTS = Path(__file__).parent / "results" / "peers.json"
TABLE = Path(__file__).parent.parent / "docs" / "agreement.md"
SESSION_PEERS = ("transformers:eager", "transformers:sdpa", "llama.cpp", "mlx")
OP_PEERS = ("torch-ops",)
RUNGS = ("prefill", "decode", "tree verify")
BATCH = 10  # sessions of one model in a row, so that it is opened once
WEIGHT_SEEDS = 3
LONG_POSITIONS = (0, 4096, 32768, 131072)

Overrides = tuple[tuple[str, Any], ...]
CONFIGS: dict[str, tuple[str, Overrides]] = {
    "tiny (K2-like, YaRN 4)": ("tiny", ()),
    "YaRN 64, beta_fast 32": ("tiny", (("yarn", (64.0, 4096, 32.0, 1.0, 1.0, 1.0)), ("rope_theta", 50000.0), ("rope_dim", 16))),
    "YaRN 64, beta_fast 1": ("tiny", (("yarn", (64.0, 4096, 1.0, 1.0, 1.0, 1.0)), ("rope_theta", 50000.0), ("rope_dim", 16))),
    "mscale .707 / all_dim 1.3": ("tiny", (("yarn", (8.0, 16, 32.0, 1.0, 0.707, 1.3)),)),
    "no YaRN": ("tiny", (("yarn", None),)),
    "groups 4/2 (V3-like)": ("tiny", (("groups", 4), ("top_groups", 2), ("routed_scale", 2.5))),
    "no q_lora": ("tiny", (("q_rank", 0),)),
    "half-split RoPE": ("tiny", (("rope_layout", "half"),)),
    "2 shared experts": ("tiny", (("shared_experts", 2),)),
    "tied embeddings": ("tiny", (("tied", True),)),
    "softmax routing (V2)": ("tiny", (("scoring", "softmax"), ("norm_top_k", False), ("group_score", "max"))),
    "softmax, groups 4/2 by max (V2)": ("tiny", (("scoring", "softmax"), ("norm_top_k", False), ("group_score", "max"), ("groups", 4), ("top_groups", 2))),
    "odd sizes (kv 7, nope 5, v 17, 1 head)": ("tiny", (("kv_rank", 7), ("nope_dim", 5), ("v_dim", 17), ("heads", 1))),
    "3 layers, all sparse": ("tiny", (("layers", 3), ("first_dense", 0))),
}  # fmt: skip
REGIMES = (
    "ordinary",
    "ordinary",
    "ordinary",
    "tied-experts",
    "negative-bias",
    "large-scores",
    "tiny-latents",
    "outlier-channel",
    "hot-expert",
)


@dataclass
class Cell:
    """One peer, configuration and rung."""

    trials: int = 0
    rows: int = 0
    error_abs_max: float = 0.0  # of a logit, against the golden one
    share_max: float = 0.0  # of its bound
    ops: Counter[str] = field(default_factory=Counter)  # checked "locally", "by region", "UNVERIFIED", "finding"


def sessions(name: str, trials: int) -> Iterator[SessionCase]:
    """`trials` seeded sessions of the configuration; ten in a row share their weights."""
    base, overrides = CONFIGS[name]
    for number in range(trials):
        block = number // BATCH
        r = philox("peer-session", name, number)
        count = int(r.integers(1, 4))
        prompts = tuple((int(r.integers(1, 18)), int(r.integers(1000))) for _ in range(count))
        rounds = tuple(tuple(_tree(r) for _ in range(count)) for _ in range(int(r.integers(1, 4))))
        yield SessionCase(
            base, overrides, block % WEIGHT_SEEDS, REGIMES[block % len(REGIMES)], prompts, rounds, chunk=int(r.choice((0, 0, 4))),
            mixed=bool(r.integers(4)), hazards=((), ("fork",), ("evict",))[number % 3],
        )  # fmt: skip


def _tree(r: np.random.Generator) -> tuple[tuple[int, int], ...]:
    """Empty (plain decoding) in a third of the cases; else up to nine nodes: chain, star, random."""
    count = int(r.integers(0, 10)) if r.integers(3) else 0
    style = int(r.integers(3))
    return tuple(((0, i, int(r.integers(min(i, 5) + 1)))[style], int(r.integers(2))) for i in range(count))


def ops_of(config: Config, given: frozenset[str], judged: dict[tuple[str, int], Judgement]) -> Counter[str]:
    """How each operation of the model was checked. An operation without a tap is covered by the next tap that was judged over its region."""
    out: Counter[str] = Counter()
    readers: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    taps = [(tap.name, layer) for layer in range(-1, config.layers + 1) for tap in taps_of_layer(config, layer) if tap.name != "argmax"]
    for tap in taps:
        for source in inputs_of(config, *tap):
            readers[source].append(tap)
    for tap in taps:
        found, seen = tap, {tap}
        queue = [tap]
        while queue and found not in judged:
            for reader in readers[queue.pop(0)]:
                if reader not in seen:
                    seen.add(reader)
                    queue.append(reader)
                    found = reader if found not in judged else found
        judgement = judged.get(found)
        if judgement is None or judgement.verdict in (Verdict.UNVERIFIED, Verdict.UNSUPPORTED):
            out["UNVERIFIED"] += 1
        elif judgement.verdict in FINDINGS:
            out["finding"] += 1
        else:
            local = found == tap and all(source[0] in given for source in inputs_of(config, *tap))
            out["locally" if local else "by region"] += 1
    return out


def measure_sessions(peer: str, trials: int) -> dict[str, Any]:
    """Every configuration in turn. What the peer refuses is listed with its reason and costs no trials."""
    engine = resolve(peer)
    description = engine.describe()
    bench = Bench(InProcess(engine))
    cells: dict[str, dict[str, Cell]] = {}
    refused: dict[str, str] = {}
    findings: dict[str, dict[str, Any]] = {}
    verdicts: Counter[str] = Counter()
    able = [name for name in CONFIGS if not _refusal(bench, name, refused)]
    for name in able:
        cells[name] = {rung: Cell() for rung in RUNGS}
        for case in sessions(name, -(-trials // len(able))):
            _one(bench, case, name, cells[name], findings, verdicts)
    return {
        "version": description.version, "profile": description.profile.name, "trials": sum(verdicts.values()), "verdicts": dict(verdicts),
        "departures": [f"{d.field} = {d.value}: {d.reason}" for d in description.departures], "refused": refused, "findings": findings,
        "long": measure_long(peer),
        "configs": {name: {rung: vars(cell) | {"ops": dict(cell.ops)} for rung, cell in of.items()} for name, of in cells.items()},
    }  # fmt: skip


def _refusal(bench: Bench, name: str, refused: dict[str, str]) -> bool:
    outcome = bench.outcome(next(sessions(name, 1)))
    if outcome.verdict is Verdict.UNSUPPORTED:
        refused[name] = outcome.judgements[0].message.partition("open: ")[2]
    return name in refused


def _one(
    bench: Bench, case: SessionCase, name: str, cells: dict[str, Cell], findings: dict[str, dict[str, Any]], verdicts: Counter[str]
) -> None:
    description = bench.worker.description
    script = session_script(case, description.departures)
    trace = bench.worker.script(script)
    judge = session_judge(script.config, script.weights)
    judgements = judge.judge(script, trace)
    worst = next((j for j in judgements if j.verdict in FINDINGS), None)
    open_ones = [j for j in judgements if j.verdict is Verdict.UNVERIFIED]
    verdicts[str(worst.verdict if worst else Verdict.UNVERIFIED if open_ones else Verdict.WITHIN_BOUND)] += 1
    if worst is not None:
        key = f"{name} | {case.regime} | {worst.op} {worst.tap}, {worst.rung}"
        findings.setdefault(key, {"count": 0, "case": to_json(case), "message": worst.message})["count"] += 1
    errors = _logit_errors(script, trace.answers, judge)
    for rung, cell in cells.items():
        own = {(j.tap, j.layer): j for j in judgements if j.rung == rung}
        if not own:
            continue
        cell.trials += 1
        rows, error = errors.get(rung, (0, 0.0))
        cell.rows += rows
        cell.error_abs_max = max(cell.error_abs_max, error)
        cell.share_max = max(cell.share_max, *(j.share for j in own.values() if np.isfinite(j.share)))
        cell.ops += ops_of(script.config, description.taps, own)


def _logit_errors(script: Any, answers: list[Any], judge: Any) -> dict[str, tuple[int, float]]:
    """rung -> (rows with logits, largest |logit - golden|)."""
    answered = [(n, step) for n, (step, a) in enumerate(zip(script.steps, answers, strict=False)) if a.failure is None]
    golden = judge.golden_logits(script, answered)
    out: dict[str, tuple[int, float]] = {}
    start = 0
    for number, step in answered:
        if isinstance(step, Forward):
            count = int(step.want_logits.sum())
            own = answers[number].logits
            rung = "tree verify" if step.phase == "tree" else step.phase
            rows, error = out.get(rung, (0, 0.0))
            if count:
                error = max(error, float(np.abs(own - golden[start : start + count]).max()))
            out[rung] = (rows + count, error)
            start += count
    return out


def measure_long(peer: str) -> dict[str, Any]:
    """Twelve tokens at far positions, rotary part of Kimi-K2.5 (64 wide, theta 50000, YaRN 64): what float32 angles cost, and that the declared
    allowance holds. Empty where the peer refuses such positions."""
    engine = resolve(peer)
    config = departed(
        preset("tiny", rope_dim=64, rope_theta=50000.0, yarn=Yarn(64.0, 4096, 32.0, 1.0, 1.0, 1.0)), engine.describe().departures
    )
    judge = session_judge(config, WeightsKey(0))
    out: dict[str, Any] = {}
    for start in LONG_POSITIONS:
        count = 12
        rows = Rows(
            np.zeros(count, np.int32), (np.arange(count) * 7 % config.vocab).astype(np.int32),
            np.arange(start, start + count, dtype=np.int32), np.arange(-1, count - 1, dtype=np.int32),
        )  # fmt: skip
        script = Script(config, WeightsKey(0), (Forward(rows, np.ones(count, np.bool_), "prefill"),))
        with InProcess(engine) as worker:
            trace = worker.script(script)
        judgements = judge.judge(script, trace)
        if any(j.verdict is Verdict.UNSUPPORTED for j in judgements):
            return out
        out[str(start)] = {
            "error_abs_max": _logit_errors(script, trace.answers, judge)["prefill"][1],
            "share_max": max(j.share for j in judgements),
            "share_max_rope": max(j.share for j in judgements if j.op == "rope"),
            "verdicts": dict(Counter(str(j.verdict) for j in judgements)),
        }
    return out


def measure_ops(peer: str, trials: int) -> dict[str, Any]:
    """Seeded operations of the frozen mix, of those that the peer offers."""
    engine = resolve(peer)
    description = engine.describe()
    bench = Bench(InProcess(engine))
    table: dict[str, dict[str, Any]] = {}
    findings: dict[str, dict[str, Any]] = {}
    verdicts: Counter[str] = Counter()

    @hypothesis_seed(20261129)
    @settings(max_examples=trials, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(op_cases("full", tuple(sorted(description.ops))))
    def run(case: OpCase) -> None:
        outcome = bench.outcome(case)
        row = table.setdefault(case.op, {"trials": 0, "share_max": 0.0})
        row["trials"] += 1
        row["share_max"] = max([row["share_max"], *(j.share for j in outcome.judgements if np.isfinite(j.share))])
        verdicts[str(outcome.verdict)] += 1
        if outcome.verdict in FINDINGS and outcome.worst is not None:
            key = f"{case.op} | {case.regime} | {outcome.worst.tap}"
            findings.setdefault(key, {"count": 0, "case": to_json(case), "message": outcome.worst.message})["count"] += 1

    run()
    return {
        "version": description.version, "profile": description.profile.name, "trials": sum(verdicts.values()), "verdicts": dict(verdicts),
        "findings": findings, "ops": dict(sorted(table.items())),
    }  # fmt: skip


# The page


def page(results: dict[str, Any]) -> str:
    lines = [
        "# Agreement with released engines",
        "",
        "Measured by `python -m benchmarks.peers`; this page is generated from `benchmarks/results/peers.json`. Every engine computes in float32 on the CPU",
        "and is judged, operation by operation, within the certified bound of its profile. *error*: the largest difference of a logit from the golden one.",
        "*share*: the largest share of a bound that was used. *ops*: how the operations of the model were checked: locally (from the engine's own inputs), by",
        "region (bounds composed over operations that the engine does not show), UNVERIFIED (the composed bound was too wide to prove anything, or the",
        "engine refused the step: mlx-lm takes no branching trees).",
        "Sessions have prompts of 1 to 17 tokens, decode and tree rounds with commits, forks and evictions; weights also in the regimes tied experts,",
        "negative routing bias, large scores, tiny latents, outlier channel (logits in the thousands where embeddings are tied), hot expert.",
        "What these engines do wrong outside of such sessions is listed in [found.md](found.md).",
        "",
        *_summary(results["peers"]),
    ]
    for peer, found in results["peers"].items():
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(found["verdicts"].items()))
        lines += ["", f"## {peer}", "", f"{found['version']}; profile `{found['profile']}`; {found['trials']} trials: {verdicts}."]
        lines += [f"- departure by design: `{departure}`" for departure in found.get("departures", [])]
        lines += [f"- refused: {name}: {reason}" for name, reason in found.get("refused", {}).items()]
        lines += [f"- finding ({entry['count']} trials): {key}: {entry['message']}" for key, entry in found["findings"].items()]
        if found.get("long"):
            lines += ["", "| position (rotary part of Kimi-K2.5) | error | share | share in rope | verdicts |", "|---|---|---|---|---|"]
            lines += [_long_row(position, row) for position, row in found["long"].items()]
        lines += ["", *(_op_table(found["ops"]) if "ops" in found else _config_table(found["configs"]))]
    return "\n".join(lines) + "\n"


def _summary(found: dict[str, Any]) -> list[str]:
    """One line per peer and rung, over all configurations."""
    lines = [
        "| peer | rung | trials | error | share | ops locally | by region | UNVERIFIED | finding |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for peer, entry in found.items():
        for rung in RUNGS if "configs" in entry else ():
            cells = [of[rung] for of in entry["configs"].values() if of.get(rung, {}).get("trials")]
            if not cells:
                lines.append(f"| {peer} | {rung} | 0 | refused | | | | | |")
                continue
            ops: Counter[str] = Counter()
            for cell in cells:
                ops.update(cell["ops"])
            lines.append(
                _line(
                    f"{peer} | {rung}",
                    sum(c["trials"] for c in cells),
                    max(c["error_abs_max"] for c in cells),
                    max(c["share_max"] for c in cells),
                    ops,
                )
            )
        if "ops" in entry:
            ops_max = max(row["share_max"] for row in entry["ops"].values())
            lines.append(
                f"| {peer} | {len(entry['ops'])} operations | {entry['trials']} | | {share_text(ops_max)} | 100 % | 0 % | 0 % | {percent(sum(f['count'] for f in entry['findings'].values()), entry['trials'])} |"
            )
    return lines


def _line(head: str, trials: int, error: float, share: float, ops: Mapping[str, int]) -> str:
    total = sum(ops.values())
    rates = " | ".join(percent(ops.get(kind, 0), total) for kind in ("locally", "by region", "UNVERIFIED", "finding"))
    return f"| {head} | {trials} | {error:.1e} | {share_text(share)} | {rates} |"


def share_text(share: float) -> str:
    """A share below 1 is never printed as 1."""
    return "< 1" if share < 1 <= round(share, 2) else f"{share:.2f}"


def _long_row(position: str, row: dict[str, Any]) -> str:
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(row["verdicts"].items()))
    return (
        f"| {position} | {row['error_abs_max']:.1e} | {share_text(row['share_max'])} | {share_text(row['share_max_rope'])} | {verdicts} |"
    )


def _config_table(configs: dict[str, Any]) -> list[str]:
    lines = [
        "| configuration | rung | trials | error | share | ops locally | by region | UNVERIFIED | finding |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rungs in configs.items():
        for rung, cell in rungs.items():
            lines.append(_line(f"{name} | {rung}", cell["trials"], cell["error_abs_max"], cell["share_max"], cell["ops"]))
    return lines


def percent(part: int, total: int) -> str:
    """A rate that is neither 0 nor 1 is never shown as 0 % or 100 %."""
    if not total or not part:
        return "0 %"
    if part == total:
        return "100 %"
    return f"{min(max(100 * part / total, 0.01), 99.99):.4g} %"


def _op_table(ops: dict[str, Any]) -> list[str]:
    return [
        "| operation | trials | share |",
        "|---|---|---|",
        *(f"| {op} | {row['trials']} | {share_text(row['share_max'])} |" for op, row in ops.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer", action="append", help="only this peer; the results are merged into the file with --write")
    parser.add_argument("--trials", type=int, default=2000, help="per peer")
    parser.add_argument("--write", action="store_true", help="with --peer: merge into the results")
    parser.add_argument("--page", action="store_true", help="only make docs/agreement.md again from the results")
    options = parser.parse_args()
    results: dict[str, Any] = (
        json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"command": "python -m benchmarks.peers", "peers": {}}
    )
    for peer in () if options.page else options.peer or (*SESSION_PEERS, *OP_PEERS):
        if reason := peers.unavailable(peer.partition(":")[0]):
            print(f"{peer}: skipped, {reason}")
            continue
        began = time.perf_counter()
        found = measure_ops(peer, options.trials) if peer in OP_PEERS else measure_sessions(peer, options.trials)
        results["peers"][peer] = found | {"seconds": round(time.perf_counter() - began, 1)}
        print(
            f"{peer}: {found['trials']} trials in {results['peers'][peer]['seconds']} s, {found['verdicts']}, {len(found['findings'])} kinds of findings",
            flush=True,
        )
        if options.write or not options.peer:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    if options.write or options.page or not options.peer:
        TABLE.write_text(page(results), "utf-8")


if __name__ == "__main__":
    main()
