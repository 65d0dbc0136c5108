"""Evaluation during training: held-out tasks at pinned versions, outside buffer and ledger.

Invariants: no stop waits for an evaluation, and training only for permits, of which an evaluation holds at most half
(`Scheduler`); at most one evaluation runs at a time, and one that
would begin meanwhile is skipped; its versions stay pinned until its last episode has ended; dropped episodes are
counted, never scored as 0; an evaluation without a committed episode has no result, and the run continues.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from agentrl.core import ids
from agentrl.core.clock import Clock
from agentrl.core.errors import CheckFailedError
from agentrl.core.intervals import confidence_half_width
from agentrl.core.ports import Observer
from agentrl.core.records import EpisodeHeader, PolicyVersion, Task
from agentrl.environment.environment import TaskSource
from agentrl.environment.task_contents import task_digest
from agentrl.journal.port import JournalStore, MetricRow
from agentrl.observe.metrics import (
    HELD_OUT_FOREIGN_CALLS,
    PROGRAM_FAILED,
    TASK_DIGEST,
    count_foreign_calls,
    find_registered_metric,
)
from agentrl.orchestrator.dispatch import ChangeCondition, Dispatcher
from agentrl.orchestrator.metrics import MAX_METRICS, mean_named_rewards
from agentrl.orchestrator.versions import BestCheckpointTracker, ServedVersions

_HOLDER = "evaluation"
"""Holder that pins the versions of the running evaluation in `ServedVersions`."""


class HeldOutSplit(NamedTuple):
    """The tasks of an evaluated split."""

    name: str
    """Name of the split; `Environment@split` if several environments are evaluated."""
    tasks: Sequence[Task]
    source: TaskSource | None = None
    """All tasks of the split, from which `tasks` were drawn; None: `tasks` are all."""


def held_out_digest(held_out: Sequence[HeldOutSplit]) -> int:
    """Return a number that identifies the tasks of an evaluation, in any order; a float represents it exactly."""
    digests = sorted(
        f"{split.name} {task.id} ".encode("utf-8", "surrogatepass") + task_digest(task)
        for split in held_out
        for task in split.tasks
    )
    return int.from_bytes(blake2b(b"\n".join(digests), digest_size=6).digest())


@dataclass(slots=True, kw_only=True, eq=False)
class Evaluator:
    """Runs evaluations of one run, one after another."""

    held_out: Sequence[HeldOutSplit]
    attempts: int = 1
    dispatcher: Dispatcher
    versions: ServedVersions
    store: JournalStore
    observer: Observer
    changed: ChangeCondition
    best: BestCheckpointTracker
    clock: Clock
    tell: Callable[[str], None]
    """Receives a line for the user."""
    _busy: bool = False
    _task_digest: int = field(init=False)

    def __post_init__(self) -> None:
        self._task_digest = held_out_digest(self.held_out)

    @property
    def tasks(self) -> int:
        """Number of tasks in an evaluation."""
        return sum(len(split.tasks) for split in self.held_out)

    async def in_background(
        self, policy: str, policies: Iterable[str], training: Collection[str], should_stop: Callable[[], bool]
    ) -> None:
        """Pin a policy's version, and evaluate all policies once each policy in training has a pinned version.

        So the versions of an evaluation have the same step, although policies take their steps at different times. If
        a policy comes to its next evaluation before the others, the current versions are evaluated. Training continues
        during the evaluation. Nothing happens if one is already running.
        """
        if self._busy:
            return
        held_versions = self._held_versions()
        if policy in held_versions:
            self.versions.unpin(_HOLDER, held_versions.pop(policy))
        else:
            await self.versions.pin(_HOLDER, self.versions.current[policy])
            held_versions = self._held_versions()
            if self._busy or not held_versions.keys() >= set(training):
                return
        self._busy = True
        for name in policies:
            if name not in held_versions:
                await self.versions.pin(_HOLDER, self.versions.current[name])
        pinned_versions = self._held_versions()
        await self.now(pinned_versions, should_stop, pinned=True)
        if not should_stop():  # otherwise episodes may still sample from these versions while the run ends
            self.versions.unpin(_HOLDER, *pinned_versions.values())
            self._busy = False

    def _held_versions(self) -> dict[str, PolicyVersion]:
        return {version.policy: version for version in self.versions.pinned_by(_HOLDER)}

    async def now(
        self, versions: Mapping[str, PolicyVersion], should_stop: Callable[[], bool], *, pinned: bool = False
    ) -> None:
        """Evaluate the current versions and wait for the result or a stop. If every episode was dropped, there is no
        result: a line says why."""
        began, busy = self.clock.monotonic(), self.versions.engine.busy_seconds()
        loop = asyncio.get_running_loop()
        tasks = repeat_tasks(self.held_out, self.attempts)
        running = loop.create_task(self.dispatcher.evaluate(tasks, versions if pinned else {}), name="evaluate")
        running.add_done_callback(lambda _: self.changed.notify())
        try:
            await self.changed.wait_for(lambda: running.done() or should_stop())
            if not running.done():
                return
            headers = running.result()
        finally:
            running.cancel()
        seconds = max(self.clock.monotonic() - began, 1e-9)
        course = {
            "evaluation/tasks": float(self.tasks),
            TASK_DIGEST: float(self._task_digest),
            "evaluation/seconds": seconds,
            "evaluation/engine_busy_share": (self.versions.engine.busy_seconds() - busy) / seconds,
        }
        try:
            metrics = {
                policy: evaluation_metrics(
                    *(headers, policy, self.attempts, self.held_out),
                    self.dispatcher.evaluated.metrics(policy, versions),
                )
                | course
                for policy in versions
            }
        except CheckFailedError as error:
            first = next(header for header in headers if not header.committed)
            show = f"`agentrl episode show {self.dispatcher.run_name} {first.episode_id}` has the details"
            self.tell(f"{error}; {show}. The evaluation of {', '.join(map(str, versions.values()))} has no result")
            return
        for policy, version in versions.items():
            self.store.record(MetricRow(policy, version.step, metrics[policy]))
            self.best.record_metrics(policy, metrics[policy], versions)
        self.observer.on_evaluation(versions, metrics)


def repeat_tasks(held_out: Sequence[HeldOutSplit], attempts: int) -> list[Task]:
    """Return the tasks of all splits, each `attempts` times in a row."""
    return [task for split in held_out for task in split.tasks for _ in range(attempts)]


def evaluation_metrics(
    headers: Sequence[EpisodeHeader],
    policy: str | None,
    attempts: int = 1,
    held_out: Sequence[HeldOutSplit] = (),
    metrics_by_episode: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, float]:
    """Compute the metrics of an evaluation for one policy: its rewards, and statistics of the whole evaluation.

    Args:
        headers: headers of all episodes, children included; root episodes come first, those of one task in a row.
        policy: policy of the rewards; one without a seat gets no reward metric. None: all policies together, by policy
            and seat.
        attempts: number of root episodes per task.
        held_out: the splits; if there are several, each also has its own metrics.
        metrics_by_episode: values of `ctx.metric` by episode id, of the episodes whose metrics this policy reports.

    Raises:
        CheckFailedError: no episode was committed.
    """
    metrics = _rewards(headers, policy, attempts) | _environment_metrics(
        _by_task(headers, attempts), metrics_by_episode or {}
    )
    if len(held_out) > 1:
        by_task, first = _by_task(headers, attempts), 0
        for split in held_out:
            split_results = by_task[first : first + len(split.tasks)]
            first += len(split.tasks)
            for name, value in _estimates(split_results, policy).items():
                group, _, name_in_group = name.partition("/")
                metric_kind, _, word = name_in_group.partition("/")
                metrics["/".join(filter(None, (f"{group}/split_{metric_kind}", split.name, word)))] = value
    if policy is not None:
        return metrics | _course(headers, metrics_by_episode or {})
    policies = sorted({trajectory.policy for header in headers for trajectory in header.trajectories})
    for name in policies:
        policy_part = f"/{name}" if len(policies) > 1 else ""
        for metric, value in _rewards(headers, name, attempts).items():
            if not metric.startswith(("evaluation/reward_error", "evaluation/pass_at")):
                metrics.setdefault(metric.replace("reward", f"reward{policy_part}", 1), value)
    return metrics | _course(headers, metrics_by_episode or {})


class _TaskResult(NamedTuple):
    """The committed episodes of one held-out task."""

    roots: list[EpisodeHeader]
    """Root episodes, one per attempt."""
    episodes: list[EpisodeHeader]
    """Root episodes and their children."""


def _by_task(headers: Sequence[EpisodeHeader], attempts: int) -> list[_TaskResult]:
    """Group the headers by task, in the order of the tasks."""
    first = min((ids.root_episode_number(header.episode_id) for header in headers), default=0)
    count = sum(header.parent_id is None for header in headers)
    results = [_TaskResult([], []) for _ in range(0, count, attempts)]
    for header in headers:
        if header.committed:
            roots, episodes = results[(ids.root_episode_number(header.episode_id) - first) // attempts]
            episodes.append(header)
            if header.parent_id is None:
                roots.append(header)
    return results


def _reward_of(header: EpisodeHeader, policy: str | None) -> float | None:
    """Return the reward of a policy, or of all policies, in an episode; None if it did not act there."""
    rewards = [trajectory.reward or 0.0 for trajectory in header.trajectories if policy in (None, trajectory.policy)]
    return sum(rewards) if rewards else None


def _is_solved(header: EpisodeHeader, policy: str | None) -> bool:
    """Whether each rewarded agent of a policy, or of all policies, has a reward of 1 or more."""
    rewards = [
        trajectory.reward
        for trajectory in header.trajectories
        if policy in (None, trajectory.policy) and trajectory.reward is not None
    ]
    return bool(rewards) and min(rewards) >= 1.0


def _estimates(tasks: Sequence[_TaskResult], policy: str | None) -> dict[str, float]:
    """Estimate mean reward and pass@k over tasks, with half the widths of their 95 % intervals.

    A task's reward is the mean over its episodes: those in which the policy acted, children too, or, for all policies
    together, its root episodes. Attempts at one task are not independent, so the intervals are over tasks.

    pass@k = 1 - C(n - c, k) / C(n, k) for c of n solved attempts (Chen et al. 2021, arXiv:2107.03374), for k = 1, 2, 4,
    … up to the number of attempts; the mean is over tasks with at least k committed attempts. An attempt is solved if
    each of the policy's rewarded agents, or of all policies', has 1 or more.
    """
    rewards = [
        [
            reward
            for header in (task.roots if policy is None else task.episodes)
            if (reward := _reward_of(header, policy)) is not None
        ]
        for task in tasks
    ]
    means = [_mean(task_rewards) for task_rewards in rewards if task_rewards]
    if not means:
        return {}
    metrics = {"evaluation/reward": _mean(means), "evaluation/reward_error": confidence_half_width(means)}
    outcomes_by_task = [
        [_is_solved(header, policy) for header in task.roots if _reward_of(header, policy) is not None]
        for task in tasks
    ]
    max_attempts = max(map(len, outcomes_by_task))
    for k in (1 << power for power in range(max_attempts.bit_length())):
        pass_rates = [
            1 - math.comb(len(outcomes) - sum(outcomes), k) / math.comb(len(outcomes), k)
            for outcomes in outcomes_by_task
            if len(outcomes) >= k
        ]
        metrics |= {
            f"evaluation/pass_at/{k}": _mean(pass_rates),
            f"evaluation/pass_at_error/{k}": confidence_half_width(pass_rates),
        }
    return metrics


def _environment_metrics(
    tasks: Sequence[_TaskResult], metrics_by_episode: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Estimate the environment's own metrics, with half the widths of their 95 % intervals over tasks."""
    by_name: dict[str, list[float]] = {}
    for task in tasks:
        values: dict[str, list[float]] = {}
        for header in task.episodes:
            for name, value in metrics_by_episode.get(header.episode_id, {}).items():
                values.setdefault(name, []).append(value)
        for name, of_task in values.items():
            if find_registered_metric(name) is None:
                by_name.setdefault(name, []).append(_mean(of_task))
    metrics: dict[str, float] = {}
    for name in sorted(by_name)[:MAX_METRICS]:
        metrics[f"evaluation/metric/{name}"] = _mean(by_name[name])
        metrics[f"evaluation/metric_error/{name}"] = confidence_half_width(by_name[name])
    return metrics


def _rewards(headers: Sequence[EpisodeHeader], policy: str | None, attempts: int) -> dict[str, float]:
    """Compute the estimates and, for one policy, their parts: by seat if it has several, by reward name, and the
    standard deviation over episodes. Empty if the policy did not act."""
    metrics = _estimates(_by_task(headers, attempts), policy)
    if policy is None or not metrics:
        return metrics
    trajectories_by_episode = [[t for t in header.trajectories if t.policy == policy] for header in headers]
    by_seat: dict[str, list[float]] = {}
    for trajectory in itertools.chain.from_iterable(trajectories_by_episode):
        by_seat.setdefault(trajectory.seat, []).append(trajectory.reward or 0.0)
    seats = {f"evaluation/reward/{seat}": _mean(by_seat[seat]) for seat in sorted(by_seat)}
    named_means = mean_named_rewards(list(itertools.chain.from_iterable(trajectories_by_episode)))
    parts = {f"evaluation/named_reward/{name}": value for name, value in named_means.items()}
    spread = {
        "evaluation/reward_deviation": statistics.pstdev(
            sum(t.reward or 0.0 for t in trajectories) for trajectories in trajectories_by_episode if trajectories
        )
    }
    return metrics | (seats if len(seats) > 1 else {}) | parts | spread


def _course(
    headers: Sequence[EpisodeHeader], metrics_by_episode: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Compute turns, tokens and counts of an evaluation; a dropped child counts as dropped too."""
    main_headers = [header for header in headers if header.parent_id is None and header.committed]
    dropped_headers = [header for header in headers if not header.committed]
    if not main_headers:
        first = dropped_headers[0]
        raise CheckFailedError(
            f"evaluation: no episode of {len(dropped_headers)} was committed, {first.episode_id} because of "
            f"{first.drop_reason}"
        )
    main_metrics = [metrics_by_episode.get(header.episode_id, {}) for header in main_headers]
    num_failed = sum(bool(metrics.get(PROGRAM_FAILED)) for metrics in main_metrics)
    foreign_calls = sum((Counter(count_foreign_calls(metrics)) for metrics in main_metrics), Counter[str]())
    return {
        "evaluation/turns": _mean([float(header.turns) for header in main_headers]),
        "evaluation/tokens": _mean([float(header.tokens) for header in main_headers]),
        "evaluation/episodes": float(len(main_headers)),
        "evaluation/truncated": float(sum(header.stop_reason != "completed" for header in main_headers)),
        "evaluation/dropped": float(len(dropped_headers)),
        **({"evaluation/failed": float(num_failed)} if num_failed else {}),
        **{f"{HELD_OUT_FOREIGN_CALLS}{form}": count / len(main_headers) for form, count in foreign_calls.items()},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
