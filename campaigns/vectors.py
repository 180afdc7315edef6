"""Golden vectors: operations, trees and sessions as plain files, for engines that neither link a C ABI nor run Python.

    DIR/manifest.json          what to compute, from what, and where the results go; docs/vectors.md is the format, `version` its number
    DIR/ID.safetensors         `inputs.NAME` and, for reference, `golden.NAME` of one vector
    DIR/weights-ID.safetensors the weights of a session vector, [in, out]

An engine writes OUTPUTS/ID.safetensors with `outputs.NAME`; campaigns/vectors_check.py judges them. Golden values are for a person to look at:
an engine is never judged by equality with them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.case import GENERATOR, Case, CaseError, OpCase, SessionCase, to_json
from campaigns.materialise import op_call, op_call_of
from campaigns.plan import weights_key
from campaigns.vectors_suite import SUITES, Suite, TreeVector, session_of, tree_inputs
from campaigns.weights import weights_for
from impls.tensorfile import TensorFile, TensorFileError
from spec.config import as_parameters
from spec.config import from_json as config_from_json
from spec.drafters import TableDrafter
from spec.engine import PROFILES, Generation, Limits, Rows
from spec.ops import OPS
from spec.script import Answer, CacheRows, Commit, Evict, Fork, Forward, Generate, OpCall, Script, WeightsKey

FORMAT, VERSION = "paritree-vectors", 1
MANIFEST = "manifest.json"
PROFILE = "float32-any-order"
TREE_OPS = ("draft_table", "best_first_tree", "tree_mask", "accept", "compact")

Arrays = dict[str, NDArray[Any]]
Entry = dict[str, Any]


class VectorsError(CaseError):
    """A folder that holds no suite, or a damaged one; the message is one sentence that says what to do."""


# ---- export --------------------------------------------------------------------------------------------------------------------------


def export(folder: Path, suite: str = "small") -> dict[str, Any]:
    """Write the suite and return its manifest. An earlier suite in `folder` is replaced. Raises VectorsError."""
    if suite not in SUITES:
        raise VectorsError(f"there is no suite {suite!r}: choose one of {', '.join(SUITES)}")
    _make_room(folder)
    entries = [_written(folder, entry, files) for entry, files in _vectors(SUITES[suite])]
    manifest = {
        "format": FORMAT, "version": VERSION, "suite": suite, "generator": GENERATOR, "profile": profile_json(PROFILE), "hash": suite_hash(entries),
        "vectors": entries,
    }  # fmt: skip
    (folder / MANIFEST).write_text(_readable(manifest), "utf-8")
    return manifest


def _readable(manifest: Mapping[str, Any]) -> str:
    """One line per vector, so that a changed suite reads well as a diff."""
    head = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items() if key != "vectors"]
    lines = ",\n".join("  " + json.dumps(entry) for entry in manifest["vectors"])
    return "{\n" + ",\n".join([*head, ' "vectors": [\n' + lines + "\n ]"]) + "\n}\n"


def profile_json(name: str) -> dict[str, Any]:
    return {"name": name} | sparse(PROFILES[name])


def sparse(of: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults: a field that is added later changes no suite that does not use it."""
    named = {field.name: field for field in dataclasses.fields(of)}
    body = dataclasses.asdict(of)
    return {name: value for name, value in body.items() if getattr(of, name) != named[name].default}


def suite_hash(entries: list[Entry]) -> str:
    """Of every entry, and so of every tensor: they name the content of their files."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def content_hash(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Of names, dtypes, shapes and bytes; how a writer arranged the file does not matter."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {list(array.shape)}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _make_room(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    old = {path.name for path in folder.iterdir()}
    if not old:
        return
    if MANIFEST not in old:
        raise VectorsError(f"{folder} is not empty and holds no {MANIFEST}: give a new folder, or one with an earlier suite")
    for entry in read_manifest(folder)["vectors"]:
        for name in files_of(entry):
            (folder / name).unlink(missing_ok=True)
    (folder / MANIFEST).unlink()


def _written(folder: Path, entry: Entry, files: Mapping[str, Arrays]) -> Entry:
    from safetensors.numpy import save

    for key, arrays in files.items():
        name = f"{entry['id']}.safetensors" if key == "file" else f"{key}-{entry['id']}.safetensors"
        (folder / name).write_bytes(save({tensor: np.ascontiguousarray(value) for tensor, value in sorted(arrays.items())}))
        entry[key] = {"name": name, "sha256": content_hash(arrays)}
    return entry


def files_of(entry: Entry) -> list[str]:
    return [str(entry[key]["name"]) for key in ("file", "weights") if key in entry]


def _vectors(suite: Suite) -> Iterator[tuple[Entry, dict[str, Arrays]]]:
    counts: dict[str, int] = {}
    for case in suite.ops:
        number = counts[case.op] = counts.get(case.op, 0) + 1
        yield _op_vector(f"op-{case.op}-{number}", case)
    for tree in suite.trees:
        yield _tree_vector(f"tree-{tree.name}", tree)
    for name, session in suite.sessions.items():
        yield _session_vector(f"session-{name}", session)


def _op_vector(name: str, case: OpCase) -> tuple[Entry, dict[str, Arrays]]:
    record, call = OPS[case.op], op_call(case)
    golden = record.function(call.inputs, call.params)
    entry = {
        "id": name, "kind": "op", "op": case.op, "summary": f"{record.summary} ({case.regime} values)", "rules": list(record.rules), "params": dict(call.params),
        "inputs": {n: _tensor("inputs", n, a) for n, a in call.inputs.items()},
        "outputs": {n: _tensor("outputs", n, golden[n]) for n in call.outputs}, "case": _recipe(case),
    }  # fmt: skip
    return entry, {"file": _prefixed("inputs", call.inputs) | _prefixed("golden", golden)}


def _recipe(case: Case) -> Entry:
    """The case without fields at their defaults, as `campaigns.case.from_json` reads it."""
    body = json.loads(to_json(case))
    kept = {"kind", "schema", "generator"} | set(sparse(case))
    if isinstance(case, SessionCase) and case.generate is not None:
        body["generate"] = {name: body["generate"][name] for name in sparse(case.generate)}
    return {name: value for name, value in body.items() if name in kept}


def _tensor(prefix: str, name: str, array: NDArray[Any]) -> Entry:
    return {"tensor": f"{prefix}.{name}", "dtype": str(array.dtype), "shape": list(array.shape)}


def _prefixed(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def _tree_vector(name: str, vector: TreeVector) -> tuple[Entry, dict[str, Arrays]]:
    inputs = tree_inputs(vector)
    golden: Arrays = {}

    def answer(call: OpCall) -> Mapping[str, NDArray[Any]]:
        outputs = OPS[call.op].function(call.inputs, call.params)
        golden.update({tree_name(call.op, output): value for output, value in outputs.items()})
        return outputs

    run_tree(inputs, vector.params, answer)
    entry = {
        "id": name, "kind": "tree", "ops": list(TREE_OPS), "summary": vector.summary, "rules": [r for op in TREE_OPS for r in OPS[op].rules],
        "params": vector.params, "inputs": {n: _tensor("inputs", n, a) for n, a in inputs.items()},
        "outputs": {n: _tensor("outputs", n, a) for n, a in golden.items()}, "case": dataclasses.asdict(vector),
    }  # fmt: skip
    entry["rules"] = list(dict.fromkeys(entry["rules"]))
    return entry, {"file": _prefixed("inputs", inputs) | _prefixed("golden", golden)}


def tree_name(op: str, output: str) -> str:
    """The compacted cache is `cache`, all others keep the name of their operation's output."""
    return "cache" if op == "compact" else output


def run_tree(
    inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int], answer: Callable[[OpCall], Mapping[str, NDArray[Any]] | None]
) -> None:
    """The five calls of a tree vector, each on the answers to those before it, up to the first that `answer` answers with None.

    N = count. Masks, acceptance and compaction see the first N + 1 nodes; the target of a node is next_token[depth, token].
    """
    state: Arrays = {}
    for op in TREE_OPS:
        answers = answer(op_call_of(op, _tree_operands(op, inputs, params, state), params))
        if answers is None:
            return
        state |= answers


def _tree_operands(op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int], state: Arrays) -> Arrays:
    if op == "draft_table":
        return {"logits": inputs["logits"]}
    if op == "best_first_tree":
        return {"ids": state["ids"], "log_probs": state["log_probs"]}
    rows = int(state["count"][0]) + 1
    tokens, parents, depths = (state[name][:rows] for name in ("tokens", "parents", "depths"))
    if op == "tree_mask":
        return {"parents": parents}
    if op == "accept":
        return {"tokens": tokens, "parents": parents, "target": inputs["next_token"][depths, tokens]}
    return {"cache": inputs["cache"][: params["prefix_len"] + rows], "path": state["path"][: int(state["length"][0])]}


# ---- sessions ------------------------------------------------------------------------------------------------------------------------


def _session_vector(name: str, case: SessionCase) -> tuple[Entry, dict[str, Arrays]]:
    from campaigns.isolation.inprocess import InProcess
    from impls.golden import GoldenEngine

    script = session_of(case)
    with InProcess(GoldenEngine()) as golden:
        trace = golden.script(script)
    inputs: Arrays = {}
    outputs: Arrays = {}
    steps = []
    for number, (step, answer) in enumerate(zip(script.steps, trace.answers, strict=True)):
        assert answer.failure is None, answer.failure
        steps.append(step_json(number, step, inputs))
        outputs |= answer_arrays(number, answer)
    weights = dict(weights_for(script.config, weights_key(case)))
    entry = {
        "id": name, "kind": "session", "summary": _summary(case), "rules": ["N2", "N3", "C1", "C2", "C3", "K1", "K2", "K3", "A1", "L1"],
        "config": sparse(script.config), "parameters": as_parameters(script.config), "steps": steps, "case": _recipe(case),
    }  # fmt: skip
    return entry, {"file": _prefixed("inputs", inputs) | _prefixed("golden", outputs), "weights": weights}


def _summary(case: SessionCase) -> str:
    rounds = f"{len(case.rounds)} rounds of draft trees"
    return f"{len(case.prompts)} prompts{f' in chunks of {case.chunk}' if case.chunk else ''}, {rounds}, then the engine's own loop three times"


def step_json(number: int, step: Any, inputs: Arrays) -> Entry:
    """One step of a script; its arrays are added to `inputs` under `NUMBER.WORD`."""

    def stored(**arrays: NDArray[Any]) -> dict[str, str]:
        inputs.update({f"{number}.{word}": array for word, array in arrays.items()})
        return {word: f"inputs.{number}.{word}" for word in arrays}

    match step:
        case Forward(rows, want, phase):
            tensors = stored(
                sequence=rows.sequence, token=rows.token, position=rows.position, parent=rows.parent, want=want.astype(np.uint8)
            )
            return {"do": "forward", "phase": phase} | tensors
        case Commit(sequence, path):
            return {"do": "commit", "sequence": sequence} | stored(path=path)
        case CacheRows(sequence):
            return {"do": "cache_rows", "sequence": sequence}
        case Evict(sequence):
            return {"do": "evict", "sequence": sequence}
        case Fork(source, target):
            return {"do": "fork", "source": source, "target": target}
        case Generate(prompts, drafter, budget, limits, None):
            inputs.update({f"{number}.prompt.{i}": prompt for i, prompt in enumerate(prompts)})
            out = {
                "do": "generate", "prompts": [f"inputs.{number}.prompt.{i}" for i in range(len(prompts))], "budget": budget,
                "max_new": limits.max_new, "stop_tokens": list(limits.stop_tokens), "block_len": 0,
            }  # fmt: skip
            if drafter is None:
                return out
            assert isinstance(drafter, TableDrafter), "a client can look up a table, but not run a drafter of ours"
            return out | stored(draft=np.array(drafter.table, np.float32)) | {"block_len": drafter.block_len}
    raise CaseError(f"a {type(step).__name__} of this kind cannot be written as a vector")


def answer_arrays(number: int, answer: Answer) -> Arrays:
    """NUMBER.logits, .cache, .tap.NAME.LAYER, .tokens.I, .round.I.R.WORD."""
    out: Arrays = {}
    if answer.logits is not None and len(answer.logits):
        out[f"{number}.logits"] = answer.logits
    if answer.cache is not None:
        out[f"{number}.cache"] = answer.cache
    out |= {f"{number}.tap.{name}.{layer}": value for (name, layer), value in answer.taps.items()}
    for i, generation in enumerate(answer.generations or ()):
        out |= {f"{number}.{name}": value for name, value in _generation_arrays(i, generation).items()}
    return out


def _generation_arrays(sequence: int, generation: Generation) -> Arrays:
    out: Arrays = {f"tokens.{sequence}": np.array(generation.tokens, np.int32)}
    for number, one in enumerate(generation.rounds):
        words = {"tokens": one.tokens, "parents": one.parents, "path": one.path, "bonus": [one.bonus]}
        out |= {f"round.{sequence}.{number}.{word}": np.array(values, np.int32) for word, values in words.items()}
    return out


# ---- reading -------------------------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises VectorsError for a folder without one, another version, or a changed one."""
    path = folder / MANIFEST
    again = "export it again: paritree vectors export"
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise VectorsError(f"{folder}: no {MANIFEST}; a suite is a folder that `paritree vectors export` wrote") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise VectorsError(f"{path}: broken JSON ({problem}), was it cut? {again}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise VectorsError(f"{path}: format is {manifest.get('format') if isinstance(manifest, dict) else None!r}, but must be {FORMAT!r}")
    if manifest.get("version") != VERSION:
        raise VectorsError(f"{path}: version {manifest.get('version')!r}, this paritree reads {VERSION}: use the version that wrote it")
    if manifest.get("hash") != suite_hash(manifest.get("vectors", [])):
        raise VectorsError(f"{path}: its entries do not have the hash that it states, it was edited or cut; {again}")
    return manifest


def read_tensors(path: Path) -> Arrays:
    """Every tensor of a safetensors file. Raises TensorFileError."""
    file = TensorFile(path)
    return {name: _booleans(np.array(file.raw(name))) for name in file.entries}


def _booleans(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.uint8) if array.dtype == np.bool_ else array


def read_checked(folder: Path, file: Mapping[str, str]) -> Arrays:
    """The tensors of a file that the manifest names. Raises VectorsError where they are not those that were exported."""
    try:
        arrays = read_tensors(folder / file["name"])
    except TensorFileError as problem:
        raise VectorsError(f"{problem}; export the suite again") from None
    if content_hash(arrays) != file["sha256"]:
        raise VectorsError(f"{folder / file['name']}: its tensors are not those that were exported; export the suite again")
    return arrays


def script_steps(entry: Entry, arrays: Mapping[str, NDArray[Any]]) -> list[Any]:
    """The inverse of `step_json` over all steps of a session vector."""
    out: list[Any] = []
    for step in entry["steps"]:
        match step["do"]:
            case "forward":
                rows = Rows(*(arrays[step[word]] for word in ("sequence", "token", "position", "parent")))
                out.append(Forward(rows, arrays[step["want"]].astype(np.bool_), step["phase"]))
            case "commit":
                out.append(Commit(step["sequence"], arrays[step["path"]]))
            case "cache_rows":
                out.append(CacheRows(step["sequence"]))
            case "evict":
                out.append(Evict(step["sequence"]))
            case "fork":
                out.append(Fork(step["source"], step["target"]))
            case "generate":
                drafter = TableDrafter.of_array(arrays[step["draft"]]) if "draft" in step else None
                limits = Limits(step["max_new"], tuple(step["stop_tokens"]))
                out.append(Generate(tuple(arrays[name] for name in step["prompts"]), drafter, step["budget"], limits))
            case other:
                raise VectorsError(f"{entry['id']}: there is no step {other!r}; this paritree reads version {VERSION}")
    return out


def script_of(entry: Entry, arrays: Mapping[str, NDArray[Any]]) -> Script:
    return Script(config_from_json(entry["config"]), WeightsKey(0), tuple(script_steps(entry, arrays)))
