"""The drawn token, redone on the engine's own logits (S1-S3, A6): the golden draw, or one that float64 cannot tell from it.

The noise is prescribed, so that a draw is a decision like an argmax. Engines make z and the keys in float64 as the rules say, but need not
decide near ties in longer arithmetic, as the specification does.
"""

from __future__ import annotations

import numpy as np

from oracles.ball import Arithmetic
from oracles.compare import Decided, Expected
from oracles.ops.record import Arrays, Params
from oracles.sampled import Draw, due, margin
from spec.arithmetic import LIBM
from spec.ops.sample import history_of, sampling_of
from spec.sampling import SamplingError

NOISE_MAX = 37.0  # -log(-log u) lies between -log(53 log 2) and 53 log 2


def expect(inputs: Arrays, params: Params, outputs: Arrays, a: Arithmetic) -> dict[str, Expected]:
    sampling, logits = sampling_of(params), inputs["logits"]
    worst = Decided("", "S3")
    for row, own in enumerate(logits):
        try:
            seen = history_of(inputs["history"][row], logits.shape[1])
            draw = Draw(own, tuple(seen), int(params["prompt_len"]), int(inputs["sequences"][row]))
            right = due(sampling, draw)
        except SamplingError as refusal:
            return {"ids": Decided(f"answered, but must refuse its inputs: row {row}: {refusal} (S1)", "S1", (row,))}
        found = int(outputs["ids"][row])
        if found == right:
            continue
        if not 0 <= found < logits.shape[1]:
            return {"ids": Decided(f"ids[{row}] is {found}, but must be a token below {logits.shape[1]} (S3)", "S3", (row,), found, right)}
        # float64 steps: bias and penalties (4), temperature, key, and two logarithms or an exponential within LIBM; sums of V masses. The
        # terms of a key are of the size of the largest finite logit over the temperature, and of the noise
        largest = (
            float(np.abs(own[np.isfinite(own)]).max(initial=0.0))
            + abs(sampling.presence_penalty)
            + abs(sampling.frequency_penalty) * len(seen)
        )
        stretch = max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)
        bound = (LIBM + 2.0**-53 * (8 + len(own))) * (stretch * largest + NOISE_MAX * max(sampling.temperature, 1e-300))
        share = margin(sampling, draw, found) / bound
        text = (
            f"ids[{row}] is {found}, but the draw is {right}, and a difference of {share * bound:.2g} of two logits lies between them (S3)"
        )
        if share > 1:
            return {"ids": Decided(text, "S3", (row,), found, right, bound, 1.0)}
        if share > worst.share:
            worst = Decided("", "S3", (row,), found, right, bound, share)
    return {"ids": worst}
