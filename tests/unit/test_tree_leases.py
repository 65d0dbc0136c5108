"""Leases of trees: a lease counts once the engine serves its version, and no tree pays for another tree's version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from agentrl.core.errors import VERSION_GONE, EngineError, EpisodeError
from agentrl.core.ports import Engine
from agentrl.core.records import EpisodeSpec, PolicyVersion, SeatBinding, Task, WeightsRef
from agentrl.engines.router import EngineRouter
from agentrl.engines.scripted import ScriptedEngine
from agentrl.engines.version_table import LiveVersion, VersionTable
from agentrl.orchestrator.dispatch import ChangeCondition
from agentrl.orchestrator.tree_leases import TreeLeases, tree_holder
from agentrl.orchestrator.versions import ServedVersions
from agentrl.testing.virtual_time import simulate

CURRENT = PolicyVersion("solver", 3, 4)
GONE, KEPT, OTHER = (PolicyVersion("solver", 1, 2), PolicyVersion("solver", 2, 4), PolicyVersion("proposer", 2, 1))


def weights(version: PolicyVersion) -> WeightsRef:
    return WeightsRef(version=version, path="", kind="adapter", sha256=str(version))


class Table(VersionTable[LiveVersion]):
    """Loads any version but `GONE`."""

    async def _load(self, weights: WeightsRef) -> None:
        await asyncio.sleep(0.01)
        if weights.version == GONE:
            raise EngineError(f"{weights.version}: its files are gone")
        self.live[weights.version] = LiveVersion(version=weights.version, digest=weights.sha256, pinned=True)
        if self._requested.is_current(weights):
            await self._make_current(self.live[weights.version])

    async def _make_current(self, serving: LiveVersion) -> None:
        self.current[serving.version.policy] = serving

    def settle(self, serving: LiveVersion) -> None:
        if not (serving.held or serving.calls or self.is_current(serving)):
            self.live.pop(serving.version, None)


class OneProcess:
    """An engine that is a version table."""

    def __init__(self) -> None:
        self.versions = Table(refresh="token", max_staleness={}, places=8)
        for version in (CURRENT, PolicyVersion("proposer", 0, 0)):
            first = LiveVersion(version=version, digest=str(version))
            self.versions.live[version] = self.versions.current[version.policy] = first

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        await self.versions.serve(current, pinned)

    def is_served(self, version: PolicyVersion) -> bool:
        return version in self.versions.live


class Replica(ScriptedEngine):
    """Loads any version but `GONE`."""

    async def load(self, weights: WeightsRef) -> None:
        await asyncio.sleep(0.01)
        if weights.version == GONE:
            raise EngineError(f"{weights.version}: its files are gone")


class Replicas(EngineRouter):
    """Two replicas behind a router."""

    def __init__(self) -> None:
        versions = {"solver": CURRENT, "proposer": PolicyVersion("proposer", 0, 0)}
        super().__init__([Replica([[3]], versions=versions) for _ in range(2)])

    def is_served(self, version: PolicyVersion) -> bool:
        (fleet,) = self.fleets
        return all(cast("Replica", engine).has_pin(version) for engine in fleet.engines)


@dataclass
class Trees:
    """Leases over a real table of versions."""

    engine: Any
    served: ServedVersions = field(init=False)
    leases: TreeLeases = field(init=False)
    limits: Mapping[str, int] = field(default_factory=lambda: {"solver": 3, "proposer": 1})

    def __post_init__(self) -> None:
        self.served = ServedVersions(cast("Engine", self.engine))
        self.leases = TreeLeases(served=self.served, published=weights, limits=self.limits, changed=ChangeCondition())

    async def acquire(self, episode: str, version: PolicyVersion) -> str:
        """Return the outcome; a lease must be served when it is granted."""
        try:
            await self.leases.acquire(spec(episode), version)
        except EpisodeError as error:
            is_expected = error.reason == VERSION_GONE and error.begin_again and str(version) in str(error)
            return "refused" if is_expected else str(error)
        assert self.engine.is_served(version)
        assert version in self.leases.leased
        return "leased"

    def end(self, episode: str) -> None:
        self.leases.member_ended(episode, 0, episode)


def spec(episode: str) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=episode,
        environment="",
        task=Task(id="t", data={}),
        seed=0,
        seats={"solver": SeatBinding("solver")},
        group_id="g0",
    )


engines = pytest.mark.parametrize("make", [OneProcess, Replicas])


@engines
@pytest.mark.parametrize(
    ("calls", "outcomes"),
    [
        ([("e8", GONE), ("e27", KEPT)], ["refused", "leased"]),
        ([("e27", KEPT), ("e8", GONE)], ["leased", "refused"]),
        ([("e27", KEPT), ("e27", KEPT)], ["leased", "leased"]),
        ([("e8", GONE), ("e8", GONE)], ["refused", "refused"]),
        ([("e8", GONE), ("e9", GONE)], ["refused", "refused"]),
        ([("e8", GONE), ("e27", KEPT), ("e9", GONE), ("e28", KEPT)], ["refused", "leased"] * 2),
        ([("e27", KEPT), ("e27", OTHER)], ["leased", "leased"]),
    ],
)
def test_trees_that_ask_at_once_each_get_their_own_outcome(
    make: Callable[[], Any], calls: list[tuple[str, PolicyVersion]], outcomes: list[str]
) -> None:
    async def main() -> None:
        trees = Trees(make())
        assert await asyncio.gather(*(trees.acquire(*call) for call in calls)) == outcomes
        leased = {version for (_, version), outcome in zip(calls, outcomes, strict=True) if outcome == "leased"}
        assert (trees.leases.leased, trees.served.pinned()) == (leased, leased)
        for episode, _ in calls:
            trees.end(episode)
        await asyncio.sleep(0.05)
        assert not trees.leases.leased
        assert not any(trees.engine.is_served(version) for version in leased)

    simulate(main, seed=0)


@engines
def test_a_second_call_waits_for_the_pin_of_the_first(make: Callable[[], Any]) -> None:
    async def main() -> None:
        for version, outcome in ((KEPT, "leased"), (GONE, "refused")):
            trees = Trees(make())
            first = asyncio.ensure_future(trees.acquire("e1", version))
            await asyncio.sleep(0.001)
            second = asyncio.ensure_future(trees.acquire("e1", version))
            await asyncio.sleep(0)
            assert not trees.leases.leased
            assert not second.done()
            assert await asyncio.gather(first, second) == [outcome] * 2

    simulate(main, seed=0)


def test_a_cancelled_call_leaves_the_pin_to_the_next_one() -> None:
    """As when a worker dies while its episode branches, and another executes the call again."""

    async def main() -> None:
        trees = Trees(Replicas())
        first = asyncio.ensure_future(trees.acquire("e1", KEPT))
        await asyncio.sleep(0.001)
        first.cancel()
        assert await trees.acquire("e1", KEPT) == "leased"
        trees.end("e1")
        await asyncio.sleep(0.05)
        assert trees.served.pinned() == set()

    simulate(main, seed=0)


def test_a_resumed_tree_has_a_lease_once_its_pin_is_confirmed() -> None:
    async def main() -> None:
        trees = Trees(OneProcess())
        pinning = asyncio.ensure_future(trees.served.pin(tree_holder("e1", 0), weights(KEPT)))
        await asyncio.sleep(0.001)
        trees.leases.add("e1", 0, "e1~0.r#2.b1")
        trees.leases.take_over()
        assert not trees.leases.leased
        assert await trees.acquire("e1", KEPT) == "leased"
        await pinning
        trees.leases.member_ended("e1", 0, "e1~0.r#2.b1")
        assert trees.leases.leased == {KEPT}
        trees.end("e1")
        assert not trees.leases.leased

    simulate(main, seed=0)


def test_a_refused_version_leaves_the_other_leases_of_its_tree() -> None:
    async def main() -> None:
        trees = Trees(Replicas())
        assert await trees.acquire("e1", KEPT) == "leased"
        trees.leases.add("e1", 0, "e1~0.r#2.b1")
        assert await trees.acquire("e1", GONE) == "refused"
        trees.end("e1")
        await asyncio.sleep(0.05)
        assert trees.engine.is_served(KEPT), "its branch is running"
        trees.leases.member_ended("e1", 0, "e1~0.r#2.b1")
        await asyncio.sleep(0.05)
        assert not trees.engine.is_served(KEPT)

    simulate(main, seed=0)


def test_a_refused_version_gives_its_room_to_the_next_tree() -> None:
    async def main() -> None:
        trees = Trees(OneProcess(), limits={"solver": 1})
        first = asyncio.ensure_future(trees.acquire("e8", GONE))
        second = asyncio.ensure_future(trees.acquire("e27", KEPT))
        assert await asyncio.gather(first, second) == ["refused", "leased"]

    simulate(main, seed=0)


@engines
def test_a_new_version_an_evaluation_and_opponents_do_not_pay_for_an_old_pin(make: Callable[[], Any]) -> None:
    async def main() -> None:
        trees = Trees(make())
        tree = asyncio.ensure_future(trees.acquire("e8", GONE))
        await asyncio.sleep(0.001)
        new = PolicyVersion("solver", 3, 5)
        await asyncio.gather(
            trees.served.make_current(weights(new)),
            trees.served.pin("evaluation", weights(KEPT)),
            trees.served.pin("opponents", weights(OTHER)),
        )
        assert await tree == "refused"
        assert trees.served.current["solver"].version == new
        assert trees.served.pinned_by("evaluation") == [KEPT]
        assert trees.engine.is_served(KEPT)
        assert trees.engine.is_served(OTHER)
        for holder in ("evaluation", "opponents"):
            with pytest.raises(EngineError, match="files are gone"):
                await trees.served.pin(holder, weights(GONE))
        assert trees.served.pinned() == {KEPT, OTHER}

    simulate(main, seed=0)
