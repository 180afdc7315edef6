"""An engine for a user's own pytest tests: cases in, assertion errors out."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from campaigns.case import Case, from_json
from campaigns.isolation import EngineLoadError, Supervisor
from campaigns.recorded import Divergence
from campaigns.trial import Bench, Outcome, patience
from impls.registry import UnknownEngine
from oracles.judgement import FINDINGS, Verdict
from spec.engine import Description


class EngineUnderTest:
    """One engine in a supervised worker; use as a context manager."""

    def __init__(self, engine: str) -> None:
        self._supervisor = Supervisor(engine, deadline_s=patience())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._supervisor.close()

    @property
    def description(self) -> Description:
        return self._supervisor.description

    def outcome(self, case: Case | str) -> Outcome:
        """Every judgement of one case (or case line). Raises CaseError for a line that is no case."""
        return Bench(self._supervisor).outcome(from_json(case) if isinstance(case, str) else case)

    def passes(self, case: Case | str) -> Outcome:
        """`outcome`, or Divergence where something is wrong. An engine that proves nothing at all does not pass either."""
        outcome = self.outcome(case)
        if any(j.verdict in FINDINGS for j in outcome.judgements):
            raise Divergence(list(outcome.judgements))
        assert outcome.verdict != Verdict.UNVERIFIED, "nothing could be verified: does the engine give taps, and does its profile fit?"
        return outcome


def check_loadable(engine: str) -> str:
    """Empty, or why the engine cannot be loaded."""
    try:
        Supervisor(engine, deadline_s=patience()).close()
    except (EngineLoadError, UnknownEngine) as problem:
        return str(problem)
    return ""
