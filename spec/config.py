"""The model's configuration: every number that fixes a function, and every switch on which real engines disagree.

A switch is bound to a function once, where the model is built; nothing branches on it per token. Presets break
coincidences on purpose (rope_dim != nope_dim, mscale != 1, routed_scale != 1): a size or factor that happens to be 1
or equal to another hides the bugs of whole classes (BUGZOO, region 2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be built; the message names the field, what was found and what is accepted."""


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (rule M6). `factor` <= 1 leaves frequencies and the softmax scale as they are."""

    factor: float
    original_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class Config:
    """Dimensions in elements. Field names are the ones used in Python, C, tables and pages."""

    vocab: int
    hidden: int
    layers: int
    first_dense: int  # this many leading layers have a dense feed-forward block
    heads: int
    q_rank: int  # 0: no query compression, weight `q` instead of `q_a`, `q_a_norm`, `q_b`
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    dense_dim: int
    experts: int
    top_k: int
    expert_dim: int
    shared_experts: int = 1
    groups: int = 1
    top_groups: int = 1
    scoring: str = "sigmoid"  # "sigmoid": noaux_tc (V3, K2); "softmax": V2
    group_score: str = "top2_sum"  # "top2_sum": V3, K2; "max": V2
    norm_top_k: bool = True
    routed_scale: float = 1.0
    denominator_eps: float = 1e-20  # transformers; 0.0: DeepSeek's own code, mlx-lm
    rms_eps: float = 1e-6
    latent_eps: float | None = None  # None: rms_eps (vLLM, SGLang, llama.cpp); 1e-6: transformers, mlx-lm
    rope_theta: float = 10000.0
    rope_layout: str = "interleaved"  # or "half"
    yarn: Yarn | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_rank", "nope_dim", "rope_dim", "v_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.rope_dim % 2:
            raise ConfigError(f"rope_dim is {self.rope_dim}, but pairs are rotated: give an even number")
        if self.first_dense > 0 and self.dense_dim < 1:
            raise ConfigError(f"dense_dim is {self.dense_dim}, but {self.first_dense} layers are dense: give at least 1")
        if self.first_dense < self.layers:
            if self.experts < 1 or self.expert_dim < 1:
                raise ConfigError(f"experts is {self.experts} and expert_dim {self.expert_dim}, but layers from {self.first_dense} on are sparse")
            if not 1 <= self.top_k <= self.experts:
                raise ConfigError(f"top_k is {self.top_k}, but must be between 1 and experts ({self.experts})")
            if self.groups < 1 or self.experts % self.groups:
                raise ConfigError(f"groups is {self.groups}, but must divide experts ({self.experts})")
            if not 1 <= self.top_groups <= self.groups:
                raise ConfigError(f"top_groups is {self.top_groups}, but must be between 1 and groups ({self.groups})")
            if self.top_k > self.top_groups * (self.experts // self.groups):
                raise ConfigError(f"top_k is {self.top_k}, but the kept groups hold only {self.top_groups * (self.experts // self.groups)} experts")
            if self.groups > 1 and self.group_score == "top2_sum" and self.experts // self.groups < 2:
                raise ConfigError("group_score is top2_sum, but a group holds one expert: use max or fewer groups")
        for name, allowed in (("scoring", ("sigmoid", "softmax")), ("group_score", ("top2_sum", "max")), ("rope_layout", ("interleaved", "half"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but must be one of {', '.join(allowed)}")

    @property
    def latent_norm_eps(self) -> float:
        return self.rms_eps if self.latent_eps is None else self.latent_eps

    @property
    def cache_dim(self) -> int:
        """Width of a cache row [latent | k_rope] per token and layer."""
        return self.kv_rank + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """(nope_dim + rope_dim)^-1/2 * mscale(factor, mscale_all_dim)^2, a double; engines receive its float32 (rule M5)."""
        scale: float = (self.nope_dim + self.rope_dim) ** -0.5
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim) ** 2
        return scale

    def is_dense(self, layer: int) -> bool:
        return layer < self.first_dense


def yarn_mscale(factor: float, mscale: float) -> float:
    """m(s, a) = 0.1 a ln s + 1, and 1 for s <= 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


TINY = Config(
    vocab=96, hidden=48, layers=2, first_dense=1, heads=3, q_rank=20, kv_rank=16, nope_dim=12, rope_dim=8, v_dim=10,
    dense_dim=72, experts=8, top_k=2, expert_dim=24, routed_scale=1.5, rms_eps=1e-5,
    rope_theta=10000.0, yarn=Yarn(factor=4.0, original_len=32, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip

PRESETS: dict[str, Config] = {
    "tiny": TINY,
    # groups, two shared experts, three layers, mscale != mscale_all_dim
    "small": dataclasses.replace(
        TINY, vocab=160, hidden=64, layers=3, heads=4, q_rank=48, kv_rank=32, nope_dim=16, v_dim=14, dense_dim=128, experts=16, top_k=4,
        expert_dim=40, shared_experts=2, groups=4, top_groups=2, routed_scale=2.5, rms_eps=1e-6,
        yarn=Yarn(factor=16.0, original_len=64, mscale=0.707, mscale_all_dim=1.3),
    ),
    # room for the byte tokens of campaigns/text.py: prompts are real text
    "tiny-text": dataclasses.replace(TINY, vocab=258),
    # softmax routing with plain top-k weights (V2), no query compression, tied head, half-split rotary pairs
    "tiny-softmax": dataclasses.replace(
        TINY, scoring="softmax", norm_top_k=False, group_score="max", groups=4, top_groups=2, q_rank=0, tied=True, rope_layout="half",
        routed_scale=1.25, yarn=None,
    ),
}  # fmt: skip


def preset(name: str, **overrides: Any) -> Config:
    """The named preset with fields replaced. Raises ConfigError for an unknown name or field."""
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}: choose one of {', '.join(PRESETS)}")
    unknown = set(overrides) - {f.name for f in dataclasses.fields(Config)}
    if unknown:
        raise ConfigError(f"a configuration has no field {sorted(unknown)[0]!r}")
    return dataclasses.replace(PRESETS[name], **overrides)


def as_parameters(config: Config) -> dict[str, int | float]:
    """The flat (key, int | double) pairs that cross the C ABI; strings become the index into their list of values."""
    out: dict[str, int | float] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("yarn", "latent_eps"):
            continue
        if field.name == "scoring":
            out["scoring_softmax"] = int(value == "softmax")
        elif field.name == "group_score":
            out["group_score_max"] = int(value == "max")
        elif field.name == "rope_layout":
            out["rope_layout_half"] = int(value == "half")
        elif isinstance(value, bool):
            out[field.name] = int(value)
        else:
            out[field.name] = value
    out["latent_eps"] = config.latent_norm_eps
    out["softmax_scale"] = config.softmax_scale
    if config.yarn is not None:
        out |= {f"yarn_{f.name}": getattr(config.yarn, f.name) for f in dataclasses.fields(Yarn)}
    return out


def from_json(data: Mapping[str, Any]) -> Config:
    """The inverse of dataclasses.asdict. Raises ConfigError for unknown or missing fields."""
    known = {f.name for f in dataclasses.fields(Config)}
    unknown = set(data) - known
    if unknown:
        raise ConfigError(f"a configuration has no field {sorted(unknown)[0]!r}")
    fields = dict(data)
    if fields.get("yarn") is not None:
        fields["yarn"] = Yarn(**fields["yarn"])
    try:
        return Config(**fields)
    except TypeError as problem:
        raise ConfigError(f"incomplete configuration: {problem}") from None
