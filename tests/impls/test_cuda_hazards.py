"""Hazards that need more than one call: an error that sticks does not end a campaign; launches on another stream are noticed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.gpu_hazards import sticky, streams
from impls.cuda.device import CupyDevice
from impls.cuda.kernels import Kernels
from impls.native.build import NoCompiler, find_compiler
from spec.engine import Unsupported
from tests.impls.cuda_devices import DEVICES, device_of


@pytest.mark.parametrize(
    "engine",
    (pytest.param("cuda:emulated:wild-address", id="emulated"), pytest.param("cuda:wild-address", id="gpu", marks=pytest.mark.gpu)),
)
def test_an_illegal_address_ends_its_worker_and_blames_nothing_else(engine: str) -> None:
    try:
        find_compiler()
        if engine == "cuda:wild-address":
            CupyDevice()
    except (NoCompiler, Unsupported) as reason:
        pytest.skip(str(reason))
    report = sticky(engine, 24)
    assert report["blamed"] == ["embed"]
    assert report["workers_replaced"] >= 1
    assert report["clean_trials_after_the_first_finding"] >= 1
    assert "embed" in report["first"]["case"]  # the finding is kept


@pytest.mark.gpu
def test_inputs_that_are_produced_late_change_nothing_and_launches_astray_are_found() -> None:
    try:
        CupyDevice()
    except Unsupported as reason:
        pytest.skip(str(reason))
    report = streams(60, 2)
    assert report["trials"]["findings"] == 0
    assert report["plant"]["caught"]


@pytest.mark.parametrize("name", DEVICES)
def test_a_replayed_round_of_kernels_sees_the_tree_of_now(name: str) -> None:
    """Draft table, tree, mask, attention, acceptance and compaction in one graph: other logits, queries and targets, the bits of fresh launches."""
    device: Any = device_of(name)
    kernels = Kernels(device)
    rng = np.random.default_rng(0)
    depths, vocab, budget, prefix, heads, rank, width = 4, 40, 9, 20, 2, 12, 16
    nodes = budget + 1

    def draw() -> list[NDArray[Any]]:
        return [
            (3 * rng.standard_normal((depths, vocab))).astype(np.float32), rng.standard_normal((nodes, heads, width)).astype(np.float32),
            rng.standard_normal((prefix + nodes, width)).astype(np.float32), rng.integers(0, vocab, nodes).astype(np.int32),
        ]  # fmt: skip

    inputs = [device.upload(array) for array in draw()]

    def round_of_kernels() -> dict[str, Any]:
        logits, query, cache, target = inputs
        status = device.zeros((1,), np.int32)
        ids, log_probs = kernels.draft_table(logits, budget, status)
        tokens, parents, _, count = kernels.best_first_tree(ids, log_probs, budget, 7, status)
        positions, bits, _ = kernels.tree_mask(parents, prefix, status, count=count, with_bytes=False)
        out = kernels.tree_attention(query, cache, bits, prefix, prefix + nodes, rank, 0.3)
        path, length, bonus = kernels.accept(tokens, parents, target, status, count=count)
        return {
            "tokens": tokens,
            "parents": parents,
            "positions": positions,
            "out": out,
            "path": path,
            "length": length,
            "bonus": bonus,
            "status": status,
        }

    round_of_kernels()
    replay, results = device.captured(round_of_kernels)
    seen = []
    for _ in range(3):
        for array, fresh in zip(inputs, draw(), strict=True):
            array[...] = fresh if name == "emulated" else device.upload(fresh)
        replay()
        found = {key: device.download(value) for key, value in results.items()}
        due = {key: device.download(value) for key, value in round_of_kernels().items()}
        assert all(np.array_equal(found[key], due[key]) for key in due), [key for key in due if not np.array_equal(found[key], due[key])]
        seen.append(found["parents"].tolist() + found["tokens"].tolist())
    assert seen[0] != seen[1] != seen[2]  # the trees did change
