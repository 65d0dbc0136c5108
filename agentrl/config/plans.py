"""What follows from a run's configuration for its parts: devices, engines, trainer and workers. `RunConfig` makes
these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import TypeAdapter

from agentrl.config.policies import AnyPolicy, BotPolicy, FrozenPolicy, LocalPolicy, PolicyConfig, RemotePolicy
from agentrl.config.scorers import ScorerConfig
from agentrl.config.sections import (
    CreditConfig,
    EvaluationSamplingConfig,
    GatewayConfig,
    ModelConfig,
    SamplingConfig,
    SandboxConfig,
)
from agentrl.core.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config.sections import ClusterConfig, EngineConfig, TrainerConfig
    from agentrl.core.ports import Refresh


class BaseModelPlan(NamedTuple):
    """A base model, and the policies that an engine of their own serves on it."""

    path: str
    name: str
    """Name for people, with the policy that trains all weights under vLLM."""
    policies: Mapping[str, AnyPolicy]

    @property
    def trained(self) -> dict[str, PolicyConfig]:
        """Policies that learn."""
        return {name: policy for name, policy in self.policies.items() if isinstance(policy, PolicyConfig)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDemand:
    """The processes of a run that compute."""

    stays_on_cpu: bool
    """Whether the run uses no GPU of this machine."""
    ranks: int
    """Number of trainer ranks; 0 if no policy learns."""
    bases: tuple[str, ...]
    """Names of the base models, each of which has its own engines."""
    engine: EngineConfig
    workers: int
    """Number of worker processes; 0: episodes run in the run's own process."""
    engine_in_process: bool
    """Whether the engine runs in the run's process."""
    cluster: ClusterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The engines of a run."""

    bases: tuple[BaseModelPlan, ...]
    """Base models; each has its own engines."""
    engine: EngineConfig
    dtype: str
    slots: int
    """Number of conversations that an engine samples at once."""
    refresh: Mapping[str, Refresh]
    """When conversations move to newer weights, by policy."""
    filtered: Sequence[str]
    """Policies sampled through a filter, whose kept sets are recorded."""
    fixed_shapes: bool
    threads: int
    """Torch threads of each engine."""
    external: Mapping[str, RemotePolicy | BotPolicy]
    """Policies that no engine serves, with the share of `max_concurrent` of one process."""
    demand: DeviceDemand
    """All processes of the run that compute."""

    def with_max_context(self, max_context: int) -> EnginePlan:
        """Return the plan with another length of contexts."""
        return replace(self, engine=self.engine.model_copy(update={"max_context": max_context}))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """What a trainer learns, and how; each of its ranks gets the same."""

    bases: tuple[BaseModelPlan, ...]
    """Base models of the run."""
    policies: Mapping[str, PolicyConfig]
    """Policies that learn."""
    steps: Mapping[str, int]
    """Number of optimizer steps of each of them."""
    trainer: TrainerConfig
    model: ModelConfig
    credit: CreditConfig
    max_context: int
    max_sampled: int
    """Number of tokens that an agent can sample in an episode, contexts aside."""
    capture_routing: bool
    seed: int
    threads: int
    """Torch threads of each rank."""
    demand: DeviceDemand
    """All processes of the run that compute."""

    def with_token_limits(self, max_context: int, micro_batch_tokens: int) -> TrainerPlan:
        """Return the plan with other lengths of contexts and micro-batches."""
        trainer = self.trainer.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
        return replace(self, max_context=max_context, trainer=trainer)

    @property
    def in_process(self) -> bool:
        """Whether the trainer runs in the run's process."""
        return self.trainer.ranks == 1 and not self.demand.cluster.address

    @property
    def offloads_masters(self) -> bool:
        """Whether all weights are on the device of the only rank, and what its optimizer changes in main memory."""
        return self.trainer.sharding == "offload" and self.trainer.ranks == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatAssignment:
    """The policies that hold the seats of episodes."""

    seats: Mapping[str, str | tuple[str, ...]]
    """Bindings of `[seats]`."""
    policies: tuple[str, ...]

    @property
    def line_ups(self) -> int:
        """Period of the assignment, in groups: after this many groups, every seat has its first policy again."""
        return math.lcm(*(len(holder) for holder in self.seats.values() if isinstance(holder, tuple)), 1)

    def policy_of(self, seat: str, group: int = 0) -> str:
        """Return the policy that holds `seat` in a group. Bindings of child episodes (`Env.seat`) fall back to the bare
        seat name.

        Raises:
            ConfigError: the seat has no binding, and there is more than one policy.
        """
        bare = seat.rsplit(".", 1)[-1]
        for key in (seat, bare):
            if key in self.seats:
                holder = self.seats[key]
                return holder if isinstance(holder, str) else holder[group % len(holder)]
        if len(self.policies) == 1:
            return self.policies[0]
        if bare in self.policies:
            return bare
        raise ConfigError(
            f"seat {seat!r} is bound to no policy; add it to [seats] (policies: {', '.join(sorted(self.policies))})"
        )

    def policies_of(self, seats: Iterable[str]) -> set[str]:
        """Return the policies that hold any of these seats in any group."""
        return {self.policy_of(seat, group) for seat in seats for group in range(self.line_ups)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """What plays and scores the episodes of a run; each worker gets the same."""

    model: ModelConfig
    bases: tuple[BaseModelPlan, ...]
    policies: Mapping[str, AnyPolicy]
    seats: SeatAssignment
    sampling: SamplingConfig
    sampling_by_policy: Mapping[str, SamplingConfig]
    gateway: GatewayConfig
    evaluation_sampling: EvaluationSamplingConfig
    """How policies that learn are sampled in evaluations."""
    scorers: Mapping[str, ScorerConfig]
    external: Mapping[str, RemotePolicy | BotPolicy]
    """Policies that no engine serves, with the share of `max_concurrent` of one process."""
    credit: CreditConfig
    episode_timeout_s: float
    sandbox: SandboxConfig
    seed: int
    workers: int
    """Number of processes that play episodes."""
    max_in_flight: Literal["auto"] | int

    @property
    def trained(self) -> dict[str, PolicyConfig]:
        """Policies that learn."""
        return {name: policy for name, policy in self.policies.items() if isinstance(policy, PolicyConfig)}

    @property
    def scored(self) -> frozenset[str]:
        """Policies whose turns are scored: those that learn. Without any (evaluations, forks): those that learned, else
        those with weights."""
        weights = {name for name, policy in self.policies.items() if isinstance(policy, LocalPolicy)}
        learned = {name for name, policy in self.policies.items() if isinstance(policy, FrozenPolicy) and policy.scored}
        return frozenset(self.trained or learned or weights)


def plan_data(plan: RolloutPlan) -> dict[str, Any]:
    """Convert a worker's plan to data that can be sent to its process."""
    data: dict[str, Any] = TypeAdapter(RolloutPlan).dump_python(plan, mode="json")
    return data


def plan_from_data(data: Mapping[str, Any]) -> RolloutPlan:
    """Return the plan that a worker received, the result of `plan_data`."""
    return TypeAdapter(RolloutPlan).validate_python(data)
