"""Positions P + depth (C2) and visibility of prefix and ancestors-or-self (C3): exact."""

from __future__ import annotations

import numpy as np

from oracles.ball import Arithmetic
from oracles.compare import Decided, Equal, Expected
from oracles.ops.record import Arrays, Params
from spec.tree import TreeError, check_structure, positions, visibility


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    prefix_len = int(params["prefix_len"])
    parents = inputs["parents"]
    try:
        depths = check_structure(parents)
    except TreeError as refusal:
        return dict.fromkeys(("positions", "visible"), refused(refusal))
    seen = visibility(parents, prefix_len)
    return {"positions": Equal(positions(depths, prefix_len), "C2"), "visible": Equal(seen.view(np.uint8), "C3")}


def refused(refusal: TreeError) -> Decided:
    """The inputs are outside the rule's domain: an engine has to say so instead of answering."""
    return Decided(f"answered, but must refuse its inputs: {refusal.message} ({refusal.rule})", refusal.rule)
