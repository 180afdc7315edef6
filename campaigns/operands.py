"""Input arrays of one operation, by regime. Every array has its own generator keyed by (op, seed, operand name), so that a change
of one size leaves the other operands as they are.

Regimes: "ordinary"; "ties" (exact duplicates, values on a coarse grid, equal scores at a cut); "extreme" (magnitudes 1e-30..1e15 whose
products stay finite, raw scores below -5e4, zero rows, one outlier channel); "lattice" (small integers and one-hot rows, so that
the exact result is a float32 and every honest order of summation gives it); "cancel" (terms that cancel almost completely). Operations of
the draft tree have "refused" as well: inputs outside their domain (REFUSALS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.formats import GROUP, packed_int4, rounded_bfloat16
from spec.weights import philox

REGIMES = ("ordinary", "ties", "extreme", "lattice", "cancel")

Float = NDArray[np.float32]
Int = NDArray[np.int32]
Bool = NDArray[np.uint8]
Inputs = dict[str, NDArray[Any]]
LATTICE_MAX = 4  # integers up to 4: sums of 2**20 products stay below 2**24 and are exact in float32


@dataclass(frozen=True)
class Recipe:
    """What a generator of operands may look at."""

    op: str
    dims: Mapping[str, int]
    params: Mapping[str, int | float]
    regime: str
    seed: int

    def rng(self, name: str) -> np.random.Generator:
        return philox("op", self.op, self.seed, name)

    def __getitem__(self, word: str) -> int:
        return int(self.params[word] if word in self.params else self.dims[word])


# Building blocks


def values(rng: np.random.Generator, shape: tuple[int, ...], regime: str, exponent_max: int = 15) -> Float:
    """Float32 values of one operand; the last axis is the channel axis. Extreme magnitudes are 10**(-2*exponent_max .. exponent_max) per
    row, so that a product of two such operands stays finite in float32 (1e30) for every accumulation order."""
    if regime == "lattice":
        return rng.integers(-LATTICE_MAX, LATTICE_MAX + 1, shape).astype(np.float32)
    draw = rng.standard_normal(shape)
    if regime == "ties":
        draw = np.rint(draw * 2) / 2
        if len(shape) and shape[0] > 1:
            draw[1::2] = draw[: 2 * (shape[0] // 2) : 2]
    elif regime == "extreme" and draw.size:
        rows = (*shape[:-1], 1)
        draw = draw * 10.0 ** rng.integers(-2 * exponent_max, exponent_max + 1, rows)
        flavour = int(rng.integers(4))
        if flavour == 0:  # zero rows
            draw = draw * (rng.random(rows) < 0.7)
        elif flavour == 1:  # one outlier channel
            draw[..., int(rng.integers(shape[-1]))] *= 1e3
        elif flavour == 2:  # denormals among ordinary values
            draw = np.where(rng.random(shape) < 0.2, 1e-40, np.sign(draw))
    return draw.astype(np.float32)


def contracted(
    recipe: Recipe, left: str, left_shape: tuple[int, ...], right: str, right_shape: tuple[int, ...], axis: int
) -> tuple[Float, Float]:
    """Operands of a contraction over the last axis of `left` and `axis` of `right`, scaled so that an ordinary result is of order one."""
    a = values(recipe.rng(left), left_shape, recipe.regime)
    b = values(recipe.rng(right), right_shape, recipe.regime)
    if recipe.regime in ("ordinary", "cancel"):
        b *= np.float32(max(1, left_shape[-1]) ** -0.5)
    if recipe.regime == "cancel":
        moved = np.moveaxis(b, axis, -1)  # a view
        pairs = 2 * (left_shape[-1] // 2)
        a[..., 1:pairs:2] = a[..., 0:pairs:2]
        moved[..., 1:pairs:2] = -moved[..., 0:pairs:2]
        if pairs:  # what remains is one term of 2**-12
            moved[..., 0] += np.float32(2.0**-12)
    return a, b


def parents(rng: np.random.Generator, rows: int) -> Int:
    """One tree with `rows` nodes, root first: chain, star, one branch point, random, or wide near the root."""
    out = np.zeros(rows, np.int32)
    out[0] = -1
    style = int(rng.integers(5))
    for node in range(2, rows):
        if style == 0:
            out[node] = node - 1
        elif style == 1:
            out[node] = 0
        elif style == 2:
            out[node] = node - 1 if node != rows // 2 else 0
        elif style == 3:
            out[node] = int(rng.integers(node))
        else:
            out[node] = int(rng.integers(min(node, 4)))
    return out


def sibling_tokens(rng: np.random.Generator, parent_of: Int, vocab: int) -> Int:
    """Tokens of a tree: siblings differ (T6), equal tokens under different parents are frequent. Needs vocab > number of siblings."""
    tokens = np.zeros(len(parent_of), np.int32)
    tokens[0] = rng.integers(vocab)
    start = int(rng.integers(vocab))
    born = np.zeros(len(parent_of), np.int32)
    for node in range(1, len(parent_of)):
        parent = int(parent_of[node])
        tokens[node] = (start + parent % 3 + born[parent]) % vocab
        born[parent] += 1
    return tokens


def visibility(rng: np.random.Generator, rows: int, keys: int) -> Bool:
    """Masks drawn on their own: random density, windows, prefix and tree, empty rows, a single key; a row may see nothing."""
    style = int(rng.integers(5))
    if style == 0:
        seen = rng.random((rows, keys)) < rng.choice([0.1, 0.5, 0.9])
    elif style == 1:
        seen = np.tri(rows, keys, keys - rows, dtype=np.bool_)
    elif style == 2:
        at = np.arange(rows)[:, None] + max(0, keys - rows) - np.arange(keys)[None, :]
        seen = (at >= 0) & (at < int(rng.integers(1, 5)))
    elif style == 3:
        seen = np.zeros((rows, keys), np.bool_)
        seen[np.arange(rows), rng.integers(0, keys, rows)] = True
    else:
        seen = np.ones((rows, keys), np.bool_)
    if style in (0, 4) and rng.random() < 0.4:
        seen[int(rng.integers(rows))] = False
        if rng.random() < 0.5:
            seen[0] = False  # an empty row in the first tile
    visible: Bool = seen.astype(np.uint8)
    return visible


def _score_values(rng: np.random.Generator, shape: tuple[int, ...], regime: str) -> Float:
    """Raw attention scores."""
    if regime == "lattice":  # one key of each row leads by more than 104: the others are exactly 0 after exp in float32
        out = np.full(shape, -300, np.float32)
        np.put_along_axis(out, rng.integers(0, shape[-1], (*shape[:-1], 1)), np.float32(0), axis=-1)
        return out
    draw = 3 * rng.standard_normal(shape)
    if regime == "ties":
        draw = np.rint(draw)
    elif regime == "extreme":
        draw += rng.choice([-6e4, -3e5, 8e4, 0.0, 80.0])
        draw *= rng.choice([1.0, 1.0, 30.0])
    elif regime == "cancel":
        draw = 1000 + draw * 2.0**-10
    return draw.astype(np.float32)


# One function per operation


def _embed(r: Recipe) -> Inputs:
    ids = r.rng("ids").integers(0, r["V"], r["T"]).astype(np.int32)
    if r.regime == "ties":
        ids[:] = ids[0]
    if r.regime == "lattice":
        ids[-1] = r["V"] - 1
    return {"table": values(r.rng("table"), (r["V"], r["N"]), r.regime), "ids": ids}


def _rms_norm(r: Recipe) -> Inputs:
    x = values(r.rng("x"), (r["T"], r["N"]), r.regime)
    if r.regime == "cancel":  # rows whose mean square is of the size of eps
        x *= np.float32(2e-3)
    return {"x": x, "gain": (1 + 0.3 * r.rng("gain").standard_normal(r["N"])).astype(np.float32)}


def _matmul(r: Recipe) -> Inputs:
    x, w = contracted(r, "x", (r["T"], r["K"]), "w", (r["K"], r["N"]), 0)
    return {"x": x, "w": w}


def _rope(r: Recipe) -> Inputs:
    half = r["half"]
    if r.regime == "lattice":  # quarter turns
        quarter = r.rng("angle").integers(0, 4, (r["T"], half))
        cos = np.array([1, 0, -1, 0], np.float32)[quarter]
        sin = np.array([0, 1, 0, -1], np.float32)[quarter]
    else:
        angle = r.rng("angle").uniform(-50, 50, (r["T"], half))
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return {"x": values(r.rng("x"), (r["T"], r["H"], 2 * half), r.regime), "cos": cos, "sin": sin}


def _q_absorb(r: Recipe) -> Inputs:
    q, w = contracted(r, "q_nope", (r["T"], r["H"], r["n"]), "w_kc", (r["H"], r["n"], r["R"]), 1)
    return {"q_nope": q, "w_kc": w}


def _scores(r: Recipe) -> Inputs:
    q, keys = contracted(r, "q", (r["T"], r["H"], r["C"]), "keys", (r["S"], r["C"]), 1)
    return {"q": q, "keys": keys}


def _softmax(r: Recipe) -> Inputs:
    return {
        "scores": _score_values(r.rng("scores"), (r["T"], r["H"], r["S"]), r.regime),
        "visible": visibility(r.rng("visible"), r["T"], r["S"]),
    }


def _probabilities(rng: np.random.Generator, shape: tuple[int, ...], regime: str) -> Float:
    if regime == "lattice":
        out = np.zeros(shape, np.float32)
        np.put_along_axis(out, rng.integers(0, shape[-1], (*shape[:-1], 1)), np.float32(1), axis=-1)
        return out
    draw = np.exp(3 * rng.standard_normal(shape))
    draw /= draw.sum(axis=-1, keepdims=True)
    if regime == "extreme":
        draw = draw**4
    return draw.astype(np.float32)


def _o_latent(r: Recipe) -> Inputs:
    latent = values(r.rng("latent"), (r["S"], r["R"]), r.regime)
    if r.regime == "cancel":
        pairs = 2 * (r["S"] // 2)
        latent[1:pairs:2] = -latent[0:pairs:2]
    return {"probs": _probabilities(r.rng("probs"), (r["T"], r["H"], r["S"]), r.regime), "latent": latent}


def _o_heads(r: Recipe) -> Inputs:
    o, w = contracted(r, "o_latent", (r["T"], r["H"], r["R"]), "w_vc", (r["H"], r["R"], r["v"]), 1)
    return {"o_latent": o, "w_vc": w}


def _tree_attention(r: Recipe) -> Inputs:
    rows, heads, keys, width = r["T"], r["H"], r["S"], r["C"]
    rng = r.rng("visible")
    if keys >= rows and rng.random() < 0.6:  # a prefix and one tree
        seen = np.zeros((rows, keys), np.uint8)
        seen[:, : keys - rows] = 1
        parent_of = parents(rng, rows)
        for row in range(rows):
            if row:
                seen[row, keys - rows :] = seen[parent_of[row], keys - rows :]
            seen[row, keys - rows + row] = 1
    else:
        seen = visibility(rng, rows, keys)
    if r.regime == "lattice":  # each row's query points at one visible key, by a score gap of at least 100
        cache = r.rng("cache").choice(np.array([-1, 1], np.float32), (keys, width))
        target = np.array([int(rng.choice(np.flatnonzero(row))) if row.any() else 0 for row in seen])
        gain = np.float32(2.0 ** np.ceil(np.log2(100 / float(r.params["scale"]))))
        q = np.repeat(cache[target][:, None, :] * gain, heads, axis=1)
        return {"q": np.ascontiguousarray(q), "cache": cache, "visible": seen}
    regime = "ordinary" if r.regime == "extreme" else r.regime
    q = values(r.rng("q"), (rows, heads, width), regime)
    cache = values(r.rng("cache"), (keys, width), regime)
    if r.regime == "extreme":
        flavour = int(r.rng("flavour").integers(3))
        if flavour == 0:  # scores of about -1e5 for every key: all keys point against all queries
            q = (np.abs(q) * np.float32(1e5 / (width * float(r.params["scale"])))).astype(np.float32)
            cache = -np.abs(cache)
        elif flavour == 1:
            cache[:, int(r.rng("channel").integers(width))] *= np.float32(100)
        else:
            cache *= np.float32(1e-6)
    return {"q": q, "cache": cache, "visible": seen}


def _router_scores(r: Recipe) -> Inputs:
    logits = _score_values(r.rng("logits"), (r["T"], r["E"]), "ordinary" if r.regime in ("extreme", "lattice", "cancel") else r.regime)
    if r.regime == "extreme":
        logits = logits * np.float32(r.rng("factor").choice([10, 30])) - np.float32(r.rng("shift").choice([0, 18, 80]))
    elif r.regime == "lattice":
        logits = np.zeros_like(logits)
    elif r.regime == "cancel":
        logits = logits * np.float32(2.0**-12)
    return {"logits": logits.astype(np.float32)}


def _route(r: Recipe) -> Inputs:
    shape = (r["T"], r["E"])
    bias = 0.3 * r.rng("bias").standard_normal(r["E"])
    if r.regime == "lattice":  # separated: scores are distinct multiples of 2**-10
        scores = (1 + np.argsort(r.rng("scores").random(shape), axis=-1)) * 2.0**-10
        bias = np.zeros(r["E"])
    else:
        scores = 1 / (1 + np.exp(-2 * r.rng("scores").standard_normal(shape)))
    if r.regime == "ties":
        scores, bias = np.ceil(scores * 4) / 8, np.rint(bias * 2) / 2
    elif r.regime == "extreme":
        scores, bias = scores * 1e-8, bias + 12
        scores[r.rng("underflow").random(r["T"]) < 0.3] = 0  # a sigmoid of logits below -104
    elif r.regime == "cancel":
        bias = bias - 2
    return {"scores": scores.astype(np.float32), "bias": bias.astype(np.float32)}


def _swiglu(r: Recipe) -> Inputs:
    shape = (r["T"], r["N"])
    gate = values(r.rng("gate"), shape, "ordinary" if r.regime == "extreme" else r.regime)
    if r.regime == "extreme":
        gate *= np.float32(r.rng("factor").choice([1e-20, 30, 100, 1e4]))
    return {"gate": gate, "up": values(r.rng("up"), shape, r.regime)}


def _moe(r: Recipe) -> Inputs:
    experts, hidden, width = r["E"], r["N"], r["F"]
    rng = r.rng("ids")
    ids = np.argsort(rng.random((r["T"], experts)), axis=-1)[:, : r["K"]].astype(np.int32)
    if rng.random() < 0.4:  # every row to the last experts, the others get none
        ids[:] = np.arange(experts - r["K"], experts)[::-1]
    regime = "ordinary" if r.regime == "extreme" else r.regime
    x = values(r.rng("x"), (r["T"], hidden), regime)
    if r.regime == "extreme":
        x *= np.float32(r.rng("factor").choice([1e-6, 50, 1e3]))
    scale = 1.0 if regime == "lattice" else hidden**-0.5
    return {
        "x": x,
        "ids": ids,
        "gate": values(r.rng("gate"), (experts, hidden, width), regime) * np.float32(scale),
        "up": values(r.rng("up"), (experts, hidden, width), regime) * np.float32(scale),
        "down": values(r.rng("down"), (experts, width, hidden), regime) * np.float32(1.0 if regime == "lattice" else width**-0.5),
    }


def _int4_matmul(r: Recipe) -> Inputs:
    """Scales are bfloat16 numbers, as checkpoints store them; "extreme" spreads them over 24 octaves from group to group."""
    groups, columns = r["G"], r["N"]
    quantised = r.rng("q").integers(-8, 8, (GROUP * groups, columns))
    scales = np.abs(values(r.rng("scales"), (groups, columns), "ordinary")) + np.float32(0.25)
    if r.regime == "extreme":
        scales = scales * np.float32(2.0) ** r.rng("octaves").integers(-12, 13, (groups, 1)).astype(np.float32)
    if r.regime == "lattice":
        scales = np.exp2(r.rng("octaves").integers(-2, 3, (groups, columns))).astype(np.float32)
    x = values(r.rng("x"), (r["T"], GROUP * groups), "ordinary" if r.regime == "extreme" else r.regime)
    return {"x": x, "packed": packed_int4(quantised), "scales": rounded_bfloat16(scales.astype(np.float32))}


def _combine(r: Recipe) -> Inputs:
    experts = values(r.rng("experts"), (r["T"], r["K"], r["N"]), r.regime)
    shared = values(r.rng("shared"), (r["T"], r["N"]), r.regime)
    weights = np.abs(values(r.rng("weights"), (r["T"], r["K"]), "lattice" if r.regime == "lattice" else "ordinary"))
    if r.regime == "cancel":
        shared = -(weights.astype(np.float64)[:, :, None] * experts).sum(axis=1).astype(np.float32)
    return {"weights": weights, "experts": experts, "shared": shared}


def _add(r: Recipe) -> Inputs:
    a = values(r.rng("a"), (r["T"], r["N"]), r.regime)
    b = values(r.rng("b"), (r["T"], r["N"]), r.regime)
    if r.regime == "cancel":
        b = (-a * np.float32(1 + 2.0**-20)).astype(np.float32)
    return {"a": a, "b": b}


def _argmax(r: Recipe) -> Inputs:
    logits = values(r.rng("logits"), (r["T"], r["V"]), r.regime)
    if r.regime == "cancel":  # zeros of both signs are equal
        logits = np.where(r.rng("sign").random(logits.shape) < 0.5, np.float32(-0.0), np.float32(0.0))
    if r.regime == "ties" and r["V"] > 1:
        columns = r.rng("columns").integers(0, r["V"], 2)
        logits[:, columns] = logits.max(axis=-1, keepdims=True)
    if r.regime == "extreme":  # masked vocabularies: some tokens, or all of a row, are impossible
        masked = r.rng("masked")
        logits = np.where(masked.random(logits.shape) < 0.3, np.float32(-np.inf), logits)
        logits[masked.random(r["T"]) < 0.3] = -np.inf
    return {"logits": logits.astype(np.float32)}


def _sample(r: Recipe) -> Inputs:
    """Histories of unequal length, tokens twice in them; "ties" on a grid, "cancel" all equal, "extreme" far apart or partly impossible."""
    rng = r.rng("logits")
    grid = {"ties": 0, "lattice": 0}.get(r.regime, -1)
    logits = grid_logits(rng, r["T"], r["V"], grid, r["V"] // 3 if r.regime == "extreme" else 0)
    if r.regime == "extreme":
        logits = (logits * np.float32(rng.choice([1e-6, 1.0, 30.0, 1e4]))).astype(np.float32)
    if r.regime == "cancel":
        logits[:] = logits[:, :1]
    history = r.rng("history").integers(0, min(r["V"], 6), (r["T"], r["J"])).astype(np.int32)
    for row, length in enumerate(r.rng("lengths").integers(1, r["J"] + 1, r["T"]).tolist()):
        history[row, length:] = -1
    return {"logits": logits, "history": history, "sequences": r.rng("sequences").integers(0, 9, r["T"]).astype(np.int32)}


def grid_logits(rng: np.random.Generator, depth: int, vocab: int, grid: int, minus_infinity: int) -> Float:
    """Draft logits [depth, vocab]: multiples of 2**-grid (negative: not rounded), `minus_infinity` candidates per row removed."""
    draw = 2.5 * rng.standard_normal((depth, vocab))
    if grid >= 0:
        draw = np.ldexp(np.rint(np.ldexp(draw, grid)), -grid)
    logits = draw.astype(np.float32)
    if minus_infinity:
        gone = np.argsort(rng.random((depth, vocab)), axis=-1)[:, : min(vocab, minus_infinity)]
        np.put_along_axis(logits, gone, np.float32(-np.inf), axis=-1)
    return logits


def _draft_table(r: Recipe) -> Inputs:
    rng = r.rng("logits")
    grid = {"ties": 0, "lattice": 0, "cancel": 1}.get(r.regime, -1)
    logits = grid_logits(rng, r["L"], r["V"], grid, r["V"] // 3 if r.regime == "cancel" else 0)
    if r.regime == "extreme":
        logits = (logits * np.float32(rng.choice([1e-6, 30.0, 1e4]))).astype(np.float32)
    return {"logits": logits}


def _best_first_tree(r: Recipe) -> Inputs:
    depth, width = r["L"], r["K"]
    rng = r.rng("log_probs")
    steps = np.abs(rng.standard_normal((depth, width)))
    if r.regime in ("ties", "lattice"):
        steps = np.floor(steps * 2) / 4
    elif r.regime == "cancel":  # sums that differ by less than a float32 ulp of their size
        steps = 20 + np.floor(steps * 4) * 2.0**-18
        steps[:, 1:] -= 20
    elif r.regime == "extreme":
        steps = steps * 10.0 ** rng.integers(-6, 6, (depth, 1))
    log_probs = (-np.cumsum(steps, axis=-1)).astype(np.float32)
    if r.regime == "extreme" and rng.random() < 0.5:  # rows that end early, also at rank 0
        log_probs[:, int(rng.integers(width)) :] = -np.inf
    vocab = max(width + 3, 8)
    ids = np.argsort(r.rng("ids").random((depth, vocab)), axis=-1)[:, :width].astype(np.int32)
    return {"ids": ids, "log_probs": log_probs}


def _tree_mask(r: Recipe) -> Inputs:
    return {"parents": parents(r.rng("parents"), r["M"])}


def _accept(r: Recipe) -> Inputs:
    rng = r.rng("parents")
    parent_of = parents(rng, r["M"])
    vocab = r["M"] + 3
    tokens = sibling_tokens(rng, parent_of, vocab)
    return {"tokens": tokens, "parents": parent_of, "target": targets(rng, tokens, parent_of, vocab, 80)}


def targets(rng: np.random.Generator, tokens: Int, parent_of: Int, vocab: int, follow: int) -> Int:
    """Target tokens: with `follow` percent the token of one of the node's children, otherwise any token."""
    out = rng.integers(0, vocab, len(tokens)).astype(np.int32)
    for node in range(len(tokens)):
        children = np.flatnonzero(parent_of == node)
        if len(children) and rng.random() * 100 < follow:
            out[node] = tokens[children[int(rng.integers(len(children)))]]
    return out


def _compact(r: Recipe) -> Inputs:
    rng = r.rng("path")
    pending = r["S"] - r["prefix_len"]
    path = np.sort(rng.permutation(pending)[: r["J"]]).astype(np.int32)
    return {"cache": values(r.rng("cache"), (r["S"], r["C"]), r.regime), "path": path}


# Inputs outside an operation's domain, which an engine must refuse


def _refused_parents(r: Recipe) -> Int:
    """A tree that is none: a node whose parent is itself, a later node, before the root, or a second root; or no root at all."""
    rng = r.rng("refused")
    parent_of = parents(r.rng("parents"), r["M"])
    node = int(rng.integers(r["M"]))
    wrong = [node, node + 1, -2, r["M"]] + ([-1] if node else [0])
    parent_of[node] = wrong[int(rng.integers(len(wrong)))]
    return parent_of


def _refused_tree_mask(r: Recipe) -> Inputs:
    return {"parents": _refused_parents(r)}


def _refused_accept(r: Recipe) -> Inputs:
    return {**_accept(r), "parents": _refused_parents(r)}


def _refused_sample(r: Recipe) -> Inputs:
    """A row with NaN or +inf, or with nothing finite."""
    inputs = _sample(r)
    rng = r.rng("refused")
    row = int(rng.integers(r["T"]))
    if rng.random() < 0.3:
        inputs["logits"][row] = -np.inf
    else:
        inputs["logits"][row, int(rng.integers(r["V"]))] = rng.choice(np.array([np.nan, np.inf], np.float32))
    return inputs


def _refused_draft_table(r: Recipe) -> Inputs:
    logits = _draft_table(r)["logits"]
    rng = r.rng("refused")
    logits[int(rng.integers(r["L"])), int(rng.integers(r["V"]))] = rng.choice(np.array([np.nan, np.inf], np.float32))
    return {"logits": logits}


def _refused_best_first_tree(r: Recipe) -> Inputs:
    """NaN in the table, or a rank that is likelier than the one before it."""
    inputs = _best_first_tree(r)
    rng = r.rng("refused")
    depth, rank = int(rng.integers(r["L"])), int(rng.integers(r["K"]))
    ascends = rank > 0 and rng.random() < 0.5
    inputs["log_probs"][depth, rank] = inputs["log_probs"][depth, rank - 1] / 2 + 1 if ascends else np.nan
    return inputs


def _refused_compact(r: Recipe) -> Inputs:
    """A path that names a row twice, goes back, or leaves the pending rows."""
    inputs = _compact(r)
    rng = r.rng("refused")
    at = int(rng.integers(r["J"]))
    wrong = [-1, r["S"] - r["prefix_len"]] + ([int(inputs["path"][at - 1])] if at else [])
    inputs["path"][at] = wrong[int(rng.integers(len(wrong)))]
    return inputs


REFUSALS: dict[str, Callable[[Recipe], Inputs]] = {
    "sample": _refused_sample,
    "draft_table": _refused_draft_table,
    "best_first_tree": _refused_best_first_tree,
    "tree_mask": _refused_tree_mask,
    "accept": _refused_accept,
    "compact": _refused_compact,
}
REFUSED = "refused"  # the regime

OPERANDS: dict[str, Callable[[Recipe], Inputs]] = {
    "embed": _embed, "rms_norm": _rms_norm, "matmul": _matmul, "rope": _rope, "q_absorb": _q_absorb, "scores": _scores,
    "softmax": _softmax, "o_latent": _o_latent, "o_heads": _o_heads, "tree_attention": _tree_attention,
    "router_scores": _router_scores, "route": _route, "swiglu": _swiglu, "moe": _moe, "int4_matmul": _int4_matmul, "combine": _combine, "add": _add,
    "argmax": _argmax, "sample": _sample, "draft_table": _draft_table, "best_first_tree": _best_first_tree, "tree_mask": _tree_mask, "accept": _accept,
    "compact": _compact,
}  # fmt: skip
