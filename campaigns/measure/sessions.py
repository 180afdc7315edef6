"""Probes through a whole model, for engines that run no single operation: weights are crafted so that the logits are one product of ours.

Every block adds exactly zero (its output projections are 0), the embedding of the probe is all ones, and the mean square of ones is 1: with a vanishing
eps the final norm hands over its gain, bit by bit, and the logits are gain @ head. The gain is the left operand, the head the right one.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.measure.functions import ABSORBED, root_points
from campaigns.measure.subject import Float, Refused
from campaigns.measure.ties import tie_line
from campaigns.trial import Worker
from campaigns.weights import weights_for
from oracles import probing
from oracles.probing import Line, likely, sure, unknown
from spec.config import Config, ConfigError, preset
from spec.engine import UNIT_FLOAT32, Int, Limits, Rows, departed
from spec.script import Answer, CacheRows, Commit, Forward, Generate, Script, Step, WeightsKey
from spec.weights import Array, philox, weight_shapes

PROBE = "probe"
TERMS_MAX = 1024  # of a hidden size that a small model still opens quickly
EPS = 1e-30  # float32 holds it, and 1 + EPS is 1
POSITIONS = (1, 7, 63, 511, 2047, 4000)
ZERO = ("o", "down", "expert_down", "shared_down")


def probe_weights(config: Config, key: WeightsKey) -> Mapping[str, Array]:
    """The weights of a probe: zeros where a block writes, ones where it normalises, and what the file named by `checkpoint` says."""
    if key.regime != PROBE:
        return weights_for(config, key)
    with np.load(key.checkpoint) as given:
        crafted = {name: given[name] for name in given.files}
    out: dict[str, Array] = {}
    for name, shape in weight_shapes(config).items():
        kind = name.rpartition(".")[2]
        if name in crafted:
            out[name] = crafted[name]
        elif kind in ZERO or kind == "router_bias":
            out[name] = np.zeros(shape, np.float32)
        elif kind == "embed" or len(shape) == 1:
            out[name] = np.ones(shape, np.float32)
        else:
            out[name] = np.full(shape, np.float32(2.0**-6))
    return out


class Sessions:
    """A Subject (subject.py) over sessions. The probes lie in a folder that goes with it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._folder = tempfile.TemporaryDirectory(prefix="paritree-probe-")
        self._probes = 0
        self._calibrated = False

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._folder.cleanup()

    def terms(self, wanted: int) -> int:
        return min(wanted, TERMS_MAX)

    def op(self, op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float]) -> dict[str, NDArray[Any]]:
        raise Refused("the engine runs no single operation")

    def product(self, left: Float, right: Float, rows: int) -> Float:
        if not self._calibrated:
            self._calibrate()
        return self._logits(left, right, rows)

    def _calibrate(self) -> None:
        """The norm of ones must be 1, or the left operand would not arrive as it is."""
        self._calibrated = True
        found = self._logits(np.ones(64, np.float32), np.eye(64, dtype=np.float32), 1)
        if not (found == 1).all():
            raise Refused(
                f"the final norm of a row of ones is {float(found.flat[0])!r}, not 1: a crafted operand would not arrive as it is"
            )

    def _logits(self, left: Float, right: Float, rows: int) -> Float:
        terms, columns = right.shape
        config = self._config(hidden=terms, vocab=max(columns, 8))
        head = np.zeros((terms, config.vocab), np.float32)
        head[:, :columns] = right
        (answer,) = self._run(config, {"norm": left, "head": head}, [_chain(np.zeros(rows, np.int32))])
        if answer.logits is None:
            raise Refused("a forward pass gave no logits")
        return answer.logits[:, :columns]

    def _config(self, **sizes: Any) -> Config:
        """A tiny model as the engine really runs it: what it takes otherwise by design does not touch the probes."""
        try:
            return departed(preset("tiny", rms_eps=EPS, latent_eps=EPS, yarn=None, **sizes), self._worker.description.departures)
        except ConfigError as problem:
            raise Refused(f"the engine's departures do not fit a tiny model: {problem}") from None

    def _run(self, config: Config, crafted: Mapping[str, Float], steps: list[Step], *, taps: bool = False) -> list[Answer]:
        """Raises Refused with what the engine said."""
        self._probes += 1
        path = Path(self._folder.name) / f"{self._probes}.npz"
        with path.open("wb") as file:
            np.savez(file, **{name: np.asarray(value, np.float32) for name, value in crafted.items()})  # type: ignore[arg-type]
        try:
            return self._asked(Script(config, WeightsKey(0, PROBE, str(path)), tuple(steps), taps=taps))
        finally:
            path.unlink()

    def _asked(self, script: Script) -> list[Answer]:
        trace = self._worker.script(script)
        problems = [trace.failure, *(answer.failure for answer in trace.answers)]
        for problem in problems:
            if problem is not None:
                raise Refused(f"a session of probes: {problem.message}")
        if len(trace.answers) != len(script.steps):
            raise Refused("a session of probes ended early")
        return trace.answers

    # ---- lines that only sessions show, or that they show as well ------------------------------------------------------------------------

    def root_lines(self) -> list[Line]:
        """The first element of a normalised row (1, v, 0, ..) is the inverse root of a mean square that float32 holds."""
        hidden = 64
        v, _ = root_points()
        v = v[::8]
        config = self._config(hidden=hidden, vocab=len(v))
        embed = np.zeros((config.vocab, hidden), np.float32)
        embed[:, 0], embed[:, 1] = 1, v
        head = np.zeros((hidden, config.vocab), np.float32)
        head[0, 0] = 1
        (answer,) = self._run(config, {"embed": embed, "head": head}, [_chain(np.arange(len(v), dtype=np.int32))])
        if answer.logits is None:
            raise Refused("a forward pass gave no logits")
        exact = 1 / np.sqrt((1 + v.astype(np.float64) ** 2) / hidden)
        return [probing.ulp_line("rsqrt_ulp", answer.logits[:, 0], exact, "inverse root of a mean square, by the final norm", 0.5)]

    def argmax_lines(self) -> list[Line]:
        """Greedy decoding of one token among equal logits."""
        if "generate" not in self._worker.description.capabilities:
            raise Refused("the engine has no loop of its own to choose tokens")
        found: list[int] = []
        equal: list[list[int]] = []
        for number in range(8):
            places = np.sort(philox("measure argmax sessions", number).permutation(203)[: 2 + number % 4])
            config = self._config(hidden=64, vocab=203)
            head = np.zeros((64, 203), np.float32)
            head[0, places] = 1
            step = Generate((np.zeros(2, np.int32),), None, 0, Limits(1))
            (answer,) = self._run(config, {"head": head}, [step])
            generations = answer.generations or []
            if not generations or not generations[0].tokens:
                raise Refused("the engine's loop emitted nothing")
            found.append(int(generations[0].tokens[0]))
            equal.append(places.tolist())
        return [tie_line("argmax ties", found, equal, "greedy choices among equal logits")]

    def invariance_lines(self) -> list[Line]:
        """The logits of one prompt alone and beside three others, and those of a first row with and without rows behind it."""
        config = departed(preset("tiny"), self._worker.description.departures)
        tokens = philox("measure batches").integers(0, config.vocab, (4, 7)).astype(np.int32)
        alone = self._asked(Script(config, WeightsKey(3), (_batch(tokens[:1]),), taps=False))[0].logits
        beside = self._asked(Script(config, WeightsKey(3), (_batch(tokens),), taps=False))[0].logits
        if alone is None or beside is None:
            raise Refused("a forward pass gave no logits")
        if alone.tobytes() != beside[: len(alone)].tobytes():
            share = 100 * float((alone != beside[: len(alone)]).mean())
            return [sure("batch_invariant", False, f"{share:.0f} % of the logits of a prompt of 7 are other bits beside three others")]
        rng = philox("measure rows")
        left, right = rng.standard_normal(TERMS_MAX).astype(np.float32), rng.standard_normal((TERMS_MAX, 48)).astype(np.float32)
        for rows in (2, 5, 16):
            if self.product(left, right, rows)[0].tobytes() != self.product(left, right, 1)[0].tobytes():
                return [sure("batch_invariant", False, f"the logits of a first row are other bits with {rows - 1} rows behind it")]
        return [
            likely("batch_invariant", True, "the logits of a prompt are the same bits alone, beside three others, and with rows behind it")
        ]

    def exp_lines(self) -> list[Line]:
        """Weights of rows in which the largest one is exactly 1: all others are exp of their distance, as the engine has it."""
        self._need_taps("scores", "probs")
        config = departed(preset("tiny"), self._worker.description.departures)
        crafted = dict(weights_for(config, WeightsKey(5)))
        crafted["0.q_b"] = crafted["0.q_b"] * np.float32(2.0**5)  # scores some tens apart
        tokens = philox("measure exp sessions").integers(0, config.vocab, (1, 96)).astype(np.int32)
        (answer,) = self._run(config, crafted, [_batch(tokens)], taps=True)
        scores, probs = answer.taps.get(("scores", 0)), answer.taps.get(("probs", 0))
        if scores is None or probs is None:
            raise Refused("the engine gave no scores or no weights")
        distance, weight = [], []
        for row in range(tokens.size):
            for head in range(config.heads):
                seen, given = scores[row, head, : row + 1], probs[row, head, : row + 1]
                apart = seen.max() - seen
                if given.max() == 1:
                    kept = (apart > ABSORBED) & (apart < 87)
                    distance.append(apart[kept])
                    weight.append(given[kept])
        points = np.concatenate([np.zeros(0, np.float32), *distance])
        if len(points) < 200:
            raise Refused(f"only {len(points)} weights of the session are a single exp")
        lines = probing.exp_lines(points, np.concatenate(weight), "exp in attention")
        if any(line.value is None for line in lines):  # the tap may be a recomputed copy of what exp was given
            raise Refused(f"{lines[0].evidence}; the scores that the engine shows may not be those that it exponentiates")
        return lines

    def router_lines(self) -> list[Line]:
        """Experts 2i and 2i + 1 have one routing column: wherever the cut goes between them, the scores are equal and the rule decides."""
        self._need_taps("router_scores", "expert_ids")
        config = departed(preset("tiny", top_k=3), self._worker.description.departures)
        tokens = philox("measure router sessions").integers(0, config.vocab, (1, 64)).astype(np.int32)
        (answer,) = self._asked(Script(config, WeightsKey(5, "tied-experts"), (_batch(tokens),)))
        layer = config.first_dense
        scores, ids = answer.taps.get(("router_scores", layer)), answer.taps.get(("expert_ids", layer))
        if scores is None or ids is None:
            raise Refused("the engine gave no router scores or no experts")
        chosen = np.zeros(scores.shape, np.bool_)
        np.put_along_axis(chosen, ids, True, 1)
        cut = (chosen[:, ::2] != chosen[:, 1::2]) & (scores[:, ::2] == scores[:, 1::2])
        higher = int((cut & chosen[:, 1::2]).sum())
        if not cut.any():
            raise Refused("no row of the session has equal router scores on both sides of the cut")
        text = f"{int(cut.sum())} pairs of equal router scores, one of each chosen"
        if higher:
            return [sure("ties", "any", f"{text}: the higher expert in {higher}")]
        return [likely("ties", "lowest", f"{text}: always the lower expert")]

    def _need_taps(self, *names: str) -> None:
        missing = [name for name in names if name not in self._worker.description.taps]
        if missing:
            raise Refused(f"only the tap {missing[0]} or a single operation would show it")

    def rotary_lines(self) -> list[Line]:
        """The cached key of a row whose unrotated key is (1, 0) in every pair is (cos, sin) of its angle, as the engine has them."""
        needed = {"forward", "commit", "cache_rows"} - set(self._worker.description.capabilities)
        if needed:
            raise Refused(f"the engine does not offer {sorted(needed)[0]}")
        config = self._config(hidden=64, rope_dim=16)
        pairs = config.rope_dim // 2
        kv_a = np.full((config.hidden, config.cache_dim), np.float32(2.0**-6))
        kv_a[:, config.kv_rank :] = 0
        kv_a[0, config.kv_rank :: 2] = 1  # interleaved pairs
        crafted = {f"{layer}.kv_a": kv_a for layer in range(config.layers)}
        count = len(POSITIONS)
        rows = Rows(
            np.arange(count, dtype=np.int32), np.zeros(count, np.int32), np.array(POSITIONS, np.int32), np.full(count, -1, np.int32)
        )
        steps: list[Step] = [Forward(rows, np.ones(count, np.bool_), "prefill")]
        steps += [Commit(sequence, np.zeros(1, np.int32)) for sequence in range(count)]
        steps += [CacheRows(sequence) for sequence in range(count)]
        caches = [answer.cache for answer in self._run(config, crafted, steps)[1 + count :]]
        found = np.stack([cache[0, -1, config.kv_rank :] for cache in caches if cache is not None]).reshape(count, pairs, 2)
        frequency = config.rope_theta ** (-2.0 * np.arange(pairs) / config.rope_dim)
        return [rotary_line(found, np.array(POSITIONS, np.float64)[:, None] * frequency)]


def rotary_line(found: NDArray[np.float32], angle: NDArray[np.float64]) -> Line:
    """`found` [positions, pairs, 2] = (cos, sin). A rounded float32 angle is off by a share of itself, which a large angle shows."""
    exact = np.stack([np.cos(angle), np.sin(angle)], -1)
    name, what = "angle_roundings", f"cached keys at positions {POSITIONS[0]} to {POSITIONS[-1]}"
    wide = found.astype(np.float64)
    if np.array_equal(found, exact.astype(np.float32)):
        return sure(name, 0.0, f"{what}: every cos and sin is the correctly rounded one")
    if not (np.abs(np.square(wide).sum(-1) - 1) < 2.0**-20).all():
        return unknown(name, f"{what}: no cos and sin of float32")
    off = np.abs(np.angle(np.exp(1j * (np.arctan2(wide[..., 1], wide[..., 0]) - angle))))
    large = angle > 2.0**6
    share = off[large] / (angle[large] * UNIT_FLOAT32)  # in roundings of the angle
    if float(share.max()) < 2.0**-4:
        return likely(name, 0.0, f"{what}: off by at most {off.max():.1e} radians, which is the rounding of cos and sin alone")
    worst = float(share.max())
    if worst > 64:
        return unknown(name, f"{what}: off by {worst:.3g} roundings of the angle: other frequencies")
    return likely(name, float(math.ceil(worst)), f"{what}: angles are off by up to {worst:.2f} float32 roundings of themselves")


def _chain(tokens: Int) -> Forward:
    """One sequence, all logits wanted."""
    rows = len(tokens)
    order = np.arange(rows, dtype=np.int32)
    return Forward(Rows(np.zeros(rows, np.int32), tokens, order, order - 1), np.ones(rows, np.bool_), "prefill")


def _batch(tokens: NDArray[np.int32]) -> Forward:
    """[sequences, length], in one batch, all logits wanted."""
    count, length = tokens.shape
    position = np.tile(np.arange(length, dtype=np.int32), count)
    parent = np.where(position == 0, -1, np.arange(count * length) - 1).astype(np.int32)
    rows = Rows(np.repeat(np.arange(count, dtype=np.int32), length), tokens.ravel(), position, parent)
    return Forward(rows, np.ones(count * length, np.bool_), "prefill")
