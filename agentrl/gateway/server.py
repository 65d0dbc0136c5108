"""The gateway: one HTTP server per worker, on loopback, in front of the seats of the episodes that run there.

`Gateway.open` gives the seats of an attempt an address and keys, which end with the attempt. A key admits to its seats,
in a header (`Authorization: Bearer`, `x-api-key`) or in the address (`/key/KEY/v1/…`). The server listens while any
seats are open.

1. A call is sampled once: if its client disconnects before it has the reply, the next byte-identical request gets the
   reply. So does, at any time, one with the same `Idempotency-Key`. Equal requests of clients that have their replies
   are separate calls.
2. A client sees latency, never an error, while its call waits for the engine: streams carry comments, other answers
   begin with white space.
3. Any invalid request gets a refusal in its protocol's form.
4. Nothing is sampled for an attempt that has ended.
5. Clients of one attempt cannot block another attempt: one request is parsed at a time, and attempts take turns; the
   memory of an attempt's waiting requests, the number of its connections and the time of a body are bounded.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.core import connections
from agentrl.core.connections import abort
from agentrl.core.errors import AgentRLError, StorageError
from agentrl.gateway import bodies
from agentrl.gateway.anthropic_messages import AnthropicMessagesProtocol
from agentrl.gateway.calls import ChatProtocol, ChatReply, ChatRequest, GatewaySeat, RequestRefusedError, bounded_repr
from agentrl.gateway.chat_completions import ChatCompletionsProtocol, openai_refusal
from agentrl.gateway.conversations import Conversations
from agentrl.gateway.http import (
    HOST,
    admit,
    body_parts,
    connection_of,
    connection_type,
    digest_of,
    json_response,
    key_of,
    refuse_browsers,
    to_json,
)
from agentrl.gateway.openai_responses import OpenAIResponsesProtocol

if TYPE_CHECKING:
    from aiohttp import web

KEEPALIVE_S = 10.0
"""Seconds between the keep-alive bytes to a waiting client."""
MOST_CALLS = 1024
"""Maximum number of waiting calls of one attempt."""
MOST_CLIENTS = 8
"""Maximum number of clients that wait for the same call."""
CLIENT_MISTAKES = ("invalid", "setting", "model")
"""Kinds of refusals that are told when the client's program fails."""
COUNT_TOKENS = "/v1/messages/count_tokens"
_KEY = re.compile(r"/key/([^/]+)(/.*)")

Answer = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


@dataclass(eq=False, slots=True)
class RequestMemoryBudget:
    """Bounds the memory that the requests of an attempt hold together."""

    held_bytes: int = 0
    """Estimated memory of requests that are being sent or wait for their reply."""
    parsing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the request that waits for its turn to be parsed, or is parsed."""

    def hold(self, count: int) -> None:
        """Count memory.

        Raises:
            RequestRefusedError: it is too much; nothing is counted.
        """
        if self.held_bytes + count > bodies.MAX_HELD_BYTES:
            raise RequestRefusedError(
                f"requests of {bodies.MAX_HELD_BYTES} bytes are being sent or wait for their reply already",
                "unavailable",
            )
        self.held_bytes += count


@dataclass(eq=False, slots=True, kw_only=True)
class AttemptEndpoint:
    """The seats of an attempt while the gateway serves them."""

    url: str
    """Base URL for clients of OpenAI's protocols; ends with `/v1`."""
    key: str
    """API key for all seats; the model's name chooses the seat."""
    keys: Mapping[str, str]
    """API keys, keyed by seat; each key admits to its seat only."""
    seats: Mapping[str, GatewaySeat]
    """Seats, keyed by model name, aliases included."""
    failure: asyncio.Future[None]
    """Future that receives the error with which the episode cannot continue."""
    calls: dict[bytes, list[_PendingReply]] = field(default_factory=dict)
    """Calls that run, or whose reply no client has received, keyed by digest of the request."""
    by_idempotency_key: dict[tuple[bytes, str], _PendingReply] = field(default_factory=dict)
    """Calls, keyed by digest of the request and its `Idempotency-Key`."""
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    sockets: list[Callable[[], None]] = field(default_factory=list)
    """What closes the attempt's own listening sockets."""
    budget: RequestMemoryBudget = field(default_factory=RequestMemoryBudget)
    is_closed: bool = False
    """Whether the attempt has ended: a request that was sent before and is read only now samples nothing."""
    refusal: RequestRefusedError | None = None
    """Why the newest request was refused; None if it was not, or a limit of the run did it."""


@dataclass(eq=False, slots=True)
class _PendingReply:
    """A call and its clients."""

    task: asyncio.Task[Sequence[ChatReply]]
    clients: int = 0
    """Number of clients that wait for the call."""


class Gateway:
    """The server of one process.

    Args:
        host: address to listen on.
    """

    def __init__(self, *, host: str = HOST) -> None:
        self._host = host
        self._endpoints_by_key: dict[bytes, tuple[AttemptEndpoint, str | None]] = {}
        """Seats and, if the key is limited to one, the seat's name; keyed by the digest of the key."""
        self._runner: web.AppRunner | None = None
        self._connect: Callable[[], asyncio.BaseProtocol] | None = None
        """Makes the protocol of a connection."""
        self._port = 0
        self._listeners = 0
        self._server = connections.BoundedServer()
        self._conversations = Conversations()
        self._parsing = asyncio.Lock()
        """Held by the request that is parsed."""
        self._start_lock = asyncio.Lock()

    @asynccontextmanager
    async def open(
        self, seats: Mapping[str, GatewaySeat], aliases: Mapping[str, str]
    ) -> AsyncIterator[AttemptEndpoint]:
        """Serve seats until the context is left; calls in flight are cancelled then.

        Args:
            seats: seats by name.
            aliases: additional model names, each mapped to a seat.

        Raises:
            StorageError: the server cannot listen on loopback.
        """
        async with self._listen() as url:
            endpoint = AttemptEndpoint(
                url=url,
                key=new_key(),
                keys={name: new_key() for name in seats},
                seats={**seats, **{alias: seats[name] for alias, name in aliases.items()}},
                failure=asyncio.get_running_loop().create_future(),
            )
            self._endpoints_by_key[digest_of(endpoint.key)] = (endpoint, None)
            self._endpoints_by_key.update({digest_of(key): (endpoint, name) for name, key in endpoint.keys.items()})
            try:
                yield endpoint
            finally:
                endpoint.is_closed = True
                self._conversations.forget(endpoint)
                for close in endpoint.sockets:
                    close()
                for key in (endpoint.key, *endpoint.keys.values()):
                    del self._endpoints_by_key[digest_of(key)]
                for task in endpoint.running:
                    task.cancel()
                await asyncio.gather(*endpoint.running, return_exceptions=True)
                endpoint.failure.cancel()
                asyncio.get_running_loop().call_later(KEEPALIVE_S, self._abort_connections, endpoint)

    def serve(self, endpoint: AttemptEndpoint, listening: socket.socket) -> None:
        """Serve an attempt's seats at a further socket, in its sandbox's network, until they are closed."""
        assert self._connect is not None
        endpoint.sockets.append(self._server.accept_from(self._connect, listening))

    @asynccontextmanager
    async def _listen(self) -> AsyncIterator[str]:
        """Listen until the context is left and all seats are closed; yields the address, which ends with `/v1`.

        Raises:
            StorageError: the address cannot be used.
        """
        async with self._start_lock:
            # In a separate context, since the server is not part of the episode that starts it.
            if self._runner is None:
                await asyncio.get_running_loop().create_task(self._start(), context=contextvars.Context())
            self._listeners += 1
        try:
            yield f"http://{self._host}:{self._port}/v1"
        finally:
            async with self._start_lock:
                self._listeners -= 1
                if not self._listeners:
                    await self._stop()

    async def _start(self) -> None:
        from aiohttp import web

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, handler_cancellation=True)
        await runner.setup()
        self._connect = functools.partial(connection_type(), runner.server, loop=asyncio.get_running_loop())
        try:
            self._port = await self._server.listen(self._connect, self._host, 0)
        except OSError as error:
            await runner.cleanup()
            raise StorageError(f"the gateway cannot listen on {self._host} ({error.strerror})") from error
        self._runner = runner

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            self._server.close()
            await runner.cleanup()

    def _abort_connections(self, endpoint: AttemptEndpoint) -> None:
        for connection in self._server.connections_of(endpoint):
            abort(connection)

    # --- a request, in order ------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Handle a request."""
        path, in_address = request.path, None
        if key_match := _KEY.fullmatch(path):
            in_address, path = key_match.groups()
        protocol = _PROTOCOLS.get(path)
        attempt_endpoint: AttemptEndpoint | None = None
        try:
            self._server.doubt(connection_of(request))
            refuse_browsers(request, self._host)
            attempt_endpoint, limited_to = self._admit(request, in_address)
            admit(self._server, request, attempt_endpoint, "episode")
            if path == "/v1/models" and request.method == "GET":
                names = [name for name, seat in attempt_endpoint.seats.items() if limited_to in (None, seat.seat)]
                return json_response(200, _models(names))
            if protocol is None or request.method != "POST":
                raise RequestRefusedError(
                    f"there is no {request.method} {bounded_repr(path)} here; there are: GET /v1/models, "
                    f"{', '.join(f'POST {endpoint}' for endpoint in _PROTOCOLS)}{_version_hint(path)}",
                    "model",
                )
            async with self._read(request, path, protocol, attempt_endpoint) as (chat, digest):
                if attempt_endpoint.is_closed:
                    raise RequestRefusedError("the episode has ended", "key")
                if path == COUNT_TOKENS:
                    num_tokens = seat_for_model(attempt_endpoint.seats, chat.model, limited_to).count_tokens(chat)
                    return json_response(200, {"input_tokens": num_tokens})
                response = await self._chat(request, protocol, chat, attempt_endpoint, limited_to, digest)
                attempt_endpoint.refusal = None
                return response
        except RequestRefusedError as refusal:
            if attempt_endpoint is not None and request.method == "POST" and refusal.kind in CLIENT_MISTAKES:
                attempt_endpoint.refusal = refusal
            return json_response(refusal.status, (protocol.refusal if protocol else openai_refusal)(refusal))
        except ConnectionResetError:
            return json_response(499, {})  # the client disconnected, so the answer is not read

    @asynccontextmanager
    async def _read(
        self, request: web.Request, path: str, protocol: ChatProtocol, endpoint: AttemptEndpoint
    ) -> AsyncIterator[tuple[ChatRequest, bytes]]:
        """Read a request and the digest of its path and body; its memory counts until the context is left.

        Raises:
            RequestRefusedError: the body is too long or malformed, or too many others are in flight.
        """
        budget, reserved_bytes, body = endpoint.budget, 0, bytearray()
        try:
            async for part in body_parts(request):
                if len(body) + len(part) > bodies.MAX_BODY_BYTES:
                    raise bodies.LongBodyError(body)
                budget.hold(len(part))
                reserved_bytes += len(part)
                body += part
            # Only one request of each attempt waits for the second lock, so attempts take turns.
            async with budget.parsing, self._parsing:
                await asyncio.sleep(0)  # all else runs between two bodies
                content = bodies.decompress_body(bytes(body), request.headers.get("Content-Encoding", ""))
                budget.hold(memory := bodies.estimate_body_memory(content))
                reserved_bytes += memory
                request_and_digest = protocol.read(bodies.parse_json_body(content)), digest_of(path, content)
            del body, content
            yield request_and_digest
        finally:
            budget.held_bytes -= reserved_bytes

    def _admit(self, request: web.Request, in_address: str | None) -> tuple[AttemptEndpoint, str | None]:
        """Find the seats of a request's key and, if the key is limited to one seat, the name of that seat.

        Raises:
            RequestRefusedError: the request has no key, or one of no running episode.
        """
        key = in_address or key_of(request)
        endpoint_and_seat = self._endpoints_by_key.get(digest_of(key))
        if endpoint_and_seat is None:
            reason = (
                "the key is of no episode that runs here: keys end with their episode" if key else "there is no key"
            )
            raise RequestRefusedError(reason, "key")
        return endpoint_and_seat

    async def _chat(
        self,
        request: web.Request,
        protocol: ChatProtocol,
        chat: ChatRequest,
        endpoint: AttemptEndpoint,
        limited_to: str | None,
        digest: bytes,
    ) -> web.StreamResponse:
        """Sample, recall or join the call of a request, and send its replies."""
        seat = seat_for_model(endpoint.seats, chat.model, limited_to)
        digest = digest_of(seat.seat, digest)  # another seat may send the same request
        call = _call_of(endpoint, digest, request)
        if call is None:
            self._conversations.check(endpoint, chat.messages)
            if len(endpoint.running) >= MOST_CALLS:
                raise RequestRefusedError(
                    f"{MOST_CALLS} calls of this episode are already waiting; try again later", "unavailable"
                )
            call = _PendingReply(asyncio.get_running_loop().create_task(self._replies(endpoint, seat, chat)))
            endpoint.running.add(call.task)
            endpoint.calls.setdefault(digest, []).append(call)
            key = request.headers.get("Idempotency-Key", "")
            if key:
                endpoint.by_idempotency_key[digest, key] = call
            call.task.add_done_callback(functools.partial(_forget_if_refused, endpoint, digest, key, call))
        if call.clients >= MOST_CLIENTS:
            raise RequestRefusedError(
                f"{MOST_CLIENTS} clients already wait for the reply to this request", "unavailable"
            )
        call.clients += 1
        try:
            response = await _hand_over(request, protocol, chat, call.task)
        except BaseException:
            call.clients -= 1
            raise
        call.clients -= 1
        _forget(endpoint, digest, call)
        return response

    async def _replies(self, endpoint: AttemptEndpoint, seat: GatewaySeat, chat: ChatRequest) -> Sequence[ChatReply]:
        """Return the replies of a call."""
        replies = await _sampled(endpoint, seat, chat)
        if not endpoint.is_closed:
            self._conversations.record(endpoint, chat.messages, [reply.message for reply in replies])
        return replies


def seat_for_model(seats: Mapping[str, GatewaySeat], model: str, limited_to: str | None = None) -> GatewaySeat:
    """Return the seat of a model's name; for a key of a single seat, any name of no seat is that seat.

    Raises:
        RequestRefusedError: there is no such seat, or the key does not admit to it.
    """
    seat = seats.get(model) or seats.get(model.rpartition("/")[2])
    if seat is None:
        names = {seat.seat for seat in seats.values()} if limited_to is None else {limited_to}
        if len(names) > 1:
            aliases = {alias: seat.seat for alias, seat in seats.items() if alias != seat.seat}
            aliases[model[:80]] = next(iter(seats))
            raise RequestRefusedError(
                f"there is no model {bounded_repr(model)}; the models are the episode's seats: {', '.join(seats)}. "
                f"To make it one of them, write `aliases = {json.dumps(aliases, ensure_ascii=False)}` in the "
                "environment's class",
                "model",
                "model",
            )
        seat = seats[names.pop()]
    if limited_to not in (None, seat.seat):
        raise RequestRefusedError(
            f"the key is valid only for {limited_to!r}, but the request names {bounded_repr(model)}", "forbidden"
        )
    return seat


def _call_of(endpoint: AttemptEndpoint, digest: bytes, request: web.Request) -> _PendingReply | None:
    """Return the call whose reply a request should get; None if it is a new call."""
    if idempotency_key := request.headers.get("Idempotency-Key", ""):
        return endpoint.by_idempotency_key.get((digest, idempotency_key))
    retries = request.headers.get("x-stainless-retry-count", "0") != "0"
    # Of equal calls the one that fewest wait for: its client is the likeliest to ask again.
    call = min(endpoint.calls.get(digest, ()), key=lambda candidate: candidate.clients, default=None)
    return call if call is not None and (retries or not call.clients) else None


def _forget(endpoint: AttemptEndpoint, digest: bytes, call: _PendingReply) -> None:
    """Forget a call whose replies a client has received."""
    calls = endpoint.calls.get(digest, [])
    if call in calls:
        calls.remove(call)
    if not calls:
        endpoint.calls.pop(digest, None)


def _forget_if_refused(
    endpoint: AttemptEndpoint, digest: bytes, key: str, call: _PendingReply, task: asyncio.Task[Sequence[ChatReply]]
) -> None:
    """Forget a call that ended without replies: refused requests, with all they hold, would add up without end."""
    endpoint.running.discard(task)
    if task.cancelled() or task.exception() is not None:
        _forget(endpoint, digest, call)
        endpoint.by_idempotency_key.pop((digest, key), None)


async def _sampled(endpoint: AttemptEndpoint, seat: GatewaySeat, chat: ChatRequest) -> Sequence[ChatReply]:
    """Return the replies of a call; report an error that ends the episode to its owner."""
    try:
        if chat.n == 1:
            return [await seat.reply(chat)]
        seat.check(chat)  # all or none: otherwise replies that no client received would be trained on
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(seat.reply(chat)) for _ in range(chat.n)]
        return [task.result() for task in tasks]
    except BaseException as error:  # noqa: BLE001 - raised again
        cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(cause, RequestRefusedError | asyncio.CancelledError) and not endpoint.failure.done():
            endpoint.failure.set_exception(cause)
            endpoint.failure.exception()  # mark as retrieved: its owner may have ended
        raise cause from None


async def _hand_over(
    request: web.Request, protocol: ChatProtocol, chat: ChatRequest, task: asyncio.Task[Sequence[ChatReply]]
) -> web.StreamResponse:
    """Wait for the replies of a call and write them; the task continues if the client disconnects."""
    await asyncio.wait({task}, timeout=0 if chat.stream else KEEPALIVE_S)
    response: web.StreamResponse | None = None
    while not task.done():
        response = response or await _start_stream(request, chat)
        await response.write(protocol.keepalive if chat.stream else b" ")
        await asyncio.wait({task}, timeout=KEEPALIVE_S)
    try:
        replies = task.result()
    except (AgentRLError, asyncio.CancelledError) as error:
        refusal = _as_refusal(error)
        if response is None:
            raise refusal from None
        body = protocol.refusal(refusal)
        await response.write(_event("error", body) if chat.stream else to_json(body))
    else:
        response = response or await _start_stream(request, chat)
        if chat.stream:
            await response.write(b"".join(_event(name, data) for name, data in protocol.events(chat, replies)))
        else:
            await response.write(to_json(protocol.whole(chat, replies)))
    await response.write_eof()
    return response


async def _start_stream(request: web.Request, chat: ChatRequest) -> web.StreamResponse:
    """Start an answer: send its status and headers."""
    from aiohttp import web

    kind = "text/event-stream" if chat.stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-store"})
    await response.prepare(request)
    return response


def _as_refusal(error: BaseException) -> RequestRefusedError:
    """Convert an error to the client's refusal; for an error that ends the episode, the refusal states only that."""
    if isinstance(error, RequestRefusedError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return RequestRefusedError("the episode has ended", "key")
    return RequestRefusedError("the episode cannot continue", "unavailable")


def _models(names: Sequence[str]) -> dict[str, Any]:
    """Describe models in a form for clients of both OpenAI and Anthropic."""
    data = [
        {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0, "owned_by": "agentrl"}
        for name in names
    ]
    return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def _event(name: str | None, data: Any) -> bytes:
    """Encode one server-sent event."""
    data_bytes = data.encode() if isinstance(data, str) else to_json(data)
    return (b"" if name is None else f"event: {name}\n".encode()) + b"data: " + data_bytes + b"\n\n"


def _version_hint(path: str) -> str:
    """Say how an unknown path follows from a client's handling of `/v1`, as a clause; "" if it does not."""
    if f"/v1{path}" in _PROTOCOLS:
        return ". endpoint.url already ends with /v1, which this request lacks: use it as it is"
    if path.removeprefix("/v1") in _PROTOCOLS:
        adds = ". Anthropic's clients add /v1 themselves: give them endpoint.url.removesuffix('/v1')"
        return f". endpoint.url already ends with /v1, which this request repeats{adds if 'messages' in path else ''}"
    return ""


def new_key() -> str:
    """Make a key of 256 random bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


_PROTOCOLS: Mapping[str, ChatProtocol] = {
    "/v1/chat/completions": ChatCompletionsProtocol(),
    "/v1/responses": OpenAIResponsesProtocol(),
    "/v1/messages": AnthropicMessagesProtocol(),
    COUNT_TOKENS: AnthropicMessagesProtocol(),
}
"""Protocols, keyed by path."""
