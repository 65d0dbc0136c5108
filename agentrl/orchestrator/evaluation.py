"""Evaluation during training: held-out tasks at pinned versions, outside buffer and ledger.

Invariants: no stop waits for an evaluation, and training only for permits, of which an evaluation holds at most half
(`Scheduler`); at most one evaluation runs at a time, and one that
would begin meanwhile is skipped; its versions stay pinned until its last episode has ended; dropped episodes are
counted, never scored as 0; an evaluation without a committed episode has no result, and the run continues.

What versions have played is in the journal, so a resumed run plays and counts nothing twice.
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
from agentrl.core.errors import EVALUATION_CUT, CheckFailedError, EngineError
from agentrl.core.intervals import confidence_half_width
from agentrl.core.ports import Observer
from agentrl.core.records import EpisodeHeader, PolicyVersion, Task, WeightsRef
from agentrl.environment.environment import TaskSource
from agentrl.environment.task_contents import task_digest
from agentrl.journal.port import Admission, EpisodeEnd, EvaluationBegun, EvaluationEnded, MetricRow
from agentrl.journal.run_log import RunJournal
from agentrl.observe.metrics import (
    HELD_OUT_CUTS,
    HELD_OUT_FOREIGN_CALLS,
    HELD_OUT_TOOLS_HIDDEN,
    PROGRAM_FAILED,
    TASK_DIGEST,
    TOOLS_HIDDEN,
    count_foreign_calls,
    find_registered_metric,
    metrics_owner,
    with_unset_metrics,
)
from agentrl.orchestrator.dispatch import ChangeCondition, Dispatcher
from agentrl.orchestrator.episode_specs import PREFIX
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


@dataclass(slots=True, eq=False)
class PlayedTasks:
    """The held-out episodes that some versions have played so far."""

    roots: dict[int, EpisodeHeader] = field(default_factory=dict)
    """Root episodes, by their place in the evaluation: the attempts at one task are neighbors."""
    children: list[EpisodeHeader] = field(default_factory=list)
    metrics: dict[str, dict[str, Mapping[str, float]]] = field(default_factory=dict)
    """For each policy, values of `ctx.metric` by episode id."""
    environments: dict[str, str] = field(default_factory=dict)
    """Environments of the committed episodes, by id."""

    @property
    def headers(self) -> list[EpisodeHeader]:
        """The headers as `evaluation_metrics` expects them."""
        roots = {self.roots[place].episode_id: self.roots[place] for place in sorted(self.roots)}
        return [*roots.values(), *(one for one in self.children if ids.root_episode_id(one.episode_id) in roots)]


@dataclass(slots=True, kw_only=True, eq=False)
class Evaluator:
    """Runs evaluations of one run, one after another."""

    held_out: Sequence[HeldOutSplit]
    attempts: int = 1
    dispatcher: Dispatcher
    versions: ServedVersions
    store: RunJournal
    observer: Observer
    changed: ChangeCondition
    best: BestCheckpointTracker
    clock: Clock
    tell: Callable[[str], None]
    """Receives a line for the user."""
    lineage: int = 0
    """Lineage of the versions that this process makes."""
    rewards_since: int = 0
    """First lineage whose episodes were played by the present code and settings; earlier ones are played again."""
    _busy: bool = False
    _waiting: dict[str, WeightsRef] = field(default_factory=dict)
    """Pinned version of each policy that waits for the others to reach its step."""
    _newest_steps: dict[str, int] = field(default_factory=dict)
    """Newest step of each policy at which an evaluation was due."""
    _task_digest: int = field(init=False)
    _places: Sequence[Task] = field(init=False)
    """Task of each root episode of an evaluation: the attempts at one task are neighbors."""
    _metric_names: dict[str, dict[str, None]] = field(default_factory=dict)
    """Names of the metrics that each environment has set in any evaluation, in order."""

    def __post_init__(self) -> None:
        self._task_digest = held_out_digest(self.held_out)
        self._places = [task for split in self.held_out for task in split.tasks for _ in range(self.attempts)]

    @property
    def tasks(self) -> int:
        """Number of tasks in an evaluation."""
        return len(self._places) // self.attempts

    async def in_background(
        self, policy: str, policies: Iterable[str], training: Collection[str], should_stop: Callable[[], bool]
    ) -> None:
        """Pin a policy's version, and evaluate all policies once each policy in training has a pinned version.

        The versions of an evaluation have the same step, although policies take their steps at different times: a
        policy waits only for policies that have not passed its step. If it comes to its next evaluation before them,
        the current versions are evaluated. A policy whose phase has just ended (`freeze`) waits for the next phase's
        policies at any step. Training continues during the evaluation. Steps during an evaluation are skipped.
        """
        weights = self.versions.current[policy]
        step = self._newest_steps[policy] = weights.version.step
        if self._busy:
            return
        if policy in self._waiting:
            self._stop_waiting(self._waiting)
            await self.beside_training(policies, should_stop)
            return
        others = set(training) - {policy}
        if policy in training:
            self._stop_waiting(name for name, each in self._waiting.items() if each.version.step < step)
            if any(self._newest_steps.get(name, -1) >= step for name in others if not self._waits(name, step)):
                self._stop_waiting(name for name in self._waiting if self._waits(name, step))
                return
        self._waiting[policy] = weights
        await self.versions.pin(_HOLDER, weights)
        is_complete = all(self._waits(name, step) if policy in training else name in self._waiting for name in others)
        if is_complete and not self._busy and self._waiting.get(policy) == weights:
            await self.beside_training(policies, should_stop)

    def _waits(self, policy: str, step: int) -> bool:
        return policy in self._waiting and self._waiting[policy].version.step == step

    def _stop_waiting(self, policies: Iterable[str]) -> None:
        self.versions.unpin(_HOLDER, *[self._waiting.pop(policy).version for policy in list(policies)])

    async def beside_training(self, policies: Iterable[str], should_stop: Callable[[], bool]) -> None:
        """Evaluate the versions that wait, and the current ones of other policies, while training continues."""
        weights = {name: self._waiting.get(name) or self.versions.current[name] for name in policies}
        self._waiting.clear()
        await self._beside_training(weights, should_stop)

    async def _beside_training(self, weights: Mapping[str, WeightsRef], should_stop: Callable[[], bool]) -> None:
        self._busy = True
        versions = {name: each.version for name, each in weights.items()}
        self._newest_steps |= {name: version.step for name, version in versions.items()}
        for each in weights.values():
            await self.versions.pin(_HOLDER, each)
        await self.now(versions, should_stop, pinned=True)
        if not should_stop():  # otherwise episodes may still sample from these versions while the run ends
            self.versions.unpin(_HOLDER, *versions.values())
            self._busy = False

    async def now(
        self, versions: Mapping[str, PolicyVersion], should_stop: Callable[[], bool], *, pinned: bool = False
    ) -> None:
        """Evaluate the current versions and wait for the result or a stop. If every episode was dropped, there is no
        result: a line says why."""
        began, busy = self.clock.monotonic(), self.versions.engine.busy_seconds()
        loop = asyncio.get_running_loop()
        running = loop.create_task(self._play(versions, versions if pinned else {}), name="evaluate")
        running.add_done_callback(lambda _: self.changed.notify())
        try:
            await self.changed.wait_for(lambda: running.done() or should_stop())
            if not running.done():
                return
            number, played = running.result()
        finally:
            running.cancel()
        seconds = max(self.clock.monotonic() - began, 1e-9)
        course = {
            "evaluation/tasks": float(self.tasks),
            TASK_DIGEST: float(self._task_digest),
            "evaluation/seconds": seconds,
            "evaluation/engine_busy_share": (self.versions.engine.busy_seconds() - busy) / seconds,
        }
        headers = played.headers
        self.store.record(EvaluationEnded(number))
        try:
            metrics = {
                policy: evaluation_metrics(
                    *(headers, policy, self.attempts, self.held_out), self._metrics_of(policy, played)
                )
                | course
                for policy in versions
            }
        except CheckFailedError as error:
            first = next(header for header in headers if not header.committed)
            show = f"`agentrl episode show {self.dispatcher.run_name} {first.episode_id}` has the details"
            self.tell(f"{error}; {show}. The evaluation of {_names(versions)} has no result")
            return
        for policy, version in versions.items():
            self.store.record(MetricRow(policy, version.step, metrics[policy]))
            self.best.record_metrics(policy, metrics[policy], versions)
        self.observer.on_evaluation(versions, metrics)

    def unfinished(self, versions: Mapping[str, PolicyVersion], *, is_due: bool) -> dict[str, WeightsRef] | None:
        """Return the versions of the evaluation that this process of the run takes up; None: there is none.

        Args:
            versions: the versions with which this process begins.
            is_due: whether they are evaluated at their step.
        """
        begun, lines = self._begun(), self.dispatcher.lines
        ended = {self._weights(each.versions) for _, each, is_ended in begun if is_ended}
        current, now = self._weights(versions), {name: self.versions.current[name] for name in versions}
        *_, newest = versions, *(each.versions for _, each, _ in begun)
        if self._weights(newest) not in ended | {current}:
            weights = {name: self.store.published(version) for name, version in newest.items()}
            known = {name: each for name, each in weights.items() if each is not None}
            if known.keys() == versions.keys() and all(lines.survives(newest[name], versions[name]) for name in known):
                return known
            self.tell(f"the evaluation of {_names(newest)} is given up: its versions are no longer those of the run")
        # The result may be newer than the checkpoint, which has the best versions; it is computed again, not played.
        is_lost = self.best.metric.startswith("evaluation/") and current in ended and not self._is_measured(versions)
        was_begun = any(self._weights(each.versions) == current for _, each, _ in begun)
        return now if is_lost or ((is_due or was_begun) and current not in ended) else None

    async def take_up(self, weights: Mapping[str, WeightsRef], should_stop: Callable[[], bool]) -> None:
        """Play the rest of an evaluation that an earlier process of the run began."""
        try:
            await self._beside_training(weights, should_stop)
        except EngineError as error:
            self._busy = False
            names = ", ".join(str(each.version) for each in weights.values())
            self.tell(f"the evaluation of {names} is given up: {error}")

    # --- playing ----------------------------------------------------------------------------------------------------

    async def _play(
        self, versions: Mapping[str, PolicyVersion], pins: Mapping[str, PolicyVersion]
    ) -> tuple[int, PlayedTasks]:
        """Play the tasks that the run has not played with these versions; returns the evaluation's newest `first`."""
        first, played = self._read_played(versions)
        has_result = any(header.committed for header in played.roots.values())  # otherwise it is repeated
        places = [place for place in range(len(self._places)) if not (has_result and place in played.roots)]
        if places:
            first = self.dispatcher.specs.numbers.next_evaluation - places[0]
            self.store.record(EvaluationBegun(first, self.lineage, dict(versions), self._task_digest))
            await self.dispatcher.evaluate([self._places[place] for place in places], pins, places)
            await self.store.flush()
            return self._read_played(versions)
        return first, played

    def _metrics_of(self, policy: str, played: PlayedTasks) -> Mapping[str, Mapping[str, float]]:
        """Return a policy's values of `ctx.metric` by episode id, with 0 for each metric that it did not set."""
        return with_unset_metrics(played.metrics.get(policy, {}), played.environments, self._metric_names)

    # --- what was played --------------------------------------------------------------------------------------------

    def _weights(self, versions: Mapping[str, PolicyVersion]) -> tuple[str, ...]:
        """Identify the weights of versions; see `_weights_of`."""
        return tuple(self._weights_of(version) for _, version in sorted(versions.items()))

    def _weights_of(self, version: PolicyVersion) -> str:
        """Identify the weights of a version, also under the other id that they have after a resume."""
        version = self.dispatcher.lines.weights(version)
        weights = self.store.published(version, outside=True)
        # with the step: two steps may publish equal changes of different weights
        return f"{version.policy} {version.step} {version.lineage if weights is None else weights.sha256}"

    def _is_measured(self, versions: Mapping[str, PolicyVersion]) -> bool:
        return self._weights(versions) in map(self._weights, self.best.measured.measured_versions)

    def _begun(self) -> list[tuple[int, EvaluationBegun, bool]]:
        """Return the evaluations of the present tasks that the present code and settings began; see
        `RunLog.evaluations`."""
        return [
            (number, each, is_ended)
            for number, each, is_ended in self.store.evaluations()
            if each.tasks == self._task_digest and each.lineage >= self.rewards_since
        ]

    def _read_played(self, versions: Mapping[str, PolicyVersion]) -> tuple[int, PlayedTasks]:
        """Return what the run has played with some versions, and the `first` of their newest evaluation. Unfinished
        episodes were dropped, and are played again."""
        played, weights, begun = PlayedTasks(), self._weights(versions), self._begun()
        own = [(number, each) for number, each, _ in begun if self._weights(each.versions) == weights]
        if not own:
            return -1, played
        since = own[0][0] if self._metric_names else begun[0][0]
        log = list(self.store.history("evaluate", since))
        ends = {each.spec.episode_id: each for each in log if isinstance(each, EpisodeEnd)}
        cut = {each.spec.episode_id for each in log if isinstance(each, Admission)}.difference(
            name for name, end in ends.items() if end.header.drop_reason != EVALUATION_CUT
        )
        cut = set(map(ids.root_episode_id, cut))  # an episode counts once all its children have ended
        seeds = list(map(self.dispatcher.specs.evaluation_seed, range(len(self._places))))
        for first in (each.first for _, each in own):
            for place in range(len(self._places)):
                end = ends.get(ids.episode_id(PREFIX["evaluate"], first + place))
                before = played.roots.get(place)
                # The rest of an evaluation has numbers of its own for its places alone.
                is_own = end is not None and end.spec.episode_id not in cut and end.spec.seed == seeds[place]
                if end is not None and is_own and (before is None or not before.committed):
                    played.roots[place] = end.header
        played.children = [end.header for end in ends.values() if end.spec.parent_id is not None]
        for name, end in ends.items():
            owner = metrics_owner(versions, end.counted)
            if end.header.committed and owner is not None:
                played.environments[name] = end.spec.environment
                played.metrics.setdefault(owner, {})[name] = end.counted[owner].metrics
                with_unset_metrics({name: end.counted[owner].metrics}, played.environments, self._metric_names)
        return own[-1][1].first, played


def _names(versions: Mapping[str, PolicyVersion]) -> str:
    return ", ".join(map(str, versions.values()))


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
    roots = [header.episode_id for header in headers if header.parent_id is None]
    place = {episode: at // attempts for at, episode in enumerate(roots)}
    results = [_TaskResult([], []) for _ in range(0, len(roots), attempts)]
    for header in headers:
        if header.committed:
            committed_roots, episodes = results[place[ids.root_episode_id(header.episode_id)]]
            episodes.append(header)
            if header.parent_id is None:
                committed_roots.append(header)
    return results


def _task_reward(task: _TaskResult, policy: str | None) -> float | None:
    """Return the mean reward over a task's episodes: those in which a policy acted, children too, or, for all policies
    together, its root episodes; None if there are none."""
    headers = task.roots if policy is None else task.episodes
    rewards = [reward for header in headers if (reward := _reward_of(header, policy)) is not None]
    return _mean(rewards) if rewards else None


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

    Attempts at one task are not independent, so the intervals are over tasks.

    pass@k = 1 - C(n - c, k) / C(n, k) for c of n solved attempts (Chen et al. 2021, arXiv:2107.03374), for k = 1, 2, 4,
    … up to the number of attempts; the mean is over tasks with at least k committed attempts. An attempt is solved if
    each of the policy's rewarded agents, or of all policies', has 1 or more.
    """
    means = [reward for task in tasks if (reward := _task_reward(task, policy)) is not None]
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
    cuts = Counter(header.stop_reason for header in main_headers if header.stop_reason != "completed")
    if not main_headers:
        first = dropped_headers[0]
        raise CheckFailedError(
            f"evaluation: no episode of {len(dropped_headers)} was committed, {first.episode_id} because of "
            f"{first.drop_reason}"
        )
    main_metrics = [metrics_by_episode.get(header.episode_id, {}) for header in main_headers]
    num_failed = sum(bool(metrics.get(PROGRAM_FAILED)) for metrics in main_metrics)
    num_hidden = sum(bool(metrics.get(TOOLS_HIDDEN)) for metrics in main_metrics)
    foreign_calls = sum((Counter(count_foreign_calls(metrics)) for metrics in main_metrics), Counter[str]())
    return {
        "evaluation/turns": _mean([float(header.turns) for header in main_headers]),
        "evaluation/tokens": _mean([float(header.tokens) for header in main_headers]),
        "evaluation/episodes": float(len(main_headers)),
        "evaluation/truncated": float(cuts.total()),
        **{f"{HELD_OUT_CUTS}{reason}": float(number) for reason, number in cuts.items()},
        "evaluation/dropped": float(len(dropped_headers)),
        **({"evaluation/failed": float(num_failed)} if num_failed else {}),
        **({HELD_OUT_TOOLS_HIDDEN: num_hidden / len(main_headers)} if num_hidden else {}),
        **{f"{HELD_OUT_FOREIGN_CALLS}{form}": count / len(main_headers) for form, count in foreign_calls.items()},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
