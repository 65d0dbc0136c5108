"""A web application on a thread of its own, for tests of clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from aiohttp import web


@contextlib.contextmanager
def served(make: Callable[[], web.Application]) -> Iterator[str]:
    """Serve an application on a thread; yields its address."""
    address: list[str] = []
    ready, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running(make()) as url:
            address.append(url)
            ready.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    try:
        yield address[0]
    finally:
        end.set()
        thread.join()


@contextlib.asynccontextmanager
async def running(application: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()
