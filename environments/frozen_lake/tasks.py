"""The tasks: random 4×4 maps, split into disjoint sets of maps.

Seeds do not separate maps: seeds 0 to 511 give 314 different maps, and 85 % of the 512 recur under later seeds. The
split is therefore by map. Invariants: held-out tasks do not depend on the run's seed; a training task with a held-out
map is redrawn; a task depends only on its split, seed and index.
"""

from __future__ import annotations

from functools import lru_cache

from agentrl.core.ids import stable_hash64
from agentrl.core.records import Task
from agentrl.environment.tasks import DrawnTasks

SIZE = 4


@lru_cache(maxsize=1 << 14)
def _map(seed: int) -> tuple[str, ...]:
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return tuple(generate_random_map(SIZE, seed=seed))


def held_out_tasks(count: int) -> list[Task]:
    """Return the maps of the generator's seeds 0 … `count` - 1; easy maps occur more than once."""
    return [
        Task(id=f"held_out-{seed}", data={"map": list(_map(seed)), "seed": 0, "shaped": False}) for seed in range(count)
    ]


def training_tasks(seed: int, *, held_out: int) -> DrawnTasks:
    """Return tasks that exclude the maps of the first `held_out` held-out tasks."""
    hidden = {_map(index) for index in range(held_out)}

    def draw(index: int, attempt: int) -> Task | None:
        rows = _map(stable_hash64("frozen_lake", seed, index, attempt) % (1 << 31))
        if rows in hidden:
            return None
        return Task(id=f"train-{seed}-{index}", data={"map": list(rows), "seed": 0, "shaped": True})

    return DrawnTasks(draw)
