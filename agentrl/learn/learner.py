"""One policy that learns: its model, optimizer and schedule, and with `credit.advantage = "gae"` its value head.

A `ValueHead` predicts a conversation's remaining reward from the policy's last hidden state at a token. The hidden
state is detached, so the head changes no gradient of the policy. The head has its own optimizer with a constant
learning rate. Its gradient is summed over the ranks, but neither counted in the gradient norm nor clipped, and every
rank holds the whole head. Engines do not read it: it is in checkpoints, not in published versions.

Owns: the optimizers, the schedule, the head. Does not own: losses and gradients (`trainer.py`), the formula of the
advantages (`credit.advantages`), the layout of checkpoints (`storage.py`).
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agentrl.core.files import ReadBytes, read_bytes
from agentrl.core.records import PolicyVersion, StepReport, WeightsRef
from agentrl.learn.storage import STATE_FILE, LearnerProgress, load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from agentrl.config.policies import PolicyConfig
    from agentrl.config.sections import GaeConfig, OptimizerConfig
    from agentrl.learn.models import PolicyModel
    from agentrl.learn.step_columns import TokenColumns

_BETAS = (0.9, 0.95)
"""AdamW's betas. The second lies below the usual 0.999, because a run has only tens of steps."""
_VALUE_HEAD = "value_head"
"""Folder of the value head in a policy's folder of a checkpoint, in the same layout."""


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


class ValueHead(nn.Module):
    """V = w · h / H + b, h being the last hidden state that predicts a token, of H numbers; 0 before the first step.

    AdamW moves each weight by at most about its learning rate in a step. Divided by H, so does V for a model of any
    width, since hidden states after the last norm are of order 1.

    Values are linear in the parameters, so the squared error of fixed returns is quadratic. Its gradient after an
    update follows from the one before and the second derivative, Σ w x xᵀ with x = (h / H, 1): no hidden state is kept
    for further updates in the same step.

    Args:
        width: H.
        device: device of the parameters.
        updates: number of updates per step.
    """

    def __init__(self, width: int, device: torch.device, updates: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, device=device))
        self.bias = nn.Parameter(torch.zeros((), device=device))
        self.updates = updates
        self.curvature = torch.zeros((width + 1, width + 1), device=device) if updates > 1 else None
        """Second derivative of the step's value loss, summed over tokens; None if one update needs none."""
        self._inputs: Tensor | None = None
        """Inputs x of the newest call, [n, H + 1]."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values [n] of hidden states [n, width], without a gradient by the hidden states."""
        inputs = hidden.detach().float() / len(self.weight)
        if self.curvature is not None:
            self._inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        return inputs @ self.weight + self.bias

    def add_curvature(self, weights: Tensor) -> None:
        """Add the tokens of the newest call to the second derivative, with their weights in the loss, [n]."""
        if self.curvature is not None and self._inputs is not None:
            self.curvature += self._inputs.T @ (self._inputs * weights[:, None])
            self._inputs = None

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the step's updates, the first with the accumulated gradient."""
        assert self.weight.grad is not None
        assert self.bias.grad is not None
        start = torch.cat([self.weight, self.bias[None]])
        gradient = torch.cat([self.weight.grad, self.bias.grad[None]])
        for update in range(self.updates):
            if update and self.curvature is not None:
                change = torch.cat([self.weight, self.bias[None]]) - start
                further = gradient + self.curvature @ change
                self.weight.grad.copy_(further[:-1])
                self.bias.grad.copy_(further[-1])
            optimizer.step()

    def discard(self) -> None:
        """Forget the step's second derivative."""
        self._inputs = None
        if self.curvature is not None:
            self.curvature.zero_()


class Learner:
    """One policy's model, optimizer, step count and, with `gae`, value head."""

    def __init__(
        self,
        name: str,
        model: PolicyModel,
        policy: PolicyConfig,
        optimizer: OptimizerConfig,
        *,
        steps: int,
        gae: GaeConfig | None,
        device: torch.device,
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
        self.warmup_steps = optimizer.warmup_steps
        self.final_share = optimizer.final_learning_rate_share
        self.max_grad_norm = optimizer.max_grad_norm
        self.optimizer = _adamw(model.parameters, policy.learning_rate)
        self.value_head: ValueHead | None = None
        self.value_parameters: dict[str, nn.Parameter] = {}
        """Parameters of the value head; empty without one."""
        if gae is not None:
            width = model.model.config.get_text_config().hidden_size
            self.value_head = ValueHead(width, device, gae.value_updates)
            self.value_parameters = dict(self.value_head.named_parameters())
            self.value_optimizer = _adamw(self.value_parameters, gae.value_learning_rate)

    @property
    def current(self) -> PolicyVersion:
        """Version of the model's weights now, published or not."""
        return self.version._replace(step=self.step)

    def rate(self, step_id: int) -> float:
        """Return the learning rate of a step: it rises linearly to its full value at step `warmup_steps`, then falls
        linearly to its final share at the run's last step."""
        if step_id < self.warmup_steps:
            return self.learning_rate * step_id / self.warmup_steps
        fallen = min(1.0, (step_id - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.learning_rate * (1.0 - fallen * (1.0 - self.final_share))

    def gradients(self) -> list[Tensor]:
        """Return the policy's gradients in parameter order; an unused parameter has a gradient of zeros."""
        return [_gradient(parameter) for parameter in self.model.parameters.values()]

    def value_gradients(self) -> list[Tensor]:
        """Return the gradients of the value head, and the second derivative for further updates; empty without one."""
        gradients = [_gradient(parameter) for parameter in self.value_parameters.values()]
        if self.value_head is not None and self.value_head.curvature is not None:
            gradients.append(self.value_head.curvature)
        return gradients

    def add_value_curvature(self, weights: NDArray[np.float32]) -> None:
        """Add a micro-batch to the second derivative of the value loss, if further updates need it.

        Args:
            weights: weight of each token in the loss, [n].
        """
        if self.value_head is not None:
            self.value_head.add_curvature(torch.from_numpy(weights).to(self.value_head.bias.device))

    def load(self, directory: Path, read: ReadBytes = read_bytes) -> LearnerProgress:
        """Load weights and optimizer state from a policy's folder in a checkpoint; see `load_checkpoint`.

        The value head is reinitialized if the checkpoint was written with an advantage other than `gae`.
        """
        state = load_checkpoint(directory, self.model.parameters, self.optimizer, read)
        self.model.round_masters()
        if self.value_head is not None:
            with suppress(FileNotFoundError):
                read(directory / _VALUE_HEAD / STATE_FILE, 0, 1)
                load_checkpoint(directory / _VALUE_HEAD, self.value_parameters, self.value_optimizer, read)
        return state

    def save(self, directory: Path, *, writes: bool) -> None:
        """Write weights and optimizer state to a policy's folder in a checkpoint; see `save_checkpoint`."""
        state = LearnerProgress(step=self.step, version=self.version, report=self.report)
        save_checkpoint(directory, self.model.parameters, self.optimizer, state, writes=writes)
        if self.value_head is not None:
            save_checkpoint(directory / _VALUE_HEAD, self.value_parameters, self.value_optimizer, state, writes=writes)

    def apply(self, rate: float, grad_norm: float) -> None:
        """Take an optimizer step with the accumulated gradient, of norm `grad_norm` over all ranks.

        If the gradient is exactly 0, weights and optimizer state stay unchanged, despite momentum. This applies to the
        policy and its value head separately.
        """
        if grad_norm > 0.0:
            self.move_weights(rate)
        parameters = self.value_parameters.values()
        if self.value_head is not None and any(bool(_gradient(parameter).any()) for parameter in parameters):
            self.value_head.update(self.value_optimizer)

    def move_weights(self, rate: float) -> None:
        """Change the policy's weights by AdamW, also if the gradient is 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.model.round_masters()

    def discard(self) -> None:
        """Discard the accumulated gradient."""
        self.open = None
        for parameter in (*self.model.parameters.values(), *self.value_parameters.values()):
            parameter.grad = None
        if self.value_head is not None:
            self.value_head.discard()


def _adamw(parameters: dict[str, nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        list(parameters.values()),
        lr=learning_rate,
        betas=_BETAS,
        weight_decay=0.0,  # RL fine-tunes weights that should not decay
        fused=True,
    )


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
