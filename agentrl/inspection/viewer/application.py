"""The viewer's server: answers the page's questions about a run on this machine, also while the run is written.

Listens on 127.0.0.1 only. The page itself contains no data of the run. A question needs the token, which is new for
each server and reaches the page behind the `#` of its address, so that browsers never transmit it; a request for
another host name is refused, as from a foreign page whose name resolves to this machine (DNS rebinding), unless the
user named it, as that of a proxy. Reads only; one query at a time, in a thread with its own reader.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from agentrl.core.connections import BoundedServer, http_logger
from agentrl.core.errors import AgentRLError, InputError
from agentrl.inspection.viewer.page import viewer_page
from agentrl.inspection.viewer.served_runs import ServedRuns

HOST = "127.0.0.1"
_NAME_AND_PORT = re.compile(r"^([^:]*):\d{1,5}$")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RunningViewerServer(NamedTuple):
    """A running server."""

    port: int
    token: str
    is_directory: bool = False
    """Whether all runs of a directory are served, so that the page opens on their list."""

    @property
    def address(self) -> str:
        """Address of the page, with the token."""
        return f"http://{HOST}:{self.port}/#{'/runs&' if self.is_directory else ''}token={self.token}"


@asynccontextmanager
async def serve_viewer(
    run: str | Path, port: int = 0, host_names: Collection[str] = ()
) -> AsyncIterator[RunningViewerServer]:
    """Serve a run until the context is left.

    Args:
        run: directory of the run, or of several runs, all of which are served.
        port: port to listen on; 0: any free port.
        host_names: names under which a proxy passes requests on, besides the server's own address.

    Raises:
        InputError: there is no run, or the port cannot be used.
        StorageError: the run cannot be read.
    """
    token = secrets.token_urlsafe(32)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="viewer")
    loop = asyncio.get_running_loop()
    # SQLite connections must be used in the thread that opened them.
    runs = await loop.run_in_executor(thread, ServedRuns, run)
    server = BoundedServer()
    runner = web.AppRunner(_application(runs, thread, token, server, host_names), access_log=None, logger=http_logger())
    try:
        await runner.setup()
        assert runner.server is not None
        try:
            port = await server.listen(runner.server, HOST, port)
        except OSError as error:
            raise InputError(
                f"port {port} of {HOST}: cannot be listened on ({error.strerror}); choose another --port"
            ) from error
        yield RunningViewerServer(port, token, runs.is_directory)
    finally:
        server.close()
        await runner.cleanup()
        await loop.run_in_executor(thread, runs.close)
        thread.shutdown()


_NOT_HERE = (
    '<!doctype html><html lang="en"><title>Not here</title>'
    '<p>There is nothing at this address. <a href="/">The run’s episodes</a></p></html>'
)


def _application(
    runs: ServedRuns, thread: ThreadPoolExecutor, token: str, server: BoundedServer, host_names: Collection[str]
) -> web.Application:
    page, names = viewer_page(), {name.lower() for name in host_names}

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests without this server's address and name."""
        if request.transport is not None:
            server.doubt(request.transport)
        if not _is_to_this_server(request, names):
            reason = "this server answers only requests to its own address, and to names given with --host-name"
            response: web.StreamResponse = _refusal(403, reason)
        elif request.method != "GET":
            response = _refusal(405, "this server is read-only: use GET")
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = _refusal(error.status, error.reason)
        response.headers.update(_HEADERS)
        response.headers["Content-Security-Policy"] = f"{page.policy}; frame-ancestors 'none'"
        return response

    async def show(_: web.Request) -> web.StreamResponse:
        return web.Response(text=page.html, content_type="text/html")

    async def ask(request: web.Request) -> web.StreamResponse:
        authorization = request.headers.get("Authorization", "")
        if not hmac.compare_digest(authorization.encode("utf-8", "surrogateescape"), f"Bearer {token}".encode()):
            return _refusal(401, "the token is missing: open the address that `agentrl run serve` printed")
        if request.transport is None or not server.admit(request.transport):
            return _refusal(503, "too many connections are open: close other windows of this page")
        question, parameters = request.match_info["question"], dict(request.query)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(thread, runs.answer, question, parameters)
        except AgentRLError as error:
            return _refusal(400 if isinstance(error, InputError) else 500, str(error))
        return web.Response(body=answer, content_type="application/json")

    async def lead_back(_: web.Request) -> web.StreamResponse:
        return web.Response(status=404, text=_NOT_HERE, content_type="text/html")

    application = web.Application(middlewares=[guard])
    application.router.add_get("/", show)
    application.router.add_get("/ask/{question:[a-z_]+}", ask)
    application.router.add_get("/{path:(?!ask/).+}", lead_back)
    return application


def _is_to_this_server(request: web.Request, proxy_names: Collection[str]) -> bool:
    """Whether a request names this server, or a proxy of it at any port, as its host and, if it states one, as its
    origin."""
    sockname = request.transport.get_extra_info("sockname") if request.transport is not None else None
    own_names = {f"{name}:{sockname[1]}" for name in (HOST, "localhost")} if sockname else set()

    def is_known(host: str) -> bool:
        return host in own_names or _NAME_AND_PORT.sub(r"\1", host).lower() in proxy_names

    origin = request.headers.get("Origin")
    scheme, _, origin_host = (origin or "").partition("://")
    is_same_origin = origin is None or (scheme in ("http", "https") and is_known(origin_host))
    return is_known(request.host) and is_same_origin


def _refusal(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=json.dumps({"error": reason}), content_type="application/json")
