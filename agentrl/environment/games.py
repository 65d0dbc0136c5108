"""Games of several players: a seat per player, one asked at a time, each told only what is theirs to see.

Owns: `GameEnvironment`: turn-taking, limits, rewards by seat, and the game as a `replay` resource.
Does not own: how a library's games are reset, shown and stepped (`pettingzoo_games.py`, `textarena_games.py`).
Invariants: what a call on the game draws is a function of `task.data["seed"]` and of how many calls there were before,
so a group plays one start and has the same luck; what a player reads goes to that player's seat and to no other; an
illegal end scores below every legal one, or the run stops by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

from agentrl.core.errors import EnvironmentDefinitionError, EpisodeError
from agentrl.core.records import Message, Task
from agentrl.environment.base import (
    Environment,
    EpisodeContext,
    LimitReachedError,
    Resource,
    Split,
    TaskSource,
    system,
    user,
)
from agentrl.environment.gym import SeedTasks


class Position(TypedDict):
    """The state of a game after a call on it: JSON data, as the journal holds it."""

    player: int | None
    """The player to move, as an index into `seats`; None if the game is over."""
    observation: str
    """That player's present observation."""
    legal: bool
    """Whether the last action was."""
    rewards: list[float]
    """Reward of each player so far."""
    illegal: list[int]
    """Players whose illegal actions ended the game."""
    truncated: bool
    """The game's own limit ended it."""


class Game(ABC):
    """A library's game, made when it is reset; what its methods do is a function of the task and the texts so far."""

    @abstractmethod
    def reset(self) -> Position:
        """Make and start it."""

    @abstractmethod
    def step(self, text: str) -> Position:
        """Do what the player who was asked says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GameEpisode:
    """A finished game, as `GameEnvironment.rewards` sees it; players in the order of `seats`."""

    rewards: tuple[float, ...]
    """Reward of each player."""
    illegal: tuple[int, ...]
    """Players whose illegal actions ended it."""
    terminated: bool
    """Whether the game ended by its own rules rather than at a limit."""


class GameEnvironment(Environment):
    """Several agents play one game, a seat each. Bind two seats to one policy for self-play."""

    # --- override these ---------------------------------------------------------------------------------------------

    instructions: ClassVar[str] = ""
    """The system message of every seat: the rules, and how to answer; none where empty."""
    max_turns: ClassVar[int] = 256
    """Turns of all players together, after which the episode is truncated."""
    remembers: ClassVar[bool] = True
    """Whether a player's conversation continues from turn to turn. False: each turn starts from the present
    observation, which must then contain all a player needs to know; rows stay as short as possible."""
    illegal_reward: ClassVar[float] = -2.0
    """Reward of a player whose illegal actions ended the game. Must lie below every legal outcome: a policy that earns
    more by breaking the format than by losing never stops breaking it."""

    def rewards(self, task: Task, episode: GameEpisode) -> Sequence[float]:
        """A finite number per player; default: what the game gave, or `illegal_reward`."""
        given = enumerate(episode.rewards)
        return [self.illegal_reward if player in episode.illegal else reward for player, reward in given]

    def begin(self, task: Task, env: Any) -> None:
        """Bring the game, which was just reset, to where the task begins; default: it is there. From positions within
        the game is learned what games between players of one kind seldom come to."""

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """One task per seed of the game; no training seed is held out. Distinct seeds may start from the same
        position."""
        return SeedTasks(split, seed)

    # --- machinery --------------------------------------------------------------------------------------------------

    @abstractmethod
    def game(self, task: Task) -> Game:
        """The task's game, not yet reset."""

    def close(self) -> None:
        """Release what the game holds; called at the end, whatever happened."""

    async def run(self, ctx: EpisodeContext) -> None:
        """Ask whose turn it is until the game is over or a limit is reached."""
        task = ctx.task
        game = ctx.resource(lambda: self.game(task), level="replay", seed=int(task.data["seed"]))
        try:
            episode = await self._play(ctx, game)
            values = self._checked_rewards(ctx.task, episode)
        finally:
            self.close()
        for seat, value in zip(self.seats, values, strict=True):
            agent = ctx.agent(seat)
            if agent.turns:  # who was never asked has nothing to be rewarded for
                agent.reward(value)

    async def _play(self, ctx: EpisodeContext, game: Resource) -> GameEpisode:
        position: Position = await game.call("reset")
        if position["player"] is None:
            raise EnvironmentDefinitionError(
                f"{type(self).__name__}, task {ctx.task.id!r}: the game is over before anybody is asked; mend `begin`"
            )
        turns = 0
        limit: LimitReachedError | None = None
        while limit is None and position["player"] is not None:
            agent = ctx.agent(self.seats[position["player"]])
            begins = not (self.remembers and agent.turns)
            first = [system(self.instructions)] if self.instructions and begins else []
            messages: list[Message] = [*first, user(position["observation"])]
            if begins and agent.turns:
                agent.restart()
            try:
                turn = await agent.act(*messages)
            except LimitReachedError as error:
                limit = error
                continue
            turns += 1
            position = await game.call("step", turn.text)
            if not position["legal"]:
                ctx.metric("turns/illegal", 1.0)
            if position["player"] is not None and turns >= self.max_turns:
                limit = LimitReachedError(f"{type(self).__name__}: no time left", stop_reason="max_turns")
        if position["truncated"]:
            limit = LimitReachedError(f"{type(self).__name__}: the game's own limit", stop_reason="max_turns")
        if limit is not None:
            ctx.truncate(limit)
        return GameEpisode(
            rewards=tuple(position["rewards"]), illegal=tuple(position["illegal"]), terminated=limit is None
        )

    def _checked_rewards(self, task: Task, episode: GameEpisode) -> Sequence[float]:
        name = type(self).__name__
        values = self.rewards(task, episode)
        if values is None or len(values) != len(self.seats):
            raise EnvironmentDefinitionError(
                f"{name}.rewards returned {values!r}; return a number for each of {self.seats}"
            )
        for player, value in enumerate(values):
            if player not in episode.illegal and value <= self.illegal_reward:
                raise EnvironmentDefinitionError(
                    f"{name}, task {task.id!r}: a legal end scores {value:g} for seat {self.seats[player]!r}, no more "
                    f"than breaking the format ({self.illegal_reward:g}), which would then be learned; set "
                    f"{name}.illegal_reward below the lowest reward of a legal end"
                )
        return values


def check_players(environment: GameEnvironment, players: int) -> None:
    """Raise `EnvironmentDefinitionError` unless there is a seat for each player of the game."""
    if players != len(environment.seats):
        raise EnvironmentDefinitionError(
            f"{type(environment).__name__}: the game has {players} players and the class {len(environment.seats)} "
            f"seats ({', '.join(environment.seats)}); name one seat per player"
        )


def check_text(environment: GameEnvironment, shown: Any) -> str:
    """The text that `render` returned; refuses anything else."""
    if not isinstance(shown, str):
        raise EpisodeError(
            f"{type(environment).__name__}.render returned {type(shown).__name__}; return a str",
            reason="environment_error",
        )
    return shown
