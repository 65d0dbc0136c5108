"""Policies so small that the gradient of their reward is known, and what the estimates of it are on average."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from agentrl.core.records import EpisodeDataLocation, PolicyVersion, TrajectoryCredit, TrajectoryHeader, Unit
from agentrl.credit.baselines import DecayingMean, MeanAtStep, RoleMeans, SeatRole
from agentrl.credit.group import Group

CHANCE = 0.3
"""Probability of action 1."""
REWARD_DECAY = 0.95
"""Share of a mean that the rules of before kept per reward."""


def pass_at_k_ratio(
    estimator: Callable[..., Sequence[float]], *, k: int, agents: int, episodes: int = 5, **options: Any
) -> float:
    """E[Σ score · advantage] of a group over the true gradient of pass@k, by enumeration of all that can happen.

    Each agent takes action 1 with probability `CHANCE`. An episode passes, and rewards all of its agents, if one of
    them takes it. pass@k is that of k independent episodes.
    """
    names = tuple(f"e{at // agents}" for at in range(episodes * agents))
    expected = 0.0
    for actions in itertools.product((0, 1), repeat=len(names)):
        chance = CHANCE ** sum(actions) * (1 - CHANCE) ** (len(actions) - sum(actions))
        passed = {name: float(any(a for a, own in zip(actions, names, strict=True) if own == name)) for name in names}
        group = Group(rewards=tuple(passed[name] for name in names), episodes=names)
        advantages = estimator(group, k=k, **options)
        expected += chance * sum((a - CHANCE) * value for a, value in zip(actions, advantages, strict=True))
    fails = (1 - CHANCE) ** agents
    by_logit = agents * fails * CHANCE  # derivative of an episode's chance to pass
    return expected / (episodes * k * fails ** (k - 1) * by_logit)


class Estimates(NamedTuple):
    """Moments of score · advantage over the episodes of a policy whose gradient is known."""

    ratio: float
    """Mean, over the true gradient."""
    variance: float


RoleCredit = Callable[[int, Sequence[tuple[int, float, int]]], list[float]]
"""From a step's number and its units in the order of release, as (number of the episode, reward, step of the weights it
began with), to their advantages."""


def asynchronous_estimates(
    credit: RoleCredit, *, staleness: int, step_size: int, episodes: int, longer: float = 5.0, seed: int = 0
) -> Estimates:
    """The estimates of the gradient where a fixed policy is trained asynchronously.

    An event simulation: at most (1 + S) · step_size episodes are outstanding, and each step takes the first step_size
    that have ended, until all are trained. Action 1 makes an episode `longer` times as long and is paid 1, so reward
    and length are tied.
    """
    draw = random.Random(seed)
    running: list[tuple[float, int]] = []
    ready: list[int] = []
    long: list[bool] = []
    began: list[int] = []
    now, step = 0.0, 0
    found: list[float] = []
    while running or len(long) < episodes:
        while len(running) + len(ready) < (1 + staleness) * step_size and len(long) < episodes:
            long.append(draw.random() < CHANCE)
            began.append(step)
            heappush(running, (now + draw.uniform(0.9, 1.1) * (longer if long[-1] else 1.0), len(long) - 1))
        now, ended = heappop(running)
        ready.append(ended)
        if len(ready) == step_size or not running:
            step += 1
            advantages = credit(step, [(at, float(long[at]), began[at]) for at in ready])
            found += ((long[at] - CHANCE) * value for at, value in zip(ready, advantages, strict=True))
            ready.clear()
    return Estimates(statistics.fmean(found) / (CHANCE * (1 - CHANCE)), statistics.pvariance(found))


def true_mean() -> RoleCredit:
    """The mean reward itself as the baseline."""
    return lambda _, units: [reward - CHANCE for _, reward, _ in units]


class DecayPerReward(RoleMeans):
    """The rule that one decay per step replaced: rewards enter one after another, in order of admission."""

    def _after(self, role: SeatRole, step: int, rewards: Mapping[str, list[float]]) -> list[MeanAtStep]:
        first, *last = super()._after(role, step, rewards)
        means = self.means.get(role)
        mean = means[-1].mean if means else DecayingMean()
        for name in sorted(rewards, key=lambda name: int(name[1:])):
            for reward in rewards[name]:
                mean = mean.with_reward(reward, REWARD_DECAY)
        return [first, MeanAtStep(step, mean)] if last else [MeanAtStep(step, mean)]


def decay_per_reward() -> RoleCredit:
    """`DecayPerReward`, as the loop used it."""
    return role_mean(DecayPerReward())


def role_mean(means: RoleMeans | None = None) -> RoleCredit:
    """`RoleMeans`, as the loop uses it."""
    means = means or RoleMeans()

    def advantages(step: int, units: Sequence[tuple[int, float, int]]) -> list[float]:
        given = []
        for number, reward, began in units:
            header = TrajectoryHeader(
                seat="x", index=0, policy="p", reward=reward, tokens=1, oldest_step=began, lineage=0
            )
            unit = Unit(
                episode_id=f"e{number}",
                attempt=0,
                policy="p",
                location=EpisodeDataLocation("w", 1),
                credits=(TrajectoryCredit("x", 0, reward, reward, 0.0),),
            )
            given.append(("game", unit, (header,)))
        found = [unit.credits[0].advantage for unit in means.credited(PolicyVersion("p", 0, step), given)]
        means.commit_step("p")
        return found

    return advantages


def newest_mean() -> RoleCredit:
    """The rule that `RoleMeans` replaced: the mean of all that entered before, a step's units in order of admission."""
    mean = DecayingMean()

    def advantages(step: int, units: Sequence[tuple[int, float, int]]) -> list[float]:
        nonlocal mean
        found = {}
        for number, reward, _ in sorted(units):
            found[number] = reward - mean.total / mean.weight if mean.weight else 0.0
            mean = mean.with_reward(reward, REWARD_DECAY)
        return [found[number] for number, *_ in units]

    return advantages
