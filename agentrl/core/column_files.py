"""Named columns of numbers as bytes, in the layout of safetensors, for ranks, step files, and their readers.

The bytes of a run are untrusted: `decode_columns` checks every size before it makes a column. Written here instead of
with safetensors, because the inspector and the sample run import neither it nor, to read, numpy.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAMES = {"<f4": "F32", "<i4": "I32", "<i8": "I64", "|u1": "U8", "|b1": "BOOL"}
_TYPE_CODES = {"F32": "f", "I32": "i", "I64": "q", "U8": "B", "BOOL": "B"}


class _Header(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def encode_columns(columns: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Serialize one-dimensional columns with texts that describe them."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts, at = [], 0
    for name, column in columns.items():
        dtype = column.dtype.newbyteorder("<").str
        parts.append(column.astype(dtype, copy=False).tobytes())
        header[name] = _Header(_NAMES[dtype], list(column.shape), (at, at + len(parts[-1])))
        at += len(parts[-1])
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def decode_columns(data: bytes, *, max_header_bytes: int = 1 << 30) -> tuple[dict[str, str], dict[str, array[Any]]]:
    """Return the texts and the columns that `encode_columns` serialized.

    Raises:
        ValueError: the bytes do not have this layout.
    """
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(len(data) - 8, max_header_bytes):
        raise ValueError(f"its header is said to have {size} bytes")
    try:
        header = json.loads(data[8 : 8 + size])
        metadata = msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
        fields = msgspec.convert(header, dict[str, _Header])
    except (msgspec.ValidationError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header cannot be read ({error})") from error
    body = memoryview(data)[8 + size :]
    columns: dict[str, array[Any]] = {}
    for name, field in fields.items():
        start, stop = field.data_offsets
        if field.dtype not in _TYPE_CODES or not 0 <= start <= stop <= len(body):
            raise ValueError(f"its column {name[:50]!r} is shorter than its header says, or of an unknown type")
        columns[name] = array(_TYPE_CODES[field.dtype])
        columns[name].frombytes(body[start:stop])
        if sys.byteorder == "big":
            columns[name].byteswap()
    return metadata, columns
