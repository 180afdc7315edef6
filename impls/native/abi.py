"""The structs and functions of include/paritree.h as ctypes sees them. Layouts only; what they mean is in the header."""

from __future__ import annotations

import ctypes
import struct
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)

ABI_VERSION = 1
OK, UNSUPPORTED, INVALID, FAILED = 0, 1, 2, 3
CPU = 1  # DLDevice.device_type


class Device(Structure):
    _fields_ = (("device_type", c_int32), ("device_id", c_int32))


class DataType(Structure):
    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class Tensor(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device", Device),
        ("ndim", c_int32),
        ("dtype", DataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class Value(Union):
    _fields_ = (("i", c_int64), ("d", c_double))


class Param(Structure):
    _fields_ = (("key", c_char_p), ("kind", c_int32), ("reserved", c_int32), ("value", Value))


class Params(Structure):
    _fields_ = (("items", POINTER(Param)), ("count", c_int64))


class NamedTensor(Structure):
    _fields_ = (("name", c_char_p), ("tensor", Tensor))


class DescriptionStruct(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("name", c_char_p),
        ("version", c_char_p),
        ("profile_name", c_char_p),
        ("profile", Params),
        ("capabilities", c_char_p),
        ("ops", c_char_p),
        ("taps", c_char_p),
    )


class OpCall(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("synchronised", c_int32),
        ("op", c_char_p),
        ("inputs", POINTER(NamedTensor)),
        ("input_count", c_int64),
        ("params", Params),
        ("outputs", POINTER(NamedTensor)),
        ("output_count", c_int64),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
        ("device", Device),
        ("stream", c_void_p),
    )


WeightFn = CFUNCTYPE(c_int32, c_void_p, c_char_p, POINTER(Tensor))


class OpenArgs(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("config", Params),
        ("weight", WeightFn),
        ("weight_user", c_void_p),
        ("weights_path", c_char_p),
        ("device", Device),
        ("stream", c_void_p),
    )


class Tap(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("layer", c_int32),
        ("name", c_char_p),
        ("tensor", Tensor),
        ("handoff", c_int32),
        ("partial_sum", c_int32),
        ("shard_axis", c_int32),
        ("shard_reserved", c_int32),
        ("shard_start", c_int64),
        ("shard_of", c_int64),
    )


# Tap in one unpacking, because a forward pass with all taps pushes a hundred of them: struct_size, layer, name, data,
# device_type, device_id, ndim, code, bits, lanes, shape, strides, byte_offset, handoff, partial_sum, shard_axis, _, start, of
TAP_LAYOUT = struct.Struct("@IiPPiiiBBHPPQiiiiqq")
assert TAP_LAYOUT.size == ctypes.sizeof(Tap)

TapFn = CFUNCTYPE(c_int32, c_void_p, c_void_p)  # the second is a Tap*


class ForwardArgs(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("synchronised", c_int32),
        ("row_count", c_int64),
        ("sequence", c_void_p),
        ("token", c_void_p),
        ("position", c_void_p),
        ("parent", c_void_p),
        ("want_logits", c_void_p),
        ("logits", POINTER(Tensor)),
        ("taps", c_char_p),
        ("tap", TapFn),
        ("tap_user", c_void_p),
        ("first_layer", c_int64),
        ("hidden", POINTER(Tensor)),
        ("stream", c_void_p),
    )


class Emission(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("sequence", c_int32),
        ("tokens", POINTER(c_int32)),
        ("token_count", c_int64),
        ("node_tokens", POINTER(c_int32)),
        ("node_parents", POINTER(c_int32)),
        ("node_count", c_int64),
        ("path", POINTER(c_int32)),
        ("path_count", c_int64),
        ("bonus", c_int32),
        ("reserved", c_int32),
    )


DraftFn = CFUNCTYPE(c_int32, c_void_p, c_int32, POINTER(c_int32), c_int64, POINTER(c_float))
EmitFn = CFUNCTYPE(c_int32, c_void_p, POINTER(Emission))


class GenerateArgs(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("prompt_count", c_int64),
        ("prompts", POINTER(c_void_p)),
        ("prompt_lengths", POINTER(c_int64)),
        ("draft", DraftFn),
        ("draft_user", c_void_p),
        ("block_len", c_int64),
        ("budget", c_int64),
        ("max_new", c_int64),
        ("stop_tokens", c_void_p),
        ("stop_count", c_int64),
        ("emit", EmitFn),
        ("emit_user", c_void_p),
        ("stream", c_void_p),
        ("sampling", Params),
    )


REQUIRED = ("paritree_abi_version", "paritree_describe")
SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "paritree_abi_version": (c_int32, ()),
    "paritree_describe": (c_int32, (POINTER(DescriptionStruct),)),
    "paritree_last_error": (c_char_p, ()),
    "paritree_run_op": (c_int32, (POINTER(OpCall),)),
    "paritree_run_op_workspace": (c_int32, (POINTER(OpCall), POINTER(c_uint64))),
    "paritree_open": (c_int32, (POINTER(OpenArgs), POINTER(c_void_p))),
    "paritree_close": (None, (c_void_p,)),
    "paritree_forward": (c_int32, (c_void_p, POINTER(ForwardArgs))),
    "paritree_commit": (c_int32, (c_void_p, c_int32, c_void_p, c_int64)),
    "paritree_cache_rows": (c_int32, (c_void_p, c_int32, c_int64, POINTER(Tensor), POINTER(c_int64))),
    "paritree_evict": (c_int32, (c_void_p, c_int32)),
    "paritree_fork": (c_int32, (c_void_p, c_int32, c_int32)),
    "paritree_free_slots": (c_int32, (c_void_p, POINTER(c_int64))),
    "paritree_generate": (c_int32, (c_void_p, POINTER(GenerateArgs))),
}
CAPABILITY_SYMBOLS = {
    "run_op": ("paritree_run_op",),
    "forward": ("paritree_open", "paritree_forward"),
    "taps": ("paritree_forward",),
    "commit": ("paritree_commit",),
    "cache_rows": ("paritree_cache_rows",),
    "fork": ("paritree_fork",),
    "evict": ("paritree_evict",),
    "free_slots": ("paritree_free_slots",),
    "generate": ("paritree_open", "paritree_generate"),
    "generate_tree": ("paritree_open", "paritree_generate"),
    "sampling": ("paritree_open", "paritree_generate"),
}
