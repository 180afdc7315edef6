"""pytest --paritree-engine: the fixture in a user's own tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.case import OpCase, to_json

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent.parent
PLUGIN = ("-p", "paritree.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:xdist")
CASE = to_json(OpCase("swiglu", (("N", 3), ("T", 2)), (), "ordinary", 0))
TEST = f"""
def test_swiglu(paritree_engine):
    outcome = paritree_engine.passes({CASE!r})
    assert outcome.judgements[0].op == "swiglu"
"""


@pytest.fixture
def user(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TEST)
    return pytester


def test_an_honest_engine_passes(user: pytest.Pytester) -> None:
    user.runpytest_subprocess(*PLUGIN, "--paritree-engine", "blocked").assert_outcomes(passed=1)


def test_every_engine_is_a_test_of_its_own_and_a_defect_fails(user: pytest.Pytester) -> None:
    result = user.runpytest_subprocess(*PLUGIN, "--paritree-engine", "blocked", "--paritree-engine", "blocked:Z33")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Divergence: DEFECT: out*"])


def test_without_an_engine_the_test_is_skipped(user: pytest.Pytester) -> None:
    user.runpytest_subprocess(*PLUGIN).assert_outcomes(skipped=1)


def test_a_wrong_name_is_a_usage_error(user: pytest.Pytester) -> None:
    result = user.runpytest_subprocess(*PLUGIN, "--paritree-engine", "blokced")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--paritree-engine blokced*did you mean 'blocked'*"])


def test_the_plugin_loads_nothing_heavy(user: pytest.Pytester) -> None:
    user.makepyfile("import sys\ndef test_light():\n    assert not {'numpy', 'hypothesis', 'campaigns', 'spec'} & set(sys.modules)\n")
    user.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=1)
