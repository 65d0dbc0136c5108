"""The connection to an engine's process: requests and their answers by number, and new tokens as they come.

Does not own the process: `client.py` starts it, or learns its address.
Invariant: when a connection ends, every unanswered call raises, after its last new tokens.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.core import rpc
from agentrl.core.errors import EngineError, InputError, VersionsRefusedError, rebuild_error
from agentrl.core.ports import TokenScores
from agentrl.core.tokens import Completion
from agentrl.engines import protocol
from agentrl.engines.version_table import in_loading_order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from agentrl.core.ports import GenerateRequest, NewTokensCallback
    from agentrl.core.records import Int32Array, PolicyVersion, WeightsRef
    from agentrl.engines.weights.version_files import VersionFiles


class EngineConnection(rpc.Connection):
    """The connection to one process, from its start to its end.

    Args:
        reader: receives the process's replies.
        writer: sends requests to it.
        on_message: called with every reply.
        on_end: called after the last reply with the reason; "" if the process closed the connection.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: rpc.ConnectionWriter,
        *,
        on_message: Callable[[protocol.Reply], None],
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(reader, writer, protocol.REPLIES, errors=(EngineError, InputError))
        self.busy = 0.0
        """Seconds that the process has computed."""
        self.sessions = 0
        """Number of conversations that use the connection."""
        self.files: VersionFiles | None = None
        """Sends files to a process on another machine; None: it is on this one, and reads them."""
        self._sending = asyncio.Lock()
        """Held while files are on the way, so that none is sent twice, and a later request finds them."""

        def check_message(message: protocol.Reply) -> None:
            if isinstance(message, protocol.NewTokens | protocol.CompletionReply):
                message.tokens.decode()  # raises here, where an invalid message ends the connection
            on_message(message)

        self.start(self._handle, on_end=on_end, on_message=check_message, name="engine replies")

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> ConnectionSession:
        """Open a session of the process; if the process refuses, the first call fails."""
        number = self.next_call()
        self.queue(protocol.OpenSessionRequest(session=number, name=session_id, policy=policy, pin=pin))
        return ConnectionSession(self, number)

    async def generate(self, session: int, request: GenerateRequest, on_delta: NewTokensCallback | None) -> Completion:
        """Make one call of a session."""
        call = self.next_call()
        on_part: Callable[[protocol.NewTokens], None] | None = None
        if on_delta is not None:

            def on_part(new: protocol.NewTokens) -> None:
                on_delta(request.request_id, new.tokens.decode())

        message = protocol.message_from_generate_request(call, session, request, deltas=on_delta is not None)
        reply = await self.ask(call, message, on_part=on_part, is_cancellable=True)
        if not isinstance(reply, protocol.CompletionReply):
            raise EngineError(f"call {request.request_id}: unexpected answer of the engine: {type(reply).__name__}")
        return Completion.of(reply.tokens.decode(), reply.finish_reason, reply.cached_tokens)

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float, top: int
    ) -> TokenScores:
        """Return the log-probabilities of tokens, and of the likeliest ones at each position."""
        call = self.next_call()
        column = token_ids.astype("<i4", copy=False).tobytes()
        request = protocol.LogprobsRequest(
            call=call, version=version, token_ids=column, temperature=temperature, top=top
        )
        reply: protocol.LogprobsReply = await self.ask(call, request)
        shape = (len(token_ids), reply.top)
        return TokenScores(
            logprobs=np.frombuffer(reply.logprobs, "<f4"),
            top_ids=np.frombuffer(reply.top_ids, "<i4").reshape(shape),
            top_logprobs=np.frombuffer(reply.top_logprobs, "<f4").reshape(shape),
        )

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef]) -> None:
        versions, pinned = in_loading_order(current, pinned), in_loading_order((), pinned)
        call = self.next_call()
        request = protocol.ServeVersionsRequest(call=call, current=list(current), pinned=pinned)
        if self.files is None:
            reply = await self.ask(call, request)
        else:
            reply = await self._send_and_ask(self.files, versions, request)
        refused = {
            version: rebuild_error(kind, message, among=(EngineError,)) for version, kind, message in reply.refused
        }
        if self.files is not None:
            refused |= self.files.take_failures(versions)
            self.files.answered(call, [weights for weights in versions if weights.version not in refused])
        if refused:
            raise VersionsRefusedError(refused=refused)

    async def _send_and_ask(
        self, files: VersionFiles, versions: Sequence[WeightsRef], request: protocol.ServeVersionsRequest
    ) -> Any:
        """Send the files of versions, and request to serve them."""
        pieces: list[asyncio.Task[None]] = []
        serving: asyncio.Task[Any] | None = None
        try:
            async with self._sending:
                await files.send(request.call, versions, pieces)
                # Asked for before the pieces are acknowledged, which would take as long again. What came only in part
                # is refused by its digest; the failure to send it says why.
                serving = asyncio.get_running_loop().create_task(self.ask(request.call, request))
                acknowledged = await asyncio.gather(*pieces, return_exceptions=True)
            answers: list[Any] = [*acknowledged, *await asyncio.gather(serving, return_exceptions=True)]
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
        except BaseException:
            if serving is not None:
                serving.cancel()
            files.answered(request.call, None)
            raise
        return answers[-1]

    def _handle(self, message: protocol.Reply) -> None:
        if isinstance(message, protocol.BusyHeartbeat):  # the owner receives the other messages by `on_message`
            self.busy = message.seconds


class ConnectionSession:
    """One conversation of the process behind a connection; it ends with the connection."""

    __slots__ = ("_connection", "_number")

    def __init__(self, connection: EngineConnection, number: int) -> None:
        self._connection = connection
        self._number = number

    async def generate(self, request: GenerateRequest, on_delta: NewTokensCallback | None = None) -> Completion:
        return await self._connection.generate(self._number, request, on_delta)

    async def wait_for_room(self) -> None:
        connection = self._connection
        call = connection.next_call()
        await connection.ask(call, protocol.WaitForRoomRequest(call=call, session=self._number), is_cancellable=True)

    def hold(self, version: PolicyVersion) -> None:
        self._connection.send(protocol.HoldVersionRequest(session=self._number, version=version))

    def close(self) -> None:
        self._connection.queue(protocol.CloseSessionRequest(session=self._number))
