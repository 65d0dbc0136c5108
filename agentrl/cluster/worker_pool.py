"""Manages the processes of episode workers as one worker: implements `core.ports.Worker`.

Each process (`app.worker_server`) is an asyncio worker with its own partition of the journal. Owns the assignment of
episodes to processes, their queue, and the episodes of a process that dies. The placement decides where processes
run: as children of this one, or of Ray actors. The pool receives only headers, never tokens.
Invariants: an episode is with at most one process, and moves to another only when the first is dead; it is reported
once, after its commit is durable; a process that lags behind gets new episodes last, and delays no episodes of
others.

Only an episode that kills its process is dropped. Deaths count in a row: machines fail, and an episode that progresses
after a death did not cause it. With two deaths in a row an episode is a suspect. A process takes few suspects at once,
fewer the more deaths they witnessed, so that each death is more informative. An episode that witnessed three more
deaths than all others that died with it is the likely cause, and dropped the second time; the first time, the cause may
be an episode that was not suspected yet. There is no circular waiting: a suspect with children in flight waits for them
in the queue and delays none of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.cluster import worker_wire as wire
from agentrl.cluster.worker_process import WorkerProcess
from agentrl.core import rpc
from agentrl.core.clock import ATTEMPTS
from agentrl.core.errors import AgentRLError, EngineError, EpisodeError
from agentrl.core.records import EpisodeHeader, EpisodeSpec, ProcessStatus, dropped_header
from agentrl.core.text import plural
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.run_process import NAMED

if TYPE_CHECKING:
    from agentrl.cluster.journal_stream import JournalReceiver
    from agentrl.core.clock import Clock
    from agentrl.core.ports import EpisodeHost, PolicyCounts
    from agentrl.engines.process import ProcessPlacement
    from agentrl.engines.remote.client import AddressableEngine
    from agentrl.journal.port import CommitLog

OnEnd = Callable[[EpisodeHeader], None]
Reply = Callable[[rpc.Reply], None]

MIN_SUSPECT_DEATHS = 2
"""Number of deaths in a row after which an episode is suspected of killing processes."""
LIKELY_MARGIN = 3
"""Number of deaths by which an episode must exceed all others of the dead process to be the likely cause."""
GUILTY_DEATHS = 2
"""Number of deaths of which an episode must be the likely cause to be guilty."""
SPLIT = 4
"""Factor by which each further death lowers the number of suspects in one process."""


@dataclass(slots=True, eq=False)
class PlacedEpisode:
    """An episode in flight."""

    number: int
    spec: EpisodeSpec
    on_end: OnEnd
    resume: bool
    process: WorkerProcess | None = None
    """Process that runs the episode; None while it waits for a process or is being committed."""
    deaths: dict[int, bool] = field(default_factory=dict)
    """Numbers of the processes that died with the episode since its last progress on disk, without deaths attributed to
    another, and whether the episode is the death's likely cause."""
    is_parked: bool = False
    deadline: float = float("inf")
    """Deadline of a parked episode; see `rollout.episode.LiveEpisode`."""

    @property
    def is_suspect(self) -> bool:
        """Whether the episode is suspected of killing processes."""
        return len(self.deaths) >= MIN_SUSPECT_DEATHS


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The size and limits of a pool, and the work of its processes."""

    workers: int
    work: wire.WorkerSetup
    """First message to each process, except for the worker's number."""
    max_in_flight: int
    silence_s: float
    """Seconds of silence after which a process counts as dead."""
    attempts: int = ATTEMPTS
    """Maximum number of consecutive losses of a process."""


class WorkerPool:
    """Runs episodes in worker processes, which start when the pool is attached.

    Args:
        settings: number of processes and their arguments.
        engines: engines from which the processes sample, one per base model in the order of `RolloutPlan.bases`.
        placements: placement of each process; closed with the pool.
        receiver: writes the entries of processes on other hosts; closed with the pool. None: all processes write their
            own.
        clock: clock for the waits between attempts.
        tell: prints a line for the user.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        engines: Sequence[AddressableEngine],
        placements: Sequence[ProcessPlacement],
        clock: Clock,
        tell: Callable[[str], None],
        receiver: JournalReceiver | None = None,
    ) -> None:
        self.last_failure = ""
        """Error of the last dropped episode, for the user."""
        self.killers = 0
        """Number of episodes that were dropped because they killed processes."""
        self.processes: list[WorkerProcess] = []
        self._settings = settings
        self._engines = engines
        self.placements = placements
        """Placement of each process; those of the first may be replaced before they start."""
        self._receiver = receiver
        self._clock = clock
        self._tell = tell
        self._share = -(-settings.max_in_flight // settings.workers)
        """Maximum number of root episodes per process; children are not counted."""
        self._episodes: dict[int, PlacedEpisode] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._deaths = 0
        """Number of processes that have died."""
        self._queue: dict[int, PlacedEpisode] = {}
        """Episodes that wait for a process, in order."""
        self._unready: set[WorkerProcess] = set()
        """First processes that were never ready. Episodes wait until all are, because the first ready process would
        take all of them."""
        self._shared_processes: set[WorkerProcess] = set()
        """Processes that were ready at least once, among which `max_in_flight` is divided."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that commit episodes and answer workers; contains `_requests`."""
        self._requests: set[asyncio.Task[None]] = set()
        """Tasks that answer requests of workers."""
        self._awaited: dict[AddressableEngine, asyncio.Task[None]] = {}
        """Tasks that wait for engines without addresses."""
        self._is_cancelling = False
        self._host: EpisodeHost
        self._store: CommitLog
        self._on_failure: Callable[[BaseException], None]

    def attach(self, host: EpisodeHost, store: CommitLog, on_failure: Callable[[BaseException], None]) -> None:
        """Connect the pool to the host that serves episodes, the store of commits, and the handler of failures that no
        episode caused."""
        self._host, self._store, self._on_failure = host, store, on_failure
        self._unready = {self._start_process(placement) for placement in self.placements}
        for engine in self._engines:
            engine.on_move(self._engine_moved)

    def _start_process(self, placement: ProcessPlacement) -> WorkerProcess:
        settings = self._settings
        process = WorkerProcess(
            msgspec.structs.replace(settings.work, number=len(self.processes)),
            self,
            placement=placement,
            receiver=self._receiver,
            attempts=settings.attempts,
            silence_s=settings.silence_s,
            clock=self._clock,
            tell=self._tell,
        )
        self.processes.append(process)
        return process

    async def close(self) -> None:
        """End the processes. Idempotent."""
        for engine in self._engines:
            engine.on_move(lambda: None)
        for task in self._awaited.values():
            task.cancel()
        self._on_failure = lambda error: None
        self._is_cancelling = True
        await asyncio.gather(*(process.close() for process in self.processes))
        await self._wait_until_settled()
        if self._receiver is not None:
            await self._receiver.close()
        for placement in self.placements:
            await placement.close()

    def statuses(self) -> list[ProcessStatus]:
        return [part.status() for part in (*self.processes, self._receiver) if part is not None]

    # --- the port -----------------------------------------------------------------------------------------------------

    def activity(self) -> Mapping[str, float]:
        total = Counter[str]()
        for process in self.processes:
            total.update(process.activity)
        return total

    def submit(self, spec: EpisodeSpec, on_end: OnEnd, *, resume: bool = False) -> None:
        """Run an episode. It waits in the queue while all processes are full."""
        self._next += 1
        episode = self._episodes[self._next] = PlacedEpisode(self._next, spec, on_end, resume)
        self._numbers[spec.episode_id] = episode.number
        self._assign(episode)

    def park(self, episode_id: str) -> bool:
        episode = self._episodes.get(self._numbers.get(episode_id, 0))
        if episode is None:
            return False
        if not episode.is_parked:
            episode.is_parked = True
            if episode.process is not None:
                episode.process.suspects.discard(episode.number)
                episode.process.tell(wire.ParkEpisode(number=episode.number))
            self._fill()
        return True

    def unpark(self, count: int = 1) -> tuple[str, ...]:
        parked_episodes = [episode for episode in self._episodes.values() if episode.is_parked]
        parked_episodes.sort(key=lambda episode: (episode.deadline, episode.spec.episode_id))
        for episode in parked_episodes[:count]:
            episode.is_parked, episode.deadline = False, float("inf")
            if episode.process is None:
                episode.deaths.clear()  # it could make no progress while it waited, so these deaths do not count
            else:
                if episode.is_suspect:
                    episode.process.suspects.add(episode.number)
                episode.process.tell(wire.UnparkEpisode(number=episode.number))
        self._fill()
        return tuple(episode.spec.episode_id for episode in parked_episodes[:count])

    async def cancel(self) -> None:
        """Stop all episodes. A process that does not stop is killed."""
        self._is_cancelling = True
        self._queue.clear()
        try:
            # longer than the wait for a stuck program
            await asyncio.gather(*(process.cancel(10.0) for process in self.processes))
            for process in self.processes:
                self._leave(process, *process.episodes)
            await self._wait_until_settled()
            self._episodes.clear()
            self._numbers.clear()
        finally:
            self._is_cancelling = False

    async def _wait_until_settled(self) -> None:
        """Wait for commits. Cancel requests first: a branch may wait for episodes that were just cancelled."""
        for request in tuple(self._requests):
            request.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    # --- episodes -----------------------------------------------------------------------------------------------------

    def _assign(self, episode: PlacedEpisode) -> None:
        """Assign an episode to the process with the fewest episodes, silent ones last; queue it if all are full."""
        able = [
            process
            for process in self.processes
            if process.is_ready and not process.is_leaving and self._takes(process, episode)
        ]
        if not able or self._unready or (episode.is_suspect and self._can_wait(episode)):
            self._queue[episode.number] = episode
            return
        process = min(able, key=lambda process: len(process.episodes))
        if process.is_behind:  # asked of the others only now, since each asks the clock
            process = min(able, key=lambda process: (process.is_behind, len(process.episodes)))
        episode.process = process
        process.episodes.add(episode.number)
        process.roots[episode.spec.purpose] += episode.spec.parent_id is None
        if episode.is_suspect:
            process.suspects.add(episode.number)
        process.tell(wire.StartEpisode(number=episode.number, spec=episode.spec, resume=episode.resume))
        if episode.is_parked:
            process.tell(wire.ParkEpisode(number=episode.number))

    def _takes(self, process: WorkerProcess, episode: PlacedEpisode) -> bool:
        """Whether a process has room for an episode; the number of suspects is limited by the deaths of the most
        suspected one."""
        if episode.spec.parent_id is None and process.roots[episode.spec.purpose] >= self._share:
            return False
        if not process.suspects or not episode.is_suspect:
            return True
        max_deaths = max(len(self._episodes[number].deaths) for number in (episode.number, *process.suspects))
        room: int = self._share // SPLIT ** (max_deaths - MIN_SUSPECT_DEATHS + 1)
        return len(process.suspects) < room

    def _can_wait(self, episode: PlacedEpisode) -> bool:
        """Whether an episode can wait without a process at no cost, because it is parked or has children in flight."""
        return episode.is_parked or any(
            child.spec.parent_id == episode.spec.episode_id for child in self._episodes.values()
        )

    def _leave(self, process: WorkerProcess, *numbers: int) -> list[PlacedEpisode]:
        """Remove episodes from a process and return them."""
        episodes = [self._episodes[number] for number in numbers]
        for episode in episodes:
            episode.process = None
            process.episodes.discard(episode.number)
            process.suspects.discard(episode.number)
            process.roots[episode.spec.purpose] -= episode.spec.parent_id is None
        return episodes

    def _fill(self) -> None:
        """Assign waiting episodes to processes with room, in order."""
        queue, self._queue = self._queue, {}
        for episode in queue.values():
            self._assign(episode)

    # --- what processes say -------------------------------------------------------------------------------------------

    def ready(self, process: WorkerProcess) -> None:
        self._tell_addresses(process)
        self._unready.discard(process)
        self._shared_processes.add(process)
        self._share = -(-self._settings.max_in_flight // max(len(self._shared_processes), self._settings.workers))
        if not self._unready:
            self._fill()

    def limit(self, max_in_flight: int) -> None:
        """Change the number of root episodes of each purpose that may run at once."""
        self._settings = replace(self._settings, max_in_flight=max_in_flight)
        self._share = -(-max_in_flight // max(len(self._shared_processes), self._settings.workers))
        self._fill()

    def lost(self, process: WorkerProcess) -> None:
        """Reassign the episodes of the process. They resume from their journaled entries."""
        self._deaths += 1
        episodes = self._leave(process, *sorted(process.episodes))
        for episode in episodes:
            if not episode.is_parked and not process.is_leaving:  # parked episodes could not have made progress
                episode.deaths[self._deaths] = False
            episode.resume = True
        if self._is_cancelling:
            return
        killer = _accuse(episodes)
        if killer is not None and sum(killer.deaths.values()) >= GUILTY_DEATHS:
            episodes.remove(killer)
            detail = f"{len(killer.deaths)} worker processes died while it ran, and it made no progress in between"
            self.killers += 1
            self._tell(f"{_name_of(killer)} is dropped as worker_lost: {detail}")
            for episode in {*self._episodes.values()} - {killer}:
                for death in killer.deaths:
                    episode.deaths.pop(death, None)
            for worker in self.processes:
                worker.suspects = {number for number in worker.suspects if self._episodes[number].is_suspect}
            self._commit(killer, dropped_header(killer.spec, "worker_lost"), b"", {}, detail)
            process.supervisor.achieved()  # the cause of its deaths has been dropped, so restart the count
        for episode in episodes:
            self._assign(episode)
        self._fill()  # assigns episodes that are no longer suspects

    def failed(self, error: AgentRLError) -> None:
        """Report the failure, with the episodes that ran in processes when they died."""
        suspects = sorted(
            (suspect for suspect in self._episodes.values() if suspect.deaths), key=lambda suspect: -len(suspect.deaths)
        )
        if suspects and isinstance(error, EngineError):
            names = ", ".join(
                f"{_name_of(suspect)} {plural(len(suspect.deaths), 'time')}" for suspect in suspects[:NAMED]
            )
            more = f" and {len(suspects) - NAMED} more" if len(suspects) > NAMED else ""
            error = EngineError(
                f"{error}. Episodes that were running in processes that died, and have made no progress since: "
                f"{names}{more}"
            )
        self._on_failure(error)

    def on_message(self, process: WorkerProcess, message: wire.FromWorker) -> None:
        episode = self._episodes.get(getattr(message, "number", 0))
        if episode is None or episode.process is not process:
            return  # the episode was cancelled or replaced
        if self._is_cancelling and not isinstance(message, wire.EpisodeEnded):
            return  # a failed pool starts nothing new
        match message:
            case wire.EpisodeEnded():
                self._leave(process, episode.number)
                header = wire.decode_episode_header(episode.spec, message, process.partition)
                self._commit(episode, header, message.digest, message.metrics, message.detail, message.counts)
                self._fill()
            case wire.EpisodeProgressed():
                episode.deaths.clear()
                if episode.number in process.suspects:
                    process.suspects.remove(episode.number)
                    self._fill()
            case wire.SpawnChildEpisodes():
                tasks, call = [message.tasks[index] for index in message.of], message.call
                on_end = partial(self._child_ended, episode, message.attempt, call)
                self._host.spawn(episode.spec, message.environment, tasks, call, on_end, message.known)
            case wire.StartBranches():
                self._requests.add(self._start(self._branch(process.replier(), episode.spec, message)))
            case wire.RememberProposal():
                self._requests.add(self._start(self._remember(process.replier(), episode.spec, message)))
            case wire.AttemptStarted():
                episode.spec = replace(episode.spec, attempt=message.attempt)
                self._host.readmit(episode.spec)
            case wire.EpisodeParked():
                episode.deadline = message.deadline

    def _child_ended(self, parent: PlacedEpisode, attempt: int, call: str, index: int, header: EpisodeHeader) -> None:
        """Report the end of a child to the parent's current process; a later process asks again."""
        if parent.process is not None:
            ended, partition = wire.encode_episode_ended(0, header), header.location and header.location.partition
            message = wire.ChildEpisodeEnded(
                number=parent.number, attempt=attempt, call=call, index=index, ended=ended, partition=partition
            )
            parent.process.tell(message)

    def _engine_moved(self) -> None:
        for process in self.processes:
            self._tell_addresses(process)
        for engine in self._engines:
            # Workers, which call the engine, only wait for its addresses; this hears if there will be none.
            if not engine.addresses and engine not in self._awaited:
                task = self._awaited[engine] = asyncio.get_running_loop().create_task(engine.ping())
                task.add_done_callback(partial(self._on_answer, engine))

    def _on_answer(self, engine: AddressableEngine, task: asyncio.Task[None]) -> None:
        del self._awaited[engine]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    def _tell_addresses(self, process: WorkerProcess) -> None:
        for base, engine in enumerate(self._engines):
            process.tell(wire.EngineAddresses(addresses=engine.addresses, base=base))

    # --- what takes time ----------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._requests.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    async def _remember(self, reply: Reply, spec: EpisodeSpec, proposal: wire.RememberProposal) -> None:
        novelty = await self._host.remember(spec, proposal.call_id, proposal.key, proposal.structure)
        reply(wire.ProposalReply(call=proposal.call, known=novelty))

    async def _branch(self, reply: Reply, main: EpisodeSpec, request: wire.StartBranches) -> None:
        try:
            versions = await self._host.branch(main, request.point, request.count, request.versions)
            answer = wire.BranchesStarted(call=request.call, pins=dict(versions))
        except EpisodeError as error:
            answer = wire.BranchesStarted(call=request.call, pins={}, refusal=str(error))
        reply(answer)

    def _commit(
        self,
        episode: PlacedEpisode,
        header: EpisodeHeader,
        digest: bytes,
        metrics: Mapping[str, float],
        detail: str,
        counts: Mapping[str, PolicyCounts] | None = None,
    ) -> None:
        async def commit() -> None:
            if not header.committed:
                self.last_failure = detail
            await self._store.commit(EpisodeEnd(episode.spec, header, digest, metrics, detail, counts))
            self._episodes.pop(episode.number, None)
            if self._numbers.get(episode.spec.episode_id) == episode.number:
                del self._numbers[episode.spec.episode_id]
            episode.on_end(header)
            parent = self._queue.get(self._numbers.get(episode.spec.parent_id or "", 0))
            if parent is not None and not self._can_wait(parent):
                parent.deaths.clear()  # it could make no progress while it waited, so these deaths do not count
                self._fill()

        self._start(commit())


def _name_of(episode: PlacedEpisode) -> str:
    return f"{episode.spec.episode_id} (task {episode.spec.task.id!r})"


def _accuse(dead: list[PlacedEpisode]) -> PlacedEpisode | None:
    """Mark the last death of the episode that witnessed `LIKELY_MARGIN` more deaths than all others of the dead
    process, and return the episode; None if there is none."""
    ordered = sorted(dead, key=lambda episode: len(episode.deaths), reverse=True)
    most, others = [*(len(episode.deaths) for episode in ordered), 0, 0][:2]
    if most < others + LIKELY_MARGIN:
        return None
    ordered[0].deaths[max(ordered[0].deaths)] = True
    return ordered[0]
