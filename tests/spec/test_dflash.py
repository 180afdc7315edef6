"""The DFlash drafter against a form without caches, grouped heads or prepared matrices; its context is exactly what was committed."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spec.config import ConfigError, preset
from spec.dflash import (
    TAPS,
    Context,
    ContextError,
    DFlash,
    DFlashConfig,
    DFlashDrafter,
    ReplayedDFlashDrafter,
    random_weights,
    target_features,
    tiny_dflash,
    weight_shapes,
)
from spec.engine import Drafter, FeatureDrafter, Float, Int, Limits, Session
from spec.loops import MissingFeatures, ddtree, greedy
from spec.model import GoldenModel
from spec.sampling import Sampling
from spec.schemes import Sampler
from spec.weights import WeightError
from tests.spec.test_loops import drafter_of, model_of, prompts_of
from tests.spec.toy_session import ToySession

SEED = 5


@functools.cache
def dflash(name: str = "tiny", **overrides: Any) -> DFlash:
    return tiny_dflash(model_of(name, False), SEED, **overrides)


def bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(np.uint32)


def drafted(model: DFlash, history: Int, tap: Callable[[str, int, NDArray[Any]], None] = lambda name, layer, array: None) -> Float:
    context = Context(model.config)
    model.extend(context, target_features(model.target, model.config.target_layers, history[:-1]), tap)
    return model.draft(context, int(history[-1]), tap)


# The second form: one list of tokens, context and block side by side, everything recomputed; one head and one element at a time.


def dot(a: Float, b: Float) -> np.float32:
    return np.float32(math.fsum((a.astype(np.float64) * b.astype(np.float64)).tolist()))


def times(x: Float, w: Float) -> Float:
    return np.array([[dot(row, column) for column in w.T] for row in x], np.float32).reshape(len(x), w.shape[1])


def norm(row: Float, gain: Float, eps: float) -> Float:
    wide = row.astype(np.float64)
    return (wide * gain / math.sqrt(math.fsum((wide * wide).tolist()) / len(row) + float(np.float32(eps)))).astype(np.float32)


def turned(row: Float, position: int, theta: float) -> Float:
    half = len(row) // 2
    out = np.empty_like(row)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(row))
        c, s = float(np.float32(math.cos(angle))), float(np.float32(math.sin(angle)))
        a, b = float(row[i]), float(row[i + half])
        out[i], out[i + half] = a * c - b * s, b * c + a * s
    return out


def plain_draft(config: DFlashConfig, weights: dict[str, Float], embed: Float, head: Float, features: Float, root: int) -> Float:
    c = config
    P, S = len(features), c.block_size
    f = np.array([norm(row, weights["hidden_norm"], c.rms_eps) for row in times(features, weights["fc"])]).reshape(P, embed.shape[1])
    x = embed[[root] + [c.mask_token] * (S - 1)]
    for layer in range(c.layers):

        def w(name: str, layer: int = layer) -> Float:
            return weights[f"{layer}.{name}"]

        h = np.array([norm(row, w("attn_norm"), c.rms_eps) for row in x])
        source = np.concatenate([f, h])  # what keys and values are made of, at positions 0..P+S-1
        k, v, q = times(source, w("k")), times(source, w("v")), times(h, w("q"))
        mixed = np.zeros((S, c.heads * c.head_dim), np.float32)
        for a in range(c.heads):
            g = a // (c.heads // c.kv_heads)
            keys = [turned(norm(row[g * c.head_dim :][: c.head_dim], w("k_norm"), c.rms_eps), p, c.rope_theta) for p, row in enumerate(k)]
            values = v[:, g * c.head_dim :][:, : c.head_dim]
            for i in range(S):
                query = turned(norm(q[i, a * c.head_dim :][: c.head_dim], w("q_norm"), c.rms_eps), P + i, c.rope_theta)
                scale = float(np.float32(c.head_dim**-0.5))
                scores = [
                    np.float32(math.fsum((query.astype(np.float64) * key.astype(np.float64)).tolist()) * scale)
                    if c.window is None or P + i - p < c.window
                    else -np.inf
                    for p, key in enumerate(keys)
                ]
                powers = [math.exp(float(s) - float(max(scores))) for s in scores]
                probs = np.array([power / math.fsum(powers) for power in powers]).astype(np.float32)
                mixed[i, a * c.head_dim :][: c.head_dim] = [dot(probs, column) for column in values.T]
        x = (x + times(mixed, w("o"))).astype(np.float32)
        h = np.array([norm(row, w("ffn_norm"), c.rms_eps) for row in x])
        gate, up = times(h, w("gate")).astype(np.float64), times(h, w("up")).astype(np.float64)
        x = x + times((gate * up / (1 + np.exp(-gate))).astype(np.float32), w("down"))
    return times(np.array([norm(row, weights["norm"], c.rms_eps) for row in x[1:]]), head)


@pytest.mark.parametrize(
    ("name", "overrides"), [("tiny", {}), ("tiny", {"window": 6}), ("tiny-softmax", {"kv_heads": 6, "block_size": 3, "layers": 1})]
)
def test_drafts_are_bit_equal_to_the_form_without_caches(name: str, overrides: dict[str, Any]) -> None:
    model = dflash(name, **overrides)
    weights = random_weights(model.config, SEED)
    head = model.target.embed.T if model.target.config.tied else model.target.weights["head"]
    for length in (1, 2, 7):
        (history,) = prompts_of(length, (length,), model.target.config.vocab)
        features = target_features(model.target, model.config.target_layers, history[:-1])
        expected = plain_draft(model.config, weights, model.target.embed, head, features, int(history[-1]))
        assert np.array_equal(bits(drafted(model, history)), bits(expected))


def test_context_in_pieces_is_context_at_once() -> None:
    """D3: cached keys and values never change, whatever the micro-batches in which they came."""
    model = dflash()
    (history,) = prompts_of(2, (12,), model.target.config.vocab)
    features = target_features(model.target, model.config.target_layers, history[:-1])
    whole = drafted(model, history)
    context = Context(model.config)
    for start, stop in [(0, 1), (1, 1), (1, 5), (5, 6), (6, 11)]:
        before = [key.copy() for key in context.keys]
        model.extend(context, features[start:stop], lambda name, layer, array: None)
        assert all(np.array_equal(key[: len(old)], old) for key, old in zip(context.keys, before, strict=True))
    assert np.array_equal(bits(model.draft(context, int(history[-1]), lambda name, layer, array: None)), bits(whole))
    assert context.length == 11


def test_taps_are_those_of_the_table_in_data_order() -> None:
    model = dflash()
    c = model.config
    seen: list[tuple[str, int, NDArray[Any]]] = []
    drafted(model, np.arange(4, dtype=np.int32), lambda name, layer, array: seen.append((name, layer, array)))
    sizes = {
        "C": 3, "P": 3, "S": c.block_size, "L": c.block_size - 1, "J": c.heads // c.kv_heads, "hidden": c.target.hidden, "heads": c.heads,
        "kv_heads": c.kv_heads, "head_dim": c.head_dim, "ffn_dim": c.ffn_dim, "vocab": c.target.vocab,
    }  # fmt: skip
    by_name = {tap.name: tap for tap in TAPS}
    assert {name for name, _, _ in seen} == set(by_name)
    for name, _, array in seen:
        assert array.shape == tuple(eval(word, {}, sizes) for word in by_name[name].dims), name  # dimension words are sums and products
        assert array.dtype == np.float32
    order = [tap.name for tap in TAPS]
    block = [order.index(name) for name, layer, _ in seen if layer == 1 and not name.startswith("context")]
    assert block == sorted(block)
    assert Counter(name for name, _, _ in seen)["scores"] == c.layers


# Rules D1-D5


def test_d1_slot_0_is_the_root_and_the_others_are_masks() -> None:
    model = dflash()
    embeds: list[Float] = []
    drafted(model, np.array([1, 2, 9], np.int32), lambda name, layer, array: embeds.append(array) if name == "embed" else None)
    table = model.target.embed
    assert np.array_equal(embeds[0], table[[9] + [model.config.mask_token] * (model.config.block_size - 1)])


def test_d2_features_are_taken_after_the_named_layers_in_list_order() -> None:
    model = model_of("small", False)
    tokens = np.array([3, 1, 4, 1, 5], np.int32)
    taps: dict[tuple[str, int], Float] = {}

    def sink(name: str, layer: int, array: NDArray[Any]) -> None:
        taps[name, layer] = array.copy()

    from spec.loops import prefill_rows

    rows, want = prefill_rows([tokens])
    model.open().forward(rows, want, frozenset({"ffn_residual", "attn_norm", "final_norm"}), sink)
    features = target_features(model, (2, 0), tokens)
    assert np.array_equal(features, np.concatenate([taps["ffn_residual", 2], taps["ffn_residual", 0]], axis=1))
    assert not np.array_equal(features[:, : model.config.hidden], taps["final_norm", 3])


def test_d3_a_context_that_is_not_the_committed_tokens_is_refused() -> None:
    drafter = DFlashDrafter(dflash())
    with pytest.raises(ContextError, match="sequence 0: the context holds 0 tokens, but 2 are committed"):
        drafter.draft(0, np.array([1, 2, 3], np.int32))
    drafter.observe(0, target_features(drafter.model.target, drafter.feature_layers, np.array([1, 2], np.int32)))
    drafter.draft(0, np.array([1, 2, 3], np.int32))
    drafter.evict(0)
    with pytest.raises(ContextError, match="holds 0 tokens"):
        drafter.draft(0, np.array([1, 2, 3], np.int32))


def test_d4_positions_are_absolute() -> None:
    """The key of slot i is turned by P + i: the same unrotated key, turned by hand."""
    model = dflash()
    taps: dict[tuple[str, int], Float] = {}

    def tap(name: str, layer: int, array: NDArray[Any]) -> None:
        taps[name, layer] = array

    drafted(model, np.arange(10, dtype=np.int32), tap)
    for name, first in (("k", 9), ("context_k", 0)):
        for slot, row in enumerate(taps[f"{name}_norm", 1]):
            expected = [turned(head, first + slot, model.config.rope_theta) for head in row]
            assert np.array_equal(taps[name, 1][slot], np.array(expected))


def test_d5_the_block_is_not_causal_and_as_wide_as_the_drafters() -> None:
    """The first marginal hears of later slots: under a causal mask it would not change with the width of the block."""
    history = np.array([1, 2, 3], np.int32)
    wide, narrow = drafted(dflash(), history), drafted(dflash(block_size=3), history)
    assert wide.shape[0] == 4
    assert narrow.shape[0] == 2
    assert not np.array_equal(wide[0], narrow[0])


# In the loop


def play(drafter: Drafter, session: Session, prompts: list[Int], budget: int, limits: Limits, sampled: bool) -> Any:
    return ddtree(session, prompts, drafter, budget, limits, Sampler(Sampling(temperature=0.9, seed=3)) if sampled else None)


class SpyDrafter(DFlashDrafter):
    """Keeps what it observes."""

    def __init__(self, model: DFlash) -> None:
        super().__init__(model)
        self.seen: dict[int, list[Float]] = {}

    def observe(self, sequence: int, features: Float) -> None:
        self.seen.setdefault(sequence, []).append(features.copy())
        super().observe(sequence, features)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_features_of_committed_rows_arrive_once_in_path_order(name: str, sampled: bool) -> None:
    """K5, D3: what was observed is bit-equal to the features of one pass over the committed stream, also after rejected branches and a
    cut in mid-path; the stateless drafter, which recomputes all of it, gives the same rounds; and the tokens are the sequential ones."""
    model = dflash(name)
    vocab = model.target.config.vocab
    reached: Counter[str] = Counter()
    for seed in range(3):
        prompts = prompts_of(seed, (5, 2)[: 1 + seed % 2], vocab)
        budget = (60, 3, 90)[seed]
        drafter = SpyDrafter(model)
        one = play(drafter, model.target.open(), prompts, budget, Limits(12), sampled)
        other = play(ReplayedDFlashDrafter(model), model.target.open(), prompts, budget, Limits(12), sampled)
        for i, (recording, replayed) in enumerate(zip(one, other, strict=True)):
            assert recording.rounds == replayed.rounds
            assert recording.tokens == replayed.tokens
            stream = np.array([*prompts[i], *recording.tokens][:-1], np.int32)
            expected = target_features(model.target, model.config.target_layers, stream)
            assert np.array_equal(bits(np.concatenate(drafter.seen[i])), bits(expected))
            reached["rounds"] += len(recording.rounds)
            reached["branch"] += sum(turn.path != tuple(range(len(turn.path))) for turn in recording.rounds)
        if not sampled:
            assert [r.tokens for r in one] == [r.tokens for r in greedy(model.target.open(), prompts, Limits(12))]
    assert reached["rounds"] >= 10
    assert reached["branch"] >= 1, "the accepted path never left the first nodes: rows of the path and first rows are the same"


def test_features_of_a_cut_path_are_those_of_the_cut_stream() -> None:
    """A chain of golden tokens, cut in its middle by the limit: exactly the committed rows are observed."""
    model = dflash()
    vocab = model.target.config.vocab
    prompts = prompts_of(1, (4,), vocab)
    free = greedy(model.target.open(), prompts, Limits(12))
    golden = [[*prompts[0].tolist(), *free[0].tokens]]
    chain = drafter_of("chain", 1, golden, prompts, 0.0, vocab)

    class Both(SpyDrafter):
        def draft(self, sequence: int, history: Int) -> Float:
            super().draft(sequence, history)  # checks the context
            return chain.draft(sequence, history)

    drafter = Both(model)
    assert isinstance(drafter, FeatureDrafter)
    (recording,) = ddtree(model.target.open(), prompts, drafter, 4, Limits(8))
    assert 1 + sum(len(turn.path) for turn in recording.rounds) > 8
    assert [len(rows) for rows in drafter.seen[0]] == [4, 5, 2]


def test_a_session_without_the_tap_is_named() -> None:
    drafter = DFlashDrafter(dflash())
    with pytest.raises(MissingFeatures, match="the drafter reads ffn_residual of layer 0, but the session did not push it"):
        ddtree(ToySession(0, 24), prompts_of(0, (3,)), drafter, 4, Limits(3))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_heads": 4}, "kv_heads is 4, but must divide heads"),
        ({"head_dim": 7}, "head_dim is 7, but pairs are rotated"),
        ({"mask_token": 96}, "mask_token is 96, but must be between 0 and 95"),
        ({"target_layers": (2,)}, "target_layers is .2,., but must name layers between 0 and 1"),
        ({"target_layers": ()}, "target_layers is"),
        ({"window": 4}, "window is 4, but the block of 5 must fit"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        dflash(**change)


def test_weights_and_targets_that_do_not_fit_are_refused() -> None:
    config = dflash().config
    weights = random_weights(config, 0)
    with pytest.raises(ConfigError, match="made for another target"):
        DFlash(config, weights, model_of("small", False))
    with pytest.raises(WeightError, match="'fc' is missing"):
        DFlash(config, {name: value for name, value in weights.items() if name != "fc"}, model_of("tiny", False))
    assert {name: value.shape for name, value in weights.items()} == weight_shapes(config)


def test_a_block_of_one_slot_drafts_nothing() -> None:
    """S = 1: plain decoding."""
    model = dflash(block_size=1)
    recording = play(DFlashDrafter(model), model.target.open(), [np.array([1, 2], np.int32)], 4, Limits(3), False)[0]
    assert [turn.tokens for turn in recording.rounds] == [(token,) for token in recording.tokens[:-1]]
    assert isinstance(model.target, GoldenModel)
    assert preset("tiny") == model.target.config
