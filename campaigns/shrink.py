"""Shrinking by Hypothesis, seeded with the choices that led to the failure: for cases that `campaigns.reduce` leaves large.

`find` has no budget of its own: the deadline leaves it as a BaseException, and the best case so far is kept outside of it. Stored
choices go under the secondary key, because an entry under the primary one that still fails ends the run without shrinking.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

from hypothesis import HealthCheck, Phase, Verbosity, find, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.errors import Flaky, NoSuchExample

from campaigns.case import Case, to_json
from campaigns.reduce import Fails, cost

_KEY = b"shrink"


class DeadlinePassed(BaseException):
    """Leaves `find` wherever it is; Exception would be taken for a failure of the predicate."""


def shrunk(
    case: Case, strategy: st.SearchStrategy[Sequence[Case]], choices: Iterable[bytes], fails: Fails, seconds: float, checks_max: int = 1000
) -> tuple[Case, int]:
    """The smallest failing case that Hypothesis meets while it shrinks a failing batch, and the number of checks.

    `strategy` draws the batch whose stored `choices` contain `case`. `case` itself where the choices no longer lead to a failure
    (they belong to one version of Hypothesis; the case line is the record).
    """
    database = InMemoryExampleDatabase()
    for stored in choices:
        database.save(_KEY + b".secondary", stored)
    best = case
    memo: dict[str, bool] = {to_json(case): True}
    deadline = time.monotonic() + seconds

    def holds(batch: Sequence[Case]) -> bool:
        nonlocal best
        failing = False
        for one in batch:
            line = to_json(one)
            if line not in memo:
                if time.monotonic() > deadline or len(memo) > checks_max:
                    raise DeadlinePassed
                memo[line] = fails(one)
            if memo[line]:
                failing = True
                if cost(one) < cost(best):
                    best = one
        return failing

    explicit = settings(
        database=database,
        phases=(Phase.reuse, Phase.shrink),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=False,
        max_examples=1000,
        verbosity=Verbosity.quiet,
    )
    with contextlib.suppress(NoSuchExample, Flaky, DeadlinePassed):
        find(strategy, holds, settings=explicit, database_key=_KEY)
    return best, len(memo) - 1
