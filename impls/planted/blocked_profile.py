"""Plants whose profile lies: honest kernels of another arithmetic than the engine declares. The bound of a long sum is wider than the lie."""

from __future__ import annotations

import numpy as np

from impls.blocked.points import Float, Site
from impls.planted.planting import plant

FAST_TERMS = 4096  # a library takes its fast path for large products only


def tf32(x: Float) -> Float:
    """Cut to the 10 bits of fraction that a tensor core reads."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@plant(
    "tf32-large", "gemm", "g", "G06 pytorch/pytorch/issues/67384", ("matmul", "N6"),
    "a probe of 4096 terms: the any-order bound of a random product of this length is wider than TF32", needs=["op"],
)  # fmt: skip
def fast_path_for_large_products(site: Site, name: str, x: Float, w: Float) -> Float:
    fast = len(w) >= FAST_TERMS
    out: Float = site.honest(name, tf32(x) if fast else x, tf32(w) if fast else w)
    return out
