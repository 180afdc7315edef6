"""Profiles whose arithmetic differs by operation: which entry an operation has, and what covers all of them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from spec.engine import Profile

TF32_PRODUCTS = Profile(
    "tf32-products",
    per_op=(("matmul", "u_input", 2.0**-10), ("matmul", "u_accumulate", 2.0**-22), ("expert_gate", "u_accumulate", 2.0**-24), ("scores", "height", "blocked:8")),
)  # fmt: skip


def test_an_operation_without_an_entry_computes_as_the_rest() -> None:
    assert TF32_PRODUCTS.at("rms_norm") == dataclasses.replace(TF32_PRODUCTS, per_op=())
    assert Profile().at("matmul") == Profile()


def test_an_operation_has_all_of_its_entries() -> None:
    own = TF32_PRODUCTS.at("matmul")
    assert (own.u_input, own.u_accumulate, own.exp_ulp) == (2.0**-10, 2.0**-22, TF32_PRODUCTS.exp_ulp)


def test_a_tap_goes_before_its_operation_and_takes_nothing_from_it() -> None:
    assert TF32_PRODUCTS.at("expert_gate", "matmul").u_input == 0.0
    assert TF32_PRODUCTS.at("q_a", "matmul").u_input == 2.0**-10


def test_the_widest_arithmetic_covers_every_operation() -> None:
    widest = TF32_PRODUCTS.widest
    assert (widest.u_input, widest.u_accumulate, widest.height, widest.per_op) == (2.0**-10, 2.0**-22, "any", ())
    assert Profile().widest == Profile()


def test_a_profile_survives_json() -> None:
    again = Profile(**json.loads(json.dumps(vars(TF32_PRODUCTS))))
    assert again == TF32_PRODUCTS
    assert hash(again) == hash(TF32_PRODUCTS)


def test_an_entry_of_no_field_is_refused() -> None:
    with pytest.raises(ValueError, match="per_op of matmul has 'u_inptu', but a profile has only"):
        Profile(per_op=(("matmul", "u_inptu", 1.0),))
