"""`OPENBLAS_NUM_THREADS=1 python benchmarks/canonical.py`: what canonical bits cost against plain float32 NumPy.

Whole-model forwards (the session: a prefill of 17 tokens and a tree of 8 nodes; a prefill of 128 tokens; one decoding step
behind 128) and one product of depth 7168. Both sides run interleaved in one process on one thread and the minimum of each is
taken, so that a busy machine slows both. The plain side is the same model in idiomatic float32 NumPy with the same fused
matrices; it is checked against the golden logits before it is timed. Writes benchmarks/results/canonical.json.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from spec import arithmetic
from spec.config import Config, preset
from spec.engine import Rows
from spec.model import GoldenModel, GoldenSession, ancestors
from spec.rotary import Rotary
from spec.weights import philox, random_weights

Array = np.ndarray[Any, Any]
RESULTS = Path(__file__).parent / "results" / "canonical.json"
TARGETS = {"hidden 64": 6.0, "hidden 256": 4.0, "product 8x7168x512": 10.0}
ROUNDS = 60  # alternations of the two sides; the minimum settles after about 20
TREE_PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3, 6], np.int32)
TREE_DEPTHS = np.array([0, 1, 1, 2, 2, 2, 3, 4], np.int32)

CONFIGS = {
    "hidden 64": preset(
        "tiny", hidden=64, layers=3, heads=4, q_rank=48, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16, dense_dim=128, experts=8, top_k=2,
        expert_dim=48, vocab=160,
    ),
    "hidden 256": preset(
        "tiny", hidden=256, layers=4, heads=8, q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32, dense_dim=512, experts=8, top_k=2,
        expert_dim=128, vocab=512,
    ),
}  # fmt: skip


class PlainModel:
    """The equations of spec/model.py in float32 NumPy: whatever BLAS and libm give."""

    def __init__(self, config: Config, weights: dict[str, Array]) -> None:
        self.c, self.w, self.rotary = config, dict(weights), Rotary(config)
        for layer in range(config.layers):
            for name, parts in (
                ("input", ("q_a", "kv_a")), ("gate_up", ("gate", "up")), ("expert_gate_up", ("expert_gate", "expert_up")),
                ("shared_gate_up", ("shared_gate", "shared_up")),
            ):  # fmt: skip
                if f"{layer}.{parts[0]}" in weights:
                    self.w[f"{layer}.{name}"] = np.concatenate([weights[f"{layer}.{part}"] for part in parts], axis=-1)

    def forward(self, cache: list[Array], tokens: Array, positions: Array, inside: Array) -> Array:
        """`cache`: per layer [P, R + D], replaced by the longer one. inside [T, T]: visibility within the batch."""
        c, w, T = self.c, self.w, len(tokens)
        cos, sin = self.rotary.tables(positions)
        visible = np.concatenate([np.ones((T, len(cache[0])), np.bool_), inside], axis=1)[:, None]
        h = w["embed"][tokens]
        for layer in range(c.layers):
            p = f"{layer}."
            joined = norm(h, w[p + "attn_norm"], c.rms_eps) @ w[p + "input"]
            q = norm(joined[:, : c.q_rank], w[p + "q_a_norm"], c.latent_norm_eps) @ w[p + "q_b"]
            q, kv = q.reshape(T, c.heads, -1), joined[:, c.q_rank :]
            latent = norm(kv[:, : c.kv_rank], w[p + "kv_a_norm"], c.latent_norm_eps)
            row = np.concatenate([latent, turn(kv[:, c.kv_rank :], cos, sin)], axis=1)
            cache[layer] = keys = np.concatenate([cache[layer], row])
            q_absorb = np.matmul(q[..., : c.nope_dim].transpose(1, 0, 2), w[p + "w_kc"]).transpose(1, 0, 2)
            query = np.concatenate([q_absorb, turn(q[..., c.nope_dim :], cos[:, None], sin[:, None])], axis=-1)
            scores = (query.reshape(T * c.heads, -1) @ keys.T).reshape(T, c.heads, -1) * np.float32(c.softmax_scale)
            scores = np.where(visible, scores, np.float32(-np.inf))
            power = np.exp(scores - scores.max(axis=-1, keepdims=True))
            probs = power / power.sum(axis=-1, keepdims=True)
            o_latent = (probs.reshape(T * c.heads, -1) @ keys[:, : c.kv_rank]).reshape(T, c.heads, -1)
            o_heads = np.matmul(o_latent.transpose(1, 0, 2), w[p + "w_vc"]).transpose(1, 0, 2)
            h = h + o_heads.reshape(T, -1) @ w[p + "o"]
            x = norm(h, w[p + "ffn_norm"], c.rms_eps)
            h = h + (feed_forward(x, w[p + "gate_up"], w[p + "down"]) if c.is_dense(layer) else self.sparse(p, x))
        logits: Array = norm(h, w["norm"], c.rms_eps) @ w["head"]
        return logits

    def sparse(self, p: str, x: Array) -> Array:
        c, w = self.c, self.w
        scores = np.float32(1) / (np.float32(1) + np.exp(-(x @ w[p + "router"])))
        ids = np.argsort(-(scores + w[p + "router_bias"]), axis=-1, kind="stable")[:, : c.top_k]
        chosen = np.take_along_axis(scores, ids, axis=-1)
        weights = chosen / (chosen.sum(axis=-1, keepdims=True) + np.float32(c.denominator_eps)) * np.float32(c.routed_scale)
        y = feed_forward(x, w[p + "shared_gate_up"], w[p + "shared_down"])
        for expert in np.unique(ids):
            rows, slots = np.nonzero(ids == expert)
            y[rows] += weights[rows, slots, None] * feed_forward(x[rows], w[p + "expert_gate_up"][expert], w[p + "expert_down"][expert])
        return y


def norm(x: Array, gain: Array, eps: float) -> Array:
    result: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * gain
    return result


def turn(x: Array, cos: Array, sin: Array) -> Array:
    out, a, b = np.empty_like(x), x[..., 0::2], x[..., 1::2]
    out[..., 0::2], out[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    return out


def feed_forward(x: Array, gate_up: Array, down: Array) -> Array:
    gate, up = np.split(x @ gate_up, 2, axis=1)
    result: Array = (gate / (np.float32(1) + np.exp(-gate)) * up) @ down
    return result


# ---- the two sides of each measurement --------------------------------------------------------------------------
def rows_of(tokens: Array, positions: Array, parents: Array) -> Rows:
    return Rows(np.zeros(len(tokens), np.int32), tokens, positions, parents)


def golden_forward(session: GoldenSession, rows: Rows) -> Array:
    return session.forward(rows, np.ones(len(rows), np.bool_), frozenset(), lambda *_: None)


def whole_models(config: Config) -> dict[str, tuple[Callable[[], Array], Callable[[], Array]]]:
    """Per workload: the plain and the canonical side, each from an empty or freshly copied cache."""
    weights = random_weights(config, 0)
    golden, plain = GoldenModel(config, weights), PlainModel(config, weights)
    draw = philox("benchmark", config.hidden)
    tokens = draw.integers(0, config.vocab, 160).astype(np.int32)
    index = np.arange(160, dtype=np.int32)
    prefilled = golden.open()
    golden_forward(prefilled, rows_of(tokens[:128], index[:128], index[:128] - 1))
    prefilled.commit(0, index[:128])
    cached = [prefilled.cache_rows(0, layer) for layer in range(config.layers)]

    def empty() -> list[Array]:
        return [np.zeros((0, config.cache_dim), np.float32) for _ in range(config.layers)]

    def plain_prefill(count: int, cache: list[Array]) -> Array:
        return plain.forward(cache, tokens[:count], index[:count], ancestors(range(-1, count - 1)))

    def plain_session() -> Array:
        cache = empty()
        first = plain_prefill(17, cache)
        return np.concatenate([first, plain.forward(cache, tokens[17:25], 17 + TREE_DEPTHS, ancestors(TREE_PARENTS.tolist()))])

    def golden_session() -> Array:
        session = golden.open()
        first = golden_forward(session, rows_of(tokens[:17], index[:17], index[:17] - 1))
        session.commit(0, index[:17])
        return np.concatenate([first, golden_forward(session, rows_of(tokens[17:25], 17 + TREE_DEPTHS, TREE_PARENTS))])

    one = rows_of(tokens[128:129], index[128:129], np.array([-1], np.int32))
    return {
        "session 17 + tree 8": (plain_session, golden_session),
        "prefill 128": (lambda: plain_prefill(128, empty()), lambda: golden.sequence_logits(tokens[:128])),
        "decode 1 behind 128": (
            lambda: plain.forward(list(cached), one.token, one.position, np.ones((1, 1), np.bool_)),
            lambda: golden_forward(prefilled, one),
        ),
    }


def products() -> dict[str, tuple[Callable[[], Array], Callable[[], Array]]]:
    draw = philox("benchmark", "product")
    a, b = draw.standard_normal((8, 7168)).astype(np.float32), draw.standard_normal((7168, 512)).astype(np.float32)
    prepared = arithmetic.prepare(b)
    return {
        "weight prepared": (lambda: a @ b, lambda: arithmetic.matmul(a, prepared)),
        "weight as it comes": (lambda: a @ b, lambda: arithmetic.matmul(a, b)),
    }


def measure(plain: Callable[[], Array], golden: Callable[[], Array]) -> dict[str, float]:
    """Milliseconds, minimum of ROUNDS alternations, after a check that both sides compute the same thing."""
    expected = golden()
    # a wrong model is off by the size of a logit, float32 noise is below 1e-5 of it; a product of depth 7168 is no worse
    assert np.abs(plain() - expected).max() < 1e-3 * np.abs(expected).max()
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for side, function in enumerate((plain, golden)):
            start = time.perf_counter()
            function()
            best[side] = min(best[side], time.perf_counter() - start)
    return {"plain_ms": best[0] * 1e3, "canonical_ms": best[1] * 1e3, "ratio": best[1] / best[0]}


def main() -> int:
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, target in TARGETS.items():
        sides = whole_models(CONFIGS[name]) if name in CONFIGS else products()
        results[name] = {}
        for workload, (plain, golden) in sides.items():
            result = results[name][workload] = measure(plain, golden)
            verdict = "within" if result["ratio"] <= target else "ABOVE"
            print(
                f"{name:20s} {workload:20s} plain {result['plain_ms']:8.3f} ms  canonical {result['canonical_ms']:8.3f} ms"
                f"  ratio {result['ratio']:5.2f}, {verdict} {target:.0f}"
            )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    environment = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(), "threads": 1}
    document = {
        "command": "OPENBLAS_NUM_THREADS=1 python benchmarks/canonical.py", "targets": TARGETS, "environment": environment, "results": results,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
