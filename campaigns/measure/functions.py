"""exp, division, log, inverse root and silu, each read from operations in which nothing else rounds."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from campaigns.measure.subject import Float, Operations, Refused
from oracles import probing
from oracles.probing import Line, merged
from spec.weights import philox

ABSORBED = 17.4  # exp(-d) from here on is less than half an ulp of 1: the sum of a row whose other key weighs 1 stays 1


def weights(subject: Operations, scores: Float) -> Float:
    """Softmax of [T, S], every key visible."""
    out: Float = subject.op("softmax", {"scores": scores[:, None], "visible": np.ones(scores.shape, np.uint8)}, {})["out"][:, 0]
    return out


def _attended(subject: Operations, scores: Float) -> Float:
    """The weight of the *last* key of each row of [T, 2], or of the *first* of longer ones, through tree_attention: its latent is one-hot."""
    rows, keys = scores.shape
    marked = keys - 1 if keys == 2 else 0
    query = np.zeros((rows, 1, 2 + rows), np.float32)
    query[np.arange(rows), 0, 2 + np.arange(rows)] = 1  # row t reads coordinate t of every key: its own scores, exactly
    cache = np.zeros((keys, 2 + rows), np.float32)
    cache[:, 0], cache[marked] = 1, 0
    cache[marked, 1] = 1
    cache[:, 2:] = scores.T
    inputs = {"q": query, "cache": cache, "visible": np.ones((rows, keys), np.uint8)}
    out: Float = subject.op("tree_attention", inputs, {"kv_rank": 2, "scale": 1.0})["out"][:, 0, 1]
    return out


def _exp_of(subject: Operations, way: str, distance: Float) -> Float:
    """exp(-distance) as softmax weighs a second key beside one that weighs 1; distances of at least ABSORBED."""
    scores = np.stack([np.zeros_like(distance), -distance], 1)
    if way == "softmax":
        return weights(subject, scores)[:, 1]
    parts = [_attended(subject, scores[start : start + 128]) for start in range(0, len(scores), 128)]
    return np.concatenate(parts)


def _ways(subject: Operations) -> list[str]:
    ways = [way for way in ("softmax", "tree_attention") if subject.offers(way)]
    if not ways:
        raise Refused("the engine offers neither softmax nor tree_attention")
    return ways


def exp_lines(subject: Operations) -> list[Line]:
    out = []
    for way in _ways(subject):
        count = 8192 if way == "softmax" else 1024
        distance = np.linspace(ABSORBED + 0.1, 87, count).astype(np.float32)
        lines = probing.exp_lines(distance, _exp_of(subject, way, distance), f"exp in {way}")
        out += lines
    return merged(out)


ASCENTS = ((0, 17, 34, 51), (0, 70, 140, 210), (0, 341, 682, 1023))  # of four keys among 1024: tiles of 16, of 64, and long parts


def online_lines(subject: Operations) -> list[Line]:
    """Four ascending keys, far apart in a long row whose other keys weigh nothing, against one exp and against a product of three."""
    out = []
    for way in _ways(subject):
        rows, keys = 96, 1024
        steps = philox("measure online").uniform(18, 28, (rows, 3)).astype(np.float32)
        levels = (-(steps[:, 0] + steps[:, 1] + steps[:, 2]), -(steps[:, 1] + steps[:, 2]), -steps[:, 2], np.zeros(rows, np.float32))
        direct = _exp_of(subject, way, -levels[0])
        first, second, third = (_exp_of(subject, way, after - before) for before, after in itertools.pairwise(levels))
        ascents = []
        for places in ASCENTS:
            scores = np.full((rows, keys), -1000, np.float32)
            for place, level in zip(places, levels, strict=True):
                scores[:, place] = level
            found = weights(subject, scores)[:, 0] if way == "softmax" else _attended(subject, scores)
            ascents.append(probing.Ascent(places, found, direct, (first * second) * third))
        out.append(probing.online_line(ascents, f"{way} of {keys} keys"))
    return merged(out)


def division_line(subject: Operations) -> Line:
    """A weight that is known bit by bit, over a sum that is a whole number exactly."""
    way = _ways(subject)[0]
    if way != "softmax":
        raise Refused("only softmax shows a quotient")
    distance = np.linspace(ABSORBED + 3, 80, 512).astype(np.float32)
    weight = _exp_of(subject, way, distance).astype(np.float64)
    found, exact = [], []
    for ones in (3, 5, 7, 11, 13):
        scores = np.concatenate([np.zeros((len(distance), ones), np.float32), -distance[:, None]], 1)
        found.append(weights(subject, scores)[:, -1])
        exact.append(weight / ones)
    return probing.ulp_line("div_ulp", np.concatenate(found), np.concatenate(exact), "softmax over 3 to 13 equal keys", 0.5)


def log_line(subject: Operations) -> Line:
    """Row i has i + 2 candidates of logit 0: each has log-probability -log(i + 2)."""
    rows = 255
    logits = np.where(np.arange(rows + 1)[None] < np.arange(2, rows + 2)[:, None], 0, -np.inf).astype(np.float32)
    found = subject.op("draft_table", {"logits": logits}, {"budget": 1})["log_probs"][:, 0]
    return probing.ulp_line("log_ulp", found, -np.log(np.arange(2, rows + 2, dtype=np.float64)), "log of 2 to 256 in the draft table")


def root_line(subject: Operations) -> Line:
    """Rows (1, v) whose mean square is a float32 number: the first output is its inverse root, nothing else rounds."""
    v, mean_square = root_points()
    rows = np.stack([np.ones_like(v), v], 1)
    found = subject.op("rms_norm", {"x": rows, "gain": np.ones(2, np.float32)}, {"eps": 1e-30})["out"][:, 0]
    return probing.ulp_line("rsqrt_ulp", found, 1 / np.sqrt(mean_square), "inverse root of a mean square, by rms_norm", 0.5)


def root_points() -> tuple[Float, NDArray[np.float64]]:
    """v with 11 bits, and (1 + v^2) / 2, which float32 holds."""
    v = (np.arange(1, 3500) * 2.0**-11).astype(np.float32)
    return v, (1 + v.astype(np.float64) ** 2) / 2


def silu_line(subject: Operations) -> Line:
    gate = -np.linspace(16, 60, 256).astype(np.float32)[:, None]
    return probing.tanh_line(gate[:, 0], subject.op("swiglu", {"gate": gate, "up": np.ones_like(gate)}, {})["out"][:, 0])
