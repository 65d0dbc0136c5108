"""The tail model: how much work an agent has left, learned from those that ended.

The work of an agent, in tokens or in seconds of its tools, is taken as log-normal, a law of its own for each
(environment, seat, turn): what is left from the beginning of that turn on, at turns that double (`core.remaining`). A
law is known as well as its observations allow: a turn seen rarely borrows from the mark before it, by a
normal-inverse-gamma prior worth a few observations.

* **Censored.** Whom the context ended would have worked longer. To take what it did for all would make the law short:
  it enters with the mean and variance of what it may have become, by the law known then (online
  expectation-maximisation, Cappé & Moulines 2009).
* **Siblings** are alike: with n ended ones of mean z, a share ρn / (ρn + 1 - ρ) of z is believed of the next.
* **Calibration**: of each that ends, what would have been said of it, its ended siblings known, is compared with what
  came.

Pure: no clock, no events. What it knows is a fold of the ends it is told, in order of commit.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from agentrl.core.records import EpisodeHeader, EpisodeSpec
from agentrl.core.remaining import MARKS, unpack

PRIOR_WEIGHT = 4.0
"""Observations that a law borrowed from the mark before counts for."""
REMEMBERED = 500
"""Predictions that are compared with what came, and groups whose members are compared with each other."""
PREDICTED = 0.9
"""Share of the work that is predicted to stay below."""


class Law(NamedTuple):
    """A log-normal law of work."""

    mean: float
    """Of the log."""
    deviation: float


@dataclass(slots=True)
class _Seen:
    """What ended, at one mark: sums over logs."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def law(self, prior: Law) -> Law:
        weight = PRIOR_WEIGHT + self.count
        mean = (PRIOR_WEIGHT * prior.mean + self.total) / weight
        square = (PRIOR_WEIGHT * (prior.deviation**2 + prior.mean**2) + self.squares) / weight
        return Law(mean, math.sqrt(max(square - mean**2, 1e-4)))

    def add(self, first: float, second: float) -> None:
        self.count += 1
        self.total += first
        self.squares += second


class TailModel:
    """Laws of work, by environment, seat and mark.

    Args:
        guess: before anything was seen.
    """

    def __init__(self, guess: Law) -> None:
        self._guess = guess
        self._seen: dict[tuple[str, str], list[_Seen]] = defaultdict(lambda: [_Seen() for _ in MARKS])
        self._groups: dict[str, list[list[float]]] = {}
        """Of groups, by mark: how far its ended members were from the mean, in deviations."""
        self._pairs, self._products = 0, 0.0
        """Of siblings, by their deviations at the first mark."""
        self._below: deque[float] = deque(maxlen=REMEMBERED)

    def ended(
        self, environment: str, seat: str, left: Sequence[float], *, group_id: str = "", is_cut: bool = False
    ) -> None:
        """An agent ended.

        Args:
            environment: of its episode.
            seat: it held.
            left: work left from the beginning of `MARKS` on, of as many as it came to with any left.
            group_id: whom it is alike; empty: nobody.
            is_cut: it was ended by the context.
        """
        seen, group, likeness = self._seen[environment, seat], self._group(group_id), self.likeness
        for mark, (work, law) in enumerate(zip(left, self.laws(environment, seat), strict=False)):
            log, siblings = math.log(work), group[mark]
            z = (log - law.mean) / law.deviation
            self._below.append(_below(z, siblings, likeness, is_cut=is_cut))
            if is_cut:
                first, second = _beyond(law, log)
                z = (first - law.mean) / law.deviation
            else:
                first, second = log, log**2
            if mark == 0:
                self._pairs += len(siblings)
                self._products += z * math.fsum(siblings)
            siblings.append(z)
            seen[mark].add(first, second)

    def laws(self, environment: str, seat: str) -> Iterator[Law]:
        """The laws of what is left from `MARKS` on, in order."""
        law = self._guess
        for seen in self._seen[environment, seat]:
            law = seen.law(law)
            yield law

    @property
    def likeness(self) -> float:
        """ρ, the correlation of siblings' logs: the mean product of their deviations, over pairs of all groups."""
        return min(max(self._products / self._pairs, 0.0), 0.95) if self._pairs else 0.0

    def calibration(self) -> float | None:
        """Of the newest predictions, the share that stayed below their P90: 0.9 where the model is right."""
        return math.fsum(self._below) / len(self._below) if self._below else None

    def _group(self, group_id: str) -> list[list[float]]:
        group = self._groups.get(group_id) or [[] for _ in MARKS]
        if group_id:
            self._groups[group_id] = group
            if len(self._groups) > REMEMBERED:
                del self._groups[next(iter(self._groups))]
        return group


class Tails:
    """The tails of a run: of the tokens that agents sample, and of the seconds that their tools take."""

    def __init__(self) -> None:
        self.tokens = TailModel(Law(5.0, 1.25))  # 150 tokens, P90 / P50 = 5
        self.tool_seconds = TailModel(Law(0.0, 1.25))
        """Of agents whose tools take any from then on."""

    def heard(self, spec: EpisodeSpec, header: EpisodeHeader) -> None:
        """A training episode ended: what its agents had left. Nothing is learned from one that was dropped."""
        is_cut = header.stop_reason == "context_length"  # whoever met it, the others would have gone on too
        for own in header.trajectories:
            group = f"{spec.group_id} {own.seat}"
            remaining = list(unpack(own.remaining))
            tokens = takewhile(bool, (float(own.tokens), *(left.tokens for left in remaining[1:])))
            self.tokens.ended(spec.environment, own.seat, list(tokens), group_id=group, is_cut=is_cut)
            seconds = takewhile(bool, (left.tool_seconds for left in remaining))
            self.tool_seconds.ended(spec.environment, own.seat, list(seconds), group_id=group, is_cut=is_cut)

    def metrics(self) -> dict[str, float]:
        """How well each predicts, where it did."""
        shares = {
            "tail/below_p90": self.tokens.calibration(),
            "tail/tools_below_p90": self.tool_seconds.calibration(),
        }
        return {name: share for name, share in shares.items() if share is not None}


def _below(z: float, siblings: Sequence[float], likeness: float, *, is_cut: bool) -> float:
    """The chance that what came stays below what was predicted with chance `PREDICTED`, the siblings known.

    Where it was cut, of what it may have become: so the mean is `PREDICTED` under the true law, wherever the cuts are.
    """
    if siblings:
        count = len(siblings)
        weight = likeness * count / (likeness * count + 1 - likeness)
        z = (z - weight * math.fsum(siblings) / count) / math.sqrt(1 - likeness * weight)
    rank = 1.0 - _tail(z)
    if rank > PREDICTED:
        return 0.0
    return (PREDICTED - rank) / (1.0 - rank) if is_cut else 1.0


def _tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2))


def _beyond(law: Law, log: float) -> tuple[float, float]:
    """E[x | x > log] and E[x² | x > log] of the log of work."""
    mean, deviation = law
    z = (log - mean) / deviation
    chance = _tail(z)
    # Mills' ratio; far out it is z + 1/z
    hazard = math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / chance if chance > 1e-12 else z + 1 / z
    first = mean + deviation * hazard
    second = mean**2 + 2 * mean * deviation * hazard + deviation**2 * (1 + z * hazard)
    return first, second


def tails_of(members: Iterable[tuple[EpisodeSpec, EpisodeHeader]]) -> Tails:
    """What a journal's committed training episodes, in order of commit, say."""
    tails = Tails()
    for spec, header in members:
        tails.heard(spec, header)
    return tails
