"""Code that draws from `random` and `numpy.random`: detected, and then the same from every prefix."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from numpy.random.mtrand import get_bit_generator, set_bit_generator

import agentrl
from agentrl.core.errors import GlobalRandomError
from agentrl.core.records import PolicyVersion
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.containment import GlobalRandomState, GuardedAwaitable, RandomDrawDetector
from agentrl.environment.context import Resource
from agentrl.environment.environment import Split, TaskSource
from agentrl.journal.entries import EffectEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.testing.execution import plain_rollout_settings, wire_dispatcher
from agentrl.testing.virtual_time import simulate
from tests.replay.executions import Stage, digits_among_draws, resumed_everywhere
from tests.unit.episodes import play


class Dealer(agentrl.Environment):
    """Deals from the global generators: in its code, in branches, and, which is remembered, in an effect."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        hand = [random.random(), float(np.random.randn())]
        for _ in range(3):
            await ctx.effect("shuffle", lambda: random.shuffle([random.random(), float(np.random.randn())]))
            hand += [random.gauss(0, 1), float(np.random.randn())]
            await agent.act(agentrl.user(f"{sum(hand)!r}"))

        async def player(number: int) -> float:
            await ctx.sleep(number)
            drawn = random.random() + float(np.random.randn())
            await ctx.agent("agent", number).act(agentrl.user(f"{drawn!r}"))
            return drawn + random.random()

        agent.reward(sum(hand) + sum(await ctx.gather(*map(player, (1, 2, 3)))))


def test_code_that_draws_is_seen_and_comes_back_from_every_prefix_under_generators_of_its_own() -> None:
    Dealer.own_random = False
    stage = Stage(environment=Dealer, script=digits_among_draws)
    assert isinstance(stage.play().error, GlobalRandomError)
    whole, *resumed = resumed_everywhere(stage)
    for again in resumed:
        assert again.error is None
        assert again.transcript == whole.transcript


class Watched(agentrl.Environment):
    """Draws at the place its task names."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        where = ctx.task.data["where"]
        await ctx.effect("draw", random.random)
        await ctx.agent("agent").act(agentrl.user("?"))

        async def branch(number: int) -> None:
            await ctx.sleep(0.5 if number else 30.0)
            if where == "branch" and number:
                np.random.random()

        try:
            await ctx.gather(branch(0), branch(1))
            if where == "own":
                random.shuffle([1, 2, 3])
                await ctx.sleep(1.0)
        except Exception:  # noqa: BLE001, S110 - as programs do that mean well
            pass
        random.seed(3) if where == "end" else ctx.rng.random()
        ctx.agent("agent").reward(1.0)


@pytest.mark.parametrize("where", ["own", "branch", "end", "nowhere"])
def test_a_draw_is_seen_wherever_it_is_made_whatever_the_program_catches(where: str) -> None:
    Watched.own_random = False
    played = Stage(environment=Watched, data={"where": where}, script=digits_among_draws).play()
    assert isinstance(played.error, GlobalRandomError) is (where != "nowhere")
    assert Watched.own_random is (where != "nowhere")
    assert any(isinstance(body, EffectEntry) for body in played.bodies.values())


def test_an_unseen_draw_is_detected_when_it_is_executed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.runner.CHECKED_EPISODES", 0)
    Watched.own_random = False
    stage = Stage(environment=Watched, data={"where": "own"}, script=digits_among_draws)
    unseen = stage.play()
    assert unseen.error is None
    assert not Watched.own_random
    assert isinstance(stage.play(unseen.entries).error, GlobalRandomError)
    assert Watched.own_random


def test_each_environment_is_checked_in_its_first_new_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.runner.CHECKED_EPISODES", 2)
    Watched.own_random = False
    stage = Stage(environment=Watched, script=digits_among_draws)

    async def detected(*wheres: str) -> list[bool]:
        settings = plain_rollout_settings(
            max_turns=9, max_context=1 << 16, tool_timeout_s=60.0, episode_timeout_s=3600.0
        )
        engine = ScriptedEngine(digits_among_draws, versions={"policy": PolicyVersion("policy", 0, 0)})
        _, runner = wire_dispatcher(Watched, engine, MemoryJournal(), settings, [], policy="policy")
        found = []
        for number, where in enumerate(wheres):
            spec = replace(stage.spec, episode_id=f"e{number}", task=agentrl.Task(id="t", data={"where": where}))
            try:
                await asyncio.get_running_loop().create_task(runner.run(spec, Watched))
                found.append(False)
            except GlobalRandomError:
                found.append(True)
        return found

    assert simulate(lambda: detected("nowhere", "nowhere", "own"), seed=0) == [False, False, False]
    assert simulate(lambda: detected("nowhere", "own"), seed=0) == [False, True]


class Dice(agentrl.ToolEnvironment):
    """A plain tool that draws."""

    made: ClassVar[int] = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.pips = 0

    @agentrl.tool
    def roll(self) -> str:
        """Roll a die; who asks is told only whether it was rolled."""
        self.pips += random.randint(1, 6)
        return "rolled"

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(self.pips)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        return [agentrl.Task(id="t", data={"question": "Roll."})]


ROLL = '<tool_call>{"name": "roll", "arguments": {}}</tool_call>'


def test_the_first_episode_begins_again_and_those_after_it_do_not() -> None:
    Dice.made, Dice.own_random = 0, False
    first, second = (play(Dice, [ROLL, *second, "done"]) for second in ([ROLL, ROLL], [ROLL]))
    assert (first.header.attempt, second.header.attempt, Dice.made) == (1, 0, 3)
    assert first.header.committed


def test_the_checker_proves_it_and_says_so() -> None:
    Dice.own_random = False
    report = agentrl.check_environment(Dice)
    assert report.passed, report.text
    assert "draws from `random` or `numpy.random`" in report.text


WAYS: list[Callable[[int], object]] = [
    lambda _: random.random(),
    lambda _: random.getrandbits(1),
    random.seed,
    lambda _: [random.random() for _ in range(312)],
    lambda _: np.random.random(),
    lambda _: [np.random.randn(), np.random.randn()],
    np.random.seed,
    lambda _: np.random.bytes(2496),
]


@pytest.mark.parametrize("move", WAYS)
def test_every_way_to_move_a_global_generator_is_seen(move: Callable[[int], object]) -> None:
    kept, numpy, watch = random.getstate(), np.random.get_state(), RandomDrawDetector()
    try:
        for number in range(3):
            watch.enter()
            assert not watch.exit()
            watch.enter()
            move(number)
            assert watch.exit()
    finally:
        random.setstate(kept)
        np.random.set_state(numpy)


@pytest.mark.parametrize("generator", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_every_draw_from_any_bit_generator_is_seen(generator: str) -> None:
    kept, watch = get_bit_generator(), RandomDrawDetector()
    made = getattr(np.random, generator)(0)
    draws = [*[lambda: np.random.bytes(4)] * 3, *[np.random.random] * 6]  # of Philox, only each fourth counts up
    try:
        set_bit_generator(made)
        for draw in draws:
            watch.enter()
            assert not watch.exit()
            watch.enter()
            draw()
            assert watch.exit()
    finally:
        set_bit_generator(kept)


def test_a_program_that_is_abandoned_in_an_effect_leaves_the_generators_of_others_alone() -> None:
    async def effect(steps: list[GuardedAwaitable]) -> None:
        steps[0].suspend_guard()
        try:
            await asyncio.Event().wait()
        finally:
            steps[0].resume_guard()

    async def awaited(steps: list[GuardedAwaitable]) -> None:
        await steps[0]

    async def main() -> None:
        steps: list[GuardedAwaitable] = []
        steps.append(GuardedAwaitable(GlobalRandomState(1), lambda: effect(steps)))
        task = asyncio.get_running_loop().create_task(awaited(steps))
        await asyncio.sleep(0)
        before = random.getstate(), get_bit_generator()
        steps[0].abandon()
        task.cancel()
        await asyncio.wait({task})
        assert (random.getstate(), get_bit_generator()) == before

    asyncio.run(main())


class Minesweeper:
    """A game of somebody else's: it seeds the global generators in `reset`, and draws from them in later moves."""

    def __init__(self) -> None:
        self.moves = 0

    def reset(self, seed: int) -> str:
        random.seed(seed)
        np.random.seed(seed)
        return "begin"

    def step(self, text: str) -> list[float]:
        self.moves += 1
        return [random.randrange(1 << 30), float(np.random.randn()), float(np.random.rand()), self.moves]

    async def later(self, text: str) -> list[float]:
        before = self.step(text)
        await asyncio.sleep(0.1)
        return [*before, *self.step(text)]


def alone(seed: int) -> list[list[float]]:
    """What the game shows when nothing else runs."""
    own = GlobalRandomState(0)
    with own.swapped_in():
        game = Minesweeper()
        game.reset(seed)
        return [game.step(""), [*game.step(""), *game.step("")], game.step("")]


class Sweeps(agentrl.Environment):
    """Plays two of them by turns, each by the seed of its task."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent, level = ctx.agent("agent"), ctx.task.data["level"]
        games = {seed: ctx.resource(Minesweeper, level=level) for seed in ctx.task.data["seeds"]}
        shown: dict[int, list[list[float]]] = {seed: [] for seed in games}
        for seed, game in games.items():
            await game.call("reset", seed)
        for method in ("step", "later", "step"):
            for seed, game in games.items():
                turn = await agent.act(agentrl.user(str(shown)))
                shown[seed].append(await game.call(method, turn.text))
        agent.reward(float(shown == {seed: alone(seed) for seed in games}))


@pytest.mark.parametrize("level", ["replay", "pinned"])
def test_a_game_that_seeds_the_global_generators_plays_what_it_plays_alone(level: str) -> None:
    stage = Stage(environment=Sweeps, data={"level": level, "seeds": [3, 11]}, script=digits_among_draws)
    whole = stage.play()
    assert whole.header is not None
    assert whole.header.reward == 1.0
    for cut in range(1, len(whole.entries) + 1) if level == "replay" else ():
        again = stage.play(whole.entries[:cut], seed=cut)
        assert again.error is None, again.error
        assert again.transcript == whole.transcript


class Nested:
    """Calls itself through the journal."""

    def __init__(self, itself: Callable[[], Resource]) -> None:
        self._itself = itself

    def draw(self) -> int:
        return random.randrange(1 << 30)

    async def twice(self) -> list[int]:
        return [self.draw(), await self._itself().call("draw"), self.draw()]


class CallsItself(agentrl.Environment):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        made: list[Resource] = []
        made.append(ctx.resource(lambda: Nested(lambda: made[0]), level="replay"))
        drawn = await made[0].call("twice")
        await ctx.agent("agent").act(agentrl.user(str(drawn)))
        ctx.agent("agent").reward(float(len(set(drawn))))


def test_a_resource_that_calls_itself_leaves_the_generators_of_others_alone() -> None:
    before = random.getstate(), get_bit_generator()
    for again in resumed_everywhere(Stage(environment=CallsItself)):
        assert again.error is None, again.error
        assert again.header is not None
        assert again.header.reward == 3.0
    assert (random.getstate(), get_bit_generator()) == before
