"""Sampling is lossless, measured. Run: `python -m benchmarks.sampling [--sessions 300]`; writes benchmarks/results/sampling.json.

1. Laws: whole decoding loops on a vocabulary of three, enumerated over every outcome of their draws. Total variation against the law of
   autoregressive sampling: below 1e-12 for the two exact schemes under every sampling here, above 0.05 in the mean for every lossy one.
2. Tokens: with noise keyed by (seed, position), the specification's draft-tree tokens equal its sequential tokens at random temperatures,
   truncations, penalties, drafters, budgets, stops and limits, with bit-equal logits for each.
3. Engines: the tokens that each engine draws in its own loops, held against the golden draws by the judge.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.case import GenerateCase, SessionCase
from campaigns.isolation import Supervisor
from campaigns.trial import Bench, patience, session_judge
from oracles.judgement import FINDINGS
from oracles.law import TOTAL_VARIATION_EXACT, Law, Stream, autoregressive_law, emitted_law, total_variation
from spec.config import preset
from spec.drafters import NoisyTargetDrafter, TableDrafter
from spec.engine import Float, Int, Limits
from spec.loops import ddtree, sequential
from spec.model import GoldenModel
from spec.sampling import Sampling
from spec.schemes import EXACT, LOSSY, Chance, Sampler, Scheme
from spec.script import WeightsKey
from spec.weights import philox, random_weights

RESULT = Path(__file__).parent / "results" / "sampling.json"
ENGINES = ("native", "blocked")
WRONG = 0.05  # a scheme is shown to be lossy above this mean total variation
TARGETS = 6  # random targets and drafters per scheme
VOCAB, MAX_NEW = 3, 3
LAWS = (
    Sampling(),
    Sampling(temperature=0.6, top_k=2),
    Sampling(top_p=0.8, frequency_penalty=0.7),
    Sampling(repetition_penalty=1.5, presence_penalty=-0.4, logit_bias=((0, 0.5),)),
)
FIELDS: dict[str, tuple[float, ...]] = {
    "temperature": (0.3, 0.7, 1.0, 2.0),
    "top_k": (0, 3, 20),
    "top_p": (1.0, 0.9, 0.5),
    "min_p": (0.0, 0.05),
    "repetition_penalty": (1.0, 1.3, 0.6),
    "presence_penalty": (0.0, 1.5, -2.0),
    "frequency_penalty": (0.0, 1.0, -2.0),
}


def small_target(seed: int) -> GoldenModel:
    """The golden model with a vocabulary of three and logits of about one nat, so that no token dominates."""
    config = preset("tiny", vocab=VOCAB)
    weights = random_weights(config, seed)
    weights["head"] *= np.float32(0.5)
    return GoldenModel(config, weights)


class Remembered:
    """Logits by history, of one golden model: an enumeration asks for the same few histories thousands of times."""

    def __init__(self, model: GoldenModel) -> None:
        self._model = model
        self._rows: dict[tuple[int, ...], Float] = {}

    def __call__(self, history: Sequence[int]) -> Float:
        key = tuple(history)
        if key not in self._rows:
            self._rows[key] = self._model.sequence_logits(key)[-1]
        return self._rows[key]


class SmallSession:
    """What a loop needs of a session: the same model, with logits looked up by the history of each row."""

    def __init__(self, logits: Remembered) -> None:
        self._logits = logits
        self._committed: list[int] = []
        self._pending: list[int] = []

    def forward(self, rows: Any, want_logits: Any, taps: Any, sink: Any) -> Float:
        histories: list[list[int]] = []
        for token, parent in zip(rows.token.tolist(), rows.parent.tolist(), strict=True):
            histories.append([*(histories[parent] if parent >= 0 else self._committed), token])
        self._pending = rows.token.tolist()
        return np.array([self._logits(h) for h, wanted in zip(histories, want_logits.tolist(), strict=True) if wanted], np.float32)

    def commit(self, sequence: int, path: Int) -> None:
        self._committed += [self._pending[index] for index in path.tolist()]


def law_of(logits: Remembered, drafter: TableDrafter, scheme: Scheme, sampling: Sampling) -> Law:
    def run(chance: Chance) -> Stream:
        decider = Sampler(sampling, scheme, chance)
        return ddtree(SmallSession(logits), [np.array([1], np.int32)], drafter, 3, Limits(MAX_NEW), decider)[0].tokens

    return emitted_law(run)


def laws() -> dict[str, Any]:
    distances: dict[str, list[float]] = {}
    for seed in range(TARGETS):
        logits = Remembered(small_target(seed))
        drafter = TableDrafter.of_array(philox("law", seed).integers(-8, 8, (VOCAB, 2, VOCAB)) / 4)
        for name, scheme in (EXACT | LOSSY).items():
            for sampling in LAWS if name in EXACT else LAWS[:1]:
                expected = autoregressive_law(logits, sampling, [1], MAX_NEW)
                distances.setdefault(name, []).append(total_variation(law_of(logits, drafter, scheme, sampling), expected))
    out = {name: {"cases": len(d), "mean": float(np.mean(d)), "max": max(d)} for name, d in distances.items()}
    for name, row in out.items():
        print(f"{name:24} total variation {row['mean']:.3g} in the mean, {row['max']:.3g} at most, {row['cases']} laws")
    return out


def drawn(number: int) -> tuple[tuple[str, float], ...]:
    draws = philox("benchmark sampling", number)
    return tuple((name, values[int(draws.integers(len(values)))]) for name, values in FIELDS.items())


def keyed(sessions: int) -> dict[str, int]:
    """Of the specification: tree tokens against sequential ones."""
    counts: Counter[str] = Counter()
    for number in range(sessions):
        draws = philox("benchmark session", number)
        config = preset(("tiny", "tiny-softmax")[number % 2])
        model = session_judge(config, WeightsKey(number % 8)).model
        fields = {name: int(value) if name == "top_k" else value for name, value in drawn(number)}
        sampler = Sampler(Sampling(**fields, seed=number))  # type: ignore[arg-type]
        prompts = [draws.integers(0, config.vocab, int(draws.integers(1, 12)), dtype=np.int32) for _ in range(int(draws.integers(1, 4)))]
        limit = int(draws.integers(6, 16))
        free = sequential(model.open(), prompts, Limits(limit + 6), sampler)
        stops = (free[0].tokens[int(draws.integers(limit))],) if number % 3 == 0 else ()
        golden = tuple((*p.tolist(), *r.tokens) for p, r in zip(prompts, free, strict=True))
        lengths = tuple(map(len, prompts))
        drafter = NoisyTargetDrafter(number, golden, lengths, config.vocab, int(draws.integers(1, 8)), 0.8, 0.5 if number % 2 else 0.0)
        one = sequential(model.open(), prompts, Limits(limit, stops), sampler)
        other = ddtree(model.open(), prompts, drafter, int(draws.integers(1, 25)), Limits(limit, stops), sampler)
        for plain, tree in zip(one, other, strict=True):
            counts["sequences"] += 1
            counts["tokens"] += len(plain.tokens)
            counts["differing"] += plain.tokens != tree.tokens or not np.array_equal(
                plain.logits.view(np.uint32), tree.logits.view(np.uint32)
            )
            counts["rounds"] += len(tree.rounds)
            counts["accepted drafts"] += sum(len(turn.path) - 1 for turn in tree.rounds)
            counts["paths off the first nodes"] += sum(turn.path != tuple(range(len(turn.path))) for turn in tree.rounds)
            counts["not the argmax"] += sum(int(row.argmax()) != token for row, token in zip(plain.logits, plain.tokens, strict=True))
        counts["sessions"] += 1
    print(f"specification: {counts['differing']} of {counts['sequences']} sequences differ, {counts['tokens']} tokens")
    return dict(counts)


def engine(name: str, sessions: int) -> dict[str, Any]:
    tokens: Counter[str] = Counter()
    faults: list[str] = []
    with Supervisor(name, deadline_s=patience()) as supervisor:
        bench = Bench(supervisor)
        for number in range(sessions):
            draws = philox("benchmark engine", number)
            loop = GenerateCase(
                ("random", "noisy", "table", "chain", "none")[number % 5], number, 80, number % 3 - 1, int(draws.integers(0, 13)), 4, 12,
                4 if number % 4 == 0 else -1, drawn(number),
            )  # fmt: skip
            prompts = tuple((int(draws.integers(1, 9)), number * 7 + i) for i in range(int(draws.integers(1, 4))))
            judgements = bench.outcome(SessionCase("tiny", (), number % 8, "ordinary", prompts, (), generate=loop)).judgements
            tokens.update({str(j.verdict): j.checked for j in judgements if (j.op, j.tap) == ("generate", "stream")})
            faults += [j.message for j in judgements if j.verdict in FINDINGS]
    print(f"{name}: {sum(tokens.values())} drawn tokens, {dict(tokens)}, {len(faults)} findings")
    return {"sessions": sessions, "tokens_by_verdict": dict(tokens), "findings": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sessions", type=int, default=300)
    options = parser.parse_args()
    report = {
        "command": f"python -m benchmarks.sampling --sessions {options.sessions}",
        "machine": {"processor": platform.machine(), "python": platform.python_version(), "numpy": np.__version__},
        "limits": {"exact": TOTAL_VARIATION_EXACT, "wrong": WRONG},
        "total_variation": laws(),
        "specification": keyed(options.sessions),
        "engines": {name: engine(name, options.sessions) for name in ENGINES},
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    exact = all(report["total_variation"][name]["max"] < TOTAL_VARIATION_EXACT for name in EXACT)
    wrong = all(report["total_variation"][name]["mean"] > WRONG for name in LOSSY)
    same = report["specification"]["differing"] == 0 and not any(one["findings"] for one in report["engines"].values())
    return 0 if exact and wrong and same else 1


if __name__ == "__main__":
    sys.exit(main())
