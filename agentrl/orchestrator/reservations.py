"""Units that children of running episodes have yet to bring, so that admission counts them before they begin.

Children are always admitted with their parent. Were they counted only then, a policy that only children feed could be
ahead of its `max_staleness` by as many parents as may run: who is slow in front of it would decide how stale it is.

An episode reserves what its environment declares in `fan_out` (the context refuses more), or, of what it does not
declare, the most children an episode of it has had here. A child takes over its part when it is spawned; what is left
is given back when the parent ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from agentrl.environment.base import Environment, children_of
from agentrl.rollout.context import MAX_CHILD_DEPTH

PolicyOf = Callable[[str, int], str]
"""Which policy holds a seat, by `Env.seat` or bare name, in a root group."""
_NONE: Mapping[Any, int] = MappingProxyType({})


@dataclass(slots=True)
class _Parent:
    """What most episodes have none of is empty and shared; it is replaced, never changed."""

    environment: type[Environment]
    group: int
    left: Mapping[str, int]
    spawned: Mapping[type[Environment], int]
    calls: tuple[str, ...] = ()
    """Spawn calls that were made: a parent that is executed again makes them again."""


class Reservations:
    """What is reserved, by policy.

    Args:
        trainable: policies whose units are trained.
        policy_of: see `PolicyOf`.
    """

    def __init__(self, trainable: Collection[str], policy_of: PolicyOf) -> None:
        self._trainable = frozenset(trainable)
        self._policy_of = policy_of
        self._parents: dict[str, _Parent] = {}
        self._most: dict[type[Environment], Counter[type[Environment]]] = {}
        self._sum: Counter[str] = Counter()

    def units(self, policy: str) -> int:
        """Units of the policy that children yet to begin are expected to bring."""
        return self._sum[policy]

    def begin(self, episode_id: str, environment: type[Environment], group: int) -> None:
        """An episode of a root group begins, or begins again with another attempt."""
        self.end(episode_id)
        has_children = bool(self._children(environment))
        left = self._below(environment, group, _depth(episode_id)) if has_children else _NONE
        self._parents[episode_id] = _Parent(environment, group, left, _NONE)
        if left:
            self._sum.update(left)

    def spawned(self, parent_id: str, environment: type[Environment], count: int, spawn_call: str) -> None:
        """A running episode has children, who from now on stand for themselves."""
        parent = self._parents.get(parent_id)
        if parent is None or spawn_call in parent.calls:
            return
        parent.calls = (*parent.calls, spawn_call)
        parent.spawned = {**parent.spawned, environment: parent.spawned.get(environment, 0) + count}
        most = self._most.setdefault(parent.environment, Counter())
        most[environment] = max(most[environment], parent.spawned[environment])
        for policy, units in self._of_child(environment, parent.group, _depth(parent_id) + 1).items():
            left = parent.left.get(policy, 0)
            taken = min(units * count, left)
            if taken:
                parent.left = {**parent.left, policy: left - taken}
                self._sum[policy] -= taken

    def end(self, episode_id: str) -> None:
        """An episode ended: it has no more children."""
        parent = self._parents.pop(episode_id, None)
        if parent is not None and parent.left:
            self._sum.subtract(parent.left)

    def _of_child(self, environment: type[Environment], group: int, depth: int) -> Counter[str]:
        """A unit for each policy that plays in it, and what its own children bring."""
        held = {self._policy_of(f"{environment.__name__}.{seat}", group) for seat in environment.seats}
        return Counter(held & self._trainable) + self._below(environment, group, depth)

    def _below(self, environment: type[Environment], group: int, depth: int) -> Counter[str]:
        units: Counter[str] = Counter()
        if depth >= MAX_CHILD_DEPTH:
            return units
        for child, count in self._children(environment).items():
            for policy, of_one in self._of_child(child, group, depth + 1).items():
                units[policy] += count * of_one
        return units

    def _children(self, environment: type[Environment]) -> Mapping[type[Environment], int]:
        declared, most = children_of(environment), self._most.get(environment)
        return Counter(declared) | most if most else declared


def _depth(episode_id: str) -> int:
    """How many parents an episode has above it."""
    return episode_id.count("~")
