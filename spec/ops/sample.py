"""The token drawn from each row with keyed noise."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.record import Arrays, Op, Params, Tensor
from spec.sampling import Sampling, SamplingError, gumbel_argmax, keyed_uniforms, scaled_logits


def golden(inputs: Arrays, params: Params) -> dict[str, NDArray[Any]]:
    """T = rows, V = vocabulary, J = length of the longest history. Raises SamplingError for a row that is no distribution."""
    sampling, vocab = sampling_of(params), inputs["logits"].shape[1]
    ids = []
    for row, history, sequence in zip(inputs["logits"], inputs["history"], inputs["sequences"].tolist(), strict=True):
        seen = history_of(history, vocab)
        z = scaled_logits(sampling, row, seen, int(params["prompt_len"]))
        ids.append(gumbel_argmax(z, keyed_uniforms(sampling.seed, sequence, len(seen), vocab)))
    return {"ids": np.array(ids, np.int32)}


def sampling_of(params: Params) -> Sampling:
    return Sampling(
        temperature=float(params["temperature"]),
        top_k=int(params["top_k"]),
        top_k_ties="all" if params["top_k_ties_all"] else "lowest",
        top_p=float(params["top_p"]),
        min_p=float(params["min_p"]),
        repetition_penalty=float(params["repetition_penalty"]),
        presence_penalty=float(params["presence_penalty"]),
        frequency_penalty=float(params["frequency_penalty"]),
        seed=int(params["seed"]),
    )


def history_of(row: NDArray[np.int32], vocab: int) -> list[int]:
    """The tokens of a history up to its first -1. Raises SamplingError for another number that is no token."""
    tokens: list[int] = row.tolist()
    seen = tokens[: tokens.index(-1)] if -1 in tokens else tokens
    for token in seen:
        if not 0 <= token < vocab:
            raise SamplingError(f"history names token {token}, but the vocabulary has {vocab}")
    return seen


RECORD = Op(
    name="sample",
    summary="argmax of z - log(-log u): z of S1 and S2, u keyed by seed, sequence, and the position behind the history",
    rules=("S1", "S2", "S3", "A6", "A1"),
    dims={"T": "rows", "V": "vocabulary", "J": "length of the longest history"},
    inputs=(
        Tensor("logits", ("T", "V")),
        Tensor("history", ("T", "J"), "int32"),  # everything before the token, prompt first; -1 past its end
        Tensor("sequences", ("T",), "int32"),  # number of the request
    ),
    params={
        "temperature": "float",
        "top_k": "int",
        "top_k_ties_all": "int",
        "top_p": "float",
        "min_p": "float",
        "repetition_penalty": "float",
        "presence_penalty": "float",
        "frequency_penalty": "float",
        "seed": "int",
        "prompt_len": "int",
    },
    outputs=(Tensor("ids", ("T",), "int32"),),
    function=golden,
)
