"""The buffer: episodes enter whole, are released as their group's rule says, and leave as units exactly once.

Owns every training episode between admission and its optimizer step, as headers only: token data stays in the journal.
Does not know about versions (`versions.py`), capacity (`staleness.py`), who runs episodes (`dispatch.py`), or when a
member may leave its group and with which advantage (`groups.py`).

Entry lifecycle: admit → end (committed or dropped) → released by its group: advantages → ready → take → resolve.
Invariants: a member is released once; a unit is taken at most once; the ledger balances after every call.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from agentrl.core.records import DataLocation, EpisodeHeader, EpisodeSpec, TrajectoryHeader
from agentrl.core.training_records import Unit
from agentrl.observe.metrics import PASS_RATES
from agentrl.orchestrator.composition import Composition
from agentrl.orchestrator.counts import Counts
from agentrl.orchestrator.groups import Credits, Group, Release, rewarded
from agentrl.orchestrator.ledger import Ledger


class ReadyUnit(NamedTuple):
    """A unit waiting for its step, with what credit and metrics need of its episode."""

    unit: Unit
    trajectories: tuple[TrajectoryHeader, ...]
    environment: str = ""
    is_alone: bool = False
    """Its rewards were to be compared with those of other episodes, and there were none: it teaches nothing."""


class UnitDrop(NamedTuple):
    """A unit that will not be trained, and why."""

    episode_id: str
    attempt: int
    policy: str
    reason: str


class EpisodeBuffer:
    """Groups of episodes on their way to a trainer.

    Args:
        trainable: policies whose units are trained; other policies only play.
        release: when members of a group are released, and what they are compared with.
        resolved_before: what became of units in an earlier life of the run, by (policy, episode id): None where they
            were trained, else the drop reason. They are compared with their siblings again, and never trained again.
        compositions: of policies, told what becomes of every unit.
    """

    def __init__(
        self,
        trainable: Iterable[str],
        release: Release,
        *,
        resolved_before: Mapping[tuple[str, str], str | None] | None = None,
        compositions: Mapping[str, Composition] | None = None,
    ) -> None:
        self.trainable = frozenset(trainable)
        """Policies whose units are trained."""
        self.release = release
        self._resolved_before = dict(resolved_before or {})
        self.compositions = dict(compositions or {})
        self._groups: dict[str, Group] = {}
        self._ready: dict[str, deque[ReadyUnit]] = {policy: deque() for policy in self.trainable}
        self._in_flight: Counter[str] = Counter()
        self._late: Counter[str] = Counter()
        self._consumed: Counter[str] = Counter()
        """Units trained in this life of the run."""
        self._begun: dict[tuple[str, str], int] = {}
        """Of units under way, by policy and episode: `_consumed` when they began."""
        self._beginnings: dict[str, Counter[int]] = {policy: Counter() for policy in self.trainable}
        """The same counted: how many began at each."""
        self._unresolved: dict[str, set[str]] = {}
        self._trained: set[str] = set()
        self.ledger = Ledger()
        self.counts = Counts()
        """Of the episodes that ended since the run began."""

    # --- entering ---------------------------------------------------------------------------------------------------

    def expect(self, group_id: str, size: int) -> None:
        """A group that has `size` members from now on, whatever their specs say (resume: dropped ones stay away)."""
        self._groups[group_id] = Group(size)

    def admit(self, spec: EpisodeSpec) -> None:
        """An episode starts. Its group is complete when `group_size` members have ended."""
        group = self._groups.setdefault(spec.group_id, Group(spec.group_size))
        self.release.admitted(spec, group)
        group.size = spec.group_size
        self.ledger.admitted += 1
        self.ledger.in_flight += 1
        for policy in self.policies_of(spec):
            self._in_flight[policy] += 1
            self._begun[policy, spec.episode_id] = began = self._consumed[policy]
            self._beginnings[policy][began] += 1
            if policy in self.compositions:
                self.compositions[policy].dispatched(spec)

    def end(self, spec: EpisodeSpec, header: EpisodeHeader) -> list[UnitDrop]:
        """An admitted episode ended; returns the units dropped because of it."""
        drops: list[UnitDrop] = []
        self.ledger.in_flight -= 1
        policies = self.policies_of(spec)
        for policy in policies & self.compositions.keys():
            self.compositions[policy].ended(policy, header)
        if header.committed:
            self._commit(header, drops)
        else:
            self.ledger.dropped[header.drop_reason or ""] += 1
        for policy in policies - {trajectory.policy for trajectory in header.trajectories}:
            self._forget_beginning(policy, header.episode_id)
        group = self._groups[spec.group_id]
        before = group.late
        group.running -= 1
        group.headers.append(header)
        released, credits = self.release.ended(spec, group)
        for policy in policies:
            self._in_flight[policy] -= 1
            self._late[policy] += group.late - before
        for member in released:
            self._make_ready(member, credits, group, spec.environment)
        if group.running == 0:
            del self._groups[spec.group_id]
            self._count_pass_rate(group.headers)
            for policy, (given, whole) in group.squares.items():
                self.counts.compared(policy, given, whole)
        return drops

    def _commit(self, header: EpisodeHeader, drops: list[UnitDrop]) -> None:
        self.ledger.ready += 1
        policies = {trajectory.policy for trajectory in header.trajectories} & self.trainable
        self._unresolved[header.episode_id] = set(policies)
        for policy in sorted(policies):
            self.ledger.units_committed[policy] += 1
            self.ledger.units_ready[policy] += 1
            if (policy, header.episode_id) in self._resolved_before:
                reason = self._resolved_before[policy, header.episode_id]
                self._resolve(header.episode_id, policy, reason=reason)
            elif any(t.reward is None for t in header.trajectories if t.policy == policy):
                drops.append(UnitDrop(header.episode_id, header.attempt, policy, "no_reward"))
                self._resolve(header.episode_id, policy, reason="no_reward")
        if not policies:
            self._leave(header.episode_id, reason="frozen")

    def _make_ready(self, header: EpisodeHeader, credits: Credits, group: Group, environment: str) -> None:
        for policy in sorted(self._unresolved.get(header.episode_id, ())):
            own = tuple(t for t in header.trajectories if t.policy == policy)
            unit = Unit(
                episode_id=header.episode_id,
                attempt=header.attempt,
                policy=policy,
                location=header.location or DataLocation("", 0),
                credits=tuple(credits[header.episode_id, t.seat, t.index] for t in own),
            )
            self._ready[policy].append(ReadyUnit(unit, own, environment, self._is_alone(unit, group)))

    def _is_alone(self, unit: Unit, group: Group) -> bool:
        """Whether the rewards of a unit were to be compared, and no other member was given one in these seats."""
        if not self.release.compares or any(credit.advantage for credit in unit.credits):
            return False
        seats = {credit.seat for credit in unit.credits}
        others = (header for header in group.headers if header.episode_id != unit.episode_id)
        return not any(own.seat in seats for other in others for own in rewarded(other, {unit.policy}))

    def _count_pass_rate(self, headers: Sequence[EpisodeHeader]) -> None:
        """Count how much of a group of child episodes was solved, if rewards lie in [0, 1]; dropped members are neither
        here nor there."""
        rewards = [header.reward for header in headers if header.parent_id is not None and header.reward is not None]
        if rewards and min(rewards) >= 0.0 and max(rewards) <= 1.0:
            mean = math.fsum(rewards) / len(rewards)
            inside = 1 + min(int(mean * 5), 3 if mean <= 0.8 else 4)
            self.counts.solved(PASS_RATES[0 if mean == 0 else -1 if mean == 1 else inside])

    # --- leaving ----------------------------------------------------------------------------------------------------

    def ready(self, policy: str) -> int:
        """Units that were released and wait for a step."""
        return len(self._ready[policy])

    def under_way(self, policy: str) -> int:
        """Units that may still be trained: of running episodes, of unreleased groups, ready, or in a step now."""
        return self._in_flight[policy] + self.ledger.units_ready[policy]

    def overtaken(self, policy: str) -> int:
        """Units that were trained since the oldest of those under way began."""
        beginnings = self._beginnings[policy]
        return self._consumed[policy] - min(beginnings) if beginnings else 0

    def late(self, policy: str) -> int:
        """Units of running episodes, others of whose group were released."""
        return self._late[policy]

    def take(self, policy: str, count: int) -> list[ReadyUnit]:
        """Up to `count` ready units, oldest release first; each must be resolved by `consume` or `drop`."""
        queue = self._ready[policy]
        return [queue.popleft() for _ in range(min(count, len(queue)))]

    def take_where(self, policy: str, wanted: Callable[[ReadyUnit], bool]) -> list[ReadyUnit]:
        """The ready units that are `wanted`, oldest release first; each must be resolved by `consume` or `drop`."""
        queue = self._ready[policy]
        taken = [ready for ready in queue if wanted(ready)]
        self._ready[policy] = deque(ready for ready in queue if not wanted(ready))
        return taken

    def give_back(self, policy: str, units: Sequence[ReadyUnit]) -> None:
        """Taken units wait for a step again, before all others."""
        self._ready[policy].extendleft(reversed(units))

    def consume(self, units: Iterable[ReadyUnit]) -> None:
        """Taken units were trained. Advantage 0 counts as consumed."""
        for ready in units:
            self._consumed[ready.unit.policy] += 1
            self._resolve(ready.unit.episode_id, ready.unit.policy, reason=None)

    def drop(self, units: Iterable[ReadyUnit], reason: str) -> list[UnitDrop]:
        """Taken units will not be trained."""
        drops = []
        for ready in units:
            drops.append(UnitDrop(ready.unit.episode_id, ready.unit.attempt, ready.unit.policy, reason))
            self._resolve(ready.unit.episode_id, ready.unit.policy, reason=reason)
        return drops

    def _resolve(self, episode_id: str, policy: str, *, reason: str | None) -> None:
        self.ledger.units_ready[policy] -= 1
        self._forget_beginning(policy, episode_id)
        if policy in self.compositions:
            self.compositions[policy].left(episode_id, trained=reason is None)
        if reason is None:
            self.ledger.units_consumed[policy] += 1
            self._trained.add(episode_id)
        else:
            self.ledger.units_dropped[policy] += 1
        unresolved = self._unresolved[episode_id]
        unresolved.discard(policy)
        if not unresolved:
            self._leave(episode_id, reason=reason or "")

    def _forget_beginning(self, policy: str, episode_id: str) -> None:
        """A unit is not under way any more."""
        beginnings, began = self._beginnings[policy], self._begun.pop((policy, episode_id))
        beginnings[began] -= 1
        if not beginnings[began]:
            del beginnings[began]

    def _leave(self, episode_id: str, *, reason: str) -> None:
        del self._unresolved[episode_id]
        self.ledger.ready -= 1
        if episode_id in self._trained:
            self._trained.discard(episode_id)
            self.ledger.trained += 1
        else:
            self.ledger.dropped[reason] += 1

    def policies_of(self, spec: EpisodeSpec) -> set[str]:
        """The trainable policies that hold a seat of an episode."""
        return {binding.policy for binding in spec.seats.values()} & self.trainable
