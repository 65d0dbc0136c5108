"""`gymnasium.Env` as an environment: a discrete or text action is a turn, the rendered observation its next message.

Owns: `GymEnvironment`, the methods a user writes (`make`, `render`, `parse`), the game as a `replay` resource, and
ready arguments of `gym_environment` for the toy-text games (`FROZEN_LAKE`, `CLIFF_WALKING`, `TAXI`, `BLACKJACK`).
Invariants: the episode's start is a function of `task.data["seed"]` alone, so a group plays one start; every call on
the game runs under its own global random state (`random` and `numpy.random`), swapped in and out; an episode that
ends by an illegal action scores below every legal end, or the run stops with an error.
"""

from __future__ import annotations

import math
import reprlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from agentrl.core.errors import EnvironmentDefinitionError, EpisodeError, RewardError
from agentrl.core.records import Task
from agentrl.core.text import valid_unicode
from agentrl.environment.context import Agent, EpisodeContext, LimitReachedError, Resource, system, user
from agentrl.environment.environment import Environment, Split, TaskSource
from agentrl.environment.rewards import finite_reward
from agentrl.environment.tasks import GameSeedTasks

if TYPE_CHECKING:
    import gymnasium

    Game = gymnasium.Env[Any, Any]
    Make = Callable[[Task], Game]
    Render = Callable[[Any, Mapping[str, Any], Game], str]
    Parse = Callable[[str, Game], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GymEpisode:
    """A finished game, passed to `GymEnvironment.reward`."""

    rewards: tuple[float, ...]
    """One reward per legal action."""
    terminated: bool
    """Whether the game ended by its own rules."""
    illegal: bool
    """Whether an illegal action ended the game. If neither this nor `terminated`, a limit ended it."""
    truncated: bool = False
    """Whether a limit ended the game, or cut the agent's last turn."""


class GymEnvironment(Environment):
    """An environment in which one agent plays a `gymnasium.Env`.

    Example:
        class Lake(agentrl.GymEnvironment):
            def make(self, task):
                return gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")

            def render(self, observation, info, env):
                return env.render()

            def parse(self, text, env):
                return {"left": 0, "down": 1, "right": 2, "up": 3}.get(text.strip())
    """

    seats = ("player",)

    # --- override these ---------------------------------------------------------------------------------------------

    instructions: ClassVar[str] = ""
    """System message: the rules, and the format of an answer. Empty: no system message."""
    max_turns: ClassVar[int] = 64
    """Turns after which the episode is truncated, in addition to the game's own time limit."""
    illegal_actions: ClassVar[int] = 1
    """Number of illegal actions that ends the episode. Below it, `illegal_text` is put before the observation."""
    illegal_text: ClassVar[str] = "That is not a legal action.\n"
    illegal_reward: ClassVar[float] = -1.0
    """Reward of an episode that illegal actions ended. Must lie below every legal outcome: a policy that earns more by
    breaking the format than by losing never stops breaking it."""

    env: Game
    """The game, available after its reset; `reward` may read it."""

    @abstractmethod
    def make(self, task: Task) -> Game:
        """Make a fresh game; it is reset with `task.data["seed"]` and closed at the end."""

    @abstractmethod
    def render(self, observation: Any, info: Mapping[str, Any], env: Game) -> str:
        """Return the agent's observation, after the reset and after every step that does not end the game."""

    @abstractmethod
    def parse(self, text: str, env: Game) -> Any:
        """Return the action that a turn's text names. None, or an action outside `env.action_space`, is illegal. A turn
        that a limit on tokens cut is illegal too, and is not parsed.

        The action may have another number type than the space: `[0.5]` is an action of a `Box` of float32.
        """

    def reward(self, task: Task, episode: GymEpisode) -> float:
        """Return a finite reward for the whole episode. Default: the sum of the game's rewards."""
        return self.illegal_reward if episode.illegal else sum(episode.rewards)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """One task per seed of the game; no training seed is held out. Distinct seeds may start from the same
        position."""
        return GameSeedTasks(split, seed)

    # --- machinery --------------------------------------------------------------------------------------------------

    async def run(self, ctx: EpisodeContext) -> None:
        """Play until the game ends, `illegal_actions` is reached, or a limit is reached."""
        game = ctx.resource(lambda: SeededGame(self, ctx.task), level="replay", seed=int(ctx.task.data["seed"]))
        agent = ctx.agent(self.seats[0])
        try:
            episode = await self._play(ctx, game, agent)
            agent.reward(self._checked_reward(ctx.task, episode))
        finally:
            if hasattr(self, "env"):
                self.env.close()

    async def _play(self, ctx: EpisodeContext, game: Resource, agent: Agent) -> GymEpisode:
        messages = [system(self.instructions)] if self.instructions else []
        messages.append(user(await game.call("reset")))
        rewards: list[float] = []
        illegal, terminated = 0, False
        limit: LimitReachedError | None = None
        while limit is None and not terminated and illegal < self.illegal_actions:
            try:
                turn = await agent.act(*messages)
            except LimitReachedError as error:
                limit = error
                continue
            step = await game.call("step", None if turn.is_cut else turn.text)
            messages = [user(step["observation"])]
            if step["legal"]:
                rewards.append(step["reward"])
            else:
                illegal += 1
                ctx.metric("turns/illegal", 1.0)
            terminated, is_late = step["terminated"], step["truncated"] or len(agent.turns) >= self.max_turns
            if is_late and not terminated and illegal < self.illegal_actions:
                limit = LimitReachedError(f"{type(self).__name__}: no time left", stop_reason="max_turns")
        if limit is not None:
            ctx.truncate(limit)
        is_illegal = illegal >= self.illegal_actions
        is_truncated = limit is not None or (bool(agent.turns) and agent.turns[-1].is_cut)
        return GymEpisode(rewards=tuple(rewards), terminated=terminated, illegal=is_illegal, truncated=is_truncated)

    def _checked_reward(self, task: Task, episode: GymEpisode) -> float:
        value = self.reward(task, episode)
        if value is None:
            raise RewardError(f"{type(self).__name__}.reward returned None; return a number")
        if not episode.illegal and value <= self.illegal_reward:
            raise EnvironmentDefinitionError(
                f"{type(self).__name__}, task {task.id!r}: a legal end scores {value:g}, no more than breaking the "
                f"format ({self.illegal_reward:g}), which would then be learned; set "
                f"{type(self).__name__}.illegal_reward below the lowest reward of a legal end"
            )
        return value


class SeededGame:
    """A game whose calls return JSON data."""

    def __init__(self, environment: GymEnvironment, task: Task) -> None:
        self._environment = environment
        self._task = task
        self._observation = ""

    def reset(self) -> str:
        """Make and reset the game; returns the first observation."""
        environment, seed = self._environment, int(self._task.data["seed"])
        environment.env = environment.make(self._task)
        observation, info = environment.env.reset(seed=seed)
        self._observation = self._render(observation, info)
        return self._observation

    def step(self, text: str | None) -> dict[str, Any]:
        """Apply `text`, None for a cut turn; an illegal action changes nothing."""
        environment = self._environment
        parsed = None if text is None else environment.parse(text, environment.env)
        action = cast_action(environment.env.action_space, parsed)
        if action is None or not environment.env.action_space.contains(action):
            shown = environment.illegal_text + self._observation
            refused = {} if parsed is None else {"refused": describe_action(parsed)}
            return {"legal": False, "observation": shown, "terminated": False, "truncated": False, **refused}
        observation, reward, terminated, truncated, info = environment.env.step(action)
        # No agent sees the final observation, and some games cannot render it.
        self._observation = "" if terminated or truncated else self._render(observation, info)
        return {
            "legal": True,
            "observation": self._observation,
            "reward": finite_reward(reward, f"step() of {type(environment.env).__name__}"),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
        }

    def _render(self, observation: Any, info: Mapping[str, Any]) -> str:
        text = self._environment.render(observation, info, self._environment.env)
        if not isinstance(text, str):
            raise EpisodeError(
                f"{type(self._environment).__name__}.render returned {type(text).__name__}; return a str "
                "(env.render() gives one only with render_mode='ansi')",
                reason="environment_error",
            )
        return valid_unicode(text)


def cast_action(space: gymnasium.Space[Any] | None, action: Any) -> Any:
    """Return an action in its space's types: lists become arrays, and numbers get the space's type. Floats may be
    rounded. An action of which something else would be lost keeps its own type, which is outside the space; one that is
    no number becomes None.

    Example:
        >>> from gymnasium.spaces import Box, Discrete
        >>> cast_action(Box(-1.0, 1.0, (1,)), [0.5]), cast_action(Discrete(3), 2.0), cast_action(Discrete(3), 2.5)
        (array([0.5], dtype=float32), 2, array(2.5))
    """
    import numpy
    from gymnasium import spaces

    if isinstance(space, spaces.Dict) and isinstance(action, Mapping):
        return {key: cast_action(space.spaces.get(key), value) for key, value in action.items()}
    if isinstance(space, spaces.Tuple) and isinstance(action, Sequence) and len(action) == len(space):
        return tuple(map(cast_action, space, action))
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
        return action
    try:
        number = numpy.asarray(action)
    except ValueError:  # lists of several lengths
        return None
    if number.dtype.kind not in "biuf":
        return None
    with numpy.errstate(all="ignore"):
        cast = number.astype(space.dtype)
    is_rounded = number.dtype.kind == cast.dtype.kind == "f" and numpy.array_equal(
        numpy.isfinite(number), numpy.isfinite(cast)
    )
    if not (is_rounded or numpy.array_equal(number, cast)):
        return number
    if cast.size == math.prod(space.shape or ()) == 1:
        cast = cast.reshape(space.shape or ())
    return int(cast) if isinstance(space, spaces.Discrete) and cast.size == 1 else cast


def describe_action(action: Any) -> str:
    """Return an action and its type, for a report."""
    return valid_unicode(f"{reprlib.repr(action)}, of type {type(action).__name__}")


def gym_environment(
    name: str,
    make: Make,
    *,
    render: Render,
    parse: Parse,
    max_turns: int = 64,
    instructions: str = "",
    illegal_reward: float = -1.0,
) -> type[GymEnvironment]:
    """Make a `GymEnvironment` class from functions.

    Args:
        name: the variable that holds the class in the module of `make`; `module:name` then refers to it.
        make: makes a fresh game for a task.
        render: maps (observation, info, env) to the agent's text observation.
        parse: maps (text, env) to an action; None is illegal.
        max_turns: turns after which the episode is truncated.
        instructions: the system message.
        illegal_reward: reward of an episode that an illegal action ended; must lie below every legal outcome.

    Example:
        >>> import gymnasium
        >>> from agentrl.environment.gym import BLACKJACK
        >>> Blackjack = gym_environment(
        ...     "Blackjack", lambda task: gymnasium.make("Blackjack-v1"), **BLACKJACK
        ... )
    """
    namespace: dict[str, Any] = {
        "__module__": make.__module__,
        "__qualname__": name,
        "__doc__": f"{name}, one agent.",
        "make": lambda self, task: make(task),
        "render": lambda self, observation, info, env: render(observation, info, env),
        "parse": lambda self, text, env: parse(text, env),
        "max_turns": max_turns,
        "instructions": instructions,
        "illegal_reward": illegal_reward,
    }
    return type(name, (GymEnvironment,), namespace)


class TextGame(TypedDict):
    """The arguments of `gym_environment` that belong to one game.

    The observations below are made from the game's state, not by `env.render()`: its text contains color codes, and
    Blackjack has no text.
    """

    render: Render
    parse: Parse
    instructions: str
    max_turns: int
    illegal_reward: float
    """Reward of an illegal end: one less than the lowest sum of rewards over `max_turns` legal actions."""


_PLACES = ("at R", "at G", "at Y", "at B", "in the taxi")


def action_name_parser(names: Sequence[str]) -> Callable[[str, Game], int | None]:
    """Make a parser in which the text `names[n]` is action n; case and a final full stop are ignored.

    Example:
        >>> action_name_parser(["stick", "hit"])(" Hit. ", None)
        1
    """
    numbers = {name: number for number, name in enumerate(names)}

    def parse(text: str, env: Game) -> int | None:
        return numbers.get(text.strip().removesuffix(".").lower())

    return parse


def _frozen_lake(observation: Any, info: Mapping[str, Any], env: Game) -> str:
    rows = [b"".join(row).decode() for row in env.unwrapped.desc]  # type: ignore[attr-defined]
    return _grid(rows, *divmod(int(observation), len(rows[0])))


def _cliff_walking(observation: Any, info: Mapping[str, Any], env: Game) -> str:
    return _grid(["." * 12] * 3 + ["S" + "C" * 10 + "G"], *divmod(int(observation), 12))


def _taxi(observation: Any, info: Mapping[str, Any], env: Game) -> str:
    row, column, passenger, goal = env.unwrapped.decode(int(observation))  # type: ignore[attr-defined]
    lines = [b"".join(line).decode() for line in env.unwrapped.desc]  # type: ignore[attr-defined]
    board = "\n".join(_with_mark(line, 2 * column + 1) if n == row + 1 else line for n, line in enumerate(lines))
    return f"{board}\nThe passenger is {_PLACES[passenger]} and wants to go to {'RGYB'[goal]}."


def _blackjack(observation: Any, info: Mapping[str, Any], env: Game) -> str:
    total, dealer, ace = (int(value) for value in observation)
    return (
        f"You hold {total}{' with a usable ace' if ace else ''}; the dealer shows {dealer if dealer > 1 else 'an ace'}."
    )


def _grid(rows: Sequence[str], row: int, column: int) -> str:
    return "\n".join(_with_mark(line, column) if number == row else line for number, line in enumerate(rows))


def _with_mark(line: str, at: int) -> str:
    return f"{line[:at]}@{line[at + 1 :]}"


FROZEN_LAKE = TextGame(
    render=_frozen_lake,
    parse=action_name_parser(["left", "down", "right", "up"]),
    instructions="You stand at @ on a frozen lake. Go to G over frozen ground F; a hole H ends the game. "
    "Answer with left, down, right or up.",
    max_turns=100,
    illegal_reward=-1.0,
)
CLIFF_WALKING = TextGame(
    render=_cliff_walking,
    parse=action_name_parser(["up", "right", "down", "left"]),
    instructions="You stand at @. Go to G; stepping onto the cliff C costs 100 and takes you back to the start S, "
    "every other step costs 1. Answer with up, right, down or left.",
    max_turns=50,
    illegal_reward=-5001.0,
)
TAXI = TextGame(
    render=_taxi,
    parse=action_name_parser(["south", "north", "east", "west", "pickup", "dropoff"]),
    instructions="You drive the taxi @; it passes : but not |. Fetch the passenger and take them where they want to "
    "go: 20 points; every step costs 1, a wrong pickup or dropoff 10. Answer with south, north, east, west, pickup or "
    "dropoff.",
    max_turns=50,
    illegal_reward=-501.0,
)
BLACKJACK = TextGame(
    render=_blackjack,
    parse=action_name_parser(["stick", "hit"]),
    instructions="Blackjack: come closer to 21 than the dealer without going over it. Answer with hit or stick.",
    max_turns=20,
    illegal_reward=-2.0,
)
