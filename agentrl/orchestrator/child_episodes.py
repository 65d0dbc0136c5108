"""Who waits for the end of child episodes: parents, which may be executed again, and forks that share a child."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from agentrl.core.records import EpisodeHeader, EpisodeSpec
from agentrl.orchestrator.in_flight import EpisodesInFlight

OnEnd = Callable[[EpisodeHeader], None]


class ChildEpisodes:
    """The ended children of running parents, and the callbacks for children in flight.

    Args:
        in_flight: the episodes that run.
    """

    def __init__(self, in_flight: EpisodesInFlight) -> None:
        self._in_flight = in_flight
        self._ended_before: dict[str, EpisodeHeader] = {}
        """Headers of children of episodes that forks were made from."""
        self._ended: dict[str, dict[str, EpisodeHeader]] = {}
        """Headers of ended children, keyed by running parent: a re-executed parent requests them again."""
        self._rejoined: dict[str, OnEnd] = {}
        """Callbacks of re-executed parents, keyed by a child in flight that was not started by that execution."""
        self._sharers: dict[str, list[OnEnd]] = {}
        """Callbacks of forks that wait for a child of the episode they were forked from."""

    def add_ended(self, headers: Mapping[str, EpisodeHeader]) -> None:
        """Add children of the episodes that forks are made from."""
        self._ended_before |= headers

    def exists(self, parent_id: str, episode_id: str) -> bool:
        """Whether a child of a running parent has ended or runs."""
        return self._header(parent_id, episode_id) is not None or episode_id in self._in_flight

    def rejoin(self, parent_id: str, episode_id: str, on_end: OnEnd) -> bool:
        """Attach a re-executed parent to an existing child; returns whether it exists. `on_end` is called when it has
        ended."""
        ended = self._header(parent_id, episode_id)
        if ended is not None:
            asyncio.get_running_loop().call_soon(on_end, ended)
            return True
        if episode_id in self._in_flight:
            self._rejoined[episode_id] = on_end
            return True
        return False

    def share(self, fork: EpisodeSpec, episode_id: str, on_end: OnEnd) -> bool:
        """Attach a fork to a child of the forked episode; returns whether it has ended or still runs."""
        if episode_id not in self._in_flight:
            return fork.fork is not None and self.rejoin(fork.fork.episode_id, episode_id, on_end)
        self._sharers.setdefault(episode_id, []).append(on_end)
        return True

    def record_end(self, spec: EpisodeSpec, header: EpisodeHeader) -> None:
        """Record the end of an episode, which may be a parent, a child or both."""
        self._ended.pop(spec.episode_id, None)
        if spec.parent_id is not None and spec.parent_id in self._in_flight:
            self._ended.setdefault(spec.parent_id, {})[spec.episode_id] = header

    def pop_waiting(self, episode_id: str, on_end: OnEnd | None) -> list[OnEnd]:
        """Return the callbacks for the end of an episode that was started with `on_end`, and forget them."""
        on_end = self._rejoined.pop(episode_id, on_end)
        return [*([on_end] if on_end is not None else ()), *self._sharers.pop(episode_id, ())]

    def _header(self, parent_id: str, episode_id: str) -> EpisodeHeader | None:
        return self._ended.get(parent_id, {}).get(episode_id) or self._ended_before.get(episode_id)
