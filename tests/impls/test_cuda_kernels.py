"""The CUDA kernels judged like any engine: on the emulator here, on a GPU with `-m gpu`. Their planted bugs must be found at their operation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from numpy.typing import NDArray

from benchmarks.gpu_trials import PRODUCTION
from campaigns.case import OpCase
from campaigns.isolation import InProcess
from campaigns.isolation.execute import run_call
from campaigns.materialise import op_call
from campaigns.operands import REGIMES
from campaigns.strategies import op_cases
from campaigns.trial import Bench, judged_call
from impls.cuda import plants
from impls.cuda.device import OutOfBounds
from impls.cuda.emulate import EmulatedDevice
from impls.cuda.engine import PROFILE, PROFILE_BF16, CudaEngine
from impls.cuda.kernels import MMA16, MMA32, RESIDENT, SPLIT16, SPLIT32, TILED, WGMMA, Form, Kernels
from impls.cuda.source import expanded, kernel_names
from oracles.judge import judge_op
from oracles.judgement import Judgement
from spec.engine import EngineError, Unsupported
from spec.ops import OPS
from spec.script import OpCall
from tests.impls.cuda_devices import DEVICES, device_of
from tests.impls.test_cuda_suite import attention_pages, attention_production_width_pages

CLEAN = ("EXACT", "WITHIN_BOUND")
EXAMPLES = 120  # about two seconds on the emulator
quick = settings(max_examples=EXAMPLES, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


def wrong(engine: CudaEngine, call: OpCall) -> list[Judgement]:
    judgements = judged_call(call, run_call(engine, call), engine.describe().profile, 0)
    return [judgement for judgement in judgements if judgement.verdict.name not in CLEAN]


def wrong_case(engine: CudaEngine, case: OpCase) -> list[Judgement]:
    """The same for a drawn case, whose inputs may be such that they must be refused."""
    return [judgement for judgement in Bench(InProcess(engine)).outcome(case).judgements if judgement.verdict.name not in CLEAN]


def wide_attention(number: int, *, rows: int = 3, heads: int = 5, keys: int = 150) -> OpCall:
    """Attention at the width of the tiled kernels."""
    dims = (("C", 576), ("H", heads), ("S", keys), ("T", rows))
    return op_call(OpCase("tree_attention", dims, (("kv_rank", 512), ("scale", 0.125)), REGIMES[number % len(REGIMES)], number))


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("forms", ("fast", "plain"))
def test_drawn_operations_are_within_their_bounds(name: str, forms: str) -> None:
    engine = CudaEngine(device_of(name, seed=3), forms=forms)

    @quick
    @seed(11)
    @given(op_cases("full", tuple(OPS), hazards=("poison", "views", "freed", "repeat")))
    def trial(case: OpCase) -> None:
        assert not wrong_case(engine, case)

    trial()


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("form", (TILED, RESIDENT, SPLIT16, SPLIT32), ids=lambda form: form.kernel)
def test_tiled_attention_is_within_its_bound(name: str, form: Form) -> None:
    engine = CudaEngine(device_of(name, seed=7))
    engine.kernels.float32_form = form
    for number in range(len(REGIMES)):
        assert not wrong(engine, wide_attention(number))


PROBE = """
// values: row 0 of a, against ones: out = c + their sum, in one addition of tensor cores
extern "C" __global__ void probe(const unsigned short* values, float c, float* out) {
    const int lane = threadIdx.x, k = 2 * (lane % 4);
    unsigned a[4] = {0u, 0u, 0u, 0u};
    if (lane < 4) {
        a[0] = values[k] | values[k + 1] << 16;
        a[2] = values[k + 8] | values[k + 9] << 16;
    }
    float d[4] = {c, c, c, c};
    paritree::mma_bf16(d, a, 0x3f803f80u, 0x3f803f80u);
    if (lane == 0) *out = d[0];
}
"""


@pytest.mark.gpu
def test_tensor_cores_keep_two_bits_more_than_float32() -> None:
    """What the bound of attention by parts stands on (tree_attention_split.cuh): sixteen products of 2**-25 beside 1 count, a sum is off by less
    than 2 u, and subnormal operands are read."""
    device = device_of("gpu", source=expanded("ptx.cuh") + PROBE)
    out = device.zeros((1,), np.float32)

    def added(values: list[float], start: float) -> float:
        padded = np.array(values + [0.0] * (16 - len(values)), np.float32)
        device.launch("probe", (1,), 32, (device.upload((padded.view(np.uint32) >> 16).astype(np.uint16)), start, out))
        return float(device.download(out)[0])

    assert added([2.0**-25] * 16, 1.0) == 1 + 2.0**-21
    assert added([1.0] + [2.0**-25] * 15, 0.0) == 1 + 3 * 2.0**-23  # 3.75 units in the last place, cut
    assert added([2.0**-133], 0.0) == 2.0**-133


def attention_of(
    kernels: Kernels, q: NDArray[np.float32], cache: NDArray[np.float32], visible: NDArray[np.uint8], scale: float
) -> NDArray[np.float32]:
    """q [T, H, 576], cache [S, 576], visible [T, S] -> [T, H, 512]."""
    upload = kernels.device.upload
    bits, seen = kernels.pack_mask(upload(visible))
    out: NDArray[np.float32] = kernels.device.download(
        kernels.tree_attention(upload(q), upload(cache), bits, 0, len(cache), 512, scale, seen=seen)
    )
    return out


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("form", (TILED, RESIDENT, SPLIT16, SPLIT32, MMA16, MMA32, WGMMA), ids=lambda form: form.kernel)
def test_a_prefix_is_the_same_as_bits_that_are_all_set(name: str, form: Form) -> None:
    """Bit for bit: tiles that every row sees whole are not asked for their bits."""
    device = device_of(name)
    if form == WGMMA and not device.warpgroups:
        pytest.skip("warpgroup products need sm_90a")
    kernels = Kernels(device)
    kernels.float32_form = kernels.mma_form = form
    rng = np.random.default_rng(8)
    rows, prefix = 3, 130
    q, cache = (device.upload(rng.standard_normal(shape).astype(np.float32)) for shape in ((rows, 2, 576), (prefix + rows, 576)))
    if not form.kernel.endswith("f32"):
        q, cache = kernels.cast_bf16(q), kernels.cast_bf16(cache)
    own = np.tril(np.ones((rows, rows), np.uint8))
    own[2, 1] = 0
    found = []
    for seen_by_all in (prefix, 0):
        bits, _ = kernels.pack_mask(device.upload(np.concatenate([np.ones((rows, prefix - seen_by_all), np.uint8), own], axis=1)))
        found.append(device.download(kernels.tree_attention(q, cache, bits, seen_by_all, prefix + rows, 512, 0.1)))
    assert np.array_equal(*found)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("form", (SPLIT16, SPLIT32), ids=lambda form: form.kernel)
def test_three_parts_are_the_whole_number(name: str, form: Form) -> None:
    """A row that sees one key returns its latent bit for bit, whatever its 24 bits: the weight is 1 and the three parts add up. Parts below
    2**-126 may be lost (FLUSH), so that magnitudes start where the last part is above that."""
    kernels = Kernels(device_of(name))
    kernels.float32_form = form
    rng = np.random.default_rng(5)
    cache = (rng.uniform(1, 2, (40, 576)) * rng.choice([-1, 1], (40, 576)) * 2.0 ** rng.integers(-100, 127, (40, 576))).astype(np.float32)
    cache[:, :4] = np.array([0.0, np.finfo(np.float32).max, -np.finfo(np.float32).max, 1.0], np.float32)
    cache[:, 512:] = 0
    visible = np.zeros((3, 40), np.uint8)
    visible[[0, 1], [7, 33]] = 1  # and the last row sees nothing
    out = attention_of(kernels, np.zeros((3, 5, 576), np.float32), cache, visible, 0.1)
    assert np.array_equal(out, np.stack([cache[7, :512], cache[33, :512], np.zeros(512, np.float32)])[:, None].repeat(5, 1))


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("form", (SPLIT16, SPLIT32), ids=lambda form: form.kernel)
def test_no_product_of_parts_is_missing(name: str, form: Form) -> None:
    """Scores that are sums of two products near 2**9 which almost cancel, two keys a row. One of the six products of parts left out moves such a
    sum by 2**-17 of 2**9 or more, and the weight by a quarter of that, 2**-10. The arithmetic: 8 u of each of four products, u = 2**-24, a quarter
    of it 2**-12."""
    kernels = Kernels(device_of(name))
    kernels.float32_form = form
    rng = np.random.default_rng(6)
    rows = 32
    q, cache = np.zeros((rows, 1, 576), np.float32), np.zeros((2 * rows, 576), np.float32)
    visible = np.repeat(np.eye(rows, dtype=np.uint8), 2, axis=1)  # row t sees keys 2 t and 2 t + 1
    for row in range(rows):
        here = rng.choice(512, 2, replace=False) + np.array([0, 64])
        q[row, 0, here] = rng.uniform(1, 2, 2)
        for key in (2 * row, 2 * row + 1):
            cache[key, here[0]] = rng.uniform(256, 512)
            score = float(q[row, 0, here[0]]) * float(cache[key, here[0]])
            cache[key, here[1]] = (rng.uniform(-1, 1) - score) / float(q[row, 0, here[1]])
    latent = rng.integers(0, 2, (2 * rows, 1))  # what a weighted sum counts
    unused = np.flatnonzero((q == 0).all(axis=(0, 1)))[0]
    cache[:, unused] = latent[:, 0]
    scores = np.where(visible, q[:, 0].astype(np.float64) @ cache.T.astype(np.float64), -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    right = weights @ latent[:, 0] / weights.sum(1)
    assert np.abs(attention_of(kernels, q, cache, visible, 1.0)[:, 0, unused] - right).max() < 2.0**-12


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("form", (SPLIT16, SPLIT32), ids=lambda form: form.kernel)
@pytest.mark.parametrize("bad", (np.inf, -np.inf, np.nan))
def test_numbers_that_are_none_do_not_vanish_between_the_parts(name: str, form: Form, bad: float) -> None:
    kernels = Kernels(device_of(name))
    kernels.float32_form = form
    rng = np.random.default_rng(7)
    q, cache = rng.standard_normal((2, 3, 576)).astype(np.float32), rng.standard_normal((20, 576)).astype(np.float32)
    visible = np.ones((2, 20), np.uint8)
    visible[1, 4] = 0
    cache[4, 17] = bad
    out = attention_of(kernels, q, cache, visible, 0.04)
    assert np.isnan(out[0, :, 17]).all()


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("form", (MMA16, MMA32, WGMMA), ids=lambda form: form.kernel)
@pytest.mark.parametrize("keys", (70, 150))  # in one part, and in two
def test_tensor_core_attention_is_within_the_bound_of_bfloat16_operands(name: str, form: Form, keys: int) -> None:
    device = device_of(name)
    if form == WGMMA and not device.warpgroups:
        pytest.skip("warpgroup products need sm_90a")
    engine = CudaEngine(device, profile=PROFILE_BF16)
    engine.kernels.mma_form = form
    for number in range(len(REGIMES)):
        assert not wrong(engine, wide_attention(number, rows=2, heads=3, keys=keys))


@pytest.mark.parametrize("name", DEVICES)
def test_keys_that_no_row_sees_may_hold_nan(name: str) -> None:
    device = device_of(name)
    for profile in (PROFILE, PROFILE_BF16):
        engine = CudaEngine(device, profile=profile)
        call = wide_attention(0, keys=80)
        visible = np.array(call.inputs["visible"])
        visible[:, 5:20] = visible[:, 70:] = 0
        cache = np.array(call.inputs["cache"])
        cache[~visible.any(axis=0)] = np.nan
        assert not wrong(engine, OpCall(call.op, {**call.inputs, "visible": visible, "cache": cache}, call.params, call.outputs))


@pytest.mark.parametrize("name", DEVICES)
def test_int4_weights_are_those_of_the_matrix_product(name: str) -> None:
    """nibble * scale is exact in float32, so that the product is judged as `matmul` on the dequantised weights."""
    rng = np.random.default_rng(4)
    rows, inner, cols = 5, 96, 70
    nibbles = rng.integers(-8, 8, (inner, cols))
    scale_bits = (rng.random((inner // 32, cols)).astype(np.float32) + np.float32(0.5)).view(np.uint32) >> 16
    scales = (scale_bits << 16).astype(np.uint32).view(np.float32)
    weights = (nibbles * np.repeat(scales, 32, axis=0)).astype(np.float32)
    packed = np.zeros((inner // 8, cols), np.uint32)
    for k in range(inner):
        packed[k // 8] |= (nibbles[k].astype(np.int64) & 15).astype(np.uint32) << np.uint32(4 * (k % 8))
    x = rng.standard_normal((rows, inner)).astype(np.float32)
    device = device_of(name)
    call = OpCall("matmul", {"x": x, "w": weights}, {}, {"out": ((rows, cols), "float32")})
    for forms in ("plain", "fast"):
        kernels = Kernels(device, forms)
        out = device.download(kernels.matmul_int4(*map(device.upload, (x, packed, scales))))
        assert {j.verdict.name for j in judge_op(call, {"out": out}, PROFILE)} <= set(CLEAN)


@pytest.mark.parametrize("name", DEVICES)
def test_many_equal_logits_take_the_exact_selection(name: str) -> None:
    """More candidates in the last bin than are sorted at once (DRAFT_SORT)."""
    engine = CudaEngine(device_of(name))
    logits = np.zeros((2, 9000), np.float32)
    logits[1, 4000:] = np.float32(-0.0)
    logits[1, 17] = 1
    call = OpCall("draft_table", {"logits": logits}, {"budget": 40}, {"ids": ((2, 40), "int32"), "log_probs": ((2, 40), "float32")})
    assert not wrong(engine, call)


@pytest.mark.parametrize("name", DEVICES)
def test_the_builder_matches_at_its_largest_budget(name: str) -> None:
    engine = CudaEngine(device_of(name))
    for regime in ("ordinary", "ties", "extreme"):
        case = OpCase("best_first_tree", (("K", 1024), ("L", 16)), (("budget", 1024), ("root", 3)), regime, 1)
        assert not wrong(engine, op_call(case))


def refusals() -> list[tuple[str, dict[str, NDArray[np.generic]], dict[str, int], type[Exception]]]:
    f32, i32 = np.float32, np.int32
    nan_logits = np.array([[0, np.nan, 1]], f32)
    return [
        ("draft_table", {"logits": nan_logits}, {"budget": 2}, EngineError),
        ("draft_table", {"logits": np.array([[0, np.inf, 1]], f32)}, {"budget": 2}, EngineError),
        ("best_first_tree", {"ids": np.zeros((1, 2), i32), "log_probs": np.array([[-2, -1]], f32)}, {"budget": 2, "root": 0}, EngineError),
        ("best_first_tree", {"ids": np.zeros((1, 1), i32), "log_probs": np.zeros((1, 1), f32)}, {"budget": 1025, "root": 0}, Unsupported),
        ("tree_mask", {"parents": np.array([-1, 1], i32)}, {"prefix_len": 0}, EngineError),
        ("tree_mask", {"parents": np.array([-1, -1], i32)}, {"prefix_len": 0}, EngineError),
        ("accept", {"tokens": np.array([1, 2, 2], i32), "parents": np.array([-1, 0, 0], i32), "target": np.zeros(3, i32)}, {}, EngineError),
        ("compact", {"cache": np.zeros((4, 2), f32), "path": np.array([1, 1], i32)}, {"prefix_len": 1}, EngineError),
        ("embed", {"table": np.zeros((2, 2), f32), "ids": np.array([2], i32)}, {}, EngineError),
    ]


@pytest.mark.parametrize("name", DEVICES)
def test_inputs_outside_the_rules_are_refused(name: str) -> None:
    engine = CudaEngine(device_of(name))
    outputs = {
        key: np.zeros(0) for key in ("ids", "log_probs", "tokens", "parents", "depths", "count", "positions", "visible", "path", "out")
    }
    for op, inputs, params, error in refusals():
        with pytest.raises(error):
            engine.run_op(op, inputs, params, outputs)


def test_every_operation_has_a_kernel() -> None:
    assert device_of("emulated") is not None
    assert frozenset(OPS) <= CudaEngine(device_of("emulated")).describe().ops
    assert len(set(kernel_names())) == len(kernel_names())
    assert frozenset(PRODUCTION) == frozenset(OPS)  # benchmarks/gpu.py tries each at production width, too


@pytest.mark.parametrize("plant", plants.PLANTS, ids=lambda plant: plant.name)
def test_the_text_of_a_plant_occurs_once(plant: plants.Plant) -> None:
    assert plants.mutated(plant) != expanded()
    assert plant.op in OPS


# each costs a compilation of the emulator, so that two of different kinds run in every test run and all of them in the drill
PLANTED = [
    pytest.param(plant, id=plant.name, marks=() if plant.name in ("missing-barrier", "path-order") else pytest.mark.drill)
    for plant in plants.PLANTS
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_plant_is_found_at_its_operation(plant: plants.Plant) -> None:
    engine = CudaEngine(device_of("emulated", seed=5, source=plants.mutated(plant)), forms=plant.forms)
    found: set[str] = set()

    @quick
    @seed(1)
    @given(op_cases("full", (plant.op, "add", "embed", "swiglu")))
    def trial(case: OpCase) -> None:
        found.update(judgement.op for judgement in wrong_case(engine, case))

    trial()
    if plant.op == "tree_attention":
        for number in range(10):
            found.update(judgement.op for judgement in wrong(engine, wide_attention(number)))
        for check in (attention_pages, attention_production_width_pages):  # run_op has no page table
            try:
                check(engine.kernels)
            except AssertionError:
                found.add("tree_attention")
    assert found == {plant.op}


def test_the_emulator_sees_a_write_behind_a_buffer() -> None:
    """Rows of 8 in the buffer, rows of 9 for the kernel."""
    device = device_of("emulated")
    assert isinstance(device, EmulatedDevice)
    buffer = device.empty((4, 8), np.float32)
    device.launch("embed_f32", (4,), 32, (device.upload(np.zeros((1, 9), np.float32)), device.zeros((4,), np.int32), buffer, 9))
    with pytest.raises(OutOfBounds):
        device.check_guards()


def test_the_emulator_refuses_launches_that_do_not_fit() -> None:
    device = device_of("emulated")
    with pytest.raises(EngineError, match="multiple of 32"):
        device.launch("add_f32", (1,), 33, (None, None, None, np.int64(0)))
    with pytest.raises(EngineError, match="number of arguments"):
        device.launch("add_f32", (1,), 32, (None, None))
    with pytest.raises(EngineError, match="no such kernel"):
        device.launch("subtract_f32", (1,), 32, ())


def test_the_emulator_sees_a_barrier_that_some_threads_miss() -> None:
    guard = "    __shared__ float scratch[32];\n    const float* row = x + "
    source = expanded()
    assert source.count(guard) == 1
    device = device_of("emulated", source=source.replace(guard, "    if (threadIdx.x >= 32) return;\n" + guard))
    x = device.upload(np.ones((1, 64), np.float32))
    with pytest.raises(EngineError, match="barrier is missed"):
        device.launch("rms_norm_f32", (1,), 64, (x, 64, x, 1e-6, device.empty((1, 64), np.float32), 64, 64))
