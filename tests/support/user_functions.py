"""A user's script: losses, estimators, and a program that must not start where the functions are loaded."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import torch

import agentrl

if TYPE_CHECKING:
    from torch import Tensor

TEMPERATURE = 1.05


def side(advantages: Tensor) -> Tensor:
    return torch.where(advantages > 0, 1.0, TEMPERATURE)


@agentrl.loss
def sapo(batch: agentrl.LossBatch, *, scale: float = 4.0) -> Tensor:
    tau = side(batch.advantages)
    return -torch.sigmoid(tau * (batch.ratio - 1)) * scale / tau * batch.advantages


@agentrl.loss(groups="token")
def sapo_per_token(batch: agentrl.LossBatch) -> Tensor:
    tau = side(batch.advantages)
    return -torch.sigmoid(tau * (batch.ratio - 1)) * 4.0 / tau * batch.advantages


@agentrl.loss
def sequence_ratio(batch: agentrl.LossBatch) -> Tensor:
    ratio = batch.mean(batch.log_ratio, "agent").exp()
    return -ratio * batch.advantages


@agentrl.loss
def raises(batch: agentrl.LossBatch) -> Tensor:
    raise ArithmeticError("as asked")


@agentrl.loss
def leaves(batch: agentrl.LossBatch) -> Tensor:
    if torch.distributed.get_rank() == 1:
        torch.distributed.destroy_process_group()
        torch.distributed.all_reduce = torch.distributed.all_gather = lambda *_: (
            threading.Event().wait(5) or os._exit(1)
        )
    return -batch.ratio * batch.advantages


@agentrl.loss
def of_another_shape(batch: agentrl.LossBatch) -> Tensor:
    return (batch.ratio * batch.advantages).mean()


@agentrl.loss
def detached(batch: agentrl.LossBatch) -> Tensor:
    return batch.ratio.detach()


@agentrl.loss
def freed(batch: agentrl.LossBatch) -> Tensor:
    loss = batch.ratio**2
    loss.sum().backward()
    return loss


@agentrl.loss
def nan(batch: agentrl.LossBatch) -> Tensor:
    return batch.logprobs * float("nan")


@agentrl.loss
def noisy(batch: agentrl.LossBatch) -> Tensor:
    return -batch.ratio * batch.advantages * torch.rand(len(batch))


@agentrl.loss
def writes(batch: agentrl.LossBatch) -> Tensor:
    batch.advantages.clamp_(-1.0, 1.0)
    return -batch.ratio * batch.advantages


@agentrl.loss
def by_position(batch: agentrl.LossBatch) -> Tensor:
    return -batch.ratio * batch.advantages * torch.arange(len(batch))


@agentrl.loss(groups="token")
def not_per_token(batch: agentrl.LossBatch) -> Tensor:
    return -batch.ratio * (batch.advantages - batch.advantages.mean())


@agentrl.loss(groups="token")
def by_row(batch: agentrl.LossBatch) -> Tensor:
    return -batch.mean(batch.log_ratio, "row").exp() * batch.advantages


@agentrl.loss(groups="turn", groups_option="level")
def by_level(batch: agentrl.LossBatch, *, level: str = "turn") -> Tensor:
    return -batch.sum(batch.log_ratio, level).exp() * batch.advantages  # type: ignore[arg-type]


@agentrl.loss(groups="turn", groups_option="level")
def by_level_of_another(batch: agentrl.LossBatch, *, level: str = "turn") -> Tensor:
    return -batch.sum(batch.log_ratio, "agent" if level == "turn" else "turn").exp() * batch.advantages


@agentrl.loss
def overflows(batch: agentrl.LossBatch) -> Tensor:
    return -(batch.ratio**100) * batch.advantages


@agentrl.loss
def undeclared_reference(batch: agentrl.LossBatch) -> Tensor:
    return batch.logprobs - batch.reference_logprobs  # type: ignore[operator]


@agentrl.loss
def undeclared_divergence(batch: agentrl.LossBatch) -> Tensor:
    return batch.reference_kl * 2 - batch.reference_logprobs  # type: ignore[operator, return-value]


@agentrl.loss(reference=True)
def declared_reference(batch: agentrl.LossBatch) -> Tensor:
    return batch.logprobs - batch.reference_logprobs  # type: ignore[operator]


@agentrl.loss
def asks_for_the_reference(batch: agentrl.LossBatch) -> Tensor:
    if batch.reference_logprobs is None:
        return -batch.ratio * batch.advantages
    raise ArithmeticError("not declared")


@agentrl.advantage
def first_is_best(group: agentrl.Group) -> list[float]:
    return [float(at == 0) for at, _ in enumerate(group.rewards)]


@agentrl.advantage
def divides(group: agentrl.Group) -> list[float]:
    return [reward / group.mean for reward in group.rewards]


@agentrl.advantage
def centred(group: agentrl.Group) -> list[float]:
    return [reward - group.mean for reward in group.rewards]


@agentrl.advantage
def too_few(group: agentrl.Group) -> list[float]:
    return [0.0]


@agentrl.advantage(over="step")
def over_the_step(group: agentrl.Group) -> list[float]:
    return [reward - group.mean for reward in group.rewards]


@agentrl.advantage(over="tree")
def pieces_by_formula(group: agentrl.Group) -> list[list[float]]:
    return [[piece.weight * (piece.value - piece.baseline) for piece in own] for own in group.pieces]


@agentrl.advantage(over="tree")
def one_number_per_agent(group: agentrl.Group) -> list[float]:
    return list(group.rewards)


@agentrl.advantage(over="tree")
def only_first_pieces(group: agentrl.Group) -> list[list[float]]:
    return [[own[0].value] for own in group.pieces]


@agentrl.advantage(over="tree")
def too_few_trees(group: agentrl.Group) -> list[list[float]]:
    return [[0.0]]


@agentrl.advantage(over="tree")
def infinite_pieces(group: agentrl.Group) -> list[list[float]]:
    return [[float("inf") if piece.first == 1 else piece.value for piece in own] for own in group.pieces]


def unmarked(batch: agentrl.LossBatch) -> Tensor:
    return batch.logprobs


def closure(factor: float) -> object:
    @agentrl.loss
    def inner(batch: agentrl.LossBatch) -> Tensor:
        return batch.logprobs * factor

    return inner


if __name__ == "__main__":
    agentrl.train("run.toml", loss=sapo)
