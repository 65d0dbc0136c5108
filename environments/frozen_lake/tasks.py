"""The tasks: random 4×4 maps, split so that no map is in both halves.

Seeds do not separate maps: seeds 0 to 511 give 314 different maps, and 85 % of the 512 recur under later seeds. So
the split is by map. Invariants: held-out tasks are the same for everyone; a training task whose map is held out is
drawn again; a task depends on nothing but its split, seed and index.
"""

from __future__ import annotations

from functools import lru_cache

from agentrl.core.ids import key64
from agentrl.core.records import Task

TRAINING_TASKS = 1 << 32
"""As many as anyone will index: they are drawn, not stored."""
SIZE = 4


@lru_cache(maxsize=1 << 14)
def _map(seed: int) -> tuple[str, ...]:
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return tuple(generate_random_map(SIZE, seed=seed))


class HeldOutTasks:
    """The maps of the generator's seeds 0 … `count` - 1, as it draws them: easy ones come more than once."""

    def __init__(self, count: int) -> None:
        maps = [_map(seed) for seed in range(count)]
        self.maps = frozenset(maps)
        self._tasks = [
            Task(id=f"held_out-{seed}", data={"map": list(rows), "seed": 0, "shaped": False})
            for seed, rows in enumerate(maps)
        ]

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int, /) -> Task:
        return self._tasks[index]


class TrainingTasks:
    """Practically endless tasks without a held-out map."""

    def __init__(self, seed: int, held_out: HeldOutTasks) -> None:
        self._seed = seed
        self._held_out = held_out.maps

    def __len__(self) -> int:
        return TRAINING_TASKS

    def __getitem__(self, index: int, /) -> Task:
        if not 0 <= index < TRAINING_TASKS:
            raise IndexError(index)
        attempt = 0
        while True:
            rows = _map(key64("frozen_lake", self._seed, index, attempt) % (1 << 31))
            if rows not in self._held_out:
                return Task(id=f"train-{self._seed}-{index}", data={"map": list(rows), "seed": 0, "shaped": True})
            attempt += 1
