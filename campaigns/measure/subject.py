"""Whom the questions are put to: an engine's operations here, its sessions in sessions.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from campaigns.materialise import op_call_of
from campaigns.trial import Worker

Float = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]


class Refused(Exception):
    """The engine did not answer a question; the message says why."""


class Subject(Protocol):
    """What the questions need. Each method raises Refused where the engine has no such thing."""

    def product(self, left: Float, right: Float, rows: int) -> Float:
        """float32 [rows, N]: `rows` equal rows left [K] times right [K, N]."""
        ...

    def op(self, op: str, inputs: Arrays, params: Mapping[str, int | float]) -> dict[str, NDArray[Any]]: ...

    def terms(self, wanted: int) -> int:
        """How long a sum can be asked for where `wanted` would be good."""
        ...


class Operations:
    """A Subject over `run_op`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def terms(self, wanted: int) -> int:
        return wanted

    def offers(self, op: str) -> bool:
        ops = self._worker.description.ops
        return not ops or op in ops

    def product(self, left: Float, right: Float, rows: int) -> Float:
        out: Float = self.op("matmul", {"x": np.tile(left, (rows, 1)), "w": right}, {})["out"]
        return out

    def op(self, op: str, inputs: Arrays, params: Mapping[str, int | float]) -> dict[str, NDArray[Any]]:
        if not self.offers(op):
            raise Refused(f"the engine does not offer {op}")
        (answer,) = self._worker.calls([op_call_of(op, {n: np.ascontiguousarray(a) for n, a in inputs.items()}, params)])
        if answer.failure is not None or answer.outputs is None:
            raise Refused(f"{op}: {answer.failure.message if answer.failure else 'no outputs'}")
        return answer.outputs
