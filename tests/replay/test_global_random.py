"""Code that draws from `random` and `numpy.random`: seen at the first draw, and the same from every prefix after it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

import agentrl
from agentrl.core.errors import GlobalRandomError
from agentrl.environment.base import Split, TaskSource
from agentrl.environment.containment import NoDraws
from agentrl.journal.entries import EffectEntry
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
    assert "random generators of its own" in report.text


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
    kept, numpy, watch = random.getstate(), np.random.get_state(), NoDraws()
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
