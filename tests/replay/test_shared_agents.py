"""Turns of one agent that several strands ask for at once: one after another, and the same on every re-execution."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentrl
from agentrl.journal.entries import TurnEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from tests.replay.executions import Execution, Stage, digits, resumed_everywhere, told


class Asking(agentrl.ToolEnvironment):
    """Tools that ask another agent."""

    seats = ("policy", "expert")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self.ctx = ctx
        await super().run(ctx)

    @agentrl.tool
    async def ask(self, n: int) -> str:
        """Ask the expert."""
        return (await self.ctx.agent("expert").act(agentrl.user(f"question {n}"))).text

    def prompt(self, task: agentrl.Task) -> str:
        return "Go."

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 1.0


def ask_twice(request: Any, policy: str, version: Any) -> list[int]:
    """A policy that calls `ask` twice at once, and an expert that names the questions which it was asked."""
    text = told(request).decode()
    if "Go." in text:
        reply = (
            "done"
            if "<tool_call>" in text
            else "".join(f'<tool_call>{{"name":"ask","arguments":{{"n":{n}}}}}</tool_call>' for n in (1, 2))
        )
    else:
        reply = f"answer to {text.count('question')} and {text.count('answer')}"
    return [*reply.encode(), STOP_TOKEN]


def turns_of(execution: Execution, seat: str, index: int = 0) -> list[TurnEntry]:
    bodies = execution.bodies.values()
    return [body for body in bodies if isinstance(body, TurnEntry) and (body.seat, body.index) == (seat, index)]


def test_tools_that_ask_one_agent_at_once_take_turns() -> None:
    whole, *resumed = resumed_everywhere(Stage(environment=Asking, script=ask_twice))
    for execution in (whole, *resumed):
        assert execution.error is None
        turns = turns_of(execution, "expert")
        assert [turn.text.removesuffix("<|stop|>") for turn in turns] == ["answer to 1 and 0", "answer to 2 and 1"]
        assert [message["content"] for turn in turns for message in turn.messages] == ["question 1", "question 2"]
        assert [turn.parent_context > 0 for turn in turns] == [False, True]


class Crowd(agentrl.Environment):
    """Strands that ask one agent at times that the task gives, some with a timeout."""

    seats = ("expert",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("expert")
        agent_turns: list[str] = []

        async def ask(name: int, pauses: list[float], timeout_s: float | None) -> None:
            for pause in pauses:
                if pause:
                    await ctx.sleep(pause)
                try:
                    async with asyncio.timeout(timeout_s):
                        agent_turns.append((await agent.act(agentrl.user(f"{name} after {len(agent_turns)}"))).text)
                except TimeoutError:
                    await ctx.effect(f"late {len(agent_turns)}", lambda: None)
                except agentrl.LimitReachedError as limit:
                    await ctx.effect(limit.stop_reason, lambda: None)
                    return

        for crowd in ctx.task.data["crowds"]:
            await ctx.gather(*(ask(name, *strand) for name, strand in enumerate(crowd)))
        agent.reward(float(len(agent_turns)))


CROWDS: dict[str, list[list[list[Any]]]] = {
    "at once": [[[[0.0], None], [[0.0], None], [[0.0], None]]],
    "several turns": [[[[0.0, 0.0], None], [[0.1, 0.3], None]], [[[0.2], None], [[0.0], None]]],
    "cancelled while waiting": [[[[0.0], None], [[0.0, 0.0], 0.15], [[0.0], None]]],
    "cancelled in a turn": [[[[0.0, 0.0], 0.15], [[0.0], None], [[0.1], None]]],
    "no turn left": [[[[0.0] * 60, None], [[0.0] * 60, None]]],
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_every_prefix_of_a_crowd_is_resumed(crowd: str) -> None:
    stage = Stage(environment=Crowd, data={"crowds": CROWDS[crowd]}, script=digits)
    whole, *resumed = resumed_everywhere(stage) if crowd != "no turn left" else [stage.play()]
    assert whole.error is None
    assert len(turns_of(whole, "expert")) >= 2
    if not resumed:
        cuts = [len(whole.entries) - n for n in range(30)]
        resumed = [stage.play(whole.entries[:cut], seed=cut) for cut in cuts]
    for execution in resumed:
        assert execution.error is None, execution.error
        again, context = turns_of(execution, "expert"), 0
        assert [turn.turn for turn in again] == list(range(len(again)))
        for turn in again:  # each turn continues the one before it
            assert turn.parent_context == context
            context += len(turn.context_ids) // 4 + len(turn.text.removesuffix("<|stop|>")) + 1
    assert resumed[-1 if crowd != "no turn left" else 0].transcript == whole.transcript


class Restarting(Asking):
    """Tools that ask in a new conversation of the same agent."""

    @agentrl.tool
    async def ask(self, n: int) -> str:
        """Ask the expert."""
        self.ctx.agent("expert").restart()
        return await super().ask(n)


def test_a_restart_during_another_turn_drops_the_episode() -> None:
    played = Stage(environment=Restarting, script=ask_twice).play()
    assert played.error is not None
    assert played.error.reason == "environment_error"
    assert "ctx.agent('expert', index)" in str(played.error)
