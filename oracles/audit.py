"""Audited profiles: what an engine's answers to probes say about its arithmetic, against what its profile declares. A profile that lies is a finding.

A probe of precision has at most two terms in every output, all other products are exactly zero, so that its bound does not grow with the length of
the dot product: it sees a silent TF32 where the certified bound of an honest long sum is wider than the lie (NUMERICS 4.4). A probe of height reads
the tree of additions off masked sums (FPRev, arXiv 2411.00442). Both are proofs relative to the profile, for the shape that was probed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.ball import INFLATE, Ball, Wide, height_block
from oracles.compare import Near, judge_near, shares
from oracles.judgement import Judgement, Verdict
from spec.engine import UNIT_FLOAT32, Profile
from spec.script import OpCall

RULE = "N6"
HEADS = {"q_absorb": ("q_nope", "w_kc"), "o_heads": ("o_latent", "w_vc")}
FORMATS = {"TF32": 10, "TF32, truncated": -10, "bfloat16": 7, "bfloat16, truncated": -7, "float16": 10, "3 x bfloat16": 23}
"""name -> explicit bits of the fraction, negative where the rest is cut off; float16 has the precision of TF32 where its range suffices."""


def judge_precision(call: OpCall, outputs: Mapping[str, NDArray[Any]], profile: Profile) -> list[Judgement]:
    """The outputs of a probe of precision against its exact results. Raises KeyError for an operation without probes."""
    left, right = _operands(call)
    profile = profile.at(call.op)
    found = outputs["out"].reshape(len(left), -1)
    exact = left @ right  # at most two terms of 24 + 1 bits each: float64 holds product and sum
    terms = (left != 0).astype(np.float64) @ (right != 0).astype(np.float64)
    near = Near(Ball(exact, _radius(left, right, exact, terms, profile)), RULE)
    share = shares(found, near)
    judgement = judge_near(found, near, share, op=call.op, tap="precision", rung="ops", step=0)
    if judgement.verdict is not Verdict.DEFECT:
        return [judgement]
    behaves = behaviour(left, right, found)
    text = f"{judgement.message}: declares {profile.name}, behaves like {behaves} over {left.shape[1]} terms"
    return [dataclasses.replace(judgement, message=text)]


def _radius(left: Wide, right: Wide, exact: Wide, terms: Wide, profile: Profile) -> Wide:
    """Inputs rounded to u_input; one addition per output, exact in float32 because its result is a float32 number; a narrower accumulator
    or output rounds once per term and once on the way out."""
    reach = np.abs(left) @ np.abs(right)
    growth = (1 + profile.u_input) ** 2 - 1
    accumulate = profile.u_accumulate if profile.u_accumulate > UNIT_FLOAT32 else 0.0
    rad: Wide = (growth + accumulate * np.maximum(terms, 1) * (1 + growth)) * reach
    return (rad + profile.u_output * (np.abs(exact) + rad)) * INFLATE


def behaviour(left: Wide, right: Wide, found: NDArray[Any]) -> str:
    """The format of the operands that gives the found outputs, or the number of bits that are right."""
    one = ((left != 0).astype(np.int64) @ (right != 0).astype(np.int64)) == 1
    if one.any():
        for name, bits in FORMATS.items():
            if np.array_equal((rounded(left, bits) @ rounded(right, bits))[one], found[one].astype(np.float64)):
                return "float32 operands, but a narrower accumulator" if bits == 23 else name
    exact = left @ right
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.nanmax(np.where(exact != 0, np.abs(found - exact) / np.abs(exact), 0.0), initial=0.0)
    return f"an arithmetic of about {max(0, -math.frexp(error)[1])} bits" if np.isfinite(error) and error else "nothing known"


def rounded(values: Wide, bits: int) -> Wide:
    """To `bits` explicit bits of fraction, nearest even; towards zero for a negative number."""
    mantissa, exponent = np.frexp(values)
    scaled = np.ldexp(mantissa, abs(bits) + 1)
    out: Wide = np.ldexp(np.trunc(scaled) if bits < 0 else np.rint(scaled), exponent - abs(bits) - 1)
    return out


def judge_height(call: OpCall, outputs: Mapping[str, NDArray[Any]], profile: Profile) -> list[Judgement]:
    """How deep in the tree of additions a term lies, against the declared height."""
    left, _ = _operands(call)
    profile = profile.at(call.op)
    found = outputs["out"].reshape(len(left), -1)[:, 0].astype(np.float64)
    terms = left.shape[1]
    place: dict[str, Any] = {"op": call.op, "tap": "height", "rung": "ops", "checked": len(left)}
    block = height_block(profile.height)
    under = terms - found  # leaves under the lowest common ancestor of the two masks
    legal = np.isfinite(found) & (found == np.rint(found)) & (under >= 2) & (under <= terms)
    if not legal.all() or block is None:
        text = "the sums of the probe are no counts, so that the order of additions cannot be read off" if block is not None else ""
        return [Judgement(Verdict.UNVERIFIED if text else Verdict.EXACT, RULE, message=text, **place)]
    declared = declared_height(block, terms)
    leaf = np.abs(left).argmax(1)  # the first mask of each row
    depths = {int(one): len(np.unique(under[(left[:, one] > 1) & (leaf == one)])) for one in np.unique(leaf)}
    deepest = max(depths, key=lambda one: depths[one])
    depth = depths[deepest]
    fields: dict[str, Any] = {"found": float(depth), "expected": float(declared), "bound": 0.0, "index": (deepest,)}
    if depth <= declared:
        return [Judgement(Verdict.WITHIN_BOUND, RULE, share=depth / declared, **fields, **place)]
    text = (
        f"term {deepest} of {terms} passes {depth} additions, but the profile {profile.name} declares at most {declared} ({profile.height}): "
        f"declares blocks, behaves like {'a chain' if depth >= terms - 2 else 'longer blocks'} ({RULE})"
    )
    return [Judgement(Verdict.DEFECT, RULE, share=float("inf"), message=text, **fields, **place)]


def declared_height(block: int, terms: int) -> int:
    """Additions above a term: at most `block` in a chain, then a balanced tree."""
    return min(terms - 1, block + max(0, math.ceil(math.log2(terms / block))))


def _operands(call: OpCall) -> tuple[Wide, Wide]:
    """[rows, terms], [terms, columns] in float64; a head of scores is a row."""
    if call.op == "matmul":
        return call.inputs["x"].astype(np.float64), call.inputs["w"].astype(np.float64)
    if call.op == "scores":
        q = call.inputs["q"]
        return q.reshape(-1, q.shape[-1]).astype(np.float64), call.inputs["keys"].T.astype(np.float64)
    if call.op in HEADS:  # probes have the same numbers in every head
        x, w = (call.inputs[name] for name in HEADS[call.op])
        return x.reshape(-1, x.shape[-1]).astype(np.float64), w[0].astype(np.float64)
    raise KeyError(call.op)
