"""Discovery: our own loop over Hypothesis' `fuzz_one_input`, which is twice as fast as @given and leaves clock and order to us.

Batches of one kind are drawn and run together, so that drawing and the trip to the worker are paid once. Known findings pass, or the first
easy bug would end the campaign; a new one leaves the test as an exception of its own class, and Hypothesis hands over the choices that
led to it, for `campaigns.shrink`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase

from campaigns import strategies
from campaigns.case import Case
from campaigns.hazards import HAZARDS
from campaigns.relations import RECIPES
from campaigns.trial import Outcome
from spec.config import preset as preset_of
from spec.engine import Description
from spec.weights import is_large

BATCH = {"op": 16, "tree": 16, "session": 8}  # at most; operations share one trip, sessions one open model
BATCH_BLIND = 2  # sessions of one model: of a black box more models show more than more sessions
BYTES = 8_000  # of entropy per batch, more than any draws (Hypothesis reads 8 KiB at most)
SESSION_HAZARDS = ("views", "freed", "repeat")  # what the worker does to the arrays of a script
RELATION_EVERY, RELATION_EVERY_BLIND = 15, 3  # sessions without a relation for each one with: taps prove more, and cost less
NEEDED_BY = {"fork": frozenset({"fork"}), "evict": frozenset({"evict"}), "orphan": frozenset({"fork", "evict"})}  # capabilities
SMALL_SHARE = 0.1  # of the trials of a campaign that is known to be at least this long: easy bugs are met small
SMALL_MAX = 600  # of the full mix, kind by kind: an engine that does sessions only meets 90 small ones, not 600


@dataclass(frozen=True)
class Diet:
    """What an engine can be asked. Kinds it does not do are left out of the mix, and said so in the report."""

    ops: tuple[str, ...]
    trees: bool
    sessions: bool
    loops: bool
    op_hazards: tuple[str, ...] = ()
    session_hazards: tuple[str, ...] = ()
    mix: tuple[tuple[str, float], ...] = tuple(strategies.MIX.items())
    checkpoint: str = ""  # a folder that some sessions load
    relations: tuple[str, ...] = ("",)  # what sessions are run a second time for; one is drawn per session, "" is none
    preset: str = ""  # of the other sessions; empty: all that the generator knows
    samples: bool = False  # the engine's loop draws tokens with prescribed noise
    hides_trees: bool = False  # the engine's loop does not say which trees it builds

    def shares(self) -> dict[str, float]:
        """Of the kinds that the engine does, summing to 1; empty where it does none."""
        offered = {"op": bool(self.ops), "tree": self.trees, "session": self.sessions}
        kept = {kind: share for kind, share in self.mix if offered[kind] and share > 0}
        total = sum(kept.values())
        return {kind: share / total for kind, share in kept.items()}


TREE_OPS = frozenset({"draft_table", "best_first_tree", "tree_mask", "accept", "compact"})


def diet_of(description: Description, *, hazards: bool = True, views: bool = True, checkpoint: str = "", preset: str = "") -> Diet:
    """Everything that the description lists. An empty list of ops with "run_op" means that all are worth asking.

    `views`: the engine takes strided arrays (`campaigns.trial.takes_views`); asking those of one that does not only wastes trials.
    """
    can = description.capabilities
    known = tuple(op for op in strategies.OP_SHAPES if not description.ops or op in description.ops) if "run_op" in can else ()
    sessions = {"forward", "commit"} <= can
    if preset and is_large(preset_of(preset)):  # a layer in full width: it is what is asked for, and each session takes a minute
        return Diet(ops=(), trees=False, sessions=sessions, loops=False, preset=preset)
    return Diet(
        ops=known,
        trees=bool(TREE_OPS & set(known)),
        sessions=sessions,
        loops=sessions and "generate" in can,
        samples=sessions and {"generate", "sampling"} <= can,
        hides_trees=sessions and {"generate", "hidden_trees"} <= can,
        op_hazards=tuple(name for name in HAZARDS if views or name != "views") if hazards else (),
        session_hazards=(
            *(name for name in strategies.PLAN_HAZARDS if NEEDED_BY.get(name, frozenset()) <= can),
            *(SESSION_HAZARDS if hazards else ()),
        ),
        checkpoint=checkpoint,
        preset=preset,
        relations=("",) * (RELATION_EVERY if "taps" in can else RELATION_EVERY_BLIND) * len(RECIPES) + tuple(RECIPES),
    )


class _Capture(ExampleDatabase):
    """Keeps the last failing choices; forgets everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.last: bytes = b""

    def save(self, key: bytes, value: bytes) -> None:
        self.last = value

    def fetch(self, key: bytes) -> Any:
        return iter(())

    def delete(self, key: bytes, value: bytes) -> None:
        return


class _NewFinding(Exception):
    """Base of one class per new fingerprint: Hypothesis tells failures apart by class and line."""


@dataclass(frozen=True)
class Fresh:
    """A trial with a new fingerprint; `batch_strategy(diet, kind, size)` fed with `choices` draws the batch that holds its case."""

    outcome: Outcome
    size: str
    choices: bytes


@dataclass
class Discovery:
    """`step` runs one batch. `run` is given cases and returns their outcomes; `is_new` records one and says whether it is a new finding."""

    diet: Diet
    seed: int
    run: Callable[[Sequence[Case]], list[Outcome]]
    is_new: Callable[[Outcome], bool]
    trials_expected: int = 10_000
    trials: int = 0
    overruns: int = 0  # draws that ran out of bytes and gave no case
    done: dict[str, int] = field(default_factory=dict)  # trials by kind
    _rng: random.Random = field(init=False)
    _tests: dict[tuple[Diet, str, str], tuple[Callable[[bytes], Any], _Capture]] = field(default_factory=dict)
    _fresh: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def step(self) -> list[Fresh]:
        """One batch of the kind that is furthest behind its share. The new findings in it. Raises ValueError for an empty diet."""
        shares = self.diet.shares()
        if not shares:
            raise ValueError("the engine offers neither operations nor sessions: there is nothing to try")
        kind = min(shares, key=lambda name: self.done.get(name, 0) / shares[name])
        small = self.done.get(kind, 0) < min(SMALL_MAX, SMALL_SHARE * self.trials_expected) * strategies.MIX[kind]
        size = "small" if small else "full"
        test, capture = self._test(kind, size)
        before = self.trials
        self._fresh.clear()
        capture.last = b""
        with contextlib.suppress(_NewFinding):
            test(self._rng.randbytes(BYTES))
        self.overruns += self.trials == before
        return [Fresh(outcome, size, capture.last) for outcome in self._fresh]

    def _test(self, kind: str, size: str) -> tuple[Callable[[bytes], Any], _Capture]:
        key = (self.diet, kind, size)
        if key not in self._tests:
            strategy = batch_strategy(self.diet, kind, size)
            capture = _Capture()

            # Everything explicit: the environment (CI=...) may load a profile that derandomises and forgets
            explicit = settings(
                database=capture, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck), phases=(Phase.generate,)
            )
            assert explicit.database is capture and not explicit.derandomize and explicit.deadline is None, (
                "a profile overrode the campaign"
            )

            @explicit
            @given(strategy)
            def batch(cases: list[Case]) -> None:
                self._try(kind, cases)

            self._tests[key] = (batch.hypothesis.fuzz_one_input, capture)  # type: ignore[attr-defined]
        return self._tests[key]

    def _try(self, kind: str, cases: list[Case]) -> None:
        outcomes = self.run(cases)
        self.trials += len(outcomes)
        self.done[kind] = self.done.get(kind, 0) + len(outcomes)
        self._fresh.extend(outcome for outcome in outcomes if self.is_new(outcome))
        if self._fresh:
            raise type("NewFinding", (_NewFinding,), {})(f"{len(self._fresh)} new")


def batch_strategy(diet: Diet, kind: str, size: str) -> st.SearchStrategy[Any]:
    """Lists of cases of one kind; shrinking deletes the innocent ones first."""
    if kind == "op":
        one: st.SearchStrategy[Any] = strategies.op_cases(size, diet.ops, diet.op_hazards)
    elif kind == "tree":
        one = strategies.tree_cases(size, diet.op_hazards)
    else:
        return strategies.session_batches(
            size,
            BATCH_BLIND if diet.hides_trees else BATCH[kind],
            loops=diet.loops,
            hazards=diet.session_hazards,
            checkpoint=diet.checkpoint,
            only=diet.preset,
            relations=diet.relations,
            samples=diet.samples,
            hides_trees=diet.hides_trees,
        )
    return st.lists(one, min_size=1, max_size=BATCH[kind])
