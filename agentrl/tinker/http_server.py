"""The HTTP server for clients of the Tinker protocol: routes, keys, bodies, long polls, errors.

A client posts a request that takes time, one of `messages.FUTURES`, gets its id at once, and polls
`retrieve_future` until the result is there. The SDK repeats a request whose answer it did not get, with the same
sequence number; the repetition gets the same id. `service.py` executes requests; this module knows no models.

1. Every request needs a key, which names its owner. What another owner has does not exist.
2. An invalid request gets an HTTP error with a sentence, and changes nothing.
3. Bodies are bounded before and after decompression, in time, in sum for each owner, and parsed one at a time by
   turns of the owners. Each owner has a share of the connections.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from agentrl.core import connections
from agentrl.core.clock import SystemClock
from agentrl.core.errors import InputError, StorageError
from agentrl.gateway import bodies
from agentrl.gateway.calls import RequestRefusedError
from agentrl.gateway.http import (
    admit,
    body_parts,
    connection_of,
    connection_type,
    digest_of,
    json_response,
    key_of,
    refuse_browsers,
)
from agentrl.tinker import messages

if TYPE_CHECKING:
    import msgspec
    from aiohttp import web

    from agentrl.tinker.service import TinkerService

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

API = "/api/v1"
DOWNLOAD_S = 3600
"""Seconds for which the URL of a download is valid."""
POLL_S = 20.0
"""Seconds that a poll waits for a result. The SDK ends a request after 45."""
_PROTOBUF = "application/x-protobuf"


class TinkerServer:
    """The server of one process.

    Args:
        service: executes requests.
        keys: owner of each key.
        host: address to listen on.
    """

    def __init__(self, service: TinkerService, keys: Mapping[str, str], host: str) -> None:
        self._service = service
        self._owners = {digest_of(key): owner for key, owner in keys.items()}
        self._signing_keys = {owner: digest_of("download", key) for key, owner in keys.items()}
        self._clock = SystemClock()
        self._host = host
        self._server = connections.BoundedServer()
        self._reading = asyncio.Lock()
        """Held while a body is decompressed and parsed, so that one body at a time takes memory and time."""
        self._next_to_read: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Held by the one request of an owner that waits for `_reading`, so that owners take turns."""
        self._held_bytes: Counter[str] = Counter()
        """Bytes of the bodies whose requests are not answered, by owner."""

    @asynccontextmanager
    async def listen(self, port: int) -> AsyncIterator[int]:
        """Serve until the context is left; yields the port.

        Raises:
            StorageError: the address cannot be used.
        """
        from aiohttp import web

        runner = web.AppRunner(self._application(), handler_cancellation=True)
        await runner.setup()
        connect = functools.partial(connection_type(), runner.server, loop=asyncio.get_running_loop())
        try:
            try:
                bound = await self._server.listen(connect, self._host, port)
            except OSError as error:
                raise StorageError(
                    f"cannot listen on {self._host}:{port} ({error.strerror}); choose another --port"
                ) from error
            yield bound
        finally:
            self._server.close()
            await runner.cleanup()

    def _application(self) -> web.Application:
        from aiohttp import web

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            """Admit only requests with a key, and turn refusals into answers."""
            try:
                self._server.doubt(connection_of(request))
                refuse_browsers(request, self._host)
                admit(self._server, request, self._owner(request), "key")
                return await handler(request)
            except RequestRefusedError as refusal:
                return _refusal(refusal.status, str(refusal))
            except InputError as error:
                return _refusal(400, str(error))
            except StorageError:
                # The SDK repeats a request after a 503: another process may serve it once the disk has space again.
                return _refusal(503, "the server cannot write its journal, so it accepts nothing; it says why")
            except web.HTTPException:
                return _refusal(404, f"there is no {request.method} {request.path[:100]} here")
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
        for path, reason in _REFUSED.items():
            method, _, place = path.partition(" ")
            router.add_route(method, API + place, functools.partial(_refused, reason))
        for route, content in _CONSTANTS.items():
            router.add_route("*", f"{API}/{route}", functools.partial(_constant, content))
        router.add_post(f"{API}/retrieve_future", self._retrieve)
        checkpoint = f"{API}/training_runs/{{model_id}}/checkpoints/{{checkpoint:.+}}"
        router.add_get(f"{checkpoint}/archive", self._archive)
        router.add_get(f"{checkpoint}/external_weights_urls", self._urls)
        router.add_get(f"{checkpoint}/files/{{file:.+}}", self._download)
        return application

    def _owner(self, request: web.Request) -> str:
        key = key_of(request)
        if not key and "signature" in request.query:
            return self._signer(request)
        owner = self._owners.get(digest_of(key))
        if owner is None:
            raise RequestRefusedError(
                "this key is not one of the server's: set TINKER_API_KEY to a key that it was started with"
                if key
                else "there is no key: set TINKER_API_KEY",
                "key",
            )
        return owner

    def _signature(self, owner: str, path: str, expires: str) -> str:
        return hmac.new(self._signing_keys[owner], f"{path}\n{expires}".encode(), "sha256").hexdigest()

    def _signer(self, request: web.Request) -> str:
        """Return the owner whose key signed the URL of a download.

        Raises:
            RequestRefusedError: the signature is missing, wrong or expired.
        """
        owner, expires, signature = (request.query.get(name, "") for name in ("owner", "expires", "signature"))
        if (
            request.method != "GET"
            or owner not in self._signing_keys
            or not hmac.compare_digest(signature.encode(), self._signature(owner, request.path, expires).encode())
        ):
            raise RequestRefusedError("this URL was not signed by the server for this request", "key")
        if self._clock.wall() > int(expires):
            raise RequestRefusedError("this URL has expired; ask for another", "key")
        return owner

    @asynccontextmanager
    async def _body(self, request: web.Request) -> AsyncIterator[dict[str, Any]]:
        """Read and parse a body, which counts among its owner's within the context; raises as `_receive`."""
        owner = self._owner(request)
        with self._held(owner) as body:
            await self._receive(request, body)
            async with self._turn_to_read(owner):
                content = bodies.parse_json_body(bytes(body))
            yield content

    @asynccontextmanager
    async def _turn_to_read(self, owner: str) -> AsyncIterator[None]:
        """Wait for an owner's turn to decompress and parse a body."""
        async with self._next_to_read[owner], self._reading:
            await asyncio.sleep(0)  # all else runs between two bodies
            yield

    @contextmanager
    def _held(self, owner: str) -> Iterator[bytearray]:
        """Yield an empty body, which counts among its owner's within the context."""
        body = bytearray()
        try:
            yield body
        finally:
            self._held_bytes[owner] -= len(body)

    async def _receive(self, request: web.Request, body: bytearray) -> None:
        """Read into a held body.

        Raises:
            RequestRefusedError: it is too long, or too much of its owner's is in memory.
        """
        owner = self._owner(request)
        async for part in body_parts(request):
            if len(body) + len(part) > bodies.MAX_BODY_BYTES:
                raise bodies.LongBodyError(body, request.headers.get("Content-Encoding", ""))
            if self._held_bytes[owner] + len(part) > bodies.MAX_HELD_BYTES:
                raise RequestRefusedError(f"requests of {bodies.MAX_HELD_BYTES} bytes wait already", "unavailable")
            self._held_bytes[owner] += len(part)
            body += part

    async def _accept(self, route: str, request: web.Request) -> web.StreamResponse:
        owner = self._owner(request)
        place: tuple[str, int] | None = None
        with self._held(owner) as body:
            try:
                await self._receive(request, body)
                async with self._turn_to_read(owner):
                    content_bytes = bodies.decompress_body(bytes(body), request.headers.get("Content-Encoding", ""))
                    try:
                        content = messages.read_request(route, content_bytes)
                    except RequestRefusedError:
                        place = messages.read_place(route, content_bytes)
                        raise
                promise = await self._service.accept(owner, route, content, content_bytes)
            except RequestRefusedError as refusal:
                if isinstance(refusal, bodies.LongBodyError):
                    place = messages.read_place(route, refusal.head)  # stands at the beginning of a pass
                if place is not None:  # others' bodies are read while it waits for the disk
                    await self._service.refuse(owner, *place, str(refusal))
                raise
        return json_response(200, promise)

    async def _question(self, question: str, kind: type[msgspec.Struct], request: web.Request) -> web.StreamResponse:
        async with self._body(request) as body:
            content = messages.read_json({**body, **request.match_info}, kind)
            answer = await self._service.answer(self._owner(request), question, content)
        return json_response(200, answer)

    async def _lookup(self, question: str, request: web.Request) -> web.StreamResponse:
        parameters = {**request.query, **request.match_info}
        return json_response(200, await self._service.answer(self._owner(request), question, parameters))

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        async with self._body(request) as body:
            content = messages.read_json(body, messages.Retrieve)
        answer = await self._service.retrieve(self._owner(request), content.request_id, POLL_S)
        if answer is None:
            waiting = {"type": "try_again", "request_id": content.request_id, "queue_state": "active"}
            return json_response(200, waiting)
        content_type = _PROTOBUF if answer.kind == "protobuf" else "application/json"
        return web.Response(body=answer.body, content_type=content_type, headers={"Cache-Control": "no-store"})

    def _files(self, request: web.Request) -> Path:
        """Return the directory of the saved weights that a request names."""
        names = request.match_info
        return self._service.archive(self._owner(request), names["model_id"], names["checkpoint"])

    async def _urls(self, request: web.Request) -> web.StreamResponse:
        """Send URLs by which a client without a key downloads saved weights; the SDK fetches them so."""
        directory, owner = self._files(request), self._owner(request)
        expires = int(self._clock.wall()) + DOWNLOAD_S
        scheme = request.headers.get("X-Forwarded-Proto", request.scheme)  # of a proxy with TLS in front
        urls = {}
        for name in _file_names(directory):
            path = f"{request.path.removesuffix('external_weights_urls')}files/{name}"
            query = {"owner": owner, "expires": expires, "signature": self._signature(owner, path, str(expires))}
            urls[name] = f"{scheme}://{request.host}{quote(path)}?{urlencode(query)}"
        return json_response(200, {"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        """Send a file of saved weights."""
        from aiohttp import web

        directory, name = self._files(request), request.match_info["file"]
        if name not in _file_names(directory):
            raise RequestRefusedError(f"these weights have no file {name[:100]!r}", "model")
        return web.FileResponse(directory / name, headers={"Cache-Control": "no-store"})

    async def _archive(self, request: web.Request) -> web.StreamResponse:
        """Send saved weights as a tar file."""
        from aiohttp import web

        directory = self._files(request)
        response = web.StreamResponse(headers={"Content-Type": "application/x-tar", "Cache-Control": "no-store"})
        await response.prepare(request)
        pieces = _tar(directory)
        while piece := await asyncio.to_thread(next, pieces, b""):
            await response.write(piece)
        await response.write_eof()
        return response


def _file_names(directory: Path) -> list[str]:
    """Return the names of the files of saved weights, with their folders."""
    return sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())


def _tar(directory: Path) -> Iterator[bytes]:
    """Yield the files of a directory as pieces of a tar file."""
    import tarfile

    for name in _file_names(directory):
        with (directory / name).open("rb") as content:
            entry = tarfile.TarInfo(name)  # without times and owners, so that equal weights give equal archives
            entry.size = os.fstat(content.fileno()).st_size
            yield entry.tobuf()
            while piece := content.read(1 << 20):
                yield piece
        if padding := bytes(-entry.size % tarfile.BLOCKSIZE):
            yield padding
    yield bytes(2 * tarfile.BLOCKSIZE)


def _refusal(status: int, sentence: str) -> web.Response:
    return json_response(status, {"detail": sentence})


async def _refused(reason: str, request: web.Request) -> web.StreamResponse:
    raise RequestRefusedError(f"{request.method} {request.path[:100]} is not served here: {reason}")


async def _constant(content: Mapping[str, Any], request: web.Request) -> web.StreamResponse:
    return json_response(200, content)


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
_NO_ACCOUNTS = "keys are environment variables of the server (`keys` in its file)"
_NO_BILLS = "nothing is billed; `agentrl run stats` shows what was computed"
_REFUSED: Mapping[str, str] = {
    "POST /copy_weights": messages.NO_PROJECTS,
    "PUT /sessions/{session_id}/project": messages.NO_PROJECTS,
    "POST /training_runs/{model_id}/checkpoints/{checkpoint:.+}/publish": messages.NO_PROJECTS,
    "DELETE /training_runs/{model_id}/checkpoints/{checkpoint:.+}/publish": messages.NO_PROJECTS,
    "POST /sessions/search": "sessions have no names here; list them",
    "GET /sessions/{session_id}/trace_export": "`agentrl run serve` shows what a session did",
    "POST /auth/token": _NO_ACCOUNTS,
    "GET /auth/apikey/me": _NO_ACCOUNTS,
    "DELETE /auth/apikey/me": _NO_ACCOUNTS,
    "GET /audit": _NO_BILLS,
    "GET /billing/usage/events": _NO_BILLS,
    "GET /billing/usage/checkpoints/current": _NO_BILLS,
    "POST /create_custom_loss": "the client computes custom losses, in two passes",
    "POST /join_sampling_session": "clients number their requests themselves",
    "POST /retrieve_futures": "poll each request with retrieve_future",
}
"""Routes of the SDK that are refused with a reason, by method and path."""
_CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "healthz": {"status": "ok"},
    # The SDK's own transport follows no proxy settings and needs no speed on this machine. Of parallel chunks it would
    # never send the first if another is refused, and then wait for it without end.
    "client/config": {"use_pyqwest_transport": False, "parallel_fwdbwd_chunks": False},
    "client/dynamic_config": {"sample_cancel_enabled": True},
    "telemetry": {"status": "accepted"},
}
"""Routes with the same answer for everyone."""
