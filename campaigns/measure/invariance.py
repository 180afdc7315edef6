"""Whether the bits of a row depend on the other rows of its batch, or on its place among them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.measure.subject import Float, Operations, Refused
from oracles.probing import Line, likely, sure
from spec.weights import philox

BATCHES = (1, 2, 5, 16)
BATCH = 33


def invariance_lines(subject: Operations) -> list[Line]:
    """The same rows in batches of several sizes, and one row in every place of a batch, bit by bit."""
    differing: list[str] = []
    moved: list[str] = []
    tried = []
    for op, inputs, params, shared in _row_wise():
        if not subject.offers(op):
            continue
        tried.append(op)
        whole = subject.op(op, inputs, params)["out"]
        for rows in BATCHES:
            part = subject.op(op, {n: a if n in shared else a[:rows] for n, a in inputs.items()}, params)["out"]
            if part.tobytes() != whole[:rows].tobytes():
                differing.append(f"{op} of {rows} rows and of {BATCH}")
                break
        same = subject.op(op, {n: a if n in shared else np.repeat(a[:1], BATCH, 0) for n, a in inputs.items()}, params)["out"]
        if any(row.tobytes() != same[0].tobytes() for row in same):
            moved.append(op)
    if not tried:
        raise Refused("the engine offers no operation whose rows are independent")
    batch = (
        sure(
            "batch_invariant",
            False,
            f"the bits of a row differ between {differing[0]}" + (f" (and in {len(differing) - 1} more)" if differing[1:] else ""),
        )
        if differing
        else likely(
            "batch_invariant",
            True,
            f"the bits of a row are the same in batches of {', '.join(map(str, BATCHES))} and {BATCH}: {', '.join(tried)}",
        )
    )
    row = (
        sure("row invariance", False, f"{BATCH} equal rows of {', '.join(moved)} give different bits")
        if moved
        else likely("row invariance", True, f"{BATCH} equal rows give equal bits: {', '.join(tried)}")
    )
    return [batch, row]


def _row_wise() -> list[tuple[str, dict[str, NDArray[Any]], dict[str, int | float], frozenset[str]]]:
    """(operation, inputs, params, inputs that all rows share)."""
    rng = philox("measure invariance")

    def normal(*shape: int) -> Float:
        return rng.standard_normal(shape).astype(np.float32)

    attention: dict[str, NDArray[Any]] = {"q": normal(BATCH, 4, 40), "cache": normal(300, 40), "visible": np.ones((BATCH, 300), np.uint8)}
    return [
        ("matmul", {"x": normal(BATCH, 1000), "w": normal(1000, 48)}, {}, frozenset({"w"})),
        ("matmul", {"x": normal(BATCH, 72), "w": normal(72, 17)}, {}, frozenset({"w"})),
        ("rms_norm", {"x": normal(BATCH, 333), "gain": normal(333)}, {"eps": 1e-6}, frozenset({"gain"})),
        ("scores", {"q": normal(BATCH, 4, 40), "keys": normal(100, 40)}, {"scale": 0.2}, frozenset({"keys"})),
        ("softmax", {"scores": normal(BATCH, 4, 300), "visible": np.ones((BATCH, 300), np.uint8)}, {}, frozenset()),
        ("tree_attention", attention, {"kv_rank": 32, "scale": 0.2}, frozenset({"cache"})),
        ("swiglu", {"gate": normal(BATCH, 37), "up": normal(BATCH, 37)}, {}, frozenset()),
    ]
