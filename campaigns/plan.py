"""A session case to a script: every row, path and read-back is fixed before the engine runs.

The trees of the rounds are the case's own, so that no golden decoding is needed here: the judge checks rows locally, and an arbitrary
accepted path exercises the cache as well as a golden one. Only the engine's own loop (Generate) starts from golden tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from campaigns import text
from campaigns.case import CaseError, GenerateCase, Node, SessionCase
from campaigns.dflash import DFlashRecipe
from campaigns.weights import checkpoint_at, weights_for
from impls.checkpoint import CheckpointError
from spec.config import Config, ConfigError, Yarn, preset
from spec.drafters import ChainDrafter, DrafterError, EdgeDrafter, NoisyTargetDrafter, RandomDrafter, TableDrafter
from spec.engine import Departure, Drafter, Int, Limits, Rows, departed
from spec.sampling import Sampling, SamplingError
from spec.script import CacheRows, Commit, Evict, Fork, Forward, Generate, Script, Step, WeightsKey
from spec.weights import is_large, philox

PLAN_HAZARDS = frozenset({"fork", "evict", "orphan", "late", "interleaved"})
"""Hazards that are planned here; all others travel to the worker in Script.hazards.

fork: a copy decodes beside its source; evict: a sequence comes back with another prompt; orphan: the source of a copy does, and the copy must
outlive it; late: the last sequence joins in the first round, its prompt in one batch with the trees of the others; interleaved: the rows of a
batch take turns among its sequences.
"""


def config_of(case: SessionCase) -> Config:
    """Raises CaseError when the overrides do not fit the preset, or the checkpoint cannot be opened."""
    if case.checkpoint:
        try:
            return checkpoint_at(case.checkpoint).config
        except CheckpointError as problem:
            raise CaseError(str(problem)) from None
    overrides = {name: Yarn(*value) if name == "yarn" and isinstance(value, tuple) else value for name, value in case.overrides}
    try:
        return preset(case.preset, **overrides)
    except (ConfigError, TypeError) as problem:
        raise CaseError(f"the configuration of the case cannot be built: {problem}") from None


def weights_key(case: SessionCase) -> WeightsKey:
    return WeightsKey(0, "ordinary", case.checkpoint) if case.checkpoint else WeightsKey(case.weights_seed, case.regime)


def prompt_tokens(config: Config, length: int, seed: int) -> Int:
    """int32 [length]; a longer prompt of the same seed starts with the shorter one, unless a text is too short for it.

    Real text where the vocabulary holds the byte tokens, uniform tokens elsewhere.
    """
    if config.vocab >= text.VOCAB:
        return text.prompt(max(1, length), seed)
    return philox("prompt", seed).integers(0, config.vocab, max(1, length)).astype(np.int32)


def tree_parents(nodes: tuple[Node, ...]) -> Int:
    """int32 [N + 1], -1 for the root; any sub-list of `nodes` is a tree as well."""
    return np.array([-1] + [max(0, number - 1 - back) for number, (back, _) in enumerate(nodes, 1)], np.int32)


def tree_tokens(config: Config, parents: Int, round_seed: int) -> Int:
    """Siblings get consecutive tokens from a start that depends on the round: distinct under one parent, often equal across parents."""
    start = int(philox("round", round_seed).integers(config.vocab))
    tokens = np.zeros(len(parents), np.int32)
    tokens[0] = start
    born = np.zeros(len(parents), np.int32)
    for node in range(1, len(parents)):
        parent = parents[node]
        tokens[node] = (start + 1 + 3 * (parent % 5) + born[parent]) % config.vocab
        born[parent] += 1
    return tokens


def hit_path(nodes: tuple[Node, ...], parents: Int) -> Int:
    """From the root to the first child that is hit, until there is none."""
    path = [0]
    for node in range(1, len(parents)):
        if parents[node] == path[-1] and nodes[node - 1][1]:
            path.append(node)
    return np.array(path, np.int32)


def session_script(case: SessionCase, departures: Sequence[Departure] = (), planner_of: type[Planner] | None = None) -> Script:
    """The script for an engine with these departures: it opens, and is judged against, the configuration that it really runs. `planner_of`: a
    Planner that cuts the work another way (campaigns/relations.py).

    Raises CaseError for a configuration that cannot be built, no prompt, or a tree with more siblings than the vocabulary has tokens.
    """
    try:
        config = departed(config_of(case), departures)
    except ConfigError as problem:
        raise CaseError(f"the engine's departures do not fit the configuration of the case: {problem}") from None
    if not case.prompts:
        raise CaseError("a session needs at least one prompt")
    planner = (planner_of or Planner)(config, case)
    first = dict(enumerate(case.prompts))
    if "late" in case.hazards and len(first) > 1 and case.rounds:
        planner.late = len(first) - 1
        del first[planner.late]
    planner.prefill(first)
    for number, trees in enumerate(case.rounds):
        planner.round(number, trees)
        if number == 0 and not {"fork", "orphan"}.isdisjoint(case.hazards):
            planner.fork()
    if not {"evict", "orphan"}.isdisjoint(case.hazards):
        planner.evict_and_refill()
    if "orphan" in case.hazards:
        planner.steps.extend(CacheRows(sequence) for sequence in sorted(planner.lengths))
    if case.generate is not None:
        try:
            planner.steps.append(generate_step(config, case))
        except DrafterError as problem:
            raise CaseError(f"the drafter of the case cannot be built: {problem}") from None
    return Script(config, weights_key(case), tuple(planner.steps), hazards=frozenset(case.hazards) - PLAN_HAZARDS)


@dataclass
class Planner:
    """Steps in order; `submit` hands in one round of trees, and is what other ways of cutting the work override."""

    config: Config
    case: SessionCase
    steps: list[Step] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)  # sequence -> committed rows
    late: int = -1  # a sequence whose prompt is still to come

    def prefill(self, prompts: dict[int, tuple[int, int]]) -> None:
        self.prefill_tokens({sequence: self.prompt(*prompt) for sequence, prompt in prompts.items()})

    def prompt(self, length: int, seed: int) -> Int:
        return prompt_tokens(self.config, length, seed)

    def prefill_tokens(self, tokens: dict[int, Int]) -> None:
        chunk = self.case.chunk if self.case.chunk > 0 else max(len(t) for t in tokens.values())
        self.lengths |= dict.fromkeys(tokens, 0)
        for start in range(0, max(len(t) for t in tokens.values()), chunk):
            parts = {sequence: t[start : start + chunk] for sequence, t in tokens.items() if start < len(t)}
            chains = {sequence: np.arange(-1, len(part) - 1, dtype=np.int32) for sequence, part in parts.items()}
            self.forward(parts, chains, "prefill")
            for sequence, part in parts.items():
                self.commit(sequence, np.arange(len(part), dtype=np.int32))

    def round(self, number: int, trees: tuple[tuple[Node, ...], ...]) -> None:
        tokens: dict[int, Int] = {}
        parents: dict[int, Int] = {}
        paths: dict[int, Int] = {}
        for order, sequence in enumerate(sorted(self.lengths)):
            nodes = trees[order] if order < len(trees) else ()
            parents[sequence] = tree_parents(nodes)
            if np.bincount(parents[sequence] + 1).max() > self.config.vocab:
                raise CaseError(f"round {number}: a node has more children than the vocabulary has tokens ({self.config.vocab})")
            seed = self.case.prompts[min(order, len(self.case.prompts) - 1)][1]
            tokens[sequence] = tree_tokens(self.config, parents[sequence], seed * 31 + number * 7 + sequence)
            paths[sequence] = hit_path(nodes, parents[sequence])
        if self.late >= 0:
            tokens[self.late] = prompt_tokens(self.config, *self.case.prompts[self.late])
            parents[self.late] = np.arange(-1, len(tokens[self.late]) - 1, dtype=np.int32)
            paths[self.late] = np.arange(len(tokens[self.late]), dtype=np.int32)
            self.lengths[self.late] = 0
            self.late = -1
        self.submit(number, tokens, parents, paths)

    def submit(self, number: int, tokens: dict[int, Int], parents: dict[int, Int], paths: dict[int, Int]) -> None:
        self.forward(tokens, parents, "tree" if any(len(p) > 1 for p in parents.values()) else "decode")
        for sequence, path in paths.items():
            self.commit(sequence, path)
        self.steps.extend(CacheRows(sequence) for sequence in paths)

    def fork(self) -> None:
        """The copy decodes on, beside its source, with another token: neither may see the other's row."""
        source, target = min(self.lengths), max(self.lengths) + 1
        self.steps.append(Fork(source, target))
        self.lengths[target] = self.lengths[source]

    def evict_and_refill(self) -> None:
        """The sequence comes back with another prompt under its old number, in slots that hold old rows."""
        sequence = min(self.lengths)
        self.steps.append(Evict(sequence))
        del self.lengths[sequence]
        length, seed = self.case.prompts[0]
        self.prefill({sequence: (max(1, length // 2), seed + 1)})
        self.steps.append(CacheRows(sequence))

    def forward(self, tokens: dict[int, Int], parents: dict[int, Int], phase: str) -> None:
        """One batch of all sequences, or one batch per sequence; parents count within a sequence."""
        batches = [list(tokens)] if self.case.mixed else [[sequence] for sequence in tokens]
        for batch in batches:
            starts = np.cumsum([0] + [len(tokens[sequence]) for sequence in batch])
            shifted = [np.where(parents[s] < 0, -1, parents[s] + start).astype(np.int32) for s, start in zip(batch, starts, strict=False)]
            rows = Rows(
                sequence=np.repeat(np.array(batch, np.int32), [len(tokens[s]) for s in batch]),
                token=np.concatenate([tokens[s] for s in batch]),
                position=np.concatenate([self.lengths[s] + depths(parents[s]) for s in batch]).astype(np.int32),
                parent=np.concatenate(shifted),
            )
            if "interleaved" in self.case.hazards and len(batch) > 1:
                rows = _taking_turns(rows)
            want = np.ones(len(rows), np.bool_)
            if phase == "prefill":  # last rows, and every fifth: the number of a logit row is not the number of its row
                want = np.arange(len(rows)) % 5 == 2
                for sequence in batch:
                    want[np.flatnonzero(rows.sequence == sequence)[-1]] = True
            self.steps.append(Forward(rows, want, phase))

    def commit(self, sequence: int, path: Int) -> None:
        self.steps.append(Commit(sequence, path))
        self.lengths[sequence] += len(path)


def _taking_turns(rows: Rows) -> Rows:
    """First row of each sequence, second row of each, and so on; the order within a sequence stays, so parents still come first."""
    turn = np.zeros(len(rows), np.int64)
    for sequence in np.unique(rows.sequence):
        own = rows.sequence == sequence
        turn[own] = np.arange(np.count_nonzero(own))
    order = np.lexsort((rows.sequence, turn))
    place = np.empty(len(rows), np.int64)
    place[order] = np.arange(len(rows))
    parent = rows.parent[order]
    moved = np.where(parent < 0, -1, place[parent]).astype(np.int32)
    return Rows(rows.sequence[order], rows.token[order], rows.position[order], moved)


def depths(parents: Int) -> NDArray[np.int64]:
    out = np.zeros(len(parents), np.int64)
    for node in range(1, len(parents)):
        out[node] = out[parents[node]] + 1
    return out


# The engine's own loop


def generate_step(config: Config, case: SessionCase) -> Generate:
    generate = case.generate
    assert generate is not None
    prompts = tuple(prompt_tokens(config, length, seed) for length, seed in case.prompts)
    stops: tuple[int, ...] = ()
    sampling = sampling_of(generate)
    golden = _golden_tokens(config, weights_key(case), case.prompts, generate.max_new, sampling) if _needs_golden(generate) else ()
    if generate.stop_at >= 0 and golden and generate.stop_at < len(golden[0]):
        stops = (golden[0][generate.stop_at],)
    drafter = drafter_of(config, generate, prompts, golden, weights_key(case))
    return Generate(prompts, drafter, generate.budget, Limits(generate.max_new, stops), sampling)


def sampling_of(generate: GenerateCase) -> Sampling | None:
    """None: greedy. Raises CaseError for a field or value that Sampling does not have."""
    if not generate.sampling:
        return None
    whole = {name: int(value) if name == "top_k" else value for name, value in generate.sampling}
    try:
        return Sampling(**whole, seed=generate.seed)  # type: ignore[arg-type]
    except (SamplingError, TypeError) as problem:
        raise CaseError(f"the sampling of the case cannot be: {problem}") from None


def _needs_golden(generate: GenerateCase) -> bool:
    return generate.stop_at >= 0 or generate.drafter in ("noisy", "chain", "edge")


@lru_cache(maxsize=256)
def _golden_tokens(
    config: Config, key: WeightsKey, prompts: tuple[tuple[int, int], ...], max_new: int, sampling: Sampling | None
) -> tuple[tuple[int, ...], ...]:
    from spec.loops import sequential
    from spec.model import GoldenModel
    from spec.schemes import Sampler

    session = GoldenModel(config, weights_for(config, key)).open()
    decider = None if sampling is None else Sampler(sampling)
    recordings = sequential(session, [prompt_tokens(config, *prompt) for prompt in prompts], Limits(max_new), decider)
    return tuple(recording.tokens for recording in recordings)


def drafter_of(
    config: Config, generate: GenerateCase, prompts: tuple[Int, ...], golden: tuple[tuple[int, ...], ...], key: WeightsKey
) -> Drafter | None:
    """None for "none": autoregressive decoding. A DFlash head needs the golden target at each draft; on a large model a random drafter stands in.
    Raises CaseError for an unknown drafter."""
    grid = 0.0 if generate.grid < 0 else 2.0**-generate.grid
    sequences = tuple(tuple(prompt.tolist()) + tokens for prompt, tokens in zip(prompts, golden, strict=True)) if golden else ()
    lengths = tuple(len(prompt) for prompt in prompts) if golden else ()
    if generate.drafter == "none":
        return None
    if generate.drafter == "dflash" and not is_large(config):
        return DFlashRecipe(config, key, generate.seed, generate.block_len)
    if generate.drafter in ("random", "dflash"):
        return RandomDrafter(generate.seed, config.vocab, generate.block_len, grid)
    if generate.drafter == "noisy":
        return NoisyTargetDrafter(generate.seed, sequences, lengths, config.vocab, generate.block_len, generate.acceptance / 100, grid)
    if generate.drafter == "chain":
        return ChainDrafter(generate.seed, config.vocab, generate.block_len, sequences)
    if generate.drafter == "edge":
        return EdgeDrafter(generate.seed, sequences, lengths, config.vocab, generate.block_len, generate.budget)
    if generate.drafter == "table":
        draws = philox("table", generate.seed).standard_normal((generate.block_len, config.vocab)) * 2
        return TableDrafter.of_array(np.rint(draws / grid) * grid if grid else draws)
    raise CaseError(f"there is no drafter {generate.drafter!r}: choose one of none, random, noisy, chain, edge, table, dflash")
