"""One matrix of a checkpoint, in whatever form it is stored: plain, fp8 with block scales, packed int4, or a slice of fused experts.

Forms of the logical tensor X.weight [out, in] (rule M11):

    plain   X.weight            F32, F16, BF16, or F64 that fits float32
    fp8     X.weight            F8_E4M3, and X.weight_scale_inv [ceil(out/128), ceil(in/128)]: RN32 of the exact product
    int4    X.weight_packed     I32 [out, in/8], value + 8 in each nibble, the lowest first; X.weight_scale [out, in/32] F16, BF16 or F32;
            X.weight_shape      integers [2] (compressed-tensors "pack-quantized", symmetric, groups of 32)
    fused   experts.gate_up_proj [E, 2 F, N] (gate first), experts.down_proj [E, N, F], as transformers keeps them in memory

Reading touches the bytes of that matrix alone. Every fault names the tensor and its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.tensorfile import TensorFile, TensorFileError
from spec.formats import FP8_BLOCK, GROUP, WORD, FormatError, dequantised_fp8
from spec.weights import WeightError

Float = NDArray[np.float32]
SCALE_INV, PACKED, SCALE, SHAPE = "_scale_inv", "_packed", "_scale", "_shape"
COMPANIONS = (SCALE_INV, PACKED, SCALE, SHAPE)
"""What may stand behind X.weight in a name."""
FUSED = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}
"""Projection -> (fused name, which part of the axis of outputs)."""


class Stored:
    """`location`: tensor name -> the open file that holds it."""

    def __init__(self, folder: Path, location: Mapping[str, TensorFile]) -> None:
        self._folder = folder
        self._location = location

    def matrix(self, name: str, shape: tuple[int, ...]) -> Float:
        """The float32 value of the logical tensor `name`. Raises WeightError."""
        if name + PACKED in self._location:
            if name in self._location:
                raise WeightError(f"{self._location[name].path}: {name!r} is stored plainly and packed as well: one of them must go")
            value, file = self._int4(name, shape)
        elif self._file(name, shape).entries[name].dtype == "F8_E4M3":
            value, file = self._fp8(name, shape)
        else:
            value, file = self._plain(name, shape)
        return _finite(value, name, file)

    def expert(self, experts: str, projection: str, number: int, shape: tuple[int, int]) -> Float:
        """Matrix [out, in] of one expert below the prefix `experts`, per-expert or fused. Raises WeightError."""
        own = f"{experts}.{number}.{projection}.weight"
        fused, part = FUSED[projection]
        name = f"{experts}.{fused}"
        if name not in self._location:
            return self.matrix(own, shape)
        if own in self._location or own + PACKED in self._location:
            raise WeightError(f"{self._location[name].path}: {name!r} is fused and there is {own!r} as well: one of them must go")
        file = self._location[name]
        found, rows = file.entries[name].shape, shape[0] * (2 if fused == "gate_up_proj" else 1)
        if len(found) != 3 or number >= found[0] or found[1:] != (rows, shape[1]):
            raise WeightError(f"{file.path}: tensor {name!r} has shape {list(found)}, but config.json needs [experts, {rows}, {shape[1]}]")
        value = self._values(file, name, (number, slice(part * shape[0], (part + 1) * shape[0])))
        return _finite(value, f"{name}[{number}]", file)

    def _plain(self, name: str, shape: tuple[int, ...]) -> tuple[Float, TensorFile]:
        file = self._file(name, shape)
        self._check_shape(name, file, shape)
        return self._values(file, name), file

    def _fp8(self, name: str, shape: tuple[int, ...]) -> tuple[Float, TensorFile]:
        file = self._file(name, shape)
        self._check_shape(name, file, shape)
        blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
        scales_file = self._file(name + SCALE_INV, blocks)
        self._check_shape(name + SCALE_INV, scales_file, blocks)
        bits = np.asarray(file.raw(name), np.uint8)
        return dequantised_fp8(bits, self._values(scales_file, name + SCALE_INV)).astype(np.float32), file

    def _int4(self, name: str, shape: tuple[int, ...]) -> tuple[Float, TensorFile]:
        outputs, inputs = shape
        file = self._file(name + PACKED, shape)
        if inputs % GROUP:
            raise WeightError(f"{file.path}: {name + PACKED!r} needs a multiple of {GROUP} inputs, but config.json says {inputs}")
        declared = self._file(name + SHAPE, (2,))
        found = np.asarray(declared.raw(name + SHAPE)).tolist()
        if found != [outputs, inputs]:
            raise WeightError(f"{declared.path}: {name + SHAPE!r} says {found}, but config.json needs {[outputs, inputs]}")
        self._check_shape(name + PACKED, file, (outputs, inputs // WORD))
        if file.entries[name + PACKED].dtype != "I32":
            raise WeightError(f"{file.path}: tensor {name + PACKED!r} is {file.entries[name + PACKED].dtype}, but must be I32")
        scales_file = self._file(name + SCALE, (outputs, inputs // GROUP))
        self._check_shape(name + SCALE, scales_file, (outputs, inputs // GROUP))
        scales = self._values(scales_file, name + SCALE)
        words = np.asarray(file.raw(name + PACKED)).view(np.uint32)
        values = np.empty((outputs, inputs // WORD, WORD), np.float32)
        for nibble in range(WORD):
            values[:, :, nibble] = ((words >> np.uint32(4 * nibble)) & np.uint32(15)).astype(np.float32) - np.float32(8)
        grouped = values.reshape(outputs, inputs // GROUP, GROUP)
        grouped *= scales[:, :, None]  # exact for 16-bit scales; RN32 for float32 ones
        return grouped.reshape(outputs, inputs), file

    def _file(self, name: str, shape: tuple[int, ...]) -> TensorFile:
        file = self._location.get(name)
        if file is None:
            raise WeightError(f"{self._folder}: tensor {name!r} is missing; expected {list(shape)}")
        return file

    @staticmethod
    def _check_shape(name: str, file: TensorFile, shape: tuple[int, ...]) -> None:
        found = file.entries[name].shape
        if found != shape:
            raise WeightError(f"{file.path}: tensor {name!r} has shape {list(found)}, but config.json needs {list(shape)}")

    @staticmethod
    def _values(file: TensorFile, name: str, index: Any = ()) -> Float:
        try:
            return file.float32(name, index)
        except (TensorFileError, FormatError) as problem:
            raise WeightError(str(problem)) from None


def _finite(value: Float, name: str, file: TensorFile) -> Float:
    if not np.isfinite(value).all():
        at = [int(i) for i in np.argwhere(~np.isfinite(value))[0]]
        raise WeightError(f"{file.path}: tensor {name!r} is {value[tuple(at)]} at {at}; weights must be finite")
    return value
