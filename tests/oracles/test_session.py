"""Whole sessions: honest engines have no finding; one changed number is named at its op, layer, row and index; wrong caches, masks and
positions come out under their rule, with and without the taps that show them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import altered, findings, honest, judge_of, run, session_case

from impls.blocked.engine import BlockedEngine
from impls.golden import GoldenEngine
from impls.planted import blocked_attention, blocked_cache  # noqa: F401  (they register)
from impls.planted.benign import VARIANTS
from impls.planted.planting import OVERRIDES
from oracles.judgement import Judgement, Verdict, worst
from oracles.session import judge_session
from oracles.walked import OP_OF_TAP
from spec.engine import PROFILES, Description, Profile
from spec.script import Answer, Failure, Forward, Trace
from spec.taps import all_tap_names, taps_of_layer

F = np.float32
ALL = frozenset(all_tap_names())


def verdicts(preset: str = "tiny", hidden: frozenset[str] = frozenset(), cache: bool = True) -> list[Judgement]:
    return judge_of(preset).judge(*honest(preset, hidden, cache))


# ---- honest engines -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", ["tiny", "small", "tiny-softmax"])
def test_an_honest_engine_has_no_finding_and_everything_is_checked(preset: str) -> None:
    judgements = verdicts(preset)
    assert {j.verdict for j in judgements} == {Verdict.EXACT, Verdict.WITHIN_BOUND}
    script, _ = honest(preset)
    config = script.config
    expected = {(tap.name, layer) for layer in range(-1, config.layers + 1) for tap in taps_of_layer(config, layer)}
    assert expected <= {(j.tap, j.layer) for j in judgements}
    assert {j.rung for j in judgements} == {"prefill", "decode", "tree verify", "accept and commit"}


def test_the_specification_passes_its_own_judge() -> None:
    script, trace = run(GoldenEngine())  # type: ignore[arg-type]
    judgements = judge_of().judge(script, trace)
    assert not findings(judgements)
    assert max(j.share for j in judgements) <= 1


def test_every_scalar_of_a_tap_is_compared() -> None:
    script, trace = honest()
    rows = sum(len(step.rows) for step in script.steps if isinstance(step, Forward))
    checked = sum(j.checked for j in judge_of().judge(script, trace) if (j.tap, j.layer) == ("attn_out", 1))
    assert checked == rows * script.config.hidden


def test_judge_session_takes_a_model_or_its_judge() -> None:
    script, trace = honest()
    assert judge_session(judge_of().model, script, trace) == judge_session(judge_of(), script, trace)


@pytest.mark.parametrize(
    "hidden",
    [
        {"scores", "probs"},
        {"q_absorb", "scores", "probs", "o_latent"},
        {"router_scores"},
        {"router_scores", "expert_ids"},
        {"attn_norm", "ffn_norm", "final_norm", "gate", "up", "act"},
        {"latent", "k_rope"},
    ],
)
def test_short_regions_are_still_proven(hidden: set[str]) -> None:
    judgements = verdicts(hidden=frozenset(hidden))
    assert {j.verdict for j in judgements} <= {Verdict.EXACT, Verdict.WITHIN_BOUND}
    assert hidden.isdisjoint({j.tap for j in judgements})


@pytest.mark.parametrize("products", [True, False])
def test_the_profile_of_an_operation_holds_for_that_operation_alone(products: bool) -> None:
    """TF32 products under per_op entries pass; the same entries of other operations do not cover them."""
    wide, ops = PROFILES["tf32"], ("matmul", "scores") if products else ("rms_norm", "swiglu")
    entries = tuple((op, name, getattr(wide, name)) for op in ops for name in ("u_input", "u_accumulate"))
    script, trace = run(BlockedEngine(VARIANTS["tf32"].points, profile=Profile(per_op=entries)))
    found = findings(judge_of().judge(script, trace))
    assert bool(found) is not products
    assert {j.op for j in found} <= {"matmul", "scores", "q_absorb", "o_heads", "o_latent"}


@pytest.mark.parametrize(("hidden", "proven"), [({"scores", "probs"}, True), ({"probs"}, True), ({"scores", "probs", "q_rope"}, False)])
def test_fused_attention_from_given_inputs_is_one_operation_that_carries_a_proof(hidden: set[str], proven: bool) -> None:
    """Its bound is a local one, as wide as the profile says: here 2^-8 of each weight, more than a composed region may lose."""
    profile = Profile(per_op=(("o_latent", "u_input", 2.0**-9), ("q_rope", "u_output", 2.0**-8), ("k_rope", "u_output", 2.0**-8)))
    script, trace = run(BlockedEngine(hidden_taps=frozenset(hidden), profile=profile))
    verdicts_of = {j.verdict for j in judge_of().judge(script, trace)}
    assert (Verdict.UNVERIFIED not in verdicts_of) is proven


@pytest.mark.parametrize(
    ("op", "field", "value", "proven"), [("o_latent", "u_input", 2.0**-3, True), ("scores", "u_output", 2.0**-2, False)]
)
def test_of_fused_attention_only_what_is_composed_can_leave_it_open(op: str, field: str, value: float, proven: bool) -> None:
    """An eighth lost in the last product is what the profile says of that product; a quarter lost in each score says nothing of the weights."""
    script, trace = run(BlockedEngine(hidden_taps=frozenset({"scores", "probs"}), profile=Profile(per_op=((op, field, value),))))
    judgements = [j for j in judge_of().judge(script, trace) if j.tap == "o_latent"]
    assert judgements and not findings(judgements)
    assert all((j.verdict is Verdict.WITHIN_BOUND) is proven for j in judgements)


def test_a_region_too_long_for_its_bound_is_unverified_and_never_passed() -> None:
    judgements = verdicts(hidden=ALL - {"logits", "embed"})
    of_logits = [j for j in judgements if j.tap == "logits" and j.op == "matmul"]
    assert of_logits and {j.verdict for j in of_logits} == {Verdict.UNVERIFIED}
    assert "without the taps" in of_logits[0].message
    assert not findings(judgements)


def test_a_black_box_is_held_against_the_statistical_bound() -> None:
    judgements = verdicts(hidden=ALL)
    of_logits = [j for j in judgements if j.tap == "logits"]
    assert {j.verdict for j in of_logits} == {Verdict.UNVERIFIED} and all(0 < j.share < 1 for j in of_logits)
    assert not findings(judgements)
    script, trace = honest(hidden=ALL)

    def nudge(answers: list[Answer]) -> None:
        logits = answers[first_step(script, "tree")].logits
        assert logits is not None
        logits[2, 7] += F(1e-3)

    (found,) = findings(judge_of().judge(script, altered(trace, nudge)))
    assert (found.verdict, found.rule, found.index) == (Verdict.DEFECT, "V2", (2, 7)) and "statistical" in found.message


# ---- one changed number -----------------------------------------------------------------------------------------------
def first_step(script: Any, phase: str) -> int:
    return next(number for number, step in enumerate(script.steps) if isinstance(step, Forward) and step.phase == phase)


FLOAT_TAPS = [tap.name for layer in (0, 1, 2) for tap in taps_of_layer(honest()[0].config, layer) if tap.dtype == "float32" and (layer == 1 or tap.name in ("gate", "up", "act", "final_norm", "logits"))]  # fmt: skip


@pytest.mark.parametrize("name", FLOAT_TAPS)
def test_one_changed_number_is_named_at_its_op_layer_row_and_index(name: str) -> None:
    script, trace = honest()
    layer = {"gate": 0, "up": 0, "act": 0, "final_norm": 2, "logits": 2}.get(name, 1)
    step = first_step(script, "tree")
    place: list[tuple[int, ...]] = []

    def change(answers: list[Answer]) -> None:
        tap = answers[step].taps[name, layer]
        row = tap[2].reshape(-1)
        at = int(np.abs(row).argmax())  # a number that a key of weight zero cannot hide
        row[at] *= F(1 + 1e-3)
        place.append((2, *(int(i) for i in np.unravel_index(at, tap.shape[1:]))))
        if name == "logits":
            answers[step].logits = tap

    found = worst(judge_of().judge(script, altered(trace, change)))
    assert found is not None and found.verdict is Verdict.DEFECT
    assert (found.tap, found.layer, found.step, found.rung) == (name, layer, step, "tree verify")
    assert found.op == ("matmul" if name == "ffn_out" and layer == 0 else OP_OF_TAP[name])
    assert found.index == place[0] and found.token == 2
    assert f"{name}[{', '.join(map(str, place[0]))}], layer {layer}, is" in found.message


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_is_named_where_it_appears_and_not_where_it_spreads(value: float) -> None:
    script, trace = honest()
    step = first_step(script, "decode")

    def change(answers: list[Answer]) -> None:
        answers[step].taps["kv_a", 1][0, 3] = value

    found = findings(judge_of().judge(script, altered(trace, change)))
    assert found[0].verdict is Verdict.NONFINITE and (found[0].tap, found[0].layer, found[0].index) == ("kv_a", 1, (0, 3))


def test_scores_of_unseen_keys_are_free() -> None:
    script, trace = honest()
    step = first_step(script, "tree")

    hidden = ~np.isin(np.arange(answers_columns(trace, step)), sees(script, step, 1))

    def poison(answers: list[Answer]) -> None:
        answers[step].taps["scores", 0][1][:, hidden] = np.nan

    assert not findings(judge_of().judge(script, altered(trace, poison)))


def answers_columns(trace: Trace, step: int) -> int:
    return int(trace.answers[step].taps["scores", 0].shape[2])


def sees(script: Any, step: int, row: int) -> list[int]:
    """Columns of a row of the first tree batch: the prefix of its sequence, and its ancestors."""
    rows = script.steps[step].rows
    own = np.flatnonzero(rows.sequence == rows.sequence[row]).tolist()
    prefix = int(rows.position[own[0]])
    chain = []
    while row >= 0:
        chain.append(row)
        row = int(rows.parent[row])
    return [*range(prefix), *(prefix + own.index(r) for r in chain)]


@pytest.mark.parametrize("value", [1e-30, np.nan])
def test_a_weight_on_an_unseen_key_breaks_c3(value: float) -> None:
    script, trace = honest()
    step = first_step(script, "tree")
    column = next(c for c in range(answers_columns(trace, step)) if c not in sees(script, step, 2))

    def change(answers: list[Answer]) -> None:
        answers[step].taps["probs", 1][2, 1, column] = value

    found = findings(judge_of().judge(script, altered(trace, change)))[0]
    assert (found.op, found.rule, found.layer, found.index) == ("softmax", "C3", 1, (2, 1, column))
    assert found.verdict is (Verdict.DEFECT if value == value else Verdict.NONFINITE)


def test_a_score_of_minus_infinity_on_a_seen_key_is_a_mask_and_breaks_c3() -> None:
    script, trace = honest()
    step = first_step(script, "tree")
    column = sees(script, step, 2)[0]

    def change(answers: list[Answer]) -> None:
        answers[step].taps["scores", 1][2, 1, column] = -np.inf

    found = findings(judge_of().judge(script, altered(trace, change)))[0]
    assert (found.verdict, found.op, found.tap, found.rule) == (Verdict.DEFECT, "softmax", "probs", "C3")
    assert (found.layer, found.index) == (1, (2, 1, column))


def test_a_weight_in_the_padding_breaks_c3() -> None:
    script, trace = honest()
    step = first_step(script, "tree")
    rows = script.steps[step].rows
    row = int(np.flatnonzero(rows.sequence == 1)[0])  # the shorter sequence: its last columns are padding
    column = answers_columns(trace, step) - 1

    def change(answers: list[Answer]) -> None:
        answers[step].taps["probs", 0][row, 0, column] = F(1e-20)

    found = findings(judge_of().judge(script, altered(trace, change)))[0]
    assert (found.rule, found.index) == ("C3", (row, 0, column)) and "no key stands there" in found.message


def test_a_wrong_expert_is_an_exact_decision() -> None:
    script, trace = honest()
    step = first_step(script, "tree")

    def change(answers: list[Answer]) -> None:
        ids = answers[step].taps["expert_ids", 1]
        ids[3, 1] = next(e for e in range(script.config.experts) if e not in ids[3])

    found = findings(judge_of().judge(script, altered(trace, change)))[0]
    assert (found.op, found.rule, found.tap, found.token, found.verdict) == ("route", "M8", "expert_ids", 3, Verdict.DEFECT)


def test_the_argmax_tap_is_exact_on_the_engines_own_logits() -> None:
    script, trace = honest()
    step = first_step(script, "decode")

    def change(answers: list[Answer]) -> None:
        answers[step].taps["argmax", script.config.layers][1] += 1

    found = findings(judge_of().judge(script, altered(trace, change)))[0]
    assert (found.op, found.rule, found.index) == ("argmax", "A1", (1,))


def test_logits_that_differ_between_answer_and_tap_are_a_defect() -> None:
    script, trace = honest()

    def change(answers: list[Answer]) -> None:
        logits = answers[first_step(script, "decode")].logits
        assert logits is not None
        logits[0, 5] = np.nextafter(logits[0, 5], F(9))

    found = findings(judge_of().judge(script, altered(trace, change)))[0]
    assert (found.rule, found.tap) == ("N4", "logits") and "the tap says" in found.message


# ---- the cache ----------------------------------------------------------------------------------------------------------
def reads(trace: Trace) -> list[int]:
    return [number for number, answer in enumerate(trace.answers) if answer.cache is not None]


def cache_finding(change: Callable[[np.ndarray[Any, np.dtype[np.float32]]], None]) -> Judgement:
    script, trace = honest()

    def apply(answers: list[Answer]) -> None:
        cache = answers[reads(trace)[0]].cache
        assert cache is not None
        change(cache)

    return findings(judge_of().judge(script, altered(trace, apply)))[0]


def test_a_cache_row_that_changed_below_the_prefix_breaks_k7() -> None:
    def change(cache: Any) -> None:
        cache[1, 2, 4] = np.nextafter(cache[1, 2, 4], F(9))

    found = cache_finding(change)
    assert (found.op, found.rule, found.rung, found.layer, found.index) == ("compact", "K7", "accept and commit", 1, (1, 2, 4))


def test_a_row_of_another_node_is_named_as_what_it_is() -> None:
    script, trace = honest()
    step = first_step(script, "tree")
    taps = trace.answers[step].taps

    def change(cache: Any) -> None:
        for layer in range(len(cache)):  # path [0, 2] of the first tree, but row 1 stands where row 2 should
            cache[layer, 5 + 1] = np.concatenate([taps["latent", layer][1], taps["k_rope", layer][1]])

    found = cache_finding(change)
    assert found.rule == "K1" and f"this is row 1 of step {step} (rejected), not row 2" in found.message


def test_a_cache_of_another_length_breaks_k2() -> None:
    script, trace = honest()

    def change(answers: list[Answer]) -> None:
        cache = answers[reads(trace)[0]].cache
        assert cache is not None
        answers[reads(trace)[0]].cache = cache[:, :-1]

    found = findings(judge_of().judge(script, altered(trace, change)))[0]
    assert (found.rule, found.op, found.verdict) == ("K2", "compact", Verdict.DEFECT)
    assert found.expected == found.found + 1


# ---- planted engines: the rule that is really broken ----------------------------------------------------------------------
ATTENTION = frozenset({"scores", "probs"})


@pytest.mark.parametrize(
    ("plant", "hidden", "cache", "ops", "rules"),
    [
        ("tree20", frozenset(), True, {"softmax"}, {"C3"}),  # causal, whatever the tree
        ("tree20", ATTENTION, True, {"softmax"}, {"C3"}),
        ("tree20", ATTENTION | {"o_latent", "o_heads"}, True, {"softmax"}, {"C3"}),
        ("Z22", frozenset(), True, {"compact"}, {"K1"}),  # the first rows kept instead of the path
        ("Z22", frozenset(), False, {"compact"}, {"K1"}),
        ("Z22", ATTENTION, False, {"compact"}, {"K1"}),
        ("Z25", frozenset(), True, {"compact"}, {"K2"}),  # a rejected row kept
        ("Z25", frozenset(), False, {"scores"}, {"K2"}),
        ("Z25", ATTENTION, False, {"compact"}, {"K2"}),
        ("Z22", ALL, True, {"compact"}, {"K1"}),  # a black box: by the statistical bound of its cache rows
        ("K7-below", frozenset(), True, {"compact"}, {"K7", "K1"}),
        ("K7-below", frozenset(), False, {"compact"}, {"K1"}),
    ],
)
def test_a_mistake_comes_out_under_its_own_rule(plant: str, hidden: frozenset[str], cache: bool, ops: set[str], rules: set[str]) -> None:
    script, trace = run(BlockedEngine(OVERRIDES[plant], hidden_taps=hidden), cache=cache)
    found = worst(judge_of().judge(script, trace))
    assert found is not None and found.verdict in (Verdict.DEFECT, Verdict.MALFORMED)
    assert found.op in ops and found.rule in rules, found


def test_the_cache_of_another_sequence_breaks_c6() -> None:
    """The planted engine mixes up sequences of one length."""
    case = dataclasses.replace(session_case(), prompts=((4, 1), (4, 2)), rounds=(((), ()),), chunk=0)
    script, trace = run(BlockedEngine(OVERRIDES["E03"]), case=case)
    found = worst(judge_of().judge(script, trace))
    assert found is not None and (found.op, found.rule) == ("scores", "C6") and "of sequence" in found.message


def test_a_position_by_slot_breaks_c2_and_says_so() -> None:
    name = next(name for name, points in OVERRIDES.items() if any(f.__name__ == "position_by_node_index" for f in points.values()))
    script, trace = run(BlockedEngine(OVERRIDES[name]))
    found = worst(judge_of().judge(script, trace))
    assert found is not None and (found.op, found.rule, found.tap) == ("rope", "C2", "q_rope")
    assert "cache slot" in found.message


# ---- answers that are none --------------------------------------------------------------------------------------------------
def test_a_crash_is_a_verdict_and_what_came_before_is_judged() -> None:
    script, trace = honest()
    cut = Trace(trace.description, trace.answers[:4], Failure("crashed", "segmentation fault", 11))
    judgements = judge_of().judge(script, cut)
    (found,) = findings(judgements)
    assert found.verdict is Verdict.CRASHED and found.step == 4 and "signal 11" in found.message
    assert any(j.verdict is Verdict.WITHIN_BOUND for j in judgements)


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("raised", Verdict.MALFORMED), ("unsupported", Verdict.UNSUPPORTED), ("hung", Verdict.HUNG), ("flaky", Verdict.FLAKY)],
)
def test_a_failed_step_has_one_verdict(kind: str, verdict: Verdict) -> None:
    script, trace = honest()
    answers = [*trace.answers[:3], Answer(failure=Failure(kind, "no"))]
    judgements = judge_of().judge(script, Trace(trace.description, answers))
    assert [j.verdict for j in judgements if j.tap == "call"] == [verdict]
    assert len(findings(judgements)) == (verdict is not Verdict.UNSUPPORTED)


def test_missing_logits_are_malformed() -> None:
    script, trace = honest()

    def change(answers: list[Answer]) -> None:
        answers[0].logits = None

    assert findings(judge_of().judge(script, altered(trace, change)))[0].verdict is Verdict.MALFORMED


def test_a_tap_of_another_shape_is_malformed_and_the_region_is_judged_without_it() -> None:
    script, trace = honest()

    def change(answers: list[Answer]) -> None:
        taps = answers[first_step(script, "decode")].taps
        taps["attn_out", 0] = taps["attn_out", 0][:, :-1]

    found = findings(judge_of().judge(script, altered(trace, change)))
    assert [(j.verdict, j.tap, j.layer) for j in found] == [(Verdict.MALFORMED, "attn_out", 0)]
    assert "but must be" in found[0].message


def test_a_tap_given_in_some_batches_only_is_used_there() -> None:
    script, trace = honest()

    def change(answers: list[Answer]) -> None:
        del answers[first_step(script, "decode")].taps["gate", 0]
        answers[first_step(script, "tree")].taps["gate", 0][1, 1] += F(1)

    found = findings(judge_of().judge(script, altered(trace, change)))
    assert found[0].tap == "gate" and found[0].index == (1, 1)


def test_an_empty_script_has_nothing_to_judge() -> None:
    script, trace = honest()
    assert judge_of().judge(dataclasses.replace(script, steps=()), Trace(trace.description, [])) == []


def test_the_profile_of_the_trace_decides() -> None:
    """bfloat16 results under the float32 profile are defects; the same trace under its own profile is not."""
    from impls.planted.benign import VARIANTS

    variant = VARIANTS["bf16-out"]
    script, trace = run(BlockedEngine(variant.points, profile=variant.profile, hidden_taps=variant.hidden_taps))
    assert not findings(judge_of().judge(script, trace))
    described = Description(trace.description.name, "1")
    assert findings(judge_of().judge(script, Trace(described, trace.answers)))


def test_session_case_rejects_rows_in_the_first_round() -> None:
    """The cases above rely on it."""
    script, _ = honest()
    assert len(session_case().rounds) == 3
    commits = [step for step in script.steps if type(step).__name__ == "Commit"]
    assert any(step.path.tolist() == [0, 2] for step in commits)
