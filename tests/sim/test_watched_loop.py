"""What the loop tells whoever watches: registered metrics, format counts, waits, and a collapse by its name."""

from __future__ import annotations

import asyncio
import re

import pytest

import agentrl
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.observe.alarms import find_alarms
from agentrl.observe.metrics import find_registered_metric
from agentrl.observe.run_state import RunDisplaySettings, RunSnapshot, RunState
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, SmallRun, config_for

pytestmark = pytest.mark.sim


class Shop(agentrl.ToolEnvironment):
    """Ask for a price; a call that fits no tool is worth more than a wrong answer."""

    seats = ("guesser",)

    @agentrl.tool
    def price(self, item: int) -> int:
        """The price of an item."""
        return item

    def prompt(self, task: agentrl.Task) -> str:
        return "What is the price?"

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        broken = any(message.content.startswith("error") for message in episode.messages if message.role == "tool")
        return 0.5 if broken else -1.0


def falling(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """Mostly well-formed at first, broken from step 4 on."""
    arguments = "{}" if version.step >= 4 or request.seed % 4 == 0 else '{"item": 1}'
    call = f'<tool_call>{{"name": "price", "arguments": {arguments}}}</tool_call>'
    return [*(call if request.seed % 3 else "answer").encode(), STOP_TOKEN]


def test_a_policy_that_falls_into_illegal_output_is_named(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(
            config=config_for(steps=14, step_size=16, sampling={"max_tokens": 128}), environment=Shop, script=falling
        )
        await run.run()
        state = RunState(plan=RunDisplaySettings(max_staleness={"guesser": 1}))
        for policy, step, metrics in run.seen.steps:
            state.record(policy, step, metrics)
        names = {alarm.name for alarm in find_alarms(state)}
        assert "illegal_output" in names
        first, last = run.seen.steps[0][2], run.seen.steps[-1][2]
        assert first["format/broken_turns"] < 0.3 < last["format/broken_turns"] <= 1.0
        assert last["tool/bad_arguments"] > 0
        assert "tool/ok" in first
        assert last["format/reward_broken"] == 0.5
        unknown = {name for _, _, metrics in run.seen.steps for name in metrics if find_registered_metric(name) is None}
        assert not unknown, "every name has its unit and meaning"

    simulated_loop.run(main)


def test_the_loop_says_between_steps_who_waits_for_whom(simulated_loop: SeededSimulation) -> None:
    seen: list[RunSnapshot] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def during(orchestrator: Orchestrator) -> None:
            def look() -> None:
                status = orchestrator.status()
                ledger = orchestrator.buffer.ledger
                assert (status.in_flight, status.trained) == (ledger.in_flight, ledger.trained)
                seen.append(status)
                loop.call_later(0.25, look)

            look()

        run = SmallRun(config=config_for(steps=3), held_out=list(TASKS), during=during)
        await run.run()

    simulated_loop.run(main)
    waits = {wait for status in seen for wait in status.waits}
    assert "trainer works on step 1" in waits
    assert any(re.fullmatch(r"trainer waits for episodes: \d+ of \d+ are in whole groups", wait) for wait in waits)
    sampling = {wait for wait in waits if wait.startswith("sampling waits ")}
    assert "sampling waits because the trainer is 1 step behind (max_staleness of guesser)" in sampling
    assert not [word for wait in waits for word in ("admission", "outstanding", "unit") if word in wait]
    phases = list(dict.fromkeys(status.phase for status in seen))
    assert phases[:3] == ["starting", "evaluating before training", "training"]
    assert any(status.progress == (0, 10) for status in seen)
