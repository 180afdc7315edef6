"""paritree: give it an inference engine; it tells, with proof, where the engine leaves the specification.

    import paritree
    paritree.judge("matmul", {"x": x, "w": w}, {"out": out}, profile="bf16-f32acc")   # raises paritree.Divergence

Import is cheap: NumPy and the rooms are loaded at first use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from campaigns.recorded import Divergence
    from oracles.judgement import Judgement
    from spec.engine import Profile

__version__ = "0.1.0"
__all__ = ["Divergence", "judge"]

ROOMS = ("spec", "impls", "oracles", "campaigns", "reports")


class ShadowedRoom(ImportError):
    """A folder or module of the user hides one of paritree's packages; the message says which."""


def _check_rooms() -> None:
    """The rooms have common names: a folder `reports/` in the working directory must not be taken for ours. Finds, imports nothing."""
    home = Path(__file__).resolve().parent.parent
    for room in ROOMS:
        found = importlib.util.find_spec(room)
        where = None if found is None else found.origin or next(iter(found.submodule_search_locations or ()), None)
        if where is None:
            raise ShadowedRoom(f"the package {room!r} of paritree is missing beside {home / 'paritree'}: install paritree again")
        folder = Path(where).resolve()
        folder = folder.parent if folder.suffix == ".py" else folder
        if folder != home / room:
            raise ShadowedRoom(
                f"{folder} hides the package {room!r} of paritree ({home / room}): start from another folder, rename it, or take it off PYTHONPATH"
            )


_check_rooms()


def judge(
    op: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    profile: str | Profile = "float32-any-order",
    params: Mapping[str, int | float] | None = None,
) -> list[Judgement]:
    """Judge one call of an operation; one judgement per output.

    Raises Divergence (an AssertionError) where an output is wrong, ValueError where the call itself does not fit the operation.
    """
    from campaigns.recorded import require

    return require(op, inputs, outputs, profile=profile, params=params)


def __getattr__(name: str) -> Any:
    if name == "Divergence":
        from campaigns.recorded import Divergence

        return Divergence
    raise AttributeError(f"module 'paritree' has no attribute {name!r}")
