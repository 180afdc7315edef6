"""The one seam between paritree and an engine: what an engine offers, what it is asked, what it answers.

Nobody inherits from these protocols; any object of this shape is an engine, and `impls/native/include/paritree.h` is the
same contract in C. Everything but `describe` is optional: an engine lists what it does in `capabilities`, and a method may
raise `Unsupported`, which is an answer and not a failure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from spec.config import Config, ConfigError
from spec.sampling import Sampling
from spec.weights import Provider

Int = NDArray[np.int32]
Float = NDArray[np.float32]

UNIT_FLOAT32 = 2.0**-24


class Unsupported(Exception):
    """'I do not do this': reported as the verdict UNSUPPORTED and listed."""


class EngineError(Exception):
    """The engine answered with an error; the message is the engine's own."""


@dataclass(frozen=True)
class Profile:
    """The arithmetic that an engine declares (NUMERICS 3). Unit roundoffs u = half an ulp of 1; *_ulp are errors in ulps.

    `height` declares the accumulation: "any" order, or "blocked:B", at most B sequential terms and then a balanced tree
    (height min(n-1, B + ceil(log2(n/B)))). Undeclared means the strictest float32.
    """

    name: str = "float32-any-order"
    u_accumulate: float = UNIT_FLOAT32
    u_input: float = 0.0  # rounding of operands on the way in (tf32, bf16); 0: none
    u_output: float = 0.0  # rounding of the result on the way out; 0: float32
    exp_ulp: float = 4.0
    log_ulp: float = 4.0
    rsqrt_ulp: float = 2.0
    div_ulp: float = 0.5
    height: str = "any"
    online_softmax: bool = True
    exp2_folding: bool = True
    tanh_silu: bool = False
    flush_to_zero: bool = True
    float32_scores: bool = False  # draft-tree path scores summed in float32
    batch_invariant: bool = False  # claims: a row's bits do not depend on the other rows
    angle_roundings: float = 0.0  # rotary tables of float32 angles: the angle of pair i is off by (angle_roundings +
    angle_roundings_per_pair: float = 0.0  # angle_roundings_per_pair * i) u, relative. Both 0: the tables are the golden ones (M6)
    ties: str = "lowest"  # among equal router choices: the lower id (N5), or "any" of them
    per_op: tuple[tuple[str, str, Any], ...] = ()
    """(operation or tap, field, value): where one operation computes otherwise than the rest, as (("matmul", "u_input", 2.0**-10),) does of an
    engine whose products alone are TF32. A tap's own entries replace those of its operation."""

    def __post_init__(self) -> None:
        entries = tuple((str(name), str(field_name), value) for name, field_name, value in self.per_op)
        object.__setattr__(self, "per_op", entries)  # lists, as they come out of JSON, would not hash
        known = {item.name for item in dataclasses.fields(self)} - {"name", "per_op"}
        for name, field_name, _ in entries:
            if field_name not in known:
                raise ValueError(f"per_op of {name} has {field_name!r}, but a profile has only {', '.join(sorted(known))}")

    def at(self, *names: str) -> Profile:
        """The arithmetic of one operation: of the first of `names` (tap, then operation) that `per_op` mentions; else that of all the rest."""
        for name in names:
            own = {field_name: value for entry, field_name, value in self.per_op if entry == name}
            if own:
                return dataclasses.replace(self, per_op=(), **own)
        return dataclasses.replace(self, per_op=()) if self.per_op else self

    @property
    def widest(self) -> Profile:
        """One arithmetic that covers every operation: the larger of two roundings, the longer of two sums."""
        out = dataclasses.replace(self, per_op=())
        for _, field_name, value in self.per_op:
            before = getattr(out, field_name)
            if field_name == "height":
                value = value if before == value else "any"
            elif isinstance(before, float | bool):
                value = max(before, value)
            out = dataclasses.replace(out, **{field_name: value})
        return out


PROFILES: dict[str, Profile] = {
    "float32-any-order": Profile(),
    "float32-strict": Profile("float32-strict", exp_ulp=1.0, log_ulp=1.0, rsqrt_ulp=1.0, online_softmax=False, exp2_folding=False),
    "tf32": Profile("tf32", u_input=2.0**-10, u_accumulate=2.0**-22),
    "bf16-f32acc": Profile("bf16-f32acc", u_input=0.0, u_output=2.0**-8, u_accumulate=2.0**-22),
    # weights dequantised to bfloat16 and bfloat16 activations, as Marlin-like kernels do it; kernels that stay in float32 need no profile
    "int4-g32": Profile("int4-g32", u_input=2.0**-8, u_output=2.0**-8, u_accumulate=2.0**-22),
    "fp16-f32acc": Profile("fp16-f32acc", u_input=0.0, u_output=2.0**-11, u_accumulate=2.0**-22),
}


@dataclass(frozen=True)
class Departure:
    """The engine computes another function than the configuration says, by design and in every session: `field` is taken as `value`.

    A named difference, not a defect: the engine is judged against the configuration that it really runs, and reports list the reason.
    What a configuration has no field for, an engine refuses (`Unsupported`).
    """

    field: str  # of spec.config.Config
    value: Any  # int, float, str or bool
    reason: str


@dataclass(frozen=True)
class Description:
    name: str
    version: str
    profile: Profile = field(default_factory=Profile)
    capabilities: frozenset[str] = frozenset()
    """Of: "run_op", "forward", "taps", "commit", "cache_rows", "fork", "evict", "free_slots", "generate", "generate_tree", "sampling" (sessions
    are `SamplingSession`); "hidden_trees": `generate` decodes by draft trees but does not report them; "log_probs": `forward` answers
    log-probabilities instead of logits, because the engine shows nothing else."""
    ops: frozenset[str] = frozenset()
    taps: frozenset[str] = frozenset()
    departures: tuple[Departure, ...] = ()


def departed(config: Config, departures: Sequence[Departure]) -> Config:
    """The configuration that the engine really runs. Raises ConfigError for a field or value that no configuration has."""
    for departure in departures:
        if departure.field not in {known.name for known in dataclasses.fields(Config)}:
            raise ConfigError(f"a departure names {departure.field!r}, which is no field of a configuration")
        config = dataclasses.replace(config, **{departure.field: departure.value})
    return config


@dataclass(frozen=True)
class Rows:
    """A ragged batch of T rows: prefill, chunk, decode, tree and mixed batches are one shape.

    Row i sees every committed row of its sequence and, inside the batch, its ancestors-or-self by `parent` (index of a row
    of this batch and of the same sequence, smaller than i; -1: the committed prefix). The cache rows of a batch are pending,
    in batch order per sequence, until `commit(sequence, path)` keeps those named by `path` (indices into the sequence's
    pending rows, strictly increasing) and drops the rest (rules C1-C3, K1-K3).
    """

    sequence: Int  # [T]
    token: Int  # [T]
    position: Int  # [T], absolute; the cache slot is another number (C2)
    parent: Int  # [T]

    def __len__(self) -> int:
        return len(self.token)


TapSink = Callable[[str, int, NDArray[Any]], None]
"""(tap name, layer, array) -> None; copied at once. Names and shapes: spec/taps.py."""


@dataclass(frozen=True)
class Limits:
    max_new: int
    stop_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Round:
    """One tree round of one sequence, as the engine ran it. N = nodes without the root."""

    tokens: tuple[int, ...]  # N + 1, root first
    parents: tuple[int, ...]  # N + 1, -1 for the root
    path: tuple[int, ...]  # accepted nodes, 0 first
    bonus: int


@dataclass(frozen=True)
class Generation:
    """What one sequence emitted: `tokens` after the prompt, cut by rule A4. `rounds` is empty for plain greedy decoding."""

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...] = ()


class Drafter(Protocol):
    """Deterministic draft logits. `history` is the prompt and everything emitted, the root last."""

    @property
    def block_len(self) -> int:
        """L, the maximum depth."""
        ...

    def draft(self, sequence: int, history: Int) -> Float:
        """float32 [L, V]; row d-1 is the distribution of the token at depth d, position len(history) - 1 + d (rule T1)."""
        ...


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter with a state of its own: it reads the target's hidden rows (DFlash, EAGLE)."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose residual stream, after them, is read, in the order of concatenation (D2)."""
        ...

    def observe(self, sequence: int, features: Float) -> None:
        """float32 [rows, len(feature_layers) * hidden] of rows that were just committed, in order; every one of them, once (K5, D3)."""
        ...


@runtime_checkable
class Session(Protocol):
    """A model with its cache. Sequences are named by small integers and exist from their first row on."""

    def forward(self, rows: Rows, want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> Float:
        """Logits float32 [number of True, vocab], in row order."""
        ...

    def commit(self, sequence: int, path: Int) -> None: ...

    def cache_rows(self, sequence: int, layer: int) -> Float:
        """Committed rows in logical order, float32 [len, kv_rank + rope_dim], [latent | k_rope]."""
        ...

    def evict(self, sequence: int) -> None: ...

    def fork(self, source: int, target: int) -> None: ...

    def generate(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits) -> list[Generation]:
        """Greedy decoding: autoregressive without a drafter, by draft trees with one."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class SamplingSession(Session, Protocol):
    """A session of an engine with the capability "sampling"; its noise is prescribed, so that tokens can be compared."""

    def sample(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits, sampling: Sampling) -> list[Generation]:
        """`generate` with tokens drawn by the rules S1-S3 and A6: noise keyed by (sampling.seed, index of the prompt, position)."""
        ...


@runtime_checkable
class Engine(Protocol):
    def describe(self) -> Description: ...

    def run_op(
        self, op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float], outputs: Mapping[str, NDArray[Any]]
    ) -> None:
        """Fill the caller's `outputs` (poisoned before the call). Records: spec/ops."""
        ...

    def open(self, config: Config, weights: Provider) -> Session: ...
