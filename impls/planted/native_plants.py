"""The bugs planted in the native engine: what each is, and what a judge should say. Where it lives is an `#ifdef` in its sources.

`python -m impls.native.build --plant NAME` compiles one; the registry knows it as "native:NAME". Letters, regions and words are
those of planting.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from impls.planted import Plant
from impls.planted.planting import (
    ACCEPT,
    ANY,
    CACHE,
    CLASSES,
    MASK,
    POSITION,
    REGIONS,
    ROPE,
    ROUTE,
    SAMPLING,
    SCORES,
    SOFTMAX,
    STREAM,
    TABLE,
    TREE,
)

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
        "sampled-greedy", "d", "DDTREE section 6 row 17 sgl-project/sglang/pull/29907", SAMPLING, "temperature 2: one token is drawn",
        needs=["generate", "sampling"],
    ),
    _plant(
        "stale-penalties", "d", "DDTREE section 6 row 50 Avarok-Cybersecurity/atlas/pull/132", SAMPLING,
        "a tree of one node that is accepted, and whose token, unpenalised, would be drawn again", nodes=1,
        needs=["generate", "sampling"],
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
    _plant("scale-log2", "a", "BUGZOO Z01 after A01 flashinfer-ai/flashinfer/pull/787", SCORES, "one score that is not 0"),
    _plant(
        "max-floor", "b", "BUGZOO Z09 after B01 flashinfer-ai/flashinfer/pull/4401", (*SOFTMAX, "o_latent"),
        "raw scores below -5e4 in every column that a row sees", needs=["extreme"],
    ),
    _plant(
        "out-not-rescaled", "h", "BUGZOO H12 flashinfer-ai/flashinfer/pull/1055", (*SOFTMAX, "o_latent"),
        "17 keys of which the last has the best score, without taps inside of attention", needs=["long", "op"],
    ),
    _plant(
        "merge-unscaled", "a", "BUGZOO Z06 after A17 flashinfer-ai/flashinfer/pull/1055", (*SOFTMAX, "o_latent"),
        "257 keys: two parts whose best scores differ", needs=["long", "op"],
    ),
    _plant(
        "empty-uniform", "b", "BUGZOO A19 vllm-project/vllm/pull/49294", (*SOFTMAX, "C3"), "a row that sees no key", needs=["op", "empty row"],
    ),
    _plant("key-layout", "a", "BUGZOO Z04 after A07 ikawrakow/ik_llama.cpp/pull/2099", ROPE, "position 1 and more than one pair"),
    _plant(
        "group-mask-zero", "f", "BUGZOO Z27 after F01 deepseek-ai/DeepSeek-V3/commit/1398800ebfcd49c048737e8b1aae69dee46ffefc", ROUTE,
        "kept groups with negative choice scores", needs=["groups"],
    ),
    _plant(
        "top-k-last", "f", "BUGZOO I08 Pushkinist/rMLX/issues/373", (*ROUTE, "N5"), "two experts with equal choice scores at the cut",
        needs=["ties"],
    ),
    _plant("biased-weights", "f", "BUGZOO Z29 after F09 ml-explore/mlx-lm/pull/1354", ROUTE, "a routing bias other than 0"),
    _plant("shared-first-row", "f", "BUGZOO F19 kvcache-ai/ktransformers/pull/1686", ("combine", "M7"), "two rows"),
    _plant("norm-eps", "g", "BUGZOO G03 huggingface/transformers/pull/44346", ("rms_norm", "M2"), "an eps other than 1e-5"),
    _plant(
        "norm-stride", "k", "BUGZOO A20 local-inference-lab/vllm/pull/17", ("rms_norm", "M2"),
        "two rows of a session: the latent is normalised out of a wider row",
    ),
    _plant("swiglu-swapped", "g", "BUGZOO Z33 after G07 vllm-project/vllm/pull/29273", ("swiglu", "moe", "M7"), "gate and up that differ"),
    _plant(
        "argmax-last", "d", "BUGZOO Z20 after D13 ohdearquant/lattice/issues/280", ("argmax", "A1", "N5"), "two equal maxima", needs=["ties"],
    ),
    _plant(
        "argmax-stray", "h", "BUGZOO H11 flashinfer-ai/flashinfer/pull/3890", ANY, "the operation with one row: its output is written past its end",
        needs=["op"],
    ),
    _plant("head-zero", "a", "BUGZOO A13 kvcache-ai/ktransformers/commit/255c0fcf3bcde6ebb51d8f1db29890c803d44bbc", ("q_absorb", "o_heads"), "two heads"),
    _plant(
        "mask-32", "b",
        "DDTREE section 6 row 46 sgl-project/sglang/blob/main/python/sglang/srt/speculative/eagle_utils.py", MASK, "33 rows of one sequence",
        nodes=32, needs=["long"],
    ),
    _plant("budget-short", "c", "DDTREE section 6 row 19 sgl-project/sglang/pull/29907", TREE, "a budget of 1", nodes=1),
    _plant(
        "child-score", "c", "DDTREE section 6 row 5 hao-ai-lab/JetSpec", TREE, "a grandchild that beats a sibling of its parent alone", nodes=2,
    ),
    _plant("table-first-row", "c", "BUGZOO D08 ml-explore/mlx-examples/pull/1291", TABLE, "two depths", nodes=1),
    _plant(
        "next-sibling", "d", "BUGZOO C05 SafeAILab/EAGLE/commit/80cd31ec4bff57a660e45cac576372e38b2a76d4", ACCEPT,
        "the accepted child of the root is node 3", nodes=3, needs=["tree"],
    ),
    _plant(
        "int4-scale-mantissa", "a", "BUGZOO A23 sgl-project/sglang/issues/39193", ("int4_matmul", "M11"), "one group of 32 with the scale 1.5",
        needs=["op"],
    ),
    _plant(
        "window-inclusive", "b", "BUGZOO B10 ml-explore/mlx-lm/pull/390", (*MASK, "M10"), "a window of 1 and a prompt of two tokens",
        needs=["window"],
    ),
    _plant(
        "cache-truncated", "g", "BUGZOO G14 Luce-Org/lucebox/pull/225", ("rms_norm", "rope", "M2", "M6", "M11"),
        "a bfloat16 cache, and a latent just below the next bfloat16", needs=["cache format"],
    ),
    _plant("fork-pages", "e", "BUGZOO E04 Luce-Org/lucebox/pull/371", COMMIT, "a fork of a sequence whose last page is not full", needs=["fork"]),
)  # fmt: skip

PLANTS: dict[str, Plant] = {plant.name: plant for plant in _ALL}
