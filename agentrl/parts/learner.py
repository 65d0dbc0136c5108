"""Training that a client drives pass by pass: adapters on a shared base model, or all weights of one.

The client chooses rows, losses and when to step; a loss is a function of a `RowBatch` and is summed over tokens.

Invariants: a failed call leaves the accumulated gradient as it was; equal calls in equal order give equal weights, bit
for bit, on one device.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.config.plans import TrainerPlan
from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.sections import OptimizerConfig
from agentrl.core import ids
from agentrl.core.errors import ConfigError, NonFiniteError
from agentrl.core.files import rename_durably, staging_directory
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.tokens import TrainingSample
from agentrl.learn.adapters import ROUTERS
from agentrl.learn.forward import SamplerDistributions
from agentrl.learn.learner import Learner
from agentrl.learn.models import LoadedBase, PolicyModel
from agentrl.learn.packing import pack
from agentrl.learn.publish import CanaryBuilder, Publisher
from agentrl.learn.storage import LearnerProgress, converting_write_errors, load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from agentrl.core.records import Float32Array, Int32Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A row of training data: after each input token, one target."""

    token_ids: Int32Array
    targets: Int64Array
    """Token whose log-probability is computed after each input token; need not be the next input token."""
    columns: Mapping[str, Float32Array]
    """Inputs of the loss by name, one number per target; all rows of a pass have the same names."""
    top_ids: Int64Array | None = None
    """Likeliest tokens of the distribution that each target was sampled from, `[n, k]`, for losses that read
    `RowBatch.divergence`."""
    top_logprobs: Float32Array | None = None
    """Their log-probabilities, then that of all other tokens together, `[n, k + 1]`."""


class RowBatch(NamedTuple):
    """What a loss sees: some rows of a pass, each whole, as columns of shape `[n]`."""

    logprobs: Tensor
    """Log-probability of each target, with gradient."""
    divergence: Tensor | None
    """KL(mu || pi) from the distribution that each target was sampled from, with gradient, if the rows have it."""
    row: Tensor
    """Number of each target's row."""
    columns: Mapping[str, Tensor]
    """Columns of the rows."""

    def sum_by_row(self, values: Tensor) -> Tensor:
        """Return for each target the sum of `values` over its row."""
        return values.new_zeros(int(self.row.max()) + 1).index_add(0, self.row, values)[self.row]


class PassResult(NamedTuple):
    """The result of a pass over rows."""

    logprobs: Sequence[Float32Array]
    """Log-probabilities of each row's targets."""
    loss: float
    """Sum of the loss over all targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """Settings of one optimizer step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    """Norm to which a larger gradient is scaled; 0: none."""


class ClientLearner:
    """Trains any number of adapters on one base model, or all its weights under one name at a time.

    One thread makes all calls; `open_parts` makes a learner for each policy that learns.

    Args:
        plan: the trainer's part of the run.
        path: directory of the base model.
        run_directory: directory of the published versions.
        device: device of the model.
    """

    def __init__(self, plan: TrainerPlan, path: Path, run_directory: Path, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._base = LoadedBase.load(plan, path, device)
        self._publisher = Publisher(run_directory)
        self._canary = CanaryBuilder(self._base.bare(), max_context=plan.max_context)
        self.learners: dict[str, Learner] = {}
        self.vocabulary = int(self._base.model.config.get_text_config().vocab_size)

    @property
    def loaded(self) -> Sequence[str]:
        """Names of the weights in memory."""
        return [*self.learners]

    def layers(self, *, attention: bool, mlp: bool) -> tuple[str, ...]:
        """Return the layers of an adapter on the attention, the other layers, or both (empty: all of them). Routers of
        experts are left out.

        Raises:
            ConfigError: there are none.
        """
        layers = (name for name in self._base.adaptable if not ROUTERS.intersection(name.split(".")))
        chosen = tuple(name for name in layers if (attention if _in_attention(name) else mlp))
        if not chosen:
            raise ConfigError(
                "an adapter needs layers, and the chosen parts of this model have none: choose the attention and the "
                "other layers"
            )
        return () if attention and mlp else chosen

    def load(self, name: str, lora: LoraConfig | None, seed: int | None = None) -> None:
        """Begin with a new adapter or, if `lora` is None, with all weights of the base model.

        Raises:
            InputError: the model cannot have such an adapter.
        """
        if lora is None:
            assert not self.learners, f"all weights of the model belong to {self.loaded}"
            model = self._base.bare()
        else:
            model = self._base.add(name, lora, seed=seed)
        model.train(offload=self._plan.offloads_masters)
        policy, optimizer = PolicyConfig(lora=lora), OptimizerConfig()
        self.learners[name] = Learner(name, model, policy, optimizer, steps=1)

    def unload(self, name: str) -> None:
        """Forget weights in memory, if they are there, with their optimizer and gradient."""
        if name in self.learners:
            self._base.remove(self.learners.pop(name).model)

    def steps(self, name: str) -> int:
        """Return the number of changes of the weights."""
        return self.learners[name].step

    def forward_backward(
        self, name: str, rows: Sequence[Row], loss: Callable[[RowBatch], Tensor], *, backward: bool = True
    ) -> PassResult:
        """Compute the log-probabilities and the loss of rows, and with `backward` add to the gradient.

        Raises:
            NonFiniteError: the loss or its gradient is NaN or infinite; nothing was added.
        """
        learner = self.learners[name]
        parameters = list(learner.model.parameters.values())
        before = [parameter.grad for parameter in parameters]
        if backward:
            for parameter in parameters:
                parameter.grad = None
        complete = False
        try:
            result = self._forward(learner, rows, loss, backward)
            if backward and not all(bool(gradient.isfinite().all()) for gradient in learner.gradients()):
                raise NonFiniteError("the gradient is NaN or infinite; nothing was added to it")
            complete = True
        finally:
            for parameter, gradient in zip(parameters, before, strict=True) if backward else ():
                if not complete:
                    parameter.grad = gradient
                elif gradient is not None and parameter.grad is not None:
                    parameter.grad += gradient
        return result

    def _forward(
        self, learner: Learner, rows: Sequence[Row], loss: Callable[[RowBatch], Tensor], backward: bool
    ) -> PassResult:
        model, total = learner.model, 0.0
        logprobs: dict[int, Float32Array] = {}
        model.activate()
        samples = [_sample(number, row) for number, row in enumerate(rows)]
        for batch in pack(samples, max_tokens=self._plan.trainer.micro_batch_tokens, share=model.sharing):
            members = [rows[number] for number in batch.members]
            counts = [len(row.targets) for row in members]
            targets = np.concatenate([row.targets for row in members])
            with torch.set_grad_enabled(backward):
                head = model.token_logprobs(replace(batch, targets=targets), reference=self._distributions(members))
                columns = {
                    column: torch.from_numpy(np.concatenate([row.columns[column] for row in members])).to(head.logprob)
                    for column in members[0].columns
                }
                numbers = torch.from_numpy(np.repeat(np.arange(len(members)), counts)).to(self._device)
                token_losses = loss(RowBatch(head.logprob, head.reference_kl, numbers, columns))
            if not bool(token_losses.isfinite().all()):
                raise NonFiniteError("the loss is NaN or infinite; nothing was added to the gradient")
            if backward:
                token_losses.sum().backward()
            total += float(token_losses.detach().double().sum())
            parts = np.split(head.logprob.detach().cpu().numpy(), np.cumsum(counts)[:-1])
            logprobs.update(zip(batch.members, parts, strict=True))
        return PassResult([logprobs[number] for number in range(len(rows))], total)

    def _distributions(self, rows: Sequence[Row]) -> SamplerDistributions | None:
        """Join the distributions of rows; None if they have none."""
        top_ids = [row.top_ids for row in rows if row.top_ids is not None]
        top_logprobs = [row.top_logprobs for row in rows if row.top_logprobs is not None]
        if not top_ids:
            return None
        joined = (torch.from_numpy(np.concatenate(parts)).to(self._device) for parts in (top_ids, top_logprobs))
        return SamplerDistributions(*joined)

    def step(self, name: str, settings: AdamSettings) -> float:
        """Take an optimizer step with the accumulated gradient, forget it, and return its norm before clipping.

        As in torch, a gradient of zeros moves the weights by momentum and decay. Without a pass since the last step
        there is no gradient, and the weights stay.

        Raises:
            NonFiniteError: the norm or a new weight is NaN or infinite. The weights are undefined: unload them.
        """
        learner = self.learners[name]
        has_gradient = any(parameter.grad is not None for parameter in learner.model.parameters.values())
        gradients = learner.gradients()
        norm = float(torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients])))
        if not math.isfinite(norm):
            raise NonFiniteError("the norm of the gradient is infinite; no step was taken. Scale the loss down")
        if settings.max_grad_norm and norm > settings.max_grad_norm:
            for gradient in gradients:
                gradient.mul_(settings.max_grad_norm / norm)
        for group in learner.optimizer.param_groups:
            group.update(betas=(settings.beta1, settings.beta2), eps=settings.eps, weight_decay=settings.weight_decay)
        if has_gradient:
            learner.move_weights(settings.learning_rate)
        if not all(bool(parameter.isfinite().all()) for parameter in learner.model.parameters.values()):
            raise NonFiniteError("the step made a weight NaN or infinite, so it was not taken; lower the learning rate")
        learner.discard()
        learner.step += 1
        return norm

    def publish(self, name: str, version: PolicyVersion) -> WeightsRef:
        """Write the weights as an immutable version, which engines load once `Parts.record_version` has recorded it."""
        model = self.learners[name].model
        model.activate()
        return self._publisher.publish(version, model, self._canary.of(model))

    def save(self, name: str, directory: Path, extra: Mapping[str, bytes] | None = None) -> None:
        """Write weights, optimizer state and further files into a directory, which appears whole or not at all and
        replaces an earlier one.

        Raises:
            StorageError: writing failed.
        """
        learner = self.learners[name]
        progress = LearnerProgress(step=learner.step, version=learner.version, report=None)
        with converting_write_errors(directory), staging_directory(directory, depth=3) as staging:
            save_checkpoint(staging / "state", _named_parameters(learner.model), learner.optimizer, progress)
            for file, content in (extra or {}).items():
                (staging / file).write_bytes(content)
            shutil.rmtree(directory, ignore_errors=True)
            rename_durably(staging, directory)

    def restore(self, name: str, directory: Path) -> None:
        """Continue from a directory of `save`, bit for bit.

        Raises:
            TrainerError: the directory lacks a file, or holds weights of another shape.
        """
        learner = self.learners[name]
        learner.step = load_checkpoint(directory / "state", _named_parameters(learner.model), learner.optimizer).step
        learner.model.round_masters()

    def replace(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Change the weights to those in a directory of `save`, and forget the gradient. Counts as a step.

        Args:
            name: name of the weights.
            directory: a directory of `save`.
            optimizer: whether to read the optimizer's state; otherwise it starts empty.
        """
        learner = self.learners[name]
        steps = learner.step
        self.restore(name, directory)
        if not optimizer:
            learner.optimizer.state.clear()
        learner.discard()
        learner.step = steps + 1


def _named_parameters(model: PolicyModel) -> dict[str, nn.Parameter]:
    """Return the trained parameters by names without that of the adapter, which differs from process to process."""
    if model.adapter is None:
        return model.parameters
    return {name.replace(f".{model.adapter}.", "."): parameter for name, parameter in model.parameters.items()}


def _sample(number: int, row: Row) -> TrainingSample:
    """Return a row with its last target appended, in which every token but the first is trained."""
    token_ids = np.append(row.token_ids, row.targets[-1:]).astype(np.int32)
    zeros = np.zeros(len(token_ids), np.float32)
    return TrainingSample(
        token_ids=token_ids,
        loss_mask=np.arange(len(token_ids)) > 0,
        logprobs=zeros,
        advantages=zeros,
        episode_id=ids.episode_id("e", number),
    )


def _in_attention(layer: str) -> bool:
    """Whether a layer belongs to the attention of its block, by its name; all others are of the MLP."""
    return any("attn" in part or "attention" in part for part in layer.split("."))
