"""The connection to an engine's process: requests and their answers by number, and new tokens as they come.

Does not own the process: `client.py` starts it, or learns its address.
Invariant: when a connection ends, every unanswered call raises, after its last new tokens.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from agentrl.core.errors import AgentRLError, EngineError, InputError, rebuild_error
from agentrl.engines import protocol
from agentrl.engines.versions import in_loading_order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from agentrl.core.ports import GenerateRequest, NewTokensCallback
    from agentrl.core.records import Completion, PolicyVersion, WeightsRef
    from agentrl.engines.process import ConnectionWriter
    from agentrl.engines.weights.transfer import VersionFiles


class EngineConnection:
    """The connection to one process, from its start to its end.

    Args:
        reader: receives the process's replies.
        writer: sends requests to it.
        on_message: called with every reply.
        on_end: called when no reply will come any more, with the error of the last one; "" if the process closed the
            connection.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: ConnectionWriter,
        *,
        on_message: Callable[[protocol.Reply], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.busy = 0.0
        """Seconds that the process has computed."""
        self.sessions = 0
        """Number of conversations that use the connection."""
        self.files: VersionFiles | None = None
        """Sends files to a process on another machine; None: it is on this one, and reads them."""
        self._writer = writer
        self._on_message = on_message
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[protocol.Reply]] = {}
        self._listeners: dict[int, tuple[str, NewTokensCallback]] = {}
        self._ended: AgentRLError | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), name="engine replies")

    @property
    def calls_in_flight(self) -> Collection[asyncio.Future[protocol.Reply]]:
        """The answers that are waited for."""
        return self._calls.values()

    def next_call(self) -> int:
        """Return a number for a call or a session."""
        return next(self._numbers)

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._ended is None

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> ConnectionSession:
        """Open a session of the process; if the process refuses, the first call fails."""
        number = self.next_call()
        self.send(protocol.OpenSessionRequest(session=number, name=session_id, policy=policy, pin=pin))
        return ConnectionSession(self, number)

    def send(self, message: protocol.Request) -> None:
        """Send a message without an answer; does nothing if the connection has ended."""
        if self._ended is None:
            protocol.send(self._writer, message)

    async def ask(self, call: int, message: protocol.Request) -> protocol.Reply:
        """Send a message and wait for its answer.

        Raises:
            AgentRLError: the process raised the error, or is gone.
        """
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        future: asyncio.Future[protocol.Reply] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        protocol.send(self._writer, message)
        try:
            return await future
        finally:
            del self._calls[call]

    async def generate(self, session: int, request: GenerateRequest, on_delta: NewTokensCallback | None) -> Completion:
        """Make one call of a session."""
        call = self.next_call()
        message = protocol.message_from_generate_request(call, session, request, deltas=on_delta is not None)
        if on_delta is not None:
            self._listeners[call] = (request.request_id, on_delta)
        try:
            reply = await self.ask(call, message)
        except asyncio.CancelledError:
            self.send(protocol.CancelRequest(call=call))
            raise
        finally:
            self._listeners.pop(call, None)
        if not isinstance(reply, protocol.CompletionReply):
            raise EngineError(f"call {request.request_id}: unexpected answer of the engine: {type(reply).__name__}")
        return protocol.completion_from_message(reply)

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef]) -> None:
        wanted = in_loading_order(current, pinned)
        pieces: list[asyncio.Task[None]] = []
        try:
            if self.files is not None:
                await self.files.send(wanted, pieces)
        except EngineError:
            await asyncio.gather(*pieces, return_exceptions=True)
            raise
        call = self.next_call()
        request = protocol.ServeVersionsRequest(call=call, current=list(current), pinned=in_loading_order((), pinned))
        serving = self.ask(call, request)
        # Asked for before the pieces are acknowledged, which would take as long again. What came only in part is
        # refused by its digest; why it came in part is raised first.
        answers: list[object] = await asyncio.gather(*pieces, serving, return_exceptions=True)
        if self.files is not None:
            answers = [*self.files.take_failures(wanted), *answers]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        if self.files is not None:
            self.files.keep_only(wanted)

    async def drain(self, error: AgentRLError) -> None:
        """Read everything a dead process sent, then fail the calls it did not answer."""
        await asyncio.wait({self._reading})
        self.close(error)

    def close(self, error: AgentRLError) -> None:
        """Stop sending, and fail unanswered calls with `error`. Idempotent."""
        self._ended = self._ended or error
        self._writer.close()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._ended.with_traceback(None))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = ""  # the process closes the connection when it dies
        try:
            while (body := await protocol.read_frame(reader)) is not None:
                reply = protocol.REPLIES.decode(body)
                self._on_message(reply)
                self._dispatch(reply)
        except Exception as error:  # noqa: BLE001 - whatever it sent, its calls must not wait for ever
            why = f"it sent an invalid message ({type(error).__name__}: {error})"
        self._on_end(why)

    def _dispatch(self, reply: protocol.Reply) -> None:
        match reply:
            case protocol.NewTokens():
                self._deliver(reply)
            case protocol.BusyHeartbeat():
                self.busy = reply.seconds
            case protocol.ErrorReply():
                self._settle(reply.call, rebuild_error(reply.kind, reply.message, among=(EngineError, InputError)))
            case protocol.EngineLoadedReply():
                self._settle(0, reply)
            case protocol.WeightsRequest():
                pass  # the message is for the owner
            case _:
                self._settle(reply.call, reply)

    def _deliver(self, delta: protocol.NewTokens) -> None:
        listener = self._listeners.get(delta.call)
        if listener is None:
            return
        request_id, on_delta = listener
        try:
            on_delta(request_id, delta.token_ids, delta.logprobs, delta.version)
        except Exception as error:  # noqa: BLE001 - of whoever made the call, and raised there
            del self._listeners[delta.call]
            self._settle(delta.call, error)
            self.send(protocol.CancelRequest(call=delta.call))

    def _settle(self, call: int, result: protocol.Reply | Exception) -> None:
        future = self._calls.get(call)
        if future is None or future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


class ConnectionSession:
    """One conversation of the process behind a connection; it ends with the connection."""

    __slots__ = ("_connection", "_number")

    def __init__(self, connection: EngineConnection, number: int) -> None:
        self._connection = connection
        self._number = number

    async def generate(self, request: GenerateRequest, on_delta: NewTokensCallback | None = None) -> Completion:
        return await self._connection.generate(self._number, request, on_delta)

    def close(self) -> None:
        self._connection.send(protocol.CloseSessionRequest(session=self._number))
