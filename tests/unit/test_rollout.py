"""One episode: several seats, rows, child episodes, limits, retries, and what a header says."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
from typing import ClassVar

import numpy as np
import pytest

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.journal.entries import ChildResultEntry, RewardEntry, SpawnEntry, TurnEntry
from agentrl.journal.rows import assemble_trajectories
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from tests.unit.episodes import play


class Talk(agentrl.Environment):
    """Two seats, one of them with two agents; one agent's context is rewritten."""

    seats = ("host", "guest")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        host, first, second = ctx.agent("host"), ctx.agent("guest"), ctx.agent("guest", 1)
        assert ctx.agent("guest") is first
        await host.act(agentrl.system("be kind"), agentrl.user("begin"))
        await first.act(agentrl.user("one"))
        await second.act(agentrl.user("two"))
        host.restart(agentrl.user("forget it"))
        await host.act()
        host.reward(1.0, turn=0)
        host.reward(0.5)
        first.reward(-1.0)
        second.reward(0.25)


def test_agents_rows_and_rewards() -> None:
    played = play(Talk, ["h1", "g1", "g2", "h2"])
    assert [t.turn_rewards for t in played.header.trajectories] == [(), (), ((0, 1.0),)]
    assert [(t.seat, t.index, t.reward) for t in played.header.trajectories] == [
        ("guest", 0, -1.0),
        ("guest", 1, 0.25),
        ("host", 0, 1.5),
    ]
    assert [entry.turn for entry in played.entries if isinstance(entry, RewardEntry)] == [0, None, None, None]
    assert [entry.row for entry in played.entries if isinstance(entry, TurnEntry)] == [0, 0, 0, 1]
    assert played.rows == [0, 0, 0, 1]


class Counting(agentrl.ToolEnvironment):
    """Its program counts, and so do its agent's tools."""

    @agentrl.tool
    def look(self) -> str:
        """Look."""
        return "seen"

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        ctx.metric("own", 2.0)
        await super().run(ctx)
        ctx.metric("own", 0.5)

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 1.0


def test_what_an_episode_and_its_agents_count_is_committed() -> None:
    played = play(Counting, ['<tool_call>{"name": "look", "arguments": {}}</tool_call>', "well"])
    assert played.metrics == {"own": 2.5, "tool/ok": 1.0, "tools_offered": 1.0}


class Early(agentrl.Environment):
    """Rewards a turn that has not been."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("agent").act(agentrl.user("go"))
        ctx.agent("agent").reward(1.0, turn=1)


def test_a_reward_is_for_a_turn_that_has_been() -> None:
    assert play(Early, ["a"]).header.drop_reason == "bad_reward"


class Retold(Talk):
    """`restart` messages are what the next turn is asked."""

    seats = ("host",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        host = ctx.agent("host")
        await host.act(agentrl.user("first"))
        host.restart(agentrl.user("anew"))
        await host.act(agentrl.user("and more"))
        host.reward(0.0)


def test_a_restarted_row_begins_with_its_messages() -> None:
    played = play(Retold, ["a", "b"])
    turns = [entry for entry in played.entries if isinstance(entry, TurnEntry)]
    assert turns[1].parent_context == 0
    assert [message["content"] for message in turns[1].messages] == ["anew", "and more"]


class Solve(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("solver").act(agentrl.user(str(ctx.task.data["problem"])))
        if turn.text == "crash":
            raise RuntimeError("no")
        ctx.agent("solver").reward(float(turn.text == "right"))


class Propose(agentrl.Environment):
    seats = ("proposer",)
    fan_out: ClassVar[dict[str, int]] = {"Solve": 3}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        proposer = ctx.agent("proposer")
        turn = await proposer.act(agentrl.user("propose"))
        results = await ctx.gather(*ctx.spawn(Solve, {"problem": turn.text}, n=3))
        solved = [result.reward for result in results if result.reward is not None]
        proposer.reward(sum(solved) / len(solved))


def test_child_episodes_are_whole_and_dropped_ones_do_not_count() -> None:
    played = play(Propose, ["2+2", "right", "crash", "wrong"])
    assert played.header.reward == 0.5
    [spawn] = [entry for entry in played.entries if isinstance(entry, SpawnEntry)]
    assert len(spawn.children) == 3
    assert spawn.children[0].startswith("e0~0.")
    ends = [entry for entry in played.entries if isinstance(entry, ChildResultEntry)]
    assert sorted(str(entry.drop_reason) for entry in ends) == ["None", "None", "environment_error"]


class Stray(agentrl.Environment):
    """Acts from tasks of its own making, and catches everything."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")

        async def late() -> None:
            with contextlib.suppress(BaseException):
                await agent.act(agentrl.user("late"))

        with contextlib.suppress(BaseException):
            if ctx.task.data["gathers"]:
                await asyncio.gather(agent.act(agentrl.user("x")), agent.act(agentrl.user("y")))
            else:
                await ctx.call_tool(
                    "tool", {}, lambda: self.keep(asyncio.create_task(late())), external=False, timeout_s=None
                )
                await ctx.sleep(1.0)
        with contextlib.suppress(BaseException):
            agent.reward(1.0)

    def keep(self, task: asyncio.Task[None]) -> str:
        self.task = task
        return ""


@pytest.mark.parametrize(("gathers", "function"), [(True, "run"), (False, "late")])
def test_a_stray_task_drops_the_episode_and_is_named_with_its_line(gathers: bool, function: str) -> None:
    played = play(Stray, ["x"], data={"gathers": gathers})
    assert played.header.drop_reason == "unstructured_concurrency"
    lines, first = inspect.getsourcelines(Stray)
    number = first + next(n for n, line in enumerate(lines) if ("asyncio.gather(" if gathers else '"late"') in line)
    assert f"{__file__}:{number} in {function} used ctx or an agent outside run()" in played.said
    assert "`await ctx.gather(...)`" in played.said


class Flaky(agentrl.Environment):
    tries: ClassVar[int] = 0

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("agent").act(agentrl.user("x"))
        Flaky.tries += 1
        if Flaky.tries < 2:
            raise ConnectionError("once")
        ctx.agent("agent").reward(1.0)


def test_an_environment_that_raises_is_tried_again() -> None:
    Flaky.tries = 0
    played = play(Flaky, ["x", "y"], attempts=2)
    assert played.header.attempt == 1
    assert played.header.committed


class Cancelling(agentrl.Environment):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        raise asyncio.CancelledError


class Orders(agentrl.Environment):
    """Orders once, then fails in its first attempt."""

    seats = ("agent",)
    orders: ClassVar[int] = 0
    failure: ClassVar[str] = ""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        await agent.act(agentrl.user("?"))
        await self.order(ctx)
        if type(self).failure == "raises":
            type(self).failure = ""
            raise ValueError("bad luck")
        if type(self).failure == "draws":
            random.random()
        agent.reward(1.0)

    async def order(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.effect("order", self.send, guarantee="once")

    def send(self) -> str:
        Orders.orders += 1
        return "ok"


class OrdersByTool(Orders):
    async def order(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.call_tool("order", {}, self.send, external=True, timeout_s=None, guarantee="once")


class AsksBeforeItOrders(Orders):
    async def order(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.effect("order", self.send, guarantee="once", reconcile=lambda: (Orders.orders > 0, "ok"))


@pytest.mark.parametrize(("failure", "reason"), [("raises", "environment_error"), ("draws", "global_random")])
@pytest.mark.parametrize("environment", [Orders, OrdersByTool, AsksBeforeItOrders])
def test_no_attempt_repeats_a_once_effect(environment: type[Orders], failure: str, reason: str) -> None:
    fresh = type("Fresh", (environment,), {"failure": failure, "__module__": __name__})
    Orders.orders = 0
    played = play(fresh, ["a", "b"], attempts=2)
    assert Orders.orders == 1
    if environment is AsksBeforeItOrders:
        assert (played.header.drop_reason, played.header.attempt) == (None, 1)
    else:
        assert (played.header.drop_reason, played.header.attempt) == (reason, 0)
        assert "'order'" in played.told
        assert "reconcile" in played.told


def test_a_program_that_raises_a_cancellation_of_its_own_is_dropped() -> None:
    assert play(Cancelling, []).header.drop_reason == "environment_error"


class Endless(agentrl.Environment):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        while True:
            await ctx.agent("agent").act(agentrl.user("more"))


def test_an_unhandled_limit_commits_a_truncated_episode() -> None:
    played = play(Endless, ["x"] * 4, max_turns=4)
    assert played.header.stop_reason == "max_turns"
    assert played.header.reward == 0.0


class Slow(agentrl.Environment):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.sleep(60.0)


def test_an_episode_that_takes_too_long_is_dropped() -> None:
    played = play(Slow, [], episode_timeout_s=0.02)
    assert played.header.drop_reason == "episode_timeout"


class WrongSeat(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("solvr").act(agentrl.user("x"))


def test_a_wrong_seat_name_lists_the_right_ones() -> None:
    with pytest.raises(EnvironmentDefinitionError, match="'solvr'"):
        play(WrongSeat, [])


class TwoRows(agentrl.Environment):
    """Two turns in one row, then one in another."""

    seats = ("host",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        host = ctx.agent("host")
        await host.act(agentrl.user("first"))
        await host.act(agentrl.user("second"))
        host.restart(agentrl.user("anew"))
        await host.act()
        host.reward(1.5)


def test_rows_rebuilt_from_the_journal_are_what_the_engine_saw() -> None:
    """Token for token, also where the sampled tokens are no text, and their text has other tokens."""
    from agentrl.journal.entries import JournalEntry, encode_body

    replies = [b"a\xff", b"\xc3", b"b"]
    played = play(TwoRows, replies)
    stored = [JournalEntry("e0", 0, f"r#{n}", b"", encode_body(body)) for n, body in enumerate(played.entries)]
    (host,) = assemble_trajectories(stored)
    _, second, third = played.seen
    assert [row.token_ids.tolist() for row in host.rows] == [second, third]
    sampled = [bytes(row.token_ids[row.loss_mask & (row.token_ids != STOP_TOKEN)].tolist()) for row in host.rows]
    assert sampled == [b"a\xff\xc3", b"b"]
    said = PlainChatFormat().parse(list(replies[0])).content
    assert said.encode() != replies[0], "tokenising the text again would give the same tokens: nothing is shown"


class TooLong(agentrl.Environment):
    """Asks for less after a message that did not fit."""

    seats = ("host",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        host = ctx.agent("host")
        await host.act(agentrl.user("begin"))
        with contextlib.suppress(agentrl.LimitReachedError):
            await host.act(agentrl.user("too long " * 9))
        await host.act(agentrl.user("shorter"))
        host.reward(1.0)


def test_a_message_that_does_not_fit_leaves_nothing_behind() -> None:
    played = play(TooLong, ["a", "b"], max_context=64)
    assert (played.header.turns, played.header.reward) == (2, 1.0)
    first, second = played.seen
    assert "too long" not in bytes(token for token in second if token < 256).decode()
    turns = [entry for entry in played.entries if isinstance(entry, TurnEntry)]
    context = np.frombuffer(turns[1].context_ids, np.int32)
    assert len(second) == len(first) + len(b"a") + 1 + len(context)


def test_a_prompt_longer_than_the_context_is_told_apart_from_a_long_episode() -> None:
    played = play(Endless, ["x"], max_context=10)
    assert played.header.drop_reason == "prompt_too_long"
    assert "raise engine.max_context" in played.said
