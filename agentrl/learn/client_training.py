"""Training that a client drives step by step: adapters on a shared base model or all weights of one, with rows and
losses chosen by the client.

The clients of a server send rows, each with a target per token, and decide when to step. Losses are sums over tokens,
not means, as the protocol of `agentrl.gateway.tinker` defines them. `learner.py` holds the optimizers, `models.py` the
models; here are the formulas, and how a row becomes a packed micro-batch.

Invariants: a call that fails leaves the accumulated gradient as it was; equal calls in equal order give equal weights,
bit for bit, on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.config.plans import TrainerPlan
from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.sections import OptimizerConfig
from agentrl.core.errors import ConfigError, InputError, NonFiniteError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.tokens import ClientRow, TrainingSample
from agentrl.learn.learner import Learner
from agentrl.learn.models import ROUTERS, LoadedBase, PolicyModel
from agentrl.learn.packing import MicroBatch, pack
from agentrl.learn.publish import CanaryBuilder, Publisher
from agentrl.learn.storage import LearnerProgress, load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.core.records import Float32Array


# The protocol's formulas, of log-probabilities and of the columns and settings that the client sent. Those of
# `losses.py` differ: their ratio is limited, while here an overflow is an error; the PPO there has a dual clip; and
# importance sampling there does not differentiate the ratio, the loss itself here.

Columns = Mapping[str, Tensor]
"""The client's columns of a micro-batch, `[n]` each, by name: `logprobs` (when sampled), `advantages`, `weights`."""
Settings = Mapping[str, float]


def _ratio(logprobs: Tensor, columns: Columns) -> Tensor:
    """Probability of each target now over that when it was sampled."""
    return (logprobs - columns["logprobs"]).exp()


def _clipped(ratio: Tensor, settings: Settings) -> Tensor:
    return ratio.clamp(settings.get("clip_low_threshold", 0.8), settings.get("clip_high_threshold", 1.2))


def _cross_entropy(logprobs: Tensor, columns: Columns, _: Settings) -> Tensor:
    """-w log p."""
    return -columns["weights"] * logprobs


def _importance_sampling(logprobs: Tensor, columns: Columns, _: Settings) -> Tensor:
    """-r A, with the ratio r."""
    return -_ratio(logprobs, columns) * columns["advantages"]


def _ppo(logprobs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    """-min(r A, clip(r) A): Schulman et al., 2017, arXiv:1707.06347."""
    ratio, advantages = _ratio(logprobs, columns), columns["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def _cispo(logprobs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    """-sg(clip(r)) A log p, with a stopped gradient: MiniMax-M1, 2025, arXiv:2506.13585."""
    return -_clipped(_ratio(logprobs, columns), settings).detach() * columns["advantages"] * logprobs


def _dro(logprobs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    """-(A log p - β/2 (log r)²): Richemond et al., 2024, arXiv:2405.19107."""
    penalty = 0.5 * settings.get("beta", 0.05) * (logprobs - columns["logprobs"]) ** 2
    return -(columns["advantages"] * logprobs - penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLoss:
    """A loss that clients choose by name."""

    function: Callable[[Tensor, Columns, Settings], Tensor]
    """Loss of each token, to be summed, of log-probabilities, columns and settings."""
    needs: tuple[str, ...] = ()
    """Columns that each row must have."""
    accepts: tuple[str, ...] = ()
    """Further columns that the formula reads. Any other column is refused: it would change nothing."""
    settings: tuple[str, ...] = ()


_CLIPPED = ("clip_low_threshold", "clip_high_threshold")
CLIENT_LOSSES: Mapping[str, ClientLoss] = {
    "cross_entropy": ClientLoss(function=_cross_entropy, accepts=("weights",)),
    "importance_sampling": ClientLoss(function=_importance_sampling, needs=("logprobs", "advantages")),
    "ppo": ClientLoss(function=_ppo, needs=("logprobs", "advantages"), settings=_CLIPPED),
    "cispo": ClientLoss(function=_cispo, needs=("logprobs", "advantages"), settings=_CLIPPED),
    "dro": ClientLoss(function=_dro, needs=("logprobs", "advantages"), settings=("beta",)),
}
_COLUMNS: Mapping[str, float] = {"logprobs": 0.0, "advantages": 0.0, "weights": 1.0}
"""Columns of a row, with the value of a row that has none."""


def check_rows(
    rows: Sequence[ClientRow], loss: str, settings: Mapping[str, float], *, vocabulary: int, max_context: int
) -> None:
    """Check what a client wants to train on, before it is accepted.

    Raises:
        InputError: the loss is unknown, or a row cannot be trained with it; the message names the row.
    """
    chosen = CLIENT_LOSSES.get(loss)
    if chosen is None:
        raise InputError(
            f"the loss {loss[:60]!r} is not served here; there are: {', '.join(CLIENT_LOSSES)}. Any other loss of "
            "log-probabilities can be computed in the script, with forward_backward_custom"
        )
    if unknown := sorted(settings.keys() - set(chosen.settings)):
        raise InputError(
            f"the loss {loss} has no setting {unknown[0][:60]!r}; it has {', '.join(chosen.settings) or 'none'}"
        )
    if not rows:
        raise InputError("there are no rows to train on")
    for number, row in enumerate(rows):
        _check_row(f"datum {number}", row, loss, chosen, vocabulary=vocabulary, max_context=max_context)


def _check_row(where: str, row: ClientRow, loss: str, chosen: ClientLoss, *, vocabulary: int, max_context: int) -> None:
    count = len(row.token_ids)
    if not count:
        raise InputError(f"{where}: it has no tokens")
    if count > max_context:
        raise InputError(f"{where}: {count} tokens, but this server's contexts have at most {max_context}")
    if len(row.targets) != count:
        raise InputError(f"{where}: {len(row.targets)} target_tokens for {count} input tokens; there must be one each")
    for name, tokens in (("model_input", row.token_ids), ("target_tokens", row.targets)):
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise InputError(f"{where}: {name} has a token outside the vocabulary, [0, {vocabulary})")
    readable = (*chosen.needs, *chosen.accepts)
    for name, column in row.columns.items():
        if name not in readable:
            advice = "; multiply the advantages by them" if name == "weights" and "advantages" in readable else ""
            raise InputError(
                f"{where}: the loss {loss} does not read {name[:60]!r}, only target_tokens, {', '.join(readable)}: "
                f"leave it out{advice}"
            )
        if len(column) != count:
            raise InputError(f"{where}: {len(column)} {name} for {count} tokens; there must be one each")
        if not np.isfinite(column).all():
            raise InputError(f"{where}: {name} has a value that is NaN or infinite")
    if missing := [name for name in chosen.needs if name not in row.columns]:
        raise InputError(f"{where}: the loss {loss} needs {missing[0]}")


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
        self, name: str, rows: Sequence[ClientRow], loss: str, settings: Mapping[str, float], *, backward: bool
    ) -> ForwardResult:
        """Compute the log-probabilities and the loss of checked rows, and with `backward` add to the gradient.

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
            result = self._forward(learner, rows, loss, settings, backward=backward)
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
        self, learner: Learner, rows: Sequence[ClientRow], loss: str, settings: Mapping[str, float], *, backward: bool
    ) -> ForwardResult:
        model, total = learner.model, 0.0
        logprobs = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        model.activate()
        batches = pack(
            [_sample(row) for row in rows], max_tokens=self._plan.trainer.micro_batch_tokens, share=model.sharing
        )
        for batch in batches:
            micro_batch = replace(batch, targets=_column([row.targets for row in rows], batch))
            columns = {
                name: torch.from_numpy(
                    _column(
                        [row.columns.get(name, np.full(len(row.targets), value, np.float32)) for row in rows], batch
                    )
                ).to(self._device)
                for name, value in _COLUMNS.items()
            }
            with torch.set_grad_enabled(backward):
                head = model.token_logprobs(micro_batch)
                losses = CLIENT_LOSSES[loss].function(head.logprob, columns, settings)
            if not bool(losses.isfinite().all()):
                raise NonFiniteError(f"the loss {loss} is NaN or infinite; nothing was added to the gradient")
            if backward:
                losses.sum().backward()
            total += float(losses.detach().double().sum())
            computed = head.logprob.detach().cpu().numpy()
            for row, position, logprob in zip(batch.sample, batch.position, computed, strict=True):
                logprobs[row][position - 1] = logprob
        return ForwardResult(logprobs, total)

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


def _sample(row: ClientRow) -> TrainingSample:
    """Return a row with its last target appended, in which every token but the first is trained."""
    token_ids = np.append(row.token_ids, row.targets[-1:]).astype(np.int32)
    zeros = np.zeros(len(token_ids), np.float32)
    return TrainingSample(
        token_ids=token_ids, loss_mask=np.arange(len(token_ids)) > 0, logprobs=zeros, advantages=zeros
    )


def _column(values: Sequence[NDArray[Any]], batch: MicroBatch) -> NDArray[Any]:
    """Gather a column of the rows for the trained tokens of a micro-batch."""
    places = zip(batch.sample, batch.position, strict=True)
    return np.array([values[row][position - 1] for row, position in places], values[0].dtype)


def _in_attention(layer: str) -> bool:
    """Whether a layer belongs to the attention of its block, by its name; all others are of the MLP."""
    return any("attn" in part or "attention" in part for part in layer.split("."))
