"""The life of a finding, as a function of what each campaign saw of it.

new        met for the first time
reopened   met again after it had been fixed
changed    its stored smallest case no longer fails, but another case with the same fingerprint does
flaky      the stored case failed in some replays and not in others
known      met in an earlier campaign, and not fixed since
fixed      its stored case was replayed and no longer fails, and no other case met it

Being a function of the sightings alone, the status of merged stores does not depend on the order of merging.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FRESH = frozenset({"new", "reopened", "changed"})  # for the campaign that saw it; known from the next one on


@dataclass(frozen=True)
class Sighting:
    """What one campaign saw: trials that met the finding, and replays of its stored case (`reproduced` of `attempts`)."""

    hits: int
    reproduced: int
    attempts: int


def status_after(sightings: Iterable[Sighting], *, later_campaign: bool = False) -> str:
    """Status after `sightings` (oldest first). `later_campaign`: the engine was tried again after the last of them."""
    status = ""
    for seen in sightings:
        status = _next(status, seen)
    return "known" if later_campaign and status in FRESH else status


def _next(status: str, seen: Sighting) -> str:
    if seen.attempts and 0 < seen.reproduced < seen.attempts:
        return "flaky"
    if not seen.hits and not seen.attempts:
        return status
    if not status:
        return "new"
    if status == "fixed":
        return "reopened" if seen.hits or seen.reproduced else "fixed"
    if seen.attempts and not seen.reproduced:
        return "changed" if seen.hits else "fixed"
    return "known"
