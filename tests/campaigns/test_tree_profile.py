"""`paritree tree-profile` on engines with planted builders, by operations and by the trees of their own loop."""

from __future__ import annotations

import json

import numpy as np
import pytest

from campaigns.tree_profile import SIZES, probes, tree_profile
from impls.blocked import BlockedEngine
from impls.planted.mutants import OVERRIDES
from oracles.tree_profile import Match
from paritree import cli
from spec.tree import draft_table

HIDDEN = frozenset({"best_first_tree", "draft_table"})


def loop_only() -> BlockedEngine:
    """The blocked engine without its tree operations."""
    return BlockedEngine(hidden_ops=HIDDEN, name="loop-only")


def loop_with_a_chain_seed() -> BlockedEngine:
    return BlockedEngine(OVERRIDES["tree03"], hidden_ops=HIDDEN, name="loop-chain-seed")


@pytest.mark.parametrize(
    ("engine", "profile", "parameter"),
    [
        ("blocked", "paper", ""),
        ("native", "paper", ""),
        ("blocked:tree01", "fifo", ""),
        ("blocked:tree03", "spine", ""),
        ("blocked:tree04", "short-spine", ""),
        ("blocked:tree06", "early-stop", ""),
        ("blocked:tree07", "capped", "width 6"),
        ("blocked:jetspec-eager", "eager", ""),
        ("blocked:bfs-numbers", "level-order", ""),
        ("blocked:Z15", "root-in-budget", ""),
    ],
)
def test_a_port_is_told_which_profile_it_is(engine: str, profile: str, parameter: str) -> None:
    report = tree_profile(engine, repeats=1)
    assert report.finding is not None
    assert report.finding.best is not None
    best = report.finding.best
    assert (best.profile.name, best.profile.parameter, best.match) == (profile, parameter, Match.EXACT)
    assert best.explained == report.finding.trees == len(SIZES) * 4
    assert (report.finding.mass_lost_max > 0) == (profile not in ("paper", "fifo", "level-order"))
    assert report.problems == ()


def test_a_depth_bonus_is_told_though_the_port_rounds_it() -> None:
    """The plant adds 0.2 to each log-probability in double: other choices among equal scores than exact sums."""
    best = tree_profile("blocked:tree05", repeats=1).finding
    assert best is not None
    assert best.best is not None
    assert best.best.profile.name == "bonus"


@pytest.mark.parametrize(("factory", "profile"), [("loop_only", "paper"), ("loop_with_a_chain_seed", "spine")])
def test_an_engine_without_operations_shows_the_trees_of_its_loop(factory: str, profile: str) -> None:
    report = tree_profile(f"{__name__}:{factory}", repeats=1)
    assert report.source == "first round of generate"
    assert report.finding is not None
    assert report.finding.best is not None
    assert (report.finding.best.profile.name, report.finding.best.match) == (profile, Match.EXACT)


def test_an_engine_that_fails_on_some_trees_is_told_so() -> None:
    report = tree_profile("blocked:tree12", repeats=1)
    assert report.finding is not None
    assert report.finding.trees == (len(SIZES) - 1) * 4
    assert len(report.problems) == 4
    assert all("budget 14" in problem for problem in report.problems)


def test_probes_reach_what_profiles_differ_in() -> None:
    tables = [(probe, draft_table(probe.logits, probe.budget)) for probe in probes(1)]
    assert {probe.kind for probe, _ in tables} == {"peaked", "flat", "tied", "graded"}
    assert any(probe.budget <= len(probe.logits) for probe, _ in tables)
    assert any(table.ids.shape[1] > 8 for _, table in tables)
    for probe, table in tables:
        if probe.kind == "tied":
            assert (table.log_probs == table.log_probs[0]).all()
        else:
            assert np.unique(table.log_probs).size == table.log_probs.size


def test_the_command_prints_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tree-profile", "blocked", "--repeats", "1"]) == 0
    assert "profile paper, exactly" in capsys.readouterr().out
    assert cli.main(["tree-profile", "blocked:tree03", "--repeats", "1"]) == 1
    out = capsys.readouterr().out
    assert "blocked:tree03: profile spine, exactly" in out
    assert "the paper takes (0), (1), the engine (0), (0,0)" in out
    assert cli.main(["tree-profile", "blocked:tree03", "--repeats", "1", "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert (body["profile"], body["match"], body["trees"]) == ("spine", "exact", len(SIZES) * 4)
    assert 0 < body["surrogate_mass_lost_mean"] < body["surrogate_mass_lost_max"] < 1
    assert body["smallest_departure"]["engine"] == [[0], [0, 0]]


def test_an_engine_without_trees_verifies_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tree-profile", "blind+blocked"]) == 5
    assert "no draft tree was seen" in capsys.readouterr().out
