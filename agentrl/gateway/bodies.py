"""Parsing of request bodies, which are untrusted: bounded in size before and after decompression, and in depth.

Parsed text has no lone surrogates, and parsed floats are finite.
"""

from __future__ import annotations

import json
import math
import re
import sys
import zlib
from typing import Any

from agentrl.core.text import valid_unicode
from agentrl.gateway.calls import RequestRefusedError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_BODY_BYTES = 8 << 20
"""Maximum bytes of a body, before and after decompression: two million tokens of text. Parsing blocks all episodes."""
HEAD_BYTES = 1 << 16
"""Bytes that are kept of a body that is too long."""
MAX_HELD_BYTES = 256 << 20
"""Maximum estimated memory of the requests of one attempt that are being sent or wait for their reply."""
MAX_BRACKETS = 1 << 18
"""Maximum number of opening brackets and braces in a body, including those in texts: each may create an object."""
MAX_SEPARATORS = 1 << 20
"""Maximum number of commas in a body."""
MAX_SEARCHED_BYTES = 64 << 10
"""Largest body that is searched for the field of a number that is not finite: it is parsed again."""
MAX_DEPTH = 64
"""Maximum nesting of objects and lists in a body."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape in JSON of half a character."""


class LongBodyError(RequestRefusedError):
    """A body is longer than `MAX_BODY_BYTES`; `head` is its beginning, decompressed."""

    def __init__(self, head: bytes | bytearray, encoding: str = "", when: str = "") -> None:
        super().__init__(f"the body is longer than {MAX_BODY_BYTES} bytes{when}", "large")
        self.head = bytes(head[:HEAD_BYTES])
        try:
            if (unpacker := _unpacker(encoding)) is not None:
                self.head = unpacker.decompress(bytes(head[: 4 * HEAD_BYTES]), HEAD_BYTES)  # zstd has blocks of 128 KiB
        except (RequestRefusedError, zlib.error, zstd.ZstdError):
            self.head = b""


def decompress_body(body: bytes, encoding: str) -> bytes:
    """Decode the `Content-Encoding` of a body: identity, gzip, deflate or zstd.

    Raises:
        RequestRefusedError: the encoding is unknown, or the body is not in it or is cut short.
        LongBodyError: the body is too long when it is decompressed.
    """
    unpacker = _unpacker(encoding)
    if unpacker is None:
        return body
    try:
        content: bytes = unpacker.decompress(body, MAX_BODY_BYTES + 1)
    except (zlib.error, zstd.ZstdError) as error:
        raise RequestRefusedError(f"the body is not {encoding}: {error}") from None
    if len(content) > MAX_BODY_BYTES:
        raise LongBodyError(content, when=" when it is unpacked")
    if not unpacker.eof:
        raise RequestRefusedError(f"the body ends in the middle of its {encoding} data")
    if unpacker.unused_data:
        raise RequestRefusedError(f"the body continues after the end of its {encoding} data")
    return content


def _unpacker(encoding: str) -> Any:
    """Return what decodes a `Content-Encoding`; None if nothing needs to be decoded."""
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip" | "deflate":
            return zlib.decompressobj(47)  # 32 + 15: accepts gzip and zlib headers
        case "zstd":
            # windows up to 8 MiB: the limit of RFC 9659
            return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 23})
    raise RequestRefusedError(f"content-encoding {encoding[:40]!r} is not supported; use gzip, deflate or zstd")


def estimate_body_memory(body: bytes) -> int:
    """Estimate the memory of a body and its parsed form, in bytes."""
    return 2 * len(body) + 256 * (body.count(b"[") + body.count(b"{")) + 64 * body.count(b",")


def parse_json_body(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a body.

    Raises:
        RequestRefusedError: the body is not a JSON object, is not UTF-8, has a number that is not finite, or is nested
            too deeply.
    """
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS or body.count(b",") > MAX_SEPARATORS:
        raise RequestRefusedError(f"the body has more than {MAX_BRACKETS} brackets or {MAX_SEPARATORS} commas", "large")
    try:
        value = parse_json(body.decode())
    except UnicodeDecodeError as error:
        raise RequestRefusedError(f"the body is not UTF-8 at byte {error.start}") from None
    except _NotFiniteError as error:
        field = _not_finite_field(body) if len(body) <= MAX_SEARCHED_BYTES else None
        raise RequestRefusedError(f"{field or 'the body'}: {error}", "invalid", field) from None
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestRefusedError("the body must be a JSON object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [item for parent in level for item in (parent.values() if isinstance(parent, dict) else parent)]
        level = [item for item in level if isinstance(item, dict | list)]
    if level:
        raise RequestRefusedError(f"the body is nested deeper than {MAX_DEPTH} levels")
    return value


def parse_json(text: str) -> Any:
    """Parse JSON; a lone surrogate becomes a question mark.

    Raises:
        ValueError: it is not JSON, or has a number that is not finite.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    if _SURROGATE.search(text):  # json.loads has joined pairs to characters; what encode replaces here is lone
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


class _NotFiniteError(ValueError):
    """A number is not finite."""


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotFiniteError(f"{text[:40]} is not a finite number")
    return value


def _not_finite_field(body: bytes) -> str | None:
    """Return the field of a body that holds a number that is not finite; None if the body cannot be read."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    fields: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        fields += [(valid_unicode(name[:40]), item) for name, item in value.items()]
    while fields:
        name, item = fields.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return name
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        fields += [(name, value) for value in inner]
    return None
