"""Whether steps are fed what was dispatched: how long, how hard, and in which order, unit by unit of each policy.

Groups are looked at in the order in which they were dispatched, each once it is settled: all of its units were trained
or dropped, or `LENGTH_STEPS` steps' worth of units have left since, and what is still missing counts as held back. So
trained and dropped units of the same age are compared with each other. What ends first is short, and fills the first
steps of every run that trains in order of completion; it is not compared with anything before the long ones of its
group are there. Where nothing is lost, all ratios are 1 whatever the lengths.

A fold of admissions, ends and resolutions, told in any number of lives of the run: what is known already changes
nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import pstdev
from typing import NamedTuple

from agentrl.core.records import EpisodeHeader, EpisodeSpec
from agentrl.observe.alarms import LENGTH_STEPS


class _Lengths(NamedTuple):
    """Sums over units whose length is known: all of them, and the trained ones."""

    units: int
    total: float
    trained: int
    trained_total: float

    @classmethod
    def of(cls, lengths: Iterable[tuple[float | None, bool]]) -> _Lengths:
        """The sums of (length, whether it was trained)."""
        known = [(length, trained) for length, trained in lengths if length is not None]
        own = [length for length, trained in known if trained]
        return cls(len(known), math.fsum(length for length, _ in known), len(own), math.fsum(own))


class _Settled(NamedTuple):
    """What became of a group's units."""

    units: int
    trained: int
    held: int
    reward: float | None
    """The mean of those that were given one: how hard the task is."""
    tokens: _Lengths
    seconds: _Lengths


@dataclass(slots=True)
class _Member:
    tokens: float | None = None
    seconds: float | None = None
    reward: float | None = None
    trained: bool | None = None
    """None: it may still be."""
    is_absent: bool = False
    """Its episode ended without a turn of the policy: there is no such unit."""


@dataclass(slots=True)
class _Group:
    place: int
    """How many units were dispatched before it."""
    size: int
    members: dict[str, _Member] = field(default_factory=dict)
    open: int = 0
    """Members that may still be trained."""

    @property
    def is_resolved(self) -> bool:
        return not self.open and len(self.members) >= self.size

    def settled(self) -> _Settled:
        units = [own for own in self.members.values() if not own.is_absent]
        rewards = [own.reward for own in units if own.reward is not None]
        return _Settled(
            units=len(units),
            trained=sum(own.trained is True for own in units),
            held=sum(own.trained is None for own in units),
            reward=math.fsum(rewards) / len(rewards) if rewards else None,
            tokens=_Lengths.of((own.tokens, own.trained is True) for own in units),
            seconds=_Lengths.of((own.seconds, own.trained is True) for own in units),
        )


class Composition:
    """What one policy's steps were fed.

    Args:
        step_size: of the policy.
    """

    def __init__(self, step_size: int) -> None:
        self._step_size = step_size
        self._groups: dict[str, _Group] = {}
        """Those that are not settled, in order of dispatch."""
        self._group_of: dict[str, str] = {}
        self._dispatched = 0
        self._left = 0
        self._overtaken: float | None = None
        self._settled: deque[_Settled] = deque()
        self._units = 0
        """In `_settled`."""

    def dispatched(self, spec: EpisodeSpec) -> None:
        """An episode begins that seats the policy."""
        if spec.episode_id in self._group_of:
            return
        group = self._groups.setdefault(spec.group_id, _Group(self._dispatched, spec.group_size))
        group.members[spec.episode_id] = _Member()
        group.open += 1
        self._group_of[spec.episode_id] = spec.group_id
        self._dispatched += 1

    def ended(self, policy: str, header: EpisodeHeader) -> None:
        """Such an episode ended."""
        own = self._open(header.episode_id)
        if own is None:
            return
        acted = [trajectory for trajectory in header.trajectories if trajectory.policy == policy]
        own.seconds = header.seconds or None  # 0: it was stopped from outside
        if acted:
            rewards = [trajectory.reward for trajectory in acted if trajectory.reward is not None]
            own.tokens = float(sum(trajectory.tokens for trajectory in acted))
            own.reward = math.fsum(rewards) if rewards else None
            return
        own.is_absent = header.committed
        self.left(header.episode_id, trained=False)

    def left(self, episode_id: str, *, trained: bool) -> None:
        """A unit was trained, or dropped."""
        own = self._open(episode_id)
        if own is None:
            return
        group = self._groups[self._group_of[episode_id]]
        own.trained = trained
        group.open -= 1
        if trained:
            self._overtaken = max(self._overtaken or 0.0, (self._left - group.place) / self._step_size)
        self._left += 1
        self._settle()

    def metrics(self) -> dict[str, float]:
        """Of the newest settled groups, about `LENGTH_STEPS` steps' worth of units; and of this step."""
        metrics: dict[str, float] = {}
        if self._overtaken is not None:
            metrics["composition/overtaken"], self._overtaken = self._overtaken, None
        if not self._units:
            return metrics
        metrics["composition/held_share"] = sum(group.held for group in self._settled) / self._units
        for name, lengths in (("length", lambda group: group.tokens), ("seconds", lambda group: group.seconds)):
            if (ratio := self._ratio(lengths)) is not None:
                metrics[f"composition/{name}_ratio"] = ratio
        if (shift := self._reward_shift()) is not None:
            metrics["composition/reward_shift"] = shift
        return metrics

    def _open(self, episode_id: str) -> _Member | None:
        group = self._groups.get(self._group_of.get(episode_id, ""))
        own = None if group is None else group.members[episode_id]
        return own if own is not None and own.trained is None else None

    def _settle(self) -> None:
        most = LENGTH_STEPS * self._step_size
        while self._groups:
            name, oldest = next(iter(self._groups.items()))
            if not oldest.is_resolved and self._left < oldest.place + len(oldest.members) + most:
                return
            del self._groups[name]
            for episode_id in oldest.members:
                del self._group_of[episode_id]
            self._settled.append(oldest.settled())
            self._units += self._settled[-1].units
            while self._units - self._settled[0].units >= most:
                self._units -= self._settled.popleft().units

    def _ratio(self, lengths: Callable[[_Settled], _Lengths]) -> float | None:
        units, total, trained, trained_total = map(sum, zip(*map(lengths, self._settled), strict=True))
        return (trained_total / trained) / (total / units) if trained and total else None

    def _reward_shift(self) -> float | None:
        known = [(group.reward, group.units, group.trained) for group in self._settled if group.reward is not None]
        units, trained = sum(units for _, units, _ in known), sum(trained for _, _, trained in known)
        if not trained:
            return None
        spread = pstdev([reward for reward, _, _ in known])
        of_all = math.fsum(reward * units for reward, units, _ in known) / units
        of_trained = math.fsum(reward * trained for reward, _, trained in known) / trained
        return (of_trained - of_all) / spread if spread > 1e-9 else 0.0


def compositions(step_sizes: Mapping[str, int]) -> dict[str, Composition]:
    """One for each policy, by its step size."""
    return {policy: Composition(size) for policy, size in step_sizes.items()}


def compositions_of(
    step_sizes: Mapping[str, int],
    dispatched: Iterable[tuple[EpisodeSpec, EpisodeHeader | None]],
    resolved: Mapping[tuple[str, str], str | None],
) -> dict[str, Composition]:
    """The same, folded from a journal.

    Args:
        step_sizes: of the policies that learn.
        dispatched: training episodes in the order of their admission, and how they ended.
        resolved: what became of units, by (policy, episode id): None where they were trained.
    """
    found = compositions(step_sizes)
    for spec, header in dispatched:
        for policy in {binding.policy for binding in spec.seats.values()} & found.keys():
            found[policy].dispatched(spec)
            if header is not None:
                found[policy].ended(policy, header)
            if (policy, spec.episode_id) in resolved:
                found[policy].left(spec.episode_id, trained=resolved[policy, spec.episode_id] is None)
    for composition in found.values():
        composition.metrics()  # of no step of this life
    return found
