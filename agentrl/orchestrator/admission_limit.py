"""How many episodes run at once under `max_in_flight = "auto"`: as many as keep the engine busy, and few more.

Owns the limit, and the readings that it follows from. Only the admission of root groups is limited: episodes that run
continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from agentrl.core.errors import ConfigError
from agentrl.core.holds import InFlightLimit, LimitKind
from agentrl.observe.bottleneck import TURNS

LOOK_S = 2.0
"""Seconds between two readings."""
TURNOVER = 0.25
"""Turns per episode in flight after which the limit may change: a change shows its effect after about one."""
MOST_QUEUED = 1 / 4
"""Share of the episodes in flight that may wait for a place of the engine before the limit falls."""
MOST_WITHOUT_ROOM = 1 / 2
"""The same for room in the KV cache. Half as many keep the limit from rising. Fewer would leave engines with room
beside engines without, and reservations keep waiting calls from evicting running conversations."""
BUSY = 0.95
"""Share of the engine's places from which on more episodes would only wait."""
RISE, FALL = 1.25, 0.8
"""Factors by which the limit changes."""


class AdmissionController:
    """The limit on episodes in flight, which follows the engine.

    The limit rises while the engine samples fewer turns than it can, and falls while too many calls wait for a place or
    for room in the KV cache.

    Args:
        places: number of turns that the engine samples at once.
        least: number of episodes of the largest group.

    Raises:
        ConfigError: the number of places is not known.
    """

    def __init__(self, places: int, least: int) -> None:
        if not places:
            raise ConfigError(
                'max_in_flight = "auto" needs an engine of the run that says how many turns it samples at once; remote '
                "endpoints and bots do not, so set a number"
            )
        self.places = places
        """Number of turns that the engine samples at once; engines that join change it."""
        self._least = least
        self.limit = max(places, least)
        self.reason = InFlightLimit("first", {"places": places})
        self._before: tuple[float, Mapping[str, float]] | None = None
        """Time and totals at the beginning of the current readings."""

    def restart(self) -> None:
        """Forget the readings since the last change, in which other episodes than those of training ran."""
        self._before = None

    def look(self, now: float, totals: Mapping[str, float], in_flight: int, *, is_held: bool) -> bool:
        """Take a reading; returns whether the limit changes.

        Args:
            now: time in seconds.
            totals: `ActivityClock.totals` of the workers.
            in_flight: number of episodes in flight.
            is_held: whether the limit holds admission back.
        """
        if self._before is None:
            self._before = (now, totals)
        since, before = self._before
        if now <= since or totals.get(TURNS, 0.0) - before.get(TURNS, 0.0) < max(TURNOVER * in_flight, 1):
            return False
        engine, memory = ((totals.get(key, 0.0) - before.get(key, 0.0)) / (now - since) for key in ("engine", "memory"))
        self._before = (now, totals)
        limit, queued = self.limit, engine - self.places
        if in_flight > limit:  # an earlier fall has not taken its full effect
            return False
        if memory > MOST_WITHOUT_ROOM * in_flight or queued > MOST_QUEUED * in_flight:
            self.limit = max(int(in_flight * FALL), self._least)
            kind: LimitKind = "room" if memory > queued else "places"
            self.reason = InFlightLimit(kind, {"waiting": max(memory, queued), "running": in_flight})
        elif is_held and memory < MOST_WITHOUT_ROOM / 2 * in_flight and engine < BUSY * self.places:
            self.limit = int(limit * RISE) + 1
            self.reason = InFlightLimit("raised", {"sampled": engine, "places": self.places})
        return self.limit != limit


def first_limit(max_in_flight: int | Literal["auto"], places: int, least: int) -> int:
    """Return the number of episodes that may run at once when a run begins; see `AdmissionController`."""
    return AdmissionController(places, least).limit if max_in_flight == "auto" else max_in_flight
