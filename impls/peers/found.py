"""What was found in released engines, each as a script: `python -m impls.peers.found NAME` in a fresh process (docs/found.md).

Every finding opens the released package on a tiny model, compares it with the specification's golden bits, prints what it does against what it
should, and exits with 0 if the difference is there, 1 if it is gone, 3 if the package is missing. Nothing here needs a judge: the differences
are thousands of roundings, NaN, or a dead process.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec.config import Config, Yarn, preset
from spec.engine import Engine, Float, Rows
from spec.model import GoldenModel
from spec.weights import Array, random_weights

ROUNDING = 2.0**-14  # of logits of order one: hundreds of float32 roundings, far above what honest engines differ by (2e-6 to 2e-5)
TOKENS = (np.arange(20) * 7 % 96).astype(np.int32)
Weights = dict[str, Array]


@dataclass(frozen=True)
class Finding:
    packages: tuple[str, ...]
    title: str
    run: Callable[[], tuple[bool, list[str]]]  # (is it there, lines that show it)


def chain(tokens: Array | Any, position: int = 0) -> Rows:
    """One sequence from `position` on."""
    count = len(tokens)
    positions = np.arange(position, position + count, dtype=np.int32)
    return Rows(np.zeros(count, np.int32), np.asarray(tokens, np.int32), positions, np.arange(-1, count - 1, dtype=np.int32))


def logits(engine: Engine, config: Config, weights: Weights, rows: Rows) -> Float:
    session = engine.open(config, weights.__getitem__)
    try:
        return session.forward(rows, np.ones(len(rows), np.bool_), frozenset(), lambda name, layer, array: None)
    finally:
        session.close()


def golden(config: Config, weights: Weights, rows: Rows) -> Float:
    return GoldenModel(config, weights).open().forward(rows, np.ones(len(rows), np.bool_), frozenset(), lambda name, layer, array: None)


def error(found: Float, due: Float) -> float:
    """The largest difference; NaN where the engine answers NaN."""
    return float(np.abs(found - due).max())


# llama.cpp


def flash_attention_halves_the_cache() -> tuple[bool, list[str]]:
    """type_k = F32 and flash_attn on: the graph casts the cache to F16 before attention."""
    from impls.peers import llama_library as llama
    from impls.peers.llamacpp_engine import LlamaCppEngine, Options

    config = _for_llama()
    weights = random_weights(config, 0)
    large = dict(weights)  # the same function of real numbers: latents times 1e5, their readers divided by it
    for name, factor in (("kv_a_norm", 1e5), ("w_kc", 1e-5), ("w_vc", 1e-5)):
        large[f"0.{name}"] = weights[f"0.{name}"] * np.float32(factor)
    lines, there = [], True
    for what, given in (("ordinary latents", weights), ("latents of 1e5 (layer 0)", large)):
        rows = chain(TOKENS[:4])
        due = golden(config, given, rows)
        off = error(logits(LlamaCppEngine(Options()), config, given, rows), due)
        on = error(logits(LlamaCppEngine(Options(flash_attention=llama.FLASH_ON)), config, given, rows), due)
        lines.append(f"{what}: float32 cache, logit error {off:.1e} without flash attention, {on:.1e} with it")
        there &= off < ROUNDING and not on < ROUNDING
    return there, lines


def yarn_betas_of_the_file_are_ignored() -> tuple[bool, list[str]]:
    from impls.peers.llamacpp_engine import LlamaCppEngine, Options

    config = _for_llama(rope_dim=16, yarn=Yarn(64.0, 4096, 1.0, 1.0, 1.0, 1.0))  # beta_fast 1: Kimi-K2-Instruct
    weights = random_weights(config, 0)
    rows = chain(TOKENS, 100)
    due = golden(config, weights, rows)
    file_only = error(logits(LlamaCppEngine(Options(yarn_betas=False)), config, weights, rows), due)
    by_caller = error(logits(LlamaCppEngine(Options()), config, weights, rows), due)
    as_32 = golden(dataclasses.replace(config, yarn=Yarn(64.0, 4096, 32.0, 1.0, 1.0, 1.0)), weights, rows)
    other = error(logits(LlamaCppEngine(Options(yarn_betas=False)), config, weights, rows), as_32)
    return file_only > ROUNDING > max(by_caller, other), [
        f"GGUF says deepseek2.rope.scaling.yarn_beta_fast = 1: logit error {file_only:.1e}; against a model with beta_fast 32: {other:.1e}",
        f"the same value set by the caller in llama_context_params: {by_caller:.1e}",
    ]


def expert_weights_are_clamped() -> tuple[bool, list[str]]:
    from impls.peers.llamacpp_engine import LlamaCppEngine

    config = _for_llama()
    asked = dataclasses.replace(config, denominator_clamp=0.0)
    weights = dict(random_weights(config, 0))
    weights["1.router"] = weights["1.router"] * np.float32(8)  # logits about -16 for some experts,
    weights["1.router_bias"] = weights["1.router_bias"] * np.float32(100)  # which the correction bias chooses all the same
    rows = chain(TOKENS)
    found, due = _tapped(LlamaCppEngine(), config, weights, rows, "expert_weights"), _golden_tap(asked, weights, rows, "expert_weights")
    sums, scale = found.sum(-1), config.routed_scale
    row = int(sums.argmin())
    wrong = error(logits(LlamaCppEngine(), config, weights, rows), golden(asked, weights, rows))
    return float(sums.min()) < scale / 2 and wrong > ROUNDING, [
        f"row {row}: weights of the chosen experts sum to {sums[row]:.3g}, should be norm_topk_prob: 1 times routed_scaling_factor = {scale}",
        f"golden weights {np.array2string(due[row], precision=4)}, llama.cpp {np.array2string(found[row], precision=4)}; logit error {wrong:.2g}",
    ]


def groups_by_maximum_are_ranked_by_sums() -> tuple[bool, list[str]]:
    from impls.peers import gguf_weights
    from impls.peers.llamacpp_engine import LlamaCppEngine

    config = preset(
        "tiny", scoring="softmax", group_score="max", norm_top_k=False, groups=4, top_groups=2
    )  # DeepSeek-V2 group_limited_greedy
    weights = random_weights(config, 0)
    rows = chain(TOKENS)
    as_file = dataclasses.replace(config, group_score="top2_sum")  # what a GGUF of it says: it has no key for the rule
    gguf_weights.refuse(as_file)
    found = logits(LlamaCppEngine(), as_file, weights, rows)
    wrong, other = error(found, golden(config, weights, rows)), error(found, golden(as_file, weights, rows))
    return wrong > ROUNDING > other, [
        f"softmax gating, 4 groups, 2 kept: logit error {wrong:.2g} against DeepSeek-V2's rule (best expert of a group), {other:.1e} against V3's (two best)"
    ]


def group_counts_abort_the_loader() -> tuple[bool, list[str]]:
    """In children: the process does not survive."""
    lines, there = [], True
    for what, groups, kept in (("all groups are kept (2 of 2)", 2, 2), ("a group has one expert (8 groups of 8 experts)", 8, 4)):
        text = (
            "import gguf\nfrom impls.peers import gguf_weights\nfrom impls.peers.llamacpp_engine import LlamaCppEngine\n"
            "from impls.peers.found import _for_llama\nfrom spec.weights import random_weights\n"
            "keys = gguf_weights._keys\n"
            "def grouped(writer, config):\n"
            f"    keys(writer, config)\n    writer.add_expert_group_count({groups})\n    writer.add_expert_group_used_count({kept})\n"
            "engine, config = LlamaCppEngine(), _for_llama()\ngguf_weights._keys = grouped\n"
            "engine.open(config, random_weights(config, 0).__getitem__)\n"
        )
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, env={**os.environ, "GGML_NO_BACKTRACE": "1"}, check=False)
        said = [line.partition("GGML_ASSERT")[2] for line in done.stderr.decode("utf-8", "replace").splitlines() if "GGML_ASSERT" in line]
        lines.append(
            f"{what}: llama_model_load_from_file ended the process with signal {-done.returncode}: GGML_ASSERT{''.join(said[-1:])}"
        )
        there &= done.returncode < 0
    return there, lines


def lite_by_layer_count() -> tuple[bool, list[str]]:
    from impls.peers import gguf_weights
    from impls.peers.llamacpp_engine import LlamaCppEngine
    from spec.engine import EngineError

    config = _for_llama(layers=26, hidden=16, vocab=96, experts=4, expert_dim=4, dense_dim=8)
    outcome = {}
    kept, gguf_weights.GUESSED_LAYERS = gguf_weights.GUESSED_LAYERS, ()
    try:
        for layers in (25, 26, 27, 28):
            sized = dataclasses.replace(config, layers=layers)
            try:
                logits(LlamaCppEngine(), sized, random_weights(sized, 0), chain(TOKENS[:2]))
                outcome[layers] = "loads"
            except EngineError:
                outcome[layers] = "is not loaded"
    finally:
        gguf_weights.GUESSED_LAYERS = kept
    lines = [f"{layers} layers with q_lora_rank 20: {what}" for layers, what in outcome.items()]
    return outcome[25] == outcome[28] == "loads" and outcome[26] == outcome[27] == "is not loaded", lines


# transformers


def eager_adds_a_boolean_mask() -> tuple[bool, list[str]]:
    import torch

    from impls.peers.transformers_engine import build

    config = _for_transformers()
    weights = random_weights(config, 0)
    parents = np.array([-1, 0, 0, 1], np.int32)
    visible = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], np.bool_)
    depth = np.array([0, 1, 1, 2], np.int32)
    due = golden(config, weights, Rows(np.zeros(4, np.int32), TOKENS[:4], depth, parents))
    errors = {}
    for attention in ("eager", "sdpa"):
        with torch.no_grad():
            out = build(config, weights.__getitem__, attention)(
                torch.from_numpy(TOKENS[:4].astype(np.int64))[None], attention_mask=torch.from_numpy(visible)[None, None],
                position_ids=torch.from_numpy(depth.astype(np.int64))[None],
            )  # fmt: skip
        errors[attention] = error(out.logits[0].numpy(), due)
    return errors["eager"] > ROUNDING > errors["sdpa"], [
        f"a tree of 4 tokens, boolean 4-D mask: logit error {errors['sdpa']:.1e} with sdpa, {errors['eager']:.2g} with eager (no token is hidden, +1 on each seen one)"
    ]


def v2_never_renormalises() -> tuple[bool, list[str]]:
    import torch

    from impls.peers.transformers_engine import build

    plain = _for_transformers(scoring="softmax", norm_top_k=False, group_score="max")
    weights = random_weights(plain, 0)
    model = build(plain, weights.__getitem__)
    model.config.norm_topk_prob = True
    again = type(model)(model.config).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        found = again(torch.from_numpy(TOKENS.astype(np.int64))[None]).logits[0].numpy()
    rows = chain(TOKENS)
    wrong = error(found, golden(dataclasses.replace(plain, norm_top_k=True), weights, rows))
    other = error(found, golden(plain, weights, rows))
    return wrong > ROUNDING > other, [
        f"DeepseekV2Config(norm_topk_prob=True): logit error {wrong:.2g}; against norm_topk_prob=False: {other:.1e}"
    ]


def gap_in_positions_hides_the_prefix() -> tuple[bool, list[str]]:
    import torch

    from impls.peers.transformers_engine import build

    config = _for_transformers()
    weights = random_weights(config, 0)
    position = np.array([0, 1, 2, 10, 11, 12], np.int32)
    due = golden(config, weights, Rows(np.zeros(6, np.int32), TOKENS[:6], position, np.arange(-1, 5, dtype=np.int32)))
    model = build(config, weights.__getitem__, "sdpa")
    errors = {}
    for use_cache in (True, False):
        with torch.no_grad():
            out = model(
                torch.from_numpy(TOKENS[:6].astype(np.int64))[None],
                position_ids=torch.from_numpy(position.astype(np.int64))[None],
                use_cache=use_cache,
            )
        errors[use_cache] = error(out.logits[0].numpy(), due)
    return errors[False] > ROUNDING > errors[True], [
        f"positions 0 1 2 10 11 12, no mask: logit error {errors[True]:.1e} with use_cache=True, {errors[False]:.2g} with use_cache=False"
    ]


def double_is_not_float64() -> tuple[bool, list[str]]:
    import torch

    from impls.peers.transformers_engine import build

    config = _for_transformers()
    norm = build(config, random_weights(config, 0).__getitem__).double().model.norm
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((4, config.hidden)))
    with torch.no_grad():
        found = norm(x)
        due = norm.weight * (x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt())
    wrong = float(((found - due) / due).abs().max())
    return wrong > 2.0**-40, [f"DeepseekV3RMSNorm after .double(), {found.dtype}: relative error {wrong:.1e}, float64 rounds at 1.1e-16"]


def latent_norms_ignore_the_eps() -> tuple[bool, list[str]]:
    from impls.peers import transformers_engine as engine

    config = _for_transformers(rms_eps=1e-3)
    weights = random_weights(config, 0)
    rows = chain(TOKENS)
    found = logits(engine.TransformersEngine(), config, weights, rows)
    wrong = error(found, golden(dataclasses.replace(config, latent_eps=None), weights, rows))
    other = error(found, golden(config, weights, rows))
    return wrong > ROUNDING > other, [f"rms_norm_eps 1e-3: logit error {wrong:.1e}; with 1e-6 in the norms of both latents: {other:.1e}"]


def float32_angles(open_engine: Callable[[], Engine], config: Config) -> tuple[bool, list[str]]:
    weights = random_weights(config, 0)
    lines, errors = [], []
    for position in (0, 4096, 32768, 131072):
        rows = chain(TOKENS, position)
        errors.append(error(logits(open_engine(), config, weights, rows), golden(config, weights, rows)))
        lines.append(f"position {position}: logit error {errors[-1]:.1e}")
    return errors[0] < ROUNDING < errors[-1], lines


LONG: dict[str, Any] = {
    "rope_dim": 64,
    "rope_theta": 50000.0,
    "yarn": Yarn(64.0, 4096, 32.0, 1.0, 1.0, 1.0),
}  # the rotary part of Kimi-K2.5


def llama_float32_angles() -> tuple[bool, list[str]]:
    from impls.peers.llamacpp_engine import LlamaCppEngine

    return float32_angles(LlamaCppEngine, _for_llama(**LONG))


def transformers_float32_angles() -> tuple[bool, list[str]]:
    from impls.peers.transformers_engine import TransformersEngine

    return float32_angles(TransformersEngine, _for_transformers(**LONG))


# mlx-lm


def mlx_one_expert_is_not_renormalised() -> tuple[bool, list[str]]:
    from impls.peers.mlx_engine import MlxEngine

    config = _for_mlx(top_k=1, norm_top_k=False)
    weights, rows = random_weights(config, 0), chain(TOKENS)
    found = logits(_mlx_with(MlxEngine(), norm_topk_prob=True), config, weights, rows)
    wrong, other = (
        error(found, golden(dataclasses.replace(config, norm_top_k=True), weights, rows)),
        error(found, golden(config, weights, rows)),
    )
    return wrong > ROUNDING > other, [
        f"num_experts_per_tok = 1, norm_topk_prob = true: logit error {wrong:.2g}; against norm_topk_prob = false: {other:.1e}"
    ]


def mlx_scoring_function_is_ignored() -> tuple[bool, list[str]]:
    from impls.peers.mlx_engine import MlxEngine

    config = _for_mlx()
    weights, rows = dict(random_weights(config, 0)), chain(TOKENS)
    weights["1.router_bias"] = np.zeros_like(weights["1.router_bias"])
    found = logits(_mlx_with(MlxEngine(), scoring_func="softmax"), config, weights, rows)
    wrong, other = (
        error(found, golden(dataclasses.replace(config, scoring="softmax"), weights, rows)),
        error(found, golden(config, weights, rows)),
    )
    return wrong > ROUNDING > other, [f'scoring_func = "softmax": logit error {wrong:.2g}; against "sigmoid": {other:.1e}']


def mlx_dropped_groups_beat_negative_choices() -> tuple[bool, list[str]]:
    from impls.peers.mlx_engine import MlxEngine

    config = _for_mlx(groups=4, top_groups=2, group_fill="zero")
    weights, rows = dict(random_weights(config, 0)), chain(TOKENS)
    weights["1.router_bias"] = weights["1.router_bias"] - np.float32(2)  # every choice is negative
    found = _tapped(MlxEngine(), config, weights, rows, "expert_ids")
    group = np.sort(found // (config.experts // config.groups), -1)
    due = _golden_tap(dataclasses.replace(config, group_fill="-inf"), weights, rows, "expert_ids")
    differ = int((np.sort(found, -1) != np.sort(due, -1)).any(-1).sum())
    wrong = error(logits(MlxEngine(), config, weights, rows), golden(dataclasses.replace(config, group_fill="-inf"), weights, rows))
    return differ == len(rows) and wrong > ROUNDING, [
        f"4 groups, 2 kept, correction bias of mean -2: {differ} of {len(rows)} tokens go to other experts, logit error {wrong:.2g}; row 0 chooses groups {group[0].tolist()}"
    ]


def mlx_quantised_cache_raises() -> tuple[bool, list[str]]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from impls.peers.mlx_engine import build

    config = _for_mlx(kv_rank=32, rope_dim=32)
    model = build(config, random_weights(config, 0).__getitem__)

    def tokens(**options: Any) -> str:
        try:
            return str([int(token) for token, _ in generate_step(mx.array(TOKENS[:6]), model, max_tokens=4, **options)])
        except AttributeError as problem:
            return f"AttributeError: {problem}"

    plain, quantised = tokens(), tokens(kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    return quantised.startswith("AttributeError") and plain.startswith("["), [
        f"generate_step without kv_bits: {plain}",
        f"generate_step with kv_bits = 8: {quantised}",
    ]


def _mlx_with(engine: Engine, **changes: Any) -> Engine:
    """The engine with other arguments of the model than the configuration says, as a config.json would bring them."""
    from mlx_lm.models import deepseek_v3

    module: Any = importlib.import_module("impls.peers.mlx_engine")

    class Changed:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def open(self, config: Config, weights: Any) -> Any:
            plain = deepseek_v3.ModelArgs
            module.deepseek_v3.ModelArgs = lambda **given: plain(**(given | changes))
            try:
                return engine.open(config, weights)
            finally:
                module.deepseek_v3.ModelArgs = plain

    changed: Any = Changed()
    return changed  # type: ignore[no-any-return]


# Helpers


def _for_mlx(**changes: Any) -> Config:
    return preset("tiny", **({"latent_eps": 1e-6, "denominator_eps": 0.0} | changes))


def _for_llama(**changes: Any) -> Config:
    from impls.peers.gguf_weights import CLAMP

    return preset("tiny", **({"denominator_clamp": CLAMP} | changes))


def _for_transformers(**changes: Any) -> Config:
    return preset("tiny", **({"rms_eps": 1e-6, "latent_eps": 1e-6} | changes))


def _tapped(engine: Engine, config: Config, weights: Weights, rows: Rows, name: str) -> Float:
    """The tap of the last layer."""
    caught: dict[int, Float] = {}
    session = engine.open(config, weights.__getitem__)
    session.forward(
        rows, np.ones(len(rows), np.bool_), frozenset({name}), lambda tap, layer, array: caught.__setitem__(layer, array.copy())
    )
    session.close()
    return caught[max(caught)]


def _golden_tap(config: Config, weights: Weights, rows: Rows, name: str) -> Float:
    caught: dict[int, Float] = {}
    session = GoldenModel(config, weights).open()
    session.forward(
        rows, np.ones(len(rows), np.bool_), frozenset({name}), lambda tap, layer, array: caught.__setitem__(layer, array.copy())
    )
    return caught[max(caught)]


LLAMA, HUGGING_FACE, MLX = ("xllamacpp", "gguf"), ("torch", "transformers"), ("mlx", "mlx_lm")
FOUND: dict[str, Finding] = {
    "llama-flash-attention": Finding(
        LLAMA, "flash attention casts a float32 cache to float16, and overflows at 65504", flash_attention_halves_the_cache
    ),
    "llama-yarn-betas": Finding(
        LLAMA, "yarn_beta_fast and yarn_beta_slow of a deepseek2 GGUF are ignored", yarn_betas_of_the_file_are_ignored
    ),
    "llama-weight-clamp": Finding(
        LLAMA, "expert weights are not renormalised where their scores sum to less than 6.1e-5", expert_weights_are_clamped
    ),
    "llama-group-max": Finding(LLAMA, "softmax gating with groups ranks groups by their two best", groups_by_maximum_are_ranked_by_sums),
    "llama-group-abort": Finding(
        LLAMA, "a GGUF whose groups are all kept, or hold one expert, aborts the process", group_counts_abort_the_loader
    ),
    "llama-lite-layers": Finding(LLAMA, "a model of 26 or 27 layers with q_lora is not loaded", lite_by_layer_count),
    "llama-long-positions": Finding(LLAMA, "rotary angles by repeated float32 products", llama_float32_angles),
    "transformers-bool-mask": Finding(HUGGING_FACE, "eager attention adds a boolean 4-D mask as numbers", eager_adds_a_boolean_mask),
    "transformers-v2-norm": Finding(HUGGING_FACE, "DeepseekV2 reads norm_topk_prob and never renormalises", v2_never_renormalises),
    "transformers-position-gap": Finding(
        HUGGING_FACE, "a gap in position_ids hides the tokens before it, if no cache is used", gap_in_positions_hides_the_prefix
    ),
    "transformers-double": Finding(HUGGING_FACE, "a model after .double() still computes norms in float32", double_is_not_float64),
    "transformers-latent-eps": Finding(HUGGING_FACE, "the norms of the latents ignore rms_norm_eps", latent_norms_ignore_the_eps),
    "transformers-long-positions": Finding(HUGGING_FACE, "rotary angles in float32", transformers_float32_angles),
    "mlx-top-1": Finding(MLX, "the weight of one chosen expert is not renormalised", mlx_one_expert_is_not_renormalised),
    "mlx-scoring-func": Finding(MLX, "scoring_func is read and ignored", mlx_scoring_function_is_ignored),
    "mlx-kv-bits": Finding(MLX, "a quantised key-value cache raises AttributeError", mlx_quantised_cache_raises),
    "mlx-group-fill": Finding(MLX, "dropped groups count as 0 and beat negative choices", mlx_dropped_groups_beat_negative_choices),
}


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in FOUND:
        print(f"python -m impls.peers.found NAME, one of: {', '.join(FOUND)}")
        return 2
    finding = FOUND[arguments[0]]
    missing = [package for package in finding.packages if importlib.util.find_spec(package) is None]
    if missing:
        print(f"{', '.join(missing)} not installed: pip install 'paritree[peers]'")
        return 3
    there, lines = finding.run()
    from importlib.metadata import version

    print(f"{arguments[0]}: {finding.title}")
    print(", ".join(f"{package} {version(package.replace('_', '-'))}" for package in finding.packages))
    print("\n".join(lines))
    print("reproduced" if there else "gone: the package does what it should")
    return 0 if there else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
