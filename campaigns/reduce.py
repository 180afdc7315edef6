"""The last minimiser: it works on the case itself, so that it takes a case from anywhere (a store, a user's file).

Small cases of the right kind are tried first (`campaigns.starts`), then the case is cut down pass by pass (`campaigns.candidates`), drastic
steps before fine ones; a case is taken when it fails with the same fingerprint and costs less. Numeric failures hang on single numbers, and a
smaller case has other numbers, so candidates that pass are tried again with a few small seeds: without that, half of the numeric failures do
not reach their minimum (CAMPAIGNS 1.5). Two recipes that make the same inputs are one check.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from campaigns.candidates import alone, candidates, passes
from campaigns.case import Case, CaseError, Node, OpCase, SessionCase, TreeCase, to_json
from campaigns.materialise import op_call, tree_job
from campaigns.operands import REFUSED
from campaigns.plan import hit_path, tree_parents
from campaigns.probes import PROBES
from campaigns.starts import possible, starts

__all__ = ["Fails", "Search", "candidates", "canonical", "cost", "nodes_of", "reduced", "reseeded"]

Fails = Callable[[Case], bool]

CHECKS_MAX = 120  # runs of the engine; at 60 ms for a session that is 8 s
SEEDS = (range(8), range(8, 16))  # tried per candidate; the second half where the first has brought nothing more
RESEEDED_MAX = {True: 40, False: 20}  # checks of a session on other seeds: to save a node, and to save less than that


class Exhausted(Exception):
    """The number of checks or the time is used up; the best case so far stands."""


@dataclasses.dataclass
class Search:
    """Counts and remembers checks, and keeps the best case."""

    fails: Fails
    best: Case
    checks_max: int
    deadline: float  # of time.monotonic
    rung: str = ""
    checks: int = 0
    seen: dict[str, bool] = dataclasses.field(default_factory=dict)

    def failing(self, case: Case) -> bool:
        key = canonical(case)
        if key is None:
            return False
        if key not in self.seen:
            if self.checks >= self.checks_max or time.monotonic() > self.deadline:
                raise Exhausted
            self.checks += 1
            self.seen[key] = self.fails(case)
        return self.seen[key]

    def take(self, case: Case) -> bool:
        if cost(case) < cost(self.best) and possible(case, self.rung) and self.failing(case):
            self.best = case
            return True
        return False

    def take_first(self, cases: Iterable[Case]) -> bool:
        return any(self.take(case) for case in cases)


def reduced(
    case: Case, fails: Fails, *, guilty: str = "", rung: str = "", checks_max: int = CHECKS_MAX, seconds: float = 60.0
) -> tuple[Case, int]:
    """The smallest case found that still fails, and the number of checks. `case` itself is taken to fail.

    `guilty`: the operation that the fingerprint names; a tree case is then also tried as that operation alone. `rung`: where it fails; a
    session is then first tried as one of the smallest of that rung.
    """
    search = Search(fails, case, checks_max, time.monotonic() + seconds, rung)
    try:
        started = search.take_first(starts(case, rung))
        if isinstance(case, SessionCase) and not started:
            _worked_off(search, passes(case)[0])
            search.take_first(starts(search.best, rung))
        if isinstance(case, TreeCase) and guilty:
            search.take_first(alone(case, guilty))
        _fixpoint(search)
        if isinstance(search.best, TreeCase) and guilty:
            search.take_first(alone(search.best, guilty))
        _other_seeds(search)
    except Exhausted:
        pass
    return search.best, search.checks


def _worked_off(search: Search, one: Callable[[Any], Iterator[Case]]) -> bool:
    """A pass from its start again after each candidate that is taken."""
    before = search.best
    while search.take_first(one(search.best)):
        pass
    return search.best is not before


def _fixpoint(search: Search) -> None:
    progress = True
    while progress:
        progress = False
        for one in passes(search.best):
            progress |= _worked_off(search, one)


def _other_seeds(search: Search) -> None:
    """Smaller candidates with other numbers. A change that no seed made fail is not tried again where something else has changed since."""
    left = dict(RESEEDED_MAX) if isinstance(search.best, SessionCase) else dict.fromkeys(RESEEDED_MAX, search.checks_max)
    for seeds in SEEDS:
        hopeless: set[frozenset[tuple[str, Any]]] = set()
        while _one_with_another_seed(search, seeds, hopeless, left):
            pass


def _one_with_another_seed(search: Search, seeds: Iterable[int], hopeless: set[frozenset[tuple[str, Any]]], left: dict[bool, int]) -> bool:
    """Whether a smaller case was taken. `left`: checks by whether they save nodes."""
    for candidate in candidates(search.best):
        change = changed(search.best, candidate)
        if size_of(candidate) >= size_of(search.best) or change in hopeless:
            continue
        saves_nodes = nodes_of(candidate) < nodes_of(search.best)
        before = search.checks
        taken = False
        for other in reseeded(candidate, seeds):
            if left[saves_nodes] <= search.checks - before:
                break
            if taken := search.take(other):
                break
        left[saves_nodes] -= search.checks - before
        if taken:
            return True
        hopeless.add(change)
    return False


def changed(case: Case, other: Case) -> frozenset[tuple[str, Any]]:
    """What `other` has and `case` has not: fields with their values, of dimensions and parameters each by itself; seeds left out."""
    return frozenset(_parts(other)) - frozenset(_parts(case))


def _parts(case: Case) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if field.name in ("dims", "params"):
            yield from value
        elif field.name not in ("seed", "weights_seed"):
            yield field.name, value


def canonical(case: Case) -> str | None:
    """Equal for two recipes that give an engine the same inputs; None for a case that cannot be materialised."""
    try:
        if isinstance(case, OpCase):
            call = op_call(case)
            own_judge = case.regime if case.regime in (REFUSED, *PROBES) else ""
            digest = hashlib.blake2b(repr((case.op, own_judge, sorted(call.params.items()), sorted(call.hazards))).encode())
            for name, value in call.inputs.items():
                digest.update(f"{name} {value.dtype} {value.shape}".encode() + value.tobytes())
            return digest.hexdigest()
        if isinstance(case, TreeCase):
            job = tree_job(case)
            digest = hashlib.blake2b(repr((job.budget, job.root, job.prefix_len, job.follow, case.seed, sorted(job.hazards))).encode())
            digest.update(repr(job.logits.shape).encode() + job.logits.tobytes() + job.cache_rows.tobytes())
            return digest.hexdigest()
    except CaseError:
        return None
    return to_json(_plain(case) if isinstance(case, SessionCase) else case)


def _plain(case: SessionCase) -> SessionCase:
    """One of the recipes that plan the same script: no chunk that cuts nothing, no tree without a prompt, links as they are followed."""
    longest = max((length for length, _ in case.prompts), default=0)
    count = len(case.prompts)
    rounds = tuple(tuple(_followed(trees[order] if order < len(trees) else ()) for order in range(count)) for trees in case.rounds)
    alone_ = count == 1 and "fork" not in case.hazards and "orphan" not in case.hazards
    return dataclasses.replace(case, chunk=case.chunk if 0 < case.chunk < longest else 0, mixed=case.mixed or alone_, rounds=rounds)


def _followed(tree: tuple[Node, ...]) -> tuple[Node, ...]:
    """Links that do not reach before the root, and hits on the accepted path only."""
    parents = tree_parents(tree)
    accepted = set(hit_path(tree, parents).tolist())
    return tuple((number - 1 - int(parents[number]), int(number in accepted)) for number in range(1, len(parents)))


def nodes_of(case: Case) -> int:
    """Tree nodes without roots: the size of an input in the reports. 0: the case holds no tree, or shows itself without one."""
    if isinstance(case, SessionCase):
        return sum(len(tree) for trees in case.rounds for tree in trees[: len(case.prompts)])
    if isinstance(case, TreeCase):
        return case.budget
    if isinstance(case, OpCase):
        dims, params = dict(case.dims), dict(case.params)
        if case.op in ("tree_mask", "accept"):
            return dims["M"] - 1
        if case.op == "best_first_tree":
            return int(params["budget"])
        if case.op == "compact":
            return dims["S"] - int(params["prefix_len"]) - 1
    return 0


def cost(case: Case) -> tuple[Any, ...]:
    """Smaller is easier to read: tree nodes count first, seeds last, and one operation is less than a chain of them."""
    if isinstance(case, SessionCase):
        generate = case.generate
        loop = (
            (0,)
            if generate is None
            else (
                1,
                generate.budget,
                generate.max_new,
                generate.block_len,
                generate.stop_at >= 0,
                generate.grid >= 0,
                len(generate.sampling),
            )
        )
        return (
            nodes_of(case), len(case.rounds), len(case.prompts), sum(length for length, _ in case.prompts), loop, len(case.hazards), case.relation != "",
            case.regime != "ordinary", case.preset != "tiny", len(case.overrides), sum(hit for r in case.rounds for t in r for _, hit in t),
            case.chunk, not case.mixed, sum(back for r in case.rounds for t in r for back, _ in t), case.weights_seed,
            sum(seed for _, seed in case.prompts), 0 if generate is None else generate.seed,
        )  # fmt: skip
    if isinstance(case, TreeCase):
        sizes = (case.depth, case.vocab, case.prefix_len, case.cache_dim)
        return (nodes_of(case), 1, sum(sizes), len(case.hazards), case.minus_infinity, case.grid < 0, case.follow, case.seed)
    if isinstance(case, OpCase):
        order = ("probe", "probe height", "lattice", "ordinary", "ties", "cancel", "extreme", "refused").index(case.regime)
        return (nodes_of(case), 0, sum(v for _, v in case.dims), len(case.hazards), order, sum(abs(v) for _, v in case.params), case.seed)
    return ()


def size_of(case: Case) -> tuple[Any, ...]:
    """The part of the cost that is size: nodes, rounds, sequences, rows; of an operation nodes and dimensions."""
    return cost(case)[:4] if isinstance(case, SessionCase) else cost(case)[:3]


def reseeded(case: Case, seeds: Iterable[int] = SEEDS[0]) -> Iterator[Case]:
    """The case with other small seeds."""
    for number in seeds:
        if isinstance(case, SessionCase):
            prompts = tuple((length, number // 2 + index) for index, (length, _) in enumerate(case.prompts))
            yield dataclasses.replace(case, weights_seed=number % 2, prompts=prompts)
        elif isinstance(case, OpCase | TreeCase):
            yield dataclasses.replace(case, seed=number)
