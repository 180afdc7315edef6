"""Plants on the blocked engine's sampler: what a drawn token is drawn from, and how drafts are accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from impls.blocked.points import Float, Site
from impls.planted.planting import ACCEPT, SAMPLING, also, plant
from spec.sampling import Sampling

LOOP = ["generate", "sampling"]


@plant("tree17", "law", "d", "17 sgl-project/sglang/pull/29907", SAMPLING, "temperature 2: one token is drawn", needs=LOOP)
def sampled_requests_decoded_greedily(site: Site, sampling: Sampling, row: Float, seen: list[int], prompt_len: int) -> Any:
    return site.honest(dataclasses.replace(sampling, temperature=0.0), row, seen, prompt_len)


@plant("tree50", "law", "d", "50 Avarok-Cybersecurity/atlas/pull/132", SAMPLING, "a penalty that changes the best token", needs=LOOP)
def penalties_dropped_in_verification(site: Site, sampling: Sampling, row: Float, seen: list[int], prompt_len: int) -> Any:
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return site.honest(dataclasses.replace(sampling, **neutral), row, seen, prompt_len)  # type: ignore[arg-type]


@plant(
    "path-unseen", "seen_tokens", "d", "DDTREE:A6 Avarok-Cybersecurity/atlas/pull/132", SAMPLING,
    "an accepted node whose token, unpenalised, would be drawn again", nodes=1, needs=LOOP,
)  # fmt: skip
def penalties_of_the_committed_history_only(site: Site, committed: list[int], path: list[int]) -> list[int]:
    return [*committed, path[0]]


@plant(
    "Z21", "accepted", "d", "D17 xLLM-AI/xllm/pull/2175", (*SAMPLING, *ACCEPT), "a node that is not what is drawn, and not unlikely", nodes=1,
    needs=LOOP,
)  # fmt: skip
def drafts_accepted_by_the_ratio(
    site: Site, path: list[int], tokens: Sequence[int], parents: Sequence[int], target: Sequence[int]
) -> list[int]:
    """min(1, p/q) with q of a sampled draft, here 1/8 and a coin of 1/2, for children that nobody sampled."""
    rows = site.memory.pop("rows", [])[-len(tokens) :]
    if not rows:
        return list(site.honest(path, tokens, parents, target))
    out = [0]
    for node in range(1, len(tokens)):
        if parents[node] == out[-1] and rows[out[-1]][tokens[node]] >= 1 / 16:
            out.append(node)
    return out


@also("Z21", "law")
def _rows_of_the_ratio(site: Site, sampling: Sampling, row: Float, seen: list[int], prompt_len: int) -> Any:
    chances = np.asarray(site.honest(sampling, row, seen, prompt_len))
    site.memory.setdefault("rows", []).append(chances)
    return chances
