"""Conversations of clients that share one key: each is an episode of its own.

A client that names its conversation, by a name behind the key (`KEY:NAME`), goes on with it. Without a name a request
belongs to the conversation whose replies its history holds; one that holds none begins a conversation.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from agentrl.gateway.calls import ChatRequest, RequestRefusedError
from agentrl.gateway.server import new_key, seat_of

if TYPE_CHECKING:
    from agentrl.gateway.server import OpenSeats

MOST_CONVERSATIONS = 1024
"""Conversations that are open at a time."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


class Conversations:
    """The open conversations behind one key.

    Args:
        models: names that clients may ask for.
        begin: starts an episode for a conversation, which may have a name, and returns its seats.
    """

    def __init__(self, models: Sequence[str], begin: Callable[[str], Awaitable[OpenSeats]]) -> None:
        self.key = new_key()
        self.models = models
        self._begin = begin
        self._open: list[OpenSeats] = []
        self._named: dict[str, OpenSeats] = {}
        self._beginning = asyncio.Lock()

    async def find(self, name: str, chat: ChatRequest, is_waited_for: Callable[[OpenSeats], bool]) -> OpenSeats:
        """The episode of a request; it begins if there is none.

        Args:
            name: of the conversation; empty: none.
            chat: the request.
            is_waited_for: whether the request repeats one of an episode, and is to get its reply.

        Raises:
            RequestRefusedError: there is no such model, the name is none, or too many conversations are open.
        """
        if chat.model not in self.models and chat.model.rpartition("/")[2] not in self.models:
            raise RequestRefusedError(
                f"there is no model {chat.model!r:.80}; there are: {', '.join(self.models)}", "model"
            )
        if name:
            return await self._find_named(name)
        for opened in reversed(self._open):
            is_unused = not opened.asked and not any(opened is each for each in self._named.values())
            if is_unused or is_waited_for(opened) or seat_of(opened.seats, chat.model).continues(chat):
                return opened  # unused: begun to count the tokens of a first request
        return await self._begin_one("")

    def close(self, opened: OpenSeats) -> None:
        """An episode ends: its conversation is begun anew if anybody goes on with it."""
        self._open = [each for each in self._open if each is not opened]
        self._named = {name: each for name, each in self._named.items() if each is not opened}

    async def _find_named(self, name: str) -> OpenSeats:
        if not _NAME.fullmatch(name):
            raise RequestRefusedError(
                "the name of a conversation, behind the colon of the key, has 1 to 64 letters, digits, '.', '_' or '-'",
                "key",
            )
        async with self._beginning:
            if name not in self._named:
                self._named[name] = await self._begin_one(name)
            return self._named[name]

    async def _begin_one(self, name: str) -> OpenSeats:
        if len(self._open) >= MOST_CONVERSATIONS:
            raise RequestRefusedError(f"{MOST_CONVERSATIONS} conversations are open already", "unavailable")
        opened = await self._begin(name)
        self._open.append(opened)
        return opened
