"""Evaluation during training: held-out tasks at pinned versions, outside buffer and ledger.

Invariants: training never waits for an evaluation, nor does a stop; at most one evaluation runs at a time, and one that
would begin meanwhile is skipped; episodes that were dropped are counted, never scored as 0.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.core.clock import Clock
from agentrl.core.errors import CheckFailedError
from agentrl.core.ports import Observer
from agentrl.core.records import EpisodeHeader, PolicyVersion, Task
from agentrl.journal.port import JournalStore
from agentrl.orchestrator.dispatch import Dispatcher, Signal
from agentrl.orchestrator.metrics import mean_named_rewards
from agentrl.orchestrator.versions import BestCheckpointTracker, ServedVersions

_HOLDER = "evaluation"
"""Pins the versions of the running evaluation in `ServedVersions`."""


@dataclass(slots=True, kw_only=True, eq=False)
class Evaluator:
    """Runs evaluations of one run, one after another."""

    tasks: Sequence[Task]
    """Held-out tasks, each repeated `attempts` times in a row."""
    attempts: int = 1
    dispatcher: Dispatcher
    versions: ServedVersions
    store: JournalStore
    observer: Observer
    signal: Signal
    best: BestCheckpointTracker
    clock: Clock
    _busy: bool = False

    async def in_background(self, policies: Iterable[str], stopping: Callable[[], bool]) -> None:
        """Evaluate the current versions while training goes on, pinned meanwhile; skip if an evaluation is running."""
        if self._busy:
            return
        self._busy = True
        try:
            for policy in policies:
                await self.versions.pin(_HOLDER, self.versions.current[policy])
            pinned = {version.policy: version for version in self.versions.pinned_by(_HOLDER)}
            await self.now(pinned, stopping, pinned=True)
        finally:
            self.versions.unpin(_HOLDER, *self.versions.pinned_by(_HOLDER))
            self._busy = False

    async def now(
        self, versions: Mapping[str, PolicyVersion], stopping: Callable[[], bool], *, pinned: bool = False
    ) -> None:
        """Evaluate the current versions and wait for the result, or for a stop.

        Raises:
            CheckFailedError: every episode was dropped.
        """
        began, busy = self.clock.monotonic(), self.versions.engine.busy_seconds()
        loop = asyncio.get_running_loop()
        running = loop.create_task(self.dispatcher.evaluate(self.tasks, versions if pinned else {}), name="evaluate")
        running.add_done_callback(lambda _: self.signal.notify())
        try:
            await self.signal.wait_for(lambda: running.done() or stopping())
            if not running.done():
                return
            headers = running.result()
        finally:
            running.cancel()
        seconds = max(self.clock.monotonic() - began, 1e-9)
        course = {
            "evaluation/tasks": float(len(self.tasks)),
            "evaluation/seconds": seconds,
            "evaluation/engine_busy_share": (self.versions.engine.busy_seconds() - busy) / seconds,
        }
        metrics = {policy: evaluation_metrics(headers, policy, self.attempts) | course for policy in versions}
        for policy, version in versions.items():
            self.store.record_metrics(policy, version.step, metrics[policy])
            self.best.record_metrics(policy, metrics[policy], versions)
        self.observer.on_evaluation(versions, metrics)


def evaluation_metrics(headers: Sequence[EpisodeHeader], policy: str, attempts: int = 1) -> dict[str, float]:
    """Metrics of an evaluation for one policy: its own rewards, and the course of the whole evaluation.

    Args:
        headers: of all episodes, children included.
        policy: gets no reward metric if it held no seat.
        attempts: root episodes of each task, in a row.

    Raises:
        CheckFailedError: none was committed.
    """
    return {**rewards_of(headers, policy), **intervals(headers, attempts, policy), **_course(headers)}


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean of independent values: 1.96 s / √n, s by n - 1; 0 for one value."""
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def intervals(headers: Sequence[EpisodeHeader], attempts: int, policy: str | None = None) -> dict[str, float]:
    """Half the widths of 95 % intervals over tasks, since attempts at one task are not independent; and pass@k.

    pass@k = 1 - C(n - c, k) / C(n, k) for c of n attempts with a reward of 1 or more (Chen et al. 2021,
    arXiv:2107.03374), for k = 1, 2, 4, … up to the number of attempts; the mean over tasks with so many committed.

    Args:
        headers: of all episodes; the root episodes of a task stand in a row.
        attempts: how many there are of each task.
        policy: whose rewards count; None: those of all agents.
    """
    roots = [header for header in headers if header.parent_id is None]
    by_task: list[list[float]] = []
    for at in range(0, len(roots), attempts):
        played = [
            [own.reward or 0.0 for own in root.trajectories if policy in (None, own.policy)]
            for root in roots[at : at + attempts]
            if root.committed
        ]
        by_task.append([sum(own) for own in played if own])
    means = [_mean(rewards) for rewards in by_task if rewards]
    if not means:
        return {}
    metrics = {"evaluation/reward_error": interval(means)}
    for k in (1 << power for power in range(attempts.bit_length())):
        counted = [(len(rewards), sum(reward >= 1.0 for reward in rewards)) for rewards in by_task]
        passed = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counted if n >= k]
        if passed:
            metrics |= {f"evaluation/pass_at/{k}": _mean(passed), f"evaluation/pass_at_error/{k}": interval(passed)}
    return metrics


def together(headers: Sequence[EpisodeHeader], attempts: int = 1) -> dict[str, float]:
    """Metrics of an evaluation for all policies: the reward of a task's agents together, then by policy and seat.

    Raises:
        CheckFailedError: no episode was committed.
    """
    course = _course(headers)
    roots = [header for header in headers if header.parent_id is None and header.committed]
    rewards = [header.reward or 0.0 for header in roots]
    metrics = {
        "evaluation/reward": _mean(rewards),
        **intervals(headers, attempts),
    }
    policies = sorted({trajectory.policy for header in headers for trajectory in header.trajectories})
    for policy in policies:
        whose = f"/{policy}" if len(policies) > 1 else ""
        for name, value in rewards_of(headers, policy).items():
            metrics.setdefault(name.replace("reward", f"reward{whose}", 1), value)
    return metrics | course


def rewards_of(headers: Sequence[EpisodeHeader], policy: str) -> dict[str, float]:
    """Mean reward of a policy per episode it acted in, including children; if it has several seats, also per agent of
    each seat. Empty if it acted in none."""
    played = [[t for t in header.trajectories if t.policy == policy] for header in headers]
    by_episode = [sum(t.reward or 0.0 for t in own) for own in played if own]
    if not by_episode:
        return {}
    by_seat: dict[str, list[float]] = {}
    for trajectory in itertools.chain.from_iterable(played):
        by_seat.setdefault(trajectory.seat, []).append(trajectory.reward or 0.0)
    seats = {f"evaluation/reward/{seat}": _mean(by_seat[seat]) for seat in sorted(by_seat)}
    named = mean_named_rewards(list(itertools.chain.from_iterable(played)))
    parts = {f"evaluation/named_reward/{name}": value for name, value in named.items()}
    spread = {"evaluation/reward_deviation": statistics.pstdev(by_episode)}
    return {"evaluation/reward": _mean(by_episode)} | (seats if len(seats) > 1 else {}) | parts | spread


def _course(headers: Sequence[EpisodeHeader]) -> dict[str, float]:
    """Turns, tokens and counts of an evaluation; a dropped child counts as dropped too."""
    committed = [header for header in headers if header.parent_id is None and header.committed]
    dropped = [header for header in headers if not header.committed]
    if not committed:
        raise CheckFailedError(
            f"evaluation: no episode of {len(dropped)} was committed, {dropped[0].episode_id} because of "
            f"{dropped[0].drop_reason}; `agentrl episode show` has the details"
        )
    return {
        "evaluation/turns": _mean([float(header.turns) for header in committed]),
        "evaluation/tokens": _mean([float(header.tokens) for header in committed]),
        "evaluation/episodes": float(len(committed)),
        "evaluation/dropped": float(len(dropped)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
