"""`paritree profile measure ENGINE`: a proposed profile, by asking. Operations where the engine runs them, sessions with crafted weights where not.

Every question has an exact answer that tells one arithmetic from another; reading the answers is oracles/probing.py and oracles/summation.py. An
engine that refuses a question, or fails at it, gets `unknown` on that line and the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from campaigns.measure import functions, invariance, sums, ties
from campaigns.measure.sessions import Sessions
from campaigns.measure.subject import Operations, Refused
from campaigns.trial import Worker
from oracles.probing import Certainty, Line, contradicts, merged, unknown
from spec.engine import Description, Profile

WEIGHTS = "campaigns.measure.sessions:probe_weights"  # what a worker must be started with


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
        return tuple(line for line in self.lines if contradicts(line, self.description.profile.widest))


def measure(worker: Worker) -> Measured:
    """Ask everything. The worker must have been started with the weights WEIGHTS."""
    description = worker.description
    lines: list[Line] = []
    with Sessions(worker) as sessions:
        if "run_op" in description.capabilities:
            lines = _of_operations(Operations(worker)) + asked(("angle_roundings",), sessions.rotary_lines)
        elif "forward" in description.capabilities:
            lines = _of_sessions(sessions)
    missing = [name for name in PROFILE_LINES if name not in {line.name for line in lines}]
    why = "only single operations would show it" if lines else "the engine offers neither operations nor sessions"
    return Measured(description, tuple(merged([*lines, *(unknown(name, why) for name in missing)])))


PROFILE_LINES = (
    "u_input", "u_accumulate", "u_output", "height", "flush_to_zero", "exp_ulp", "exp2_folding", "online_softmax", "div_ulp", "log_ulp", "rsqrt_ulp",
    "tanh_silu", "float32_scores", "ties", "angle_roundings", "batch_invariant",
)  # fmt: skip


def _of_operations(subject: Operations) -> list[Line]:
    return [
        *asked(("u_input", "u_output", "u_accumulate"), lambda: sums.precision_lines(subject)),
        *asked(("height",), lambda: [sums.height_line(subject)]),
        *asked(("flush_to_zero",), lambda: sums.flush_lines(subject)),
        *asked(("exp_ulp", "exp2_folding"), lambda: functions.exp_lines(subject)),
        *asked(("online_softmax",), lambda: functions.online_lines(subject)),
        *asked(("div_ulp",), lambda: [functions.division_line(subject)]),
        *asked(("log_ulp",), lambda: [functions.log_line(subject)]),
        *asked(("rsqrt_ulp",), lambda: [functions.root_line(subject)]),
        *asked(("tanh_silu",), lambda: [functions.silu_line(subject)]),
        *asked(("argmax ties",), lambda: [ties.argmax_line(subject.op)]),
        *asked(("ties",), lambda: [ties.router_line(subject.op)]),
        *asked(("top-k ties",), lambda: [ties.candidates_line(subject.op)]),
        *asked(("heap ties", "float32_scores"), lambda: ties.heap_lines(subject.op)),
        *asked(("batch_invariant", "row invariance"), lambda: invariance.invariance_lines(subject)),
    ]


def _of_sessions(subject: Sessions) -> list[Line]:
    return [
        *asked(("u_input", "u_output", "u_accumulate"), lambda: sums.precision_lines(subject)),
        *asked(("height",), lambda: [sums.height_line(subject)]),
        *asked(("flush_to_zero",), lambda: sums.flush_lines(subject)),
        *asked(("exp_ulp", "exp2_folding"), subject.exp_lines),
        *asked(("rsqrt_ulp",), subject.root_lines),
        *asked(("ties",), subject.router_lines),
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
