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
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')


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


def kernel_names() -> tuple[str, ...]:
    """Every `extern "C" __global__` function, in order of appearance."""
    return tuple(_KERNEL.findall(expanded()))
