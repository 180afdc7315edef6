"""Sampling on the device draws the golden tokens: rules at random, nodes of trees, near ties, and the loops of the native CUDA engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from impls.cuda import build
from impls.cuda.engine import GIVEN_UP, STATUS
from impls.cuda.kernels import Kernels
from impls.native.adapter import load_library
from impls.native.build import NoCompiler
from spec.config import preset
from spec.drafters import RandomDrafter
from spec.engine import Limits
from spec.model import GoldenModel
from spec.sampling import Sampling, SamplingError, gumbel_argmax, keyed_uniforms, scaled_logits
from spec.weights import philox, random_weights
from tests.impls.cuda_devices import DEVICES, device_of

NO_DISTRIBUTION, UNDECIDED = 32, 64  # sampling.cuh
FORMS = pytest.mark.parametrize("forms", ("fast", "plain"))
ON_DEVICES = pytest.mark.parametrize("name", DEVICES)


def due(sampling: Sampling, row: np.ndarray, history: list[int], prompt_len: int, number: int) -> int:
    z = scaled_logits(sampling, row, history, prompt_len)
    return gumbel_argmax(z, keyed_uniforms(sampling.seed, number, len(history), len(row)))


def drawn(kernels: Kernels, sampling: Sampling, logits: np.ndarray, histories: list[list[int]], **tree: Any) -> tuple[list[int], int]:
    """(ids, status); the prompt is the first token, and stream i is request 3 i."""
    device = kernels.device
    status = device.zeros((1,), np.int32)
    draws = kernels.draws(sampling, histories, [1] * len(histories), [3 * i for i in range(len(histories))])
    on_device = {key: device.upload(np.array(value, np.int32)) for key, value in tree.items()}
    ids = device.download(kernels.sample(device.upload(logits), draws, status, **on_device)).tolist()
    return ids, int(device.download(status)[0])


def rule_of(rng: np.random.Generator, vocab: int) -> Sampling:
    biased = np.unique(rng.integers(0, vocab, int(rng.integers(0, 3)))).tolist()
    return Sampling(
        temperature=float(rng.choice([0.0, 0.05, 0.7, 1.0, 1.3])),
        top_k=int(rng.choice([0, 0, 1, 2, 5, 50])),
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.5, 0.25])),
        min_p=float(rng.choice([0.0, 0.0, 0.1, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
        presence_penalty=float(rng.choice([0.0, 0.5])),
        frequency_penalty=float(rng.choice([0.0, 0.37])),
        logit_bias=tuple((token, float(rng.choice([-5.5, 3.25, -np.inf]))) for token in biased),
        top_k_ties=str(rng.choice(["lowest", "all"])),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
    )


@ON_DEVICES
@FORMS
def test_rules_at_random_draw_the_golden_token(name: str, forms: str) -> None:
    kernels = Kernels(device_of(name, seed=3), forms)
    rng = np.random.default_rng(8)
    for trial in range(40):
        vocab = int(rng.choice([1, 2, 5, 33, 100]))
        logits = (rng.standard_normal((2, vocab)) * rng.choice([0.01, 2.5, 30.0])).astype(np.float32)
        if trial % 3 == 1:
            logits = np.rint(logits)
        if trial % 4 == 2:
            logits[rng.random(logits.shape) < 0.4] = -np.inf
        sampling, histories = rule_of(rng, vocab), [rng.integers(0, vocab, n).tolist() for n in (3, 7)]
        try:
            expected = [due(sampling, row, history, 1, 3 * i) for i, (row, history) in enumerate(zip(logits, histories, strict=True))]
        except SamplingError:
            assert drawn(kernels, sampling, logits, histories)[1] == NO_DISTRIBUTION
            continue
        assert drawn(kernels, sampling, logits, histories) == (expected, 0), sampling


@ON_DEVICES
@FORMS
def test_rows_beyond_one_block_draw_the_golden_token(name: str, forms: str) -> None:
    """Two and a bit chunks of tokens, the last four of them alone."""
    kernels = Kernels(device_of(name), forms)
    logits = (2.5 * philox("cuda sampling").standard_normal((1, 2 * 4096 + 5))).astype(np.float32)
    for sampling in (Sampling(seed=5), Sampling(top_p=0.8, top_k=700, seed=6), Sampling(min_p=0.02, repetition_penalty=1.4, seed=7)):
        assert drawn(kernels, sampling, logits, [[8000, 8195, 8195]]) == ([due(sampling, logits[0], [8000, 8195, 8195], 1, 0)], 0)


@ON_DEVICES
@FORMS
def test_a_node_is_drawn_after_its_own_path(name: str, forms: str) -> None:
    """Noise of the node's position, penalties of its path; rows past the count are padding."""
    kernels = Kernels(device_of(name, seed=2), forms)
    parents = [[-1, 0, 0, 1, 3, 2], [-1, 0, 1, 2, 2, 0]]
    tokens = [[9, 4, 5, 4, 4, 9], [1, 7, 7, 7, 2, 3]]
    histories, nodes = [[2, 9], [3, 3, 1]], [5, 4]
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((12, 20)).astype(np.float32)
    sampling = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.6, frequency_penalty=0.4, presence_penalty=0.2, seed=11)
    count = [[n, 0, 0, 0, 0, 0] for n in nodes]  # at the first word of each stream
    ids, status = drawn(kernels, sampling, logits, histories, tokens=tokens, parents=parents, count=count)
    assert status == 0
    for row, found in enumerate(ids):
        stream, node = divmod(row, 6)
        if node > nodes[stream]:
            assert found == -1
            continue
        path = []
        while node > 0:
            path.append(tokens[stream][node])
            node = parents[stream][node]
        assert found == due(sampling, logits[row], histories[stream] + path[::-1], 1, 3 * stream)


@ON_DEVICES
@FORMS
def test_what_float64_cannot_decide_is_decided_in_longer_arithmetic(name: str, forms: str) -> None:
    """Keys within an ulp of each other, masses at top-p, gaps at min-p."""
    kernels = Kernels(device_of(name), forms)
    rng = np.random.default_rng(5)
    history = [1, 2, 3]
    for trial in range(45):
        vocab, seed = int(rng.choice([2, 3, 9])), int(rng.integers(2**40))
        logits = 2 * rng.standard_normal((1, vocab)).astype(np.float32)
        order = np.argsort(-logits[0], kind="stable")
        cut = int(rng.integers(1, vocab))
        weights = np.exp(logits[0, order].astype(np.float64) - float(logits[0, order[0]]))
        if trial % 3 == 0:
            logits[:] = 0
            noise = -np.log(-np.log(keyed_uniforms(seed, 0, 3, vocab)))
            ulps = rng.integers(-1, 2, vocab) * 2.0**-53
            sampling = Sampling(logit_bias=tuple(enumerate((0.25 - noise + ulps).tolist())), seed=seed)
        elif trial % 3 == 1:
            share = np.nextafter(weights[:cut].sum() / weights.sum(), rng.choice([0.0, 1.0]))
            sampling = Sampling(top_p=float(min(share, 1.0)), seed=seed)
        else:
            sampling = Sampling(min_p=float(min(np.nextafter(weights[cut], rng.choice([0.0, 1.0])), 1.0)), seed=seed)
        assert drawn(kernels, sampling, logits, [history]) == ([due(sampling, logits[0], history, 1, 0)], 0), sampling


@ON_DEVICES
def test_equal_keys_leave_the_lowest_index(name: str) -> None:
    """Temperature 0: no noise. Among equal masses top-p counts exactly: half of eight is four."""
    kernels = Kernels(device_of(name))
    logits = np.array([[1, 4, 4, 4]], np.float32)
    assert drawn(kernels, Sampling(temperature=0.0), logits, [[0]]) == ([1], 0)
    for seed in range(6):
        sampling = Sampling(top_p=0.5, seed=seed)
        assert drawn(kernels, sampling, np.zeros((1, 8), np.float32), [[0]]) == ([due(sampling, np.zeros(8, np.float32), [0], 1, 0)], 0)


@ON_DEVICES
def test_rows_that_are_no_distribution_are_refused(name: str) -> None:
    kernels = Kernels(device_of(name))
    for bad in ([np.nan, 0, 1], [np.inf, 0, 1], [-np.inf] * 3):
        assert drawn(kernels, Sampling(seed=1), np.array([[0, 1, 2], bad], np.float32), [[0], [0]])[1] == NO_DISTRIBUTION
    assert {NO_DISTRIBUTION, UNDECIDED} <= set(STATUS)
    assert GIVEN_UP & UNDECIDED


@ON_DEVICES
def test_the_native_engine_draws_the_golden_tokens(name: str) -> None:
    """Its own loops: prompts of unequal length, one row at a time and by trees."""
    try:
        engine = load_library(build.library(emulated=name == "emulated"))
    except (NoCompiler, build.NoNvcc) as reason:
        pytest.skip(str(reason))
    assert "sampling" in engine.describe().capabilities
    config = preset("tiny")
    weights = random_weights(config, 3)
    model = GoldenModel(config, weights)
    prompts = [philox("cuda sampling", i).integers(0, config.vocab, n).astype(np.int32) for i, n in enumerate((3, 1))]
    drafter = RandomDrafter(2, config.vocab, 3)
    for sampling in (
        Sampling(temperature=1.5, top_k=5, top_p=0.95, frequency_penalty=0.4, seed=2**64 - 1),
        Sampling(logit_bias=((5, 4.0), (0, -np.inf)), repetition_penalty=1.3, seed=4),
    ):
        with engine.open(config, weights) as session:
            for drafting, budget in ((None, 0), (drafter, 6)):
                found = session.sample(prompts, drafting, budget, Limits(4), sampling)
                assert found == model.open().sample(prompts, drafting, budget, Limits(4), sampling)
            assert session.generate(prompts, drafter, 6, Limits(4)) == model.open().generate(prompts, drafter, 6, Limits(4))
