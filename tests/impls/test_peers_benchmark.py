"""The agreement table: which operations count as checked locally, by region or not at all, and how rates are printed."""

from __future__ import annotations

from collections import Counter

from benchmarks import peers
from campaigns.case import SessionCase
from campaigns.isolation.inprocess import InProcess
from campaigns.trial import Bench
from impls.blocked.engine import BlockedEngine
from oracles.judgement import Judgement
from spec.config import preset
from spec.taps import taps_of_layer

CONFIG = preset("tiny")
OPS = sum(len(taps_of_layer(CONFIG, layer)) for layer in range(-1, CONFIG.layers + 1)) - 1  # without the argmax


def checked(hidden: frozenset[str]) -> Counter[str]:
    engine = BlockedEngine(hidden_taps=hidden)
    outcome = Bench(InProcess(engine)).outcome(SessionCase("tiny", (), 0, "ordinary", ((5, 1),), ()))
    judged: dict[tuple[str, int], Judgement] = {(j.tap, j.layer): j for j in outcome.judgements if j.rung == "prefill"}
    return peers.ops_of(CONFIG, engine.describe().taps, judged)


def test_every_operation_of_an_engine_that_shows_all_is_checked_locally() -> None:
    assert checked(frozenset()) == {"locally": OPS}


def test_a_hidden_tap_and_its_readers_are_checked_by_region() -> None:
    """Two layers: the hidden operation, and the one that reads it."""
    assert checked(frozenset({"q_absorb"})) == {"locally": OPS - 4, "by region": 4}
    assert checked(frozenset({"router_scores"}))["by region"] == 3  # read by the choice and the weights


def test_a_black_box_verifies_nothing() -> None:
    from spec.taps import all_tap_names

    assert checked(frozenset(all_tap_names())) == {"UNVERIFIED": OPS}


def test_a_rate_that_is_neither_none_nor_all_is_never_printed_as_such() -> None:
    assert [peers.percent(*pair) for pair in ((0, 9), (9, 9), (1, 10**7), (10**7 - 1, 10**7), (1, 3), (0, 0))] == [
        "0 %", "100 %", "0.01 %", "99.99 %", "33.33 %", "0 %",
    ]  # fmt: skip


def test_sessions_of_a_configuration_are_the_same_every_time_and_differ_from_each_other() -> None:
    name = next(iter(peers.CONFIGS))
    drawn = list(peers.sessions(name, 60))
    assert drawn == list(peers.sessions(name, 60))
    assert len(set(drawn)) > 50 and {case.regime for case in drawn} >= {"ordinary", "tied-experts"}


def test_the_page_lists_findings_refusals_and_departures() -> None:
    cell = {"trials": 3, "rows": 9, "error_abs_max": 1.5e-6, "share_max": 0.25, "ops": {"locally": 2, "by region": 1}}
    found = {
        "version": "x 1", "profile": "p", "trials": 3, "verdicts": {"WITHIN_BOUND": 3}, "departures": ["latent_eps = 1e-06: why"],
        "refused": {"half": "no key"}, "findings": {"k": {"count": 2, "case": "{}", "message": "is 1, but should be 2"}},
        "configs": {"tiny": {"prefill": cell}},
    }  # fmt: skip
    text = peers.page({"peers": {"engine": found}})
    for part in (
        "| tiny | prefill | 3 | 1.5e-06 | 0.25 | 66.67 % | 33.33 % | 0 % | 0 % |",
        "refused: half: no key",
        "finding (2 trials): k",
        "latent_eps",
    ):
        assert part in text
