"""The environment: a question, a calculator, and a reward for the right answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import agentrl
from agentrl.environments.calculator.tasks import held_out_tasks, training_tasks

if TYPE_CHECKING:
    from agentrl.core.records import Task
    from agentrl.environment.environment import Split, TaskSource
    from agentrl.environment.tools import ToolEpisode


class Calculator(agentrl.ToolEnvironment):
    """Sums and differences of a few terms, with a calculator for single operations."""

    @agentrl.tool
    def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:
        """One operation on two integers."""
        if op == "+":
            return a + b
        return a - b if op == "-" else a * b

    def reward(self, task: Task, episode: ToolEpisode) -> float:
        """Return 1 if the answer is exactly the right number, else 0."""
        return float(episode.answer.strip() == task.data["answer"])

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0, held_out: int = 512) -> TaskSource:
        """Return questions of reasoning-gym's `chain_sum`, with 2 to 4 terms of 1 or 2 digits.

        Args:
            split: training tasks never contain a held-out question.
            seed: seed of the training tasks; the held-out ones are the same for all seeds.
            held_out: number of held-out questions, all different.
        """
        return held_out_tasks(held_out) if split == "held_out" else training_tasks(seed, held_out=held_out)
