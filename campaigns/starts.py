"""Small sessions to start from: the least that each rung of the ladder can show. One that fails saves the way down from a large case.

They keep what the failing case is made under (preset, weights, hazards, relation), because that may be what it takes; what of it is not
needed, the reducer takes off. Few, and the most telling first: each costs a run of the engine where it does not fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from campaigns.candidates import CHAIN, ONE, ONE_ACCEPTED, SECOND_ACCEPTED, SIBLINGS, Rounds
from campaigns.case import Case, GenerateCase, SessionCase

HIT: Rounds = ((ONE_ACCEPTED,),)
SECOND_HIT: Rounds = ((SECOND_ACCEPTED,),)
LATE_ROWS = 15  # with a root and a node 17: more than a tile of 16

Shape = tuple[tuple[int, ...], Rounds, int, bool]
"""(prompt lengths, rounds, chunk, whether the last sequence joins late)."""

SHAPES: dict[str, tuple[Shape, ...]] = {
    "prefill": (
        ((1,), (), 0, False),
        ((3,), (), 0, False),
        ((1, 2), (), 0, False),
        ((2, 2), (), 1, False),
        ((6,), (), 2, False),
        ((17,), (), 0, False),
    ),
    "decode": (
        ((1,), (((),),), 0, False),
        ((1, 2), (((), ()),), 0, False),
        ((1,), (((),), ((),)), 0, False),
        ((3,), (((),),), 0, False),
        ((16,), (((),),), 0, False),
    ),
    "tree verify": (
        ((1,), ((ONE,),), 0, False),
        ((2,), ((SIBLINGS,),), 0, False),
        ((1, 2), (((), ONE),), 0, False),
        ((1,), (((),), (ONE,)), 0, False),
        ((1, LATE_ROWS), ((ONE, ()),), 0, True),
        ((6,), ((SIBLINGS,),), 3, False),
        ((1, 3), ((SIBLINGS, ()),), 0, True),
        ((16,), ((ONE,),), 0, False),
        ((4,), ((CHAIN,),), 0, False),
    ),
    "accept and commit": (
        ((1,), (((),),), 0, False),
        ((1,), HIT, 0, False),
        ((1,), SECOND_HIT, 0, False),
        ((3,), SECOND_HIT, 0, False),
        ((1,), ((((0, 0), (1, 1), (0, 1)),),), 0, False),
        ((1, 2), (((), ONE_ACCEPTED),), 0, False),
        ((3,), (HIT[0], HIT[0]), 0, False),
    ),
}
LOOPS = ((1, 1, 1), (1, 1, 3), (2, 1, 4), (3, 2, 6))  # (budget, block_len, max_new)


def starts(case: Case, rung: str) -> Iterator[SessionCase]:
    """Of a session that fails on `rung`; none for other kinds, or where the rung is not known."""
    if not isinstance(case, SessionCase):
        return
    if rung == "whole loop" and case.generate is not None:
        for budget, block_len, max_new in LOOPS:
            yield dataclasses.replace(
                case,
                prompts=_prompts(case, (1,)),
                rounds=(),
                chunk=0,
                mixed=True,
                generate=_loop(case.generate, budget, block_len, max_new),
            )
    for lengths, rounds, chunk, late in SHAPES.get(rung, ()):
        hazards = {*case.hazards} - {"late"} | ({"late"} if late else set())
        yield dataclasses.replace(
            case, prompts=_prompts(case, lengths), rounds=rounds, chunk=chunk, mixed=True, generate=None, hazards=tuple(sorted(hazards))
        )


def _prompts(case: SessionCase, lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """With the seeds of the case as far as it has them: numeric failures hang on numbers."""
    seeds = [seed for _, seed in case.prompts]
    return tuple((length, seeds[index] if index < len(seeds) else index) for index, length in enumerate(lengths))


def _loop(generate: GenerateCase, budget: int, block_len: int, max_new: int) -> GenerateCase:
    stop_at = min(generate.stop_at, max_new - 1)
    return dataclasses.replace(
        generate,
        budget=min(budget, generate.budget), block_len=min(block_len, generate.block_len), max_new=min(max_new, generate.max_new), stop_at=stop_at,
    )  # fmt: skip


def possible(case: Case, rung: str) -> bool:
    """Whether a session can fail on `rung` at all: what has no tree row fails in no tree batch. True where that is not known."""
    if not isinstance(case, SessionCase) or case.relation:
        return True
    if rung == "whole loop":
        return case.generate is not None
    if rung == "decode":
        return bool(case.rounds)
    if rung == "tree verify":
        joins = "late" in case.hazards and len(case.prompts) > 1 and case.prompts[-1][0] > 1
        return any(any(trees[: len(case.prompts)]) or (joins and number == 0) for number, trees in enumerate(case.rounds))
    return True
