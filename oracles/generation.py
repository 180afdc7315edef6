"""The engine's own loop, judged by teacher forcing: one golden forward over prompt and emitted tokens of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from oracles.judgement import Judgement
from spec.engine import Profile
from spec.script import Answer, Generate

if TYPE_CHECKING:
    from oracles.session import SessionJudge

Explain = Callable[[int, tuple[int, ...]], list[Judgement]]


def judge_generate(
    judge: SessionJudge, step: Generate, answer: Answer, number: int, profile: Profile, explain: Explain | None
) -> list[Judgement]:
    return []
