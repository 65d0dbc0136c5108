"""How games ended, and those between a policy and its past versions: folds of committed headers.

Owns what counts as a win. Who was drawn, and how often, is `orchestrator/versions.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from agentrl.core.records import EpisodeHeader, PolicyVersion


class Tally(NamedTuple):
    """Episodes between two, and what they came to: a win counts 1, a draw ½."""

    episodes: int = 0
    score: float = 0.0

    @property
    def win_rate(self) -> float:
        """The mean, shrunk towards ½ by a win and a loss (Laplace): defined without any episode."""
        return (self.score + 1.0) / (self.episodes + 2.0)

    def plus(self, score: float) -> Tally:
        """With one more."""
        return Tally(self.episodes + 1, self.score + score)


class Result(NamedTuple):
    """How a committed episode ended for who learns."""

    learner: PolicyVersion
    opponent: PolicyVersion
    score: float
    """1: who learns was given more than the opponent, ½: as much, 0: less; a seat given nothing counts as 0."""


def result_of(header: EpisodeHeader, opponent: str, of: str) -> Result | None:
    """An episode between the policy `of` and the `opponent` that plays its past; None where one of them did not act.

    Versions are the oldest that sampled a token; of a policy that holds several seats, the first seat's.
    """
    sides = [[t for t in header.trajectories if t.policy == policy] for policy in (of, opponent)]
    if not all(sides):
        return None
    own, other = (sum(t.reward or 0.0 for t in side) / len(side) for side in sides)
    learner, past = (PolicyVersion(of, side[0].lineage, side[0].oldest_step) for side in sides)
    return Result(learner, past, 0.5 if own == other else float(own > other))


def winner(header: EpisodeHeader) -> str | None:
    """The seat that was given most, in an episode that was a decided game: some gained by it, others lost."""
    seats: dict[str, float] = {}
    for trajectory in header.trajectories:
        seats[trajectory.seat] = seats.get(trajectory.seat, 0.0) + (trajectory.reward or 0.0)
    if not seats or not min(seats.values()) < 0.0 < max(seats.values()):
        return None
    return max(seats, key=lambda seat: seats[seat])


def win_rates(
    headers: Iterable[EpisodeHeader], opponent: str, of: str, *, every: int
) -> dict[tuple[int, PolicyVersion], Tally]:
    """Results by the learner's step, rounded down to multiples of `every`, and the opponent's version."""
    matrix: dict[tuple[int, PolicyVersion], Tally] = {}
    for header in headers:
        result = result_of(header, opponent, of)
        if result is not None:
            key = (result.learner.step - result.learner.step % every, result.opponent)
            matrix[key] = matrix.get(key, Tally()).plus(result.score)
    return dict(sorted(matrix.items()))
