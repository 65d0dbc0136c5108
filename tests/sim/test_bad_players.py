"""What one seat, policy or endpoint does wrong is told with its name, and costs its own episodes alone."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.core.records import Task
from agentrl.environment.games import Game, GameEnvironment, GamePosition
from agentrl.journal.port import EpisodeEnd
from agentrl.observe.alarms import find_alarms
from agentrl.observe.run_state import RunDisplaySettings, RunState
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for

pytestmark = pytest.mark.sim

BROKEN = 3
"""The task that goes wrong."""
GAMES = [Task(id=f"game-{seed}", data={"seed": seed}) for seed in range(6)]
PLAYERS: dict[str, Any] = {"white": {"step_size": 8}, "black": {"step_size": 8}}
SEATS = {"x": "white", "o": "black"}


class Board(Game):
    """Four moves, then x has won; some boards fall apart at the third, and an illegal move loses."""

    def __init__(self, *, falls_apart: bool) -> None:
        self._falls_apart = falls_apart
        self._moves = 0
        self._broke_off: int | None = None

    def reset(self) -> GamePosition:
        return self._position()

    def step(self, text: str) -> GamePosition:
        if text == "?":
            self._broke_off = self._moves % 2
        self._moves += 1
        if self._falls_apart and self._moves == 3:
            raise ZeroDivisionError("the board fell off")
        return self._position()

    def _position(self) -> GamePosition:
        over = self._moves == 4 or self._broke_off is not None
        return GamePosition(
            player=None if over else self._moves % 2,
            observation="Your move.",
            legal=self._broke_off is None,
            rewards=[1.0, -1.0] if over else [0.0, 0.0],
            illegal=[] if self._broke_off is None else [self._broke_off],
            truncated=False,
        )


class Brawl(GameEnvironment):
    """Two players."""

    seats: ClassVar[tuple[str, ...]] = ("x", "o")

    def game(self, task: Task) -> Game:
        return Board(falls_apart=task.data["seed"] == BROKEN)


class Extra(agentrl.Environment):
    """Nobody was told of it."""

    seats = ("referee",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        raise AssertionError("nobody holds the seat")


class Surprise(agentrl.Environment):
    """Spawns what it does not declare."""

    seats = ("x", "o")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            await ctx.agent(seat).act(agentrl.user("Your move."))
            ctx.agent(seat).reward(ctx.rng.random())
        if ctx.task.data["seed"] == BROKEN:
            await ctx.gather(*ctx.spawn(Extra, {}, n=2))


def dropped(run: SmallRun) -> list[EpisodeEnd]:
    return [row for row in run.journal.records if isinstance(row, EpisodeEnd) and row.header.drop_reason]


def check_all_else_went_on(run: SmallRun, ends: list[EpisodeEnd]) -> None:
    assert ends
    assert {end.spec.task.data["seed"] for end in ends} == {BROKEN}
    assert [len(batch.units) for batch in run.trainer.batches] == [8] * 6


def test_a_game_that_raises_in_the_middle(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(policies=PLAYERS, seats=SEATS, steps=3), environment=Brawl, tasks=GAMES)
        await run.run()
        ends = dropped(run)
        check_all_else_went_on(run, ends)
        for end in ends:
            assert end.header.drop_reason == "environment_error"
            assert "ZeroDivisionError: the board fell off at " in end.detail
            name = f"{end.spec.episode_id}.{end.header.attempt}"
            assert end.detail.endswith(f" (episode {name}, after a turn of seat 'x', policy 'white')")

    simulated_loop.run(main)


def test_a_seat_of_an_undeclared_child_that_is_bound_to_no_policy(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(policies=PLAYERS, seats=SEATS, steps=3), environment=Surprise, tasks=GAMES)
        await run.run()
        ends = dropped(run)
        check_all_else_went_on(run, ends)
        for end in ends:
            assert (
                "seat 'Extra.referee' is bound to no policy; add it to [seats] (policies: black, white)" in end.detail
            )
            assert f"(episode {end.spec.episode_id}." in end.detail

    simulated_loop.run(main)


def test_an_agent_that_never_moves_legally_is_named_and_the_other_plays_on(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        said = {"white": [ord("a"), STOP_TOKEN], "black": [ord("?"), STOP_TOKEN]}
        at_once = {name: {"step_size": 8, "max_staleness": 0} for name in PLAYERS}
        config = config_for(policies=at_once, seats=SEATS, steps=5)
        run = SmallRun(
            config=config, environment=Brawl, tasks=GAMES[:3], script=lambda request, policy, version: said[policy]
        )
        await run.run()
        assert not dropped(run)
        state = RunState(plan=RunDisplaySettings(max_staleness={"white": 1, "black": 1}))
        for policy, step, metrics in run.seen.steps:
            state.record(policy, step, metrics)
            assert metrics["reward/mean"] == (1.0 if policy == "white" else Brawl.illegal_reward)
        raised = [alarm for alarm in find_alarms(state) if alarm.name == "illegal_output"]
        assert [alarm.policy for alarm in raised] == ["black"]
        assert "turns/illegal" in raised[0].text

    simulated_loop.run(main)
