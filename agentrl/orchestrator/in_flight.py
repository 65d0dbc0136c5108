"""The episodes in flight: the attempt of each that runs, and the versions they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from agentrl.core.records import EpisodeSpec, PolicyVersion, Purpose
from agentrl.observe.bottleneck import ActivityClock
from agentrl.orchestrator.group_scores import GroupScoring


class EpisodesInFlight:
    """The specs of the episodes in flight, children included.

    Args:
        activity: counts them.
        group_scoring: holds ended training episodes that wait for the scores of their group, which are in flight too;
            None: no scorer scores groups.
    """

    def __init__(self, activity: ActivityClock, group_scoring: GroupScoring | None = None) -> None:
        self.activity = activity
        self._group_scoring = group_scoring
        self._specs: dict[str, EpisodeSpec] = {}
        self._purposes: Counter[Purpose] = Counter()
        self._pins: Counter[PolicyVersion] = Counter()
        """Number of running training episodes that are pinned to each version."""
        self.waiting = 0
        """Number of root episodes outside training that wait for a permit."""
        self.unresumed = 0
        """Number of training episodes of a previous attempt of the run that wait for a step before they continue."""

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def get(self, episode_id: str) -> EpisodeSpec | None:
        """Return the spec of the attempt that runs; None: the episode does not run."""
        return self._specs.get(episode_id)

    def get_attempt(self, episode_id: str, attempt: int) -> EpisodeSpec | None:
        """Return the spec of an attempt; None: it has ended, or a further one superseded it."""
        spec = self._specs.get(episode_id)
        return spec if spec is not None and spec.attempt == attempt else None

    def count(self, purpose: Purpose) -> int:
        """Return the number of running episodes of a purpose."""
        return self._purposes[purpose]

    def held_out(self) -> int:
        """Return the number of running episodes outside training."""
        return len(self._specs) - self._purposes["train"]

    def training(self) -> Iterable[str]:
        """Return the ids of the training episodes in flight, those that wait for scores included."""
        running = (name for name, spec in self._specs.items() if spec.purpose == "train")
        return running if self._group_scoring is None else (*running, *self._group_scoring.waiting())

    def pinned(self) -> Collection[PolicyVersion]:
        """Return the versions to which training episodes in flight are pinned, those that wait for scores included."""
        return self._pins.keys()

    def add(self, spec: EpisodeSpec) -> None:
        """Note that an episode runs with this spec, which replaces that of an earlier attempt."""
        self.remove(spec.episode_id)
        self._specs[spec.episode_id] = spec
        self._purposes[spec.purpose] += 1
        self.activity.change("episodes", 1)
        if spec.purpose == "train":
            self._pins.update(spec.pins.values())

    def remove(self, episode_id: str) -> None:
        """Note that an episode no longer runs. Idempotent."""
        spec = self._specs.pop(episode_id, None)
        if spec is None:
            return
        self._purposes[spec.purpose] -= 1
        self.activity.change("episodes", -1)
        if spec.purpose != "train":
            return
        for pin in spec.pins.values():
            self._pins[pin] -= 1
            if not self._pins[pin]:
                del self._pins[pin]

    def specs(self) -> list[EpisodeSpec]:
        """Return the specs of all running episodes."""
        return list(self._specs.values())

    def clear(self) -> None:
        """Forget all running episodes."""
        self._specs.clear()
        self._purposes.clear()
        self._pins.clear()
