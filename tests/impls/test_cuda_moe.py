"""Grouped products: the forms for few rows an expert have the bits of each other, and all are within the bound of float32 sums."""

from __future__ import annotations

import numpy as np
import pytest

from tests.impls.cuda_devices import DEVICES, device_of


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    ("rows", "chosen", "experts", "inner", "cols"), ((3, 2, 8, 300, 40), (21, 3, 2, 70, 33), (9, 4, 40, 16, 70), (40, 1, 1, 513, 64))
)
def test_the_forms_of_grouped_products_agree(name: str, rows: int, chosen: int, experts: int, inner: int, cols: int) -> None:
    device = device_of(name)
    rng = np.random.default_rng(rows)
    pairs = rows * chosen
    x = rng.standard_normal((rows, inner)).astype(np.float32)
    first, second = (rng.standard_normal((experts, inner, cols)).astype(np.float32) for _ in range(2))
    ids = np.stack(
        [rng.permutation(experts)[:chosen] if experts >= chosen else rng.integers(0, experts, chosen) for _ in range(rows)]
    ).astype(np.int32)
    on = {key: device.upload(value) for key, value in {"x": x, "first": first, "second": second, "ids": ids}.items()}
    starts, order = device.empty((experts + 1,), np.int32), device.empty((pairs,), np.int32)
    device.launch("moe_group", (1,), min(1024, 32 * experts), (on["ids"], starts, order, pairs, experts), 4 * (experts + 1))
    assert np.array_equal(device.download(order), np.argsort(ids.reshape(-1), kind="stable"))
    assert np.array_equal(device.download(starts), np.searchsorted(np.sort(ids.reshape(-1)), np.arange(experts + 1)))

    found = []
    for size, columns in ((2, 32), (8, 64), (16, 64)):
        out, second_out = (device.empty((pairs, cols), np.float32) for _ in range(2))
        tiles = min(pairs, experts) + pairs // size
        device.launch(
            f"matmul_grouped_rows{size}_f32", (-(-cols // columns), tiles, 2), 256,
            (on["x"], chosen, on["first"], on["second"], starts, order, out, second_out, experts, cols, inner),
        )  # fmt: skip
        found.append((device.download(out), device.download(second_out)))
    out = device.empty((pairs, cols), np.float32)
    device.launch(
        "matmul_grouped_f32",
        (-(-cols // 64), min(pairs, experts) + pairs // 32),
        256,
        (on["x"], chosen, on["first"], starts, order, out, experts, cols, inner),
    )
    assert all(np.array_equal(one, other) for pair in found for one, other in zip(pair, found[0], strict=True))
    for result, weights in ((found[0][0], first), (found[0][1], second), (device.download(out), first)):
        of_pair = weights[ids.reshape(-1)].astype(np.float64)
        operand = np.repeat(x, chosen, 0).astype(np.float64)
        due, size_of = np.einsum("pk,pkn->pn", operand, of_pair), np.einsum("pk,pkn->pn", np.abs(operand), np.abs(of_pair))
        assert (np.abs(result - due) <= (inner + 1) * 2.0**-24 * size_of).all()  # any order of sums
