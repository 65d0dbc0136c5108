"""Evaluation during training: held-out tasks at pinned versions, outside buffer and ledger.

Invariants: no stop waits for an evaluation, and training only for permits, of which an evaluation holds at most half
(`Scheduler`); at most one evaluation runs at a time, and one that
would begin meanwhile is skipped; its versions stay pinned until its last episode has ended; dropped episodes are
counted, never scored as 0; an evaluation without a committed episode has no result, and the run continues.

With a `Question`, an evaluation plays growing parts of the tasks, in one order for all evaluations of the run, until it
is decided whether the version is better than the best one so far. A better version plays all tasks, since later ones
are compared with it.

What versions have played is in the journal, so a resumed run plays and counts nothing twice.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from agentrl.core import ids
from agentrl.core.betting import VERDICTS, anytime_interval, budget_share, decide
from agentrl.core.clock import Clock
from agentrl.core.errors import EVALUATION_CUT, CheckFailedError
from agentrl.core.intervals import confidence_half_width
from agentrl.core.ports import Observer
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, Task, WeightsRef
from agentrl.environment.environment import TaskSource
from agentrl.environment.task_contents import task_digest
from agentrl.journal.port import MetricRow
from agentrl.journal.run_log import RunJournal
from agentrl.observe.metrics import (
    HELD_OUT_CUTS,
    HELD_OUT_FOREIGN_CALLS,
    PROGRAM_FAILED,
    TASK_DIGEST,
    VERDICT,
    VERDICT_ERROR,
    count_foreign_calls,
    find_registered_metric,
    metrics_owner,
    with_unset_metrics,
)
from agentrl.orchestrator.dispatch import ChangeCondition, Dispatcher
from agentrl.orchestrator.metrics import MAX_METRICS, mean_named_rewards
from agentrl.orchestrator.versions import BestCheckpointTracker, ServedVersions

_HOLDER = "evaluation"
"""Holder that pins the versions of the running evaluation in `ServedVersions`."""
FIRST_LOOK = 16
"""Number of tasks after which an evaluation with a question is first judged."""
LOOK_GROWTH = 1.5
"""Growth of the number of tasks from one look to the next. The tasks of one look are played at once, so a small growth
leaves the engine idle between looks, and a large one plays tasks that the answer does not need."""
MISSED = 0.05
"""Probability with which `not better` is wrong. It is no part of the run's budget: the version stays unchosen, and a
later one can still be chosen."""


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


class Question(NamedTuple):
    """The question of an evaluation that ends when it is answered: is a version better than the best one so far?"""

    margin: float
    """Difference in mean reward by which it must be better."""
    bounds: tuple[float, float] | None
    """Smallest and largest reward of a task; None: 0 and 1, as long as no reward is outside."""

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """The bounds in force."""
        return self.bounds or (0.0, 1.0)


class IntervalRule(NamedTuple):
    """How wide the intervals of an evaluation's rewards are."""

    bounds: tuple[float, float] = (0.0, 1.0)
    error: float | None = None
    """Probability with which an interval that holds at any time may be wrong, half of it on either side; None: the 95 %
    interval of a fixed number of tasks."""

    def half_width(self, values: Sequence[float], bounds: tuple[float, float]) -> float:
        """Return half the width of a mean's interval; the larger half if the mean is not in the middle. Values outside
        the bounds, such as the rewards of a policy that is in no question, have the interval of a fixed number."""
        if self.error is None or not all(bounds[0] <= value <= bounds[1] for value in values):
            return confidence_half_width(values)
        interval, mean = anytime_interval(values, bounds, (self.error / 2, self.error / 2)), _mean(values)
        return max(interval.high - mean, mean - interval.low)


FIXED_SIZE = IntervalRule()


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

    def add(self, places: Sequence[int], headers: Sequence[EpisodeHeader]) -> None:
        """Add the root episodes at some places, and their children behind them."""
        self.roots |= dict(zip(places, headers[: len(places)], strict=True))
        self.children += headers[len(places) :]


def _digest(task: Task) -> bytes:
    name = f"held-out task {task.id} ".encode("utf-8", "surrogatepass")
    return blake2b(name + task_digest(task), digest_size=16).digest()


class TaskOrder:
    """The order in which an evaluation plays its tasks; each task has `attempts` places in a row.

    Args:
        held_out: the splits.
        attempts: number of root episodes per task.
        is_mixed: whether tasks are ordered by a digest of their ids and data, so that runs with different seeds, and
            with other tasks beside these, play the same ones first; else one split follows another.
    """

    def __init__(self, held_out: Sequence[HeldOutSplit], attempts: int, *, is_mixed: bool) -> None:
        self.held_out = held_out
        self.attempts = attempts
        self._tasks = [(at, index) for at, split in enumerate(held_out) for index in range(len(split.tasks))]
        if is_mixed:
            self._tasks.sort(key=lambda place: _digest(held_out[place[0]].tasks[place[1]]))

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, number: int) -> Task:
        """Return the task with a number in the order."""
        split, index = self._tasks[number]
        return self.held_out[split].tasks[index]

    def missing(self, played: PlayedTasks, stop: int) -> list[int]:
        """Return the places of the first `stop` tasks that were not played yet."""
        return [place for place in range(stop * self.attempts) if place not in played.roots]

    def tasks_at(self, places: Iterable[int]) -> list[Task]:
        """Return the tasks at some places."""
        return [self.task(place // self.attempts) for place in places]

    def in_order(self, played: PlayedTasks) -> tuple[list[EpisodeHeader], list[HeldOutSplit]]:
        """Return headers as `evaluation_metrics` expects them, and the splits with the tasks that were played."""
        tasks: list[list[Task]] = [[] for _ in self.held_out]
        roots: dict[str, EpisodeHeader] = {}
        for number in self._numbers(played):
            split, index = self._tasks[number]
            tasks[split].append(self.held_out[split].tasks[index])
            for place in range(number * self.attempts, (number + 1) * self.attempts):
                roots[played.roots[place].episode_id] = played.roots[place]
        children = [child for child in played.children if ids.root_episode_id(child.episode_id) in roots]
        splits = [split._replace(tasks=part) for split, part in zip(self.held_out, tasks, strict=True)]
        return [*roots.values(), *children], splits

    def rewards(self, played: PlayedTasks, policy: str | None, stop: int | None = None) -> dict[int, float]:
        """Return a policy's rewards of the first `stop` tasks, or of all that were played, by their numbers in the
        order; tasks without a committed episode are absent. Without a policy, they are of all policies together."""
        tasks = zip(self._numbers(played), _by_task(self.in_order(played)[0], self.attempts), strict=True)
        return {
            number: reward
            for number, task in tasks
            if (stop is None or number < stop) and (reward := _task_reward(task, policy)) is not None
        }

    def _numbers(self, played: PlayedTasks) -> list[int]:
        """Return the numbers in the order of the tasks that were played, task by task of each split."""
        counts = Counter(place // self.attempts for place in played.roots)
        numbers = (number for number, count in counts.items() if count == self.attempts)
        return sorted(numbers, key=self._tasks.__getitem__)


Ended = tuple[EpisodeSpec, EpisodeHeader, Mapping[str, PolicyVersion]]
"""An episode that has ended, with the versions that sampled it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Evaluator:
    """Runs evaluations of one run, one after another."""

    held_out: Sequence[HeldOutSplit]
    attempts: int = 1
    question: Question | None = None
    """What ends an evaluation; None: all tasks are played."""
    dispatcher: Dispatcher
    versions: ServedVersions
    store: RunJournal
    observer: Observer
    changed: ChangeCondition
    best: BestCheckpointTracker
    clock: Clock
    tell: Callable[[str], None]
    """Receives a line for the user."""
    rewards_since: int = 0
    """First lineage whose episodes were played by the present code and settings; earlier ones are played again."""
    questions_left: Callable[[PolicyVersion], int] = lambda version: 1
    """Returns the number of evaluations that are planned, with that of a version."""
    _busy: bool = False
    _waiting: dict[str, WeightsRef] = field(default_factory=dict)
    """Pinned version of each policy that waits for the others to reach its step."""
    _newest_steps: dict[str, int] = field(default_factory=dict)
    """Newest step of each policy at which an evaluation was due."""
    _task_digest: int = field(init=False)
    _order: TaskOrder = field(init=False)
    _played: dict[tuple[str, ...], PlayedTasks] = field(default_factory=dict)
    """What the best versions and the evaluated ones have played, keyed by their weights."""
    _metric_names: dict[str, dict[str, None]] = field(default_factory=dict)
    """Names of the metrics that each environment has set in any evaluation, in order."""
    _fixed_size: bool = False
    """Whether a reward was outside its bounds, so that questions have no answers."""

    def __post_init__(self) -> None:
        self._task_digest = held_out_digest(self.held_out)
        self._order = TaskOrder(self.held_out, self.attempts, is_mixed=self.question is not None)

    @property
    def tasks(self) -> int:
        """Number of tasks in an evaluation."""
        return len(self._order)

    def restore(self, versions: Mapping[str, PolicyVersion]) -> None:
        """Take over what the versions with which this process begins, and the best ones if a question compares with
        them, have played in earlier processes of the run, and the errors of its verdicts. Unfinished episodes were
        dropped, and are played again."""
        self._read_played(versions, {} if self.question is None else self.best.measured.versions)
        rows = self.store.metric_rows(self.best.policy, VERDICT_ERROR)
        if rows and rows[-1][0] == versions[self.best.policy].step and self._is_unrecorded(versions):
            rows = rows[:-1]  # the same question is asked again, about the same episodes
        self.best.restore_spent([value for _, value in rows])

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
        self._busy = True
        weights = {name: self._waiting.get(name) or self.versions.current[name] for name in policies}
        self._waiting.clear()
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
            played, rule, answer = running.result()
        finally:
            running.cancel()
        seconds = max(self.clock.monotonic() - began, 1e-9)
        course = {
            "evaluation/tasks": float(self.tasks),
            TASK_DIGEST: float(self._task_digest),
            "evaluation/seconds": seconds,
            "evaluation/engine_busy_share": (self.versions.engine.busy_seconds() - busy) / seconds,
        }
        headers, splits = self._order.in_order(played)
        if self.question is not None:
            course["evaluation/played"] = float(sum(len(split.tasks) for split in splits))
        try:
            metrics = {
                policy: evaluation_metrics(
                    *(headers, policy, self.attempts, splits), self._metrics_of(policy, played), rule
                )
                | course
                | (answer if policy == self.best.policy else {})
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
        if self.question is not None:
            best = self._weights(self.best.measured.versions)
            self._played = {weights: each for weights, each in self._played.items() if weights == best}
        self.observer.on_evaluation(versions, metrics)

    def was_cut(self, versions: Mapping[str, PolicyVersion], *, is_due: bool) -> bool:
        """Whether an earlier process of the run ended before a checkpoint recorded the result of these versions, and
        results choose the best version.

        Args:
            versions: the versions with which this process begins.
            is_due: whether they are evaluated at their step; otherwise only an evaluation that began counts. After a
                change of the rewards, that is so at every step.
        """
        if not self.best.metric.startswith("evaluation/"):
            return False
        measured = self.best.measured
        return not self._is_measured(versions) if is_due and measured.newest else self._is_unrecorded(versions)

    # --- playing ----------------------------------------------------------------------------------------------------

    async def _play(
        self, versions: Mapping[str, PolicyVersion], pins: Mapping[str, PolicyVersion]
    ) -> tuple[PlayedTasks, IntervalRule, dict[str, float]]:
        """Play the tasks, or as many as the question needs; returns what was played, how intervals are computed, and
        the metrics of the answer."""
        if self.question is None:
            played = self._played.pop(self._weights(versions), PlayedTasks())
            await self._play_until(played, self.tasks, versions, pins)
            return played, FIXED_SIZE, {}
        best_versions = self.best.measured.versions
        played = self._played.setdefault(self._weights(versions), PlayedTasks())
        best = self._played.setdefault(self._weights(best_versions), PlayedTasks()) if best_versions else None
        error = budget_share(self.best.measured.spent, self.questions_left(versions[self.best.policy]))
        answer: dict[str, float] = {}
        if best is None or best is played:  # no question: the first version is what later ones are compared with
            await self._play_until(played, self.tasks if best is None else 1, versions, pins)
        else:
            answer = await self._compare(self.question, (played, versions, pins), (best, best_versions), error)
        if self._is_bounded(played):
            return played, IntervalRule(self.question.reward_bounds, error), answer
        await self._play_until(played, self.tasks, versions, pins)
        return played, FIXED_SIZE, {}

    async def _compare(
        self,
        question: Question,
        new: tuple[PlayedTasks, Mapping[str, PolicyVersion], Mapping[str, PolicyVersion]],
        old: tuple[PlayedTasks, Mapping[str, PolicyVersion]],
        error: float,
    ) -> dict[str, float]:
        """Play growing parts of the tasks with new versions until they are shown to be better than the best ones by
        more than the margin, or not better; returns the metrics of the answer.

        Args:
            question: has the margin and the bounds.
            new: what the new versions have played, their ids, and their pins.
            old: what the best versions have played, and their ids.
            error: probability with which `better` may be wrong.
        """
        (played, versions, pins), (best, best_versions) = new, old
        low, high = question.reward_bounds
        for stop in looks(self.tasks):
            await self._play_until(played, stop, versions, pins)
            if not (self._is_bounded(played) and self._is_bounded(best)):
                break
            before, now = (self._order.rewards(each, self.best.policy, stop) for each in (best, played))
            differences = [now[task] - before[task] for task in now.keys() & before.keys()]
            verdict = decide(differences, question.margin, high - low, (error, MISSED))
            if verdict == "better":  # later versions are compared with it, when the engine may not serve it any more
                await self._play_until(played, self.tasks, versions, pins)
            if verdict != "undecided":
                break
        if not (self._is_bounded(played) and self._is_bounded(best)):
            return {}
        interval = anytime_interval(differences, (low - high, high - low), (error, MISSED))
        return {
            VERDICT: float(VERDICTS.index(verdict) - 1),
            "evaluation/margin": question.margin,
            VERDICT_ERROR: error,
            "evaluation/difference": _mean(differences) if differences else 0.0,
            "evaluation/difference_low": interval.low,
            "evaluation/difference_high": interval.high,
            "evaluation/difference_tasks": float(len(differences)),
            "evaluation/best_step": float(best_versions[self.best.policy].step),
        }

    async def _play_until(
        self, played: PlayedTasks, stop: int, versions: Mapping[str, PolicyVersion], pins: Mapping[str, PolicyVersion]
    ) -> None:
        """Play the unplayed tasks among the first `stop`."""
        places = self._order.missing(played, stop)
        if not places:
            return
        played.add(places, await self.dispatcher.evaluate(self._order.tasks_at(places), pins, places))
        played.environments |= self.dispatcher.evaluated.environments
        for policy in versions:
            played.metrics.setdefault(policy, {}).update(self.dispatcher.evaluated.metrics(policy, versions))

    def _metrics_of(self, policy: str, played: PlayedTasks) -> Mapping[str, Mapping[str, float]]:
        """Return a policy's values of `ctx.metric` by episode id, with 0 for each metric that it did not set."""
        return with_unset_metrics(played.metrics.get(policy, {}), played.environments, self._metric_names)

    # --- what was played --------------------------------------------------------------------------------------------

    def _is_bounded(self, played: PlayedTasks) -> bool:
        """Whether all rewards are within their bounds, so that an answer can be given; says so if one is not."""
        if self.question is None or self._fixed_size:
            return False
        low, high = self.question.reward_bounds
        for number, reward in self._order.rewards(played, self.best.policy).items():
            if not low <= reward <= high:
                task = f"held-out task {self._order.task(number).id!r} got {reward:g}"
                self.tell(
                    f"evaluation.stop = 'decided' needs rewards between known bounds, and {task}, outside "
                    + (f"evaluation.bounds = [{low:g}, {high:g}]" if self.question.bounds else "[0, 1]")
                    + f": evaluations play all {self.tasks} tasks, and their intervals are of a fixed size. Set "
                    "evaluation.bounds to the smallest and the largest reward of a task"
                )
                self._fixed_size = True
                return False
        return True

    def _weights(self, versions: Mapping[str, PolicyVersion]) -> tuple[str, ...]:
        """Identify the weights of versions; see `_weights_of`."""
        parents = self.store.parents()
        return tuple(self._weights_of(version, parents) for _, version in sorted(versions.items()))

    def _weights_of(self, version: PolicyVersion, parents: Mapping[tuple[str, int], PolicyVersion]) -> str:
        """Identify the weights of a version, also under the other id that they have after a resume."""
        version = version.first_with_weights(parents)
        weights = self.versions.find(version) or self.store.published(version, outside=True)
        # with the step: two steps may publish equal changes of different weights
        return f"{version.policy} {version.step} {version.lineage if weights is None else weights.sha256}"

    def _is_unrecorded(self, versions: Mapping[str, PolicyVersion]) -> bool:
        """Whether versions have played held-out tasks, and no checkpoint has the result."""
        played = self._played.get(self._weights(versions))
        return played is not None and bool(played.roots) and not self._is_measured(versions)

    def _is_measured(self, versions: Mapping[str, PolicyVersion]) -> bool:
        return self._weights(versions) in map(self._weights, self.best.measured.measured_versions)

    def _read_played(self, *evaluated: Mapping[str, PolicyVersion]) -> None:
        parents, weights_by_version = self.store.parents(), dict[PolicyVersion, str]()
        evaluated = tuple(filter(None, evaluated))
        records = [self._played.setdefault(self._weights(versions), PlayedTasks()) for versions in evaluated]
        requested = [{name: self._weights_of(one, parents) for name, one in versions.items()} for versions in evaluated]
        places = {self.dispatcher.specs.evaluation_seed(place): place for place in range(self.tasks * self.attempts)}
        recorded: list[Ended] = [
            (spec, header, _sampled_by(spec, header)) for spec, header in self.store.ended_evaluations()
        ]
        cut_specs = [spec for spec, header, _ in recorded if header.drop_reason == EVALUATION_CUT]
        cut_specs += self.store.unfinished("evaluate")
        # An episode counts once all its children have ended, which its parent need not wait for.
        cut = {ids.root_episode_id(spec.episode_id) for spec in cut_specs}
        roots = [
            (spec, header, sampled_by, place, ids.root_episode_number(spec.episode_id) - place)
            for spec, header, sampled_by in recorded
            if spec.parent_id is None and (place := places.get(spec.seed)) is not None
        ]
        # Of a dropped episode without pins, only the episodes of the same evaluation tell the versions.
        versions_by_evaluation = {first: sampled_by for _, _, sampled_by, _, first in reversed(roots) if sampled_by}
        record_of: dict[str, PlayedTasks] = {}
        for spec, header, sampled_by, place, first in roots:
            versions = sampled_by or versions_by_evaluation.get(first, {})
            if (
                spec.episode_id in cut
                or not self._has_present_rewards(versions)
                or task_digest(spec.task) != task_digest(self._order.task(place // self.attempts))
            ):
                continue
            for version in versions.values():
                if version not in weights_by_version:
                    weights_by_version[version] = self._weights_of(version, parents)
            weights = {name: weights_by_version[version] for name, version in versions.items()}
            for record, evaluated_weights in zip(records, requested, strict=True):
                policies = weights.keys() & evaluated_weights.keys()
                if (
                    policies
                    and all(weights[name] == evaluated_weights[name] for name in policies)
                    and (place not in record.roots or (header.committed and not record.roots[place].committed))
                ):
                    record.roots[place] = header
                    record_of[spec.episode_id] = record
        for record in records:
            if not any(header.committed for header in record.roots.values()):
                record.roots.clear()  # an evaluation without a result is repeated
        for spec, header, _ in recorded:
            root = ids.root_episode_id(spec.episode_id)
            if spec.parent_id is not None and root in record_of:
                record_of[root].children.append(header)
                record_of[spec.episode_id] = record_of[root]
        self._read_metrics(recorded, record_of, evaluated[0] if evaluated else ())

    def _read_metrics(
        self, recorded: Sequence[Ended], record_of: Mapping[str, PlayedTasks], policies: Collection[str]
    ) -> None:
        """Read the values of `ctx.metric` of the episodes in `record_of`, and the names that any have set."""
        environments = {
            spec.episode_id: spec.environment
            for spec, header, sampled_by in recorded
            if header.committed and self._has_present_rewards(sampled_by)
        }
        metrics = self.store.episode_metrics(environments)
        with_unset_metrics(metrics, environments, self._metric_names)
        for spec, header, _ in recorded:
            episode_id, acted = spec.episode_id, {each.policy for each in header.trajectories}
            if episode_id in record_of and (owner := metrics_owner(policies, acted)) is not None:
                record = record_of[episode_id]
                record.environments[episode_id] = spec.environment
                record.metrics.setdefault(owner, {})[episode_id] = metrics.get(episode_id, {})

    def _has_present_rewards(self, sampled_by: Mapping[str, PolicyVersion]) -> bool:
        """Whether the present code and settings gave the rewards of an episode that these versions sampled."""
        return max((version.lineage for version in sampled_by.values()), default=0) >= self.rewards_since


def _sampled_by(spec: EpisodeSpec, header: EpisodeHeader) -> Mapping[str, PolicyVersion]:
    """Return the versions that sampled an episode, by policy; those it was pinned to also if it was dropped."""
    sampled = {each.policy: PolicyVersion(each.policy, each.lineage, each.oldest_step) for each in header.trajectories}
    return sampled | dict(spec.pins)


def looks(tasks: int) -> Iterator[int]:
    """Yield the numbers of tasks after which an evaluation with a question is judged.

    Example:
        >>> list(looks(100))
        [16, 24, 36, 54, 81, 100]
    """
    size = FIRST_LOOK
    while size < tasks:
        yield size
        size = math.ceil(size * LOOK_GROWTH)
    yield tasks


def evaluation_metrics(
    headers: Sequence[EpisodeHeader],
    policy: str | None,
    attempts: int = 1,
    held_out: Sequence[HeldOutSplit] = (),
    metrics_by_episode: Mapping[str, Mapping[str, float]] | None = None,
    rule: IntervalRule = FIXED_SIZE,
) -> dict[str, float]:
    """Compute the metrics of an evaluation for one policy: its rewards, and statistics of the whole evaluation.

    Args:
        headers: headers of all episodes, children included; root episodes come first, those of one task in a row.
        policy: policy of the rewards; one without a seat gets no reward metric. None: all policies together, by policy
            and seat.
        attempts: number of root episodes per task.
        held_out: the splits; if there are several, each also has its own metrics.
        metrics_by_episode: values of `ctx.metric` by episode id, of the episodes whose metrics this policy reports.
        rule: how wide the intervals of rewards and of pass@k are.

    Raises:
        CheckFailedError: no episode was committed.
    """
    metrics = _rewards(headers, policy, attempts, rule) | _environment_metrics(
        _by_task(headers, attempts), metrics_by_episode or {}
    )
    if len(held_out) > 1:
        by_task, first = _by_task(headers, attempts), 0
        for split in held_out:
            split_results = by_task[first : first + len(split.tasks)]
            first += len(split.tasks)
            for name, value in _estimates(split_results, policy, rule).items():
                group, _, name_in_group = name.partition("/")
                metric_kind, _, word = name_in_group.partition("/")
                metrics["/".join(filter(None, (f"{group}/split_{metric_kind}", split.name, word)))] = value
    if policy is not None:
        return metrics | _course(headers, metrics_by_episode or {})
    policies = sorted({trajectory.policy for header in headers for trajectory in header.trajectories})
    for name in policies:
        policy_part = f"/{name}" if len(policies) > 1 else ""
        for metric, value in _rewards(headers, name, attempts, rule).items():
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


def _estimates(tasks: Sequence[_TaskResult], policy: str | None, rule: IntervalRule) -> dict[str, float]:
    """Estimate mean reward and pass@k over tasks, with half the widths of their 95 % intervals.

    Attempts at one task are not independent, so the intervals are over tasks.

    pass@k = 1 - C(n - c, k) / C(n, k) for c of n solved attempts (Chen et al. 2021, arXiv:2107.03374), for k = 1, 2, 4,
    … up to the number of attempts; the mean is over tasks with at least k committed attempts. An attempt is solved if
    each of the policy's rewarded agents, or of all policies', has 1 or more.
    """
    means = [reward for task in tasks if (reward := _task_reward(task, policy)) is not None]
    if not means:
        return {}
    metrics = {"evaluation/reward": _mean(means), "evaluation/reward_error": rule.half_width(means, rule.bounds)}
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
            f"evaluation/pass_at_error/{k}": rule.half_width(pass_rates, (0.0, 1.0)),
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


def _rewards(
    headers: Sequence[EpisodeHeader], policy: str | None, attempts: int, rule: IntervalRule
) -> dict[str, float]:
    """Compute the estimates and, for one policy, their parts: by seat if it has several, by reward name, and the
    standard deviation over episodes. Empty if the policy did not act."""
    metrics = _estimates(_by_task(headers, attempts), policy, rule)
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
    foreign_calls = sum((Counter(count_foreign_calls(metrics)) for metrics in main_metrics), Counter[str]())
    return {
        "evaluation/turns": _mean([float(header.turns) for header in main_headers]),
        "evaluation/tokens": _mean([float(header.tokens) for header in main_headers]),
        "evaluation/episodes": float(len(main_headers)),
        "evaluation/truncated": float(cuts.total()),
        **{f"{HELD_OUT_CUTS}{reason}": float(number) for reason, number in cuts.items()},
        "evaluation/dropped": float(len(dropped_headers)),
        **({"evaluation/failed": float(num_failed)} if num_failed else {}),
        **{f"{HELD_OUT_FOREIGN_CALLS}{form}": count / len(main_headers) for form, count in foreign_calls.items()},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
