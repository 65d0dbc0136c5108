"""Opponents: past versions of a policy that learns, kept served beside it, one drawn for each group of episodes.

Every so many steps of the policy its newest version joins, and the newest few that joined are drawn from; which they
are is in the manifest, so a rollback has them back. What was drawn is pinned in the episode's spec, so journal, resume,
replay and forks know it. Win rates are a fold of committed headers.

Owns: which versions the engine must keep for this, draws, win rates. Does not load files (`app/recovery.py` at the
start) or publish. Invariant: a version that an episode in flight is pinned to is served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl.core.ports import Engine
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, WeightsRef
from agentrl.core.rng import stream
from agentrl.journal.results import Result, Tally, result_of
from agentrl.orchestrator.counts import Counts


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
    tallies: dict[PolicyVersion, Tally] = field(default_factory=dict)
    """How episodes against each version ended."""

    def draw(self, *key: object) -> PolicyVersion:
        """The opponent of a group; where prioritised by (1 - win rate)², PFSP's hard one (Vinyals et al., 2019)."""
        versions = self.drawn_from()
        if self.choose == "latest":
            return versions[-1]
        weights = [1.0] * len(versions)
        if self.choose == "prioritised":
            weights = [(1.0 - self.tallies.get(version, Tally()).win_rate) ** 2 for version in versions]
        at = stream("opponent", self.name, *key).random() * sum(weights)
        for version, weight in zip(versions, weights, strict=True):
            at -= weight
            if at < 0.0:
                return version
        return versions[-1]

    def drawn_from(self) -> list[PolicyVersion]:
        """The newest that joined, oldest first."""
        return self.served[-self.size :]

    def is_due(self, version: PolicyVersion) -> bool:
        """Whether a version that became current is to join; later than its step where there was no place for it."""
        return version.step - version.step % self.every > self.served[-1].step and len(self.served) <= self.size

    def count(self, header: EpisodeHeader) -> Result | None:
        """Count a committed episode; how it ended, if it was against one of these."""
        result = result_of(header, self.name, self.of)
        if result is not None:
            self.tallies[result.opponent] = self.tallies.get(result.opponent, Tally()).plus(result.score)
        return result


@dataclass(slots=True, kw_only=True, eq=False)
class Opponents:
    """All pools of a run."""

    pools: Mapping[str, OpponentPool]
    engine: Engine
    run_seed: int
    pinned: Callable[[], Collection[PolicyVersion]]
    """Versions that episodes in flight are pinned to."""
    counts: Counts
    checkpoints: int
    """How many checkpoints are kept, and may be gone on from."""
    _saved: deque[Mapping[str, Sequence[PolicyVersion]]] = field(init=False)
    """What was drawn from at the newest checkpoints."""

    def __post_init__(self) -> None:
        self._saved = deque([self.drawn_from()], maxlen=self.checkpoints)

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

    def ended(self, header: EpisodeHeader) -> None:
        """Hear of the end of a training episode."""
        for name, pool in self.pools.items():
            result = pool.count(header) if header.committed else None
            if result is not None:
                self.counts.played(name, result.score)
        self._let_go()

    def drawn_from(self) -> dict[str, Sequence[PolicyVersion]]:
        """What is drawn from now, by past policy: a checkpoint keeps it, since stragglers have a say in it."""
        return {name: pool.drawn_from() for name, pool in self.pools.items()}

    def saved(self) -> None:
        """A checkpoint was written."""
        self._saved.append(self.drawn_from())

    def needed(self) -> set[PolicyVersion]:
        """Versions whose files must stay: an engine that is replaced loads those that are served again, and a run that
        goes on from a checkpoint those of its pools.
        """
        served = {version for pool in self.pools.values() for version in pool.served}
        return served.union(*(versions for pools in self._saved for versions in pools.values()))

    def _let_go(self) -> None:
        """Release what has left its pool, once nothing in flight is pinned to it."""
        for pool in self.pools.values():
            if len(pool.served) > pool.size and pool.served[0] not in self.pinned():
                self.engine.release(pool.served.pop(0))
