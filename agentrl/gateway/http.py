"""Shared parts of the HTTP servers: bounded headers, keys, no browsers, answers in JSON."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Hashable
from typing import TYPE_CHECKING, Any

from agentrl.core import connections
from agentrl.gateway.calls import RequestRefusedError
from agentrl.gateway.chat_completions import openai_refusal

if TYPE_CHECKING:
    from aiohttp import web

HOST = "127.0.0.1"
MAX_HEADER_BYTES = 8192
"""Maximum length of a header line: OpenTelemetry's `baggage` has this length."""
MAX_HEADERS = 64
BODY_S = 120.0
"""Seconds within which a body must arrive: the longest one, at 0.6 Mbit/s."""


def refuse_browsers(request: web.Request, host: str) -> None:
    """Refuse browsers: a page whose name resolves to this machine could use a key that it guessed or saw.

    Raises:
        RequestRefusedError: a page of another origin sent the request, or the server listens on loopback, and the
            request names another host.
    """
    port = connection_of(request).get_extra_info("sockname")[1]  # a sandbox has its own port
    hosts = (f"{host}:{port}", f"localhost:{port}")
    if (host == HOST and request.host not in hosts) or "Origin" in request.headers:
        raise RequestRefusedError(
            "the server answers only programs on this machine that use its own address", "forbidden"
        )


def key_of(request: web.Request) -> str:
    """Return the key in a request's headers; empty without one."""
    authorization = request.headers.get("Authorization", "")
    bearer = authorization[7:].strip() if authorization[:7].lower() == "bearer " else ""
    return request.headers.get("x-api-key") or bearer


def admit(server: connections.BoundedServer, request: web.Request, owner: Hashable, name: str) -> None:
    """Note the owner of a request's connection.

    Args:
        server: server that accepted the connection.
        request: the request, whose key is the owner's.
        owner: the owner.
        name: what the refusal calls an owner.

    Raises:
        RequestRefusedError: the owner has too many connections; this one is closed.
    """
    if not server.admit(connection_of(request), owner):
        request.protocol.close()
        count = len(server.connections_of(owner))
        raise RequestRefusedError(
            f"{count} connections of this {name} are open already, and the process can have no more; close some, or "
            "raise its limit of open files (ulimit -n)",
            "unavailable",
        )


async def body_parts(request: web.Request) -> AsyncIterator[bytes]:
    """Yield the parts of a request's body as they arrive.

    Raises:
        RequestRefusedError: the body is not complete after `BODY_S`.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + BODY_S
    while True:
        try:
            async with asyncio.timeout_at(until):
                part = await request.content.readany()
        except TimeoutError:
            raise RequestRefusedError(f"the body did not arrive within {BODY_S:.0f} s; send it again", "slow") from None
        if not part:
            return
        yield part


def connection_type() -> Callable[..., asyncio.BaseProtocol]:
    """Return the class of a connection's HTTP protocol."""
    from aiohttp import web

    class Connection(web.RequestHandler):
        """Bounds headers, because they are read before the key is known, and refuses in a form that clients read."""

        __slots__ = ()

        def __init__(self, manager: Any, **options: Any) -> None:
            super().__init__(
                manager,
                access_log=None,  # type: ignore[arg-type]
                logger=connections.http_logger(),
                auto_decompress=False,
                keepalive_timeout=75.0,
                max_headers=MAX_HEADERS,
                max_field_size=MAX_HEADER_BYTES,
                max_line_size=MAX_HEADER_BYTES,
                **options,
            )

        def handle_error(
            self,
            request: web.BaseRequest,
            status: int = 500,
            exc: BaseException | None = None,
            message: str | None = None,
        ) -> web.StreamResponse:
            """Answer a request that is not HTTP, or has too long headers."""
            super().handle_error(request, status, exc, message)
            text = "the server failed"
            if status < 500:
                text = (
                    f"the request cannot be read: {message}. A request may have {MAX_HEADERS} headers, and a header "
                    f"line {MAX_HEADER_BYTES} bytes"
                )
            # The path is unknown: this is an error body of OpenAI's and of Anthropic's protocols.
            response = json_response(status, {"type": "error", **openai_refusal(RequestRefusedError(text))})
            response.force_close()
            return response

    return Connection


def connection_of(request: web.Request) -> asyncio.BaseTransport:
    """Return the connection of a request.

    Raises:
        ConnectionResetError: the client has disconnected.
    """
    if request.transport is None:
        raise ConnectionResetError
    return request.transport


def json_response(status: int, value: Any) -> web.Response:
    """Return an answer that no proxy keeps."""
    from aiohttp import web

    return web.Response(
        status=status, body=to_json(value), content_type="application/json", headers={"Cache-Control": "no-store"}
    )


def to_json(value: Any) -> bytes:
    """Encode JSON in ASCII: lone surrogates of a model's arguments stay escaped."""
    return json.dumps(value, default=dict).encode()


def digest_of(*parts: str | bytes) -> bytes:
    """Return the digest of a key, or of a request's path and body; keys are looked up by digest against timing
    attacks.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode("utf-8", "surrogateescape"))
        digest.update(b"\0")
    return digest.digest()
