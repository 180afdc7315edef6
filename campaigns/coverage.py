"""Which input regions a campaign reached: a case to its regions (region, value), and the draft trees of a session to their crossed cells.

BUGZOO section 2 numbers the regions. Each region that should be reached is declared once per run with zero trials, so that one that no case
entered is a row of the coverage table and not a silence. The crossed cells (reports/cells.py: axes, classes, what is reachable) need no such rows:
`witness` gives a case in any of them, which is what a campaign that fills the emptiest ones needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from campaigns.case import Case, OpCase, SessionCase, TreeCase
from campaigns.operands import REFUSED, REGIMES
from campaigns.plan import depths, hit_path, tree_parents
from campaigns.regions import REGIONS, TIED_WEIGHTS, regions
from campaigns.strategies import OP_SHAPES, WEIGHT_SEEDS, in_frozen_mix
from campaigns.weights import REGIMES as WEIGHT_REGIMES
from reports.cells import AXES, PAGE, UNREACHABLE, Cell, reachable
from spec.sampling import Sampling

Region = tuple[str, str]

BUGZOO = "BUGZOO region"
TILE = 16  # the smallest tile of common kernels; its neighbours are the off-boundary sizes
SEQUENCE_HAZARDS, ROW_HAZARDS = frozenset({"fork", "evict", "orphan"}), frozenset({"late", "interleaved"})
SIZE_WORDS = ("T", "K", "N", "S", "V", "M", "E")


def cells(case: Case) -> set[Region]:
    return set(_cells(case)) | {(BUGZOO, f"{number:02d} {REGIONS[number]}") for number in regions(case)}


def declared() -> set[Region]:
    """Regions that a check of an engine with all capabilities is meant to reach."""
    out: set[Region] = {("op", op) for op in OP_SHAPES} | {("regime", regime) for regime in (*REGIMES, REFUSED)}
    out |= {("weights", regime) for regime in WEIGHT_REGIMES}
    out |= {("size mod 16", word) for word in ("0", "1", "15", "other", "below")}
    out |= {("tree shape", shape) for shape in ("empty", "chain", "star", "branching")}
    out |= {("accepted path", word) for word in ("root only", "whole spine", "first branch", "another branch")}
    out |= {("rounds", word) for word in ("1", "2", "3")} | {("sequences", word) for word in ("1", "2", "3")}
    out |= {("prompt length", word) for word in ("1", "unequal", "2 to 16", "above 16")}
    out |= {("draft ties", word) for word in ("integers", "grid", "none")} | {
        ("draft candidates", word) for word in ("all", "some -inf", "row of -inf")
    }
    out |= {("budget", word) for word in ("0", "1", "below the paths", "above the paths")}
    out |= {("loop", word) for word in ("none", "random", "noisy", "table", "chain", "dflash", "edge")} | {
        ("stop token", word) for word in ("declared", "none")
    }
    out |= {("sampling", field.name) for field in dataclasses.fields(Sampling) if field.name not in ("seed", "logit_bias", "top_k_ties")}
    out |= {
        ("coincidence broken", word) for word in ("rope_dim", "groups", "yarn", "routed_scale", "q_rank", "tied", "scoring", "latent_eps")
    }
    out |= {(BUGZOO, f"{number:02d} {words}") for number, words in REGIONS.items()}
    return out | {("batch", word) for word in ("mixed", "apart", "chunked prefill")} | {("frozen mix", "yes")}


# ---- crossed: one cell per draft tree ----------------------------------------------------------------------------------------------------


def crossed(case: Case) -> Iterator[Cell]:
    """The cell of each tree that the rounds of a session verify: one per sequence and round, repeats included; nothing for other cases.

    The recipe decides: a sequence that joins late brings its prompt instead of a tree, a copy decodes without one (campaigns/plan.py), and the
    trees of the engine's own loop are not known before it runs.
    """
    if not isinstance(case, SessionCase):
        return
    dtype = next((str(value) for name, value in case.overrides if name == "cache_format"), "float32")
    ties = TIED_WEIGHTS.get(case.regime, "none")
    lengths = dict(enumerate(length for length, _ in case.prompts))
    late = dict([lengths.popitem()]) if "late" in case.hazards and len(lengths) > 1 else {}
    for number, trees in enumerate(case.rounds):
        prefixes = [*lengths.values(), *(0 for _ in late)]
        batch = "alone" if len(prefixes) == 1 else "equal" if len(set(prefixes)) == 1 else "unequal"
        hazard = _hazard(case.hazards, alone=batch == "alone")
        for order, sequence in enumerate(sorted(lengths)):
            nodes = trees[order] if order < len(trees) else ()
            parents = tree_parents(nodes)
            width = int(np.bincount(parents[1:]).max()) if len(parents) > 1 else 0
            yield (
                _class(int(depths(parents).max()), AXES["depth"]), _class(width, AXES["width"]), _of_page(lengths[sequence]), batch, dtype, ties, hazard,
                _class(number + 1, AXES["round"]),
            )  # fmt: skip
            lengths[sequence] += len(hit_path(nodes, parents))
        if number == 0:
            lengths |= late
            late = {}
            if not {"fork", "orphan"}.isdisjoint(case.hazards):
                lengths[max(lengths) + 1] = lengths[min(lengths)]


def witness(cell: Cell, seed: int = 0) -> SessionCase:
    """A session with a tree in this reachable cell; `seed` draws tokens and weights. Raises ValueError for a cell that cannot be."""
    if not reachable(cell):
        raise ValueError(f"{cell} cannot be reached: {'; '.join(reason for reason, _ in UNREACHABLE)}")
    depth, width, prefix, batch, dtype, ties, hazard, round_ = cell
    earlier = AXES["round"].index(round_)
    tall, wide = (AXES[axis].index(word) for axis, word in (("depth", depth), ("width", width)))
    chain = (0, 1, 2, 4)[tall]
    # A chain, then siblings of its first node; the whole chain is accepted
    nodes = (*((0, 1),) * chain, *((chain - 1 + more, 0) for more in range(1, wide)))
    length = {"0": PAGE, "1": PAGE + 1, "15": PAGE - 1, "other": PAGE + 2}[prefix] - earlier
    prompts = {"alone": (length,), "equal": (length, length), "unequal": (length, length + 1)}[batch]
    by_class = {"none": (), "sequences": ("evict",), "rows": ("interleaved",), "memory": ("repeat",)}
    regime = next((name for name, word in TIED_WEIGHTS.items() if word == ties), "ordinary")
    return SessionCase(
        "tiny", () if dtype == "float32" else (("cache_format", dtype),), seed % WEIGHT_SEEDS, regime,
        tuple((rows, seed * 31 + number) for number, rows in enumerate(prompts)), (*((),) * earlier, (nodes,)), hazards=by_class[hazard],
    )  # fmt: skip


def _hazard(hazards: tuple[str, ...], *, alone: bool) -> str:
    if not SEQUENCE_HAZARDS.isdisjoint(hazards):
        return "sequences"
    if not alone and not ROW_HAZARDS.isdisjoint(hazards):
        return "rows"  # one sequence has no other to take turns with
    return "memory" if set(hazards) - ROW_HAZARDS else "none"


def _of_page(rows: int) -> str:
    return {0: "0", 1: "1", PAGE - 1: "15"}.get(rows % PAGE, "other")


# ---- regions ---------------------------------------------------------------------------------------------------------------------------


def _class(value: int, classes: tuple[str, ...]) -> str:
    """The class of a number: the words are its lower ends, with + on the last."""
    return next(word for word in reversed(classes) if value >= int(word.rstrip("+").partition(" ")[0]))


def _cells(case: Case) -> Iterator[Region]:
    for hazard in getattr(case, "hazards", ()):
        yield "hazard", hazard
    if isinstance(case, OpCase):
        yield "op", case.op
        yield "regime", case.regime
        for word, value in case.dims:
            if word in SIZE_WORDS:
                yield "size mod 16", _beside_tile(value)
    elif isinstance(case, TreeCase):
        paths = sum(case.vocab**depth for depth in range(1, min(case.depth, 4) + 1))
        yield "budget", str(case.budget) if case.budget < 2 else "below the paths" if case.budget < paths else "above the paths"
        yield "draft ties", "integers" if case.grid == 0 else "grid" if case.grid > 0 else "none"
        yield "draft candidates", "all" if not case.minus_infinity else "some -inf" if case.minus_infinity < case.vocab else "row of -inf"
    elif isinstance(case, SessionCase):
        yield from _session_cells(case)


def _session_cells(case: SessionCase) -> Iterator[Region]:
    yield "preset", "a checkpoint" if case.checkpoint else case.preset
    yield "weights", case.regime
    for name, _ in case.overrides:
        yield "coincidence broken", name
    yield "rounds", str(len(case.rounds))
    yield "sequences", str(len(case.prompts))
    yield "batch", "mixed" if case.mixed else "apart"
    if case.chunk:
        yield "batch", "chunked prefill"
    lengths = {length for length, _ in case.prompts}
    for length in lengths:
        yield "prompt length", "1" if length == 1 else "2 to 16" if length <= TILE else "above 16"
    if len(lengths) > 1:
        yield "prompt length", "unequal"
    for trees in case.rounds:
        for tree in trees[: len(case.prompts)]:
            parents = tree_parents(tree).tolist()
            yield "tree shape", _shape(parents)
            yield "accepted path", _path(parents, [hit for _, hit in tree])
    if case.generate is not None:
        yield "loop", case.generate.drafter
        yield "stop token", "declared" if case.generate.stop_at >= 0 else "none"
        yield from (("sampling", name) for name, _ in case.generate.sampling)
    if in_frozen_mix(case):
        yield "frozen mix", "yes"


def _beside_tile(value: int) -> str:
    if value < TILE - 1:
        return "below"
    return {0: "0", 1: "1", TILE - 1: "15"}.get(value % TILE, "other")


def _shape(parents: list[int]) -> str:
    if len(parents) == 1:
        return "empty"
    if all(parent == node - 1 for node, parent in enumerate(parents)):
        return "chain"
    return "star" if not any(parents[1:]) else "branching"


def _path(parents: list[int], hits: list[int]) -> str:
    path = [0]
    first_child = True
    for node in range(1, len(parents)):
        if parents[node] == path[-1] and hits[node - 1]:
            first_child &= parents.index(path[-1]) == node
            path.append(node)
    if len(path) == 1:
        return "root only"
    if not first_child:
        return "another branch"
    return "whole spine" if path[-1] not in parents else "first branch"
