"""The HTTP server for clients of the Tinker protocol: routes, the key, bodies, long polls, errors.

A client posts a request that takes time, one of `messages.FUTURES`, gets its id at once, and polls
`retrieve_future` until the result is there. The SDK repeats a request whose answer it did not get, with the same
sequence number; the repetition gets the same id. `service.py` executes requests; this module knows no models.

1. The server has one owner and listens on loopback or a Unix socket. If it has a key, every request needs it.
2. An invalid request gets an HTTP error with a sentence, and changes nothing.
3. A body has a declared length, and is bounded when it is unpacked, and in time. Only such a body can have no trailers,
   which the HTTP library would add to the headers of the connection's next request.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from aiohttp import ClientError, web

from agentrl.parts import InputError, StorageError
from agentrl_tinker import messages
from agentrl_tinker.errors import RequestRefusedError

if TYPE_CHECKING:
    import msgspec

    from agentrl_tinker.service import TinkerService

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

API = "/api/v1"
HOST = "127.0.0.1"
BODY_S = 120.0
"""Seconds within which a body must arrive."""
DOWNLOAD_S = 3600
"""Seconds for which the URL of a download is valid."""
POLL_S = 20.0
"""Seconds that a poll waits for a result. The SDK ends a request after 45."""
_HEAD_BYTES = 1 << 16
"""Beginning of a body that is too long, in which the place of the request is looked up."""
_PROTOBUF = "application/x-protobuf"


class LongBodyError(RequestRefusedError):
    """A body is longer than `MAX_BODY_BYTES`; `head` is its beginning, unpacked."""

    def __init__(self, head: bytes) -> None:
        super().__init__(f"the body is longer than {messages.MAX_BODY_BYTES} bytes when it is unpacked", 413)
        self.head = head


class TinkerServer:
    """The server of one process.

    Args:
        service: executes requests.
        key: key that each request must have; empty: none.
    """

    def __init__(self, service: TinkerService, key: str = "") -> None:
        self._service = service
        self._key = key.encode()
        self._signing_key = self._key or secrets.token_bytes(16)

    @asynccontextmanager
    async def listen(self, place: int | Path) -> AsyncIterator[str]:
        """Serve on a port of loopback or on a Unix socket until the context is left; yields the address.

        Raises:
            StorageError: the place cannot be used.
        """
        runner = web.AppRunner(
            self._application(),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=75.0,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        try:
            try:
                if isinstance(place, Path):
                    mask = os.umask(0o177)  # the socket is for its owner alone
                    try:
                        await web.UnixSite(runner, str(place)).start()
                    finally:
                        os.umask(mask)
                    address = str(place)
                else:
                    await web.TCPSite(runner, HOST, place).start()
                    address = f"http://{HOST}:{runner.addresses[0][1]}"
            except OSError as error:
                raise StorageError(f"cannot listen on {place} ({error.strerror}); choose another place") from error
            yield address
        finally:
            await runner.cleanup()

    def _application(self) -> web.Application:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            """Admit only requests of the owner's programs, and turn refusals into answers."""
            try:
                self._check_admitted(request)
                return await handler(request)
            except RequestRefusedError as refusal:
                return _refusal(refusal.status, str(refusal))
            except InputError as error:
                return _refusal(400, str(error))
            except StorageError:
                # The SDK repeats a request after a 503: another process may serve it once the disk has space again.
                return _refusal(503, "the server cannot write its journal, so it accepts nothing; it says why")
            except web.HTTPException:
                route = f"{request.method} {request.path[:100]}"
                return _refusal(404, f"{route} is not served here; docs/how-to/tinker.md says what is")
            except ConnectionResetError:
                return _refusal(499, "")  # the client disconnected, so the answer is not read

        application = web.Application(middlewares=[guard])
        router = application.router
        for route in messages.FUTURES:
            router.add_post(f"{API}/{route}", functools.partial(self._accept, route))
        for path, (question, kind) in _QUESTIONS.items():
            method, _, place = path.partition(" ")
            router.add_route(method, API + place, functools.partial(self._question, question, kind))
        for path, question in _LOOKUPS.items():
            method, _, place = path.partition(" ")
            router.add_route(method, API + place, functools.partial(self._lookup, question))
        for route, content in _CONSTANTS.items():
            router.add_route("*", f"{API}/{route}", functools.partial(_constant, content))
        router.add_post(f"{API}/retrieve_future", self._retrieve)
        checkpoint = f"{API}/training_runs/{{model_id}}/checkpoints/{{checkpoint:.+}}"
        router.add_get(f"{checkpoint}/external_weights_urls", self._urls)
        router.add_get(f"{checkpoint}/files/{{file:.+}}", self._download)
        return application

    def _check_admitted(self, request: web.Request) -> None:
        """Refuse browsers, other keys, two keys, and bodies of undeclared length.

        Raises:
            RequestRefusedError: the sentence says what to change.
        """
        if "Transfer-Encoding" in request.headers:
            raise RequestRefusedError("send a Content-Length instead of a body in chunks, which may have trailers", 411)
        # A page whose name resolves to this machine could use a key that it guessed or saw.
        if "Origin" in request.headers or request.host.rpartition(":")[0] not in (HOST, "localhost"):
            raise RequestRefusedError("the server answers only programs that use its own address", 403)
        keys = [*request.headers.getall("X-API-Key", []), *request.headers.getall("Authorization", [])]
        if len(keys) > 1:
            raise RequestRefusedError("the request has two keys; send one")
        if not self._key or self._is_signed(request):
            return
        scheme, _, token = keys[0].partition(" ") if keys else ("", "", "")
        key = token.strip() if scheme.lower() == "bearer" else "".join(keys)
        if not hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self._key):
            raise RequestRefusedError(
                "this is not the server's key: set TINKER_API_KEY to the key that it was started with"
                if key
                else "there is no key: set TINKER_API_KEY",
                401,
            )

    def _signature(self, path: str, expires: str) -> str:
        return hmac.new(self._signing_key, f"{path}\n{expires}".encode(), "sha256").hexdigest()

    def _is_signed(self, request: web.Request) -> bool:
        """Whether the server signed the URL of a download, for a client without a key, and it has not expired."""
        expires, signature = (request.query.get(name, "") for name in ("expires", "signature"))
        is_signed = hmac.compare_digest(signature.encode(), self._signature(request.path, expires).encode())
        return request.method == "GET" and is_signed and self._service.parts.clock.wall() <= int(expires)

    async def _body(self, request: web.Request) -> bytes:
        """Read and unpack a body.

        Raises:
            RequestRefusedError: it is too long, too slow, or damaged.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.content.iter_any():
                    body += part
                    if len(body) > messages.MAX_BODY_BYTES:
                        raise LongBodyError(bytes(body[:_HEAD_BYTES]))
        except TimeoutError:
            raise RequestRefusedError(f"the body did not arrive within {BODY_S:.0f} s; send it again", 408) from None
        except (web.RequestPayloadError, ClientError) as error:
            raise RequestRefusedError(f"the body cannot be unpacked: {error}") from None
        return bytes(body)

    async def _accept(self, route: str, request: web.Request) -> web.StreamResponse:
        place: tuple[str, int] | None = None
        try:
            body = await self._body(request)
            try:
                content = messages.read_request(route, body)
            except RequestRefusedError:
                place = messages.read_place(route, body)
                raise
            promise = await self._service.accept(route, content, body)
        except RequestRefusedError as refusal:
            if isinstance(refusal, LongBodyError):
                place = messages.read_place(route, refusal.head)  # stands at the beginning of a pass
            if place is not None:
                await self._service.refuse(*place, str(refusal))
            raise
        return _json(200, promise)

    async def _question(self, question: str, kind: type[msgspec.Struct], request: web.Request) -> web.StreamResponse:
        body = messages.parse_json_body(await self._body(request))
        content = messages.read_json({**body, **request.match_info}, kind)
        return _json(200, await self._service.answer(question, content))

    async def _lookup(self, question: str, request: web.Request) -> web.StreamResponse:
        parameters = {**request.query, **request.match_info}
        return _json(200, await self._service.answer(question, parameters))

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        content = messages.read_json(messages.parse_json_body(await self._body(request)), messages.Retrieve)
        answer = await self._service.retrieve(content.request_id, POLL_S)
        if answer is None:
            waiting = {"type": "try_again", "request_id": content.request_id, "queue_state": "active"}
            return _json(200, waiting)
        content_type = _PROTOBUF if answer.kind == "protobuf" else "application/json"
        return web.Response(body=answer.body, content_type=content_type, headers={"Cache-Control": "no-store"})

    def _files(self, request: web.Request) -> Path:
        """Return the directory of the saved weights that a request names."""
        names = request.match_info
        return self._service.archive(names["model_id"], names["checkpoint"])

    async def _urls(self, request: web.Request) -> web.StreamResponse:
        """Send URLs by which a client without a key downloads saved weights; the SDK fetches them so."""
        directory, expires = self._files(request), int(self._service.parts.clock.wall()) + DOWNLOAD_S
        urls = {}
        for name in _file_names(directory):
            path = f"{request.path.removesuffix('external_weights_urls')}files/{name}"
            query = {"expires": expires, "signature": self._signature(path, str(expires))}
            urls[name] = f"http://{request.host}{quote(path)}?{urlencode(query)}"
        return _json(200, {"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        """Send a file of saved weights."""
        directory, name = self._files(request), request.match_info["file"]
        if name not in _file_names(directory):
            raise RequestRefusedError(f"these weights have no file {name[:100]!r}", 404)
        return web.FileResponse(directory / name, headers={"Cache-Control": "no-store"})


def _file_names(directory: Path) -> list[str]:
    """Return the names of the files of saved weights, with their folders."""
    return sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())


def _json(status: int, value: Any) -> web.Response:
    body = json.dumps(value).encode()
    return web.Response(
        status=status, body=body, content_type="application/json", headers={"Cache-Control": "no-store"}
    )


def _refusal(status: int, sentence: str) -> web.Response:
    response = _json(status, {"detail": sentence})
    if status in (408, 411, 413):
        response.force_close()  # the rest of the body is not read
    return response


async def _constant(content: Mapping[str, Any], request: web.Request) -> web.StreamResponse:
    return _json(200, content)


_QUESTIONS: Mapping[str, tuple[str, type[msgspec.Struct]]] = {
    "POST /create_session": ("create_session", messages.CreateSession),
    "POST /session_heartbeat": ("session_heartbeat", messages.OfSession),
    "POST /sessions/{session_id}/finish": ("finish_session", messages.FinishSession),
    "POST /create_sampling_session": ("create_sampling_session", messages.CreateSampler),
    "POST /get_info": ("get_info", messages.OfModel),
    "POST /weights_info": ("weights_info", messages.OfPath),
    "POST /cancel_future": ("cancel_future", messages.CancelFuture),
    "PUT /training_runs/{model_id}/checkpoints/{checkpoint:.+}/ttl": ("set_checkpoint_ttl", messages.SetTtl),
}
"""Requests with a body that are answered at once, with their message, by method and path."""
_LOOKUPS: Mapping[str, str] = {
    "GET /get_server_capabilities": "capabilities",
    "GET /sessions": "sessions",
    "GET /sessions/{session_id}": "session",
    "GET /samplers/{sampler_id}": "sampler",
    "GET /training_runs": "models",
    "GET /training_runs/{model_id}": "model",
    "GET /training_runs/{model_id}/checkpoints": "checkpoints",
    "GET /checkpoints": "all_checkpoints",
    "DELETE /training_runs/{model_id}/checkpoints/{checkpoint:.+}": "delete_checkpoint",
}
"""Questions whose parameters are in their path and query, by method and path."""
_CHUNKS = {"fwdbwd_max_chunk_bytes_count": 1 << 20}
"""Size from which the SDK divides a pass: within `MAX_TOKENS` of `losses.py`, at 16 bytes per token."""
_CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "healthz": {"status": "ok"},
    # The SDK's own transport follows no proxy settings and needs no speed on this machine. Of parallel chunks it would
    # never send the first if another is refused, and then wait for it without end.
    "client/config": {"use_pyqwest_transport": False, "parallel_fwdbwd_chunks": False, **_CHUNKS},
    "client/dynamic_config": {"sample_cancel_enabled": True},
    "telemetry": {"status": "accepted"},
}
"""Routes with the same answer for everyone."""
