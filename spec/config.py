"""The model's configuration: every number that fixes a function, and every switch on which real engines disagree.

A switch is bound to a function once, where the model is built; nothing branches on it per token. Presets break
coincidences on purpose (rope_dim != nope_dim, mscale != 1, routed_scale != 1): a size or factor that happens to be 1
or equal to another hides the bugs of whole classes (BUGZOO, region 2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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


def _switch(default: Any, meaning: str, users: str, values: tuple[str, ...] = ()) -> Any:
    """A field on which real engines disagree: `meaning` of its values, who uses which, and the accepted words (docs/switches.md)."""
    return field(default=default, metadata={"meaning": meaning, "users": users, "values": values})


@dataclass(frozen=True)
class Config:
    """Dimensions in elements. Field names are the ones used in Python, C, tables and pages.

    The fields made by `_switch` are those on which engines disagree; a top-k tie is no field: the lower index wins (N5), and an engine
    whose profile says `ties="any"` is judged by that.
    """

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
    scoring: str = _switch(
        "sigmoid",
        "router scores: sigmoid of each logit with a routing bias (noaux_tc), or softmax over all experts without one",
        "sigmoid: DeepSeek-V3, Kimi-K2; softmax: DeepSeek-V2",
        ("sigmoid", "softmax"),
    )
    group_score: str = _switch(
        "top2_sum",
        "a group of experts counts by the sum of its two best choices, or by its best",
        "top2_sum: V3, K2, and llama.cpp for every model; max: V2",
        ("top2_sum", "max"),
    )
    group_fill: str = _switch(
        "-inf",
        "the choice of experts in dropped groups; zero beats every negative choice",
        "-inf: transformers 5, DeepSeek's code, vLLM, SGLang, llama.cpp; zero: older transformers, mlx-lm 0.32",
        ("-inf", "zero"),
    )
    norm_top_k: bool = _switch(True, "the weights of the chosen experts are divided by their sum", "true: V3, K2; false: V2")
    routed_scale: float = 1.0
    denominator_eps: float = _switch(
        1e-20, "is added to the sum of the chosen scores before the division", "1e-20: transformers; 0: DeepSeek's code, mlx-lm, llama.cpp"
    )
    denominator_clamp: float = _switch(
        0.0, "the sum (with its eps) is at least this; 0: no clamp", "2^-14 = 6.1e-5: llama.cpp; 0: all others"
    )
    rms_eps: float = 1e-6
    latent_eps: float | None = _switch(
        None,
        "eps of q_a_norm and kv_a_norm; none: rms_eps",
        "none: vLLM, SGLang, llama.cpp, tinygrad; 1e-6 whatever rms_eps is: transformers, DeepSeek's code, mlx-lm",
    )
    rope_theta: float = 10000.0
    rope_layout: str = _switch(
        "interleaved",
        "rotated pairs are (2i, 2i+1), or (i, i + D/2)",
        "interleaved: V3 and K2 checkpoints in DeepSeek's code, llama.cpp, mlx-lm, vLLM, SGLang; half: transformers with rope_interleave "
        "false, tinygrad after permuting the weights",
        ("interleaved", "half"),
    )
    rope_table_len: int = _switch(
        0,
        "0: cos and sin of exact angles, rounded once (M6); n: the tables of positions 0 .. n-1 are weights, rope_cos and rope_sin [n, D/2]",
        "0: the specification; carried tables bring the float32 angles of transformers, llama.cpp, vLLM, SGLang and mlx-lm bit for bit",
    )
    yarn: Yarn | None = None
    tied: bool = _switch(False, "the head is the embedding transposed", "false: every listed model")
    attention_bias: bool = _switch(
        False,
        "q_a (q without query compression), kv_a and o have biases q_a_bias (q_bias), kv_a_bias, o_bias",
        "false: every listed model; transformers, vLLM and SGLang follow config.json",
    )
    window: int = _switch(
        0,
        "a row at position p sees keys at positions above p - window only; 0: all",
        "0: every listed model; sliding-window drafters and hybrids",
    )
    cache_format: str = _switch(
        "float32",
        "latent and k_rope are rounded to this format, to nearest even, when they enter the cache; every reader sees the rounded row",
        "bfloat16: vLLM, SGLang, mlx-lm, transformers on bf16 models; float16: llama.cpp by default; float32: its option, and our engines",
        ("float32", "bfloat16", "float16"),
    )

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
                raise ConfigError(
                    f"experts is {self.experts} and expert_dim {self.expert_dim}, but layers from {self.first_dense} on are sparse"
                )
            if not 1 <= self.top_k <= self.experts:
                raise ConfigError(f"top_k is {self.top_k}, but must be between 1 and experts ({self.experts})")
            if self.groups < 1 or self.experts % self.groups:
                raise ConfigError(f"groups is {self.groups}, but must divide experts ({self.experts})")
            if not 1 <= self.top_groups <= self.groups:
                raise ConfigError(f"top_groups is {self.top_groups}, but must be between 1 and groups ({self.groups})")
            if self.top_k > self.top_groups * (self.experts // self.groups):
                raise ConfigError(
                    f"top_k is {self.top_k}, but the kept groups hold only {self.top_groups * (self.experts // self.groups)} experts"
                )
            if self.groups > 1 and self.group_score == "top2_sum" and self.experts // self.groups < 2:
                raise ConfigError("group_score is top2_sum, but a group holds one expert: use max or fewer groups")
        for switch in SWITCHES.values():
            allowed = switch.metadata["values"]
            if allowed and getattr(self, switch.name) not in allowed:
                raise ConfigError(f"{switch.name} is {getattr(self, switch.name)!r}, but must be one of {', '.join(allowed)}")
        for name in ("window", "rope_table_len", "denominator_clamp"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must not be negative")

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


SWITCHES: Mapping[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Config) if f.metadata}
"""The fields on which engines disagree; `metadata` holds meaning, users, values."""


def unfamiliar_switches(config: Config, known: frozenset[str]) -> list[str]:
    """Switches that `config` sets to another value than the default and that an engine that knows only `known` would ignore."""
    return [name for name, switch in SWITCHES.items() if name not in known and getattr(config, name) != switch.default]


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
    # The ratios of the real models below that break coincidences, in small: scales, groups, eps, layers, YaRN
    "deepseek-v2-lite-tiny": dataclasses.replace(
        TINY, vocab=102, hidden=40, layers=3, heads=4, q_rank=0, dense_dim=104, experts=16, top_k=3, expert_dim=28, shared_experts=2,
        scoring="softmax", group_score="max", norm_top_k=False, routed_scale=1.0, rms_eps=1e-6,
        yarn=Yarn(factor=40.0, original_len=64, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek-v3-tiny": dataclasses.replace(
        TINY, vocab=130, hidden=56, layers=4, first_dense=3, heads=4, q_rank=24, dense_dim=144, experts=16, top_k=4, expert_dim=20,
        groups=4, top_groups=2, routed_scale=2.5, rms_eps=1e-6, yarn=Yarn(factor=40.0, original_len=64),
    ),
    "kimi-k2-tiny": dataclasses.replace(
        TINY, vocab=164, hidden=56, layers=3, heads=2, q_rank=24, dense_dim=144, experts=24, top_k=4, expert_dim=20, routed_scale=2.827,
        rms_eps=1e-6, rope_theta=50000.0, yarn=Yarn(factor=32.0, original_len=64, beta_fast=1.0, beta_slow=1.0),
    ),
    "kimi-k2.5-tiny": dataclasses.replace(
        TINY, vocab=164, hidden=56, layers=3, heads=2, q_rank=24, dense_dim=144, experts=24, top_k=4, expert_dim=20, routed_scale=2.827,
        rms_eps=1e-5, rope_theta=50000.0, yarn=Yarn(factor=64.0, original_len=64),
    ),
}  # fmt: skip

# Real models. Quoted by public configurations or engine sources: everything that is not said to be inferred here.
DEEPSEEK_V3 = Config(
    vocab=129280, hidden=7168, layers=61, first_dense=3, heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128,
    dense_dim=18432, experts=256, top_k=8, expert_dim=2048, groups=8, top_groups=4, routed_scale=2.5, rms_eps=1e-6,
    yarn=Yarn(factor=40.0, original_len=4096),
)  # fmt: skip
KIMI_K2 = dataclasses.replace(  # inferred, from memory of the family: rms_eps, beta_fast
    DEEPSEEK_V3, vocab=163840, first_dense=1, heads=64, experts=384, groups=1, top_groups=1, routed_scale=2.827, rope_theta=50000.0,
    yarn=Yarn(factor=32.0, original_len=4096, beta_fast=1.0, beta_slow=1.0),
)  # fmt: skip
KIMI_K25 = dataclasses.replace(KIMI_K2, rms_eps=1e-5, yarn=Yarn(factor=64.0, original_len=4096))  # K2.6 is taken to be the same: inferred
MODELS: dict[str, Config] = {
    # inferred, from memory of the published config.json: all of it
    "deepseek-v2-lite": Config(
        vocab=102400, hidden=2048, layers=27, first_dense=1, heads=16, q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128,
        dense_dim=10944, experts=64, top_k=6, expert_dim=1408, shared_experts=2, scoring="softmax", group_score="max", norm_top_k=False,
        routed_scale=1.0, yarn=Yarn(factor=40.0, original_len=4096, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek-v3": DEEPSEEK_V3,
    "kimi-k2": KIMI_K2,
    "kimi-k2.5": KIMI_K25,
    # one layer in full width, with a vocabulary that is none: embedding and head are not what is tested
    "kimi-k2-layer": dataclasses.replace(KIMI_K2, vocab=258, layers=1, first_dense=0),
    "kimi-k2.5-dense-layer": dataclasses.replace(KIMI_K25, vocab=258, layers=1, first_dense=1),
    "deepseek-v3-layer": dataclasses.replace(DEEPSEEK_V3, vocab=258, layers=1, first_dense=0),
}  # fmt: skip


def preset(name: str, **overrides: Any) -> Config:
    """The named preset with fields replaced. Raises ConfigError for an unknown name or field."""
    known = PRESETS | MODELS
    if name not in known:
        raise ConfigError(f"there is no preset {name!r}: choose one of {', '.join(known)}")
    unknown = set(overrides) - {f.name for f in dataclasses.fields(Config)}
    if unknown:
        raise ConfigError(f"a configuration has no field {sorted(unknown)[0]!r}")
    return dataclasses.replace(known[name], **overrides)


LATER = ("group_fill", "denominator_clamp", "rope_table_len", "attention_bias", "window", "cache_format")
"""Switches whose parameter is sent only where it says something, so that an engine that does not know it is asked for nothing new."""


def as_parameters(config: Config) -> dict[str, int | float]:
    """The flat (key, int | double) pairs that cross the C ABI. Of two words, a flag says whether it is the second (`scoring_softmax`);
    of more, `cache_format` is the index into the list of values. An engine that does not know a key must answer UNSUPPORTED."""
    out: dict[str, int | float] = {}
    for item in dataclasses.fields(config):
        value, words = getattr(config, item.name), item.metadata.get("values", ())
        if item.name in ("yarn", "latent_eps") or (item.name in LATER and value == item.default):
            continue
        if len(words) == 2:
            out[f"{item.name}_{words[1]}"] = int(value == words[1])
        elif words:
            out[item.name] = words.index(value)
        elif isinstance(value, bool):
            out[item.name] = int(value)
        else:
            out[item.name] = value
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
