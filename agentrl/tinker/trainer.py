"""Training that a client drives step by step: adapters on a shared base model or all weights of one, with rows and
losses chosen by the client.

Clients send rows, each with a target per token, and decide when to step. Losses are sums over tokens, not means, as the
protocol defines them. Optimizers and models come from `agentrl.learn`; this module packs rows into micro-batches.

Invariants: a call that fails leaves the accumulated gradient as it was; equal calls in equal order give equal weights,
bit for bit, on one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn

from agentrl.config.plans import TrainerPlan
from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.sections import OptimizerConfig
from agentrl.core import ids
from agentrl.core.errors import ConfigError, NonFiniteError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.tokens import TrainingSample
from agentrl.learn.adapters import ROUTERS
from agentrl.learn.forward import SamplerDistributions
from agentrl.learn.learner import Learner
from agentrl.learn.models import LoadedBase, PolicyModel
from agentrl.learn.packing import pack
from agentrl.learn.publish import CanaryBuilder, Publisher
from agentrl.learn.step_columns import TokenColumns
from agentrl.learn.storage import LearnerProgress, load_checkpoint, save_checkpoint
from agentrl.tinker.losses import CLIENT_LOSSES, RATIO_MASK, ClientBatch, ClientLoss
from agentrl.tinker.messages import ClientRow

if TYPE_CHECKING:
    from agentrl.core.records import Float32Array
    from agentrl.tinker.stability import RowDistributions


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """The settings of one optimizer step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    """Norm to which a larger gradient is scaled; 0: none."""


class ForwardResult(NamedTuple):
    """The result of a pass over rows."""

    logprobs: Sequence[Float32Array]
    """Log-probabilities of each row's targets."""
    loss: float
    """Sum of the loss over all targets."""


class ClientTrainer:
    """Trains any number of adapters on one base model, or all its weights for one policy at a time. Calls are made by
    one thread.

    Args:
        plan: the trainer's part of the server's configuration.
        path: directory of the base model.
        run_directory: directory of the published versions.
        device: device of the model.
    """

    def __init__(self, plan: TrainerPlan, path: Path, run_directory: Path, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._base = LoadedBase.load(plan, path, device)
        self._publisher = Publisher(run_directory, plan.model)
        self._canary = CanaryBuilder(self._base.bare(), max_context=plan.max_context)
        self.learners: dict[str, Learner] = {}
        self.vocabulary = int(self._base.model.config.get_text_config().vocab_size)

    def layers(self, *, attention: bool, mlp: bool) -> tuple[str, ...]:
        """Return the layers of an adapter on the attention, the other layers, or both. Routers of experts are left out.

        Raises:
            ConfigError: there are none.
        """
        layers = (name for name in self._base.adaptable if not ROUTERS.intersection(name.split(".")))
        chosen = tuple(name for name in layers if (attention if _in_attention(name) else mlp))
        if not chosen:
            raise ConfigError(
                "an adapter needs layers, and there are none that can have one in the chosen parts of this model: set "
                "train_attn and train_mlp"
            )
        return () if attention and mlp else chosen

    def add(self, name: str, lora: LoraConfig | None, seed: int | None) -> None:
        """Begin with a new adapter or, if `lora` is None, with all weights of the base model.

        Raises:
            InputError: the model cannot have such an adapter.
        """
        if lora is None:
            assert not self.learners, f"all weights of the model belong to {[*self.learners]}"
            model = self._base.bare()
        else:
            model = self._base.add(name, lora, seed=seed)
        model.train(offload=self._plan.offloads_masters)
        self.learners[name] = Learner(
            name,
            model,
            PolicyConfig(lora=lora),
            OptimizerConfig(),
            steps=1,
            gae=None,
            device=self._device,
        )

    def remove(self, name: str) -> None:
        """Forget an adapter or all trained weights, with their optimizer and gradient."""
        self._base.remove(self.learners.pop(name).model)

    def has(self, name: str) -> bool:
        """Whether trained weights are in memory."""
        return name in self.learners

    def step(self, name: str) -> int:
        """Return the number of changes of the weights."""
        return self.learners[name].step

    def forward(
        self,
        name: str,
        rows: Sequence[ClientRow],
        loss: str,
        settings: Mapping[str, float],
        *,
        backward: bool,
        distributions: Sequence[RowDistributions] | None = None,
    ) -> ForwardResult:
        """Compute the log-probabilities and the loss of checked rows, and with `backward` add to the gradient.

        Args:
            name: name of the weights.
            rows: the rows.
            loss: name of the loss.
            settings: settings of the loss.
            backward: whether to add to the gradient.
            distributions: distributions that each row's targets were sampled from, for a loss that reads them.

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
            result = self._forward(learner, rows, loss, settings, backward, distributions)
            if backward and not all(bool(gradient.isfinite().all()) for gradient in learner.gradients()):
                raise NonFiniteError(f"the gradient of {loss} is NaN or infinite; nothing was added to the gradient")
            complete = True
        finally:
            for parameter, gradient in zip(parameters, before, strict=True) if backward else ():
                if not complete:
                    parameter.grad = gradient
                elif gradient is not None and parameter.grad is not None:
                    parameter.grad += gradient
        return result

    def _forward(
        self,
        learner: Learner,
        rows: Sequence[ClientRow],
        loss: str,
        settings: Mapping[str, float],
        backward: bool,
        distributions: Sequence[RowDistributions] | None,
    ) -> ForwardResult:
        model, chosen, total = learner.model, CLIENT_LOSSES[loss], 0.0
        logprobs: dict[int, Float32Array] = {}
        model.activate()
        samples = [_sample(number, row, chosen) for number, row in enumerate(rows)]
        columns = TokenColumns.of(samples, learner.version, group_size=1)
        for batch in pack(samples, max_tokens=self._plan.trainer.micro_batch_tokens, share=model.sharing):
            members = batch.members
            targets = np.concatenate([rows[number].targets for number in members])
            sampler = None if distributions is None else self._sampler([distributions[number] for number in members])
            with torch.set_grad_enabled(backward):
                head = model.token_logprobs(replace(batch, targets=targets), reference=sampler)
                client_batch = ClientBatch(
                    columns.take(columns.tokens_of(members)),
                    logprobs=head.logprob,
                    entropies=head.entropy,
                    reference_kl=head.reference_kl,
                )
                if RATIO_MASK in chosen.needs:
                    mask = np.concatenate([rows[number].columns[RATIO_MASK] for number in members]) != 0
                    client_batch.ratio_mask = torch.from_numpy(mask).to(head.logprob)
                token_losses = chosen.function(client_batch, **settings)
            if not bool(token_losses.isfinite().all()):
                raise NonFiniteError(f"the loss {loss} is NaN or infinite; nothing was added to the gradient")
            if backward:
                token_losses.sum().backward()
            total += float(token_losses.detach().double().sum())
            ends = np.cumsum([len(rows[number].targets) for number in members])
            parts = np.split(head.logprob.detach().cpu().numpy(), ends[:-1])
            logprobs.update(zip(members, parts, strict=True))
        return ForwardResult([logprobs[number] for number in range(len(rows))], total)

    def _sampler(self, distributions: Sequence[RowDistributions]) -> SamplerDistributions:
        """Join the distributions of rows."""
        ids, logprobs = map(np.concatenate, zip(*distributions, strict=True))
        return SamplerDistributions(torch.from_numpy(ids).to(self._device), torch.from_numpy(logprobs).to(self._device))

    def optim_step(self, name: str, settings: AdamSettings) -> float:
        """Take an optimizer step with the accumulated gradient, forget it, and return its norm before clipping.

        As in torch, a gradient of zeros moves the weights by momentum and decay. Without a pass since the last step
        there is no gradient, and the weights stay.

        Raises:
            NonFiniteError: the norm or a new weight is NaN or infinite. The weights are undefined: remove them.
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

    def write_version(self, name: str, version: PolicyVersion) -> WeightsRef:
        """Write the weights as an immutable version, which engines load."""
        model = self.learners[name].model
        model.activate()
        return self._publisher.publish(version, model, self._canary.of(model))

    def save(self, name: str, directory: Path) -> None:
        """Write weights and optimizer state into a directory that does not exist."""
        learner = self.learners[name]
        progress = LearnerProgress(step=learner.step, version=learner.version, report=None)
        save_checkpoint(directory, _named_parameters(learner.model), learner.optimizer, progress)

    def restore(self, name: str, directory: Path) -> None:
        """Continue from a directory of `save`, bit for bit."""
        learner = self.learners[name]
        learner.step = self._read(learner, directory).step

    def load(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Change the weights to those in a directory of `save`, and forget the gradient.

        Args:
            name: name of the weights.
            directory: a directory of `save`.
            optimizer: whether to load the optimizer's state; otherwise it starts empty.
        """
        learner = self.learners[name]
        self._read(learner, directory)
        if not optimizer:
            learner.optimizer.state.clear()
        learner.discard()
        learner.step += 1

    def _read(self, learner: Learner, directory: Path) -> LearnerProgress:
        progress = load_checkpoint(directory, _named_parameters(learner.model), learner.optimizer)
        learner.model.round_masters()
        return progress


def _named_parameters(model: PolicyModel) -> dict[str, nn.Parameter]:
    """Return the trained parameters by names without that of the adapter, which differs from process to process."""
    if model.adapter is None:
        return model.parameters
    return {name.replace(f".{model.adapter}.", "."): parameter for name, parameter in model.parameters.items()}


def _sample(number: int, row: ClientRow, loss: ClientLoss) -> TrainingSample:
    """Return a row with its last target appended, in which every token but the first is trained."""
    token_ids = np.append(row.token_ids, row.targets[-1:]).astype(np.int32)

    def column(name: str, default: float) -> Float32Array:
        values = row.columns.get(name, np.full(len(row.targets), default, np.float32))
        return np.concatenate([np.zeros(1, np.float32), values])

    return TrainingSample(
        token_ids=token_ids,
        loss_mask=np.arange(len(token_ids)) > 0,
        logprobs=column("logprobs", 0.0),
        advantages=column(loss.advantages, 1.0),
        episode_id=ids.episode_id("e", number),
    )


def _in_attention(layer: str) -> bool:
    """Whether a layer belongs to the attention of its block, by its name; all others are of the MLP."""
    return any("attn" in part or "attention" in part for part in layer.split("."))
