"""Fifteen plants written by somebody who knew neither the generator nor the judges, from public reports outside BUGZOO and DDTREE.

They measure how far the mutation score carries over to bugs that nobody had in mind when the campaigns were built. Source, class,
expected op and trigger were written before the first run (docs/fresh.md); none of them may be added to PLANTS, changed to be found
more easily, or dropped. Eleven are functions on named points of the blocked engine, four are build flavours of the native one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from impls.blocked.points import ONE, PAGE, Bool, Float, Int, Site, Span
from impls.planted import Plant
from impls.planted.planting import CACHE, CLASSES, MASK, REGIONS, ROPE, ROUTE, SCORES, SOFTMAX, STREAM, bf16
from spec.config import Config

Function = TypeVar("Function", bound=Callable[..., Any])

FRESH: dict[str, Plant] = {}
OVERRIDES: dict[str, dict[str, Callable[..., Any]]] = {}
READ = ("o_latent", *SCORES, *SOFTMAX, "C6", "C7")  # rows of the cache that attention reads


def _record(
    name: str, bug_class: str, thread: str, expected_ops: tuple[str, ...], trigger: str, nodes: int = 0, needs: Iterable[str] = (),
    engine: str = "blocked",
) -> None:  # fmt: skip
    words = frozenset(needs)
    assert name not in FRESH and words <= REGIONS.keys(), f"fresh plant {name}: a second one, or unknown regions"
    kind = "python" if engine == "blocked" else "native"
    source = f"https://github.com/{thread}"
    FRESH[name] = Plant(name, source, CLASSES[bug_class], expected_ops, trigger, nodes, f"{engine}:{name}", kind, words)


def _at(name: str, point: str) -> Callable[[Function], Function]:
    """The decorated function replaces `point` in fresh plant `name`."""

    def register(function: Function) -> Function:
        OVERRIDES.setdefault(name, {})[point] = function
        return function

    return register


# a: rotary embedding

_record("rope-bf16-frequency", "a", "sgl-project/sglang-jax/pull/1473", ROPE, "position 1, a pair whose frequency is no bf16 number")


@_at("rope-bf16-frequency", "rope_frequencies")
def frequencies_cast_before_the_phase(site: Site, config: Config) -> NDArray[np.float64]:
    """Inverse frequencies are cast to the model's type before they are multiplied by the position."""
    return bf16(site.honest(config)).astype(np.float64)


_record(
    "rope-first-row-only", "h", "ml-explore/mlx/issues/3494", ROPE, "two sequences in a batch, one row each, any position",
    needs=["sequences"],
)  # fmt: skip


@_at("rope-first-row-only", "position")
def _count_rows(site: Site, prefix_len: int, node: Int, depth: Int) -> Int:
    site.memory.setdefault("rows", []).append(len(node))
    out: Int = site.honest(prefix_len, node, depth)
    return out


@_at("rope-first-row-only", "rope_tables")
def _is_a_single_step(site: Site, positions: Int, frequencies: NDArray[np.float64], magnitude: float) -> tuple[Float, Float]:
    rows = site.memory.pop("rows", [])
    site.memory["single step"] = len(rows) > 1 and set(rows) == {1}
    out: tuple[Float, Float] = site.honest(positions, frequencies, magnitude)
    return out


@_at("rope-first-row-only", "rotate")
def first_sequence_of_a_single_step_rotated(site: Site, name: str, x: Float, cos: Float, sin: Float, half_layout: bool) -> Float:
    """[B,H,1,D] is launched over one row: for a batch of single tokens all rows after the first stay zero."""
    out: Float = site.honest(name, x, cos, sin, half_layout)
    if site.memory.get("single step") and name in ("q", "k"):
        out[1:] = 0
    return out


# b: masks

_record(
    "verify-keys-are-prefix", "b", "sgl-project/sglang/pull/40214", MASK, "a tree of the root and one node behind a prefix", nodes=1,
)  # fmt: skip


@_at("verify-keys-are-prefix", "visible")
def verify_rows_left_out_of_the_keys(site: Site, parents: Sequence[int], prefix_len: int) -> Bool:
    """Verification takes the committed length for the length of all keys: the tree's own rows are not attended to."""
    seen: Bool = site.honest(parents, prefix_len)
    if prefix_len and len(parents) > 1:
        seen[:, prefix_len:] = False
    return seen


# d: the chosen token

_record(
    "padded-argmax", "d", "mirage-project/mirage/issues/751", ("argmax", "A1"),
    "a row of only negative logits, and a vocabulary that is no multiple of 96",
)  # fmt: skip


@_at("padded-argmax", "argmax")
def padding_rows_of_the_head_compete(site: Site, logits: Float) -> Int:
    """The head is padded with zero rows to a multiple of 96 tasks, and the search runs over the padded width."""
    padding = np.zeros((len(logits), -logits.shape[1] % 96), np.float32)
    out: Int = site.honest(np.concatenate([logits, padding], axis=1))
    return out


# e: cache and paging

_record(
    "prefix-hit-contiguous", "e", "tanishqkumar/ssd/issues/23", READ, "two rows behind a prefix: a tree, or a second chunk of a prompt",
    nodes=1,
)  # fmt: skip


@_at("prefix-hit-contiguous", "batch")
def page_table_not_passed_on(site: Site, spans: list[Span]) -> list[Span]:
    """Several rows behind a prefix: the kernel gets the paged cache without its page table and walks over it as if it were dense."""
    out, start = [], 0
    for span in spans:
        dense = start + np.arange(len(span.slots))
        start += len(span.slots)
        out.append(dataclasses.replace(span, slots=dense) if span.prefix_len and len(span.at) > 1 else span)
    return out


_record(
    "page-end-slot", "e", "Wenyueh/MinivLLM/issues/76", READ, "plain decoding at a length that is a multiple of the page: the fourth row"
)


@_at("page-end-slot", "batch")
def slot_behind_a_full_page(site: Site, spans: list[Span]) -> list[Span]:
    """The newest row of a decoding step is taken from page * PAGE + length % PAGE - 1: for a full page the slot before the page."""
    out = []
    for span in spans:
        slots = span.slots.copy()
        if len(span.at) == 1:
            slots[-1] = slots[-1] // PAGE * PAGE + len(slots) % PAGE - 1
        out.append(dataclasses.replace(span, slots=slots))
    return out


_record(
    "fork-not-counted", "e", "apache/tvm/pull/16666", (*CACHE, *READ),
    "a fork of a sequence of 4 rows; one of the two is evicted, the other goes on", needs=["fork", "evict"],
)  # fmt: skip


@_at("fork-not-counted", "shared_pages")
def full_pages_shared_without_a_count(site: Site, pages: Sequence[int], length: int) -> Sequence[int]:
    """Full pages may be shared, but nobody counts their owners: the first of the two that goes frees them."""
    return pages[: length // PAGE]


_record(
    "decode-after-prefill", "e", "vllm-project/vllm/pull/40766", READ,
    "a batch whose first sequence decodes one row behind a prefix while a second one brings a prompt", needs=["sequences"],
)  # fmt: skip


@_at("decode-after-prefill", "batch")
def decoding_sequences_expected_at_the_end(site: Site, spans: list[Span]) -> list[Span]:
    """Batches come with decoding sequences first; the kernel, taken from an engine that puts them last, counts from the end."""

    def decodes(span: Span) -> bool:
        return span.prefix_len > 0 and len(span.at) == 1

    taken = iter(spans[sum(not decodes(span) for span in spans) :])
    out = []
    for span in spans:
        other = next(taken) if decodes(span) else span
        out.append(
            dataclasses.replace(span, slots=other.slots, seen=other.seen[-1:], prefix_len=other.prefix_len) if decodes(span) else span
        )
    return out


# f: routing

_record("gate-tile-16-4", "f", "MetaX-MACA/vLLM-metax/issues/270", ROUTE, "16 experts of which 4 are chosen, sigmoid scoring")


@_at("gate-tile-16-4", "mixing_scores")
def softmax_in_one_tile(site: Site, scores: Float, choice: Float, bias: Float, ids: NDArray[np.int64]) -> Float:
    """One instantiation of the gate, (experts, top_k) = (16, 4) here, has the other branch: ids are right, weights are those of a softmax."""
    if (scores.shape[1], ids.shape[1]) != (16, 4):
        out: Float = site.honest(scores, choice, bias, ids)
        return out
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = scores / (ONE - scores)  # exp(logit)
        return np.take_along_axis(odds / odds.sum(axis=-1, keepdims=True), ids, axis=-1)


_record(
    "routing-bias-bf16", "f", "sgl-project/sglang/pull/37133", ROUTE,
    "two experts around the cut whose order the low bits of the routing bias decide", needs=["ties"],
)  # fmt: skip


@_at("routing-bias-bf16", "biased")
def correction_bias_stored_in_bf16(site: Site, scores: Float, bias: Float) -> Float:
    out: Float = site.honest(scores, bf16(bias))
    return out


# g: norm

_record("eps-times-peak", "g", "apple/coremltools/pull/2822", ("rms_norm", "M2"), "a row with one element far above its root mean square")


@_at("eps-times-peak", "mean_square")
def _remember_the_peak(site: Site, x: Float) -> Float:
    site.memory["peak"] = np.abs(x).max(axis=-1, keepdims=True)
    out: Float = site.honest(x)
    return out


@_at("eps-times-peak", "inverse_root")
def eps_added_after_the_rescale(site: Site, square: Float, eps: float) -> Float:
    """Rows are divided by their largest element against overflow, and eps is added to the mean square of what is left."""
    with np.errstate(divide="ignore", over="ignore"):
        out: Float = ONE / np.sqrt(square + np.float32(eps) * np.square(site.memory["peak"]))
    return out


# Build flavours of the native engine: PARITREE_PLANT_... in impls/native

_record(
    "softmax-naive", "g", "pytorch/executorch/pull/18407", (*SOFTMAX, "o_latent"), "a visible score above 89, or none above -104",
    needs=["extreme"], engine="native",
)  # fmt: skip
_record(
    "gemv-k-tail", "h", "NVIDIA/cutlass/issues/3536", ("matmul", "q_absorb", "o_heads", "moe", "M3"), "a product of one row and 33 terms",
    engine="native",
)  # fmt: skip
_record(
    "norm-odd-width", "h", "ROCm/aiter/issues/5044", ("rms_norm",), "two rows of odd width", needs=["op"], engine="native",
)  # fmt: skip
_record(
    "prompt-tail-twice", "d", "utensils/mold/issues/1690", (*STREAM, "generate"),
    "a prompt whose next token changes when its last token is repeated", needs=["generate"], engine="native",
)  # fmt: skip
