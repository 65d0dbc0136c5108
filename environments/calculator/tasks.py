"""The tasks: reasoning-gym's `chain_sum`, split into disjoint sets of questions.

Invariants: a task depends only on its split, seed and index; held-out questions are distinct; a training task with a
held-out question is redrawn.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

from agentrl.core.ids import stable_hash64
from agentrl.core.records import Task
from agentrl.environment.tasks import DrawnTasks


@lru_cache(maxsize=1)
def _source() -> Any:
    """Return the generator; item `i` depends only on `i`. reasoning-gym takes a second to import, so import it late."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, which reasoning-gym imports, on its first import
        from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    config = ChainSumConfig(min_terms=2, max_terms=4, min_digits=1, max_digits=2, seed=0, size=1)
    return ChainSumDataset(config)


def _draw(*key: object) -> dict[str, str]:
    """Return the question and answer drawn with `key`, as a task's data."""
    item = _source()[stable_hash64("chain_sum", *key)]
    return {"question": item["question"], "answer": item["answer"]}


def held_out_tasks(count: int) -> list[Task]:
    """Return `count` tasks with distinct questions, independent of the run's seed."""
    questions: dict[str, dict[str, str]] = {}
    num_drawn = 0
    while len(questions) < count:
        data = _draw("held_out", num_drawn)
        questions.setdefault(data["question"], data)
        num_drawn += 1
    return [Task(id=f"held_out-{index}", data=data) for index, data in enumerate(questions.values())]


def training_tasks(seed: int, *, held_out: int) -> DrawnTasks:
    """Return tasks that exclude the first `held_out` held-out questions."""
    hidden = {task.data["question"] for task in held_out_tasks(held_out)}

    def draw(index: int, attempt: int) -> Task | None:
        data = _draw("train", seed, index, attempt)
        return None if data["question"] in hidden else Task(id=f"train-{seed}-{index}", data=data)

    return DrawnTasks(draw)
