"""Frames of `agentrl.core.rpc`, of which one write may hold several."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.core.rpc import HEAD_BYTES


def bodies(frames: bytes) -> Iterator[bytes]:
    """Yield the bodies of whole frames, one after another."""
    start = 0
    while start < len(frames):
        end = start + HEAD_BYTES + int.from_bytes(frames[start : start + HEAD_BYTES], "little")
        yield frames[start + HEAD_BYTES : end]
        start = end
