"""Every rule by its id: what it says, a tiny example, where it comes from. Judgements, reports and `paritree explain` quote these.

T table and tree, C compiled batch, V verification rows, A acceptance, S sampling, K commit, D drafter interface, L the loop;
M the model, N numerics. Where an example can be executed it is: `check` computes it with the spec itself, and a test calls every one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.config import preset
from spec.dflash import Context, ContextError, DFlash, DFlashDrafter, target_features, tiny_dflash
from spec.encodings import encode_bitpacked, encode_ggml_mask
from spec.engine import Limits, Rows
from spec.formats import dequantised_int4
from spec.loops import ddtree, greedy, tree_rows
from spec.model import GoldenModel, in_window
from spec.ops import OPS
from spec.sampling import Sampling, keyed_uniforms, scaled_logits
from spec.schemes import LossyError, Place, leviathan, sample_and_match, scheme, target_only_coin
from spec.tree import (
    DraftTable,
    TreeError,
    accept_greedy,
    best_first_tree,
    check_structure,
    compact,
    cut,
    draft_table,
    positions,
    visibility,
)
from spec.weights import random_weights


@dataclass(frozen=True)
class Rule:
    """`example` is written for a person; `check`, where there is one, is the same example executed and returns True."""

    id: str
    statement: str
    example: str
    source: str
    check: Callable[[], bool] | None = None


class UnknownRule(KeyError):
    """There is no rule of this id."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule

    def __str__(self) -> str:
        return f"there is no rule {self.rule!r}: choose one of {', '.join(RULES)}"


def rule(name: str) -> Rule:
    """The rule of this id, whatever its case. Raises UnknownRule."""
    try:
        return RULES[name.upper()]
    except KeyError:
        raise UnknownRule(name) from None


# What the checks are written with

INF = float("inf")
DDTREE = "github.com/liranringel/ddtree c96427a"
DFLASH = "github.com/z-lab/dflash 44947fb"
DEEPSEEK = "DeepSeek-V3 technical report (arXiv 2412.19437) and its inference/model.py"


def _paths(log_probs: list[list[float]], budget: int) -> list[tuple[int, ...]]:
    """Rank paths of the tree, root excluded; the token of rank r is r."""
    table = np.array(log_probs, np.float32)
    ids = np.tile(np.arange(table.shape[1], dtype=np.int32), (len(table), 1))
    return list(best_first_tree(DraftTable(ids, table), root=0, budget=budget).ranks[1:])


def _refuses(call: Callable[[], object], rule_id: str) -> bool:
    try:
        call()
    except TreeError as refusal:
        return refusal.rule == rule_id
    return False


def _op(name: str, inputs: Mapping[str, Any], output: str = "out", **params: int | float) -> NDArray[Any]:
    """An output of a golden op; floats become float32, integers int32, booleans uint8."""
    arrays = {key: np.asarray(value) for key, value in inputs.items()}
    kinds = {"f": np.float32, "i": np.int32, "b": np.uint8}
    outputs = OPS[name].function({key: value.astype(kinds[value.dtype.kind]) for key, value in arrays.items()}, params)
    return outputs[output]


def _equal(actual: NDArray[Any], expected: Any) -> bool:
    return bool(np.array_equal(actual, np.asarray(expected, actual.dtype)))


def _table(logits: list[list[float]], budget: int) -> DraftTable:
    return draft_table(np.array(logits, np.float32), budget)


def _path_scores_are_exact() -> bool:
    # 2**-24 is lost when 1 + 2**-24 is rounded to float32, so that float32 sums tie where the exact sums do not
    tiny = -(2.0**-24)
    return _paths([[-1.0, -1.0], [tiny, -9.0]], 3) == [(0,), (1,), (0, 0)]


def _nested_budgets() -> bool:
    table = [[-0.5, -1.0, -1.0], [-0.5, -1.0, -1.5]]
    return all(_paths(table, budget) == _paths(table, 12)[:budget] for budget in range(13))


def _mask_formats() -> bool:
    mask = visibility([-1, 0, 0], 0)
    additive = encode_ggml_mask(mask, row_pad=1)
    return _equal(encode_bitpacked([mask])[0, :, 0], [0b001, 0b011, 0b101]) and _equal(additive == 0, mask) and bool(additive.min() == -INF)


def _row_of_a_tree() -> bool:
    rows = visibility([-1, 0, 0, 2], 1)
    chain = visibility([-1, 0, 1], 1)
    return _equal(rows[3][[0, 1, 3, 4]], chain[2])  # node 3 sees its path 0, 2, 3 as the chain's last row sees its own


def _isolated_requests() -> bool:
    table = DraftTable(np.array([[5, 6]], np.int32), np.array([[-0.5, -1.5]], np.float32))
    trees = [best_first_tree(table, root=1, budget=2), best_first_tree(table, root=2, budget=1)]
    rows: Rows = tree_rows([0, 1], trees, [3, 7])
    return _equal(rows.parent, [-1, 0, 0, -1, 3]) and _equal(rows.position, [3, 4, 4, 7, 8]) and _equal(rows.sequence, [0, 0, 0, 1, 1])


def _sampled(logits: list[float], history: list[int], prompt_len: int = 0, **fields: Any) -> list[float]:
    z: list[float] = scaled_logits(Sampling(**fields), np.array(logits, np.float32), history, prompt_len).tolist()
    return z


def _matches_half_the_time() -> bool:
    """Over a fair coin, the child of mass 1/2 is taken in one of two runs; Leviathan's rule with q = 1/2 never leaves it."""

    @dataclass(frozen=True)
    class Says:
        outcome: int

        def token(self, z: Any, place: Place) -> int:
            return self.outcome

        def pick(self, weights: Any, place: Place) -> int:
            return int(np.flatnonzero(weights)[-1])

    z = np.log(np.array([0.5, 0.5]))
    runs = [sample_and_match(z, [1], [0.5], Says(outcome), Place(0, 0)) for outcome in (0, 1)]
    return runs == [(0, False), (1, True)] and leviathan(z, [1], [0.5], Says(0), Place(0, 0)) == (1, True)


def _own_path() -> bool:
    """Token 1 was drafted below the root: on that path it is penalised, beside it, it is not."""
    return _sampled([0.0, 1.0], [7, 1], 1, frequency_penalty=2.0) == [0.0, -1.0] and _sampled(
        [0.0, 1.0], [7], 1, frequency_penalty=2.0
    ) == [0.0, 1.0]


def _noise_by_position() -> bool:
    """A token of the vocabulary and a position have one number, however it is asked for."""
    return _equal(keyed_uniforms(3, 0, 5, 8)[:4], keyed_uniforms(3, 0, 5, 4)) and not _equal(
        keyed_uniforms(3, 0, 6, 4), keyed_uniforms(3, 0, 5, 4)
    )


def _coin_covers() -> bool:
    @dataclass(frozen=True)
    class Coin:
        uniform: float

        def token(self, z: Any, place: Place) -> int:
            return int(np.flatnonzero(z > -INF)[0])

        def pick(self, weights: Any, place: Place) -> int:
            return int((np.cumsum(weights) <= self.uniform).sum())

    z = np.log(np.array([0.125, 0.5, 0.25, 0.125]))
    taken = [target_only_coin(z, [1, 2], [0.5, 0.5], Coin(u), Place(0, 0)) for u in (0.4, 0.6, 0.8)]
    return taken == [(1, True), (2, True), (0, False)]


def _lossy_needs_its_name() -> bool:
    try:
        scheme("leviathan")
    except LossyError:
        return scheme("leviathan", allow_lossy=True) is leviathan
    return False


@functools.cache
def _drafter(block_size: int) -> DFlash:
    """A DFlash drafter of two layers for the preset `tiny`."""
    config = preset("tiny")
    return tiny_dflash(GoldenModel(config, random_weights(config, 0)), 0, block_size=block_size)


def _marginals(block_size: int, pieces: Sequence[Sequence[int]], root: int) -> tuple[NDArray[Any], dict[tuple[str, int], NDArray[Any]]]:
    """Drafts after the tokens of `pieces`, whose features arrive one piece after the other, and the taps of the last of them."""
    model = _drafter(block_size)
    tokens = np.array([token for piece in pieces for token in piece], np.int32)
    features = target_features(model.target, model.config.target_layers, tokens)
    context, taps = Context(model.config), {}

    def tap(name: str, layer: int, array: NDArray[Any]) -> None:
        taps[name, layer] = array

    start = 0
    for piece in pieces:
        model.extend(context, features[start : start + len(piece)], tap)
        start += len(piece)
    return model.draft(context, root, tap), taps


def _anchor_in_slot_0() -> bool:
    model = _drafter(4)
    mask = model.config.mask_token
    return _equal(_marginals(4, [[1, 2]], 7)[1]["embed", -1], model.target.embed[[7, mask, mask, mask]])


def _features_in_list_order() -> bool:
    target = _drafter(4).target
    tokens, hidden = np.array([1, 2], np.int32), target.config.hidden
    return _equal(target_features(target, (1, 0), tokens)[:, hidden:], target_features(target, (0,), tokens))


def _context_is_committed() -> bool:
    try:
        DFlashDrafter(_drafter(4)).draft(0, np.array([1, 2], np.int32))
    except ContextError:
        return _equal(_marginals(4, [[1, 2, 3]], 7)[0], _marginals(4, [[1], [2, 3]], 7)[0])
    return False


def _absolute_positions() -> bool:
    """Token 2 after token 1: its key is turned by 1, not by 0, though it comes alone."""
    taps = _marginals(4, [[1], [2]], 7)[1]
    return not _equal(taps["context_k", 0], taps["context_k_norm", 0])


def _lossless() -> bool:
    model = _drafter(4)
    prompts = [np.array([5, 1], np.int32)]
    sequential = greedy(model.target.open(), prompts, Limits(4))[0]
    by_tree = ddtree(model.target.open(), prompts, DFlashDrafter(model), 5, Limits(4))[0]
    return sequential.tokens == by_tree.tokens and _equal(sequential.logits, by_tree.logits)


def _wide_block() -> bool:
    return not _equal(_marginals(4, [[1, 2]], 7)[0][0], _marginals(3, [[1, 2]], 7)[0][0])


def _split_scores() -> bool:
    # q.k over [latent | rope] in one row: 1*2 + 3*4, scaled by 0.5
    scores = _op("scores", {"q": [[[1.0, 3.0]]], "keys": [[2.0, 4.0]]}, scale=0.5)
    return _equal(scores, [[[7.0]]])


_TREE_RULES = (
    Rule(
        "T1",
        "Row d-1 of the drafter's logits belongs to depth d; the row of block slot 0 is unused.",
        "logits [[0, 9], [9, 0]], B = 2 -> tokens [root, 1, 0]: token 1 at depth 1, token 0 at depth 2",
        f"{DDTREE}: a mask slot predicts its own position, no shift by one",
        lambda: _equal(best_first_tree(_table([[0.0, 9.0], [9.0, 0.0]], 2), root=7, budget=2).tokens, [7, 1, 0]),
    ),
    Rule(
        "T2",
        "lp = fp32(logit - logZ), logZ = fp32(logsumexp); the score of a path is the exact sum of the fp32 table.",
        "lp = [[-1, -1], [-2**-24, -9]], B = 3 -> (0), (1), (0,0): summed in float32, (0,0) would tie with (0) and come before (1)",
        f"{DDTREE}: fp32 table, double accumulation; broken by float32 sums and by bf16 log-softmax in ports",
        _path_scores_are_exact,
    ),
    Rule(
        "T3",
        "Nodes are ordered by score descending, then by rank path ascending, a prefix before its extension; numbers follow this order.",
        "lp = [[-1, -1], [0, -5]], B = 2 -> (0), (0,0); a first-in-first-out heap takes (0), (1)",
        f"{DDTREE}: heap of (-score, rank path, ..); broken by warpfront/hipfire ddtree.rs (push order), Luce-Org/lucebox (score only)",
        lambda: _paths([[-1.0, -1.0], [0.0, -5.0]], 2) == [(0,), (0, 0)],
    ),
    Rule(
        "T4",
        "A depth has the K = min(B, V) best candidates by (logit descending, id ascending), named by ids of the whole vocabulary.",
        "logits [1, 3, 3, 2], B = 3 -> ids [1, 2, 3]",
        f"{DDTREE}; broken by width caps (8, 6, 2), by arbitrary top-k ties, by ids of a vocabulary shard",
        lambda: _equal(_table([[1.0, 3.0, 3.0, 2.0]], 3).ids, [[1, 2, 3]]),
    ),
    Rule(
        "T5",
        "The tree has the first B paths, the root not counted: N = min(B, number of paths). Budgets out of range are refused.",
        "L = 1, V = 2, B = 3 -> N = 2; B = -1 is refused",
        f"{DDTREE}; broken by early stops on branches (sgl-project/sglang #29907), by buffers of exactly B nodes",
        lambda: len(_paths([[-0.5, -1.0]], 3)) == 2 and _refuses(lambda: _paths([[-0.5]], -1), "T5"),
    ),
    Rule(
        "T6",
        "Parents come first, parent(i) < i, node 0 is the only root, and no token occurs twice under one parent.",
        "parents [-1, 0, 2] are refused: node 2 is its own parent",
        "sgl-project/sglang #36201, issue 7477: a walk over a missing parent reads the next request, or does not end",
        lambda: _refuses(lambda: check_structure([-1, 0, 2]), "T6") and _refuses(lambda: check_structure([-1, 0, 0], [1, 4, 4]), "T6"),
    ),
    Rule(
        "T7",
        "No heuristics: no chain seed, depth bonus, cutoff, width cap, eager expansion or cost stop.",
        "q = [[.5, .45], [.5, .4]], B = 2 -> (0), (1); a chain for B <= L would take (0), (0,0)",
        "sgl-project/sglang #29907 (chain if B <= L, +0.2 a depth), Luce-Org/lucebox (chain seed by default)",
        lambda: _paths(np.log([[0.5, 0.45], [0.5, 0.4]]).tolist(), 2) == [(0,), (1,)],
    ),
    Rule(
        "T8",
        "A candidate of log-probability -inf is no node; NaN and +inf are refused; -0.0 equals 0.0.",
        "L = 1, logits [0, -inf, -inf, -inf], B = 4 -> one node, of score 0",
        f"{DDTREE} and all ports compute a sibling's score as s - (-inf) + (-inf) = NaN",
        lambda: _paths([[0.0, -INF, -INF, -INF]], 4) == [(0,)] and _refuses(lambda: _paths([[float("nan")]], 1), "T8"),
    ),
)

_BATCH_RULES = (
    Rule(
        "C1",
        "Input ids are [root, token(1), .., token(N)]: flat index i is node i.",
        "root 7, one candidate 3 -> ids [7, 3]",
        f"{DDTREE}; off by one in patrickbdevaney/dflash-caddtree-integrations: zero acceptance",
        lambda: _equal(best_first_tree(_table([[0.0, 0.0, 0.0, 9.0]], 1), root=7, budget=1).tokens, [7, 3]),
    ),
    Rule(
        "C2",
        "Positions are P + depth, cache slots P + i; the two differ as soon as the tree branches.",
        "parents [-1, 0, 0, 1], P = 10 -> positions [10, 11, 11, 12], slots [10, 11, 12, 13]",
        "warpfront/hipfire #72, lablup/mlxcel #1214, rmagur1203/vllm-ddtree: rotary positions by slot, fake acceptance",
        lambda: _equal(positions(check_structure([-1, 0, 0, 1]), 10), [10, 11, 11, 12]),
    ),
    Rule(
        "C3",
        "A row sees the committed prefix and its ancestors-or-self, nothing else; a window W adds pos(row) - pos(key) < W on positions.",
        "parents [-1, 0, 0], P = 1 -> row 2 sees [prefix, root, -, itself]",
        f"{DDTREE}; sgl-project/sglang #27509 (mask of zeros = visible), #29907 (backend silently causal)",
        lambda: _equal(visibility([-1, 0, 0], 1)[2], [True, True, False, True]),
    ),
    Rule(
        "C4",
        "Padding is inert: unreachable from the root, seen by no real row; buffers hold B + 1 rows.",
        "a table of two paths, B = 3 -> tokens [root, a, b, -1], count 2; a node of token 0 is a node",
        "sgl-project/sglang #27509 (size counted by token != 0), #29907 (buffers of B rows)",
        lambda: _equal(_op("best_first_tree", {"ids": [[4, 0]], "log_probs": [[-0.5, -1.0]]}, "tokens", budget=3, root=7), [7, 4, 0, -1]),
    ),
    Rule(
        "C5",
        "The mask has the polarity, dtype, bit order and pointer units that the kernel reads; in the spec True (1) is visible.",
        "root and two children: SGLang packs rows 1, 11, 101 from the least significant bit; ggml writes 0 where seen, -inf elsewhere",
        "sgl-project/sglang #27509 (additive mask read as nonzero = allowed), rmagur1203/vllm-ddtree (elements for bytes)",
        _mask_formats,
    ),
    Rule(
        "C6",
        "Requests are isolated: each has its own prefix length, tree size, strides and order in the batch.",
        "trees of 2 and 1 nodes at P = 3 and 7 -> parents [-1, 0, 0, -1, 3], positions [3, 4, 4, 7, 8]",
        "sgl-project/sglang #15360, #26866, #27509; rmagur1203/vllm-ddtree: seen only with unequal requests",
        _isolated_requests,
    ),
    Rule(
        "C7",
        "No stale state: graph replay, buckets and cached offsets see the data of this round.",
        "round 1 is a chain, round 2 branches; the same graph must read round 2's positions",
        "rmagur1203/vllm-ddtree 11.5: acceptance 4.43 by a stale buffer, 2.84 after the fix; Luce-Org/lucebox #482",
    ),
    Rule(
        "V1",
        "Row i is the target's distribution after the path root..i, and decides among the children of i.",
        "tokens [7, 3, 3], parents [-1, 0, 1], target [3, 9, 5] -> path [0, 1], bonus 9: row 1, not row 0, judges node 2",
        f"{DDTREE}; off by one in patrickbdevaney/dflash-caddtree-integrations",
        lambda: accept_greedy([7, 3, 3], [-1, 0, 1], [3, 9, 5]).path == (0, 1),
    ),
    Rule(
        "V2",
        "Row i of the tree forward is the last row of a chain forward over the path root..i, on the same prefix.",
        "parents [-1, 0, 0, 2]: node 3 sees of [root, 1, 2, 3] what the chain root, 2, 3 sees",
        "held bit for bit by the spec; within bounds by an engine; the strongest single test of a tree engine",
        _row_of_a_tree,
    ),
    Rule(
        "V3",
        "A recurrent layer starts a node from its parent's state: state_in(node) = state_out(parent).",
        "nodes 1 and 2 under the root both start from the root's state, not 2 from 1's",
        "rmagur1203/vllm-ddtree 11.4, jroth1111/ddtree-mlx, SGLang tree scan",
    ),
)

_COMMIT_RULES = (
    Rule(
        "A1",
        "Greedy: walk to the child that is the row's argmax; among equal maxima the lowest id wins.",
        "logits [1, 3, 3] -> 1",
        f"{DDTREE}; torch leaves the tie unspecified on CUDA",
        lambda: _equal(_op("argmax", {"logits": [[1.0, 3.0, 3.0]]}, "ids"), [1]),
    ),
    Rule(
        "A2",
        "Sampling keeps the target's law: sample at each node of the walk and go on at a match.",
        "one child x, p(x) = .5, drafted with q(x) = .5: min(1, p/q) emits x always, sample-and-match half the time",
        f"{DDTREE}; Leviathan's rule on top-k children is biased, warpfront/hipfire #483",
        _matches_half_the_time,
    ),
    Rule(
        "A3",
        "The bonus comes from the row of the last accepted node.",
        "tokens [7, 3], parents [-1, 0], target [3, 9] -> path [0, 1], bonus 9",
        f"{DDTREE}; wrong stride for a batch above 1 in sgl-project/sglang #15360",
        lambda: accept_greedy([7, 3], [-1, 0], [3, 9]).bonus == 9,
    ),
    Rule(
        "A4",
        "The emitted stream is the autoregressive stream up to the first stop token, which is kept, and at most max_new tokens.",
        "round emits 4, 2, 5; stop token 2 -> 4, 2; max_new 1 -> 4",
        f"{DDTREE}; unslothai/llama.cpp #224: more tokens than asked for",
        lambda: cut([4, 2, 5], (2,), 9) == (4, 2) and cut([4, 2, 5], (2,), 1) == (4,),
    ),
    Rule(
        "A5",
        "All tensor-parallel ranks hold the same tree, ids and path.",
        "two shards of two tokens: token 1 of shard 1 is id 3 on both ranks",
        "sgl-project/sglang #29907 review",
    ),
    Rule(
        "A6",
        "Logits processors see the history of each node's own path.",
        "repetition penalty: node 2 under node 1 is penalised for node 1's token, its uncle is not",
        "Avarok-Cybersecurity/atlas #132",
        _own_path,
    ),
    Rule(
        "S1",
        "A row's law is softmax(z): bias, repetition (divide if positive, else multiply), frequency, presence, temperature, min-p, top-k, top-p.",
        "logits (4, -1), both seen, repetition 2, temperature 1/2 -> z = (4, -4)",
        "vLLM v1 sampler, same order; float64 here, the model's dtype in transformers and the reference",
        lambda: _sampled([4.0, -1.0], [0, 1], repetition_penalty=2.0, temperature=0.5) == [4.0, -4.0],
    ),
    Rule(
        "S2",
        "Truncation: p >= min_p * p_max; then k tokens by (z, id); then the shortest head whose mass reaches top_p. Temperature 0: the best alone.",
        "four equal logits, top_p 1/2 -> tokens 0 and 1; logits (1, 2, 2), temperature 0 -> token 1",
        "vLLM, transformers; equals of the k-th are all kept there (top_k_ties = all)",
        lambda: (
            np.isfinite(_sampled([1.0] * 4, [], top_p=0.5)).tolist() == [True, True, False, False]
            and int(np.argmax(_sampled([1.0, 2.0, 2.0], [], temperature=0.0))) == 1
        ),
    ),
    Rule(
        "S3",
        "Token = argmax(z + g), g = -log(-log u), u from Philox4x64-10 keyed by (seed, position): sequential and tree decoding draw the same.",
        "the u of token 3 at position 5 is word 3 of block 1 of key (seed, 5), whatever was drawn before",
        "this spec; Gumbel-max, Philox of Salmon et al. 2011",
        _noise_by_position,
    ),
    Rule(
        "S4",
        "Target-only coin: one number takes the first child whose cumulative mass covers it; else an independent draw without the children.",
        "children of mass .5 and .25: coin .6 takes the second; coin .8 draws from the others",
        "SGLang tree_speculative_sampling_target_only with both thresholds at 1; vllm-project/vllm #54282 (dependent noise)",
        _coin_covers,
    ),
    Rule(
        "S5",
        "Lossy modes (Leviathan's min(1, p/q) on unsampled children, typical acceptance, thresholds below 1) run by name only.",
        "scheme('leviathan') is refused unless allow_lossy is set",
        "total variation .40 on V = 3; vLLM refuses lossy methods (#50808)",
        _lossy_needs_its_name,
    ),
    Rule(
        "K1",
        "Compaction: dst(P + j) = src(P + path[j]); everything is read before anything is written, or moved in ascending order.",
        "P = 1, rows [a, b, c, d], path [0, 2] -> [a, b, d]",
        f"{DDTREE}; sgl-project/sglang #15360, #26866",
        lambda: _equal(compact(np.arange(4), 1, [0, 2]), [0, 1, 3]),
    ),
    Rule(
        "K2",
        "The new length is P + len(path); the bonus has no cache row yet.",
        "P = 5, path [0, 2, 3] -> 8 rows",
        DDTREE,
        lambda: len(compact(np.zeros(10), 5, [0, 2, 3])) == 8,
    ),
    Rule(
        "K3",
        "Rejected slots are freed, each once.",
        "N + 1 = 4 pending rows, path [0, 2] -> 2 slots freed; a second commit frees none",
        "paged caches, sgl-project/sglang #29907",
        lambda: len(compact(np.zeros(4), 0, [0, 2])) == 2,
    ),
    Rule(
        "K4",
        "Data moves in the layout of each cache (latent rows, pages, indexer, scales), for every layer group.",
        "page size 64, path [0, 2]: a page-indexed buffer moved by token indices is scrambled",
        "sgl-project/sglang #31215, #31218; rmagur1203/vllm-ddtree 11.4",
    ),
    Rule(
        "K5",
        "The drafter gets the hidden rows of the path, in path order.",
        "features [f0, f1, f2], path [0, 2] -> [f0, f2], not the first two",
        "sgl-project/sglang #27509 hidden[i, :n]; openvinotoolkit/openvino.genai #3396",
        lambda: _equal(compact(np.array([10, 11, 12]), 0, [0, 2]), [10, 12]),
    ),
    Rule(
        "K6",
        "A recurrent state after the commit is state_out of the last accepted node.",
        "path [0, 2]: the state of node 2, not of slot len(path) - 1",
        "rmagur1203/vllm-ddtree 11.4; Luce-Org/lucebox #414, #415",
    ),
    Rule(
        "K7",
        "Nothing below P changes.",
        "P = 2, any path -> rows 0 and 1 as they were",
        f"{DDTREE}; Luce-Org/lucebox #436",
        lambda: _equal(compact(np.array([8, 9, 1, 2]), 2, [1])[:2], [8, 9]),
    ),
    Rule(
        "D1",
        "Block slot 0 carries the root's embedding, slots 1.. the mask token.",
        "block of 4 -> [root, MASK, MASK, MASK]; all MASK costs acceptance 6.34 -> 1.46",
        f"{DFLASH}; warpfront/hipfire #483",
        _anchor_in_slot_0,
    ),
    Rule(
        "D2",
        "Target features come from the checkpoint's layer list, after those layers, before the final norm.",
        "layer id 3 -> hidden_states[4] of transformers",
        f"{DFLASH}; vllm-project/vllm #40727, #42704; sgl-project/sglang issue 37475",
        _features_in_list_order,
    ),
    Rule(
        "D3",
        "The drafter's context holds committed tokens only, every one of them, never recomputed.",
        "prompt longer than a micro-batch: the features of all micro-batches are kept",
        f"{DFLASH}; ikawrakow/ik_llama.cpp #2124",
        _context_is_committed,
    ),
    Rule(
        "D4",
        "The drafter's positions are absolute.",
        "P = 100 -> the block's rotary positions are 100, 101, ..",
        DFLASH,
        _absolute_positions,
    ),
    Rule(
        "D5",
        "Attention inside the block is not causal, and the block is as wide as the drafter's, whatever the budget.",
        "budget 64, block 8: still 7 mask slots",
        f"{DFLASH}; rmagur1203/vllm-ddtree 11.3",
        _wide_block,
    ),
    Rule(
        "L1",
        "Lossless: the emitted stream is the autoregressive stream. In the spec bit for bit, logits included.",
        "greedy AR emits 5, 1, 4; trees of any budget emit 5, 1, 4",
        "DDTree (arXiv 2604.12989) and this spec's canonical float32",
        _lossless,
    ),
    Rule(
        "L2",
        "Every round emits at least one token and ends.",
        "no child matches: path [0], the bonus is emitted",
        DDTREE,
        lambda: accept_greedy([7, 3], [-1, 0], [4, 9]).path == (0,),
    ),
    Rule(
        "L3",
        "The output is cut by rule, never filtered by value.",
        "generated token equal to the mask id: it stays",
        "z-lab/dflash #76; still in the reference of DDTree",
        lambda: cut([6, 0, 6], (), 9) == (6, 0, 6),
    ),
)

_MODEL_RULES = (
    Rule(
        "M1",
        "Embedding: row of the table by token id, no scaling.",
        "table [[1], [5]], id 1 -> 5",
        DEEPSEEK,
        lambda: _equal(_op("embed", {"table": [[1.0], [5.0]], "ids": [1]}), [[5.0]]),
    ),
    Rule(
        "M2",
        "RMSNorm: gain * x / sqrt(mean(x^2) + eps), eps inside the root.",
        "x = (0, 0), eps = 1 -> (0, 0); x = (1, 7), eps = 0, gain 5 -> (1, 7)",
        f"{DEEPSEEK}; the eps of the latent norms is 1e-6 in transformers, rms_norm_eps in vLLM",
        lambda: _equal(_op("rms_norm", {"x": [[1.0, 7.0]], "gain": [5.0, 5.0]}, eps=0.0), [[1.0, 7.0]]),
    ),
    Rule(
        "M3",
        "Projections: y = x @ W with W [in, out]; q is [nope | rope] per head, kv_a is [latent | rope].",
        "x = (1, 2), W = [[1, 0], [10, 3]] -> (21, 6)",
        DEEPSEEK,
        lambda: _equal(_op("matmul", {"x": [[1.0, 2.0]], "w": [[1.0, 0.0], [10.0, 3.0]]}), [[21.0, 6.0]]),
    ),
    Rule(
        "M4",
        "Absorb: q_c(h) = q_nope(h) @ w_kc(h) meets the latent cache; o(h) = u(h) @ w_vc(h). kv_b holds, per head, first K then V rows.",
        "q_nope (1, 2), w_kc [[3], [4]] -> 11",
        f"{DEEPSEEK}; vLLM W_UK_T and W_UV, SGLang w_kc and w_vc",
        lambda: _equal(_op("q_absorb", {"q_nope": [[[1.0, 2.0]]], "w_kc": [[[3.0], [4.0]]]}), [[[11.0]]]),
    ),
    Rule(
        "M5",
        "Attention: s = scale * Q.K over [latent | rope], softmax over visible keys, u = sum p c. scale = (nope + rope)^-1/2 * mscale^2.",
        "q (1, 3), key (2, 4), scale 1/2 -> 7",
        f"{DEEPSEEK}; mscale counts twice, once for q and once for k",
        _split_scores,
    ),
    Rule(
        "M6",
        "RoPE: pair (2i, 2i+1) of the rope part turns by position * theta^(-2i/D); YaRN stretches the low frequencies by its factor.",
        "pair (1, 2) by a quarter turn (cos 0, sin 1) -> (-2, 1)",
        f"{DEEPSEEK}; YaRN arXiv 2309.00071; transformers writes the same rotation half-split",
        lambda: _equal(_op("rope", {"x": [[[1.0, 2.0]]], "cos": [[0.0]], "sin": [[1.0]]}, half_layout=0), [[[-2.0, 1.0]]]),
    ),
    Rule(
        "M7",
        "Feed-forward: down(silu(gate) * up); leading layers dense, others sum_k weight_k * expert_k(x) + shared(x).",
        "gate 0 -> silu(0) * up = 0; weights (2, 3), experts 1 and 10, shared 5 -> 37",
        DEEPSEEK,
        lambda: (
            _equal(_op("swiglu", {"gate": [[0.0]], "up": [[4.0]]}), [[0.0]])
            and _equal(_op("combine", {"weights": [[2.0, 3.0]], "experts": [[[1.0], [10.0]]], "shared": [[5.0]]}), [[37.0]])
        ),
    ),
    Rule(
        "M8",
        "Router: experts are chosen by score + bias (groups by their two best), weighted by score without bias, normalised, times routed_scale.",
        "scores (.5, .5, .25), bias (0, 0, 1), top 1 -> expert 2, weight .25 / .25 = 1",
        f"{DEEPSEEK} (noaux_tc); dropped groups are -inf, not 0, in all current engines but mlx-lm",
        lambda: _equal(
            _op(
                "route",
                {"scores": [[0.5, 0.5, 0.25]], "bias": [0.0, 0.0, 1.0]},
                "ids",
                top_k=1,
                groups=1,
                top_groups=1,
                group_score_max=0,
                norm_top_k=1,
                routed_scale=1.0,
                denominator_eps=0.0,
            ),
            [[2]],
        ),
    ),
    Rule(
        "M9",
        "Head: logits = RMSNorm(h) @ head, or @ embed^T where tied.",
        "tied: the head is the embedding table, transposed, not a copy of it",
        DEEPSEEK,
    ),
    Rule(
        "M10",
        "Sliding window: a row at position p sees, of its keys, those at positions above p - window; distance is in positions, not in slots.",
        "window 2, siblings at positions 4 and 4 in slots 4 and 5: both see position 3, neither the other, and slot 5 - 2 means nothing",
        "this spec; hybrids and sliding-window drafters",
        lambda: _equal(in_window(np.array([4, 4]), np.array([2, 3, 4, 4]), 2), [[False, True, True, True]] * 2),
    ),
    Rule(
        "M11",
        "Formats: bits have one exact value; a weight is value * scale (int4: exact in float32; fp8: RN32 once); a cache row is rounded once, on entry.",
        "int4 word 0x0000000f is -1 (two's complement, lowest nibble first), times the scale 0.5 -> -0.5",
        "compressed-tensors pack-quantized (there with an offset of 8); DeepSeek-V3 weight_scale_inv",
        lambda: _equal(dequantised_int4(np.array([[15], [0], [0], [0]], np.int32), np.array([[0.5]], np.float32))[:2], [[-0.5], [0.0]]),
    ),
)

_NUMERIC_RULES = (
    Rule(
        "N1",
        "Golden bits: each op's result is the correctly rounded float32 of its exact real value on its float32 inputs.",
        "(2**24, 1, -2**24) . (1, 1, 1) = 1, which float32 sums from the left give as 0",
        "this spec; Ziv's rounding test, exact arithmetic where it is undecided",
        lambda: _equal(_op("matmul", {"x": [[2.0**24, 1.0, -(2.0**24)]], "w": [[1.0], [1.0], [1.0]]}), [[1.0]]),
    ),
    Rule(
        "N2",
        "Local bound: each tap is recomputed in float64 from the engine's own inputs and must lie within a bound derived from its profile.",
        "dot of n terms in float32, any order: |error| <= n u / (1 - n u) * sum |a b|, u = 2**-24",
        "Higham, Accuracy and Stability of Numerical Algorithms, section 3.1",
    ),
    Rule(
        "N3",
        "Exact decision: top-k, argmax, heap order, mask, path and compaction are judged exactly, on the engine's own scores.",
        "the engine's logits 1.0, 1.5 and token 0: wrong, whatever the bound on the logits",
        "this spec: a decision has no rounding error of its own",
        lambda: _equal(_op("argmax", {"logits": [[1.0, 1.5]]}, "ids"), [1]),
    ),
    Rule(
        "N4",
        "Bit equality: copies, gathers and operations of one rounding (residual add, path score) must equal the reference bit for bit.",
        "1 + 2**-24 in float32 is 1 (ties to even)",
        "IEEE 754: a single correctly rounded operation has one result",
        lambda: _equal(_op("add", {"a": [[1.0]], "b": [[2.0**-24]]}), [[1.0]]),
    ),
    Rule(
        "N5",
        "Ties: the lowest index wins, in argmax, top-k, expert and group choice.",
        "equal scores of 4 experts, top 2 -> experts 0 and 1",
        "llama.cpp, mlx and SGLang's fused gate do so; torch.topk is arbitrary",
        lambda: _equal(_table([[1.0, 1.0, 1.0, 1.0]], 2).ids, [[0, 1]]),
    ),
    Rule(
        "N6",
        "Audited profile: formats, accumulator and accumulation height are what the profile declares; probes with exact results must come back exact.",
        "1 + 2**-23 times 1 is itself in float32; TF32 answers 1",
        "FPRev (arXiv 2411.00442) for the height; one-term products for the formats",
        lambda: _equal(_op("matmul", {"x": [[1 + 2.0**-23]], "w": [[1.0]]}), [[1 + 2.0**-23]]),
    ),
)

RULES: dict[str, Rule] = {r.id: r for r in (*_TREE_RULES, *_BATCH_RULES, *_COMMIT_RULES, *_MODEL_RULES, *_NUMERIC_RULES)}
