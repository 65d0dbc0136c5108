"""Stateful objects of an episode, called through the journal: how each comes back when `run` is executed again."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.errors import ReplayMismatchError
from agentrl.environment.base import Resource, ResourceLevel
from agentrl.journal.entries import ResourceEntry, asked_hash
from agentrl.rollout.journaled_data import checked, encode, encode_arguments

if TYPE_CHECKING:
    from agentrl.rollout.episode import LiveEpisode


class LiveResource(Resource):
    """A stateful object called through the journal; its declared level is recorded with each call."""

    __slots__ = ("_episode", "_level", "_name", "_object")

    def __init__(self, episode: LiveEpisode, instance: object, name: str, level: ResourceLevel) -> None:
        self._episode = episode
        self._object = instance
        self._name = name
        self._level = level

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method; on re-execution a `replay` resource is called again and compared."""
        journal = self._episode.journal
        opened = journal.open(asked_hash(self._name.encode(), method.encode(), encode_arguments(arguments)))
        recorded = journal.expect(opened, ResourceEntry)
        started = self._episode.services.clock.monotonic()
        value = getattr(self._object, method)(*arguments)
        if inspect.isawaitable(value):
            value = await value
        plain = checked(value, f"{self._name}.{method}")
        if recorded is None:
            seconds = self._episode.services.clock.monotonic() - started
            journal.write(opened, ResourceEntry(self._name, self._level, method, plain, seconds))
        elif recorded.value != msgspec.msgpack.decode(encode(plain)):
            raise ReplayMismatchError(
                f"episode {self._episode.spec.episode_id}, call {opened.call_id}: {self._name}.{method} returned "
                f"{str(plain)[:200]!r}, the journal holds {str(recorded.value)[:200]!r}; "
                "declare the resource `snapshot` or `pinned`"
            )
        return value
