"""The tasks: reasoning-gym's `chain_sum`, split so that no question is in both halves.

Invariants: a task depends on nothing but its split, seed and index; held-out questions are distinct; a training task
whose question is held out is drawn again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from agentrl.core.ids import key64
from agentrl.core.records import Task

TRAINING_TASKS = 1 << 32
"""As many as anyone will index: they are drawn, not stored."""


@lru_cache(maxsize=1)
def _source() -> Any:
    """The generator; item `i` depends on `i` alone. reasoning-gym takes a second to import, so it is imported late."""
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    config = ChainSumConfig(min_terms=2, max_terms=4, min_digits=1, max_digits=2, seed=0, size=1)
    return ChainSumDataset(config)


def _draw(*key: object) -> tuple[str, str]:
    """The question and answer drawn with `key`."""
    item = _source()[key64("chain_sum", *key)]
    return item["question"], item["answer"]


class HeldOutTasks:
    """`count` tasks with distinct questions, the same for everyone."""

    def __init__(self, count: int) -> None:
        answers: dict[str, str] = {}
        drawn = 0
        while len(answers) < count:
            question, answer = _draw("held_out", drawn)
            answers.setdefault(question, answer)
            drawn += 1
        self.questions = frozenset(answers)
        self._tasks = [
            Task(id=f"held_out-{index}", data={"question": question, "answer": answer})
            for index, (question, answer) in enumerate(answers.items())
        ]

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int, /) -> Task:
        return self._tasks[index]


class TrainingTasks:
    """Practically endless tasks without a held-out question."""

    def __init__(self, seed: int, held_out: HeldOutTasks) -> None:
        self._seed = seed
        self._held_out = held_out.questions

    def __len__(self) -> int:
        return TRAINING_TASKS

    def __getitem__(self, index: int, /) -> Task:
        if not 0 <= index < TRAINING_TASKS:
            raise IndexError(index)
        attempt = 0
        question, answer = _draw("train", self._seed, index, attempt)
        while question in self._held_out:
            attempt += 1
            question, answer = _draw("train", self._seed, index, attempt)
        return Task(id=f"train-{self._seed}-{index}", data={"question": question, "answer": answer})
