"""The parallel builder and the draft table in one launch against the specification, on tables that lead into each of their branches."""

from __future__ import annotations

import numpy as np
import pytest

from impls.cuda.engine import PROFILE
from impls.cuda.kernels import DRAFT_CHUNK, Kernels
from oracles.judge import judge_op
from spec.script import OpCall
from spec.tree import DraftTable, best_first_tree, draft_table
from tests.impls.cuda_devices import DEVICES, device_of

ON_DEVICES = pytest.mark.parametrize("name", DEVICES)
FORMS = pytest.mark.parametrize("forms", ("fast", "plain"))


def descending(rng: np.random.Generator, depth: int, width: int, scale: float) -> np.ndarray:
    return -np.cumsum(rng.exponential(scale, (depth, width)), axis=1)


def tables(rng: np.random.Generator) -> dict[str, tuple[np.ndarray, int]]:
    """What leads where: (log_probs, budget) by the reason."""
    wide = descending(rng, 6, 40, 0.5)
    wide[:, 0] = -np.exp2(-rng.integers(60, 100, 6))  # units beyond 62 bits: two doubles hold the sums, 63-bit integers do not
    narrow = descending(rng, 3, 2, 1.0)
    above = descending(rng, 4, 9, 0.3)
    above[1, 0] = 0.25  # a sum may exceed its parent's: the order of the heap is the definition
    tail = descending(rng, 5, 12, 0.7)
    tail[:, 5:] = -np.inf
    return {
        "peaked": (descending(rng, 15, 64, 1.5), 64),
        "flat": (descending(rng, 15, 64, 0.01) - 3, 64),
        "deep": (descending(rng, 16, 20, 6.0), 50),
        "all equal": (np.full((9, 30), -1.0), 30),  # more paths within the limit than are held: the popping form takes over
        "all zero": (np.zeros((4, 8)), 20),
        "grid": (np.rint(2 * descending(rng, 8, 33, 1.0)) / 2, 33),
        "fewer paths than the budget": (narrow, 60),
        "no candidate": (np.full((3, 4), -np.inf), 7),
        "some candidates": (tail, 40),
        "above zero": (above, 30),
        "wide": (wide, 40),
        "tiny": (1e-6 * descending(rng, 7, 17, 1.0), 17),
        "huge": (1e30 * descending(rng, 3, 9, 1.0), 9),
        "one node": (descending(rng, 2, 3, 1.0), 1),
        "the root alone": (descending(rng, 2, 3, 1.0), 0),
    }


@ON_DEVICES
@FORMS
def test_every_branch_of_the_builder_gives_the_tree_of_the_specification(name: str, forms: str) -> None:
    kernels = Kernels(device_of(name, seed=9), forms)
    device, rng = kernels.device, np.random.default_rng(6)
    for _ in range(2):
        for reason, (values, budget) in tables(rng).items():
            log_probs = values.astype(np.float32)
            ids = rng.permutation(log_probs.size).astype(np.int32).reshape(log_probs.shape)
            status = device.zeros((1,), np.int32)
            found = kernels.best_first_tree(device.upload(ids), device.upload(log_probs), budget, 7, status)
            tokens, parents, depths, count = (device.download(array) for array in found)
            tree = best_first_tree(DraftTable(ids, log_probs), 7, budget)
            nodes = len(tree.tokens)
            assert int(device.download(status)[0]) == 0, reason
            assert int(count[0]) == nodes - 1, reason
            for own, expected in ((tokens, tree.tokens), (parents, tree.parents), (depths, tree.depths)):
                assert own[:nodes].tolist() == expected.tolist(), reason
                assert (own[nodes:] == -1).all(), reason


@ON_DEVICES
@pytest.mark.parametrize("vocab", (1, 3, DRAFT_CHUNK - 1, DRAFT_CHUNK, DRAFT_CHUNK + 1, 2 * DRAFT_CHUNK + 7))
def test_a_table_across_blocks_is_that_of_the_specification(name: str, vocab: int) -> None:
    """Rows of several blocks, odd sizes, candidates that all lie in the last block, ties across blocks; twice, so that counters are as they were."""
    kernels = Kernels(device_of(name, seed=4))
    device, rng = kernels.device, np.random.default_rng(vocab)
    logits = (2.5 * rng.standard_normal((3, vocab))).astype(np.float32)
    logits[1] = np.rint(logits[1])
    logits[2, -min(vocab, 40) :] += 50
    for budget in (1, 37, 500):
        width = min(budget, vocab)
        for _ in range(2):
            status = device.zeros((1,), np.int32)
            ids, log_probs = (device.download(array) for array in kernels.draft_table(device.upload(logits), width, status))
            assert ids.tolist() == draft_table(logits, budget).ids.tolist()
            call = OpCall("draft_table", {"logits": logits}, {"budget": budget}, {})
            assert {j.verdict.name for j in judge_op(call, {"ids": ids, "log_probs": log_probs}, PROFILE)} <= {"EXACT", "WITHIN_BOUND"}
            assert int(device.download(status)[0]) == 0
