"""The owner's end of weight transfers: it sends the files of versions to an engine on another machine.

If full weights are stored as a delta (`core.weight_deltas`), a process that holds the base is sent only the delta. If
the process refuses the result, because its copy of the base or the delta was damaged, the version is sent whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from agentrl.core.errors import EngineError, EngineLostError, version_refused_error
from agentrl.core.files import DELTA_FILES, WEIGHT_FILES
from agentrl.core.records import PolicyVersion
from agentrl.core.weight_deltas import WeightDeltaError, open_weights, read_header_of, read_record
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
    versions: set[PolicyVersion]
    """Versions of this request and of those before it."""


class VersionFiles:
    """Sends the files of versions to a process that cannot read those of its owner, piece by piece.

    Args:
        connection: connection to the process.
        host: machine of the process, for messages.
        only_headers: whether the process requests full weights; only the headers of their files are sent first.
    """

    def __init__(self, connection: Requests, host: str, *, only_headers: bool) -> None:
        self._connection = connection
        self._host = host
        self._only_headers = only_headers
        self._sent: set[str] = set()
        """Digests of the versions that the process has, at least their headers."""
        self._headers_only: dict[str, tuple[WeightsRef, int]] = {}
        """Versions of which only a header was sent, and its bytes, keyed by digest: steps that change nothing publish
        the same file again."""
        self._sent_deltas: set[str] = set()
        """Digests of the versions of which a delta was sent, and that the process has not answered for yet."""
        self._refused_deltas: set[str] = set()
        """Digests of the versions that the process refused after a delta, and that are sent whole from then on."""
        self._digests: dict[PolicyVersion, str] = {}
        """Digests of the versions that the process may request."""
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
        self._digests |= {weights.version: weights.sha256 for weights in versions}
        sent: set[str] = set()
        self._requests[request] = _ServeRequest(sent, self._sent | on_the_way, set(self._digests))
        for weights in versions:
            if weights.sha256 in self._sent | on_the_way | sent:
                continue
            sent.add(weights.sha256)
            try:
                if weights.kind == "full" and await asyncio.to_thread(self._has_base, weights):
                    self._sent_deltas.add(weights.sha256)
                    await self._send_files(weights, pieces, DELTA_FILES)
                elif self._only_headers and weights.kind == "full":
                    await self._send_header(weights, pieces)
                else:
                    await self._send_files(weights, pieces, WEIGHT_FILES[weights.kind])
            except EngineError as error:
                self._failures[weights.version] = error

    async def send_remainder(self, version: PolicyVersion) -> None:
        """Send the rest of a version's file, if only its header was sent; returns when it is there."""
        weights, start = self._headers_only.pop(self._digests.get(version, ""), (None, 0))
        if weights is None:
            return
        pieces: list[asyncio.Task[None]] = []
        try:
            await self._send_files(weights, pieces, WEIGHT_FILES[weights.kind], start)
        except EngineError as error:
            self._failures[version] = error
        for answer in await asyncio.gather(*pieces, return_exceptions=True):
            if isinstance(answer, EngineError):
                self._failures.setdefault(version, answer)

    def take_failures(self, versions: Iterable[WeightsRef]) -> dict[PolicyVersion, EngineError]:
        """Return why some of these versions could not be sent, and forget it."""
        names = [weights.version for weights in versions]
        return {version: self._failures.pop(version) for version in names if version in self._failures}

    def must_resend(self, refused: Collection[PolicyVersion]) -> bool:
        """Whether the process refused a version of which a delta was sent; it is sent whole the next time."""
        refused_deltas = self._sent_deltas.intersection(map(self._digests.get, refused))
        self._refused_deltas |= refused_deltas
        self._sent_deltas.clear()
        return bool(refused_deltas)

    def answered(self, request: int, versions: Collection[WeightsRef] | None) -> None:
        """Note that the process serves these versions, and has removed its copies of others that it had when the
        request was made; None: the request failed."""
        ended = self._requests.pop(request, None)
        if versions is None or ended is None:
            return
        served = {weights.version: weights.sha256 for weights in versions}
        removed = (ended.sent | ended.had).difference(served.values())
        self._sent = self._sent.union(served.values()) - removed
        for version in ended.versions - served.keys():
            self._digests.pop(version, None)
        for digest in removed & self._headers_only.keys():
            del self._headers_only[digest]

    def _has_base(self, weights: WeightsRef) -> bool:
        """Whether the process can rebuild a version from its delta."""
        try:
            record = read_record(Path(weights.path))
        except (OSError, WeightDeltaError):  # it is sent whole, which reports the damage unless it is stored whole
            return False
        return (
            record is not None
            and record.base_sha256 in self._sent - self._headers_only.keys()
            and weights.sha256 not in self._refused_deltas
        )

    async def _send_header(self, weights: WeightsRef, pieces: list[asyncio.Task[None]]) -> None:
        (name,) = WEIGHT_FILES["full"]
        try:
            header = await asyncio.to_thread(read_header_of, Path(weights.path) / name)
        except (OSError, ValueError) as error:
            raise version_refused_error(weights, f"{weights.path}/{name} cannot be read ({error})") from error
        self._headers_only[weights.sha256] = (weights, len(header))
        self._send_piece(weights, pieces, name, 0, header)

    async def _send_files(
        self, weights: WeightsRef, pieces: list[asyncio.Task[None]], names: Sequence[str], start: int = 0
    ) -> None:
        pieces_to_read = _read_in_pieces(Path(weights.path), names, PIECE_BYTES, start=start)
        is_last = False
        while not is_last:
            try:
                read, is_last = await asyncio.to_thread(next, pieces_to_read)
            except WeightDeltaError as error:
                raise version_refused_error(weights, str(error)) from error
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
    directory: Path, names: Sequence[str], size: int, *, start: int = 0
) -> Iterator[tuple[list[tuple[str, int, bytes]], bool]]:
    """Yield lists of (file name, bytes before, bytes) of files in a directory, each of at most `size` bytes, and
    whether a list is the last; without the first `start` bytes of the first file.

    Raises:
        OSError, WeightDeltaError: a file cannot be read; see `open_weights`.
    """
    read: list[tuple[str, int, bytes]] = []
    room = size
    for name in names:
        with open_weights(directory / name) as file:
            file.read(start)
            while data := file.read(room or size):
                if not room:
                    yield read, False
                    read, room = [], size
                read.append((name, start, data))
                start += len(data)
                room -= len(data)
        start = 0
    yield read, True
