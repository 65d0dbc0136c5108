"""The viewer's server: answers the page's questions about a run on this machine, also while the run is written.

Listens on 127.0.0.1 only. The page itself contains no data of the run. A question needs the token, which is new for
each server and reaches the page behind the `#` of its address, so that browsers never transmit it; a request for
another host name is refused, as from a foreign page whose name resolves to this machine (DNS rebinding). Reads only;
one query at a time, in a thread with its own reader.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from agentrl.core.connections import BoundedServer, http_logger
from agentrl.core.errors import AgentRLError, InputError, StorageError
from agentrl.core.files import os_error_advice
from agentrl.inspection.viewer.page import viewer_page
from agentrl.inspection.viewer.served_runs import ServedRuns

HOST = "127.0.0.1"
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
async def serve_viewer(run: str | Path, port: int = 0) -> AsyncIterator[RunningViewerServer]:
    """Serve a run until the context is left.

    Args:
        run: directory of the run, or of several runs, all of which are served.
        port: port to listen on; 0: any free port.

    Raises:
        InputError: there is no run.
        StorageError: the run cannot be read, or the port cannot be used.
    """
    token = secrets.token_urlsafe(32)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="viewer")
    loop = asyncio.get_running_loop()
    # SQLite connections must be used in the thread that opened them.
    runs = await loop.run_in_executor(thread, ServedRuns, run)
    server = BoundedServer()
    runner = web.AppRunner(_application(runs, thread, token, server), access_log=None, logger=http_logger())
    try:
        await runner.setup()
        assert runner.server is not None
        try:
            port = await server.listen(runner.server, HOST, port)
        except OSError as error:
            raise StorageError(
                f"port {port} of {HOST}: cannot be listened on ({error.strerror}); {os_error_advice(error)}"
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


def _application(runs: ServedRuns, thread: ThreadPoolExecutor, token: str, server: BoundedServer) -> web.Application:
    page = viewer_page()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests without this server's address and name."""
        if request.transport is not None:
            server.doubt(request.transport)
        if not _is_from_this_host(request):
            response: web.StreamResponse = _refusal(403, "this server answers only requests to its own address")
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
        if request.transport is not None:
            server.admit(request.transport)
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


def _is_from_this_host(request: web.Request) -> bool:
    """Whether a request names this server as its host and, if it states one, as its origin."""
    sockname = request.transport.get_extra_info("sockname") if request.transport is not None else None
    host_names = {f"{name}:{sockname[1]}" for name in (HOST, "localhost")} if sockname else set()
    origin = request.headers.get("Origin")
    return request.host in host_names and (origin is None or origin in {f"http://{name}" for name in host_names})


def _refusal(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=json.dumps({"error": reason}), content_type="application/json")
