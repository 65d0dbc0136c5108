"""One attempt of an episode while it runs: what its agents, resources and context share, and who serves them.

Owns the counts an episode adds up (`metrics`), and stops its time while it is parked or its engine is gone. `runner.py`
makes one per attempt; `context.py` is what the environment sees of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

from agentrl.core import ids
from agentrl.journal.entries import PlayedUnder
from agentrl.rollout.branches import current_branch

if TYPE_CHECKING:
    from agentrl.core.clock import Clock
    from agentrl.core.ports import ChatFormat, EpisodeHost, Sampler, SamplingParams
    from agentrl.core.records import EpisodeSpec, PolicyVersion
    from agentrl.environment.base import Limits
    from agentrl.rollout.branches import Branch
    from agentrl.rollout.calls import CallJournal
    from agentrl.rollout.parking import Parking
    from agentrl.rollout.partials import EpisodePartials
    from agentrl.rollout.room import Room
    from agentrl.rollout.time_limit import TimeLimit


_AS_THE_RUN: Mapping[str, PolicySettings] = MappingProxyType({})

OnCodeChange = Literal["try", "restart", "drop"]
"""What becomes of an episode whose environment was edited since it was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """How a policy is spoken to."""

    chat_format: ChatFormat
    sampling: SamplingParams
    limits: Limits
    is_outside: bool = False
    """It samples elsewhere than in the engine, and takes none of its memory."""

    @property
    def recorded(self) -> PlayedUnder:
        """As the first entry of an episode has it."""
        sampling, limits = self.sampling, self.limits
        return PlayedUnder(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=limits.max_tokens,
            max_turns=limits.max_turns,
            max_context=limits.max_context,
        )

    def as_recorded(self, began: PlayedUnder) -> PolicySettings:
        """The same policy, sampled and limited as when an episode began; a smaller context of now bounds it still."""
        sampling = replace(
            self.sampling,
            temperature=began.temperature,
            top_k=began.top_k,
            top_p=began.top_p,
            min_p=began.min_p,
            max_tokens=began.max_tokens,
        )
        limits = replace(
            self.limits,
            max_turns=began.max_turns,
            max_tokens=began.max_tokens,
            max_context=min(began.max_context, self.limits.max_context),
        )
        return replace(self, sampling=sampling, limits=limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """What is the same for every episode of a worker."""

    sampling: SamplingParams
    limits: Limits
    policies: Mapping[str, PolicySettings] = field(default_factory=dict)
    """Those that are spoken to otherwise than by the two before and the worker's chat format."""
    tool_timeout_s: float
    episode_timeout_s: float
    max_staleness: Mapping[str, int] = field(default_factory=dict)
    """By policy, for the order in which parked episodes go on; 0 where absent."""
    on_code_change: OnCodeChange = "try"
    infrastructure_attempts: int = 5
    """How often in a row an act's infrastructure may fail before it is taken for the policy's doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Who serves the episodes of a worker."""

    engine: Sampler
    default: PolicySettings
    """Of policies that are spoken to as the run says."""
    host: EpisodeHost
    clock: Clock
    settings: RolloutSettings
    parking: Parking
    room: Room

    def spoken_to(self, policy: str) -> PolicySettings:
        """How a policy is spoken to."""
        return self.settings.policies.get(policy) or self.default


class Sampling(Protocol):
    """What an episode asks of its agents: `agent.LiveAgent`."""

    seat: str
    policy: str
    counts: dict[str, float]
    """What of the episode's `metrics` is its doing."""

    def suspend(self) -> None:
        """Cut the call in flight and give back what the engine holds."""
        ...

    def versions(self) -> Iterable[PolicyVersion]:
        """Who sampled the agent's tokens."""
        ...


@dataclass(slots=True, eq=False)
class LiveEpisode:
    """An attempt that runs."""

    spec: EpisodeSpec
    journal: CallJournal
    services: Services
    partials: EpisodePartials
    began_under: Mapping[str, PolicySettings] = field(default_factory=lambda: _AS_THE_RUN)
    """By seat, and under "" for `ctx.limits`: those it began with, where the run has others now."""
    agents: list[Sampling] = field(default_factory=list)
    """In the order in which the program first asked for them."""
    limit: TimeLimit | None = None
    """Of the program, while it runs."""
    _counts: dict[str, float] | None = None
    """What is nobody's doing."""

    @property
    def name(self) -> str:
        """Episode and attempt, for messages and sessions."""
        return f"{self.spec.episode_id}.{self.spec.attempt}"

    @property
    def whereabouts(self) -> str:
        """Where the program is, for messages about what went wrong there."""
        agent = self.speaker()
        who = "before any turn" if agent is None else f"after a turn of seat {agent.seat!r}, policy {agent.policy!r}"
        return f"episode {self.name}, {who}"

    @property
    def limits(self) -> Limits:
        """What `ctx.limits` says."""
        began = self.began_under.get("")
        return self.services.settings.limits if began is None else began.limits

    def spoken_to(self, seat: str) -> PolicySettings:
        """How the policy of a seat is spoken to."""
        return self.began_under.get(seat) or self.services.spoken_to(self.spec.seats[seat].policy)

    def sampling_seed(self, call_id: str) -> int:
        """Of one engine call: the same on every execution of the attempt."""
        return ids.key64(self.spec.seed, self.spec.attempt, call_id)

    def metric(self, name: str, value: float, of: Sampling | None = None) -> None:
        """Add to a number of the episode, which is that of the agent whose doing it is."""
        if of is not None:
            counts = of.counts
        else:
            counts = self._counts = self._counts or {}
        counts[name] = counts.get(name, 0.0) + float(value)

    @property
    def metrics(self) -> dict[str, float]:
        """All that was added up, whosever doing it was."""
        metrics = dict(self._counts or {})
        for agent in self.agents:
            for name, value in agent.counts.items():
                metrics[name] = metrics.get(name, 0.0) + value
        return metrics

    def close(self) -> None:
        """The attempt has ended: its agents are let go, each of which knows its episode; what they counted stays."""
        self._counts = self.metrics
        self.agents.clear()

    def speaker(self, branch: Branch | None = None) -> Sampling | None:
        """Who acted last on a branch; default: where the program is now."""
        number = (branch or current_branch()).speaker
        return None if number is None else self.agents[number]

    def deadline(self) -> float:
        """See `parking.Parkable`."""
        bounds = self.services.settings.max_staleness
        return min(
            (
                version.step + bounds.get(version.policy, 0)
                for agent in self.agents
                for version in agent.versions()
                if version.policy == agent.policy  # an opponent's may be as old as it likes
            ),
            default=float("inf"),
        )

    def suspend(self) -> None:
        """See `parking.Parkable`."""
        self.metric("parked", 1.0)
        for agent in self.agents:
            agent.suspend()
        self._hold()

    def go_on(self) -> None:
        """See `parking.Parkable`."""
        self._release()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Within, the time that passes is the machinery's, not the episode's."""
        self._hold()
        try:
            yield
        finally:
            self._release()

    def got_on(self) -> None:
        """A turn ended: the program has its time again."""
        if self.limit is not None:
            self.limit.restart()

    def _hold(self) -> None:
        if self.limit is not None:
            self.limit.hold()

    def _release(self) -> None:
        if self.limit is not None:
            self.limit.release()
