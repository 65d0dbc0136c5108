"""Batches for losses, from plain lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from agentrl.config.algorithms import LOSSES
from agentrl.config.sections import LossConfig, TrainerConfig
from agentrl.core.custom_functions import Kind, declaration_of, find_function, installed_functions
from agentrl.core.tokens import LOSS_COLUMNS, Tokens
from agentrl.learn.loss_batch import LossBatch, TokenGradients
from agentrl.learn.losses import BUILT_IN, Loss, make_loss
from agentrl.learn.step_columns import IDS, TokenColumns


def _packaged(kind: Kind) -> dict[str, Any]:
    """The functions of packages/algorithms."""
    names = [name for name, place in installed_functions(kind).items() if place.startswith("agentrl_algorithms.")]
    return {name: find_function(kind, name, key=kind)[1] for name in names}


PACKAGED_ADVANTAGES = _packaged("advantage")
ALL_LOSSES = BUILT_IN | _packaged("loss")
"""The built-in losses and those of packages/algorithms, by name."""
DECLARATIONS = {name: LOSSES.get(name) or declaration_of(loss) for name, loss in ALL_LOSSES.items()}


def loss_named(name: str, **options: Any) -> Loss:
    """A loss of `ALL_LOSSES`."""
    return make_loss(TrainerConfig(loss=LossConfig.model_validate({"name": name, **options})))


def token_table(behavior: Any, advantages: Any) -> Tokens:
    """Trained tokens with these log-probabilities and advantages, [n] each; other columns of losses have their fill."""
    count = len(behavior)
    filled: Any = {column.name: np.full(count, column.fill, column.dtype) for column in LOSS_COLUMNS}
    return Tokens(token_ids=np.zeros(count, np.int32), **(filled | {"logprobs": behavior, "advantages": advantages}))


def batch_of(
    logprobs: Sequence[float],
    behavior: Sequence[float],
    advantages: Sequence[float],
    *,
    entropies: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    divergence: Sequence[float] | None = None,
    lags: Sequence[int] | None = None,
    ids: Mapping[str, Sequence[int]] | None = None,
    kind: type[LossBatch] = LossBatch,
) -> LossBatch:
    """Tokens in float64; those without an id have 0."""
    count = len(logprobs)
    numbers = {name: np.array((ids or {}).get(name, [0] * count), np.int64) for name in IDS}
    columns = TokenColumns(
        tokens=token_table(np.array(behavior, np.float64), np.array(advantages, np.float64)),
        lags=np.array(lags or [0] * count, np.int32),
        names={"seat": ["agent"], "group": ["g0"]},
        starts=np.array([0, count]),
        **numbers,
    )
    return kind(
        columns,
        logprobs=torch.tensor(list(logprobs), dtype=torch.float64, requires_grad=True),
        entropies=torch.tensor(list(entropies or [0.0] * count), dtype=torch.float64, requires_grad=True),
        reference_logprobs=None if reference is None else torch.tensor(list(reference), dtype=torch.float64),
        reference_kl=None
        if divergence is None
        else torch.tensor(list(divergence), dtype=torch.float64, requires_grad=True),
    )


def conversations(lengths: Sequence[int], advantages: Sequence[float], groups: Sequence[int], seed: int) -> LossBatch:
    """Conversations of one seat, each of one turn: float32 advantages as a trainer has them, random log-probabilities
    of policy and reference in float64.
    """
    agent = np.repeat(np.arange(len(lengths)), lengths)
    count = len(agent)
    draw = torch.Generator().manual_seed(seed)
    columns = TokenColumns(
        tokens=token_table(np.zeros(count, np.float32), np.repeat(np.array(advantages, np.float32), lengths)),
        lags=np.zeros(count, np.int32),
        names={"seat": ["agent"], "group": [f"g{number}" for number in range(max(groups) + 1)]},
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        row=agent,
        turn=agent,
        agent=agent,
        episode=agent,
        seat=np.zeros(count, np.int64),
        group=np.repeat(groups, lengths),
    )
    return LossBatch(
        columns,
        logprobs=torch.randn(count, generator=draw, dtype=torch.float64).requires_grad_(),
        entropies=torch.zeros(count, dtype=torch.float64).requires_grad_(),
        reference_logprobs=torch.randn(count, generator=draw, dtype=torch.float64),
    )


def evaluated(loss: Loss, batch: LossBatch) -> TokenGradients:
    """The loss and its derivatives, undivided."""
    return loss.evaluate(batch, torch.ones(len(batch), dtype=torch.float64))
