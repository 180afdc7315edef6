"""Decoding loops over any `spec.engine.Session`: autoregressive, and by draft trees (rules A1-A4, A6, K1-K5, D3, L1-L3).

Several sequences of unequal length share each batch and leave it when they are done. A loop holds no model and no cache: it
builds rows, reads logits, asks a `spec.schemes.Decider` for tokens, and commits paths. Sequence i of `prompts` is sequence i
of the session: fresh, or holding the first `cached[i]` tokens of the prompt from an earlier loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.engine import Drafter, EngineError, FeatureDrafter, Float, Generation, Int, Limits, Round, Rows, Session
from spec.schemes import Decider, Greedy
from spec.tree import DraftTable, Tree, best_first_tree, cut, draft_table, positions, root_tree

Builder = Callable[[DraftTable, int, int], Tree]
"""(table, root, budget) -> tree; the paper's is `best_first_tree`, others are in spec/profiles.py."""
FEATURE_TAP = "ffn_residual"  # the residual stream after a layer (D2)


class BadLogits(EngineError):
    """A session answered with logits of the wrong shape or dtype, or with NaN: no token can be chosen from them."""


class MissingFeatures(EngineError):
    """A session did not push the taps that the drafter reads (D2)."""


@dataclass(frozen=True, eq=False)
class Recording:
    """One sequence as it was decoded. `logits[i]` is the row that chose `tokens[i]`: bit-equal rows prove losslessness (L1)."""

    tokens: tuple[int, ...]  # after the prompt, cut by rule A4
    rounds: tuple[Round, ...]  # empty for autoregressive decoding
    logits: Float  # [len(tokens), V]


def greedy(session: Session, prompts: Sequence[Int], limits: Limits) -> list[Recording]:
    """Autoregressive decoding by argmax: the stream that every other greedy loop must emit (L1). Raises as `sequential`."""
    return sequential(session, prompts, limits)


def sequential(
    session: Session, prompts: Sequence[Int], limits: Limits, decider: Decider | None = None, *, cached: Sequence[int] | None = None
) -> list[Recording]:
    """Autoregressive decoding, one token a step, chosen by `decider` (None: argmax).

    Raises BadLogits, and ValueError for a prompt without tokens or one that is cached as a whole.
    """
    choose = decider or Greedy()
    streams = _prefill(session, prompts, limits, choose, cached, None)
    while active := [stream for stream in streams if not stream.done]:
        logits, _ = _forward(
            session, decode_rows([s.number for s in active], [s.history[-1] for s in active], [s.prefix_len for s in active])
        )
        for row, stream in enumerate(active):
            session.commit(stream.number, np.zeros(1, np.int32))
            stream.emit([_bonus(choose, stream, logits[row : row + 1])], logits[row : row + 1])
    return [stream.recording() for stream in streams]


def ddtree(
    session: Session,
    prompts: Sequence[Int],
    drafter: Drafter,
    budget: int,
    limits: Limits,
    decider: Decider | None = None,
    *,
    cached: Sequence[int] | None = None,
    builder: Builder = best_first_tree,
) -> list[Recording]:
    """Decoding by draft trees: each round drafts a tree per sequence, runs all its nodes in one batch, and keeps the accepted path.

    The path is committed as far as its tokens are emitted, so that the cache is that of the cut stream even after a stop in
    the middle of a path (A4), and decoding can go on from there. `Round.path` is the whole accepted path. A `FeatureDrafter`
    observes the features of committed rows, in path order, each once (K5, D3). Raises BadLogits, TreeError for draft logits
    outside T8 or a bad budget, ValueError as `sequential`.
    """
    choose = decider or Greedy()
    observer = drafter if isinstance(drafter, FeatureDrafter) else None
    streams = _prefill(session, prompts, limits, choose, cached, observer)
    while active := [stream for stream in streams if not stream.done]:
        trees = [_draft_tree(drafter, stream, budget, builder) for stream in active]
        rows = tree_rows([s.number for s in active], trees, [s.prefix_len for s in active])
        logits, features = _forward(session, rows, observer=observer)
        first = 0
        for stream, tree in zip(active, trees, strict=True):
            own = slice(first, first + len(tree.tokens))
            first = own.stop
            accepted = choose.accept(stream.number, stream.history, stream.prompt_len, tree, logits[own])
            path = list(accepted.path)
            emitted = stream.emit([*tree.tokens[path[1:]].tolist(), accepted.bonus], logits[own][path])
            session.commit(stream.number, np.array(path[:emitted], np.int32))
            if observer is not None:
                observer.observe(stream.number, features[own][path[:emitted]])
            stream.rounds.append(Round(tuple(tree.tokens.tolist()), tuple(tree.parents.tolist()), accepted.path, accepted.bonus))
    return [stream.recording() for stream in streams]


def generation(recording: Recording) -> Generation:
    """What crosses the seam: the recording without its logits."""
    return Generation(recording.tokens, recording.rounds)


# Batches


def prefill_rows(
    prompts: Sequence[Int], sequences: Sequence[int] | None = None, cached: Sequence[int] | None = None
) -> tuple[Rows, NDArray[np.bool_]]:
    """Every prompt as a chain from position 0, or from behind its first `cached` tokens, and want_logits: the last row of each."""
    before = [0] * len(prompts) if cached is None else list(cached)
    lengths = [len(prompt) - known for prompt, known in zip(prompts, before, strict=True)]
    numbers = range(len(prompts)) if sequences is None else sequences
    starts = np.cumsum([0, *lengths])
    parent = np.arange(-1, starts[-1] - 1, dtype=np.int32)
    parent[starts[:-1]] = -1
    rows = Rows(
        sequence=np.repeat(np.asarray(numbers, np.int32), lengths),
        token=np.concatenate([np.asarray(prompt, np.int32)[known:] for prompt, known in zip(prompts, before, strict=True)]),
        position=np.concatenate([np.arange(known, len(prompt), dtype=np.int32) for prompt, known in zip(prompts, before, strict=True)]),
        parent=parent,
    )
    want = np.zeros(len(rows), np.bool_)
    want[starts[1:] - 1] = True
    return rows, want


def decode_rows(sequences: Sequence[int], tokens: Sequence[int], prefix_lens: Sequence[int]) -> Rows:
    """One row per sequence, at the position after its committed prefix."""
    return Rows(
        np.array(sequences, np.int32), np.array(tokens, np.int32), np.array(prefix_lens, np.int32), np.full(len(tokens), -1, np.int32)
    )


def tree_rows(sequences: Sequence[int], trees: Sequence[Tree], prefix_lens: Sequence[int]) -> Rows:
    """The nodes of each tree in order, root first (C1), at P + depth (C2); parents are shifted to rows of the batch (C6)."""
    parents = []
    first = 0
    for tree in trees:
        shifted = tree.parents + np.int32(first)
        shifted[0] = -1
        parents.append(shifted)
        first += len(tree.parents)
    return Rows(
        sequence=np.repeat(np.array(sequences, np.int32), [len(tree.tokens) for tree in trees]),
        token=np.concatenate([tree.tokens for tree in trees]),
        position=np.concatenate([positions(tree.depths, prefix_len) for tree, prefix_len in zip(trees, prefix_lens, strict=True)]),
        parent=np.concatenate(parents),
    )


# State of one sequence


class _Stream:
    """History and what is emitted. Invariant: the cache holds history[:-1]; the last token, the root, has no cache row yet."""

    def __init__(self, number: int, prompt: list[int], limits: Limits) -> None:
        self.number = number
        self.history = prompt
        self.prompt_len = len(prompt)
        self.limits = limits
        self.rounds: list[Round] = []
        self.rows: list[Float] = []
        self.done = limits.max_new <= 0

    @property
    def prefix_len(self) -> int:
        return len(self.history) - 1

    def emit(self, tokens: list[int], logits: Float) -> int:
        """Append as much of `tokens` as rule A4 lets out; how many those are."""
        left = self.limits.max_new - (len(self.history) - self.prompt_len)
        kept = cut(tokens, self.limits.stop_tokens, left)
        self.history.extend(kept)
        self.rows.append(logits[: len(kept)].copy())
        self.done = len(kept) == left or kept[-1] in self.limits.stop_tokens
        return len(kept)

    def recording(self) -> Recording:
        rows = np.concatenate(self.rows) if self.rows else np.zeros((0, 0), np.float32)
        return Recording(tuple(self.history[self.prompt_len :]), tuple(self.rounds), rows)


def _prefill(
    session: Session,
    prompts: Sequence[Int],
    limits: Limits,
    decider: Decider,
    cached: Sequence[int] | None,
    observer: FeatureDrafter | None,
) -> list[_Stream]:
    before = [0] * len(prompts) if cached is None else list(cached)
    for number, (prompt, known) in enumerate(zip(prompts, before, strict=True)):
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} has no tokens: give at least one, the first row needs something to stand on")
        if not 0 <= known < len(prompt):
            raise ValueError(f"{known} tokens of prompt {number} are cached, but must be between 0 and {len(prompt) - 1}: one row must run")
    streams = [_Stream(number, np.asarray(prompt, np.int32).tolist(), limits) for number, prompt in enumerate(prompts)]
    if limits.max_new <= 0 or not streams:
        return streams
    rows, want = prefill_rows(prompts, cached=before)
    logits, features = _forward(session, rows, want, observer)
    first = 0
    for stream, known in zip(streams, before, strict=True):
        own = slice(first, first + stream.prompt_len - known)
        first = own.stop
        session.commit(stream.number, np.arange(stream.prompt_len - known, dtype=np.int32))
        if observer is not None:
            observer.observe(stream.number, features[own])
        row = logits[stream.number : stream.number + 1]
        stream.emit([_bonus(decider, stream, row)], row)
    return streams


def _bonus(decider: Decider, stream: _Stream, row: Float) -> int:
    """The token after the history, from its one row [1, V]."""
    return decider.accept(stream.number, stream.history, stream.prompt_len, root_tree(stream.history[-1]), row).bonus


def _draft_tree(drafter: Drafter, stream: _Stream, budget: int, builder: Builder) -> Tree:
    logits = drafter.draft(stream.number, np.array(stream.history, np.int32))  # (L,V)
    return builder(draft_table(logits, budget), stream.history[-1], budget)


def _forward(
    session: Session, rows: Rows, want: NDArray[np.bool_] | None = None, observer: FeatureDrafter | None = None
) -> tuple[Float, Float]:
    """Logits of the wanted rows, and the features [T, layers * hidden] that `observer` reads (none: [T, 0])."""
    wanted = np.ones(len(rows), np.bool_) if want is None else want
    layers = () if observer is None else observer.feature_layers
    kept: dict[int, NDArray[Any]] = {}

    def keep(name: str, layer: int, array: NDArray[Any]) -> None:
        if layer in layers:
            kept[layer] = array.copy()  # a sink copies at once

    logits = session.forward(rows, wanted, frozenset({FEATURE_TAP} if layers else ()), keep)
    if logits.ndim != 2 or len(logits) != np.count_nonzero(wanted) or logits.dtype != np.float32:
        raise BadLogits(f"logits are {logits.dtype} {list(logits.shape)}, but {np.count_nonzero(wanted)} rows of float32 were asked for")
    if np.isnan(logits).any():
        row, token = (int(i) for i in np.argwhere(np.isnan(logits))[0])
        raise BadLogits(f"the logit of token {token} in row {row} is NaN")
    missing = set(layers) - set(kept)
    if missing:
        raise MissingFeatures(f"the drafter reads {FEATURE_TAP} of layer {min(missing)}, but the session did not push it")
    empty = np.zeros((len(rows), 0), np.float32)
    return logits, np.concatenate([kept[layer] for layer in layers], axis=1) if layers else empty
