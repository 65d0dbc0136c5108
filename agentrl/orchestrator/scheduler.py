"""The scheduler decides what runs next: how many groups may be admitted, and when a policy may step.

It asks the staleness bound of every policy a group would feed, the in-flight bound, and how much the run still needs.
It never looks at content. `why_not` says what holds admission back, in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.staleness import BoundedStaleness
from agentrl.orchestrator.versions import PolicyBoard


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one root group asks for."""

    episodes: int
    units: Mapping[str, int]
    """Units of each trainable policy it will bring, if nothing is dropped."""


class Scheduler:
    """First come, first served, within the bounds.

    Args:
        staleness: the bound of every trainable policy.
        steps: the optimizer step each trainable policy ends at.
        max_in_flight: episodes running at once.
    """

    def __init__(
        self,
        *,
        buffer: EpisodeBuffer,
        board: PolicyBoard,
        staleness: Mapping[str, BoundedStaleness],
        steps: int,
        max_in_flight: int,
    ) -> None:
        self._buffer = buffer
        self._board = board
        self._staleness = staleness
        self._steps = steps
        self._max_in_flight = max_in_flight
        self._first_step = {policy: board.step(policy) for policy in staleness}

    def may_admit(self, demand: Demand) -> bool:
        """Whether a group may start now."""
        return self.why_not(demand) is None

    def why_not(self, demand: Demand) -> str | None:
        """What holds a group back; None if nothing does."""
        running = self._buffer.ledger.in_flight
        if running + demand.episodes > self._max_in_flight:
            return f"max_in_flight: {running} episodes are running"
        for policy, units in demand.units.items():
            expected = self._buffer.expected(policy)
            bound = self._staleness[policy]
            first = self._first_step[policy]
            if expected >= (self._steps - first) * bound.step_size:
                return f"the run needs no more units of {policy}"
            if bound.capacity(steps=self._board.step(policy) - first, units=expected) < units:
                return (
                    f"max_staleness of {policy}: {expected} units since step {first}, now at {self._board.step(policy)}"
                )
        return None

    def may_step(self, policy: str, demand: Demand) -> bool:
        """Whether a policy has its step: enough units are ready, or all that can come have come.

        The second case keeps a step size that groups, drops or fan-outs cannot fill exactly from waiting for ever; at
        staleness 0 it makes a step take all ready units of the wave.
        """
        ready = self._buffer.ready(policy)
        if ready >= self._staleness[policy].step_size:
            return True
        return ready > 0 and self._buffer.in_flight(policy) == 0 and not self.may_admit(demand)
