"""The twelve input regions that real bugs need (BUGZOO section 2), as predicates of a case: which of them it is in, on purpose.

A case says what was asked for, not what the arrays happened to hold: a mask drawn with rows that see nothing counts by its recipe.
"""

from __future__ import annotations

from campaigns.case import Case, OpCase, SessionCase, TreeCase
from campaigns.plan import tree_parents
from campaigns.strategies import rows_of

REGIONS: dict[int, str] = {
    1: "sizes just off a boundary",
    2: "configurations that break a coincidence",
    3: "more than one call",
    4: "empty and degenerate rows",
    5: "layout",
    6: "poison",
    7: "extreme magnitudes",
    8: "unequal members of a batch",
    9: "branching trees",
    10: "large offsets",
    11: "exact and near ties",
    12: "limits in the middle of a path",
}
BOUNDARIES = (4, 8, 16, 32, 64, 128)  # tiles and pages of common kernels
LARGE_KEYS, LARGE_ROWS = 256, 32  # beyond what an index that is narrowed for tests can reach
EXTREME_WEIGHTS = frozenset(
    {"large-scores", "tiny-latents", "tiny-embeddings", "cold-router", "silent-router", "faint-router", "outlier-channel"}
)
TIED_WEIGHTS = {  # regime -> what ties
    "tied-vocabulary": "vocabulary",
    "equal-maxima": "vocabulary",
    "tied-experts": "experts",
    "level-router": "experts",
}
CROWDED_WEIGHTS = frozenset({"hot-expert"})  # every token on one expert, others without any
LAID_OUT_WEIGHTS, POISONED_WEIGHTS = frozenset({"views"}), frozenset({"poisoned-margins", "fenced"})
PARAMETERS = {"eps": 1e-6, "routed_scale": 1.0, "scale": 1.0, "norm_top_k": 1.0, "groups": 1.0}
POISON = frozenset({"poison", "fence", "guard"})


def regions(case: Case) -> set[int]:
    """Numbers of REGIONS."""
    hazards = set(getattr(case, "hazards", ()))
    out = {5} if "views" in hazards else set()
    out |= {6} if hazards & POISON else set()
    out |= {3} if hazards & {"repeat", "freed", "fork", "evict", "orphan"} else set()
    if isinstance(case, OpCase):
        return out | _of_op(case)
    if isinstance(case, TreeCase):
        return out | _of_tree(case)
    return out | _of_session(case) if isinstance(case, SessionCase) else out


def beside(value: int) -> bool:
    """On or one beside a boundary."""
    return any(abs(value - boundary) <= 1 for boundary in BOUNDARIES)


def _of_op(case: OpCase) -> set[int]:
    dims, params = dict(case.dims), dict(case.params)
    out = {1} if any(beside(value) for value in dims.values()) else set()
    out |= {2} if any(params[name] != usual for name, usual in PARAMETERS.items() if name in params) else set()
    out |= {7} if case.regime == "extreme" else set()
    out |= {11} if case.regime in ("ties", "lattice") else set()
    out |= {10} if dims.get("S", 0) > LARGE_KEYS else set()
    if case.op in ("softmax", "tree_attention") or (case.op == "moe" and dims["E"] > dims["T"] * dims["K"]):
        out.add(4)  # two masks in five have rows that see nothing; experts without tokens
    if case.op in ("tree_mask", "accept") and dims.get("M", 0) > 2:
        out.add(9)
    return out


def _of_tree(case: TreeCase) -> set[int]:
    out = {1} if beside(case.budget) or beside(case.prefix_len) else set()
    out |= {9} if case.budget > 1 and case.vocab > 1 else set()
    out |= {11} if case.grid == 0 else set()
    out |= {4} if case.budget < 2 or case.vocab == 1 or case.minus_infinity >= case.vocab or not case.prefix_len else set()
    return out


def _of_session(case: SessionCase) -> set[int]:
    lengths = [length for length, _ in case.prompts]
    trees = [tree_parents(tree).tolist() for round_ in case.rounds for tree in round_[: len(lengths)]]
    out = {1} if any(beside(length) for length in lengths) else set()
    out |= {2} if case.overrides or case.preset != "tiny" else set()
    out |= {3} if len(case.rounds) > 1 or case.chunk or case.relation else set()
    out |= {4} if 1 in lengths or any(len(tree) == 1 for tree in trees) or case.regime in CROWDED_WEIGHTS else set()
    out |= {5} if case.regime in LAID_OUT_WEIGHTS else set()
    out |= {6} if case.regime in POISONED_WEIGHTS else set()
    out |= {7} if case.regime in EXTREME_WEIGHTS else set()
    out |= {8} if len(set(lengths)) > 1 or "late" in case.hazards or case.regime in CROWDED_WEIGHTS else set()
    out |= {9} if any(len(set(tree)) < len(tree) for tree in trees) else set()
    out |= {10} if rows_of(case) > LARGE_ROWS else set()
    out |= {11} if case.regime in TIED_WEIGHTS else set()
    generate = case.generate
    if generate is not None and generate.drafter != "none" and generate.budget and generate.stop_at >= 0:
        out.add(12)
    return out
