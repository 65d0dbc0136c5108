"""A reward is a real number of a sensible size, wherever it comes from."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError, RewardError
from agentrl.credit.group import Group
from agentrl.credit.group_baselines import leave_one_out
from agentrl.credit.to_go import advantages_to_go
from agentrl.environment.rewards import LARGEST_REWARD, finite_reward
from agentrl.rollout.episode_context import LiveEpisodeContext
from agentrl.testing.execution import POLICY
from tests.unit.episodes import play


class Converts:
    """An object that is no number, and converts to one."""

    def __float__(self) -> float:
        return 1.0


class Unshowable:
    """An object that raises where it is shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


ODD = [np.complex64(1 + 2j), np.timedelta64(5), Unshowable()]


@pytest.mark.parametrize(
    "value", [Converts(), "1.0", b"1", None, 1j, [1.0], np.array([1.0, 2.0]), np.bytes_(b"1"), *ODD]
)
def test_rewards_that_are_no_numbers_are_refused_wherever_they_come_from(value: object) -> None:
    with pytest.raises(RewardError, match="number"):
        finite_reward(value, "here")


@pytest.mark.parametrize("value", [1e30, -1e30, 10**400, math.nan, math.inf, np.float64(-math.inf)])
def test_rewards_of_no_sensible_size_are_refused(value: object) -> None:
    with pytest.raises(RewardError, match="finite"):
        finite_reward(value, "here")
    assert finite_reward(LARGEST_REWARD, "here") == -finite_reward(-LARGEST_REWARD, "here") == LARGEST_REWARD


def test_a_reward_that_is_a_long_text_is_not_quoted_whole() -> None:
    with pytest.raises(RewardError) as refused:
        finite_reward("x" * 1_000_000, "here")
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "value", [1, True, 0.5, Fraction(1, 2), np.float32(0.5), np.int64(1), np.bool_(True), np.array(0.5), np.array([1])]
)
def test_real_numbers_are_rewards(value: object) -> None:
    assert 0.0 <= finite_reward(value, "here") <= 1.0


class Counted(agentrl.Environment):
    """Rewards each turn by name until a limit ends it, or the first turn is refused."""

    seats = ("agent",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        for turn in range(9):
            text = (await agent.act(agentrl.user("?"))).text
            if not agent.gate("bad" not in text, penalty=-3.0):
                return
            if turn or "silent" not in text:
                agent.reward({"correct": 1.0, "short": 0.1}, turn=turn)


class Fined(Counted):
    truncated_reward = -1.0


@pytest.mark.parametrize(
    ("environment", "reply", "reward"), [(Counted, "silent", 0.0), (Counted, "bad", -3.0), (Fined, "silent", -1.0)]
)
def test_rewards_that_agentrl_gives_need_no_weight(environment: type[Counted], reply: str, reward: float) -> None:
    """Dropping those episodes would leave out the worst ones."""
    played = play(environment, [reply], max_turns=1, reward_weights={"correct": 1.0, "short": 0.2})
    assert played.header.drop_reason is None, played.told
    assert played.header.trajectories[0].reward == reward


def test_a_truncated_reward_replaces_those_of_each_turn_and_name() -> None:
    played = play(Fined, ["a", "b", "c"], max_turns=3, reward_weights={"correct": 1.0, "short": 0.2, "reward": 5.0})
    trajectory = played.header.trajectories[0]
    assert trajectory.reward == -5.0, "it has the weight of other rewards without a name"
    assert dict(trajectory.turn_rewards) == {0: 0.0, 1: 0.0, 2: 0.0}
    assert dict(trajectory.named_rewards) == {"correct": 0.0, "short": 0.0, "reward": -1.0}
    to_go = advantages_to_go(leave_one_out, [-1.0, 0.0], [trajectory.turn_rewards, ()], ["a", "b"])
    assert to_go[0] == (-1.0, -1.0, -1.0, -1.0)


def test_a_header_has_rewards_before_their_weights() -> None:
    """Later weights, such as those of a resumed run, say nothing of a reward that was given before."""

    class Right(agentrl.Environment):
        seats = ("agent",)

        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            agent = ctx.agent("agent")
            await agent.act(agentrl.user("?"))
            agent.reward(1.0)

    for weight in (1.0, 0.25, 0.0):
        trajectory = play(Right, ["a"], reward_weights={"reward": weight, "style": 1.0}).header.trajectories[0]
        assert trajectory.reward == weight
        group = Group(rewards=(weight,), episodes=("e0",), named_rewards=(trajectory.named_rewards,))
        assert group.by_name() == {"reward": (1.0,)}


@pytest.mark.parametrize("turn", [True, np.bool_(False), 1, -1, 0.5])
def test_a_reward_for_what_is_no_turn_is_refused_at_the_call(turn: Any) -> None:
    class Wrong(Counted):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            agent = ctx.agent("agent")
            await agent.act(agentrl.user("?"))
            agent.reward(1.0, turn=turn)

    played = play(Wrong, ["a"])
    assert played.header.drop_reason == "bad_reward"
    assert f"a reward for turn {turn!r}" in played.said


def test_numbers_of_numpy_count_turns_agents_and_children() -> None:
    class Numbered(Counted):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            agent = ctx.agent("agent", np.int64(1))  # type: ignore[arg-type]
            assert agent is ctx.agent("agent", 1)
            await agent.act(agentrl.user("?"))
            agent.reward(1.0, turn=np.int64(0))  # type: ignore[arg-type]

    played = play(Numbered, ["a"])
    assert [each.index for each in played.header.trajectories] == [1], played.said
    assert played.header.trajectories[0].turn_rewards == ((0, 1.0),)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ctx: ctx.agent("agent", True), "an index that is a whole number of at least 0, not True"),
        (lambda ctx: ctx.agent("agent", -1), "an index that is a whole number of at least 0, not -1"),
        (lambda ctx: ctx.spawn(Counted, {}, n=True), "n that is a whole number of at least 0, not True"),
        (lambda ctx: ctx.spawn(Counted, {}, n=-3), "n that is a whole number of at least 0, not -3"),
        (lambda ctx: ctx.sleep(True), "seconds as a number, not True"),
    ],
)
def test_what_is_no_number_is_refused_at_the_call(call: Callable[[Any], Any], message: str) -> None:
    class Wrong(Counted):
        fan_out: ClassVar[dict[str, int]] = {"Counted": 2}

        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            await ctx.agent("agent").act(agentrl.user("?"))
            result = call(ctx)
            if inspect.isawaitable(result):
                await result

    with pytest.raises(EnvironmentDefinitionError, match=message):
        play(Wrong, ["a"])


def test_what_a_tool_did_before_an_agent_acted_is_counted() -> None:
    class Prepared(Counted):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            def broken() -> str:
                raise KeyError("setup")

            for _ in range(3):
                await ctx.call_tool("setup", {}, broken, external=True, timeout_s=None)
            agent = ctx.agent("agent")
            await agent.act(agentrl.user("?"))
            await ctx.call_tool("look", {}, broken, external=True, timeout_s=None)
            agent.reward(1.0)
            assert isinstance(ctx, LiveEpisodeContext)
            counted.append(ctx.counted()[POLICY].metrics["tool/error"])

    counted: list[float] = []
    assert play(Prepared, ["a"]).metrics["tool/error"] == 4.0
    assert counted == [4.0]
