"""Replay: runs an episode's program over its journal alone, without sampling or performing anything.

A call that the journal does not hold ends the execution before it is performed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from agentrl.core.errors import EngineError
from agentrl.core.records import ProposalNovelty
from agentrl.rollout.calls.mismatch import describe_entry

if TYPE_CHECKING:
    from agentrl.core.records import EpisodeHeader, EpisodeSpec, ForkPoint, PolicyVersion, Task
    from agentrl.journal.entries import EntryBody


class CallNotRecordedError(EngineError):
    """The code makes a call that the journal does not hold."""

    def __init__(self, call_id: str, act: str) -> None:
        super().__init__(f"call {call_id} is not in the journal: the code now makes {act}")
        self.call_id = call_id
        self.act = act


class ReplayStoppedError(EngineError):
    """The execution reached the call at which it was to stop."""

    def __init__(self, call_id: str) -> None:
        super().__init__(f"stopped at call {call_id}, as requested")
        self.call_id = call_id


class Replay:
    """What a replay does with recorded and new calls; see `OnNew`.

    Args:
        until: id of the call after which to stop.
    """

    def __init__(self, until: str | None = None) -> None:
        self._until = until
        self.acts: list[tuple[str, str]] = []
        """Id and description of each recorded call that has returned."""

    def came_back(self, call_id: str, body: EntryBody) -> None:
        self.acts.append((call_id, describe_entry(body)))
        if call_id == self._until:
            raise ReplayStoppedError(call_id)

    def error(self, call_id: str, act: str) -> CallNotRecordedError:
        return CallNotRecordedError(call_id, act)


class ReplayHost:
    """An `EpisodeHost` that starts no children."""

    def spawn(
        self,
        parent: EpisodeSpec,
        environment: str,
        tasks: Sequence[Task],
        spawn_call: str,
        on_end: Callable[[int, EpisodeHeader], None],
        known: Sequence[str],
    ) -> None:
        """Start nothing; the journal holds the results of the children."""

    async def branch(
        self, main: EpisodeSpec, point: ForkPoint, count: int, versions: Mapping[str, PolicyVersion]
    ) -> Mapping[str, PolicyVersion]:
        """Start nothing: a replay follows one episode."""
        return {}

    async def remember(self, spec: EpisodeSpec, call_id: str, key: str, structure: str) -> ProposalNovelty:
        """Return an empty recollection: the episode reads the recorded one from its journal."""
        return ProposalNovelty(0, 0.0)

    def readmit(self, spec: EpisodeSpec) -> None:
        """Do nothing: a replay has no further attempt."""
