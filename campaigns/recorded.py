"""A user's own tensors: one operation with inputs and outputs, judged as an engine's would be. Nothing is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.case import CaseError, RecordedCase
from campaigns.materialise import op_call_of
from oracles.judge import judge_op
from oracles.judgement import FINDINGS, Judgement
from spec.engine import PROFILES, Profile

INPUT, OUTPUT = ("inputs.", "input.", "in."), ("outputs.", "output.", "out.")


class Divergence(AssertionError):
    """An output that its operation does not explain; `judgements` are all of the call."""

    def __init__(self, judgements: list[Judgement]) -> None:
        wrong = [j for j in judgements if j.verdict in FINDINGS]
        super().__init__("; ".join(f"{j.verdict}: {j.message}" for j in wrong))
        self.judgements = judgements


def profile_named(profile: str | Profile) -> Profile:
    """Raises CaseError for a name that no profile has."""
    if isinstance(profile, Profile):
        return profile
    if profile not in PROFILES:
        raise CaseError(f"there is no profile {profile!r}: choose one of {', '.join(PROFILES)}")
    return PROFILES[profile]


def judged(
    op: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    profile: str | Profile = "float32-any-order",
    params: Mapping[str, int | float] | None = None,
) -> list[Judgement]:
    """One judgement per output. Raises CaseError for an operation, input or parameter that does not fit."""
    arrays = {name: _array(value) for name, value in inputs.items()}
    call = op_call_of(op, arrays, params or {})
    return judge_op(call, {name: _array(value) for name, value in outputs.items()}, profile_named(profile))


def require(
    op: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    profile: str | Profile = "float32-any-order",
    params: Mapping[str, int | float] | None = None,
) -> list[Judgement]:
    """`judged`, but a finding raises Divergence: for one line in a test."""
    judgements = judged(op, inputs, outputs, profile=profile, params=params)
    if any(j.verdict in FINDINGS for j in judgements):
        raise Divergence(judgements)
    return judgements


def read_dump(
    path: Path, op: str = "", params: Mapping[str, int | float] | None = None
) -> tuple[RecordedCase, dict[str, Any], dict[str, Any], str]:
    """(case, inputs, outputs, profile) of a safetensors file with tensors `inputs.NAME` and `outputs.NAME`.

    Its metadata may hold `op`, `params` (JSON) and `profile`; arguments go before it. Raises CaseError.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "np") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CaseError(f"{path}: no such file") from None
    except (SafetensorError, OSError, TypeError, ValueError) as problem:
        raise CaseError(f"{path}: not a safetensors file that NumPy can read: {problem}") from None
    inputs = _with_prefix(tensors, INPUT)
    outputs = _with_prefix(tensors, OUTPUT)
    name = op or metadata.get("op", "")
    if not name:
        raise CaseError(f"{path}: the operation is not named: give --op, or metadata `op`")
    if not inputs or not outputs:
        raise CaseError(f"{path}: tensors are {', '.join(tensors) or '(none)'}, but inputs.NAME and outputs.NAME are needed")
    try:
        given: dict[str, Any] = json.loads(metadata.get("params", "{}"))
    except json.JSONDecodeError as problem:
        raise CaseError(f"{path}: metadata `params` is no JSON: {problem}") from None
    given |= dict(params or {})
    content = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    case = RecordedCase(name, tuple(sorted(given.items())), content, str(path))
    return case, inputs, outputs, metadata.get("profile", "float32-any-order")


def _with_prefix(tensors: Mapping[str, NDArray[Any]], prefixes: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() for prefix in prefixes if name.startswith(prefix)}


def _array(value: Any) -> NDArray[Any]:
    """Anything with `__array__` or DLPack on the CPU; booleans become uint8, 64-bit integers int32 where they fit. Floats stay as they are."""
    array = np.asarray(value)
    if array.dtype == np.bool_:
        return array.astype(np.uint8)
    if array.dtype == np.int64 and array.size and array.min() >= -(2**31) and array.max() < 2**31:
        return array.astype(np.int32)
    return array
