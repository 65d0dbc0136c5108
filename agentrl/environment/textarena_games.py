"""TextArena games as environments: the game's messages are the observation, the player's text is the action.

Owns: `TextArenaEnvironment`, and which of the game's messages a player has not read yet.
Does not own: turn-taking and rewards (`games.py`). Imports TextArena only when a game is made.
Invariants: a seat reads each message addressed to it once, its own actions not at all: its conversation holds them;
TextArena's own rule for illegal actions holds (by default one is forgiven, the next ends the game for that player).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from agentrl.core.records import Task
from agentrl.environment.base import finite_reward
from agentrl.environment.games import Game, GameEnvironment, Position, check_text

if TYPE_CHECKING:
    import textarena


class TextArenaEnvironment(GameEnvironment):
    """A seat for each player of the game, player 0 first.

    Example:
        class Poker(agentrl.TextArenaEnvironment):
            seats = ("first", "second")

            def make(self, task):
                return textarena.make("KuhnPoker-v0")
    """

    # --- override these ---------------------------------------------------------------------------------------------

    env: textarena.Env
    """The game, from its reset on; `rewards` may look at it."""

    @abstractmethod
    def make(self, task: Task) -> textarena.Env:
        """A fresh game; it is reset with `task.data["seed"]` and a player for each seat."""

    def render(self, player: int, text: str, env: textarena.Env) -> str:
        """The observation of the player to move; default: the game's messages since its last turn."""
        return text

    def action(self, text: str, env: textarena.Env) -> str:
        """The action that is sent to the game for a turn's text; default: the text."""
        return text

    # --- machinery --------------------------------------------------------------------------------------------------

    def game(self, task: Task) -> Game:
        """The task's game."""
        return _TextArenaGame(self, task)


class _TextArenaGame(Game):
    """One game. Bypasses its observation wrappers, which repeat the whole conversation at every turn."""

    def __init__(self, environment: TextArenaEnvironment, task: Task) -> None:
        self._environment = environment
        self._task = task
        self._inner: Any = None

    def reset(self) -> Position:
        """Make and reset the game."""
        import textarena

        env = self._environment.env = self._environment.make(self._task)
        env.reset(num_players=len(self._environment.seats), seed=int(self._task.data["seed"]))
        while isinstance(env, textarena.Wrapper):
            env = env.env
        self._inner = env
        self._environment.begin(self._task, env)
        return self._asked()

    def step(self, text: str) -> Position:
        """Send the action of `text` to the game."""
        over, _ = self._environment.env.step(action=self._environment.action(text, self._inner))
        if not over:
            return self._asked(legal=not getattr(self._inner.state, "error_count", 0))
        rewards, info = self._environment.env.close()
        players = range(len(self._environment.seats))
        illegal = [player for player in players if (info or {}).get(player, {}).get("invalid_move")]
        return Position(
            player=None,
            observation="",
            legal=not illegal,
            rewards=[finite_reward((rewards or {}).get(player, 0.0), f"player {player}") for player in players],
            illegal=illegal,
            truncated=False,
        )

    def _asked(self, *, legal: bool = True) -> Position:
        player, messages = self._inner.get_observation()
        text = messages if isinstance(messages, str) else self._as_text(player, messages)
        shown = self._environment.render(int(player), text, self._inner)
        return Position(
            player=None if self._inner.state.done else int(player),
            observation=check_text(self._environment, shown),
            legal=legal,
            rewards=[0.0] * len(self._environment.seats),
            illegal=[],
            truncated=False,
        )

    def _as_text(self, player: int, messages: Any) -> str:
        names = self._inner.state.role_mapping
        others = [m for m in messages if m[0] != player or m[2].name != "PLAYER_ACTION"]
        return "\n".join(f"[{names.get(sender, f'Player {sender}')}] {text}" for sender, text, _ in others)
