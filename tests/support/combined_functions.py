"""A user's functions with each declaration that decides what they can be combined with; none is ever called."""

from __future__ import annotations

from collections.abc import Sequence

import agentrl


@agentrl.advantage
def by_group(group: agentrl.Group) -> list[float]:
    return list(group.rewards)


@agentrl.advantage(over="step")
def by_step(group: agentrl.Group) -> list[float]:
    return list(group.rewards)


@agentrl.advantage(over="tree")
def by_tree(group: agentrl.Group) -> list[list[float]]:
    return [[reward] for reward in group.rewards]


@agentrl.loss(groups="token")
def of_token(batch: agentrl.LossBatch) -> object:
    return -batch.advantages * batch.logprobs


@agentrl.loss(groups="group")
def of_group(batch: agentrl.LossBatch) -> object:
    return -batch.advantages * batch.logprobs


@agentrl.loss
def of_step(batch: agentrl.LossBatch) -> object:
    return -batch.advantages * batch.logprobs


@agentrl.loss(groups="token", reference=True)
def with_reference(batch: agentrl.LossBatch) -> object:
    return -batch.advantages * batch.logprobs


@agentrl.loss(groups="token", divergence=True)
def with_divergence(batch: agentrl.LossBatch) -> object:
    return batch.reference_kl


@agentrl.scorer
def ranked(group: Sequence[agentrl.Scored]) -> list[float]:
    return [0.0 for _ in group]


@agentrl.scorer
def alone(group: Sequence[agentrl.Scored]) -> list[float]:
    return [0.0 for _ in group]
