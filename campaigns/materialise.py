"""Cases to arrays: the only place where a recipe becomes numbers. Nothing here knows an engine.

Everything is keyed by the seeds in the case (Philox), so that a case line alone gives the same arrays on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.case import CaseError, OpCase, TreeCase
from campaigns.isolation.chain import TreeJob
from campaigns.operands import OPERANDS, REFUSALS, REFUSED, REGIMES, Recipe, grid_logits, values
from campaigns.plan import session_script
from campaigns.probes import PROBES
from campaigns.probes import operands as probe_operands
from campaigns.weights import weights_for
from spec.ops import OPS
from spec.record import Op, shape, size
from spec.script import OpCall
from spec.weights import philox

__all__ = ["op_call", "op_call_of", "session_script", "tree_job", "weights_for"]


def op_call(case: OpCase) -> OpCall:
    """Inputs by regime, params of the record's kinds, output shapes from the record. Raises CaseError for a case that is none."""
    record = record_of(case.op)
    if case.regime not in (*REGIMES, *PROBES) and not (case.regime == REFUSED and case.op in REFUSALS):
        raise CaseError(f"there is no regime {case.regime!r}: choose one of {', '.join(REGIMES)}")
    params = params_of(record, case)
    dims = dict(case.dims)
    recipe = Recipe(case.op, dims, params, case.regime, case.seed)
    try:
        makers = REFUSALS if case.regime == REFUSED else OPERANDS
        inputs = probe_operands(case) if case.regime in PROBES else makers[case.op](recipe)
        outputs = output_shapes(record, dims, params)
        _check_shapes(record, dims, params, inputs)
    except KeyError as missing:
        raise CaseError(f"{case.op}: the case lacks the dimension or parameter {missing}") from None
    except (ValueError, IndexError, ZeroDivisionError) as problem:
        raise CaseError(f"{case.op}: the dimensions {dims} do not fit together: {problem}") from None
    return OpCall(case.op, inputs, params, outputs, frozenset(case.hazards))


def tree_job(case: TreeCase) -> TreeJob:
    """Draft logits on a grid (ties), a cache with room for every node, and the rule that draws the targets. Raises CaseError."""
    if case.vocab < 1 or case.depth < 0 or case.budget < 0 or case.prefix_len < 0 or case.cache_dim < 1:
        raise CaseError("a tree needs vocab and cache_dim of at least 1, and depth, budget and prefix_len of at least 0")
    return TreeJob(
        logits=grid_logits(philox("tree-logits", case.seed), case.depth, case.vocab, case.grid, case.minus_infinity),
        budget=case.budget,
        root=case.seed % case.vocab,
        prefix_len=case.prefix_len,
        cache_rows=values(philox("tree-cache", case.seed), (case.prefix_len + case.budget + 1, case.cache_dim), "ordinary"),
        follow=case.follow,
        seed=case.seed,
        hazards=frozenset(case.hazards),
    )


def record_of(op: str) -> Op:
    if op not in OPS:
        raise CaseError(f"there is no operation {op!r}: choose one of {', '.join(sorted(OPS))}")
    return OPS[op]


def params_of(record: Op, case: OpCase) -> dict[str, int | float]:
    given = dict(case.params)
    missing = set(record.params) - set(given) - set(record.defaults)
    if missing:
        raise CaseError(f"{case.op}: the case lacks the parameter {sorted(missing)[0]!r}")
    return _typed(record, given)


def _typed(record: Op, given: Mapping[str, int | float]) -> dict[str, int | float]:
    """The given parameters of the record, by kind; those that only repeat a default are not sent."""
    kept = {name: kind for name, kind in record.params.items() if name in given and given[name] != record.defaults.get(name)}
    return {name: int(given[name]) if kind == "int" else float(given[name]) for name, kind in kept.items()}


def output_shapes(record: Op, dims: dict[str, int], params: dict[str, int | float]) -> dict[str, tuple[tuple[int, ...], str]]:
    words = dims | {name: int(value) for name, value in params.items() if isinstance(value, int)}
    if record.name == "draft_table":
        words["K"] = min(words["budget"], words["V"])
    return {tensor.name: (shape(tensor, words), tensor.dtype) for tensor in record.outputs}


def _check_shapes(record: Op, dims: dict[str, int], params: dict[str, int | float], inputs: Mapping[str, NDArray[Any]]) -> None:
    """Raises ValueError where an input is not as large as the dimensions say, as a path of more rows than are pending: outputs would not fit."""
    words = dims | {name: int(value) for name, value in params.items() if isinstance(value, int)}
    for tensor in record.inputs:
        if (found := inputs[tensor.name].shape) != (wanted := shape(tensor, words)):
            raise ValueError(f"{tensor.name} comes out as {list(found)}, not {list(wanted)}")


def op_call_of(op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float]) -> OpCall:
    """A call for given arrays (a user's own tensors): dimensions are read off the input shapes. Raises CaseError."""
    record = record_of(op)
    missing = set(record.params) - set(params) - set(record.defaults)
    if missing:
        raise CaseError(f"{op}: parameter {sorted(missing)[0]!r} is missing; give {', '.join(record.params)}")
    kinds = _typed(record, params)
    dims: dict[str, int] = {name: value for name, value in kinds.items() if isinstance(value, int)}
    for tensor in record.inputs:
        if tensor.name not in inputs:
            raise CaseError(f"{op}: input {tensor.name!r} is missing; inputs are {', '.join(t.name for t in record.inputs)}")
        found = inputs[tensor.name]
        if found.dtype != np.dtype(tensor.dtype) or found.ndim != len(tensor.dims):
            wanted = f"{tensor.dtype} [{', '.join(tensor.dims)}]"
            raise CaseError(f"{op}: {tensor.name} is {found.dtype} {list(found.shape)}, but must be {wanted}")
        for word, extent in zip(tensor.dims, found.shape, strict=True):
            _solve(op, tensor.name, word, extent, dims)
    return OpCall(op, {t.name: inputs[t.name] for t in record.inputs}, kinds, output_shapes(record, dims, kinds))


def _solve(op: str, name: str, word: str, extent: int, dims: dict[str, int]) -> None:
    """Bind the one unknown part of a dimension word, or check a known one."""
    parts = word.replace("*", "+").split("+")
    unknown = [part for part in parts if not part.isdigit() and part not in dims]
    if len(unknown) == 1:
        known = [size(part, dims) for part in parts if part not in unknown]
        dims[unknown[0]] = extent // math.prod(known) if "*" in word else extent - sum(known)
    if not [part for part in unknown if part not in dims] and size(word, dims) != extent:
        raise CaseError(f"{op}: {name} has extent {extent} where {word} = {size(word, dims)} follows from the inputs before it")
