"""Audited profiles: honest arithmetic passes the probes under its own profile, a profile that lies does not, and the message says what it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from campaigns.isolation.inprocess import InProcess
from campaigns.probes import HEIGHT, OPS, TERMS, audit_cases, height_pairs, probe
from campaigns.trial import Bench
from impls.blocked import BlockedEngine, engine
from impls.planted.benign import VARIANTS
from impls.planted.blocked_profile import FAST_TERMS
from oracles.audit import declared_height, rounded
from oracles.judgement import FINDINGS, Judgement, Verdict
from spec.engine import PROFILES, Engine, Profile

F = np.float32


def judged(subject: Engine) -> list[Judgement]:
    bench = Bench(InProcess(subject))
    return [j for outcome in bench.outcomes(audit_cases(subject.describe())) for j in outcome.judgements]


def findings(subject: Engine) -> list[Judgement]:
    return [j for j in judged(subject) if j.verdict in FINDINGS]


@pytest.mark.parametrize("name", [None, "tf32", "bf16-in", "bf16-out", "fp16-out", "height-128", "flush", "split-k", "N10"])
def test_an_honest_profile_passes_its_audit(name: str | None) -> None:
    subject = engine(name)
    offered = subject.describe().ops & set(OPS)
    assert {"matmul", "scores"} <= offered  # an engine that expands its keys has no q_absorb
    assert len(judged(subject)) >= len(offered) * len(TERMS)
    assert not findings(subject)


def test_tf32_under_the_float32_profile_is_named() -> None:
    first = findings(engine("tf32-unsaid"))[0]
    assert (first.verdict, first.op, first.rule) == (Verdict.DEFECT, "matmul", "N6")
    assert "declares float32-any-order, behaves like TF32, truncated" in first.message


def test_a_bfloat16_kernel_under_the_tf32_profile_is_named() -> None:
    liar = BlockedEngine(VARIANTS["bf16-in"].points, profile=PROFILES["tf32"])
    assert "declares tf32, behaves like bfloat16" in findings(liar)[0].message


def test_a_profile_is_audited_operation_by_operation() -> None:
    """What is declared for one operation covers no other one."""
    wide = PROFILES["tf32"]
    entries = tuple((op, name, getattr(wide, name)) for op in OPS for name in ("u_input", "u_accumulate"))
    assert not findings(BlockedEngine(VARIANTS["tf32"].points, profile=Profile(per_op=entries)))
    only_products = tuple(entry for entry in entries if entry[0] == "matmul")
    assert {j.op for j in findings(BlockedEngine(VARIANTS["tf32"].points, profile=Profile(per_op=only_products)))} == {"scores"}


def test_a_fast_path_for_large_products_is_seen_at_its_size_only() -> None:
    assert {j.op for j in findings(engine("tf32-large"))} == {"matmul"}
    assert [f"over {FAST_TERMS} terms" in j.message for j in findings(engine("tf32-large"))] == [True]


def test_the_bound_of_a_long_random_product_is_wider_than_tf32() -> None:
    """Why the probe exists: what it finds, an ordinary case of the same size cannot prove."""
    bench = Bench(InProcess(engine("tf32-large")))
    ordinary = dataclasses.replace(probe("matmul", FAST_TERMS), regime="ordinary")
    assert not [j for j in bench.outcome(ordinary).judgements if j.verdict in FINDINGS]


def test_a_chain_that_declares_blocks_is_named() -> None:
    liar = BlockedEngine(VARIANTS["sequential"].points, profile=Profile("liar", height="blocked:8"))
    found = [j for j in findings(liar) if j.tap == "height"]
    assert [j.op for j in found] == ["matmul"]
    assert "passes 31 additions, but the profile liar declares at most 10" in found[0].message


def test_the_height_is_not_asked_of_any_order() -> None:
    assert not [case for case in audit_cases(engine().describe()) if case.regime == HEIGHT]


def test_nothing_is_asked_of_an_engine_without_operations() -> None:
    hidden = dataclasses.replace(engine().describe(), capabilities=frozenset({"forward", "commit"}))
    assert audit_cases(hidden) == []


def test_every_pair_of_a_probed_leaf_is_asked_once() -> None:
    pairs = height_pairs(8 * 31, 32)
    assert len(set(pairs)) == len(pairs) == 8 * 31
    assert all(first != second for first, second in pairs)


@pytest.mark.parametrize(("terms", "height"), [(2, 1), (8, 7), (9, 8), (16, 9), (64, 11)])
def test_declared_height_is_a_chain_and_then_a_balanced_tree(terms: int, height: int) -> None:
    assert declared_height(8, terms) == height


def test_rounding_to_bits() -> None:
    value = np.array([1 + 3 * 2.0**-11, -(1 + 3 * 2.0**-11)])
    assert rounded(value, 10).tolist() == [1 + 2 * 2.0**-10, -(1 + 2 * 2.0**-10)]
    assert rounded(value, -10).tolist() == [1 + 2.0**-10, -(1 + 2.0**-10)]
