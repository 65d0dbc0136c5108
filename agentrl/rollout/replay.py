"""Replay: runs an episode's program over its journal alone, without sampling or performing anything.

A call that the journal does not hold ends the execution before it is performed. With `rescoring`, recorded rewards are
not compared: the rewards that the code gives now count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from agentrl.core import ids
from agentrl.core.errors import EngineError
from agentrl.core.ports import SpawnedGroup
from agentrl.core.records import ProposalNovelty
from agentrl.journal.entries import RewardEntry, SpawnEntry
from agentrl.rollout.calls.journal import CallJournal, JournaledCall, current_strand
from agentrl.rollout.calls.mismatch import DIFFERENT_REQUEST, REPLAY_REMEDY, describe_entry
from agentrl.rollout.runner import EpisodeRunner

if TYPE_CHECKING:
    from agentrl.core.records import EpisodeHeader, EpisodeSpec, ForkPoint, PolicyVersion, Task
    from agentrl.journal.entries import EntryBody, JournalEntry, TurnEntry
    from agentrl.journal.port import TurnLog

OnCall = Callable[[str, str], None]
"""Callback for each recorded call that has returned, with its id and a description."""


class CallNotRecordedError(EngineError):
    """The code makes a call that the journal does not hold."""

    def __init__(self, call_id: str, act: str) -> None:
        super().__init__(f"call {call_id} is not in the journal: the code now makes {act}")
        self.call_id = call_id
        self.act = act


class ReplayStoppedError(EngineError):
    """The execution reached the call at which it was to stop."""


class ReplayJournal(CallJournal):
    """A journal that is read and never written.

    Args:
        log: log of the episode; nothing is appended to it.
        episode_id: id of the episode.
        attempt: number of the attempt.
        recorded: see `CallJournal`.
        seed: see `CallJournal`.
        inherited: see `CallJournal`.
        edits: see `CallJournal`.
        on_call: called for each recorded call that has returned.
        until: id of the call after which to stop.
        answers: see `CallJournal`.
        rescoring: whether to ignore recorded rewards; the scorers' scores stay.
    """

    __slots__ = ("_last_call", "_on_call", "_rewards", "new_rewards", "reached")

    def __init__(  # noqa: PLR0913 (one keyword per setting)
        self,
        log: TurnLog,
        episode_id: str,
        attempt: int,
        recorded: Sequence[JournalEntry],
        *,
        seed: int,
        inherited: Sequence[JournalEntry],
        edits: Mapping[str, Sequence[Mapping[str, Any]]],
        answers: Iterable[JournalEntry],
        on_call: OnCall,
        last_call: str | None,
        rescoring: bool,
    ) -> None:
        self._rewards: set[str] = set()
        if rescoring:
            self._rewards = {
                entry.call_id
                for entry in (*inherited, *recorded)
                if isinstance(entry.decode(), RewardEntry) and not ids.is_score(entry.call_id)
            }
        entries_to_replay = [entry for entry in recorded if entry.call_id not in self._rewards]
        before = [entry for entry in inherited if entry.call_id not in self._rewards]
        super().__init__(
            log, episode_id, attempt, entries_to_replay, seed=seed, inherited=before, edits=edits, answers=answers
        )
        self._on_call = on_call
        self._last_call = last_call
        self.reached = 0
        """Number of numbered calls that have returned."""
        self.new_rewards: list[RewardEntry] | None = [] if rescoring else None
        """Rewards that the code gave, if recorded rewards are ignored."""

    def open(self, digest: bytes, describe: Callable[[], str]) -> JournaledCall:
        self._skip_rewards()
        return super().open(digest, describe)

    def peek(self, digest: bytes) -> EntryBody | None:
        self._skip_rewards()
        return super().peek(digest)

    def fork_edits(self) -> Sequence[Mapping[str, Any]]:
        self._skip_rewards()
        return super().fork_edits()

    async def reach(self, call: JournaledCall, *, cancelled: bool = False) -> None:
        await super().reach(call, cancelled=cancelled)
        if call.recorded is None:
            self._end_at(call, "a new call")

    def record(self, call: JournaledCall, body: EntryBody) -> None:
        """End the replay at this call: it was not recorded."""
        self._end_at(call, describe_entry(body))

    def record_again(self, call: JournaledCall, body: TurnEntry) -> None:
        self._came_back(call.call_id, body)

    def check_new(self, call: JournaledCall, difference: str) -> None:
        if difference:
            self.mismatch(call.call_id, DIFFERENT_REQUEST, difference, remedy=REPLAY_REMEDY)
        self._end_at(call, "a turn that was not requested in the recording")

    def reward(self, body: RewardEntry) -> RewardEntry:
        if self.new_rewards is None:
            return super().reward(body)
        self.new_rewards.append(body)
        return body

    def _returned(self, call_id: str) -> None:
        entry = self._recorded.get(call_id)
        super()._returned(call_id)
        if entry is not None and ids.has_call_number(call_id):
            self._came_back(call_id, entry.decode())

    def _came_back(self, call_id: str, body: EntryBody) -> None:
        self.reached += 1
        self._on_call(call_id, describe_entry(body))
        if call_id == self._last_call:
            error = ReplayStoppedError(f"stopped at call {call_id}, as requested")
            self.fail(error)
            raise error

    def _skip_rewards(self) -> None:
        if self._rewards:
            strand = current_strand()
            while ids.call_id(strand.path, strand.calls) in self._rewards:
                strand.calls += 1

    def _end_at(self, call: JournaledCall, act: str) -> NoReturn:
        error = CallNotRecordedError(call.call_id, act)
        self.fail(error)
        raise error


class ReplayRunner(EpisodeRunner):
    """Runs attempts over their journals alone; see `ReplayJournal` for the keyword arguments."""

    def __init__(
        self,
        *,
        inherited: Sequence[JournalEntry],
        on_call: OnCall,
        until: str | None,
        rescoring: bool,
        **services: Any,
    ) -> None:
        super().__init__(**services)
        self._inherited_entries = inherited
        self._on_call = on_call
        self.until = until
        self._rescoring = rescoring
        self.journal: ReplayJournal | None = None
        """The journal of the newest attempt."""

    def _journal_of(
        self, spec: EpisodeSpec, recorded: Iterable[JournalEntry], answers: Iterable[JournalEntry]
    ) -> CallJournal:
        self.journal = ReplayJournal(
            *(self._log, spec.episode_id, spec.attempt, list(recorded)),
            seed=spec.seed,
            inherited=self._inherited_entries,
            edits={} if spec.fork is None else spec.fork.edits,
            answers=answers,
            on_call=self._on_call,
            last_call=self.until,
            rescoring=self._rescoring,
        )
        return self.journal


class ReplayHost:
    """An `EpisodeHost` that knows the recorded children of an episode, and starts none.

    Args:
        entries: entries of the episode, including inherited ones.
    """

    def __init__(self, entries: Collection[JournalEntry]) -> None:
        bodies = ((entry.call_id, entry.decode()) for entry in entries)
        self._spawn_entries = {call_id: body for call_id, body in bodies if isinstance(body, SpawnEntry)}

    def spawn(
        self,
        parent: EpisodeSpec,
        environment: str,
        tasks: Sequence[Task],
        spawn_call: str,
        on_end: Callable[[int, EpisodeHeader], None],
        known: Sequence[str] = (),
    ) -> SpawnedGroup:
        """Return the recorded children of the call; the journal holds their results."""
        entry = self._spawn_entries.get(spawn_call)
        if entry is not None and len(entry.children) == len(tasks):
            return SpawnedGroup(group_id=entry.group_id, episode_ids=entry.children)
        names = [ids.child_episode_id(parent.episode_id, parent.attempt, spawn_call, i) for i in range(len(tasks))]
        return SpawnedGroup(group_id=f"{parent.episode_id}~{parent.attempt}.{spawn_call}", episode_ids=tuple(names))

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

    def record_episode_metrics(self, spec: EpisodeSpec, header: EpisodeHeader, metrics: Mapping[str, float]) -> None:
        """Discard the measurement."""
