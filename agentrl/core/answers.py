"""Bodies of HTTP answers, bounded: the peer is hostile, and a small compressed body can expand to a huge one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

UNCOMPRESSED = {"Accept-Encoding": "identity"}
"""Headers of a request whose answer `read_answer` reads; its session has `auto_decompress=False`."""


async def read_answer(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """Read the body of an answer; None if it is longer than `limit` bytes.

    Raises:
        ValueError: the peer compresses its answers although the request forbids it.
    """
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ValueError(f"it compresses its answers although the request forbids it ({encoding!r})")
    content = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > limit:
            return None
    return bytes(content)
