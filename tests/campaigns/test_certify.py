"""Certificates: every way that was tried, how often, whether every bit was equal, and the first difference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from campaigns.case import CaseError, from_json
from campaigns.certify import FRESH, INVARIANCE, SAME, Certificate, certify, drawn
from campaigns.isolation import Supervisor
from campaigns.isolation.inprocess import InProcess
from campaigns.trial import patience
from impls.golden import GoldenEngine
from impls.registry import resolve
from paritree.console import certificates
from spec.engine import EngineError, Float, Rows, TapSink

BOTH = ["determinism", "batch-invariance"]


def test_the_specification_holds_both_properties() -> None:
    determinism, invariance = certify(InProcess(resolve("golden")), BOTH, sessions=3)
    assert determinism.holds
    assert invariance.holds
    assert (determinism.sessions, invariance.sessions) == (3, 3)
    assert {name: way.runs for name, way in determinism.ways.items()} == {SAME: 3, FRESH: 1}
    assert {name: (way.runs, way.equal) for name, way in invariance.ways.items()} == dict.fromkeys(INVARIANCE, (3, 3))
    assert min(determinism.values, *(way.values for way in invariance.ways.values())) > 1000
    assert "numbers (sequence numbers and cache slots are names): 3 of 3 pairs" in certificates("golden", [determinism, invariance])


def test_an_engine_whose_products_depend_on_their_shape_is_deterministic_and_no_more() -> None:
    determinism, invariance = certify(InProcess(resolve("blocked")), BOTH, sessions=4)
    assert determinism.holds
    assert not invariance.holds
    assert "bit for bit" in invariance.first
    assert from_json(invariance.case)
    assert invariance.ways["numbers"].equal == 4  # the same batches under other numbers


def test_a_race_is_named_with_its_first_difference() -> None:
    (determinism,) = certify(InProcess(resolve("blocked:race")), ["determinism"], sessions=4)
    assert not determinism.holds
    assert determinism.first.startswith(f"{SAME}: o_latent, layer ")
    assert from_json(determinism.case)


def test_a_kernel_that_is_tuned_at_its_first_call_differs_in_one_process_only() -> None:
    with Supervisor("blocked:tuned-late", deadline_s=patience()) as supervisor:
        (determinism,) = certify(supervisor, ["determinism"], sessions=2)
    same, fresh = determinism.ways.values()
    assert (same.runs, same.equal) == (1, 0)
    assert (fresh.runs, fresh.equal, fresh.first) == (1, 1, "")
    assert not determinism.holds
    said = certificates("tuned", [determinism])
    assert f"{SAME} (taps, logits, cache and streams): 0 of 1 pairs" in said
    assert "then" in said


class OfManySequences(GoldenEngine):
    """The specification, but for the last bit of the logits of a batch of several sequences."""

    def open(self, config: Any, weights: Any) -> Any:
        session = super().open(config, weights)
        forward = session.forward

        def moved(rows: Rows, want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> Float:
            logits = forward(rows, want_logits, taps, sink)
            return np.nextafter(logits, np.float32(np.inf)) if len(set(rows.sequence.tolist())) > 1 else logits

        session.forward = moved  # type: ignore[method-assign]
        return session


def test_an_engine_that_varies_with_its_batch_fails_in_that_way_alone() -> None:
    determinism, invariance = certify(InProcess(OfManySequences()), BOTH, sessions=4)
    assert determinism.holds
    alone = invariance.ways["alone"]
    assert alone.first.endswith("a row does not depend on the other sequences of its batch (C6)")
    assert not invariance.holds
    for name in ("chunks", "siblings", "rejected", "numbers", "chain"):
        assert invariance.ways[name].runs == invariance.ways[name].equal == 4, name


class Refuses(GoldenEngine):
    """Opens, and then answers nothing."""

    def open(self, config: Any, weights: Any) -> Any:
        raise EngineError("no memory")


def test_where_nothing_is_answered_nothing_holds() -> None:
    found: list[Certificate] = certify(InProcess(Refuses()), BOTH, sessions=2)
    assert [(one.runs, one.values, one.holds) for one in found] == [(0, 0, False)] * 2
    assert "nothing could be compared" in certificates("refuses", found)


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
