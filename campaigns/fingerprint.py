"""What makes two failures one finding: (engine without version, verdict, op or rule, output, rung). The store uses the same five."""

from __future__ import annotations

from typing import NamedTuple

from oracles.judgement import FINDINGS, Judgement


class Fingerprint(NamedTuple):
    engine: str
    verdict: str
    guilty: str  # op, or the rule where a judgement names no op
    output: str
    rung: str

    def __str__(self) -> str:
        return f"{self.verdict} {self.guilty}/{self.output} ({self.rung})"


def of(engine: str, judgement: Judgement) -> Fingerprint:
    return Fingerprint(engine, str(judgement.verdict), judgement.op or judgement.rule, judgement.tap, judgement.rung)


def first(engine: str, judgements: list[Judgement]) -> tuple[Fingerprint, Judgement] | None:
    """The fingerprint of a trial: that of its first finding in data order. None where nothing is wrong."""
    for judgement in judgements:
        if judgement.verdict in FINDINGS:
            return of(engine, judgement), judgement
    return None
