"""Checkpoints in Hugging Face layout: the round trip is exact, and every fault of a user's folder is one clear message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from impls.checkpoint import Checkpoint, CheckpointError, config_json, read_config, write_checkpoint
from impls.tensorfile import TensorFile
from spec.config import PRESETS, Config, preset
from spec.weights import WeightError, random_weights, weight_shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("checkpoint")
    config = preset("tiny")
    weights = random_weights(config, 5)
    write_checkpoint(target, config, weights.__getitem__, shard_bytes=40_000)
    return target


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_tensor_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = preset(name)
    weights = random_weights(config, 1)
    write_checkpoint(tmp_path, config, weights.__getitem__)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config == config
    for tensor in weight_shapes(config):
        value = checkpoint.tensor(tensor)
        assert value.dtype == np.float32 and value.flags.c_contiguous
        np.testing.assert_array_equal(value, weights[tensor], err_msg=tensor)


def test_shards_and_index_are_written_and_read(folder: Path) -> None:
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    weights = random_weights(preset("tiny"), 5)
    np.testing.assert_array_equal(Checkpoint(folder).tensor("1.expert_down"), weights["1.expert_down"])


def test_kv_b_is_split_per_head_and_not_all_keys_first(folder: Path) -> None:
    config = preset("tiny")
    joint = Checkpoint(folder)._read(
        "model.layers.0.self_attn.kv_b_proj.weight", (config.heads * (config.nope_dim + config.v_dim), config.kv_rank)
    )
    second_head = joint[config.nope_dim + config.v_dim :]
    np.testing.assert_array_equal(Checkpoint(folder).tensor("0.w_kc")[1], second_head[: config.nope_dim])
    np.testing.assert_array_equal(Checkpoint(folder).tensor("0.w_vc")[1].T, second_head[config.nope_dim : config.nope_dim + config.v_dim])


def test_a_missing_tensor_is_named(copy: Path) -> None:
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    shard = copy / index["weight_map"].pop(name)
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    _rewrite(shard, drop=name)
    with pytest.raises(WeightError, match=r"experts\.3\.up_proj\.weight' is missing; expected \[24, 48\]"):
        Checkpoint(copy).tensor("1.expert_up")


def test_a_misshapen_tensor_is_named_with_both_shapes(copy: Path) -> None:
    data = json.loads((copy / "config.json").read_text())
    data["qk_rope_head_dim"] = 10
    (copy / "config.json").write_text(json.dumps(data))
    with pytest.raises(WeightError, match=r"q_b_proj\.weight' has shape \[60, 20\], but config.json needs \[66, 20\]"):
        Checkpoint(copy).tensor("0.q_b")


def test_a_truncated_shard_is_named(copy: Path) -> None:
    shard = sorted(copy.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{shard.name}: tensor '.*' ends at byte \d+, but the file has \d+: it was cut"):
        Checkpoint(copy)


def test_half_a_header_is_named(copy: Path) -> None:
    shard = sorted(copy.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="it was cut, or is no safetensors file"):
        Checkpoint(copy)


def test_a_duplicate_tensor_is_named(copy: Path) -> None:
    first, *_, last = sorted(copy.glob("model-*.safetensors"))
    _rewrite(last, add={"model.embed_tokens.weight": TensorFile(first).float32("model.embed_tokens.weight")})
    with pytest.raises(CheckpointError, match="'model.embed_tokens.weight' is both in"):
        Checkpoint(copy)


def test_a_tensor_that_the_config_does_not_explain_is_refused(copy: Path) -> None:
    last = sorted(copy.glob("model-*.safetensors"))[-1]
    _rewrite(last, add={"model.layers.0.self_attn.q_a_proj.bias": np.zeros(20, np.float32)})
    with pytest.raises(CheckpointError, match=r"q_a_proj\.bias' is not explained by config\.json"):
        Checkpoint(copy)


def test_a_not_finite_weight_is_named_with_its_place(copy: Path) -> None:
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    name = "model.layers.0.mlp.down_proj.weight"
    shard = copy / index["weight_map"][name]
    value = TensorFile(shard).float32(name).copy()
    value[2, 5] = np.nan
    _rewrite(shard, add={name: value})
    with pytest.raises(WeightError, match=r"down_proj\.weight' is nan at \[2, 5\]"):
        Checkpoint(copy).tensor("0.down")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "lacks 'vocab_size'"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"type": "llama3"}}, "rope type is 'llama3'"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn section lacks 'factor'"),
        ({"num_experts_per_tok": 99}, "top_k is 99"),
        ({"hidden_size": "48"}, r"config\.json: hidden_size is '48', but must be a whole number"),
        ({"n_group": True}, "n_group is True"),
    ],
)
def test_a_wrong_config_is_explained(copy: Path, change: dict[str, object], message: str) -> None:
    data = {k: v for k, v in (json.loads((copy / "config.json").read_text()) | change).items() if v is not None or k not in change}
    (copy / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(copy)


def test_a_folder_without_a_checkpoint_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json(preset("tiny"))))
    with pytest.raises(CheckpointError, match="holds neither"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        Checkpoint(tmp_path)


def test_bfloat16_and_float16_are_read_exactly(tmp_path: Path) -> None:
    import struct

    header = {
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "h": {"dtype": "F16", "shape": [2], "data_offsets": [4, 8]},
    }
    text = json.dumps(header).encode()
    body = struct.pack("<HH", 0x3FC0, 0xC049) + np.array([0.1, -2.0], np.float16).tobytes()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    file = TensorFile(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(file.float32("b"), np.array([1.5, -3.140625], np.float32))
    np.testing.assert_array_equal(file.float32("h"), np.array([0.1, -2.0], np.float16).astype(np.float32))


def test_config_survives_the_round_trip(tmp_path: Path) -> None:
    for config in PRESETS.values():
        (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
        found: Config = read_config(tmp_path / "config.json")
        assert found == config


def _rewrite(shard: Path, *, drop: str = "", add: dict[str, np.ndarray] | None = None) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = {k: v for k, v in load_file(shard).items() if k != drop} | (add or {})
    save_file(tensors, shard)
