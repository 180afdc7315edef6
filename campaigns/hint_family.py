"""What a hint tries where no known defect fits: at each named point of the blocked engine, the few ways in which kernels go wrong anywhere.

A point's result, or what goes into it, is rounded to a narrower format; a result is multiplied by a constant (which one is found by the hint), or one of
its rows is lost: left empty, or a copy of its neighbour. A mask has a key too many or too few, a position is one off, a norm has another eps. None of
these is a report; each says where, and what it is like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.blocked.points import Overrides, Site
from impls.planted import Plant
from impls.planted.planting import CACHE, CLASSES, MASK, POSITION, ROPE, ROUTE, SCORES, SOFTMAX, TABLE, bf16

Float = NDArray[np.float32]

# point -> operations and rules that a judge may rightly name for it
POINTS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("matmul", "moe", "int4_matmul", "M3"),
    "argmax": ("argmax", "A1"),
    "best": ROUTE,
    "candidates": TABLE,
    "group_scales": ("int4_matmul", "M11"),
    "mean_square": ("rms_norm", "M2"),
    "inverse_root": ("rms_norm", "M2"),
    "apply_gain": ("rms_norm", "M2"),
    "sigmoid": ("router_scores", "swiglu", "moe", "M7"),
    "swiglu": ("swiglu", "moe", "M7"),
    "residual": ("add",),
    "rope_frequencies": ROPE,
    "rope_tables": ROPE,
    "rotate": ROPE,
    "to_cache": ("rms_norm", "rope", *CACHE),
    "absorb": ("q_absorb",),
    "unabsorb": ("o_heads",),
    "load_tile": SCORES,
    "score": SCORES,
    "exponential": (*SOFTMAX, "router_scores"),
    "row_sum": SOFTMAX,
    "rescale": SOFTMAX,
    "normalise": SOFTMAX,
    "value_tile": ("o_latent", "tree_attention"),
    "group_scores": ROUTE,
    "biased": ROUTE,
    "mixing_scores": ROUTE,
    "mixing_weights": ROUTE,
    "shared_output": ("combine", "M7"),
    "combine": ("combine", "M7"),
    "log_normaliser": TABLE,
    "log_prob": TABLE,
}


def fp16(x: Float) -> Float:
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


def cut(x: Float) -> Float:
    """Without the last 13 bits, as TF32."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).reshape(np.shape(x))


def twice(x: Float) -> Float:
    return x * np.float32(2)


def without_last_row(x: Float) -> Float:
    if not np.ndim(x) or len(x) < 2:
        return x
    out = x.copy()
    out[-1] = 0
    return out


def last_row_again(x: Float) -> Float:
    if not np.ndim(x) or len(x) < 2:
        return x
    out = x.copy()
    out[-1] = out[-2]
    return out


WAYS: Mapping[str, tuple[str, str, Callable[[Float], Float]]] = {
    # name -> (class, words, function)
    "bf16": ("g", "rounded to bfloat16", bf16),
    "fp16": ("g", "rounded to float16", fp16),
    "tf32": ("g", "cut to TF32", cut),
    "factor": ("a", "times a constant", twice),
    "last row empty": ("h", "without its last row", without_last_row),
    "last row stale": ("h", "with the last row but one in place of the last", last_row_again),
}


def _at(point: str, change: Callable[[Float], Float]) -> Overrides:
    def replaced(site: Site, *arguments: Any) -> Any:
        out = site.honest(*arguments)
        if isinstance(out, tuple):
            return tuple(change(part) for part in out)
        changed = change(out)
        return type(out)(changed) if np.ndim(out) == 0 else changed.astype(out.dtype, copy=False)

    return {point: replaced}


def _given(point: str, change: Callable[[Float], Float], first_only: bool = False) -> Overrides:
    """What goes into the point is changed, not what comes out."""

    def replaced(site: Site, *arguments: Any) -> Any:
        given = list(arguments)
        arrays = [place for place, each in enumerate(given) if isinstance(each, np.ndarray) and each.dtype == np.float32]
        for place in arrays[:1] if first_only else arrays:
            given[place] = change(given[place])
        return site.honest(*given)

    return {point: replaced}


NARROW = ("bf16", "fp16", "tf32")
INTEGERS = frozenset({"argmax", "best", "candidates"})  # indices come out: only what goes in can be rounded

Mask = Callable[[NDArray[np.bool_], int], None]


def _mask(change: Mask) -> Overrides:
    def replaced(site: Site, parents: Sequence[int], prefix_len: int) -> NDArray[np.bool_]:
        seen: NDArray[np.bool_] = site.honest(parents, prefix_len)
        change(seen, prefix_len)
        return seen

    return {"visible": replaced}


def _set(rows: slice, columns: Callable[[int, int], Any], value: bool) -> Mask:
    """`columns` of (prefix_len, rows) in `rows` of trees and prompts alike."""

    def change(seen: NDArray[np.bool_], prefix_len: int) -> None:
        seen[rows, columns(prefix_len, len(seen))] = value

    return change


def _own_key(row: int) -> Mask:
    def change(seen: NDArray[np.bool_], prefix_len: int) -> None:
        if len(seen) > 1:
            seen[row, prefix_len + row % len(seen)] = False

    return change


def _causal(seen: NDArray[np.bool_], prefix_len: int) -> None:
    seen |= np.tri(seen.shape[0], seen.shape[1], prefix_len, dtype=np.bool_)


EVERY = slice(None)
MASKS: Mapping[str, tuple[str, Mask]] = {
    "everything": ("every row sees every key", _set(EVERY, lambda prefix, rows: EVERY, True)),
    "causal": ("every row sees all rows before it", _causal),
    "no prefix": ("the prefix is not seen", _set(EVERY, lambda prefix, rows: slice(prefix), False)),
    "no first key": ("the first key is not seen", _set(EVERY, lambda prefix, rows: slice(1), False)),
    "no last of the prefix": (
        "the last key of the prefix is not seen",
        _set(EVERY, lambda prefix, rows: slice(max(0, prefix - 1), prefix), False),
    ),
    "second row without itself": ("the second row does not see itself", _own_key(1)),
    "last row without itself": ("the last row does not see itself", _own_key(-1)),
}
POSITIONS: Mapping[str, tuple[str, Callable[[Any, int, Any, Any], Any]]] = {
    "one more": ("every position is one too large", lambda site, prefix, node, depth: site.honest(prefix, node, depth) + np.int32(1)),
    "one less": ("every position is one too small", lambda site, prefix, node, depth: np.maximum(site.honest(prefix, node, depth) - 1, 0).astype(np.int32)),
    "of the last row": (
        "every row has the position of the last", lambda site, prefix, node, depth: np.full_like(depth, site.honest(prefix, node, depth)[-1]),
    ),
    "of the first row": (
        "every row has the position of the first", lambda site, prefix, node, depth: np.full_like(depth, site.honest(prefix, node, depth)[0]),
    ),
    "without the prefix": ("positions start at 0 in every batch", lambda site, prefix, node, depth: site.honest(0, node, depth)),
}  # fmt: skip


def _rotated(which: str, change: Callable[[Callable[..., Float], Float, Float, Float, bool], Float]) -> Overrides:
    """Of "q" or "k" in a session; an operation on its own is either."""

    def replaced(site: Site, name: str, x: Float, cos: Float, sin: Float, half_layout: bool) -> Float:
        if name not in (which, "op"):
            out: Float = site.honest(name, x, cos, sin, half_layout)
            return out
        return change(lambda *given: site.honest(name, *given), x, cos, sin, half_layout)

    return {"rotate": replaced}


ROTATIONS: Mapping[str, tuple[str, Callable[[Callable[..., Float], Float, Float, Float, bool], Float]]] = {
    "not at all": ("is not rotated", lambda honest, x, cos, sin, half: x),
    "twice": ("is rotated twice", lambda honest, x, cos, sin, half: honest(honest(x, cos, sin, half), cos, sin, half)),
    "back": ("is rotated the other way", lambda honest, x, cos, sin, half: honest(x, cos, -sin, half)),
    "the other layout": ("is rotated in the other layout", lambda honest, x, cos, sin, half: honest(x, cos, sin, not half)),
}
KEPT: Mapping[str, tuple[str, Callable[[Site, Sequence[int], int], Sequence[int]]]] = {
    "the first rows": ("the first rows are kept instead of the accepted ones", lambda site, path, pending: range(len(path))),
    "every row": ("nothing is rolled back", lambda site, path, pending: range(pending)),
    "not the last": ("the last accepted row is lost", lambda site, path, pending: path[:-1] if len(path) > 1 else path),
    "the last rows": (
        "the last rows are kept instead of the accepted ones",
        lambda site, path, pending: range(pending - len(path), pending),
    ),
}


def _nothing_moves(site: Site, store: Float, target: Any, source: Any, kv_rank: int) -> None:
    return None


def _another_eps(site: Site, square: Float, eps: float) -> Float:
    out: Float = site.honest(square, eps * 2)
    return out


def _members() -> Iterator[tuple[str, str, tuple[str, ...], str, Overrides]]:
    """(name, class, operations, words, functions)."""
    for point, ops in POINTS.items():
        for way, (letter, words, change) in WAYS.items():
            if point not in INTEGERS:
                yield f"{point}, {way}", letter, ops, words, _at(point, change)
            if way in NARROW:
                yield f"{point} of {way}", letter, ops, f"of operands {words}", _given(point, change)
                yield f"{point} of {way} first", letter, ops, f"of a first operand {words}", _given(point, change, first_only=True)
    for name, (words, mask) in MASKS.items():
        yield f"visible, {name}", "b", MASK, words, _mask(mask)
    for name, (words, function) in POSITIONS.items():
        yield f"position, {name}", "b", POSITION, words, {"position": function}
    for name, (words, rotation) in ROTATIONS.items():
        for which in ("q", "k"):
            yield f"rotate {which}, {name}", "a", ROPE, f"{which} {words}", _rotated(which, rotation)
    for name, (words, keep) in KEPT.items():
        yield f"keep, {name}", "e", CACHE, words, {"keep": keep}
    yield "move, nothing", "e", CACHE, "accepted rows are not moved", {"move": _nothing_moves}
    yield "inverse_root, another eps", "g", POINTS["inverse_root"], "with another eps", {"inverse_root": _another_eps}


FAMILY: Mapping[str, tuple[Plant, Overrides]] = {
    name: (Plant(name, "", CLASSES[letter], ops, words, 0, "", "family"), functions) for name, letter, ops, words, functions in _members()
}
