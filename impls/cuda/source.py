"""The device code as text: `kernels.cuh` with its own includes put in place, and the names of the kernels.

One text serves CuPy (whose kernel cache then sees every change), NVRTC, and the emulator.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = "kernels.cuh"
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__(?:launch_bounds|cluster_dims)__\([^)]*\)\s+)*(\w+)\(')
NOT_EMULATED = ("tree_attention_wgmma_pair_bf16",)  # its blocks see each other's shared memory; the emulator runs one after the other


@lru_cache(maxsize=4)
def expanded(root: str = ROOT) -> str:
    """`root` and everything that it includes, each file once, without include lines."""
    seen: set[str] = set()

    def text_of(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (FOLDER / name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: text_of(match[1]), text)

    return text_of(root)


def kernel_names(*, emulated: bool = False) -> tuple[str, ...]:
    """Every `extern "C" __global__` function, in order of appearance; `emulated`: those that the emulator runs."""
    return tuple(name for name in _KERNEL.findall(expanded()) if not (emulated and name in NOT_EMULATED))
