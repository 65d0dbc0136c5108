"""Opponent pools: earlier versions of a learning policy to play against.

`OpponentPool` draws a version and counts its results; `OpponentPools` keeps the versions of all pools served.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl.core.errors import VERSION_GONE
from agentrl.core.ids import random_stream
from agentrl.core.records import EpisodeHeader, EpisodeSpec, GameResult, GameTally, Lines, PolicyVersion, WeightsRef
from agentrl.orchestrator.metrics import EpisodeTotals
from agentrl.orchestrator.versions import ServedVersions


def opponent_pool_steps(step: int, every: int, size: int) -> range:
    """Return the steps whose versions are opponents when the policy is at `step`: the newest `size` multiples of
    `every`.

    Example:
        >>> list(opponent_pool_steps(35, 10, 3)), list(opponent_pool_steps(4, 10, 3))
        ([10, 20, 30], [0])
    """
    newest = step - step % every
    return range(max(newest - (size - 1) * every, 0), newest + 1, every)


def opponent_pool_holder(name: str) -> str:
    """Return the holder that pins the versions of an opponent pool in `ServedVersions`."""
    return f"opponents {name}"


@dataclass(slots=True, kw_only=True, eq=False)
class OpponentPool:
    """A pool of earlier versions of a learning policy, represented by one policy of the configuration.

    After every `every` steps of the policy its newest version joins; opponents are drawn from the newest `size` that
    joined.
    """

    name: str
    """Policy that holds the seats."""
    of: str
    """Policy whose past versions form the pool."""
    every: int
    size: int
    choose: Literal["uniform", "latest", "prioritized"]
    served: list[PolicyVersion]
    """Served versions, oldest first. Opponents are drawn from the newest `size`; one more may still have episodes in
    flight."""
    tallies: dict[PolicyVersion, GameTally] = field(default_factory=dict)
    """Results of the episodes against each version."""
    lost: set[PolicyVersion] = field(default_factory=set)
    """Versions that the engine could not serve to an episode."""

    @property
    def holder(self) -> str:
        """Holder that pins the pool's versions in `ServedVersions`."""
        return opponent_pool_holder(self.name)

    def draw(self, *key: object) -> PolicyVersion:
        """Draw the opponent of a group; `prioritized` uses (1 - win rate)², PFSP's hard weighting (Vinyals et al.,
        2019)."""
        versions = self.drawn_from()
        if self.choose == "latest":
            return versions[-1]
        weights = [1.0] * len(versions)
        if self.choose == "prioritized":
            weights = [(1.0 - self.tallies.get(version, GameTally()).win_rate) ** 2 for version in versions]
        at = random_stream("opponent", self.name, *key).random() * sum(weights)
        for version, weight in zip(versions, weights, strict=True):
            at -= weight
            if at < 0.0:
                return version
        return versions[-1]

    def drawn_from(self) -> list[PolicyVersion]:
        """Return the versions from which opponents are drawn, oldest first; lost ones only if all are lost."""
        newest = self.served[-self.size :]
        return [version for version in newest if version not in self.lost] or newest

    def is_due(self, version: PolicyVersion, lines: Lines) -> bool:
        """Whether a version that became current should join; it joins after its step if the pool was full then."""
        return lines.age(self.served[-1], version) > version.step % self.every and len(self.served) <= self.size

    def count(self, header: EpisodeHeader) -> GameResult | None:
        """Count a committed episode; returns its result if it was played against a version of this pool."""
        result = header.result(self.of, self.name)
        if result is not None:
            self.tallies[result.opponent] = self.tallies.get(result.opponent, GameTally()).plus(result.score)
        return result


@dataclass(slots=True, kw_only=True, eq=False)
class OpponentPools:
    """The opponent pools of a run: keeps their versions served, draws one per root group, counts results.

    Pools are in the manifest, so a rollback restores them. The drawn version is pinned in the episode's spec, so
    journal, resume, replay and forks know it. Win rates are computed from committed headers. Loading the files at the
    start is up to `app/recovery.py`.
    """

    pools: Mapping[str, OpponentPool]
    versions: ServedVersions
    run_seed: int
    pinned: Callable[[], Collection[PolicyVersion]]
    """Returns the versions to which episodes in flight are pinned."""
    counts: EpisodeTotals
    lines: Lines

    def pins(self, group: int) -> dict[str, PolicyVersion]:
        """Return the version of each pool for a root group: its members are compared, so they meet the same
        opponent.
        """
        return {name: pool.draw(self.run_seed, group) for name, pool in self.pools.items()}

    def repinned(self, spec: EpisodeSpec) -> EpisodeSpec | None:
        """Return an episode's spec with the newest opponent, if its own is gone; None if it is not."""
        gone = {
            name: pool.served[-1]
            for name, pool in self.pools.items()
            if name in spec.pins and spec.pins[name] not in pool.served
        }
        return spec.pinned({**spec.pins, **gone}) if gone else None

    async def add_version(self, weights: WeightsRef) -> None:
        """Add a version that became current to the pools that it should join, and keep it served."""
        for pool in self.pools.values():
            if pool.of == weights.version.policy and pool.is_due(weights.version, self.lines):
                await self.versions.pin(pool.holder, weights)
                pool.served.append(weights.version)
        self.unpin_unneeded()

    def record_result(self, spec: EpisodeSpec, header: EpisodeHeader) -> None:
        """Count the result of a training episode."""
        seated = {binding.policy for binding in spec.seats.values()}
        for name, pool in self.pools.items():
            if header.drop_reason == VERSION_GONE and name in seated & spec.pins.keys():
                pool.lost.add(spec.pins[name])
            result = pool.count(header) if header.committed else None
            if result is not None:
                self.counts.count_game(name, result.score)

    def drawn_from(self) -> dict[str, Sequence[PolicyVersion]]:
        """Return the versions from which opponents are drawn, by pool. Checkpoints store them, because they depend on
        stragglers."""
        return {name: pool.drawn_from() for name, pool in self.pools.items()}

    def unpin_unneeded(self) -> None:
        """Unpin versions that have left their pool, once no episode in flight is pinned to them."""
        for pool in self.pools.values():
            if len(pool.served) > pool.size and pool.served[0] not in self.pinned():
                self.versions.unpin(pool.holder, pool.served.pop(0))
