"""The input of a loss: `TokenColumns` of the trained tokens with the model's outputs, as tensors.

Owns: means and sums over ids. Does not own: the formulas (`losses.py`), the forward pass, the normalizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from agentrl.learn.device_copies import device_tensors
from agentrl.learn.step_columns import LOG_RATIO_LIMIT, Id, TokenColumns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from agentrl.learn.forward import HeadOutput


class LossBatch:
    """The trained tokens of one optimizer step of one policy, as columns of shape [n].

    A loss returns the loss of each token. Ids group the tokens: `batch.mean(values, "agent")` is, for each token, the
    mean over its conversation. Of the columns only `logprobs`, `entropies` and `reference_kl` carry a gradient.

    Example:
        A sequence-level ratio (GSPO) is `batch.mean(batch.log_ratio, "agent").exp()`.
    """

    def __init__(
        self,
        columns: TokenColumns,
        *,
        logprobs: Tensor,
        entropies: Tensor,
        reference_logprobs: Tensor | None = None,
        reference_kl: Tensor | None = None,
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        self.logprobs = logprobs
        """log pi of each token under the trained weights."""
        self.entropies = entropies
        """Entropy in nats of the distribution of each token, under the trained weights."""
        arrays = columns.loss_inputs() | ({} if weights is None else {"weights": weights})
        device_arrays = device_tensors(arrays, logprobs.device)
        self.weights = device_arrays.pop("weights", None)
        """Factor on each token's loss, from the normalizer, if the trainer evaluates the loss per micro-batch."""
        self.reference_logprobs = reference_logprobs
        """Log-probabilities of the reference, or of the base model under the adapter; None unless the loss is marked
        with `reference`."""
        self.reference_kl = reference_kl
        """KL(pi || ref) of the distribution of each token, in nats: exact over the reference's likeliest tokens,
        estimated by the sampled token over the others (`forward.reference_divergence`); None unless the loss is marked
        with `divergence`."""
        self.mask = torch.ones(len(columns), dtype=torch.bool, device=logprobs.device)
        """Always True: these columns hold trained tokens only, none of prompts and tools."""
        self.seats: Sequence[str] = columns.names["seat"]
        """Names of the seats, indexed by the ids in `seat`."""
        for name, column in device_arrays.items():
            assert not hasattr(self, name), f"{name} is taken: choose another in_loss for that column"
            setattr(self, name, column)

    @staticmethod
    def of(
        columns: TokenColumns, head: HeadOutput, reference: HeadOutput | None, weights: NDArray[np.float32]
    ) -> LossBatch:
        """Make the batch of a model's outputs, whose columns are leaves, detached from the model's graph."""
        return LossBatch(
            columns,
            logprobs=head.logprob.detach().requires_grad_(),
            entropies=head.entropy.detach().requires_grad_(),
            reference_logprobs=None if reference is None else reference.logprob,
            reference_kl=None if head.reference_kl is None else head.reference_kl.detach().requires_grad_(),
            weights=weights,
        )

    behavior_logprobs: Tensor
    """log mu of each token, recorded when it was sampled, under the version that sampled it."""
    advantages: Tensor
    """Advantage of each token's agent, or of its turn."""
    lags: Tensor
    """int32: optimizer steps between the weights that sampled the token and the trained weights; -1: unknown."""
    row: Tensor
    """Id of the token sequence, int64 from 0. An agent has one sequence, and one more for each rewrite of its
    context.
    """
    turn: Tensor
    """Id of the turn that sampled the token: one engine call of one agent. An agent's ids ascend in time."""
    agent: Tensor
    """Id of the conversation: one agent in one episode."""
    episode: Tensor
    """Id of the episode."""
    seat: Tensor
    """Id of the seat; see `seats`."""
    group: Tensor
    """Id of the group: the episodes that are compared with each other."""

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def log_ratio(self) -> Tensor:
        """log w = log pi - log mu, clamped to ±`LOG_RATIO_LIMIT`, [n]."""
        return (self.logprobs - self.behavior_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @property
    def ratio(self) -> Tensor:
        """Importance ratio w = pi / mu, [n]."""
        return self.log_ratio.exp()

    @cached_property
    def proximal_logprobs(self) -> Tensor:
        """Log-probabilities of a policy between the sampling and the trained one, without gradient, [n].

        log mu + (1 - 1/lag) (log pi - log mu), and log pi at lag 0: the version one step before the current one, by
        interpolation instead of a forward pass (A-3PO, arXiv:2512.06547; AReaL's `loglinear`). An unknown lag is 1.
        """
        lags = self.lags.to(self.logprobs.dtype)
        share = torch.where(self.lags == 0, torch.ones_like(lags), 1 - 1 / lags.clamp(min=1))
        now = self.logprobs.detach()
        return self.behavior_logprobs + share * (now - self.behavior_logprobs)

    def sum(self, values: Tensor, by: Id) -> Tensor:
        """Return for each token the sum of `values` over the tokens with the same id, shape [n]."""
        number = getattr(self, by)
        size = int(number.max()) + 1 if len(number) else 0
        return values.new_zeros(size).index_add(0, number, values)[number]

    def mean(self, values: Tensor, by: Id) -> Tensor:
        """Return for each token the mean of `values` over the tokens with the same id, shape [n]."""
        return self.sum(values, by) / self.sum(torch.ones_like(values), by)


class TokenGradients(NamedTuple):
    """A loss and its derivatives, per token, [n] each, without gradient."""

    loss: Tensor
    by_logprob: Tensor
    by_entropy: Tensor
    by_reference_kl: Tensor
    weight: Tensor
    """Absolute derivative of the policy loss by the token's log-probability, without entropy and KL."""

    @property
    def derivatives(self) -> tuple[Tensor, Tensor, Tensor]:
        """The derivatives by logprob, entropy and divergence from the reference."""
        return self.by_logprob, self.by_entropy, self.by_reference_kl
