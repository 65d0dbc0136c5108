"""What a turn has sampled while its engine call still runs, so that a process that dies resumes it there.

Partials lie beside the entries of a partition, in a table of their own: no commit counts them, no digest covers them,
and they are removed when their turn is an entry. A partial that is missing, damaged or of another question cuts its
turn there and is no error: the tokens are sampled again, as after any crash.
"""

from __future__ import annotations

import msgspec

from agentrl.journal.entries import Span


class Partial(msgspec.Struct, frozen=True, array_like=True):
    """Some consecutive tokens of a turn, the body of a row of `partials`."""

    start: int
    """Number of the first of them in its turn."""
    token_ids: bytes  # <i4
    logprobs: bytes  # <f4
    spans: tuple[Span, ...]
    """Over these tokens."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Partial)


def encode_partial(partial: Partial) -> bytes:
    """Bytes of a partial."""
    return _ENCODER.encode(partial)


def decode_partial(body: bytes) -> Partial:
    """A partial from its bytes.

    Raises:
        msgspec.MsgspecError: they are none of this format.
    """
    return _DECODER.decode(body)
