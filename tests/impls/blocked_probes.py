"""Small deterministic exercises of an engine, as dictionaries of what it answered: the inputs on which plants must show.

`PROBES[name](engine)` runs one of them. Nothing is judged here; two engines are compared by the bits that they return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.blocked import BlockedEngine
from spec.config import Config, Yarn, preset
from spec.drafters import NoisyTargetDrafter, RandomDrafter, TableDrafter
from spec.engine import Drafter, EngineError, Int, Limits, Rows
from spec.formats import packed_int4
from spec.sampling import Sampling
from spec.taps import all_tap_names
from spec.weights import philox, random_weights

Answers = dict[str, Any]
Tree = Sequence[int]  # parents
Round = Sequence[tuple[Tree, Sequence[int]]]  # per sequence: parents and the path that is committed

CHAIN = (-1, 0, 1)
FORK = (-1, 0, 0)
FIVE = (-1, 0, 0, 1, 2)
OTHER_FIVE = (-1, 0, 1, 1, 0)
ROUNDS: tuple[Round, ...] = (
    ((FIVE, (0, 2, 4)), ((-1, 0, 1, 0), (0, 3))),
    ((OTHER_FIVE, (0, 1, 3)), ((-1, 0, 0, 2), (0, 2, 3))),
    (((-1,), (0,)), ((-1,), (0,))),
    ((FIVE, (0,)), ((-1, 0), (0, 1))),
    ((CHAIN, (0, 1)), (FORK, (0, 2))),
)


@lru_cache(maxsize=8)
def weights_of(config: Config) -> dict[str, NDArray[np.float32]]:
    return random_weights(config, 7)


def prompt(config: Config, length: int, seed: int) -> Int:
    return philox("probe", seed).integers(0, config.vocab, length).astype(np.int32)


class Recorder:
    """A session that notes every answer: taps, logits, cache rows."""

    def __init__(self, engine: BlockedEngine, config: Config) -> None:
        self.config = config
        self.session = engine.open(config, weights_of(config).__getitem__)
        self.answers: Answers = {}
        self.lengths: dict[int, int] = {}

    def note(self, name: str, value: Any) -> None:
        self.answers[f"{len(self.answers)} {name}"] = value

    def forward(self, tokens: dict[int, Int], parents: dict[int, Tree]) -> None:
        """One batch; parents count within a sequence."""
        starts = np.cumsum([0, *map(len, tokens.values())])
        own = [np.array(parents[sequence], np.int32) for sequence in tokens]
        depth = [np.array(_depths(parents[sequence])) + self.lengths.get(sequence, 0) for sequence in tokens]
        rows = Rows(
            np.repeat(np.array(list(tokens), np.int32), np.diff(starts)),
            np.concatenate(list(tokens.values())),
            np.concatenate(depth).astype(np.int32),
            np.concatenate([np.where(p < 0, -1, p + start) for p, start in zip(own, starts, strict=False)]).astype(np.int32),
        )
        logits = self.session.forward(
            rows,
            np.arange(len(rows)) % 3 != 1,
            frozenset(all_tap_names()),
            lambda name, layer, value: self.note(f"{name} {layer}", value.copy()),
        )
        self.note("logits", logits)

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        self.session.commit(sequence, np.array(path, np.int32))
        self.lengths[sequence] = self.lengths.get(sequence, 0) + len(path)
        for layer in range(self.config.layers):
            self.note(f"cache {sequence} {layer}", self.session.cache_rows(sequence, layer))

    def prefill(self, prompts: dict[int, Int], chunk: int = 64) -> None:
        for start in range(0, max(map(len, prompts.values())), chunk):
            parts = {sequence: p[start : start + chunk] for sequence, p in prompts.items() if start < len(p)}
            self.forward(parts, {sequence: range(-1, len(part) - 1) for sequence, part in parts.items()})
            for sequence, part in parts.items():
                self.commit(sequence, range(len(part)))

    def round(self, number: int, trees: dict[int, tuple[Tree, Sequence[int]]]) -> None:
        tokens = {sequence: prompt(self.config, len(parents), 100 * number + sequence) for sequence, (parents, _) in trees.items()}
        self.forward(tokens, {sequence: parents for sequence, (parents, _) in trees.items()})
        for sequence, (_, path) in trees.items():
            self.commit(sequence, path)


def _depths(parents: Tree) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def session(engine: BlockedEngine, config: Config, lengths: Sequence[int], rounds: Sequence[Round] = ROUNDS, chunk: int = 64) -> Answers:
    """Prompts of these lengths, then the rounds."""
    recorder = Recorder(engine, config)
    recorder.prefill({sequence: prompt(config, length, sequence) for sequence, length in enumerate(lengths)}, chunk)
    for number, trees in enumerate(rounds):
        recorder.round(number, dict(enumerate(trees[: len(lengths)])))
    return recorder.answers


def fork_and_evict(engine: BlockedEngine) -> Answers:
    recorder = Recorder(engine, preset("tiny"))
    recorder.prefill({0: prompt(recorder.config, 6, 0)})
    recorder.session.fork(0, 1)
    recorder.lengths[1] = recorder.lengths[0]
    recorder.round(1, {0: ((-1,), (0,)), 1: (FORK, (0, 2))})
    recorder.round(2, {0: (CHAIN, (0, 1)), 1: ((-1,), (0,))})
    recorder.session.evict(0)
    del recorder.lengths[0]
    recorder.prefill({0: prompt(recorder.config, 3, 9)})
    recorder.round(3, {0: (FORK, (0, 1))})
    return recorder.answers


# The engine's own loop


@lru_cache(maxsize=8)
def golden_streams(config: Config, lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    prompts = [prompt(config, length, sequence) for sequence, length in enumerate(lengths)]
    plain = BlockedEngine().open(config, weights_of(config).__getitem__).generate(prompts, None, 0, Limits(24))
    return tuple((*p.tolist(), *g.tokens) for p, g in zip(prompts, plain, strict=True))


def generate(engine: BlockedEngine, lengths: tuple[int, ...], limits: Limits, drafter: Drafter, budget: int = 8) -> Answers:
    config = preset("tiny")
    prompts = [prompt(config, length, sequence) for sequence, length in enumerate(lengths)]
    out = engine.open(config, weights_of(config).__getitem__).generate(prompts, drafter, budget, limits)
    return {f"stream {number}": (g.tokens, g.rounds) for number, g in enumerate(out)}


def noisy(lengths: tuple[int, ...], acceptance: float = 0.8) -> Drafter:
    streams = golden_streams(preset("tiny"), lengths)
    return NoisyTargetDrafter(3, streams, lengths, preset("tiny").vocab, 4, acceptance)


def sampled(engine: BlockedEngine) -> Answers:
    """Streams that repeat themselves, so that the tokens of a path matter to its later nodes; and streams of few, nearly equal candidates, so that
    a draft that is not drawn is not unlikely. Most drafts are accepted."""
    repeating = Sampling(temperature=0.7, top_k=5, frequency_penalty=-2.0, seed=4)
    return sampled_by(engine, repeating) | sampled_by(engine, Sampling(temperature=5.0, top_k=4, seed=4))


def sampled_by(engine: BlockedEngine, sampling: Sampling) -> Answers:
    config, lengths = preset("tiny"), (5, 3)
    prompts = [prompt(config, length, sequence) for sequence, length in enumerate(lengths)]
    plain = BlockedEngine().open(config, weights_of(config).__getitem__).sample(prompts, None, 0, Limits(24), sampling)
    streams = tuple((*p.tolist(), *g.tokens) for p, g in zip(prompts, plain, strict=True))
    drafter = NoisyTargetDrafter(3, streams, lengths, config.vocab, 4, 0.8)
    out = engine.open(config, weights_of(config).__getitem__).sample(prompts, drafter, 64, Limits(16), sampling)
    return {f"stream {number} at {sampling.temperature}": (g.tokens, g.rounds) for number, g in enumerate(out)}


def stop_token(lengths: tuple[int, ...], index: int) -> tuple[int, ...]:
    """What the golden stream of sequence 0 emits at `index`."""
    return (golden_streams(preset("tiny"), lengths)[0][lengths[0] + index],)


def mask_token_accepted(engine: BlockedEngine) -> Answers:
    """The vocabulary is renamed so that the second token of the golden stream is token 1."""
    config, own = preset("tiny"), weights_of(preset("tiny"))
    start = prompt(config, 5, 0)
    token = golden_streams(config, (5,))[0][6]
    order = np.arange(config.vocab)
    order[[1, token]] = [token, 1]
    weights = own | {"embed": own["embed"][order], "head": np.ascontiguousarray(own["head"][:, order])}
    streams = (tuple(order[list(golden_streams(config, (5,))[0])].tolist()),)
    drafter = NoisyTargetDrafter(3, streams, (5,), config.vocab, 4, 1.0)
    out = engine.open(config, weights.__getitem__).generate([order[start].astype(np.int32)], drafter, 8, Limits(8))
    return {"stream": (out[0].tokens, out[0].rounds)}


# Single operations


def op(
    engine: BlockedEngine, name: str, outputs: dict[str, tuple[tuple[int, ...], str]], params: dict[str, float] | None = None, **inputs: Any
) -> Answers:
    """One run_op on poisoned outputs that lie between fences."""
    buffers = {word: np.full(int(np.prod(shape)) + 16, 0x2A, dtype) for word, (shape, dtype) in outputs.items()}
    given = {word: buffer[8:-8].reshape(outputs[word][0]) for word, buffer in buffers.items()}
    arrays = {word: value if isinstance(value, np.ndarray) else np.array(value) for word, value in inputs.items()}
    try:
        engine.run_op(name, arrays, params or {}, given)
    except (EngineError, ValueError, RuntimeError, IndexError) as problem:
        return {"raised": type(problem).__name__}
    return dict(buffers)


def f32(values: Any) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def i32(values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def softmax(engine: BlockedEngine, scores: Any, visible: Any) -> Answers:
    scores = f32(scores)
    return op(engine, "softmax", {"out": (scores.shape, "float32")}, scores=scores, visible=np.array(visible, np.uint8))


def route(engine: BlockedEngine, scores: Any, bias: Any, top_k: int = 2, groups: int = 1, top_groups: int = 1) -> Answers:
    params: dict[str, float] = {
        "top_k": top_k, "groups": groups, "top_groups": top_groups, "group_score_max": 0, "norm_top_k": 1, "routed_scale": 1.5, "denominator_eps": 1e-20,
    }  # fmt: skip
    scores = f32(scores)
    shape = (len(scores), top_k)
    return op(engine, "route", {"ids": (shape, "int32"), "weights": (shape, "float32")}, params, scores=scores, bias=f32(bias))


def argmax(engine: BlockedEngine, logits: Any) -> Answers:
    logits = f32(logits)
    return op(engine, "argmax", {"ids": ((len(logits),), "int32")}, logits=logits)


def table(engine: BlockedEngine, logits: Any, budget: int) -> Answers:
    logits = f32(logits)
    shape = (len(logits), min(budget, logits.shape[1]))
    return op(engine, "draft_table", {"ids": (shape, "int32"), "log_probs": (shape, "float32")}, {"budget": budget}, logits=logits)


def tree(engine: BlockedEngine, log_probs: Any, budget: int) -> Answers:
    log_probs = f32(log_probs)
    ids = np.tile(np.arange(log_probs.shape[1], dtype=np.int32) + 10, (len(log_probs), 1))
    outputs: dict[str, tuple[tuple[int, ...], str]] = dict.fromkeys(("tokens", "parents", "depths"), ((budget + 1,), "int32"))
    return op(engine, "best_first_tree", outputs | {"count": ((1,), "int32")}, {"budget": budget, "root": 3}, ids=ids, log_probs=log_probs)


def logs(*rows: Sequence[float]) -> NDArray[np.float32]:
    return np.log(np.array(rows)).astype(np.float32)


def accept(engine: BlockedEngine, tokens: Any, parents: Any, target: Any) -> Answers:
    outputs = {"path": ((len(tokens),), "int32"), "length": ((1,), "int32"), "bonus": ((1,), "int32")}
    return op(engine, "accept", outputs, tokens=i32(tokens), parents=i32(parents), target=i32(target))


def matmul(engine: BlockedEngine, x: NDArray[Any], w: NDArray[Any]) -> Answers:
    return op(engine, "matmul", {"out": ((len(x), w.shape[1]), "float32")}, x=x, w=w)


def normal(*shape: int) -> NDArray[np.float32]:
    return philox("normal", *shape).standard_normal(shape).astype(np.float32)


def mask_of(engine: BlockedEngine, parents: Any, prefix_len: int) -> Answers:
    rows = len(parents)
    outputs = {"positions": ((rows,), "int32"), "visible": ((rows, prefix_len + rows), "uint8")}
    return op(engine, "tree_mask", outputs, {"prefix_len": prefix_len}, parents=i32(parents))


def moe_of_five(engine: BlockedEngine) -> Answers:
    gate, up, down = normal(5, 6, 4), normal(5, 6, 4) + 1, normal(5, 4, 6)
    ids = i32([[0, 4], [3, 1]])
    return op(engine, "moe", {"out": ((2, 2, 6), "float32")}, x=normal(2, 6), ids=ids, gate=gate, up=up, down=down)


def repeated(engine: BlockedEngine) -> Answers:
    """Sixty calls: a race that shows once in four calls is missed with a probability of 3e-8."""
    out = [
        op(engine, "o_latent", {"out": ((1, 1, 3), "float32")}, probs=f32([[[0.25, 0.75]]]), latent=normal(2, 3))["out"] for _ in range(60)
    ]
    return {"out": np.array(out)}


NAN = np.float32(np.nan)
BETAS = preset("tiny", yarn=Yarn(factor=4.0, original_len=4096, beta_fast=1.0, beta_slow=1.0))


def int4_group(engine: BlockedEngine) -> Answers:
    packed, scales = packed_int4(np.arange(-8, 8).repeat(2)[:, None]), f32([[1.5]])
    return op(engine, "int4_matmul", {"out": ((1, 1), "float32")}, {}, x=f32([np.arange(32)]), packed=packed, scales=scales)


PROBES: dict[str, Callable[[BlockedEngine], Answers]] = {
    "session": lambda e: session(e, preset("tiny"), (5, 9)),
    "one token": lambda e: session(e, preset("tiny"), (1, 6), ROUNDS[:1]),
    "equal lengths": lambda e: session(e, preset("tiny"), (6, 6), (((FORK, (0,)), (FORK, (0,))), ((FORK, (0, 1)), (FORK, (0, 2))))),
    "unequal batch": lambda e: session(e, preset("tiny"), (4, 3), (((FIVE, (0, 1)), (FORK, (0, 2))),)),
    "prompt of 21": lambda e: session(e, preset("tiny"), (21,), ROUNDS[:1]),
    "prompt of 34": lambda e: session(e, preset("tiny"), (34,), ROUNDS[:1]),
    "star": lambda e: session(e, preset("tiny"), (3,), ((((-1, *[0] * 34), (0, 30)),),)),
    "groups": lambda e: session(e, preset("small"), (5, 9), ROUNDS[:1]),
    "softmax routing": lambda e: session(e, preset("tiny-softmax"), (5, 9), ROUNDS[:1]),
    "betas": lambda e: session(e, BETAS, (7,), ()),
    "fork and evict": fork_and_evict,
    "sampled": sampled,
    "generate": lambda e: generate(e, (5, 3), Limits(12), noisy((5, 3))),
    "generate alone": lambda e: generate(e, (5,), Limits(12), RandomDrafter(5, 96, 4)),
    "stop in a path": lambda e: generate(e, (5,), Limits(12, stop_token((5,), 2)), noisy((5,), 1.0)),
    "stop and limit": lambda e: generate(e, (5,), Limits(4, stop_token((5,), 2)), noisy((5,), 1.0)),
    "limit in a path": lambda e: generate(e, (5,), Limits(7), noisy((5,), 1.0)),
    "mask token": mask_token_accepted,
    "far below": lambda e: softmax(e, [[[-6e4, -6.0001e4]]], [[1, 1]]),
    "empty first row": lambda e: softmax(e, normal(6, 1, 3), [[0, 0, 0], *[[1, 0, 1]] * 5]),
    "empty sixth row": lambda e: softmax(e, normal(6, 1, 3), [*[[1, 0, 1]] * 5, [0, 0, 0]]),
    "last row elsewhere": lambda e: softmax(e, normal(2, 1, 20), [[1] * 20, [0] * 16 + [1] * 4]),
    "rising scores": lambda e: softmax(e, np.linspace(-4, 4, 40)[None, None], [[1] * 40]),
    "route ties": lambda e: route(e, [[0.5, 0.25, 0.5, 0.5]], [0, 0, 0, 0]),
    "route near ties": lambda e: route(e, [[0.5001, 0.25, 0.5002, 0.5003]], [0, 0, 0, 0]),
    "route zeros": lambda e: route(e, [[0, 0, 0, 0]], [1, 2, 3, 4]),
    "route negative": lambda e: route(e, [[0.1, 0.2, 0.3, 0.4]], [-1, -1, -2, -2], groups=2),
    "route large bias": lambda e: route(e, [[1e-8, 2e-8, 3e-8, 0]], [12, 12, 12, 12]),
    "moe of five": moe_of_five,
    "int4 group": int4_group,
    "window": lambda e: session(e, preset("tiny", window=2), (4, 5), ((((-1,), (0,)), ((-1,), (0,))),)),
    "argmax ties": lambda e: argmax(e, [[0, 1, 1]]),
    "argmax near ties": lambda e: argmax(e, [[0, 1, 1.0001]]),
    "argmax of nothing": lambda e: argmax(e, [[-np.inf] * 3]),
    "argmax of three": lambda e: argmax(e, [[0, 1]] * 3),
    "table": lambda e: table(e, normal(3, 12), 9),
    "table of everything": lambda e: table(e, normal(2, 4), 4),
    "table ties": lambda e: table(e, [[1, 2, 2, 0]], 2),
    "table near ties": lambda e: table(e, [[1, 2, 2.001, 0]], 2),
    "table with holes": lambda e: table(e, [[1, -np.inf, 2]], 3),
    "tree fifo": lambda e: tree(e, [[-1, -1], [0, -5]], 2),
    "tree of ties": lambda e: tree(e, [[-1, -1, -1], [-1, -1, -1], [-1, -1, -1]], 7),
    "tree early": lambda e: tree(e, logs([0.9, 0.05, 0.03], [0.9, 0.05, 0.03]), 9),
    "tree bonus": lambda e: tree(e, logs([0.5, 0.2, 0.19], [0.35, 0.3, 0.05]), 3),
    "tree fast path": lambda e: tree(e, logs([0.5, 0.45], [0.5, 0.4]), 2),
    "tree chain seed": lambda e: tree(e, [[-0.7, -0.7], [-3, -4], [-1, -2]], 2),
    "tree deep": lambda e: tree(e, logs([0.9, 0.1], [0.9, 0.1], [0.9, 0.1]), 6),
    "tree one layer": lambda e: tree(e, logs([0.5, 0.3, 0.2]), 2),
    "tree short": lambda e: tree(e, logs([0.5, 0.3]), 5),
    "tree of 40": lambda e: tree(e, logs(*[[0.4, 0.3, 0.2]] * 4), 40),
    "accept siblings": lambda e: accept(e, [5, 6, 7, 8], [-1, 0, 1, 0], [8, 1, 1, 2]),
    "accept zero": lambda e: accept(e, [5, 0], [-1, 0], [0, 1]),
    "accept one": lambda e: accept(e, [5, 6, 7], [-1, 0, 0], [6, 1, 2]),
    "accept none": lambda e: accept(e, [5, 6], [-1, 0], [9, 1]),
    "accept gap": lambda e: accept(e, [5, 6, 7, 8], [-1, 0, 1, 2], [6, 9, 8, 1]),
    "operand slice": lambda e: matmul(e, normal(3, 8)[:, 2:6], normal(4, 2)),
    "rows of five": lambda e: matmul(e, normal(5, 8), normal(8, 3)),
    "rows of seven": lambda e: matmul(e, normal(7, 8), normal(8, 3)),
    "long terms": lambda e: matmul(e, normal(1, 33), normal(33, 3)),
    "4096 terms": lambda e: matmul(e, normal(1, 4096), normal(4096, 3)),
    "mask of 40": lambda e: mask_of(e, range(-1, 39), 3),
    "repeated": repeated,
    "no drafter": lambda e: generate(e, (5, 3), Limits(6), TableDrafter.of_array(np.zeros((2, 96))), budget=0),
}


def same(first: Answers, second: Answers) -> bool:
    """Equal keys and equal bits, NaN equal to NaN."""
    if first.keys() != second.keys():
        return False
    for name, value in first.items():
        if isinstance(value, np.ndarray):
            other = second[name]
            if value.shape != other.shape or not np.array_equal(value, other, equal_nan=value.dtype.kind == "f"):
                return False
        elif value != second[name]:
            return False
    return True
