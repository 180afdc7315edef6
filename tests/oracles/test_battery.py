"""Fixed rules in use elsewhere: each says what its users would have seen, on pairs made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from campaigns.battery import compared, recorded
from campaigns.case import OpCase, SessionCase, TreeCase
from campaigns.isolation.inprocess import InProcess
from campaigns.trial import Bench
from impls.registry import resolve
from oracles.battery import FIXED_RULES, NAMES, TOKEN_EXACT, verdicts

GOLDEN = np.linspace(1, 2, 64, dtype=np.float32).reshape(4, 16)


def failing(found: np.ndarray, golden: np.ndarray = GOLDEN) -> set[str]:
    return {name for name, passes in verdicts([(found, golden)]).items() if not passes}


def test_equal_arrays_pass_every_rule() -> None:
    assert failing(GOLDEN.copy()) == set()


def test_a_small_common_factor_is_seen_by_the_narrow_rules_only() -> None:
    assert failing(GOLDEN * np.float32(1 + 3e-5)) == {"numpy", "torch"}
    assert failing(GOLDEN * np.float32(1 + 1e-3)) == {"numpy", "torch", "KernelBench", "llama.cpp"}


def test_cosine_absorbs_a_factor_that_its_difference_form_sees() -> None:
    assert {"FlashMLA", "FlashInfer-Bench"} <= failing(GOLDEN * 2)
    assert "cosine" not in failing(GOLDEN * 2)


def test_one_wrong_element_in_twenty_passes_95_percent() -> None:
    found = GOLDEN.copy()
    found[0, :3] = 9
    assert "FlashInfer-Bench" not in failing(found)
    found[0, :4] = 9
    assert "FlashInfer-Bench" in failing(found)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_rule_passes_a_value_that_is_no_number(value: float) -> None:
    found = GOLDEN.copy()
    found[2, 2] = value
    assert failing(found) >= {rule.name for rule in FIXED_RULES} - {"FlashInfer-Bench"}


def test_integers_must_be_equal_and_shapes_too() -> None:
    ids = np.arange(4, dtype=np.int32)
    assert failing(ids + (ids == 2), ids) == {rule.name for rule in FIXED_RULES}
    assert failing(GOLDEN[:2]) == {rule.name for rule in FIXED_RULES}


def test_token_exact_sees_the_greedy_choice_only() -> None:
    assert TOKEN_EXACT not in verdicts([(GOLDEN, GOLDEN)])
    assert verdicts([], [(GOLDEN * 3, GOLDEN)])[TOKEN_EXACT]
    swapped = GOLDEN.copy()
    swapped[1, 0] = 5
    assert not verdicts([], [(swapped, GOLDEN)])[TOKEN_EXACT]
    assert not verdicts([], [], [(np.array([1]), np.array([2]))])[TOKEN_EXACT]


CASES = {
    "op": OpCase("softmax", (("H", 1), ("S", 5), ("T", 2)), (), "ordinary", 1),
    "tree": TreeCase(8, 2, 4, 3, 2, 0, 80, 0, 1),
    "session": SessionCase("tiny", (), 0, "ordinary", ((3, 1),), ((((0, 1), (1, 0)),),)),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_specification_passes_every_rule_bit_for_bit(kind: str) -> None:
    said = compared(Bench(InProcess(resolve("golden"))), CASES[kind]).verdicts()
    assert set(said) == set(NAMES if kind == "session" else NAMES[:-1])
    assert all(said.values())


def test_a_gross_defect_fails_them() -> None:
    said = compared(Bench(InProcess(resolve("blocked:Z01"))), CASES["session"]).verdicts()
    assert not said["KernelBench"]


def test_a_subtle_defect_passes_most_of_them() -> None:
    """Operands silently cut to TF32: the certified bound and the audit see it, a cosine and 1e-2 do not."""
    said = compared(Bench(InProcess(resolve("blocked:tf32-unsaid"))), CASES["session"]).verdicts()
    assert said["cosine"]
    assert said["FlashInfer-Bench"]
    assert not said["numpy"]


def test_a_users_own_tensors() -> None:
    x, w = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)
    assert all(recorded("matmul", {}, {"x": x, "w": w}, {"out": x @ w}).verdicts().values())
    assert not any(recorded("matmul", {}, {"x": x, "w": w}, {"out": x @ w * 2}).verdicts()[rule] for rule in ("numpy", "torch"))
