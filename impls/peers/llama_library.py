"""The C API of llama.cpp inside the xllamacpp wheel, by ctypes: structures, prototypes, and a check that they belong to this build.

The layouts are those of one build; nothing in the library tells its version of them. A structure that is one field too short still reads
its first fields right, so `load` compares the defaults of *every* end, the booleans above all, before anything is opened.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGE = "xllamacpp"
TYPE_F32, TYPE_F16, TYPE_Q8_0, TYPE_I32, TYPE_I64 = 0, 1, 8, 26, 27
FLASH_AUTO, FLASH_OFF, FLASH_ON = -1, 0, 1
DIMENSIONS = 4  # of a ggml tensor
NAME_BYTES = 64


class LibraryMismatch(RuntimeError):
    """The library does not have the layout that this file was written for."""


def _structure(name: str, text: str) -> Any:
    """'i:a,b p:c' -> a ctypes structure with int32 a, int32 b, pointer c."""
    kinds: dict[str, Any] = {
        "i": c.c_int32, "u": c.c_uint32, "f": c.c_float, "p": c.c_void_p, "b": c.c_bool, "z": c.c_size_t,
        "I": c.POINTER(c.c_int32), "J": c.POINTER(c.POINTER(c.c_int32)), "B": c.POINTER(c.c_int8),
    }  # fmt: skip
    fields = [(field, kinds[kind]) for kind, fields in (part.split(":") for part in text.split()) for field in fields.split(",")]
    return type(name, (c.Structure,), {"_fields_": fields})


ModelParams: Any = _structure(
    "ModelParams",
    "p:devices,buffer_overrides i:gpu_layers,split_mode,load_mode,lazy_mode,main_gpu p:tensor_split,progress,progress_data,kv_overrides "
    "b:vocab_only,check_tensors,extra_buffers,no_host,no_alloc,load_mtp",
)
ContextParams: Any = _structure(
    "ContextParams",
    "u:n_ctx,n_batch,n_ubatch,n_seq_max,n_rs_seq,n_outputs_max,n_outputs_max_per_seq "
    "i:n_threads,n_threads_batch,ctx_type,rope_scaling,pooling,attention,flash_attention "
    "f:rope_base,rope_scale,yarn_ext,yarn_attn,yarn_beta_fast,yarn_beta_slow u:yarn_orig f:defrag "
    "p:eval_callback,eval_data i:type_k,type_v p:abort,abort_data,unnamed "
    "b:embeddings,offload_kqv,no_perf,op_offload,swa_full,kv_unified p:samplers z:n_samplers p:other",
)
Batch: Any = _structure("Batch", "i:n_tokens I:token p:embedding I:pos,n_seq_id J:seq_id B:logits")


class Tensor(c.Structure):
    """ggml_tensor up to its name."""

    _fields_ = [
        ("type", c.c_int32), ("buffer", c.c_void_p), ("ne", c.c_int64 * DIMENSIONS), ("nb", c.c_size_t * DIMENSIONS), ("op", c.c_int32),
        ("op_params", c.c_int32 * 16), ("flags", c.c_int32), ("src", c.c_void_p * 10), ("view_src", c.c_void_p), ("view_offs", c.c_size_t),
        ("data", c.c_void_p), ("name", c.c_char * NAME_BYTES),
    ]  # fmt: skip


EvalCallback = c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)
_LogCallback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)

_PROTOTYPES: tuple[tuple[str, Any, list[Any]], ...] = (
    ("llama_model_default_params", ModelParams, []),
    ("llama_context_default_params", ContextParams, []),
    ("llama_model_load_from_file", c.c_void_p, [c.c_char_p, ModelParams]),
    ("llama_init_from_model", c.c_void_p, [c.c_void_p, ContextParams]),
    ("llama_batch_init", Batch, [c.c_int32] * 3),
    ("llama_batch_free", None, [Batch]),
    ("llama_decode", c.c_int32, [c.c_void_p, Batch]),
    ("llama_get_logits_ith", c.POINTER(c.c_float), [c.c_void_p, c.c_int32]),
    ("llama_get_memory", c.c_void_p, [c.c_void_p]),
    ("llama_memory_clear", None, [c.c_void_p, c.c_bool]),
    ("llama_memory_seq_rm", c.c_bool, [c.c_void_p, c.c_int32, c.c_int32, c.c_int32]),
    ("llama_memory_seq_cp", None, [c.c_void_p, c.c_int32, c.c_int32, c.c_int32, c.c_int32]),
    ("llama_memory_seq_pos_max", c.c_int32, [c.c_void_p, c.c_int32]),
    ("llama_free", None, [c.c_void_p]),
    ("llama_model_free", None, [c.c_void_p]),
    ("ggml_op_name", c.c_char_p, [c.c_int]),
    ("ggml_get_name", c.c_char_p, [c.c_void_p]),
    ("ggml_nbytes", c.c_size_t, [c.c_void_p]),
)


def unavailable() -> str:
    """Empty, or which package is missing."""
    missing = [name for name in (PACKAGE, "gguf") if importlib.util.find_spec(name) is None]
    return f"pip install {' '.join(missing)}" if missing else ""


def package_version() -> str:
    return version(PACKAGE)


@cache
def load() -> Any:
    """The library, with prototypes, silent. Raises LibraryMismatch where the defaults do not read back."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise LibraryMismatch(f"{PACKAGE} is not installed: pip install {PACKAGE} gguf")
    library: Any = c.CDLL(str(next(Path(spec.origin).parent.glob(f"{PACKAGE}*.so"))))
    for name, result, arguments in _PROTOTYPES:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.silence = _LogCallback(lambda level, text, data: None)  # the library object keeps it alive
    library.llama_log_set(library.silence, None)
    library.llama_backend_init()
    _check_defaults(library)
    return library


def _check_defaults(library: Any) -> None:
    """A shifted field shows in the defaults, most of all in the booleans behind the pointers."""
    context, model = library.llama_context_default_params(), library.llama_model_default_params()
    expected: tuple[tuple[Any, dict[str, Any]], ...] = (
        (context, {
            "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0, "type_k": TYPE_F16,
            "type_v": TYPE_F16, "flash_attention": FLASH_AUTO, "embeddings": False, "offload_kqv": True, "no_perf": True, "op_offload": True,
            "swa_full": True, "kv_unified": False, "eval_callback": None, "abort": None,
        }),
        (model, {"vocab_only": False, "check_tensors": False, "extra_buffers": True, "no_host": False, "no_alloc": False}),
    )  # fmt: skip
    for structure, defaults in expected:
        for field, due in defaults.items():
            found = getattr(structure, field)
            if found != due:
                kind = type(structure).__name__
                raise LibraryMismatch(
                    f"{PACKAGE} {package_version()}: the default of {kind}.{field} reads as {found!r}, should be {due!r}; "
                    "this build has another layout: compare its llama.h with impls/peers/llama_library.py"
                )
