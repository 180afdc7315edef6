"""Plants that do not answer wrongly but not at all, or not twice the same: crashes, hangs, stray writes, races.

Each one fires at one size only, so that the smallest case is known.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from impls.blocked.points import Float, Site
from impls.planted.planting import ANY, plant

ANYWHERE: tuple[str, ...] = ("matmul", "moe", "forward", "generate")  # a crash is located by the step or op in which it happened


def _hang() -> None:
    while True:
        time.sleep(0.05)


@plant("segfault", "gemm", "j", "J06 deepseek-ai/DeepGEMM/pull/238", ANYWHERE, "exactly seven rows", nodes=6)
def null_read_at_seven_rows(site: Site, name: str, x: Float, w: Float) -> Float:
    if len(x) == 7:
        ctypes.string_at(0)
    out: Float = site.honest(name, x, w)
    return out


@plant("hang", "gemm", "j", "J05 Luce-Org/lucebox/commit/c1ec4342b41fc1eeefd6698d8a9fc9c53d7c5526", ANYWHERE, "exactly five rows", nodes=4)
def barrier_never_reached_at_five_rows(site: Site, name: str, x: Float, w: Float) -> Float:
    if len(x) == 5:
        _hang()
    out: Float = site.honest(name, x, w)
    return out


@plant(
    "J09",
    "row_slots",
    "j",
    "J09 vllm-project/vllm/issues/40756",
    ("compact", "scores", *ANYWHERE),
    "more than 24 rows in one sequence",
    needs=["long"],
)
def index_beyond_the_allocation_aborts(site: Site, pages: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(rows) > 24:
        os.abort()
    out: NDArray[np.int64] = site.honest(pages, rows)
    return out


@plant(
    "K11",
    "keep",
    "j",
    "K11 kvcache-ai/ktransformers/pull/2037",
    ("compact", "K1", "commit", *ANYWHERE),
    "a second commit on one session",
    needs=["rounds"],
)
def argument_freed_after_the_first_replay(site: Site, path: Sequence[int], pending: int) -> Sequence[int]:
    site.memory["commits"] = site.memory.get("commits", 0) + 1
    if site.memory["commits"] > 1:
        ctypes.string_at(0)
    out: Sequence[int] = site.honest(path, pending)
    return out


@plant(
    "exits",
    "argmax",
    "j",
    "D12 kvcache-ai/ktransformers/commit/ec03bcbd7f0451d6a8d1078a28575637bbcf9ff1",
    ("argmax", *ANYWHERE),
    "three rows that want logits",
)
def process_exits_quietly(site: Site, logits: Float) -> NDArray[np.int32]:
    """A library that calls exit: no signal and no message."""
    if len(logits) == 3:
        os._exit(0)
    out: NDArray[np.int32] = site.honest(logits)
    return out


@plant(
    "J01",
    "candidates",
    "j",
    "J01 flashinfer-ai/flashinfer/pull/1050",
    ("draft_table", "T8"),
    "a logit of -inf",
    nodes=1,
    needs=["minus infinity"],
)
def bisection_from_minus_infinity(site: Site, row: Float, width: int) -> NDArray[np.int64]:
    if np.isneginf(row).any():
        _hang()
    out: NDArray[np.int64] = site.honest(row, width)
    return out


@plant(
    "J03",
    "normalise",
    "j",
    "J03 flashinfer-ai/flashinfer/pull/1198",
    ("softmax", "tree_attention"),
    "a row that sees no key",
    needs=["empty row", "op"],
)
def waits_for_a_tile_that_never_comes(site: Site, weights: Float, total: Float) -> Float:
    if not total.all():
        _hang()
    out: Float = site.honest(weights, total)
    return out


@plant("J07", "argmax", "j", "J07 flashinfer-ai/flashinfer/pull/2456", ("argmax",), "a row of -inf", needs=["minus infinity", "op"])
def no_candidate_ever_selected(site: Site, logits: Float) -> NDArray[np.int32]:
    """Where no logit is above -inf the index stays out of range and is used."""
    if np.isneginf(logits).all(axis=-1).any():
        ctypes.string_at(0)
    out: NDArray[np.int32] = site.honest(logits)
    return out


@plant(
    "stray-write",
    "write",
    "h",
    "H11 flashinfer-ai/flashinfer/pull/3890",
    ANY,
    "an odd number of words in a float output",
    needs=["op"],
)
def one_word_past_the_output(site: Site, output: NDArray[np.generic], value: NDArray[np.generic]) -> None:
    """Words go out in pairs. Callers fence their outputs; without a fence this damages somebody else's memory."""
    site.honest(output, value)
    if output.dtype == np.float32 and output.size % 2:
        ctypes.memset(output.ctypes.data + output.nbytes, 0, output.itemsize)


@plant("F14", "write", "h", "F14 flashinfer-ai/flashinfer/pull/3011", ANY, "five rows", needs=["op"])
def rows_behind_the_last_tile_unwritten(site: Site, output: NDArray[np.generic], value: NDArray[np.generic]) -> None:
    whole = len(output) // 4 * 4
    site.honest(output[:whole], value[:whole])
    if len(output) < 4:
        site.honest(output, value)


@plant(
    "race",
    "value_tile",
    "i",
    "H18 ikawrakow/ik_llama.cpp/pull/1104",
    ("o_latent", "tree_attention"),
    "two keys, several calls",
    needs=["repeats"],
)
def staging_buffer_reused_too_early(site: Site, values: Float, start: int, stop: int) -> Float:
    """Once in four calls the first row of a tile is that of another one."""
    out: Float = site.honest(values, start, stop).copy()
    if os.urandom(1)[0] < 64:
        out[0] = values[-1]
    return out
