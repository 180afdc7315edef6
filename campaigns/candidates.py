"""Simpler cases of a case, drastic ones first: what the reducer (`campaigns.reduce`) tries.

`passes` groups them: one pass is worked off before the next begins, so that a small step never leads to the large ones being tried all over.
Candidates may be invalid: a case that cannot be materialised does not fail, and costs no run of an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from campaigns.case import Case, GenerateCase, Node, OpCase, SessionCase, TreeCase
from campaigns.plan import hit_path, tree_parents

Pass = Callable[[Any], Iterator[Any]]
Rounds = tuple[tuple[tuple[Node, ...], ...], ...]

ONE: tuple[Node, ...] = ((0, 0),)
SIBLINGS: tuple[Node, ...] = ((0, 0), (1, 0))
CHAIN: tuple[Node, ...] = ((0, 0), (0, 0))
ONE_ACCEPTED: tuple[Node, ...] = ((0, 1),)
SECOND_ACCEPTED: tuple[Node, ...] = ((0, 0), (1, 1))  # the least path that is no prefix of its tree
ALONE_MAX = 4  # budgets tried for one operation alone
ALONE_VALUES = (  # of six such lists the one with the fewest checks on the 57 plants first met in a tree case, and the smallest results
    ("ties", 0), ("lattice", 0), ("ordinary", 0), ("ties", 1), ("lattice", 1), ("ordinary", 1), ("ties", 2), ("ties", 3),
)  # fmt: skip


def passes(case: Case) -> tuple[Pass, ...]:
    """The passes of the case's kind, in the order in which they cut most."""
    if isinstance(case, SessionCase):
        return (surroundings, fewer_rounds, fewer_sequences, rows_without_nodes, smaller_trees, shorter_prompts, smaller_loop, plainer)
    if isinstance(case, TreeCase):
        return (_tree_candidates,)
    if isinstance(case, OpCase):
        return (_op_candidates,)
    return ()


def candidates(case: Case) -> Iterator[Case]:
    """Of all passes."""
    for one in passes(case):
        yield from one(case)


# Sessions


def surroundings(case: SessionCase) -> Iterator[SessionCase]:
    """Without loop, hazards, relation, checkpoint, preset: what most failures do not need."""
    replace = dataclasses.replace
    if case.generate is not None:
        yield replace(case, generate=None)
        if case.rounds:
            yield replace(case, rounds=())
    plain = replace(case, hazards=(), relation="", checkpoint="", preset="tiny", overrides=(), regime="ordinary")
    if plain != case:
        yield plain
    if case.hazards:
        yield replace(case, hazards=())
        for index in range(len(case.hazards) if len(case.hazards) > 1 else 0):
            yield replace(case, hazards=case.hazards[:index] + case.hazards[index + 1 :])
    if case.relation:
        yield replace(case, relation="")
    if case.checkpoint:
        yield replace(case, checkpoint="", preset="tiny", overrides=(), regime="ordinary")
    if case.preset != "tiny" or case.overrides or case.regime != "ordinary":
        yield replace(case, preset="tiny", overrides=(), regime="ordinary")
        if case.regime != "ordinary":
            yield replace(case, regime="ordinary")
            if case.preset != "tiny" or case.overrides:
                yield replace(case, preset="tiny", overrides=())
        if case.preset != "tiny":
            yield replace(case, preset="tiny")
        for index in range(len(case.overrides) if len(case.overrides) > 1 or case.preset != "tiny" else 0):
            yield replace(case, overrides=case.overrides[:index] + case.overrides[index + 1 :])


def fewer_rounds(case: SessionCase) -> Iterator[SessionCase]:
    for start, stop in _spans(len(case.rounds)):
        yield dataclasses.replace(case, rounds=case.rounds[:start] + case.rounds[stop:])
    for number in range(len(case.rounds)):
        yield _prefilled(case, number)
        if len(case.rounds) > 1:
            yield _committed_before(case, number)


def fewer_sequences(case: SessionCase) -> Iterator[SessionCase]:
    if len(case.prompts) > 1:
        for start, stop in _spans(len(case.prompts)):
            if stop - start < len(case.prompts):
                yield _without_sequences(case, start, stop)


def rows_without_nodes(case: SessionCase) -> Iterator[SessionCase]:
    """Fewer nodes, but as many rows: in the prompt of the same sequence, in the prompt of one that joins late, in an earlier chunk. Failures
    that hang on the size of a batch, or on the length of a sequence, need no tree."""
    for number, trees in enumerate(case.rounds):
        for order, tree in enumerate(trees[: len(case.prompts)]):
            if tree and "late" in case.hazards and number == 0 and order < len(case.prompts) - 1:
                yield _joined_late(dataclasses.replace(case, rounds=_with_tree(case.rounds, number, order, ())), number, len(tree))
            if len(tree) < 2:
                continue
            accepted = (SECOND_ACCEPTED, ONE_ACCEPTED) if any(hit for _, hit in tree) else ()
            for smaller in (*accepted, ONE, SIBLINGS, CHAIN):
                if len(smaller) >= len(tree):
                    continue
                changed = dataclasses.replace(case, rounds=_with_tree(case.rounds, number, order, smaller))
                yield _joined_late(changed, number, len(tree) - len(smaller))  # as many rows in the batch
                if smaller == ONE:
                    yield _joined_late(changed, number, len(tree) + 1)  # as many rows of one sequence
                yield _with_prompt(changed, order, case.prompts[order][0] + len(tree) - len(smaller))
        yield from _last_tree_as_prompt(case, number)
    if len(case.rounds) > 1 and len(case.prompts) == 1:
        for number in range(1, len(case.rounds)):  # a chunk of the prompt is the batch of equal size that came first
            rows = 1 + max((len(tree) for tree in case.rounds[number]), default=0)
            yield dataclasses.replace(case, rounds=case.rounds[number : number + 1], prompts=((2 * rows, case.prompts[0][1]),), chunk=rows)


def smaller_trees(case: SessionCase) -> Iterator[SessionCase]:
    for number, trees in enumerate(case.rounds):
        for order, tree in enumerate(trees):
            if not tree:
                continue
            for smaller in _smaller_trees(tree):
                changed = dataclasses.replace(case, rounds=_with_tree(case.rounds, number, order, smaller))
                yield changed
                yield from _shorter_prompt(changed, order, len(tree) - len(smaller))
            if order < len(case.prompts):  # as many committed rows without it
                lost = len(hit_path(tree, tree_parents(tree))) - 1
                changed = dataclasses.replace(case, rounds=_with_tree(case.rounds, number, order, ()))
                if lost:
                    yield _with_prompt(changed, order, case.prompts[order][0] + lost)


def shorter_prompts(case: SessionCase) -> Iterator[SessionCase]:
    if any(length > 1 for length, _ in case.prompts) and len(case.prompts) > 1:
        yield dataclasses.replace(case, prompts=tuple((1, seed) for _, seed in case.prompts))
    for index, (length, _) in enumerate(case.prompts):
        for shorter in _smaller_numbers(length, 1):
            yield _with_prompt(case, index, shorter)
    if case.chunk:
        yield dataclasses.replace(case, chunk=0)
        for smaller in _smaller_numbers(case.chunk, 1):  # whole chunks stay whole
            yield dataclasses.replace(
                case, chunk=smaller, prompts=tuple((max(1, length - (case.chunk - smaller)), seed) for length, seed in case.prompts)
            )
    if not case.mixed:
        yield dataclasses.replace(case, mixed=True)


def smaller_loop(case: SessionCase) -> Iterator[SessionCase]:
    if case.generate is not None:
        for generate in _smaller_loops(case.generate):
            yield dataclasses.replace(case, generate=generate)


def plainer(case: SessionCase) -> Iterator[SessionCase]:
    """As small, but easier to read: first seeds, no accepted node, chains."""
    replace = dataclasses.replace
    yield replace(case, weights_seed=0, prompts=tuple((length, index) for index, (length, _) in enumerate(case.prompts)))
    yield replace(case, rounds=tuple(tuple(tuple((back, 0) for back, _ in tree) for tree in trees) for trees in case.rounds))
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


def _committed_before(case: SessionCase, number: int) -> SessionCase:
    """Without one round, and with prompts longer by what it committed: the rounds after it find as many rows as before."""
    trees = case.rounds[number]
    accepted = [len(hit_path(tree, tree_parents(tree))) for tree in (*trees, *((),) * len(case.prompts))]
    prompts = tuple((length + rows, seed) for (length, seed), rows in zip(case.prompts, accepted, strict=False))
    return dataclasses.replace(case, rounds=case.rounds[:number] + case.rounds[number + 1 :], prompts=prompts)


def _shorter_prompt(case: SessionCase, order: int, by: int) -> Iterator[SessionCase]:
    """The prompt loses as many rows as the tree of its sequence has lost, so that batches of equal size stay equal."""
    if order < len(case.prompts) and case.prompts[order][0] > by:
        length, seed = case.prompts[order]
        yield dataclasses.replace(case, prompts=(*case.prompts[:order], (length - by, seed), *case.prompts[order + 1 :]))


def _without_sequences(case: SessionCase, start: int, stop: int) -> SessionCase:
    rounds = tuple(trees[:start] + trees[stop:] for trees in case.rounds)
    return dataclasses.replace(case, prompts=case.prompts[:start] + case.prompts[stop:], rounds=rounds)


def _with_prompt(case: SessionCase, index: int, length: int) -> SessionCase:
    return dataclasses.replace(case, prompts=(*case.prompts[:index], (length, case.prompts[index][1]), *case.prompts[index + 1 :]))


def _joined_late(case: SessionCase, number: int, rows: int) -> SessionCase:
    """Only round `number`, whose batch also holds a prompt of `rows` rows."""
    prompts = case.prompts
    if "late" in case.hazards and len(prompts) > 1 and number == 0:
        prompts = (*prompts[:-1], (prompts[-1][0] + rows, prompts[-1][1]))
    else:
        prompts = (*prompts, (rows, len(prompts)))
    rounds = tuple((*trees, *((),) * (len(prompts) - len(trees))) for trees in case.rounds[number : number + 1])
    return dataclasses.replace(case, prompts=prompts, rounds=rounds, hazards=tuple(sorted({*case.hazards, "late"})))


def _last_tree_as_prompt(case: SessionCase, number: int) -> Iterator[SessionCase]:
    """The last sequence joins late with as many rows as its tree had: a chain without a node."""
    trees = case.rounds[number]
    last = len(case.prompts) - 1
    if last < 1 or "late" in case.hazards or len(trees) <= last or not trees[last]:
        return
    changed = _with_prompt(case, last, 1 + len(trees[last]))
    rounds = ((*trees[:last], ()),)
    yield dataclasses.replace(changed, rounds=rounds, hazards=tuple(sorted({*case.hazards, "late"})))


def _with_tree(rounds: Rounds, number: int, order: int, tree: tuple[Node, ...]) -> Rounds:
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
    """One operation of the chain with inputs of its own: its ties are denser than those of real tables. Two and three nodes first, where most
    failures lie; the reducer goes below."""
    for budget in sorted(range(1, min(case.budget, ALONE_MAX) + 1), key=lambda b: (b == 1, b)):
        for regime, seed in ALONE_VALUES:
            yield from _alone(case, op, budget, regime, seed)


def _alone(case: TreeCase, op: str, budget: int, regime: str, seed: int) -> Iterator[OpCase]:
    made: list[tuple[dict[str, int], dict[str, Any]]] = []
    if op == "best_first_tree":
        made = [({"K": 2, "L": 2}, {"budget": budget, "root": 0})]
    elif op == "draft_table":
        made = [({"L": 1, "V": 3}, {"budget": budget})]
    elif op == "tree_mask":
        made = [({"M": budget + 1}, {"prefix_len": case.prefix_len})]
    elif op == "accept":
        made = [({"M": budget + 1}, {})]
    elif op == "compact":
        for path in dict.fromkeys((1, min(budget, 2))):
            for prefix_len in dict.fromkeys((case.prefix_len, case.prefix_len + case.budget - budget)):
                made.append(({"C": 1, "J": path, "S": prefix_len + budget + 1}, {"prefix_len": prefix_len}))
    for dims, params in made:
        yield OpCase(op, _pairs(dims), _pairs(params), regime, seed, case.hazards)


def _tree_candidates(case: TreeCase) -> Iterator[TreeCase]:
    replace = dataclasses.replace
    if case.hazards:
        yield replace(case, hazards=())
    least = {"budget": 0, "depth": 1, "vocab": 1, "prefix_len": 0, "cache_dim": 1, "minus_infinity": 0}
    for name, minimum in least.items():
        for value in _smaller_numbers(getattr(case, name), minimum):
            yield replace(case, **{name: value})
            if name == "budget":  # as many rows in all: what hangs on a page or a tile needs no node
                yield replace(case, budget=value, prefix_len=case.prefix_len + case.budget - value, follow=100)
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
    for most in (1, 2, 5):
        yield replace(case, dims=tuple((word, min(most, value)) for word, value in dims.items()))
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
