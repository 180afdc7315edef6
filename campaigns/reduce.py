"""The last minimiser: it works on the case itself, so that it takes a case from anywhere (a store, a user's file).

Candidates are ordered from drastic to fine; one is taken when it fails with the same fingerprint and costs less. Numeric failures hang on
single numbers, and a smaller case has other numbers, so candidates that pass are tried again with a few small seeds: without
that, half of the numeric failures do not reach their minimum (CAMPAIGNS 1.5).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from campaigns.case import Case, GenerateCase, Node, OpCase, SessionCase, TreeCase, to_json

Fails = Callable[[Case], bool]

CHECKS_MAX = 150  # runs of a session; at 60 ms each that is 10 s
CHECKS_MAX_SMALL = 600  # runs of an op or tree case, at 1 ms each
ALONE_MAX = 4  # budgets tried for one operation alone: 4 * 2 * 16 checks at most
SEEDS_PER_CANDIDATE = 16  # of CAMPAIGNS 1.5: 9 of 10 numeric failures reach their minimum


class Exhausted(Exception):
    """The number of checks or the time is used up; the best case so far stands."""


@dataclasses.dataclass
class Search:
    """Counts and remembers checks, and keeps the best case."""

    fails: Fails
    best: Case
    checks_max: int
    deadline: float  # of time.monotonic
    checks: int = 0
    seen: dict[str, bool] = dataclasses.field(default_factory=dict)

    def failing(self, case: Case) -> bool:
        line = to_json(case)
        if line not in self.seen:
            if self.checks >= self.checks_max or time.monotonic() > self.deadline:
                raise Exhausted
            self.checks += 1
            self.seen[line] = self.fails(case)
        return self.seen[line]

    def take(self, case: Case) -> bool:
        if cost(case) < cost(self.best) and self.failing(case):
            self.best = case
            return True
        return False


def reduced(case: Case, fails: Fails, *, guilty: str = "", checks_max: int | None = None, seconds: float = 60.0) -> tuple[Case, int]:
    """The smallest case found that still fails, and the number of checks. `case` itself is taken to fail.

    `guilty`: the operation that the fingerprint names; a tree case is then also tried as that operation alone.
    """
    limit = checks_max if checks_max is not None else CHECKS_MAX if isinstance(case, SessionCase) else CHECKS_MAX_SMALL
    search = Search(fails, case, limit, time.monotonic() + seconds)
    try:
        _fixpoint(search, reroll=False)
        if isinstance(search.best, TreeCase) and guilty:
            any(search.take(candidate) for candidate in alone(search.best, guilty))
        _fixpoint(search, reroll=True)
    except Exhausted:
        pass
    return search.best, search.checks


def _fixpoint(search: Search, *, reroll: bool) -> None:
    """Candidates of the best case, from the start again after each one that is taken."""
    progress = True
    while progress:
        progress = False
        for candidate in candidates(search.best):
            if cost(candidate) >= cost(search.best):
                continue
            if search.take(candidate) or (reroll and any(search.take(other) for other in reseeded(candidate))):
                progress = True
                break


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


def candidates(case: Case) -> Iterator[Case]:
    """Simpler cases, drastic ones first. They may be invalid: a case that cannot be materialised does not fail."""
    if isinstance(case, SessionCase):
        yield from _session_candidates(case)
    elif isinstance(case, TreeCase):
        yield from _tree_candidates(case)
    elif isinstance(case, OpCase):
        yield from _op_candidates(case)


def reseeded(case: Case) -> Iterator[Case]:
    """The case with other small seeds."""
    for number in range(SEEDS_PER_CANDIDATE):
        if isinstance(case, SessionCase):
            prompts = tuple((length, number // 2 + index) for index, (length, _) in enumerate(case.prompts))
            yield dataclasses.replace(case, weights_seed=number % 2, prompts=prompts)
        elif isinstance(case, OpCase | TreeCase):
            yield dataclasses.replace(case, seed=number)


# Sessions


def _session_candidates(case: SessionCase) -> Iterator[SessionCase]:
    replace = dataclasses.replace
    if case.generate is not None:
        yield replace(case, generate=None)
        if case.rounds:
            yield replace(case, rounds=())
    for start, stop in _spans(len(case.rounds)):
        yield replace(case, rounds=case.rounds[:start] + case.rounds[stop:])
    for number in range(len(case.rounds)):
        yield _prefilled(case, number)
    if case.hazards:
        yield replace(case, hazards=())
    if case.relation:
        yield replace(case, relation="")
    if case.checkpoint:
        yield replace(case, checkpoint="", preset="tiny", overrides=(), regime="ordinary")
    if case.preset != "tiny" or case.overrides or case.regime != "ordinary":
        yield replace(case, preset="tiny", overrides=(), regime="ordinary")
        yield replace(case, regime="ordinary")
        yield replace(case, preset="tiny", overrides=())
        yield replace(case, preset="tiny")
        for index in range(len(case.overrides)):
            yield replace(case, overrides=case.overrides[:index] + case.overrides[index + 1 :])
    if len(case.prompts) > 1:
        for index in range(len(case.prompts)):
            yield _without_sequence(case, index)
    for number, trees in enumerate(case.rounds):
        for order, tree in enumerate(trees):
            if not tree:
                continue
            for smaller in _smaller_trees(tree):
                changed = replace(case, rounds=_with_tree(case.rounds, number, order, smaller))
                yield changed
                yield from _shorter_prompt(changed, order, len(tree) - len(smaller))
    for index, (length, seed) in enumerate(case.prompts):
        for shorter in _smaller_numbers(length, 1):
            yield replace(case, prompts=(*case.prompts[:index], (shorter, seed), *case.prompts[index + 1 :]))
    if case.chunk:
        yield replace(case, chunk=0)
    if not case.mixed:
        yield replace(case, mixed=True)
    if case.generate is not None:
        for generate in _smaller_loops(case.generate):
            yield replace(case, generate=generate)
    yield replace(case, weights_seed=0, prompts=tuple((length, index) for index, (length, _) in enumerate(case.prompts)))
    for number, trees in enumerate(case.rounds):
        for order, tree in enumerate(trees):
            for node, (back, hit) in enumerate(tree):
                if hit:
                    yield replace(case, rounds=_with_tree(case.rounds, number, order, (*tree[:node], (back, 0), *tree[node + 1 :])))
                if back:
                    yield replace(case, rounds=_with_tree(case.rounds, number, order, (*tree[:node], (back - 1, hit), *tree[node + 1 :])))


def _prefilled(case: SessionCase, number: int) -> SessionCase:
    """Without one round, and with prompts as long as its trees were: failures that hang on the rows of a batch need no tree."""
    trees = case.rounds[number]
    rows = [1 + len(trees[order]) if order < len(trees) else 1 for order in range(len(case.prompts))]
    prompts = tuple((max(length, wanted), seed) for (length, seed), wanted in zip(case.prompts, rows, strict=True))
    return dataclasses.replace(case, rounds=case.rounds[:number] + case.rounds[number + 1 :], prompts=prompts, chunk=0)


def _shorter_prompt(case: SessionCase, order: int, by: int) -> Iterator[SessionCase]:
    """The prompt loses as many rows as the tree of its sequence has lost, so that batches of equal size stay equal."""
    if order < len(case.prompts) and case.prompts[order][0] > by:
        length, seed = case.prompts[order]
        yield dataclasses.replace(case, prompts=(*case.prompts[:order], (length - by, seed), *case.prompts[order + 1 :]))


def _without_sequence(case: SessionCase, index: int) -> SessionCase:
    rounds = tuple(trees[:index] + trees[index + 1 :] for trees in case.rounds)
    return dataclasses.replace(case, prompts=case.prompts[:index] + case.prompts[index + 1 :], rounds=rounds)


def _with_tree(
    rounds: tuple[tuple[tuple[Node, ...], ...], ...], number: int, order: int, tree: tuple[Node, ...]
) -> tuple[tuple[tuple[Node, ...], ...], ...]:
    trees = rounds[number]
    return (*rounds[:number], (*trees[:order], tree, *trees[order + 1 :]), *rounds[number + 1 :])


def _smaller_trees(tree: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    """No tree; a first half; without one subtree; without one node, whose children move to its parent; without a span of the list."""
    yield ()
    if len(tree) > 3:
        yield tree[: len(tree) // 2]
    parents = [-1] + [max(0, number - 1 - back) for number, (back, _) in enumerate(tree, 1)]
    for node in range(1, len(parents)):
        gone = {node}
        for later in range(node + 1, len(parents)):
            if parents[later] in gone:
                gone.add(later)
        yield _encoded(tree, parents, gone)
    for node in range(1, len(parents)):
        if node in parents:  # a leaf alone is the case above
            yield _encoded(tree, parents, {node})


def _encoded(tree: tuple[Node, ...], parents: list[int], gone: set[int]) -> tuple[Node, ...]:
    """The tree without the nodes `gone`, as (back, hit); children of a lost node hang on its nearest remaining ancestor."""
    number_of = {0: 0}
    out: list[Node] = []
    for node in range(1, len(parents)):
        if node in gone:
            continue
        parent = parents[node]
        while parent in gone:
            parent = parents[parent]
        number = number_of[node] = len(out) + 1
        out.append((number - 1 - number_of[parent], tree[node - 1][1]))
    return tuple(out)


def _smaller_loops(generate: GenerateCase) -> Iterator[GenerateCase]:
    replace = dataclasses.replace
    for budget in _smaller_numbers(generate.budget, 0):
        yield replace(generate, budget=budget)
    for max_new in _smaller_numbers(generate.max_new, 1):
        yield replace(generate, max_new=max_new)
    for block_len in _smaller_numbers(generate.block_len, 1):
        yield replace(generate, block_len=block_len)
    if generate.stop_at >= 0:
        yield replace(generate, stop_at=-1)
    if generate.grid >= 0:
        yield replace(generate, grid=-1)
    if generate.sampling:
        yield replace(generate, sampling=())
    for dropped in range(1, len(generate.sampling)):  # the temperature, which comes first, stays: without it there is no sampling
        yield replace(generate, sampling=tuple(pair for number, pair in enumerate(generate.sampling) if number != dropped))
    if generate.seed:
        yield replace(generate, seed=0)


# Trees and operations


def alone(case: TreeCase, op: str) -> Iterator[OpCase]:
    """One operation of the chain with inputs of its own, smallest budgets first: its ties are denser than those of real tables."""
    for budget in range(1, min(case.budget, ALONE_MAX) + 1):
        for regime in ("ties", "ordinary"):
            for seed in range(SEEDS_PER_CANDIDATE):
                if op == "best_first_tree":
                    dims, params = {"K": 2, "L": 2}, {"budget": budget, "root": 0}
                elif op == "draft_table":
                    dims, params = {"L": 1, "V": 3}, {"budget": budget}
                elif op == "tree_mask":
                    dims, params = {"M": budget + 1}, {"prefix_len": case.prefix_len}
                elif op == "accept":
                    dims, params = {"M": budget + 1}, {}
                elif op == "compact":
                    dims, params = {"C": 1, "J": 1, "S": case.prefix_len + budget + 1}, {"prefix_len": case.prefix_len}
                else:
                    return
                yield OpCase(op, _pairs(dims), _pairs(params), regime, seed, case.hazards)


def _tree_candidates(case: TreeCase) -> Iterator[TreeCase]:
    replace = dataclasses.replace
    if case.hazards:
        yield replace(case, hazards=())
    least = {"budget": 0, "depth": 1, "vocab": 1, "prefix_len": 0, "cache_dim": 1, "minus_infinity": 0}
    for name, minimum in least.items():
        for value in _smaller_numbers(getattr(case, name), minimum):
            yield replace(case, **{name: value})
    if case.grid < 0:
        yield replace(case, grid=0)
    for follow in (0, 100):
        yield replace(case, follow=follow)
    for seed in (0, 1, 2):
        yield replace(case, seed=seed)


def _op_candidates(case: OpCase) -> Iterator[OpCase]:
    replace = dataclasses.replace
    dims, params = dict(case.dims), dict(case.params)
    if case.hazards:
        yield replace(case, hazards=())
    yield replace(case, dims=tuple((word, 1) for word in dims))
    for word, value in dims.items():
        for smaller in _smaller_numbers(value, 1):
            changed = dims | {word: smaller}
            if case.op == "compact" and word == "S":  # a shorter prefix, or fewer pending rows
                moved = params | {"prefix_len": max(0, int(params["prefix_len"]) - (value - smaller))}
                yield replace(case, dims=_pairs(changed), params=_pairs(moved))
            yield replace(case, dims=_pairs(changed))
    if case.op == "route":
        for groups in _smaller_numbers(int(params["groups"]), 1):
            per_group = dims["E"] // int(params["groups"])
            moved = params | {"groups": groups, "top_groups": min(groups, params["top_groups"])}
            yield replace(case, dims=_pairs(dims | {"E": groups * per_group}), params=_pairs(moved))
        for per_group in _smaller_numbers(dims["E"] // int(params["groups"]), 1):
            yield replace(case, dims=_pairs(dims | {"E": int(params["groups"]) * per_group}))
    for name in ("budget", "top_k", "top_groups", "root", "prefix_len", "kv_rank"):
        for value in _smaller_numbers(int(params.get(name, 0)), 0 if name in ("root", "prefix_len") else 1):
            yield replace(case, params=_pairs(params | {name: value}))
    for regime in ("lattice", "ordinary"):
        yield replace(case, regime=regime)
    for seed in (0, 1, 2):
        yield replace(case, seed=seed)


def _pairs(values: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(values.items()))


def _smaller_numbers(value: int, minimum: int) -> list[int]:
    """The minimum, then half way, then one less."""
    return [v for v in dict.fromkeys((minimum, (minimum + value) // 2, value - 1)) if minimum <= v < value]


def _spans(length: int) -> Iterator[tuple[int, int]]:
    """Spans to delete: all, halves, quarters, .., single elements."""
    width = length
    while width:
        for start in range(0, length, width):
            yield start, min(length, start + width)
        width //= 2
