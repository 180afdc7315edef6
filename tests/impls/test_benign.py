"""Benign variants are never flagged, and are variants: each rounds differently somewhere, or is legal by another rule."""

from __future__ import annotations

import pytest

from campaigns.case import OpCase, SessionCase, TreeCase
from campaigns.operands import REGIMES
from impls.blocked import engine
from impls.planted.benign import VARIANTS
from tests.impls.blocked_judging import judged_op, judged_session, judged_tree
from tests.impls.blocked_probes import PROBES, same

SESSIONS = (
    SessionCase("tiny", (), 1, "ordinary", ((19, 1), (4, 2)), ((((0, 1), (1, 0), (0, 1)), ((0, 0), (1, 1))), (((0, 1),), ())), chunk=7),
    SessionCase("small", (), 2, "ordinary", ((6, 3),), ((((0, 0), (1, 1), (2, 0), (0, 1)),), ((),))),
    SessionCase("tiny-softmax", (), 1, "ordinary", ((3, 4), (3, 5)), ((((0, 1),), ((0, 0), (1, 1))),), mixed=False),
)
TREES = tuple(TreeCase(16, 4, 9, 5, 4, grid, 60, holes, 11 + grid) for grid in (-1, 0, 3) for holes in (0, 2))
DIMS = {
    "matmul": {"T": 9, "K": 129, "N": 17}, "rms_norm": {"T": 5, "N": 65}, "rope": {"T": 5, "H": 2, "half": 4}, "scores": {"T": 3, "H": 2, "C": 33, "S": 33},
    "softmax": {"T": 5, "H": 2, "S": 40}, "o_latent": {"T": 3, "H": 2, "S": 40, "R": 7}, "router_scores": {"T": 5, "E": 8}, "swiglu": {"T": 5, "N": 17},
    "route": {"T": 5, "E": 8}, "combine": {"T": 5, "K": 3, "N": 9}, "moe": {"T": 5, "E": 4, "K": 2, "N": 9, "F": 17}, "add": {"T": 3, "N": 9},
    "tree_attention": {"T": 5, "H": 2, "S": 40, "C": 12},
}  # fmt: skip
PARAMS: dict[str, dict[str, float]] = {
    "rms_norm": {"eps": 1e-6}, "rope": {"half_layout": 0}, "scores": {"scale": 0.125}, "router_scores": {"softmax": 0}, "tree_attention": {"kv_rank": 8, "scale": 0.25},
    "route": {"top_k": 2, "groups": 2, "top_groups": 1, "group_score_max": 0, "norm_top_k": 1, "routed_scale": 2.5, "denominator_eps": 1e-20},
}  # fmt: skip
OPS = tuple(
    OpCase(op, tuple(sorted(dims.items())), tuple(sorted(PARAMS.get(op, {}).items())), regime, 5)
    for op, dims in DIMS.items()
    for regime in REGIMES
)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_variant_is_never_flagged(name: str) -> None:
    subject = engine(name)
    offered = subject.describe().ops
    assert [found for case in OPS if case.op in offered for found in judged_op(subject, case)] == []
    assert [found for case in TREES for found in judged_tree(subject, case)] == []
    assert [found for case in SESSIONS for found in judged_session(subject, case)] == []


# Bit-equal by construction: physical slots are no result; splits and tiles of these sizes only regroup; short sums round alike.
REGROUPED = {"height-128", "slots-reversed", "tile-64", "one-part", "strict", "float32-scores", "flush"}


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - REGROUPED))
def test_variant_changes_some_bit(name: str) -> None:
    probes = ("groups", "session", "table", "empty sixth row", "rows of seven", "long terms", "route negative", "prompt of 34")
    assert any(not same(PROBES[probe](engine()), PROBES[probe](engine(name))) for probe in probes)


def test_variants_say_what_they_do() -> None:
    assert all(variant.summary and variant.points for variant in VARIANTS.values())
    assert {f"N{number:02d}" for number in range(1, 11)} <= VARIANTS.keys()


def test_variants_with_other_formats_declare_them() -> None:
    declared = {name for name, variant in VARIANTS.items() if variant.profile.u_input or variant.profile.u_output}
    assert declared == {"tf32", "bf16-in", "bf16-out", "fp16-out"}
