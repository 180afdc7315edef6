"""How a plant is written down: a short function on a named point of the blocked engine, and its record.

    @plant("Z01", "softmax_scale", "a", "A01 flashinfer-ai/flashinfer/pull/787", SCORES, "two keys")
    def scale_in_base_two(site: Site, config: Config) -> float:
        return site.honest(config) * math.log(2)

The function gets a `Site` and then the arguments of its point (impls/blocked/points.py). A plant on several points repeats the
decorator with `also`. Sources are "BUGZOO id, or row of the table in DDTREE section 6 or rule, then repository and thread".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from impls.planted import Plant

Function = TypeVar("Function", bound=Callable[..., Any])

PLANTS: dict[str, Plant] = {}
OVERRIDES: dict[str, dict[str, Callable[..., Any]]] = {}

CLASSES = {
    "a": "a: MLA, scale, YaRN, RoPE, state merge",
    "b": "b: masks, tree masks, positions",
    "c": "c: tree building",
    "d": "d: acceptance, verify",
    "e": "e: KV compaction, rollback, paging",
    "f": "f: MoE routing and experts",
    "g": "g: norm, SwiGLU, quantisation, precision",
    "h": "h: shape-dependent kernels",
    "i": "i: non-determinism, near ties",
    "j": "j: crash, hang, illegal access",
    "k": "k: adapter (layout, lifetime, stream, dtype)",
}

REGIONS = {
    "tree": "a batch with a branching tree",
    "chain": "a tree with depth 2 or more",
    "rounds": "more than one round on the same session",
    "rejection": "a round in which some row is not accepted",
    "sequences": "two sequences or more in one batch",
    "generate": "the engine's own loop with a drafter",
    "stop": "a stop token in the stream",
    "sampling": "a loop that draws its tokens",
    "op": "seen by run_op only: no session reaches the input",
    "yarn": "YaRN with factor > 1",
    "mscale": "mscale != mscale_all_dim",
    "betas": "YaRN betas other than 32 and 1",
    "groups": "more than one expert group",
    "softmax routing": "softmax scoring without renormalisation",
    "tied": "a tied head",
    "latent eps": "a latent eps that is neither the default nor absorbed by large latents",
    "ties": "exactly equal scores",
    "extreme": "extreme magnitudes",
    "empty row": "a row that sees no key",
    "minus infinity": "logits of -inf",
    "long": "more rows than the scaled-down limit",
    "views": "operands that are views",
    "fork": "a forked sequence",
    "evict": "an evicted sequence that comes back",
    "window": "a sliding window shorter than the keys",
    "cache format": "a cache of 16-bit numbers",
    "repeats": "the same call several times",
}

# Where a judge may rightly place a bug: op names and rule ids.
OP_RECORDS = (
    "embed", "rms_norm", "matmul", "rope", "q_absorb", "scores", "softmax", "o_latent", "o_heads", "tree_attention", "router_scores", "route",
    "swiglu", "moe", "int4_matmul", "combine", "add", "argmax", "sample", "draft_table", "best_first_tree", "tree_mask", "accept", "compact",
)  # fmt: skip
SCORES = ("scores", "tree_attention", "M5")
SOFTMAX = ("softmax", "tree_attention")
ANY = OP_RECORDS  # stray and missing writes show where they happen
MASK = ("softmax", "tree_mask", "tree_attention", "C3")
POSITION = ("rope", "tree_mask", "C2")
ROPE = ("rope", "M6")
CACHE = ("compact", "scores", "K1", "K2", "K3", "K4", "K7", "C7")
ROUTE = ("route", "M8")
TREE = ("best_first_tree", "T3", "T5", "T6", "T7")
TABLE = ("draft_table", "best_first_tree", "T2", "T3", "T4", "T8")  # a loop shows only the tree that comes of it
ACCEPT = ("accept", "A1", "A3", "V1", "L1")
STREAM = ("A4", "L1", "L2", "L3")
SAMPLING = ("generate", "A2", "A6", "S1", "S2", "S3", "sample")


def plant(
    name: str,
    point: str,
    bug_class: str,
    source: str,
    expected_ops: tuple[str, ...],
    trigger: str,
    *,
    nodes: int = 0,
    needs: Iterable[str] = (),
) -> Callable[[Function], Function]:
    """Register the decorated function as plant `name` on `point`."""
    origin, _, thread = source.partition(" ")
    words = frozenset(needs)
    assert name not in PLANTS, f"plant {name} is registered twice"
    assert words <= REGIONS.keys(), f"plant {name} needs unknown regions {sorted(words - REGIONS.keys())}"
    PLANTS[name] = Plant(
        name=name,
        source=f"{_origin(origin)}, https://github.com/{thread}",
        bug_class=CLASSES[bug_class],
        expected_ops=expected_ops,
        trigger=trigger,
        smallest_nodes=nodes,
        engine=f"blocked:{name}",
        kind="python",
        needs=words,
    )
    return also(name, point)


def also(name: str, point: str) -> Callable[[Function], Function]:
    """The decorated function is a part of plant `name`, on another point."""

    def register(function: Function) -> Function:
        OVERRIDES.setdefault(name, {})[point] = function
        return function

    return register


def _origin(word: str) -> str:
    return f"DDTREE section 6 row {word}" if word.isdigit() else f"DDTREE {word[7:]}" if word.startswith("DDTREE:") else f"BUGZOO {word}"


def bf16(x: NDArray[Any]) -> NDArray[np.float32]:
    """Round to bfloat16 (nearest, ties to even), as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x).astype(np.float32)
