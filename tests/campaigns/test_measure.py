"""Measured profiles: right on every line that is called sure, for honest engines and for liars; proposals under which the engine passes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from campaigns.case import OpCase
from campaigns.isolation.inprocess import InProcess
from campaigns.measure import Measured, measure
from campaigns.measure import ties as tie_module
from campaigns.measure.sessions import probe_weights
from campaigns.trial import Bench
from impls import peers
from impls.blocked import BlockedEngine, engine
from impls.blocked.points import Float, Site
from impls.planted.benign import VARIANTS
from impls.planted.planting import bf16
from impls.registry import resolve
from oracles.judgement import FINDINGS
from oracles.probing import Certainty, Line
from spec.config import Config
from spec.engine import PROFILES, Description, Engine, EngineError, Profile, Session, Unsupported
from spec.ops import OPS
from spec.weights import Provider


def measured(subject: Any) -> Measured:
    return measure(InProcess(subject, weights=probe_weights))


def sure_values(result: Measured) -> dict[str, Any]:
    return {line.name: line.value for line in result.lines if line.certainty is Certainty.SURE}


def line(result: Measured, name: str) -> Line:
    return next(one for one in result.lines if one.name == name)


class SessionsOnly:
    """Another engine without its operations and taps."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    def describe(self) -> Description:
        whole = self._inner.describe()
        return dataclasses.replace(whole, capabilities=whole.capabilities - {"run_op", "taps"}, ops=frozenset(), taps=frozenset())

    def open(self, config: Config, weights: Provider) -> Session:
        return self._inner.open(config, weights)


# ---- liars: arithmetic that is written here, so that the truth is known ------------------------------------------------------------------


def truncated(x: Float) -> Float:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def tf32_product(site: Site, name: str, x: Float, w: Float) -> Float:
    return np.asarray(site.honest(name, truncated(x), truncated(w)))


def bf16_accumulation(site: Site, name: str, x: Float, w: Float) -> Float:
    total: Float = np.zeros((len(x), w.shape[1]), np.float32)
    for term in range(len(w)):
        total = bf16(total + x[:, term, None] * w[term])
    return total


def truncating_sum(site: Site, name: str, x: Float, w: Float) -> Float:
    """Additions that cut off: float64 additions, then towards zero."""
    total: Float = np.zeros((len(x), w.shape[1]), np.float32)
    for term in range(len(w)):
        exact = total.astype(np.float64) + x[:, term, None].astype(np.float64) * w[term]
        near = exact.astype(np.float32)
        total = np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)
    return total


def folded_exp(site: Site, x: Float) -> Float:
    out: Float = np.exp2(x * np.float32(np.log2(np.e)))
    return out


def tanh_silu(site: Site, gate: Float, up: Float) -> Float:
    half = np.float32(0.5)
    out: Float = gate * (half + half * np.tanh(half * gate)) * up
    return out


def liar(point: str, function: Callable[..., Any], profile: Profile = PROFILES["float32-any-order"]) -> BlockedEngine:
    return BlockedEngine({point: function}, profile=profile)


TRUTH: dict[str, Any] = {
    "u_input": 0.0, "u_output": 0.0, "u_accumulate": 2.0**-24, "exp2_folding": False, "tanh_silu": False, "float32_scores": False, "ties": "lowest",
    "argmax ties": "lowest", "top-k ties": "lowest", "heap ties": "rank path", "angle_roundings": 0.0,
}  # fmt: skip
"""Of the blocked engine. Its height, its batch invariance and its flushing depend on the BLAS of the machine: checked apart."""
MACHINE = {"height", "batch_invariant", "row invariance", "flush_to_zero"}

CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], set[str]]] = {
    # name: engine, what differs from TRUTH, lines that contradict its declared profile
    "blocked": (engine, {}, set()),
    "split-k": (lambda: engine("split-k"), {}, set()),
    "sequential": (lambda: engine("sequential"), {}, set()),
    "tf32": (lambda: engine("tf32"), {"u_input": 2.0**-11}, set()),
    "bf16-in": (lambda: engine("bf16-in"), {"u_input": 2.0**-8}, set()),
    "bf16-out": (lambda: engine("bf16-out"), {"u_output": 2.0**-8}, set()),
    "fp16-out": (lambda: engine("fp16-out"), {"u_output": 2.0**-11}, set()),
    "N04": (lambda: engine("N04"), {"exp2_folding": True}, set()),
    "silu-tanh": (lambda: engine("silu-tanh"), {"tanh_silu": True}, set()),
    "float32-scores": (lambda: engine("float32-scores"), {"float32_scores": True}, set()),
    "tf32 unsaid": (lambda: liar("gemm", tf32_product), {"u_input": 2.0**-10}, {"u_input"}),
    "tf32 for large products": (lambda: engine("tf32-large"), {"u_input": 2.0**-10}, {"u_input"}),
    # its results come out of the accumulator, and so are rounded like it
    "bf16 accumulation": (lambda: liar("gemm", bf16_accumulation), {"u_accumulate": 2.0**-8, "u_output": 2.0**-8}, {"u_accumulate", "u_output"}),
    "sums that cut off": (lambda: liar("gemm", truncating_sum), {"u_accumulate": 2.0**-23}, {"u_accumulate"}),
    "exp2 unsaid": (lambda: liar("exponential", folded_exp, PROFILES["float32-strict"]), {"exp2_folding": True}, {"exp2_folding"}),
    "tanh unsaid": (lambda: liar("swiglu", tanh_silu), {"tanh_silu": True}, {"tanh_silu"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_sure_line_is_right(name: str) -> None:
    make, changes, lies = CASES[name]
    result = measured(make())
    truth = TRUTH | changes
    found = {key: value for key, value in sure_values(result).items() if key not in MACHINE}
    assert {key: value for key, value in found.items() if key in truth} == {key: value for key, value in truth.items() if key in found}
    assert found.keys() <= truth.keys()
    assert set(changes) <= found.keys()
    assert {one.name for one in result.contradictions} == lies


def test_a_short_accumulator_leaves_open_whether_operands_are_short() -> None:
    result = measured(liar("gemm", bf16_accumulation))
    assert line(result, "u_input").value is None
    assert "operands or accumulator are short" in line(result, "u_input").evidence


def test_the_order_of_additions_of_known_kernels() -> None:
    chain, block = measured(engine("sequential")), measured(engine("height-128"))
    assert (line(chain, "height").value, line(chain, "height").certainty) == ("any", Certainty.SURE)
    assert line(chain, "height").heights[1024] == 1023
    assert line(block, "height").value == "blocked:128"
    assert line(measured(engine("split-k")), "height").value == "any"


def test_a_chain_that_declares_blocks_is_contradicted() -> None:
    subject = BlockedEngine(VARIANTS["sequential"].points, profile=Profile("liar", height="blocked:8"))
    assert {one.name for one in measured(subject).contradictions} == {"height"}


def test_flushed_subnormals_are_a_witness() -> None:
    assert sure_values(measured(engine("flush")))["flush_to_zero"] is True


def test_the_native_engine_is_measured_as_it_declares() -> None:
    result = measured(resolve("native"))
    declared = result.description.profile
    found = sure_values(result)
    for name in (
        "u_input",
        "u_output",
        "u_accumulate",
        "exp2_folding",
        "online_softmax",
        "tanh_silu",
        "float32_scores",
        "ties",
        "angle_roundings",
    ):
        assert found[name] == getattr(declared, name), name
    for name in ("height", "batch_invariant", "flush_to_zero"):
        assert line(result, name).value == getattr(declared, name), name
    assert found["heap ties"] == "rank path"
    assert not result.contradictions


def test_a_heap_that_breaks_ties_by_arrival_is_named() -> None:
    found = sure_values(measured(resolve("native:heap-fifo")))
    assert found["heap ties"].startswith("first in, first out")
    assert found["ties"] == found["argmax ties"] == "lowest"


# ---- ties of engines that are only rules -------------------------------------------------------------------------------------------------


Answer = Callable[[Mapping[str, NDArray[Any]], Mapping[str, int | float]], dict[str, NDArray[Any]]]


class OneOp:
    """An engine of the specification's operations, one of them another."""

    def __init__(self, op: str, answer: Answer) -> None:
        self._op, self._answer = op, answer

    def describe(self) -> Description:
        return Description("one-op", "1", capabilities=frozenset({"run_op"}), ops=frozenset({self._op}))

    def run_op(self, op: str, inputs: Mapping[str, Any], params: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        for name, value in self._answer(inputs, params).items():
            outputs[name][...] = value


def last_maximum(inputs: Mapping[str, NDArray[Any]], params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    logits = inputs["logits"]
    return {"ids": (logits.shape[1] - 1 - logits[:, ::-1].argmax(1)).astype(np.int32)}


def higher_expert(inputs: Mapping[str, NDArray[Any]], params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    turned = OPS["route"].function({name: np.ascontiguousarray(array[..., ::-1]) for name, array in inputs.items()}, params)
    return {"ids": (inputs["scores"].shape[1] - 1 - turned["ids"]).astype(np.int32), "weights": turned["weights"]}


def wrong_expert(inputs: Mapping[str, NDArray[Any]], params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    turned = OPS["route"].function({"scores": -inputs["scores"], "bias": inputs["bias"]}, params)
    return {"ids": turned["ids"], "weights": turned["weights"]}


def higher_candidate(inputs: Mapping[str, NDArray[Any]], params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    turned = OPS["draft_table"].function({"logits": np.ascontiguousarray(inputs["logits"][:, ::-1])}, params)
    return {"ids": (inputs["logits"].shape[1] - 1 - turned["ids"]).astype(np.int32), "log_probs": turned["log_probs"]}


def heap(key: tie_module.Key, add: tie_module.Sum) -> Answer:
    def answer(inputs: Mapping[str, NDArray[Any]], params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        budget = int(params["budget"])
        paths = [(), *tie_module.tree(inputs["log_probs"], budget, add, key)]
        out = {name: np.full(budget + 1, -1, np.int32) for name in ("tokens", "parents", "depths")}
        for node, path in enumerate(paths):
            out["tokens"][node] = path[-1] if path else 0
            out["parents"][node] = paths.index(path[:-1]) if path else -1
            out["depths"][node] = len(path)
        return out | {"count": np.array([len(paths) - 1], np.int32)}

    return answer


@pytest.mark.parametrize(
    ("op", "answer", "name", "value"),
    [
        ("argmax", last_maximum, "argmax ties", "highest"),
        ("route", higher_expert, "ties", "any"),
        ("draft_table", higher_candidate, "top-k ties", "highest"),
        ("best_first_tree", heap(tie_module._by_path, tie_module.exact_sum), "heap ties", "rank path"),
        ("best_first_tree", heap(tie_module._first_in(False), tie_module.exact_sum), "heap ties", "first in, first out"),
        ("best_first_tree", heap(tie_module._first_in(True), tie_module.exact_sum), "heap ties", "first in, first out, child first"),
        ("best_first_tree", heap(tie_module._last_in, tie_module.exact_sum), "heap ties", "last in, first out"),
        ("best_first_tree", heap(lambda path, pushes: path[::-1], tie_module.exact_sum), "heap ties", "another rule"),
        ("best_first_tree", heap(tie_module._first_in(False), tie_module.float32_sum), "float32_scores", True),
        ("best_first_tree", heap(tie_module._by_path, tie_module.exact_sum), "float32_scores", False),
    ],
)
def test_rules_for_ties_are_told_apart(op: str, answer: Answer, name: str, value: object) -> None:
    assert sure_values(measured(OneOp(op, answer)))[name] == value


def second_best(inputs: Mapping[str, NDArray[Any]], params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    return {"ids": inputs["logits"].argmin(1).astype(np.int32)}


def ascending(inputs: Mapping[str, NDArray[Any]], params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    return OPS["draft_table"].function({"logits": -inputs["logits"]}, params)


@pytest.mark.parametrize(
    ("op", "answer", "name"),
    [
        ("route", wrong_expert, "ties"),
        ("argmax", second_best, "argmax ties"),
        ("draft_table", ascending, "top-k ties"),
        ("best_first_tree", heap(tie_module._by_path, lambda above, value: above - value), "heap ties"),
    ],
)
def test_a_wrong_choice_is_no_rule_for_ties(op: str, answer: Answer, name: str) -> None:
    assert line(measured(OneOp(op, answer)), name).value is None


def test_the_model_of_the_heap_is_the_specifications() -> None:
    for number in range(12):
        table = tie_module._grid_table(number)
        ids = np.tile(np.arange(table.shape[1], dtype=np.int32), (len(table), 1))
        golden = OPS["best_first_tree"].function({"ids": ids, "log_probs": table}, {"budget": 10, "root": 0})
        mine = heap(tie_module._by_path, tie_module.exact_sum)({"log_probs": table}, {"budget": 10})
        assert all(np.array_equal(golden[name], mine[name]) for name in golden)


# ---- sessions ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (engine, {}),
        (lambda: liar("gemm", tf32_product), {"u_input": 2.0**-10}),
        (lambda: engine("bf16-out"), {"u_output": 2.0**-8}),
        (lambda: resolve("native"), {}),
    ],
)
def test_sessions_show_what_operations_would(make: Callable[[], Engine], changes: dict[str, Any]) -> None:
    result = measured(SessionsOnly(make()))
    found = {name: value for name, value in sure_values(result).items() if name not in MACHINE}
    truth = TRUTH | changes
    assert {"u_input", "u_output", "u_accumulate", "argmax ties", "angle_roundings"} <= found.keys()
    assert found == {name: truth[name] for name in found}
    assert line(result, "exp_ulp").certainty is Certainty.UNKNOWN


@pytest.mark.drill
@pytest.mark.parametrize("name", ["transformers", "llama.cpp", "torch-ops"])
def test_released_engines_are_measured_as_what_they_are(name: str) -> None:
    """Float32 settings: nothing is rounded but sums, to nearest."""
    if problem := peers.unavailable(name):
        pytest.skip(problem)
    result = measured(resolve(name))
    found = sure_values(result)
    assert (found["u_input"], found["u_output"], found["u_accumulate"]) == (0.0, 0.0, 2.0**-24)
    assert found.get("ties", "any") == "any" and not found.get("tanh_silu", False) and found.get("height", "any") == "any"
    assert not result.contradictions


def test_an_engine_that_offers_nothing_gets_unknown_lines_only() -> None:
    class Nothing:
        def describe(self) -> Description:
            return Description("nothing", "1")

    result = measured(Nothing())
    assert {one.certainty for one in result.lines} == {Certainty.UNKNOWN}
    assert dataclasses.replace(result.profile, name="") == Profile("")


@pytest.mark.parametrize("problem", [Unsupported("not this"), EngineError("no memory")])
def test_an_engine_that_refuses_or_fails_gets_the_reason(problem: Exception) -> None:
    class Failing:
        def describe(self) -> Description:
            return Description("failing", "1", capabilities=frozenset({"run_op", "forward"}))

        def run_op(self, *args: Any) -> None:
            raise problem

        def open(self, config: Config, weights: Provider) -> Session:
            raise problem

    result = measured(Failing())
    assert {one.certainty for one in result.lines} == {Certainty.UNKNOWN}
    assert str(problem) in line(result, "u_input").evidence


def test_nan_is_unknown_and_never_an_error_of_ours() -> None:
    class NotANumber:
        def describe(self) -> Description:
            return Description("nan", "1", capabilities=frozenset({"run_op"}))

        def run_op(self, op: str, inputs: Any, params: Any, outputs: Mapping[str, NDArray[Any]]) -> None:
            for output in outputs.values():
                output.fill(np.nan if output.dtype == np.float32 else -7)

    result = measured(NotANumber())
    assert not sure_values(result).keys() - {"batch_invariant", "row invariance"}


# ---- the proposal --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["blocked", "blocked:N04", "blocked:fast-exp", "blocked:tf32", "blocked:bf16-out", "blocked:N05", "native"]
)
def test_an_engine_passes_under_the_profile_that_is_proposed_for_it(name: str) -> None:
    subject = resolve(name)
    profile = measured(subject).profile
    bench = Bench(InProcess(_Declared(subject, profile)))
    cases = [
        OpCase(op, tuple(sorted(dims.items())), tuple(sorted(params.items())), regime, seed)
        for op, dims, params in (
            ("matmul", {"T": 5, "K": 300, "N": 17}, {}),
            ("rms_norm", {"T": 5, "N": 130}, {"eps": 1e-6}),
            ("softmax", {"T": 3, "H": 2, "S": 150}, {}),
            ("tree_attention", {"T": 3, "H": 2, "S": 70, "C": 20}, {"kv_rank": 16, "scale": 0.3}),
            ("swiglu", {"T": 5, "N": 65}, {}),
            ("draft_table", {"L": 3, "V": 60}, {"budget": 9}),
        )
        for regime in ("ordinary", "ties")
        for seed in range(3)
    ]
    assert not [j.message for outcome in bench.outcomes(cases) for j in outcome.judgements if j.verdict in FINDINGS]


class _Declared:
    """An engine under another profile."""

    def __init__(self, inner: Engine, profile: Profile) -> None:
        self._inner, self._profile = inner, profile
        self.run_op = inner.run_op

    def describe(self) -> Description:
        return dataclasses.replace(self._inner.describe(), profile=self._profile)


def test_the_command_says_what_contradicts(capsys: pytest.CaptureFixture[str]) -> None:
    from paritree import cli

    assert cli.main(["profile", "measure", "blocked:tf32-large", "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in body["lines"] if one["contradicts"]] == ["u_input"]
    assert body["profile"]["u_input"] == 2.0**-10
    assert cli.main(["profile", "measure", "native"]) == 0
    out = capsys.readouterr().out
    assert "sure     u_accumulate     2**-24         (declared 2**-24)" in out
    assert "proposed: Profile(name='measured-native'" in out
    assert cli.main(["profile", "measure", "nobody"]) == 3
