"""Strangers at a port: of the gateway, the viewer and the cluster's listeners, each with real sockets."""

from __future__ import annotations

import asyncio
import logging
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrl.core.connections import BoundedServer
from agentrl.core.network import Listener, connect
from agentrl.gateway.server import Gateway
from agentrl.inspection.viewer.application import serve_viewer
from tests.unit.test_hostile_clients import HeldSeat

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Port(NamedTuple):
    """A port, and how to show a key there."""

    number: int
    enter: Callable[[], Awaitable[Stream]]
    """Connect, show the key, and return the admitted connection."""
    ask: Callable[[Stream], Awaitable[bytes]]
    """Have a request answered on an admitted connection."""


Serve = Callable[[Path], AbstractAsyncContextManager[Port]]


def _http(number: int, path: str, header: str) -> Port:
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{number}\r\n{header}\r\n\r\n".encode()

    async def ask(stream: Stream) -> bytes:
        stream[1].write(head)
        return await stream[0].readuntil(b"\r\n")

    async def enter() -> Stream:
        stream = await asyncio.open_connection("127.0.0.1", number)
        assert b" 200 " in await ask(stream)
        return stream

    return Port(number, enter, ask)


@asynccontextmanager
async def gateway(_: Path) -> AsyncIterator[Port]:
    async with Gateway().open({"main": HeldSeat()}, {}) as opened:
        yield _http(int(opened.url.removesuffix("/v1").rpartition(":")[2]), "/v1/models", f"x-api-key: {opened.key}")


@asynccontextmanager
async def viewer(run: Path) -> AsyncIterator[Port]:
    async with serve_viewer(run) as served:
        yield _http(served.port, "/ask/run", f"Authorization: Bearer {served.token}")


@asynccontextmanager
async def listener(_: Path) -> AsyncIterator[Port]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)

    listening = Listener(echo)
    address = await listening.listen("127.0.0.1")

    async def ask(stream: Stream) -> bytes:
        stream[1].write(b"hello\n")
        return await stream[0].readline()

    yield Port(address.port, lambda: connect(address), ask)
    listening.close()


every_port = pytest.mark.parametrize("serve", [gateway, viewer, listener])


async def is_closed(stream: Stream) -> bool:
    """Wait until the other side has closed a connection."""
    try:
        async with asyncio.timeout(30):
            await stream[0].read()
    except ConnectionError:
        return True
    return stream[0].at_eof()


@contextmanager
def file_limit(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@every_port
def test_half_a_request_is_closed_and_a_known_client_stays(
    serve: Serve, sample_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.core.connections.UNKNOWN_S", 0.2)

    async def held() -> bytes:
        async with serve(sample_run) as port:
            known = await port.enter()
            for sent in (b"", b"GET / HTTP/1.1\r\nHost: "):
                stranger = await asyncio.open_connection("127.0.0.1", port.number)
                stranger[1].write(sent)
                assert await is_closed(stranger)
                stranger[1].close()
            answer = await port.ask(known)
            known[1].close()
            return answer

    assert asyncio.run(held())


@every_port
def test_strangers_in_great_numbers_hold_up_nobody(serve: Serve, sample_run: Path) -> None:
    """More of them than the process has files for: the oldest are closed. The client's sockets count in this process,
    so the strangers are in another one."""
    flood = (
        "import resource, socket, sys\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
        "held = []\n"
        "for _ in range(600):\n"
        "    held.append(socket.create_connection(('127.0.0.1', int(sys.argv[1]))))\n"
        "    try: held[-1].send(b'GET / HTTP/1.1')\n"
        "    except OSError: pass\n"
        "print('sent', flush=True); sys.stdin.read()\n"
    )

    async def held() -> bytes:
        async with serve(sample_run) as port, asyncio.timeout(60):
            known = await port.enter()
            pipe = asyncio.subprocess.PIPE
            strangers = await asyncio.create_subprocess_exec(
                sys.executable, "-c", flood, str(port.number), stdin=pipe, stdout=pipe
            )
            assert strangers.stdout is not None
            assert await strangers.stdout.readline() == b"sent\n"
            late = await port.enter()
            answers = await port.ask(known) + await port.ask(late)
            for _, writer in (known, late):
                writer.close()
            strangers.kill()
            await strangers.wait()
            return answers

    with file_limit(200):
        assert asyncio.run(held()).count(b"\n") == 2


@every_port
def test_malformed_requests_write_no_lines(serve: Serve, sample_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def sent() -> None:
        async with serve(sample_run) as port:
            for request in (b"\0\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 70_000, b"x" * 96):
                stream = await asyncio.open_connection("127.0.0.1", port.number)
                stream[1].write(request)
                stream[1].write_eof()
                assert await is_closed(stream)
                stream[1].close()

    asyncio.run(sent())
    assert [record for record in caplog.records if record.name != "asyncio" or record.levelno > logging.DEBUG] == []


OUT_OF_FILES = """
import asyncio, os, resource, socket
from agentrl.core import connections

connections.RETRY_S = 0.0
accepted = asyncio.Event()

class Accepted(asyncio.Protocol):
    def connection_made(self, transport):
        accepted.set()

async def main():
    server = connections.BoundedServer()
    port = await server.listen(Accepted, "127.0.0.1")
    client = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    client.connect(("127.0.0.1", port))
    for _ in range(1000):
        await asyncio.sleep(0)
    assert not accepted.is_set()
    for descriptor in held:
        os.close(descriptor)
    await accepted.wait()
    server.close()

asyncio.run(main())
"""


def test_a_process_without_files_says_so_once_and_accepts_later() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", OUT_OF_FILES], capture_output=True, text=True, check=False, timeout=60
    )
    assert finished.returncode == 0, finished.stderr
    assert len(finished.stderr.splitlines()) == 1
    assert "ulimit" in finished.stderr


async def _occupied() -> None:
    first, second = BoundedServer(), BoundedServer()
    port = await first.listen(asyncio.Protocol, "127.0.0.1")
    with pytest.raises(OSError, match="in use"):
        await second.listen(asyncio.Protocol, "127.0.0.1", port)
    first.close()
    assert await second.listen(asyncio.Protocol, "127.0.0.1", port) == port
    second.close()


def test_a_port_is_free_again_when_its_server_is_closed() -> None:
    asyncio.run(_occupied())
