"""Cases: recipes, one line of JSON each. Arrays come from `campaigns.materialise`, keyed by the printed seeds.

Every sequence-like field is delete-safe: any sub-list is still a valid case, which is what makes shrinking short.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

SCHEMA = 1
GENERATOR = 1


class CaseError(ValueError):
    """A case that cannot be read; the message names the field."""


@dataclass(frozen=True)
class OpCase:
    """One operation. `dims` and `params` are sorted pairs; regime: "ordinary", "ties", "extreme", "lattice", "cancel"."""

    op: str
    dims: tuple[tuple[str, int], ...]
    params: tuple[tuple[str, float], ...]
    regime: str
    seed: int
    hazards: tuple[str, ...] = ()


@dataclass(frozen=True)
class TreeCase:
    """Drafter logits -> table -> tree -> mask and positions -> acceptance -> compaction, each on the engine's own outputs.

    `follow`: percent of nodes whose target token is one of their children.
    """

    vocab: int
    depth: int
    budget: int
    prefix_len: int
    cache_dim: int
    grid: int  # logits are multiples of 2**-grid (0: integers, heavy ties); negative: not rounded
    follow: int
    minus_infinity: int  # candidates per row set to -inf
    seed: int
    hazards: tuple[str, ...] = ()


Node = tuple[int, int]
"""(back, hit): the parent is node max(0, i - 1 - back) of a tree whose root is node 0; hit: an accepted path goes through here
if it reaches the parent and no earlier sibling was hit."""


@dataclass(frozen=True)
class GenerateCase:
    """The engine's own loop. `drafter`: "random", "noisy", "table", "chain", "dflash", "none"; `stop_at`: the token that the golden stream emits at this
    index is declared a stop token (-1: none). `sampling`: fields of spec.sampling.Sampling but its seed, which is `seed`; (): greedy."""

    drafter: str
    seed: int
    acceptance: int  # percent, for "noisy"
    grid: int  # draft logits as multiples of 2**-grid; negative: not rounded
    budget: int
    block_len: int
    max_new: int
    stop_at: int
    sampling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class SessionCase:
    """Prompts, then rounds of explicit trees, forward and commit driven by the campaign; optionally the engine's own loop.

    prompts: (length, seed) per sequence. rounds: per round one tree per sequence (missing trees are empty: the root alone, which is
    plain decoding). chunk: prefill in chunks of this many rows (0: whole). mixed: rows of the sequences share one forward.
    """

    preset: str
    overrides: tuple[tuple[str, Any], ...]
    weights_seed: int
    regime: str  # of the weights: campaigns/materialise.py
    prompts: tuple[tuple[int, int], ...]
    rounds: tuple[tuple[tuple[Node, ...], ...], ...]
    chunk: int = 0
    mixed: bool = True
    generate: GenerateCase | None = None
    hazards: tuple[str, ...] = ()
    checkpoint: str = ""  # a folder in Hugging Face layout instead of preset, overrides, weights_seed and regime
    relation: str = ""  # a second run in another legal way, whose logits must agree: campaigns/relations.py


@dataclass(frozen=True)
class RecordedCase:
    """A user's own tensors: one op with inputs and outputs from a safetensors file, named by content hash."""

    op: str
    params: tuple[tuple[str, float], ...]
    content: str  # blake2b of the file
    path: str


Case = OpCase | TreeCase | SessionCase | RecordedCase
KINDS: dict[str, type[Any]] = {"op": OpCase, "tree": TreeCase, "session": SessionCase, "recorded": RecordedCase}


def kind_of(case: Case) -> str:
    return next(kind for kind, cls in KINDS.items() if type(case) is cls)


def to_json(case: Case) -> str:
    """One line, keys in a fixed order."""
    body = {"kind": kind_of(case), "schema": SCHEMA, "generator": GENERATOR} | dataclasses.asdict(case)
    return json.dumps(body, separators=(",", ":"))


def from_json(text: str) -> Case:
    """Raises CaseError for text that is no case: truncated JSON, unknown kind, schema or field, a missing field."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError as problem:
        raise CaseError(f"not a case: broken JSON at character {problem.pos}; was the file cut?") from None
    if not isinstance(body, dict) or body.get("kind") not in KINDS:
        found = body.get("kind") if isinstance(body, dict) else type(body).__name__
        raise CaseError(f"not a case: kind is {found!r}, but must be one of {', '.join(KINDS)}")
    if body.get("schema") != SCHEMA:
        raise CaseError(f"the case has schema {body.get('schema')!r}, this paritree reads {SCHEMA}: use the version that wrote it")
    cls = KINDS[body["kind"]]
    fields = {k: _tuples(v) for k, v in body.items() if k not in ("kind", "schema", "generator")}
    if fields.get("generate") is not None:
        loop = fields["generate"]
        fields["generate"] = _build(GenerateCase, {k: _tuples(v) for k, v in loop.items()} if isinstance(loop, dict) else loop)
    built: Case = _build(cls, fields)
    return built


def _build(cls: type[Any], fields: Any) -> Any:
    known = {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(fields, dict):
        raise CaseError(f"{cls.__name__} needs an object, found {type(fields).__name__}")
    for name in fields:
        if name not in known:
            raise CaseError(f"{cls.__name__} has no field {name!r}")
    for name, field in known.items():
        if name not in fields and field.default is dataclasses.MISSING:
            raise CaseError(f"{cls.__name__} lacks its field {name!r}")
    return cls(**fields)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def case_id(case: Case) -> str:
    """A short stable name: the hash of the canonical line."""
    return hashlib.blake2b(to_json(case).encode(), digest_size=8).hexdigest()
