"""One policy that learns: its model, optimizer and schedule.

Owns: the optimizer, the schedule. Does not own: losses and gradients (`trainer.py`), the layout of checkpoints
(`storage.py`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agentrl.core.files import ReadBytes, read_bytes
from agentrl.core.records import PolicyVersion, StepReport, WeightsRef
from agentrl.learn.storage import LearnerProgress, load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from agentrl.config.policies import PolicyConfig
    from agentrl.config.sections import OptimizerConfig
    from agentrl.learn.models import PolicyModel
    from agentrl.learn.step_columns import TokenColumns


@dataclass(slots=True)
class StepAccumulator:
    """The accumulated sums of the step in progress."""

    step_id: int
    units: set[tuple[str, int]] = field(default_factory=set)
    columns: list[TokenColumns] = field(default_factory=list)
    """Columns of each call that accumulated gradient."""
    totals: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    suspect: str | None = None
    """First episode on this rank whose loss was not finite."""
    seconds: float = 0.0


class Learner:
    """One policy's model, optimizer and step count."""

    def __init__(
        self,
        name: str,
        model: PolicyModel,
        policy: PolicyConfig,
        optimizer: OptimizerConfig,
        *,
        steps: int,
    ) -> None:
        self.name = name
        self.model = model
        self.step = 0
        self.version = PolicyVersion(name, 0, 0)
        self.published: WeightsRef | None = None
        """Newest version that this process has published."""
        self.report: StepReport | None = None
        self.open: StepAccumulator | None = None
        self.learning_rate = policy.learning_rate
        self.steps = steps
        self.schedule = optimizer
        self.max_grad_norm = optimizer.max_grad_norm
        self.optimizer = _adamw(model.parameters, policy.learning_rate)

    @property
    def current(self) -> PolicyVersion:
        """Version of the model's weights now, published or not."""
        return self.version._replace(step=self.step)

    def rate(self, step_id: int) -> float:
        """Return the learning rate of a step."""
        return self.schedule.rate(self.learning_rate, step_id, self.steps)

    def gradients(self) -> list[Tensor]:
        """Return the policy's gradients in parameter order; an unused parameter has a gradient of zeros."""
        return [_gradient(parameter) for parameter in self.model.parameters.values()]

    def load(self, directory: Path, read: ReadBytes = read_bytes) -> LearnerProgress:
        """Load weights and optimizer state from a policy's folder in a checkpoint; see `load_checkpoint`."""
        state = load_checkpoint(directory, self.model.parameters, self.optimizer, read)
        self.model.round_masters()
        return state

    def save(self, directory: Path, *, writes: bool) -> None:
        """Write weights and optimizer state to a policy's folder in a checkpoint; see `save_checkpoint`."""
        state = LearnerProgress(step=self.step, version=self.version, report=self.report)
        save_checkpoint(directory, self.model.parameters, self.optimizer, state, writes=writes)

    def apply(self, rate: float, grad_norm: float) -> None:
        """Take an optimizer step with the accumulated gradient, of norm `grad_norm` over all ranks.

        If the gradient is exactly 0, weights and optimizer state stay unchanged, despite momentum.
        """
        if grad_norm > 0.0:
            self.move_weights(rate)

    def move_weights(self, rate: float) -> None:
        """Change the policy's weights by AdamW, also if the gradient is 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.model.round_masters()

    def discard(self) -> None:
        """Discard the accumulated gradient."""
        self.open = None
        for parameter in self.model.parameters.values():
            parameter.grad = None


def _adamw(parameters: dict[str, nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        list(parameters.values()),
        lr=learning_rate,
        betas=(0.9, 0.95),  # the second is usually .999, but a run has only tens of steps
        weight_decay=0.0,  # RL fine-tunes weights that should not decay
        fused=True,
    )


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
