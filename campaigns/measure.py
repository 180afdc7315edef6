"""`paritree profile measure ENGINE`: a proposed profile, by asking. Operations where the engine runs them, sessions with crafted weights where not.

Every question has an exact answer that tells one arithmetic from another; reading the answers is oracles/probing.py and oracles/summation.py. An
engine that refuses a question, or fails at it, gets `unknown` on that line and the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from campaigns import measure_ties
from campaigns.materialise import op_call_of
from campaigns.trial import Worker
from oracles import probing, summation
from oracles.audit import rounded
from oracles.probing import Certainty, Line, bits_kept, format_name, likely, sure, unit_of, unknown
from spec.engine import UNIT_FLOAT32, Description, Profile
from spec.weights import philox

if TYPE_CHECKING:
    from campaigns.measure_sessions import Sessions

Float = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]

WEIGHTS = "campaigns.measure_sessions:probe_weights"  # what a worker must be started with
TERMS = (8, 64, 1024, 4096)  # kernels choose their precision by size: below and above the common thresholds
TREE_TERMS = 64  # all pairs of so many terms: the whole tree
LONG_TERMS = (256, 1024)  # one leaf against all others
ROWS = (1, 16)  # a matrix-vector kernel and a tile
COLUMNS = 48
ABSORBED = 17.4  # exp(-d) from here on is less than half an ulp of 1: the sum of a row whose other key weighs 1 stays 1


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


@dataclass(frozen=True)
class Measured:
    """The lines, and the profile that they propose: sure and likely values, defaults elsewhere."""

    description: Description
    lines: tuple[Line, ...]

    @property
    def profile(self) -> Profile:
        fields = {field.name for field in dataclasses.fields(Profile)} - {"name"}
        values = {line.name: line.value for line in self.lines if line.name in fields and line.certainty is not Certainty.UNKNOWN}
        return Profile(f"measured-{self.description.name}", **values)

    @property
    def contradictions(self) -> tuple[Line, ...]:
        """Sure lines outside the declared profile."""
        return tuple(line for line in self.lines if probing.contradicts(line, self.description.profile))


def measure(worker: Worker) -> Measured:
    """Ask everything. The worker must have been started with the weights WEIGHTS."""
    from campaigns.measure_sessions import Sessions

    description = worker.description
    lines: list[Line] = []
    with Sessions(worker) as sessions:
        if "run_op" in description.capabilities:
            lines = _of_operations(Operations(worker)) + asked(("angle_roundings",), sessions.rotary_lines)
        elif "forward" in description.capabilities:
            lines = _of_sessions(sessions)
    missing = [name for name in PROFILE_LINES if name not in {line.name for line in lines}]
    why = "only single operations would show it" if lines else "the engine offers neither operations nor sessions"
    return Measured(description, tuple(_merged([*lines, *(unknown(name, why) for name in missing)])))


PROFILE_LINES = (
    "u_input", "u_accumulate", "u_output", "height", "flush_to_zero", "exp_ulp", "exp2_folding", "online_softmax", "div_ulp", "log_ulp", "rsqrt_ulp",
    "tanh_silu", "float32_scores", "ties", "angle_roundings", "batch_invariant",
)  # fmt: skip


def _of_operations(subject: Operations) -> list[Line]:
    return [
        *asked(("u_input", "u_output", "u_accumulate"), lambda: precision_lines(subject)),
        *asked(("height",), lambda: [height_line(subject)]),
        *asked(("flush_to_zero",), lambda: flush_lines(subject)),
        *asked(("exp_ulp", "exp2_folding"), lambda: exp_lines(subject)),
        *asked(("online_softmax",), lambda: online_lines(subject)),
        *asked(("div_ulp",), lambda: [division_line(subject)]),
        *asked(("log_ulp",), lambda: [log_line(subject)]),
        *asked(("rsqrt_ulp",), lambda: [root_line(subject)]),
        *asked(("tanh_silu",), lambda: [silu_line(subject)]),
        *asked(("argmax ties",), lambda: [measure_ties.argmax_line(subject.op)]),
        *asked(("ties",), lambda: [measure_ties.router_line(subject.op)]),
        *asked(("top-k ties",), lambda: [measure_ties.candidates_line(subject.op)]),
        *asked(("heap ties", "float32_scores"), lambda: measure_ties.heap_lines(subject.op)),
        *asked(("batch_invariant", "row invariance"), lambda: invariance_lines(subject)),
    ]


def _of_sessions(subject: Sessions) -> list[Line]:
    return [
        *asked(("u_input", "u_output", "u_accumulate"), lambda: precision_lines(subject)),
        *asked(("height",), lambda: [height_line(subject)]),
        *asked(("flush_to_zero",), lambda: flush_lines(subject)),
        *asked(("rsqrt_ulp",), subject.root_lines),
        *asked(("argmax ties",), subject.argmax_lines),
        *asked(("angle_roundings",), subject.rotary_lines),
        *asked(("batch_invariant",), subject.invariance_lines),
    ]


def asked(names: Iterable[str], ask: Callable[[], list[Line]]) -> list[Line]:
    """The lines of one question, all unknown where the engine refuses it."""
    try:
        return ask()
    except Refused as problem:
        return [unknown(name, str(problem)) for name in names]


def _merged(lines: Iterable[Line]) -> list[Line]:
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


# ---- an engine's operations ------------------------------------------------------------------------------------------------------------


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


# ---- formats and sums --------------------------------------------------------------------------------------------------------------------


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
    for rows in ROWS:
        sums = subject.product(ones, summation.masks(terms, of), rows)[0]
        under = summation.leaves_under(sums, terms)
        tree = None if under is None else summation.tree_of(under, terms)
        if tree is None:
            why = "the sums of masked ones are those of no tree: compensated, wider than the masks, or too short a format"
            return unknown("height", f"{terms} terms, {rows} rows: {why}")
        heights[terms] = max(heights.get(terms, 0), summation.height(tree))
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
            heights[longer] = max(heights.get(longer, 0), summation.depth_of_leaf(under))
    return probing.height_line(heights, "; ".join(kinds), "products")


def flush_lines(subject: Subject) -> list[Line]:
    """Subnormal products, and exp far below the range where the engine has a softmax."""
    terms = subject.terms(TERMS[0])
    right = np.zeros((terms, COLUMNS), np.float32)
    right[0] = np.float32(2.0**-70)
    found = subject.product(np.full(terms, 2.0**-70, np.float32), right, ROWS[0])
    exact = np.float32(2.0**-140)
    if not ((found == exact) | (found == 0)).all():
        return [unknown("flush_to_zero", f"2**-70 squared is {float(found.flat[0]):.3g}")]
    if (found == 0).any():
        return [sure("flush_to_zero", True, "the product 2**-70 * 2**-70 is 0, not 2**-140")]
    seen = ["products"]
    if isinstance(subject, Operations) and subject.offers("softmax"):
        weight = _weights(subject, np.array([[0, -95]], np.float32))[0, 1]
        if weight == 0:
            return [sure("flush_to_zero", True, "exp(-95) is 0 in a softmax, not 5.5e-42")]
        seen.append("exp")
    return [likely("flush_to_zero", False, f"subnormal results survive in {' and '.join(seen)}")]


# ---- functions -----------------------------------------------------------------------------------------------------------------------------


def _weights(subject: Operations, scores: Float) -> Float:
    """Softmax of [T, S], every key visible."""
    out: Float = subject.op("softmax", {"scores": scores[:, None], "visible": np.ones(scores.shape, np.uint8)}, {})["out"][:, 0]
    return out


def _attended(subject: Operations, scores: Float) -> Float:
    """The weight of the *last* key of each row of [T, 2], or of the *first* of longer ones, through tree_attention: its latent is one-hot."""
    rows, keys = scores.shape
    marked = keys - 1 if keys == 2 else 0
    query = np.zeros((rows, 1, 2 + rows), np.float32)
    query[np.arange(rows), 0, 2 + np.arange(rows)] = 1  # row t reads coordinate t of every key: its own scores, exactly
    cache = np.zeros((keys, 2 + rows), np.float32)
    cache[:, 0], cache[marked] = 1, 0
    cache[marked, 1] = 1
    cache[:, 2:] = scores.T
    inputs = {"q": query, "cache": cache, "visible": np.ones((rows, keys), np.uint8)}
    out: Float = subject.op("tree_attention", inputs, {"kv_rank": 2, "scale": 1.0})["out"][:, 0, 1]
    return out


def _exp_of(subject: Operations, way: str, distance: Float) -> Float:
    """exp(-distance) as softmax weighs a second key beside one that weighs 1; distances of at least ABSORBED."""
    scores = np.stack([np.zeros_like(distance), -distance], 1)
    if way == "softmax":
        return _weights(subject, scores)[:, 1]
    parts = [_attended(subject, scores[start : start + 128]) for start in range(0, len(scores), 128)]
    return np.concatenate(parts)


def _ways(subject: Operations) -> list[str]:
    ways = [way for way in ("softmax", "tree_attention") if subject.offers(way)]
    if not ways:
        raise Refused("the engine offers neither softmax nor tree_attention")
    return ways


def exp_lines(subject: Operations) -> list[Line]:
    out = []
    for way in _ways(subject):
        count = 8192 if way == "softmax" else 1024
        distance = np.linspace(ABSORBED + 0.1, 87, count).astype(np.float32)
        lines = probing.exp_lines(distance, _exp_of(subject, way, distance), f"exp in {way}")
        out += lines
    return _merged(out)


ASCENTS = ((0, 17, 34, 51), (0, 70, 140, 210), (0, 341, 682, 1023))  # of four keys among 1024: tiles of 16, of 64, and long parts


def online_lines(subject: Operations) -> list[Line]:
    """Four ascending keys, far apart in a long row whose other keys weigh nothing, against one exp and against a product of three."""
    out = []
    for way in _ways(subject):
        rows, keys = 96, 1024
        steps = philox("measure online").uniform(18, 28, (rows, 3)).astype(np.float32)
        levels = (-(steps[:, 0] + steps[:, 1] + steps[:, 2]), -(steps[:, 1] + steps[:, 2]), -steps[:, 2], np.zeros(rows, np.float32))
        direct = _exp_of(subject, way, -levels[0])
        first, second, third = (_exp_of(subject, way, after - before) for before, after in zip(levels, levels[1:], strict=False))
        ascents = []
        for places in ASCENTS:
            scores = np.full((rows, keys), -1000, np.float32)
            for place, level in zip(places, levels, strict=True):
                scores[:, place] = level
            found = _weights(subject, scores)[:, 0] if way == "softmax" else _attended(subject, scores)
            ascents.append(probing.Ascent(places, found, direct, (first * second) * third))
        out.append(probing.online_line(ascents, f"{way} of {keys} keys"))
    return _merged(out)


def division_line(subject: Operations) -> Line:
    """A weight that is known bit by bit, over a sum that is a whole number exactly."""
    way = _ways(subject)[0]
    if way != "softmax":
        raise Refused("only softmax shows a quotient")
    distance = np.linspace(ABSORBED + 3, 80, 512).astype(np.float32)
    weight = _exp_of(subject, way, distance).astype(np.float64)
    found, exact = [], []
    for ones in (3, 5, 7, 11, 13):
        scores = np.concatenate([np.zeros((len(distance), ones), np.float32), -distance[:, None]], 1)
        found.append(_weights(subject, scores)[:, -1])
        exact.append(weight / ones)
    return probing.ulp_line("div_ulp", np.concatenate(found), np.concatenate(exact), "softmax over 3 to 13 equal keys", 0.5)


def log_line(subject: Operations) -> Line:
    """Row i has i + 2 candidates of logit 0: each has log-probability -log(i + 2)."""
    rows = 255
    logits = np.where(np.arange(rows + 1)[None] < np.arange(2, rows + 2)[:, None], 0, -np.inf).astype(np.float32)
    found = subject.op("draft_table", {"logits": logits}, {"budget": 1})["log_probs"][:, 0]
    return probing.ulp_line("log_ulp", found, -np.log(np.arange(2, rows + 2, dtype=np.float64)), "log of 2 to 256 in the draft table")


def root_line(subject: Operations) -> Line:
    """Rows (1, v) whose mean square is a float32 number: the first output is its inverse root, nothing else rounds."""
    v, mean_square = root_points()
    rows = np.stack([np.ones_like(v), v], 1)
    found = subject.op("rms_norm", {"x": rows, "gain": np.ones(2, np.float32)}, {"eps": 1e-30})["out"][:, 0]
    return probing.ulp_line("rsqrt_ulp", found, 1 / np.sqrt(mean_square), "inverse root of a mean square, by rms_norm", 0.5)


def root_points() -> tuple[Float, NDArray[np.float64]]:
    """v with 11 bits, and (1 + v^2) / 2, which float32 holds."""
    v = (np.arange(1, 3500) * 2.0**-11).astype(np.float32)
    return v, (1 + v.astype(np.float64) ** 2) / 2


def silu_line(subject: Operations) -> Line:
    gate = -np.linspace(16, 60, 256).astype(np.float32)[:, None]
    return probing.tanh_line(gate[:, 0], subject.op("swiglu", {"gate": gate, "up": np.ones_like(gate)}, {})["out"][:, 0])


# ---- invariances -----------------------------------------------------------------------------------------------------------------------------


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

    attention = {"q": normal(BATCH, 4, 40), "cache": normal(300, 40), "visible": np.ones((BATCH, 300), np.uint8)}
    return [
        ("matmul", {"x": normal(BATCH, 1000), "w": normal(1000, 48)}, {}, frozenset({"w"})),
        ("matmul", {"x": normal(BATCH, 72), "w": normal(72, 17)}, {}, frozenset({"w"})),
        ("rms_norm", {"x": normal(BATCH, 333), "gain": normal(333)}, {"eps": 1e-6}, frozenset({"gain"})),
        ("scores", {"q": normal(BATCH, 4, 40), "keys": normal(100, 40)}, {"scale": 0.2}, frozenset({"keys"})),
        ("softmax", {"scores": normal(BATCH, 4, 300), "visible": np.ones((BATCH, 300), np.uint8)}, {}, frozenset()),
        ("tree_attention", attention, {"kv_rank": 32, "scale": 0.2}, frozenset({"cache"})),
        ("swiglu", {"gate": normal(BATCH, 37), "up": normal(BATCH, 37)}, {}, frozenset()),
    ]
