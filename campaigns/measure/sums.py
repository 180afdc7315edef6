"""Products and their sums: the formats of operands, accumulator and result, the order of additions, and what becomes of subnormal numbers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.measure.functions import weights
from campaigns.measure.subject import Float, Operations, Subject
from oracles import probing, summation
from oracles.audit import rounded
from oracles.probing import Certainty, Line, bits_kept, format_name, likely, sure, unit_of, unknown
from spec.engine import UNIT_FLOAT32
from spec.weights import philox

TERMS = (8, 64, 1024, 4096)  # kernels choose their precision by size: below and above the common thresholds
TREE_TERMS = 64  # all pairs of so many terms: the whole tree
LONG_TERMS = (256, 1024)  # one leaf against all others
ROWS = (1, 16)  # a matrix-vector kernel and a tile
COLUMNS = 48


def precision_lines(subject: Subject) -> list[Line]:
    """Operands, accumulator and result of a product, the worst over all sizes; one probe has one or three terms, all others are 0."""
    found: list[tuple[int, int, str, Line]] = []
    for wanted in TERMS:
        terms = subject.terms(wanted)
        for rows in ROWS:
            found += [(terms, rows, line.name, line) for line in _precision(subject, terms, rows)]
    sizes = (
        f"sums of {', '.join(str(terms) for terms in sorted({terms for terms, *_ in found}))} terms, {' and '.join(map(str, ROWS))} rows"
    )
    return [_worst([entry for entry in found if entry[2] == name], sizes) for name in ("u_input", "u_output", "u_accumulate")]


def _worst(entries: list[tuple[int, int, str, Line]], sizes: str) -> Line:
    known = [(terms, rows, line) for terms, rows, _, line in entries if line.value is not None]
    if not known:
        return entries[0][3]
    terms, rows, line = max(known, key=lambda entry: entry[2].value)
    others = {entry[2].value for entry in known} - {line.value}
    where = f"at {terms} terms and {rows} rows, less elsewhere" if others else sizes
    weaker = len(known) < len(entries) and line.certainty is Certainty.SURE and not others
    return dataclasses.replace(line, certainty=Certainty.LIKELY if weaker else line.certainty, evidence=f"{line.evidence} ({where})")


def _precision(subject: Subject, terms: int, rows: int) -> list[Line]:
    rng = philox("measure precision", terms, rows)
    names = ("u_input", "u_output", "u_accumulate")
    columns = np.arange(COLUMNS)
    at = rng.integers(0, terms, COLUMNS)
    long = (1 + rng.integers(2**22, 2**23, terms) * 2.0**-23).astype(np.float32) + np.float32(2.0**-23)
    powers = np.ldexp(1.0, rng.integers(-6, 7, COLUMNS)).astype(np.float32)

    def one_term(values: NDArray[Any]) -> Float:
        right = np.zeros((terms, COLUMNS), np.float32)
        right[at, columns] = values
        return right

    ones = np.ones(terms, np.float32)
    random_words = (1 + rng.integers(1, 2**23, COLUMNS) * 2.0**-23).astype(np.float32)
    left_found = subject.product(long, one_term(powers), rows)
    right_found = subject.product(ones, one_term(random_words), rows)
    left_bits = bits_kept(np.tile(long[at].astype(np.float64) * powers, (rows, 1)), left_found)
    right_bits = bits_kept(np.tile(random_words.astype(np.float64), (rows, 1)), right_found)
    if left_bits is None or right_bits is None:
        text = "one-term products are no rounding of the exact ones"
        return [unknown(name, text) for name in names]
    bits = min(left_bits, right_bits, key=abs)
    out = _input_and_output(subject, bits, left_bits, right_bits, terms, rows, one_term)
    return [*out, _accumulator(subject, terms, rows)]


def _input_and_output(
    subject: Subject, bits: int, left_bits: int, right_bits: int, terms: int, rows: int, one_term: Callable[[NDArray[Any]], Float]
) -> list[Line]:
    """Which of operands and result were rounded, where a product of a long and a short number came back short."""
    if abs(bits) == probing.FULL:
        text = "products of one operand of 24 random bits come back exactly"
        return [sure("u_input", 0.0, text), sure("u_output", 0.0, text)]
    text = f"products with an operand of 24 random bits come back with {format_name(bits)} (x: {format_name(left_bits)}, w: {format_name(right_bits)})"
    if abs(bits) > 11:
        return [unknown("u_input", text), unknown("u_output", text)]
    short = 1 + 2.0 ** -abs(bits)  # held by the format; its square needs twice the bits
    squares = subject.product(np.full(terms, short, np.float32), one_term(np.full(COLUMNS, short)), rows)
    kept = bool((squares == np.float32(short * short)).all())
    if kept:
        line = sure(
            "u_input", unit_of(bits), f"{text}, but the square of a short one keeps all {2 * abs(bits)} bits: the operands are rounded"
        )
        return [line, sure("u_output", 0.0, f"the square of 1 + 2**-{abs(bits)} comes back exactly")]
    if not (squares == rounded(np.array([short * short]), bits)).all() or terms < 2:
        return [unknown("u_input", text), unknown("u_output", f"{text}; the square of a short number is rounded otherwise")]
    output = sure("u_output", unit_of(bits), f"{text}, and so does the square of a short number: the result is rounded")
    small = 2.0 ** -(abs(bits) + 3)
    right = np.zeros((terms, COLUMNS), np.float32)
    right[0], right[-1] = 1 + small, -1
    rest = subject.product(np.ones(terms, np.float32), right, rows)
    if (rest == np.float32(small)).all():
        return [sure("u_input", 0.0, f"1 + 2**-{abs(bits) + 3} - 1 leaves its last bit: the operands are not rounded"), output]
    return [
        unknown("u_input", f"1 + 2**-{abs(bits) + 3} - 1 leaves {float(rest.flat[0]):.3g}: operands or accumulator are short, too"),
        output,
    ]


PLACES = ((0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1), (2, 1, 0), (1, 0, 2))  # of 1, the small term, and -1


def _accumulator(subject: Subject, terms: int, rows: int) -> Line:
    """1 + 2**-t - 1 in every order of three distant and three adjacent places: what is lost is what the accumulator cannot hold beside 1."""
    name = "u_accumulate"
    if terms < 3:
        return unknown(name, f"{terms} terms are too few")
    spots = [(0, 1, 2), (0, terms // 2, terms - 1)]
    widths = np.arange(3, 31)
    columns = [(t, s[p[0]], s[p[1]], s[p[2]]) for t in widths for s in spots for p in PLACES]
    ones = np.ones(terms, np.float32)

    def survivors(factor: float) -> NDArray[Any]:
        right = np.zeros((terms, len(columns)), np.float32)
        for column, (t, one, small, minus) in enumerate(columns):
            right[one, column], right[small, column], right[minus, column] = 1, factor * 2.0 ** -int(t), -1
        return subject.product(ones, right, rows).reshape(rows, len(widths), -1)

    kept = survivors(1.0) == np.ldexp(1.0, -widths)[None, :, None].astype(np.float32)
    always = kept.all((0, 2))
    bits = int(widths[always].max()) if always.all() else int(widths[~always].min()) - 1
    if bits < int(widths[0]):
        return unknown(name, "1 + 1/8 - 1 is not 1/8 in every order")
    if bits > probing.FULL:  # the profile's unit is that of functions as well, which stay float32 functions
        text = f"1 + 2**-{bits} - 1 keeps its last bit in every order and place: wider than float32, or compensated"
        return likely(name, UNIT_FLOAT32, text)
    nearest = survivors(1.5)[:, bits + 1 - int(widths[0])]  # 1 + 3/4 of the last bit
    cut = bool((nearest == 0).any())
    unit = 2.0**-bits if cut else 2.0 ** -(bits + 1)
    how = "cuts off" if cut else "rounds to nearest"
    return sure(
        name, unit, f"1 + 2**-{bits} - 1 keeps its last bit in every order, 2**-{bits + 1} is lost in some: {bits + 1} bits, and it {how}"
    )


def height_line(subject: Subject) -> Line:
    """FPRev: the whole tree of few terms, and the depth of one term among many."""
    terms = subject.terms(TREE_TERMS)
    ones = np.ones(terms, np.float32)
    of = summation.pairs(terms)
    heights: dict[int, int] = {}
    kinds = []
    fused = 1  # additions that one node stands for, in the worst order
    for rows in ROWS:
        sums = subject.product(ones, summation.masks(terms, of), rows)[0]
        under = summation.leaves_under(sums, terms)
        tree = None if under is None else summation.tree_of(under, terms)
        if tree is None:
            why = "the sums of masked ones are those of no tree: compensated, wider than the masks, or too short a format"
            return unknown("height", f"{terms} terms, {rows} rows: {why}")
        heights[terms] = max(heights.get(terms, 0), summation.height(tree))
        fused = max(fused, summation.widest(tree) - 1)
        kinds.append(f"{rows} row{'s' if rows > 1 else ''}: {summation.words(tree, terms)}")
    for wanted in LONG_TERMS:
        longer = subject.terms(wanted)
        if longer in heights:
            continue
        for rows, leaf in itertools.product(ROWS, (0, longer // 2, longer - 1)):
            others = np.delete(np.arange(longer), leaf)
            masks = summation.masks(longer, np.stack([np.full(longer - 1, leaf), others], 1))
            under = summation.leaves_under(subject.product(np.ones(longer, np.float32), masks, rows)[0], longer)
            if under is None:
                return unknown("height", f"{'; '.join(kinds)} over {terms} terms, but {longer} masked ones give no counts")
            heights[longer] = max(heights.get(longer, 0), min(longer - 1, fused * summation.depth_of_leaf(under)))
    return probing.height_line(heights, "; ".join(kinds), "products")


SUBNORMAL = 2.0**-128  # of float32, and of bfloat16, so that a short result is not taken for a flushed one


def flush_lines(subject: Subject) -> list[Line]:
    """Subnormal products, and exp far below the range where the engine has a softmax."""
    terms = subject.terms(TERMS[0])
    right = np.zeros((terms, COLUMNS), np.float32)
    right[0] = np.float32(2.0**-64)
    found = subject.product(np.full(terms, 2.0**-64, np.float32), right, ROWS[0])
    if not ((found == np.float32(SUBNORMAL)) | (found == 0)).all():
        return [unknown("flush_to_zero", f"2**-64 squared is {float(found.flat[0]):.3g}")]
    if (found == 0).any():
        return [sure("flush_to_zero", True, "the product 2**-64 * 2**-64 is 0, not 2**-128")]
    seen = ["products"]
    if isinstance(subject, Operations) and subject.offers("softmax"):
        if weights(subject, np.array([[0, -89]], np.float32))[0, 1] == 0:
            return [sure("flush_to_zero", True, "exp(-89) is 0 in a softmax, not 2.2e-39")]
        seen.append("exp")
    return [likely("flush_to_zero", False, f"subnormal results survive in {' and '.join(seen)}")]
