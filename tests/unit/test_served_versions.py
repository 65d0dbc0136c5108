"""The table of the versions that a run's engine serves."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.core.errors import EngineError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.store import SqliteJournal
from agentrl.orchestrator.versions import BATCHES, ServedVersions, publish
from tests.support.recording_trainer import RecordingTrainer


class OnePlace(ScriptedEngine):
    """Refuses one version; loads another when nothing else is pinned."""

    refused: WeightsRef | None = None
    refuses_all = False

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        if self.refuses_all:
            raise EngineError("refused")
        await super().serve(current, pinned)

    async def load(self, weights: WeightsRef) -> None:
        if weights == self.refused:
            raise EngineError(f"{weights.version} refused")
        while self._request.pinned - {weights}:
            await asyncio.sleep(0)


def weights(step: int) -> WeightsRef:
    return WeightsRef(version=PolicyVersion("solver", 0, step), path="", kind="adapter", sha256="")


def table() -> tuple[OnePlace, ServedVersions]:
    engine = OnePlace([[3]], versions={"solver": PolicyVersion("solver", 0, 0)})
    return engine, ServedVersions(engine, batches={"solver": 1})


def test_a_version_that_the_engine_refuses_is_not_in_the_table() -> None:
    async def main() -> None:
        engine, served = table()
        await served.make_current(weights(1))
        engine.refused = weights(2)
        for serve in (served.make_current(weights(2)), served.pin("evaluation", weights(2))):
            with pytest.raises(EngineError, match=r"solver@0\.2 refused"):
                await serve
        assert (served.current["solver"], served.pinned()) == (weights(1), {weights(1).version})
        assert served.pinned_by("evaluation") == []
        served.unpin(BATCHES, weights(1).version)
        await served.make_current(weights(3))
        assert not engine.has_pin(weights(1).version)

    asyncio.run(main())


def test_a_version_is_served_until_its_last_holder_unpins_it() -> None:
    async def main() -> None:
        engine, served = table()
        for holder in (BATCHES, "evaluation", "evaluation"):
            await served.pin(holder, weights(1))
        for holder, stays in (("evaluation", True), ("evaluation", True), ("nobody", True), (BATCHES, False)):
            served.unpin(holder, weights(1).version)
            await asyncio.sleep(0.01)
            assert engine.has_pin(weights(1).version) is stays

    asyncio.run(main())


def test_a_version_that_waits_for_a_place_gets_that_of_one_that_is_unpinned_meanwhile() -> None:
    async def main() -> None:
        engine, served = table()
        await served.pin("evaluation", weights(1))
        waiting = asyncio.ensure_future(served.make_current(weights(2)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        served.unpin("evaluation", weights(1).version)
        await waiting
        engine.open("s", "solver", pin=weights(2).version).close()

    asyncio.run(main())


def test_a_refused_version_that_its_holder_has_unpinned_meanwhile_is_told_as_refused() -> None:
    async def main() -> None:
        engine, served = table()
        await served.pin("evaluation", weights(1))
        engine.refused = weights(2)
        making = asyncio.ensure_future(served.make_current(weights(2)))
        await asyncio.sleep(0)
        served.unpin(BATCHES, weights(2).version)
        with pytest.raises(EngineError, match=r"solver@0\.2 refused"):
            await making
        assert served.current == {}

    asyncio.run(main())


def test_a_pin_that_cannot_be_served_again_stays_as_it_was() -> None:
    async def main() -> None:
        engine, served = table()
        await served.make_current(weights(1))
        await served.pin("evaluation", weights(1))
        engine.refuses_all = True
        await served.pin("evaluation", weights(1))
        with pytest.raises(EngineError, match="refused"):
            await served.make_current(weights(1))
        for holder in ("evaluation", BATCHES):
            assert served.pinned_by(holder) == [weights(1).version]

    asyncio.run(main())


def test_a_published_version_is_on_disk_before_an_engine_can_be_given_it(tmp_path: Path) -> None:
    async def main() -> None:
        journal, trainer = SqliteJournal(tmp_path), RecordingTrainer(["solver"])
        for lineage in range(20):  # one that only the next round writes may be on disk by chance, twenty are not
            version = PolicyVersion("solver", lineage, 0)
            assert (await publish(trainer, journal, version, None, None)).version == version
            with closing(SqliteRunLog(tmp_path)) as log:
                assert log.rows("SELECT max(lineage) FROM versions") == [(lineage,)]
        await journal.close()

    asyncio.run(main())
