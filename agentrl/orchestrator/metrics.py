"""Statistics of training episodes for the metrics of a step.

`EpisodeTotals` are sums over the episodes that ended, and over those that were trained; each policy's step reports the
change since its previous step.
`SelectionBiasTracker` compares the units that a policy trained on with those dispatched. Both are computed from headers
alone.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from agentrl.core.records import REWARD, EpisodeHeader, EpisodeSpec, GroupScores, TrajectoryHeader
from agentrl.observe.alarms import LENGTH_STEPS
from agentrl.observe.metrics import (
    FRONTIER,
    GATE_PASSED,
    GATE_REFUSED,
    PASS_RATES,
    broken_turns,
    find_registered_metric,
)

if TYPE_CHECKING:
    from agentrl.core.ports import PolicyCounts
    from agentrl.journal.past_run import PastRun

NO_SIGNAL = "no_signal"
"""Drop reason of the units of a group without any advantage (`credit.dynamic_sampling`)."""
TOO_FEW_MEMBERS = "too_few_members"
"""Drop reason of the units of a group with too few members for the estimator, such as k or fewer for `pass_at_k`."""
PROBE = "probe"
"""Drop reason of a probe, whose reward measures the value of a state."""
TREE_LOST = "tree_lost"
"""Drop reason of a branch whose main episode was dropped, restarted or not rewarded."""
AS_TRAINED: tuple[str | None, ...] = (None, NO_SIGNAL)
"""Drop reasons (None: trained) of units that selection bias counts as trained: those without an advantage would have
given no gradient."""
MAX_METRICS = 100
"""Maximum number of a step's metrics of its episodes, built-in ones included; an environment's metrics beyond that are
kept with their episodes only."""
_COMPARED = 256
"""Maximum number of a step's conversations that `reward_agreement` compares with each other."""


Count = tuple[str, str, str]
"""Name of a count: its kind, such as `turns`; its label (a seat, opponent, pass rate or the name of an environment's
metric), "" where the kind has none; the policy, "" for all policies."""


class EpisodeTotals:
    """Sums over the training episodes of a run or, as returned by `since`, over those between two moments."""

    def __init__(self, counts: Mapping[Count, float] | None = None) -> None:
        self._counts = defaultdict[Count, float](float, counts or {})

    def since(self, before: EpisodeTotals) -> EpisodeTotals:
        """Return the difference from an earlier copy."""
        return EpisodeTotals({count: value - before._counts.get(count, 0.0) for count, value in self._counts.items()})

    def copy(self) -> EpisodeTotals:
        """Return a copy."""
        return EpisodeTotals(self._counts)

    def of(self, kind: str, label: str = "", policy: str = "") -> float:
        """Return a single count; 0 if nothing was counted."""
        return self._counts.get((kind, label, policy), 0.0)

    def of_all_policies(self, kind: str, label: str = "") -> float:
        """Return a count summed over policies."""
        return sum(value for count, value in self._counts.items() if count[:2] == (kind, label))

    def each(self, kind: str, policy: str = "") -> dict[str, float]:
        """Return the nonzero counts of a kind, keyed by label."""
        return {
            label: n for (of_kind, label, whose), n in self._counts.items() if n and (of_kind, whose) == (kind, policy)
        }

    def _labels(self, kind: str, policy: str = "") -> list[str]:
        """Return the labels of a kind that the run ever counted, also if nothing was counted lately."""
        return [label for of_kind, label, whose in self._counts if (of_kind, whose) == (kind, policy)]

    def _add(self, kind: str, value: float = 1.0, label: str = "", policy: str = "") -> None:
        self._counts[kind, label, policy] += value

    # --- counting -----------------------------------------------------------------------------------------------------

    def count_end(self, header: EpisodeHeader, won_by: str | None) -> None:
        """Count an ended episode; `won_by` is the winning seat of a decided game."""
        self._add("episodes")
        self._add("timed out", header.stop_reason == "time_limit" or header.drop_reason == "episode_timeout")
        self._add("context full", header.stop_reason == "context_length")
        if won_by is not None:
            for seat in dict.fromkeys(trajectory.seat for trajectory in header.trajectories):
                self._add("decided", label=seat)
                self._add("won", seat == won_by, seat)

    def count_superseded(self) -> None:
        """Count an end that was reported twice, or belongs to a replaced attempt."""
        self._add("superseded")

    def count_committed(self, counted: Mapping[str, PolicyCounts]) -> None:
        """Count a committed episode for each policy that acted in it."""
        for policy, (turns, metrics) in counted.items():
            self._add("committed", policy=policy)
            self._add("turns", turns, policy=policy)
            self._add("broken turns", min(broken_turns(metrics), float(turns)), policy=policy)
            for name in (GATE_PASSED, GATE_REFUSED):
                self._add("gate", metrics.get(name, 0.0), name)

    def count_trained(self, policy: str, trajectories: Sequence[TrajectoryHeader], counts: PolicyCounts) -> None:
        """Count a trained unit: the policy's agents in an episode, and their metrics."""
        turns, metrics = counts
        rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
        broken = min(broken_turns(metrics), float(turns))
        self._add("trained", policy=policy)
        self._add("trained turns", turns, policy=policy)
        self._add("trained broken turns", broken, policy=policy)
        self._add("tokens", sum(trajectory.tokens for trajectory in trajectories), policy=policy)
        if rewards:
            form = "broken" if broken else "kept"
            self._add("rewarded", 1.0, form, policy)
            self._add("reward", sum(rewards), form, policy)
        for name, value in metrics.items():
            self._add("metric", value, name, policy)
            self._add("episodes with metric", 1.0, name, policy)

    def count_proposal(self, *, is_repeated: bool) -> None:
        """Count a remembered proposal."""
        self._add("proposals")
        self._add("proposals made before", is_repeated)

    def count_game(self, opponent: str, score: float) -> None:
        """Count a game against an opponent pool; score 1: won, ½: a draw, 0: lost."""
        self._add("games", label=opponent)
        self._add("score", score, label=opponent)

    def count_squared_advantages(self, policy: str, credited: float, whole: float) -> None:
        """Add a complete group's summed squared advantages: as trained (`credited`), and with leave-one-out baselines
        (`whole`)."""
        self._add("squares of advantages", credited, "given", policy)
        self._add("squares of advantages", whole, "leave one out", policy)

    def count_pass_rate(self, pass_rate: str) -> None:
        """Count a group of child episodes in a bin of `PASS_RATES`."""
        self._add("groups", label=pass_rate)

    def count_group_scores(self, policy: str, scores: GroupScores) -> None:
        """Count the votes' spread of a scored group."""
        if scores.spread is not None:
            self._add("score spreads", scores.spread, scores.scorer, policy)
            self._add("groups with spread", 1.0, scores.scorer, policy)

    def count_state(self, policy: str, turns: int) -> None:
        """Count an anchor state in which `turns` turns of a complete group's seat began."""
        self._add("turns in states", turns, "repeated" if turns > 1 else "single", policy)

    def count_without_signal(self, policy: str) -> None:
        """Count a group whose units were dropped because none of them had an advantage."""
        self._add("groups without signal", policy=policy)

    # --- metrics of a step --------------------------------------------------------------------------------------------

    def metrics(self, policy: str) -> dict[str, float]:
        """Return the metrics of all episodes, and of those of `policy`, which takes the step."""
        metrics: dict[str, float] = {}
        if self._labels("superseded"):
            metrics["episodes/superseded"] = self.of("superseded")
        if episodes := self.of("episodes"):
            metrics["episodes/timed_out"] = self.of("timed out") / episodes
            metrics["episodes/context_full"] = self.of("context full") / episodes
        for opponent, games in self.each("games").items():
            metrics |= {f"win_rate/{opponent}": self.of("score", opponent) / games, f"games/{opponent}": games}
        squares = self.each("squares of advantages", policy)
        if whole := squares.get("leave one out"):
            metrics["advantage/variance_ratio"] = squares.get("given", 0.0) / whole
        if self._labels("groups without signal", policy):
            metrics["groups/no_signal"] = self.of("groups without signal", policy=policy)
        if turns := self.each("turns in states", policy):
            metrics["advantage/repeated_state_share"] = turns.get("repeated", 0.0) / sum(turns.values())
        for scorer, groups in self.each("groups with spread", policy).items():
            metrics[f"score_spread/{scorer}"] = self.of("score spreads", scorer, policy) / groups
        if decided := sum(self.each("won").values()):
            metrics |= {f"won/{seat}": self.of("won", seat) / decided for seat in self.each("decided")}
            metrics["episodes/decided"] = decided
        return metrics | self._of_proposals() | self._of_policy(policy)

    def _of_proposals(self) -> dict[str, float]:
        """Return the metrics of proposed tasks: gate, repetitions, pass rates."""
        metrics: dict[str, float] = {}
        passed, refused = (self.of("gate", name) for name in (GATE_PASSED, GATE_REFUSED))
        if asked := passed + refused:
            metrics["gate/acceptance"] = passed / asked
        if made := self.of("proposals"):
            metrics |= {"proposals/made": made, "proposals/repeated": self.of("proposals made before") / made}
        solved = self.each("groups")
        if groups := sum(solved.values()):
            metrics |= {f"pass_rate/{name}": solved.get(name, 0.0) / groups for name in PASS_RATES}
            metrics["pass_rate/frontier"] = sum(metrics[f"pass_rate/{name}"] for name in FRONTIER)
            metrics["pass_rate/groups"] = groups
        return metrics

    def _of_policy(self, policy: str) -> dict[str, float]:
        """Return the metrics of the policy's trained episodes, and those that the environment recorded; empty if
        there are none."""
        trained, turns = self.of("trained", policy=policy), self.of("trained turns", policy=policy)
        if not trained:
            return {}
        metrics = {
            "episodes/turns": turns / trained,
            "episodes/tokens": self.of("tokens", policy=policy) / trained,
            "format/episodes": trained,
            "format/broken_turns": self.of("trained broken turns", policy=policy) / max(turns, 1.0),
        }
        rewarded = self.each("rewarded", policy)
        if rewarded:
            metrics["format/broken_share"] = rewarded.get("broken", 0.0) / sum(rewarded.values())
        for form, episodes in rewarded.items():
            metrics[f"format/reward_{form}"] = self.of("reward", form, policy) / episodes
        for name in self._labels("metric", policy):
            # A built-in count that no episode has is 0 per episode. For an environment's own, see `with_unset_metrics`.
            is_own = find_registered_metric(name) is None
            episodes = self.of("episodes with metric", name, policy) if is_own else trained
            if episodes and not name.startswith("gate/") and len(metrics) < MAX_METRICS:
                metrics.setdefault(name, self.of("metric", name, policy) / episodes)
        return metrics


class _Lengths(NamedTuple):
    """Counts and sums of known lengths: of all units, and of the trained ones."""

    units: int
    total: float
    trained: int
    trained_total: float

    @classmethod
    def of(cls, lengths: Iterable[tuple[float | None, bool]]) -> _Lengths:
        """Sum up pairs of (length, whether the unit was trained)."""
        measured = [(length, trained) for length, trained in lengths if length is not None]
        trained_lengths = [length for length, trained in measured if trained]
        return cls(
            len(measured), math.fsum(length for length, _ in measured), len(trained_lengths), math.fsum(trained_lengths)
        )

    def plus(self, other: _Lengths, sign: int = 1) -> _Lengths:
        """Return the sums with those of `other` added, or subtracted if `sign` is -1."""
        return _Lengths(
            self.units + sign * other.units,
            self.total + sign * other.total,
            self.trained + sign * other.trained,
            self.trained_total + sign * other.trained_total,
        )

    def ratio(self) -> float | None:
        """Return the mean length of trained units over that of all; None without trained units."""
        if not self.trained or not self.total:
            return None
        return (self.trained_total / self.trained) / (self.total / self.units)


class _SettledGroup(NamedTuple):
    """Totals of a settled group's units."""

    units: int
    trained: int
    held: int
    reward: float | None
    """Mean over the units with a reward: a measure of the task's difficulty."""
    tokens: _Lengths
    seconds: _Lengths


@dataclass(slots=True)
class _Member:
    tokens: float | None = None
    seconds: float | None = None
    reward: float | None = None
    trained: bool | None = None
    """Whether the unit was trained; None: undecided."""
    is_absent: bool = False
    """Whether the episode ended without a turn of the policy, so that the unit does not exist."""


@dataclass(slots=True)
class _DispatchedGroup:
    place: int
    """Number of units dispatched before the group."""
    size: int
    members: dict[str, _Member] = field(default_factory=dict)
    open: int = 0
    """Number of members that may still be trained."""

    @property
    def is_resolved(self) -> bool:
        return not self.open and len(self.members) >= self.size

    def settled(self) -> _SettledGroup:
        units = [unit for unit in self.members.values() if not unit.is_absent]
        rewards = [unit.reward for unit in units if unit.reward is not None]
        return _SettledGroup(
            units=len(units),
            trained=sum(unit.trained is True for unit in units),
            held=sum(unit.trained is None for unit in units),
            reward=math.fsum(rewards) / len(rewards) if rewards else None,
            tokens=_Lengths.of((unit.tokens, unit.trained is True) for unit in units),
            seconds=_Lengths.of((unit.seconds, unit.trained is True) for unit in units),
        )


class SelectionBiasTracker:
    """Measures whether the units a policy trains on differ from those dispatched: in length, reward or order.

    Groups are compared in order of dispatch, each once it is settled: all of its units were trained or dropped, or
    `LENGTH_STEPS` steps' worth of units have been resolved since; units still missing then count as held back. So
    trained units are compared with dropped units of the same age. The first steps of a run that trains in order of
    completion have short episodes; these are compared only after the long ones of their groups have ended. If no unit
    is lost, all ratios are 1 for any lengths.

    It is computed from admissions, ends and resolutions; repeating those of earlier attempts of a run has no effect.

    Args:
        step_size: step size of the policy.
    """

    def __init__(self, step_size: int) -> None:
        self.step_size = step_size
        self._groups: OrderedDict[str, _DispatchedGroup] = OrderedDict()
        """Groups that are not settled yet, in order of dispatch. In a `dict`, finding the first takes longer the more
        were removed before it."""
        self._group_of: dict[str, str] = {}
        self._dispatched = 0
        self._left = 0
        self._overtaken: float | None = None
        self._settled: deque[_SettledGroup] = deque()
        self._units = self._held = 0
        """Numbers of units and of held back units in `_settled`."""
        self._tokens = self._seconds = _Lengths(0, 0.0, 0, 0.0)
        """Sums over `_settled`."""

    def record_admission(self, spec: EpisodeSpec) -> None:
        """Record that an episode with a seat of the policy has begun."""
        if spec.episode_id in self._group_of:
            return
        group = self._groups.setdefault(spec.group_id, _DispatchedGroup(self._dispatched, spec.group_size))
        group.members[spec.episode_id] = _Member()
        group.open += 1
        self._group_of[spec.episode_id] = spec.group_id
        self._dispatched += 1

    def record_end(self, policy: str, header: EpisodeHeader) -> None:
        """Record that an episode with a seat of the policy has ended."""
        unit = self._open(header.episode_id)
        if unit is None:
            return
        acted = [trajectory for trajectory in header.trajectories if trajectory.policy == policy]
        unit.seconds = header.seconds or None  # 0 if the episode was cancelled
        if acted:
            rewards = [trajectory.reward for trajectory in acted if trajectory.reward is not None]
            unit.tokens = float(sum(trajectory.tokens for trajectory in acted))
            unit.reward = math.fsum(rewards) if rewards else None
            return
        unit.is_absent = header.committed
        self.record_resolution(header.episode_id, trained=False)

    def record_resolution(self, episode_id: str, *, trained: bool) -> None:
        """Record that a unit was trained or dropped."""
        unit = self._open(episode_id)
        if unit is None:
            return
        group = self._groups[self._group_of[episode_id]]
        unit.trained = trained
        group.open -= 1
        if trained:
            self._overtaken = max(self._overtaken or 0.0, (self._left - group.place) / self.step_size)
        self._left += 1
        self._settle()

    def metrics(self) -> dict[str, float]:
        """Return the metrics over the newest settled groups, about `LENGTH_STEPS` steps' worth of units, and of this
        step."""
        metrics: dict[str, float] = {}
        if self._overtaken is not None:
            metrics["selection_bias/overtaken"], self._overtaken = self._overtaken, None
        if not self._units:
            return metrics
        metrics["selection_bias/held_share"] = self._held / self._units
        for name, lengths in (("length", self._tokens), ("seconds", self._seconds)):
            if (ratio := lengths.ratio()) is not None:
                metrics[f"selection_bias/{name}_ratio"] = ratio
        if (shift := self._reward_shift()) is not None:
            metrics["selection_bias/reward_shift"] = shift
        return metrics

    def _open(self, episode_id: str) -> _Member | None:
        group = self._groups.get(self._group_of.get(episode_id, ""))
        unit = None if group is None else group.members[episode_id]
        return unit if unit is not None and unit.trained is None else None

    def _settle(self) -> None:
        compared = LENGTH_STEPS * self.step_size
        while self._groups:
            name, oldest = next(iter(self._groups.items()))
            if not oldest.is_resolved and self._left < oldest.place + len(oldest.members) + compared:
                return
            del self._groups[name]
            for episode_id in oldest.members:
                del self._group_of[episode_id]
            self._settled.append(oldest.settled())
            self._count(self._settled[-1])
            while self._units - self._settled[0].units >= compared:
                self._count(self._settled.popleft(), -1)

    def _count(self, group: _SettledGroup, sign: int = 1) -> None:
        """Add a group to the sums over `_settled`, or subtract it if `sign` is -1."""
        self._units += sign * group.units
        self._held += sign * group.held
        self._tokens = self._tokens.plus(group.tokens, sign)
        self._seconds = self._seconds.plus(group.seconds, sign)

    def _reward_shift(self) -> float | None:
        rewarded = [(group.reward, group.units, group.trained) for group in self._settled if group.reward is not None]
        units, trained = sum(units for _, units, _ in rewarded), sum(trained for _, _, trained in rewarded)
        if not trained:
            return None
        mean = math.fsum(reward for reward, _, _ in rewarded) / len(rewarded)
        spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward, _, _ in rewarded) / len(rewarded))
        of_all = math.fsum(reward * units for reward, units, _ in rewarded) / units
        of_trained = math.fsum(reward * trained for reward, _, trained in rewarded) / trained
        return (of_trained - of_all) / spread if spread > 1e-9 else 0.0


def restore_selection_bias(trackers: Mapping[str, SelectionBiasTracker], past: PastRun) -> None:
    """Restore the trackers of all policies, keyed by policy, from the newest episodes."""
    units = sum(tracker.step_size for tracker in trackers.values())
    # More episodes than are compared, because some of them are held back.
    dispatched = list(past.log.dispatched(4 * LENGTH_STEPS * units))
    resolved = past.resolved_units({spec.episode_id for spec, _ in dispatched})
    for spec, header in dispatched:
        if spec.is_probe:
            continue  # gives no unit
        for policy in {binding.policy for binding in spec.seats.values()} & trackers.keys():
            trackers[policy].record_admission(spec)
            if header is not None:
                trackers[policy].record_end(policy, header)
            if (policy, spec.episode_id) in resolved:
                trackers[policy].record_resolution(
                    spec.episode_id, trained=resolved[policy, spec.episode_id] in AS_TRAINED
                )
    for tracker in trackers.values():
        tracker.metrics()  # discards values of steps of previous attempts


def mean_named_rewards(trajectories: Sequence[TrajectoryHeader]) -> dict[str, float]:
    """Return the mean of each named reward before weights; a missing name counts as 0. Empty where no trajectory has
    named rewards; one without names counts under `reward` with its weighted reward."""
    if not any(trajectory.named_rewards for trajectory in trajectories):
        return {}
    named = [dict(each.named_rewards) or {REWARD: each.reward or 0.0} for each in trajectories]
    names = sorted({name for rewards in named for name in rewards})
    return {name: math.fsum(rewards.get(name, 0.0) for rewards in named) / len(named) for name in names}


def reward_agreement(trajectories: Sequence[TrajectoryHeader]) -> dict[str, float]:
    """Return how well each named reward agrees with the unnamed one: the share of pairs of conversations that it orders
    alike, among those that the unnamed reward orders. Ties count half, so chance is ½. Left out without such a pair."""
    named = [rewards for each in trajectories if REWARD in (rewards := dict(each.named_rewards))][:_COMPARED]
    found = {}
    for name in sorted({name for rewards in named for name in rewards} - {REWARD}):
        pairs = itertools.combinations([(rewards[REWARD], rewards[name]) for rewards in named if name in rewards], 2)
        orders = [(x - y) * (a - b) for (a, x), (b, y) in pairs if a != b]
        if orders:
            found[name] = sum((order > 0) + (order == 0) / 2 for order in orders) / len(orders)
    return found
