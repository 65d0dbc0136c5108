"""Manages the processes of episode workers as one worker: implements `core.ports.Worker`.

Each process (`app.worker_server`) is an asyncio worker with its own partition of the journal. Owns the assignment of
episodes to processes, their queue, and the episodes of a process that dies. The placement decides where processes
run: as children of this one, or of Ray actors. The pool receives only headers, never tokens.
Invariants: an episode is with at most one process, and moves to another only when the first is dead; it is reported
once, after its commit is durable; a process that lags behind gets new episodes last, and delays no episodes of
others.

Only an episode that kills its process is dropped. Deaths count in a row: machines fail, and an episode that progresses
after a death did not cause it. With two deaths in a row an episode is a suspect. A process takes few suspects at once,
fewer the more deaths they witnessed, so that each death is more informative; an episode that witnessed three more
deaths than any other that died with it is dropped. There is no circular waiting: a suspect with children in flight
waits for them in the queue and delays none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.cluster import worker_wire as wire
from agentrl.cluster.worker_process import WorkerProcess
from agentrl.core.clock import ATTEMPTS
from agentrl.core.errors import AgentRLError, EngineError, EpisodeError
from agentrl.core.records import EpisodeHeader, EpisodeSpec, ProcessStatus, dropped_header
from agentrl.core.text import plural
from agentrl.journal.run_process import NAMED

if TYPE_CHECKING:
    from agentrl.cluster.journal_stream import JournalReceiver
    from agentrl.core.clock import Clock
    from agentrl.core.ports import EpisodeHost, PolicyCounts
    from agentrl.engines.process import ProcessPlacement
    from agentrl.engines.remote.client import AddressableEngine
    from agentrl.journal.port import CommitLog

OnEnd = Callable[[EpisodeHeader], None]

SUSPECTED = 2
"""Number of deaths in a row after which an episode is suspected of killing processes."""
GUILTY = 3
"""Number of deaths by which an episode must exceed all others present at the last death to be guilty."""
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
    deaths: set[int] = field(default_factory=set)
    """Numbers of the processes that died with the episode since its last progress on disk, without deaths attributed to
    another."""
    is_parked: bool = False
    deadline: float = float("inf")
    """Deadline of a parked episode; see `rollout.episode.LiveEpisode`."""

    @property
    def is_suspect(self) -> bool:
        """Whether the episode is suspected of killing processes."""
        return len(self.deaths) >= SUSPECTED


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
        engines: engines from which the processes sample, one per base model in the order of `RunConfig.bases`.
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
        self._sharing: set[WorkerProcess] = set()
        """Processes that were ready at least once, among which `max_in_flight` is divided."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that commit episodes and answer workers."""
        self._idle = asyncio.Event()
        """Set when the last episode in flight ends."""
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

    def add(self, placement: ProcessPlacement) -> None:
        """Start one more process. It takes episodes once it is ready, and the others fewer."""
        self.placements = [*self.placements, placement]
        self._start_process(placement)

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
        self._on_failure = lambda error: None
        self._is_cancelling = True
        await asyncio.gather(*(process.close() for process in self.processes))
        await self._settled()
        if self._receiver is not None:
            await self._receiver.close()
        for placement in self.placements:
            await placement.close()

    def statuses(self) -> list[ProcessStatus]:
        receiver = [] if self._receiver is None else [self._receiver.status()]
        return [*(process.status() for process in self.processes), *receiver]

    # --- the port -----------------------------------------------------------------------------------------------------

    def submit(self, spec: EpisodeSpec, on_end: OnEnd, *, resume: bool = False) -> None:
        """Run an episode. It waits in the queue while all processes are full."""
        self._next += 1
        placed = self._episodes[self._next] = PlacedEpisode(self._next, spec, on_end, resume)
        self._numbers[spec.episode_id] = placed.number
        self._assign(placed)

    def park(self, episode_id: str) -> bool:
        placed = self._episodes.get(self._numbers.get(episode_id, 0))
        if placed is None:
            return False
        if not placed.is_parked:
            placed.is_parked = True
            if placed.process is not None:
                placed.process.suspects.discard(placed.number)
                placed.process.tell(wire.ParkEpisode(number=placed.number))
            self._fill()
        return True

    def unpark(self, count: int = 1) -> tuple[str, ...]:
        parked = [placed for placed in self._episodes.values() if placed.is_parked]
        parked.sort(key=lambda placed: (placed.deadline, placed.spec.episode_id))
        for placed in parked[:count]:
            placed.is_parked, placed.deadline = False, float("inf")
            if placed.process is None:
                placed.deaths.clear()  # it could make no progress while it waited, so these deaths do not count
            else:
                if placed.is_suspect:
                    placed.process.suspects.add(placed.number)
                placed.process.tell(wire.UnparkEpisode(number=placed.number))
        self._fill()
        return tuple(placed.spec.episode_id for placed in parked[:count])

    async def drain(self) -> None:
        while self._episodes:
            self._idle.clear()
            await self._idle.wait()

    async def cancel(self) -> None:
        """Stop all episodes. A process that does not stop is killed."""
        self._is_cancelling = True
        self._queue.clear()
        try:
            # longer than the wait for a stuck program
            await asyncio.gather(*(process.cancel(10.0) for process in self.processes))
            for process in self.processes:
                self._leave(process, *process.episodes)
            await self._settled()
            self._episodes.clear()
            self._numbers.clear()
            self._idle.set()
        finally:
            self._is_cancelling = False

    async def _settled(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    # --- episodes -----------------------------------------------------------------------------------------------------

    def _assign(self, placed: PlacedEpisode) -> None:
        """Assign an episode to the process with the fewest episodes, silent ones last; queue it if all are full."""
        able = [
            process
            for process in self.processes
            if process.is_ready and not process.is_leaving and self._takes(process, placed)
        ]
        if not able or self._unready or (placed.is_suspect and self._can_wait(placed)):
            self._queue[placed.number] = placed
            return
        process = min(able, key=lambda process: len(process.episodes))
        if process.is_behind:  # asked of the others only now, since each asks the clock
            process = min(able, key=lambda process: (process.is_behind, len(process.episodes)))
        placed.process = process
        process.episodes.add(placed.number)
        process.roots += placed.spec.parent_id is None
        if placed.is_suspect:
            process.suspects.add(placed.number)
        process.tell(wire.StartEpisode(number=placed.number, spec=placed.spec, resume=placed.resume))
        if placed.is_parked:
            process.tell(wire.ParkEpisode(number=placed.number))

    def _takes(self, process: WorkerProcess, placed: PlacedEpisode) -> bool:
        """Whether a process has room for an episode; the number of suspects is limited by the deaths of the most
        suspected one."""
        if placed.spec.parent_id is None and process.roots >= self._share:
            return False
        if not process.suspects or not placed.is_suspect:
            return True
        most = max(len(self._episodes[number].deaths) for number in (placed.number, *process.suspects))
        room: int = self._share // SPLIT ** (most - SUSPECTED + 1)
        return len(process.suspects) < room

    def _can_wait(self, placed: PlacedEpisode) -> bool:
        """Whether an episode can wait without a process at no cost, because it is parked or has children in flight."""
        return placed.is_parked or any(
            other.spec.parent_id == placed.spec.episode_id for other in self._episodes.values()
        )

    def _leave(self, process: WorkerProcess, *numbers: int) -> list[PlacedEpisode]:
        """Remove episodes from a process and return them."""
        left = [self._episodes[number] for number in numbers]
        for placed in left:
            placed.process = None
            process.episodes.discard(placed.number)
            process.suspects.discard(placed.number)
            process.roots -= placed.spec.parent_id is None
        return left

    def _fill(self) -> None:
        """Assign waiting episodes to processes with room, in order."""
        queue, self._queue = self._queue, {}
        for placed in queue.values():
            self._assign(placed)

    # --- what processes say -------------------------------------------------------------------------------------------

    def ready(self, process: WorkerProcess) -> None:
        self._tell_addresses(process)
        self._unready.discard(process)
        self._sharing.add(process)
        self._share = -(-self._settings.max_in_flight // max(len(self._sharing), self._settings.workers))
        if not self._unready:
            self._fill()

    def lost(self, process: WorkerProcess) -> None:
        """Reassign the episodes of the process. They resume from their journaled entries."""
        self._deaths += 1
        left = self._leave(process, *sorted(process.episodes))
        for placed in left:
            if not placed.is_parked and not process.is_leaving:  # parked episodes could not have made progress
                placed.deaths.add(self._deaths)
            placed.resume = True
        if self._is_cancelling:
            return
        if (killer := _killer(left)) is not None:
            left.remove(killer)
            detail = (
                f"{len(killer.deaths)} worker processes died while it ran, and it got nowhere: it is what killed them"
            )
            self.killers += 1
            self._tell(f"{_name_of(killer)} is dropped as worker_lost: {detail}")
            for placed in self._episodes.values():
                if placed is not killer:
                    placed.deaths -= killer.deaths
            for other in self.processes:
                other.suspects = {number for number in other.suspects if self._episodes[number].is_suspect}
            self._commit(killer, dropped_header(killer.spec, "worker_lost"), b"", {}, detail, {})
            process.supervisor.achieved()  # the cause of its deaths has been dropped, so restart the count
        for placed in left:
            self._assign(placed)
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
        placed = self._episodes.get(getattr(message, "number", 0))
        if placed is None or placed.process is not process:
            return  # the episode was cancelled or replaced
        if self._is_cancelling and not isinstance(message, wire.EpisodeEnded):
            return  # a failed pool starts nothing new
        match message:
            case wire.EpisodeEnded():
                self._leave(process, placed.number)
                header = wire.decode_episode_header(placed.spec, message, process.partition)
                counted = wire.decode_policy_counts(message)
                self._commit(placed, header, message.digest, message.metrics, message.detail, counted)
                self._fill()
            case wire.EpisodeProgressed():
                placed.deaths.clear()
                if placed.number in process.suspects:
                    process.suspects.remove(placed.number)
                    self._fill()
            case wire.SpawnChildEpisodes():
                tasks = [message.tasks[index] for index in message.of]
                on_end = partial(self._child_ended, placed, message.attempt, message.call)
                self._host.spawn(placed.spec, message.environment, tasks, message.call, on_end)
            case wire.StartBranches():
                self._start(self._branch(process, placed.spec, message))
            case wire.RememberProposal():
                self._start(self._remember(process, placed.spec, message))
            case wire.AttemptStarted():
                placed.spec = replace(placed.spec, attempt=message.attempt)
                self._host.readmit(placed.spec)
            case wire.EpisodeParked():
                placed.deadline = message.deadline

    def _child_ended(self, parent: PlacedEpisode, attempt: int, call: str, index: int, header: EpisodeHeader) -> None:
        """Report the end of a child to the parent's current process; a later process asks again."""
        if parent.process is not None:
            ended = wire.ChildEpisodeEnded(
                number=parent.number,
                attempt=attempt,
                call=call,
                index=index,
                ended=wire.encode_episode_ended(0, header),
                partition=None if header.location is None else header.location.partition,
            )
            parent.process.tell(ended)

    def _engine_moved(self) -> None:
        for process in self.processes:
            self._tell_addresses(process)

    def _tell_addresses(self, process: WorkerProcess) -> None:
        for base, engine in enumerate(self._engines):
            process.tell(wire.EngineAddresses(addresses=engine.addresses, base=base))

    # --- what takes time ----------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    async def _remember(self, process: WorkerProcess, spec: EpisodeSpec, asked: wire.RememberProposal) -> None:
        known = await self._host.remember(spec, asked.call_id, asked.key, asked.structure)
        process.tell(wire.ProposalReply(call=asked.call, known=known))

    async def _branch(self, process: WorkerProcess, main: EpisodeSpec, request: wire.StartBranches) -> None:
        try:
            versions = await self._host.branch(main, request.point, request.count, request.versions)
            reply = wire.BranchesStarted(call=request.call, pins=dict(versions))
        except EpisodeError as error:
            reply = wire.BranchesStarted(call=request.call, pins={}, refusal=str(error))
        process.tell(reply)

    def _commit(
        self,
        placed: PlacedEpisode,
        header: EpisodeHeader,
        digest: bytes,
        metrics: Mapping[str, float],
        detail: str,
        counted: Mapping[str, PolicyCounts],
    ) -> None:
        async def commit() -> None:
            await self._store.commit_episode(placed.spec, header, digest, metrics, detail)
            if header.committed:
                self._host.record_episode_metrics(placed.spec, header, counted)
            else:
                self.last_failure = detail
            self._episodes.pop(placed.number, None)
            if self._numbers.get(placed.spec.episode_id) == placed.number:
                del self._numbers[placed.spec.episode_id]
            placed.on_end(header)
            parent = self._queue.get(self._numbers.get(placed.spec.parent_id or "", 0))
            if parent is not None and not self._can_wait(parent):
                parent.deaths.clear()  # it could make no progress while it waited, so these deaths do not count
                self._fill()
            if not self._episodes:
                self._idle.set()

        self._start(commit())


def _name_of(placed: PlacedEpisode) -> str:
    return f"{placed.spec.episode_id} (task {placed.spec.task.id!r})"


def _killer(dead: list[PlacedEpisode]) -> PlacedEpisode | None:
    """Return the episode that witnessed at least `GUILTY` more deaths than every other episode of the dead process;
    None if there is none."""
    first = max(dead, key=lambda placed: len(placed.deaths), default=None)
    others = max((len(placed.deaths) for placed in dead if placed is not first), default=0)
    if first is None or others > 1 or len(first.deaths) < others + GUILTY:
        return None
    return first
