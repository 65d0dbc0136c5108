"""The scheduler decides what runs next: how many groups may be admitted, and when a policy may step.

It asks the staleness bound of every policy a group would feed, the in-flight bound, and how much the run still needs.
It never looks at content. `why_not` says what holds admission back, in words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion
from agentrl.orchestrator.buffer import EpisodeBuffer, ReadyUnit
from agentrl.orchestrator.opponents import Opponents
from agentrl.orchestrator.phases import Phases
from agentrl.orchestrator.proposals import Seen
from agentrl.orchestrator.reservations import Reservations
from agentrl.orchestrator.staleness import BoundedStaleness
from agentrl.orchestrator.versions import PolicyBoard


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one root group asks for."""

    episodes: int
    units: Mapping[str, int]
    """Units of each trainable policy it will bring, if nothing is dropped."""


class Scheduler:
    """Admits within the bounds; what is admitted first is due first.

    Args:
        demand: what a root group brings.
        staleness: the bound of every trainable policy.
        phases: who learns when, and how long.
        reservations: units that children of running episodes have yet to bring.
        opponents: past versions that play.
        max_in_flight: episodes running at once.
    """

    def __init__(
        self,
        *,
        demand: Demand,
        buffer: EpisodeBuffer,
        reservations: Reservations,
        opponents: Opponents,
        board: PolicyBoard,
        staleness: Mapping[str, BoundedStaleness],
        phases: Phases,
        max_in_flight: int,
    ) -> None:
        self._buffer = buffer
        self._reservations = reservations
        self._opponents = opponents
        self._board = board
        self._bounds = staleness
        self.phases = phases
        self._max_in_flight = max_in_flight
        shares = [units / staleness[policy].step_size for policy, units in demand.units.items()]
        self._roots_per_step = max(int(demand.episodes / max(shares, default=1.0)), 1)
        """Of the policy that steps most often."""
        self.stepping: set[str] = set()
        """Policies that are taking a step right now."""

    def may_admit(self, demand: Demand) -> bool:
        """Whether a group may start now."""
        return self.why_not(demand) is None

    def why_not(self, demand: Demand) -> str | None:
        """What holds a group back; None if nothing does."""
        running = self._buffer.ledger.in_flight
        if running + demand.episodes > self._max_in_flight:
            return f"max_in_flight: {running} episodes are running"
        frozen = self.phases.frozen()
        if all(self._has_enough(policy) for policy in self._bounds if policy not in frozen):
            return (
                f"the run needs no more units of {', '.join(policy for policy in self._bounds if policy not in frozen)}"
            )
        for policy, units in demand.units.items():
            if self.phases.is_over(policy):
                continue
            bound, under_way, overtaken = self._bounds[policy], self._under_way(policy), self._buffer.overtaken(policy)
            if bound.window(under_way=under_way, overtaken=overtaken) < units:
                return (
                    f"max_lag of {policy}: {under_way} units are under way at step {self._board.step(policy)}, and "
                    f"{overtaken} were trained since the oldest of them began"
                )
            if policy in frozen:
                continue
            if bound.capacity(under_way=under_way, late=self._buffer.late(policy)) < units:
                return f"max_staleness of {policy}: {under_way} units are under way at step {self._board.step(policy)}"
        return None

    def _under_way(self, policy: str) -> int:
        """Units begun or reserved, and neither trained nor dropped."""
        return self._buffer.under_way(policy) + self._reservations.units(policy)

    def _has_enough(self, policy: str) -> bool:
        return self._under_way(policy) >= self.phases.left(policy) * self._bounds[policy].step_size

    def max_lag(self, policy: str) -> int | None:
        """The limit on the lag of a policy's tokens, where there is one."""
        return self._bounds[policy].max_lag

    def take(self, policy: str) -> Sequence[ReadyUnit]:
        """The units of the policy's next step."""
        return self._buffer.take(policy, self._bounds[policy].step_size)

    # --- what the dispatcher asks: see `Admission` --------------------------------------------------------------------

    def pins(self, group: int) -> Mapping[str, PolicyVersion]:
        """Versions that a root group plays with, whatever becomes current: its opponents."""
        return self._opponents.pins(group)

    def deadline(self, number: int) -> int:
        """For which step a root episode was admitted, about.

        Its tokens become too old `max_staleness` steps after its admission. Each policy's steps come in the order of
        what was admitted for them, so one order serves all policies.
        """
        return number // self._roots_per_step

    def resumable(self, spec: EpisodeSpec) -> EpisodeSpec | None:
        """An episode of an earlier life as it can go on now; None: not yet."""
        return self._opponents.resumable(spec)

    def seen(self) -> Seen | None:
        """Which proposals an episode sees, where that is not all that were made."""
        return None

    def learning(self) -> Collection[str]:
        """Policies that learn now: neither frozen nor over."""
        return {policy for policy in self._bounds.keys() - self.phases.frozen() if not self.phases.is_over(policy)}

    def ended(self, header: EpisodeHeader) -> None:
        """Hear of the end of a training episode."""
        self._opponents.ended(header)

    # --- versions -----------------------------------------------------------------------------------------------------

    def keeps(self, policy: str) -> bool:
        """Whether the engine must keep the policy's versions until they are `outdated`."""
        return False

    def outdated(self, policy: str) -> PolicyVersion | None:
        """The version that the engine need not keep any more, after a step of the policy."""
        return None

    def may_step(self, policy: str, demand: Demand) -> bool:
        """Whether a policy has its step: enough units are ready, or all that can come have come.

        The second case keeps a step size that groups, drops or fan-outs cannot fill exactly from waiting for ever; at
        staleness 0 it makes a step take all ready units of the wave. It holds only where nothing else can move on.
        """
        if self._is_full(policy):
            return True
        if (
            policy in self.phases.frozen()
            or self._buffer.ready(policy) == 0
            or self._buffer.ledger.in_flight
            or self.stepping
        ):
            return False
        return not self.may_admit(demand) and not any(map(self._is_full, self._bounds))

    def is_starved(self, demand: Demand) -> str | None:
        """A policy that waits for units which cannot come any more, with the reason; None while anything can move."""
        if self._buffer.ledger.in_flight or self.stepping or self.may_admit(demand):
            return None
        waiting = [policy for policy in self._bounds if not self.phases.is_over(policy)]
        if not waiting or any(self.may_step(policy, demand) for policy in waiting):
            return None
        return f"{', '.join(waiting)} (nothing is running, and {self.why_not(demand)})"

    def _is_full(self, policy: str) -> bool:
        if self.phases.is_over(policy) or policy in self.phases.frozen():
            return False
        return self._buffer.ready(policy) >= self._bounds[policy].step_size
