"""Which input regions a campaign reached: a case to its cells (region, value). BUGZOO section 2 numbers the regions.

Every cell that should be reached is declared once per run with zero trials, so that a region that no case entered is a row of the
coverage table and not a silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from campaigns.case import Case, OpCase, SessionCase, TreeCase
from campaigns.operands import REFUSED, REGIMES
from campaigns.plan import depths, hit_path, tree_parents
from campaigns.regions import REGIONS, regions
from campaigns.strategies import OP_SHAPES, in_frozen_mix
from campaigns.weights import REGIMES as WEIGHT_REGIMES
from spec.sampling import Sampling

Cell = tuple[str, str]

BUGZOO, SHAPE = "BUGZOO region", "depth x width x prefix mod 16"
DEPTHS, WIDTHS, PREFIXES = ("0", "1", "2 to 3", "4+"), ("0", "1", "2", "3+"), ("0", "1", "15", "other")
TILE = 16  # the smallest tile of common kernels; its neighbours are the off-boundary sizes
SIZE_WORDS = ("T", "K", "N", "S", "V", "M", "E")


def cells(case: Case) -> set[Cell]:
    return set(_cells(case)) | {(BUGZOO, f"{number:02d} {REGIONS[number]}") for number in regions(case)} | set(_shapes(case))


def declared() -> set[Cell]:
    """Cells that a check of an engine with all capabilities is meant to reach."""
    out: set[Cell] = {("op", op) for op in OP_SHAPES} | {("regime", regime) for regime in (*REGIMES, REFUSED)}
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
    out |= {("loop", word) for word in ("none", "random", "noisy", "table", "chain", "dflash")} | {
        ("stop token", word) for word in ("declared", "none")
    }
    out |= {("sampling", field.name) for field in dataclasses.fields(Sampling) if field.name not in ("seed", "logit_bias", "top_k_ties")}
    out |= {
        ("coincidence broken", word) for word in ("rope_dim", "groups", "yarn", "routed_scale", "q_rank", "tied", "scoring", "latent_eps")
    }
    out |= {(BUGZOO, f"{number:02d} {words}") for number, words in REGIONS.items()}
    out |= {(SHAPE, f"depth {d}, width {w}, prefix {p}") for d in DEPTHS for w in WIDTHS for p in PREFIXES if (d == "0") == (w == "0")}
    return out | {("batch", word) for word in ("mixed", "apart", "chunked prefill")} | {("frozen mix", "yes")}


def _shapes(case: Case) -> Iterator[Cell]:
    """Depth x width x prefix mod 16 of each tree of a session, in classes; the prefix of a later round depends on the accepted paths."""
    if not isinstance(case, SessionCase):
        return
    prefix = [length for length, _ in case.prompts]
    for trees in case.rounds:
        for order, tree in enumerate(trees[: len(prefix)]):
            parents = tree_parents(tree)
            depth, width = depths(parents), np.bincount(parents[1:]) if len(parents) > 1 else np.zeros(1, np.int64)
            words = (_class(int(depth.max()), DEPTHS), _class(int(width.max()), WIDTHS), _beside_tile(TILE + prefix[order] % TILE))
            yield SHAPE, f"depth {words[0]}, width {words[1]}, prefix {words[2]}"
            prefix[order] += len(hit_path(tree, parents))


def _class(value: int, classes: tuple[str, ...]) -> str:
    """The class of a number: the words are its lower ends, with + on the last."""
    return next(word for word in reversed(classes) if value >= int(word.rstrip("+").partition(" ")[0]))


def _cells(case: Case) -> Iterator[Cell]:
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


def _session_cells(case: SessionCase) -> Iterator[Cell]:
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
