"""A TCP server that bounds its connections, for every port that strangers can reach.

A connection is unknown until its client has shown a key, a token or a proof; from then on it has an owner. Owns:
accepting, the number of connections and each owner's share of it, the time a connection may stay unknown, and the log
lines that strangers can cause. Does not own what a key is: the protocol calls `admit` when it has seen one.

Of the process's open files, unknown connections use at most a quarter and admitted ones at most half. If those are
full, an owner with fewer connections takes the place of the oldest one of the owner that has the most.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import cast

from agentrl.core.files import os_error_advice

UNKNOWN_S = 10.0
"""Seconds after which an unknown connection is closed; at most twice as long."""
UNKNOWN_SHARE = 4
"""Divisor of the process's limit on open files that gives the maximum number of unknown connections."""
ADMITTED_SHARE = 2
"""Divisor of the same limit that gives the maximum number of admitted connections."""
RECEIVE_BYTES = 8192
"""Buffer of a connection that a sandboxed program makes: a body in chunks of one byte takes 5 µs for each, and all that
is buffered is parsed at once."""
RETRY_S = 0.2
"""Seconds without accepting after the process could open no file."""
WARNING_S = 60.0
"""Minimum seconds between two log lines about that."""

logger = logging.getLogger("agentrl.network")


class BoundedServer:
    """Listens on a TCP port, and closes unknown connections that are too many or too old.

    It accepts one connection at a time: asyncio's own server accepts a hundred before a protocol sees the first, and
    logs a traceback for each that the process has no file for.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: dict[asyncio.BaseTransport, float] = {}
        """Unknown connections with the time since which they are, oldest first."""
        self._owners: dict[asyncio.BaseTransport, Hashable] = {}
        """Owners of the admitted connections, by the time of their newest request, oldest first."""
        self._warned_at = -WARNING_S

    async def listen(self, make: Callable[[], asyncio.BaseProtocol], host: str, port: int = 0) -> int:
        """Listen until `close`. Returns the port.

        Args:
            make: makes the protocol of a connection.
            host: address or name of this machine.
            port: port to listen on; 0: any free one.

        Raises:
            OSError: the address cannot be used.
        """
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, address in dict.fromkeys((family, address) for family, _, _, _, address in addresses):
                listening = socket.create_server(address, family=family, backlog=100)
                listening.setblocking(False)
                self._sockets.append(listening)
        except OSError:
            self.close()
            raise
        self._tasks = [loop.create_task(self._accept(make, listening)) for listening in self._sockets]
        self._tasks.append(loop.create_task(self._close_old()))
        return int(self._sockets[0].getsockname()[1])

    def accept_from(self, make: Callable[[], asyncio.BaseProtocol], listening: socket.socket) -> Callable[[], None]:
        """Accept from a further listening socket, which this server owns from now on. Returns what closes it."""
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        # In a separate context, since the server is not part of the calling code.
        accept_loop = self._accept(make, listening)
        task = asyncio.get_running_loop().create_task(accept_loop, context=contextvars.Context())
        self._sockets.append(listening)
        self._tasks.append(task)

        def close() -> None:
            task.cancel()
            listening.close()
            if listening in self._sockets:
                self._sockets.remove(listening)
                self._tasks.remove(task)

        return close

    def admit(self, connection: asyncio.BaseTransport, owner: Hashable = None) -> bool:
        """Note the owner of a connection.

        Returns:
            Whether the connection may stay. If not, its owner has as many as any, and no more are possible: refuse it.
        """
        if len(self._owners) >= file_limit() // ADMITTED_SHARE:
            self._forget_closed()
        if len(self._owners) >= file_limit() // ADMITTED_SHARE:
            counts = Counter(self._owners.values())
            largest, count = counts.most_common(1)[0]
            if counts[owner] >= count:
                return False
            oldest = next(transport for transport, whose in self._owners.items() if whose == largest)
            del self._owners[oldest]
            abort(oldest)
        self._pending.pop(connection, None)
        self._owners[connection] = owner
        return True

    def doubt(self, connection: asyncio.BaseTransport) -> None:
        """Note that the client of a connection must show its key again."""
        if self._owners.pop(connection, self) is not self:
            self._pending[connection] = asyncio.get_running_loop().time()

    def connections_of(self, owner: Hashable) -> Sequence[asyncio.BaseTransport]:
        """Return the connections of an owner, oldest request first."""
        return [transport for transport, whose in self._owners.items() if whose == owner]

    def close(self) -> None:
        """Close the port, and abort its connections: a client may never read its data. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for listening in self._sockets:
            listening.close()
        for connection in (*self._pending, *self._owners):
            abort(connection)
        self._tasks, self._sockets = [], []
        self._forget_closed()

    async def _accept(self, make: Callable[[], asyncio.BaseProtocol], listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client_socket, _ = await loop.sock_accept(listening)
            except ConnectionError:  # the client has left
                continue
            except OSError as error:
                if loop.time() - self._warned_at >= WARNING_S:
                    self._warned_at = loop.time()
                    logger.warning("no connection can be accepted (%s); %s", error.strerror, os_error_advice(error))
                self._close_oldest(len(self._pending) // 2)
                await asyncio.sleep(RETRY_S)
                continue
            max_unknown = file_limit() // UNKNOWN_SHARE
            if len(self._pending) > max_unknown:
                self._forget_closed()
                self._close_oldest(len(self._pending) - max_unknown)
            try:
                connection, _ = await loop.connect_accepted_socket(make, client_socket)
            except OSError:  # the client has left
                client_socket.close()
            except Exception:  # one protocol that cannot be made must not end the port
                logger.exception("a connection was refused")
                client_socket.close()
            else:
                if connection not in self._owners:  # its first bytes may have been read already
                    self._pending[connection] = loop.time()

    def _close_oldest(self, count: int) -> None:
        for connection in list(self._pending)[: max(count, 0)]:
            abort(connection)
            del self._pending[connection]

    async def _close_old(self) -> None:
        while True:
            await asyncio.sleep(UNKNOWN_S)
            self._forget_closed()
            oldest = asyncio.get_running_loop().time() - UNKNOWN_S
            self._close_oldest(sum(since <= oldest for since in self._pending.values()))

    def _forget_closed(self) -> None:
        self._pending = {transport: since for transport, since in self._pending.items() if not transport.is_closing()}
        self._owners = {transport: whose for transport, whose in self._owners.items() if not transport.is_closing()}


def file_limit() -> int:
    """Return the maximum number of open files of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def http_logger() -> logging.Logger:
    """Return a logger for aiohttp that is silent about malformed requests: they may hold keys, and any stranger can
    send any number."""
    from aiohttp.http_exceptions import HttpProcessingError

    def is_from_here(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

    logger.filters[:] = [is_from_here]
    return logger


def abort(connection: asyncio.BaseTransport) -> None:
    """Close a connection at once: a client that never reads would keep one open."""
    cast("asyncio.Transport", connection).abort()  # uvloop's transports, which Ray uses, do not inherit from asyncio's
