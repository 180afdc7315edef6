"""ncu --clock-control none --section SpeedOfLight --section WarpStateStats python -m benchmarks.gpu_profile: one launch of each long kernel.

Runs the attention forms and the tree builder once each, on the smaller of the two shapes of gpu_timing, so that a profiler sees little else.
"""

from __future__ import annotations

import numpy as np

from benchmarks.gpu_timing import HEADS, RANK, SCALE, SHAPES, WIDTH, tree_bits
from impls.cuda.device import CupyDevice
from impls.cuda.kernels import MMA32, RESIDENT, SPLIT16, SPLIT32, TILED, WGMMA, Kernels


def main() -> None:
    import cupy

    kernels = Kernels(CupyDevice())
    prefix, nodes = SHAPES[0]
    rng = cupy.random.default_rng(1)
    q = rng.standard_normal((nodes, HEADS, WIDTH), dtype=np.float32)
    cache = rng.standard_normal((prefix + nodes, WIDTH), dtype=np.float32)
    bits = tree_bits(kernels, nodes)
    narrow = kernels.cast_bf16(q), kernels.cast_bf16(cache)
    for form in (TILED, RESIDENT, SPLIT16, SPLIT32, MMA32, WGMMA):
        kernels.float32_form = kernels.mma_form = form
        a, b = (q, cache) if form.kernel.endswith("f32") else narrow
        kernels.tree_attention(a, b, bits, prefix, prefix + nodes, RANK, SCALE)
    status = kernels.device.zeros((1,), np.int32)
    ids, log_probs = kernels.draft_table(rng.standard_normal((15, 163_840), dtype=np.float32) * 2.5, 512, status)
    kernels.best_first_tree(ids, log_probs, 512, 7, status)
    cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    main()
