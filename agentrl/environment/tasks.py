"""Sources of practically endless training tasks, and the reward of an agent that proposes tasks.

A task is drawn when it is accessed and stored nowhere: by a function (`DrawnTasks`), or as the seed of a game
(`GameSeedTasks`). `learnability` estimates how much there is to learn from a proposed task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from agentrl.core.errors import EpisodeError, InputError, RewardError
from agentrl.core.ids import stable_hash64
from agentrl.core.records import Task
from agentrl.environment.context import ChildResult
from agentrl.environment.environment import Split

COUNT = 1 << 32
"""Size of a task source without an end: larger than any index in use."""
MAX_ATTEMPTS = 10_000
HELD_OUT_SEEDS = 512
SEEDS = 1 << 31


class DrawnTasks:
    """A `TaskSource` of tasks that a function draws.

    Args:
        draw: function of (index, attempt) that returns a task, or None if the draw is held out: it is called again with
            the next attempt. Must be deterministic.

    Example:
        >>> held_out = {3, 7}
        >>> def draw(index, attempt):
        ...     number = (index + attempt) % 10
        ...     return None if number in held_out else Task(id=f"train-{index}", data={"number": number})
        >>> [DrawnTasks(draw)[index].data["number"] for index in range(5)]
        [0, 1, 2, 4, 4]
    """

    def __init__(self, draw: Callable[[int, int], Task | None]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int, /) -> Task:
        """Draw a task.

        Raises:
            IndexError: the index is negative, or too large.
            InputError: all attempts were held out.
        """
        if not 0 <= index < COUNT:
            raise IndexError(index)
        for attempt in range(MAX_ATTEMPTS):
            task = self._draw(index, attempt)
            if task is not None:
                return task
        raise InputError(
            f"training task {index}: all of {MAX_ATTEMPTS:,} draws were held-out tasks; hold out fewer, or draw from "
            "more tasks"
        )


class GameSeedTasks:
    """Tasks that are seeds of a game: 512 are held out, the same for every run; the others are practically endless."""

    def __init__(self, split: Split, seed: int) -> None:
        self._split = split
        self._seed = seed

    def __len__(self) -> int:
        return HELD_OUT_SEEDS if self._split == "held_out" else SEEDS

    def __getitem__(self, index: int, /) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._split == "held_out":
            return Task(id=f"held_out-{index}", data={"seed": index})
        game_seed = HELD_OUT_SEEDS + stable_hash64("gym", self._seed, index) % (SEEDS - HELD_OUT_SEEDS)
        return Task(id=f"train-{self._seed}-{index}", data={"seed": game_seed})


def learnability(solved: Iterable[ChildResult]) -> float:
    """Estimate 4·p·(1 - p) of a task from attempts at it, without bias: 0 if all or none succeed, largest if half do.

    p is the mean reward of an attempt, in [0, 1]. The plug-in estimate from the pass rate p̂ of K attempts is biased:
    E[4·p̂·(1 - p̂)] = 4·p·(1 - p)·(K - 1)/K, because the variance of p̂ is p·(1 - p)/K. It is too small, and more so if
    dropped attempts lower K. This function returns the U-statistic 4/(K·(K - 1)) · Σ_{i≠j} r_i·(1 - r_j), whose terms
    multiply two independent attempts; for rewards of 0 and 1 it equals 4·p̂·(1 - p̂)·K/(K - 1). Its maximum is 4/3 at K
    = 4 and 8/7 at K = 8. Related measures: 1 - p for 0 < p < 1 (AZR, arXiv:2505.03335); min(p, 1 - p) (R-Zero,
    arXiv:2508.05004), which has no unbiased estimate.

    Args:
        solved: results of the attempts; dropped ones are left out.

    Raises:
        EpisodeError: fewer than two are left (`too_few_children`): there is no estimate, and the proposer's unit is
            dropped.
        RewardError: a reward is outside [0, 1].

    Example:
        >>> def attempt(reward):
        ...     return ChildResult(episode_id="e0~0.r#1.0", drop_reason=None, rewards={"solver": reward})
        >>> learnability([attempt(1.0), attempt(0.0), attempt(0.0), attempt(1.0)])
        1.3333333333333333
    """
    rewards = [reward for child in solved if (reward := child.reward) is not None]
    count = len(rewards)
    if count < 2:
        raise EpisodeError(
            f"only {count} of the child episodes were committed; learnability needs two or more",
            reason="too_few_children",
        )
    outside = [reward for reward in rewards if not 0.0 <= reward <= 1.0]
    if outside:
        raise RewardError(f"learnability needs rewards between 0 and 1, but a child episode got {outside[0]}")
    total = math.fsum(rewards)
    pairs = total * (count - total) - math.fsum(reward * (1.0 - reward) for reward in rewards)
    return 4.0 * pairs / (count * (count - 1))


def split_tasks(tasks: Sequence[Task], split: Split, held_out: float) -> list[Task]:
    """Return the tasks of a split of a format that has none: a share of the tasks, by a hash of their ids, is held out.

    Args:
        tasks: all tasks.
        split: `train` or `held_out`.
        held_out: the share that is held out: one task or more, unless it is 0, when both splits are all tasks.

    Example:
        >>> tasks = [Task(id=name, data={}) for name in "abcde"]
        >>> [[task.id for task in split_tasks(tasks, split, 0.2)] for split in ("train", "held_out")]
        [['a', 'b', 'd', 'e'], ['c']]
    """
    count = math.ceil(held_out * len(tasks))
    held_out_ids = {task.id for task in sorted(tasks, key=lambda task: stable_hash64("held out", task.id))[:count]}
    return [task for task in tasks if not count or (task.id in held_out_ids) == (split == "held_out")]
