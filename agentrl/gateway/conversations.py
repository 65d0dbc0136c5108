"""Finds requests that continue a conversation of another running episode: their program mixes episodes.

A program that rebinds a shared client sends one episode's messages with another's key. The gateway can tell if another
episode got the reply in the request, to exactly the messages before it, and the key's episode never asked them. It
cannot tell from short texts: an example in a prompt, such as "2 + 2" and "4", may be another episode's task and reply.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import msgspec

from agentrl.core.records import Message
from agentrl.gateway.calls import RequestRefusedError

MIN_REPLY_CHARACTERS = 40
"""Minimum length of a reply without tool calls that identifies a conversation; ids of calls are unique."""


class Conversations:
    """What the running episodes of a gateway asked, and the replies that they got."""

    def __init__(self) -> None:
        self._asked: dict[Hashable, set[bytes]] = {}
        """Digests of the messages that each episode asked."""
        self._answered: dict[bytes, set[Hashable]] = {}
        """Episodes that got a reply, keyed by the digest of the messages with it."""
        self._digests: dict[Hashable, list[bytes]] = {}
        """Keys of `_answered`, by episode."""

    def check(self, episode: Hashable, messages: Sequence[Message]) -> None:
        """Refuse a request that another episode should have sent.

        Raises:
            RequestRefusedError: it continues a conversation of another episode.
        """
        asked, before = self._asked.get(episode, set()), b""
        for message in messages:
            digest = _extended(before, message)
            episodes = self._answered.get(digest, ()) if message.role == "assistant" else ()
            if episodes and episode not in episodes and before not in asked:
                raise RequestRefusedError(
                    "the request continues a conversation of another running episode, whose key differs. The program "
                    "shares a client, its key or messages between episodes: make them for each episode, from its "
                    "endpoint",
                    "foreign_conversation",
                )
            before = digest

    def record(self, episode: Hashable, messages: Sequence[Message], replies: Sequence[Message]) -> None:
        """Record the replies to a request."""
        digest = b""
        for message in messages:
            digest = _extended(digest, message)
        self._asked.setdefault(episode, set()).add(digest)
        for reply in replies:
            if len(reply.content) < MIN_REPLY_CHARACTERS and not reply.tool_calls:
                continue
            with_reply = _extended(digest, reply)
            self._answered.setdefault(with_reply, set()).add(episode)
            self._digests.setdefault(episode, []).append(with_reply)

    def forget(self, episode: Hashable) -> None:
        """Forget an episode that has ended."""
        self._asked.pop(episode, None)
        for digest in self._digests.pop(episode, ()):
            episodes = self._answered.get(digest, set())
            episodes.discard(episode)
            if not episodes:
                self._answered.pop(digest, None)


def _extended(digest: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message, without what clients drop: thinking."""
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    content = msgspec.json.encode(
        (message.role, message.content, calls, message.tool_call_id), order="sorted", enc_hook=str
    )
    return hashlib.blake2b(digest + content, digest_size=16).digest()
