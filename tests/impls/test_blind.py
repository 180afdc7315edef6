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
    assert {"forward", "commit", "generate", "hidden_trees"} <= description.capabilities
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


def test_it_draws_tokens_as_the_inner_engine_does() -> None:
    loop = GenerateCase("edge", 3, 100, -1, 6, 3, 8, -1, (("temperature", 1.0),))
    script = session_script(SessionCase("tiny", (), 0, "ordinary", ((5, 1), (2, 4)), (), generate=loop))
    inside, outside = (InProcess(resolve(name)).script(script).answers[-1].generations for name in ("blocked", "blind+blocked"))
    assert inside is not None and outside is not None
    assert [g.tokens for g in inside] == [g.tokens for g in outside]
    assert any(g.rounds for g in inside) and not any(g.rounds for g in outside)


@pytest.mark.parametrize(
    "plant", ["tree01", "Z13", "tree07", "tree08", "tree09", "D08", "logz-bf16", "Z15", "depth-cap", "last-draft-lost"]
)
def test_another_tree_shows_in_the_accepted_lengths(plant: str) -> None:
    """Tokens are the same in each of them: only how many a round accepts is another number, with drafts at the edge of the tree."""
    honest, wrong = (Bench(InProcess(resolve(f"blind+blocked{name}"))) for name in ("", f":{plant}"))
    for seed in range(12):
        loop = GenerateCase("edge", seed, 100, -1, 40 if plant == "tree09" else 12, 4, 24, -1)
        case = SessionCase("tiny", (("vocab", 16),), 0, "ordinary", ((2, seed), (3, seed)), (), generate=loop)
        assert honest.outcome(case).verdict is Verdict.UNVERIFIED
        found = wrong.outcome(case).worst
        assert found is not None
        if found.verdict is Verdict.DEFECT:
            assert found.op == "best_first_tree"
            return
    raise AssertionError(f"{plant} was not seen in 12 sessions")


def test_a_capsule_finds_it_again() -> None:
    assert locator("blind+blocked:Z08") == locator("blocked:Z08") | {
        "module": "impls.blind",
        "attribute": "engine",
        "arguments": ["blocked:Z08"],
    }
