"""What the drawn trials of test_cuda_kernels.py may miss: every operation by itself, argmax over rows that are split, bfloat16 attention of any sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from campaigns.case import OpCase
from campaigns.materialise import op_call
from campaigns.operands import REGIMES
from campaigns.strategies import op_cases
from impls.cuda.engine import PROFILE_BF16, CudaEngine
from impls.cuda.kernels import Kernels
from spec.ops import OPS
from tests.impls.cuda_devices import DEVICES, device_of
from tests.impls.test_cuda_kernels import wrong, wrong_case

few = settings(max_examples=8, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("forms", ("fast", "plain"))
@pytest.mark.parametrize("op", sorted(OPS))
def test_every_operation_is_within_its_bound(name: str, forms: str, op: str) -> None:
    engine = CudaEngine(device_of(name), forms=forms)

    @few
    @seed(5)
    @given(op_cases("full", (op,)))
    def trial(case: OpCase) -> None:
        assert not wrong_case(engine, case)

    trial()


@pytest.mark.parametrize("name", DEVICES)
def test_the_argmax_of_a_split_row_is_the_lowest_index(name: str) -> None:
    """Rows of more than 4,096 logits are split: ties within a part, across parts, in the last and partial one; both zeros; all -inf; NaN."""
    vocab = 9001
    logits = np.full((6, vocab), -1, np.float32)
    logits[0, [5000, 4097, 8999]] = 2
    logits[1, [9000, 8999]] = 2
    logits[2, 100], logits[2, 50] = 0.0, -0.0
    logits[3] = -np.inf
    logits[4, [8500, 3]] = np.inf
    logits[5, 10], logits[5, [7000, 8000]] = 5, np.nan
    right = [4097, 8999, 50, 0, 3, 7000]
    for forms in ("fast", "plain"):
        kernels = Kernels(device_of(name), forms=forms)
        assert kernels.device.download(kernels.argmax(kernels.device.upload(logits))).tolist() == right, forms


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("forms", ("fast", "plain"))
@pytest.mark.parametrize("keys", (1, 40, 200))
def test_bfloat16_attention_of_any_size_is_within_its_bound(name: str, forms: str, keys: int) -> None:
    engine = CudaEngine(device_of(name), forms=forms, profile=PROFILE_BF16)
    dims = (("C", 24), ("H", 3), ("S", keys), ("T", 2))
    for number, regime in enumerate(REGIMES):
        assert not wrong(engine, op_call(OpCase("tree_attention", dims, (("kv_rank", 16), ("scale", 0.25)), regime, number)))
