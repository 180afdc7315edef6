"""What an engine's answers to probes say about its arithmetic: numbers in, lines of a proposed profile out. The questions are campaigns/measure.py.

A line is `sure` only where an answer is a witness: one exact result that the other value of the line cannot give, at the sizes that were asked and
that the evidence names. A largest error over a scan is a lower bound, so that ulps are `likely` at best. What was not seen is `unknown`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.audit import declared_height, rounded
from oracles.ball import Wide, height_block
from oracles.summation import smallest_block
from spec.engine import UNIT_FLOAT32, Profile

FULL = 23  # explicit bits of float32's fraction
FLOAT32_LOG2E = float(np.float32(math.log2(math.e)))


class Certainty(StrEnum):
    SURE = "sure"
    LIKELY = "likely"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Line:
    """`name` is a field of Profile, or words for a behaviour that has no field. `value` None: nothing could be said.

    `heights`: of the line `height`, additions that some term passes, by the number of terms.
    """

    name: str
    value: Any
    certainty: Certainty
    evidence: str
    heights: Mapping[int, int] = field(default_factory=dict)


def sure(name: str, value: Any, evidence: str) -> Line:
    return Line(name, value, Certainty.SURE, evidence)


def likely(name: str, value: Any, evidence: str) -> Line:
    return Line(name, value, Certainty.LIKELY, evidence)


def unknown(name: str, evidence: str) -> Line:
    return Line(name, None, Certainty.UNKNOWN, evidence)


# ---- formats -------------------------------------------------------------------------------------------------------------------------


def bits_kept(exact: Wide, found: NDArray[Any]) -> int | None:
    """The most explicit bits of fraction to which all of `exact` (float32 numbers) was rounded: nearest, negative where the rest is cut off.

    23 where nothing was rounded, None where no such rounding explains `found`.
    """
    wide = found.astype(np.float64)
    for bits in range(FULL, 0, -1):
        if np.array_equal(rounded(exact, bits), wide):
            return bits
        if np.array_equal(rounded(exact, -bits), wide):
            return -bits
    return None


def unit_of(bits: int) -> float:
    """The unit roundoff of a rounding to so many bits; 0 for float32 itself, whose operands are not rounded."""
    return 0.0 if abs(bits) >= FULL else 2.0**bits if bits < 0 else 2.0 ** -(bits + 1)


def format_name(bits: int) -> str:
    known = {
        FULL: "float32",
        10: "TF32 or float16",
        -10: "TF32 by truncation",
        7: "bfloat16",
        -7: "bfloat16 by truncation",
        3: "fp8 e4m3",
        2: "fp8 e5m2",
    }
    return known.get(bits, f"{abs(bits)} bits of fraction{' by truncation' if bits < 0 else ''}")


def height_line(heights: Mapping[int, int], how: str, what: str) -> Line:
    """`heights`: additions that some term passes, by the number of terms. A block that is not well below the longest sum is no block."""
    longest = max(heights)
    block = smallest_block(dict(heights))
    seen = ", ".join(f"{height} of {terms} terms" for terms, height in sorted(heights.items()))
    text = f"{what}: {how}; additions that a term passes: {seen}"
    if longest < 64:
        return Line("height", "any", Certainty.UNKNOWN, f"{text}; too short to tell a block from a chain", heights)
    if 4 * block >= longest:
        return Line("height", "any", Certainty.SURE, f"{text}; no block below a quarter of {longest} explains it", heights)
    before = max(terms for terms in heights if terms < longest)
    if heights[longest] > heights[before] + math.ceil(math.log2(longest / before)):
        return Line("height", "any", Certainty.SURE, f"{text}; from {before} to {longest} it grows faster than a tree of blocks", heights)
    return Line("height", f"blocked:{block}", Certainty.LIKELY, f"{text}; all within blocks of {block} and a balanced tree", heights)


# ---- functions -----------------------------------------------------------------------------------------------------------------------


def ulps(found: NDArray[Any], exact: Wide) -> Wide:
    """|found - exact| / (2 u |exact|), the unit of the profile's *_ulp: at most 0.5 for a correct rounding. Infinite where `found` is not finite."""
    with np.errstate(invalid="ignore"):
        out: Wide = np.abs(found.astype(np.float64) - exact) / (2 * UNIT_FLOAT32 * np.abs(exact))
    return np.where(np.isfinite(out), out, np.inf)


def rounded_up(largest: float, step: float) -> float:
    """The next multiple of `step` above what was seen, and at least half an ulp, which a correct rounding needs."""
    return max(0.5, float(math.ceil(largest / step) * step))


def ulp_line(name: str, found: NDArray[Any], exact: Wide, what: str, step: float = 1.0) -> Line:
    """`unknown` where the results are no float32 results at all (rounded outputs, another function)."""
    error = ulps(found, exact)
    largest = float(error.max())
    if not largest < 2.0**10:
        return unknown(name, f"{what}: off by {largest:.3g} ulp, no float32 function")
    correct = 100 * float((found == exact.astype(np.float32)).mean())
    return likely(
        name,
        rounded_up(largest, step),
        f"{what}: largest error {largest:.2f} ulp in {error.size} points, {correct:.0f} % correctly rounded",
    )


def exp_lines(distance: NDArray[np.float32], found: NDArray[Any], what: str) -> list[Line]:
    """`found` = exp(-distance) as the engine has it. Folding log2(e) into exp2 rounds its argument, an error that grows with the distance."""
    d = distance.astype(np.float64)
    direct = ulps(found, np.exp(-d))
    argument = (distance * np.float32(FLOAT32_LOG2E)).astype(np.float64)
    folded = ulps(found, np.exp2(-argument))
    worst, worst_folded = float(direct.max()), float(folded.max())
    points = f"{what}, {d.size} distances from {d.min():.0f} to {d.max():.0f}"
    if worst <= 3:
        line = sure("exp2_folding", False, f"{points}: off by at most {worst:.2f} ulp; a rounded x log2(e) would show tens")
        return [likely("exp_ulp", rounded_up(worst, 1), f"{points}: largest error {worst:.2f} ulp"), line]
    if worst_folded <= 3:
        line = sure(
            "exp2_folding", True, f"{points}: off by up to {worst:.0f} ulp, but by {worst_folded:.2f} from exp2 of the rounded x log2(e)"
        )
        return [
            likely("exp_ulp", rounded_up(worst_folded, 1), f"{points}: largest error {worst_folded:.2f} ulp after exp2's argument"),
            line,
        ]
    text = f"{points}: off by up to {worst:.3g} ulp, and not by a rounded x log2(e)"
    if worst < 2.0**10:
        return [likely("exp_ulp", rounded_up(worst, 1), text), unknown("exp2_folding", text)]
    return [unknown("exp_ulp", text), unknown("exp2_folding", text)]


@dataclass(frozen=True)
class Ascent:
    """The weight of the first key of rows whose maximum rises three times, as found, as one exp, and as a product of three."""

    places: tuple[int, ...]
    found: NDArray[np.float32]
    direct: NDArray[np.float32]
    chained: NDArray[np.float32]


def online_line(ascents: list[Ascent], what: str) -> Line:
    """Rescaled weights are a witness of online softmax. Weights that are not leave open whether the sum is rescaled."""
    name = "online_softmax"
    for ascent in ascents:
        telling = int((ascent.direct != ascent.chained).sum())
        if telling and np.array_equal(ascent.found, ascent.chained):
            text = f"{what}: the first of four ascending keys, at {', '.join(map(str, ascent.places))}, weighs what three rescalings give"
            return sure(name, True, f"{text}, in {telling} rows where that is another number")
    off = max(float(ulps(ascent.found, ascent.direct.astype(np.float64)).max()) for ascent in ascents)
    if off == 0:
        return unknown(
            name,
            f"{what}: the weight of the first of four ascending keys is one exp at every distance of the keys; the sum may be rescaled or not",
        )
    if 1.5 < off < 2.0**10:
        return likely(name, True, f"{what}: the weight of the first of four ascending keys depends on their order, by up to {off:.0f} ulp")
    return unknown(
        name, f"{what}: the weight of the first of four ascending keys is off from one exp by {off:.3g} ulp, and no product of three"
    )


def tanh_line(x: NDArray[np.float32], found: NDArray[Any]) -> Line:
    """silu at x << 0, where the form with tanh loses what the form with exp keeps."""
    wide = x.astype(np.float64)
    exact = wide * np.exp(wide) / (1 + np.exp(wide))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(found - exact) / np.abs(exact)
        absolute = np.abs(found - exact) / np.abs(wide)
    where = f"silu at {len(x)} points from {x.min():.0f} to {x.max():.0f}"
    if (relative <= 2.0**-6).all():
        return sure("tanh_silu", False, f"{where}: relative error at most {relative.max():.1e}; 1 + tanh would be 0 there")
    if (absolute <= 2.0**-22).all():
        return sure("tanh_silu", True, f"{where}: relative error up to {relative.max():.1e}, absolute error as of 1 + tanh(x / 2)")
    return unknown("tanh_silu", f"{where}: neither form, relative error up to {relative.max():.1e}")


# ---- one line per name -----------------------------------------------------------------------------------------------------------------


def merged(lines: Iterable[Line]) -> list[Line]:
    """One line per name: the looser of two values that are known, a known one before an unknown one."""
    out: dict[str, Line] = {}
    for line in lines:
        before = out.get(line.name)
        out[line.name] = line if before is None else _looser(before, line)
    return list(out.values())


def _looser(first: Line, second: Line) -> Line:
    """The value that allows more errors is the profile's; "there is none" is only as sure as both places that were asked."""
    order = list(Certainty)
    if first.value is None or second.value is None:
        known = first if second.value is None else second
        doubtful = known.certainty is Certainty.SURE and not known.value
        return dataclasses.replace(known, certainty=Certainty.LIKELY if doubtful else known.certainty)
    if first.value == second.value:
        pick = min if first.value else max
        certainty = pick(first.certainty, second.certainty, key=order.index)
        return dataclasses.replace(first, certainty=certainty, evidence=f"{first.evidence}; {second.evidence}")
    chosen, other = (second, first) if second.value > first.value else (first, second)
    return dataclasses.replace(chosen, evidence=f"{chosen.evidence}; but {other.value}: {other.evidence}")


# ---- against what is declared --------------------------------------------------------------------------------------------------------

LARGER_IS_LOOSER = ("u_input", "u_output", "u_accumulate", "exp_ulp", "log_ulp", "rsqrt_ulp", "div_ulp", "angle_roundings")
TRUE_IS_LOOSER = ("online_softmax", "exp2_folding", "tanh_silu", "flush_to_zero", "float32_scores")


def contradicts(line: Line, declared: Profile) -> bool:
    """A sure line whose value is outside what the profile allows: the profile claims more than the engine keeps."""
    if line.certainty is not Certainty.SURE or not hasattr(declared, line.name):
        return False
    claimed = getattr(declared, line.name)
    if line.name in LARGER_IS_LOOSER:
        return bool(line.value > claimed)
    if line.name in TRUE_IS_LOOSER:
        return bool(line.value and not claimed)
    if line.name == "batch_invariant":
        return bool(claimed and not line.value)
    if line.name == "ties":
        return bool(claimed == "lowest" and line.value != "lowest")
    block = height_block(declared.height)
    return line.name == "height" and block is not None and any(seen > declared_height(block, terms) for terms, seen in line.heights.items())
