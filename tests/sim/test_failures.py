"""What fails around an episode: programs that will not stop, engines that are lost, ends that are told twice."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

import agentrl
from agentrl.core.errors import EngineLostError
from agentrl.core.ports import GenerateRequest, NewTokensCallback
from agentrl.core.records import EpisodeHeader, EpisodeSpec
from agentrl.core.tokens import Completion
from agentrl.engines.scripted import ScriptedEngine, ScriptedSession
from agentrl.journal.port import EpisodeEnd
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.turn.sampler import LOST_IN_A_ROW
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import Ask, Guess, SmallRun, config_for

pytestmark = pytest.mark.sim


class Stubborn(Guess):
    """Every fourth episode swallows its cancellation and tries to go on."""

    late: Counter[str]

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.task.id not in ("digit-0", "digit-4"):
            await super().run(ctx)
            return
        guesser = ctx.agent("guesser")
        await guesser.act(agentrl.user("Guess a digit."))
        while True:
            try:
                await asyncio.sleep(40.0)
            except asyncio.CancelledError:
                self.late["cancelled"] += 1
                await asyncio.sleep(20.0)  # longer than the grace
                try:
                    await guesser.act(agentrl.user("Again."))
                except agentrl.AgentRLError:
                    self.late["refused"] += 1


def test_a_program_that_swallows_its_cancellation_is_left_behind(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        late: Counter[str] = Counter()
        environment = type("Stubborn", (Stubborn,), {"late": late})
        # Steps take so long that the run outlasts what was left behind.
        run = SmallRun(
            config=config_for(steps=6, episode_timeout_s=30.0),
            environment=environment,
            trainer_options={"step_seconds": 25.0},
        )
        await run.run()
        ledger = run.orchestrator.buffer.ledger
        ends = [record for record in run.journal.records if isinstance(record, EpisodeEnd)]
        dropped = [end.header.episode_id for end in ends if end.header.drop_reason == "episode_timeout"]
        assert ledger.dropped["episode_timeout"] == len(set(dropped)) > 0
        assert late["cancelled"] > 0
        assert late["refused"] == 0, "it does not go on"
        assert [batch.step_id for batch in run.trainer.batches] == [1, 2, 3, 4, 5, 6]

    simulated_loop.run(main)


def test_a_run_that_ends_does_not_wait_for_a_stuck_program(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        late: Counter[str] = Counter()
        environment = type("Stubborn", (Stubborn,), {"late": late})
        run = SmallRun(config=config_for(steps=2), environment=environment)
        run.during = lambda orchestrator: _stop_at(orchestrator, 3.0)
        before = asyncio.get_running_loop().time()
        outcome = await run.run()
        assert outcome.interrupted
        assert asyncio.get_running_loop().time() - before < 30

    simulated_loop.run(main)


def _stop_at(orchestrator: Orchestrator, seconds: float) -> None:
    asyncio.get_running_loop().call_later(seconds, orchestrator.stop)


class FlakyEngine(ScriptedEngine):
    """A scripted engine whose process dies under some calls, and is back at once."""

    losses = 1
    fatal = "never"

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.asked: Counter[str] = Counter()

    def open(self, *arguments: object, **options: object) -> ScriptedSession:
        session = super().open(*arguments, **options)  # type: ignore[arg-type]
        return _FlakySession(self, session)  # type: ignore[return-value]


class _FlakySession:
    def __init__(self, engine: FlakyEngine, session: ScriptedSession) -> None:
        self._engine = engine
        self._session = session

    async def generate(self, request: GenerateRequest, on_delta: NewTokensCallback | None = None) -> Completion:
        self._engine.asked[request.request_id] += 1
        is_fatal = request.request_id.startswith(self._engine.fatal)
        if is_fatal or self._engine.asked[request.request_id] <= self._engine.losses:
            await asyncio.sleep(0.3)
            raise EngineLostError("the engine's process died (SIGKILL)")
        return await self._session.generate(request, on_delta)

    def close(self) -> None:
        self._session.close()


def test_an_episode_whose_engine_is_lost_goes_on_from_its_last_entry(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(engine_class=FlakyEngine)
        await run.run()
        ledger = run.orchestrator.buffer.ledger
        assert ledger.trained == 4 * 8
        assert set(ledger.dropped) <= {"run_ended"}
        engine = run.orchestrator.versions.engine
        assert isinstance(engine, FlakyEngine)
        # `e<k>.<attempt>.<call>`: no environment was blamed, and a turn that was sampled is not asked for again.
        assert all(request_id.split(".")[1] == "0" for request_id in engine.asked)
        assert max(engine.asked.values()) == 2

    simulated_loop.run(main)


def test_a_parent_that_is_executed_again_finds_its_children(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(engine_class=FlakyEngine, environment=Ask)
        await run.run()  # the journal refuses a call that is journaled twice
        units = Counter(unit.episode_id for batch in run.trainer.batches for unit in batch.units)
        assert max(units.values()) == 1
        assert any("~" in episode_id for episode_id in units)

    simulated_loop.run(main)


def test_an_episode_that_loses_its_engine_again_and_again_is_dropped(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        engine = type("Fatal", (FlakyEngine,), {"losses": 0, "fatal": "e3."})
        run = SmallRun(engine_class=engine)
        await run.run()
        assert run.orchestrator.buffer.ledger.dropped["engine_lost"] == 1
        assert isinstance(run.orchestrator.versions.engine, FlakyEngine)
        assert max(run.orchestrator.versions.engine.asked.values()) == LOST_IN_A_ROW + 1

    simulated_loop.run(main)


def test_an_end_told_twice_or_of_an_old_attempt_is_ignored(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun()

        def repeat(orchestrator: Orchestrator) -> None:
            worker = orchestrator.dispatcher.worker
            submit = worker.submit

            def submit_and_repeat(
                spec: EpisodeSpec, on_end: Callable[[EpisodeHeader], None], *, resume: bool = False
            ) -> None:
                def tell(header: EpisodeHeader) -> None:
                    on_end(dataclasses.replace(header, attempt=header.attempt + 1))
                    on_end(header)
                    on_end(header)

                submit(spec, tell, resume=resume)

            worker.submit = submit_and_repeat  # type: ignore[method-assign]

        run.during = repeat
        await run.run()
        units = Counter(unit.episode_id for batch in run.trainer.batches for unit in batch.units)
        assert max(units.values()) == 1

    simulated_loop.run(main)
