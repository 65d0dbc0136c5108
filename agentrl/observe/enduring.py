"""A text stream that a run outlives: when nobody reads it any more, it goes quiet."""

from __future__ import annotations

import io
from typing import TextIO


class EnduringStream(io.TextIOBase):
    """Writes to another stream until that fails; `agentrl train … 2>&1 | head -1` must not end the training."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        """Write what can be written; always claims to have written all."""
        if self._stream is not None:
            try:
                self._stream.write(text)
            except (OSError, ValueError):
                self._stream = None
        return len(text)

    def flush(self) -> None:
        """Flush, or go quiet."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None

    def isatty(self) -> bool:
        """Whether there is a terminal."""
        return self._stream is not None and not self._stream.closed and self._stream.isatty()
