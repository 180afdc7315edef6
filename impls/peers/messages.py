"""The line protocol of docs/subprocess-protocol.md: one line of JSON, then as many bytes of safetensors as its `payload` says.

Shared by the engine that starts a process and by the sample server. Nothing is trusted: sizes are bounded, and whatever cannot be read raises
`ProtocolError` with what was found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

VERSION = 1
LINE_BYTES_MAX = 16 << 20
PAYLOAD_BYTES_MAX = 1 << 32
DTYPES = ("float32", "int32", "uint8")

Arrays = Mapping[str, NDArray[Any]]


class ProtocolError(RuntimeError):
    """The other side said something that is no message of this protocol."""


class Ended(ProtocolError):
    """The other side closed its end."""


def write(stream: IO[bytes], message: Mapping[str, Any], arrays: Arrays | None = None) -> None:
    """One message. Arrays go as float32, int32 or uint8."""
    payload = save({name: np.ascontiguousarray(value) for name, value in arrays.items()}) if arrays else b""
    line = json.dumps({**message, "payload": len(payload)}, separators=(",", ":"), allow_nan=False).encode()
    stream.write(line + b"\n" + payload)
    stream.flush()


def read(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """(fields, arrays). Raises Ended at the end of the stream, ProtocolError for anything that is no message."""
    line = stream.readline(LINE_BYTES_MAX)
    if not line:
        raise Ended("the stream ended where a message should begin")
    try:
        message = json.loads(line)
        size = message.pop("payload", 0)
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise ProtocolError(f"{line[:80]!r} is no line of JSON with an object") from None
    if type(size) is not int or not 0 <= size <= PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"payload is {size!r}, but must be a number of bytes up to {PAYLOAD_BYTES_MAX}")
    if not size:
        return message, {}
    data = stream.read(size)
    if len(data) < size:
        raise Ended(f"the stream ended after {len(data)} of {size} bytes of a payload")
    try:
        arrays = load(data)
    except (SafetensorError, ValueError, KeyError) as problem:
        raise ProtocolError(f"the payload is no safetensors file: {problem}") from None
    for name, value in arrays.items():
        if str(value.dtype) not in DTYPES:
            raise ProtocolError(f"array {name!r} is {value.dtype}, but must be one of {', '.join(DTYPES)}")
    return message, arrays
