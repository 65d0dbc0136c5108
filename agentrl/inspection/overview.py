"""The overview of a run: the curves to look at first, alarms, waits, and a catalog of all metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.control_messages import read_actions
from agentrl.core.errors import InputError, JournalError
from agentrl.inspection.run_comparison import (
    AXIS_METRICS,
    LINEAGE_METRIC,
    axis_places,
    changed_settings,
)
from agentrl.inspection.statistics import run_state
from agentrl.observe.alarms import find_alarms
from agentrl.observe.metrics import (
    find_registered_metric,
    interval_metric,
    own_metrics,
)

if TYPE_CHECKING:
    from agentrl.inspection.reader import RunReader
    from agentrl.journal.run_log import SqliteRunLog

OVERVIEW_METRICS = (
    *("reward/mean", "evaluation/reward", "episodes/tokens", "entropy", "k3"),
    *("tokens/sampled_per_s", "engine/busy_share", "trainer/busy_share"),
)
"""Metrics of the overview, if the run recorded them."""
Point = tuple[int, float | None, float | None]
"""Step, value, and half the width of the value's 95 % interval; None if the metric is no estimate. A point without a
value stands before the first evaluation on other tasks: a curve has a gap there."""


class MetricEntry(msgspec.Struct, frozen=True):
    """A metric of the catalog."""

    name: str
    unit: str
    meaning: str
    """Empty for an environment's own metric."""


class MetricSeries(msgspec.Struct, frozen=True):
    """The values of a metric."""

    unit: str
    meaning: str
    is_estimate: bool
    policies: dict[str, list[Point]]


class AlarmEntry(msgspec.Struct, frozen=True):
    """An alarm with its advice."""

    name: str
    policy: str
    text: str
    advice: str


class RunOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The overview of a run."""

    state: str
    """State of the run, as `RunReader.standing` returns it."""
    seconds: float | None
    """Duration of the run, as `RunLog.seconds` defines it; None before the first admission."""
    purpose: str
    """`train` or `evaluate`."""
    episodes: dict[str, int]
    """Committed episodes by purpose."""
    policies: list[str]
    """Policies with metrics."""
    bottleneck: str
    """Bottleneck of the last seconds; of an ended run, the part that was busy for most of it."""
    pace: str
    """Estimated time of the first step while it is under way."""
    controls: list[str]
    """What was asked of the run while it ran, with time and user."""
    resumed: int
    """Number of times the run resumed from a checkpoint: by its user, or after it lost a trainer."""
    waits: list[str]
    """Reasons why trainers, admission or the engine wait, while the run is running."""
    alarms: list[AlarmEntry]
    metrics: list[MetricEntry]
    series: dict[str, MetricSeries]
    """Series by name: of `OVERVIEW_METRICS`, of rewards by seat, of the environment's own metrics, and of these over
    held-out tasks."""
    own_metrics: list[str]
    """The environment's own metrics, from `ctx.metric`."""
    settings: dict[str, Any]
    """Settings that differ from their defaults."""
    places: dict[str, dict[str, list[tuple[int, float]]]]
    """Tokens trained until each step, and seconds, by policy: the other axes of a chart."""
    failure: str
    """First sentence of the error that ended the run, and where all of it is; empty if none did."""
    problem: str


def run_overview(reader: RunReader) -> RunOverview:
    """Return the overview of a run. Raises `JournalError` if its control log is damaged."""
    state = run_state(reader)
    names = reader.metric_names()
    own = own_metrics(names)
    shown = {*OVERVIEW_METRICS, *own, *(f"evaluation/metric/{name}" for name in own)}
    series = metric_series(reader, [name for name in names if name in shown or is_seat_reward(name)])
    axis_values = reader.metrics([*AXIS_METRICS.values(), LINEAGE_METRIC])
    lineages = axis_values.get(LINEAGE_METRIC, {})
    status, problems = state.status, list[str]()
    return RunOverview(
        state=state.standing,
        seconds=reader.log.seconds(),
        purpose=reader.purpose(),
        episodes=dict(
            reader.log.rows(
                "SELECT purpose, count(*) FROM episodes WHERE drop_reason IS NULL GROUP BY 1 ORDER BY 1 DESC"
            )
        ),
        policies=sorted({policy for entry in series.values() for policy in entry.policies}),
        bottleneck=status.bottleneck if status is not None else "",
        controls=[action.line for action in read_actions(reader.info())],
        pace=status.pace if status is not None else "",
        resumed=_count_resumes(reader.log, problems),
        waits=list(status.waits) if status is not None else [],
        alarms=[AlarmEntry(alarm.name, alarm.policy, alarm.text, alarm.advice) for alarm in find_alarms(state)],
        metrics=[metric_entry(name) for name in names],
        series=series,
        own_metrics=own,
        settings=changed_settings(reader),
        places={
            axis: {
                policy: list(axis_places(axis, values, lineages.get(policy, ())).items())
                for policy, values in axis_values[name].items()
            }
            for axis, name in AXIS_METRICS.items()
            if name in axis_values
        },
        failure=state.failure,
        problem="; ".join(filter(None, [state.problem, *problems])),
    )


def is_seat_reward(name: str) -> bool:
    """Return whether a metric is the reward of one of several seats, in training or over held-out tasks."""
    metric = find_registered_metric(name)
    return metric is not None and metric.name in ("reward/<seat>", "evaluation/reward/<seat>")


def metric_entry(name: str) -> MetricEntry:
    """Return a metric with its unit and meaning, as far as they are registered."""
    metric = find_registered_metric(name)
    return MetricEntry(name, metric.unit if metric else "", metric.meaning.replace("`", "") if metric else "")


def metric_series(reader: RunReader, names: list[str]) -> dict[str, MetricSeries]:
    """Return the series of metrics, with the intervals of those that are estimates.

    Raises:
        InputError: the run did not record a metric.
    """
    intervals = {name: interval_metric(name) for name in names}
    values = reader.metrics([*names, *intervals.values()])
    breaks = reader.evaluation_breaks()
    series = {}
    for name in names:
        if name not in values:
            raise InputError(f"{reader.path}: no metric {name!r} was recorded")
        errors = values.get(intervals[name], {})
        policies: dict[str, list[Point]] = {}
        for policy, points in values[name].items():
            by_step = dict(errors.get(policy, []))
            gaps = breaks.get(policy, set()) if name.startswith("evaluation/") else set()
            policies[policy] = [
                point
                for step, value in points
                for point in ([(step, None, None)] if step in gaps else []) + [(step, value, by_step.get(step))]
            ]
        entry = metric_entry(name)
        series[name] = MetricSeries(entry.unit, entry.meaning, bool(errors), policies)
    return series


def _count_resumes(log: SqliteRunLog, problems: list[str]) -> int:
    """Return how often the run resumed from a checkpoint; an unreadable record is a problem."""
    try:
        return max(len(log.starts()) - 1, 0)
    except JournalError as error:
        problems.append(str(error))
        return 0
