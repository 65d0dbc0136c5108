"""Messages between processes: frames, calls and their answers, notifications, deadlines and heartbeats.

Every connection between processes of a run is a `Connection`. A protocol adds its message classes, a decoder for each
direction, and a function that handles the messages other than answers. `network.py` authenticates connections between
machines; `engines.process.Supervisor` kills and restarts silent processes.
Invariants: a frame cannot run code, because it decodes to a message of the protocol or ends the connection; messages
are handled in the order of their sending; when a connection closes, every unanswered call raises, after its last part.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import traceback
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from agentrl.core.errors import AgentRLError, format_foreign_error, rebuild_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine

HEAD_BYTES = 4
"""Number of bytes of a frame's length prefix."""
MAX_FRAME_BYTES = 1 << 30
_ENCODER = msgspec.msgpack.Encoder()


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Content of a frame: an array whose first element is the name of the message's class."""


class Reply(WireMessage, frozen=True, kw_only=True):
    """Answer to the call with this number."""

    call: int = 0


class Acknowledgement(Reply, frozen=True):
    """Answer to a call without a result."""


class ErrorReply(Reply, frozen=True, kw_only=True):
    """Answer to a call that raised."""

    kind: str
    """Class of `agentrl.core.errors`; "" for any other exception."""
    message: str


class Part(WireMessage, frozen=True, kw_only=True):
    """Part of an answer, sent before the answer."""

    call: int


class CancelCall(WireMessage, frozen=True):
    """Note that the caller no longer waits for an answer."""

    call: int


class ConnectionWriter(Protocol):
    """The sending half of a connection."""

    def write(self, data: bytes, /) -> None:
        """Queue bytes; never waits."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Connection:
    """One end of a connection between two processes. Either end can make and answer calls.

    Args:
        reader: receives from the peer.
        writer: sends to the peer.
        decoder: decoder of the messages that the peer may send.
        errors: error classes that an answer may raise here; the first replaces any other.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: ConnectionWriter,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        errors: tuple[type[AgentRLError], ...] = (AgentRLError,),
    ) -> None:
        self.frame_bytes = 0
        """Size of the newest message from the peer, in bytes."""
        self.answering: dict[int, asyncio.Task[None]] = {}
        """Tasks that answer the peer's calls, keyed by the call's number."""
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._errors = errors
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._listeners: dict[int, Callable[[Any], None]] = {}
        self.queued = bytearray()
        """Messages that are sent at the end of this iteration of the event loop."""
        self._end_error: AgentRLError | None = None
        self._read_task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._end_error is None

    @property
    def calls_in_flight(self) -> Collection[asyncio.Future[Any]]:
        """Answers for which this end waits."""
        return self._calls.values()

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, message: WireMessage) -> None:
        """Send a message without waiting; does nothing if the connection is closed."""
        if self._end_error is None:
            self._write_queued()
            send(self._writer, message)

    def queue(self, message: WireMessage) -> None:
        """Send a message together with others of this iteration of the event loop, in one system call."""
        if self._end_error is None:
            if not self.queued:
                asyncio.get_running_loop().call_soon(self._write_queued)
            self.queued += encode_frame(message)

    def next_call(self) -> int:
        """Return a number for a call."""
        return next(self._numbers)

    async def ask(
        self,
        call: int,
        message: WireMessage,
        *,
        on_part: Callable[[Any], None] | None = None,
        limit_s: float | None = None,
        is_cancellable: bool = False,
    ) -> Any:
        """Send a message and wait for its answer.

        Args:
            call: number of the call.
            message: message that the peer answers under this number.
            on_part: receives each `Part` of the answer; its exception cancels the call and is raised here.
            limit_s: longest wait for the answer, in seconds; None: as long as the connection is open.
            is_cancellable: whether the peer stops working when this coroutine is cancelled.

        Raises:
            AgentRLError: the peer raised the error, or the connection closed.
            TimeoutError: the answer did not come within `limit_s`.
        """
        if self._end_error is not None:
            raise self._end_error.with_traceback(None)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        if on_part is not None:
            self._listeners[call] = on_part
        try:
            self.queue(message)
            async with asyncio.timeout(limit_s):
                return await future
        except asyncio.CancelledError:
            if is_cancellable:
                self.send(CancelCall(call=call))
            raise
        finally:
            self._calls.pop(call, None)
            self._listeners.pop(call, None)

    async def send_heartbeats(self, every_s: float, make: Callable[[], Awaitable[WireMessage]]) -> None:
        """Send a message every `every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.send(await make())

    async def flush(self) -> None:
        """Wait until all messages have left this process."""
        self._write_queued()
        if isinstance(self._writer, asyncio.StreamWriter):
            self._writer.transport.set_write_buffer_limits(0)
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    # --- receiving ----------------------------------------------------------------------------------------------------

    async def receive(self) -> Any:
        """Return the next message; None after the last.

        Raises:
            ValueError: the message is invalid.
        """
        body = await read_frame(self._reader)
        if body is None:
            return None
        self.frame_bytes = len(body)
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error

    async def run(
        self,
        handle: Callable[[Any], Awaitable[None] | None],
        on_message: Callable[[Any], None] | None = None,
    ) -> None:
        """Handle messages until the peer closes the connection; then cancel the calls that it no longer waits for.

        Args:
            handle: called with each message that is not about a call made here; awaited before the next message.
            on_message: called with every message first.

        Raises:
            ValueError: the peer sent an invalid message.
        """
        try:
            while (message := await self.receive()) is not None:
                if on_message is not None:
                    on_message(message)
                match message:
                    case Part():
                        self._deliver(message)
                    case ErrorReply():
                        self._settle(message.call, rebuild_error(message.kind, message.message, among=self._errors))
                    case Reply():
                        self._settle(message.call, message)
                    case CancelCall():
                        if (task := self.answering.get(message.call)) is not None:
                            task.cancel()
                    case _ if (work := handle(message)) is not None:
                        await work
        finally:
            for task in list(self.answering.values()):
                task.cancel()

    def start(
        self,
        handle: Callable[[Any], Awaitable[None] | None],
        *,
        on_end: Callable[[str], None],
        on_message: Callable[[Any], None] | None = None,
        name: str,
    ) -> None:
        """Handle messages in a task.

        Args:
            handle: see `run`.
            on_end: called after the last message with the reason; "" if the peer closed the connection.
            on_message: see `run`.
            name: name of the task.
        """

        async def run() -> None:
            why = ""
            try:
                await self.run(handle, on_message)
            except Exception as error:  # noqa: BLE001 - any exception ends the connection, and so its calls
                why = f"it sent an invalid message ({type(error).__name__}: {error})"
            on_end(why)

        self._read_task = asyncio.get_running_loop().create_task(run(), name=name)

    def answer(self, call: int, work: Coroutine[Any, Any, Reply | None]) -> None:
        """Answer a call in a task, with the result of `work` or its error."""
        task = asyncio.get_running_loop().create_task(self._answer(call, work))
        self.answering[call] = task
        task.add_done_callback(lambda _: self.answering.pop(call, None))
        # A coroutine that was cancelled before it started must be closed.
        task.add_done_callback(lambda _: work.close())

    # --- the end ------------------------------------------------------------------------------------------------------

    async def drain(self, error: AgentRLError) -> None:
        """Handle every message of a dead process, then close the connection. Needs `start`."""
        if self._read_task is not None:
            await asyncio.wait({self._read_task})
        self.queued.clear()
        self.close(error)

    def close(self, error: AgentRLError) -> None:
        """Send what is queued, close the sending half, and fail unanswered calls with `error`. Idempotent."""
        if self._end_error is None:
            self._write_queued()
            self._end_error = error
        self._writer.close()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._end_error.with_traceback(None))

    def _write_queued(self) -> None:
        if self.queued:
            data, self.queued = bytes(self.queued), bytearray()
            self._writer.write(data)

    async def _answer(self, call: int, work: Coroutine[Any, Any, Reply | None]) -> None:
        try:
            reply = await work
        except Exception as error:  # noqa: BLE001 - the caller must hear of any exception
            reply = error_reply(call, error)
        self.queue(Acknowledgement(call=call) if reply is None else reply)

    def _deliver(self, part: Part) -> None:
        listener = self._listeners.get(part.call)
        if listener is None:
            return
        try:
            listener(part)
        except Exception as error:  # noqa: BLE001 - an error of the caller's code, raised in its call
            del self._listeners[part.call]
            self._settle(part.call, error)
            self.send(CancelCall(call=part.call))

    def _settle(self, call: int, result: Reply | Exception) -> None:
        future = self._calls.get(call)
        if future is None or future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def error_reply(call: int, error: Exception) -> ErrorReply:
    """Make the answer to a call that raised; prints the traceback of a bug, which the answer lacks."""
    if isinstance(error, AgentRLError):
        return ErrorReply(call=call, kind=type(error).__name__, message=str(error))
    with contextlib.suppress(OSError):  # the disk may be full
        traceback.print_exception(error)
    return ErrorReply(call=call, kind="", message=format_foreign_error(error))


# --- frames -----------------------------------------------------------------------------------------------------------


def send(writer: ConnectionWriter, message: WireMessage) -> None:
    """Queue a frame; never waits."""
    writer.write(encode_frame(message))


def encode_frame(message: object) -> bytes:
    """Encode a message with its length."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "little") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next frame's body; None at the end of the connection, also in the middle of a frame.

    Raises:
        ValueError: the frame is larger than `MAX_FRAME_BYTES`.
    """
    try:
        size = int.from_bytes(await reader.readexactly(HEAD_BYTES), "little")
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError):  # the peer's machine may be unreachable
        return None
