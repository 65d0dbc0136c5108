"""Units that children and branches of running episodes will still contribute, which admission counts in advance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from agentrl.core import ids
from agentrl.environment.environment import Environment, child_environments
from agentrl.rollout.episode_context import MAX_CHILD_DEPTH

PolicyOf = Callable[[str, int], str]
"""Maps a seat (`Env.seat` or its bare name) and the number of a root group to the policy that holds the seat."""

_NONE: Mapping[Any, int] = MappingProxyType({})


@dataclass(slots=True)
class _Parent:
    """The reservations of a running parent. Mappings are empty and shared for most episodes; they are replaced, never
    mutated."""

    environment: type[Environment]
    group: int
    left: Mapping[str, int]
    spawned: Mapping[type[Environment], int]
    calls: tuple[str, ...] = ()
    """Calls that started children or branches: a re-executed parent makes them again."""
    of_branch: Mapping[str, int] = field(default_factory=lambda: _NONE)
    """Units of one branch."""


class ChildUnitReservations:
    """Units that children of running episodes will still contribute, by policy, so that admission counts them in
    advance.

    Children are always admitted with their parent. If they were counted only then, a policy whose units all come from
    children could exceed its `max_staleness` by the number of running parents.

    An episode reserves the children declared in its environment's `fan_out` (the context refuses more) or, for
    undeclared children, the largest number that any episode of the environment has spawned here. A spawned child takes
    over its part of the reservation; the rest is returned when the parent ends.

    Args:
        trainable: policies whose units are trained.
        policy_of: see `PolicyOf`.
    """

    def __init__(self, trainable: Collection[str], policy_of: PolicyOf) -> None:
        self._trainable = frozenset(trainable)
        self._policy_of = policy_of
        self._parents: dict[str, _Parent] = {}
        self._childless: _Parent | None = None
        """Shared record of the newest episodes that are not known to start children."""
        self._most: dict[type[Environment], Counter[type[Environment]]] = {}
        self._sum: Counter[str] = Counter()

    def units(self, policy: str) -> int:
        """Return the units of the policy expected from children that have not started."""
        return self._sum[policy]

    def reserve(
        self, episode_id: str, environment: type[Environment], group: int, *, branching: Collection[str] = ()
    ) -> None:
        """Reserve the units of an episode's children, and of its branches if it has `branching` policies; replaces the
        reservation of an earlier attempt."""
        self.cancel(episode_id)
        branches = environment.branches if branching else 0
        if branches or self._children(environment):
            left = self._below(environment, group, ids.child_depth(episode_id))
            of_branch = Counter(branching) + left
            for policy, units in of_branch.items() if branches else ():
                left[policy] += branches * units
            self._parents[episode_id] = _Parent(environment, group, left, _NONE, of_branch=of_branch)
            self._sum.update(left)
            return
        shared = self._childless
        if shared is None or shared.environment is not environment or shared.group != group:
            shared = self._childless = _Parent(environment, group, _NONE, _NONE)
        self._parents[episode_id] = shared

    def hand_over(self, parent_id: str, environment: type[Environment], count: int, spawn_call: str) -> None:
        """Move units from a parent's reservation to its spawned children, which are counted themselves."""
        parent = self._parents.get(parent_id)
        if parent is None or spawn_call in parent.calls:
            return
        if not parent.calls:
            parent = self._parents[parent_id] = replace(parent)  # copy on write: siblings may share the parent's record
        parent.calls = (*parent.calls, spawn_call)
        parent.spawned = {**parent.spawned, environment: parent.spawned.get(environment, 0) + count}
        most = self._most.setdefault(parent.environment, Counter())
        most[environment] = max(most[environment], parent.spawned[environment])
        for policy, units in self._of_child(environment, parent.group, ids.child_depth(parent_id) + 1).items():
            left = parent.left.get(policy, 0)
            taken = min(units * count, left)
            if taken:
                parent.left = {**parent.left, policy: left - taken}
                self._sum[policy] -= taken

    def hand_over_branches(self, main_id: str, count: int, branch_call: str) -> None:
        """Move units from an episode's reservation to its branches, which are counted themselves."""
        main = self._parents.get(main_id)
        if main is None or branch_call in main.calls:
            return
        main.calls = (*main.calls, branch_call)
        for policy, units in main.of_branch.items():
            left = main.left.get(policy, 0)
            taken = min(units * count, left)
            main.left = {**main.left, policy: left - taken}
            self._sum[policy] -= taken

    def cancel(self, episode_id: str) -> None:
        """Cancel the rest of an episode's reservation after it has ended."""
        parent = self._parents.pop(episode_id, None)
        if parent is not None and parent.left:
            self._sum.subtract(parent.left)

    def _of_child(self, environment: type[Environment], group: int, depth: int) -> Counter[str]:
        """Count a unit for each policy that plays in a child, and the units of the child's own children."""
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
        declared, most = child_environments(environment), self._most.get(environment)
        return Counter(declared) | most if most else declared
