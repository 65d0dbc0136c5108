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
from agentrl.gateway.calls import ChatReply, ChatRequest, RequestRefusedError, require_object_list
from agentrl.gateway.server import AttemptEndpoint, Gateway
from tests.unit.episodes import play
from tests.unit.test_gateway import Loop, ask, turns, user

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
    monkeypatch.setattr("agentrl.core.connections.UNKNOWN_S", 0.2)

    async def held() -> bytes:
        gateway = Gateway()
        async with gateway.open({"main": HeldSeat()}, {}) as opened:
            port = int(opened.url.removesuffix("/v1").rpartition(":")[2])
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


def test_many_connections_without_a_key_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are closed: a client shows its key at once."""
    monkeypatch.setattr("agentrl.core.connections.UNKNOWN_SHARE", 4)
    monkeypatch.setattr("agentrl.core.connections.file_limit", lambda: 32)

    async def answered() -> tuple[bytes, int]:
        async with asyncio.timeout(60), Gateway().open({"main": HeldSeat()}, {}) as opened:
            port = int(opened.url.removesuffix("/v1").rpartition(":")[2])
            silent = []
            for _ in range(40):
                silent.append(await asyncio.open_connection("127.0.0.1", port))
                await asyncio.sleep(0.01)
            async with aiohttp.ClientSession(headers={"x-api-key": opened.key}) as client:
                response = await client.get(f"{opened.url}/models")
                status = response.status
            first = await silent[0][0].read()
            for _, writer in silent:
                writer.close()
            return first, status

    assert asyncio.run(answered()) == (b"", 200)


def test_a_client_of_an_episode_that_ended_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.server.KEEPALIVE_S", 0.1)
    seat = HeldSeat()

    async def held() -> bytes:
        gateway = Gateway()
        async with gateway.open({"other": seat}, {}):
            async with gateway.open({"main": seat}, {}) as ended:
                port = int(ended.url.removesuffix("/v1").rpartition(":")[2])
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nx-api-key: {ended.key}\r\n"
                writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
                while not gateway._server.connections_of(ended):
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(10):
                try:
                    return await reader.read()
                except ConnectionResetError:
                    return b""
                finally:
                    writer.close()

    assert asyncio.run(held()) == b""


def test_a_request_that_is_read_after_the_end_of_its_episode_samples_nothing() -> None:
    """The episode ends when only the last byte is missing; another one keeps the gateway open."""
    seat = HeldSeat()  # fails if it is asked

    async def answered() -> bytes:
        gateway, body = Gateway(), b'{"model": "main", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}'
        async with asyncio.timeout(60), gateway.open({"other": seat}, {}):
            async with gateway.open({"main": seat}, {}) as ended:
                reader, writer = await send_begun(ended, body[:-1])
                while ended.budget.held_bytes < len(body) - 1:
                    await asyncio.sleep(0.01)
            writer.write(body[-1:])
            answer = await reader.readline() + await reader.readuntil(b"ended")
            writer.close()
            return answer

    assert b" 401 " in asyncio.run(answered())


def test_the_connections_of_an_episode_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those of ended episodes would leave none to others; one that shows another episode's key by then stays."""
    monkeypatch.setattr("agentrl.gateway.server.KEEPALIVE_S", 0.5)
    monkeypatch.setattr("agentrl.core.connections.UNKNOWN_S", 0.2)

    async def still_answered() -> bytes:
        gateway = Gateway()
        async with asyncio.timeout(60), gateway.open({"other": HeldSeat()}, {}) as other:
            async with gateway.open({"main": HeldSeat()}, {}) as ended:
                port = int(ended.url.removesuffix("/v1").rpartition(":")[2])

                def head(key: str) -> bytes:
                    return f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nx-api-key: {key}\r\n\r\n".encode()

                pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
                for reader, writer in pairs:
                    writer.write(head(ended.key))
                    await reader.readuntil(b"}]")
            (idle, _), (renewing, renews), (moved, moves) = pairs
            moves.write(head(other.key))
            await moved.readuntil(b"}]")
            closed = asyncio.gather(idle.read(), renewing.read(), return_exceptions=True)
            while not closed.done():
                renews.write(head(ended.key))
                await asyncio.sleep(0.05)
            moves.write(head(other.key))
            answer = await moved.readuntil(b"200 OK")
            for _, writer in pairs:
                writer.close()
            return answer

    assert b"200 OK" in asyncio.run(still_answered())


class WaitingSeat(HeldSeat):
    """A seat whose replies never come."""

    def __init__(self) -> None:
        self.asked = 0

    async def reply(self, request: ChatRequest) -> ChatReply:
        self.asked += 1
        await asyncio.Event().wait()
        raise AssertionError


async def send_retries(opened: AttemptEndpoint, text: str, clients: int) -> list[int]:
    """Send a request several times, as retries of one another; the statuses of those that are refused."""
    body = {"model": "main", "messages": [user(text)]}

    async def send(client: aiohttp.ClientSession) -> int:
        headers = {"Idempotency-Key": "one", "x-api-key": opened.key}
        try:
            async with asyncio.timeout(1):
                async with client.post(f"{opened.url}/chat/completions", json=body, headers=headers) as response:
                    return response.status
        except TimeoutError:
            return 0

    async with aiohttp.ClientSession() as client:
        return [status for status in await asyncio.gather(*(send(client) for _ in range(clients))) if status]


def test_the_clients_of_one_call_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.server.MOST_CLIENTS", 3)
    seat = WaitingSeat()

    async def refused() -> list[int]:
        async with Gateway().open({"main": seat}, {}) as opened:
            return await send_retries(opened, "a", 5)

    assert asyncio.run(refused()) == [503, 503]
    assert seat.asked == 1


def test_retries_of_equal_requests_spread_over_their_calls() -> None:
    seat = WaitingSeat()

    async def clients() -> list[int]:
        async with Gateway().open({"main": seat}, {}) as opened, aiohttp.ClientSession() as client:
            body = {"model": "main", "messages": [user("a")]}

            def post(retry: int) -> asyncio.Future[Any]:
                headers = {"x-api-key": opened.key, "x-stainless-retry-count": str(retry)}
                return asyncio.ensure_future(client.post(f"{opened.url}/chat/completions", json=body, headers=headers))

            sent = []
            for retry in (0, 0, 1, 1):
                sent.append(post(retry))
                while sum(call.clients for calls in opened.calls.values() for call in calls) < len(sent):
                    await asyncio.sleep(0.01)
            found = [call.clients for calls in opened.calls.values() for call in calls]
            for each in sent:
                each.cancel()
            return found

    assert asyncio.run(clients()) == [2, 2]
    assert seat.asked == 2


def test_requests_that_wait_for_their_reply_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 16_000)
    seat = WaitingSeat()

    async def refused() -> tuple[list[int], int]:
        async with Gateway().open({"main": seat}, {}) as opened:
            statuses = await send_retries(opened, "a" * 2_000, 4)
            while opened.budget.held_bytes:
                await asyncio.sleep(0.01)
            return statuses, opened.budget.held_bytes

    statuses, held = asyncio.run(refused())
    assert statuses == [503, 503]
    assert held == 0


def test_attempts_take_turns_with_their_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = bodies.parse_json_body

    def noted(body: bytes) -> dict[str, Any]:
        found = parse(body)
        parsed.append(found["model"])
        return found

    monkeypatch.setattr(bodies, "parse_json_body", noted)

    async def asked() -> None:
        gateway = Gateway()
        async with (
            gateway.open({"many": RefusingSeat()}, {}) as many,
            gateway.open({"one": RefusingSeat()}, {}) as one,
            aiohttp.ClientSession() as client,
        ):

            async def ask_one(opened: AttemptEndpoint, model: str) -> None:
                body = {"model": model, "messages": [user("a")]}
                url, headers = f"{opened.url}/chat/completions", {"x-api-key": opened.key}
                async with client.post(url, json=body, headers=headers):
                    pass

            async with gateway._parsing:  # until all wait for it
                asking = [asyncio.ensure_future(ask_one(many, "many")) for _ in range(8)]
                while not many.budget.parsing.locked():
                    await asyncio.sleep(0.01)
                asking.append(asyncio.ensure_future(ask_one(one, "one")))
                while not one.budget.parsing.locked():
                    await asyncio.sleep(0.01)
            await asyncio.gather(*asking)

    asyncio.run(asked())
    assert parsed[:2] == ["many", "one"]


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


async def send_begun(opened: AttemptEndpoint, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request with a body of which the last byte is missing."""
    port = int(opened.url.removesuffix("/v1").rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nx-api-key: {opened.key}\r\n"
    writer.write(f"{head}Content-Length: {len(body) + 1}\r\n\r\n".encode() + body)
    return reader, writer


def test_bodies_that_are_being_sent_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 3_000)

    async def sent() -> bytes:
        async with asyncio.timeout(60), Gateway().open({"main": HeldSeat()}, {}) as opened:
            _, first = await send_begun(opened, b" " * 2_000)
            while opened.budget.held_bytes < 2_000:
                await asyncio.sleep(0.01)
            reader, second = await send_begun(opened, b" " * 2_000)
            refused = await reader.readline()
            for writer in (first, second):
                writer.close()
            while opened.budget.held_bytes:
                await asyncio.sleep(0.01)
            return refused

    assert b" 503 " in asyncio.run(sent())


def test_connections_of_an_attempt_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.connections.file_limit", lambda: 8)

    async def asked() -> list[bytes]:
        async with asyncio.timeout(60), Gateway().open({"main": HeldSeat()}, {}) as opened:
            port = int(opened.url.removesuffix("/v1").rpartition(":")[2])
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


def test_slow_bodies_of_an_episode_take_no_connection_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the process has files for; each other episode asks several times, over new connections."""
    monkeypatch.setattr("agentrl.core.connections.file_limit", lambda: 64)

    async def asked() -> list[int]:
        gateway = Gateway()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(60))
            hostile, *others = [
                await stack.enter_async_context(gateway.open({"main": HeldSeat()}, {})) for _ in range(9)
            ]
            writers, statuses = [], []
            for _ in range(5):
                writers += [(await send_begun(hostile, b"{"))[1] for _ in range(80)]
                for other in others:
                    async with (
                        aiohttp.ClientSession(headers={"x-api-key": other.key}) as client,
                        client.get(f"{other.url}/models") as response,
                    ):
                        statuses.append(response.status)
            for writer in writers:
                writer.close()
            return statuses

    assert asyncio.run(asked()) == [200] * 40


def test_a_body_that_does_not_arrive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.http.BODY_S", 0.1)

    async def asked() -> bytes:
        async with asyncio.timeout(60), Gateway().open({"main": HeldSeat()}, {}) as opened:
            reader, writer = await send_begun(opened, b"{")
            answer = await reader.readline()
            writer.close()
            return answer

    assert b" 408 " in asyncio.run(asked())


def test_malformed_requests_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Their text holds the key, and whoever reaches loopback could fill a disk with them."""

    async def asked() -> bytes:
        async with Gateway().open({"main": HeldSeat()}, {}) as opened:
            port = int(opened.url.removesuffix("/v1").rpartition(":")[2])
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
    assert (status, "keys" in message) == (401, True)


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
        (b'{"a": 1e999}', ""),
        (b'{"a": [' + b"{}," * 300_000 + b"1]}", ""),
        (b'{"a": [' + b"1," * 1_100_000 + b"1]}", ""),
        (gzip.compress(b" " * (bodies.MAX_BODY_BYTES + 1), mtime=0), "gzip"),
        (gzip.compress(b"{}", mtime=0)[:-4], "gzip"),  # with a time, names of tests would differ between processes
        (gzip.compress(b"{}", mtime=0) * 2, "gzip"),
        (b"{}", "gzip"),
        (b"{}", "br"),
        (zstd.compress(b" " * (bodies.MAX_BODY_BYTES + 1)), "zstd"),
        (zstd.compress(b"{}")[:-1], "zstd"),
        (zstd.compress(b"{}") * 2, "zstd"),
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


def test_half_a_character_is_replaced_and_a_whole_one_kept() -> None:
    read = bodies.parse_json_body(b'{"a": "\\ud800 \\ud83d\\ude00 \\\\ud800", "\\udfff": 1.5}')
    assert read == {"a": "? \U0001f600 \\ud800", "?": 1.5}


def test_a_list_too_long_to_be_read_is_refused_and_quoted_shortly() -> None:
    with pytest.raises(RequestRefusedError, match="at most 8192"):
        require_object_list([{}] * 9_000, "messages")
    with pytest.raises(RequestRefusedError) as refused:
        require_object_list([0.5] * 100_000, "messages")
    assert len(str(refused.value)) < 150


UNUSUAL: list[dict[str, Any]] = [
    {"messages": [user("\ud800")], "stop": ["\udfff"]},
    {
        "messages": [
            user("a"),
            {"role": "assistant", "tool_calls": [{"id": "\ud800", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "\ud800", "content": "x"},
        ]
    },
    {
        "messages": [user("a")],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}],
    },
    *(
        {
            "messages": [
                user("a"),
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ]
        }
        for arguments in ('{"a": 1' + "0" * 40 + "}", '{"a": "\\ud800", "\\udc00": 1}', {"a": 10**40}, '{"a": NaN}')
    ),
]


class Unusual(Loop):
    """Sends what the model may have written and a harness sends back, and what no chat format knows."""

    statuses: ClassVar[list[int]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        for body in UNUSUAL:
            status, _ = await ask(client, endpoint, **body)
            self.statuses.append(status)


def test_unusual_content_is_answered_or_refused_and_costs_no_episode() -> None:
    Unusual.statuses.clear()
    played = play(Unusual, ["yes"] * len(UNUSUAL), max_turns=20)
    assert played.header.drop_reason is None
    assert Unusual.statuses == [200, 200, 400, 200, 200, 200, 200]


def test_a_call_that_no_journal_can_hold_continues_its_row_when_it_is_sent_back() -> None:
    """Else a model could choose to have its bad episodes dropped."""

    class Echoing(Loop):
        async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
            messages: list[Any] = [user("a")]
            tools = [{"type": "function", "function": {"name": "f"}}]
            for _ in range(2):
                _, reply = await ask(client, endpoint, messages, tools=tools)
                message = reply["choices"][0]["message"]
                messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"}]
            await ask(client, endpoint, messages, tools=tools)

    call = '<tool_call>{"name": "f", "arguments": {"a": 1' + "0" * 40 + ', "b": "\\ud800"}}</tool_call>'
    played = play(Echoing, [call, call, "done"])
    assert played.header.drop_reason is None
    assert [turn.row for turn in turns(played)] == [0, 0, 0]
