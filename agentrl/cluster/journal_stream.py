"""Sends the entries of episode workers on other hosts to the journal on the run's host.

A worker on another host has a `StreamedTurnLog` instead of a partition: it sends entries over TCP and waits, where a
commit needs it, until they are on the disk of the run's host. There, one receiving process (this module as a program)
writes a partition for each worker with the production writer. The run only grants and revokes connections: entries
never pass through its event loop. Owns: the messages, the receiver, which connection may write a partition. Does not
own: the contents of entries (`journal.store`), the run's processes. The framing is that of `engines.wire`.
Invariants: at most one connection writes a partition, and none once it is revoked; messages take effect in the order
in which they were sent; a worker ends when its connection ends, and its episodes continue elsewhere from their
acknowledged entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentrl.core.clock import RetryBudget, SystemClock
from agentrl.core.errors import AgentRLError, EngineLostError, JournalError, format_foreign_error, rebuild_error
from agentrl.core.network import Address, Listener, connect
from agentrl.core.records import ProcessStatus
from agentrl.engines.process import ChildProgram, LocalPlacement, Supervisor, die_with_parent
from agentrl.engines.protocol import WireMessage, read_frame, send
from agentrl.journal.entries import JournalEntry
from agentrl.journal.run_process import retry_until_writer_exits
from agentrl.journal.store import SqliteTurnLog, check_entry_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentrl.core.clock import Clock
    from agentrl.core.records import ForkPoint
    from agentrl.engines.process import ConnectedChildProcess

RECEIVER = ChildProgram("", {}, "agentrl.cluster.journal_stream")
SILENCE_S = 60.0


# --- messages ---------------------------------------------------------------------------------------------------------


class StartReceiver(WireMessage, frozen=True):
    """Message to the receiver with the journal whose partitions it writes and the address at which it listens."""

    journal: str
    host: str


class GrantPartition(WireMessage, frozen=True):
    """Message to the receiver: let only a new process of a worker write the worker's partition."""

    worker: int


class RevokePartition(WireMessage, frozen=True):
    """Message to the receiver: let no process write a worker's partition."""

    worker: int


class PartitionGranted(WireMessage, frozen=True):
    """Message to the run with the address to which the worker's process connects."""

    worker: int
    address: str


class ReceiverHeartbeat(WireMessage, frozen=True):
    """Heartbeat to the run, with the bytes of entries received so far."""

    bytes: int


class Append(WireMessage, frozen=True):
    """Message from a worker with an entry or a partial."""

    entry: JournalEntry
    partial: bool


class RemovePartials(WireMessage, frozen=True):
    """Message from a worker; see `TurnLog.remove_partials`."""

    episode_id: str
    attempt: int
    call_id: str | None


class Flush(WireMessage, frozen=True):
    """Request from a worker: answer when all earlier messages are on disk."""

    call: int


class TakeOverAttempt(WireMessage, frozen=True):
    """Request from a worker: take over an attempt and answer with all its entries and partials."""

    call: int
    episode_id: str
    attempt: int


class FindProgressedEpisodes(WireMessage, frozen=True):
    """Request from a worker; see `WorkerTurnLog.advanced`."""

    call: int


class JournalAnswer(WireMessage, frozen=True):
    """Answer to a worker. If the request failed, `kind` names a class of `agentrl.core.errors`."""

    call: int
    entries: tuple[JournalEntry, ...] = ()
    partials: tuple[JournalEntry, ...] = ()
    episodes: tuple[str, ...] = ()
    kind: str = ""
    message: str = ""


Question = Flush | TakeOverAttempt | FindProgressedEpisodes
TO_RECEIVER: msgspec.msgpack.Decoder[StartReceiver | GrantPartition | RevokePartition] = msgspec.msgpack.Decoder(
    StartReceiver | GrantPartition | RevokePartition
)
TO_RUN: msgspec.msgpack.Decoder[PartitionGranted | ReceiverHeartbeat] = msgspec.msgpack.Decoder(
    PartitionGranted | ReceiverHeartbeat
)
FROM_WORKER: msgspec.msgpack.Decoder[Append | RemovePartials | Question] = msgspec.msgpack.Decoder(
    Append | RemovePartials | Question
)
TO_WORKER: msgspec.msgpack.Decoder[JournalAnswer] = msgspec.msgpack.Decoder(JournalAnswer)


# --- in a worker's process, on any host -------------------------------------------------------------------------------


class StreamedTurnLog:
    """Partition on the run's host; implements `WorkerTurnLog`."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._writer = writer
        self._calls = itertools.count(1)
        self._answers: dict[int, asyncio.Future[JournalAnswer]] = {}
        self._found: dict[tuple[str, int], JournalAnswer] = {}
        """Recorded entries of attempts that were taken over, held until they are read."""
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), name="journal's answers")

    @staticmethod
    async def open(address: str, worker: int) -> StreamedTurnLog:
        """Connect to the receiver.

        Raises:
            EngineLostError: the receiver cannot be reached from here, perhaps only for a while.
        """
        where = Address.parse(address)
        try:
            reader, writer = await connect(where)
        except (OSError, TimeoutError) as error:
            raise EngineLostError(
                f"{socket.gethostname()}: the journal on the run's host cannot be reached at port {where.port} of "
                f"{where.host} ({error}); docs/security.md says which connections the network must allow"
            ) from error
        return StreamedTurnLog(f"turns-{worker}.db", reader, writer)

    def append(self, entry: JournalEntry) -> None:
        check_entry_size(entry)
        send(self._writer, Append(entry=entry, partial=False))

    def append_partial(self, entry: JournalEntry) -> None:
        send(self._writer, Append(entry=entry, partial=True))

    def remove_partials(self, episode_id: str, attempt: int, call_id: str | None = None) -> None:
        send(self._writer, RemovePartials(episode_id=episode_id, attempt=attempt, call_id=call_id))

    async def flush(self) -> None:
        await self._ask(Flush(call=next(self._calls)))

    async def take_over(self, episode_id: str, attempt: int) -> None:
        """See `TurnLog.take_over`; `read` and `read_partials` then each return the recorded entries once."""
        asked = TakeOverAttempt(call=next(self._calls), episode_id=episode_id, attempt=attempt)
        self._found[episode_id, attempt] = await self._ask(asked)

    def read(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """See `TurnLog.read`, for an attempt that was taken over."""
        found = self._found.get((episode_id, attempt))
        return [] if found is None else list(found.entries)

    def read_partials(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """See `TurnLog.read_partials`, for an attempt that was taken over."""
        found = self._found.pop((episode_id, attempt), None)
        return [] if found is None else list(found.partials)

    def prefix(self, point: ForkPoint) -> list[JournalEntry]:
        """Raise an error, because forks run on the run's host.

        Raises:
            JournalError: always.
        """
        raise JournalError("a fork can only be run on the host of its run")

    async def advanced(self) -> list[str]:
        """See `WorkerTurnLog.advanced`; also checks for errors of the disk of the run's host."""
        return list((await self._ask(FindProgressedEpisodes(call=next(self._calls)))).episodes)

    def check(self) -> None:
        """Do nothing: the receiver reports errors in its next answer."""

    async def close(self) -> None:
        """Return when everything sent is on disk or the connection has ended. Idempotent."""
        with contextlib.suppress(AgentRLError):
            await self.flush()
        self._reading.cancel()
        self._writer.close()

    async def _ask(self, question: Question) -> JournalAnswer:
        answer: asyncio.Future[JournalAnswer] = asyncio.get_running_loop().create_future()
        self._answers[question.call] = answer
        send(self._writer, question)
        try:
            found = await answer
        finally:
            del self._answers[question.call]
        if found.kind:
            raise rebuild_error(found.kind, found.message, among=(AgentRLError,))
        return found

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ValueError, msgspec.MsgspecError):
            while (body := await read_frame(reader)) is not None:
                answer = TO_WORKER.decode(body)
                waiting = self._answers.get(answer.call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
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
        tell: prints a line for people.
    """

    def __init__(self, journal: Path, host: str, *, log: Path, clock: Clock, tell: Callable[[str], None]) -> None:
        self._received, self._per_second, self._heard_at = 0, 0.0, clock.monotonic()
        """Bytes of entries that the process has received, their rate at its last heartbeat, and the time of that."""
        self._clock = clock
        self._receive = StartReceiver(journal=str(journal.absolute()), host=host)
        self._placement = LocalPlacement(log)
        self._child: ConnectedChildProcess | None = None
        self._grants: dict[int, asyncio.Future[str]] = {}
        self._reading: asyncio.Task[None] | None = None
        name = "the journal's receiver"
        self.supervisor = Supervisor(name, self, budget=RetryBudget(), silence_s=SILENCE_S, clock=clock, tell=tell)

    async def grant(self, worker: int) -> str:
        """Return an address for a new process of a worker; earlier addresses become invalid.

        Raises:
            EngineLostError: the receiver died during the call; another is started.
            AgentRLError: the receiver died too often and is not restarted.
        """
        await self.supervisor.serving()
        if self._child is None:
            raise EngineLostError("the connection to the journal on the run's host is closed")
        granted = self._grants[worker] = asyncio.get_running_loop().create_future()
        send(self._child.writer, GrantPartition(worker=worker))
        address: str = await granted
        return address

    def status(self) -> ProcessStatus:
        """Return what the process does, with its rate."""
        return ProcessStatus(name="journal receiver", doing=f"receives {self._per_second / 1000:,.1f} kB/s")

    def revoke(self, worker: int) -> None:
        """Accept no more entries from the process of a worker, which counts as dead."""
        if self._child is not None:
            send(self._child.writer, RevokePartition(worker=worker))

    async def close(self) -> None:
        """End the process once all received entries are on disk. Idempotent."""
        if self._child is not None:
            self._child.writer.close()
        await self.supervisor.stop(SILENCE_S)

    async def launch(self) -> ConnectedChildProcess:
        child = self._child = await self._placement.start(RECEIVER)
        self._reading = asyncio.get_running_loop().create_task(self._read(child), name="journal's receiver")
        return child

    async def welcome(self) -> None:
        if self._child is not None:
            send(self._child.writer, self._receive)

    async def died(self, how: str) -> None:
        self._child = None
        for granted in self._grants.values():
            if not granted.done():
                granted.set_exception(EngineLostError(f"the journal's receiver {how}"))

    async def _read(self, child: ConnectedChildProcess) -> None:
        try:
            while (body := await read_frame(child.reader)) is not None:
                self.supervisor.sign_of_life()
                match TO_RUN.decode(body):
                    case PartitionGranted() as granted:
                        if not (waiting := self._grants[granted.worker]).done():
                            waiting.set_result(granted.address)
                    case ReceiverHeartbeat(bytes=received):
                        if received > self._received:
                            self.supervisor.achieved()
                        now = self._clock.monotonic()
                        self._per_second = max(0, received - self._received) / max(now - self._heard_at, 1e-3)
                        self._received, self._heard_at = received, now
        except (ValueError, msgspec.MsgspecError) as error:
            self.supervisor.kill(f"it sent an invalid message ({error})")


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
        asked: set[asyncio.Task[None]] = set()
        try:
            while (body := await read_frame(reader)) is not None and listener is self._listener:
                self._count(len(body))
                match FROM_WORKER.decode(body):
                    case Append(entry=entry, partial=False):
                        self.log.append(entry)
                    case Append(entry=entry):
                        self.log.append_partial(entry)
                    case RemovePartials() as removed:
                        self.log.remove_partials(removed.episode_id, removed.attempt, removed.call_id)
                    case question:
                        asked.add(task := asyncio.get_running_loop().create_task(self._answer(question, writer)))
                        task.add_done_callback(asked.discard)
        except (ValueError, msgspec.MsgspecError) as error:
            sys.stderr.write(f"agentrl: the journal's receiver disconnected a worker: {error}\n")
        finally:
            for task in asked:
                task.cancel()

    async def _answer(self, question: Question, writer: asyncio.StreamWriter) -> None:
        log = self.log
        try:
            match question:
                case Flush():
                    await log.flush()
                    answer = JournalAnswer(call=question.call)
                case TakeOverAttempt(episode_id=episode_id, attempt=attempt):
                    await log.take_over(episode_id, attempt)
                    answer = JournalAnswer(
                        call=question.call,
                        entries=tuple(log.read(episode_id, attempt)),
                        partials=tuple(log.read_partials(episode_id, attempt)),
                    )
                case FindProgressedEpisodes():
                    log.check()
                    answer = JournalAnswer(call=question.call, episodes=tuple(await log.advanced()))
        except AgentRLError as error:
            answer = JournalAnswer(call=question.call, kind=type(error).__name__, message=str(error))
        except Exception as error:  # noqa: BLE001 - a bug of ours: whoever asked must not wait for ever
            answer = JournalAnswer(call=question.call, kind="JournalError", message=format_foreign_error(error))
        send(writer, answer)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    body = await read_frame(reader)
    if body is None or not isinstance(begun := TO_RECEIVER.decode(body), StartReceiver):
        return
    partitions: dict[int, _Partition] = {}
    received = 0

    def count(size: int) -> None:
        nonlocal received
        received += size

    async def say_alive() -> None:
        while True:
            send(writer, ReceiverHeartbeat(bytes=received))
            await asyncio.sleep(1.0)

    def tell(line: str) -> None:
        sys.stderr.write(f"agentrl: {line}\n")

    alive = asyncio.get_running_loop().create_task(say_alive())
    while (body := await read_frame(reader)) is not None:
        match TO_RECEIVER.decode(body):
            case GrantPartition(worker=worker):
                if worker not in partitions:

                    def opened(worker: int = worker) -> SqliteTurnLog:
                        return SqliteTurnLog.open(Path(begun.journal), str(worker))

                    partitions[worker] = _Partition(await retry_until_writer_exits(opened, tell, SystemClock()), count)
                address = await partitions[worker].grant(begun.host)
                send(writer, PartitionGranted(worker=worker, address=address))
            case RevokePartition(worker=worker) if worker in partitions:
                partitions[worker].revoke()
    alive.cancel()
    await _close(list(partitions.values()))


async def _close(partitions: Sequence[_Partition]) -> None:
    for partition in partitions:
        partition.revoke()
    await asyncio.gather(*(partition.log.close() for partition in partitions))


def main() -> None:
    """Serve the connection that the parent handed over, until it ends."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    asyncio.run(_serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main()
