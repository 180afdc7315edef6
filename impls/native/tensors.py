"""NumPy arrays as DLPack tensors and back. Pointers are borrowed: whoever calls keeps the array alive."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.native import abi
from spec.engine import EngineError

_KINDS = {"i": 0, "u": 1, "f": 2, "b": 1}  # numpy kind -> DLDataType.code; a boolean travels as uint8
DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (2, 32): np.dtype(np.float32),
    (0, 32): np.dtype(np.int32),
    (1, 8): np.dtype(np.uint8),
}


def address(array: NDArray[Any]) -> int:
    """Where the first element lies; half the time of `array.ctypes.data`."""
    where: int = array.__array_interface__["data"][0]
    return where


def describe(tensor: abi.Tensor, name: str, array: NDArray[Any]) -> list[Any]:
    """Fill everything but the data pointer; the returned objects own the shape and must outlive the tensor.

    Raises EngineError for a dtype or strides that DLPack cannot express.
    """
    if array.dtype.kind not in _KINDS or not array.dtype.isnative:
        raise EngineError(f"{name} has dtype {array.dtype}, which cannot cross the C ABI: pass float32, int32 or uint8")
    tensor.device = abi.Device(abi.CPU, 0)
    tensor.ndim = array.ndim
    tensor.dtype = abi.DataType(_KINDS[array.dtype.kind], array.dtype.itemsize * 8, 1)
    tensor.byte_offset = 0
    sizes = (ctypes.c_int64 * array.ndim)(*array.shape)
    tensor.shape = sizes
    owners: list[Any] = [sizes]
    if not array.flags.c_contiguous:
        if any(stride % array.dtype.itemsize for stride in array.strides):
            raise EngineError(f"{name} has strides {list(array.strides)} bytes, which are not whole elements: pass a copy")
        strides = (ctypes.c_int64 * array.ndim)(*(stride // array.dtype.itemsize for stride in array.strides))
        tensor.strides = strides
        owners.append(strides)
    return owners


class Operand:
    """A tensor struct that is pointed to one array after another, all of one dtype and one number of dimensions."""

    def __init__(self, tensor: abi.Tensor, name: str, array: NDArray[Any]) -> None:
        """Raises EngineError for a dtype that DLPack cannot express."""
        self._tensor, self._name, self._itemsize = tensor, name, array.dtype.itemsize
        describe(tensor, name, array)
        self._sizes = (ctypes.c_int64 * array.ndim)()
        self._strides = (ctypes.c_int64 * array.ndim)()
        tensor.shape = self._sizes
        tensor.strides = None
        self._strided = False

    def point_to(self, array: NDArray[Any]) -> None:
        """Raises EngineError for strides that are not whole elements."""
        self._sizes[:] = list(array.shape)
        if array.flags.c_contiguous:
            if self._strided:
                self._tensor.strides = None
                self._strided = False
        else:
            if any(stride % self._itemsize for stride in array.strides):
                raise EngineError(f"{self._name} has strides {list(array.strides)} bytes, which are not whole elements: pass a copy")
            self._strides[:] = [stride // self._itemsize for stride in array.strides]
            self._tensor.strides = self._strides
            self._strided = True
        self._tensor.data = array.__array_interface__["data"][0]


def whole_tensor(name: str, array: NDArray[Any]) -> tuple[abi.Tensor, list[Any]]:
    """A tensor over `array`, and what must outlive it."""
    tensor = abi.Tensor()
    owners = describe(tensor, name, array)
    tensor.data = address(array)
    return tensor, [*owners, array]


def copied(data: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A read-only copy of engine memory; strides in elements, None: contiguous."""
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return np.zeros(shape, dtype)
    if strides is None:
        return np.frombuffer(ctypes.string_at(data, count * dtype.itemsize), dtype).reshape(shape)
    # from the lowest to the highest element that the strides reach
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    lowest, highest = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    memory = np.frombuffer(ctypes.string_at(data + lowest * dtype.itemsize, (highest - lowest + 1) * dtype.itemsize), dtype)
    view = np.lib.stride_tricks.as_strided(memory[-lowest:], shape, [stride * dtype.itemsize for stride in strides])
    return view.copy()


def parameters(values: Mapping[str, int | float]) -> tuple[abi.Params, list[Any]]:
    """(key, int64 | double) pairs. Raises EngineError for a value that is neither."""
    items = (abi.Param * len(values))()
    keys = []
    for item, (key, value) in zip(items, values.items(), strict=True):
        keys.append(key.encode())
        item.key = keys[-1]
        if isinstance(value, (bool, int, np.integer, np.bool_)):
            item.kind = 0
            item.value.i = int(value)
        elif isinstance(value, (float, np.floating)):
            item.kind = 1
            item.value.d = float(value)
        else:
            raise EngineError(f"parameter {key} is {value!r}, but must be an integer or a double")
    return abi.Params(items, len(values)), [items, keys]


def read_parameters(params: abi.Params) -> dict[str, int | float]:
    values: dict[str, int | float] = {}
    for index in range(params.count):
        item = params.items[index]
        values[item.key.decode()] = item.value.d if item.kind == 1 else item.value.i
    return values


def int32(name: str, values: NDArray[Any] | Sequence[int], count: int | None = None) -> NDArray[np.int32]:
    """A contiguous int32 vector of `count` elements. Raises EngineError for another shape."""
    array = np.ascontiguousarray(values, np.int32)
    if array.ndim != 1 or (count is not None and len(array) != count):
        expected = "one dimension" if count is None else f"shape [{count}]"
        raise EngineError(f"{name} has shape {list(array.shape)}, but must have {expected}")
    return array
