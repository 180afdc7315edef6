"""A finding as a folder that a stranger can use: case.json, arrays.safetensors, README.md, repro.py (for C ABI engines and operations repro.cpp,
for a finding that shows only after earlier cases history.jsonl with them, oldest first).

Written beside its place, synced and renamed, so that a capsule is complete or is not there. Opening one never executes anything from it. The
arrays hold what repro.py needs to run the case without paritree: inputs or weights and batches, what was found, what should be, the bound.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from campaigns import repro
from campaigns.case import Case, CaseError, OpCase, SessionCase, TreeCase, from_json, to_json
from campaigns.locate import locator
from campaigns.materialise import op_call, session_script, tree_job, weights_for
from campaigns.relations import twin
from campaigns.repro_cpp import program
from campaigns.trial import REFUSAL, Bench
from oracles.judgement import Judgement, Verdict
from spec.config import as_parameters
from spec.engine import Description, Generation
from spec.script import Answer, CacheRows, Commit, Evict, Fork, Forward, Generate, OpCall, Script
from spec.weights import is_large

FORMAT = 1
CASE, ARRAYS, README, REPRO, PROGRAM = "case.json", "arrays.safetensors", "README.md", "repro.py", "repro.cpp"
HISTORY = "history.jsonl"

Arrays = dict[str, NDArray[Any]]


class CapsuleError(ValueError):
    """A folder that is no capsule, or a damaged one; the message is one sentence."""


@dataclass(frozen=True)
class Capsule:
    """What a capsule says. `plan` is the metadata of its arrays: finding, engine, steps, check."""

    folder: Path
    case: Case
    plan: Mapping[str, Any]
    earlier: tuple[Case, ...] = ()  # must have run before `case` in the same engine

    @property
    def finding(self) -> Mapping[str, Any]:
        finding: Mapping[str, Any] = self.plan["finding"]
        return finding


def read(folder: Path) -> Capsule:
    """Raises CapsuleError."""
    if not (folder / CASE).is_file():
        raise CapsuleError(f"{folder}: no {CASE}; a capsule is a folder that `paritree check` wrote under findings/")
    try:
        case = from_json((folder / CASE).read_text("utf-8"))
        earlier = history(folder)
        _, plan = repro.read_safetensors(folder / ARRAYS)
    except (CaseError, repro.Damaged, UnicodeDecodeError) as problem:
        raise CapsuleError(f"{folder}: {problem}") from None
    if plan.get("format") != FORMAT:
        raise CapsuleError(f"{folder}: format {plan.get('format')!r}, this paritree reads {FORMAT}")
    return Capsule(folder, case, plan, earlier)


def history(folder: Path) -> tuple[Case, ...]:
    """The earlier cases of a capsule; () for most. Raises CaseError."""
    lines = (folder / HISTORY).read_text("utf-8").splitlines() if (folder / HISTORY).is_file() else ()
    return tuple(from_json(line) for line in lines)


def write(
    folder: Path, engine: str, bench: Bench, case: Case, judgement: Judgement, *, finding_id: str, located: str = "",
    earlier: Sequence[Case] = (), runs: int = 1,
) -> None:  # fmt: skip
    """The capsule of `judgement`, the first finding of `case` behind `earlier`. They are run once more for the engine's arrays: the worker must be
    one in which nothing has run. `runs`: of repro.py; more than one for a finding that shows only sometimes."""
    arrays, plan = recorded(bench, case, judgement, earlier)
    description = bench.worker.description
    plan |= {
        "format": FORMAT,
        "runs": runs,
        "engine": locator(engine),
        "finding": {
            "id": finding_id, "engine": description.name, "engine_version": description.version, "engine_spec": engine, "profile": description.profile.name,
            "verdict": str(judgement.verdict), "op": judgement.op, "rule": judgement.rule, "output": judgement.tap, "rung": judgement.rung,
            "layer": judgement.layer, "message": judgement.message,
        },
    }  # fmt: skip
    files = {
        CASE: (to_json(case) + "\n").encode(),
        ARRAYS: save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, {"paritree": json.dumps(plan)}),
        README: readme(case, judgement, description, engine, finding_id, located, earlier).encode(),
        REPRO: Path(repro.__file__).read_bytes(),
    }
    if earlier:
        files[HISTORY] = "".join(to_json(one) + "\n" for one in earlier).encode()
    if plan["engine"]["kind"] == "abi" and isinstance(case, OpCase) and not earlier:
        files[PROGRAM] = program(op_call(case), judgement, plan["engine"]["path"]).encode()
    _publish(folder, files)


def _publish(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".tmp-{folder.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for name, data in files.items():
        with open(temporary / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    old = folder.parent / f".old-{folder.name}-{os.getpid()}"
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(old, ignore_errors=True)


# ---- what repro.py runs --------------------------------------------------------------------------------------------------------------


def recorded(bench: Bench, case: Case, judgement: Judgement, earlier: Sequence[Case] = ()) -> tuple[Arrays, dict[str, Any]]:
    """Arrays, and the plan: what runs before, steps up to the guilty one and the check. Raises CaseError for a recorded case."""
    arrays: Arrays = {}
    weights: dict[Any, str] = {}  # (config, key) -> the prefix of its names
    before = [block for number, one in enumerate(earlier) for block in _before(arrays, weights, bench, one, f"before {number}.")]
    if isinstance(case, OpCase):
        call = op_call(case)
        answers = bench.worker.calls([call])
        plan = _of_calls(arrays, [call], answers, judgement)
    elif isinstance(case, TreeCase):
        made = bench.worker.trees([tree_job(case)])[0][: judgement.step + 1]
        plan = _of_calls(arrays, [call for call, _ in made], [answer for _, answer in made], judgement)
    elif isinstance(case, SessionCase):
        script = session_script(case, bench.worker.description.departures)
        trace = bench.worker.script(script)
        plan = _of_script(arrays, weights, script, trace.answers, bench.worker.description, judgement)
    else:
        raise CaseError("a recorded case has its arrays already")
    return arrays, plan | ({"earlier": before} if before else {})


def _before(arrays: Arrays, weights: dict[Any, str], bench: Bench, case: Case, prefix: str) -> list[dict[str, Any]]:
    """An earlier case, run in the worker and written down: one block of steps, two where its relation runs it a second way."""
    worker = bench.worker
    if isinstance(case, OpCase):
        call = op_call(case)
        worker.calls([call])
        return [{"steps": _call_steps(arrays, [call], prefix)}]
    if isinstance(case, TreeCase):
        return [{"steps": _call_steps(arrays, [call for call, _ in worker.trees([tree_job(case)])[0]], prefix)}]
    if not isinstance(case, SessionCase):
        raise CaseError("a recorded case runs on no engine")
    scripts = [session_script(case, worker.description.departures)]
    if case.relation:
        scripts.append(twin(case, worker.description.departures)[1])
    blocks = []
    for number, script in enumerate(scripts):
        answers = worker.script(script).answers
        steps = _script_steps(arrays, script, answers, len(script.steps), f"{prefix}{number}.")
        blocks.append(_surroundings(arrays, weights, script, worker.description) | {"steps": steps})
    return blocks


def _of_calls(arrays: Arrays, calls: list[OpCall], answers: list[Answer], judgement: Judgement) -> dict[str, Any]:
    steps = _call_steps(arrays, calls, "")
    step = min(judgement.step, len(steps) - 1)
    found = answers[step].outputs if step < len(answers) else None
    arrays.update({f"answer.{name}": value for name, value in (found or {}).items()})
    return {"steps": steps, "check": _check(judgement, step, dict.fromkeys(found or (), None), arrays)}


def _call_steps(arrays: Arrays, calls: Sequence[OpCall], prefix: str) -> list[dict[str, Any]]:
    steps = []
    for number, call in enumerate(calls):
        for name, value in call.inputs.items():
            arrays[f"{prefix}{number}.{name}"] = value
        steps.append({
            "do": "op", "op": call.op, "params": dict(call.params), "inputs": {name: f"{prefix}{number}.{name}" for name in call.inputs},
            "outputs": {name: [list(shape), dtype] for name, (shape, dtype) in call.outputs.items()}, "hazards": sorted(call.hazards),
        })  # fmt: skip
    return steps


def _surroundings(arrays: Arrays, weights: dict[Any, str], script: Script, description: Description) -> dict[str, Any]:
    """What a script runs under. Equal weights are written once, and the engine's session with them is the same one."""
    prefix = weights.setdefault((script.config, script.weights), f"weight{len(weights) or ''}.")
    if not is_large(script.config):  # gigabytes: the case line makes them again
        arrays.update({f"{prefix}{name}": value for name, value in weights_for(script.config, script.weights).items()})
    return {
        "config": dataclasses.asdict(script.config), "parameters": as_parameters(script.config), "taps": sorted(description.taps), "weights": prefix,
        "hazards": sorted(script.hazards),
    }  # fmt: skip


def _script_steps(arrays: Arrays, script: Script, answers: Sequence[Answer], count: int, prefix: str) -> list[dict[str, Any]]:
    """The first `count` steps."""
    steps: list[dict[str, Any]] = []
    for number, step in enumerate(script.steps[:count]):
        key = f"{prefix}{number}"
        match step:
            case Forward(rows, want, phase):
                columns = {"sequence": rows.sequence, "token": rows.token, "position": rows.position, "parent": rows.parent}
                arrays.update({f"{key}.{word}": value for word, value in columns.items()})
                arrays[f"{key}.want"] = want.astype(np.uint8)
                steps.append({"do": "forward", "rows": key, "phase": phase})
            case Commit(sequence, path):
                arrays[f"{key}.path"] = path
                steps.append({"do": "commit", "sequence": sequence, "path": f"{key}.path"})
            case CacheRows(sequence):
                steps.append({"do": "cache_rows", "sequence": sequence})
            case Evict(sequence):
                steps.append({"do": "evict", "sequence": sequence})
            case Fork(source, target):
                steps.append({"do": "fork", "source": source, "target": target})
            case Generate():
                steps.append(_generate_step(arrays, key, step, answers[number] if number < len(answers) else Answer()))
    return steps


def _of_script(
    arrays: Arrays, weights: dict[Any, str], script: Script, answers: list[Answer], description: Description, judgement: Judgement
) -> dict[str, Any]:
    last = min(judgement.step, len(script.steps) - 1)
    steps = _script_steps(arrays, script, answers, last + 1, "")
    answer = answers[last] if last < len(answers) else Answer()
    layers: dict[str, int | None] = {}
    if answer.logits is not None:
        arrays["answer.logits"] = answer.logits
        layers["logits"] = None
    if answer.cache is not None:
        arrays["answer.cache"] = answer.cache
        layers["cache"] = None
    for (name, layer), value in answer.taps.items():
        if name == judgement.tap and layer == judgement.layer:
            arrays[f"answer.{name}@{layer}"] = value
            layers[name] = layer
    if answer.generations is not None:
        arrays.update({f"answer.{name}": value for name, value in generation_arrays(answer.generations).items()})
    plan = _surroundings(arrays, weights, script, description)
    return plan | {"steps": steps, "check": _check(judgement, last, layers, arrays)}


def _generate_step(arrays: Arrays, key: str, step: Generate, answer: Answer) -> dict[str, Any]:
    """Draft logits are recorded for every history that the engine asked for, and for those that it met: the prompt and what it emitted, round by
    round. An engine that drafts from another history than its own asks for one that it never emitted."""
    generations = answer.generations or []
    histories: dict[tuple[int, tuple[int, ...]], None] = {}
    for index, prompt in enumerate(step.prompts):
        arrays[f"{key}.prompt.{index}"] = prompt
        emitted = generations[index].tokens if index < len(generations) else ()
        for length in range(len(emitted) + 1):
            histories[index, (*prompt.tolist(), *emitted[:length])] = None
    drafts = []
    if step.drafter is not None:
        for number, (sequence, history_) in enumerate([*histories, *(asked for asked in answer.drafted if asked not in histories)]):
            arrays[f"{key}.draft.{number}"] = np.asarray(step.drafter.draft(sequence, np.array(history_, np.int32)), np.float32)
            drafts.append({"sequence": sequence, "history": list(history_), "logits": f"{key}.draft.{number}"})
    return {
        "do": "generate", "prompts": [f"{key}.prompt.{i}" for i in range(len(step.prompts))], "budget": step.budget,
        "max_new": step.limits.max_new, "stop_tokens": list(step.limits.stop_tokens), "drafts": drafts,
        "sampling": None if step.sampling is None else dataclasses.asdict(step.sampling),
    }  # fmt: skip


def generation_arrays(generations: list[Generation]) -> Arrays:
    """The names that repro.py gives to the tokens and rounds of each sequence."""
    out: Arrays = {}
    for number, generation in enumerate(generations):
        out[f"tokens {number}"] = np.array(generation.tokens, np.int64)
        for index, one in enumerate(generation.rounds):
            for word in ("tokens", "parents", "path"):
                out[f"{word} {number}.{index}"] = np.array(getattr(one, word), np.int64)
            out[f"bonus {number}.{index}"] = np.array([one.bonus], np.int64)
    return out


def _check(judgement: Judgement, step: int, layers: Mapping[str, int | None], arrays: Arrays) -> dict[str, Any]:
    """How repro.py decides: by the named element where it can be read from the answer, else by the whole answer; an answer of the wrong kind by its
    shape and type."""
    layer = layers.get(judgement.tap)
    answer = arrays.get(f"answer.{judgement.tap}" if layer is None else f"answer.{judgement.tap}@{layer}")
    numeric = judgement.bound >= 0 and (judgement.found != judgement.expected or not np.isfinite(judgement.found))
    element = judgement.tap in layers and bool(judgement.index) and numeric
    if judgement.verdict == Verdict.FLAKY:
        what = "element" if element else "flaky"
    elif judgement.verdict == Verdict.MALFORMED and answer is not None:
        what = "shape"
    elif judgement.verdict in (Verdict.CRASHED, Verdict.HUNG, Verdict.MALFORMED):
        what = "failure"
    elif judgement.tap == REFUSAL:
        what = "refusal"
    else:
        what = "element" if element else "answer"
    return {
        "what": what, "step": step, "name": judgement.tap, "layer": layer, "index": list(judgement.index),
        "expected": judgement.expected, "bound": judgement.bound, "found": judgement.found,
    }  # fmt: skip


# ---- in words ------------------------------------------------------------------------------------------------------------------------


def readme(
    case: Case, judgement: Judgement, description: Description, engine: str, finding_id: str, located: str, earlier: Sequence[Case] = ()
) -> str:
    j = judgement
    lines = [
        f"# {finding_id}: {j.verdict} in {j.op or j.rule}",
        "",
        j.message or f"{j.tap} of {j.op}",
        "",
        f"- engine: {description.name} {description.version}, profile {description.profile.name}, named `{engine}`",
        f"- where: {j.rung}, operation {j.op or '-'}, output {j.tap}, layer {j.layer}, step {j.step + 1}, row {j.token}, index {list(j.index)}",
        f"- found {j.found!r}, expected {j.expected!r}, bound {j.bound:.3g}, share of the bound {j.share:.3g}",
        f"- rule: {j.rule}; `paritree explain {j.rule}` says what it means",
        f"- smallest input: {in_words(case)}",
    ]
    if earlier:
        lines.append(
            f"- only after {len(earlier)} earlier {'case' if len(earlier) == 1 else 'cases'} in the same engine (`{HISTORY}`), in this order:"
        )
        lines += [f"  {number}. {in_words(one)}" for number, one in enumerate(earlier, 1)]
    if located:
        lines.append(f"- location: {located}")
    lines += [
        "",
        "## See it again",
        "",
        "    python repro.py                  # exit 1: it fails again, 0: it does not, 4: the engine cannot be loaded",
        "    python repro.py --engine OTHER   # another build: PATH.so or MODULE:ATTRIBUTE",
        f"    paritree replay . --engine {engine}",
        "    git bisect run paritree replay --bisect . --engine ...",
        "",
        "`case.json` is the recipe (seeds and sizes), `arrays.safetensors` holds the numbers. Nothing in this folder is executed by paritree.",
        "",
    ]
    return "\n".join(lines)


def in_words(case: Case) -> str:
    """One sentence about the input."""
    names: tuple[str, ...] = getattr(case, "hazards", ())
    hazards = f", hazards {', '.join(names)}" if names else ""
    if isinstance(case, OpCase):
        dims = ", ".join(f"{word} = {value}" for word, value in case.dims)
        params = "".join(f", {name} {value:g}" for name, value in case.params)
        return f"{case.op} with {dims}{params}, {case.regime} values, seed {case.seed}{hazards}"
    if isinstance(case, TreeCase):
        return (
            f"draft tree of budget {case.budget} from {case.depth} depths of {case.vocab} tokens behind {case.prefix_len} committed rows, "
            f"seed {case.seed}{hazards}"
        )
    if isinstance(case, SessionCase):
        lengths = ", ".join(str(length) for length, _ in case.prompts)
        overrides = "".join(f", {name} = {value}" for name, value in case.overrides)
        trees = "; ".join("trees of " + ", ".join(str(len(tree)) for tree in trees) + " nodes" for trees in case.rounds) or "no rounds"
        drawn = ", sampled" if case.generate and case.generate.sampling else ""
        loop = f"; then its own loop ({case.generate.drafter} drafter, budget {case.generate.budget}{drawn})" if case.generate else ""
        return f"preset {case.preset}{overrides}, {case.regime} weights, prompts of {lengths} tokens, {trees}{loop}{hazards}"
    return f"{case.op} on recorded tensors"
