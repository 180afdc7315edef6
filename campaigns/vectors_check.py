"""Outputs that an engine wrote for a suite of golden vectors: judged by the oracles that judge a running engine, never by equality.

OUTPUTS holds one ID.safetensors per vector and, optionally, engine.json: who wrote them, under which profile, and what it does not do.
Whatever is wrong with a file is a judgement about its vector; only a suite that cannot be read is an error of ours (VectorsError).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.isolation import validate
from campaigns.isolation.validate import Malformed
from campaigns.materialise import op_call_of
from campaigns.recorded import profile_named
from campaigns.vectors import TREE_OPS, VectorsError, read_checked, read_manifest, read_tensors, run_tree, script_of, tree_name
from impls.tensorfile import TensorFileError
from oracles.judge import judge_op
from oracles.judgement import FINDINGS, Judgement, Verdict, worst
from oracles.session import SessionJudge
from spec.engine import PROFILES, Description, Generation, Profile, Round
from spec.model import GoldenModel
from spec.script import Answer, CacheRows, Failure, Forward, Generate, OpCall, Script, Trace
from spec.taps import all_tap_names

ENGINE = "engine.json"
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Checked:
    """The judgements of one vector, in data order. `rules`: those that the vector exercises, `rule` the one that the worst judgement names."""

    id: str
    kind: str
    rules: tuple[str, ...]
    judgements: tuple[Judgement, ...]

    @property
    def worst(self) -> Judgement | None:
        return worst(list(self.judgements))

    @property
    def verdict(self) -> Verdict:
        found = self.worst
        return Verdict.UNVERIFIED if found is None else found.verdict


@dataclass(frozen=True)
class Author:
    """What engine.json says. `ops` None: every operation is offered; `failed`: vector -> the engine's own error."""

    description: Description
    ops: frozenset[str] | None
    unsupported: Mapping[str, str]
    failed: Mapping[str, str]


def check(folder: Path, outputs: Path | None = None, profile: str = "") -> tuple[Author, list[Checked]]:
    """One Checked per vector of the suite in `folder`, and one for files that belong to no vector. `outputs`: FOLDER/outputs.

    `profile` goes before that of engine.json, which goes before that of the suite. Raises VectorsError, CaseError for an unknown profile.
    """
    manifest = read_manifest(folder)
    place = folder / "outputs" if outputs is None else outputs
    if not place.is_dir():
        raise VectorsError(f"{place}: no such folder; run your engine on {folder} (docs/vectors.md), or give --outputs DIR")
    author = read_author(place, str(manifest["profile"]["name"]), profile)
    judged = []
    for entry in manifest["vectors"]:
        given = read_checked(folder, entry["file"])
        weights = read_checked(folder, entry["weights"]) if "weights" in entry else {}
        judged.append(Checked(entry["id"], entry["kind"], tuple(entry["rules"]), tuple(_judged(entry, given, weights, place, author))))
    stray = _stray_files(place, [entry["id"] for entry in manifest["vectors"]])
    return author, judged + ([Checked("outputs", "files", (), tuple(stray))] if stray else [])


# ---- engine.json ---------------------------------------------------------------------------------------------------------------------


def read_author(place: Path, default: str, profile: str = "") -> Author:
    """Raises VectorsError for an engine.json that cannot be read, and for a profile or a field of one that does not exist."""
    path = place / ENGINE
    try:
        body = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as problem:
        raise VectorsError(f"{path}: {problem}; it is optional: repair it or remove it") from None
    if not isinstance(body, dict):
        raise VectorsError(f"{path}: holds a {type(body).__name__}, but must be an object")
    known = {"engine", "version", "profile", "capabilities", "ops", "taps", "unsupported", "failed"}
    if unknown := sorted(set(body) - known):
        raise VectorsError(f"{path}: there is no field {unknown[0]!r}; there are {', '.join(sorted(known))}")
    declared = profile_named(profile) if profile else _profile(path, body.get("profile", default))
    capabilities = body.get("capabilities", ["forward", "taps", "commit", "cache_rows", "fork", "evict", "generate", "generate_tree"])
    name, version = str(body.get("engine", place.name)), str(body.get("version", ""))
    description = Description(name, version, declared, _words(path, capabilities), taps=_words(path, body.get("taps", all_tap_names())))
    ops = _words(path, body["ops"]) if "ops" in body else None
    return Author(description, ops, _texts(path, body, "unsupported"), _texts(path, body, "failed"))


def _profile(path: Path, given: object) -> Profile:
    """A name, or an object with `name` and the fields that differ from the profile of that name (from the defaults for a name of your own)."""
    if isinstance(given, str):
        return profile_named(given)
    if not isinstance(given, dict):
        raise VectorsError(f"{path}: profile is {given!r}, but must be a name or an object")
    fields = dict(given)
    name = str(fields.pop("name", "float32-any-order"))
    base = PROFILES.get(name, Profile(name))
    if "height_block" in fields:
        block = fields.pop("height_block")
        fields["height"] = f"blocked:{block}" if block else "any"
    for field, value in fields.items():
        if field not in vars(base):
            raise VectorsError(f"{path}: a profile has no field {field!r}; there are {', '.join(vars(base))} and height_block")
        kind = type(getattr(base, field))
        fields[field] = bool(value) if kind is bool else float(value) if kind is float and isinstance(value, (int, float)) else value
    try:
        return validate.description(Description("", "", dataclasses.replace(base, **fields))).profile
    except Malformed as problem:
        raise VectorsError(f"{path}: {problem}") from None


def _words(path: Path, given: Any) -> frozenset[str]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(word, str) for word in given):
        raise VectorsError(f"{path}: {given!r} must be a list of names")
    return frozenset(given)


def _texts(path: Path, body: Mapping[str, Any], field: str) -> dict[str, str]:
    given = body.get(field, {})
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values()):
        raise VectorsError(f"{path}: {field} must be an object of texts, vector -> reason")
    return given


# ---- files ---------------------------------------------------------------------------------------------------------------------------


def _judged(entry: dict[str, Any], given: Arrays, weights: Arrays, place: Path, author: Author) -> list[Judgement]:
    """A file that is missing or torn is the one judgement of its vector."""
    name, rung = entry["id"], "prefill" if entry["kind"] == "session" else "ops"
    path = place / f"{name}.safetensors"

    def of_file(verdict: Verdict, what: str, message: str) -> list[Judgement]:
        return [Judgement(verdict, f"engine {what}", entry.get("op", ""), "file", rung, message=message)]

    if name in author.unsupported:
        return of_file(Verdict.UNSUPPORTED, "unsupported", f"{name}: {author.unsupported[name]}")
    if name in author.failed:
        return of_file(Verdict.MALFORMED, "raised", f"{name}: the engine's own error: {author.failed[name]}")
    if not path.exists():
        if entry["kind"] == "op" and author.ops is not None and entry["op"] not in author.ops:
            return of_file(Verdict.UNSUPPORTED, "unsupported", f"{name}: the engine does not offer {entry['op']}")
        text = f"{path} is missing: the engine wrote nothing for {name}; if it does not do this, say so in {ENGINE}, field `unsupported`"
        return of_file(Verdict.MALFORMED, "missing", text)
    try:
        tensors = read_tensors(path)
    except TensorFileError as problem:
        return of_file(Verdict.MALFORMED, "torn", str(problem))
    outputs = {key.removeprefix("outputs."): value for key, value in tensors.items()}
    inputs = {key.removeprefix("inputs."): value for key, value in given.items() if key.startswith("inputs.")}
    if entry["kind"] == "session":
        judgements, known = _judge_session(entry, given, weights, outputs, author)
    else:
        known = set(entry["outputs"])
        judge = _judge_tree if entry["kind"] == "tree" else _judge_op
        judgements = judge(entry, inputs, given, outputs, author)
    return judgements + _stray_tensors(name, outputs, known)


def _stray_tensors(name: str, outputs: Arrays, known: set[str]) -> list[Judgement]:
    stray = sorted(set(outputs) - known)
    if not stray:
        return []
    close = difflib.get_close_matches(stray[0], sorted(known - set(outputs)), 1)
    hint = f" (should it be {close[0]!r}?)" if close else ""
    text = f"{name}: output {stray[0]!r} belongs to no part of this vector{hint}; {len(stray)} such tensors were not looked at"
    return [Judgement(Verdict.WARNING, "engine extra", "", "file", "ops", message=text)]


def _stray_files(place: Path, ids: list[str]) -> list[Judgement]:
    stray = sorted(path.name for path in place.glob("*.safetensors") if path.stem not in ids)
    close = difflib.get_close_matches(stray[0].removesuffix(".safetensors"), ids, 1) if stray else []
    hint = f" (should it be {close[0]}.safetensors?)" if close else ""
    text = f"{place}: {stray[0]} belongs to no vector of the suite{hint}; {len(stray)} such files were not looked at" if stray else ""
    return [Judgement(Verdict.WARNING, "engine extra", "", "file", "ops", message=text)] if stray else []


# ---- operations and trees ------------------------------------------------------------------------------------------------------------


def _judge_op(entry: dict[str, Any], inputs: Arrays, given: Arrays, outputs: Arrays, author: Author) -> list[Judgement]:
    return judge_op(op_call_of(entry["op"], inputs, entry["params"]), outputs, author.description.profile)


def _judge_tree(entry: dict[str, Any], inputs: Arrays, given: Arrays, outputs: Arrays, author: Author) -> list[Judgement]:
    """Each link on the engine's own outputs, on golden ones where it does not offer the operation; the first finding ends the chain."""
    judgements: list[Judgement] = []

    def answer(call: OpCall) -> Mapping[str, NDArray[Any]] | None:
        step = TREE_OPS.index(call.op)
        names = {name: tree_name(call.op, name) for name in call.outputs}
        if author.ops is not None and call.op not in author.ops and not any(stored in outputs for stored in names.values()):
            text = f"{entry['id']}: the engine does not offer {call.op}; what follows is judged on golden values"
            judgements.append(Judgement(Verdict.UNSUPPORTED, "engine unsupported", call.op, "call", "ops", step=step, message=text))
            return {name: given[f"golden.{stored}"] for name, stored in names.items()}
        found = {name: outputs[stored] for name, stored in names.items() if stored in outputs}
        made = judge_op(call, found, author.description.profile, step=step)
        judgements.extend(made)
        return None if any(judgement.verdict in FINDINGS for judgement in made) else found

    run_tree(inputs, entry["params"], answer)
    return judgements


# ---- sessions ------------------------------------------------------------------------------------------------------------------------


def _judge_session(
    entry: dict[str, Any], given: Arrays, weights: Arrays, outputs: Arrays, author: Author
) -> tuple[list[Judgement], set[str]]:
    """The judgements, and the names that were read. The trace is put together from the file as a worker would have brought it back."""
    script = script_of(entry, given)
    seen: set[str] = set()
    answers = [_answer(number, step, script, outputs, author.description, seen) for number, step in enumerate(script.steps)]
    trace = Trace(author.description, answers)
    return SessionJudge(GoldenModel(script.config, weights)).judge(script, trace), seen


def _answer(number: int, step: Any, script: Script, outputs: Arrays, description: Description, seen: set[str]) -> Answer:
    own = {name.removeprefix(f"{number}."): value for name, value in outputs.items() if name.startswith(f"{number}.")}
    needed = _capability(step)
    if needed not in description.capabilities and not own:
        return Answer(failure=Failure("unsupported", f"the engine does not offer {needed}"))
    try:
        if isinstance(step, Forward):
            answer = _forward(step, script, own)
        elif isinstance(step, CacheRows):
            answer = Answer(
                cache=validate.array_of(_need(own, "cache"), "cache", "float32", (script.config.layers, None, script.config.cache_dim))
            )
        elif isinstance(step, Generate):
            answer = Answer(generations=_generations(step, script, own))
        else:
            return Answer()
    except Malformed as problem:
        seen.update(f"{number}.{name}" for name in own)
        return Answer(failure=Failure("malformed", f"{problem}; outputs of step {number} are outputs.{number}.NAME"))
    seen.update(f"{number}.{name}" for name in own if name.split(".")[0] in ("logits", "tap", "cache", "tokens", "round"))
    return answer


def _capability(step: Any) -> str:
    if isinstance(step, Generate):
        return "generate" if step.drafter is None else "generate_tree"
    return {"Forward": "forward", "Commit": "commit", "CacheRows": "cache_rows", "Fork": "fork", "Evict": "evict"}[type(step).__name__]


def _need(own: Arrays, name: str) -> NDArray[Any]:
    if name not in own:
        raise Malformed(f"{name} is missing")
    return own[name]


def _forward(step: Forward, script: Script, own: Arrays) -> Answer:
    wanted = int(np.count_nonzero(step.want_logits))
    sink = validate.Taps(script.config, frozenset(all_tap_names()), len(step.rows), wanted)
    for name, value in own.items():
        if name.startswith("tap."):
            _, tap, layer = name.split(".") if name.count(".") == 2 else ("", name, "0")
            sink(tap, int(layer) if layer.lstrip("-").isdigit() else -2, value)
    if sink.problem is not None:
        raise Malformed(sink.problem)
    logits = _need(own, "logits") if wanted else np.zeros((0, script.config.vocab), np.float32)
    return Answer(logits=validate.logits(logits, wanted, script.config), taps=sink.arrays)


def _generations(step: Generate, script: Script, own: Arrays) -> list[Generation]:
    """tokens.I and round.I.R.WORD of every prompt I; rounds are numbered from 0 without a gap."""
    out = []
    for i in range(len(step.prompts)):
        rounds: list[Round] = []
        while f"round.{i}.{len(rounds)}.tokens" in own:
            words = {word: _integers(own, f"round.{i}.{len(rounds)}.{word}") for word in ("tokens", "parents", "path", "bonus")}
            if len(words["bonus"]) != 1:
                raise Malformed(f"round.{i}.{len(rounds)}.bonus has {len(words['bonus'])} elements, but must have 1")
            rounds.append(Round(words["tokens"], words["parents"], words["path"], words["bonus"][0]))
        out.append(Generation(_integers(own, f"tokens.{i}"), tuple(rounds)))
    return validate.generations(out, step, script.config)


def _integers(own: Arrays, name: str) -> tuple[int, ...]:
    return tuple(validate.array_of(_need(own, name), name, "int32", (None,)).tolist())
