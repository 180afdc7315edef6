"""Read safetensors lazily, as raw bits where numpy has no dtype. Writing goes through the safetensors package.

The package's numpy reader cannot hand out bfloat16 or float8 lazily, and its errors name neither tensor nor file; the
format is a length, a JSON header and bytes, so a map of the file and forty lines do both.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# bfloat16 and float8 as raw bits: numpy has no such dtypes
DTYPES: dict[str, np.dtype[np.generic]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"), "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation


class TensorFileError(ValueError):
    """A tensor file that cannot be read; the message names the file, the tensor, what was found and what is expected."""


@dataclass(frozen=True)
class Entry:
    dtype: str  # the format's own name: "F32", "BF16", ...
    shape: tuple[int, ...]
    begin: int  # byte offsets in the file
    end: int


class TensorFile:
    """One open file. `raw(name)` is a read-only view of the mapped bytes; nothing is copied."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise TensorFileError(f"{self.path} does not exist") from None
        except (OSError, ValueError) as problem:
            raise TensorFileError(f"{self.path} cannot be read: {problem or 'it is empty'}") from None
        self.entries = self._header()

    def _header(self) -> dict[str, Entry]:
        total = len(self._map)
        if total < 8:
            raise TensorFileError(f"{self.path} has {total} bytes, but a safetensors file begins with an 8-byte length: it was cut")
        length = int.from_bytes(self._map[:8], "little")
        if length > min(MAX_HEADER_BYTES, total - 8):
            raise TensorFileError(
                f"{self.path} announces a header of {length} bytes, but {total - 8} follow: it was cut, or is no safetensors file"
            )
        try:
            header = json.loads(self._map[8 : 8 + length])
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise TensorFileError(f"{self.path} has a header that is not JSON: it is no safetensors file") from None
        if not isinstance(header, dict):
            raise TensorFileError(f"{self.path} has a header that is no object: it is no safetensors file")
        header.pop("__metadata__", None)
        return {name: self._entry(name, fields, 8 + length, total) for name, fields in header.items()}

    def _entry(self, name: str, fields: object, start: int, total: int) -> Entry:
        try:
            dtype, shape = fields["dtype"], tuple(int(n) for n in fields["shape"])  # type: ignore[index]
            begin, end = (start + int(offset) for offset in fields["data_offsets"])  # type: ignore[index]
        except (KeyError, TypeError, ValueError):
            raise TensorFileError(f"{self.path}: tensor {name!r} has a malformed header entry {fields!r}") from None
        if dtype not in DTYPES:
            raise TensorFileError(f"{self.path}: tensor {name!r} has dtype {dtype!r}; readable are {', '.join(DTYPES)}")
        if min(shape, default=0) < 0 or not start <= begin <= end:
            raise TensorFileError(f"{self.path}: tensor {name!r} has impossible shape {list(shape)} or offsets")
        if end > total:
            raise TensorFileError(f"{self.path}: tensor {name!r} ends at byte {end}, but the file has {total}: it was cut")
        expected = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        if end - begin != expected:
            raise TensorFileError(f"{self.path}: tensor {name!r} {dtype} {list(shape)} needs {expected} bytes, but has {end - begin}")
        return Entry(dtype, shape, begin, end)

    def raw(self, name: str) -> NDArray[np.generic]:
        """The stored bits. Raises KeyError for an unknown name."""
        entry = self.entries[name]
        count = int(np.prod(entry.shape, dtype=np.int64))
        return np.frombuffer(self._map, DTYPES[entry.dtype], count, entry.begin).reshape(entry.shape)

    def float32(self, name: str, index: Any = ()) -> NDArray[np.float32]:
        """Exact float32 of F32, F16 and BF16; F64 only where nothing is lost. `index`: a part, whose bytes alone are read.

        Raises TensorFileError for other formats.
        """
        entry = self.entries[name]
        raw: NDArray[np.generic] = np.asarray(self.raw(name)[index])
        if entry.dtype == "F32":
            return raw.astype(np.float32, copy=False)
        if entry.dtype == "F16":
            return raw.astype(np.float32)
        if entry.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        if entry.dtype == "F64":
            value = raw.astype(np.float32)
            if not (value.astype(np.float64) == raw).all():
                raise TensorFileError(f"{self.path}: tensor {name!r} is F64 and does not fit float32 exactly: convert it first")
            return value
        raise TensorFileError(f"{self.path}: tensor {name!r} is {entry.dtype}, which has no value without its scales")
