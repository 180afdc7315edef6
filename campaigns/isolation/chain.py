"""The chain of a tree case: draft_table -> best_first_tree -> tree_mask -> accept -> compact, each on the engine's own outputs.

A pure function of the job and of the answers so far: `TreeChain.next_call` says which call comes next. The worker drives it
with the engine, and the supervisor drives it again with the answers it received, so that calls never travel back and a damaged
worker cannot misreport what it was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec import tree
from spec.ops import accept, best_first_tree, compact, draft_table, tree_mask
from spec.script import Answer, OpCall
from spec.weights import philox

Arrays = dict[str, NDArray[Any]]

RECORDS = {module.RECORD.name: module.RECORD for module in (draft_table, best_first_tree, tree_mask, accept, compact)}


@dataclass(frozen=True, eq=False)
class TreeJob:
    """L depths, V tokens, P = prefix_len, B = budget.

    `logits`: float32 [L, V]. `cache_rows`: float32 [>= P + B + 1, C]; a tree of N nodes compacts its first P + N + 1 rows. `follow`:
    percent of nodes whose target is the token of one of their children; the others get a token that no child has.
    """

    logits: NDArray[np.float32]
    budget: int
    root: int
    prefix_len: int
    cache_rows: NDArray[np.float32]
    follow: int
    seed: int
    hazards: frozenset[str] = frozenset()


class TreeChain:
    """One walk along the chain. Ask `next_call`, make the call, `take` its answer, and so on until there is no call."""

    def __init__(self, job: TreeJob) -> None:
        tree.check_budget(job.budget)
        needed = job.prefix_len + job.budget + 1
        if len(job.cache_rows) < needed:
            raise ValueError(
                f"cache_rows has {len(job.cache_rows)} rows, but prefix_len {job.prefix_len} and budget {job.budget} need {needed}"
            )
        self._job = job
        self._links = [self._draft_table, self._best_first_tree, self._tree_mask, self._accept, self._compact]
        self._call: OpCall | None = None
        self._state: Arrays = {}

    def next_call(self) -> OpCall | None:
        """The call to make now; None at the end of the chain, or where an output cannot serve as the input of the next call."""
        self._call = self._links.pop(0)() if self._links else None
        return self._call

    def take(self, answer: Answer) -> None:
        """Continue on the answer's outputs; on golden ones where the engine does not offer the op; not at all after another failure."""
        assert self._call is not None
        outputs = answer.outputs
        if answer.failure is not None:
            outputs = (
                RECORDS[self._call.op].function(self._call.inputs, self._call.params) if answer.failure.kind == "unsupported" else None
            )
        if outputs is None:
            self._links = []
        else:
            self._state |= outputs

    def _draft_table(self) -> OpCall:
        depth, vocab = self._job.logits.shape
        width = min(self._job.budget, vocab)
        outputs = {"ids": ((depth, width), "int32"), "log_probs": ((depth, width), "float32")}
        return self._made("draft_table", {"logits": self._job.logits}, {"budget": self._job.budget}, outputs)

    def _best_first_tree(self) -> OpCall | None:
        ids, log_probs = self._state["ids"], self._state["log_probs"]
        bad_ids = ((ids < 0) | (ids >= self._job.logits.shape[1])).any()
        if bad_ids or not (log_probs < np.inf).all() or not (log_probs[:, 1:] <= log_probs[:, :-1]).all():
            return None  # T4, T8: outside the domain of the next op, which may refuse it with good reason
        length = self._job.budget + 1
        outputs = dict.fromkeys(("tokens", "parents", "depths"), ((length,), "int32")) | {"count": ((1,), "int32")}
        params = {"budget": self._job.budget, "root": self._job.root}
        return self._made("best_first_tree", {"ids": ids, "log_probs": log_probs}, params, outputs)

    def _tree_mask(self) -> OpCall | None:
        count = int(self._state["count"][0])
        if not 0 <= count <= self._job.budget:
            return None
        rows = count + 1
        self._state |= {name: self._state[name][:rows] for name in ("tokens", "parents")}
        tokens = self._state["tokens"]
        try:
            tree.check_structure(self._state["parents"], tokens)
        except tree.TreeError:
            return None
        if ((tokens < 0) | (tokens[:1] != self._job.root)).any() or (tokens[1:] >= self._job.logits.shape[1]).any():
            return None
        outputs = {"positions": ((rows,), "int32"), "visible": ((rows, self._job.prefix_len + rows), "uint8")}
        return self._made("tree_mask", {"parents": self._state["parents"]}, {"prefix_len": self._job.prefix_len}, outputs)

    def _accept(self) -> OpCall:
        tokens, parents = self._state["tokens"], self._state["parents"]
        target = target_ids(tokens, parents, self._job.logits.shape[1], self._job.follow, self._job.seed)
        outputs = {"path": ((len(tokens),), "int32"), "length": ((1,), "int32"), "bonus": ((1,), "int32")}
        return self._made("accept", {"tokens": tokens, "parents": parents, "target": target}, {}, outputs)

    def _compact(self) -> OpCall | None:
        rows = len(self._state["tokens"])
        length = int(self._state["length"][0])
        if not 1 <= length <= rows:
            return None
        path = self._state["path"][:length]
        try:
            tree.check_path(path, rows)
        except tree.TreeError:
            return None
        prefix_len = self._job.prefix_len
        cache = self._job.cache_rows[: prefix_len + rows]
        outputs = {"out": ((prefix_len + length, cache.shape[1]), "float32")}
        return self._made("compact", {"cache": cache, "path": path}, {"prefix_len": prefix_len}, outputs)

    def _made(self, op: str, inputs: Arrays, params: dict[str, int], outputs: Mapping[str, tuple[tuple[int, ...], str]]) -> OpCall:
        return OpCall(op, {name: np.ascontiguousarray(value) for name, value in inputs.items()}, params, outputs, self._job.hazards)


def target_ids(tokens: NDArray[np.int32], parents: NDArray[np.int32], vocab: int, follow: int, seed: int) -> NDArray[np.int32]:
    """One target per node: with `follow` percent the token of one of its children, otherwise a token that no child has.

    A node all of whose tokens are children's follows whatever the draw says. Three draws per node, used or not, so that the targets of the
    first nodes stay when later ones are removed.
    """
    children: dict[int, list[int]] = {}
    for node in range(1, len(tokens)):
        children.setdefault(int(parents[node]), []).append(int(tokens[node]))
    uniform = philox("tree-target", seed).random((len(tokens), 3))
    targets = np.empty(len(tokens), np.int32)
    for node in range(len(tokens)):
        of_node = sorted(set(children.get(node, ())))
        follows = 100 * uniform[node, 0] < follow
        if of_node and (follows or len(of_node) == vocab):
            targets[node] = of_node[int(uniform[node, 1] * len(of_node))]
            continue
        target = int(uniform[node, 2] * (vocab - len(of_node)))  # the target-th token outside `of_node`
        for taken in of_node:
            target += taken <= target
        targets[node] = target
    return targets
