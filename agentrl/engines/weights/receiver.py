"""The engine's end of weight transfers: it requests full weights and answers a trainer's calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from agentrl.core import rpc
from agentrl.core.errors import EngineError
from agentrl.core.network import Listener
from agentrl.core.records import PolicyVersion
from agentrl.engines.weights.transfer import REQUEST_DECODER, TransferCall, TransferReply, WeightOffer

OFFER_S = 15.0
"""Seconds that an engine waits for a trainer's offer before it loads the published file: the trainer may be busy, or
another engine may hold it up."""


class TransferError(Exception):
    """The trainer's end of a connection is gone, hangs, or sent an invalid message."""


class IncomingTransfer:
    """A transfer of one version in progress: the connection of the trainer that sends it."""

    def __init__(self, offer: WeightOffer, connection: rpc.Connection) -> None:
        self.offer = offer
        self._connection = connection

    def answer(self, *, error: str = "") -> None:
        """Answer the last request."""
        refusal = rpc.ErrorReply(kind="EngineError", message=error)
        self._connection.send(refusal if error else TransferReply())

    async def next_call(self) -> TransferCall:
        """Return the next call of the trainer.

        Raises:
            TransferError: there will be no further call, or none has come for `WeightOffer.silence_s`.
        """
        try:
            async with asyncio.timeout(self.offer.silence_s):
                message = await self._connection.receive()
        except TimeoutError as error:
            raise TransferError(f"the trainer has sent nothing for {self.offer.silence_s:g} s") from error
        except ValueError as error:
            raise TransferError(str(error)) from error
        if not isinstance(message, TransferCall):
            raise TransferError("the trainer closed the connection")
        return message

    def close(self) -> None:
        """Close the connection."""
        self._connection.close(EngineError("the transfer ended"))


class WeightReceiver:
    """Receiving end of weight transfers in an engine. Before `listen`, it requests nothing."""

    def __init__(self) -> None:
        self._address = ""
        self._listener = Listener(self._receive)
        self._tell: Callable[[int, PolicyVersion, str], None] = lambda number, version, address: None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[PolicyVersion | None, asyncio.Future[IncomingTransfer | None]]] = {}
        """Requests by number, each with the version that a trainer may send; None: it asks for a file."""

    async def listen(self, path: str, tell: Callable[[int, PolicyVersion, str], None], *, host: str = "") -> None:
        """Accept trainers at a Unix socket or at a TCP port.

        Args:
            path: of the Unix socket, in a directory that only this user can enter.
            tell: passes a request to the engine's owner: its number, the version, and the address of this end; "" asks
                for the version's file.
            host: address of this machine, for trainers on other machines, which then use a TCP port and a token; "":
                they use the Unix socket.
        """
        self._tell = tell
        listener = self._listener
        self._address = str(await listener.listen(host)) if host else await listener.listen_locally(path)

    def close(self) -> None:
        """Refuse further deliveries."""
        self._address = ""
        self._listener.close()

    async def ask(self, version: PolicyVersion) -> IncomingTransfer | None:
        """Request a version; returns its delivery, or None if no trainer offers it within `OFFER_S`."""
        return await self._request(version, self._address, OFFER_S) if self._address else None

    async def fetch(self, version: PolicyVersion) -> None:
        """Wait until the owner has sent the missing part of a version's file, or has failed to: the file's digest tells
        which."""
        if self._address:
            await self._request(version, "", None)

    async def _request(self, version: PolicyVersion, address: str, limit_s: float | None) -> IncomingTransfer | None:
        number = next(self._numbers)
        future: asyncio.Future[IncomingTransfer | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (version if address else None, future)
        self._tell(number, version, address)
        try:
            await asyncio.wait({future}, timeout=limit_s)
            return future.result() if future.done() else None
        finally:
            del self._waiting[number]

    def not_sent(self, number: int) -> None:
        """Note the owner's answer that nothing more will be sent: no trainer sends the version, or all was sent."""
        _, future = self._waiting.get(number, (None, None))
        if future is not None and not future.done():
            future.set_result(None)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = rpc.Connection(reader, writer, REQUEST_DECODER)
        try:
            offer = await connection.receive()
        except ValueError:
            offer = None
        for version, future in self._waiting.values():
            if isinstance(offer, WeightOffer) and offer.version == version and not future.done():
                future.set_result(IncomingTransfer(offer, connection))
                with contextlib.suppress(OSError):
                    await writer.wait_closed()  # the listener closes the connection when this returns
                return
        writer.close()


@runtime_checkable
class WeightReceivingEngine(Protocol):
    """An engine that takes weights from trainers."""

    inbox: WeightReceiver
