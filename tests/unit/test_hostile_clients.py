"""Clients of the gateway that send too much, too slowly, or for ever, and bodies that are none."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import aiohttp
import pytest

import agentrl
from agentrl.gateway import bodies
from agentrl.gateway.calls import ChatReply, ChatRequest, RequestRefusedError
from agentrl.gateway.server import Gateway, OpenSeats
from tests.unit.episodes import play
from tests.unit.test_gateway import Loop, ask, user

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def _zstd_of_large_window() -> bytes:
    """Compress two bytes so that a reader is told to hold 2 GiB."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 31})
    return compressor.compress(b"{}") + compressor.flush()


class HeldSeat:
    """A seat that nobody asks."""

    seat = "main"

    async def reply(self, request: ChatRequest) -> ChatReply:
        raise AssertionError

    def count_tokens(self, request: ChatRequest) -> int:
        raise AssertionError


def test_connections_without_a_key_are_closed_and_those_with_one_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.server.KEYLESS_S", 0.2)

    async def held() -> bytes:
        gateway = Gateway()
        async with gateway.open({"main": HeldSeat()}, {}) as opened:
            port = int(opened.root_url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nx-api-key: {opened.key}\r\n\r\n".encode()
            writer.write(head)
            assert await reader.readuntil(b"}]") != b""
            for sent in (b"", b"GET / HTTP/1.1\r\nHost: ", head.replace(opened.key.encode(), b"sk-no")):
                keyless, sender = await asyncio.open_connection("127.0.0.1", port)
                sender.write(sent)
                async with asyncio.timeout(20):
                    await keyless.read()  # until it is closed
                sender.close()
            await asyncio.sleep(0.6)
            writer.write(head)
            answer = await reader.readuntil(b"200 OK")
            writer.close()
            return answer

    assert b"200 OK" in asyncio.run(held())


def test_connections_without_a_key_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.server.KEYLESS_SHARE", 1 << 40)

    async def refused() -> None:
        async with Gateway().open({"main": HeldSeat()}, {}) as opened:
            port = int(opened.root_url.rpartition(":")[2])
            _, first = await asyncio.open_connection("127.0.0.1", port)
            reader, second = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            for writer in (first, second):
                writer.close()

    asyncio.run(refused())


def test_a_client_of_an_episode_that_ended_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.server.KEEPALIVE_S", 0.1)
    seat = HeldSeat()

    async def held() -> bytes:
        gateway = Gateway()
        async with gateway.open({"other": seat}, {}):
            async with gateway.open({"main": seat}, {}) as ended:
                port = int(ended.root_url.rpartition(":")[2])
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nx-api-key: {ended.key}\r\n"
                writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
                while not ended.answering:
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(10):
                try:
                    return await reader.read()
                except ConnectionResetError:
                    return b""
                finally:
                    writer.close()

    assert asyncio.run(held()) == b""


class RefusingSeat(HeldSeat):
    """A seat that refuses whatever it is asked."""

    async def reply(self, request: ChatRequest) -> ChatReply:
        raise RequestRefusedError("no", "limit")


def test_refused_requests_leave_nothing_behind() -> None:
    async def left() -> tuple[list[int], int]:
        async with Gateway().open({"main": RefusingSeat()}, {}) as opened:
            statuses = []
            async with aiohttp.ClientSession(headers={"x-api-key": opened.key}) as client:
                for text in "aab":
                    body = {"model": "main", "messages": [user(text)]}
                    headers = {"Idempotency-Key": text}
                    async with client.post(f"{opened.url}/chat/completions", json=body, headers=headers) as response:
                        statuses.append(response.status)
            return statuses, len(opened.calls) + len(opened.by_idempotency_key) + len(opened.running)

    assert asyncio.run(left()) == ([403, 403, 403], 0)


async def send_begun(opened: OpenSeats, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request of which the last byte is missing."""
    port = int(opened.root_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nx-api-key: {opened.key}\r\n"
    writer.write(f"{head}Content-Length: {size + 1}\r\n\r\n".encode() + b" " * size)
    return reader, writer


def test_bodies_that_are_being_sent_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_WAITING_BYTES", 3_000)

    async def sent() -> bytes:
        async with asyncio.timeout(60), Gateway().open({"main": HeldSeat()}, {}) as opened:
            _, first = await send_begun(opened, 2_000)
            while opened.body_bytes < 2_000:
                await asyncio.sleep(0.01)
            reader, second = await send_begun(opened, 2_000)
            refused = await reader.readline()
            for writer in (first, second):
                writer.close()
            while opened.body_bytes:
                await asyncio.sleep(0.01)
            return refused

    assert b" 503 " in asyncio.run(sent())


def test_connections_of_an_attempt_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.server._file_limit", lambda: 8)

    async def asked() -> list[bytes]:
        async with asyncio.timeout(60), Gateway().open({"main": HeldSeat()}, {}) as opened:
            port = int(opened.root_url.rpartition(":")[2])
            head = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nx-api-key: {opened.key}\r\n\r\n".encode()
            statuses, writers = [], []
            for number in range(7):
                if number == 5:
                    writers.pop(0).close()
                    await asyncio.sleep(0.2)
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head)
                statuses.append((await reader.readline()).split()[1])
                writers.append(writer)
            for writer in writers:
                writer.close()
            return statuses

    assert asyncio.run(asked()) == [*[b"200"] * 4, b"503", b"200", b"503"]


def test_malformed_requests_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Their text holds the key, and whoever reaches loopback could fill a disk with them."""

    async def asked() -> bytes:
        async with Gateway().open({"main": HeldSeat()}, {}) as opened:
            port = int(opened.root_url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET /v1/models HTTP/1.1\nx-api-key: {opened.key}\n\n".encode())  # without \r
            async with asyncio.timeout(60):
                answer = await reader.readline()
            writer.close()
            return answer

    assert b" 400 " in asyncio.run(asked())
    assert not caplog.records


def test_a_key_is_void_once_its_episode_has_ended() -> None:
    seat = HeldSeat()

    async def asked() -> tuple[int, str]:
        gateway = Gateway()
        async with gateway.open({"other": seat}, {}):
            async with gateway.open({"main": seat}, {}) as ended:
                pass
            headers = {"x-api-key": ended.key}
            body = {"model": "main", "messages": [user("a")]}
            async with aiohttp.ClientSession(headers=headers) as client:
                response = await client.post(f"{ended.url}/chat/completions", json=body)
                return response.status, (await response.json())["error"]["message"]

    status, message = asyncio.run(asked())
    assert (status, "keys end with their episode" in message) == (401, True)


class Enormous(Loop):
    """Sends 50 MB, and then asks in the ordinary way."""

    answers: ClassVar[list[tuple[int, str]]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nx-api-key: {endpoint.key}\r\n"
        writer.write(f"{head}Content-Length: {50 << 20}\r\n\r\n".encode())
        try:
            for _ in range(50):
                writer.write(b" " * (1 << 20))
                await writer.drain()
        except ConnectionError:
            pass  # it is refused before the last byte
        first = await reader.readline()
        writer.close()
        self.answers.append((int(first.split()[1]), ""))
        status, reply = await ask(client, endpoint, [user("a")])
        self.answers.append((status, reply["choices"][0]["message"]["content"]))


def test_a_body_of_50_mb_is_refused_and_holds_up_nobody() -> None:
    Enormous.answers.clear()
    play(Enormous, ["yes"])
    assert Enormous.answers == [(413, ""), (200, "yes")]


class Deaf(Loop):
    """Asks twenty thousand times without reading an answer, and then in the ordinary way."""

    answers: ClassVar[list[tuple[int, str]]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
        _, writer = await asyncio.open_connection("127.0.0.1", port)  # reads 128 KiB and no more
        head = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nx-api-key: {endpoint.key}\r\n\r\n"
        writer.write(head.encode() * 20_000)
        status, reply = await ask(client, endpoint, [user("a")])
        self.answers.append((status, reply["choices"][0]["message"]["content"]))
        writer.transport.abort()


def test_a_client_that_never_reads_holds_up_nobody() -> None:
    Deaf.answers.clear()
    assert play(Deaf, ["yes"]).header.drop_reason is None
    assert Deaf.answers == [(200, "yes")]


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"[" * 100_000, ""),
        (b'{"a":' * 80 + b"1" + b"}" * 80, ""),
        (b'{"a": "\xff"}', ""),
        (b"[]", ""),
        (b'{"a": NaN}', ""),
        (b'{"a": [' + b"{}," * 300_000 + b"1]}", ""),
        (b'{"a": [' + b"1," * 1_100_000 + b"1]}", ""),
        (gzip.compress(b" " * (bodies.MAX_BODY_BYTES + 1), mtime=0), "gzip"),
        (gzip.compress(b"{}", mtime=0)[:-4], "gzip"),  # with a time, names of tests would differ between processes
        (b"{}", "gzip"),
        (b"{}", "br"),
        (zstd.compress(b" " * (bodies.MAX_BODY_BYTES + 1)), "zstd"),
        (zstd.compress(b"{}")[:-1], "zstd"),
        (_zstd_of_large_window(), "zstd"),
        (b"{}", "zstd"),
    ],
)
def test_hostile_bodies_are_refused(body: bytes, encoding: str) -> None:
    with pytest.raises(RequestRefusedError):
        bodies.parse_json_body(bodies.decompress_body(body, encoding))


@pytest.mark.parametrize(("compress", "encoding"), [(gzip.compress, "gzip"), (zstd.compress, "zstd")])
def test_a_packed_body_is_read(compress: Callable[[bytes], bytes], encoding: str) -> None:
    assert bodies.parse_json_body(bodies.decompress_body(compress(b'{"a": 1}'), encoding)) == {"a": 1}
