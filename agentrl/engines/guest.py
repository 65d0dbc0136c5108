"""An engine that runs in processes of somebody else's, sampled from directly: what an episode worker's process has.

Implements `core.ports.Sampler`. Owns the lines to those processes and which of them a conversation is with; is told
where they are (`moved`) by who owns the engine. Invariants: a conversation stays with its process, which has its KV,
while that is there; a call in flight when its line ends raises `EngineLostError` after its last delta.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agentrl.core.errors import EngineLostError
from agentrl.core.ids import key64
from agentrl.engines import wire
from agentrl.engines.connection import ConnectedSession, Connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentrl.core.ports import EngineCapabilities, GenerateRequest
    from agentrl.core.records import Int32Array, PolicyVersion

LOAD_BOUND = 1.25
"""An engine takes conversations that its cache suits up to this multiple of the mean."""


@runtime_checkable
class Shared(Protocol):
    """An engine whose processes take guests."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The Unix sockets of those that take calls now."""
        ...

    def on_move(self, moved: Callable[[], None]) -> None:
        """Have `moved` called whenever these have changed."""
        ...


def suited(loads: Sequence[int], policy: str, context: Int32Array) -> int:
    """Which of several engines, with so many conversations each, is to have one that begins with `context`: those that
    begin alike go to one (consistent hashing with bounded loads: Mirrokni et al., 2018, arXiv:1608.01350).
    """
    best = key64(policy, context.tobytes().hex()) % len(loads)
    return best if loads[best] <= LOAD_BOUND * sum(loads) / len(loads) else loads.index(min(loads))


class GuestEngine:
    """See `agentrl.core.ports.Sampler`; versions are its owner's, and a version that is not there fails the call."""

    def __init__(self, capabilities: EngineCapabilities) -> None:
        self.capabilities = capabilities
        self._addresses: tuple[str, ...] = ()
        self._moved = asyncio.Event()
        self._lines: dict[str, asyncio.Task[Connection]] = {}
        self._coming = Counter[str]()
        """Conversations, by address, whose line is being opened."""

    def moved(self, addresses: Sequence[str]) -> None:
        """These processes take calls now; those that are gone end their lines themselves."""
        self._addresses = tuple(addresses)
        self._moved.set()

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> ConnectedSession:
        """See `agentrl.core.ports.Sampler.open`; which process it is with is decided by its first call."""
        return ConnectedSession(self, session_id, policy, pin)

    def abort(self, request_id: str) -> None:
        """See `agentrl.core.ports.Sampler.abort`."""
        for line in self._lines.values():
            if line.done() and not line.cancelled() and line.exception() is None:
                line.result().tell(wire.Abort(request_id=request_id))

    async def connected(self, held: Connection | None, policy: str, request: GenerateRequest) -> Connection:
        """See `connection.Connector`; waits while no process takes calls."""
        while True:
            while not self._addresses:
                self._moved.clear()
                await self._moved.wait()
            for address in self._addresses:
                if held is not None and held.is_open and self._line(address) is held:
                    return held
            loads = [self._load(address) for address in self._addresses]
            address = self._addresses[suited(loads, policy, request.token_ids)]
            self._coming[address] += 1
            try:
                return await self._open_line(address)
            except (FileNotFoundError, ConnectionRefusedError):  # it is dead; where the next one is will be told
                self._addresses = tuple(each for each in self._addresses if each != address)
            except OSError as error:
                raise EngineLostError(f"the engine's process takes no calls ({error.strerror or error})") from error
            finally:
                self._coming[address] -= 1

    async def _open_line(self, address: str) -> Connection:
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = asyncio.get_running_loop().create_task(self._connect(address))
        try:
            return await asyncio.shield(line)
        except OSError:
            self._lines.pop(address, None)
            raise

    def _line(self, address: str) -> Connection | None:
        line = self._lines.get(address)
        return line.result() if line is not None and line.done() and line.exception() is None else None

    def _load(self, address: str) -> int:
        line = self._line(address)
        return self._coming[address] + (0 if line is None else line.sessions)

    async def _connect(self, address: str) -> Connection:
        reader, writer = await asyncio.open_unix_connection(address)

        def ended(why: str) -> None:
            self._lines.pop(address, None)
            line.hang_up(EngineLostError(f"the line to the engine's process ended{why and f': {why}'}"))

        line = Connection(reader, writer, heard=lambda reply: None, ended=ended)
        return line
