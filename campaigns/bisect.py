"""Where a failing case leaves the specification: guilty operation, layer and token, and how its error travels to the logits.

One pass on the minimal case is enough where the engine has taps: the judge looks at each operation on the engine's own inputs, so the first
finding in data order is the location and later deviations are consequences. Beside it the golden model runs the same script, and
the relative distance of each tap shows how the error grows or fades on its way to the token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.case import Case, OpCase, SessionCase, TreeCase
from campaigns.fingerprint import Fingerprint
from campaigns.isolation import Supervisor
from campaigns.materialise import op_call, session_script
from campaigns.plan import depths
from campaigns.trial import Bench, golden_model, judged_call, patience, session_judge
from oracles.judgement import FINDINGS, Judgement
from spec import tree
from spec.engine import Generation, Rows
from spec.loops import prefill_rows
from spec.ops import OPS
from spec.script import Answer, Commit, Evict, Fork, Forward, Generate, Script, Step, Trace
from spec.taps import taps_of_layer

AT_LEAST = 1e-30  # of a tap's scale: a row of exact zeros has no relative error


@dataclass(frozen=True)
class Station:
    """One tap on the way: the relative distance to the golden tap (largest deviation over the largest golden value)."""

    tap: str
    layer: int
    step: int
    relative_error: float
    share: float  # of the local bound; 0 where the tap was not judged


@dataclass(frozen=True)
class Location:
    """`token`: row of the batch of `step`. `stations` of the guilty step, in data order; empty for an engine without taps."""

    judgement: Judgement
    stations: tuple[Station, ...]
    token_changed: bool
    note: str

    def sentence(self) -> str:
        j = self.judgement
        layer = f", layer {j.layer}" if j.layer >= 0 else ""
        token = f", row {j.token}" if j.token >= 0 else ""
        return f"{j.op or j.rule}{layer}{token} of step {j.step + 1} ({j.rung}): {j.message}"


def located(bench: Bench, case: Case) -> Location | None:
    """None where the case passes."""
    if isinstance(case, SessionCase):
        return _in_session(bench, case)
    judgements = list(bench.outcome(case).judgements)
    found = next((j for j in judgements if j.verdict in FINDINGS), None)
    if found is None:
        return None
    stations = _of_call(bench, case) if isinstance(case, OpCase) else ()
    where = "operation" if isinstance(case, OpCase) else f"link {found.step + 1} of the tree chain"
    return Location(found, stations, False, f"one {where}, on the engine's own inputs")


def _of_call(bench: Bench, case: OpCase) -> tuple[Station, ...]:
    call = op_call(case)
    (answer,) = bench.worker.calls([call])
    if answer.outputs is None:
        return ()
    golden = OPS[case.op].function(call.inputs, call.params)
    judged = {j.tap: j.share for j in judged_call(call, answer, bench.worker.description.profile, 0)}
    return tuple(
        Station(name, -1, 0, relative_error(found, golden[name]), judged.get(name, 0.0))
        for name, found in answer.outputs.items()
        if name in golden
    )


def _in_session(bench: Bench, case: SessionCase) -> Location | None:
    script = session_script(case, bench.worker.description.departures)
    trace = bench.worker.script(script)
    judgements = session_judge(script.config, script.weights).judge(script, trace)
    found = next((j for j in judgements if j.verdict in FINDINGS), None)
    if found is None:
        return None
    inside = _inside_the_loop(bench, script, trace, found)
    if inside is not None:
        return Location(
            inside,
            (),
            False,
            "the engine's own loop gives no taps: its rounds, driven from outside with the trees that it built, fail here",
        )
    if found.step >= len(trace.answers) or not trace.answers[found.step].taps:
        note = "the engine gives no taps at this step, so the location is the step" if trace.answers else "the engine gave no answer"
        return Location(found, (), False, note)
    shares = {(j.tap, j.layer): j.share for j in judgements if j.step == found.step}
    golden = golden_answers(script)
    stations = tuple(
        Station(name, layer, found.step, relative_error(array, golden[found.step].taps[name, layer]), shares.get((name, layer), 0.0))
        for name, layer, array in _taps_in_order(script, trace, found.step)
        if (name, layer) in golden[found.step].taps and array.dtype.kind == "f"
    )
    changed = _token_changed(trace.answers[found.step], golden[found.step])
    return Location(found, stations, changed, "first finding in data order on the engine's own taps; one pass")


def _inside_the_loop(bench: Bench, script: Script, trace: Trace, found: Judgement) -> Judgement | None:
    """The first finding of the same rounds run batch by batch, with taps; None where the finding is not in the loop, or the rounds are right."""
    if found.step >= min(len(trace.answers), len(script.steps)) or not bench.worker.description.taps:
        return None
    step, generations = script.steps[found.step], trace.answers[found.step].generations
    if not isinstance(step, Generate) or not generations:
        return None
    again = driven(script, step, generations)
    judgements = session_judge(again.config, again.weights).judge(again, bench.worker.script(again))
    return next((j for j in judgements if j.verdict in FINDINGS), None)


def driven(script: Script, step: Generate, generations: Sequence[Generation]) -> Script:
    """The rounds that the engine reports, as a script: prompts in one batch, then in each round the trees of all sequences that still run. Ends
    before a tree or path that is none."""
    rows, want = prefill_rows([prompt.copy() for prompt in step.prompts])
    steps: list[Step] = [Forward(rows, want, "prefill")]
    lengths = [len(prompt) for prompt in step.prompts]
    steps += [Commit(sequence, np.arange(length, dtype=np.int32)) for sequence, length in enumerate(lengths)]
    for number in range(max(len(generation.rounds) for generation in generations)):
        live = {s: generation.rounds[number] for s, generation in enumerate(generations) if number < len(generation.rounds)}
        if any(one.path[:1] != (0,) or not all(0 <= token < script.config.vocab for token in one.tokens) for one in live.values()):
            break
        try:
            for one in live.values():
                tree.check_structure(np.array(one.parents, np.int32), np.array(one.tokens, np.int32))
                tree.check_path(np.array(one.path, np.int32), len(one.tokens))
        except tree.TreeError:
            break
        columns: dict[str, list[int]] = {word: [] for word in ("sequence", "token", "position", "parent")}
        for sequence, one in live.items():
            start, parents = len(columns["token"]), np.array(one.parents, np.int32)
            columns["sequence"] += [sequence] * len(parents)
            columns["token"] += one.tokens
            columns["position"] += (lengths[sequence] + depths(parents)).tolist()
            columns["parent"] += [parent + start if parent >= 0 else -1 for parent in one.parents]
        made = Rows(**{word: np.array(values, np.int32) for word, values in columns.items()})
        phase = "tree" if any(len(one.tokens) > 1 for one in live.values()) else "decode"
        steps.append(Forward(made, np.ones(len(made), np.bool_), phase))
        for sequence, one in live.items():
            steps.append(Commit(sequence, np.array(one.path, np.int32)))
            lengths[sequence] += len(one.path)
    return Script(script.config, script.weights, tuple(steps))


def _taps_in_order(script: Script, trace: Trace, step: int) -> Iterator[tuple[str, int, NDArray[Any]]]:
    taps = trace.answers[step].taps
    for layer in range(-1, script.config.layers + 1):
        for tap in taps_of_layer(script.config, layer):
            if (tap.name, layer) in taps:
                yield tap.name, layer, taps[tap.name, layer]


def _token_changed(found: Answer, golden: Answer) -> bool:
    if found.logits is None or golden.logits is None or found.logits.shape != golden.logits.shape:
        return False
    return bool((found.logits.argmax(axis=-1) != golden.logits.argmax(axis=-1)).any())


def golden_answers(script: Script) -> list[Answer]:
    """The golden model's taps, logits and caches of the forward steps of a script; other steps get empty answers."""
    model = golden_model(script.config, script.weights)
    session = model.open()
    names = frozenset(tap.name for layer in range(-1, script.config.layers + 1) for tap in taps_of_layer(script.config, layer))
    answers = []
    for step in script.steps:
        answer = Answer()
        if isinstance(step, Forward):
            answer.logits = session.forward(_copied(step.rows), step.want_logits, names, _sink(answer))
        elif isinstance(step, Commit):
            session.commit(step.sequence, step.path)
        elif isinstance(step, Evict):
            session.evict(step.sequence)
        elif isinstance(step, Fork):
            session.fork(step.source, step.target)
        answers.append(answer)
    return answers


def _sink(answer: Answer) -> Any:
    def take(name: str, layer: int, array: NDArray[Any]) -> None:
        answer.taps[name, layer] = np.array(array)

    return take


def _copied(rows: Rows) -> Rows:
    return Rows(rows.sequence.copy(), rows.token.copy(), rows.position.copy(), rows.parent.copy())


def relative_error(found: NDArray[Any], golden: NDArray[Any]) -> float:
    """Largest deviation over the largest golden value; infinite where a value is not finite or the shapes differ."""
    if found.shape != golden.shape:
        return float("inf")
    if not found.size:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        deviation = float(np.max(np.abs(found.astype(np.float64) - golden.astype(np.float64))))
    if not np.isfinite(deviation):
        return float("inf")
    return deviation / max(float(np.max(np.abs(golden.astype(np.float64)))), AT_LEAST)


def trace_column(location: Location) -> list[list[Any]]:
    """[tap, layer, relative error, share of bound] in data order: the store's column `trace`."""
    return [[s.tap, s.layer, _finite(s.relative_error), _finite(s.share)] for s in location.stations]


def _finite(value: float) -> float:
    return value if np.isfinite(value) else 1e308  # JSON has no infinity; the page shows it as such


def bisect_column(location: Location) -> dict[str, Any]:
    """The store's column `bisect`."""
    j = location.judgement
    tap = f"{j.tap} layer {j.layer}" if j.layer >= 0 else j.tap
    before = ""
    for station in location.stations:
        if (station.tap, station.layer) == (j.tap, j.layer):
            break
        before = f"{station.tap} layer {station.layer}"
    return {"by": "tap", "op": j.op, "first_bad": tap, "last_good": before, "steps": 1, "note": f"{location.sentence()} [{location.note}]"}


def tree_column(case: Case, judgement: Judgement) -> list[dict[str, Any]]:
    """Trees of the rounds, as the page draws them: the store's column `tree`."""
    from campaigns.plan import config_of, hit_path, tree_parents, tree_tokens

    if isinstance(case, TreeCase):
        return []
    if not isinstance(case, SessionCase):
        return []
    config = config_of(case)
    rounds = []
    for number, trees in enumerate(case.rounds):
        for sequence, nodes in enumerate(trees[: len(case.prompts)]):
            if not nodes:
                continue
            parents = tree_parents(nodes)
            seed = case.prompts[sequence][1]
            rounds.append({
                "title": f"round {number + 1}, sequence {sequence}",
                "tokens": tree_tokens(config, parents, seed * 31 + number * 7 + sequence).tolist(),
                "parents": parents.tolist(),
                "path": hit_path(nodes, parents).tolist(),
                "expected_path": [],
                "guilty": [judgement.token] if judgement.rung == "tree verify" and 0 <= judgement.token < len(parents) else [],
            })  # fmt: skip
    return rounds


def first_bad(builds: list[str], case: Case, wanted: Fingerprint | None) -> str | None:
    """The first engine of `builds` (oldest first, one change from good to bad) on which the case fails; None where the last one passes.

    Raises EngineLoadError for a build that cannot be loaded: leave it out and ask again.
    """

    from campaigns.replay import replayed  # which reads capsules, which hold what this file finds

    def fails(engine: str) -> bool:
        with Supervisor(engine, deadline_s=patience()) as supervisor:
            return replayed(supervisor, case, wanted).reproduced > 0

    if not builds or not fails(builds[-1]):
        return None
    low, high = 0, len(builds) - 1  # builds[high] is bad
    while low < high:
        middle = (low + high) // 2
        if fails(builds[middle]):
            high = middle
        else:
            low = middle + 1
    return builds[high]
