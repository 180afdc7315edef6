"""The golden model against an independent second form (expanded MLA, dense MoE, complex RoPE, float64) and against itself.

The second form shares no code with spec/model.py: keys and values are expanded per head, all experts run on all rows, and
positions turn complex numbers. Everything else here is bit equality: tree = sequence, chunks = whole, decode = prefill.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from spec import loops, record, taps
from spec.config import Config, Yarn, preset
from spec.drafters import NoisyTargetDrafter
from spec.engine import EngineError, Limits, Rows, Session
from spec.formats import ROUNDED
from spec.model import GoldenModel, GoldenSession, RowsError
from spec.weights import EXPERT_STACKS, WeightError, philox, random_weights

# float32 engines of six codebases stay within 3e-7 .. 1e-6 of max|logit| of a float64 evaluation; every mistake of the list of
# known ones moves logits of order 4 by 2 and more, the smallest (latent eps 1e-5 for 1e-6) by 9e-5
FLOAT32_NOISE = 5e-6

CONFIGS: dict[str, Config] = {
    "tiny": preset("tiny"),
    "small": preset("small"),
    "tiny-softmax": preset("tiny-softmax"),
    "all dense": preset("tiny", first_dense=2, experts=0, top_k=0, expert_dim=0),
    "no shared expert": preset("small", shared_experts=0, layers=2),
    "half layout, other latent eps": preset("tiny", rope_layout="half", rms_eps=1e-2, latent_eps=1e-6),
    "no renormalisation": preset("tiny", norm_top_k=False, first_dense=0, top_k=5),
    "one head, one expert": preset("tiny", heads=1, experts=1, top_k=1, denominator_eps=0.0),
    "tied, no query compression": preset("small", tied=True, q_rank=0),
    "window": preset("tiny", window=7),
    "biases": preset("tiny", attention_bias=True),
    "biases, no query compression": preset("tiny", attention_bias=True, q_rank=0),
    "carried tables": preset("tiny", rope_table_len=128),
    "clamped sum": preset("tiny", denominator_clamp=1.5),
    "dropped groups count as 0": preset("tiny", groups=4, top_groups=2, group_fill="zero", top_k=3, first_dense=0),
    "deepseek-v3-tiny": preset("deepseek-v3-tiny"),
    "kimi-k2.5-tiny": preset("kimi-k2.5-tiny"),
}
every_config = pytest.mark.parametrize("name", CONFIGS)
_models: dict[str, GoldenModel] = {}


def model_of(name: str) -> GoldenModel:
    if name not in _models:
        _models[name] = GoldenModel(CONFIGS[name], random_weights(CONFIGS[name], 11))
    return _models[name]


def tokens_of(config: Config, count: int, *key: object) -> np.ndarray:
    return philox("test model", *key).integers(0, config.vocab, count).astype(np.int32)


# ---- the second form --------------------------------------------------------------------------------------------
def rms(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * gain


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def turn(x: np.ndarray, turns: np.ndarray, half_layout: bool) -> np.ndarray:
    """Pairs as complex numbers; always interleaved on the way out, which no dot product notices if q and k do the same."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:] if half_layout else x[..., 0::2] + 1j * x[..., 1::2]
    z = z * turns
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def plain_frequencies(c: Config) -> tuple[np.ndarray, float]:
    """Float64 by the formulas of the paper, and the factor of cos and sin."""
    frequency = c.rope_theta ** (-np.arange(0, c.rope_dim, 2) / c.rope_dim)
    if c.yarn is None:
        return frequency, 1.0
    pair = [
        c.rope_dim * np.log(c.yarn.original_len / (2 * np.pi * b)) / (2 * np.log(c.rope_theta))
        for b in (c.yarn.beta_fast, c.yarn.beta_slow)
    ]
    low, high = max(np.floor(pair[0]), 0), min(np.ceil(pair[1]), c.rope_dim - 1)
    ramp = np.clip((np.arange(c.rope_dim // 2) - low) / (high - low), 0, 1)
    m = [0.1 * a * np.log(c.yarn.factor) + 1 for a in (c.yarn.mscale, c.yarn.mscale_all_dim)]
    return frequency * (1 - ramp) + frequency / c.yarn.factor * ramp, m[0] / m[1]


def expanded_logits(c: Config, weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """One causal forward in float64: MLA with keys and values expanded per head, every expert on every row."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    frequency, factor = plain_frequencies(c)
    turns = factor * np.exp(1j * np.arange(len(tokens))[:, None] * frequency)  # (T,D/2)
    if c.rope_table_len:
        turns = (w["rope_cos"] + 1j * w["rope_sin"])[: len(tokens)]
    seen = np.tri(len(tokens), dtype=bool) & ~np.tri(len(tokens), k=-(c.window or len(tokens)), dtype=bool)
    bias = {name: w.get(name, 0.0) for p in range(c.layers) for name in (f"{p}.q_a_bias", f"{p}.q_bias", f"{p}.kv_a_bias", f"{p}.o_bias")}
    latent_eps = c.rms_eps if c.latent_eps is None else c.latent_eps
    h = w["embed"][tokens]
    for layer in range(c.layers):
        p = f"{layer}."
        x = rms(h, w[p + "attn_norm"], c.rms_eps)
        if c.q_rank:
            q = rms(x @ w[p + "q_a"] + bias[p + "q_a_bias"], w[p + "q_a_norm"], latent_eps) @ w[p + "q_b"]
        else:
            q = x @ w[p + "q"] + bias[p + "q_bias"]
        kv = x @ w[p + "kv_a"] + bias[p + "kv_a_bias"]
        latent = rms(kv[:, : c.kv_rank], w[p + "kv_a_norm"], latent_eps)
        k_rope = turn(kv[:, c.kv_rank :], turns, c.rope_layout == "half")
        heads = []
        for head, q_head in enumerate(np.split(q, c.heads, axis=1)):
            q_head = np.concatenate([q_head[:, : c.nope_dim], turn(q_head[:, c.nope_dim :], turns, c.rope_layout == "half")], axis=1)
            k_head = np.concatenate([latent @ w[p + "w_kc"][head].T, k_rope], axis=1)
            scores = np.where(seen, q_head @ k_head.T * c.softmax_scale, -np.inf)
            power = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(power / power.sum(axis=1, keepdims=True) @ (latent @ w[p + "w_vc"][head]))
        h = h + np.concatenate(heads, axis=1) @ w[p + "o"] + bias[p + "o_bias"]
        x = rms(h, w[p + "ffn_norm"], c.rms_eps)
        if layer < c.first_dense:
            h = h + (silu(x @ w[p + "gate"]) * (x @ w[p + "up"])) @ w[p + "down"]
        else:
            h = h + dense_moe(c, {name[len(p) :]: value for name, value in w.items() if name.startswith(p)}, x)
    return rms(h, w["norm"], c.rms_eps) @ (w["embed"].T if c.tied else w["head"])


def dense_moe(c: Config, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    logits = x @ w["router"]
    power = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = 1 / (1 + np.exp(-logits)) if c.scoring == "sigmoid" else power / power.sum(axis=1, keepdims=True)
    share = np.zeros_like(scores)  # (T,E), 0 for experts that were not chosen
    for row, choice in enumerate(scores + w.get("router_bias", np.zeros(c.experts))):
        size = c.experts // c.groups
        groups = [list(range(g * size, (g + 1) * size)) for g in range(c.groups)]
        best = [sorted((choice[e] for e in group), reverse=True) for group in groups]
        worth = [b[0] if c.group_score == "max" else sum(b[:2]) for b in best]
        kept = sorted(range(c.groups), key=lambda g, worth=worth: (-worth[g], g))[: c.top_groups]
        counts = {e: choice[e] if e // size in kept else 0.0 for e in range(c.experts) if c.group_fill == "zero" or e // size in kept}
        ids = sorted(counts, key=lambda e, counts=counts: (-counts[e], e))[: c.top_k]
        total = max(scores[row, ids].sum() + c.denominator_eps, c.denominator_clamp) if c.norm_top_k else 1.0
        share[row, ids] = scores[row, ids] / total * c.routed_scale
    y = np.zeros_like(x)
    for e in range(c.experts):
        y += share[:, e : e + 1] * ((silu(x @ w["expert_gate"][e]) * (x @ w["expert_up"][e])) @ w["expert_down"][e])
    return y + (silu(x @ w["shared_gate"]) * (x @ w["shared_up"])) @ w["shared_down"] if c.shared_experts else y


@every_config
def test_the_model_is_the_expanded_form(name: str) -> None:
    config, tokens = CONFIGS[name], tokens_of(CONFIGS[name], 40, name)
    expected = expanded_logits(config, random_weights(config, 11), tokens)
    actual = model_of(name).sequence_logits(tokens)
    assert np.abs(actual - expected).max() <= FLOAT32_NOISE * np.abs(expected).max()


def test_positions_far_out_agree_as_well() -> None:
    """Absolute positions enter through differences only: the same prompt at position 100000 has the same logits, up to rounding."""
    config = CONFIGS["tiny"]
    tokens, index = tokens_of(config, 12, "far"), np.arange(12, dtype=np.int32)
    far = forward(model_of("tiny").open(), Rows(np.zeros_like(index), tokens, 100_000 + index, index - 1))
    near = model_of("tiny").sequence_logits(tokens)
    assert np.abs(far - near).max() <= FLOAT32_NOISE * np.abs(near).max()
    assert not np.array_equal(far, near)


def test_half_layout_is_a_permutation_of_the_weights_bit_for_bit() -> None:
    """Evens, then odds, in the rope part of each query head and of kv_a: the same real numbers, hence the same bits."""
    config = CONFIGS["small"]
    weights = random_weights(config, 11)
    split = np.concatenate([np.arange(0, config.rope_dim, 2), np.arange(1, config.rope_dim, 2)])
    for layer in range(config.layers):
        q_b = weights[f"{layer}.q_b"].reshape(config.q_rank, config.heads, -1).copy()
        q_b[..., config.nope_dim :] = q_b[..., config.nope_dim + split]
        weights[f"{layer}.q_b"] = q_b.reshape(config.q_rank, -1)
        kv_a = weights[f"{layer}.kv_a"].copy()
        kv_a[:, config.kv_rank :] = kv_a[:, config.kv_rank + split]
        weights[f"{layer}.kv_a"] = kv_a
    half = GoldenModel(dataclasses.replace(config, rope_layout="half"), weights)
    tokens = tokens_of(config, 20, "half")
    assert np.array_equal(half.sequence_logits(tokens), model_of("small").sequence_logits(tokens))


# ---- bit equality -----------------------------------------------------------------------------------------------
def no_sink(name: str, layer: int, array: np.ndarray) -> None:
    """Nobody listens."""


def forward(session: Session, rows: Rows) -> np.ndarray:
    return session.forward(rows, np.ones(len(rows), np.bool_), frozenset(), no_sink)


def chain(sequence: int, tokens: np.ndarray, start: int) -> Rows:
    index = np.arange(len(tokens), dtype=np.int32)
    return Rows(np.full_like(index, sequence), tokens, start + index, index - 1)


def feed(session: GoldenSession, sequence: int, tokens: np.ndarray, chunks: list[int]) -> np.ndarray:
    """Logits of all rows, given in chunks of these sizes."""
    out, start = [], 0
    for size in chunks:
        out.append(forward(session, chain(sequence, tokens[start : start + size], start)))
        session.commit(sequence, np.arange(size))
        start += size
    assert start == len(tokens)
    return np.concatenate(out)


@every_config
def test_chunks_and_single_steps_are_the_whole_prefill(name: str) -> None:
    config, model = CONFIGS[name], model_of(name)
    tokens = tokens_of(config, 19, name, "chunks")
    whole, steps, chunks = model.open(), model.open(), model.open()
    expected = feed(whole, 3, tokens, [19])
    assert np.array_equal(feed(steps, 3, tokens, [1] * 19), expected)
    assert np.array_equal(feed(chunks, 3, tokens, [7, 1, 8, 3]), expected)
    assert np.array_equal(model.sequence_logits(tokens), expected)
    for layer in range(config.layers):
        rows = whole.cache_rows(3, layer)
        assert rows.shape == (19, config.kv_rank + config.rope_dim)
        assert np.array_equal(steps.cache_rows(3, layer), rows)
        assert np.array_equal(chunks.cache_rows(3, layer), rows)


def test_sequence_logits_does_not_depend_on_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(CONFIGS["tiny"], 150, "long")
    expected = model_of("tiny").sequence_logits(tokens)
    monkeypatch.setattr("spec.model.CHUNK", 37)
    assert np.array_equal(model_of("tiny").sequence_logits(tokens.tolist()), expected)


def random_trees(config: Config, seed: int) -> tuple[list[np.ndarray], Rows]:
    """Prefixes of unequal length (one empty) and one batch with a random forest on each, the sequences interleaved row by row."""
    draw = philox("trees", seed)
    prefixes = [tokens_of(config, int(n), "prefix", seed, n) for n in (draw.integers(1, 12), 0, draw.integers(1, 30))]
    sequence = draw.integers(0, 3, 18)
    parent = np.full(18, -1)
    position = np.zeros(18, int)
    for i, s in enumerate(sequence):
        earlier = np.flatnonzero(sequence[:i] == s)
        if len(earlier) and draw.random() < 0.85:
            parent[i] = draw.choice(earlier)
        position[i] = len(prefixes[s]) if parent[i] < 0 else position[parent[i]] + 1
    columns = (sequence, draw.integers(0, config.vocab, 18), position, parent)
    return prefixes, Rows(*(column.astype(np.int32) for column in columns))


def path_to(rows: Rows, row: int) -> list[int]:
    path = [row]
    while rows.parent[path[0]] >= 0:
        path.insert(0, int(rows.parent[path[0]]))
    return path


@pytest.mark.parametrize("seed", range(3))
@every_config
def test_every_tree_row_is_the_last_row_of_its_chain(name: str, seed: int) -> None:
    """V2 for several sequences at once; then the deepest path is committed, and the cache is that of the chain (K1, K2, K7)."""
    config, model = CONFIGS[name], model_of(name)
    prefixes, rows = random_trees(config, seed)
    session = model.open()
    for s, prefix in enumerate(prefixes):
        if len(prefix):
            feed(session, s, prefix, [len(prefix)])
    logits = forward(session, rows)
    for row in range(len(rows)):
        stream = np.concatenate([prefixes[rows.sequence[row]], rows.token[path_to(rows, row)]])
        assert np.array_equal(logits[row], model.sequence_logits(stream)[-1]), row
    for s, prefix in enumerate(prefixes):
        own = np.flatnonzero(rows.sequence == s)
        if not len(own):
            continue
        deepest = path_to(rows, int(own[np.argmax(rows.position[own])]))
        session.commit(s, np.searchsorted(own, deepest))
        alone = model.open()
        stream = np.concatenate([prefix, rows.token[deepest]])
        feed(alone, 0, stream, [len(stream)])
        for layer in range(config.layers):
            assert np.array_equal(session.cache_rows(s, layer), alone.cache_rows(0, layer))
        after = np.array([s], np.int32), stream[:1], np.array([len(stream)], np.int32), np.array([-1], np.int32)
        assert np.array_equal(forward(session, Rows(*after))[0], model.sequence_logits(np.append(stream, stream[0]))[-1])


def test_rows_that_want_no_logits_change_nothing() -> None:
    model = model_of("tiny")
    tokens = tokens_of(model.config, 9, "want")
    want = np.array([0, 1, 0, 0, 1, 0, 0, 0, 1], np.bool_)
    some = model.open().forward(chain(0, tokens, 0), want, frozenset(), no_sink)
    assert np.array_equal(some, model.sequence_logits(tokens)[want])
    none = model.open().forward(chain(0, tokens, 0), np.zeros(9, np.bool_), frozenset(taps.all_tap_names()), no_sink)
    assert none.shape == (0, model.config.vocab)


# ---- taps -------------------------------------------------------------------------------------------------------
@every_config
def test_taps_come_in_data_order_with_their_shapes(name: str) -> None:
    config, model = CONFIGS[name], model_of(name)
    prefixes, rows = random_trees(config, 1)
    session = model.open()
    for s, prefix in enumerate(prefixes):
        if len(prefix):
            feed(session, s, prefix, [len(prefix)])
    want = np.arange(len(rows)) % 3 != 0
    seen: list[tuple[int, str, np.ndarray]] = []
    logits = session.forward(rows, want, frozenset(taps.all_tap_names()), lambda tap, layer, array: seen.append((layer, tap, array)))
    expected = [(layer, tap) for layer in range(-1, config.layers + 1) for tap in taps.taps_of_layer(config, layer)]
    assert [(layer, tap) for layer, tap, _ in seen] == [(layer, tap.name) for layer, tap in expected]
    S = max(len(prefix) + int((rows.sequence == s).sum()) for s, prefix in enumerate(prefixes))
    dims = {key: value for key, value in dataclasses.asdict(config).items() if isinstance(value, int)} | {"S": S}
    for (_, tap), (_, _, array) in zip(expected, seen, strict=True):
        wanted = dims | {"T": int(want.sum()) if tap.name in ("logits", "argmax") else len(rows)}
        assert array.shape == tuple(record.size(word, wanted) for word in tap.dims), tap
        assert array.dtype == tap.dtype, tap
    assert np.array_equal(seen[-2][2], logits)


def test_attention_taps_show_exactly_the_visible_keys() -> None:
    """Every visible key has a positive weight at this scale, every other column is exactly 0."""
    model = model_of("tiny")
    prefixes, rows = random_trees(model.config, 2)
    session = model.open()
    for s, prefix in enumerate(prefixes):
        if len(prefix):
            feed(session, s, prefix, [len(prefix)])
    probs: list[np.ndarray] = []
    session.forward(rows, np.zeros(len(rows), np.bool_), frozenset({"probs"}), lambda tap, layer, array: probs.append(array))
    assert len(probs) == model.config.layers
    visible = np.zeros((len(rows), probs[0].shape[-1]), np.bool_)
    for row, s in enumerate(rows.sequence):
        visible[row, : len(prefixes[s])] = True
        own = np.flatnonzero(rows.sequence == s)
        visible[row, len(prefixes[s]) + np.searchsorted(own, path_to(rows, row))] = True
    for layer in probs:
        assert np.array_equal(layer > 0, np.broadcast_to(visible[:, None], layer.shape))


# ---- sessions ---------------------------------------------------------------------------------------------------
def test_a_session_is_a_session() -> None:
    assert isinstance(model_of("tiny").open(), Session)


def test_a_new_batch_drops_pending_rows_and_an_empty_path_keeps_none() -> None:
    model = model_of("tiny")
    tokens = tokens_of(model.config, 8, "pending")
    session = model.open()
    feed(session, 0, tokens[:5], [5])
    forward(session, chain(0, tokens[5:], 5))
    assert np.array_equal(forward(session, chain(0, tokens[5:], 5)), model.sequence_logits(tokens)[5:])
    session.commit(0, np.zeros(0, np.int32))
    assert session.cache_rows(0, 0).shape[0] == 5
    with pytest.raises(RowsError, match="must ascend within its 0 pending rows"):
        session.commit(0, np.zeros(1, np.int32))


def test_a_fork_goes_its_own_way() -> None:
    model = model_of("tiny")
    a, b = tokens_of(model.config, 70, "a"), tokens_of(model.config, 3, "b")
    session = model.open()
    feed(session, 0, a[:66], [66])
    session.fork(0, 4)
    feed_from = forward(session, chain(4, b, 66))
    session.commit(4, np.arange(3))
    assert np.array_equal(forward(session, chain(0, a[66:], 66)), model.sequence_logits(a)[66:])
    assert np.array_equal(feed_from, model.sequence_logits(np.concatenate([a[:66], b]))[66:])
    session.evict(0)
    assert session.cache_rows(4, 1).shape[0] == 69
    with pytest.raises(RowsError, match="there is no sequence 0"):
        session.cache_rows(0, 0)
    session.close()
    with pytest.raises(RowsError, match="there is no sequence 4"):
        session.commit(4, np.zeros(0, np.int32))


def test_cache_rows_are_a_copy() -> None:
    model = model_of("tiny")
    tokens = tokens_of(model.config, 6, "copy")
    session = model.open()
    feed(session, 0, tokens[:5], [5])
    session.cache_rows(0, 0)[:] = np.nan
    assert np.isfinite(session.cache_rows(0, 0)).all()
    assert np.array_equal(forward(session, chain(0, tokens[5:], 5))[0], model.sequence_logits(tokens)[5])


def rows_with(**changes: Any) -> Rows:
    columns = {"sequence": [0, 1, 0], "token": [1, 2, 3], "position": [0, 0, 1], "parent": [-1, -1, 0]} | changes
    return Rows(**{key: np.array(value, np.int32) for key, value in columns.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent": [-1, -1, 1]}, "row 2 of sequence 0 has a parent in sequence 1"),
        ({"parent": [-1, -1, 2]}, "row 2 has parent 2, but must be -1 or an earlier row"),
        ({"parent": [-2, -1, 0]}, "row 0 has parent -2"),
        ({"token": [1, 2, 96]}, "row 2 has token 96, but must be between 0 and 95"),
        ({"token": [-1, 2, 3]}, "row 0 has token -1"),
        ({"position": [0, -1, 1]}, "row 1 has position -1"),
        ({"position": [0, 0, 1 << 26]}, "row 2 has position 67108864"),
        ({"sequence": [0, 1]}, "sequence has shape \\[2\\], but the batch has 3 rows"),
    ],
)
def test_bad_rows_are_refused_before_anything_changes(changes: dict[str, list[int]], message: str) -> None:
    session = model_of("tiny").open()
    with pytest.raises(RowsError, match=message):
        forward(session, rows_with(**changes))
    with pytest.raises(EngineError, match="there is no sequence 0"):
        session.cache_rows(0, 0)


def test_bad_paths_forks_and_layers_are_refused() -> None:
    session = model_of("tiny").open()
    forward(session, rows_with(sequence=[0, 0, 0], parent=[-1, 0, 0], position=[0, 1, 1]))
    for path, message in (
        ([0, 0], "must ascend"),
        ([1, 0], "row 1 has parent 0, not -1"),
        ([0, 1, 2], "row 2 has parent 0, not 1"),
        ([0, 3], "must ascend"),
    ):
        with pytest.raises(RowsError, match=message):
            session.commit(0, np.array(path))
    session.commit(0, np.array([0, 2]))
    with pytest.raises(RowsError, match="sequence 0 exists"):
        session.fork(0, 0)
    with pytest.raises(RowsError, match="there is no sequence 9"):
        session.fork(9, 1)
    with pytest.raises(RowsError, match="layer is 2, but must be between 0 and 1"):
        session.cache_rows(0, 2)


def test_an_empty_batch_has_no_logits() -> None:
    empty = np.zeros(0, np.int32)
    assert forward(model_of("tiny").open(), Rows(empty, empty, empty, empty)).shape == (0, 96)


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_generate_is_lossless_and_leaves_the_session_alone(name: str) -> None:
    """L1: trees emit the autoregressive stream, whose tokens are the argmax of one causal forward over the result."""
    config, model = CONFIGS[name], model_of(name)
    prompts = [tokens_of(config, n, "prompt", n) for n in (3, 8)]
    session = model.open()
    feed(session, 0, prompts[0], [3])
    plain = session.generate(prompts, None, 0, Limits(10))
    golden = tuple(tuple(prompt.tolist()) + generation.tokens for prompt, generation in zip(prompts, plain, strict=True))
    drafter = NoisyTargetDrafter(
        seed=1, golden=golden, prompt_lens=tuple(map(len, prompts)), vocab=config.vocab, block_len=4, acceptance=0.7
    )
    drafted = session.generate(prompts, drafter, 7, Limits(10))
    assert [generation.tokens for generation in drafted] == [generation.tokens for generation in plain]
    assert any(len(r.path) > 1 for generation in drafted for r in generation.rounds)
    for stream, prompt in zip(golden, prompts, strict=True):
        assert stream[len(prompt) :] == tuple(model.sequence_logits(stream).argmax(axis=1)[len(prompt) - 1 : -1].tolist())
    assert session.cache_rows(0, 0).shape[0] == 3
    recordings = loops.greedy(model.open(), prompts, Limits(10))
    assert [r.tokens for r in recordings] == [g.tokens for g in plain]


def test_weights_may_come_from_a_provider_and_are_checked() -> None:
    config = CONFIGS["tiny"]
    weights = random_weights(config, 11)
    tokens = tokens_of(config, 5, "provider")
    assert np.array_equal(GoldenModel(config, weights.__getitem__).sequence_logits(tokens), model_of("tiny").sequence_logits(tokens))
    weights["1.o"] = weights["1.o"].T
    with pytest.raises(WeightError, match=r"1\.o"):
        GoldenModel(config, weights)


def test_yarn_factor_one_is_no_yarn() -> None:
    weights = random_weights(preset("tiny"), 11)
    tokens = tokens_of(preset("tiny"), 8, "yarn")
    without = GoldenModel(preset("tiny", yarn=None), weights).sequence_logits(tokens)
    assert np.array_equal(GoldenModel(preset("tiny", yarn=Yarn(factor=1.0, original_len=32)), weights).sequence_logits(tokens), without)
    assert not np.array_equal(model_of("tiny").sequence_logits(tokens), without)


# ---- switches and sources of weights --------------------------------------------------------------------------------


def test_a_dropped_group_that_counts_as_0_beats_negative_choices() -> None:
    """Or the switch would say nothing: with a bias of -2 every choice is negative, and the experts differ."""
    config = CONFIGS["dropped groups count as 0"]
    weights = random_weights(config, 11)
    weights |= {f"{layer}.router_bias": weights[f"{layer}.router_bias"] - np.float32(2) for layer in range(config.layers)}
    tokens = tokens_of(config, 9, "fill")
    filled = GoldenModel(config, weights).sequence_logits(tokens)
    dropped = GoldenModel(dataclasses.replace(config, group_fill="-inf"), weights).sequence_logits(tokens)
    assert np.abs(filled - expanded_logits(config, weights, tokens)).max() <= FLOAT32_NOISE * np.abs(filled).max()
    assert np.abs(filled - dropped).max() > 0.1


@pytest.mark.parametrize("cache_format", ["bfloat16", "float16"])
def test_a_cache_format_rounds_rows_once_on_entry(cache_format: str) -> None:
    """In the first layer nothing was rounded before: its rows are those of the float32 cache, rounded."""
    config, tokens, index = preset("tiny", cache_format=cache_format), tokens_of(CONFIGS["tiny"], 9, "cache"), np.arange(9, dtype=np.int32)
    rows = Rows(np.zeros_like(index), tokens, index, index - 1)
    cached = []
    for model in (model_of("tiny"), GoldenModel(config, random_weights(config, 11))):
        session = model.open()
        forward(session, rows)
        session.commit(0, index)
        cached.append([session.cache_rows(0, layer) for layer in range(config.layers)])
    plain, rounded = cached
    assert np.array_equal(rounded[0], ROUNDED[cache_format](plain[0])) and not np.array_equal(rounded[0], plain[0])
    assert all(np.array_equal(ROUNDED[cache_format](layer), layer) for layer in rounded)


@pytest.mark.parametrize("name", ["tiny", "biases", "tiny-softmax", "small"])
def test_fetched_weights_give_the_bits_of_kept_ones(name: str) -> None:
    config, tokens = CONFIGS[name], tokens_of(CONFIGS[name], 9, "fetched")
    weights, asked = random_weights(config, 11), []

    def provider(tensor: str) -> np.ndarray:
        asked.append(tensor)
        stack, _, number = tensor.partition("/")
        return weights[stack][int(number)] if number else weights[stack]

    fetched = GoldenModel(config, provider, keep=False).sequence_logits(tokens)
    assert np.array_equal(fetched, model_of(name).sequence_logits(tokens))
    assert any("/" in tensor for tensor in asked) and not any(tensor.rpartition(".")[2] in EXPERT_STACKS for tensor in asked)


def test_a_position_behind_carried_tables_is_refused() -> None:
    config = preset("tiny", rope_table_len=4)
    with pytest.raises(RowsError, match="row 0 has position 4, but must be between 0 and 3"):
        forward(GoldenModel(config, random_weights(config, 1)).open(), chain(0, np.array([1], np.int32), 4))
