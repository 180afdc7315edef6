"""Certified bounds: honest float32 code stays inside, worst cases come close to them, what lies outside is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles.ball import Ball, arithmetic, dot, height_block
from oracles.compare import Near, shares
from oracles.judge import judge_op
from oracles.judgement import Verdict
from oracles.ops import BOUNDS, matmul, o_latent, softmax
from oracles.ops.route import Rule
from spec.engine import PROFILES, Profile
from spec.script import OpCall

F = np.float32
Array = NDArray[Any]
PROFILE = Profile()
A = arithmetic(PROFILE)


def normal(seed: int, *shape: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(F)


# ---- summation ----------------------------------------------------------------------------------------------------
def in_order(products: Array) -> Array:
    total = np.zeros(products.shape[:-1], F)
    for term in range(products.shape[-1]):
        total = total + products[..., term]
    return total


def pairwise(products: Array) -> Array:
    while products.shape[-1] > 1:
        if products.shape[-1] % 2:
            products = np.concatenate([products, np.zeros((*products.shape[:-1], 1), F)], -1)
        products = products[..., 0::2] + products[..., 1::2]
    return products[..., 0]


def split(products: Array) -> Array:
    return in_order(np.stack([in_order(part) for part in np.array_split(products, 3, -1)], -1))


ORDERS: dict[str, Callable[[Array], Array]] = {
    "in order": in_order,
    "reversed": lambda p: in_order(p[..., ::-1]),
    "pairwise": pairwise,
    "split-K": split,
    "smallest first": lambda p: in_order(np.take_along_axis(p, np.argsort(np.abs(p), -1), -1)),
    "largest first": lambda p: in_order(np.take_along_axis(p, np.argsort(-np.abs(p), -1), -1)),
}


def dot_with(order: Callable[[Array], Array], x: Array, w: Array) -> Array:
    return order(x[..., :, None, :] * np.swapaxes(w, -1, -2)[..., None, :, :])


def widest(found: Array, ball: Ball) -> float:
    return float(shares(found, Near(ball)).max())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", [1e-18, 1e-4, 1.0, 1e4, 1e15])
def test_a_dot_is_inside_in_any_order_and_at_any_scale(order: str, scale: float) -> None:
    x, w = normal(1, 5, 63, scale=scale), normal(2, 63, 7)
    assert widest(dot_with(ORDERS[order], x, w), matmul.bound(Ball(x), Ball(w), A)) <= 1


@pytest.mark.parametrize("order", ORDERS)
def test_a_dot_that_cancels_is_inside(order: str) -> None:
    x, w = normal(3, 4, 40), normal(4, 40, 6)
    x[:, 1::2], w[1::2] = x[:, ::2], -w[::2]
    w[0] += F(2.0**-14)
    assert widest(dot_with(ORDERS[order], x, w), matmul.bound(Ball(x), Ball(w), A)) <= 1


@pytest.mark.parametrize(("terms", "least"), [(16, 0.93), (64, 0.98), (1024, 0.998)])
def test_the_bound_of_a_dot_cannot_be_tightened(terms: int, least: float) -> None:
    """(1, u, u, ..) summed in order loses every u: the witness of NUMERICS 0."""
    x = np.full((1, terms), 2.0**-24, F)
    x[0, 0] = 1
    w = np.ones((terms, 1), F)
    share = widest(dot_with(in_order, x, w), matmul.bound(Ball(x), Ball(w), A))
    assert least < share <= 1


def test_fused_multiply_add_is_inside() -> None:
    x, w = normal(5, 4, 50), normal(6, 50, 5)
    total = np.zeros((4, 5), F)
    for k in range(50):  # float64 holds the product exactly, so that this rounds once, as an FMA does
        total = (total.astype(np.float64) + x[:, k : k + 1].astype(np.float64) * w[k]).astype(F)
    assert widest(total, matmul.bound(Ball(x), Ball(w), A)) <= 1


def test_a_declared_height_is_tighter_and_holds_for_its_order() -> None:
    x, w = normal(7, 3, 1024), normal(8, 1024, 4)
    blocked = Profile(height="blocked:32")
    products = x[:, None, :] * w.T[None]
    found = pairwise(np.stack([in_order(products[..., s : s + 32]) for s in range(0, 1024, 32)], -1))
    tight, loose = matmul.bound(Ball(x), Ball(w), arithmetic(blocked)), matmul.bound(Ball(x), Ball(w), A)
    assert tight.rad is not None and loose.rad is not None
    assert (tight.rad < loose.rad / 20).all()
    assert widest(found, tight) <= 1


@pytest.mark.parametrize("terms", [1, 2, 31, 32, 33, 1000])
def test_roundings_of_a_blocked_sum_never_exceed_those_of_any_order(terms: int) -> None:
    assert 1 <= arithmetic(Profile(height="blocked:32")).roundings(terms) <= terms


@pytest.mark.parametrize("word", ["", "blocked", "blocked:0", "tree:4", "blocked:x"])
def test_an_unknown_height_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="height is"):
        height_block(word)


def test_silent_tf32_is_outside_the_float32_profile_and_inside_its_own() -> None:
    x, w = normal(9, 6, 64), normal(10, 64, 8)

    def tf32(v: Array) -> Array:
        return ((v.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(F)

    found = tf32(x) @ tf32(w)
    assert widest(found, matmul.bound(Ball(x), Ball(w), A)) > 1
    assert widest(found, matmul.bound(Ball(x), Ball(w), arithmetic(PROFILES["tf32"]))) <= 1


def test_bfloat16_results_need_their_profile() -> None:
    x, w = normal(11, 6, 64), normal(12, 64, 8)
    bits = (x @ w).view(np.uint32)
    found = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(F)
    assert widest(found, matmul.bound(Ball(x), Ball(w), A)) > 1
    assert widest(found, matmul.bound(Ball(x), Ball(w), arithmetic(PROFILES["bf16-f32acc"]))) <= 1


def test_too_many_roundings_have_no_bound() -> None:
    with pytest.raises(ValueError, match="no bound exists"):
        arithmetic(Profile(u_accumulate=2.0**-8)).gamma(128)


def test_flush_to_zero_is_inside_only_if_it_is_declared() -> None:
    x, w = np.full((1, 3), 1e-25, F), np.full((3, 1), 1e-14, F)  # products of 1e-39 are subnormal
    flushed = np.zeros((1, 1), F)
    assert widest(flushed, matmul.bound(Ball(x), Ball(w), A)) <= 1
    assert widest(flushed, matmul.bound(Ball(x), Ball(w), arithmetic(Profile(flush_to_zero=False)))) > 1


def test_a_float64_accumulator_still_rounds_its_result_once() -> None:
    x, w = normal(13, 5, 64), normal(14, 64, 5)
    found = (x.astype(np.float64) @ w.astype(np.float64)).astype(F)
    ball = matmul.bound(Ball(x), Ball(w), arithmetic(Profile(u_accumulate=2.0**-53)))
    assert 0.5 < widest(found, ball) <= 1


def test_one_bad_input_row_leaves_the_bounds_of_others() -> None:
    x, w = normal(15, 3, 8), normal(16, 8, 2)
    clean = matmul.bound(Ball(x), Ball(w), A)
    x[1, 2] = np.nan
    ball = matmul.bound(Ball(x), Ball(w), A)
    assert clean.rad is not None and ball.rad is not None
    assert np.isnan(ball.mid[1]).all()
    assert np.allclose(ball.rad[[0, 2]], clean.rad[[0, 2]], rtol=1e-6, atol=0)  # gamma is the same; FLUSH may differ by its max


@pytest.mark.parametrize("seed", range(4))
def test_balls_hold_every_choice_of_their_inputs(seed: int) -> None:
    """INHERIT: products of perturbed inputs stay in the ball of the product."""
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((4, 9)), rng.standard_normal((9, 5))
    rx, rw = np.abs(rng.standard_normal((4, 9))) * 1e-2, np.abs(rng.standard_normal((9, 5))) * 1e-2
    ball = dot(Ball(x, rx), Ball(w, rw), 9, A)
    for _ in range(20):
        found = (x + rx * rng.choice([-1, 1], x.shape)) @ (w + rw * rng.choice([-1, 1], w.shape))
        assert widest(found, ball) <= 1


@pytest.mark.parametrize("seed", range(6))
def test_softmax_balls_hold_every_choice_of_their_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    s, r = rng.standard_normal((3, 2, 7)) * 4, np.abs(rng.standard_normal((3, 2, 7))) * 10.0 ** -rng.integers(0, 6)
    visible = rng.random((3, 1, 7)) < 0.7
    visible[:, :, 0] = True
    ball = softmax.bound(Ball(s, r), visible, A)
    for _ in range(20):
        moved = np.where(visible, s + r * rng.choice([-1, 1], s.shape), -np.inf)
        power = np.exp(moved - moved.max(-1, keepdims=True))
        assert widest(power / power.sum(-1, keepdims=True), ball) <= 1


# ---- the longest chain of rescalings -----------------------------------------------------------------------------
def chain_by_hand(row: list[float]) -> int:
    """Over every start and both directions: how often a running maximum rises, the start included."""
    best = 1
    for values in (row, row[::-1]):
        for start in range(len(values)):
            top, length = values[start], 1
            for value in values[start + 1 :]:
                if value > top:
                    top, length = value, length + 1
            best = max(best, length)
    return best


@pytest.mark.parametrize("keys", [1, 2, 5, 30, 97, 200])
def test_the_longest_chain_is_that_of_the_definition(keys: int) -> None:
    rng = np.random.default_rng(keys)
    rows = np.rint(rng.standard_normal((6, keys)) * 4)
    found = softmax.longest_chain(rows)[:, 0]
    assert found.tolist() == [chain_by_hand(row) for row in rows.tolist()]


# ---- one honest float32 form after the other ---------------------------------------------------------------------
def judged(
    op: str, inputs: dict[str, Array], params: dict[str, float], outputs: dict[str, Array], profile: Profile = PROFILE
) -> dict[str, Any]:
    call = OpCall(op, inputs, params, {name: (value.shape, str(value.dtype)) for name, value in outputs.items()})
    return {j.tap: j for j in judge_op(call, outputs, profile)}


def passes(op: str, inputs: dict[str, Array], params: dict[str, float], out: Array, profile: Profile = PROFILE) -> bool:
    return judged(op, inputs, params, {"out": out}, profile)["out"].verdict in (Verdict.EXACT, Verdict.WITHIN_BOUND)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rms_norm_is_inside_in_any_order(order: str, scale: float) -> None:
    x, gain = normal(20, 6, 48, scale=scale), normal(21, 48)
    mean = ORDERS[order](x * x)[:, None] / F(48) + F(1e-6)
    inputs = {"x": x, "gain": gain}
    assert passes("rms_norm", inputs, {"eps": 1e-6}, x * (F(1) / np.sqrt(mean)) * gain)
    assert passes("rms_norm", inputs, {"eps": 1e-6}, gain * (x / np.sqrt(mean)))
    assert not passes("rms_norm", inputs, {"eps": 1e-6}, gain * (x / np.sqrt(mean)) * F(1 + 2.0**-17))


def test_rms_norm_with_another_eps_is_outside() -> None:
    x, gain = normal(22, 4, 32, scale=0.05), normal(23, 32)
    found = x / np.sqrt((x * x).mean(-1, keepdims=True) + F(1e-5)) * gain
    assert passes("rms_norm", {"x": x, "gain": gain}, {"eps": 1e-5}, found)
    assert not passes("rms_norm", {"x": x, "gain": gain}, {"eps": 1e-6}, found)


def softmax_plain(s: Array) -> Array:
    power = np.exp(s - s.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True, dtype=F)


def softmax_base_two(s: Array) -> Array:
    folded = s * F(1.4426950408889634)
    power = np.exp2(folded - folded.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True, dtype=F)


def softmax_online(s: Array, tile: int = 1) -> Array:
    top = np.full(s.shape[:-1], -np.inf, F)
    total = np.zeros(s.shape[:-1], F)
    weights = np.zeros_like(s)
    for start in range(0, s.shape[-1], tile):
        part = s[..., start : start + tile]
        new = np.maximum(top, part.max(-1))
        factor = np.exp(np.where(np.isneginf(top), F(-np.inf), top - np.where(np.isneginf(new), F(0), new)))
        own = np.exp(part - np.where(np.isneginf(new), F(0), new)[..., None])
        weights *= factor[..., None]
        weights[..., start : start + tile] = own
        total = total * factor + own.sum(-1, dtype=F)
        top = new
    return weights / total[..., None]


SOFTMAXES: dict[str, Callable[[Array], Array]] = {
    "plain": softmax_plain,
    "base two": softmax_base_two,
    "online": softmax_online,
    "online in tiles": lambda s: softmax_online(s, 5),
    "online, reversed": lambda s: softmax_online(s[..., ::-1])[..., ::-1],
}


@pytest.mark.parametrize("form", SOFTMAXES)
@pytest.mark.parametrize("offset", [0.0, 80.0, -3e3])
def test_every_stable_softmax_is_inside(form: str, offset: float) -> None:
    scores = normal(24, 5, 3, 33, scale=4) + F(offset)
    visible = (np.random.default_rng(25).random((5, 33)) < 0.6).astype(np.uint8)
    visible[:, 3] = 1
    found = SOFTMAXES[form](np.where(visible[:, None] > 0, scores, F(-np.inf)))
    assert passes("softmax", {"scores": scores, "visible": visible}, {}, found)


def test_softmax_of_the_strict_profile_excludes_folding_at_large_scores() -> None:
    scores = normal(26, 8, 4, 16, scale=3) + F(3e3)
    visible = np.ones((8, 16), np.uint8)
    inputs = {"scores": scores, "visible": visible}
    assert passes("softmax", inputs, {}, softmax_plain(scores), PROFILES["float32-strict"])
    assert not passes("softmax", inputs, {}, softmax_base_two(scores), PROFILES["float32-strict"])


def test_a_hidden_key_must_weigh_exactly_nothing() -> None:
    scores, visible = normal(27, 2, 1, 4), np.array([[1, 1, 0, 0], [1, 1, 1, 1]], np.uint8)
    found = softmax_plain(np.where(visible[:, None] > 0, scores, F(-np.inf)))
    assert passes("softmax", {"scores": scores, "visible": visible}, {}, found)
    found[0, 0, 3] = F(1e-30)
    judgement = judged("softmax", {"scores": scores, "visible": visible}, {}, {"out": found})["out"]
    assert judgement.verdict is Verdict.DEFECT and judgement.index == (0, 0, 3) and "exactly 0" in judgement.message


def test_a_row_that_sees_nothing_is_zero_and_never_nan() -> None:
    scores, visible = normal(28, 2, 2, 3), np.array([[0, 0, 0], [1, 0, 1]], np.uint8)
    found = np.zeros((2, 2, 3), F)
    found[1] = softmax_plain(np.where(visible[1] > 0, scores[1], F(-np.inf)))
    assert passes("softmax", {"scores": scores, "visible": visible}, {}, found)
    found[0] = np.nan
    assert judged("softmax", {"scores": scores, "visible": visible}, {}, {"out": found})["out"].verdict is Verdict.NONFINITE


def test_poison_behind_the_mask_is_no_business_of_the_bound() -> None:
    scores, visible = normal(29, 2, 2, 5), np.array([[1, 1, 0, 1, 0]] * 2, np.uint8)
    found = softmax_plain(np.where(visible[:, None] > 0, scores, F(-np.inf)))
    scores[:, :, [2, 4]] = np.nan
    assert passes("softmax", {"scores": scores, "visible": visible}, {}, found)


@pytest.mark.parametrize("form", SOFTMAXES)
def test_tree_attention_is_inside_however_its_softmax_is_formed(form: str) -> None:
    q, cache = normal(30, 6, 3, 24), normal(31, 20, 24)
    visible = (np.random.default_rng(32).random((6, 20)) < 0.5).astype(np.uint8)
    visible[:, 0] = 1
    scores = np.einsum("thc,sc->ths", q, cache) * F(0.2)
    weights = SOFTMAXES[form](np.where(visible[:, None] > 0, scores, F(-np.inf)))
    found = np.einsum("ths,sr->thr", weights, cache[:, :16]).astype(F)
    params = {"kv_rank": 16, "scale": 0.2}
    cache[~visible.any(0)] = np.nan
    assert passes("tree_attention", {"q": q, "cache": cache, "visible": visible}, params, found)
    assert not passes("tree_attention", {"q": q, "cache": cache, "visible": visible}, params, found * F(1 + 1e-4))


def test_attention_that_looks_at_one_key_more_is_outside() -> None:
    q, cache = normal(33, 4, 2, 12), normal(34, 9, 12)
    visible = np.tri(4, 9, 5, dtype=np.uint8)
    scores = np.einsum("thc,sc->ths", q, cache) * F(0.3)
    more = visible.copy()
    more[1, 8] = 1
    found = np.einsum("ths,sr->thr", softmax_plain(np.where(more[:, None] > 0, scores, F(-np.inf))), cache[:, :8]).astype(F)
    judgement = judged("tree_attention", {"q": q, "cache": cache, "visible": visible}, {"kv_rank": 8, "scale": 0.3}, {"out": found})["out"]
    assert judgement.verdict is Verdict.DEFECT and judgement.token == 1


def test_o_latent_counts_only_weights_that_are_not_zero() -> None:
    """Adding an exact zero does not round: a row with one key has a bound of one rounding."""
    probs, latent = np.zeros((1, 1, 500), F), normal(35, 500, 4)
    probs[0, 0, 7] = F(0.3)
    ball = o_latent.bound(Ball(probs), Ball(latent), np.array([[[1]]]), A)
    assert ball.rad is not None
    assert (ball.rad <= 1.01 * 2.0**-24 * np.abs(ball.mid) + 1e-34).all()


@pytest.mark.parametrize("half_layout", [0, 1])
def test_rope_is_inside_with_and_without_fma_and_outside_for_the_other_layout(half_layout: int) -> None:
    x, angle = normal(36, 5, 2, 8), np.random.default_rng(37).uniform(0, 9, (5, 4))
    cos, sin = np.cos(angle).astype(F)[:, None], np.sin(angle).astype(F)[:, None]

    def turned(half: int, fused: bool) -> Array:
        kind = np.float64 if fused else F
        a, b = (x[..., :4], x[..., 4:]) if half else (x[..., ::2], x[..., 1::2])
        first = (a.astype(kind) * cos - b * sin).astype(F), (b.astype(kind) * cos + a * sin).astype(F)
        return np.concatenate(first, -1) if half else np.stack(first, -1).reshape(x.shape)

    inputs = {"x": x, "cos": cos[:, 0], "sin": sin[:, 0]}
    assert passes("rope", inputs, {"half_layout": half_layout}, turned(half_layout, False))
    assert passes("rope", inputs, {"half_layout": half_layout}, turned(half_layout, True))
    assert not passes("rope", inputs, {"half_layout": half_layout}, turned(1 - half_layout, False))


@pytest.mark.parametrize("factor", [1e-6, 1.0, 30.0, 200.0])
def test_swiglu_and_sigmoid_are_inside_at_any_size(factor: float) -> None:
    gate, up = normal(38, 7, 40, scale=factor), normal(39, 7, 40)
    with np.errstate(over="ignore"):
        divided = gate / (1 + np.exp(-gate))
        sigmoid = 1 / (1 + np.exp(-gate))
    assert passes("swiglu", {"gate": gate, "up": up}, {}, divided * up)
    assert passes("swiglu", {"gate": gate, "up": up}, {}, gate * sigmoid * up)
    assert passes("router_scores", {"logits": gate}, {"softmax": 0}, sigmoid)
    assert not passes("router_scores", {"logits": gate}, {"softmax": 0}, sigmoid * F(1 + 1e-5))


def test_a_tanh_silu_is_outside_unless_it_is_declared() -> None:
    gate, up = normal(40, 6, 50, scale=6), normal(41, 6, 50)
    found = F(0.5) * gate * (1 + np.tanh(F(0.5) * gate)) * up
    assert not passes("swiglu", {"gate": gate, "up": up}, {}, found)
    assert passes("swiglu", {"gate": gate, "up": up}, {}, found, Profile(tanh_silu=True))


@pytest.mark.parametrize("order", ORDERS)
def test_combine_is_inside_in_any_order(order: str) -> None:
    weights, experts, shared = np.abs(normal(42, 5, 3)), normal(43, 5, 3, 16), normal(44, 5, 16)
    terms = np.concatenate([weights[:, None, :] * experts.transpose(0, 2, 1), shared[..., None]], -1)
    assert passes("combine", {"weights": weights, "experts": experts, "shared": shared}, {}, ORDERS[order](terms))


def test_experts_in_float32_are_inside_and_swapped_matrices_are_not() -> None:
    x, ids = normal(45, 5, 12), np.array([[0, 2], [1, 2], [3, 0], [2, 1], [0, 1]], np.int32)
    gate, up, down = normal(46, 4, 12, 9, scale=0.3), normal(47, 4, 12, 9, scale=0.3), normal(48, 4, 9, 12, scale=0.3)

    def experts(first: Array, second: Array) -> Array:
        g, u = np.einsum("tn,tknf->tkf", x, first[ids]), np.einsum("tn,tknf->tkf", x, second[ids])
        return np.einsum("tkf,tkfn->tkn", g / (1 + np.exp(-g)) * u, down[ids]).astype(F)

    inputs = {"x": x, "ids": ids, "gate": gate, "up": up, "down": down}
    assert passes("moe", inputs, {}, experts(gate, up))
    assert not passes("moe", inputs, {}, experts(up, gate))


@pytest.mark.parametrize("vocab", [1, 2, 50, 400])
def test_log_probabilities_are_inside_in_every_form(vocab: int) -> None:
    logits = normal(49, 5, vocab, scale=5) + F(20)
    top = logits.max(1, keepdims=True)
    log_total = np.log(np.exp(logits - top).sum(1, keepdims=True, dtype=F))
    ids = np.argsort(-logits, 1, kind="stable")[:, : min(6, vocab)].astype(np.int32)
    for table in (logits - (top + log_total), (logits - top) - log_total):
        outputs = {"ids": ids, "log_probs": np.take_along_axis(table, ids, 1)}
        assert all(
            j.verdict in (Verdict.EXACT, Verdict.WITHIN_BOUND)
            for j in judged("draft_table", {"logits": logits}, {"budget": 6}, outputs).values()
        )
    outputs["log_probs"] = outputs["log_probs"] - F(1e-4)
    assert judged("draft_table", {"logits": logits}, {"budget": 6}, outputs)["log_probs"].verdict is Verdict.DEFECT


# ---- sharpness of every float op ----------------------------------------------------------------------------------
def samples() -> dict[str, tuple[dict[str, Array], dict[str, float], dict[str, Array]]]:
    """(inputs, params, outputs) per op with a float output; outputs are replaced by the middle of the bound."""
    ids = np.array([[0, 2], [1, 2], [3, 0]], np.int32)
    angle = np.random.default_rng(50).uniform(0, 9, (3, 2))
    scores = np.abs(normal(51, 3, 4)) + F(0.1)
    chosen = Rule(2, 1, 1, False).choose(scores, np.zeros(4, F)).astype(np.int32)
    visible = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]], np.uint8)
    probs = softmax_plain(normal(52, 3, 2, 4))
    return {
        "rms_norm": ({"x": normal(53, 3, 8), "gain": normal(54, 8)}, {"eps": 1e-6}, {}),
        "matmul": ({"x": normal(55, 3, 8), "w": normal(56, 8, 5)}, {}, {}),
        "rope": ({"x": normal(57, 3, 2, 4), "cos": np.cos(angle).astype(F), "sin": np.sin(angle).astype(F)}, {"half_layout": 0}, {}),
        "q_absorb": ({"q_nope": normal(58, 3, 2, 4), "w_kc": normal(59, 2, 4, 5)}, {}, {}),
        "scores": ({"q": normal(60, 3, 2, 6), "keys": normal(61, 4, 6)}, {"scale": 0.3}, {}),
        "softmax": ({"scores": normal(62, 3, 2, 4), "visible": visible}, {}, {}),
        "o_latent": ({"probs": probs, "latent": normal(63, 4, 5)}, {}, {}),
        "o_heads": ({"o_latent": normal(64, 3, 2, 4), "w_vc": normal(65, 2, 4, 5)}, {}, {}),
        "tree_attention": ({"q": normal(66, 3, 2, 6), "cache": normal(67, 4, 6), "visible": visible}, {"kv_rank": 4, "scale": 0.3}, {}),
        "router_scores": ({"logits": normal(68, 3, 4)}, {"softmax": 0}, {}),
        "swiglu": ({"gate": normal(69, 3, 4), "up": normal(70, 3, 4)}, {}, {}),
        "moe": (
            {"x": normal(71, 3, 6), "ids": ids, "gate": normal(72, 4, 6, 5), "up": normal(73, 4, 6, 5), "down": normal(74, 4, 5, 6)}, {}, {},
        ),
        "combine": ({"weights": np.abs(normal(75, 3, 2)), "experts": normal(76, 3, 2, 4), "shared": normal(77, 3, 4)}, {}, {}),
        "route": (
            {"scores": scores, "bias": np.zeros(4, F)},
            {
                "top_k": 2, "groups": 1, "top_groups": 1, "group_score_max": 0, "norm_top_k": 1, "routed_scale": 1.5, "denominator_eps": 1e-20,
            },
            {"ids": chosen},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("op", samples())
def test_just_inside_passes_and_just_outside_is_a_defect_at_its_element(op: str) -> None:
    inputs, params, outputs = samples()[op]
    name = "weights" if op == "route" else "out"
    outputs[name] = np.zeros((3, 2), F)  # only its presence matters to `expect`
    expected = BOUNDS[op](inputs, params, outputs, A)[name]
    assert isinstance(expected, Near) and expected.ball.rad is not None
    mid, rad = expected.ball.mid, expected.ball.rad
    for flat in range(mid.size):
        at = np.unravel_index(flat, mid.shape)
        if rad[at] == 0:
            continue
        for factor, verdict in ((0.8, Verdict.WITHIN_BOUND), (2.5, Verdict.DEFECT)):
            # float32 has few numbers inside a radius of one or two roundings: round towards the middle, or away from it
            moved = mid.astype(F)
            target = mid[at] + factor * rad[at]
            moved[at] = F(target)
            if verdict is Verdict.WITHIN_BOUND and abs(float(moved[at]) - mid[at]) > rad[at]:
                moved[at] = np.nextafter(moved[at], F(mid[at]))
            outputs[name] = moved
            judgement = judged(op, inputs, params, outputs)[name]
            assert judgement.verdict is verdict, (at, factor, judgement)
            if verdict is Verdict.DEFECT:
                assert judgement.index == tuple(at) and judgement.share > 1
