"""The native CUDA engine: its C ABI, its operations, its sessions and its own loops. On the emulator here; on a GPU with `-m gpu`, where nvcc and cuBLAS are."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.gpu_trials import draw_and_judge
from campaigns.case import OpCase, SessionCase
from campaigns.isolation import InProcess
from campaigns.strategies import op_cases, session_cases
from campaigns.trial import Bench
from impls.cuda import build
from impls.native.adapter import load_library
from impls.native.build import BuildError, NoCompiler
from spec.config import preset
from spec.drafters import RandomDrafter
from spec.engine import EngineError, Limits, Rows
from spec.ops import OPS
from spec.weights import random_weights
from tests.impls.cuda_devices import DEVICES

FINDINGS = ("MALFORMED", "NONFINITE", "DEFECT", "CRASHED", "HUNG", "FLAKY")


@lru_cache(maxsize=2)
def engine_on(name: str) -> Any:
    """Skips the test, with the reason, where it cannot be built."""
    try:
        return load_library(build.library(emulated=name == "emulated"))
    except (NoCompiler, build.NoNvcc) as reason:
        pytest.skip(str(reason))


def rows_of(sequence: int, tokens: list[int], start: int) -> Rows:
    count = len(tokens)
    return Rows(
        np.full(count, sequence, np.int32),
        np.array(tokens, np.int32),
        np.arange(start, start + count, dtype=np.int32),
        np.arange(-1, count - 1, dtype=np.int32),
    )


@pytest.mark.parametrize("name", DEVICES)
def test_drawn_sessions_have_no_finding(name: str) -> None:
    bench = Bench(InProcess(engine_on(name)))

    @settings(max_examples=8, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @seed(9)
    @given(session_cases("full"))
    def trial(case: SessionCase) -> None:
        assert not [judgement for judgement in bench.outcome(case).judgements if judgement.verdict.name in FINDINGS]

    trial()


@pytest.mark.parametrize("name", DEVICES)
def test_drawn_operations_and_trees_have_no_finding(name: str) -> None:
    """Every operation of spec/ops through the C ABI, hazards and refusals included: the same kernels as those of the CuPy engine."""
    engine = engine_on(name)
    assert engine.describe().ops == frozenset(OPS)
    tally = draw_and_judge(engine, 5, 150, tuple(OPS))
    assert not tally.findings
    assert len(tally.trials) > len(OPS) // 2


@pytest.mark.parametrize("name", DEVICES)
def test_every_operation_is_answered(name: str) -> None:
    bench = Bench(InProcess(engine_on(name)))
    for op in OPS:

        @settings(max_examples=3, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        @seed(4)
        @given(op_cases("full", (op,)))
        def trial(case: OpCase) -> None:
            assert bench.outcome(case).verdict.name in ("EXACT", "WITHIN_BOUND")

        trial()


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("override", ({"latent_eps": 1e-3}, {"tied": True, "q_rank": 0}, {"shared_experts": 0, "top_k": 8}), ids=str)
def test_switches_of_the_model_are_honoured(name: str, override: dict[str, Any]) -> None:
    case = SessionCase("tiny", tuple(override.items()), 1, "ordinary", ((9, 3), (2, 4)), ((((0, 1), (1, 0)), ()),))
    outcome = Bench(InProcess(engine_on(name))).outcome(case)
    assert not [judgement for judgement in outcome.judgements if judgement.verdict.name in FINDINGS]


@pytest.mark.parametrize("name", DEVICES)
def test_drafts_change_the_rounds_but_not_the_tokens(name: str) -> None:
    """L1: the stream of draft trees is the autoregressive stream, and every round is reported."""
    config = preset("tiny")
    session = engine_on(name).open(config, random_weights(config, 3).__getitem__)
    prompts = [np.array(tokens, np.int32) for tokens in ([5, 9, 1], [7], [3, 3, 3, 3, 2, 1, 0, 11, 12, 13, 14, 15, 16, 17])]
    limits = Limits(max_new=24, stop_tokens=(4,))
    plain = session.generate(prompts, None, 0, limits)
    for budget, length in ((1, 1), (6, 3), (40, 5)):
        drafted = session.generate(prompts, RandomDrafter(2, config.vocab, length), budget, limits)
        assert [g.tokens for g in drafted] == [g.tokens for g in plain]
        assert all(len(g.rounds) >= 1 for g in drafted if len(g.tokens) > 1)
    session.close()


@pytest.mark.parametrize("name", DEVICES)
def test_an_evicted_sequence_gives_its_slots_back(name: str) -> None:
    config = preset("tiny")
    session = engine_on(name).open(config, random_weights(config, 1).__getitem__)
    free = session.free_slots()
    session.forward(rows_of(4, list(range(20)), 0), np.zeros(20, np.bool_), frozenset(), lambda *_: None)
    session.commit(4, np.arange(20, dtype=np.int32))
    session.fork(4, 8)
    assert session.free_slots() == free - 64  # two sequences of two pages of 16
    assert np.array_equal(session.cache_rows(4, 1), session.cache_rows(8, 1))
    session.evict(4)
    session.evict(8)
    assert session.free_slots() == free
    with pytest.raises(EngineError, match="unknown"):
        session.cache_rows(4, 0)
    session.close()


@pytest.mark.parametrize("name", DEVICES)
def test_a_refused_batch_leaves_the_cache_as_it_was(name: str) -> None:
    config = preset("tiny")
    session = engine_on(name).open(config, random_weights(config, 1).__getitem__)
    session.forward(rows_of(0, [1, 2, 3], 0), np.zeros(3, np.bool_), frozenset(), lambda *_: None)
    session.commit(0, np.arange(3, dtype=np.int32))
    before = session.cache_rows(0, 0)
    for bad in (rows_of(0, [config.vocab], 3), rows_of(0, [-1], 3)):
        with pytest.raises(EngineError, match="token"):
            session.forward(bad, np.ones(1, np.bool_), frozenset(), lambda *_: None)
    with pytest.raises(EngineError):
        session.commit(0, np.array([0], np.int32))
    assert np.array_equal(session.cache_rows(0, 0), before)
    session.close()


def test_without_nvcc_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITREE_NVCC", "no-such-nvcc")
    with pytest.raises(build.NoNvcc, match="install the CUDA toolkit"):
        build.find_nvcc()


def test_without_a_gpu_the_message_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("PARITREE_CUDA_ARCH", raising=False)
    build._own_architecture.cache_clear()
    with pytest.raises(build.Incomplete, match="run on a machine with one, or say which by PARITREE_CUDA_ARCH"):
        build._device_flags()
    build._own_architecture.cache_clear()


def test_hopper_is_compiled_for_by_its_full_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITREE_CUDA_ARCH", "90a")
    assert build._device_flags() == ("-gencode=arch=compute_90a,code=sm_90a", "-DPARITREE_SM90A")
    monkeypatch.setenv("PARITREE_CUDA_ARCH", "120")
    assert build._device_flags() == ("-gencode=arch=compute_120,code=sm_120",)


def test_without_cublas_the_message_comes_before_the_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that fails as nvcc does where the header is missing."""
    fake = tmp_path / "nvcc"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) echo fake;; *cublas_gemm*) echo "cublas_v2.h: No such file" >&2; exit 1;; *) exit 7;; esac\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PARITREE_NVCC", str(fake))
    monkeypatch.setenv("PARITREE_CUDA_ARCH", "90a")
    monkeypatch.setenv("PARITREE_CACHE", str(tmp_path))
    with pytest.raises(build.Incomplete, match="finds no cublas_v2.h: install cuBLAS for development"):
        build.library()


@pytest.mark.parametrize("architecture", ("120", *(pytest.param(a, marks=pytest.mark.drill) for a in build.ARCHITECTURES if a != "120")))
def test_the_kernels_compile(architecture: str) -> None:
    try:
        lines = build.check((architecture,))
    except build.NoNvcc as reason:
        pytest.skip(str(reason))
    except BuildError as problem:
        pytest.fail(str(problem))
    assert any(f"sm_{architecture}" in line for line in lines)
