"""Whether an entry's content can be shown, as text and as JSON: msgpack holds more than either does."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.errors import JournalError
from agentrl.core.records import ForkPoint

if TYPE_CHECKING:
    from agentrl.journal.entries import EntryBody

MAX_DEPTH = 100
"""Deepest nesting that is shown; far from where recursive printers end."""


def check_showable(body: EntryBody, where: str) -> None:
    """Refuse content that no JSON writer takes: keys that are neither text nor numbers, extension types, great depth.

    Raises:
        JournalError: the content is such; the message begins with `where`.
    """
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                odd = [type(key).__name__ for key in value if not isinstance(key, str | int | float | None)]
                if odd:
                    raise JournalError(f"{where}: a key of type {odd[0]}, which cannot be shown")
                below += value.values()
            elif isinstance(value, msgspec.Struct):
                below += [getattr(value, name) for name in value.__struct_fields__]
            elif isinstance(value, ForkPoint):
                below += [value.journal, value.partition, value.episode_id, value.attempt, value.call_id]
                below += value.messages
            elif isinstance(value, list | tuple):
                below += value
            elif not isinstance(value, str | int | float | bytes | datetime | None):
                raise JournalError(f"{where}: a value of type {type(value).__name__}, which cannot be shown")
        if not below:
            return
        level = below
    raise JournalError(f"{where}: nested deeper than {MAX_DEPTH}, which cannot be shown")
