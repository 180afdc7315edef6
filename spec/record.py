"""One record per operation: what goes in, what comes out, which rules it answers to, and the function itself.

`spec/ops/<op>.py` defines RECORD; the C header's list of ops, the tap table, the documentation and the skeletons are
generated from these records, and a test fails on drift. `oracles/ops/<op>.py` adds the bound and the exact checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
Params = Mapping[str, int | float]


@dataclass(frozen=True)
class Tensor:
    """A named operand. `dims` are the words of the record's `dims`; dtype is "float32", "int32" or "uint8" (booleans)."""

    name: str
    dims: tuple[str, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Op:
    """`function(inputs, params)` returns the outputs by name as golden bits.

    `dims` explains each dimension word; a word may be "a+b" or "a*b" of others, or the name of an int parameter. A parameter of
    `defaults` may be left out: a call sends it only where it says something else, so that older engines and cases stay as they are.
    """

    name: str
    summary: str
    rules: tuple[str, ...]
    dims: Mapping[str, str]
    inputs: tuple[Tensor, ...]
    params: Mapping[str, str]  # name -> "int" | "float"
    outputs: tuple[Tensor, ...]
    function: Callable[[Arrays, Params], dict[str, NDArray[Any]]]
    defaults: Params = field(default_factory=dict)


def size(word: str, dims: Mapping[str, int]) -> int:
    """The value of a dimension word."""
    if "+" in word:
        return sum(size(part, dims) for part in word.split("+"))
    if "*" in word:
        total = 1
        for part in word.split("*"):
            total *= size(part, dims)
        return total
    return int(word) if word.isdigit() else dims[word]


def shape(tensor: Tensor, dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size(word, dims) for word in tensor.dims)
