"""The devices that the tests of impls/cuda run on: the emulator everywhere, a GPU where the marker `gpu` selects it."""

from __future__ import annotations

import pytest

from impls.cuda.device import CupyDevice, Device
from impls.cuda.emulate import EmulatedDevice
from impls.native.build import NoCompiler
from spec.engine import Unsupported

DEVICES = (pytest.param("emulated", id="emulated"), pytest.param("gpu", id="gpu", marks=pytest.mark.gpu))


def device_of(name: str, *, seed: int = 0, source: str | None = None) -> Device:
    """Skips the test, with the reason, where the device is not there."""
    try:
        if name == "gpu":
            return CupyDevice(checking=True, source=source)
        return EmulatedDevice(seed=seed, source=source)
    except (Unsupported, NoCompiler) as reason:
        pytest.skip(str(reason))
