"""Every op record: its function runs on random inputs, answers with the shapes and dtypes it declares, and agrees with a second form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spec import record, taps
from spec.formats import rounded_bfloat16
from spec.ops import OPS, ORDER
from spec.record import Op
from spec.rules import RULES
from spec.weights import philox

DIMS = {"G": 2,
    "T": 3, "K": 5, "N": 4, "H": 2, "S": 6, "R": 4, "n": 3, "v": 5, "C": 7, "E": 8, "F": 3, "V": 9, "half": 2, "L": 3,
    "M": 4, "J": 2, "top_k": 2, "kv_rank": 4, "budget": 5, "prefix_len": 3,
}  # fmt: skip
PARAMS: dict[str, int | float] = {
    "eps": 1e-6, "scale": 0.3, "half_layout": 1, "softmax": 0, "top_k": 2, "groups": 4, "top_groups": 2, "group_score_max": 0,
    "norm_top_k": 1, "routed_scale": 1.5, "denominator_eps": 1e-20, "kv_rank": 4, "budget": 5, "root": 1, "prefix_len": 3,
    "group_fill_zero": 0, "denominator_clamp": 0.0, "temperature": 0.8, "top_k_ties_all": 0, "top_p": 0.9, "min_p": 0.0,
    "repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.2, "seed": 2**62 + 5, "prompt_len": 1,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # operands that are not arbitrary numbers
    "embed": {"ids": [8, 0, 3]},
    "moe": {"ids": [[0, 7, 3, 1, 2], [1, 1, 1, 1, 1], [7, 6, 5, 4, 3]]},
    "tree_mask": {"parents": [-1, 0, 0, 2]},
    "accept": {"tokens": [5, 1, 2, 3], "parents": [-1, 0, 0, 2], "target": [2, 0, 3, 4]},
    "compact": {"path": [0, 2]},
    "sample": {"history": [[1, 8], [3, -1], [0, 3]], "sequences": [0, 4, 4]},
}
forward_ops = pytest.mark.parametrize("name", ORDER[: ORDER.index("draft_table")])


def dims_of(name: str) -> dict[str, int]:
    return DIMS | {"K": 5} if name in ("draft_table", "best_first_tree") else DIMS


def inputs_of(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random operands; logits and tables where an op wants a distribution."""
    draw, op, dims = philox("test ops", name, seed), OPS[name], dims_of(name)
    inputs: dict[str, np.ndarray] = {}
    for tensor in op.inputs:
        shape = record.shape(tensor, dims)
        if tensor.name in OWN.get(name, {}):
            inputs[tensor.name] = np.array(OWN[name][tensor.name], tensor.dtype)
        elif tensor.dtype == "uint8":
            inputs[tensor.name] = draw.integers(0, 2, shape).astype(np.uint8)
        elif tensor.dtype == "int32":
            inputs[tensor.name] = draw.permuted(np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape), axis=-1)
        else:
            inputs[tensor.name] = draw.standard_normal(shape).astype(np.float32)
    if name == "best_first_tree":
        inputs["log_probs"] = -np.sort(np.abs(inputs["log_probs"]), axis=1)
    if name == "int4_matmul":
        inputs["packed"] = draw.integers(-(2**31), 2**31, inputs["packed"].shape).astype(np.int32)
        inputs["scales"] = rounded_bfloat16(np.abs(inputs["scales"]))
    if name == "route":
        inputs["scores"] = np.abs(inputs["scores"])
    return inputs


def params_of(op: Op) -> dict[str, int | float]:
    return {key: PARAMS[key] for key in op.params}


@pytest.mark.parametrize("name", ORDER)
def test_a_record_answers_with_the_shapes_and_dtypes_it_declares(name: str) -> None:
    op = OPS[name]
    inputs = inputs_of(name)
    before = {key: array.copy() for key, array in inputs.items()}
    outputs = op.function(inputs, params_of(op))
    assert list(outputs) == [tensor.name for tensor in op.outputs]
    for tensor in op.outputs:
        assert outputs[tensor.name].shape == record.shape(tensor, dims_of(name)), tensor
        assert outputs[tensor.name].dtype == tensor.dtype
    for key, array in inputs.items():
        assert np.array_equal(array, before[key]), f"{key} was changed"


@pytest.mark.parametrize("name", ORDER)
def test_a_record_is_complete(name: str) -> None:
    op = OPS[name]
    assert op.name == name
    assert op.summary
    assert op.rules
    assert set(op.rules) <= set(RULES)
    words = {part for tensor in (*op.inputs, *op.outputs) for word in tensor.dims for part in word.replace("*", "+").split("+")}
    words = {word for word in words if not word.isdigit()}
    assert words == set(op.dims), "dims explains each dimension word, and no other"
    assert set(op.params.values()) <= {"int", "float"}


def test_the_registry_is_in_order_and_covers_every_tap() -> None:
    assert tuple(OPS) == ORDER
    tapped = {tap.op for group in (taps.EMBED, taps.ATTENTION, taps.DENSE, taps.SPARSE, taps.RESIDUAL, taps.HEAD) for tap in group}
    assert tapped <= set(OPS)


@forward_ops
def test_an_empty_batch_gives_empty_outputs(name: str) -> None:
    op = OPS[name]
    inputs = inputs_of(name)
    empty = {t.name: inputs[t.name][:0] if t.dims[0] == "T" else inputs[t.name] for t in op.inputs}
    for tensor in op.outputs:
        assert op.function(empty, params_of(op))[tensor.name].shape == record.shape(tensor, DIMS | {"T": 0})


@forward_ops
def test_rows_do_not_see_each_other(name: str) -> None:
    """Row by row or all at once, reversed or not: the same bits."""
    op, inputs = OPS[name], inputs_of(name)
    whole = op.function(inputs, params_of(op))
    by_row = [t.name for t in op.inputs if t.dims[0] == "T"]
    for row in range(DIMS["T"]):
        alone = op.function({k: v[row : row + 1] if k in by_row else v for k, v in inputs.items()}, params_of(op))
        for key, array in whole.items():
            assert np.array_equal(alone[key][0], array[row])


def second_form(name: str, x: dict[str, np.ndarray]) -> np.ndarray:
    """float64, by einsum and loops."""
    w = {key: array.astype(np.float64) for key, array in x.items()}
    if name == "embed":
        return np.stack([w["table"][i] for i in x["ids"]])
    if name == "rms_norm":
        return w["x"] * w["gain"] / np.sqrt(np.mean(w["x"] ** 2, axis=1, keepdims=True) + 1e-6)
    if name == "matmul":
        return np.einsum("tk,kn->tn", w["x"], w["w"])
    if name == "rope":
        a, b, c, s = w["x"][..., :2], w["x"][..., 2:], w["cos"][:, None], w["sin"][:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
    if name == "q_absorb":
        return np.einsum("thn,hnr->thr", w["q_nope"], w["w_kc"])
    if name == "scores":
        return 0.3 * np.einsum("thc,sc->ths", w["q"], w["keys"])
    if name == "softmax":
        power = np.exp(w["scores"]) * x["visible"][:, None]
        return power / np.maximum(power.sum(axis=-1, keepdims=True), 1e-300)
    if name == "o_latent":
        return np.einsum("ths,sr->thr", w["probs"], w["latent"])
    if name == "o_heads":
        return np.einsum("thr,hrv->thv", w["o_latent"], w["w_vc"])
    if name == "tree_attention":
        out = np.zeros((3, 2, 4))
        for t, h in np.ndindex(3, 2):
            seen = np.flatnonzero(x["visible"][t])
            power = np.exp([0.3 * w["q"][t, h] @ w["cache"][s] for s in seen])
            out[t, h] = sum((p * w["cache"][s, :4] for p, s in zip(power / power.sum(), seen, strict=True)), np.zeros(4))
        return out
    if name == "router_scores":
        return 1 / (1 + np.exp(-w["logits"]))
    if name == "swiglu":
        return w["gate"] / (1 + np.exp(-w["gate"])) * w["up"]
    if name == "moe":
        out = np.empty((3, 5, 4))
        for t, k in np.ndindex(3, 5):
            e = x["ids"][t, k]
            gate, up = w["x"][t] @ w["gate"][e], w["x"][t] @ w["up"][e]
            out[t, k] = (gate / (1 + np.exp(-gate)) * up) @ w["down"][e]
        return out
    if name == "combine":
        return np.einsum("tk,tkn->tn", w["weights"], w["experts"]) + w["shared"]
    if name == "int4_matmul":
        words = x["packed"].view(np.uint32).astype(np.int64)
        nibbles = np.array([[(words[k // 8, n] >> 4 * (k % 8)) % 16 for n in range(words.shape[1])] for k in range(8 * len(words))])
        return w["x"] @ (np.where(nibbles > 7, nibbles - 16, nibbles) * w["scales"].repeat(32, axis=0))
    if name == "add":
        return w["a"] + w["b"]
    if name == "sample":
        return np.array([drawn_by_hand(w["logits"][t], [i for i in x["history"][t] if i >= 0], x["sequences"][t]) for t in range(3)])
    assert name == "argmax"
    return np.array([max(range(9), key=lambda i, row=row: (row[i], -i)) for row in w["logits"]])


def drawn_by_hand(logits: np.ndarray, history: list[int], sequence: int) -> int:
    """PARAMS on one row: penalties, the two best, of these the head of mass 0.9, and the one whose clock rings first."""
    z = logits.copy()
    for token in set(history):
        z[token] = z[token] / 1.5 if z[token] > 0 else z[token] * 1.5
        generated = history[1:].count(token)
        z[token] -= (0.2 * generated + 0.3) if generated else 0
    mass = np.exp(z / 0.8)
    best, second = np.argsort(-mass)[:2]
    kept = [best] if mass[best] >= 0.9 * (mass[best] + mass[second]) else [best, second]
    words = np.random.Philox(
        key=np.array([2**62 + 5, len(history)], np.uint64), counter=np.array([0, sequence, 0, 0], np.uint64)
    ).random_raw(9)
    return int(min(kept, key=lambda token: -np.log((words[token] // 2**12 * 2.0 + 1) / 2.0**53) / mass[token]))


@pytest.mark.parametrize("name", [name for name in ORDER[: ORDER.index("draft_table")] if name != "route"])
def test_a_record_computes_what_its_summary_says(name: str) -> None:
    op, inputs = OPS[name], inputs_of(name)
    if "visible" in inputs:
        inputs["visible"][:, 0] = 1  # rows that see nothing have tests of their own
    actual = next(iter(op.function(inputs, params_of(op)).values()))
    expected = second_form(name, inputs)
    # at most three float32 roundings in a row (moe, tree_attention), each carried on by sums of magnitude below 64
    assert (np.abs(actual - expected) <= 3 * 2.0**-24 * 64).all()


def test_router_scores_by_softmax_sum_to_one() -> None:
    logits = inputs_of("router_scores")["logits"]
    scores = OPS["router_scores"].function({"logits": logits}, {"softmax": 1})["out"]
    power = np.exp(logits.astype(np.float64))
    # one rounding each; float64 is exact beside it
    assert (np.abs(scores - power / power.sum(axis=1, keepdims=True)) <= 2.0**-24 * (1 + 2.0**-20) * scores).all()


def route_by_hand(scores: np.ndarray, bias: np.ndarray, p: dict[str, int | float]) -> list[int]:
    """One row, in Python: groups and experts sorted by (-value, index)."""
    choice = [float(np.float32(s) + np.float32(b)) for s, b in zip(scores, bias, strict=True)]
    size = len(choice) // int(p["groups"])
    groups = [range(g * size, (g + 1) * size) for g in range(int(p["groups"]))]

    def group_score(group: range) -> float:
        best = sorted((choice[e] for e in group), reverse=True)
        return best[0] if p["group_score_max"] else float(np.float32(best[0]) + np.float32(best[1]))

    kept = sorted(range(len(groups)), key=lambda g: (-group_score(groups[g]), g))[: int(p["top_groups"])] if len(groups) > 1 else [0]
    allowed = [e for g in kept for e in groups[g]]
    return sorted(allowed, key=lambda e: (-choice[e], e))[: int(p["top_k"])]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("group_score_max", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_route_follows_the_rule_on_grids_full_of_ties(groups: int, group_score_max: int, seed: int) -> None:
    """Values are multiples of 1/4, negative biases included: ties within and between groups, and choices below 0."""
    draw = philox("route", groups, group_score_max, seed)
    scores = (draw.integers(0, 4, (20, 8)) / 4).astype(np.float32)
    bias = (draw.integers(-8, 3, 8) / 4).astype(np.float32)
    params = {key: PARAMS[key] for key in OPS["route"].params} | {
        "groups": groups, "top_groups": max(1, groups // 2), "group_score_max": group_score_max, "denominator_eps": 1e-20,
    }  # fmt: skip
    out = OPS["route"].function({"scores": scores, "bias": bias}, params)
    for row in range(20):
        assert out["ids"][row].tolist() == route_by_hand(scores[row], bias, params)
        chosen = [float(scores[row, e]) for e in out["ids"][row]]
        expected = [1.5 * c / (sum(chosen) + 1e-20) for c in chosen]
        # one rounding, of numbers up to 1.5
        assert np.allclose(out["weights"][row], expected, rtol=2.0**-23, atol=0)


def test_a_dropped_group_loses_to_a_negative_choice() -> None:
    """Fill -inf, not 0 (mlx-lm): every choice is negative and the second group is dropped."""
    params = {**{key: PARAMS[key] for key in OPS["route"].params}, "groups": 2, "top_groups": 1}
    scores = np.full((1, 4), 0.25, np.float32)
    bias = np.array([-1, -2, -3, -4], np.float32)
    assert OPS["route"].function({"scores": scores, "bias": bias}, params)["ids"].tolist() == [[0, 1]]


def test_tree_attention_is_its_three_ops_and_never_reads_unseen_slots() -> None:
    inputs = inputs_of("tree_attention")
    inputs["visible"][:, 4] = 0
    inputs["visible"][1] = 0
    params = params_of(OPS["tree_attention"])
    out = OPS["tree_attention"].function(inputs, params)["out"]
    scores = OPS["scores"].function({"q": inputs["q"], "keys": inputs["cache"]}, {"scale": 0.3})["out"]
    probs = OPS["softmax"].function({"scores": scores, "visible": inputs["visible"]}, {})["out"]
    assert np.array_equal(out, OPS["o_latent"].function({"probs": probs, "latent": inputs["cache"][:, :4]}, {})["out"])
    assert not out[1].any()
    inputs["cache"][4] = np.nan
    assert np.array_equal(OPS["tree_attention"].function(inputs, params)["out"], out)


def test_argmax_takes_the_lowest_of_equal_maxima() -> None:
    logits = np.array([[1, 3, 3, 0], [2, 2, 2, 2], [-0.0, 0.0, -1, -1]], np.float32)
    assert OPS["argmax"].function({"logits": logits}, {})["ids"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("bad", [-1, 9])
def test_embed_and_moe_refuse_ids_out_of_range(bad: int) -> None:
    inputs = inputs_of("embed") | {"ids": np.array([bad], np.int32)}
    with pytest.raises(IndexError, match="ids lie between"):
        OPS["embed"].function(inputs, {})
    inputs = inputs_of("moe")
    inputs["ids"][0, 0] = bad
    with pytest.raises(IndexError, match="ids lie between"):
        OPS["moe"].function(inputs, {})
