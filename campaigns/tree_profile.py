"""Ask an engine for trees and tell which named profile they are: `paritree tree-profile ENGINE`.

Probes are seeded draft logits of many sizes: peaked, flat, and with forged ties. An engine that offers the operation
`best_first_tree` builds trees one by one, from its own draft table where it has `draft_table`; any other is asked to generate on
the model `tiny`, and shows the tree of its first round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from campaigns.isolation import Deadline, Supervisor
from oracles.tree_profile import Finding, Observed, explain, read_tree
from spec.config import preset
from spec.drafters import TableDrafter
from spec.engine import Limits
from spec.script import Answer, Generate, OpCall, Script, WeightsKey
from spec.tree import DraftTable, TreeError, draft_table
from spec.weights import philox

Float = NDArray[np.float32]
SIZES = (  # (depths, vocabulary, budget), small to large; budgets below, at and above the depth, and above the number of paths
    (1, 2, 1), (1, 3, 3), (2, 2, 2), (2, 3, 3), (2, 3, 14), (3, 3, 3), (3, 4, 6), (2, 12, 12), (4, 8, 4), (4, 16, 16), (7, 32, 8), (7, 24, 32),
)  # fmt: skip
KINDS = ("peaked", "flat", "tied", "graded")
PRESET = "tiny"  # of the model that a generating engine runs; its vocabulary is that of the draft logits
ROOT = 1


@dataclass(frozen=True, eq=False)
class Probe:
    """Draft logits and a budget; `kind` says how they were drawn."""

    kind: str
    logits: Float  # [L, V]
    budget: int


@dataclass(frozen=True)
class TreeProfileReport:
    """`source`: the operation or loop that built the trees. `finding` is None where no tree came back; `problems` says why some did not."""

    engine: str
    source: str
    finding: Finding | None
    problems: tuple[str, ...]


def tree_profile(engine: str, repeats: int = 2) -> TreeProfileReport:
    """`repeats`: seeds per size and kind. Raises EngineLoadError or UnknownEngine."""
    with Supervisor(engine, deadline_s=Deadline()) as supervisor:
        description = supervisor.description
        if "best_first_tree" in description.ops:
            chained = "draft_table" in description.ops
            source = "draft_table and best_first_tree" if chained else "best_first_tree"
            observed, problems = _by_operations(supervisor, list(probes(repeats)), chained)
        elif "generate_tree" in description.capabilities:
            source = "first round of generate"
            observed, problems = _by_generating(supervisor, list(probes(repeats, preset(PRESET).vocab)))
        else:
            source, observed, problems = "nothing", [], ["the engine offers neither best_first_tree nor generate_tree"]
        return TreeProfileReport(description.name, source, explain(observed) if observed else None, tuple(problems))


def probes(repeats: int, vocab: int | None = None) -> Iterator[Probe]:
    """`vocab`: that of every probe, instead of the one of its size."""
    for depths, own_vocab, budget in SIZES:
        for kind in KINDS:
            for seed in range(repeats):
                draws = philox("tree-profile", depths, own_vocab, budget, kind, seed)
                yield Probe(kind, _logits(kind, draws, depths, vocab or own_vocab), budget)


def _logits(kind: str, draws: np.random.Generator, depths: int, vocab: int) -> Float:
    shape = (depths, vocab)
    if kind == "peaked":
        return (20 + 3 * draws.standard_normal(shape)).astype(np.float32)
    if kind == "flat":
        return (20 + 0.3 * draws.standard_normal(shape)).astype(np.float32)
    if kind == "graded":  # one spread per depth: in some, branching pays, in others going deeper does
        return (20 + draws.choice([0.2, 1.0, 4.0], (depths, 1)) * draws.standard_normal(shape)).astype(np.float32)
    # One row for all depths: whatever an engine makes of its normaliser, it is the same, so that sums tie on every engine's own table
    row = 20 + draws.integers(0, 3, vocab)
    return np.tile(row.astype(np.float32), (depths, 1))


def _by_operations(supervisor: Supervisor, asked: list[Probe], chained: bool) -> tuple[list[Observed], list[str]]:
    tables = [draft_table(probe.logits, probe.budget) for probe in asked]
    given = tables
    problems: list[str] = []
    if chained:
        calls = [_table_call(probe, table) for probe, table in zip(asked, tables, strict=True)]
        given = []
        for probe, table, answer in zip(asked, tables, supervisor.calls(calls), strict=True):
            problem = _problem("draft_table", probe, answer)
            problems += [problem] if problem else []
            outputs = answer.outputs
            given.append(table if problem or outputs is None else DraftTable(outputs["ids"], outputs["log_probs"]))
    answers = supervisor.calls([_tree_call(table, probe.budget) for probe, table in zip(asked, given, strict=True)])
    observed: list[Observed] = []
    for probe, table, answer in zip(asked, tables, answers, strict=True):
        problem = _problem("best_first_tree", probe, answer)
        if not problem and answer.outputs is not None:
            count = int(answer.outputs["count"][0])
            rows = slice(0, count + 1 if 0 <= count <= probe.budget else 0)
            problem = _read(observed, answer.outputs["tokens"][rows], answer.outputs["parents"][rows], table, probe)
        problems += [problem] if problem else []
    return observed, problems


def _by_generating(supervisor: Supervisor, asked: list[Probe]) -> tuple[list[Observed], list[str]]:
    """One short generation per probe; the limit leaves room for a whole path, so that no engine may cut the tree for its sake (A4)."""
    steps = [
        Generate((np.array([ROOT, 2, 3], np.int32),), TableDrafter.of_array(probe.logits), probe.budget, Limits(len(probe.logits) + 2))
        for probe in asked
    ]
    trace = supervisor.script(Script(preset(PRESET), WeightsKey(0), tuple(steps), taps=False))
    observed: list[Observed] = []
    problems = [f"generate: {trace.failure.message}"] if trace.failure else []
    for probe, answer in zip(asked, trace.answers, strict=False):
        problem = _problem("generate", probe, answer)
        if not problem and answer.generations is not None:
            rounds = answer.generations[0].rounds
            table = draft_table(probe.logits, probe.budget)
            if rounds:
                problem = _read(observed, np.array(rounds[0].tokens, np.int32), np.array(rounds[0].parents, np.int32), table, probe)
            else:
                problem = f"generate reported no round for {_words(probe)}"
        problems += [problem] if problem else []
    return observed, problems


def _read(observed: list[Observed], tokens: NDArray[np.int32], parents: NDArray[np.int32], table: DraftTable, probe: Probe) -> str:
    """Empty, or why this is no tree of the table."""
    try:
        observed.append(read_tree(tokens, parents, table, probe.budget))
    except TreeError as problem:
        return f"{problem} ({_words(probe)})"
    return ""


def _table_call(probe: Probe, table: DraftTable) -> OpCall:
    shape = table.ids.shape
    return OpCall(
        "draft_table", {"logits": probe.logits}, {"budget": probe.budget}, {"ids": (shape, "int32"), "log_probs": (shape, "float32")}
    )


def _tree_call(table: DraftTable, budget: int) -> OpCall:
    outputs: dict[str, tuple[tuple[int, ...], str]] = dict.fromkeys(("tokens", "parents", "depths"), ((budget + 1,), "int32"))
    inputs = {"ids": table.ids, "log_probs": table.log_probs}
    return OpCall("best_first_tree", inputs, {"budget": budget, "root": ROOT}, outputs | {"count": ((1,), "int32")})


def _problem(what: str, probe: Probe, answer: Answer) -> str:
    return f"{what}: {answer.failure.message} ({_words(probe)})" if answer.failure is not None else ""


def _words(probe: Probe) -> str:
    return f"{probe.kind}, {len(probe.logits)} depths, {probe.logits.shape[1]} tokens, budget {probe.budget}"
