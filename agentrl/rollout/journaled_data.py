"""Values of environments as the journal can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentrl.core.errors import EpisodeError
from agentrl.environment.base import valid_unicode

encode = msgspec.msgpack.Encoder().encode


def plain(arguments: Any) -> Any:
    """Arguments as the journal can hold them: what it cannot (an integer of 80 bits, say) becomes text."""
    data = dict(arguments) if isinstance(arguments, Mapping) else arguments
    try:
        encode(data)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return valid_unicode(str(plain)[:2000])
    return data


def encode_arguments(arguments: Any) -> bytes:
    """Bytes of arguments, to be hashed."""
    return encode(plain(arguments))


def checked(value: Any, where: str) -> Any:
    """A value that can be journaled.

    Raises:
        EpisodeError: it cannot; `where` says what returned it.
    """
    try:
        encode(value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise EpisodeError(
            f"{where} returned {type(value).__name__}, which cannot be journaled ({error}); return JSON data",
            reason="environment_error",
        ) from error
    return value
