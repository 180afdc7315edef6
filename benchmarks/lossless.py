"""The critical invariant: decoding by draft trees emits what plain decoding emits. Run: `python -m benchmarks.lossless [--sessions 500]`.

For random sessions (two presets, unequal prompts, every drafter, budgets 1 to 24, stop tokens) the specification's DDTree tokens must equal its
autoregressive tokens, with bit-equal logits for each committed token. Each engine's own two loops must equal one another and the specification's,
up to TIEs: a differing token counts as one only where the engine, run again on that history with taps, passes every operation; each is listed with
its margin, and they may be 0.1 % of the tokens at most.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.isolation import Supervisor
from campaigns.trial import explainer, patience, session_judge
from oracles.judgement import FINDINGS, Verdict
from spec.config import preset
from spec.drafters import ChainDrafter, NoisyTargetDrafter, RandomDrafter, TableDrafter
from spec.engine import Drafter, Int, Limits
from spec.loops import Recording, ddtree, greedy
from spec.script import Generate, Script, WeightsKey

PRESETS = ("tiny", "tiny-softmax")
WEIGHT_SEEDS = 8
ENGINES = ("native", "blocked")
TIES_MAX = 1e-3  # of the tokens
RESULT = Path(__file__).parent / "results" / "lossless.json"


@dataclass
class Counts:
    """Of one engine."""

    tokens: int = 0
    differing: int = 0
    own_streams_differ: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    ties: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """One random session. The drafter may know the golden stream, so that acceptance runs over its whole range."""

    number: int
    script: Script
    prompts: tuple[Int, ...]
    drafter: Drafter
    budget: int
    limits: Limits
    golden: list[Recording]


def planned(number: int) -> Plan:
    draw = np.random.Generator(np.random.Philox(key=number))
    config = preset(PRESETS[number % len(PRESETS)])
    key = WeightsKey(int(draw.integers(WEIGHT_SEEDS)))
    prompts = tuple(draw.integers(0, config.vocab, int(draw.integers(1, 24)), dtype=np.int32) for _ in range(int(draw.integers(1, 4))))
    budget, block_len, max_new = int(draw.integers(1, 25)), int(draw.integers(1, 8)), int(draw.integers(6, 25))
    model = session_judge(config, key).model
    golden = greedy(model.open(), prompts, Limits(max_new))
    streams = tuple((*prompt.tolist(), *one.tokens) for prompt, one in zip(prompts, golden, strict=True))
    limits = Limits(max_new)
    if draw.random() < 0.3:
        limits = Limits(max_new, (int(draw.choice(golden[0].tokens)),))
        golden = greedy(model.open(), prompts, limits)
    seed = int(draw.integers(2**31))
    drafter: Drafter
    match int(draw.integers(6)):
        case 0:
            drafter = RandomDrafter(seed, config.vocab, block_len, grid=0.5)
        case 1:
            drafter = ChainDrafter(seed, config.vocab, block_len, streams)
        case 2:
            table = draw.normal(size=(config.vocab, block_len, config.vocab)).astype(np.float32)
            drafter = TableDrafter.of_array(table)
        case _:
            lengths = tuple(len(prompt) for prompt in prompts)
            drafter = NoisyTargetDrafter(seed, streams, lengths, config.vocab, block_len, float(draw.random()))
    steps = (Generate(prompts, None, 0, limits), Generate(prompts, drafter, budget, limits))
    return Plan(number, Script(config, key, steps), prompts, drafter, budget, limits, golden)


def golden_fault(plan: Plan) -> tuple[str, int, int]:
    """(what differs between the specification's two loops or "", accepted nodes, rounds)."""
    model = session_judge(plan.script.config, plan.script.weights).model
    accepted = rounds = 0
    for sequence, (plain, tree) in enumerate(
        zip(plan.golden, ddtree(model.open(), plan.prompts, plan.drafter, plan.budget, plan.limits), strict=True)
    ):
        accepted += sum(len(ran.path) - 1 for ran in tree.rounds)
        rounds += len(tree.rounds)
        if plain.tokens != tree.tokens:
            return f"session {plan.number}, sequence {sequence}: tokens {plain.tokens} and {tree.tokens}", accepted, rounds
        if not np.array_equal(plain.logits.view(np.uint32), tree.logits.view(np.uint32)):
            return f"session {plan.number}, sequence {sequence}: logits differ in their bits", accepted, rounds
    return "", accepted, rounds


def compare(supervisor: Supervisor, plan: Plan, counts: Counts) -> None:
    """The engine's two loops, held against one another, the golden stream, and the judge."""
    judge = session_judge(plan.script.config, plan.script.weights)
    trace = supervisor.script(plan.script)
    judgements = judge.judge(plan.script, trace, explain=explainer(supervisor, plan.script, judge))
    for judgement in judgements:
        counts.verdicts[str(judgement.verdict)] = counts.verdicts.get(str(judgement.verdict), 0) + 1
        if judgement.verdict in FINDINGS or judgement.verdict in (Verdict.UNVERIFIED, Verdict.UNSUPPORTED):
            counts.faults.append(f"session {plan.number}: {judgement.verdict} {judgement.message}")
        elif judgement.verdict is Verdict.TIE:
            counts.ties.append({"session": plan.number, "bound": judgement.bound, "message": judgement.message})
    loops = [answer.generations for answer in trace.answers]
    if len(loops) != 2 or loops[0] is None or loops[1] is None:
        return  # the judgements above say why
    for golden, plain, tree in zip(plan.golden, *loops, strict=True):
        counts.tokens += len(plain.tokens) + len(tree.tokens)
        counts.own_streams_differ += plain.tokens != tree.tokens
        # behind a first difference the histories differ: the judge goes on there with the engine's own history
        counts.differing += (plain.tokens != golden.tokens) + (tree.tokens != golden.tokens)
    excused = any(j.verdict is Verdict.TIE for j in judgements)
    if not excused and any(p.tokens != g.tokens or t.tokens != g.tokens for g, p, t in zip(plan.golden, *loops, strict=True)):
        counts.faults.append(f"session {plan.number}: tokens differ without a TIE")


def main() -> int:
    """Exit 1 where the invariant does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("engines", nargs="*", default=ENGINES)
    options = parser.parse_args()
    faults: list[str] = []
    accepted = rounds = tokens = 0
    counts = {engine: Counts() for engine in options.engines}
    supervisors = {engine: Supervisor(engine, deadline_s=patience()) for engine in options.engines}
    for supervisor in supervisors.values():
        supervisor.__enter__()
    try:
        for number in range(options.sessions):
            plan = planned(number)
            fault, more_accepted, more_rounds = golden_fault(plan)
            faults += [fault] if fault else []
            accepted, rounds = accepted + more_accepted, rounds + more_rounds
            tokens += sum(len(one.tokens) for one in plan.golden)
            for engine, supervisor in supervisors.items():
                compare(supervisor, plan, counts[engine])
    finally:
        for supervisor in supervisors.values():
            supervisor.__exit__(None, None, None)
    engines = {
        name: {
            "tokens": one.tokens,
            "streams_that_differ_from_the_spec": one.differing,
            "own_loops_that_differ": one.own_streams_differ,
            "ties": one.ties,
            "tie_share": len(one.ties) / max(1, one.tokens),
            "verdicts": one.verdicts,
            "faults": one.faults[:20],
            "holds": not one.faults and len(one.ties) <= TIES_MAX * one.tokens,
        }
        for name, one in counts.items()
    }
    body = {
        "command": " ".join(["python -m benchmarks.lossless", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "sessions": options.sessions,
        "holds": not faults and all(one["holds"] for one in engines.values()),
        "spec": {"tokens": tokens, "rounds": rounds, "accepted_per_round": round(accepted / max(1, rounds), 3), "faults": faults[:20]},
        "engines": engines,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body, indent=1))
    return 0 if body["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
