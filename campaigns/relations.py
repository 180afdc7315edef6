"""Relations: a session run a second time in another legal way, whose logits must agree row by row. No second opinion is needed.

Each recipe turns a session case into its twin. Rows are matched by what they depend on, the tokens that they see in order of position, so that a
recipe only says how the work is cut and numbered. What must be equal, and how, is judged in oracles/relations.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from campaigns.case import CaseError, SessionCase
from campaigns.plan import Planner, config_of, generate_step, session_script
from oracles.relations import BITS, CLOSE, TOKENS, Relation
from spec.engine import Departure, Int, departed
from spec.script import CacheRows, Commit, Evict, Fork, Forward, Script, Step

RENAMED_FROM, RENAMED_BY = 5, 2  # other numbers, with gaps


class _Pruned(Planner):
    """Every tree without its rejected branches."""

    def submit(self, number: int, tokens: dict[int, Int], parents: dict[int, Int], paths: dict[int, Int]) -> None:
        kept = {sequence: tokens[sequence][path] for sequence, path in paths.items()}
        super().submit(number, kept, {s: _chain(len(t)) for s, t in kept.items()}, {s: _whole(len(t)) for s, t in kept.items()})


class _LastChain(Planner):
    """The last trees are their chains from the root to the last leaf."""

    def submit(self, number: int, tokens: dict[int, Int], parents: dict[int, Int], paths: dict[int, Int]) -> None:
        if number < len(self.case.rounds) - 1:
            super().submit(number, tokens, parents, paths)
            return
        kept = {sequence: tokens[sequence][_ancestors(parents[sequence])] for sequence in tokens}
        super().submit(number, kept, {s: _chain(len(t)) for s, t in kept.items()}, {s: np.zeros(1, np.int32) for s in kept})


class _Relabelled(Planner):
    """Nodes in another order, parents still first: depth by depth, siblings from the last to the first."""

    def submit(self, number: int, tokens: dict[int, Int], parents: dict[int, Int], paths: dict[int, Int]) -> None:
        moved: tuple[dict[int, Int], dict[int, Int], dict[int, Int]] = ({}, {}, {})
        for sequence, above in parents.items():
            order = _other_order(above)
            place = np.argsort(order)
            moved[0][sequence] = tokens[sequence][order]
            moved[1][sequence] = np.where(above[order] < 0, -1, place[above[order]]).astype(np.int32)
            moved[2][sequence] = place[paths[sequence]].astype(np.int32)
        super().submit(number, *moved)


class _PlainDecode(Planner):
    """The accepted tokens one by one."""

    def submit(self, number: int, tokens: dict[int, Int], parents: dict[int, Int], paths: dict[int, Int]) -> None:
        one = np.zeros(1, np.int32)
        for index in range(max(len(path) for path in paths.values())):
            live = {s: tokens[s][path[index : index + 1]] for s, path in paths.items() if index < len(path)}
            self.forward(live, dict.fromkeys(live, one - 1), "decode")
            for sequence in live:
                self.commit(sequence, one)


class _FreshPrefill(Planner):
    """Prompt and everything accepted before the last round in one prefill."""

    def prefill(self, prompts: dict[int, tuple[int, int]]) -> None:
        self.fresh = {sequence: [self.prompt(*prompt)] for sequence, prompt in prompts.items()}
        self.lengths |= dict.fromkeys(prompts, 0)

    def submit(self, number: int, tokens: dict[int, Int], parents: dict[int, Int], paths: dict[int, Int]) -> None:
        last = number == len(self.case.rounds) - 1
        if last:
            self.prefill_tokens({sequence: np.concatenate(parts) for sequence, parts in self.fresh.items()})
            super().submit(number, tokens, parents, paths)
        else:
            for sequence, path in paths.items():
                self.fresh[sequence].append(tokens[sequence][path])


def _chain(count: int) -> Int:
    return np.arange(-1, count - 1, dtype=np.int32)


def _whole(count: int) -> Int:
    return np.arange(count, dtype=np.int32)


def _ancestors(parents: Int) -> Int:
    """Root to the last node."""
    path = [len(parents) - 1]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return np.array(path[::-1], np.int32)


def _other_order(parents: Int) -> Int:
    """Old numbers in their new order."""
    depth = np.zeros(len(parents), np.int64)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    return np.lexsort((-np.arange(len(parents)), depth)).astype(np.int32)


Recipe = Callable[[SessionCase, Sequence[Departure]], Script]


def _planned(planner: type[Planner]) -> Recipe:
    def twin(case: SessionCase, departures: Sequence[Departure]) -> Script:
        return session_script(case, departures, planner)

    return twin


def _chunked(case: SessionCase, departures: Sequence[Departure]) -> Script:
    return session_script(dataclasses.replace(case, chunk=2 if case.chunk == 1 else 1), departures)


def _apart(case: SessionCase, departures: Sequence[Departure]) -> Script:
    return session_script(dataclasses.replace(case, mixed=not case.mixed), departures)


def _renamed(case: SessionCase, departures: Sequence[Departure]) -> Script:
    """Other sequence numbers, and with them other slots; the same rows in the same batches."""
    script = session_script(case, departures)
    return dataclasses.replace(script, steps=tuple(_rename(step) for step in script.steps))


def _rename(step: Step) -> Step:
    def new(sequence: int) -> int:
        return RENAMED_FROM + RENAMED_BY * sequence

    if isinstance(step, Forward):
        rows = dataclasses.replace(step.rows, sequence=(RENAMED_FROM + RENAMED_BY * step.rows.sequence).astype(np.int32))
        return dataclasses.replace(step, rows=rows)
    if isinstance(step, Fork):
        return Fork(new(step.source), new(step.target))
    if isinstance(step, Commit):
        return Commit(new(step.sequence), step.path)
    if isinstance(step, Evict | CacheRows):
        return type(step)(new(step.sequence))
    return step


def _budget(case: SessionCase, departures: Sequence[Departure]) -> Script:
    """The engine's own loop with half the budget, and the same drafts: a drafter that aims at the budget's edge aims at that of the first run."""
    if case.generate is None:
        raise CaseError("the relation `budget` needs the engine's own loop")
    loop = generate_step(departed(config_of(case), departures), case)
    script = session_script(dataclasses.replace(case, generate=None, rounds=()), departures)
    return dataclasses.replace(script, steps=(*script.steps, dataclasses.replace(loop, budget=loop.budget // 2)))


RECIPES: Mapping[str, tuple[Relation, Recipe]] = {
    "chain": (Relation("chain", "V2", CLOSE, "a row of a tree is the last row of the chain along its path"), _planned(_LastChain)),
    "siblings": (Relation("siblings", "C1", CLOSE, "the numbers of the nodes of a tree are names"), _planned(_Relabelled)),
    "rejected": (Relation("rejected", "K3", CLOSE, "rejected branches leave no trace"), _planned(_Pruned)),
    "decode": (Relation("decode", "L1", CLOSE, "a tree accepts what plain decoding says"), _planned(_PlainDecode)),
    "numbers": (Relation("numbers", "C6", BITS, "sequence numbers and cache slots are names"), _renamed),
    "chunks": (Relation("chunks", "C6", CLOSE, "a prompt may be cut anywhere"), _chunked),
    "alone": (Relation("alone", "C6", CLOSE, "a row does not depend on the other sequences of its batch"), _apart),
    "prefill": (Relation("prefill", "K1", CLOSE, "the cache after commits is that of a fresh prefill"), _planned(_FreshPrefill)),
    "budget": (Relation("budget", "T5", TOKENS, "a smaller budget gives the first nodes of the same tree"), _budget),
}


def twin(case: SessionCase, departures: Sequence[Departure] = ()) -> tuple[Relation, Script]:
    """The relation that `case.relation` names, and the second script. Raises CaseError for an unknown one."""
    if case.relation not in RECIPES:
        raise CaseError(f"there is no relation {case.relation!r}: choose one of {', '.join(RECIPES)}")
    relation, recipe = RECIPES[case.relation]
    # the same batches need the same hazards; elsewhere they would only be in the way
    kept = case.hazards if relation.equality == BITS else ()
    plain = dataclasses.replace(case, relation="", hazards=kept, generate=case.generate if case.relation == "budget" else None)
    return relation, recipe(plain, departures)
