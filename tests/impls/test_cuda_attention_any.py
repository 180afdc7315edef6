"""Attention of any sizes, split over keys: against float64, for one part and several, contiguous and paged, with rows that see nothing."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from impls.cuda.device import Device
from impls.cuda.emulate import EmulatedDevice
from tests.impls.cuda_devices import DEVICES, device_of

PAGE = 16


def reference(
    q: NDArray[np.float32], cache: NDArray[np.float32], visible: NDArray[np.bool_], rank: int, scale: float
) -> NDArray[np.float64]:
    scores = np.einsum("thc,sc->ths", q.astype(np.float64), cache.astype(np.float64)) * scale
    scores = np.where(visible[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    out: NDArray[np.float64] = np.einsum(
        "ths,sr->thr", weights / np.where(total > 0, total, 1.0), np.where(np.isnan(cache), 0.0, cache)[:, :rank].astype(np.float64)
    )
    return out


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    ("rows", "heads", "rank", "rope", "prefix", "each"),
    ((5, 3, 16, 8, 300, 128), (1, 2, 10, 4, 130, 128), (9, 2, 200, 6, 20, 512), (3, 1, 1, 2, 500, 256)),
)
def test_the_parts_together_are_the_whole(name: str, rows: int, heads: int, rank: int, rope: int, prefix: int, each: int) -> None:
    device: Device = device_of(name)
    rng = np.random.default_rng(rows)
    keys, width, scale = prefix + rows, rank + rope, 0.3
    q, cache = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, heads, width), (keys, width)))
    tree = np.tril(rng.random((rows, rows)) < 0.5) | np.eye(rows, dtype=np.bool_)
    visible = np.concatenate([np.ones((rows, prefix), np.bool_), tree], 1)
    words = -(-rows // 32)
    bits = np.zeros((rows, words), np.uint32)
    for row, column in np.argwhere(tree):
        bits[row, column // 32] |= np.uint32(1 << (column % 32))
    pages = rng.permutation(-(-keys // PAGE)).astype(np.int32)
    store = np.full((len(pages) * PAGE, width), np.nan, np.float32)
    slots = pages[np.arange(keys) // PAGE] * PAGE + np.arange(keys) % PAGE
    store[slots] = cache
    splits = -(-keys // each)
    columns = 1
    while columns < min(rank, 128):
        columns *= 2
    on = {
        key: device.upload(value)
        for key, value in {"q": q, "store": store, "pages": pages, "bits": bits, "prefix": np.array([prefix], np.int32)}.items()
    }
    out = device.empty((rows, heads, rank), np.float32)
    part_out = device.empty((splits, rows * heads, rank), np.float32) if splits > 1 else None
    part_stat = device.empty((splits, rows * heads, 2), np.float32) if splits > 1 else None
    shared = 4 * (3 * 128 + width + 4 + 128 // columns * rank)
    # the lengths of the arguments are too long by a part: those on the device count, and the last block finds nothing to do
    arguments = (
        on["q"],
        on["store"],
        on["pages"],
        PAGE,
        on["bits"],
        words,
        heads,
        rank,
        width,
        prefix + each,
        keys + each,
        each,
        scale,
        out,
        part_out,
        part_stat,
        on["prefix"],
    )
    device.launch("tree_attention_any_f32", (rows * heads, splits), 128, arguments, shared)
    if splits > 1:
        device.launch("tree_attention_any_merge", (rows * heads,), 128, (part_out, part_stat, splits, rows * heads, rank, out))
    found, due = device.download(out), reference(q, cache, visible, rank, scale)
    # scores of at most width products of order one, then sums of weights: (width + keys + 8) roundings of 2^-24, inflated by exp of a score's error
    bound = (width + keys + 8) * 2.0**-24 * (1 + np.abs(scale * width)) * np.abs(cache).max()
    assert np.abs(found - due).max() <= bound


@pytest.mark.parametrize("name", DEVICES)
def test_a_row_that_sees_nothing_is_zero(name: str) -> None:
    device = device_of(name)
    q, cache = (device.upload(np.full(shape, np.nan if shape[0] == 200 else 1.0, np.float32)) for shape in ((1, 1, 6), (200, 6)))
    bits = device.zeros((1, 7), np.uint32)
    out, part_out, part_stat = (device.empty(shape, np.float32) for shape in ((1, 1, 4), (2, 1, 4), (2, 1, 2)))
    device.launch(
        "tree_attention_any_f32",
        (1, 2),
        128,
        (q, cache, None, 1, bits, 7, 1, 4, 6, 0, 200, 128, 1.0, out, part_out, part_stat, None),
        4 * (3 * 128 + 10 + 32 * 4),
    )
    device.launch("tree_attention_any_merge", (1,), 128, (part_out, part_stat, 2, 1, 4, out))
    assert np.array_equal(device.download(out), np.zeros((1, 1, 4), np.float32))


@pytest.mark.parametrize("seed", (1, 2))
def test_the_order_of_threads_does_not_matter(seed: int) -> None:
    from impls.native.build import NoCompiler

    try:
        first, other = EmulatedDevice(), EmulatedDevice(seed=seed)
    except NoCompiler as reason:
        pytest.skip(str(reason))
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 2, 20), (300, 20))]
    found = []
    for device in (first, other):
        q, cache = (device.upload(array) for array in arrays)
        out = device.empty((2, 2, 12), np.float32)
        bits = device.upload(np.array([[1], [3]], np.uint32))
        device.launch(
            "tree_attention_any_f32",
            (4, 1),
            128,
            (q, cache, None, 1, bits, 1, 2, 12, 20, 298, 300, 384, 0.2, out, None, None, None),
            4 * (3 * 128 + 24 + 8 * 12),
        )
        found.append(device.download(out))
    assert np.array_equal(found[0], found[1])
