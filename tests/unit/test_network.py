"""Only who knows a listener's token is heard, on both sides; an address tells nobody else its token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agentrl.core.network import Address, Listener, connect, interface_of


def listening(client: Callable[[Address, list[bytes]], Awaitable[None]]) -> list[bytes]:
    """What a listener on loopback heard from a client."""
    heard: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        writer.write(b"yes\n")
        await writer.drain()

    async def run() -> None:
        listener = Listener(handle)
        await client(await listener.listen("127.0.0.1"), heard)
        listener.close()

    asyncio.run(run())
    return heard


def test_a_client_with_the_token_is_heard() -> None:
    async def client(address: Address, heard: list[bytes]) -> None:
        reader, writer = await connect(Address.parse(str(address)))
        writer.write(b"hello\n")
        assert await reader.readline() == b"yes\n"
        writer.close()

    assert listening(client) == [b"hello\n"]


def test_a_client_with_another_token_or_none_is_not() -> None:
    async def client(address: Address, heard: list[bytes]) -> None:
        with pytest.raises(ConnectionRefusedError, match="token"):
            await connect(address._replace(token="00" * 32))
        reader, writer = await asyncio.open_connection(address.host, address.port)
        nonce = await reader.readexactly(32)
        writer.write(nonce + b"x" * 32 + b"hello\n")
        assert await reader.read() == b""
        writer.close()

    assert listening(client) == []


def test_a_listener_that_does_not_know_the_token_is_left() -> None:
    async def run() -> None:
        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"n" * 32)
            writer.write(await reader.readexactly(64))
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionRefusedError, match="listener"):
            await connect(Address("127.0.0.1", port, "ab" * 32))
        server.close()
        await server.wait_closed()

    asyncio.run(run())


@pytest.mark.parametrize("text", ["", "tcp://127.0.0.1:80", "tcp://secret@host", "/run/clients"])
def test_what_is_no_address_is_refused_and_not_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="address") as refused:
        Address.parse(text)
    assert "secret" not in str(refused.value)


def test_the_interface_of_loopback_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(OSError, match=r"203\.0\.113\.9"):
        interface_of("203.0.113.9")
