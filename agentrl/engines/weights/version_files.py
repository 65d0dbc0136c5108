"""The owner's end of weight transfers: it sends the files of versions to an engine on another machine."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from agentrl.core.errors import EngineError, EngineLostError, version_refused_error
from agentrl.core.files import WEIGHT_FILES
from agentrl.core.records import PolicyVersion
from agentrl.engines import protocol

if TYPE_CHECKING:
    from agentrl.core.records import WeightsRef

PIECE_BYTES = 4 << 20
"""Number of bytes of a version's file in one message."""
PIECES = 4
"""Number of such messages on the way at a time."""


class Requests(Protocol):
    """The connection to an engine's process; see `EngineConnection`."""

    def next_call(self) -> int:
        """Return a number for a call."""
        ...

    async def ask(self, call: int, message: protocol.Request) -> protocol.Reply:
        """Send a message and wait for its answer."""
        ...


class _ServeRequest(NamedTuple):
    """A request to serve versions."""

    sent: set[str]
    """Digests of the versions sent for it."""
    had: set[str]
    """Digests that the process had, or was being sent, when it was made."""


class VersionFiles:
    """Sends the files of versions to a process that cannot read those of its owner, piece by piece.

    Args:
        connection: connection to the process.
        host: machine of the process, for messages.
    """

    def __init__(self, connection: Requests, host: str) -> None:
        self._connection = connection
        self._host = host
        self._sent: set[str] = set()
        """Digests of the versions that the process has."""
        self._failures: dict[PolicyVersion, EngineError] = {}
        """Why a version could not be sent."""
        self._requests: dict[int, _ServeRequest] = {}
        """Requests to serve versions that are not answered yet."""

    async def send(self, request: int, versions: Collection[WeightsRef], pieces: list[asyncio.Task[None]]) -> None:
        """Send what the process needs to be asked for versions; add the answers to `pieces`, of which at most `PIECES`
        are open. What is sent for another request is left out.

        Files that fit into one message's size are on the way together, with the request that follows them: over Ray
        each write is acknowledged before the next one leaves. `take_failures` returns what could not be sent.
        """
        on_the_way = {digest for other in self._requests.values() for digest in other.sent}
        sent: set[str] = set()
        self._requests[request] = _ServeRequest(sent, self._sent | on_the_way)
        for weights in versions:
            if weights.sha256 in self._sent | on_the_way | sent:
                continue
            sent.add(weights.sha256)
            try:
                await self._send_files(weights, pieces)
            except EngineError as error:
                self._failures[weights.version] = error

    def take_failures(self, versions: Iterable[WeightsRef]) -> dict[PolicyVersion, EngineError]:
        """Return why some of these versions could not be sent, and forget it."""
        names = [weights.version for weights in versions]
        return {version: self._failures.pop(version) for version in names if version in self._failures}

    def answered(self, request: int, versions: Collection[WeightsRef] | None) -> None:
        """Note that the process serves these versions, and has removed its copies of others that it had when the
        request was made; None: the request failed."""
        ended = self._requests.pop(request, None)
        if versions is None or ended is None:
            return
        served = {weights.sha256 for weights in versions}
        self._sent = (self._sent | served) - (ended.sent | ended.had).difference(served)

    async def _send_files(self, weights: WeightsRef, pieces: list[asyncio.Task[None]]) -> None:
        pieces_to_read = _read_in_pieces(Path(weights.path), WEIGHT_FILES[weights.kind], PIECE_BYTES)
        is_last = False
        while not is_last:
            try:
                read, is_last = await asyncio.to_thread(next, pieces_to_read)
            except OSError as error:
                raise version_refused_error(
                    weights, f"{error.filename or weights.path} cannot be read ({error.strerror})"
                ) from error
            for name, before, data in read:
                self._send_piece(weights, pieces, name, before, data)
            if not is_last and len(pieces) >= PIECES:
                await asyncio.wait({oldest := pieces[-PIECES]})
                if oldest.cancelled() or oldest.exception() is not None or weights.version in self._failures:
                    return

    def _send_piece(
        self, weights: WeightsRef, pieces: list[asyncio.Task[None]], name: str, start: int, data: bytes
    ) -> None:
        call = self._connection.next_call()
        chunk = protocol.WeightChunk(call=call, sha256=weights.sha256, name=name, start=start, data=data)
        pieces.append(asyncio.get_running_loop().create_task(self._confirm_chunk(weights, chunk)))

    async def _confirm_chunk(self, weights: WeightsRef, chunk: protocol.WeightChunk) -> None:
        try:
            await self._connection.ask(chunk.call, chunk)
        except EngineLostError:
            raise
        except EngineError as error:
            reason = f"machine {self._host} cannot store them: {error}"
            self._failures.setdefault(weights.version, version_refused_error(weights, reason, type(error)))


def _read_in_pieces(
    directory: Path, names: Iterable[str], size: int
) -> Iterator[tuple[list[tuple[str, int, bytes]], bool]]:
    """Yield lists of (file name, bytes before, bytes) of files in a directory, each of at most `size` bytes, and
    whether a list is the last.

    Raises:
        OSError: a file cannot be read.
    """
    read: list[tuple[str, int, bytes]] = []
    room = size
    for name in names:
        start = 0
        with (directory / name).open("rb") as file:
            while data := file.read(room or size):
                if not room:
                    yield read, False
                    read, room = [], size
                read.append((name, start, data))
                start += len(data)
                room -= len(data)
    yield read, True
