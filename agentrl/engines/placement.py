"""Where an engine's process runs: what is to be run, who starts it, and what the one who talks to it has of it.

Contracts only. `child_process.py` starts it on this machine, `agentrl.cluster.engine_actors` wherever Ray has room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.engines.supervision import Child

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class EngineProgram:
    """What the process is to run."""

    factory: str
    """`module:name`, called as `name(versions=…, **arguments)`; returns an engine."""
    arguments: Mapping[str, Any]
    """Plain values."""
    host: str = "agentrl.engines.process_host"
    """The module that is run."""


class Writer(Protocol):
    """The sending half of a connection."""

    def write(self, data: bytes, /) -> None:
        """Queue bytes; never waits."""
        ...

    def close(self) -> None:
        """Nothing more is sent; the engine's process ends when it sees that."""
        ...


class EngineChild(Child, Protocol):
    """A process that runs an `EngineProgram`, and the connection to it."""

    @property
    def reader(self) -> asyncio.StreamReader:
        """What it says; ends when it is dead."""
        ...

    @property
    def writer(self) -> Writer:
        """What is said to it."""
        ...


class Placement(Protocol):
    """Starts an engine's processes, one after another."""

    async def start(self, program: EngineProgram) -> EngineChild:
        """Start one; cancelled, it leaves none.

        Raises:
            OSError: it cannot be started now, and may be later.
            AgentRLError: it never can.
        """
        ...

    async def close(self) -> None:
        """The last one is dead, and there will be no other. Idempotent."""
        ...
