"""`python tests/spec/golden_hash.py` prints one hash over golden outputs: operations of spec/arithmetic.py, rotary tables, a whole model.

test_arithmetic.py runs it under other BLAS kernels, thread counts and SIMD levels, all of which must print the same.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from spec import arithmetic
from spec.config import preset
from spec.engine import Rows
from spec.model import GoldenModel
from spec.rotary import Rotary
from spec.weights import philox, random_weights


def arrays() -> list[np.ndarray]:
    draw = philox("golden hash")

    def normal(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape).astype(np.float32)

    out = []
    for rows, depth, columns in ((8, 64, 160), (64, 257, 64), (5, 1100, 40)):  # the last one is summed in blocks
        a, b = normal(rows, depth), normal(depth, columns)
        out += [arithmetic.matmul(a, b), arithmetic.matmul(a, arithmetic.prepare(b), 0.37)]
    x, wide = normal(64, 96), normal(64, 96) * np.float32(12)
    out += [arithmetic.rms_norm(x, x[0], 1e-6), arithmetic.sigmoid(wide), arithmetic.swiglu(wide, x), arithmetic.log_probs(wide)]
    out += [arithmetic.softmax(wide, wide > -9), arithmetic.top_k_weights(arithmetic.sigmoid(wide), 1.5, True, 1e-20)]
    out += Rotary(preset("small", rope_dim=16)).tables(np.array([*range(300), 131072, 9999991]))
    for name in ("tiny", "small", "tiny-softmax"):
        config = preset(name)
        session = GoldenModel(config, random_weights(config, 5)).open()
        tokens = draw.integers(0, config.vocab, 24).astype(np.int32)
        index = np.arange(16, dtype=np.int32)
        prompt = Rows(np.zeros_like(index), tokens[:16], index, index - 1)
        parents = np.array([-1, 0, 0, 1, 1, 2, 3, 6], np.int32)
        depths = np.array([0, 1, 1, 2, 2, 2, 3, 4], np.int32)
        for rows in (prompt, Rows(np.zeros(8, np.int32), tokens[16:], 16 + depths, parents)):
            out.append(session.forward(rows, np.ones(len(rows), np.bool_), frozenset(), lambda *_: None))
            session.commit(0, index if rows is prompt else np.array([0, 1, 3]))
        out.append(session.cache_rows(0, 1))
    return out


if __name__ == "__main__":
    digest = hashlib.sha256()
    for array in arrays():
        digest.update(np.ascontiguousarray(array).tobytes())
    print(digest.hexdigest())
