"""Uses nodes that join the cluster during a run: starts workers and engines there, or moves workers there.

Owns: the watch for new nodes, and the number of workers and engines they get. Does not own: the comparison of a node
with the run's host (`nodes.py`), episodes (`worker_pool.py`) or versions (`engines.fleet`).
Invariants: a node is used only after it was compared; the number of workers and engines per node stays that of the
start, rounded down. A node that is lost and joins again therefore takes a worker back, and adds none.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agentrl.cluster.session import LOOK_S, shorten_ray_error
from agentrl.core.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentrl.cluster.worker_pool import WorkerPool
    from agentrl.config.devices import Node
    from agentrl.core.clock import Clock


@runtime_checkable
class MovablePlacement(Protocol):
    """A placement whose next process can be started on another node."""

    def move(self, node: Node) -> None:
        """Start the next process on a node."""
        ...


@dataclass(frozen=True, slots=True)
class ScalableProcessKind:
    """A kind of processes of which more are started on nodes that join."""

    name: str
    """One of them, in messages."""
    count: Callable[[], int]
    """Returns how many there are."""
    start: Callable[[Node], None]
    """Starts one more on a node."""
    most: Callable[[Node], int] = lambda node: sys.maxsize
    """Returns for how many a node has room."""


class JoiningNodeWatcher:
    """Watches the cluster of a run, and starts workers and engines on nodes that join it.

    Args:
        growing: kinds of processes to start there, workers first.
        pool: workers of the run, of which some may be moved there; None: it has one, in its own process.
        nodes: returns the nodes that are alive; blocking.
        missing: returns a node's missing requirements, in sentences; blocking.
        clock: times the looks at the cluster.
        tell: prints a line for the user.
    """

    def __init__(
        self,
        process_kinds: Sequence[ScalableProcessKind],
        *,
        pool: WorkerPool | None,
        nodes: Callable[[], Sequence[Node]],
        missing: Callable[[Node], Sequence[str]],
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self._process_kinds = process_kinds
        self._pool = pool
        self._nodes = nodes
        self._missing = missing
        self._clock = clock
        self._tell = tell
        self._first = [kind.count() for kind in process_kinds]
        """Number of processes of each kind at the start."""
        self._watch_task = asyncio.get_running_loop().create_task(self._watch(), name="watch for nodes that join")

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        self._watch_task.cancel()
        await asyncio.wait({self._watch_task})

    async def _watch(self) -> None:
        if not self._process_kinds:
            return
        while not (first := await self._look()):
            await self._clock.sleep(LOOK_S)
        seen_ids = {node.id for node in first}
        while True:
            await self._clock.sleep(LOOK_S)
            alive = await self._look()
            for node in alive:
                if node.id not in seen_ids:
                    seen_ids.add(node.id)
                    await self._use(node, nodes=len(alive), at_start=len(first))

    async def _look(self) -> Sequence[Node]:
        try:
            return await asyncio.to_thread(self._nodes)
        except Exception:  # noqa: BLE001 - Ray's errors have no common class; the head may not answer for a while
            return ()

    async def _use(self, node: Node, *, nodes: int, at_start: int) -> None:
        """Start processes on a node of now `nodes`, and move workers there until the nodes are balanced."""
        try:
            missing = await asyncio.to_thread(self._missing, node)
        except Exception as error:  # noqa: BLE001 - as above; a node may be lost again at once
            missing = [f"node {node.address} could not be compared ({shorten_ray_error(error)})"]
        if missing:
            self._tell(f"node {node.address} has joined and is not used: {'; '.join(missing)}")
            return
        num_started = []
        for kind, first in zip(self._process_kinds, self._first, strict=True):
            num_missing = first * nodes // at_start - kind.count()
            num_started.append(max(0, min(num_missing, -(-first // at_start), kind.most(node))))
            for _ in range(num_started[-1]):
                kind.start(node)
        num_moved = self._move_to(node, num_started[0] if num_started else 0)
        counts = [plural(count, kind.name) for kind, count in zip(self._process_kinds, num_started, strict=True)]
        self._tell(
            f"node {node.address} has joined: {', '.join(counts)} started there, {plural(num_moved, 'worker')} moved"
        )

    def _move_to(self, node: Node, has: int) -> int:
        """Move workers to a node with this number of them; returns the number moved."""
        num_moved = 0
        while self._pool is not None and self._move_one(self._pool, node, has + num_moved):
            num_moved += 1
        return num_moved

    @staticmethod
    def _move_one(pool: WorkerPool, node: Node, has: int) -> bool:
        """Move a worker from the node with most workers, if that has too many more than `has`."""
        movable = [
            process
            for process in pool.processes
            if process.is_ready and not process.is_leaving and isinstance(process.placement, MovablePlacement)
        ]
        load = Counter(process.node for process in movable if process.node != node.address)
        fullest, max_load = max(load.items(), key=lambda item: item[1], default=("", 0))
        if max_load - has <= 1:
            return False
        process = next(candidate for candidate in reversed(movable) if candidate.node == fullest)
        assert isinstance(process.placement, MovablePlacement)
        process.placement.move(node)
        process.leave(f"node {node.address} has joined")
        return True
