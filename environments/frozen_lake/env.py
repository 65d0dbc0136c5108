"""The environment: a lake with holes, four moves, and a map that is shown once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import agentrl
from agentrl.environments.frozen_lake.tasks import SIZE, held_out_tasks, training_tasks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import gymnasium

    from agentrl.core.records import Task
    from agentrl.environment.environment import Split, TaskSource
    from agentrl.environment.gym import GymEpisode

MOVES = "LDRU"
"""Letters of the game's actions 0 to 3."""
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Movement of each action, as (rows, columns)."""
WALL = "#"


class FrozenLake(agentrl.GymEnvironment):
    """Reach the goal of a 4×4 lake without falling into a hole; the ice is not slippery.

    The first message is the map, row by row. Every message has the row, the column, and the neighboring squares to the
    left, below, to the right and above. The answer is one letter: L, D, R or U.
    """

    max_turns = 16
    illegal_reward = -0.5

    def make(self, task: Task) -> gymnasium.Env[Any, Any]:
        """Make gymnasium's game on the task's map."""
        import gymnasium

        self._map: Sequence[str] = task.data["map"]
        self._is_shown = False
        return gymnasium.make("FrozenLake-v1", desc=list(self._map), is_slippery=False, disable_env_checker=True)

    def render(self, observation: Any, info: Mapping[str, Any], env: gymnasium.Env[Any, Any]) -> str:
        """The position and its four neighbors; at first, the map before them."""
        row, column = divmod(int(observation), SIZE)
        around = "".join(self._cell(row + down, column + right) for down, right in STEPS)
        map_text = "" if self._is_shown else "\n".join(self._map) + "\n"
        self._is_shown = True
        return f"{map_text}{row}{column}{around}"

    def parse(self, text: str, env: gymnasium.Env[Any, Any]) -> int | None:
        """Accept exactly one letter."""
        return MOVES.index(text) if len(text) == 1 and text in MOVES else None

    def reward(self, task: Task, episode: GymEpisode) -> float:
        """Return 1 at the goal, else 0 on held-out maps. Training rewards are shaped: where the moves run out, more the
        farther from the start, and there no more than in a hole; least for an illegal move."""
        reached = sum(episode.rewards) > 0
        if reached or not task.data["shaped"]:
            return float(reached)
        if episode.illegal:
            return self.illegal_reward
        if episode.terminated:
            return -0.25
        row, column = divmod(int(self.env.unwrapped.s), SIZE)  # type: ignore[attr-defined]
        # Without the subtraction, walking to and fro would pay more than a try that ends in a hole.
        return 0.5 * (row + column) / (2 * (SIZE - 1)) - 0.25

    def _cell(self, row: int, column: int) -> str:
        return self._map[row][column] if 0 <= row < SIZE and 0 <= column < SIZE else WALL

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0, held_out: int = 512) -> TaskSource:
        """Return maps of gymnasium's `generate_random_map`.

        Args:
            split: training maps never contain a held-out one.
            seed: seed of the training maps; the held-out ones are the same for all seeds.
            held_out: number of seeds with held-out maps.
        """
        return held_out_tasks(held_out) if split == "held_out" else training_tasks(seed, held_out=held_out)
