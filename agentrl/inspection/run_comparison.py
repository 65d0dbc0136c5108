"""Comparison of runs: differing settings, metrics side by side, aligned curves, paired held-out rewards.

Runs that differ in their seed alone are one group, such as three seeds of one configuration. All differences are
relative to the first group.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from agentrl.config.policies import LocalPolicy, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import EnvironmentConfig, ModelConfig
from agentrl.core.errors import InputError, JournalError
from agentrl.core.intervals import MAX_REWARD, Interval, difference_interval, half_width_of_few, verdict
from agentrl.core.masking import mask_secrets
from agentrl.core.records import PolicyVersion
from agentrl.journal.control_rows import ADMISSION_COLUMNS, decode_admission_row
from agentrl.observe.metrics import TASK_DIGEST, interval_metric
from agentrl.observe.run_directory import run_argument

if TYPE_CHECKING:
    from agentrl.core.records import EpisodeSpec
    from agentrl.inspection.reader import RunReader

Axis = Literal["step", "tokens", "seconds"]
AXES: tuple[Axis, ...] = ("step", "tokens", "seconds")
AXIS_METRICS = {"tokens": "step/tokens", "seconds": "run/seconds"}
"""Metrics that place a step on an axis."""
LINEAGE_METRIC = "run/lineage"
StepValues = Sequence[tuple[int, float | None]]
"""Values of a metric by step; None: not finite."""
CURVES = ("reward/mean", "evaluation/reward")
"""Metrics whose curves a comparison has unless others are named."""
_IGNORED_SETTINGS = frozenset({"name", "directory"})
_NEWEST = ("evaluation/", "run/", "episodes/trained", "episodes/dropped", "episodes/superseded")
"""Starts of the names of evaluations, clocks and totals, of which the newest value is compared."""
_TRAINING_SETTINGS = ("steps", "trainer.", "credit.", "checkpoint.", "best.", "freeze")
"""Starts of the names of settings without effect on an evaluation."""
_TRAINED_POLICY_SETTINGS = frozenset(PolicyConfig.model_fields) - frozenset(LocalPolicy.model_fields)
"""Settings of a policy without effect on an evaluation."""
_CODE = "code of "
"""Start of the names of files among the settings. Only runs that recorded a file are compared by it."""
_GRID = 200
"""Number of places at which the curves of several seeds are averaged, if their points differ."""


class ComparedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that differ in their seed alone."""

    name: str
    runs: list[str]


class SettingComparison(msgspec.Struct, frozen=True):
    """A setting with different values."""

    name: str
    values: list[Any]
    """Value in each group; None where the setting is absent."""


class MetricComparison(msgspec.Struct, frozen=True):
    """A metric of one policy, side by side."""

    policy: str
    metric: str
    values: list[float | None]
    """Value of each group: the mean of the last five steps, or the newest value of an evaluation, clock or total; then
    the mean over its runs."""


class CurvePoint(msgspec.Struct, frozen=True):
    """A point of a curve."""

    x: float
    y: float
    error: float = 0.0
    """Half the width of the 95 % interval of an estimate, or half the range of the runs of a group; 0 if neither."""


class ComparedCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A curve of one group."""

    group: str
    policy: str
    metric: str
    points: list[CurvePoint]


class PairedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The held-out reward of a group minus that of the first group, over the same tasks."""

    group: str
    policy: str
    steps: list[int]
    """Steps of the compared evaluations: the newest of each run of the group, then of the first group."""
    tasks: int
    """Number of tasks that both groups were evaluated on."""
    reward: float
    baseline: float
    """Reward of the first group over these tasks."""
    difference: float
    low: float
    """Lower end of the interval of the difference; all intervals of a comparison are right with 95 %. For several
    seeds, it is wider by the interval of their means."""
    high: float
    verdict: str
    """`better`, `worse` or `undecided`."""
    better: int
    worse: int


class RunsComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of several runs."""

    groups: list[ComparedGroup]
    settings: list[SettingComparison]
    metrics: list[MetricComparison]
    axis: str
    curves: list[ComparedCurve]
    paired: list[PairedDifference]
    notes: list[str]
    """Reasons why a part of the comparison is missing."""


class _Run(NamedTuple):
    name: str
    settings: dict[str, Any]
    is_evaluation: bool
    values: dict[str, dict[str, list[tuple[int, float | None]]]]
    """Values by metric and policy."""
    seconds: dict[str, float]
    """Seconds that all processes of the run trained, by policy."""


def compare_runs(
    readers: Sequence[RunReader], *, axis: str = "step", metrics: Sequence[str] = CURVES
) -> RunsComparison:
    """Compare runs; the first is the one that the others are compared with.

    Args:
        readers: one reader per run, at least two.
        axis: what the curves are aligned by: `step`, sampled `tokens`, or `seconds` since training began.
        metrics: metrics whose curves are compared.

    Raises:
        InputError: fewer than two runs are given, the axis is unknown, or no run recorded a metric.
        JournalError: a journal is damaged.
    """
    if len(readers) < 2:
        raise InputError("a comparison needs a second run, such as `agentrl run compare a b`")
    if axis not in AXES:
        raise InputError(f"curves are aligned by one of {', '.join(AXES)}, not by {axis!r}")
    runs = [
        _Run(
            name,
            _settings(reader) | _code(reader),
            reader.purpose() == "evaluate",
            reader.metrics(),
            reader.training_seconds(),
        )
        for name, reader in zip(_names(readers), readers, strict=True)
    ]
    for metric in metrics:
        if metric not in CURVES and not any(metric in run.values for run in runs):
            listing = f"`agentrl run metrics {run_argument(readers[0].path)}`"
            raise InputError(f"no run recorded the metric {metric!r}; {listing} lists metrics")
    runs, changes = _on_newest_tasks(runs)
    members = _group_runs(runs)
    groups = [ComparedGroup(name=name, runs=[runs[at].name for at in places]) for name, places in members.items()]
    curves, notes = list[ComparedCurve](), changes
    for metric in metrics:
        for name, places in members.items():
            curves += _curves(name, [runs[at] for at in places], metric, axis)
    if axis != "step" and not curves:
        notes.append(f"no run recorded the {axis} of its steps, so no curve is aligned by them")
    paired_differences, missing = _pair_runs({name: [readers[at] for at in places] for name, places in members.items()})
    return RunsComparison(
        groups=groups,
        settings=_setting_differences([runs[places[0]] for places in members.values()]),
        metrics=_metric_comparisons([[runs[at] for at in places] for places in members.values()]),
        axis=axis,
        curves=curves,
        paired=paired_differences,
        notes=[*notes, *missing],
    )


def _on_newest_tasks(runs: Sequence[_Run]) -> tuple[list[_Run], list[str]]:
    """Return the runs without evaluations on other held-out tasks than their newest one, and notes about these, and
    about runs with different held-out tasks."""
    kept_runs, notes, newest_digests = [], [], set()
    for run in runs:
        digests = {policy: dict(points) for policy, points in run.values.get(TASK_DIGEST, {}).items()}
        newest = {policy: by_step[max(by_step)] for policy, by_step in digests.items()}
        newest_digests |= set(newest.values())
        left_out = {
            policy: {step for step, digest in by_step.items() if digest != newest[policy]}
            for policy, by_step in digests.items()
        }
        values = {
            name: {
                policy: [point for point in points if point[0] not in left_out.get(policy, ())]
                for policy, points in by_policy.items()
            }
            if name.startswith("evaluation/")
            else by_policy
            for name, by_policy in run.values.items()
        }
        kept_runs.append(run._replace(values=values))
        if steps := sorted(set().union(*left_out.values())):
            notes.append(
                f"{run.name}: its held-out tasks changed, and evaluations on others are left out (of "
                f"{'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))})"
            )
    if len(newest_digests) > 1:
        notes.append(
            "the runs were evaluated on different held-out tasks: only paired rewards are over the same ones, not the "
            "curves and metrics of evaluations"
        )
    return kept_runs, notes


# --- settings ---------------------------------------------------------------------------------------------------------


def _names(readers: Sequence[RunReader]) -> list[str]:
    """Return a distinct name for each run: that of its directory, or its path."""
    names = [reader.path.resolve().name for reader in readers]
    names = [name if names.count(name) == 1 else str(reader.path) for name, reader in zip(names, readers, strict=True)]
    return [name if name not in names[:at] else f"{name} ({at + 1})" for at, name in enumerate(names)]


def _settings(reader: RunReader) -> dict[str, Any]:
    """Return the resolved configuration as a flat table, without blank settings and those that name the run.

    A policy's sampling is listed where it differs from the run's.
    """
    return _flat_settings(reader.config())


def _code(reader: RunReader) -> dict[str, str]:
    """Return the digests of the user's code at the newest start, as settings that are named after their files."""
    starts = reader.log.starts()
    digests = starts[-1].digests_by_name if starts else {}
    return {f"{_CODE}{name}": ", ".join(sorted(of_name)) for name, of_name in digests.items()}


def changed_settings(reader: RunReader) -> dict[str, Any]:
    """Return a run's settings that have no default or differ from it, sorted. Every policy is compared with the
    defaults of a trained policy."""
    defaults = _flat_settings(
        RunConfig(
            environment=EnvironmentConfig(id="-"), model=ModelConfig(path="-"), policies={"main": PolicyConfig()}
        ).model_dump(mode="json")
    )
    missing = object()
    changed = {}
    for name, value in sorted(_settings(reader).items()):
        group, _, of_policy = name.partition(".")
        default_name = f"policies.main.{of_policy.partition('.')[2]}" if group == "policies" else name
        if default_name in ("environment.id", "model.path") or value != defaults.get(default_name, missing):
            changed[name] = mask_secrets(value, name)
    return changed


def _flat_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as `_settings` does."""
    flat: dict[str, Any] = {}
    pending = [("", config)]
    while pending:
        prefix, table = pending.pop()
        for key, value in table.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                pending.append((f"{name}.", value))
            elif name not in _IGNORED_SETTINGS and value not in (None, "", []):
                flat[name] = value
    return {
        name: value
        for name, value in flat.items()
        if not (name.startswith("policies.") and ".sampling." in name)
        or flat.get(f"sampling.{name.rpartition('.')[2]}") != value
    }


def _group_runs(runs: Sequence[_Run]) -> dict[str, list[int]]:
    """Group runs that differ in their seed alone; a group is named after its first run."""
    groups: dict[str, list[int]] = {}
    for at, run in enumerate(runs):
        for places in groups.values():
            first = runs[places[0]]
            is_same_kind = first.is_evaluation == run.is_evaluation
            if run.settings and is_same_kind and _differing_settings([first, run]) == ["seed"]:
                places.append(at)
                break
        else:
            groups[run.name] = [at]
    return {
        name if len(places) == 1 else f"{name} and {len(places) - 1} more seeds": places
        for name, places in groups.items()
    }


def _differing_settings(runs: Sequence[_Run]) -> list[str]:
    names = sorted({name for run in runs for name in run.settings})
    return [name for name in names if not _is_same([run for run in runs if _has_effect(run, name)], name)]


def _is_same(runs: Sequence[_Run], name: str) -> bool:
    return all(run.settings.get(name) == runs[0].settings.get(name) for run in runs)


def _has_effect(run: _Run, setting: str) -> bool:
    """Return whether a setting has an effect on the run; many have none on an evaluation."""
    if setting.startswith(_CODE):
        return setting in run.settings
    if not run.is_evaluation:
        return True
    if setting.startswith("policies."):
        return setting.split(".")[2] not in _TRAINED_POLICY_SETTINGS
    return not setting.startswith(_TRAINING_SETTINGS)


def _setting_differences(runs: Sequence[_Run]) -> list[SettingComparison]:
    return [
        SettingComparison(
            name, _shown_values(name, [run.settings.get(name) if _has_effect(run, name) else None for run in runs])
        )
        for name in _differing_settings(runs)
    ]


def _shown_values(name: str, values: Sequence[Any]) -> list[Any]:
    """Return a setting's values with secrets masked; different values that look alike then are numbered."""
    distinct = [value for at, value in enumerate(values) if value not in values[:at]]
    shown = [mask_secrets(value, name) for value in distinct]
    numbered = [
        text if shown.count(text) == 1 else f"{text} ({shown[: at + 1].count(text)})" for at, text in enumerate(shown)
    ]
    return [numbered[distinct.index(value)] for value in values]


# --- metrics and curves -----------------------------------------------------------------------------------------------


def _metric_comparisons(groups: Sequence[Sequence[_Run]]) -> list[MetricComparison]:
    keys = sorted(
        {(policy, name) for runs in groups for run in runs for name in run.values for policy in run.values[name]}
    )
    comparisons = [
        MetricComparison(policy, name, [_latest(runs, name, policy) for runs in groups]) for policy, name in keys
    ]
    return [comparison for comparison in comparisons if any(value is not None for value in comparison.values)]


def _latest(runs: Sequence[_Run], metric: str, policy: str) -> float | None:
    means = []
    for run in runs:
        values = [value for _, value in run.values.get(metric, {}).get(policy, []) if value is not None]
        if metric == AXIS_METRICS["seconds"] and policy in run.seconds:
            means.append(run.seconds[policy])
        elif values:
            # a training metric is averaged over the newest 5 steps
            newest = values[-1:] if metric.startswith(_NEWEST) else values[-5:]
            means.append(_mean(newest))
    return _mean(means) if means else None


def _mean(values: Sequence[float]) -> float:
    """Return the mean; inf or NaN for numbers that only an altered record has."""
    return sum(values) / len(values)


def _curves(group: str, runs: Sequence[_Run], metric: str, axis: str) -> list[ComparedCurve]:
    policies = dict.fromkeys(policy for run in runs for policy in run.values.get(metric, {}))
    result = []
    for policy in policies:
        curves = [curve for run in runs if (curve := _curve(run, metric, policy, axis))]
        if curves:
            points = curves[0] if len(curves) == 1 else _band(curves)
            result.append(ComparedCurve(group=group, policy=policy, metric=metric, points=points))
    return result


def _curve(run: _Run, metric: str, policy: str, axis: str) -> list[CurvePoint]:
    place = _places(run, policy, axis)
    errors = dict(run.values.get(interval_metric(metric), {}).get(policy, []))
    points = []
    for step, value in run.values.get(metric, {}).get(policy, []):
        x = place(step)
        if value is not None and x is not None:
            points.append(CurvePoint(x, value, errors.get(step) or 0.0))
    return points


def _places(run: _Run, policy: str, axis: str) -> Callable[[int], float | None]:
    """Return a function from a step to its place on the axis; None if unknown."""
    if axis == "step":
        return float
    values, lineages = (run.values.get(name, {}).get(policy, []) for name in (AXIS_METRICS[axis], LINEAGE_METRIC))
    places = axis_places(axis, values, lineages)
    return places.get if len(places) > 1 else (lambda step: None)


def axis_places(axis: str, values: StepValues, lineages: StepValues = ()) -> dict[int, float]:
    """Return the place of each step on an axis: the tokens trained until then, or the seconds.

    A resumed run restarts its count of seconds; it is added to the earlier count. Its steps have another lineage.
    """
    places, total, last = {0: 0.0}, 0.0, 0.0
    lineage_by_step, last_lineage = dict(lineages), None
    for step, value in values:
        if value is None:
            continue
        lineage = lineage_by_step.get(step, last_lineage)
        is_resumed = axis == "seconds" and (value < last or lineage != last_lineage)
        total += value if axis == "tokens" or is_resumed else value - last
        places[step], last, last_lineage = total, value, lineage
    return places


def _band(curves: Sequence[Sequence[CurvePoint]]) -> list[CurvePoint]:
    """Average curves where all of them are known; the error is half the range."""
    common = set.intersection(*({point.x for point in curve} for curve in curves))
    every = sorted({point.x for curve in curves for point in curve})
    if len(common) * 2 >= len(every):
        grid = sorted(common)
    else:
        first, last = max(curve[0].x for curve in curves), min(curve[-1].x for curve in curves)
        grid = [x for x in every if first <= x <= last]
        grid = grid[:: max(len(grid) // _GRID, 1)]
    points = []
    for x in grid:
        values = [_interpolate(curve, x) for curve in curves]
        points.append(CurvePoint(x, _mean(values), (max(values) - min(values)) / 2))
    return points


def _interpolate(curve: Sequence[CurvePoint], x: float) -> float:
    at = bisect.bisect_left(curve, x, key=lambda point: point.x)
    right_point = curve[min(at, len(curve) - 1)]
    left_point = curve[max(at - 1, 0)]
    if right_point.x == x or right_point.x <= left_point.x:
        return right_point.y
    return left_point.y + (right_point.y - left_point.y) * (x - left_point.x) / (right_point.x - left_point.x)


# --- held-out tasks ---------------------------------------------------------------------------------------------------

TaskRewards = dict[bytes, float]
"""Mean reward by task: its id and data."""


def _pair_runs(
    groups: Mapping[str, Sequence[RunReader]],
) -> tuple[list[PairedDifference], list[str]]:
    rewards_by_group = {name: [_held_out(reader) for reader in readers] for name, readers in groups.items()}
    (base_name, base), *other_groups = rewards_by_group.items()
    lines, notes = [], []
    policies = dict.fromkeys(policy for run in base for policy in run)
    error = 0.05 / max(len(other_groups) * len(policies), 1)
    for name, runs in other_groups:
        for policy in policies:
            group_runs = [run[policy] for run in runs if policy in run]
            base_runs = [run[policy] for run in base if policy in run]
            line = _paired_difference(name, policy, group_runs, base_runs, error) if group_runs else None
            if line is not None:
                lines.append(line)
                if len(set(line.steps)) > 1:
                    ours, theirs = (_steps_text(evaluated) for evaluated in (group_runs, base_runs))
                    notes.append(
                        f"{policy}: {name} was evaluated {ours}, {base_name} {theirs}, so they differ in training"
                    )
            else:
                notes.append(f"{policy}: {name} and {base_name} were not evaluated on the same held-out tasks")
        if not any(base):
            notes.append(f"{base_name} has no evaluation, so {name} is compared with it by training metrics alone")
    return lines, notes


def _steps_text(evaluated: Sequence[tuple[int, TaskRewards]]) -> str:
    return f"after step {', '.join(map(str, sorted({step for step, _ in evaluated})))}"


def _held_out(reader: RunReader) -> dict[str, tuple[int, TaskRewards]]:
    """Return the newest evaluation of each policy that has a result: its step, and the rewards by task. Of a directory
    of forks, return those of the forks.

    The newest is of the newest lineage, since a resume may have undone later steps of an older one. Episodes of
    the same weights count as well: a resume continues an evaluation under a new lineage.
    """
    results = reader.metric("evaluation/reward")
    if not results and not reader.info().get("forks"):
        return {}
    # `agentrl evaluate` records its result at step 0, whatever the step of the weights.
    measured = {policy: dict(points) for policy, points in results.items()} if reader.purpose() == "train" else {}
    rows = [
        row
        for row in reader.log.rows(
            "SELECT t.policy, t.oldest_step, t.lineage, t.episode, t.attempt, sum(coalesce(t.reward, 0.0))"
            " FROM trajectories t"
            " JOIN episodes e ON e.episode = t.episode AND e.attempt = t.attempt"
            " WHERE e.purpose != 'train' AND e.drop_reason IS NULL GROUP BY t.policy, t.episode, t.attempt"
        )
        if row[1] in measured.get(row[0], (row[1],))
    ]
    newest: dict[str, tuple[int, int]] = {}
    for policy, step, lineage, *_ in rows:
        newest[policy] = max(newest.get(policy, (lineage, step)), (lineage, step))
    lines = reader.log.lines()
    of_newest = {policy: lines.weights(PolicyVersion(policy, *version)).lineage for policy, version in newest.items()}
    newest_rows = [
        row
        for row in rows
        if row[1] == newest[row[0]][1]
        and lines.weights(PolicyVersion(row[0], row[2], row[1])).lineage == of_newest[row[0]]
    ]
    tasks = held_out_task_keys(reader, [(row[3], row[4]) for row in newest_rows])
    # Of an attempt that was repeated, since the reward's code had changed, the newest counts.
    rewards: dict[str, dict[bytes, dict[int, tuple[int, list[float]]]]] = {}
    for policy, _, lineage, episode, attempt, reward in sorted(newest_rows, key=itemgetter(2)):
        if reward is None or not -MAX_REWARD <= reward <= MAX_REWARD:
            raise InputError(
                f"{reader.path}: episode {episode} has the reward {reward}, which cannot be compared; rewards are "
                f"between {-MAX_REWARD:g} and {MAX_REWARD:g}, so the record was altered or is damaged"
            )
        if (key := tasks.get((episode, attempt))) is not None:
            of_task = rewards.setdefault(policy, {}).setdefault(key.task, {})
            found_lineage, values = of_task.get(key.seed, (lineage, []))
            of_task[key.seed] = lineage, [*(values if found_lineage == lineage else []), float(reward)]
    return {
        policy: (
            newest[policy][1],
            {
                task: statistics.fmean(value for _, values in of_task.values() for value in values)
                for task, of_task in by_task.items()
            },
        )
        for policy, by_task in rewards.items()
    }


class HeldOutTaskKey(NamedTuple):
    """What identifies the task of an episode, and its attempt at it."""

    task: bytes
    seed: int


def held_out_task_keys(reader: RunReader, episodes: Sequence[tuple[Any, Any]]) -> dict[tuple[str, int], HeldOutTaskKey]:
    """Return the key of the task of each episode; a child belongs to its root's task."""
    columns = ", ".join([*ADMISSION_COLUMNS.split(), "checksum"])
    specs: dict[tuple[str, int], EpisodeSpec] = {}
    for row in reader.log.rows(f"SELECT {columns} FROM admissions WHERE purpose != 'train'"):
        try:
            spec = decode_admission_row(row)
        except JournalError:
            continue  # `episode list` reports the damaged episode
        specs[spec.episode_id, spec.attempt] = spec
    by_episode = {episode: spec for (episode, _), spec in specs.items()}
    keys = {}
    for key in episodes:
        root = specs.get(key)
        for _ in range(len(by_episode)):
            if root is None or root.parent_id is None:
                break
            root = by_episode.get(root.parent_id)
        if root is not None:
            task = msgspec.json.encode([root.task.id, root.task.data], order="deterministic")
            keys[key] = HeldOutTaskKey(task, root.seed)
    return keys


def _paired_difference(
    group: str,
    policy: str,
    group_runs: Sequence[tuple[int, TaskRewards]],
    base_runs: Sequence[tuple[int, TaskRewards]],
    error: float,
) -> PairedDifference | None:
    common = sorted(set.intersection(*(set(rewards) for _, rewards in [*group_runs, *base_runs])))
    if not common:
        return None
    sides = [[statistics.fmean(run[key] for _, run in side) for key in common] for side in (group_runs, base_runs)]
    differences = [first - second for first, second in zip(*sides, strict=True)]
    means_of_runs = [
        [statistics.fmean(run[key] for key in common) for _, run in side] for side in (group_runs, base_runs)
    ]
    difference = statistics.fmean(differences)
    low, high = difference_interval(list(zip(*sides, strict=True)), error)
    of_seeds = sum(map(half_width_of_few, means_of_runs))
    interval = Interval(low - of_seeds, high + of_seeds)
    return PairedDifference(
        group=group,
        policy=policy,
        steps=[step for step, _ in [*group_runs, *base_runs]],
        tasks=len(common),
        reward=statistics.fmean(sides[0]),
        baseline=statistics.fmean(sides[1]),
        difference=difference,
        low=interval.low,
        high=interval.high,
        verdict=verdict(interval),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
    )
