"""Drafters: deterministic draft logits from plain data and a seed. They stand in for a DFlash head; no model runs here.

Each is a frozen dataclass that satisfies `spec.engine.Drafter`, pickles, and crosses process and language walls as JSON
(`as_json`, `from_json`). Values come from Philox integers by exact arithmetic, without exp or log, so that every machine
draws the same bits. LM-like: logits near 20, one temperature per depth, float32 differences that are exact; then path
scores are exact in double (T2). Coarse values (`grid`, `bf16`) forge exact score ties, also at the budget cut (T3).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.engine import Drafter, Float, Int
from spec.tree import best_first_tree, check_budget, draft_table

CENTRE = np.float32(20.0)  # logits lie in 20 +- 26: with logZ in the same binades, differences round rarely
RANKS_OF_MISSES = (1, 2, 3, -1, -1, -1)  # where a golden token stands that is not first: branches are accepted too; -1: last
STYLES = ("ordinary", "close", "close", "wide", "ties", "ties", "level", "sure", "holes", "holes")
PLACES_OUTSIDE = 3  # how many places behind the last node of the tree the continuation may stand
DOMINANCE = np.float32(12.0)  # nats above the best other candidate: a branch beats the spine only after many depths


class DrafterError(ValueError):
    """A drafter that cannot be built; the message names the field, what was found and what is accepted."""


@dataclass(frozen=True)
class RandomDrafter:
    """LM-like logits keyed by (seed, history): what a drafter that knows nothing of the target proposes."""

    seed: int
    vocab: int
    block_len: int
    grid: float = 0.0  # logits are rounded to multiples of it; 0: not
    bf16: bool = False  # logits are rounded to bfloat16

    def __post_init__(self) -> None:
        _check_sizes(self.vocab, self.block_len, self.grid)

    def draft(self, sequence: int, history: Int) -> Float:
        return _coarse(_logits_of(_bits_of_history("random", self.seed, history), self.block_len, self.vocab), self.grid, self.bf16)


@dataclass(frozen=True)
class TableDrafter:
    """Fixed logits: one table [L, V] for every history, or one per last token, [tokens, L, V] (last token modulo tokens)."""

    table: tuple[Any, ...]  # nested tuples of floats, so that two equal drafters compare equal; `of_array` makes them

    def __post_init__(self) -> None:
        if self._array.ndim not in (2, 3) or 0 in self._array.shape[:1]:
            raise DrafterError(f"table has shape {list(self._array.shape)}, but must be [depth, vocabulary], or one such per last token")

    @classmethod
    def of_array(cls, table: NDArray[Any]) -> TableDrafter:
        return cls(_tuples(np.asarray(table, np.float32).tolist()))

    @functools.cached_property
    def _array(self) -> Float:
        try:
            return np.array(self.table, np.float32)
        except (ValueError, TypeError):
            raise DrafterError("table is ragged or holds something that is not a number") from None

    @property
    def block_len(self) -> int:
        return int(self._array.shape[-2])

    @property
    def vocab(self) -> int:
        return int(self._array.shape[-1])

    def draft(self, sequence: int, history: Int) -> Float:
        table = self._array if self._array.ndim == 2 else self._array[int(history[-1]) % len(self._array)]
        return table.copy()


@dataclass(frozen=True)
class NoisyTargetDrafter:
    """Knows what the target will say, and says it with probability `acceptance` at each depth.

    There the golden token of that position is ranked first (among equals, where ties are forged); else it stands at one of
    `RANKS_OF_MISSES`. Past the end of a golden sequence, and once `history` has left it, the logits are
    those of a `RandomDrafter`. Noise is keyed by (seed, sequence, number of emitted tokens), so that shrinking a prompt
    keeps the drafts.
    """

    seed: int
    golden: tuple[tuple[int, ...], ...]  # per sequence: the prompt and the target's greedy tokens
    prompt_lens: tuple[int, ...]
    vocab: int
    block_len: int
    acceptance: float
    grid: float = 0.0
    bf16: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self.vocab, self.block_len, self.grid)
        _check_golden(self.golden, self.prompt_lens, self.vocab)
        if not 0.0 <= self.acceptance <= 1.0:
            raise DrafterError(f"acceptance is {self.acceptance}, but is a probability: 0 to 1")

    @functools.cached_property
    def _golden_bytes(self) -> tuple[bytes, ...]:
        return tuple(np.array(tokens, np.int32).tobytes() for tokens in self.golden)

    def draft(self, sequence: int, history: Int) -> Float:
        expected = _continuation(self._golden_bytes, self.golden, sequence, history, self.block_len)
        if not expected:
            return _coarse(_logits_of(_bits_of_history("off", self.seed, history), self.block_len, self.vocab), self.grid, self.bf16)
        bits = _bits("noisy", self.seed, sequence, len(history) - self.prompt_lens[sequence])
        logits = _logits_of(bits, self.block_len, self.vocab)
        order = np.argsort(-logits, axis=1, kind="stable")  # (L,V), tokens by rank
        chances: list[int] = bits.random_raw(2 * len(expected)).tolist()
        for depth, token in enumerate(expected):
            hit, miss = chances[2 * depth] * 2.0**-64, chances[2 * depth + 1]
            rank = 0 if hit < self.acceptance else RANKS_OF_MISSES[miss % len(RANKS_OF_MISSES)]
            other = order[depth, min(rank, self.vocab - 1)]
            logits[depth, token], logits[depth, other] = logits[depth, other], logits[depth, token]
        return _coarse(logits, self.grid, self.bf16)


@dataclass(frozen=True)
class ChainDrafter:
    """One candidate dominates each depth, so that a tree of B <= L nodes is a chain (the tree must equal chain speculation).

    The candidate is the golden token while `history` is on the sequence's golden tokens; elsewhere it is a random token.
    """

    seed: int
    vocab: int
    block_len: int
    golden: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _check_sizes(self.vocab, self.block_len, 0.0)
        _check_golden(self.golden, (1,) * len(self.golden), self.vocab)

    @functools.cached_property
    def _golden_bytes(self) -> tuple[bytes, ...]:
        return tuple(np.array(tokens, np.int32).tobytes() for tokens in self.golden)

    def draft(self, sequence: int, history: Int) -> Float:
        logits = _logits_of(_bits_of_history("chain", self.seed, history), self.block_len, self.vocab)
        expected = _continuation(self._golden_bytes, self.golden, sequence, history, self.block_len)
        best = logits.argmax(axis=1)  # (L,)
        best[: len(expected)] = expected
        logits[np.arange(self.block_len), best] = logits.max(axis=1) + DOMINANCE
        return logits


@dataclass(frozen=True)
class EdgeDrafter:
    """Puts the target's own continuation at the edge of the tree of `budget` nodes: among its last nodes, or the first that are none.

    Greedy decoding by trees emits the same tokens whatever tree it builds. With these drafts the length that a round accepts says whether the right
    nodes were in it: another order, width, normaliser, budget or tie rule takes in another node, and accepts one token more or less. What the
    logits look like is drawn anew for each round (`STYLES`). Off the golden sequences the logits are those of a `RandomDrafter`.
    """

    seed: int
    golden: tuple[tuple[int, ...], ...]  # per sequence: the prompt and the target's greedy tokens
    prompt_lens: tuple[int, ...]
    vocab: int
    block_len: int
    budget: int

    def __post_init__(self) -> None:
        _check_sizes(self.vocab, self.block_len, 0.0)
        _check_golden(self.golden, self.prompt_lens, self.vocab)
        check_budget(self.budget)

    @functools.cached_property
    def _golden_bytes(self) -> tuple[bytes, ...]:
        return tuple(np.array(tokens, np.int32).tobytes() for tokens in self.golden)

    @functools.cached_property
    def _made(self) -> dict[tuple[int, int], Float]:
        return {}

    def draft(self, sequence: int, history: Int) -> Float:
        expected = _continuation(self._golden_bytes, self.golden, sequence, history, self.block_len)
        if not expected:
            return _logits_of(_bits_of_history("off", self.seed, history), self.block_len, self.vocab)
        emitted = len(history) - self.prompt_lens[sequence]
        if (sequence, emitted) not in self._made:
            bits = _bits("edge", self.seed, sequence, emitted)
            self._made[sequence, emitted] = _at_the_edge(bits, expected, self.block_len, self.vocab, self.budget)
        return self._made[sequence, emitted].copy()


def _at_the_edge(bits: np.random.Philox, expected: tuple[int, ...], depths: int, vocab: int, budget: int) -> Float:
    """[depths, vocab] in which the path `expected` leads to a node around number `budget` of the best-first order."""
    style, place, end = (int(word) for word in bits.random_raw(3))
    style_name = STYLES[style % len(STYLES)]
    logits = _styled(style_name, bits, depths, vocab)
    table = draft_table(logits, budget)
    ids = table.ids
    paths = best_first_tree(table, 0, budget + PLACES_OUTSIDE).ranks[1:]
    if not paths:
        return logits
    around = (0, 0, 1, 2, -1, -1, -2, place % (budget + 1))[(place >> 32) % 8]  # nodes before the last one of the tree
    order = sorted(range(len(paths)), key=lambda number: abs(budget - 1 - around - number))
    path = next((paths[number] for number in order if len(paths[number]) <= len(expected)), ())
    if style_name == "holes" and end % 3 == 0:  # a chain, and room for what is no candidate: the continuation is that at its end
        best = logits.argmax(1)
        logits[:] = -np.inf
        logits[np.arange(depths), best] = CENTRE
        ids = best[:, None]
        path, end = (0,) * (len(expected) - 1), 1
    for depth, rank in enumerate(path):
        token, other = expected[depth], int(ids[depth, rank])
        logits[depth, token], logits[depth, other] = logits[depth, other], logits[depth, token]
    if len(path) < len(expected) and end % 2:  # the child that would go on is the worst candidate, or none
        row, token = logits[len(path)], expected[len(path)]
        worst = int(row.argmin())
        row[token], row[worst] = row[worst], row[token]
    return logits


def _styled(style: str, bits: np.random.Philox, depths: int, vocab: int) -> Float:
    """[depths, vocab], multiples of 2**-16 in 0..32 or -inf, exact in float32."""
    if style == "ordinary":
        return _logits_of(bits, depths, vocab)
    raw = bits.random_raw(depths * (vocab + 2)).reshape(depths, vocab + 2)
    fraction = (raw[:, :vocab] & np.uint64(0xFFFF)).astype(np.float32) * np.float32(2.0**-16)  # (L,V) in [0, 1)
    order = np.argsort(raw[:, :vocab] >> np.uint64(16), axis=1, kind="stable")  # (L,V), a permutation
    leaders = (raw[:, vocab] % np.uint64(3)).astype(np.int64) + 2  # (L,)
    standing = np.argsort(order, axis=1, kind="stable")  # (L,V), place of each token in it
    leads, follows = standing < leaders[:, None], standing < 2 * leaders[:, None]
    if style == "wide":  # every candidate within 2 nats: ranks up to the budget at the first depth
        return CENTRE - 2 * fraction
    if style == "close":  # a few candidates within 1 nat: many paths of several depths with nearly the same score
        return np.where(leads, CENTRE - fraction, CENTRE - np.float32(6) - 4 * fraction)
    if style == "ties":  # equal logits, so that the order of ranks and of paths decides
        return np.where(leads, CENTRE, np.where(follows, CENTRE - 1, CENTRE - 8)).astype(np.float32)
    if style == "level":  # all equal
        return np.full((depths, vocab), CENTRE, np.float32)
    single = (raw[:, vocab + 1] & np.uint64(1)).astype(np.bool_)[:, None]
    if style == "sure":  # at some depths one candidate has all the mass, log-probability 0; ties at the others
        return np.where(np.where(single, standing < 1, follows), np.where(leads, CENTRE, CENTRE - 1), -np.inf).astype(np.float32)
    assert style == "holes", style  # fewer paths than the budget: what is not finite is no candidate
    return np.where(np.where(single, leads, standing < 1), CENTRE - 3 * fraction, -np.inf).astype(np.float32)


KINDS: dict[str, type[Any]] = {
    "random": RandomDrafter,
    "table": TableDrafter,
    "noisy-target": NoisyTargetDrafter,
    "chain": ChainDrafter,
    "edge": EdgeDrafter,
}


def as_json(drafter: Drafter) -> dict[str, Any]:
    """Plain data with a `kind`; strict JSON (-inf becomes the string "-inf"). Raises DrafterError for a foreign drafter."""
    for kind, known in KINDS.items():
        if isinstance(drafter, known):
            names = [field.name for field in dataclasses.fields(known)]
            return {"kind": kind} | {name: _strict(getattr(drafter, name)) for name in names}
    raise DrafterError(f"{type(drafter).__name__} is not one of {', '.join(KINDS)}")


def from_json(data: Mapping[str, Any]) -> Drafter:
    """The inverse of `as_json`. Raises DrafterError for an unknown kind, or for fields that are unknown or missing."""
    fields = {name: _loose(value) for name, value in data.items() if name != "kind"}
    kind = data.get("kind")
    if kind not in KINDS:
        raise DrafterError(f"there is no drafter {kind!r}: choose one of {', '.join(KINDS)}")
    try:
        drafter: Drafter = KINDS[str(kind)](**fields)
    except TypeError as problem:
        raise DrafterError(f"drafter {kind!r}: {problem}") from None
    return drafter


def to_bf16(values: Float) -> Float:
    """Rounded to bfloat16, ties to even, kept as float32. Finite or infinite input."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


# Random numbers


def _bits_of_history(kind: str, seed: int, history: Int) -> np.random.Philox:
    digest = hashlib.blake2b(np.ascontiguousarray(history, np.int32).tobytes(), digest_size=16).hexdigest()
    return _bits(kind, seed, digest)


def _bits(*key: object) -> np.random.Philox:
    digest = hashlib.blake2b("/".join(map(str, ("drafter", *key))).encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little"))


def _logits_of(bits: np.random.Philox, depths: int, vocab: int) -> Float:
    """[depths, vocab]: 20 + temperature * z, z a sum of four uniforms (sd 1.15), temperature 2, 2.5, .., 5.5 by depth.

    Multiples of 2**-16 below 2**6: exact in float32.
    """
    raw = bits.random_raw(depths * (vocab + 1))
    quarters = raw[: depths * vocab].view(np.uint16).astype(np.float32).reshape(depths, vocab, 4)
    total = quarters @ np.ones(4, np.float32)  # (L,V), integers below 2**18: any order of adding gives the same
    z = (total - np.float32(2**17)) * np.float32(2.0**-15)
    temperature = (raw[depths * vocab :] & np.uint64(7)).astype(np.float32) * np.float32(0.5) + np.float32(2.0)  # (L,)
    logits: Float = CENTRE + z * temperature[:, None]
    return logits


def _coarse(logits: Float, grid: float, bf16: bool) -> Float:
    if grid:
        logits = np.rint(logits / np.float32(grid)) * np.float32(grid)
    return to_bf16(logits) if bf16 else logits


# Golden sequences, checks, JSON


def _continuation(
    golden_bytes: tuple[bytes, ...], golden: tuple[tuple[int, ...], ...], sequence: int, history: Int, length: int
) -> tuple[int, ...]:
    """The next golden tokens, at most `length`; none where the history is not a prefix of the golden sequence."""
    if not 0 <= sequence < len(golden):
        return ()
    if not golden_bytes[sequence].startswith(np.ascontiguousarray(history, np.int32).tobytes()):
        return ()
    return golden[sequence][len(history) : len(history) + length]


def _check_sizes(vocab: int, block_len: int, grid: float) -> None:
    if vocab < 1:
        raise DrafterError(f"vocab is {vocab}, but must be at least 1")
    if block_len < 0:
        raise DrafterError(f"block_len is {block_len}, but must be at least 0 (0: no draft, plain decoding)")
    if not 0.0 <= grid < 2.0**10:
        raise DrafterError(f"grid is {grid}, but must be 0 (none) or a step below 1024")


def _check_golden(golden: tuple[tuple[int, ...], ...], prompt_lens: tuple[int, ...], vocab: int) -> None:
    if len(golden) != len(prompt_lens):
        raise DrafterError(f"there are {len(golden)} golden sequences, but {len(prompt_lens)} prompt_lens")
    for number, (tokens, prompt_len) in enumerate(zip(golden, prompt_lens, strict=True)):
        if not 1 <= prompt_len <= len(tokens):
            raise DrafterError(f"prompt_lens[{number}] is {prompt_len}, but golden[{number}] holds {len(tokens)} tokens with the prompt")
        if not all(0 <= token < vocab for token in tokens):
            raise DrafterError(f"golden[{number}] holds a token outside 0..{vocab - 1}")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _strict(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _loose(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_loose, value))
    return float(value) if isinstance(value, str) else value
