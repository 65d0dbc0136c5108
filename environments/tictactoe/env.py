"""The environment: TextArena's TicTacToe in a few letters, starting a few moves into the game."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import agentrl
from agentrl.core.ids import random_stream
from agentrl.environment.tasks import DrawnTasks

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from random import Random

    import textarena

    from agentrl.core.records import Message, Task
    from agentrl.environment.environment import Split, TaskSource
    from agentrl.environment.games import GameEpisode

FREE_MARKS, OWN_MARKS, OPPONENT_MARKS = "012345678", "ABCDEFGHI", "abcdefghi"
"""Characters of the nine cells in a prompt: free, with the player's own mark, with the other player's."""
SYMMETRIES = ("012345678", "630741852", "876543210", "258147036", "036147258", "678345012", "852741630", "210543876")
"""Display order of the cells, for each rotation and reflection of the board."""
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
OPENINGS = (1, 1, 1, 1, 2, 3, 3, 3)
"""Relative frequencies of training games that start after 0, 1, … 7 moves: close to the end of a game, a single move
decides it."""


class TicTacToe(agentrl.TextArenaEnvironment):
    """Three in a row. Both seats see the lines of the board, each from its own side, and answer with a cell, such as
    `[4]`. Boards that are equal under rotation or reflection look the same, and moves are mapped back.

    As in TextArena, one illegal move is forgiven; a second in a row loses, and costs more than a loss.
    """

    seats: ClassVar[tuple[str, ...]] = ("first", "second")
    remembers: ClassVar[bool] = False
    illegal_reward: ClassVar[float] = -0.5

    def make(self, task: Task) -> textarena.Env:
        """Make TextArena's game."""
        import textarena

        return textarena.make("TicTacToe-v0-raw")

    def begin(self, task: Task, env: textarena.Env) -> None:
        """Play the opening moves of a training game."""
        for cell in task.data["opening"]:
            env.step(action=f"[{cell}]")

    def render(self, player: int, text: str, env: textarena.Env) -> str:
        """Return the eight lines of the board: free cells as numbers, the player's own as capital letters, the
        opponent's as lowercase letters."""
        marks = [mark for row in env.state.game_state["board"] for mark in row]
        names = {"": FREE_MARKS, "OX"[player]: OWN_MARKS, "XO"[player]: OPPONENT_MARKS}
        boards = ["".join(names[marks[int(cell)]][at] for at, cell in enumerate(cells)) for cells in SYMMETRIES]
        board = min(boards)
        self._symmetry = SYMMETRIES[boards.index(board)]
        return "".join(board[cell] for line in LINES for cell in line)

    def action(self, text: str, env: textarena.Env) -> str:
        """Return the text with each `[cell]` mapped back to TextArena's board."""
        return re.sub(r"\[\s*([0-8])\s*\]", lambda cell: f"[{self._symmetry[int(cell[1])]}]", text)

    def rewards(self, task: Task, episode: GameEpisode) -> Sequence[float]:
        """Return 1 for a win, ½ for a draw, and 0 for a loss or a truncated game."""
        return [
            self.illegal_reward if player in episode.illegal else (1.0 + reward) / 2.0 * episode.terminated
            for player, reward in enumerate(episode.rewards)
        ]

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0, held_out: int = 512) -> TaskSource:
        """Return games: training games start after up to 7 random moves, held-out ones from the empty board.

        Args:
            split: `train` or `held_out`; held-out games differ only in the players' samples.
            seed: seed of the training games.
            held_out: number of held-out games.
        """
        if split == "held_out":
            return [
                agentrl.Task(id=f"held_out-{number}", data={"seed": 0, "opening": []}) for number in range(held_out)
            ]

        def draw(index: int, attempt: int) -> Task | None:
            random = random_stream("tictactoe", seed, index, attempt)
            (moves,) = random.choices(range(len(OPENINGS)), OPENINGS)
            cells = random.sample(range(9), moves)
            if is_won(cells[0::2]) or is_won(cells[1::2]):
                return None
            return agentrl.Task(id=f"train-{seed}-{index}", data={"seed": 0, "opening": cells})

        return DrawnTasks(draw)


def is_won(cells: Collection[int]) -> bool:
    """Whether three of a player's cells are in a row."""
    return any(set(line) <= set(cells) for line in LINES)


def random_player(conversation: Sequence[Message], random: Random) -> str:
    """A bot that marks a random free cell."""
    return f"[{random.choice(sorted(set(FREE_MARKS) & set(conversation[-1].content)))}]"
