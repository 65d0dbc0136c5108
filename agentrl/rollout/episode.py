"""One attempt of an episode while it runs: what its agents, resources and context share, and who serves them.

Owns the counts an episode adds up (`metrics`), and stops its time while it is parked or its engine is gone. `runner.py`
makes one per attempt; `context.py` is what the environment sees of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from agentrl.core import ids
from agentrl.rollout.branches import current_branch

if TYPE_CHECKING:
    from agentrl.core.clock import Clock
    from agentrl.core.ports import ChatFormat, EpisodeHost, Sampler, SamplingParams
    from agentrl.core.records import EpisodeSpec, PolicyVersion
    from agentrl.environment.base import Limits
    from agentrl.rollout.calls import CallJournal
    from agentrl.rollout.parking import Parking
    from agentrl.rollout.partials import EpisodePartials
    from agentrl.rollout.room import Room


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
    chat_format: ChatFormat
    host: EpisodeHost
    clock: Clock
    settings: RolloutSettings
    parking: Parking
    room: Room

    def spoken_to(self, policy: str) -> PolicySettings:
        """How a policy is spoken to."""
        settings = self.settings
        own = settings.policies.get(policy)
        return own or PolicySettings(chat_format=self.chat_format, sampling=settings.sampling, limits=settings.limits)


class Sampling(Protocol):
    """What an episode asks of its agents: `agent.LiveAgent`."""

    seat: str
    policy: str
    counts: dict[str, float]
    """What of the episode's `metrics` is the agent's doing."""

    def waited(self, seconds: float) -> None:
        """Tools took so long after its newest turn."""
        ...

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
    metrics: dict[str, float] = field(default_factory=dict)
    agents: list[Sampling] = field(default_factory=list)
    """In the order in which the program first asked for them."""
    limit: asyncio.Timeout | None = None
    """Of the program, while it runs."""
    _held: int = 0
    """How many wait for the machinery: while any does, the limit stands still."""
    _left_s: float = 0.0
    """Of the limit, while it stands still."""

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

    def sampling_seed(self, call_id: str) -> int:
        """Of one engine call: the same on every execution of the attempt."""
        return ids.key64(self.spec.seed, self.spec.attempt, call_id)

    def metric(self, name: str, value: float, of: Sampling | None = None) -> None:
        """Add to a number of the episode, and to that of the agent whose doing it is."""
        self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
        if of is not None:
            of.counts[name] = of.counts.get(name, 0.0) + float(value)

    def waited(self, seconds: float) -> None:
        """A tool, an effect or a sleep took so long, now or when it was recorded: on behalf of whoever acted last."""
        agent = self.speaker()
        if agent is not None and not current_branch().is_in_tool:  # else it counts with the tool
            agent.waited(seconds)

    def speaker(self) -> Sampling | None:
        """Who acted last where the program is now."""
        number = current_branch().speaker
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

    def _hold(self) -> None:
        self._held += 1
        limit = self.limit
        if self._held == 1 and limit is not None and not limit.expired() and (when := limit.when()) is not None:
            self._left_s = when - asyncio.get_running_loop().time()
            limit.reschedule(None)

    def _release(self) -> None:
        self._held -= 1
        if not self._held and self.limit is not None and self.limit.when() is None:
            self.limit.reschedule(asyncio.get_running_loop().time() + self._left_s)
