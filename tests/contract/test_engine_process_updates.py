"""Updates of an engine in a process of its own: whose caller is cancelled, and that kill the process."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.core.errors import EngineError
from agentrl.engines.child_process import EngineProgram
from tests.contract.engine_kinds import START, prompt, request, version
from tests.contract.test_engine_process import made, weights_of


def test_who_is_cancelled_in_an_update_keeps_nothing() -> None:
    async def main() -> None:
        engine, _ = await made(EngineProgram("tests.contract.scripted_program:CountingEngine", {}))
        updating = asyncio.ensure_future(engine.update(weights_of(1), keep=True))
        await asyncio.sleep(0)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        await engine.update(weights_of(2))
        assert (await engine.score(version(1), prompt(1))).tolist() == [0]
        await engine.update(weights_of(2), keep=True)
        assert (await engine.score(version(2), prompt(1))).tolist() == [1]
        await engine.close()

    asyncio.run(main())


def test_an_update_that_kills_the_process_again_is_refused_and_the_version_before_serves() -> None:
    async def main() -> None:
        engine, _ = await made(EngineProgram("tests.contract.scripted_program:FragileEngine", {}), attempts=3)
        for step, losses in ((1, 2), (2, 4)):
            with pytest.raises(EngineError, match=f"solver@0.{step} refused: 2 processes of the engine died"):
                await engine.update(weights_of(step), keep=True)
            completion = await engine.open("a", "solver").generate(request("a", prompt(9)))
            assert completion.spans[0].version == START["solver"]
            assert engine.supervisor.losses == losses
        await engine.update(weights_of(3))
        completion = await engine.open("b", "solver").generate(request("b", prompt(9)))
        assert completion.spans[0].version == version(3)
        assert engine.supervisor.losses == 4
        await engine.close()

    asyncio.run(main())
