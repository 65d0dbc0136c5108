"""Which versions of clients an engine serves, and in which order calls of them get their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Literal

import pytest

from agentrl.core.errors import EngineError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.parts.sampler import VersionPlaces


def weights(name: str, kind: Literal["full", "adapter"] = "full") -> WeightsRef:
    policy, _, step = name.rpartition("@")
    return WeightsRef(version=PolicyVersion(policy, 1, int(step)), path="", kind=kind, sha256=name)


class Engine:
    """Records what it is asked to serve, and refuses some versions."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.served: list[list[str]] = []

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        await asyncio.sleep(0)
        for each in (*current, *pinned):
            if each.sha256 in self.refused:
                raise EngineError(f"{each.sha256} is refused")
        assert all(each.kind == "adapter" for each in pinned)
        self.served.append([each.sha256 for each in (*current, *pinned)])


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


class Calls:
    """Calls that use versions until they are ended."""

    def __init__(self, versions: VersionPlaces) -> None:
        self._versions = versions
        self.running: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def start(self, *calls: str, kind: Literal["full", "adapter"] = "full") -> None:
        """Start calls `NAME:VERSION`, and let them get as far as they can."""
        for call in calls:
            self._ends[call] = asyncio.Event()
            self._tasks[call] = asyncio.create_task(self._call(call, kind))
            await settle()

    async def _call(self, call: str, kind: Literal["full", "adapter"]) -> None:
        async with self._versions.use(weights(call.partition(":")[2], kind)):
            self.running.append(call)
            await self._ends[call].wait()
            self.running.remove(call)

    async def end(self, *calls: str) -> None:
        for call in calls:
            self._ends[call].set()
        await settle()

    async def cancel(self, call: str) -> None:
        self._tasks[call].cancel()
        await settle()


def test_versions_of_all_weights_take_turns_in_the_order_of_their_first_calls() -> None:
    """A version whose calls overlap for ever does not keep another one waiting, and equal ones share a turn."""

    async def work() -> None:
        engine = Engine()
        calls = Calls(VersionPlaces(engine, 1))  # type: ignore[arg-type]
        await calls.start("1:p@1", "2:p@1", "3:p@2", "4:p@1", "5:p@2", "6:q@1")
        assert calls.running == ["1:p@1", "2:p@1", "6:q@1"]  # another base has a place of its own
        await calls.end("1:p@1")
        assert "3:p@2" not in calls.running
        await calls.end("2:p@1")
        assert calls.running == ["6:q@1", "3:p@2", "5:p@2"]
        await calls.start("7:p@2")  # call 4 waits
        assert "7:p@2" not in calls.running
        await calls.end("3:p@2", "5:p@2")
        assert calls.running == ["6:q@1", "4:p@1"]
        await calls.end("4:p@1")
        assert calls.running == ["6:q@1", "7:p@2"]
        assert engine.served == [["p@1"], ["q@1"], ["p@2"], ["p@1"], ["p@2"]]

    asyncio.run(work())


def test_a_cancelled_or_refused_call_holds_up_no_other() -> None:
    async def work() -> None:
        engine = Engine("p@9")
        versions = VersionPlaces(engine, 1)  # type: ignore[arg-type]
        calls = Calls(versions)
        await calls.start("1:p@1", "2:p@2", "3:p@1", "4:p@9", "5:p@9", "6:p@1")
        assert versions.is_used(weights("p@2").version)
        await calls.cancel("2:p@2")
        assert not versions.is_used(weights("p@2").version)
        assert calls.running == ["1:p@1", "3:p@1", "6:p@1"]  # the next turn is of a version with a place
        await calls.end("1:p@1", "3:p@1", "6:p@1")
        for call in ("4:p@9", "5:p@9"):
            with pytest.raises(EngineError, match="p@9 is refused"):
                await calls._tasks[call]
        assert not calls.running
        await calls.start("7:p@1")
        assert calls.running == ["7:p@1"]
        assert not versions.is_used(weights("p@9").version)

    asyncio.run(work())


def test_adapters_share_slots_and_the_one_that_was_used_last_stays() -> None:
    async def work() -> None:
        engine = Engine()
        calls = Calls(VersionPlaces(engine, 2))  # type: ignore[arg-type]
        await calls.start("1:p@1", "2:q@1", "3:r@1", "4:p@1", kind="adapter")
        assert calls.running == ["1:p@1", "2:q@1"]  # call 4 lets call 3 go first
        await calls.end("2:q@1")
        assert calls.running == ["1:p@1", "3:r@1", "4:p@1"]
        await calls.start("5:b@1")  # all weights need none of the slots
        assert calls.running[-1] == "5:b@1"
        assert engine.served == [["p@1"], ["p@1", "q@1"], ["p@1", "r@1"], ["b@1", "r@1", "p@1"]]

    asyncio.run(work())
