"""Names, shapes and seeded values of the weights. Row-major [in, out], y = x @ W.

Values come from Philox keyed by (seed, tensor name), so that a change of one size or of the number of layers leaves
the other tensors as they are. Norm gains and the routing bias are random on purpose: ones and zeros test nothing.
Of a large model nobody keeps all weights: tensors are fetched for each use, and experts one at a time, as "3.expert_gate/17".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.config import Config

Array = NDArray[np.float32]
Weights = Mapping[str, Array]
Provider = Callable[[str], Array]
"""A lazy provider: name -> tensor, or NAME/INDEX -> one expert's matrix of the stack NAME. Raises KeyError for an unknown name."""
LARGE_BYTES = 1 << 30  # as float32; a judge that wants float64 and absolute values as well then takes 5 GiB
EXPERT_STACKS = ("expert_gate", "expert_up", "expert_down")


def layer_shapes(config: Config, layer: int) -> dict[str, tuple[int, ...]]:
    """Names without the `{layer}.` prefix. H = heads, R = kv_rank, E = experts, F = expert_dim."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (c.hidden,)}
    q_out = c.heads * (c.nope_dim + c.rope_dim)
    if c.q_rank:
        shapes |= {"q_a": (c.hidden, c.q_rank), "q_a_norm": (c.q_rank,), "q_b": (c.q_rank, q_out)}
    else:
        shapes |= {"q": (c.hidden, q_out)}
    if c.attention_bias:
        shapes |= {
            "q_a_bias" if c.q_rank else "q_bias": (c.q_rank or q_out,),
            "kv_a_bias": (c.kv_rank + c.rope_dim,),
            "o_bias": (c.hidden,),
        }
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
    if config.rope_table_len:
        shapes |= dict.fromkeys(("rope_cos", "rope_sin"), (config.rope_table_len, config.rope_dim // 2))
    for layer in range(config.layers):
        shapes |= {f"{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
    shapes["norm"] = (config.hidden,)
    if not config.tied:
        shapes["head"] = (config.hidden, config.vocab)
    return shapes


def tensor_shape(config: Config, name: str) -> tuple[int, ...]:
    """The shape of a tensor, or of one expert's matrix ("3.expert_gate/17"). Raises KeyError for a name that the configuration lacks."""
    stack, slash, index = name.partition("/")
    shape = weight_shapes(config)[stack]
    if not slash:
        return shape
    if stack.rpartition(".")[2] not in EXPERT_STACKS or not index.isdigit() or int(index) >= shape[0]:
        raise KeyError(name)
    return shape[1:]


def tensor_of(provider: Provider, name: str) -> Array:
    """`provider(name)`; a slice NAME/INDEX also of a provider that knows whole stacks only."""
    stack, slash, index = name.partition("/")
    if not slash:
        return provider(name)
    try:
        return provider(name)
    except KeyError:
        matrix: Array = provider(stack)[int(index)]
        return matrix


def is_large(config: Config) -> bool:
    """Whether the weights take more than LARGE_BYTES: then nobody keeps them, and experts are lent one at a time."""
    return 4 * sum(math.prod(shape) for shape in weight_shapes(config).values()) > LARGE_BYTES


def philox(*key: Any) -> np.random.Generator:
    """A generator keyed by the printed form of `key`: the same on every machine and in every process."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def random_tensor(config: Config, seed: int, name: str) -> Array:
    """One seeded tensor; std is fan_in^-1/2 for matrices, so that activations stay of order one."""
    shape = weight_shapes(config)[name]
    kind = name.rpartition(".")[2]
    if kind in ("rope_cos", "rope_sin"):
        return rope_tables_of_float32_angles(config)[kind == "rope_sin"]
    draw = philox("weights", seed, name).standard_normal(shape)
    if kind.endswith("_bias"):
        draw *= 0.3
    elif len(shape) == 1:
        draw = 1 + 0.3 * draw
    else:
        draw *= deviation(config, kind, shape)
    return draw.astype(np.float32)


def deviation(config: Config, kind: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of a random matrix."""
    if kind == "embed":
        return 1.0
    fan_in = config.kv_rank if kind == "w_kc" else shape[-2]
    scale: float = float(fan_in) ** -0.5
    return scale * (2.0 if kind in ("head", "router") else 1.0)


def rope_tables_of_float32_angles(config: Config) -> tuple[Array, Array]:
    """(cos, sin) [rope_table_len, D/2] as engines carry them that keep frequencies and angles in float32: at position 10000 they
    differ from the exact ones by 1e-4."""
    from spec.rotary import frequencies, table_factor  # which imports spec.arithmetic: this file is read by what needs names only

    rates = np.array([float(f) for f in frequencies(config)]).astype(np.float32)
    angles = (np.arange(config.rope_table_len, dtype=np.float32)[:, None] * rates).astype(np.float64)
    factor = float(table_factor(config.yarn))
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


CHEAP_PERIOD = (1 << 20) + 1  # 4 MiB of values, drawn in 3 ms; odd, and without the factors 3 and 7 of real widths


def cheap_tensor(config: Config, seed: int, name: str) -> Array:
    """One seeded tensor, or one expert's matrix, at the speed of memory (normals take 20 times as long): for layers in full width.

    Vectors are those of `random_tensor`. A matrix is one block of CHEAP_PERIOD uniform values of the same deviation, drawn by Philox
    keyed by the name, that runs through the elements in row-major order again and again. The period shares no factor with a width
    of a listed model, so that no two rows are equal.
    """
    shape = tensor_shape(config, name)
    kind = name.partition("/")[0].rpartition(".")[2]
    if len(shape) == 1 or kind in ("rope_cos", "rope_sin"):
        return random_tensor(config, seed, name)
    block = philox("cheap", seed, name).random(CHEAP_PERIOD, dtype=np.float32)
    block -= np.float32(0.5)
    block *= np.float32(math.sqrt(12.0) * deviation(config, kind, shape))
    out = np.empty(math.prod(shape), np.float32)
    for start in range(0, len(out), CHEAP_PERIOD):
        part = out[start : start + CHEAP_PERIOD]
        part[:] = block[: len(part)]
    return out.reshape(shape)


def random_weights(config: Config, seed: int) -> dict[str, Array]:
    return {name: random_tensor(config, seed, name) for name in weight_shapes(config)}


def checked(config: Config, provider: Provider) -> Iterator[tuple[str, Array]]:
    """Pull every tensor through `provider`. Raises WeightError on a missing, misshapen, wrongly typed or non-finite one, and for a
    large model, which cannot be held at once: fetch its tensors with `checked_tensor`."""
    if is_large(config):
        raise WeightError(f"all weights together take more than {LARGE_BYTES >> 20} MiB: fetch them one by one")
    for name, shape in weight_shapes(config).items():
        yield name, checked_tensor(name, shape, provider)


class FetchedWeights(Mapping[str, Array]):
    """The tensors of a configuration, pulled through a provider and checked each time that one is read; slices by name, too."""

    def __init__(self, config: Config, provider: Provider) -> None:
        self._config, self._provider = config, provider

    def __getitem__(self, name: str) -> Array:
        return checked_tensor(name, tensor_shape(self._config, name), self._provider)

    def __iter__(self) -> Iterator[str]:
        return iter(weight_shapes(self._config))

    def __len__(self) -> int:
        return len(weight_shapes(self._config))


class WeightError(ValueError):
    """A weight that cannot be used; the message names the tensor, what was found and what is expected."""


def checked_tensor(name: str, shape: tuple[int, ...], provider: Provider) -> Array:
    try:
        value = tensor_of(provider, name)
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
