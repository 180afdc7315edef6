"""One call of one operation: are its outputs what they must be? Shapes and classes of numbers first, then the op's own judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.ball import arithmetic
from oracles.compare import Near, judge_expected
from oracles.judgement import Judgement, Verdict
from oracles.ops import BOUNDS
from oracles.suspicion import suspect
from spec.engine import Profile
from spec.script import OpCall


def judge_op(
    call: OpCall,
    outputs: Mapping[str, NDArray[Any]],
    profile: Profile,
    rung: str = "ops",
    step: int = 0,
    tap: str = "",
    statistics: bool = False,
) -> list[Judgement]:
    """One judgement per output, in the op's order; the named element is the worst one.

    `statistics`: an output that passes may still be a WARNING (oracles/suspicion.py). `tap` replaces the output's name (with several outputs: goes before it). Raises KeyError for an operation that does not exist.
    """
    expect = BOUNDS[call.op]
    malformed = [
        Judgement(Verdict.MALFORMED, "C5", call.op, _label(tap, name, call), rung, step=step, share=float("inf"), message=problem)
        for name, (shape, dtype) in call.outputs.items()
        if (problem := _misshapen(name, outputs.get(name), shape, dtype))
    ]
    if malformed:
        return malformed
    with np.errstate(all="ignore"):  # operands may be anything; classes of numbers are told apart where they are compared
        expected = expect(call.inputs, call.params, outputs, arithmetic(profile.at(call.op), statistics))
        judged = []
        for name, expectation in expected.items():
            judgement = judge_expected(outputs[name], expectation, op=call.op, tap=_label(tap, name, call), rung=rung, step=step)
            if statistics and type(expectation) is Near:
                judgement = suspect(judgement, outputs[name], expectation)
            judged.append(judgement)
    return judged


def _label(tap: str, name: str, call: OpCall) -> str:
    if not tap:
        return name
    return tap if len(call.outputs) == 1 else f"{tap}.{name}"


def _misshapen(name: str, found: NDArray[Any] | None, shape: tuple[int, ...], dtype: str) -> str:
    if found is None:
        return f"{name} is missing; expected {dtype} {list(shape)}"
    if found.shape != tuple(shape) or found.dtype != np.dtype(dtype):
        return f"{name} is {found.dtype} {list(found.shape)}, but must be {dtype} {list(shape)}"
    return ""
