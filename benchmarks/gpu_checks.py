"""python -m benchmarks.gpu_checks: the 27 named checks on the GPU, in one process without a test runner, for compute-sanitizer.

CuPy's memory pool is off: every buffer is an allocation of its own, so that a write past its end is one past an allocation.
"""

from __future__ import annotations

import sys

from impls.cuda.device import CupyDevice
from impls.cuda.kernels import MMA16, MMA32, RESIDENT, SPLIT16, SPLIT32, TILED, WGMMA, Kernels
from tests.impls.test_cuda_suite import CHECKS, attention_production_width


def main() -> int:
    import cupy

    cupy.cuda.set_allocator(None)
    device = CupyDevice()
    kernels = Kernels(device)
    for check in CHECKS:
        check(kernels)
    for form in (TILED, RESIDENT, SPLIT16, SPLIT32):
        kernels.float32_form = form
        attention_production_width(kernels)
    bf16_forms(kernels)
    print(f"{len(CHECKS)} checks passed")
    return 0


def bf16_forms(kernels: Kernels) -> None:
    """Each tensor-core form once, for its memory accesses; what it computes is judged elsewhere."""
    import numpy as np

    rng = np.random.default_rng(0)
    upload = kernels.device.upload
    q, cache = (kernels.cast_bf16(upload(rng.standard_normal(shape).astype(np.float32))) for shape in ((3, 5, 576), (150, 576)))
    bits, seen = kernels.pack_mask(upload((rng.random((3, 150)) < 0.5).astype(np.uint8)))
    forms = (MMA16, MMA32, WGMMA) if kernels.device.warpgroups else (MMA16, MMA32)
    for form in forms:
        kernels.mma_form = form
        out = kernels.device.download(kernels.tree_attention(q, cache, bits, 0, 150, 512, 0.1, seen=seen))
        if not np.isfinite(out).all():
            raise SystemExit(f"{form[0]}: the output is not finite")


if __name__ == "__main__":
    sys.exit(main())
