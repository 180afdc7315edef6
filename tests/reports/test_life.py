"""The life of a finding, as a table of what campaigns saw."""

from __future__ import annotations

import pytest

from reports.life import Sighting, status_after

HIT, AGAIN, CLEAN, HALF, ANOTHER, NOTHING = (
    Sighting(3, 0, 0),
    Sighting(0, 5, 5),
    Sighting(0, 0, 5),
    Sighting(0, 2, 5),
    Sighting(1, 0, 5),
    Sighting(0, 0, 0),
)


@pytest.mark.parametrize(
    ("sightings", "status"),
    [
        ([HIT], "new"),
        ([HIT, HIT], "known"),
        ([HIT, AGAIN], "known"),
        ([HIT, NOTHING], "new"),
        ([HIT, CLEAN], "fixed"),
        ([HIT, CLEAN, CLEAN], "fixed"),
        ([HIT, CLEAN, HIT], "reopened"),
        ([HIT, CLEAN, AGAIN], "reopened"),
        ([HIT, CLEAN, HIT, HIT], "known"),
        ([HIT, ANOTHER], "changed"),
        ([HIT, ANOTHER, HIT], "known"),
        ([HIT, HALF], "flaky"),
        ([HIT, HALF, CLEAN], "fixed"),
        ([HIT, HALF, AGAIN], "known"),
        ([], ""),
    ],
)
def test_status_follows_from_the_sightings(sightings: list[Sighting], status: str) -> None:
    assert status_after(sightings) == status


@pytest.mark.parametrize(
    ("sightings", "status"), [([HIT], "known"), ([HIT, CLEAN, HIT], "known"), ([HIT, CLEAN], "fixed"), ([HIT, HALF], "flaky")]
)
def test_a_later_campaign_turns_news_into_known(sightings: list[Sighting], status: str) -> None:
    assert status_after(sightings, later_campaign=True) == status
