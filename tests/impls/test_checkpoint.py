"""Checkpoints in Hugging Face layout: the round trip is exact, and every fault of a user's folder is one clear message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from impls.checkpoint import Checkpoint, CheckpointError, config_json, read_config, write_checkpoint
from impls.tensorfile import TensorFile
from spec.config import PRESETS, Config, preset
from spec.formats import dequantised_fp8, dequantised_int4, quantised_fp8, quantised_int4, to_bfloat16, unpacked_int4
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
        ({"attention_bias": True, "q_lora_rank": None}, "attention_bias is true without q_lora_rank"),
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


# ---- how matrices are stored ----------------------------------------------------------------------------------------

GROUPS = preset("tiny", hidden=64, expert_dim=32, dense_dim=96)  # widths that int4 groups of 32 divide


def restored(folder: Path, change: Callable[[dict[str, np.ndarray]], None], dtypes: dict[str, str] | None = None) -> Path:
    """A checkpoint of GROUPS in one file, its tensors changed; `dtypes` names what NumPy has no type for."""
    write_checkpoint(folder, GROUPS, random_weights(GROUPS, 5).__getitem__)
    file = TensorFile(folder / "model.safetensors")
    tensors = {name: np.array(file.raw(name)) for name in file.entries}
    change(tensors)
    write_raw(folder / "model.safetensors", tensors, dtypes or {})
    return folder


def write_raw(path: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, str]) -> None:
    names = {"float32": "F32", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "BF16", "float16": "F16"}
    header, body = {}, b""
    for name, array in tensors.items():
        start, body = len(body), body + array.tobytes()
        header[name] = {"dtype": dtypes.get(name, names[array.dtype.name]), "shape": array.shape, "data_offsets": [start, len(body)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


EXPERT = "model.layers.1.mlp.experts.3.gate_proj.weight"


def as_int4(tensors: dict[str, np.ndarray]) -> None:
    """The expert as compressed-tensors packs it: [out, in / 8] words, value + 8 in each nibble, bfloat16 scales."""
    matrix = tensors.pop(EXPERT)  # (out,in)
    words, scales = quantised_int4(np.ascontiguousarray(matrix.T))
    nibbles = (unpacked_int4(words).T.astype(np.int64) + 8).reshape(len(matrix), -1, 8)
    packed = sum(nibbles[:, :, i] << 4 * i for i in range(8)).astype(np.uint32).view(np.int32)
    tensors |= {
        f"{EXPERT}_packed": packed,
        f"{EXPERT}_scale": to_bfloat16(np.ascontiguousarray(scales.T)),
        f"{EXPERT}_shape": np.array(matrix.shape, np.int64),
    }


def test_a_packed_int4_expert_is_read_exactly(tmp_path: Path) -> None:
    checkpoint = Checkpoint(restored(tmp_path, as_int4))
    matrix = random_weights(GROUPS, 5)["1.expert_gate"][3]
    np.testing.assert_array_equal(checkpoint.tensor("1.expert_gate/3"), dequantised_int4(*quantised_int4(matrix)))
    np.testing.assert_array_equal(checkpoint.tensor("1.expert_gate")[3], checkpoint.tensor("1.expert_gate/3"))


def test_an_fp8_matrix_is_the_rounded_product_of_value_and_block_scale(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_b_proj.weight"
    held: dict[str, np.ndarray] = {}

    def change(tensors: dict[str, np.ndarray]) -> None:
        bits, scales = quantised_fp8(tensors[name])
        tensors |= {name: bits, f"{name}_scale_inv": scales}
        held["value"] = dequantised_fp8(bits, scales).astype(np.float32)

    value = Checkpoint(restored(tmp_path, change, {name: "F8_E4M3"})).tensor("0.q_b")
    np.testing.assert_array_equal(value.T, held["value"])
    assert 0 < np.abs(value - random_weights(GROUPS, 5)["0.q_b"]).max() < 0.1


def test_fused_experts_are_sliced_gate_first(tmp_path: Path) -> None:
    def fuse(tensors: dict[str, np.ndarray]) -> None:
        at = "model.layers.1.mlp.experts."
        of = {p: np.stack([tensors.pop(f"{at}{e}.{p}_proj.weight") for e in range(GROUPS.experts)]) for p in ("gate", "up", "down")}
        tensors |= {at + "gate_up_proj": np.concatenate([of["gate"], of["up"]], 1), at + "down_proj": of["down"]}

    checkpoint, weights = Checkpoint(restored(tmp_path, fuse)), random_weights(GROUPS, 5)
    for stack in ("1.expert_gate", "1.expert_up", "1.expert_down"):
        np.testing.assert_array_equal(checkpoint.tensor(stack), weights[stack])
        np.testing.assert_array_equal(checkpoint.tensor(f"{stack}/7"), weights[stack][7])


def test_biases_and_the_prefix_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    config = preset("tiny", attention_bias=True)
    weights = random_weights(config, 5)
    write_checkpoint(tmp_path, config, weights.__getitem__)
    file = TensorFile(tmp_path / "model.safetensors")
    tensors = {f"language_model.{name}": np.array(file.raw(name)) for name in file.entries} | {
        "vision_tower.patch": np.zeros(2, np.float32)
    }
    write_raw(tmp_path / "model.safetensors", tensors, {})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config == config
    for name in ("0.q_a_bias", "1.kv_a_bias", "1.o_bias", "head"):
        np.testing.assert_array_equal(checkpoint.tensor(name), weights[name])


def _spoil(suffix: str, value: np.ndarray | None) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        as_int4(tensors)
        if value is None:
            del tensors[EXPERT + suffix]
        else:
            tensors[EXPERT + suffix] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_spoil("_scale", None), r"'model\.layers\.1\.mlp\.experts\.3\.gate_proj\.weight_scale' is missing; expected \[32, 2\]"),
        (_spoil("_shape", np.array([32, 65], np.int64)), r"weight_shape' says \[32, 65\], but config\.json needs \[32, 64\]"),
        (_spoil("_packed", np.zeros((32, 7), np.int32)), r"weight_packed' has shape \[32, 7\], but config\.json needs \[32, 8\]"),
        (_spoil("_scale", np.full((32, 2), np.nan, np.float32)), r"safetensors: tensor .*gate_proj\.weight' is nan at \[0, 0\]"),
        (_spoil("", np.zeros((32, 64), np.float32)), "stored plainly and packed as well"),
    ],
)
def test_a_fault_of_a_packed_expert_is_named(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        Checkpoint(restored(tmp_path, change)).tensor("1.expert_gate/3")


def test_an_fp8_matrix_without_its_scales_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_b_proj.weight"

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = quantised_fp8(tensors[name])[0]

    with pytest.raises(WeightError, match=r"q_b_proj\.weight_scale_inv' is missing; expected \[1, 1\]"):
        Checkpoint(restored(tmp_path, change, {name: "F8_E4M3"})).tensor("0.q_b")
