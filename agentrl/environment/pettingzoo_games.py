"""PettingZoo games as environments: any `AECEnv` or `ParallelEnv` whose actions can be read from text.

Owns: `PettingZooEnvironment`, what a user fills in, and the game's legal actions.
Does not own: turn-taking and rewards (`games.py`). Imports PettingZoo only when a game is made.
Invariants: the game is stepped with legal actions only (its action mask, else its action space); a player's reward is
the sum of what `last()` told; the players of a parallel game are asked one after the other, none seeing another's move.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentrl.core.records import Task
from agentrl.environment.base import finite_reward
from agentrl.environment.games import Game, GameEnvironment, Position, check_players, check_text

Turns = Any
"""A `pettingzoo.AECEnv`."""
LEGAL_ACTIONS = "Legal actions: "
"""Prefix of the list of legal actions in a player's observation."""


class PettingZooEnvironment(GameEnvironment):
    """A seat for each of the game's `possible_agents`, in their order.

    Example:
        class Noughts(agentrl.PettingZooEnvironment):
            seats = ("cross", "nought")

            def make(self, task):
                return pettingzoo.make("aec", "classic/tictactoe-v3")
    """

    # --- override these ---------------------------------------------------------------------------------------------

    illegal_actions: ClassVar[int] = 1
    """The game ends with a player's illegal action of this number; before, `illegal_text` comes before the
    observation. The others keep what the game gave them so far."""
    illegal_text: ClassVar[str] = "That is not a legal action.\n"

    env: Turns
    """The game, from its reset on; `rewards` may look at it."""

    @abstractmethod
    def make(self, task: Task) -> Any:
        """A fresh `AECEnv` or `ParallelEnv`; it is reset with `task.data["seed"]` and closed at the end."""

    def render(self, observation: Any, info: Mapping[str, Any], env: Turns) -> str:
        """The observation of the player to move; default: the numbers of the observation. The legal actions are
        appended."""
        shown = observation.get("observation", observation) if isinstance(observation, Mapping) else observation
        return str(shown.tolist() if hasattr(shown, "tolist") else shown)

    def action_name(self, action: int, env: Turns) -> str:
        """The text that takes an action; default: its number. Case does not matter."""
        return str(action)

    def parse(self, text: str, env: Turns) -> Any:
        """The action that a turn's text names, None if none; default: the legal action whose name it contains."""
        said = text.strip().removesuffix(".").lower()
        named = (action for action in legal_actions(env) or () if self.action_name(action, env).lower() == said)
        return next(named, None)

    # --- machinery --------------------------------------------------------------------------------------------------

    def game(self, task: Task) -> Game:
        """The task's game."""
        return _PettingZooGame(self, task)

    def close(self) -> None:
        """Close the game."""
        if hasattr(self, "env"):
            self.env.close()


def legal_actions(env: Turns) -> Sequence[int] | None:
    """Legal actions of the player to move: from its action mask, else all; None if they cannot be listed."""
    observation, _, _, _, info = env.last()
    mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
    if mask is None:
        mask = info.get("action_mask")
    if mask is not None:
        return [number for number, legal in enumerate(mask) if legal]
    space: Any = env.action_space(env.agent_selection)
    if not hasattr(space, "n") or not hasattr(space, "start"):
        return None
    return range(int(space.start), int(space.start) + int(space.n))


class _PettingZooGame(Game):
    """One game, with the turn order of PettingZoo's `agent_iter`."""

    def __init__(self, environment: PettingZooEnvironment, task: Task) -> None:
        self._environment = environment
        self._task = task
        self._rewards = [0.0] * len(environment.seats)
        self._mistakes = [0] * len(environment.seats)
        self._observation = ""
        self._truncated = False

    def reset(self) -> Position:
        """Make and reset the game."""
        from pettingzoo import ParallelEnv
        from pettingzoo.utils import parallel_to_aec

        made = self._environment.make(self._task)
        self._environment.env = parallel_to_aec(made) if isinstance(made, ParallelEnv) else made
        self._environment.env.reset(seed=int(self._task.data["seed"]))
        check_players(self._environment, len(self._environment.env.possible_agents))
        self._environment.begin(self._task, self._environment.env)
        return self._advance()

    def step(self, text: str) -> Position:
        """Do what `text` says; an illegal action changes nothing."""
        environment = self._environment
        env = environment.env
        player = self._player()
        action = environment.parse(text, env)
        if not self._is_legal(action):
            self._mistakes[player] += 1
            if self._mistakes[player] >= environment.illegal_actions:
                return self._position(None, legal=False, illegal=[player])
            return self._position(player, environment.illegal_text + self._observation, legal=False)
        env.step(action)
        return self._advance()

    def _advance(self) -> Position:
        """Collect rewards up to the next player who is still in the game."""
        env = self._environment.env
        while env.agents:
            observation, reward, terminated, truncated, info = env.last()
            player = self._player()
            self._rewards[player] += finite_reward(reward, f"player {player!r}")
            if not terminated and not truncated:
                shown = check_text(self._environment, self._environment.render(observation, info, env))
                legal = legal_actions(env)
                if legal is not None:
                    names = ", ".join(self._environment.action_name(action, env) for action in legal)
                    shown = f"{shown}\n{LEGAL_ACTIONS}{names}"
                self._observation = shown
                return self._position(player, shown)
            self._truncated = self._truncated or bool(truncated)
            env.step(None)
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

    def _position(
        self, player: int | None, observation: str = "", *, legal: bool = True, illegal: Sequence[int] = ()
    ) -> Position:
        return Position(
            player=player,
            observation=observation,
            legal=legal,
            rewards=list(self._rewards),
            illegal=list(illegal),
            truncated=self._truncated and player is None,
        )
