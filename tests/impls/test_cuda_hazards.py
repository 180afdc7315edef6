"""Hazards that need more than one call: an error that sticks does not end a campaign; launches on another stream are noticed."""

from __future__ import annotations

import pytest

from benchmarks.gpu_hazards import sticky, streams
from impls.cuda.device import CupyDevice
from impls.native.build import NoCompiler, find_compiler
from spec.engine import Unsupported


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
