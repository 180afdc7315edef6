"""Weights of a session case: seeded values, then one named change that opens an input region which ordinary values hide.

Sessions of one (configuration, key) share one set of arrays, which are read-only, so that an engine that writes into the
provider's memory fails in its own worker and not in the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import numpy as np

from campaigns.hazards import placed
from impls.checkpoint import Checkpoint
from spec.config import Config
from spec.formats import ROUNDED
from spec.script import WeightsKey
from spec.weights import Array, FetchedWeights, cheap_tensor, checked, is_large, philox, random_weights

Change = Callable[[Config, int, dict[str, Array]], None]
"""(configuration, seed, weights) -> None; replaces entries of the dictionary."""

KEPT = 24  # weight sets of a preset take 0.2 to 1.5 MB each: under 40 MB a process


class WeightsKeyError(ValueError):
    """A weights key that names no regime; the message lists them."""


def _tied_vocabulary(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """Columns 2i and 2i+1 of the head are equal: every argmax is an exact tie, and the lower id wins (A1)."""
    if config.tied:
        table = weights["embed"].copy()
        table[1::2] = table[: 2 * (config.vocab // 2) : 2]
        weights["embed"] = table
        return
    head = weights["head"].copy()
    head[:, 1::2] = head[:, : 2 * (config.vocab // 2) : 2]
    weights["head"] = head


def _tied_experts(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """Experts 2i and 2i+1 have one routing column and one bias: equal choice scores, at the cut for odd top_k as well."""
    even = 2 * (config.experts // 2)
    for layer in range(config.first_dense, config.layers):
        router = weights[f"{layer}.router"].copy()
        router[:, 1::2] = router[:, :even:2]
        weights[f"{layer}.router"] = router
        if (bias := weights.get(f"{layer}.router_bias")) is not None:
            bias = bias.copy()
            bias[1::2] = bias[:even:2]
            weights[f"{layer}.router_bias"] = bias


def _negative_bias(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """Routing bias of mean -2: every choice score is negative, so that masking dropped groups with 0 chooses them."""
    for layer in range(config.first_dense, config.layers):
        if (bias := weights.get(f"{layer}.router_bias")) is not None:
            weights[f"{layer}.router_bias"] = (bias - np.float32(2)).astype(np.float32)


def _large_scores(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """Queries times 2**18: raw scores of about 1e5, often below -5e4 for every visible key of a row."""
    name = "q_b" if config.q_rank else "q"
    for layer in range(config.layers):
        weights[f"{layer}.{name}"] = weights[f"{layer}.{name}"] * np.float32(2.0**18)


def _tiny_latents(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """Latent columns of kv_a times 2**-9: their mean square is of the size of the norm's eps."""
    for layer in range(config.layers):
        kv_a = weights[f"{layer}.kv_a"].copy()
        kv_a[:, : config.kv_rank] *= np.float32(2.0**-9)
        weights[f"{layer}.kv_a"] = kv_a


def _tiny_embeddings(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """Embeddings times 2**-9: the mean square of the first norm's input is of the size of its eps."""
    weights["embed"] = weights["embed"] * np.float32(2.0**-9)


def _cold_router(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """Routing logits of about +-18 and a bias of 12: sigmoid scores of 1e-8 that (s + b) - b cannot give back."""
    for layer in range(config.first_dense, config.layers):
        weights[f"{layer}.router"] = weights[f"{layer}.router"] * np.float32(9)
        if (bias := weights.get(f"{layer}.router_bias")) is not None:
            weights[f"{layer}.router_bias"] = (bias + np.float32(12)).astype(np.float32)


def _hot_expert(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """The last expert is chosen by every token, others get few or none."""
    for layer in range(config.first_dense, config.layers):
        if (bias := weights.get(f"{layer}.router_bias")) is not None:
            bias = bias.copy()
            bias[-1] = 4
            weights[f"{layer}.router_bias"] = bias
        else:
            router = weights[f"{layer}.router"].copy()
            router[:, -1] *= 4
            weights[f"{layer}.router"] = router


def _outlier_channel(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """One channel of the residual stream is 2**7 times the others."""
    channel = int(philox("outlier", seed).integers(config.hidden))
    table = weights["embed"].copy()
    table[:, channel] *= np.float32(2.0**7)
    weights["embed"] = table


def _special_tokens(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """Head columns of the first three ids and of the last one times 4: what is often a mask, padding or stop token is often the argmax."""
    special = [0, 1, 2, config.vocab - 1] if config.vocab > 3 else [0]
    if config.tied:
        table = weights["embed"].copy()
        table[special] *= np.float32(4)
        weights["embed"] = table
        return
    head = weights["head"].copy()
    head[:, special] *= np.float32(4)
    weights["head"] = head


def _negative_logits(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """One channel pulls every logit below zero: what an engine adds with a logit of 0, such as padding, is the argmax."""
    channel = int(philox("negative", seed).integers(config.hidden))
    table, gain = weights["embed"].copy(), weights["norm"].copy()
    table[:, channel], gain[channel] = 32, -np.abs(gain[channel]) - 1  # 32: far above what the layers add to the stream
    weights |= {"embed": table, "norm": gain}
    if not config.tied:
        head = weights["head"].copy()
        head[channel] = 1
        weights["head"] = head


def _equal_maxima(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """All logits lie below zero but for three tokens, whose head columns are zero: logits of exactly 0 in any order of summation, of which the
    lowest token is due (A1). A tied head has no such columns."""
    if config.tied:
        return
    _negative_logits(config, seed, weights)
    head = weights["head"].copy()
    head[:, philox("maxima", seed).choice(config.vocab, min(3, config.vocab), replace=False)] = 0
    weights["head"] = head


def _quiet_router(level: float, bias_shift: float) -> Change:
    """Every routing logit is about `level`, because one channel of the stream is the same in every row. At -300 all sigmoids are exactly 0 in float32:
    the bias alone chooses, and the mixing weights are 0 over a denominator of eps. At -18, and a bias of 12, (score + bias) - bias is 0 for every
    expert, but the mixing weights are those of any scores."""

    def change(config: Config, seed: int, weights: dict[str, Array]) -> None:
        channel = int(philox("quiet", seed).integers(config.hidden))
        table = weights["embed"].copy()
        table[:, channel] = 32  # far above what the layers add: after the norm it is close to the root of the width
        weights["embed"] = table
        for layer in range(config.first_dense, config.layers):
            if f"{layer}.router_bias" not in weights or not config.denominator_eps:
                continue
            gain, router = weights[f"{layer}.ffn_norm"].copy(), weights[f"{layer}.router"].copy()
            gain[channel] = 1
            router[channel] = level / math.sqrt(config.hidden)
            bias = (weights[f"{layer}.router_bias"] + np.float32(bias_shift)).astype(np.float32)
            weights |= {f"{layer}.ffn_norm": gain, f"{layer}.router": router, f"{layer}.router_bias": bias}

    return change


def _level_router(config: Config, seed: int, weights: dict[str, Array]) -> None:
    """No router column and no bias: every choice is an exact tie in any engine, and the lowest groups and experts are due (N5)."""
    for layer in range(config.first_dense, config.layers):
        for name in (f"{layer}.router", f"{layer}.router_bias"):
            if name in weights:
                weights[name] = np.zeros_like(weights[name])


def _laid_out(*hazards: str) -> Change:
    """The same numbers in memory that is less friendly (campaigns/hazards.py): an engine goes by the strides (K04), and reads nothing beside them."""

    def change(config: Config, seed: int, weights: dict[str, Array]) -> None:
        for index, (name, value) in enumerate(weights.items()):
            weights[name] = placed(value, frozenset(hazards), index)

    return change


def _of_format(name: str) -> Change:
    """Every weight is a number of a 16-bit format, as most checkpoints hold them: exact float32 values, nothing else changes (M11)."""

    def change(config: Config, seed: int, weights: dict[str, Array]) -> None:
        for tensor, value in weights.items():
            if not tensor.startswith("rope_"):
                weights[tensor] = ROUNDED[name](value)

    return change


REGIMES: dict[str, Change] = {
    "ordinary": lambda config, seed, weights: None,
    "tied-vocabulary": _tied_vocabulary,
    "tied-experts": _tied_experts,
    "negative-bias": _negative_bias,
    "large-scores": _large_scores,
    "tiny-latents": _tiny_latents,
    "tiny-embeddings": _tiny_embeddings,
    "cold-router": _cold_router,
    "hot-expert": _hot_expert,
    "outlier-channel": _outlier_channel,
    "bfloat16-weights": _of_format("bfloat16"),
    "float16-weights": _of_format("float16"),
    "special-tokens": _special_tokens,
    "negative-logits": _negative_logits,
    "equal-maxima": _equal_maxima,
    "silent-router": _quiet_router(-300.0, 0.0),
    "faint-router": _quiet_router(-18.0, 12.0),
    "level-router": _level_router,
    "views": _laid_out("views"),
    "poisoned-margins": _laid_out("poison"),
    "fenced": _laid_out("fence"),
}


@lru_cache(maxsize=4)
def checkpoint_at(folder: str) -> Checkpoint:
    """One open checkpoint per folder. Raises CheckpointError."""
    return Checkpoint(folder)


@lru_cache(maxsize=KEPT)
def weights_for(config: Config, key: WeightsKey) -> Mapping[str, Array]:
    """name -> read-only float32 tensor; of a large model made or read anew at each access, experts one at a time ("3.expert_gate/17").

    Raises WeightsKeyError for an unknown regime; CheckpointError, WeightError for a bad checkpoint.
    """
    if is_large(config):
        if not key.checkpoint and key.regime != "ordinary":
            raise WeightsKeyError(f"the weights of a large model are ordinary ones, not {key.regime!r}: they are made at each access")
        return FetchedWeights(config, checkpoint_at(key.checkpoint).tensor if key.checkpoint else partial(cheap_tensor, config, key.seed))
    if key.checkpoint:
        weights = dict(checked(config, checkpoint_at(key.checkpoint).tensor))
    else:
        if key.regime not in REGIMES:
            raise WeightsKeyError(f"there is no weights regime {key.regime!r}: choose one of {', '.join(REGIMES)}")
        weights = random_weights(config, key.seed)
        REGIMES[key.regime](config, key.seed, weights)
    for value in weights.values():
        value.setflags(write=False)
    return weights
