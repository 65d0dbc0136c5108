"""Runs the process of one episode worker: keeps it alive, sends and receives its messages, and detects silence.

Owns the connection. `engines.process.Supervisor` restarts the process; the pool owns its episodes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Protocol

import msgspec

from agentrl.cluster import worker_wire as wire
from agentrl.core import rpc
from agentrl.core.clock import RetryBudget
from agentrl.core.errors import AgentRLError, EngineLostError, rebuild_error
from agentrl.core.records import ProcessStatus
from agentrl.core.text import plural
from agentrl.engines.process import ChildProgram, Supervisor
from agentrl.observe.bottleneck import MOST

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agentrl.cluster.journal_stream import JournalReceiver
    from agentrl.core.clock import Clock
    from agentrl.core.records import Purpose
    from agentrl.engines.process import ConnectedChildProcess, ProcessPlacement

PROGRAM = ChildProgram("", {}, "agentrl.app.worker_server")
BEHIND_S = 5.0
"""Seconds of silence after which a process gets new episodes last; a process sends a message every second."""

CLOSE_S = 5.0
"""Timeout for the process to end once no episode is in flight, in seconds."""


class WorkerProcessOwner(Protocol):
    """The owner of a worker process."""

    def ready(self, process: WorkerProcess) -> None:
        """Note that a new process is ready for episodes."""
        ...

    def on_message(self, process: WorkerProcess, message: wire.FromWorker) -> None:
        """Handle a message of the process about its episodes."""
        ...

    def lost(self, process: WorkerProcess) -> None:
        """Handle the death of the process; all its messages were delivered, and another process is started."""
        ...

    def failed(self, error: AgentRLError) -> None:
        """Report a failure that no episode caused; the run ends."""
        ...


class WorkerProcess:
    """Supervised process of an episode worker, as described in the module. Started at once."""

    def __init__(
        self,
        work: wire.WorkerSetup,
        owner: WorkerProcessOwner,
        *,
        placement: ProcessPlacement,
        receiver: JournalReceiver | None,
        attempts: int,
        silence_s: float,
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self.partition = f"turns-{work.number}.db"
        self.episodes: set[int] = set()
        """Numbers of the process's episodes."""
        self.roots: Counter[Purpose] = Counter()
        """Number of root episodes among `episodes`."""
        self.suspects: set[int] = set()
        """Numbers of the episodes suspected of killing processes."""
        self.is_ready = False
        """Whether the process has answered its welcome and takes episodes."""
        self.is_leaving = False
        """Whether the process takes no more episodes, and ends by itself."""
        self._activity: Mapping[str, float] = {}
        """Totals of the running process, as of its newest heartbeat."""
        self._ended_activity = Counter[str]()
        """Totals of the processes that have ended; each counts from 0."""
        self._work = work
        self._owner = owner
        self.placement = placement
        self._receiver = receiver
        self._clock = clock
        self._tell = tell
        self._child: ConnectedChildProcess | None = None
        self._connection: rpc.Connection | None = None
        self._last_message_at = clock.monotonic()
        self.supervisor = Supervisor(
            f"worker {work.number}",
            self,
            budget=RetryBudget(attempts),
            silence_s=silence_s,
            clock=clock,
            tell=tell,
        )
        self._watch_task = asyncio.get_running_loop().create_task(
            self._report_end(), name=f"watch worker {work.number}"
        )

    @property
    def node(self) -> str:
        """Address of the process's machine; "" for the run's host, and while there is no process."""
        return "" if self._child is None else self._child.host

    @property
    def is_behind(self) -> bool:
        """Whether the process has been silent for longer than `BEHIND_S`."""
        return self._clock.monotonic() - self._last_message_at > BEHIND_S

    @property
    def activity(self) -> Mapping[str, float]:
        """What the worker's episodes have spent their time on in all its processes, at most a second ago."""
        return self._ended_activity + Counter(self._activity)

    def tell(self, message: wire.ToWorker) -> None:
        """Send a message; never blocks. Messages of one event loop iteration share a system call."""
        if self._connection is not None and self.is_ready:
            self._connection.queue(message)

    def replier(self) -> Callable[[rpc.Reply], None]:
        """Return a function that sends replies to the running process only. The next process numbers its calls from 1
        again, so it must not receive them."""
        assert self._connection is not None, "a process without a connection asks nothing"
        return self._connection.queue

    def leave(self, why: str) -> None:
        """Make the process park its episodes, which continue in others, and end. Idempotent."""
        if not self.is_leaving:
            self._tell(f"worker {self._work.number} leaves ({why}): its episodes are parked; other workers resume them")
            self.tell(wire.ShutDownWorker())
            self.is_leaving = True

    def status(self) -> ProcessStatus:
        """Return the node and the activity of the process."""
        state = "starts" if not self.is_ready else "leaves" if self.is_leaving else "plays"
        episodes = plural(len(self.episodes), "episode")
        return ProcessStatus(
            name=f"worker {self._work.number}",
            node=self.node,
            doing=f"{state} {episodes}" if state == "plays" else f"{state}, with {episodes}",
        )

    async def cancel(self, seconds: float) -> None:
        """Stop all episodes of the process; kill and replace the process if that takes longer than `seconds`."""
        if self._connection is None or not self.is_ready:
            return
        try:
            await self._connection.ask(0, wire.CancelEpisodes(), limit_s=seconds)
        except EngineLostError:
            pass  # its episodes ended with it
        except TimeoutError:
            self.supervisor.kill(f"it did not stop its episodes within {seconds:g} s")
            self.is_ready = False

    async def close(self) -> None:
        """End the process permanently. Idempotent."""
        self._watch_task.cancel()
        if self._connection is not None:
            # The end of the connection makes the child close its partition and exit.
            self._connection.close(EngineLostError(f"worker {self._work.number} was closed"))
        await self.supervisor.stop(CLOSE_S if self.is_ready else 0.0)

    # --- the process ------------------------------------------------------------------------------------------------

    async def launch(self) -> ConnectedChildProcess:
        child = self._child = await self.placement.start(PROGRAM)
        self._connection = rpc.Connection(child.reader, child.writer, wire.FROM_WORKER)
        self._connection.start(
            self._on_message, on_end=self.supervisor.kill, on_message=self._on_sign_of_life, name="worker's messages"
        )
        return child

    async def welcome(self) -> None:
        if self._connection is None:
            raise EngineLostError("the worker's process is not connected")
        work = self._work
        if self._receiver is not None:
            receiver, host = await self._receiver.grant(work.number), self.node
            host = "" if host == self._receiver.host else host
            work = msgspec.structs.replace(work, receiver=receiver, host=host)
        await self._connection.ask(0, work)
        self.is_ready = True
        self._owner.ready(self)

    async def died(self, how: str) -> None:
        self.is_ready = False  # no new episodes while its entries are written
        if self._receiver is not None:
            # Revoke before its episodes are reassigned: the process may be alive but unreachable.
            await self._receiver.revoke(self._work.number)
        if self._connection is not None:
            await self._connection.drain(EngineLostError(f"worker {self._work.number} {how}"))
        self._child, self._connection = None, None
        self._ended_activity.update({name: spent for name, spent in self._activity.items() if not name.endswith(MOST)})
        self._activity = {}
        if self.is_leaving:
            self.supervisor.achieved()  # a requested exit does not count as a loss
        self._owner.lost(self)
        self.is_leaving = False
        self._watch_task.cancel()
        self._watch_task = asyncio.get_running_loop().create_task(
            self._report_end(), name=f"watch worker {self._work.number}"
        )

    async def _report_end(self) -> None:
        """Report a process that is no longer restarted."""
        try:
            await self.supervisor.serving()
        except AgentRLError as error:
            self._owner.failed(error)

    def _on_sign_of_life(self, message: object) -> None:
        self.supervisor.sign_of_life()
        self._last_message_at = self._clock.monotonic()

    def _on_message(self, message: wire.FromWorker) -> None:
        try:
            self._handle(message)
        except ValueError:
            raise  # the process is replaced, as after any invalid message
        except Exception as error:  # noqa: BLE001 - a bug of ours, or the disk: the run must not wait forever
            self._owner.failed(error if isinstance(error, AgentRLError) else _bug(error))
            self.supervisor.kill()

    def _handle(self, message: wire.FromWorker) -> None:
        match message:
            case wire.WorkerHeartbeat():
                self._activity = message.activity
                if self._child is not None and self._child.is_drained:
                    self.leave("its node is drained")
            case wire.WorkerShuttingDown():
                self.leave("it got SIGTERM")
            case wire.LogLine():
                self._tell(message.line)
            case wire.WorkerFailed():
                self._owner.failed(rebuild_error(message.kind, message.message, among=(AgentRLError,)))
            case _:
                if isinstance(message, wire.EpisodeEnded | wire.EpisodeProgressed):
                    self.supervisor.achieved()
                self._owner.on_message(self, message)


def _bug(error: Exception) -> AgentRLError:
    failure = AgentRLError(f"a worker's message could not be handled ({type(error).__name__}: {error})")
    failure.__cause__ = error
    return failure
