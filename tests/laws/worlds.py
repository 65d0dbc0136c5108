"""Random runs for the laws: environments and configurations that combine the features of the loop, by seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import agentrl
from agentrl.config.run import RunConfig
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from tests.sim.small_run import config_for

TASKS = [Task(id=f"t{number}", data={}) for number in range(6)]
HELD_OUT = [Task(id=f"held-out-{number}", data={}) for number in range(4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A random run: its configuration, its root environment, and what its environments do."""

    config: RunConfig
    environment: type[agentrl.Environment]
    failure_rate: float
    """Share of episodes that raise."""
    names_rewards: bool
    forgets_rewards: bool
    remembers: bool
    """Whether episodes ask for earlier proposals."""
    slow_s: float
    """Longest pause of a root episode before its reward, in seconds."""


def say(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """A digit that depends on the request and on the step of the weights."""
    return [*b"......"[: request.seed % 7], ord(str((request.seed + version.step) % 10)), STOP_TOKEN]


def number_in(text: str) -> int:
    """The digit that `say` wrote, after its dots."""
    digit = text.strip(".")
    return int(digit) if digit.isdecimal() else 0


class Played(agentrl.Environment):
    """What the environments of a world share."""

    world: ClassVar[World]
    """The world whose run is simulated: one process simulates one run at a time."""

    async def talk(self, ctx: agentrl.EpisodeContext, seat: str) -> int:
        total = 0
        for turn in range(2):
            total += number_in((await ctx.agent(seat).act(agentrl.user(f"{seat} {turn} {ctx.task.id}"))).text)
            await ctx.sleep(ctx.rng.random())
            if turn == 0 and isinstance(self, Tree) and ctx.branches_left():
                await ctx.branch(1)
        self.may_fail(ctx)
        if ctx.rng.random() < 0.4:
            ctx.metric("total", float(total))
        if self.world.remembers and seat == self.seats[0]:
            total -= (await ctx.remember(str(total), structure=str(total % 3))).times
        return total

    def may_fail(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.rng.random() < self.world.failure_rate:
            raise RuntimeError("planted")

    def pay(self, ctx: agentrl.EpisodeContext, seat: str, reward: float) -> None:
        if self.world.forgets_rewards and ctx.rng.random() < 0.1:
            return
        if not self.world.names_rewards:
            ctx.agent(seat).reward(reward)
            return
        ctx.agent(seat).reward(reward, name="right")
        ctx.agent(seat).reward(ctx.rng.random(), name="extra")


class One(Played):
    """One seat."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        total = await self.talk(ctx, "solver")
        await ctx.sleep(ctx.rng.random() * self.world.slow_s)
        self.pay(ctx, "solver", float(total > 8))


class Tree(One):
    """One seat, and branches after its first turn."""

    branches = 2


class Two(Played):
    """Two policies in one episode."""

    seats = ("proposer", "solver")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        proposed, solved = await self.talk(ctx, "proposer"), await self.talk(ctx, "solver")
        await ctx.sleep(ctx.rng.random() * self.world.slow_s)
        self.pay(ctx, "proposer", float(proposed > solved))
        self.pay(ctx, "solver", float(solved >= proposed))


class Child(Played):
    """An attempt of the solver at what a parent proposed."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("solver").act(agentrl.user(f"solve {ctx.task.data['total']}"))
        await ctx.sleep(ctx.rng.random() * 2)
        self.may_fail(ctx)
        self.pay(ctx, "solver", float(number_in(turn.text) < 5))


class Parent(Played):
    """The proposer acts in the root, and the solver in the children alone."""

    seats = ("proposer",)
    fan_out: ClassVar = {"Child": 2}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        total = await self.talk(ctx, "proposer")
        children = await ctx.gather(*ctx.spawn(Child, {"total": total}, n=2))
        self.pay(ctx, "proposer", sum(child.reward or 0.0 for child in children))


class Duel(Played):
    """A zero-sum game of the solver against its past versions."""

    seats = ("x", "o")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        numbers = []
        for seat in self.seats:
            numbers.append(number_in((await ctx.agent(seat).act(agentrl.user("play"))).text))
            await ctx.sleep(ctx.rng.random() * self.world.slow_s)
        self.may_fail(ctx)
        difference = float((numbers[0] > numbers[1]) - (numbers[0] < numbers[1]))
        ctx.agent("x").reward(difference)
        ctx.agent("o").reward(-difference)


@agentrl.scorer
async def slow_scores(scored: Sequence[Any]) -> list[float]:
    """Scores of a group that come a second later; those of one task never come."""
    await asyncio.sleep(1.0)
    if scored[0].task.id.endswith("3"):
        raise RuntimeError("planted")
    return [float(place) for place in range(len(scored))]


KINDS: Sequence[type[agentrl.Environment]] = (One, Tree, Two, Parent, Parent, Duel)


def draw(seed: int) -> World:  # noqa: C901  # a list of choices
    """Return the world of a seed."""
    rng = random.Random(seed)

    def chance(share: float) -> bool:
        return rng.random() < share

    kind: type[agentrl.Environment] = rng.choice(KINDS)
    is_tree = kind is Tree
    release = "group" if is_tree else rng.choice(["group", "late", "episode"])
    credit: dict[str, Any] = {"group_size": rng.choice([2, 4]), "release": release}
    compares_in_groups = release == "group" and not is_tree
    if compares_in_groups and chance(0.15):
        credit["advantage"] = "role_mean"
    elif release == "group" and chance(0.3):
        credit["dynamic_sampling"] = True
    adapter = {"lora": {"rank": 2}} if is_tree or chance(0.5) else {}
    settings = {"max_staleness": rng.choice([0, 1, 2] if release == "group" else [1, 2]), **adapter}
    policies: dict[str, Any] = {"solver": {"step_size": 12 if is_tree else 8, **settings}}
    changes: dict[str, Any] = {"steps": rng.choice([3, 5, 8]), "seed": seed, "environment": {"id": "unused"}}
    has_two_learners = kind in (Two, Parent)
    if has_two_learners:
        policies["proposer"] = {"step_size": rng.choice([4, 8]), **settings}
        if chance(0.25):
            changes["freeze"] = [["proposer", 2], ["solver", 2]]
    if kind is Duel:
        choose = rng.choice(["uniform", "prioritized", "latest"])
        policies["past"] = {"kind": "past", "of": "solver", "every": rng.choice([1, 2]), "size": 2, "choose": choose}
        changes["seats"] = {"x": ["solver", "past"], "o": ["past", "solver"]}
    names_rewards = chance(0.3) and kind is not Duel
    if names_rewards:
        credit["reward_weights"] = {"right": 1.0, "extra": 0.5}
    if compares_in_groups and chance(0.45):
        changes["scorers"] = {"slow_scores": {"function": f"{__name__}:slow_scores", "per": "group"}}
        if names_rewards:
            credit["reward_weights"]["slow_scores"] = 1.0
    if chance(0.4):
        changes["environment"]["selection"] = {"replay": 0.5, "retire_after": 2}
    metric_of = "solver/" if has_two_learners else ""
    if chance(0.5):
        changes["evaluation"] = {"tasks": len(HELD_OUT), "every": rng.choice([1, 2]), "attempts": rng.choice([1, 2])}
        if chance(0.6):
            changes["best"] = {"metric": f"{metric_of}evaluation/reward"}
    elif chance(0.3):
        changes["best"] = {"metric": f"{metric_of}reward/mean"}
    changes["max_in_flight"] = rng.choice([24, 64] if kind is Parent else [8, 16, 64])
    return World(
        config=config_for(policies=policies, credit=credit, checkpoint={"every": 1, "versions": 0}, **changes),
        environment=kind,
        failure_rate=0.08 if chance(0.6) else 0.0,
        names_rewards=names_rewards,
        forgets_rewards=chance(0.3),
        remembers=kind in (One, Parent) and chance(0.6),
        slow_s=rng.choice([0.5, 3.0, 8.0]),
    )
