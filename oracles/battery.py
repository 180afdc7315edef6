"""Rules that are in use elsewhere, applied to the same arrays: what a fixed tolerance would have said beside our verdict. Never part of a verdict.

Each rule compares found with golden values as its project does (NUMERICS 4.2 measures them). `token-exact` compares the greedy choice of each row and
says nothing of arrays that are no logits; integers must be equal under every other rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Pair = tuple[Array, Array]
"""(found, golden), equal shapes."""


@dataclass(frozen=True)
class FixedRule:
    """`passes(found, golden)` of one array of floats; `words` is the rule as its users write it, `source` where it is used."""

    name: str
    words: str
    source: str
    passes: Callable[[Array, Array], bool]


def _close(rtol: float, atol: float, share: float = 1.0) -> Callable[[Array, Array], bool]:
    def passes(found: Array, golden: Array) -> bool:
        near = np.isclose(found, golden, rtol=rtol, atol=atol)
        return bool(near.mean() >= share) if near.size else True

    return passes


def _cosine(found: Array, golden: Array) -> bool:
    x, y = found.astype(np.float64).ravel(), golden.astype(np.float64).ravel()
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size > 0.999 if size else not (x.any() or y.any())


def _cosine_difference(found: Array, golden: Array) -> bool:
    """1 - 2 x.y / (x.x + y.y), which sees a common factor, too."""
    x, y = found.astype(np.float64).ravel(), golden.astype(np.float64).ravel()
    return 1 - 2 * float(x @ y) / max(float(x @ x + y @ y), 1e-12) < 1e-5 if (x.any() or y.any()) else True


def _nmse(found: Array, golden: Array) -> bool:
    y = golden.astype(np.float64)
    size = float(np.square(y).sum())
    error = float(np.square(found - y).sum())
    return error / size <= 1e-7 if size else error == 0


FIXED_RULES: tuple[FixedRule, ...] = (
    FixedRule("numpy", "allclose(rtol=1e-5, atol=1e-8)", "numpy.allclose, the defaults", _close(1e-5, 1e-8)),
    FixedRule("torch", "assert_close(rtol=1.3e-6, atol=1e-5)", "torch.testing, the defaults for float32", _close(1.3e-6, 1e-5)),
    FixedRule("KernelBench", "allclose(rtol=1e-4, atol=1e-4)", "KernelBench, float32", _close(1e-4, 1e-4)),
    FixedRule("llama.cpp", "NMSE <= 1e-7", "llama.cpp, test-backend-ops", _nmse),
    FixedRule("cosine", "cosine > 0.999", "common in ports of models", _cosine),
    FixedRule("FlashInfer-Bench", "rtol = atol = 1e-2 for 95 %", "FlashInfer-Bench", _close(1e-2, 1e-2, 0.95)),
    FixedRule("FlashMLA", "1 - 2xy/(xx + yy) < 1e-5", "FlashMLA, test_flash_mla", _cosine_difference),
)
TOKEN_EXACT = "token-exact"
NAMES = (*(rule.name for rule in FIXED_RULES), TOKEN_EXACT)


def verdicts(pairs: Sequence[Pair], logits: Sequence[Pair] = (), tokens: Sequence[Pair] = ()) -> Mapping[str, bool]:
    """rule -> whether it passes. `pairs`: every array that a user would compare; `logits` [rows, V] and `tokens` decide token-exact, which is left out
    where neither is given. An array of another shape than the golden one fails every rule."""
    with np.errstate(all="ignore"):
        out = {rule.name: all(_passes(rule, *pair) for pair in pairs) for rule in FIXED_RULES}
        if logits or tokens:
            chosen = [(found.argmax(-1), golden.argmax(-1)) for found, golden in logits if found.shape == golden.shape]
            equal = [np.array_equal(found, golden) for found, golden in (*chosen, *tokens)]
            out[TOKEN_EXACT] = all(equal) and len(chosen) == len(logits)
    return out


def _passes(rule: FixedRule, found: Array, golden: Array) -> bool:
    if found.shape != golden.shape:
        return False
    if golden.dtype.kind != "f":
        return bool(np.array_equal(found, golden))
    if np.isnan(found).any() or np.isnan(golden).any():  # each of them fails for NaN in one place only, and in both
        return False
    both = np.isinf(golden) & (found == golden)  # equal infinities are equal; the sums of the other rules would not survive them
    return rule.passes(np.where(both, 0, found), np.where(both, 0, golden))
