"""Probes of a declared arithmetic: operands whose exact results are float32 numbers, so that one wrong bit tells how an engine computes.

Two regimes of products, asked once per check and never drawn: "probe" holds outputs of one or two terms, all others zero (what
precision do operands, products and sums have?), "probe height" the masks of FPRev (in which tree are terms added? arXiv 2411.00442). What the
answers mean is decided in oracles/audit.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from campaigns.case import OpCase
from oracles.ball import height_block
from spec.engine import Description
from spec.weights import philox

PROBE, HEIGHT = "probe", "probe height"
PROBES = (PROBE, HEIGHT)
OPS = ("matmul", "scores", "q_absorb", "o_heads")
HEIGHT_OPS = ("matmul", "scores")
HEADS = {"q_absorb": ("n", "R"), "o_heads": ("R", "v")}  # per-head products: dimension words of terms and columns
TERMS = (8, 64, 1024, 4096)  # kernels choose their precision and their split by size: below and above the common thresholds
ROWS, COLUMNS = 16, 24
MASK = 2.0**30  # absorbs up to 2**5 ones, and as many more as TERMS_MAX allows in one rounding each: every 1 beside it is lost
LEAVES = 8  # of the tree whose depth is looked at
HEIGHT_TERMS_MAX = 512


def audit_cases(description: Description) -> list[OpCase]:
    """The probes that an engine's description allows; none where it runs no single operation."""
    ops = [op for op in OPS if "run_op" in description.capabilities and (not description.ops or op in description.ops)]
    cases = [probe(op, terms) for op in ops for terms in TERMS]
    for op in (op for op in ops if op in HEIGHT_OPS):
        block = height_block(description.profile.at(op).height)
        if block is not None and (terms := min(HEIGHT_TERMS_MAX, 4 * block)) > 2:
            cases.append(OpCase(op, _pairs(op, LEAVES * (terms - 1), terms, 1), _params(op), HEIGHT, 0))
    return cases


def probe(op: str, terms: int) -> OpCase:
    return OpCase(op, _pairs(op, ROWS, terms, COLUMNS), _params(op), PROBE, 0)


def _pairs(op: str, rows: int, terms: int, columns: int) -> tuple[tuple[str, int], ...]:
    if op in HEADS:
        inner, outer = HEADS[op]
        dims = {"T": rows, "H": 1, inner: terms, outer: columns}
    else:
        dims = {"T": rows, "K": terms, "N": columns} if op == "matmul" else {"T": rows, "H": 1, "C": terms, "S": columns}
    return tuple(sorted(dims.items()))


def _params(op: str) -> tuple[tuple[str, float], ...]:
    return (("scale", 1.0),) if op == "scores" else ()


def operands(case: OpCase) -> dict[str, NDArray[np.float32]]:
    """Raises KeyError for a missing dimension, ValueError for another operation."""
    if case.op not in OPS:
        raise ValueError(f"there is no probe of {case.op}")
    dims = dict(case.dims)
    words = HEADS.get(case.op, ("K", "N") if case.op == "matmul" else ("C", "S"))
    rows, terms, columns = (dims[word] for word in ("T", *words))
    left, right = _precision(rows, terms, columns, case.seed) if case.regime == PROBE else _masks(rows, terms, columns)
    if case.op == "matmul":
        return {"x": left, "w": right}
    if case.op in HEADS:
        x, w = ("q_nope", "w_kc") if case.op == "q_absorb" else ("o_latent", "w_vc")
        return {x: np.repeat(left[:, None], dims["H"], 1), w: np.repeat(right[None], dims["H"], 0)}
    return {"q": np.repeat(left[:, None], dims["H"], 1), "keys": np.ascontiguousarray(right.T)}


def _precision(rows: int, terms: int, columns: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rows 0, 3, ..: one operand of 24 random bits times powers of two; rows 1, 4, ..: 1 times a weight of 24 random bits; rows 2, 5, ..: 1 plus
    one small power of two that a float32 sum still holds, as far apart as the row is long."""
    rng = philox("probe", seed)
    left = np.zeros((rows, terms), np.float32)
    right = np.zeros((terms, columns), np.float32)
    free = iter(rng.permutation(terms).tolist() * (2 * rows // terms + 2))
    for row in range(rows):
        at = next(free)
        if row % 3 == 0 or terms == 1:
            left[row, at] = 1 + rng.integers(1, 2**23) * 2.0**-23
            right[at] = np.ldexp(1.0, rng.integers(-6, 7, columns))
        elif row % 3 == 1:
            left[row, at] = 1
            right[at] = 1 + rng.integers(1, 2**23, columns) * 2.0**-23
        else:
            left[row, 0], left[row, -1] = 1, 2.0 ** -int(rng.integers(4, 24))
            right[0], right[-1] = 1, 1
    return left, right


def _masks(rows: int, terms: int, columns: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Row r: +MASK at leaf i, -MASK at leaf j, ones elsewhere; the pairs of LEAVES leaves with all others, as many as there are rows."""
    left = np.ones((rows, terms), np.float32)
    for row, (first, second) in enumerate(height_pairs(rows, terms)):
        left[row, first], left[row, second] = MASK, -MASK
    return left, np.ones((terms, columns), np.float32)


def height_pairs(rows: int, terms: int) -> list[tuple[int, int]]:
    """(i, j) of each row. A row beyond the last pair repeats the first ones."""
    chosen = sorted({round(number * (terms - 1) / max(1, LEAVES - 1)) for number in range(LEAVES)})
    pairs = [(first, second) for first in chosen for second in range(terms) if first != second] or [(0, 0)]
    return [pairs[row % len(pairs)] for row in range(rows)]
