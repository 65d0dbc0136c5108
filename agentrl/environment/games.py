"""Games of several players, PettingZoo's and TextArena's among them: a seat per player, one asked at a time.

Owns: `GameEnvironment`: turn-taking, limits, rewards by seat, and the game as a `replay` resource;
`PettingZooEnvironment` and `TextArenaEnvironment`: the adapters that reset, render and step a library's game. Either
library is imported only when a game is made.
Invariants: the draws of a call on the game are a function of `task.data["seed"]` and the number of earlier calls, so
the episodes of a group start alike and draw alike; an observation goes to its player's seat only; an illegal end scores
below every legal one, or the run stops with an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired, TypedDict

from agentrl.core.errors import EnvironmentDefinitionError, EpisodeError
from agentrl.core.records import Message, Task
from agentrl.core.text import valid_unicode
from agentrl.environment.context import EpisodeContext, LimitReachedError, Resource, system, user
from agentrl.environment.environment import Environment, Split, TaskSource
from agentrl.environment.gym import cast_action, describe_action
from agentrl.environment.rewards import finite_reward
from agentrl.environment.tasks import GameSeedTasks

if TYPE_CHECKING:
    import textarena

Turns = Any
"""A `pettingzoo.AECEnv`."""
LEGAL_ACTIONS = "Legal actions: "
"""Prefix of the list of legal actions in a player's observation of a PettingZoo game."""


class GamePosition(TypedDict):
    """The state of a game after a call on it: JSON data, as the journal holds it."""

    player: int | None
    """The player to move, as an index into `seats`; None if the game is over."""
    observation: str
    """Current observation of that player."""
    legal: bool
    """Whether the last action was legal."""
    refused: NotRequired[str]
    """The illegal action that the last text was parsed as, with its type; absent if it was parsed as none."""
    rewards: list[float]
    """Reward of each player so far, including rewards that it was not told yet: the episode may end here."""
    illegal: list[int]
    """Players whose illegal actions ended the game."""
    truncated: bool
    """Whether the game's own limit ended it."""


class Game(ABC):
    """A library's game, made when it is reset. Its methods are functions of the task and the texts so far."""

    @abstractmethod
    def reset(self) -> GamePosition:
        """Make and start the game."""

    @abstractmethod
    def step(self, text: str) -> GamePosition:
        """Apply the text of the player to move."""

    def refuse(self) -> GamePosition:
        """Count an illegal action of the player to move, whose turn a limit on tokens cut. Default: apply ""."""
        return self.step("")


@dataclass(frozen=True, slots=True, kw_only=True)
class GameEpisode:
    """A finished game, passed to `GameEnvironment.rewards`. Players are in the order of `seats`."""

    rewards: tuple[float, ...]
    """Reward of each player."""
    illegal: tuple[int, ...]
    """Players whose illegal actions ended the game."""
    terminated: bool
    """Whether the game ended by its own rules rather than at a limit."""
    truncated: bool = False
    """Whether a limit ended the game, or cut the last turn of a player."""


class GameEnvironment(Environment):
    """An environment in which several agents play one game, one seat each. Bind two seats to one policy for
    self-play."""

    # --- override these ---------------------------------------------------------------------------------------------

    instructions: ClassVar[str] = ""
    """System message of every seat: the rules, and the format of an answer. Empty: no system message."""
    max_turns: ClassVar[int] = 256
    """Limit on the turns of all players together; beyond it the episode is truncated."""
    remembers: ClassVar[bool] = True
    """Whether a player's conversation continues from turn to turn. False: each turn starts from the current
    observation, which must then contain all that a player needs; rows stay short."""
    illegal_reward: ClassVar[float] = -2.0
    """Reward of a player whose illegal actions ended the game. Must lie below every legal outcome: a policy that earns
    more by breaking the format than by losing never stops breaking it."""

    def rewards(self, task: Task, episode: GameEpisode) -> Sequence[float]:
        """Return a finite reward per player. Default: the game's rewards, or `illegal_reward`."""
        rewards = enumerate(episode.rewards)
        return [self.illegal_reward if player in episode.illegal else reward for player, reward in rewards]

    def begin(self, task: Task, env: Any) -> None:
        """Bring a game that was just reset to the start position of the task. Default: leave it.

        Positions inside a game teach what two players of one kind seldom reach.
        """

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """One task per seed of the game; no training seed is held out. Distinct seeds may start from the same
        position."""
        return GameSeedTasks(split, seed)

    # --- machinery --------------------------------------------------------------------------------------------------

    @abstractmethod
    def game(self, task: Task) -> Game:
        """Return the task's game, not yet reset."""

    def close(self) -> None:
        """Release the resources of the game; called at the end in any case."""

    async def run(self, ctx: EpisodeContext) -> None:
        """Ask the player to move until the game is over or a limit is reached."""
        task = ctx.task
        game = ctx.resource(lambda: self.game(task), level="replay", seed=int(task.data["seed"]))
        try:
            episode = await self._play(ctx, game)
            values = self._checked_rewards(ctx.task, episode)
        finally:
            self.close()
        for seat, value in zip(self.seats, values, strict=True):
            agent = ctx.agent(seat)
            if agent.turns:  # an agent without turns gets no reward
                agent.reward(value)

    async def _play(self, ctx: EpisodeContext, game: Resource) -> GameEpisode:
        position: GamePosition = await game.call("reset")
        if position["player"] is None:
            raise EnvironmentDefinitionError(
                f"{type(self).__name__}, task {ctx.task.id!r}: the game is over before the first turn; correct `begin`"
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
            position = await (game.call("refuse") if turn.is_cut else game.call("step", turn.text))
            if not position["legal"]:
                ctx.metric("turns/illegal", 1.0)
            if position["player"] is not None and turns >= self.max_turns:
                limit = LimitReachedError(f"{type(self).__name__}: no time left", stop_reason="max_turns")
        if position["truncated"]:
            limit = LimitReachedError(f"{type(self).__name__}: the game's own limit", stop_reason="max_turns")
        if limit is not None:
            ctx.truncate(limit)
        players = [ctx.agent(seat) for seat in self.seats]
        return GameEpisode(
            rewards=tuple(position["rewards"]),
            illegal=tuple(position["illegal"]),
            terminated=limit is None,
            truncated=limit is not None or any(player.turns and player.turns[-1].is_cut for player in players),
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


def _check_players(environment: GameEnvironment, players: int) -> None:
    """Raise `EnvironmentDefinitionError` unless there is a seat for each player of the game."""
    if players != len(environment.seats):
        raise EnvironmentDefinitionError(
            f"{type(environment).__name__}: the game has {players} players and the class {len(environment.seats)} "
            f"seats ({', '.join(environment.seats)}); name one seat per player"
        )


def _check_text(environment: GameEnvironment, text: Any) -> str:
    """Return the text that `render` returned; raise if it is not text."""
    if not isinstance(text, str):
        raise EpisodeError(
            f"{type(environment).__name__}.render returned {type(text).__name__}; return a str",
            reason="environment_error",
        )
    return valid_unicode(text)


class PettingZooEnvironment(GameEnvironment):
    """An `AECEnv` or `ParallelEnv` whose actions can be parsed from text, with a seat for each of its
    `possible_agents`.

    Seats are in the order of `possible_agents`. Only legal actions reach the game: those of its action mask, else of
    its action space. A player's reward is the sum of the rewards that `last()` returned, or would return next if the
    episode ends before the game. The players of a parallel game act one after the other; none sees another's move.

    Example:
        class Noughts(agentrl.PettingZooEnvironment):
            seats = ("cross", "nought")

            def make(self, task):
                return pettingzoo.make("aec", "classic/tictactoe-v3")
    """

    # --- override these ---------------------------------------------------------------------------------------------

    illegal_actions: ClassVar[int] = 1
    """Number of illegal actions of one player that ends the game.

    Below it, `illegal_text` is put before the observation. The other players keep their rewards.
    """
    illegal_text: ClassVar[str] = "That is not a legal action.\n"

    env: Turns
    """The game, available after its reset; `rewards` may read it."""

    @abstractmethod
    def make(self, task: Task) -> Any:
        """Make a fresh `AECEnv` or `ParallelEnv`; it is reset with `task.data["seed"]` and closed at the end."""

    def render(self, observation: Any, info: Mapping[str, Any], env: Turns) -> str:
        """Return the observation of the player to move. Default: the numbers of the observation. The legal actions are
        appended."""
        value = observation.get("observation", observation) if isinstance(observation, Mapping) else observation
        return str(value.tolist() if hasattr(value, "tolist") else value)

    def action_name(self, action: int, env: Turns) -> str:
        """Return the text that selects an action. Default: its number. Case is ignored."""
        return str(action)

    def parse(self, text: str, env: Turns) -> Any:
        """Return the action that a turn's text names, or None. Default: the legal action whose name is the whole text;
        case, and a full stop at the end, are ignored."""
        action_text = text.strip().removesuffix(".").lower()
        matches = (
            action for action in legal_actions(env) or () if self.action_name(action, env).lower() == action_text
        )
        return next(matches, None)

    # --- machinery --------------------------------------------------------------------------------------------------

    def game(self, task: Task) -> Game:
        return _PettingZooGame(self, task)

    def close(self) -> None:
        """Close the game."""
        if hasattr(self, "env"):
            self.env.close()


def legal_actions(env: Turns) -> Sequence[int] | None:
    """Return the legal actions of the player to move: from its action mask, else all; None if they cannot be listed."""
    space: Any = env.action_space(env.agent_selection)
    if not (hasattr(space, "n") and hasattr(space, "start")):
        return None
    observation, _, _, _, info = env.last()
    actions = range(int(space.start), int(space.start) + int(space.n))
    mask = {**info, **(observation if isinstance(observation, Mapping) else {})}.get("action_mask")
    return [action for index, action in enumerate(actions) if mask is None or mask[index]]


class _PettingZooGame(Game):
    """One game, with the turn order of PettingZoo's `agent_iter`."""

    def __init__(self, environment: PettingZooEnvironment, task: Task) -> None:
        self._environment = environment
        self._task = task
        self._rewards = [0.0] * len(environment.seats)
        self._told: set[int] = set()
        """Players who were told their newest reward, which `_rewards` has."""
        self._mistakes = [0] * len(environment.seats)
        self._observation = ""
        self._truncated = False

    def reset(self) -> GamePosition:
        """Make and reset the game."""
        from pettingzoo import ParallelEnv
        from pettingzoo.utils import parallel_to_aec

        env = self._environment.make(self._task)
        self._environment.env = parallel_to_aec(env) if isinstance(env, ParallelEnv) else env
        self._environment.env.reset(seed=int(self._task.data["seed"]))
        _check_players(self._environment, len(self._environment.env.possible_agents))
        self._environment.begin(self._task, self._environment.env)
        return self._advance()

    def step(self, text: str) -> GamePosition:
        """Apply `text`; an illegal action changes nothing."""
        env = self._environment.env
        parsed = self._environment.parse(text, env)
        action = cast_action(env.action_space(env.agent_selection), parsed)
        if not self._is_legal(action):
            position = self.refuse()
            if parsed is not None:
                position["refused"] = describe_action(parsed)
            return position
        self._move(action)
        return self._advance()

    def refuse(self) -> GamePosition:
        environment, player = self._environment, self._player()
        self._mistakes[player] += 1
        is_end = self._mistakes[player] >= environment.illegal_actions
        shown = "" if is_end else environment.illegal_text + self._observation
        return self._position(None if is_end else player, shown, legal=False, illegal=[player] if is_end else [])

    def _move(self, action: Any) -> None:
        """Step the game. An `AECEnv` then has a new reward for the player; a parallel game keeps the old ones until
        every player has moved, and then replaces them all."""
        from pettingzoo import ParallelEnv

        env = self._environment.env
        player, rewards = self._player(), env._cumulative_rewards
        env.step(action)
        if not isinstance(env.unwrapped, ParallelEnv):
            self._told.discard(player)
        elif env._cumulative_rewards is not rewards:
            self._told.clear()

    def _advance(self) -> GamePosition:
        """Collect rewards up to the next player who is still in the game."""
        env = self._environment.env
        while env.agents:
            observation, reward, terminated, truncated, info = env.last()
            player = self._player()
            self._rewards[player] += finite_reward(reward, f"player {player!r}")
            self._told.add(player)
            if not terminated and not truncated:
                text = _check_text(self._environment, self._environment.render(observation, info, env))
                legal = legal_actions(env)
                if legal is not None:
                    names = ", ".join(self._environment.action_name(action, env) for action in legal)
                    text = f"{text}\n{LEGAL_ACTIONS}{names}"
                self._observation = text
                return self._position(player, text)
            self._truncated = self._truncated or bool(truncated)
            self._move(None)
        return self._position(None)

    def _is_legal(self, action: Any) -> bool:
        env = self._environment.env
        if action is None or not env.action_space(env.agent_selection).contains(action):
            return False
        legal = legal_actions(env)
        return legal is None or int(action) in legal

    def _player(self) -> int:
        env = self._environment.env
        return list(env.possible_agents).index(env.agent_selection)

    def _rewards_so_far(self) -> list[float]:
        env, rewards = self._environment.env, list(self._rewards)
        for player, agent in enumerate(env.possible_agents):
            if agent in env.agents and player not in self._told:
                rewards[player] += finite_reward(env._cumulative_rewards[agent], f"player {player!r}")
        return rewards

    def _position(
        self, player: int | None, observation: str = "", *, legal: bool = True, illegal: Sequence[int] = ()
    ) -> GamePosition:
        return GamePosition(
            player=player,
            observation=observation,
            legal=legal,
            rewards=self._rewards_so_far(),
            illegal=list(illegal),
            truncated=self._truncated and player is None,
        )


class TextArenaEnvironment(GameEnvironment):
    """A game of TextArena: its messages are the observation, the player's text is the action; player 0 has seat 0.

    A seat reads each message addressed to it once, and its own actions not at all: its conversation holds them.
    TextArena's own rule for illegal actions applies: by default the first is forgiven, the second ends the game for
    that player.

    Example:
        class Poker(agentrl.TextArenaEnvironment):
            seats = ("first", "second")

            def make(self, task):
                return textarena.make("KuhnPoker-v0")
    """

    # --- override these ---------------------------------------------------------------------------------------------

    env: textarena.Env
    """The game, available after its reset; `rewards` may read it."""

    @abstractmethod
    def make(self, task: Task) -> textarena.Env:
        """Make a fresh game; it is reset with `task.data["seed"]` and a player for each seat."""

    def render(self, player: int, text: str, env: textarena.Env) -> str:
        """Return the observation of the player to move. Default: the game's messages since its last turn."""
        return text

    def action(self, text: str, env: textarena.Env) -> str:
        """Return the action sent to the game for a turn's text. Default: the text."""
        return text

    # --- machinery --------------------------------------------------------------------------------------------------

    def game(self, task: Task) -> Game:
        return _TextArenaGame(self, task)


class _TextArenaGame(Game):
    """A TextArena game. Bypasses its observation wrappers, which repeat the whole conversation at every turn."""

    def __init__(self, environment: TextArenaEnvironment, task: Task) -> None:
        self._environment = environment
        self._task = task
        self._inner: Any = None

    def reset(self) -> GamePosition:
        """Make and reset the game."""
        import textarena

        env = self._environment.env = self._environment.make(self._task)
        env.reset(num_players=len(self._environment.seats), seed=int(self._task.data["seed"]))
        while isinstance(env, textarena.Wrapper):
            env = env.env
        self._inner = env
        self._environment.begin(self._task, env)
        return self._question()

    def step(self, text: str) -> GamePosition:
        """Send the action of `text` to the game."""
        over, _ = self._environment.env.step(action=self._environment.action(text, self._inner))
        return self._end() if over else self._question(legal=not getattr(self._inner.state, "error_count", 0))

    def refuse(self) -> GamePosition:
        state = self._inner.state
        player = int(state.current_player_id)
        # Games of more than two players differ in how a second illegal action ends. Here, it ends the game.
        has_lost = bool(state.set_invalid_move(reason="The reply was cut off before its end."))
        over, _ = state.step()
        return self._end(*[player] * has_lost) if over or has_lost else self._question(legal=False)

    def _end(self, *lost: int) -> GamePosition:
        """Return the position of a game that is over, or that `lost` players end by an illegal action."""
        rewards, info = self._environment.env.close()
        players = range(len(self._environment.seats))
        illegal = [player for player in players if player in lost or (info or {}).get(player, {}).get("invalid_move")]
        return GamePosition(
            player=None,
            observation="",
            legal=not illegal,
            rewards=[finite_reward((rewards or {}).get(player, 0.0), f"player {player}") for player in players],
            illegal=illegal,
            truncated=False,
        )

    def _question(self, *, legal: bool = True) -> GamePosition:
        player, messages = self._inner.get_observation()
        text = messages if isinstance(messages, str) else self._as_text(player, messages)
        observation_text = self._environment.render(int(player), text, self._inner)
        return GamePosition(
            player=None if self._inner.state.done else int(player),
            observation=_check_text(self._environment, observation_text),
            legal=legal,
            rewards=[0.0] * len(self._environment.seats),
            illegal=[],
            truncated=False,
        )

    def _as_text(self, player: int, messages: Any) -> str:
        names = self._inner.state.role_mapping
        visible_messages = [m for m in messages if m[0] != player or m[2].name != "PLAYER_ACTION"]
        return "\n".join(f"[{names.get(sender, f'Player {sender}')}] {text}" for sender, text, _ in visible_messages)
