"""Names, shapes and seeded values of the weights. Row-major [in, out], y = x @ W.

Values come from Philox keyed by (seed, tensor name), so that a change of one size or of the number of layers leaves
the other tensors as they are. Norm gains and the routing bias are random on purpose: ones and zeros test nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.config import Config

Array = NDArray[np.float32]
Weights = Mapping[str, Array]
Provider = Callable[[str], Array]
"""A lazy provider: name -> tensor. Raises KeyError for an unknown name."""


def layer_shapes(config: Config, layer: int) -> dict[str, tuple[int, ...]]:
    """Names without the `{layer}.` prefix. H = heads, R = kv_rank, E = experts, F = expert_dim."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (c.hidden,)}
    q_out = c.heads * (c.nope_dim + c.rope_dim)
    if c.q_rank:
        shapes |= {"q_a": (c.hidden, c.q_rank), "q_a_norm": (c.q_rank,), "q_b": (c.q_rank, q_out)}
    else:
        shapes |= {"q": (c.hidden, q_out)}
    shapes |= {
        "kv_a": (c.hidden, c.kv_rank + c.rope_dim),
        "kv_a_norm": (c.kv_rank,),
        "w_kc": (c.heads, c.nope_dim, c.kv_rank),
        "w_vc": (c.heads, c.kv_rank, c.v_dim),
        "o": (c.heads * c.v_dim, c.hidden),
        "ffn_norm": (c.hidden,),
    }
    if c.is_dense(layer):
        return shapes | {"gate": (c.hidden, c.dense_dim), "up": (c.hidden, c.dense_dim), "down": (c.dense_dim, c.hidden)}
    shapes |= {"router": (c.hidden, c.experts)}
    if c.scoring == "sigmoid":
        shapes |= {"router_bias": (c.experts,)}
    shapes |= {
        "expert_gate": (c.experts, c.hidden, c.expert_dim),
        "expert_up": (c.experts, c.hidden, c.expert_dim),
        "expert_down": (c.experts, c.expert_dim, c.hidden),
    }
    if c.shared_experts:
        shared = c.shared_experts * c.expert_dim
        shapes |= {"shared_gate": (c.hidden, shared), "shared_up": (c.hidden, shared), "shared_down": (shared, c.hidden)}
    return shapes


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that a session may ask for, in loading order."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab, config.hidden)}
    for layer in range(config.layers):
        shapes |= {f"{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
    shapes["norm"] = (config.hidden,)
    if not config.tied:
        shapes["head"] = (config.hidden, config.vocab)
    return shapes


def philox(*key: Any) -> np.random.Generator:
    """A generator keyed by the printed form of `key`: the same on every machine and in every process."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def random_tensor(config: Config, seed: int, name: str) -> Array:
    """One seeded tensor; std is fan_in^-1/2 for matrices, so that activations stay of order one."""
    shape = weight_shapes(config)[name]
    draw = philox("weights", seed, name).standard_normal(shape)
    kind = name.rpartition(".")[2]
    if kind == "router_bias":
        draw *= 0.3
    elif len(shape) == 1:
        draw = 1 + 0.3 * draw
    elif kind == "embed":
        draw *= 1.0
    elif kind == "w_kc":
        draw *= config.kv_rank**-0.5
    else:
        draw *= shape[-2] ** -0.5 * (2.0 if kind in ("head", "router") else 1.0)
    return draw.astype(np.float32)


def random_weights(config: Config, seed: int) -> dict[str, Array]:
    return {name: random_tensor(config, seed, name) for name in weight_shapes(config)}


def checked(config: Config, provider: Provider) -> Iterator[tuple[str, Array]]:
    """Pull every tensor through `provider`. Raises WeightError on a missing, misshapen, wrongly typed or non-finite one."""
    for name, shape in weight_shapes(config).items():
        yield name, checked_tensor(name, shape, provider)


class WeightError(ValueError):
    """A weight that cannot be used; the message names the tensor, what was found and what is expected."""


def checked_tensor(name: str, shape: tuple[int, ...], provider: Provider) -> Array:
    try:
        value = provider(name)
    except KeyError:
        raise WeightError(f"weight {name!r} is missing; expected float32 {list(shape)}") from None
    if value.dtype != np.float32:
        raise WeightError(f"weight {name!r} is {value.dtype}, but must be float32")
    if value.shape != shape:
        raise WeightError(f"weight {name!r} has shape {list(value.shape)}, but the configuration needs {list(shape)}")
    if not np.isfinite(value).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(value))[0])
        raise WeightError(f"weight {name!r} is {value[at]} at {list(at)}; weights must be finite")
    return value
