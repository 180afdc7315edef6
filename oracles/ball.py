"""Mid-radius ("ball") arithmetic: an exact value, and how far an engine of a declared profile may be from it.

`mid` is the operation in float64 at the midpoint of its inputs. `rad` is a certified radius: it holds for any order of summation
(or the profile's declared height), FMA or not, split-K or not. `std` is an order-averaged rounding model that serves warnings and
statistical bounds only, and is computed on request. A tensor that an engine handed over is a leaf of radius zero: operations on leaves
give the local bound (rule N2), operations on balls the bound of a region. Beyond about five operations the radius says nothing.

Derivations, by name: DOT gamma_n |A||B| (Higham, Accuracy and Stability, 3.1: every term passes at most n roundings); INHERIT
|AB - ab| <= |A||B| - |a||b| over the boxes of the inputs; OUT one more rounding on the way out; FLUSH underflow, absolute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.engine import UNIT_FLOAT32, Profile

Wide = NDArray[np.float64]
Multiply = Callable[[Wide, Wide], Wide]

THIRD = 1 / 3.0  # variance of a rounding error that is uniform on [-u, u], in units of u^2
INFLATE = 1 + 2.0**-20  # covers the float64 evaluation of mid and rad, about 2**-29 of the radius
OVERFLOW = 2.0**127  # an intermediate of this size may overflow float32 in some order of evaluation: nothing is certified there
ETA_FLUSH = 2.0**-126  # what is lost when a subnormal becomes zero
ETA_GRADUAL = 2.0**-149  # with subnormals: at most half of this, doubled for the pair (product, function)


class Arithmetic:
    """A profile turned into the constants of the bounds. `statistics`: also compute `std`. `real`: leaves are real numbers, not
    float32 ones, so that nothing is rounded (perturbed walks).

    e_f = 2 u ulps(f) is a relative error; `input_growth` = (1 + u_in)^2 - 1 for a product of two rounded operands.
    """

    __slots__ = (
        "angle", "angle_per_pair", "any_tie", "block", "div", "eta", "exp", "exp2_folding", "float32_scores", "input_growth", "log", "online", "output", "profile", "real", "rsqrt",
        "statistics", "tanh", "unit",
    )  # fmt: skip

    def __init__(self, profile: Profile, statistics: bool = False, real: bool = False) -> None:
        self.profile = profile
        self.unit = profile.u_accumulate
        self.input_growth = (1 + profile.u_input) ** 2 - 1
        # results are handed over as float32: a wider accumulator still rounds once on the way out
        self.output = profile.u_output or (UNIT_FLOAT32 if profile.u_accumulate < UNIT_FLOAT32 else 0.0)
        self.exp = 2 * self.unit * profile.exp_ulp
        self.log = 2 * self.unit * profile.log_ulp
        self.rsqrt = 2 * self.unit * profile.rsqrt_ulp
        self.div = 2 * self.unit * profile.div_ulp
        self.online = profile.online_softmax
        self.exp2_folding = profile.exp2_folding
        self.tanh = profile.tanh_silu
        self.eta = ETA_FLUSH if profile.flush_to_zero else ETA_GRADUAL
        self.float32_scores = profile.float32_scores
        self.angle = profile.angle_roundings * profile.u_accumulate
        self.angle_per_pair = profile.angle_roundings_per_pair * profile.u_accumulate
        self.any_tie = ties_any(profile.ties)
        self.statistics = statistics
        self.real = real
        self.block = height_block(profile.height)

    def at(self, *names: str) -> Arithmetic:
        """Of one operation: `names` as in Profile.at, the tap before its operation."""
        return arithmetic(self.profile.at(*names), self.statistics, self.real) if self.profile.per_op else self

    @property
    def widest(self) -> Arithmetic:
        """Of operations that an engine may have joined or split otherwise."""
        return arithmetic(self.profile.widest, self.statistics, self.real) if self.profile.per_op else self

    def gamma(self, roundings: Any) -> Any:
        """k u / (1 - k u). Raises ValueError where so many roundings have no bound."""
        error = roundings * self.unit
        if np.max(error) >= 0.5:
            raise ValueError(f"{np.max(roundings)} roundings of {self.unit}: no bound exists; declare an accumulation height")
        return error / (1 - error)

    def roundings(self, terms: int) -> int:
        """Roundings that one term of a dot of `terms` terms can pass: its product and the additions above it."""
        if self.block is None or terms < 2:
            return terms
        return min(terms, 1 + min(terms - 1, self.block + max(0, math.ceil(math.log2(terms / self.block)))))


@lru_cache(maxsize=256)
def arithmetic(profile: Profile, statistics: bool = False, real: bool = False) -> Arithmetic:
    return Arithmetic(profile, statistics, real)


def height_block(height: str) -> int | None:
    """B of "blocked:B", None for "any". Raises ValueError for another word."""
    if height == "any":
        return None
    kind, _, block = height.partition(":")
    if kind != "blocked" or not block.isdigit() or int(block) < 1:
        raise ValueError(f"height is {height!r}, but must be any or blocked:B with B at least 1")
    return int(block)


def ties_any(ties: str) -> bool:
    """Whether any of several equal choices is right. Raises ValueError for another word than lowest and any."""
    if ties not in ("lowest", "any"):
        raise ValueError(f"ties is {ties!r}, but must be lowest or any")
    return ties == "any"


class Ball:
    """`rad` and `std` None mean zero everywhere: an exact leaf. `overflow`: where an intermediate may leave float32's range."""

    __slots__ = ("_absolute", "_largest", "mid", "overflow", "rad", "std")

    def __init__(self, mid: Any, rad: Wide | None = None, std: Wide | None = None, overflow: NDArray[np.bool_] | None = None) -> None:
        self.mid: Wide = np.asarray(mid, np.float64)
        self.rad = rad
        self.std = std
        self.overflow = overflow
        self._absolute: Wide | None = None
        self._largest: float | None = None

    @property
    def exact(self) -> bool:
        return self.rad is None

    @property
    def absolute(self) -> Wide:
        """|mid|, kept: weights are asked for it in every case."""
        if self._absolute is None:
            self._absolute = np.abs(self.mid)
        return self._absolute

    @property
    def largest(self) -> float:
        """max |mid| over the finite elements, kept; 0 if there is none."""
        if self._largest is None:
            largest = float(self.absolute.max(initial=0.0))
            if not math.isfinite(largest):  # one bad element makes its own results unknowable, not those of other rows
                largest = float(self.absolute[np.isfinite(self.absolute)].max(initial=0.0))
            self._largest = largest
        return self._largest

    @property
    def upper(self) -> Wide:
        """|mid| + rad: no value of the ball is larger in magnitude."""
        return self.absolute if self.rad is None else self.absolute + self.rad

    def map(self, view: Callable[[Any], Any]) -> Ball:
        """The same rearrangement of every part: reshape, transpose, index."""
        out = Ball(view(self.mid), *(None if part is None else view(part) for part in (self.rad, self.std, self.overflow)))
        if self._absolute is not None:
            out._absolute = view(self._absolute)
            out._largest = self._largest  # of a superset: an upper bound is what it is used for
        return out

    def __getitem__(self, index: Any) -> Ball:
        return self.map(lambda part: part[index])

    def reshape(self, *shape: int) -> Ball:
        return self.map(lambda part: part.reshape(shape))

    def transpose(self, *axes: int) -> Ball:
        return self.map(lambda part: part.transpose(axes))


def concatenate(balls: list[Ball], axis: int) -> Ball:
    """Joined along `axis`; a part that only some balls have is filled with zeros for the others."""

    def joined(parts: list[Any], dtype: Any) -> Any:
        if all(part is None for part in parts):
            return None
        return np.concatenate([np.zeros(b.mid.shape, dtype) if part is None else part for part, b in zip(parts, balls, strict=True)], axis)

    return Ball(
        np.concatenate([b.mid for b in balls], axis),
        joined([b.rad for b in balls], np.float64),
        joined([b.std for b in balls], np.float64),
        joined([b.overflow for b in balls], np.bool_),
    )


def zeros_if_none(part: Wide | None) -> Any:
    return 0.0 if part is None else part


def finish(mid: Wide, rad: Any, variance: Any, a: Arithmetic, overflow: NDArray[np.bool_] | None = None, rad_floor: Any = 0.0) -> Ball:
    """OUT: one rounding of the result to the output format, then INFLATE. `rad_floor`: an absolute error that does not round."""
    std = None
    if a.output:
        rad = rad + a.output * (np.abs(mid) + rad)
        if a.statistics:
            variance = variance + THIRD * (a.output * mid) ** 2
    if a.statistics:
        std = np.sqrt(variance)
    return Ball(mid, np.asarray(rad * INFLATE + rad_floor), std, overflow)


def too_large(size: Wide, bound: float) -> NDArray[np.bool_] | None:
    """Where `size` may overflow float32; None at once if `bound`, an upper bound of all of it, says that none does."""
    if bound < OVERFLOW:
        return None
    where: NDArray[np.bool_] = ~(size < OVERFLOW)
    return where if where.any() else None


def either(first: NDArray[np.bool_] | None, second: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    if first is None or second is None:
        return second if first is None else first
    return first | second


def dot(
    x: Ball,
    y: Ball,
    terms: Any,
    a: Arithmetic,
    *,
    count: int | None = None,
    extra: int = 0,
    scale: float = 1.0,
    multiply: Multiply = np.matmul,
) -> Ball:
    """scale * (x . y) as `multiply` contracts them.

    DOT: rad = ((1 + u_in)^2 (1 + gamma(roundings + extra)) - 1) |x||y|, plus INHERIT where the inputs are balls, plus FLUSH: each of the
    `count` products, partial sums and subnormal operands may be lost (2 + max|x| + max|y| per term). `terms` is the number
    of terms that are not exactly zero (adding zero is exact), an int or an array that broadcasts; `extra` counts further
    roundings of each term (a scale, a split). std^2 = u^2/3 (n s^2/3 + (n/6 + 1) sum x^2 y^2), the mean over summation orders.
    """
    longest = count if count is not None else int(np.max(terms))
    if a.block is None:
        roundings = terms
    else:
        roundings = np.minimum(terms, a.roundings(longest)) if isinstance(terms, np.ndarray) else min(terms, a.roundings(longest))
    growth = (1 + a.input_growth) * (1 + a.gamma(roundings + extra)) - 1
    mid = multiply(x.mid, y.mid)
    total = multiply(x.absolute, y.absolute)
    reach = total  # |x||y| at the far corner of the boxes
    if x.exact and y.exact:
        rad = growth * total
    else:
        reach = multiply(x.upper, y.upper)
        rad = (1 + growth) * reach - total
    factor = abs(scale)
    flush = a.eta * longest * (2 + x.largest + y.largest) * max(factor, 1.0)
    overflow = too_large(reach * max(factor, 1.0), float(longest) * x.largest * y.largest * max(factor, 1.0) if reach is total else np.inf)
    variance: Any = 0.0
    if a.statistics:
        squares = multiply(np.square(x.mid), np.square(y.mid))
        variance = THIRD * a.unit**2 * (terms * mid * mid * THIRD + (terms / 6 + 1) * squares)
        variance = variance + THIRD * (extra * (a.unit * mid) ** 2 + 2 * (math.sqrt(1 + a.input_growth) - 1) ** 2 * squares)
        if x.std is not None:
            variance = variance + multiply(np.square(x.std), np.square(y.mid))
        if y.std is not None:
            variance = variance + multiply(np.square(x.mid), np.square(y.std))
    if scale != 1.0:
        mid, rad, variance = mid * scale, rad * factor, variance * (scale * scale)
    return finish(mid, rad, variance, a, overflow, flush)
