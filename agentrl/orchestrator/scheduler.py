"""Scheduling: when a root group or a held-out episode may be admitted, when a policy may step, and on which units.

`BoundedStaleness` limits the outstanding units of a policy, `FreezeSchedule` decides which policies learn now,
`StarvationGuard` detects a policy that gets no units to train on. `Scheduler` combines them;
`SynchronousBatchScheduler` is the scheduler of a deterministic run. Scheduling never depends on the content of
episodes. `why_not` says what holds the next root group back, whatever its task, which is drawn afterwards.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from agentrl.core import ids
from agentrl.core.holds import SET_LIMIT, Hold, InFlightLimit
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion
from agentrl.core.text import plural
from agentrl.orchestrator.buffer import EpisodeBuffer, ReadyUnit
from agentrl.orchestrator.child_reservations import ChildUnitReservations
from agentrl.orchestrator.episode_specs import EpisodeNumbers
from agentrl.orchestrator.in_flight import EpisodesInFlight
from agentrl.orchestrator.metrics import NO_SIGNAL, TOO_FEW_MEMBERS
from agentrl.orchestrator.opponents import OpponentPools
from agentrl.orchestrator.tasks import VisibleRange
from agentrl.orchestrator.versions import PolicyBoard


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedStaleness:
    """Bounds the mean lag of one policy's units.

    Capacity rule: outstanding units (started or reserved, neither trained nor dropped) are at most (1 + S) · step_size.
    With full steps that is AReaL's bound on all that was ever admitted, (n + 1 + S) · step_size after n steps
    (arXiv:2505.24298); a step with too few units leaves no credit behind.

    A full step therefore overtakes at most S · step_size units. A unit's lag is the number of times this happens to it:
    the mean lag is at most S, regardless of slow episodes. S = 0 is synchronous training.

    If groups are released in parts, late members (still running while others of their group are trained) are left out
    of the count, up to half a step: they would otherwise keep out the work that fills the engine. The mean lag is then
    at most S + 1/2.

    Example:
        >>> BoundedStaleness(max_staleness=1, step_size=64).capacity(outstanding=96)
        32
    """

    max_staleness: int
    step_size: int

    def capacity(self, *, outstanding: int, late: int = 0) -> int:
        """Return the number of units that may still be admitted; `late` of the outstanding ones belong to groups
        already released."""
        return (1 + self.max_staleness) * self.step_size - outstanding + min(late, self.step_size // 2)


class FreezePhase(NamedTuple):
    """A part of the cycle: the frozen policies, and its length."""

    frozen: frozenset[str]
    steps: int
    """Number of steps that each of the other policies takes in the phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeSchedule:
    """The policies that learn now, if policies are frozen in turn: a pure function of their steps.

    A phase freezes some policies until each of the others has taken its number of steps; the last phase is followed by
    the first. Only policies that some phase freezes take part; the rest always learn. A policy that has taken all its
    steps does not prolong a phase. Units of a frozen policy are dropped (`frozen`): their weights would be long
    outdated when it learns again.

    Example:
        >>> from agentrl.core.records import PolicyVersion
        >>> board = PolicyBoard({"a": PolicyVersion("a", 0, 2), "b": PolicyVersion("b", 0, 0)}, ["a", "b"])
        >>> cycle = [FreezePhase(frozenset({"b"}), 2), FreezePhase(frozenset({"a"}), 1)]
        >>> FreezeSchedule(board=board, steps={"a": 8, "b": 4}, cycle=cycle).frozen()
        {'a'}
    """

    board: PolicyBoard
    steps: Mapping[str, int]
    """Last step of each policy that learns."""
    cycle: Sequence[FreezePhase] = ()

    def frozen(self) -> set[str]:
        """Return the policies that do not learn now."""
        if not self.cycle:
            return set()
        named = set().union(*(phase.frozen for phase in self.cycle))
        next_phase = {policy: self._next_phase(policy) for policy in named if not self.is_over(policy)}
        now = min(next_phase.values(), default=None)
        return {policy for policy in named if next_phase.get(policy) != now or now is None}

    def _next_phase(self, policy: str) -> tuple[int, int]:
        """Return round and number of the phase to which the policy's next step belongs."""
        own = [(number, phase.steps) for number, phase in enumerate(self.cycle) if policy not in phase.frozen]
        rounds, step = divmod(self.board.step(policy), sum(steps for _, steps in own))
        for number, steps in own:
            if step < steps:
                return rounds, number
            step -= steps
        raise AssertionError("the remainder must be smaller than the divisor")

    def is_over(self, policy: str) -> bool:
        """Whether a policy has taken all its steps."""
        return self.board.step(policy) >= self.steps[policy]

    def left(self, policy: str) -> int:
        """Return the number of steps that a policy has yet to take."""
        return max(self.steps[policy] - self.board.step(policy), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDemand:
    """The episodes and units of one root group."""

    episodes: int
    units: Mapping[str, int]
    """Number of units of each trainable policy that the group contributes, if nothing is dropped."""


class Scheduler:
    """Decides when a root group may start, when a policy may step, and which units the step takes.

    Groups start within the bounds; those admitted first are due first.

    An episode in flight holds one of `max_in_flight` permits, in training and evaluation, children included. Beside
    training, an evaluation gets the next free permits until it holds half of them, or as many as leave enough for one
    group. Where a group needs all permits, the two take turns. So neither waits for the other to end.

    Args:
        demands: demand of each root group in turn; repeats after the last.
        numbers: knows the next root group.
        in_flight: the episodes in flight, held-out ones included.
        staleness: the bound of every trainable policy.
        phases: the phases in which policies learn.
        reservations: units that children of running episodes will still contribute.
        opponents: the opponent pools.
        max_in_flight: maximum number of episodes running at once.
    """

    def __init__(  # noqa: PLR0913 (one keyword per part)
        self,
        *,
        demands: Sequence[GroupDemand],
        numbers: EpisodeNumbers,
        in_flight: EpisodesInFlight,
        buffer: EpisodeBuffer,
        reservations: ChildUnitReservations,
        opponents: OpponentPools,
        board: PolicyBoard,
        staleness: Mapping[str, BoundedStaleness],
        phases: FreezeSchedule,
        max_in_flight: int,
    ) -> None:
        demand = demands[0]
        self._demands, self._numbers, self._in_flight = demands, numbers, in_flight
        self._buffer = buffer
        self._reservations = reservations
        self._opponents = opponents
        self._starvation = StarvationGuard(demand.episodes)
        self._board = board
        self._bounds = dict(staleness)
        self.phases = phases
        self._max_in_flight, self._limit_reason = max_in_flight, SET_LIMIT
        shares = [units / staleness[policy].step_size for policy, units in demand.units.items()]
        self._roots_per_step = max(int(demand.episodes / max(shares, default=1.0)), 1)
        """Number of root episodes per step of the policy that steps most often."""
        self.stepping: set[str] = set()
        """Policies that are taking a step."""
        self.is_paused = False
        """Whether nothing may start, until the run continues."""
        self.is_draining = False
        """Whether no further group may start."""
        self.is_training = False
        """Whether groups start; before and after training, an evaluation may hold all permits."""

    @property
    def next_demand(self) -> GroupDemand:
        """Demand of the next root group."""
        return self._demands[self._numbers.next_group % len(self._demands)]

    def why_not(self) -> Hold | None:
        """Return what holds the next root group back, whatever its task; None if nothing does. `max_in_flight` is
        named if it alone does, since more permits help only then."""
        return self._closed() or self._beyond_bounds() or self._full()

    def _beyond_bounds(self) -> Hold | None:
        """Return the bound of a policy or of the run that holds the next root group back."""
        demand = self.next_demand
        learning = sorted(self._bounds.keys() - self.phases.frozen())
        if all(map(self._has_enough, learning)):
            return Hold("last_steps", tuple(learning))
        for policy, units in demand.units.items():
            if self.phases.is_over(policy):
                continue
            bound = self._bounds[policy]
            # A frozen policy is bound too: what is in flight when its phase begins is sampled by the weights of now.
            if bound.capacity(outstanding=self._outstanding(policy), late=self._buffer.late(policy)) < units:
                return Hold("max_staleness", (policy,), {"behind": bound.max_staleness})
        return None

    def _full(self) -> Hold | None:
        held_out = self._in_flight.held_out()
        running, due = self._buffer.ledger.in_flight + held_out, 0
        if self._is_turn_of_evaluation():
            due = max(min(self._evaluation_share() - held_out, self._in_flight.waiting), 0)
        if running + due + self.next_demand.episodes <= self._max_in_flight:
            return None
        return Hold("max_in_flight", values={"running": running, "due": due}, limit=self._limit_reason)

    def _is_turn_of_evaluation(self) -> bool:
        """Whether an evaluation gets the next free permit while a group waits for permits too: the side with fewer
        running episodes does."""
        return self._in_flight.held_out() < self._in_flight.count("train")

    def _evaluation_share(self) -> int:
        """Return the number of permits that an evaluation may hold beside training."""
        half, room = self._max_in_flight // 2, self._max_in_flight - self.next_demand.episodes
        return max(min(half, room) or half, 1)

    def _closed(self) -> Hold | None:
        if self.is_paused:
            return Hold("paused")
        return Hold("draining") if self.is_draining else None

    def limit(self, max_in_flight: int, reason: InFlightLimit = SET_LIMIT) -> None:
        """Change the number of episodes that may run at once."""
        self._max_in_flight, self._limit_reason = max_in_flight, reason

    def bound(self, policy: str, max_staleness: int) -> None:
        """Change the bound on the mean lag of a policy's units."""
        self._bounds[policy] = replace(self._bounds[policy], max_staleness=max_staleness)

    @property
    def max_in_flight(self) -> int:
        """Maximum number of episodes running at once."""
        return self._max_in_flight

    def end_after(self, steps: Mapping[str, int]) -> None:
        """Change the last step of each policy."""
        self.phases = replace(self.phases, steps=steps)

    def _outstanding(self, policy: str) -> int:
        """Return the number of units started or reserved, and neither trained nor dropped."""
        return self._buffer.outstanding(policy) + self._reservations.units(policy)

    def _has_enough(self, policy: str) -> bool:
        return self._outstanding(policy) >= self.phases.left(policy) * self._bounds[policy].step_size

    def max_staleness(self, policy: str) -> int:
        """Return the bound on the mean lag of a policy's units."""
        return self._bounds[policy].max_staleness

    def pop_units(self, policy: str) -> Sequence[ReadyUnit]:
        """Take the units of the policy's next step out of the buffer."""
        return self._buffer.pop_ready(policy, self._bounds[policy].step_size)

    # --- `AdmissionPolicy`, for the dispatcher ------------------------------------------------------------------------

    def may_play(self) -> bool:
        running = len(self._in_flight)
        if not self.is_training:
            # Episodes that wait for a step hold no permit here: the first step waits for this evaluation.
            return running - self._in_flight.unresumed < self._max_in_flight
        if all(map(self.phases.is_over, self._bounds)):
            return self._in_flight.held_out() < self._max_in_flight  # training episodes are parked, and will be dropped
        if running >= self._max_in_flight or self._in_flight.held_out() >= self._evaluation_share():
            return False
        hold = self.why_not()
        return self._is_turn_of_evaluation() or hold is None or hold.kind != "max_in_flight"

    def pins(self, group: int) -> Mapping[str, PolicyVersion]:
        """Return the opponent versions to which a root group is pinned, independent of later updates."""
        return self._opponents.pins(group)

    def deadline(self, number: int) -> int:
        """Return roughly the step for which a root episode was admitted.

        Its tokens become too old `max_staleness` steps after its admission. Each policy's steps follow the order of the
        admissions for them, so one order serves all policies.
        """
        return number // self._roots_per_step

    def resumable(self, spec: EpisodeSpec) -> EpisodeSpec | None:
        return spec

    def seen(self) -> VisibleRange | None:
        return None

    def learning(self) -> Collection[str]:
        return {policy for policy in self._bounds.keys() - self.phases.frozen() if not self.phases.is_over(policy)}

    def is_over(self, policy: str) -> bool:
        return self.phases.is_over(policy)

    def record_end(self, spec: EpisodeSpec, header: EpisodeHeader, learning: Collection[str]) -> str | None:
        """Record the end of a training episode; returns why the run must end, if a policy starves."""
        self._opponents.record_result(spec, header)
        if self.is_training:
            self._opponents.unpin_unneeded()
        for policy, units in self._buffer.without_signal.items():
            if units >= WITHOUT_SIGNAL_IN_A_ROW:
                self._buffer.without_signal[policy] = 0  # a resume counts anew
                return (
                    f"the last {units} units of {policy} were dropped: as {NO_SIGNAL}, because the rewards of each "
                    f"group are equal, or as {TOO_FEW_MEMBERS}, because other members failed. Choose tasks of which "
                    "some attempts succeed and some fail, a larger credit.group_size or sampling.temperature, or "
                    "credit.release = 'group'"
                )
        return self._starvation.record_end(header, self._buffer.policies_of(spec), learning, self._running_roots)

    def _running_roots(self, policy: str | None) -> set[int]:
        """Return the numbers of the root episodes of running training episodes that seat a policy; None: of all.

        Branches are left out: they teach nothing if their main episode fails.
        """
        running = ((episode_id, self._in_flight.get(episode_id)) for episode_id in self._in_flight.training())
        return {
            ids.root_episode_number(episode_id)
            for episode_id, spec in running
            if ids.main_episode_id(episode_id) == episode_id
            # an episode without a spec waits for its scores
            if policy is None or spec is None or policy in self._buffer.policies_of(spec)
        }

    def visible_groups(self, group: int) -> int | None:
        """Return the number of first root groups whose results may decide the task of `group`; None: all that ended."""
        return None

    # --- steps --------------------------------------------------------------------------------------------------------

    def may_step(self, policy: str) -> bool:
        """Whether a policy may take its step: enough units are ready, or no more can come.

        The second case keeps a step size that groups, drops or fan-outs cannot fill exactly from waiting forever; at
        staleness 0 it makes a step take all ready units. It applies only if nothing else can make progress; a group
        that waits for permits of an evaluation will start.
        """
        if self.is_paused or self.phases.is_over(policy):
            return False
        if self._is_full(policy):
            return True
        if (
            policy in self.phases.frozen()
            or self._buffer.ready(policy) == 0
            or self._buffer.ledger.in_flight
            or self.stepping
        ):
            return False
        return bool(self._closed() or self._beyond_bounds()) and not any(map(self._is_full, self._bounds))

    def is_starved(self) -> str | None:
        """Name the policies that wait for units which can no longer come, with the reason; None while anything can
        progress."""
        if self.is_paused or self._buffer.ledger.in_flight or self.stepping:
            return None
        hold = self._closed() or self._beyond_bounds()
        if hold is None:
            return None
        waiting = [policy for policy in self._bounds if not self.phases.is_over(policy)]
        if not waiting or any(map(self.may_step, waiting)):
            return None
        return f"{', '.join(waiting)} (nothing is running, and {hold.text})"

    def _is_full(self, policy: str) -> bool:
        if self.phases.is_over(policy) or policy in self.phases.frozen():
            return False
        return self._buffer.ready(policy) >= self._bounds[policy].step_size


WITHOUT_SIGNAL_IN_A_ROW = 4096
"""Number of units of a policy in a row, dropped as `no_signal` or `too_few_members`, that ends the run."""
FAILED_IN_A_ROW = 32
"""Number of episodes in a row that seat a policy and give it no unit, from at least four groups, that ends the run."""
FAILED_GROUPS = 8
"""Minimum number of groups of those episodes if they are child episodes: one bad proposal fails in all its children."""
NO_UNIT_IN_A_ROW = 256
"""Number of root episodes in a row that, with their children, give no unit to any learning policy, that ends the
run.
"""


class StarvationGuard:
    """Ends a run in which a policy gets no units, episode after episode, although admission is open.

    Either the episodes that seat the policy fail or never reward it; or no episode seats it, for example because a gate
    refuses every proposal for its child episodes. The second case may pass while another policy learns from those
    episodes, so it ends the run only when they give no unit to any policy that learns.

    Failures often end long before successes, so that a few broken tasks can make up all of the first ends. Failures
    therefore count only if no earlier root episode still plays. Each one that does requires as many failures again: one
    episode that hangs cannot hide that all others fail.

    Args:
        group_size: size of root groups.
    """

    def __init__(self, group_size: int) -> None:
        self._failures = max(FAILED_IN_A_ROW, 4 * group_size)
        self._failed: defaultdict[str, list[int]] = defaultdict(list)
        """Sorted numbers of the root episodes of the episodes that failed since the policy last got a unit."""
        self._failed_groups: defaultdict[str, set[str]] = defaultdict(set)
        self._waiting: defaultdict[str, list[int]] = defaultdict(list)
        """Sorted numbers of the root episodes that ended since the policy last got a unit."""

    def record_end(
        self,
        header: EpisodeHeader,
        seated: Collection[str],
        learning: Collection[str],
        running_roots: Callable[[str | None], Collection[int]],
    ) -> str | None:
        """Count the end of an episode; returns why the run must end, if it must.

        Args:
            header: header of a training episode.
            seated: trained policies that hold a seat of the episode.
            learning: policies that learn now.
            running_roots: returns the numbers of the root episodes of running episodes that seat a policy; None: of
                all.
        """
        unrewarded = {trajectory.policy for trajectory in header.trajectories if trajectory.reward is None}
        with_unit = {trajectory.policy for trajectory in header.trajectories} - unrewarded
        for policy in with_unit:
            for counts in (self._failed, self._waiting, self._failed_groups):
                counts.pop(policy, None)
        root = ids.root_episode_number(header.episode_id)
        without_unit = set(learning) - with_unit
        seated_without_unit = without_unit.intersection(seated)
        for policy in seated_without_unit:
            insort(self._failed[policy], root)
        if header.parent_id is None:
            for policy in without_unit:
                insort(self._waiting[policy], root)
        for policy in sorted(seated_without_unit):
            self._failed_groups[policy].add(header.parent_id or header.episode_id)
            of_enough_groups = header.parent_id is None or len(self._failed_groups[policy]) >= FAILED_GROUPS
            running = partial(running_roots, policy)
            if of_enough_groups and _is_conclusive(self._failed[policy], self._failures, running):
                why = self._failing(policy, header)
                self._failed.clear()  # a resume counts anew
                return why
        fewest = min((self._waiting[policy] for policy in learning), key=len, default=())
        if _is_conclusive(fewest, NO_UNIT_IN_A_ROW, partial(running_roots, None)):
            self._waiting.clear()
            return self._nothing_learned(learning)
        return None

    def _failing(self, policy: str, header: EpisodeHeader) -> str:
        trajectories = (trajectory for trajectory in header.trajectories if trajectory.policy == policy)
        unrewarded = next((trajectory for trajectory in trajectories if trajectory.reward is None), None)
        if header.drop_reason:
            why = f"because of {header.drop_reason}"
        elif unrewarded is None:
            why = "because its seat never acted"
        elif header.drops_as_truncated(unrewarded):
            why = f"because it was truncated ({header.stop_reason}), and truncated_reward = None drops such episodes"
        else:
            why = (
                f"because its seat {unrewarded.seat!r} was given no reward. Call agent.reward(…) for it on every path "
                "through run(), or let a frozen, remote or bot policy hold the seat"
            )
        return (
            f"{plural(len(self._failed[policy]), 'episode')} in a row gave {policy} nothing to train on, the last one, "
            f"{header.episode_id}, {why}"
        )

    def _nothing_learned(self, learning: Collection[str]) -> str:
        names = " and ".join(sorted(learning))
        return (
            f"the last {NO_UNIT_IN_A_ROW} root episodes, with their children, gave {names} nothing to train on, and no "
            f"other policy learns: no episode seats {names}, or none rewards it. If a gate refuses every "
            "proposal: use a base model that makes valid proposals, a wider gate, a higher temperature, or a proposer "
            "that learns from its penalty"
        )


def _is_conclusive(failed: Sequence[int], required: int, running_roots: Callable[[], Collection[int]]) -> bool:
    """Whether so many root episodes in a row failed that those still running cannot change the verdict.

    Args:
        failed: sorted numbers of the root episodes.
        required: number of failures if no earlier root episode plays.
        running_roots: returns the numbers of the running ones.
    """
    if len(failed) < required:
        return False
    running = [*sorted(running_roots()), math.inf]
    return any(bisect_left(failed, root) >= required * (number + 1) for number, root in enumerate(running))


class SynchronousBatchScheduler(Scheduler):
    """Deterministic scheduling: the configuration alone decides which units a step trains on, and which versions
    sampled them.

    Root group k belongs to batch ⌊k / groups per batch⌋. Step s + 1 of every policy trains on exactly the units of
    batch s, in (root, call id) order, even if there are none, and batch b is sampled by each policy's weights of step b
    − S. So the weights after any number of kills are bit-identical to those of the undisturbed run, if the engine
    computes in fixed shapes. The price is that a fast episode waits for the slowest of its batch.

    Owns batches and pins; `ServedVersions` keeps the pinned versions served.

    Args:
        pinned: policies whose episodes are pinned to a version; policies with full weights have one version at a time,
            and staleness 0.
        parts: those of `Scheduler`.
    """

    def __init__(self, *, pinned: Collection[str], **parts: Any) -> None:
        super().__init__(**parts)
        demand = self._demands[0]
        self._steps = max(self.phases.steps.values())
        self._groups = max(
            math.ceil(self._bounds[policy].step_size / units) for policy, units in demand.units.items() if units
        )
        self._roots = self._groups * demand.episodes
        self._pinned = frozenset(pinned)

    def end_after(self, steps: Mapping[str, int]) -> None:
        super().end_after(steps)
        self._steps = max(steps.values())

    def batch_of(self, episode_id: str) -> int:
        """Return the batch of a training episode's root."""
        return ids.root_episode_number(episode_id) // self._roots

    # --- admission --------------------------------------------------------------------------------------------------

    def _closed(self) -> Hold | None:
        # A drained run ends with a whole batch.
        is_inside = not self.is_paused and self._numbers.next_group % self._groups
        return None if is_inside else super()._closed()

    def _beyond_bounds(self) -> Hold | None:
        batch = self._numbers.next_group // self._groups
        if batch >= self._steps:
            return Hold("last_steps", tuple(self.next_demand.units))
        for policy, bound in self._bounds.items():
            if self._board.step(policy) < batch - bound.max_staleness:
                return Hold("max_staleness", (policy,), {"step": self._board.step(policy), "batch": batch})
        return None

    # --- steps ------------------------------------------------------------------------------------------------------

    def may_step(self, policy: str) -> bool:
        """Whether every episode of the policy's batch has ended; without units of the policy, the step is empty."""
        step = self._board.step(policy)
        if self.is_paused or self.phases.is_over(policy) or self._numbers.next_group < (step + 1) * self._groups:
            return False
        return not any(self.batch_of(episode_id) <= step for episode_id in self._in_flight.training())

    def pop_units(self, policy: str) -> Sequence[ReadyUnit]:
        """Take all units of the policy's batch out of the buffer, in (root, call id) order."""
        step = self._board.step(policy)
        taken = self._buffer.pop_ready_where(policy, lambda ready: self.batch_of(ready.unit.episode_id) <= step)
        return sorted(taken, key=lambda ready: ids.episode_sort_key(ready.unit.episode_id))

    # --- pins -------------------------------------------------------------------------------------------------------

    def pins(self, group: int) -> Mapping[str, PolicyVersion]:
        """Return the version of each pinned policy for a root group and its children."""
        return self._pins_of_batch(group // self._groups)

    def _pins_of_batch(self, batch: int) -> Mapping[str, PolicyVersion]:
        return {policy: self._board.at(policy, self._pinned_step(policy, batch)) for policy in self._pinned}

    def _pinned_step(self, policy: str, batch: int) -> int:
        return max(batch - self._bounds[policy].max_staleness, 0)

    def seen(self) -> VisibleRange:
        """Return the proposals that an episode sees: those of the batches that had ended when its own batch began."""
        return self._seen

    def visible_groups(self, group: int) -> int:
        """Return the number of root groups in the batches that had ended when the group's own batch began."""
        behind = max(bound.max_staleness for bound in self._bounds.values())
        return max(group // self._groups - behind, 0) * self._groups

    def _seen(self, episode_id: str) -> tuple[int, int]:
        """Return an episode's batch, and the first batch that need not have ended when its own began."""
        batch = self.batch_of(episode_id)
        return batch, batch - max(bound.max_staleness for bound in self._bounds.values())

    def resumable(self, spec: EpisodeSpec) -> EpisodeSpec | None:
        """Return the spec with which an episode of a previous attempt can continue now; None while its weights are not
        recomputed.

        A version of a dead lineage is recomputed bit for bit, under a new id.
        """
        batch = self.batch_of(spec.episode_id)
        if any(self._pinned_step(policy, batch) > self._board.step(policy) for policy in self._bounds):
            return None
        return spec.pinned(self._pins_of_batch(batch))
