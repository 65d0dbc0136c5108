"""What the training episodes of a run come to: counts that only grow, and what a step's metrics make of the new part.

Owns: the counts, and the metrics of episodes that ended. Does not know steps or units: each policy's step looks at what
has been counted since its last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from agentrl.observe.metrics import BROKEN_FORMAT, FRONTIER, GATE_PASSED, GATE_REFUSED, PASS_RATES

if TYPE_CHECKING:
    from agentrl.core.ports import Counted
    from agentrl.core.records import EpisodeHeader

MAX_METRICS = 100
"""Names an environment may add to a step; further ones are kept with their episodes only."""


class Count(NamedTuple):
    """The name of one count."""

    what: str
    of: str = ""
    """The seat, the opponent, the pass rate, or the name an environment gave it."""
    policy: str = ""
    """Whose; those of no policy are of all."""


class Counts:
    """Grow since the run began, or, made by `since`, are the difference of two moments."""

    def __init__(self, counts: Mapping[Count, float] | None = None) -> None:
        self._counts: dict[Count, float] = dict(counts or {})

    def since(self, before: Counts) -> Counts:
        """What was counted since then."""
        return Counts({count: value - before._counts.get(count, 0.0) for count, value in self._counts.items()})

    def now(self) -> Counts:
        """As they are."""
        return Counts(self._counts)

    def of(self, what: str, of: str = "", policy: str = "") -> float:
        """One of them."""
        return self._counts.get(Count(what, of, policy), 0.0)

    def of_all_policies(self, what: str, of: str = "") -> float:
        """One that each policy has, added up."""
        return sum(value for count, value in self._counts.items() if count[:2] == (what, of))

    def each(self, what: str, policy: str = "") -> dict[str, float]:
        """All of one kind that are not 0, by what they are of."""
        return {count.of: n for count, n in self._counts.items() if n and (count.what, count.policy) == (what, policy)}

    def _add(self, what: str, value: float = 1.0, of: str = "", policy: str = "") -> None:
        count = Count(what, of, policy)
        self._counts[count] = self._counts.get(count, 0.0) + value

    # --- what happens -------------------------------------------------------------------------------------------------

    def ended(self, header: EpisodeHeader, won_by: str | None) -> None:
        """An episode has ended; `won_by` names the seat where it was a decided game."""
        self._add("episodes")
        self._add("tokens", header.tokens)
        self._add("timed out", header.stop_reason == "time_limit" or header.drop_reason == "episode_timeout")
        if won_by is not None:
            self._add("won", of=won_by)

    def superseded(self) -> None:
        """An end was told twice, or of an attempt that another has replaced."""
        self._add("superseded")

    def committed(self, header: EpisodeHeader, counted: Mapping[str, Counted]) -> None:
        """What an episode that was committed counted, by policy that acted in it."""
        for policy, (turns, metrics) in counted.items():
            own = [trajectory for trajectory in header.trajectories if trajectory.policy == policy]
            rewards = [trajectory.reward for trajectory in own if trajectory.reward is not None]
            broken = min(sum(metrics.get(name, 0.0) for name in BROKEN_FORMAT), float(turns))
            self._add("committed", policy=policy)
            self._add("turns", turns, policy=policy)
            self._add("broken turns", broken, policy=policy)
            self._add("tokens", sum(trajectory.tokens for trajectory in own), policy=policy)
            if rewards:
                form = "broken" if broken else "kept"
                self._add("rewarded", 1.0, form, policy)
                self._add("reward", sum(rewards), form, policy)
            for name, value in metrics.items():
                self._add("metric", value, name, policy)

    def proposed(self, *, is_repeated: bool) -> None:
        """A proposal was remembered."""
        self._add("proposals")
        self._add("proposals made before", is_repeated)

    def played(self, opponent: str, score: float) -> None:
        """A game against a past policy ended; 1: it was won, ½: a draw, 0: lost."""
        self._add("games", of=opponent)
        self._add("score", score, of=opponent)

    def compared(self, policy: str, given: float, whole: float) -> None:
        """A group was complete: squares of its advantages, and of those that leave-one-out would have given."""
        self._add("squares of advantages", given, "given", policy)
        self._add("squares of advantages", whole, "leave one out", policy)

    def solved(self, pass_rate: str) -> None:
        """So much of a group of child episodes, a name of `PASS_RATES`."""
        self._add("groups", of=pass_rate)

    # --- what a step says of it ---------------------------------------------------------------------------------------

    def metrics(self, policy: str, structure_entropy: float | None) -> dict[str, float]:
        """Of all, and of the policy's doing in those that it acted in; `structure_entropy` is that of proposals."""
        metrics: dict[str, float] = {}
        if superseded := self.of("superseded"):
            metrics["episodes/superseded"] = superseded
        if timed_out := self.of("timed out"):
            metrics["episodes/timed_out"] = timed_out / self.of("episodes")
        for opponent, games in self.each("games").items():
            metrics |= {f"win_rate/{opponent}": self.of("score", opponent) / games, f"games/{opponent}": games}
        squares = self.each("squares of advantages", policy)
        if whole := squares.get("leave one out"):
            metrics["advantage/variance_ratio"] = squares.get("given", 0.0) / whole
        won = self.each("won")
        if decided := sum(won.values()):
            metrics |= {f"won/{seat}": count / decided for seat, count in won.items()}
            metrics["episodes/decided"] = decided
        return metrics | self._of_proposals(structure_entropy) | self._of_policy(policy)

    def _of_proposals(self, structure_entropy: float | None) -> dict[str, float]:
        """What became of the tasks that episodes thought up."""
        metrics: dict[str, float] = {}
        passed, refused = (self.of_all_policies("metric", name) for name in (GATE_PASSED, GATE_REFUSED))
        if asked := passed + refused:
            metrics["gate/acceptance"] = passed / asked
        if made := self.of("proposals"):
            metrics |= {"proposals/made": made, "proposals/repeated": self.of("proposals made before") / made}
            if structure_entropy is not None:
                metrics["proposals/structure_entropy"] = structure_entropy
        solved = self.each("groups")
        if groups := sum(solved.values()):
            metrics |= {f"pass_rate/{name}": solved.get(name, 0.0) / groups for name in PASS_RATES}
            metrics["pass_rate/frontier"] = sum(metrics[f"pass_rate/{name}"] for name in FRONTIER)
            metrics["pass_rate/groups"] = groups
        return metrics

    def _of_policy(self, policy: str) -> dict[str, float]:
        """What it did, and what its episodes counted themselves; nothing where none was committed."""
        committed, turns = self.of("committed", policy=policy), self.of("turns", policy=policy)
        if not committed:
            return {}
        metrics = {
            "episodes/turns": turns / committed,
            "episodes/tokens": self.of("tokens", policy=policy) / committed,
            "format/episodes": committed,
            "format/broken_turns": self.of("broken turns", policy=policy) / max(turns, 1.0),
        }
        rewarded = self.each("rewarded", policy)
        if rewarded:
            metrics["format/broken_share"] = rewarded.get("broken", 0.0) / sum(rewarded.values())
        for form, episodes in rewarded.items():
            metrics[f"format/reward_{form}"] = self.of("reward", form, policy) / episodes
        for name, value in self.each("metric", policy).items():
            if not name.startswith("gate/") and len(metrics) < MAX_METRICS:
                metrics.setdefault(name, value / committed)
        return metrics
