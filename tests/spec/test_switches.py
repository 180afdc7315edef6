"""Switches: the page that lists them, what crosses the C ABI, and presets of real models with the derived figures that are published."""

from __future__ import annotations

import dataclasses
import math

import pytest

from spec import switches
from spec.config import LATER, MODELS, PRESETS, SWITCHES, ConfigError, as_parameters, preset, unfamiliar_switches
from spec.weights import is_large, layer_shapes


def test_the_page_is_up_to_date() -> None:
    assert switches.PAGE.read_text("utf-8") == switches.page(), "run `python -m spec.switches --write`"


def test_a_switch_is_sent_where_it_says_something() -> None:
    sent = as_parameters(preset("tiny"))
    assert not {"window", "cache_format", "group_fill_zero", "attention_bias", "rope_table_len", "denominator_clamp"} & set(sent)
    other = as_parameters(preset("tiny", window=5, cache_format="float16", group_fill="zero", attention_bias=True, denominator_clamp=0.5))
    new = {name: value for name, value in other.items() if name not in sent}
    assert new == {"window": 5, "cache_format": 2, "group_fill_zero": 1, "attention_bias": 1, "denominator_clamp": 0.5}


def test_switches_that_an_engine_would_ignore_are_named() -> None:
    config = preset("tiny", window=3, tied=True)
    assert unfamiliar_switches(config, frozenset({"tied"})) == ["window"]
    assert unfamiliar_switches(preset("tiny"), frozenset()) == []


@pytest.mark.parametrize(("name", "value"), [("group_fill", "none"), ("cache_format", "fp8"), ("window", -1), ("rope_table_len", -2)])
def test_a_value_that_does_not_exist_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is"):
        preset("tiny", **{name: value})


def test_later_switches_are_switches() -> None:
    assert set(LATER) <= set(SWITCHES)
    assert all(field.default == getattr(PRESETS["tiny"], name) for name, field in SWITCHES.items())


# (attention, MoE layer) in millions of parameters, and the softmax scale, as derived independently from the published configurations
FIGURES = {
    "kimi-k2": (101.1, 16960, 0.130861),
    "kimi-k2.5": (101.1, 16960, 0.144680),
    "deepseek-v3": (187.1, 11320, 0.135234),
}


@pytest.mark.parametrize("name", FIGURES)
def test_presets_of_real_models_have_the_published_sizes(name: str) -> None:
    config = MODELS[name]
    attention, sparse, scale = FIGURES[name]
    sizes = {tensor: math.prod(shape) for tensor, shape in layer_shapes(config, config.layers - 1).items()}
    own = ("q_a", "q_b", "kv_a", "w_kc", "w_vc", "o")
    assert sum(sizes[tensor] for tensor in own) / 1e6 == pytest.approx(attention, abs=0.05)  # the figures have four digits
    experts = sum(size for tensor, size in sizes.items() if tensor.startswith(("expert_", "shared_", "router")))
    assert experts / 1e6 == pytest.approx(sparse, rel=5e-4)
    assert config.softmax_scale == pytest.approx(scale, abs=5e-7)


def test_layers_in_full_width_differ_from_their_model_in_depth_and_vocabulary_only() -> None:
    for name, of, first_dense in (
        ("kimi-k2-layer", "kimi-k2", 0),
        ("kimi-k2.5-dense-layer", "kimi-k2.5", 1),
        ("deepseek-v3-layer", "deepseek-v3", 0),
    ):
        assert MODELS[name] == dataclasses.replace(MODELS[of], vocab=258, layers=1, first_dense=first_dense)
        assert is_large(MODELS[name]) and not is_large(preset(f"{of}-tiny"))
