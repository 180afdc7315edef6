"""The bugs planted in the native engine: what each is, and what a judge should say. Where it lives is an `#ifdef` in its sources.

`python -m impls.native.build --plant NAME` compiles one; the registry knows it as "native:NAME". Letters, regions and words are
those of planting.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from impls.planted import Plant
from impls.planted.planting import ACCEPT, CACHE, CLASSES, MASK, POSITION, REGIONS, STREAM, TREE

PRODUCTS = ("matmul", "q_absorb", "o_heads", "moe", "M3")
COMMIT = (*CACHE, "commit", "cache_rows")


def _plant(
    name: str, bug_class: str, source: str, expected_ops: tuple[str, ...], trigger: str, *, nodes: int = 0, needs: Iterable[str] = ()
) -> Plant:
    origin, _, thread = source.rpartition(" ")
    words = frozenset(needs)
    assert words <= REGIONS.keys(), f"plant {name} needs unknown regions {sorted(words - REGIONS.keys())}"
    return Plant(
        name=name,
        source=f"{origin}, https://github.com/{thread}",
        bug_class=CLASSES[bug_class],
        expected_ops=expected_ops,
        trigger=trigger,
        smallest_nodes=nodes,
        engine=f"native:{name}",
        kind="native",
        needs=words,
    )


_ALL = (
    _plant(
        "position-index", "b", "DDTREE section 6 row 25 warpfront/hipfire/pull/72", POSITION,
        "a root with two children: the second is at depth 1, but node 2", nodes=2, needs=["tree"],
    ),
    _plant(
        "mask-tile", "b", "BUGZOO B14 PaddlePaddle/FastDeploy/pull/3514", MASK,
        "node 4 does not descend from all of nodes 0 to 3: its first column tile of 4 is taken as causal", nodes=4, needs=["tree"],
    ),
    _plant(
        "mask-stale", "k", "DDTREE section 6 row 22 sgl-project/sglang/pull/29907", (*MASK, "scores", "C7"),
        "two batches of one sequence with the same number of rows and other parents: a prompt of 3 tokens, then a root with two children",
        nodes=2, needs=["tree", "rounds"],
    ),
    _plant(
        "gemm-tail-stale", "h", "BUGZOO H17 ikawrakow/ik_llama.cpp/pull/171", PRODUCTS,
        "a matrix product of 5 rows: one full tile of 4, and one row behind it",
    ),
    _plant(
        "expert-first-row", "f", "BUGZOO F13 vllm-project/vllm-xpu-kernels/issues/453", ("moe", "matmul", "M9"),
        "two rows of a batch that choose the same expert",
    ),
    _plant(
        "heap-fifo", "c", "DDTREE section 6 row 1 warpfront/hipfire", TREE,
        "L=2, K=2, B=2, log_probs [[-1, -1], [0, -5]]: (0) and (0,0) are right, push order takes (0) and (1)", nodes=2, needs=["ties"],
    ),
    _plant(
        "bonus-parent", "d", "BUGZOO Z18 after D01 vllm-project/vllm/pull/2658", (*ACCEPT, "generate"),
        "a tree of one node that is accepted", nodes=1,
    ),
    _plant(
        "stop-last", "d", "BUGZOO D06 LostRuins/koboldcpp/issues/1276", (*STREAM, "generate"),
        "an accepted node is a stop token and the bonus is not", nodes=1, needs=["generate", "stop"],
    ),
    _plant(
        "compact-first", "e", "DDTREE section 6 row 16 sgl-project/sglang/pull/27509", COMMIT,
        "path [1] of two pending rows; in a session root, node 2: perfect in the first round, wrong in the cache and in every round after it",
        nodes=1,
    ),
    _plant(
        "compact-page", "e", "BUGZOO Z26 after E07 sgl-project/sglang/pull/26866", COMMIT,
        "a prefix of 14 rows and the accepted path root, node 2: row 16, in the second page, should move to row 15, in the first",
        nodes=2, needs=["tree"],
    ),
    _plant(
        "rejected-visible", "e", "BUGZOO E17 flexflow/flexflow-train/pull/714", COMMIT,
        "a tree of one node that is rejected: the cache is one row too long", nodes=1, needs=["rejection"],
    ),
    _plant(
        "mask-crash", "j", "BUGZOO J06 deepseek-ai/DeepGEMM/pull/238", ("tree_mask", "forward", "generate"),
        "exactly 7 rows of one sequence in a batch: a root and 6 nodes, or a prompt of 7 tokens", nodes=6,
    ),
    _plant(
        "gemm-hang", "j", "BUGZOO J05 Luce-Org/lucebox/commit/c1ec4342b41fc1eeefd6698d8a9fc9c53d7c5526", (*PRODUCTS, "forward", "generate"),
        "a matrix product of exactly 5 rows: a root and 4 nodes, or a prompt of 5 tokens", nodes=4,
    ),
)  # fmt: skip

PLANTS: dict[str, Plant] = {plant.name: plant for plant in _ALL}
