"""A sandbox that fails: asked again with back-off, never a reward, and the policy's doing where it fails for ever."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.core.errors import EpisodeError
from agentrl.journal.entries import EffectEntry, ToolEntry
from tests.replay.executions import Execution, Stage

ATTEMPTS = 5


class Sandbox:
    """Fails a number of times."""

    failures = 0
    asked = 0

    @classmethod
    def broken(cls, failures: int) -> None:
        """Begin anew."""
        cls.failures, cls.asked = failures, 0

    @classmethod
    def run(cls) -> str:
        """What it says, if it is there."""
        cls.asked += 1
        if cls.asked <= cls.failures:
            raise agentrl.InfrastructureError("the sandbox does not answer")
        return "4"


class Asks(agentrl.Environment):
    """Asks its sandbox once by an effect."""

    seats = ("solver",)
    guarantee = "idempotent"

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        solver = ctx.agent("solver")
        await solver.act(agentrl.user("?"))
        try:
            value = await ctx.effect("ask", Sandbox.run, guarantee=self.guarantee)  # type: ignore[arg-type]
        except agentrl.LimitReachedError as limit:
            ctx.truncate(limit)
            return solver.reward(-1.0)
        return solver.reward(float(value))


class AsksOnce(Asks):
    """May not ask twice."""

    guarantee = "once"


class Uses(agentrl.ToolEnvironment):
    """The policy asks the sandbox, by a tool."""

    @agentrl.tool(external=True)
    async def ask(self) -> str:
        """Ask it."""
        return Sandbox.run()

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return -1.0 if episode.truncated else 1.0


def calls_the_tool(*_: object) -> list[int]:
    """One call."""
    return list(b'<tool_call>{"name": "ask", "arguments": {}}</tool_call>')


def reward_of(execution: Execution) -> tuple[float | None, str | None]:
    header = execution.header
    assert header is not None
    return header.trajectories[0].reward, header.stop_reason


def test_a_failure_of_the_infrastructure_is_tried_again_and_leaves_no_trace() -> None:
    Sandbox.broken(ATTEMPTS)
    execution = Stage(environment=Asks).play()
    assert reward_of(execution) == (4.0, "completed")
    assert Sandbox.asked == ATTEMPTS + 1
    (effect,) = [body for body in execution.bodies.values() if isinstance(body, EffectEntry)]
    assert (effect.value, effect.error) == ("4", None)
    assert effect.seconds == pytest.approx(1 + 2 + 4 + 8 + 16)


def test_what_breaks_its_infrastructure_for_ever_is_truncated_and_stays_so_on_replay() -> None:
    Sandbox.broken(1000)
    execution = Stage(environment=Asks).play()
    assert reward_of(execution) == (-1.0, "infrastructure")
    asked = Sandbox.asked
    assert asked == ATTEMPTS + 1
    for cut in range(len(execution.entries) + 1):
        again = Stage(environment=Asks).play(execution.entries[:cut])
        assert again.transcript == execution.transcript
        assert reward_of(again) == (-1.0, "infrastructure")
    assert Sandbox.asked == asked * 4  # asked anew only where the cut was before the effect's own entry


def test_what_must_happen_once_is_not_tried_again() -> None:
    Sandbox.broken(1)
    execution = Stage(environment=AsksOnce).play()
    assert isinstance(execution.error, EpisodeError)
    assert "the sandbox does not answer" in str(execution.error)
    assert Sandbox.asked == 1


def test_a_tool_that_breaks_its_sandbox_for_ever_truncates_the_episode() -> None:
    Sandbox.broken(1000)
    stage = Stage(environment=Uses, data={"question": "?"}, script=calls_the_tool)
    execution = stage.play()
    assert reward_of(execution) == (-1.0, "infrastructure")
    (used,) = [body for body in execution.bodies.values() if isinstance(body, ToolEntry)]
    assert used.outcome == "infrastructure"
    asked = Sandbox.asked
    assert reward_of(stage.play(execution.entries)) == (-1.0, "infrastructure")
    assert Sandbox.asked == asked
