"""The decisions that dispatch leaves to the run's scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion
from agentrl.orchestrator.in_flight import EpisodesInFlight
from agentrl.orchestrator.tasks import VisibleRange


class AdmissionPolicy(Protocol):
    """The decisions a dispatcher leaves to the scheduler: versions an episode plays with, and policies that learn."""

    def may_play(self) -> bool:
        """Whether a root episode that is not trained, held-out or a fork, may start now."""
        ...

    def pins(self, group: int) -> Mapping[str, PolicyVersion]:
        """Return the versions to which a root group and its children are pinned, independent of later updates."""
        ...

    def deadline(self, number: int) -> int:
        """Return the `EpisodeSpec.deadline` of a root training episode; it grows with the number, by one for each
        step.
        """
        ...

    def resumable(self, spec: EpisodeSpec) -> EpisodeSpec | None:
        """Return the spec with which an episode of a previous attempt can continue now; None if it must wait."""
        ...

    def seen(self) -> VisibleRange | None:
        """Return the proposals that an episode sees; None: all that were made. Constant within a run."""
        ...

    def learning(self) -> Collection[str]:
        """Return the policies that learn now: neither frozen nor over."""
        ...

    def is_over(self, policy: str) -> bool:
        """Whether a policy has taken its last step."""
        ...

    def record_end(self, spec: EpisodeSpec, header: EpisodeHeader, learning: Collection[str]) -> str | None:
        """Record the end of a training episode, with `learning()` now; returns why the run must end, if it must."""
        ...


class UnrestrictedAdmission:
    """The `AdmissionPolicy` of episodes outside training: they play the current versions.

    Args:
        in_flight: the episodes in flight.
        max_in_flight: maximum number of episodes running at once, children included.
    """

    def __init__(self, in_flight: EpisodesInFlight, max_in_flight: int) -> None:
        self._in_flight = in_flight
        self._max_in_flight = max_in_flight

    def may_play(self) -> bool:
        """Whether fewer than `max_in_flight` episodes run."""
        return len(self._in_flight) < self._max_in_flight

    def pins(self, group: int) -> Mapping[str, PolicyVersion]:
        """Return no pins."""
        return {}

    def deadline(self, number: int) -> int:
        """Return 0: all episodes have equal priority."""
        return 0

    def resumable(self, spec: EpisodeSpec) -> EpisodeSpec | None:
        """Return the spec unchanged."""
        return spec

    def seen(self) -> VisibleRange | None:
        """Return None: every proposal is visible."""
        return None

    def learning(self) -> Collection[str]:
        """Return no policies."""
        return ()

    def is_over(self, policy: str) -> bool:
        """Return False: nothing is trained."""
        return False

    def record_end(self, spec: EpisodeSpec, header: EpisodeHeader, learning: Collection[str]) -> str | None:
        """Return None: the end of an episode never ends the run."""
        return None
