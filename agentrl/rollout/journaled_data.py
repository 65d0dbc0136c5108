"""Values of environments as the journal can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentrl.core.errors import EpisodeError
from agentrl.environment.base import valid_unicode

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


def plain(arguments: Any) -> Any:
    """Arguments as the journal can hold them: what it cannot (an integer of 80 bits, say) becomes text."""
    return plain_and_encoded(arguments)[0]


def encode_arguments(arguments: Any) -> bytes:
    """Bytes of arguments, to be hashed."""
    return plain_and_encoded(arguments)[1]


def plain_and_encoded(arguments: Any) -> tuple[Any, bytes]:
    """`plain` and `encode_arguments` at once."""
    data = dict(arguments) if type(arguments) is dict or isinstance(arguments, Mapping) else arguments
    try:
        return data, encode(data)
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = valid_unicode(str(data)[:2000])
        return text, encode(text)


def journaled(value: Any, where: str) -> Any:
    """A value as it comes back from the journal: the same on the first execution as on every other.

    Tuples are lists, and what the caller does to it changes nothing recorded.

    Raises:
        EpisodeError: it cannot be journaled; `where` says what returned it.
    """
    try:
        return decode(encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        numpy = " (`.tolist()`, `float()`)" if type(value).__module__ == "numpy" else ""
        raise EpisodeError(
            f"{where} returned {type(value).__name__}, which cannot be journaled ({error}); return JSON data{numpy}",
            reason="environment_error",
        ) from error
