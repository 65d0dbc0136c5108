"""Authenticated connections between the processes of a run, on one machine or several.

Between machines an address is `tcp://TOKEN@HOST:PORT`, and both sides prove that they know the listener's token. The
address is a capability: it travels over existing connections only, is written nowhere, and ends with its listener. On
one machine an address is the path of a Unix socket in a directory that only this user can enter. Owns: listening, the
handshake, the lifetime of a silent connection (before its handshake: `connections.py`). Does not own the messages
(`rpc.py`). Nothing is encrypted: the network must be private.
Invariant: no byte of a connection is interpreted before its handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from agentrl.core.connections import BoundedServer

SCHEME = "tcp://"
HANDSHAKE_S = 10.0
"""Time limit of a client's handshake, in seconds."""
SILENT_S = 90
"""Seconds without an acknowledgement after which a connection ends. A network failure of 30 s does not end it: TCP
sends again, at the latest 51 s after the failure began."""
_NONCE = 32

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Address(NamedTuple):
    """A listener's address and token: the right to connect to it."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{self.token}@{host}:{self.port}"

    @staticmethod
    def parse(text: str) -> Address:
        """Parse the text of an address.

        Raises:
            ValueError: the text is not an address; the message does not quote it, because it may hold a token.
        """
        token, _, place = text.removeprefix(SCHEME).partition("@")
        host, _, port = place.rpartition(":")
        if not (text.startswith(SCHEME) and token and host and port.isdecimal()):
            raise ValueError("not the address of a listener")
        return Address(host.strip("[]"), int(port), token)


class Listener:
    """A TCP port, open to peers that know its token, or a Unix socket in a private directory."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._token = secrets.token_hex(_NONCE)
        self._server = BoundedServer()
        self._unix: asyncio.Server | None = None

    async def listen(self, host: str) -> Address:
        """Listen at `host`, one of this machine's addresses, on a free port.

        Raises:
            OSError: `host` is not an address of this machine.
        """
        return Address(host, await self._server.listen(self._make_protocol, host), self._token)

    async def listen_locally(self, path: str) -> str:
        """Listen at a Unix socket in a directory that only this user can enter; returns `path`.

        Raises:
            OSError: the socket cannot be made, for example because the path is longer than 107 characters.
        """
        self._unix = await asyncio.start_unix_server(self._handle, path)
        return path

    def close(self) -> None:
        """Stop listening, and close the connections of a port. Idempotent."""
        self._server.close()
        if self._unix is not None:
            self._unix.close()

    def _make_protocol(self) -> asyncio.BaseProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._accept)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            keep_alive(writer)
            nonce = secrets.token_bytes(_NONCE)
            writer.write(nonce)
            peer_nonce, proof = await reader.readexactly(_NONCE), await reader.readexactly(_NONCE)
            if not hmac.compare_digest(proof, _proof(self._token, b"client", nonce, peer_nonce)):
                return
            if not self._server.admit(writer.transport):
                return
            writer.write(_proof(self._token, b"listener", peer_nonce, nonce))
            await self._handle(reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            writer.close()


async def connect(address: Address | str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a listener by its address or the text of it.

    Raises:
        FileNotFoundError, ConnectionRefusedError: no process listens there, or the token is wrong.
        OSError: the machine cannot be reached.
        ValueError: see `Address.parse`.
    """
    if isinstance(address, str):
        if not address.startswith(SCHEME):
            return await asyncio.open_unix_connection(address)
        address = Address.parse(address)
    async with asyncio.timeout(HANDSHAKE_S):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            keep_alive(writer)
            nonce, peer_nonce = secrets.token_bytes(_NONCE), await reader.readexactly(_NONCE)
            writer.write(nonce + _proof(address.token, b"client", peer_nonce, nonce))
            proof = await reader.readexactly(_NONCE)
            if not hmac.compare_digest(proof, _proof(address.token, b"listener", nonce, peer_nonce)):
                raise ConnectionRefusedError("another listener is using this port now")
        except asyncio.IncompleteReadError:
            writer.close()
            raise ConnectionRefusedError("the listener did not accept the token") from None
        except BaseException:
            writer.close()
            raise
    return reader, writer


def _proof(token: str, role: bytes, nonce: bytes, sender_nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), role + nonce + sender_nonce, "sha256")


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """End a connection when its peer has been silent for `SILENT_S`, and not earlier."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_S // 9)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)


def interface_of(address: str) -> str:
    """Return the network interface that has an IPv4 address of this machine.

    Raises:
        OSError: no interface has the address.
    """
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # SIOCGIFADDR fails for an interface without an address
                request = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(request[20:24]) == address:
                    return name
    raise OSError(f"no network interface of this machine has the address {address}")
