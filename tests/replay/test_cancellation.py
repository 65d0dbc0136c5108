"""Cancellations, branches and their order on re-execution."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.core.errors import EffectError
from agentrl.journal.entries import EffectEntry, UnansweredEntry
from tests.replay.executions import Stage, resumed_everywhere


def of(kind: type, entries: dict[str, Any]) -> list[str]:
    return [call_id for call_id, body in entries.items() if isinstance(body, kind)]


class Impatient(agentrl.Environment):
    """Waits 0.25 s for a turn that takes longer, then takes another."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent, said = ctx.agent("agent"), "nothing"
        try:
            async with asyncio.timeout(0.25):
                said = (await agent.act(agentrl.user("quick"))).text
        except TimeoutError:
            said = "late"
        with_whom = await ctx.effect("look", lambda: said)
        agent.reward(float(len(with_whom)))


def test_a_turn_that_was_cancelled_is_cancelled_again() -> None:
    whole, *resumed = resumed_everywhere(Stage(environment=Impatient))
    assert of(UnansweredEntry, whole.bodies) == ["r#0"]
    for again in resumed:
        assert again.error is None
        assert again.transcript == whole.transcript
    assert [again.engine_calls for again in resumed] == [1, *[0] * (len(resumed) - 1)]


class Ending(agentrl.Environment):
    """Cancels its last act."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        ctx.agent("agent").reward(1.0)
        try:
            async with asyncio.timeout(1.0):
                await ctx.sleep(10.0)
        except TimeoutError:
            pass


def test_a_cancellation_nothing_follows_is_recorded_at_the_end() -> None:
    whole, *_ = resumed_everywhere(Stage(environment=Ending))
    assert of(UnansweredEntry, whole.bodies) == ["r#1"]


@pytest.mark.parametrize("without_notice", [False, True])
def test_a_stop_from_outside_records_nothing(without_notice: bool) -> None:
    stage = Stage(environment=Impatient, stop_after=0.1, cancel_without_notice=without_notice)
    stopped = stage.play()
    assert stopped.header is None
    assert [entry.call_id for entry in stopped.entries] == ["begin"]
    again = Stage(environment=Impatient).play(stopped.entries)
    assert again.transcript == Stage(environment=Impatient).play().transcript


class Tidying(agentrl.Environment):
    """Would act in its finally."""

    tidied: ClassVar[list[str]] = []

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        try:
            await ctx.agent("agent").act(agentrl.user("long"))
        finally:
            await ctx.effect("tidy", lambda: self.tidied.append("once"))
            ctx.agent("agent").reward(0.0)


def test_a_stopped_episode_acts_no_more() -> None:
    stopped = Stage(environment=Tidying, stop_after=0.1).play()
    assert [entry.call_id for entry in stopped.entries] == ["begin"]
    assert Tidying.tidied == []


class Racing(agentrl.Environment):
    """Branches of several calls each write down what they saw, and one of them may fail."""

    seats = ("left", "right")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        log: list[str] = []

        async def line(seat: str, pause: float, times: int) -> str:
            for number in range(times):
                await ctx.sleep(pause)
                log.append(f"{seat}{number} after {len(log)}")
                turn = await ctx.agent(seat).act(agentrl.user("; ".join(log)))
                log.append(f"{seat} heard {turn.text}, {ctx.rng.random():.6f}")
                if ctx.task.data["fails"] == f"{seat}{number}":
                    raise LookupError(seat)
            return seat

        try:
            ended = await ctx.gather(line("left", 0.3, 4), line("right", 0.5, 3), line_of_none(log))
        except LookupError as error:
            ended = [f"failed {error}"]
        await ctx.effect("end", lambda: "; ".join([*log, *map(str, ended)]))
        ctx.agent("left").reward(1.0)


async def line_of_none(log: list[str]) -> None:
    """A branch that makes no call."""


@pytest.mark.parametrize("fails", ["", "left1", "right0", "right1"])
def test_shared_state_evolves_in_the_recorded_order(fails: str) -> None:
    stage = Stage(environment=Racing, data={"fails": fails})
    whole = stage.play()
    assert whole.error is None
    assert "gather" in [getattr(body, "kind", "") for body in whole.bodies.values()]
    assert bool(of(UnansweredEntry, whole.bodies)) is bool(fails)
    for cut in range(1, len(whole.entries) + 1):
        resumed = stage.play(whole.entries[:cut], seed=cut)
        assert resumed.error is None, cut
        assert resumed.entries[:cut] == whole.entries[:cut]
        again = stage.play(resumed.entries, seed=cut + 1)
        assert again.error is None, cut
        assert again.engine_calls == 0
        assert again.transcript == resumed.transcript


class GatherInTime(agentrl.Environment):
    """A gather that is cut off by a timeout, with a branch that catches."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        caught: list[str] = []

        async def stubborn() -> None:
            try:
                await ctx.sleep(9.0)
            except asyncio.CancelledError:
                caught.append("stubborn")
                raise

        async def busy() -> None:
            while True:
                await ctx.sleep(0.4)
                caught.append("busy")

        try:
            async with asyncio.timeout(1.0):
                await ctx.gather(stubborn(), busy())
        except TimeoutError:
            caught.append("late")
        await ctx.effect("caught", lambda: caught)


def test_a_gather_that_is_cut_off_is_cut_off_again() -> None:
    whole, *resumed = resumed_everywhere(Stage(environment=GatherInTime))
    assert sorted(of(UnansweredEntry, whole.bodies)) == ["r#0", "r/0.0#0", "r/0.1#2"]
    effect = whole.bodies["r#1"]
    assert isinstance(effect, EffectEntry)
    assert effect.value == ["busy", "busy", "stubborn", "late"]
    complete = resumed[-1]
    assert complete.error is None
    assert complete.transcript == whole.transcript
    assert all(again.error is None for again in resumed)


class Failing(agentrl.Environment):
    """A branch fails at once, before the others began."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        async def fails() -> None:
            raise LookupError("at once")

        async def fails_later() -> None:
            try:
                await ctx.sleep(5.0)
            finally:
                raise EffectError("on the way out", error="E: e")

        try:
            await ctx.gather(ctx.sleep(1.0), fails(), fails_later())
        except LookupError:
            ctx.agent("agent").reward(1.0)
        assert await ctx.gather() == []


def test_the_first_failure_is_raised() -> None:
    for execution in resumed_everywhere(Stage(environment=Failing)):
        assert execution.error is None
        assert execution.header is not None
        assert execution.header.reward is None or execution.header.reward == 1.0


class NestedTool(agentrl.ToolEnvironment):
    """A tool that asks another agent, on branches of its own."""

    seats = ("agent", "judge")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self.ctx = ctx
        await super().run(ctx)

    @agentrl.tool
    async def ask(self, times: int) -> str:
        """Ask the judge."""

        async def one(index: int) -> str:
            await self.ctx.sleep(0.1 * index)
            return (await self.ctx.agent("judge", index).act(agentrl.user(f"number {index}"))).text

        first = await one(0)
        return ",".join([first, *await self.ctx.gather(*(one(index) for index in range(1, times)))])

    def prompt(self, task: agentrl.Task) -> str:
        return "?"

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 1.0


def test_tools_may_call_the_context() -> None:
    from agentrl.rollout.chat.byte_formats import STOP_TOKEN
    from tests.replay.executions import told

    call = b'<tool_call>{"name": "ask", "arguments": {"times": 3}}</tool_call>'

    def script(request: Any, policy: str, version: Any) -> list[int]:
        text = told(request)
        return [*(b"judged" if b"number" in text else b"ok" if b"judged" in text else call), STOP_TOKEN]

    whole, *resumed = resumed_everywhere(Stage(environment=NestedTool, script=script))
    assert "r#1" in whole.bodies
    assert "r/4.1#1" in whole.bodies
    for again in resumed:
        assert again.error is None
        assert again.transcript == whole.transcript
