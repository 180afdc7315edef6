"""One conformance test for every peer with sessions: honest runs pass, a wrong weight is found, refusals are loud, taps change nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from campaigns.case import SessionCase
from campaigns.isolation import Supervisor
from campaigns.isolation.inprocess import InProcess
from campaigns.plan import config_of, session_script
from campaigns.trial import Bench, session_judge
from campaigns.weights import weights_for
from impls import peers
from impls.registry import resolve
from oracles.judgement import FINDINGS, Verdict
from spec.config import Config, Yarn, preset
from spec.engine import Engine, EngineError, Rows, Session, Unsupported, departed
from spec.script import WeightsKey
from spec.weights import random_weights

PEERS = ("transformers:eager", "transformers:sdpa", "llama.cpp", "mlx")
TREE = ((0, 1), (1, 0), (0, 1), (2, 0), (0, 0))  # a branch at the root, one below it, a leaf at depth 3
Float = NDArray[np.float32]


@pytest.fixture(scope="module", params=PEERS)
def peer(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if reason := peers.unavailable(name.partition(":")[0]):
        pytest.skip(f"{name}: {reason}")
    return name


@pytest.fixture(scope="module")
def engine(peer: str) -> Engine:
    return resolve(peer)


def case(overrides: tuple[tuple[str, Any], ...] = (), **more: Any) -> SessionCase:
    fields: dict[str, Any] = {
        "regime": "ordinary",
        "prompts": ((9, 1), (5, 2)),
        "rounds": ((TREE, ()), ((), TREE)),
        "hazards": ("fork", "evict"),
    }
    return SessionCase("tiny", overrides, 0, **(fields | more))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (("groups", 4), ("top_groups", 2)),
        (("q_rank", 0),),
        (("yarn", (64.0, 4096, 1.0, 1.0, 1.0, 1.0)), ("rope_dim", 16)),
        (("yarn", None), ("tied", True)),
        (("kv_rank", 7), ("nope_dim", 5), ("heads", 1), ("v_dim", 17)),
        (("shared_experts", 2), ("top_k", 3), ("layers", 3)),
        (("attention_bias", True),),
    ],
)
def test_an_honest_session_has_no_finding(engine: Engine, overrides: tuple[tuple[str, Any], ...]) -> None:
    outcome = Bench(InProcess(engine)).outcome(case(overrides, rounds=rounds_for(engine)))
    if ("attention_bias", True) in overrides and engine.describe().name == "llama.cpp":
        assert outcome.verdict is Verdict.UNSUPPORTED and "attention_bias" in outcome.judgements[0].message
        return
    assert not [j.message for j in outcome.judgements if j.verdict in FINDINGS]
    checked = [j for j in outcome.judgements if j.verdict in (Verdict.WITHIN_BOUND, Verdict.EXACT)]
    assert len(checked) > 60 and {"prefill", "decode"} <= set(outcome.rungs)
    assert all(0 <= j.share <= 1 for j in checked)


def rounds_for(engine: Engine) -> tuple[Any, ...]:
    return ((TREE, ()), ((), TREE), ((), ())) if "tree" in capabilities(engine) else (((), ()), ((), ()))


def capabilities(engine: Engine) -> set[str]:
    """What the conformance cases may ask for: an engine without trees says so when it is asked for one."""
    config = model_of(engine)
    session = engine.open(config, random_weights(config, 0).__getitem__)
    try:
        run(session, Rows(*(np.array(v, np.int32) for v in ((0, 0, 0), (1, 2, 3), (0, 1, 1), (-1, 0, 0)))))
    except Unsupported:
        return set()
    finally:
        session.close()
    return {"tree"}


@pytest.mark.parametrize(
    "regime", ["tied-experts", "negative-bias", "cold-router", "large-scores", "tiny-latents", "outlier-channel", "hot-expert"]
)
def test_hostile_weights_of_an_honest_engine_are_no_finding(engine: Engine, regime: str) -> None:
    groups = (("groups", 4), ("top_groups", 2)) if regime == "negative-bias" else ()
    outcome = Bench(InProcess(engine)).outcome(case(groups, regime=regime, rounds=rounds_for(engine)))
    assert not [j.message for j in outcome.judgements if j.verdict in FINDINGS]


@pytest.mark.parametrize(
    ("name", "tap"),
    [
        ("1.attn_norm", "attn_norm"), ("0.q_b", "q"), ("1.kv_a_norm", "latent"), ("0.w_kc", "q_absorb"), ("1.w_vc", "o_heads"),
        ("1.router", "router_logits"), ("1.shared_down", "shared_out"), ("head", "logits"),
    ],
)  # fmt: skip
def test_a_weight_that_is_wrong_by_one_part_in_a_thousand_is_found(engine: Engine, name: str, tap: str) -> None:
    """The engine is opened with it, the judge is not told: what the weight map does wrong would look like this."""
    honest = case()
    script = session_script(case(rounds=rounds_for(engine)), engine.describe().departures)
    weights = dict(weights_for(script.config, script.weights))
    weights[name] = weights[name] * np.float32(1.001)
    with InProcess(engine, weights=lambda config, key: weights) as worker:
        trace = worker.script(script)
    judgements = session_judge(script.config, WeightsKey(honest.weights_seed)).judge(script, trace)
    found = next(j for j in judgements if j.verdict is Verdict.DEFECT)
    assert found.tap == tap or tap not in engine.describe().taps
    assert found.layer == (int(name[0]) if name[0].isdigit() else script.config.layers)


def test_taps_change_no_bit_of_the_answer(engine: Engine) -> None:
    config = model_of(engine)
    weights = random_weights(config, 0)
    rows = Rows(np.zeros(6, np.int32), np.arange(6, dtype=np.int32) * 5, np.arange(6, dtype=np.int32), np.arange(-1, 5, dtype=np.int32))
    answers = []
    for taps in (frozenset[str](), engine.describe().taps):
        session = engine.open(config, weights.__getitem__)
        answers.append(session.forward(rows, np.ones(6, np.bool_), taps, lambda name, layer, array: None))
        session.close()
    assert answers[0].tobytes() == answers[1].tobytes()


def test_every_tap_that_is_offered_comes(engine: Engine) -> None:
    from spec.taps import taps_of_layer

    config = model_of(engine)
    session = engine.open(config, random_weights(config, 0).__getitem__)
    came: set[tuple[str, int]] = set()
    rows = Rows(np.zeros(3, np.int32), np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), np.arange(-1, 2, dtype=np.int32))
    session.forward(rows, np.ones(3, np.bool_), engine.describe().taps, lambda name, layer, array: came.add((name, layer)))
    session.close()
    offered = engine.describe().taps
    due = {(tap.name, layer) for layer in range(-1, config.layers + 1) for tap in taps_of_layer(config, layer) if tap.name in offered}
    assert came == due


def test_far_positions_stay_within_the_angles_that_the_profile_declares(engine: Engine) -> None:
    """Logits are off by 1e-2 there; every operation is within its bound, and rope uses a fair share of what was declared."""
    from benchmarks.peers import measure_long

    found = measure_long(engine.describe().name)
    if engine.describe().name == "mlx":
        assert list(found) == ["0"]  # its positions come from its cache
        return
    far = found["131072"]
    assert far["error_abs_max"] > 1e-3 and not set(far["verdicts"]) & {str(verdict) for verdict in FINDINGS}
    assert 0.01 < far["share_max_rope"] < 1


def test_sequences_that_do_not_exist_and_paths_that_do_not_ascend_are_errors(engine: Engine) -> None:
    config = model_of(engine)
    session = engine.open(config, random_weights(config, 0).__getitem__)
    for call in (
        lambda: session.evict(7),
        lambda: session.fork(7, 8),
        lambda: session.cache_rows(7, 0),
        lambda: session.commit(7, np.zeros(1, np.int32)),
    ):
        with pytest.raises(EngineError, match="no sequence 7"):
            call()
    run(session, Rows(*(np.array(v, np.int32) for v in ((0, 0), (1, 2), (0, 1), (-1, 0)))))
    with pytest.raises(EngineError, match="K1"):
        session.commit(0, np.array([1, 1], np.int32))
    for bad in ((np.array([96]), "tokens"), (np.array([-1]), "tokens")):
        with pytest.raises(EngineError, match=bad[1]):
            run(session, Rows(np.zeros(1, np.int32), bad[0].astype(np.int32), np.array([2], np.int32), np.array([-1], np.int32)))
    session.close()


def test_a_session_runs_in_a_supervised_worker(peer: str, engine: Engine) -> None:
    with Supervisor(peer, deadline_s=120.0) as supervisor:
        assert supervisor.description == engine.describe()
        outcome = Bench(supervisor).outcome(case(prompts=((4, 1),), rounds=((),)))
    assert not [j.message for j in outcome.judgements if j.verdict in FINDINGS]


REFUSALS: dict[str, dict[str, str]] = {
    "llama.cpp": {
        "rope_layout": "interleaved", "latent_eps": "one norm eps", "shared_experts": "shared expert", "yarn": "multiplier", "group_score": "two best",
        "layers": "26 layers", "window": "has no window",
    },
    "transformers": {"window": "has no window", "shared_experts": "shared expert", "group_score": "two best", "norm_top_k": "never renormalised", "first_dense": "without a sparse layer"},
    "mlx": {"window": "has no window", "rope_layout": "interleaved", "group_score": "two best", "scoring": "sigmoid"},
}  # fmt: skip
UNUSUAL: dict[str, dict[str, Any]] = {
    "window": {"window": 4},
    "rope_layout": {"rope_layout": "half"}, "latent_eps": {"latent_eps": 1e-3}, "shared_experts": {"shared_experts": 0},
    "yarn": {"yarn": Yarn(8.0, 16, 32.0, 1.0, 0.707, 1.3)}, "group_score": {"groups": 4, "top_groups": 2, "group_score": "max"},
    "layers": {"layers": 26}, "norm_top_k": {"scoring": "softmax"}, "first_dense": {"first_dense": 2}, "scoring": {"scoring": "softmax"},
}  # fmt: skip


def test_what_cannot_be_represented_is_refused_with_the_reason(peer: str, engine: Engine) -> None:
    for what, reason in REFUSALS[peer.partition(":")[0]].items():
        config = departed(preset("tiny", **UNUSUAL[what]), engine.describe().departures)
        with pytest.raises(Unsupported, match=reason):
            engine.open(config, random_weights(config, 0).__getitem__)


def test_departures_are_those_of_the_configuration_that_runs(engine: Engine) -> None:
    """An engine opens the configuration that it declares, and refuses the one that was asked for where they differ."""
    for departure in engine.describe().departures:
        other = departed(preset("tiny"), [d for d in engine.describe().departures if d is not departure])
        grouped = dataclasses.replace(other, groups=4, top_groups=2)
        if getattr(grouped, departure.field) != departure.value:
            with pytest.raises(Unsupported):
                engine.open(grouped, random_weights(grouped, 0).__getitem__)


def model_of(engine: Engine) -> Config:
    return departed(config_of(case()), engine.describe().departures)


def run(session: Session, rows: Rows) -> Float:
    return session.forward(rows, np.ones(len(rows), np.bool_), frozenset(), lambda name, layer, array: None)
