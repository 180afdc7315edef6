"""Answers of an engine, checked for their kind: type, dtype, shape, token range. Whether the numbers are right is the judge's business.

An engine may return anything: None, an array of another library, the wrong shape, token -1, an object whose `__str__` raises. Every function
here returns plain arrays and integers of ours, or raises Malformed with what was found and what is expected.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.config import Config
from spec.engine import Departure, Description, Generation, Profile, Round
from spec.record import size
from spec.script import Generate
from spec.taps import Tap, taps_of_layer

TEXT_MAX = 2000  # characters of any text that an engine hands us; a message is read by people
ARRAY_BYTES_MAX = 2**32  # one array of an answer; larger is an engine that has lost its sizes


class Malformed(Exception):
    """The engine's answer is of the wrong kind; the message says what was found and what is expected."""


def text_of(value: object) -> str:
    """`str(value)` as bounded printable text, whatever its methods do."""
    try:
        text = value if type(value) is str else str(value)
        text = str.__str__(text)[: TEXT_MAX + 1]
    except BaseException as problem:
        text = f"<{type(value).__name__} whose text raises {type(problem).__name__}>"
    if len(text) > TEXT_MAX:
        text = text[:TEXT_MAX] + " ..."
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def described(problem: BaseException) -> str:
    """Type, message and innermost line of an exception that the engine raised."""
    where = ""
    try:
        trace = problem.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            code = trace.tb_frame.f_code
            where = f" ({PurePath(code.co_filename).name}:{trace.tb_lineno} in {code.co_name})"
    except BaseException:
        where = ""
    return f"{text_of(type(problem).__name__)}: {text_of(problem)}{where}"


def kind_of(value: object) -> str:
    """A short description of what an engine returned, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {text_of(type(value).__name__)}"


def array_of(value: object, what: str, dtype: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """A private copy of the array `value`; None in `shape` matches any extent. No conversion: another dtype is malformed."""
    wanted = f"{dtype} [{', '.join('*' if extent is None else str(extent) for extent in shape)}]"
    if not isinstance(value, np.ndarray):
        raise Malformed(f"{what} is {kind_of(value)}, but must be a NumPy array {wanted}")
    fits = value.ndim == len(shape) and all(extent is None or extent == found for extent, found in zip(shape, value.shape, strict=True))
    if value.dtype != np.dtype(dtype) or not fits:
        raise Malformed(f"{what} is {kind_of(value)}, but must be {wanted}")
    if value.nbytes > ARRAY_BYTES_MAX:
        raise Malformed(f"{what} has {value.nbytes} bytes, but at most {ARRAY_BYTES_MAX} are taken")
    return np.array(value, np.dtype(dtype), order="C", subok=False)


def integer(value: object, what: str, low: int, high: int) -> int:
    """A Python or NumPy integer with low <= value < high."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except BaseException:
        raise Malformed(f"{what} is {kind_of(value)} ({text_of(value)[:60]}), but must be an integer") from None
    if not low <= number < high:
        raise Malformed(f"{what} is {number if abs(number) < 2**64 else 'huge'}, but must be between {low} and {high - 1}")
    return number


def integers(values: object, what: str, low: int, high: int, count_max: int) -> tuple[int, ...]:
    return tuple(integer(value, f"{what}[{i}]", low, high) for i, value in enumerate(items(values, what, count_max)))


def items(values: object, what: str, count_max: int) -> Sequence[Any]:
    """The items of a list, tuple or array; at most `count_max`."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        pass
    elif not isinstance(values, (list, tuple)):
        raise Malformed(f"{what} is {kind_of(values)}, but must be a sequence")
    if len(values) > count_max:
        raise Malformed(f"{what} has {len(values)} items, but at most {count_max} make sense here")
    return list(values)


def logits(value: object, rows: int, config: Config) -> NDArray[np.float32]:
    return array_of(value, "logits", "float32", (rows, config.vocab))


def cache(layers: Sequence[object], config: Config) -> NDArray[np.float32]:
    """float32 [layers, len, cache_dim] of the rows of each layer."""
    rows = [array_of(value, f"cache_rows of layer {layer}", "float32", (None, config.cache_dim)) for layer, value in enumerate(layers)]
    lengths = [len(of_layer) for of_layer in rows]
    if len(set(lengths)) > 1:
        raise Malformed(f"cache_rows has {lengths} rows in layers 0 to {len(lengths) - 1}, but every layer caches the same tokens")
    return np.stack(rows)


class Taps:
    """The sink of one forward pass: copies each tap at once and keeps the first thing that was wrong.

    `rows` is T, `wanted` the rows whose logits were asked for. The engine sees no exception of ours: its control flow stays its own.
    """

    def __init__(self, config: Config, asked: frozenset[str], rows: int, wanted: int) -> None:
        self.arrays: dict[tuple[str, int], NDArray[Any]] = {}
        self.problem: str | None = None
        self._config = config
        self._asked = asked
        self._rows = rows
        self._wanted = wanted
        self._dims = {name: value for name, value in vars(config).items() if isinstance(value, int)}

    def __call__(self, name: object, layer: object, array: object) -> None:
        try:
            self._take(name, layer, array)
        except Malformed as problem:
            self.problem = self.problem or str(problem)

    def _take(self, name: object, layer: object, array: object) -> None:
        number = integer(layer, f"the layer of tap {text_of(name)!r}", -1, self._config.layers + 1)
        tap = next((tap for tap in taps_of_layer(self._config, number) if type(name) is str and tap.name == name), None)
        if tap is None:
            raise Malformed(f"there is no tap {text_of(name)!r} in layer {number}")
        if tap.name not in self._asked:
            return
        if (tap.name, number) in self.arrays:
            raise Malformed(f"tap {tap.name!r} of layer {number} was given twice in one forward pass")
        self.arrays[tap.name, number] = array_of(array, f"tap {tap.name!r} of layer {number}", tap.dtype, self._shape(tap, array))

    def _shape(self, tap: Tap, array: object) -> tuple[int | None, ...]:
        rows: int = self._rows
        if tap.name in ("logits", "argmax"):
            rows = self._wanted
        elif tap.name == "final_norm" and isinstance(array, np.ndarray) and array.shape[:1] == (self._wanted,):
            rows = self._wanted  # an engine may cut the rows before or after the last norm
        return tuple(rows if word == "T" else None if word == "S" else size(word, self._dims) for word in tap.dims)


def generations(value: object, step: Generate, config: Config) -> list[Generation]:
    """One Generation per prompt. Tokens must be of the vocabulary; lengths and order are judged elsewhere, within reason of size."""
    sequences = items(value, "generate", len(step.prompts))
    if len(sequences) != len(step.prompts):
        raise Malformed(f"generate returned {len(sequences)} sequences, but there are {len(step.prompts)} prompts")
    return [_generation(one, f"generate[{i}]", step, config) for i, one in enumerate(sequences)]


def _generation(value: object, what: str, step: Generate, config: Config) -> Generation:
    # a stream that is too long is the judge's (L3); one that is absurdly long is nobody's
    count_max = 4 * step.limits.max_new + 4 * step.budget + 64
    tokens = integers(_attribute(value, "tokens", what), f"{what}.tokens", 0, config.vocab, count_max)
    rounds = items(_attribute(value, "rounds", what), f"{what}.rounds", count_max)
    return Generation(tokens, tuple(_round(one, f"{what}.rounds[{i}]", step, config) for i, one in enumerate(rounds)))


def _round(value: object, what: str, step: Generate, config: Config) -> Round:
    count_max = 2 * step.budget + 2  # one node too many is a finding of its own (Z15), so it must get through
    tokens = integers(_attribute(value, "tokens", what), f"{what}.tokens", 0, config.vocab, count_max)
    parents = integers(_attribute(value, "parents", what), f"{what}.parents", -1, len(tokens), count_max)
    if len(parents) != len(tokens):
        raise Malformed(f"{what} has {len(tokens)} tokens, but {len(parents)} parents")
    path = integers(_attribute(value, "path", what), f"{what}.path", 0, len(tokens), count_max)
    return Round(tokens, parents, path, integer(_attribute(value, "bonus", what), f"{what}.bonus", 0, config.vocab))


def _attribute(value: object, name: str, what: str) -> object:
    try:
        found: object = getattr(value, name)
    except BaseException:
        raise Malformed(f"{what} is {kind_of(value)}, but must have the attribute {name!r}") from None
    return found


def _profile_field(what: str, found: object, default: object) -> None:
    fits = type(found) is type(default)
    if isinstance(default, float):
        fits = isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found < np.inf
    if not fits:
        raise Malformed(f"{what} is {text_of(found)[:60]!r}, but must be a {type(default).__name__} like {default!r}")


def description(value: object) -> Description:
    """The engine's description with every field checked."""
    if not isinstance(value, Description):
        raise Malformed(f"describe() returned {kind_of(value)}, but must return a spec.engine.Description")
    if not isinstance(value.profile, Profile):
        raise Malformed(f"the profile is {kind_of(value.profile)}, but must be a spec.engine.Profile")
    defaults = vars(Profile())
    for name, default in defaults.items():
        _profile_field(f"profile.{name}", getattr(value.profile, name), default)
    for op, name, found in value.profile.per_op:
        _profile_field(f"profile.per_op of {text_of(op)[:60]}, {name},", found, defaults[name])
    names = {field: _names(getattr(value, field), field) for field in ("capabilities", "ops", "taps")}
    departures = tuple(_departure(item, i) for i, item in enumerate(items(value.departures, "departures", 100)))
    return Description(
        text_of(value.name), text_of(value.version), value.profile, names["capabilities"], names["ops"], names["taps"], departures
    )  # fmt: skip


def _departure(value: object, number: int) -> Departure:
    if not isinstance(value, Departure) or type(value.value) not in (int, float, str, bool):
        raise Malformed(f"departures[{number}] is {kind_of(value)}, but must be a spec.engine.Departure with a plain value")
    name = text_of(value.field)
    if name not in {field.name for field in dataclasses.fields(Config)}:
        raise Malformed(f"departures[{number}] names {name!r}, which is no field of a configuration")
    return Departure(name, value.value, text_of(value.reason))


def _names(values: object, what: str) -> frozenset[str]:
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise Malformed(f"{what} is {kind_of(values)}, but must be a set of names")
    found = list(values)
    if not all(type(name) is str for name in found) or len(found) > 1000:
        raise Malformed(f"{what} must hold at most 1000 names, found {text_of(found)[:80]}")
    return frozenset(found)
