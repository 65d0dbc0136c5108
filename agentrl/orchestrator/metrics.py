"""Statistics of training episodes for the metrics of a step.

`EpisodeTotals` are sums over the episodes that ended, and over those that were trained; each policy's step reports the
change since its previous step. They are computed from headers alone.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentrl.core.records import REWARD, EpisodeHeader, TrajectoryHeader
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

NO_REWARD = "no_reward"
"""Drop reason of the units of an agent that got no reward."""
NO_SIGNAL = "no_signal"
"""Drop reason of the units of a group without any advantage (`credit.dynamic_sampling`)."""
TOO_FEW_MEMBERS = "too_few_members"
"""Drop reason of the units of a group with too few members for the estimator, such as k or fewer for `pass_at_k`."""

TREE_LOST = "tree_lost"
"""Drop reason of a branch whose main episode was dropped, restarted or not rewarded."""
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
        self._add("out of turns", header.stop_reason == "max_turns")
        if won_by is not None:
            for seat in dict.fromkeys(trajectory.seat for trajectory in header.trajectories):
                self._add("decided", label=seat)
                self._add("won", seat == won_by, seat)

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
        if episodes := self.of("episodes"):
            metrics["episodes/timed_out"] = self.of("timed out") / episodes
            metrics["episodes/context_full"] = self.of("context full") / episodes
            metrics["episodes/out_of_turns"] = self.of("out of turns") / episodes
        for opponent, games in self.each("games").items():
            metrics |= {f"win_rate/{opponent}": self.of("score", opponent) / games, f"games/{opponent}": games}
        squares = self.each("squares of advantages", policy)
        if whole := squares.get("leave one out"):
            metrics["advantage/variance_ratio"] = squares.get("given", 0.0) / whole
        if self._labels("groups without signal", policy):
            metrics["groups/no_signal"] = self.of("groups without signal", policy=policy)
        if turns := self.each("turns in states", policy):
            metrics["advantage/repeated_state_share"] = turns.get("repeated", 0.0) / sum(turns.values())
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


def mean_named_rewards(trajectories: Sequence[TrajectoryHeader]) -> dict[str, float]:
    """Return the mean of each named reward before weights; a missing name counts as 0. Empty where no trajectory has
    named rewards."""
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
