"""Updates of an engine in a process of its own: cancelled callers, lost files, versions that kill the process."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.core.errors import EngineError, VersionNotServedError, VersionsRefusedError
from agentrl.core.records import WeightsRef
from agentrl.engines.process import ChildProgram
from agentrl.orchestrator.versions import ServedVersions
from tests.contract.engine_kinds import START, prompt, request, version
from tests.contract.test_engine_process import made, weights_of


def test_what_a_cancelled_caller_asked_for_is_replaced_by_what_is_asked_for_next() -> None:
    async def main() -> None:
        engine, _ = await made(ChildProgram("tests.contract.scripted_program:ListingEngine", {}))
        updating = asyncio.ensure_future(engine.serve([weights_of(1)], [weights_of(1)]))
        await asyncio.sleep(0)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        await engine.serve([weights_of(2)])
        assert (await engine.score("solver", prompt(1))).logprobs.tolist() == [0, 2]
        await engine.serve([weights_of(2)], [weights_of(1)])
        assert (await engine.score("solver", prompt(1))).logprobs.tolist() == [0, 1, 2]
        await engine.close()

    asyncio.run(main())


def test_a_call_that_supersedes_another_takes_effect_at_once_also_in_the_process() -> None:
    """A version waits for the place of a pinned one; the call that unpins it must not wait for that version."""

    async def main() -> None:
        engine, _ = await made(ChildProgram("tests.contract.scripted_program:OnePlaceEngine", {}))
        await engine.serve([weights_of(1)], [weights_of(1)])
        waiting = asyncio.ensure_future(engine.serve([weights_of(2)], [weights_of(1)]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await engine.serve([weights_of(2)])
        await waiting
        assert (await engine.open("a", "solver").generate(request("a", prompt(9)))).spans[0].version == version(2)
        await engine.close()

    asyncio.run(main())


def test_a_lost_pin_stands_in_the_way_of_no_later_version(tmp_path: Path) -> None:
    """Its files vanish, and the engine's process starts again."""

    def of(step: int) -> WeightsRef:
        path = tmp_path / str(step)
        path.touch()
        return replace(weights_of(step), path=str(path))

    async def main() -> None:
        engine, _ = await made(ChildProgram("tests.contract.scripted_program:FileEngine", {}))
        served = ServedVersions(engine)
        await served.make_current(of(1))
        for step in (2, 3):
            await served.pin("opponents", of(step))
        (tmp_path / "2").unlink()
        os.kill(engine.supervisor.process_id, signal.SIGKILL)
        assert (await engine.score("solver", prompt(1))).logprobs.tolist() == [0, 1, 3]
        with pytest.raises(VersionNotServedError, match=r"solver@0\.2 .* there is no "):
            engine.open("a", "solver", pin=version(2))
        await served.make_current(of(4))
        assert (await engine.score("solver", prompt(1))).logprobs.tolist() == [0, 3, 4]
        refused = replace(of(5), path=str(tmp_path / "none"))
        for serve in (served.make_current(refused), served.pin("evaluation", refused)):
            with pytest.raises(EngineError, match=r"solver@0\.5 refused"):
                await serve
        assert served.current["solver"].version == version(4)
        assert served.pinned() == {version(2), version(3)}
        served.unpin("opponents", version(2))
        await served.make_current(of(4))
        await served.pin("opponents", of(2))
        assert (await engine.score("solver", prompt(1))).logprobs.tolist() == [0, 2, 3, 4]
        engine.open("b", "solver", pin=version(2)).close()
        await engine.close()

    asyncio.run(main())


def test_a_version_that_kills_the_process_is_refused_alone() -> None:
    async def main() -> None:
        engine, _ = await made(ChildProgram("tests.contract.scripted_program:FragileEngine", {}), attempts=9)
        for fatal in (1, 2):
            with pytest.raises(VersionsRefusedError, match=f"solver@0.{fatal} refused: 2 processes") as refusal:
                await engine.serve([weights_of(fatal + 3)], [weights_of(fatal), weights_of(3)])
            assert list(refusal.value.refused) == [version(fatal)]
            engine.open("pinned", "solver", pin=version(3)).close()
            completion = await engine.open("a", "solver").generate(request("a", prompt(9)))
            assert completion.spans[0].version == version(fatal + 3)
        await engine.close()

    asyncio.run(main())


def test_an_update_that_kills_the_process_again_is_refused_and_the_version_before_serves() -> None:
    async def main() -> None:
        engine, _ = await made(ChildProgram("tests.contract.scripted_program:FragileEngine", {}), attempts=3)
        for step, losses in ((1, 2), (2, 4)):
            with pytest.raises(EngineError, match=f"solver@0.{step} refused: 2 processes of the engine died"):
                await engine.serve([weights_of(step)], [weights_of(step)])
            completion = await engine.open("a", "solver").generate(request("a", prompt(9)))
            assert completion.spans[0].version == START["solver"]
            assert engine.supervisor.losses == losses
        await engine.serve([weights_of(3)])
        completion = await engine.open("b", "solver").generate(request("b", prompt(9)))
        assert completion.spans[0].version == version(3)
        assert engine.supervisor.losses == 4
        await engine.close()

    asyncio.run(main())
