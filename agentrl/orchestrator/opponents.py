"""Opponents: past versions of a policy that learns, kept served beside it, one drawn for each group of episodes.

Which versions there are follows from the policy's step: every so many steps its newest version joins, and the newest
few that joined are drawn from. What was drawn is pinned in the episode's spec, so journal, resume, replay and forks
know it. Win rates are a fold of committed headers.

Owns: which versions the engine must keep for this, draws, win rates. Does not load files (`app/recovery.py` at the
start) or publish. Invariant: a version that an episode in flight is pinned to is served.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from agentrl.core.ports import Engine
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, WeightsRef
from agentrl.core.rng import stream


class Played(NamedTuple):
    """Episodes between two, and what they came to: a win counts 1, a draw ½."""

    episodes: int = 0
    score: float = 0.0

    @property
    def win_rate(self) -> float:
        """The mean, shrunk towards ½ by a win and a loss (Laplace): defined without any episode."""
        return (self.score + 1.0) / (self.episodes + 2.0)


class Result(NamedTuple):
    """How a committed episode ended for who learns."""

    learner: PolicyVersion
    opponent: PolicyVersion
    score: float
    """1: who learns was given more than the opponent, ½: as much, 0: less; a seat given nothing counts as 0."""


def result_of(header: EpisodeHeader, opponent: str, of: str) -> Result | None:
    """An episode between a policy and a past version of it; None where one of them did not act.

    Versions are the oldest that sampled a token; of a policy that holds several seats, the first seat's.
    """
    sides = [[t for t in header.trajectories if t.policy == policy] for policy in (of, opponent)]
    if not all(sides):
        return None
    own, other = (sum(t.reward or 0.0 for t in side) / len(side) for side in sides)
    learner, past = (PolicyVersion(of, side[0].lineage, side[0].oldest_step) for side in sides)
    return Result(learner, past, 0.5 if own == other else float(own > other))


def joined_by(step: int, every: int, size: int) -> range:
    """The steps whose versions are opponents when the policy is at `step`: the newest `size` multiples of `every`.

    Example:
        >>> list(joined_by(35, 10, 3)), list(joined_by(4, 10, 3))
        ([10, 20, 30], [0])
    """
    newest = step - step % every
    return range(max(newest - (size - 1) * every, 0), newest + 1, every)


@dataclass(slots=True, kw_only=True, eq=False)
class OpponentPool:
    """The past versions that one policy stands for."""

    name: str
    """Of the policy that holds the seats."""
    of: str
    """Whose versions they are."""
    every: int
    size: int
    choose: Literal["uniform", "latest", "prioritised"]
    served: list[PolicyVersion]
    """Oldest first; the newest `size` are drawn from, the one more there may be still has episodes in flight."""
    played: dict[PolicyVersion, Played] = field(default_factory=dict)

    def draw(self, *key: object) -> PolicyVersion:
        """The opponent of a group; where prioritised by (1 - win rate)², PFSP's hard one (Vinyals et al., 2019)."""
        versions = self.served[-self.size :]
        if self.choose == "latest":
            return versions[-1]
        weights = [1.0] * len(versions)
        if self.choose == "prioritised":
            weights = [(1.0 - self.played.get(version, Played()).win_rate) ** 2 for version in versions]
        at = stream("opponent", self.name, *key).random() * sum(weights)
        for version, weight in zip(versions, weights, strict=True):
            at -= weight
            if at < 0.0:
                return version
        return versions[-1]

    def is_due(self, version: PolicyVersion) -> bool:
        """Whether a version that became current is to join; later than its step where there was no place for it."""
        return version.step - version.step % self.every > self.served[-1].step and len(self.served) <= self.size

    def heard(self, header: EpisodeHeader) -> None:
        """Count a committed episode."""
        result = result_of(header, self.name, self.of)
        if result is not None:
            known = self.played.get(result.opponent, Played())
            self.played[result.opponent] = Played(known.episodes + 1, known.score + result.score)


@dataclass(slots=True, kw_only=True, eq=False)
class Opponents:
    """All pools of a run."""

    pools: Mapping[str, OpponentPool]
    engine: Engine
    run_seed: int
    pinned: Callable[[], Collection[PolicyVersion]]
    """Versions that episodes in flight are pinned to."""

    def pins(self, group: int) -> dict[str, PolicyVersion]:
        """Whom the seats of each pool are held by in a root group: its members are compared, so they meet the same."""
        return {name: pool.draw(self.run_seed, group) for name, pool in self.pools.items()}

    def resumable(self, spec: EpisodeSpec) -> EpisodeSpec:
        """An episode of an earlier life as it can go on: against the newest, where its opponent is served no more."""
        gone = {
            name: pool.served[-1]
            for name, pool in self.pools.items()
            if name in spec.pins and spec.pins[name] not in pool.served
        }
        return spec.pinned({**spec.pins, **gone}) if gone else spec

    async def published(self, weights: WeightsRef) -> None:
        """A version became current: keep it served, if it is to join."""
        for pool in self.pools.values():
            if pool.of == weights.version.policy and pool.is_due(weights.version):
                await self.engine.update(weights, keep=True)
                pool.served.append(weights.version)
        self._let_go()

    def heard(self, header: EpisodeHeader) -> None:
        """A training episode ended."""
        for pool in self.pools.values():
            if header.committed:
                pool.heard(header)
        self._let_go()

    def served(self) -> set[PolicyVersion]:
        """All versions that are kept, and whose files must stay: an engine that is replaced loads them again."""
        return {version for pool in self.pools.values() for version in pool.served}

    def _let_go(self) -> None:
        """Release what has left its pool, once nothing in flight is pinned to it."""
        for pool in self.pools.values():
            if len(pool.served) > pool.size and pool.served[0] not in self.pinned():
                self.engine.release(pool.served.pop(0))
