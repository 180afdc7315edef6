"""What the suites of golden vectors hold: recipes only. `small` is made to be committed: every operation, trees with ties, sessions of two rounds.

Sizes lie beside the boundaries of common tiles (5 rows, 33 terms), and no size equals another by chance, so that a transposed or a padded
operand shows. A tree vector is closed: its targets are a table that a client looks up, not a drafter that it would have to run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.case import GenerateCase, Node, OpCase, SessionCase
from campaigns.operands import grid_logits, values
from campaigns.plan import config_of, prompt_tokens, session_script, weights_key
from campaigns.weights import weights_for
from spec.drafters import TableDrafter
from spec.engine import Limits
from spec.loops import greedy
from spec.model import GoldenModel
from spec.script import Generate, Script
from spec.tree import draft_table
from spec.weights import philox

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class TreeVector:
    """Draft logits [L, V] on a grid, a committed prefix of P rows of width C, and a target model that is one table."""

    name: str
    vocab: int
    depth: int
    budget: int
    prefix_len: int
    cache_dim: int
    grid: int  # logits are multiples of 2**-grid; negative: not rounded
    minus_infinity: int
    seed: int
    summary: str

    @property
    def params(self) -> dict[str, int]:
        return {"budget": self.budget, "root": self.seed % self.vocab, "prefix_len": self.prefix_len}


@dataclass(frozen=True)
class Suite:
    name: str
    ops: tuple[OpCase, ...]
    trees: tuple[TreeVector, ...]
    sessions: Mapping[str, SessionCase]


# ---- operations ----------------------------------------------------------------------------------------------------------------------

_ROUTE = {"top_groups": 1, "groups": 1, "group_score_max": 0, "norm_top_k": 1, "routed_scale": 1.5, "denominator_eps": 1e-20}
_ATTENTION = {"kv_rank": 6, "scale": 0.2236068}
_SAMPLE = {
    "temperature": 0.8, "top_k": 0, "top_k_ties_all": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.2,
    "frequency_penalty": 0.1, "seed": 2**62 + 11, "prompt_len": 3,
}  # fmt: skip

_OPS: tuple[tuple[str, dict[str, int], dict[str, float], tuple[str, ...]], ...] = (
    ("embed", {"V": 11, "N": 7, "T": 5}, {}, ("ordinary",)),
    ("rms_norm", {"T": 5, "N": 33}, {"eps": 1e-5}, ("ordinary", "extreme")),
    ("matmul", {"T": 5, "K": 33, "N": 9}, {}, ("ordinary", "cancel", "lattice")),
    ("matmul", {"T": 1, "K": 130, "N": 17}, {}, ("ordinary",)),
    ("rope", {"T": 5, "H": 3, "half": 4}, {"half_layout": 0}, ("ordinary",)),
    ("rope", {"T": 5, "H": 3, "half": 4}, {"half_layout": 1}, ("ordinary",)),
    ("q_absorb", {"T": 5, "H": 3, "n": 6, "R": 9}, {}, ("ordinary",)),
    ("scores", {"T": 5, "H": 3, "C": 10, "S": 13}, {"scale": 0.2236068}, ("ordinary", "lattice")),
    ("softmax", {"T": 5, "H": 3, "S": 19}, {}, ("ordinary", "extreme", "lattice")),
    ("o_latent", {"T": 5, "H": 3, "S": 13, "R": 9}, {}, ("ordinary",)),
    ("o_heads", {"T": 5, "H": 3, "R": 9, "v": 7}, {}, ("ordinary",)),
    ("tree_attention", {"T": 5, "H": 3, "S": 19, "C": 10}, _ATTENTION, ("ordinary", "lattice")),
    ("router_scores", {"T": 5, "E": 8}, {"softmax": 0}, ("ordinary", "extreme")),
    ("router_scores", {"T": 5, "E": 8}, {"softmax": 1}, ("ordinary",)),
    ("route", {"T": 7, "E": 8}, _ROUTE | {"top_k": 2}, ("ordinary", "ties", "cancel")),
    ("route", {"T": 7, "E": 16}, _ROUTE | {"top_k": 4, "groups": 4, "top_groups": 2}, ("ordinary", "ties")),
    ("route", {"T": 7, "E": 16}, _ROUTE | {"top_k": 3, "groups": 4, "top_groups": 2, "group_score_max": 1, "norm_top_k": 0}, ("ties",)),
    ("swiglu", {"T": 5, "N": 21}, {}, ("ordinary", "extreme")),
    ("moe", {"T": 5, "N": 10, "K": 2, "E": 4, "F": 6}, {}, ("ordinary",)),
    ("combine", {"T": 5, "K": 3, "N": 11}, {}, ("ordinary", "cancel")),
    ("add", {"T": 5, "N": 13}, {}, ("ordinary", "cancel")),
    ("argmax", {"T": 7, "V": 37}, {}, ("ordinary", "ties", "cancel")),
    ("draft_table", {"L": 3, "V": 13}, {"budget": 6}, ("ordinary", "ties", "cancel")),
    ("best_first_tree", {"L": 3, "K": 6}, {"budget": 9, "root": 4}, ("ordinary", "ties", "cancel")),
    ("tree_mask", {"M": 9}, {"prefix_len": 5}, ("ordinary",)),
    ("accept", {"M": 9}, {}, ("ordinary",)),
    ("compact", {"S": 14, "C": 5, "J": 4}, {"prefix_len": 5}, ("ordinary",)),
    ("int4_matmul", {"T": 5, "G": 3, "N": 9}, {}, ("ordinary", "lattice")),  # new ones go to the end: the place is the seed
    ("sample", {"T": 7, "V": 37, "J": 6}, _SAMPLE, ("ordinary", "ties")),
    ("sample", {"T": 7, "V": 37, "J": 6}, _SAMPLE | {"top_k": 5, "top_p": 0.9, "repetition_penalty": 1.3}, ("ordinary", "ties", "extreme")),
)


def _op_cases() -> tuple[OpCase, ...]:
    return tuple(
        OpCase(op, tuple(sorted(dims.items())), tuple(sorted(params.items())), regime, number)
        for number, (op, dims, params, regimes) in enumerate(_OPS)
        for regime in regimes
    )


# ---- trees ---------------------------------------------------------------------------------------------------------------------------

_TREES = (
    TreeVector("ties", 6, 3, 8, 4, 5, 0, 0, 7, "logits are whole numbers: equal path scores, ranks decide (T3)"),
    TreeVector("near", 9, 4, 12, 7, 5, 2, 0, 10, "logits are multiples of 1/4: equal sums of unequal terms"),
    TreeVector("wide", 40, 4, 16, 3, 5, -1, 0, 3, "ordinary logits, more candidates than the budget"),
    TreeVector("ended", 7, 3, 24, 5, 5, 1, 5, 54, "most candidates are -inf: the tree ends before the budget (T8)"),
    TreeVector("one", 8, 1, 1, 0, 5, 1, 0, 5, "one node on an empty prefix"),
    TreeVector("all", 3, 2, 12, 2, 5, 0, 0, 6, "the budget takes every node, V^1 + V^2"),
)


def tree_inputs(vector: TreeVector) -> Arrays:
    """logits [L, V], cache [P + B + 1, C], next_token int32 [L + 1, V]: the target of a node at depth d with token t is next_token[d, t]."""
    v = vector
    logits = grid_logits(philox("vector-logits", v.seed), v.depth, v.vocab, v.grid, v.minus_infinity)
    rng = philox("vector-targets", v.seed)
    next_token = rng.integers(0, v.vocab, (v.depth + 1, v.vocab)).astype(np.int32)
    ids = draft_table(logits, v.budget).ids
    for depth in range(v.depth):  # most targets are one of the two best candidates of the next depth, so that paths go deep
        likely = rng.random(v.vocab) < 0.8
        rank = rng.integers(0, min(2, ids.shape[1]), v.vocab)
        next_token[depth] = np.where(likely, ids[depth, rank], next_token[depth])
    rows = v.prefix_len + v.budget + 1
    return {"logits": logits, "cache": values(philox("vector-cache", v.seed), (rows, v.cache_dim), "ordinary"), "next_token": next_token}


# ---- sessions ------------------------------------------------------------------------------------------------------------------------

_TINY = (
    ("vocab", 24), ("hidden", 20), ("heads", 2), ("q_rank", 10), ("kv_rank", 9), ("nope_dim", 6), ("rope_dim", 4), ("v_dim", 5),
    ("dense_dim", 28), ("experts", 4), ("top_k", 2), ("expert_dim", 11),
)  # fmt: skip
_SOFTMAX = (*_TINY[:3], *_TINY[4:], ("groups", 2), ("top_groups", 2), ("tied", False))  # a tied head repeats one token
_BRANCHING: tuple[Node, ...] = ((0, 0), (1, 1), (0, 1), (1, 0), (0, 0))  # path [0, 2, 3]: node 2 moves, the first sibling is rejected
_CHAIN: tuple[Node, ...] = ((0, 1), (0, 1))
_LOOP = GenerateCase("table", 7, 0, -1, 6, 3, 12, -1)

_SESSIONS = {
    "sigmoid": SessionCase("tiny", _TINY, 49, "ordinary", ((5, 1), (8, 2)), ((_BRANCHING, _CHAIN), (_CHAIN, _BRANCHING)), 0, True, _LOOP),
    "softmax": SessionCase("tiny-softmax", _SOFTMAX, 49, "ordinary", ((7, 3),), ((_BRANCHING,), (_BRANCHING,)), 3, True, _LOOP),
}

SUITES = {"small": Suite("small", _op_cases(), _TREES, _SESSIONS)}


def session_of(case: SessionCase) -> Script:
    """The planned script; its loop runs on a table of draft logits per last token that often hits, once to the end and once to a stop token,
    and plain greedy decoding goes before."""
    script = session_script(case)
    assert case.generate is not None
    config, weights = config_of(case), weights_for(config_of(case), weights_key(case))
    prompts = tuple(prompt_tokens(config, *prompt) for prompt in case.prompts)
    plan = case.generate
    streams = [r.tokens for r in greedy(GoldenModel(config, weights).open(), prompts, Limits(plan.max_new + plan.block_len))]
    drafter = _hitting_table(plan, config.vocab, [[*prompt.tolist(), *tokens] for prompt, tokens in zip(prompts, streams, strict=True)])
    limits = Limits(plan.max_new)
    stop = Limits(plan.max_new, (streams[0][plan.max_new // 2],))
    loops = (
        Generate(prompts, None, 0, limits),
        Generate(prompts, drafter, plan.budget, limits),
        Generate(prompts, drafter, plan.budget, stop),
    )
    return dataclasses.replace(script, steps=(*(s for s in script.steps if not isinstance(s, Generate)), *loops))


def _hitting_table(plan: GenerateCase, vocab: int, streams: list[list[int]]) -> TableDrafter:
    """[V, L, V]: what followed a token in the golden streams is likely after it."""
    table = np.rint(4 * philox("vector-table", plan.seed).standard_normal((vocab, plan.block_len, vocab))) / 4
    for stream in streams:
        for at, token in enumerate(stream):
            for depth, follower in enumerate(stream[at + 1 : at + 1 + plan.block_len]):
                table[token, depth, follower] = max(2.5, table[token, depth, follower])
    return TableDrafter.of_array(table)
