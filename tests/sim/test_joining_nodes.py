"""Nodes join the cluster of a run: workers are started there or moved there, and episodes go on."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from agentrl.cluster.elastic import JoiningNodeWatcher, ScalableProcessKind
from agentrl.cluster.session import LOOK_S
from agentrl.config.devices import Node
from agentrl.core.clock import LoopClock
from agentrl.engines.process import ChildProgram
from agentrl.testing.plugin import SeededSimulation
from tests.sim.test_worker_deaths import ACT_S, ACTS, STARTS_S, Machine, Process

pytestmark = pytest.mark.sim

EPISODES = 64
SOON_S = LOOK_S + STARTS_S + 5.0
"""Seconds in which a node has joined, was compared, and its worker has started."""


class Cluster:
    """Nodes with a placement for each worker, of one machine's processes; blocking calls take no time."""

    def __init__(self, nodes: int, workers: int) -> None:
        self.alive = [Node(f"id{number}", f"10.0.0.{number}") for number in range(nodes)]
        self.lacks: dict[str, list[str]] = {}
        self.told: list[str] = []
        self.engines = list(self.alive)
        """Node of each engine."""
        self.room = 1
        """Engines for which a node has room."""
        self.machine = Machine(workers=workers, in_flight=2 * EPISODES)
        for number, process in enumerate(self.machine.pool.processes):
            process.placement = OnNode(self, self.alive[number % nodes])
        pool = self.machine.pool
        self.joining = JoiningNodeWatcher(
            [
                ScalableProcessKind("worker", lambda: len(pool.processes), lambda node: pool.add(OnNode(self, node))),
                ScalableProcessKind("engine", lambda: len(self.engines), self.engines.append, lambda node: self.room),
            ],
            pool=pool,
            nodes=lambda: tuple(self.alive),
            missing=lambda node: self.lacks.get(node.address, []),
            clock=LoopClock(),
            tell=self.told.append,
        )

    def join(self, number: int) -> None:
        self.alive.append(Node(f"later{number}", f"10.0.0.{number}"))

    def lose(self, number: int) -> None:
        """Lose a node and the processes on it."""
        (lost,) = [node for node in self.alive if node.address == f"10.0.0.{number}"]
        self.alive.remove(lost)
        for process in self.machine.processes.values():
            if process.host == lost.address:
                process.kill()

    @property
    def workers(self) -> Counter[str]:
        """Number of ready workers by node."""
        return Counter(process.node for process in self.machine.pool.processes if process.is_ready)

    async def ready(self) -> Cluster:
        await self.machine.ready()
        for number in range(EPISODES):
            self.machine.submit(f"e{number}")
        await asyncio.sleep(ACT_S)
        return self

    async def drained(self) -> None:
        await self.joining.close()
        await self.machine.drained()
        assert len(self.machine.ends) == EPISODES
        assert not self.machine.dropped


class OnNode:
    """Starts processes on one node, or on the first that is alive where it is lost."""

    gpus = ()

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self._cluster = cluster
        self._node = node

    def move(self, node: Node) -> None:
        self._node = node

    async def start(self, program: ChildProgram) -> Process:
        process = await self._cluster.machine.start(program)
        alive = self._cluster.alive
        process.host = (self._node if self._node in alive else alive[0]).address
        return process

    async def close(self) -> None: ...


def test_a_new_node_gets_workers_in_proportion_and_they_take_episodes(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        cluster = await Cluster(2, 4).ready()
        cluster.join(7)
        await asyncio.sleep(SOON_S)
        assert cluster.workers == {"10.0.0.0": 2, "10.0.0.1": 2, "10.0.0.7": 2}
        assert [node.address for node in cluster.engines] == ["10.0.0.0", "10.0.0.1", "10.0.0.7"]
        assert cluster.told == ["node 10.0.0.7 has joined: 2 workers, 1 engine started there, 0 workers moved"]
        for number in range(EPISODES, EPISODES + 16):
            cluster.machine.submit(f"e{number}")
        assert [len(process.episodes) for process in cluster.machine.pool.processes] == [16, 16, 16, 16, 8, 8]
        await cluster.joining.close()
        await cluster.machine.drained()
        assert len(cluster.machine.ends) == EPISODES + 16

    simulated_loop.run(main)


def test_a_node_that_was_lost_and_joins_again_takes_a_worker_back(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        cluster = await Cluster(3, 3).ready()
        for _ in range(3):
            cluster.lose(2)
            await asyncio.sleep(ACT_S)
            assert cluster.workers == {"10.0.0.0": 2, "10.0.0.1": 1}
            cluster.alive.append(Node(f"again{len(cluster.told)}", "10.0.0.2"))
            await asyncio.sleep(ACT_S)
            assert cluster.workers == {"10.0.0.0": 1, "10.0.0.1": 1, "10.0.0.2": 1}
        assert cluster.told == ["node 10.0.0.2 has joined: 0 workers, 0 engines started there, 1 worker moved"] * 3
        await cluster.drained()

    simulated_loop.run(main)


def test_a_node_that_lacks_something_is_named_and_not_used(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        cluster = await Cluster(2, 2).ready()
        cluster.lacks["10.0.0.7"] = ["node 10.0.0.7 has no model at /m: copy its directory there"]
        cluster.join(7)
        await asyncio.sleep(SOON_S)
        assert cluster.told == [
            "node 10.0.0.7 has joined and is not used: node 10.0.0.7 has no model at /m: copy its directory there"
        ]
        assert cluster.workers == {"10.0.0.0": 1, "10.0.0.1": 1}
        await asyncio.sleep(ACTS * ACT_S)
        assert len(cluster.told) == 1
        await cluster.drained()

    simulated_loop.run(main)


def test_a_node_without_room_for_an_engine_gets_workers_alone(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        cluster = await Cluster(2, 2).ready()
        cluster.room = 0
        cluster.join(7)
        await asyncio.sleep(SOON_S)
        (told,) = cluster.told
        assert "1 worker, 0 engines" in told
        await cluster.drained()

    simulated_loop.run(main)
