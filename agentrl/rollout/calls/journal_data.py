"""Values as the journal holds them: encoding, hashing, and the round trip that makes all executions see the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentrl.core.errors import EpisodeError
from agentrl.core.text import valid_unicode


def _plain(value: Any) -> Any:
    """Convert what msgpack does not know: text of a subclass of `str`, and numbers of numpy."""
    if isinstance(value, str):
        return valid_unicode(value)
    if type(value).__module__ == "numpy":
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode

decode = msgspec.msgpack.Decoder().decode


def to_journal_data(arguments: Any) -> Any:
    """Convert arguments to data that the journal can hold; anything else (such as an integer of 80 bits) becomes
    text.
    """
    return to_journal_data_and_bytes(arguments)[0]


def encode_arguments(arguments: Any) -> bytes:
    """Encode arguments for hashing."""
    return to_journal_data_and_bytes(arguments)[1]


def to_journal_data_and_bytes(arguments: Any) -> tuple[Any, bytes]:
    """Compute `to_journal_data` and `encode_arguments` at once."""
    data = dict(arguments) if type(arguments) is dict or isinstance(arguments, Mapping) else arguments
    try:
        return data, encode(data)
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = valid_unicode(str(data)[:2000])
        return text, encode(text)


def after_journal_round_trip(value: Any, where: str) -> Any:
    """Return a value as the journal returns it: the same on the first execution as on every other.

    Tuples become lists, and the caller may change the result without changing the recorded value.

    Raises:
        EpisodeError: the value cannot be journaled; `where` names its origin in the message.
    """
    try:
        return decode(encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EpisodeError(
            f"{where} returned {type(value).__name__}, which cannot be journaled ({error}); return JSON data",
            reason="environment_error",
        ) from error
