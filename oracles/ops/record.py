"""What `oracles/ops/<op>.py` offers: one function per operation, from a call and its outputs to expectations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from oracles.ball import Arithmetic
from oracles.compare import Expected

Arrays = Mapping[str, NDArray[Any]]
Params = Mapping[str, int | float]
Expect = Callable[[Arrays, Params, Arrays, Arithmetic], dict[str, Expected]]
"""(inputs, params, outputs, arithmetic) -> what each output must be, in data order. An output may be judged on another output of
the same call: weights on the ids that were chosen."""
