"""The latent cache: what it keeps beside the float32 rows is what would be prepared from those rows afresh."""

from __future__ import annotations

import numpy as np

from spec.arithmetic import matmul, prepare
from spec.cache import FIRST_CAPACITY, LatentCache
from spec.config import preset
from spec.weights import philox

CONFIG = preset("tiny")


def rows_of(count: int, *key: object) -> np.ndarray:
    return philox("cache", *key).standard_normal((CONFIG.layers, count, CONFIG.cache_dim)).astype(np.float32)


def append(cache: LatentCache, rows: np.ndarray, path: list[int]) -> None:
    cache.start([-1] * rows.shape[1])
    for layer in range(CONFIG.layers):
        cache.extend(layer, rows[layer])
    cache.commit(np.array(path, np.intp))


def same_norms(actual: np.ndarray, expected: np.ndarray, terms: int) -> bool:
    """Sums of `terms` squares in another order: terms * 2**-53 relative before the root, and a few roundings."""
    return bool((np.abs(actual - expected) <= (terms + 4) * 2.0**-53 * expected).all())


def assert_holds(cache: LatentCache, expected: np.ndarray) -> None:
    assert cache.length == expected.shape[1]
    for layer in range(CONFIG.layers):
        assert np.array_equal(cache.committed(layer), expected[layer])
        keys, latents = cache.keys(layer), cache.latents(layer)
        assert np.array_equal(keys.value, expected[layer].T)
        assert np.array_equal(keys.wide, keys.value)
        assert same_norms(keys.column_bound, prepare(expected[layer].T.copy()).column_bound, CONFIG.cache_dim)
        assert np.array_equal(latents.value, expected[layer][:, : CONFIG.kv_rank])
        assert np.array_equal(latents.wide, latents.value)
        assert same_norms(latents.column_bound, prepare(np.ascontiguousarray(latents.value)).column_bound, cache.length)


def test_rows_stand_in_order_through_moves_and_growth() -> None:
    cache, expected = LatentCache(CONFIG), np.zeros((CONFIG.layers, 0, CONFIG.cache_dim), np.float32)
    for step, (count, path) in enumerate(((5, [0, 1, 2, 3, 4]), (6, [0, 2, 5]), (3, []), (4, [3]), (2 * FIRST_CAPACITY, [1, 7, 90]))):
        rows = rows_of(count, step)
        append(cache, rows, path)
        expected = np.concatenate([expected, rows[:, path]], axis=1)
        assert_holds(cache, expected)


def test_pending_rows_stand_behind_the_committed_ones_until_the_next_batch() -> None:
    cache, first, second, third = LatentCache(CONFIG), rows_of(3, 1), rows_of(4, 2), rows_of(2, 3)
    append(cache, first, [0, 1, 2])
    for rows in (second, third):
        cache.start([-1] * rows.shape[1])
        cache.extend(0, rows[0])
        assert np.array_equal(cache.keys(0).value.T, np.concatenate([first[0], rows[0]]))
        assert np.array_equal(cache.committed(0), first[0])


def test_a_copy_shares_nothing_and_has_no_pending_rows() -> None:
    cache, rows = LatentCache(CONFIG), rows_of(4, "copy")
    append(cache, rows[:, :3], [0, 1, 2])
    cache.start([-1])
    other = cache.copy()
    assert other.parents == []
    append(cache, rows[:, 3:], [0])
    assert_holds(other, rows[:, :3])
    append(other, rows[:, :1], [0])
    assert_holds(cache, rows)


def test_products_with_the_cache_are_products_with_its_rows() -> None:
    cache, rows = LatentCache(CONFIG), rows_of(9, "product")
    append(cache, rows, [0, 2, 3, 8])
    query = philox("cache query").standard_normal((6, CONFIG.cache_dim)).astype(np.float32)
    assert np.array_equal(matmul(query, cache.keys(1), 0.3), matmul(query, rows[1][[0, 2, 3, 8]].T.copy(), 0.3))
