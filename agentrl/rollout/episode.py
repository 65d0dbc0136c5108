"""One attempt of an episode while it runs: what its agents, resources and context share, and who serves them.

Owns nothing but the counts an episode adds up (`metrics`). `runner.py` makes one per attempt; `context.py` is what the
environment sees of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from agentrl.core import ids

if TYPE_CHECKING:
    from agentrl.core.clock import Clock
    from agentrl.core.ports import ChatFormat, Engine, EpisodeHost, SamplingParams
    from agentrl.core.records import EpisodeSpec
    from agentrl.environment.base import Limits
    from agentrl.rollout.calls import CallJournal


OnCodeChange = Literal["try", "restart", "drop"]
"""What becomes of an episode whose environment was edited since it was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """What is the same for every episode of a worker."""

    sampling: SamplingParams
    limits: Limits
    tool_timeout_s: float
    episode_timeout_s: float
    on_code_change: OnCodeChange = "try"


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Who serves the episodes of a worker."""

    engine: Engine
    chat_format: ChatFormat
    host: EpisodeHost
    clock: Clock
    settings: RolloutSettings


@dataclass(slots=True, eq=False)
class LiveEpisode:
    """An attempt that runs."""

    spec: EpisodeSpec
    journal: CallJournal
    services: Services
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Episode and attempt, for messages and sessions."""
        return f"{self.spec.episode_id}.{self.spec.attempt}"

    def sampling_seed(self, call_id: str) -> int:
        """Of one engine call: the same on every execution of the attempt."""
        return ids.key64(self.spec.seed, self.spec.attempt, call_id)

    def metric(self, name: str, value: float) -> None:
        """Add to a number of the episode."""
        self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
