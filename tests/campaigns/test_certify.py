"""Certificates: what was tried, whether every bit was equal, and the first difference."""

from __future__ import annotations

import dataclasses

import pytest

from campaigns.case import CaseError, from_json
from campaigns.certify import certify, drawn
from campaigns.isolation.inprocess import InProcess
from impls.registry import resolve


def test_the_specification_holds_both_properties() -> None:
    determinism, invariance = certify(InProcess(resolve("golden")), ["determinism", "batch-invariance"], sessions=3)
    assert determinism.holds
    assert invariance.holds
    assert (determinism.sessions, invariance.sessions) == (3, 3)
    assert determinism.runs == 4  # the first session also in a fresh worker
    assert min(determinism.values, invariance.values) > 1000


def test_an_engine_whose_products_depend_on_their_shape_is_deterministic_and_no_more() -> None:
    determinism, invariance = certify(InProcess(resolve("blocked")), ["determinism", "batch-invariance"], sessions=4)
    assert determinism.holds
    assert not invariance.holds
    assert "bit for bit" in invariance.first
    assert from_json(invariance.case)


def test_a_race_is_named_with_its_first_difference() -> None:
    (determinism,) = certify(InProcess(resolve("blocked:race")), ["determinism"], sessions=4)
    assert not determinism.holds
    assert "differs from its first run in the same process" in determinism.first


def test_what_cannot_be_certified_is_refused() -> None:
    worker = InProcess(resolve("blocked"))
    with pytest.raises(CaseError, match="there is no property 'speed': choose one of determinism, batch-invariance"):
        certify(worker, ["speed"])
    worker.description = dataclasses.replace(worker.description, capabilities=frozenset({"run_op"}))
    with pytest.raises(CaseError, match="offers no sessions"):
        certify(worker, ["determinism"])


def test_sessions_follow_from_the_seed() -> None:
    description = resolve("blocked").describe()
    assert drawn(description, 5, 1) == drawn(description, 5, 1)
    assert drawn(description, 5, 1) != drawn(description, 5, 2)
