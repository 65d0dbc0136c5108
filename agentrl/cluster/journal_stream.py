"""Sends the entries of episode workers on other hosts to the journal on the run's host.

A worker on another host has a `StreamedTurnLog` instead of a partition: it sends entries over TCP and waits, where a
commit needs it, until they are on the disk of the run's host. There, one receiving process (this module as a program)
writes a partition for each worker with the production writer. The run only grants and revokes connections: entries
never pass through its event loop. Owns: the messages, the receiver, which connection may write a partition. Does not
own: the contents of entries (`journal.store`), the run's processes.
Invariants: at most one connection writes a partition, and none once it is revoked; messages take effect in the order
in which they were sent; a worker ends when its connection ends, and its episodes are reassigned only when all entries
received from it are on disk, so that the next worker sees them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentrl.core import rpc
from agentrl.core.clock import RetryBudget, SystemClock
from agentrl.core.errors import AgentRLError, EngineLostError, JournalError
from agentrl.core.network import Address, Listener, connect
from agentrl.core.parent_death import die_with_parent
from agentrl.core.records import ProcessStatus
from agentrl.engines.process import ChildProgram, LocalPlacement, Supervisor
from agentrl.journal.entries import JournalEntry
from agentrl.journal.run_process import retry_until_writer_exits
from agentrl.journal.store import SqliteTurnLog, check_entry_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentrl.core.clock import Clock
    from agentrl.core.records import ForkPoint
    from agentrl.core.tokens import RoutingReference
    from agentrl.engines.process import ConnectedChildProcess
    from agentrl.journal.routing import RoutingStore

RECEIVER = ChildProgram("", {}, "agentrl.cluster.journal_stream")
SILENCE_S = 60.0


# --- messages ---------------------------------------------------------------------------------------------------------


class StartReceiver(rpc.WireMessage, frozen=True):
    """Message to the receiver with the journal whose partitions it writes and the address at which it listens."""

    journal: str
    host: str


class GrantPartition(rpc.WireMessage, frozen=True):
    """Request to the receiver: let only a new process of a worker write the worker's partition."""

    call: int
    worker: int


class RevokePartition(rpc.WireMessage, frozen=True):
    """Request to the receiver: let no process write a worker's partition, and answer when all entries received so far
    are on disk."""

    call: int
    worker: int


class PartitionGranted(rpc.Reply, frozen=True):
    """Answer to `GrantPartition` with the address to which the worker's process connects."""

    address: str


class ReceiverHeartbeat(rpc.WireMessage, frozen=True):
    """Heartbeat to the run, with the bytes of entries received so far."""

    bytes: int


class Append(rpc.WireMessage, frozen=True):
    """Message from a worker with an entry or a partial."""

    entry: JournalEntry
    partial: bool


class RemovePartials(rpc.WireMessage, frozen=True):
    """Message from a worker; see `TurnLog.remove_partials`."""

    episode_id: str
    attempt: int
    call_id: str | None


class Flush(rpc.WireMessage, frozen=True):
    """Request from a worker: answer when all earlier messages are on disk."""

    call: int


class TakeOverAttempt(rpc.WireMessage, frozen=True):
    """Request from a worker: take over an attempt and answer with all its entries and partials."""

    call: int
    episode_id: str
    attempt: int


class FindProgressedEpisodes(rpc.WireMessage, frozen=True):
    """Request from a worker; see `WorkerTurnLog.advanced`."""

    call: int


class AttemptTakenOver(rpc.Reply, frozen=True):
    """Answer to `TakeOverAttempt`."""

    entries: tuple[JournalEntry, ...]
    partials: tuple[JournalEntry, ...]


class ProgressedEpisodes(rpc.Reply, frozen=True):
    """Answer to `FindProgressedEpisodes`."""

    episodes: tuple[str, ...]


Question = Flush | TakeOverAttempt | FindProgressedEpisodes
ToReceiver = StartReceiver | GrantPartition | RevokePartition
ToRun = PartitionGranted | ReceiverHeartbeat | rpc.Acknowledgement | rpc.ErrorReply
FromWorker = Append | RemovePartials | Question
ToWorker = rpc.Acknowledgement | AttemptTakenOver | ProgressedEpisodes | rpc.ErrorReply
TO_RECEIVER: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
TO_RUN: msgspec.msgpack.Decoder[ToRun] = msgspec.msgpack.Decoder(ToRun)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


# --- in a worker's process, on any host -------------------------------------------------------------------------------


class StreamedTurnLog:
    """Partition on the run's host; implements `WorkerTurnLog`. Expert routing stays on this host."""

    def __init__(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, routing: RoutingStore
    ) -> None:
        self.name = name
        self._routing = routing
        self._connection = rpc.Connection(reader, writer, TO_WORKER)
        self._connection.start(lambda message: None, on_end=self._on_end, name="journal's answers")
        self._is_closed = False
        self._attempts: dict[tuple[str, int], AttemptTakenOver] = {}
        """Recorded entries of attempts that were taken over, held until they are read."""

    @staticmethod
    async def open(address: str, worker: int, routing: RoutingStore) -> StreamedTurnLog:
        """Connect to the receiver.

        Args:
            address: address that the receiver granted.
            worker: number of the worker.
            routing: the expert routing on this host.

        Raises:
            EngineLostError: the receiver cannot be reached from here, perhaps only for a while.
        """
        where = Address.parse(address)
        try:
            reader, writer = await connect(where)
        except (OSError, TimeoutError) as error:
            raise EngineLostError(
                f"{socket.gethostname()}: the journal on the run's host cannot be reached at port {where.port} of "
                f"{where.host} ({error}); docs/reference/security.md says which connections the network must allow"
            ) from error
        return StreamedTurnLog(f"turns-{worker}.db", reader, writer, routing)

    def append(self, entry: JournalEntry) -> None:
        check_entry_size(entry)
        self._connection.send(Append(entry=entry, partial=False))

    def store_routing(self, episode_id: str, attempt: int, routing: bytes) -> RoutingReference:
        return self._routing.put(episode_id, attempt, routing)

    def append_partial(self, entry: JournalEntry) -> None:
        self._connection.send(Append(entry=entry, partial=True))

    def remove_partials(self, episode_id: str, attempt: int, call_id: str | None = None) -> None:
        self._connection.send(RemovePartials(episode_id=episode_id, attempt=attempt, call_id=call_id))

    async def flush(self) -> None:
        call = self._connection.next_call()
        await self._connection.ask(call, Flush(call=call))

    async def take_over(self, episode_id: str, attempt: int) -> None:
        """Take over an attempt. `read` and `read_partials` then each return the recorded entries once."""
        call = self._connection.next_call()
        request = TakeOverAttempt(call=call, episode_id=episode_id, attempt=attempt)
        self._attempts[episode_id, attempt] = await self._connection.ask(call, request)

    def read(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Return the entries of an attempt that was taken over."""
        attempt_state = self._attempts.get((episode_id, attempt))
        return [] if attempt_state is None else list(attempt_state.entries)

    def read_partials(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Return the partial turns of an attempt that was taken over."""
        attempt_state = self._attempts.pop((episode_id, attempt), None)
        return [] if attempt_state is None else list(attempt_state.partials)

    def prefix(self, point: ForkPoint) -> list[JournalEntry]:
        """Raise an error, because forks run on the run's host.

        Raises:
            JournalError: always.
        """
        raise JournalError("a fork can only be run on the host of its run")

    async def advanced(self) -> list[str]:
        """Return the episodes with new entries on disk. Raises disk errors of the run's host."""
        call = self._connection.next_call()
        reply: ProgressedEpisodes = await self._connection.ask(call, FindProgressedEpisodes(call=call))
        return list(reply.episodes)

    def check(self) -> None:
        """Do nothing: the receiver reports errors in its next answer."""

    async def close(self) -> None:
        """Return when everything sent is on disk or the connection has ended. Idempotent."""
        with contextlib.suppress(AgentRLError):
            await self.flush()
        self._is_closed = True
        self._connection.close(EngineLostError("the journal's connection was closed"))

    def _on_end(self, why: str) -> None:
        if self._is_closed:
            return
        with contextlib.suppress(OSError):
            sys.stderr.write(
                "agentrl: the connection to the journal on the run's host ended, and this worker with it\n"
            )
        # Further entries would be lost, so exit: the run starts another process, which resumes from the entries
        # received.
        os._exit(1)


# --- in the run's process ---------------------------------------------------------------------------------------------


class JournalReceiver:
    """Handle on the receiving process, in the run. Starts the process at once, and again when it dies.

    Args:
        journal: the run's journal directory.
        host: address of this machine, to which workers on others connect.
        log: file for the process's error stream.
        clock: clock for the waits before a restart.
        tell: prints a line for the user.
    """

    def __init__(self, journal: Path, host: str, *, log: Path, clock: Clock, tell: Callable[[str], None]) -> None:
        self._received, self._per_second, self._heard_at = 0, 0.0, clock.monotonic()
        """Bytes of entries that the process has received, their rate at its last heartbeat, and the time of that."""
        self.host = host
        self._clock = clock
        self._receive = StartReceiver(journal=str(journal.absolute()), host=host)
        self._placement = LocalPlacement(log)
        self._connection: rpc.Connection | None = None
        name = "the journal's receiver"
        self.supervisor = Supervisor(name, self, budget=RetryBudget(), silence_s=SILENCE_S, clock=clock, tell=tell)

    async def grant(self, worker: int) -> str:
        """Return an address for a new process of a worker; earlier addresses become invalid.

        Raises:
            EngineLostError: the receiver died during the call; another is started.
            AgentRLError: the worker's partition cannot be opened, or the receiver died too often.
        """
        await self.supervisor.serving()
        if self._connection is None:
            raise EngineLostError("the connection to the journal on the run's host is closed")
        call = self._connection.next_call()
        reply: PartitionGranted = await self._connection.ask(call, GrantPartition(call=call, worker=worker))
        return reply.address

    def status(self) -> ProcessStatus:
        """Return the activity of the process, with its rate."""
        return ProcessStatus(name="journal receiver", doing=f"receives {self._per_second / 1000:,.1f} kB/s")

    async def revoke(self, worker: int) -> None:
        """Accept no more entries from the process of a worker, which counts as dead. On return, no entry of it will
        reach the disk any more."""
        if self._connection is not None:
            call = self._connection.next_call()
            with contextlib.suppress(AgentRLError):  # the receiver died or its disk failed: it writes nothing more
                await self._connection.ask(call, RevokePartition(call=call, worker=worker))

    async def close(self) -> None:
        """End the process once all received entries are on disk. Idempotent."""
        if self._connection is not None:
            self._connection.close(EngineLostError("the journal's receiver was closed"))
        await self.supervisor.stop(SILENCE_S)

    async def launch(self) -> ConnectedChildProcess:
        child = await self._placement.start(RECEIVER)
        self._connection = rpc.Connection(child.reader, child.writer, TO_RUN)
        self._connection.start(
            self._on_heartbeat,
            on_end=self.supervisor.kill,
            on_message=lambda message: self.supervisor.sign_of_life(),
            name="journal's receiver",
        )
        return child

    async def welcome(self) -> None:
        if self._connection is not None:
            self._connection.send(self._receive)

    async def died(self, how: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.drain(EngineLostError(f"the journal's receiver {how}"))

    def _on_heartbeat(self, heartbeat: ReceiverHeartbeat) -> None:
        if heartbeat.bytes > self._received:
            self.supervisor.achieved()
        now = self._clock.monotonic()
        self._per_second = max(0, heartbeat.bytes - self._received) / max(now - self._heard_at, 1e-3)
        self._received, self._heard_at = heartbeat.bytes, now


# --- the receiving process, on the run's host -------------------------------------------------------------------------


class _Partition:
    """A worker's partition and the one listener through which it is written."""

    def __init__(self, log: SqliteTurnLog, count: Callable[[int], None]) -> None:
        self.log = log
        self._count = count
        self._listener: Listener | None = None

    async def grant(self, host: str) -> str:
        """Revoke the earlier grant and listen for the next process."""
        self.revoke()
        self._listener = listener = Listener(lambda reader, writer: self._serve(listener, reader, writer))
        return str(await listener.listen(host))

    def revoke(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _serve(self, listener: Listener, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = rpc.Connection(reader, writer, FROM_WORKER)

        def handle(message: FromWorker) -> None:
            if listener is not self._listener:
                return  # revoked
            self._count(connection.frame_bytes)
            match message:
                case Append(entry=entry, partial=False):
                    self.log.append(entry)
                case Append(entry=entry):
                    self.log.append_partial(entry)
                case RemovePartials():
                    self.log.remove_partials(message.episode_id, message.attempt, message.call_id)
                case _:
                    connection.answer(message.call, self._answer(message))

        try:
            await connection.run(handle)
        except ValueError as error:
            sys.stderr.write(f"agentrl: the journal's receiver disconnected a worker: {error}\n")

    async def _answer(self, question: Question) -> rpc.Reply:
        log = self.log
        match question:
            case Flush():
                await log.flush()
                return rpc.Acknowledgement(call=question.call)
            case TakeOverAttempt(episode_id=episode_id, attempt=attempt):
                await log.take_over(episode_id, attempt)
                return AttemptTakenOver(
                    call=question.call,
                    entries=tuple(log.read(episode_id, attempt)),
                    partials=tuple(log.read_partials(episode_id, attempt)),
                )
            case FindProgressedEpisodes():
                log.check()
                return ProgressedEpisodes(call=question.call, episodes=tuple(await log.advanced()))


class _Receiver:
    """The partitions of this process, and the run's connection."""

    def __init__(self, journal: Path, host: str, run: rpc.Connection) -> None:
        self._journal = journal
        self._host = host
        self._run = run
        self._partitions: dict[int, _Partition] = {}
        self._received = 0

    async def handle(self, message: GrantPartition | RevokePartition) -> None:
        try:
            reply = await self._answer(message)
        except AgentRLError as error:  # such as a damaged partition, of which the run tells the user
            reply = rpc.error_reply(message.call, error)
        self._run.send(reply)

    async def _answer(self, request: GrantPartition | RevokePartition) -> rpc.Reply:
        partition = self._partitions.get(request.worker)
        if isinstance(request, GrantPartition):
            if partition is None:
                partition = _Partition(await self._open(request.worker), self._count)
                self._partitions[request.worker] = partition
            return PartitionGranted(call=request.call, address=await partition.grant(self._host))
        if partition is not None:
            partition.revoke()
            await partition.log.flush()
        return rpc.Acknowledgement(call=request.call)

    async def heartbeat(self) -> ReceiverHeartbeat:
        return ReceiverHeartbeat(bytes=self._received)

    async def close(self) -> None:
        """Return when all received entries are on disk."""
        for partition in self._partitions.values():
            partition.revoke()
        await asyncio.gather(*(partition.log.close() for partition in self._partitions.values()))

    async def _open(self, worker: int) -> SqliteTurnLog:
        def tell(line: str) -> None:
            sys.stderr.write(f"agentrl: {line}\n")

        return await retry_until_writer_exits(
            lambda: SqliteTurnLog.open(self._journal, str(worker)), tell, SystemClock()
        )

    def _count(self, size: int) -> None:
        self._received += size


async def _serve(connection: socket.socket) -> None:
    run = rpc.Connection(*await asyncio.open_connection(sock=connection), TO_RECEIVER)
    start = await run.receive()
    if not isinstance(start, StartReceiver):
        return
    receiver = _Receiver(Path(start.journal), start.host, run)
    heartbeats = asyncio.get_running_loop().create_task(run.send_heartbeats(1.0, receiver.heartbeat))
    await run.run(receiver.handle)
    heartbeats.cancel()
    await receiver.close()


def main() -> None:
    """Serve the connection inherited from the parent, until it ends."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    asyncio.run(_serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main()
