"""Runs whose held-out rewards follow the step of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import agentrl
from agentrl.core import ids
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from tests.support.crash_scenario import CrashScenario, Machine

NUM_TASKS = 96


class Answer(agentrl.Environment):
    """One turn, which is right or wrong. Training episodes are slow, so that no evaluation is skipped."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("guesser").act(agentrl.user("Well?"))
        await ctx.sleep(ctx.rng.random() + 60.0 * (not ctx.task.id.startswith("held-out")))
        ctx.agent("guesser").reward(ctx.task.data.get("prize", 1.0) if turn.text.startswith("y") else 0.0)


def held_out(**data: Any) -> list[Task]:
    return [Task(id=f"held-out-{number}", data=data) for number in range(NUM_TASKS)]


def with_skills(*percents: int) -> Callable[[GenerateRequest, str, PolicyVersion], list[int]]:
    """A script that is right in so many percent of its requests, by the step of its weights; the last one stays."""

    def answer(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        percent = percents[min(version.step, len(percents) - 1)]
        return [*(b"y" if ids.stable_hash64("skill", version.step, request.seed) % 100 < percent else b"n"), STOP_TOKEN]

    return answer


class Evaluated(CrashScenario):
    """Keeps the newest life's loop."""

    orchestrator: Orchestrator

    def rewired(self, orchestrator: Orchestrator, machine: Machine) -> None:
        self.orchestrator = orchestrator
