"""Honest engines that round differently from the golden bits: each within the profile that it declares, none to be flagged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spec.engine import Profile


@dataclass(frozen=True)
class Variant:
    """A legal rearrangement. `hidden_taps`: taps that do not exist in it, because the step is done another way."""

    name: str
    points: Mapping[str, Callable[..., Any]]
    source: str
    profile: Profile = field(default_factory=Profile)
    hidden_taps: frozenset[str] = frozenset()


VARIANTS: dict[str, Variant] = {}
