"""Sokoban on six by six squares with one box, one move a turn. Levels are made backward, by pulling the box.

With `teach`, supervised steps: half of the moves are the first of a shortest solution, the others random. They teach
the frozen lakes' tiny model to read a level; reward then teaches it to solve more of them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from zlib import crc32

import agentrl

MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
INNER = range(1, 5)
"""Rows and columns within the outer walls."""
MAX_MOVES = 12
"""Moves of an episode. A level is made by as many moves backward, so that it can be solved in time."""
ILLEGAL = -0.5
"""Reward for a reply that is no move: less than any other end, or the policy learns to break the format."""

Square = tuple[int, int]


class Level(NamedTuple):
    """A position of the game."""

    walls: frozenset[Square]
    target: Square
    box: Square
    player: Square

    def is_free(self, square: Square) -> bool:
        """Whether the player, or a box, can stand there."""
        return square[0] in INNER and square[1] in INNER and square not in self.walls

    @property
    def is_solved(self) -> bool:
        """Whether the box is on its target."""
        return self.box == self.target

    def after(self, move: str) -> Level:
        """The position after a move; a move against a wall changes nothing."""
        step, beyond = _shifted(self.player, move), _shifted(self.player, move, 2)
        if not self.is_free(step) or (step == self.box and not self.is_free(beyond)):
            return self
        return self._replace(player=step, box=beyond if step == self.box else self.box)

    def solution(self) -> str | None:
        """A shortest solution; None if there is none."""
        seen, waiting = {(self.box, self.player)}, deque([(self, "")])
        while waiting:
            level, moves = waiting.popleft()
            if level.is_solved:
                return moves
            for move in MOVES:
                after = level.after(move)
                if (after.box, after.player) not in seen:
                    seen.add((after.box, after.player))
                    waiting.append((after, moves + move))
        return None

    def text(self) -> str:
        """Rows of squares within the outer walls, then row and column of player, box and target."""
        marks = {self.target: ".", self.box: "$", self.player: "+" if self.player == self.target else "@"}
        marks |= dict.fromkeys(self.walls, "#")
        rows = ["".join(marks.get((row, column), "-") for column in INNER) for row in INNER]
        places = " ".join(f"{row}{column}" for row, column in (self.player, self.box, self.target))
        return "\n".join([*rows, places])


def _shifted(square: Square, move: str, times: int = 1) -> Square:
    down, right = MOVES[move]
    return square[0] + times * down, square[1] + times * right


def drawn_level(drawn: random.Random) -> Level:
    """Pull the box away from its target by random moves. Pushes undo pulls, so the level can be solved."""
    squares = [(row, column) for row in INNER for column in INNER]
    walls = frozenset(drawn.sample(squares, drawn.randint(0, 2)))
    target, player = drawn.sample([square for square in squares if square not in walls], 2)
    level = Level(walls, target, target, player)
    for _ in range(MAX_MOVES):
        move = drawn.choice(list(MOVES))
        step, behind = _shifted(level.player, move), _shifted(level.player, move, -1)
        if level.is_free(step) and step != level.box:
            pulls = behind == level.box and drawn.random() < 0.8
            level = level._replace(player=step, box=level.player if pulls else level.box)
    return level


class Sokoban(agentrl.Environment):
    """The reward is 1 for a box on its target."""

    seats = ("player",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Show the position at every turn; the conversation before it is left out."""
        player, data = ctx.agent("player"), ctx.task.data
        level = read_level(data["level"])
        replies = taught_moves(data["level"], ctx.task.id) if data["is_taught"] else None
        for _ in range(MAX_MOVES):
            reply = None if replies is None else next(replies, None)
            if replies is not None and reply is None:
                break
            player.restart()
            turn = await player.act(agentrl.user(level.text()), reply=reply)
            if turn.text not in MOVES:
                player.reward(ILLEGAL)
                return
            level = level.after(turn.text)
            if level.is_solved:
                break
        player.reward(1.0 if data["is_taught"] else float(level.is_solved))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0, teach: bool = False) -> agentrl.TaskSource:
        """Return 8,192 levels for training, and 512 others, which are never taught."""
        count = 8192 if split == "train" else 512
        return [_task(split, seed, index, teach=teach and split == "train") for index in range(count)]


def read_level(data: dict[str, Any]) -> Level:
    """Read the level of a task."""
    walls = frozenset((row, column) for row, column in data["walls"])
    target, box, player = ((row, column) for row, column in (data["target"], data["box"], data["player"]))
    return Level(walls, target, box, player)


def taught_moves(data: dict[str, Any], key: str) -> Iterator[str]:
    """Yield moves until the level is solved or cannot be solved any more."""
    level, drawn = read_level(data), random.Random(key)
    while moves := level.solution():
        move = moves[0] if drawn.random() < 0.5 else drawn.choice(list(MOVES))
        yield move
        level = level.after(move)


def _task(split: str, seed: int, index: int, *, teach: bool) -> agentrl.Task:
    drawn = random.Random(f"{split} {seed if split == 'train' else 0} {index}")
    while True:
        level = drawn_level(drawn)
        if not level.is_solved and (crc32(level.text().encode()) % 8 == 0) == (split == "held_out"):
            places = {"target": level.target, "box": level.box, "player": level.player}
            data = {"walls": sorted(map(list, level.walls)), **{name: list(place) for name, place in places.items()}}
            return agentrl.Task(id=f"{split}-{index}", data={"level": data, "is_taught": teach})
