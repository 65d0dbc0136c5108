"""Updates of an engine in a process of its own: whose caller is cancelled, and that kill the process."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.core.errors import EngineError
from agentrl.engines.child_process import EngineProgram
from tests.contract.engine_kinds import START, prompt, request, version
from tests.contract.test_engine_process import made, weights_of


def test_what_a_cancelled_caller_asked_for_is_replaced_by_what_is_asked_for_next() -> None:
    async def main() -> None:
        engine, _ = await made(EngineProgram("tests.contract.scripted_program:ListingEngine", {}))
        updating = asyncio.ensure_future(engine.serve([weights_of(1)], [weights_of(1)]))
        await asyncio.sleep(0)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        await engine.serve([weights_of(2)])
        assert (await engine.score("solver", prompt(1))).tolist() == [2]
        await engine.serve([weights_of(2)], [weights_of(1)])
        assert (await engine.score("solver", prompt(1))).tolist() == [1, 2]
        await engine.close()

    asyncio.run(main())


def test_a_call_that_supersedes_another_takes_effect_at_once_also_in_the_process() -> None:
    """A version waits for the place of a pinned one; the call that unpins it must not wait for that version."""

    async def main() -> None:
        engine, _ = await made(EngineProgram("tests.contract.scripted_program:OnePlaceEngine", {}))
        await engine.serve([weights_of(1)], [weights_of(1)])
        waiting = asyncio.ensure_future(engine.serve([weights_of(2)], [weights_of(1)]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await engine.serve([weights_of(2)])
        await waiting
        assert (await engine.open("a", "solver").generate(request("a", prompt(9)))).spans[0].version == version(2)
        await engine.close()

    asyncio.run(main())


def test_an_update_that_kills_the_process_again_is_refused_and_the_version_before_serves() -> None:
    async def main() -> None:
        engine, _ = await made(EngineProgram("tests.contract.scripted_program:FragileEngine", {}), attempts=3)
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
