"""A stand-alone C++ program for a failing operation of a C ABI engine: for authors who debug with gdb and sanitizers, without Python.

Inputs are written as bit patterns, so the program feeds exactly the failing numbers. It declares the few structs of paritree.h that one
call needs (ABI 1) and loads the engine with dlopen.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.judgement import Judgement
from spec.script import OpCall

ELEMENTS_MAX = 20_000  # of all inputs; beyond it the source is too long to read, and repro.py serves

_HEAD = """// {title}
// c++ -std=c++20 repro.cpp -ldl -o repro && ./repro [engine.so]     exit 1: fails again, 0: does not, 4: the engine cannot be loaded
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <vector>

struct DLDevice {{ int32_t device_type, device_id; }};
struct DLDataType {{ uint8_t code, bits; uint16_t lanes; }};
struct DLTensor {{ void *data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t *shape, *strides; uint64_t byte_offset; }};
struct Param {{ const char *key; int32_t kind, reserved; union {{ int64_t i; double d; }} value; }};
struct Params {{ const Param *items; int64_t count; }};
struct NamedTensor {{ const char *name; DLTensor tensor; }};
struct OpCall {{
  uint32_t struct_size; int32_t synchronised; const char *op; const NamedTensor *inputs; int64_t input_count; Params params;
  const NamedTensor *outputs; int64_t output_count; void *workspace; uint64_t workspace_bytes; DLDevice device; void *stream;
}};

"""


def program(call: OpCall, judgement: Judgement, path: str) -> str:
    """The source; a comment that says why where the inputs are too large."""
    if sum(array.size for array in call.inputs.values()) > ELEMENTS_MAX:
        return f"// {call.op}: the inputs have more than {ELEMENTS_MAX} elements; use repro.py\n"
    lines = [_HEAD.format(title=" ".join(judgement.message.split()) or f"{judgement.verdict} in {call.op}")]
    for name, array in call.inputs.items():
        lines.append(_array(f"in_{name}", array))
    lines.append("int main(int argc, char **argv) {")
    lines.append(f"  const char *path = argc > 1 ? argv[1] : {_text(path)};")
    lines.append(_LOAD)
    for name, array in call.inputs.items():
        lines.append(f"  int64_t shape_{name}[] = {{{_joined(array.shape) or '0'}}};")
    for name, (shape, dtype) in call.outputs.items():
        word = "uint8_t" if dtype == "uint8" else "uint32_t"
        poison = "0xA5" if dtype == "uint8" else "0x7FC0DEADu" if dtype == "float32" else "0xFF895439u"
        lines.append(f"  int64_t shape_{name}[] = {{{_joined(shape) or '0'}}};")
        lines.append(f"  std::vector<{word}> out_{name}({max(1, math.prod(shape))}, {poison});")
    lines.append(
        "  NamedTensor inputs[] = {"
        + ", ".join(_tensor(name, f"in_{name}", a.ndim, str(a.dtype)) for name, a in call.inputs.items())
        + "};"
    )
    outputs = ", ".join(_tensor(name, f"out_{name}.data()", len(shape), dtype) for name, (shape, dtype) in call.outputs.items())
    lines.append(f"  NamedTensor outputs[] = {{{outputs}}};")
    params = ", ".join(_param(key, value) for key, value in call.params.items())
    lines.append(f"  Param params[{max(1, len(call.params))}] = {{{params}}};")
    lines.append(
        f"  OpCall call = {{sizeof(OpCall), 1, {_text(call.op)}, inputs, {len(call.inputs)}, {{params, {len(call.params)}}}, outputs, "
        f"{len(call.outputs)}, nullptr, 0, {{1, 0}}, nullptr}};"
    )
    lines.append(_RUN)
    lines.append(_comparison(call, judgement))
    lines.append("}\n")
    return "\n".join(lines)


_LOAD = """  void *library = dlopen(path, RTLD_NOW);
  if (!library) { std::fprintf(stderr, "the engine cannot be loaded: %s\\n", dlerror()); return 4; }
  auto run_op = reinterpret_cast<int32_t (*)(const OpCall *)>(dlsym(library, "paritree_run_op"));
  auto size_of = reinterpret_cast<int32_t (*)(const OpCall *, uint64_t *)>(dlsym(library, "paritree_run_op_workspace"));
  if (!run_op) { std::fprintf(stderr, "the engine cannot be loaded: it has no paritree_run_op\\n"); return 4; }"""

_RUN = """  uint64_t bytes = 0;
  if (size_of) size_of(&call, &bytes);
  std::vector<uint8_t> workspace(bytes + 64, 0xA5);
  call.workspace = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
  call.workspace_bytes = bytes;
  const int32_t status = run_op(&call);
  if (status) { std::printf("fails again: status %d\\n", status); return 1; }"""


def _comparison(call: OpCall, j: Judgement) -> str:
    if j.tap not in call.outputs or len(j.index) != len(call.outputs[j.tap][0]):
        return '  std::printf("does not fail: the engine answered\\n");\n  return 0;'
    shape, dtype = call.outputs[j.tap]
    flat = int(np.ravel_multi_index(j.index, shape)) if shape else 0
    kind = {"float32": "float", "int32": "int32_t", "uint8": "uint8_t"}[dtype]
    wrong = (
        f"!std::isfinite(found) || std::fabs(found - {j.expected!r}) > {j.bound!r}" if math.isfinite(j.expected) else "std::isfinite(found)"
    )
    return (
        f"  {kind} value;\n  std::memcpy(&value, reinterpret_cast<const {kind} *>(out_{j.tap}.data()) + {flat}, sizeof value);\n"
        f"  const double found = value;\n  const bool wrong = {wrong};\n"
        f'  std::printf("%s: {j.tap}[{_joined(j.index)}] is %.9g, but should be {j.expected!r} within {j.bound:.3g}\\n", '
        f'wrong ? "fails again" : "does not fail", found);\n  return wrong;'
    )


def _array(name: str, array: NDArray[Any]) -> str:
    bits = np.ascontiguousarray(array).view(f"u{array.itemsize}").ravel()
    word = "uint8_t" if array.itemsize == 1 else "uint32_t"
    body = ", ".join(f"{value:#x}" for value in bits.tolist()) or "0"
    return f"static {word} {name}[] = {{{body}}};"


def _tensor(name: str, data: str, ndim: int, dtype: str) -> str:
    code, bits = {"float32": (2, 32), "int32": (0, 32), "uint8": (1, 8)}[dtype]
    return f"{{{_text(name)}, {{{data}, {{1, 0}}, {ndim}, {{{code}, {bits}, 1}}, shape_{name}, nullptr, 0}}}}"


def _param(key: str, value: int | float) -> str:
    if isinstance(value, float):
        return f"{{{_text(key)}, 1, 0, {{.d = {value!r}}}}}"
    return f"{{{_text(key)}, 0, 0, {{.i = {int(value)}}}}}"


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _joined(values: Any) -> str:
    return ", ".join(str(int(v)) for v in values)
