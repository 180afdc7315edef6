"""Recipes to arrays: determinism, what each regime promises, and the region each weights regime opens."""

from __future__ import annotations

import numpy as np
import pytest

from campaigns.case import CaseError, GenerateCase, OpCase, SessionCase, TreeCase
from campaigns.isolation import InProcess
from campaigns.materialise import op_call, op_call_of, session_script, tree_job, weights_for
from campaigns.operands import OPERANDS, REFUSALS, REFUSED, REGIMES
from campaigns.strategies import OP_SHAPES, op_cases
from campaigns.trial import Bench
from campaigns.weights import REGIMES as WEIGHT_REGIMES
from campaigns.weights import WeightsKeyError
from impls.golden import GoldenEngine
from oracles.judgement import FINDINGS, Verdict
from spec.config import preset
from spec.model import GoldenModel
from spec.ops import OPS
from spec.script import Commit, Fork, Forward, Generate, WeightsKey

TINY = preset("tiny")


def drawn(op: str, regime: str, count: int) -> list[OpCase]:
    """Cases of one op and regime, drawn like a campaign draws them."""
    import random

    from hypothesis import HealthCheck, given, settings

    cases: list[OpCase] = []

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(op_cases("full", (op,)))
    def collect(case: OpCase) -> None:
        cases.append(OpCase(case.op, case.dims, case.params, regime, case.seed))

    source = random.Random(f"{op} {regime}")
    while len(cases) < count:
        collect.hypothesis.fuzz_one_input(source.randbytes(400))  # type: ignore[attr-defined]
    return cases


def test_every_operation_has_operands_and_sizes() -> None:
    assert set(OPERANDS) == set(OP_SHAPES) == set(OPS)


@pytest.mark.parametrize("op", sorted(OPS))
def test_the_specification_passes_its_own_judge_in_every_regime(op: str) -> None:
    bench = Bench(InProcess(GoldenEngine()))
    for regime in REGIMES:
        for outcome in bench.outcomes(drawn(op, regime, 6)):
            found = [j for j in outcome.judgements if j.verdict in FINDINGS or j.verdict == Verdict.UNSUPPORTED]
            assert not found, (outcome.case, found)


@pytest.mark.parametrize("op", ["matmul", "q_absorb", "scores", "o_latent", "o_heads", "tree_attention", "combine"])
def test_lattice_operands_leave_one_possible_float32_result(op: str) -> None:
    for case in drawn(op, "lattice", 8):
        params = tuple((name, 1.0 if name == "scale" else value) for name, value in case.params)
        call = op_call(OpCase(op, case.dims, params, "lattice", case.seed))
        golden = OPS[op].function(call.inputs, call.params)["out"]
        doubles = {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in call.inputs.items()}
        doubles["rank"] = np.array(call.params.get("kv_rank", 0))
        plain = {
            "matmul": lambda a: a["x"] @ a["w"],
            "q_absorb": lambda a: np.einsum("thn,hnr->thr", a["q_nope"], a["w_kc"]),
            "scores": lambda a: np.einsum("thc,sc->ths", a["q"], a["keys"]),
            "o_latent": lambda a: np.einsum("ths,sr->thr", a["probs"], a["latent"]),
            "o_heads": lambda a: np.einsum("thr,hrv->thv", a["o_latent"], a["w_vc"]),
            "combine": lambda a: np.einsum("tk,tkn->tn", a["weights"], a["experts"]) + a["shared"],
            "tree_attention": _pointed,
        }[op](doubles)
        assert (golden == plain).all(), case


def _pointed(a: dict[str, np.ndarray]) -> np.ndarray:
    """Attention whose weights are one-hot (or equal among equal rows): the latent of the key that the query points at."""
    scores = np.einsum("thc,sc->ths", a["q"], a["cache"])
    scores[np.broadcast_to(a["visible"][:, None, :] == 0, scores.shape)] = -np.inf
    seen = np.isfinite(scores.max(axis=-1))
    out = a["cache"][scores.argmax(axis=-1), : int(a["rank"])]
    return np.where(seen[..., None], out, 0.0)


def test_arrays_depend_on_the_case_alone_and_operands_on_their_own_sizes() -> None:
    small = OpCase("matmul", (("K", 5), ("N", 3), ("T", 2)), (), "ordinary", 11)
    wide = OpCase("matmul", (("K", 5), ("N", 4), ("T", 2)), (), "ordinary", 11)
    assert all((op_call(small).inputs[name] == op_call(small).inputs[name]).all() for name in ("x", "w"))
    assert (op_call(small).inputs["x"] == op_call(wide).inputs["x"]).all()


def test_ties_are_exact() -> None:
    logits = op_call(OpCase("argmax", (("T", 3), ("V", 9)), (), "ties", 1)).inputs["logits"]
    assert all((row == row.max()).sum() >= 2 for row in logits)
    scores = op_call(OpCase("route", (("E", 8), ("T", 4)), _route_params(), "ties", 1)).inputs["scores"]
    assert all(len(set(row.tolist())) < len(row) for row in scores)


def _route_params() -> tuple[tuple[str, float], ...]:
    return (
        ("denominator_eps", 0.0), ("group_score_max", 0), ("groups", 2), ("norm_top_k", 1), ("routed_scale", 1.5), ("top_groups", 1), ("top_k", 2),
    )  # fmt: skip


def test_extreme_scores_lie_below_the_usual_start_of_a_running_maximum() -> None:
    lowest = []
    for seed in range(30):
        call = op_call(OpCase("softmax", (("H", 2), ("S", 5), ("T", 2)), (), "extreme", seed))
        lowest.append(call.inputs["scores"].max())
    assert min(lowest) < -5e4


def test_extreme_products_stay_finite() -> None:
    for seed in range(40):
        call = op_call(OpCase("matmul", (("K", 33), ("N", 5), ("T", 4)), (), "extreme", seed))
        with np.errstate(over="raise"):
            assert np.isfinite(call.inputs["x"] @ call.inputs["w"]).all()


def test_a_call_of_given_arrays_has_the_shapes_of_its_recipe() -> None:
    for op in OPS:
        call = op_call(drawn(op, "ordinary", 1)[0])
        again = op_call_of(op, call.inputs, call.params)
        assert again.outputs == call.outputs, op


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w": np.zeros((4, 2), np.float32)}, "w has extent 4 where K = 3"),
        ({"w": np.zeros((3, 2))}, "w is float64"),
        ({"w": None}, "input 'w' is missing"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change: dict[str, np.ndarray | None], said: str) -> None:
    inputs = {"x": np.zeros((1, 3), np.float32), "w": np.zeros((3, 2), np.float32), **change}
    with pytest.raises(CaseError, match=said):
        op_call_of("matmul", {name: array for name, array in inputs.items() if array is not None}, {})


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (OpCase("spell", (), (), "ordinary", 0), "no operation 'spell'"),
        (OpCase("add", (("T", 1),), (), "ordinary", 0), "lacks the dimension or parameter 'N'"),
        (OpCase("rms_norm", (("N", 1), ("T", 1)), (), "ordinary", 0), "lacks the parameter 'eps'"),
        (OpCase("add", (("N", 1), ("T", 1)), (), "wild", 0), "no regime 'wild'"),
        (OpCase("add", (("N", -1), ("T", 1)), (), "ordinary", 0), "do not fit together"),
    ],
)
def test_a_case_that_cannot_become_arrays_says_why(case: OpCase, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        op_call(case)


def test_a_tree_job_has_room_for_every_node() -> None:
    job = tree_job(TreeCase(5, 3, 7, 4, 2, 0, 80, 2, 9))
    assert job.cache_rows.shape == (4 + 7 + 1, 2)
    assert (np.isneginf(job.logits).sum(axis=1) == 2).all()
    finite = job.logits[np.isfinite(job.logits)]
    assert (finite == np.rint(finite)).all()  # grid 0: integers, so that ties are frequent


# Weights


@pytest.mark.parametrize("regime", sorted(WEIGHT_REGIMES))
@pytest.mark.parametrize("name", ["tiny", "small", "tiny-softmax"])
def test_weights_of_every_regime_build_a_model_and_are_read_only(name: str, regime: str) -> None:
    config = preset(name)
    weights = weights_for(config, WeightsKey(0, regime))
    GoldenModel(config, weights)
    assert not any(tensor.flags.writeable for tensor in weights.values())
    assert weights_for(config, WeightsKey(0, regime)) is weights


def test_tied_vocabulary_makes_every_argmax_a_tie() -> None:
    logits = GoldenModel(TINY, weights_for(TINY, WeightsKey(1, "tied-vocabulary"))).sequence_logits([3, 1, 4, 1, 5])
    assert all((row == row.max()).sum() >= 2 for row in logits)
    assert (logits.argmax(axis=1) % 2 == 0).all()  # the lower of each pair


def test_equal_maxima_are_exact_zeros() -> None:
    logits = GoldenModel(TINY, weights_for(TINY, WeightsKey(1, "equal-maxima"))).sequence_logits([3, 1, 4, 1, 5])
    assert all(row.max() == 0 and (row == 0).sum() == 3 for row in logits)
    assert len(set(logits.argmax(axis=1).tolist())) == 1


def taps_of(regime: str, name: str) -> np.ndarray:
    session = GoldenModel(TINY, weights_for(TINY, WeightsKey(1, regime))).open()
    step = session_script(SessionCase("tiny", (), 1, regime, ((6, 1),), ())).steps[0]
    assert isinstance(step, Forward)
    seen: list[np.ndarray] = []
    session.forward(step.rows, step.want_logits, frozenset({name}), lambda tap, layer, value: seen.append(value.copy()))
    return np.concatenate(seen)


def test_a_silent_router_has_scores_of_zero() -> None:
    assert not taps_of("silent-router", "router_scores").any()
    assert not taps_of("silent-router", "expert_weights").any()


def test_a_faint_router_has_scores_that_a_bias_swallows() -> None:
    scores = taps_of("faint-router", "router_scores")
    bias = weights_for(TINY, WeightsKey(1, "faint-router"))[f"{TINY.first_dense}.router_bias"]
    assert (scores > 0).all() and (scores < 1e-5).all()
    assert (((scores + bias[: scores.shape[1]]) - bias[: scores.shape[1]]) < scores / 2).mean() > 0.5
    assert (taps_of("faint-router", "expert_weights").sum(-1) > 0.9).all()


def test_a_level_router_is_a_tie_of_all_experts() -> None:
    assert (taps_of("level-router", "router_scores") == 0.5).all()
    assert (np.sort(taps_of("level-router", "expert_ids"), -1) == np.arange(TINY.top_k)).all()


@pytest.mark.parametrize("regime", ["views", "poisoned-margins", "fenced"])
def test_weights_in_other_memory_are_the_same_numbers(regime: str) -> None:
    plain, moved = (weights_for(TINY, WeightsKey(1, name)) for name in ("ordinary", regime))
    assert all(np.array_equal(plain[name], moved[name]) for name in plain)
    assert all(moved[name].flags.c_contiguous for name in plain) == (regime != "views")
    assert not any(moved[name].base is None for name in plain if plain[name].ndim > 1 and regime != "views")


def test_large_scores_has_rows_that_see_nothing_above_minus_50000() -> None:
    session = GoldenModel(TINY, weights_for(TINY, WeightsKey(0, "large-scores"))).open()
    script = session_script(SessionCase("tiny", (), 0, "large-scores", ((6, 1),), ()))
    step = script.steps[0]
    assert isinstance(step, Forward)
    worst: list[float] = []

    def sink(name: str, layer: int, scores: np.ndarray) -> None:
        rows = len(scores)
        visible = np.tri(rows, dtype=bool)[:, None, :]
        worst.append(float(np.where(visible, scores, -np.inf).max(axis=-1).min()))

    session.forward(step.rows, step.want_logits, frozenset({"scores"}), sink)
    assert min(worst) < -5e4


def test_tiny_latents_are_of_the_size_of_the_norms_epsilon() -> None:
    ordinary, tiny = (weights_for(TINY, WeightsKey(0, regime))["0.kv_a"][:, : TINY.kv_rank] for regime in ("ordinary", "tiny-latents"))
    assert (tiny == ordinary * np.float32(2.0**-9)).all()


def test_an_unknown_regime_is_named() -> None:
    with pytest.raises(WeightsKeyError, match="no weights regime 'wild'"):
        weights_for(TINY, WeightsKey(0, "wild"))


# Sessions


def test_a_session_is_planned_row_by_row() -> None:
    case = SessionCase("tiny", (), 0, "ordinary", ((3, 0), (1, 1)), ((((0, 1), (1, 0)), ()),), chunk=2)
    script = session_script(case)
    forwards = [step for step in script.steps if isinstance(step, Forward)]
    assert [step.rows.sequence.tolist() for step in forwards] == [[0, 0, 1], [0], [0, 0, 0, 1]]
    assert [step.rows.position.tolist() for step in forwards] == [[0, 1, 0], [2], [3, 4, 4, 1]]
    assert [step.rows.parent.tolist() for step in forwards] == [[-1, 0, -1], [-1], [-1, 0, 0, -1]]
    assert [step.phase for step in forwards] == ["prefill", "prefill", "tree"]
    commits = [(step.sequence, step.path.tolist()) for step in script.steps if isinstance(step, Commit)]
    assert commits == [(0, [0, 1]), (1, [0]), (0, [0]), (0, [0, 1]), (1, [0])]


def test_sequences_apart_have_batches_of_their_own() -> None:
    case = SessionCase("tiny", (), 0, "ordinary", ((3, 0), (2, 1)), ((),), mixed=False)
    forwards = [step for step in session_script(case).steps if isinstance(step, Forward)]
    assert [set(step.rows.sequence.tolist()) for step in forwards] == [{0}, {1}, {0}, {1}]
    assert [step.phase for step in forwards] == ["prefill", "prefill", "decode", "decode"]


def test_fork_decodes_two_sequences_from_one_prefix() -> None:
    case = SessionCase("tiny", (), 0, "ordinary", ((2, 0),), ((), ()), hazards=("fork",))
    script = session_script(case)
    assert Fork(0, 1) in script.steps
    last = [step for step in script.steps if isinstance(step, Forward)][-1]
    assert last.rows.sequence.tolist() == [0, 1]
    assert last.rows.token[0] != last.rows.token[1]
    assert script.hazards == frozenset()


def test_a_late_sequence_brings_its_prompt_into_the_batch_of_a_tree() -> None:
    case = SessionCase("tiny", (), 0, "ordinary", ((2, 0), (3, 1)), ((((0, 1),), ()), ()), hazards=("late",))
    forwards = [step for step in session_script(case).steps if isinstance(step, Forward)]
    assert [step.rows.sequence.tolist() for step in forwards] == [[0, 0], [0, 0, 1, 1, 1], [0, 1]]
    assert [step.rows.position.tolist() for step in forwards] == [[0, 1], [2, 3, 0, 1, 2], [4, 3]]


def test_interleaved_rows_take_turns_and_keep_their_parents() -> None:
    case = SessionCase("tiny", (), 0, "ordinary", ((2, 0), (3, 1)), ((((0, 1), (1, 0)), ((0, 1),)),), hazards=("interleaved",))
    forwards = [step for step in session_script(case).steps if isinstance(step, Forward)]
    assert [step.rows.sequence.tolist() for step in forwards] == [[0, 1, 0, 1, 1], [0, 1, 0, 1, 0]]
    assert [step.rows.parent.tolist() for step in forwards] == [[-1, -1, 0, 1, 3], [-1, -1, 0, 1, 0]]
    assert forwards[0].want_logits.tolist() == [False, False, True, False, True]  # the last rows of both


@pytest.mark.parametrize("op", sorted(REFUSALS))
def test_refused_inputs_lie_outside_the_domain_and_the_specification_refuses_them(op: str) -> None:
    bench = Bench(InProcess(GoldenEngine()))
    for case in drawn(op, REFUSED, 40):
        (judgement,) = bench.outcome(case).judgements
        assert (judgement.verdict, judgement.tap) == (Verdict.EXACT, "refusal")


def test_an_engine_that_answers_what_it_must_refuse_is_wrong() -> None:
    class Careless(GoldenEngine):
        def run_op(self, op, inputs, params, outputs):  # type: ignore[no-untyped-def]
            for output in outputs.values():
                output[...] = 0

    for op in REFUSALS:
        (judgement,) = Bench(InProcess(Careless())).outcome(drawn(op, REFUSED, 1)[0]).judgements
        assert (judgement.verdict, judgement.op, judgement.tap) == (Verdict.DEFECT, op, "refusal")
        assert "must refuse" in judgement.message


def test_a_declared_stop_token_is_one_that_the_golden_stream_emits() -> None:
    generate = GenerateCase("noisy", 0, 80, -1, 4, 3, 6, 3)
    step = session_script(SessionCase("tiny", (), 0, "ordinary", ((4, 0),), (), generate=generate)).steps[-1]
    assert isinstance(step, Generate)
    session = GoldenModel(TINY, weights_for(TINY, WeightsKey(0))).open()
    (golden,) = session.generate(step.prompts, step.drafter, 4, step.limits)
    assert golden.tokens[-1] in step.limits.stop_tokens
    assert len(golden.tokens) <= 4


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (SessionCase("tiny", (), 0, "ordinary", (), ()), "at least one prompt"),
        (SessionCase("tiny", (("heads", 0),), 0, "ordinary", ((1, 0),), ()), "cannot be built"),
        (SessionCase("tiny", (("vocab", 2),), 0, "ordinary", ((1, 0),), ((((0, 0), (1, 0), (2, 0)),),)), "more children than"),
        (SessionCase("huge", (), 0, "ordinary", ((1, 0),), ()), "no preset 'huge'"),
    ],
)
def test_a_session_that_cannot_be_planned_says_why(case: SessionCase, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        session_script(case)
