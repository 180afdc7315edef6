"""CUDA graphs of the native engine: the same bits as launch by launch, replays that see what has changed, and plants that do not.

On the emulator a capture keeps every launch with its arguments and a replay runs them again, so that a stale argument shows here too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.gpu_hazards import REPLAYED
from campaigns.isolation import InProcess
from campaigns.trial import Bench
from impls.cuda import build
from impls.cuda.plants import HOST_PLANTS
from impls.native.adapter import load_library
from impls.native.build import NoCompiler
from spec.config import preset
from spec.drafters import NoisyTargetDrafter, RandomDrafter
from spec.engine import EngineError, Limits, Rows
from spec.weights import random_weights
from tests.impls.cuda_devices import DEVICES
from tests.impls.test_cuda_sessions import FINDINGS, engine_on

SEQUENCES = {0: 7, 5: 19}  # name -> length of the prefix
ROWS = 11
Seen = dict[tuple[str, int], NDArray[Any]]


def chain(sequence: int, tokens: NDArray[Any]) -> Rows:
    count = len(tokens)
    return Rows(
        np.full(count, sequence, np.int32),
        tokens.astype(np.int32),
        np.arange(count, dtype=np.int32),
        np.arange(-1, count - 1, dtype=np.int32),
    )


def run(engine: Any, rounds: int) -> list[tuple[NDArray[Any], Seen]]:
    """Logits and taps of `rounds` batches of one shape: two sequences, interleaved, each time other tokens, trees, lengths and wanted rows."""
    config = preset("tiny")
    session = engine.open(config, random_weights(config, 3).__getitem__)
    rng = np.random.default_rng(0)
    taps = engine.describe().taps
    lengths = dict(SEQUENCES)
    for sequence, count in lengths.items():
        session.forward(chain(sequence, rng.integers(0, config.vocab, count)), np.zeros(count, np.bool_), frozenset(), lambda *_: None)
        session.commit(sequence, np.arange(count, dtype=np.int32))
    out: list[tuple[NDArray[Any], Seen]] = []
    for number in range(rounds):
        columns = np.zeros((4, ROWS), np.int32)
        depth = np.zeros(ROWS, np.int32)
        for row in range(ROWS):
            sequence = tuple(SEQUENCES)[row % 2]
            earlier = [at for at in range(row) if at % 2 == row % 2]
            parent = int(rng.choice([-1, *earlier]))
            depth[row] = 0 if parent < 0 else depth[parent] + 1
            columns[:, row] = sequence, rng.integers(0, config.vocab), lengths[sequence] + depth[row], parent
        wanted = np.arange(ROWS) < 6 if number % 2 else np.arange(ROWS) >= 5
        seen: Seen = {}
        logits = session.forward(
            Rows(*columns), wanted, taps, lambda name, layer, array, into=seen: into.update({(name, layer): np.array(array)})
        )
        out.append((logits, seen))
        for sequence in list(lengths)[: 1 + number % 2]:
            session.commit(sequence, np.array([0], np.int32))
            lengths[sequence] += 1
    out += [(session.cache_rows(sequence, layer), {}) for sequence in lengths for layer in range(config.layers)]
    session.close()
    return out


@pytest.mark.parametrize("name", DEVICES)
def test_a_forward_pass_under_graph_replay_has_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(name)
    monkeypatch.setenv("PARITREE_CUDA_POISON", "1")
    monkeypatch.setenv("PARITREE_CUDA_GRAPH", "0")
    plain = run(engine, 6)
    monkeypatch.setenv("PARITREE_CUDA_GRAPH", "1")
    replayed = run(engine, 6)
    for (logits, taps), (logits_again, taps_again) in zip(plain, replayed, strict=True):
        assert np.array_equal(logits, logits_again)
        assert list(taps) == list(taps_again)
        assert all(np.array_equal(taps[key], taps_again[key]) for key in taps)
    assert not np.array_equal(plain[2][0], plain[4][0])  # the batches differ, so that a replay that repeats itself would show


@pytest.mark.parametrize("name", DEVICES)
def test_rounds_under_graph_replay_are_the_same_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = preset("tiny")
    weights = random_weights(config, 3)
    prompts = [np.array(tokens, np.int32) for tokens in ([5, 9, 1], [7], [3, 3, 3, 3, 2, 1, 0, 11, 12, 13, 14, 15, 16, 17])]
    limits = Limits(max_new=24, stop_tokens=(4,))
    found: dict[str, list[Any]] = {}
    for graph in ("0", "1"):
        monkeypatch.setenv("PARITREE_CUDA_GRAPH", graph)
        session = engine_on(name).open(config, weights.__getitem__)
        own = session.generate(prompts, None, 0, Limits(max_new=24))
        golden = tuple((*prompt.tolist(), *stream.tokens) for prompt, stream in zip(prompts, own, strict=True))
        often_right = NoisyTargetDrafter(1, golden, tuple(map(len, prompts)), config.vocab, 4, 0.7)
        drafts = ((RandomDrafter(2, config.vocab, 3), 6), (RandomDrafter(2, config.vocab, 1), 0), (often_right, 9))
        found[graph] = [session.generate(prompts, drafter, budget, limits) for drafter, budget in drafts]
        session.close()
    for plain, replayed in zip(found["0"], found["1"], strict=True):
        for one, other in zip(plain, replayed, strict=True):
            assert one.tokens == other.tokens
            assert one.rounds == other.rounds
    assert max(len(r.path) for r in found["1"][2][0].rounds) > 2  # some rounds accept and move rows


@pytest.mark.parametrize("plant", [plant.name for plant in HOST_PLANTS])
@pytest.mark.parametrize("name", DEVICES)
def test_what_is_stale_under_replay_is_found_where_it_acts(name: str, plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        engine = load_library(build.library(emulated=name == "emulated", defines=(build.PLANTED,)))
    except (NoCompiler, build.NoNvcc) as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("PARITREE_CUDA_POISON", "1")
    monkeypatch.setenv("PARITREE_CUDA_PLANT", plant)

    def findings(graph: str) -> list[str]:
        monkeypatch.setenv("PARITREE_CUDA_GRAPH", graph)
        outcome = Bench(InProcess(engine)).outcome(REPLAYED)
        return [judgement.tap for judgement in outcome.judgements if judgement.verdict.name in FINDINGS]

    assert not findings("0")  # launch by launch nothing is stale
    assert findings("1")[0] in next(row.taps for row in HOST_PLANTS if row.name == plant)


@pytest.mark.parametrize("graph", ("0", "1"))
@pytest.mark.parametrize("name", DEVICES)
def test_a_write_behind_a_buffer_is_noticed(name: str, graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        engine = load_library(build.library(emulated=name == "emulated", defines=(build.PLANTED,)))
    except (NoCompiler, build.NoNvcc) as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("PARITREE_CUDA_POISON", "1")
    monkeypatch.setenv("PARITREE_CUDA_GRAPH", graph)
    assert run(engine, 4)
    monkeypatch.setenv("PARITREE_CUDA_PLANT", "short-buffer")
    with pytest.raises(EngineError, match="behind the end of buffer 'logits'"):
        run(engine, 4)


@pytest.mark.parametrize("graph", ("0", "1"))
@pytest.mark.parametrize("name", DEVICES)
def test_nobody_relies_on_work_that_was_only_asked_for(name: str, graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PARITREE_CUDA_DELAY: on the emulator work is done when somebody waits, on a GPU a busy kernel goes before each copy from the host."""
    try:
        engine = load_library(build.library(emulated=name == "emulated", defines=(build.PLANTED,)))
    except (NoCompiler, build.NoNvcc) as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("PARITREE_CUDA_GRAPH", graph)
    due = run(engine, 4)
    monkeypatch.setenv("PARITREE_CUDA_DELAY", "1")
    late = run(engine, 4)
    assert all(np.array_equal(one, other) for (one, _), (other, _) in zip(due, late, strict=True))
    monkeypatch.setenv("PARITREE_CUDA_PLANT", "early-read")
    try:
        early = run(engine, 4)
    except EngineError:
        return  # nonsense that the engine noticed by itself
    assert not all(np.array_equal(one, other) for (one, _), (other, _) in zip(due, early, strict=True))
