"""python repro.py: run the smallest failing case of this folder on its engine. Exit 1: it fails again, 0: it does not, 4: the engine cannot be loaded.

Needs NumPy and the engine, nothing of paritree. Inputs, weights, the wrong value and what it should be are in arrays.safetensors beside this
file; nothing there is executed. The engine runs in a child process, so that a crash, an exit or a hang is an answer as well. Where the failure
shows only after earlier cases, these run first, in the same engine; where it shows only sometimes, the case runs several times.

    python repro.py [--engine PATH.so | MODULE:ATTRIBUTE] [--timeout SECONDS]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import os
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 60.0
POISON_FLOAT_BITS, POISON_INT, POISON_BYTE = 0x7FC0DEAD, -7777777, 0xA5
GUARD_BYTES, WIDE_GUARD_BYTES, MARGIN_BYTES = 64, 16384, 256
SESSIONS_OPEN = 2  # as in the worker in which it failed: an engine may keep state between sessions
NOT_LOADABLE, DAMAGED, FAILS_AGAIN, PASSES = 4, 2, 1, 0
UNSUPPORTED = 1  # PARITREE_UNSUPPORTED
DTYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64, "U8": np.uint8, "BOOL": np.bool_}


class Damaged(Exception):
    """A file of the capsule is cut or is no safetensors file; the message is one sentence."""


class NotLoadable(Exception):
    """The engine cannot be loaded; the message says why and what to do."""


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, metadata). Raises Damaged."""
    try:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            if stop > len(raw):
                raise ValueError("cut")
            tensors[name] = np.frombuffer(raw[start:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return tensors, json.loads(header["__metadata__"]["paritree"])
    except OSError as problem:
        raise Damaged(f"{path}: {problem.strerror}; a capsule is the folder with case.json and arrays.safetensors") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as problem:
        raise Damaged(f"{path}: damaged or cut ({problem}); take the capsule from its store again") from None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", help="another build or class than the recorded one")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds until the engine counts as hung")
    parser.add_argument("--inner", type=int, default=-1, help=argparse.SUPPRESS)  # where the child tells that it came to an end
    options = parser.parse_args()
    try:
        tensors, plan = read_safetensors(HERE / "arrays.safetensors")
    except Damaged as problem:
        print(problem, file=sys.stderr)
        return DAMAGED
    if options.engine:
        plan["engine"] = located(options.engine)
    if options.inner < 0:
        return watched(plan, options)
    try:
        code = run(plan, tensors)
    except NotLoadable as problem:
        print(f"the engine cannot be loaded: {problem}", file=sys.stderr)
        code = NOT_LOADABLE
    sys.stdout.flush()
    os.write(options.inner, bytes([code]))
    return code


def watched(plan: Mapping[str, Any], options: argparse.Namespace) -> int:
    """The case in a child process. One that ends without having told its result was ended by the engine, with whatever exit status."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--inner",
        str(writing),
        *(["--engine", options.engine] if options.engine else []),
    ]
    print(f"{plan['finding']['message']}", flush=True)
    try:
        code = subprocess.run(command, timeout=options.timeout, pass_fds=(writing,)).returncode
    except subprocess.TimeoutExpired:
        print(f"fails again: no answer within {options.timeout:g} s")
        return FAILS_AGAIN
    os.close(writing)
    try:
        told = os.read(reading, 1)
    except BlockingIOError:
        told = b""
    if told:
        return told[0]
    print(f"fails again: the engine ended the process with {f'signal {-code}' if code < 0 else f'exit status {code}'}, without an answer")
    return FAILS_AGAIN


def located(engine: str) -> dict[str, Any]:
    if engine.endswith((".so", ".dylib", ".dll")):
        return {"kind": "abi", "path": os.path.abspath(engine)}
    module, _, attribute = engine.partition(":")
    return {"kind": "python", "module": module, "attribute": attribute, "arguments": []}


Outcome = tuple[bool, str]
"""Whether it fails again, and a sentence."""


def run(plan: Mapping[str, Any], tensors: Mapping[str, Any]) -> int:
    """What ran before, then the failing case, as often as the plan says."""
    engine = load(plan["engine"])
    outcomes = []
    first: list[Any] = []  # what the first run answered
    for _ in range(plan.get("runs", 1)):
        sessions = Sessions(engine, tensors)
        for block in plan.get("earlier", ()):
            pass_through(engine, sessions, block, tensors)
        outcomes.append(attempt(engine, sessions, plan, tensors, first))
        sessions.close()
    failed = [sentence for fails, sentence in outcomes if fails]
    if len(outcomes) > 1:
        return verdict(bool(failed), f"{len(failed)} of {len(outcomes)} runs: {(failed or [outcomes[0][1]])[0]}")
    return verdict(*outcomes[0])


def pass_through(engine: Any, sessions: Sessions, block: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """An earlier case; what it answers is no matter. As in the worker, an operation that fails does not stop the next, a step of a session does."""
    for _ in range(2 if "repeat" in block.get("hazards", ()) else 1):
        live: set[int] = set()
        ended = False
        for step in block["steps"]:
            try:
                if step["do"] == "op":
                    for _ in range(2 if "repeat" in step["hazards"] else 1):
                        run_op(engine, step, tensors)
                else:
                    run_step(sessions.of(block), step, tensors, block, live)
            except Broken:
                pass  # an answer of the wrong kind leaves the session as it is
            except Exception as problem:
                ended = step["do"] != "op" and not left_out(step, problem)
            if ended:
                break
        if "weights" in block:
            sessions.emptied(block, live, ended)


def attempt(engine: Any, sessions: Sessions, plan: Mapping[str, Any], tensors: Mapping[str, Any], first: list[Any]) -> Outcome:
    """Every step up to the guilty one, then the comparison."""
    check = plan["check"]
    repeats = "repeat" in plan.get("hazards", ())
    live: set[int] = set()
    values: list[Any] = []
    for number, step in enumerate(plan["steps"]):
        guilty = number == check["step"]
        try:
            if step["do"] == "op":
                value = run_op(engine, step, tensors)
                if guilty and (check["what"] == "flaky" or "repeat" in step["hazards"]):
                    again = run_op(engine, step, tensors)
                    if check["what"] == "flaky":
                        return equal_or_not([value], [again], "two equal calls")
            else:
                value = run_step(sessions.of(plan), step, tensors, plan, live)
        except Broken as problem:
            return True, str(problem)
        except Exception as problem:
            if guilty and check["what"] == "refusal":
                return False, f"the engine refuses: {problem}"
            if guilty or not left_out(step, problem):
                return True, f"step {number + 1} ({step['do']}) raised {type(problem).__name__}: {problem}"
            value = {}
        values.append(value)
        if guilty and check["what"] != "flaky":
            recorded = {name.removeprefix("answer."): array for name, array in tensors.items() if name.startswith("answer.")}
            return compared(check, value, recorded)
    if check["what"] != "flaky":
        return False, "the engine ran every step"
    if repeats:
        sessions.emptied(plan, live, False)
        return equal_or_not(
            values, [run_step(sessions.of(plan), step, tensors, plan, live) for step in plan["steps"]], "the same steps again"
        )
    first[:] = first or values
    return equal_or_not(first, values, "two equal runs")


def left_out(step: Mapping[str, Any], problem: Exception) -> bool:
    """The engine does not read its cache back, or has no loop of its own, and says so: the steps after it still mean something."""
    said = type(problem).__name__ == "Unsupported" or (isinstance(problem, AttributeError) and "undefined symbol" in str(problem))
    return said and step["do"] in ("cache_rows", "generate")


def equal_or_not(first: list[Any], second: list[Any], what: str) -> Outcome:
    """Two answers to the same steps, bit for bit."""
    for one, other in zip(first, second, strict=True):
        for name in one:
            if name not in other or np.asarray(one[name]).tobytes() != np.asarray(other[name]).tobytes():
                return True, f"{what} gave another {name}"
    return False, f"{what} gave the same bits"


def compared(check: Mapping[str, Any], value: Any, answer: Mapping[str, Any]) -> Outcome:
    """The named element against what it should be."""
    if check["what"] == "refusal":
        return True, "the engine answers, but must refuse its inputs"
    if check["what"] == "failure":
        return False, "the engine answered"
    key = check["name"] if check["layer"] is None else f"{check['name']}@{check['layer']}"
    if check["what"] == "shape":
        kinds = [f"{array.dtype} {list(array.shape)}" for array in (np.asarray(value[key]) if key in value else np.zeros(0), answer[key])]
        return kinds[0] == kinds[1], f"{key} is {kinds[0]}; {kinds[1]} is of the wrong kind"
    if check["what"] == "answer":
        same = all(name in value and np.asarray(value[name]).tobytes() == recorded.tobytes() for name, recorded in answer.items())
        return same, "the answer is the recorded one, bit for bit" if same else "the answer is another one than the recorded"
    if key not in value:
        return True, f"{key} is missing from the answer"
    array = np.asarray(value[key])
    index = tuple(check["index"])
    if len(index) != array.ndim or any(i >= extent for i, extent in zip(index, array.shape, strict=True)):
        return True, f"{key} has shape {list(array.shape)}, without an element {list(index)}"
    found = float(array[index])
    expected, bound = float(check["expected"]), float(check["bound"])
    wrong = not np.isfinite(found) if np.isfinite(expected) and not np.isfinite(found) else abs(found - expected) > bound
    return bool(wrong), f"{key}{list(index)} is {found!r}, but should be {expected!r} within {bound:.3g}"


def verdict(fails: bool, sentence: str) -> int:
    print(("fails again: " if fails else "does not fail: ") + sentence, flush=True)
    return FAILS_AGAIN if fails else PASSES


# ---- running steps -------------------------------------------------------------------------------------------------------------------


class Broken(Exception):
    """An answer of the wrong kind: a write outside the output, a changed input, an array of another type."""


class Sessions:
    """Open sessions by their weights, kept for later cases as the worker keeps them."""

    def __init__(self, engine: Any, tensors: Mapping[str, Any]) -> None:
        self._engine, self._tensors = engine, tensors
        self._open: OrderedDict[str, Any] = OrderedDict()

    def of(self, block: Mapping[str, Any]) -> Any:
        prefix = block["weights"]
        if prefix not in self._open:
            while len(self._open) >= SESSIONS_OPEN:
                closed(self._open.popitem(last=False)[1])

            def provider(name: str) -> Any:
                tensor = self._tensors[f"{prefix}{name}"].view()
                tensor.flags.writeable = False
                return tensor

            self._open[prefix] = self._engine.open(config_of(block), provider)
        self._open.move_to_end(prefix)
        return self._open[prefix]

    def emptied(self, block: Mapping[str, Any], live: set[int], ended: bool) -> None:
        """Without sequences; closed where a step failed or the engine cannot evict."""
        session: Any = self._open.get(block["weights"])
        try:
            for sequence in () if ended or session is None else sorted(live):
                session.evict(sequence)
        except Exception:
            ended = True
        live.clear()
        if ended and session is not None:
            closed(self._open.pop(block["weights"]))

    def close(self) -> None:
        while self._open:
            closed(self._open.popitem()[1])


def closed(session: Any) -> None:
    try:
        session.close()
    except Exception:
        return


def run_op(engine: Any, step: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    hazards = set(step["hazards"])
    contiguous = bool(getattr(engine, "contiguous_only", False))
    inputs = {name: placed(tensors[key], hazards, i, contiguous) for i, (name, key) in enumerate(step["inputs"].items())}
    buffers, outputs = {}, {}
    for name, (shape, dtype) in step["outputs"].items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        guard = WIDE_GUARD_BYTES if "guard" in hazards else GUARD_BYTES
        start = guard + (np.dtype(dtype).itemsize if "views" in hazards and "fence" not in hazards else 0)
        buffer = fenced(start + size) if "fence" in hazards else np.empty(start + size + guard, np.uint8)
        buffer[...] = POISON_BYTE
        outputs[name] = buffer[start : start + size].view(dtype).reshape(shape)
        poison(outputs[name])
        buffers[name] = (buffer, start, start + size)
    given = dict(outputs)
    engine.run_op(step["op"], dict(inputs), dict(step["params"]), given)
    for name, (buffer, start, stop) in buffers.items():
        if (buffer[:start] != POISON_BYTE).any() or (buffer[stop:] != POISON_BYTE).any():
            raise Broken(f"{step['op']} wrote outside output {name!r}")
        if given.get(name) is not outputs[name]:
            raise Broken(f"{step['op']} replaced output {name!r}; it must fill the array that it was given")
    for name, key in step["inputs"].items():
        unchanged(inputs[name], tensors[key], f"{step['op']} changed its input {name!r}")
        spoiled(inputs[name], hazards)
    return {name: output.copy() for name, output in outputs.items()}


def poison(array: Any) -> None:
    if array.dtype == np.float32:
        array[...] = np.array(POISON_FLOAT_BITS, np.uint32).view(np.float32)
    else:
        array[...] = POISON_INT if array.dtype.itemsize > 1 else POISON_BYTE


def unchanged(lent: Any, source: Any, sentence: str) -> None:
    if lent.tobytes() != source.tobytes():
        raise Broken(sentence)


def spoiled(array: Any, hazards: set[str]) -> None:
    """What happens to a caller's buffer once the call is over."""
    if "freed" in hazards:
        array.flags.writeable = True
        poison(array)


def placed(source: Any, hazards: set[str], index: int = 0, contiguous_only: bool = False) -> Any:
    """A private read-only copy laid out as it was when it failed: a view, before an unreadable page, or between margins of poison."""
    if "views" in hazards and not contiguous_only and source.ndim and source.size:
        if index % 3 == 1 and source.ndim > 1:
            copy = np.array(source, order="F")
        elif index % 3 == 2 or source.ndim == 1:
            copy = poisoned((*source.shape[:-1], 2 * source.shape[-1]), source.dtype)[..., 1::2]
        else:
            copy = poisoned((*source.shape[:-1], source.shape[-1] + 3), source.dtype)[..., 1 : 1 + source.shape[-1]]
    elif "fence" in hazards:
        copy = fenced(source.nbytes).view(source.dtype).reshape(source.shape)
    else:
        margin = MARGIN_BYTES // source.itemsize + ("views" in hazards)
        copy = poisoned((source.size + 2 * margin,), source.dtype)[margin : margin + source.size].reshape(source.shape)
    copy[...] = source
    copy.flags.writeable = False
    return copy


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    array = np.empty(shape, dtype)
    poison(array)
    return array


def fenced(size: int) -> Any:
    """Bytes whose end is the start of a page that can be neither read nor written."""
    whole = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE)
    memory = np.frombuffer(whole, np.uint8)
    stop = len(memory) - mmap.PAGESIZE
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    protect(memory.__array_interface__["data"][0] + stop, mmap.PAGESIZE, 0)
    return memory[stop - size : stop]


def run_step(session: Any, step: Mapping[str, Any], tensors: Mapping[str, Any], plan: Mapping[str, Any], live: set[int]) -> dict[str, Any]:
    """The answer as name -> array; taps are called name@layer. `live`: sequences that the session holds, kept up to date."""
    kind = step["do"]
    hazards = set(plan.get("hazards", ()))
    config = plan["config"]
    if kind == "forward":
        given = {word: tensors[f"{step['rows']}.{word}"] for word in ("sequence", "token", "position", "parent", "want")}
        given["want"] = given["want"].astype(np.bool_)
        live |= set(given["sequence"].tolist())
        lent = {word: placed(array, hazards, 2) for word, array in given.items()}
        taps: dict[str, Any] = {}

        def sink(name: str, layer: int, array: Any) -> None:
            taps[f"{name}@{layer}"] = np.array(array)

        rows = rows_of({word: lent[word] for word in ("sequence", "token", "position", "parent")})
        logits = session.forward(rows, lent["want"], frozenset(plan["taps"]), sink)
        returned(lent, given, hazards)
        right_kind(logits, "logits", (int(given["want"].sum()), config["vocab"]))
        return taps | {"logits": np.array(logits)}
    if kind == "commit":
        given = {"path": tensors[step["path"]]}
        lent = {"path": placed(given["path"], hazards, 2)}
        session.commit(step["sequence"], lent["path"])
        returned(lent, given, hazards)
    elif kind == "cache_rows":
        layers = [session.cache_rows(step["sequence"], layer) for layer in range(config["layers"])]
        for rows in layers:
            right_kind(
                rows, "cache_rows", (len(layers[0]) if isinstance(layers[0], np.ndarray) else 0, config["kv_rank"] + config["rope_dim"])
            )
        return {"cache": np.stack([np.array(rows) for rows in layers])}
    elif kind == "evict":
        session.evict(step["sequence"])
        live.discard(step["sequence"])
    elif kind == "fork":
        live.add(step["target"])
        session.fork(step["source"], step["target"])
    elif kind == "generate":
        given = {str(number): tensors[name] for number, name in enumerate(step["prompts"])}
        lent = {name: placed(array, hazards, 2) for name, array in given.items()}
        limits = limits_of(step["max_new"], tuple(step["stop_tokens"]))
        asked = (list(lent.values()), drafter_of(step, tensors), step["budget"], limits)
        out = session.sample(*asked, sampling_of(step["sampling"])) if step.get("sampling") else session.generate(*asked)
        returned(lent, given, hazards)
        answer: dict[str, Any] = {}
        for number, generation in enumerate(out):
            answer[f"tokens {number}"] = np.array(generation.tokens, np.int64)
            for index, one in enumerate(generation.rounds):
                for word in ("tokens", "parents", "path"):
                    answer[f"{word} {number}.{index}"] = np.array(getattr(one, word), np.int64)
                answer[f"bonus {number}.{index}"] = np.array([one.bonus], np.int64)
        return answer
    return {}


def returned(lent: Mapping[str, Any], given: Mapping[str, Any], hazards: set[str]) -> None:
    for name, array in lent.items():
        unchanged(array, given[name], f"the engine changed its input {name!r}")
        spoiled(array, hazards)


def right_kind(value: Any, what: str, shape: tuple[int, ...]) -> None:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.shape != shape:
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise Broken(f"{what} is {found}, but must be float32 {list(shape)}")


def rows_of(arrays: dict[str, Any]) -> Any:
    try:
        from spec.engine import Rows

        return Rows(**arrays)
    except ImportError:
        return _Rows(**arrays)


class _Rows(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.token)


def limits_of(max_new: int, stop_tokens: tuple[int, ...]) -> Any:
    try:
        from spec.engine import Limits

        return Limits(max_new, stop_tokens)
    except ImportError:
        return SimpleNamespace(max_new=max_new, stop_tokens=stop_tokens)


def sampling_of(fields: Mapping[str, Any]) -> Any:
    whole = dict(fields) | {"logit_bias": tuple((int(token), float(bias)) for token, bias in fields["logit_bias"])}
    try:
        from spec.sampling import Sampling

        return Sampling(**whole)
    except ImportError:
        return SimpleNamespace(**whole)


def parameters_of(sampling: Any) -> dict[str, Any]:
    """The pairs that cross the C ABI; none: greedy."""
    if sampling is None:
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
    pairs = {name: getattr(sampling, name) for name in names} | {"top_k_ties_all": int(sampling.top_k_ties == "all")}
    return pairs | {f"logit_bias:{token}": bias for token, bias in sampling.logit_bias}


def config_of(plan: Mapping[str, Any]) -> Any:
    try:
        from spec.config import from_json

        return from_json(plan["config"])
    except ImportError:
        c = SimpleNamespace(**plan["config"], **{"cache_dim": plan["config"]["kv_rank"] + plan["config"]["rope_dim"]})
        c.yarn = SimpleNamespace(**c.yarn) if c.yarn else None
        c.latent_norm_eps, c.softmax_scale = plan["parameters"]["latent_eps"], plan["parameters"]["softmax_scale"]
        c.is_dense = lambda layer: layer < c.first_dense
        c.parameters = plan["parameters"]
        return c


def drafter_of(step: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """The recorded drafts, by sequence and history; zeros for a history that was never met."""
    if not step["drafts"]:
        return None
    table = {(entry["sequence"], tuple(entry["history"])): tensors[entry["logits"]] for entry in step["drafts"]}
    shape = next(iter(table.values())).shape

    class Recorded:
        block_len = shape[0]
        vocab = shape[1]

        def draft(self, sequence: int, history: Any) -> Any:
            return table.get((int(sequence), tuple(int(t) for t in history)), np.zeros(shape, np.float32)).copy()

    return Recorded()


# ---- loading -------------------------------------------------------------------------------------------------------------------------


def load(engine: Mapping[str, Any]) -> Any:
    if engine["kind"] == "abi":
        return Library(engine["path"])
    sys.path[:0] = [os.getcwd(), *(path for path in engine.get("search", []) if path not in sys.path)]
    try:
        target: Any = importlib.import_module(engine["module"])
        for word in filter(None, engine["attribute"].split(".")):
            target = getattr(target, word)
        return target(*engine["arguments"]) if callable(target) else target
    except Exception as problem:
        raise NotLoadable(
            f"{engine['module']}:{engine['attribute']}: {type(problem).__name__}: {problem}; is it on PYTHONPATH?"
        ) from problem


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Number(ctypes.Union):
    _fields_ = [("i", ctypes.c_int64), ("d", ctypes.c_double)]


class Param(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char_p), ("kind", ctypes.c_int32), ("reserved", ctypes.c_int32), ("value", Number)]


class Params(ctypes.Structure):
    _fields_ = [("items", ctypes.POINTER(Param)), ("count", ctypes.c_int64)]


class NamedTensor(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("tensor", DLTensor)]


class OpCall(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("synchronised", ctypes.c_int32), ("op", ctypes.c_char_p),
        ("inputs", ctypes.POINTER(NamedTensor)), ("input_count", ctypes.c_int64), ("params", Params),
        ("outputs", ctypes.POINTER(NamedTensor)), ("output_count", ctypes.c_int64), ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("stream", ctypes.c_void_p),
    ]  # fmt: skip


WEIGHT_FN = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(DLTensor))


class OpenArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("config", Params), ("weight", WEIGHT_FN),
        ("weight_user", ctypes.c_void_p), ("weights_path", ctypes.c_char_p), ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32), ("stream", ctypes.c_void_p),
    ]  # fmt: skip


class Tap(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("layer", ctypes.c_int32), ("name", ctypes.c_char_p), ("tensor", DLTensor),
        ("handoff", ctypes.c_int32), ("partial_sum", ctypes.c_int32), ("shard_axis", ctypes.c_int32),
        ("shard_reserved", ctypes.c_int32), ("shard_start", ctypes.c_int64), ("shard_of", ctypes.c_int64),
    ]  # fmt: skip


TAP_FN = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(Tap))
INT32 = ctypes.POINTER(ctypes.c_int32)


class ForwardArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("synchronised", ctypes.c_int32), ("row_count", ctypes.c_int64), ("sequence", INT32),
        ("token", INT32), ("position", INT32), ("parent", INT32), ("want_logits", ctypes.POINTER(ctypes.c_uint8)),
        ("logits", ctypes.POINTER(DLTensor)), ("taps", ctypes.c_char_p), ("tap", TAP_FN), ("tap_user", ctypes.c_void_p),
        ("first_layer", ctypes.c_int64), ("hidden", ctypes.POINTER(DLTensor)), ("stream", ctypes.c_void_p),
    ]  # fmt: skip


DRAFT_FN = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, INT32, ctypes.c_int64, ctypes.POINTER(ctypes.c_float))


class Emission(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("sequence", ctypes.c_int32), ("tokens", INT32), ("token_count", ctypes.c_int64),
        ("node_tokens", INT32), ("node_parents", INT32), ("node_count", ctypes.c_int64), ("path", INT32),
        ("path_count", ctypes.c_int64), ("bonus", ctypes.c_int32), ("reserved", ctypes.c_int32),
    ]  # fmt: skip


EMIT_FN = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(Emission))


class GenerateArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("prompt_count", ctypes.c_int64), ("prompts", ctypes.POINTER(INT32)),
        ("prompt_lengths", ctypes.POINTER(ctypes.c_int64)), ("draft", DRAFT_FN), ("draft_user", ctypes.c_void_p),
        ("block_len", ctypes.c_int64), ("budget", ctypes.c_int64), ("max_new", ctypes.c_int64), ("stop_tokens", INT32),
        ("stop_count", ctypes.c_int64), ("emit", EMIT_FN), ("emit_user", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("sampling", Params),
    ]  # fmt: skip


CODES = {"f": 2, "i": 0, "u": 1, "b": 1}


def dltensor(array: Any, keep: list[Any]) -> DLTensor:
    """`keep` holds what the tensor points to."""
    ints = ctypes.c_int64 * max(1, array.ndim)
    shape = ints(*array.shape)
    contiguous = array.flags.c_contiguous
    strides = None if contiguous else ints(*(step // array.itemsize for step in array.strides))
    keep += [array, shape, strides]
    bits = 8 * array.itemsize
    return DLTensor(array.ctypes.data, 1, 0, array.ndim, CODES[array.dtype.kind], bits, 1, shape, strides, 0)


def params_of(values: Mapping[str, Any], keep: list[Any]) -> Params:
    items = (Param * max(1, len(values)))()
    for item, (key, value) in zip(items, values.items(), strict=False):
        item.key = key.encode()
        item.kind = int(isinstance(value, float))
        item.value = Number(d=value) if isinstance(value, float) else Number(i=int(value))
    keep.append(items)
    return Params(items, len(values))


def array_of(pointer: Any, count: int) -> Any:
    return np.ctypeslib.as_array(pointer, (count,)).copy() if count else np.zeros(0, np.int32)


class Unsupported(Exception):
    """The engine does not do this, and says so."""


class Library:
    """A C ABI engine (paritree.h, ABI 1) as a Python object with run_op and open."""

    def __init__(self, path: str) -> None:
        try:
            self.c = ctypes.CDLL(path)
            version = self.c.paritree_abi_version()
        except (OSError, AttributeError) as problem:
            raise NotLoadable(f"{path}: {problem}; build it, or give --engine") from problem
        if version != 1:
            raise NotLoadable(f"{path} speaks ABI {version}, not 1")
        self.c.paritree_last_error.restype = ctypes.c_char_p

    def check(self, status: int) -> None:
        if status == UNSUPPORTED:
            raise Unsupported((self.c.paritree_last_error() or b"").decode(errors="replace"))
        if status:
            raise RuntimeError(f"status {status}: {(self.c.paritree_last_error() or b'').decode(errors='replace')}")

    def run_op(self, op: str, inputs: Any, params: Any, outputs: Any) -> None:
        keep: list[Any] = []

        def named(arrays: Mapping[str, Any]) -> Any:
            items = (NamedTensor * max(1, len(arrays)))()
            for item, (name, array) in zip(items, arrays.items(), strict=False):
                item.name, item.tensor = name.encode(), dltensor(array, keep)
            keep.append(items)
            return items

        call = OpCall(
            ctypes.sizeof(OpCall), 1, op.encode(), named(inputs), len(inputs), params_of(params, keep), named(outputs), len(outputs),
            None, 0, 1, 0, None,
        )  # fmt: skip
        workspace = ctypes.c_uint64(0)
        if hasattr(self.c, "paritree_run_op_workspace"):
            self.check(self.c.paritree_run_op_workspace(ctypes.byref(call), ctypes.byref(workspace)))
        buffer = np.full(workspace.value + 64, POISON_BYTE, np.uint8)
        call.workspace = (buffer.ctypes.data + 63) // 64 * 64
        call.workspace_bytes = workspace.value
        self.check(self.c.paritree_run_op(ctypes.byref(call)))

    def open(self, config: Any, provider: Callable[[str], Any]) -> LibrarySession:
        return LibrarySession(self, parameters(config), provider)


def parameters(config: Any) -> dict[str, Any]:
    if hasattr(config, "parameters"):
        return dict(config.parameters)
    from spec.config import as_parameters

    return as_parameters(config)


class LibrarySession:
    def __init__(self, library: Library, config: Mapping[str, Any], provider: Callable[[str], Any]) -> None:
        self.library, self.config = library, config
        self.handle = ctypes.c_void_p()
        keep: list[Any] = []

        def weight(user: Any, name: bytes, tensor: Any) -> int:
            tensor[0] = dltensor(provider(name.decode()), keep)
            return 0

        args = OpenArgs(ctypes.sizeof(OpenArgs), 0, params_of(config, keep), WEIGHT_FN(weight), None, None, 1, 0, None)
        library.check(library.c.paritree_open(ctypes.byref(args), ctypes.byref(self.handle)))

    def forward(self, rows: Any, want: Any, taps: frozenset[str], sink: Callable[[str, int, Any], None]) -> Any:
        keep: list[Any] = []
        columns = [np.ascontiguousarray(getattr(rows, word), np.int32) for word in ("sequence", "token", "position", "parent")]
        wanted = np.ascontiguousarray(want, np.uint8)
        logits = np.full((int(wanted.sum()), self.config["vocab"]), np.nan, np.float32)

        def on_tap(user: Any, tap: Any) -> int:
            tensor = tap[0].tensor
            shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
            base = ctypes.c_int32 if tensor.code == 0 else ctypes.c_float if tensor.code == 2 else ctypes.c_uint8
            pointer = ctypes.cast(tensor.data + tensor.byte_offset, ctypes.POINTER(base))
            count = int(np.prod(shape, dtype=np.int64))
            flat = np.ctypeslib.as_array(pointer, (max(1, count),))[:count]
            sink(tap[0].name.decode(), tap[0].layer, flat.reshape(shape))
            return 0

        tensor = dltensor(logits, keep)
        pointers = [column.ctypes.data_as(INT32) for column in columns]
        args = ForwardArgs(
            ctypes.sizeof(ForwardArgs), 1, len(columns[0]), *pointers, wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)),
            ctypes.pointer(tensor) if len(logits) else None, ",".join(sorted(taps)).encode(), TAP_FN(on_tap), None, 0, None, None,
        )  # fmt: skip
        self.library.check(self.library.c.paritree_forward(self.handle, ctypes.byref(args)))
        return logits

    def close(self) -> None:
        self.library.c.paritree_close(self.handle)

    def commit(self, sequence: int, path: Any) -> None:
        path = np.ascontiguousarray(path, np.int32)
        self.library.check(self.library.c.paritree_commit(self.handle, sequence, path.ctypes.data_as(INT32), ctypes.c_int64(len(path))))

    def cache_rows(self, sequence: int, layer: int) -> Any:
        count = ctypes.c_int64()
        call = self.library.c.paritree_cache_rows
        self.library.check(call(self.handle, sequence, ctypes.c_int64(layer), None, ctypes.byref(count)))
        rows = np.full((count.value, self.config["kv_rank"] + self.config["rope_dim"]), np.nan, np.float32)
        keep: list[Any] = []
        tensor = dltensor(rows, keep)
        self.library.check(call(self.handle, sequence, ctypes.c_int64(layer), ctypes.byref(tensor), ctypes.byref(count)))
        return rows

    def evict(self, sequence: int) -> None:
        self.library.check(self.library.c.paritree_evict(self.handle, sequence))

    def fork(self, source: int, target: int) -> None:
        self.library.check(self.library.c.paritree_fork(self.handle, source, target))

    def generate(self, prompts: list[Any], drafter: Any, budget: int, limits: Any) -> list[Any]:
        return self.sample(prompts, drafter, budget, limits, None)

    def sample(self, prompts: list[Any], drafter: Any, budget: int, limits: Any, sampling: Any) -> list[Any]:
        keep: list[Any] = []
        pairs = params_of(parameters_of(sampling), keep)
        tokens: list[list[int]] = [[] for _ in prompts]
        rounds: list[list[Any]] = [[] for _ in prompts]
        arrays = [np.ascontiguousarray(prompt, np.int32) for prompt in prompts]
        pointers = (INT32 * len(arrays))(*(array.ctypes.data_as(INT32) for array in arrays))
        lengths = (ctypes.c_int64 * len(arrays))(*map(len, arrays))
        stops = np.array(limits.stop_tokens, np.int32)

        def draft(user: Any, sequence: int, history: Any, count: int, logits: Any) -> int:
            value = np.ascontiguousarray(drafter.draft(sequence, array_of(history, count)), np.float32)
            np.ctypeslib.as_array(logits, value.shape)[...] = value
            return 0

        def emit(user: Any, emission: Any) -> int:
            e = emission[0]
            tokens[e.sequence] += array_of(e.tokens, e.token_count).tolist()
            if e.node_count:
                nodes, parents, path = (
                    array_of(e.node_tokens, e.node_count),
                    array_of(e.node_parents, e.node_count),
                    array_of(e.path, e.path_count),
                )
                rounds[e.sequence].append(SimpleNamespace(tokens=nodes, parents=parents, path=path, bonus=e.bonus))
            return 0

        args = GenerateArgs(
            ctypes.sizeof(GenerateArgs), 0, len(arrays), pointers, lengths, DRAFT_FN(draft) if drafter else DRAFT_FN(), None,
            drafter.block_len if drafter else 0, budget, limits.max_new, stops.ctypes.data_as(INT32), len(stops), EMIT_FN(emit), None, None, pairs,
        )  # fmt: skip
        self.library.check(self.library.c.paritree_generate(self.handle, ctypes.byref(args)))
        return [SimpleNamespace(tokens=tuple(t), rounds=tuple(r)) for t, r in zip(tokens, rounds, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
