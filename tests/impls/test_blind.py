"""An engine as a black box: logits and tokens are the inner engine's, bit for bit, and nothing else is shown."""

from __future__ import annotations

import numpy as np
import pytest

from campaigns.case import GenerateCase, SessionCase
from campaigns.isolation.inprocess import InProcess
from campaigns.locate import locator
from campaigns.materialise import session_script
from campaigns.trial import Bench
from impls.registry import UnknownEngine, resolve
from oracles.judgement import FINDINGS, Verdict
from spec.engine import Unsupported

CASE = SessionCase("tiny", (), 0, "ordinary", ((5, 1),), ((((0, 1), (1, 0)),),), generate=GenerateCase("random", 1, 80, -1, 4, 2, 4, -1))


def test_what_is_left_is_the_inner_engines() -> None:
    script = session_script(CASE)
    inside, outside = InProcess(resolve("blocked")).script(script), InProcess(resolve("blind+blocked")).script(script)
    for one, other in zip(inside.answers, outside.answers, strict=True):
        if one.logits is not None:
            assert other.logits is not None
            np.testing.assert_array_equal(one.logits, other.logits)
            assert not other.taps
        if one.generations is not None:
            assert other.generations is not None
            assert [g.tokens for g in one.generations] == [g.tokens for g in other.generations]
            assert all(not g.rounds for g in other.generations)
        assert other.cache is None


def test_it_offers_sessions_and_no_more() -> None:
    description = resolve("blind+blocked:Z08").describe()
    assert description.name == "blind+blocked:Z08"
    assert {"forward", "commit", "generate"} <= description.capabilities
    assert not description.capabilities & {"run_op", "taps", "cache_rows", "generate_tree"}
    assert not description.ops
    assert not description.taps
    with pytest.raises(Unsupported):
        resolve("blind+blocked").run_op("add", {}, {}, {})
    with pytest.raises(UnknownEngine):
        resolve("blind+nothing")


def test_a_black_box_is_unverified_where_it_is_right_and_a_defect_where_it_is_not() -> None:
    right = Bench(InProcess(resolve("blind+blocked"))).outcome(CASE)
    assert right.verdict is Verdict.UNVERIFIED
    wrong = Bench(InProcess(resolve("blind+blocked:Z08"))).outcome(CASE)
    found = [j for j in wrong.judgements if j.verdict in FINDINGS]
    assert found
    assert "statistical" in found[0].message


def test_a_capsule_finds_it_again() -> None:
    assert locator("blind+blocked:Z08") == locator("blocked:Z08") | {
        "module": "impls.blind",
        "attribute": "engine",
        "arguments": ["blocked:Z08"],
    }
