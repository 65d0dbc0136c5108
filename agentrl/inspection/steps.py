"""Optimizer steps: the inputs and the result of each."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import msgspec

from agentrl.core.errors import InputError, JournalError
from agentrl.core.records import PolicyVersion
from agentrl.inspection.reader import verified_control_rows
from agentrl.inspection.tokens import StepRow, read_step_rows
from agentrl.observe.metrics import GRADIENT_METRICS, no_gradient_text

if TYPE_CHECKING:
    from agentrl.inspection.reader import Row, RunReader


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """A step in a list."""

    policy: str
    lineage: int
    step: int
    """Step number; the step made the version `policy@lineage.step`."""
    survives: bool
    """Whether the step led to the policy's newest version; if not, a rollback undid it."""
    loss: float | None
    grad_norm: float | None
    reward: float | None
    """Mean reward over the step's units; None if they have several seats, whose sum means nothing."""
    rewards: dict[str, float]
    """Mean reward of each seat's agents, as in the metric `reward/<seat>`."""
    units: int
    samples: int
    tokens: int
    seconds: float
    stepped_at: float
    no_gradient: str = ""
    """Why the step had no gradient; empty if it had one, or led to no surviving version."""


class EvaluationLine(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of a version in a list."""

    policy: str
    step: int
    metrics: dict[str, float | None]


class ConsumedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that a step consumed."""

    position: int
    episode: str
    attempt: int
    seat: str
    agent: int
    reward: float
    baseline: float
    advantage: float
    tokens: int | None = None
    """Number of trained tokens, of all agents of the unit; None if the step's columns are gone."""
    mean_ratio: float | None = None
    """Mean probability ratio of the trained weights to the sampling ones, over the tokens of the unit."""
    largest_lag: int | None = None


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """A step with all its inputs."""

    line: StepLine
    started_from: str
    normalizer: float
    input_digest: str
    columns_file: str | None
    metrics: dict[str, float | None]
    fed: list[ConsumedTrajectory]
    problems: list[str]


def evaluation_list(reader: RunReader) -> list[EvaluationLine]:
    """List the evaluations of surviving versions by policy and step, with their metrics."""
    evaluations: dict[tuple[str, int], dict[str, float | None]] = {}
    names = [name for name in reader.metric_names() if name.startswith("evaluation/")]
    for name, by_policy in reader.metrics(names).items():
        for policy, values in by_policy.items():
            for step, value in values:
                evaluations.setdefault((policy, step), {})[name.removeprefix("evaluation/")] = value
    return [
        EvaluationLine(policy=policy, step=step, metrics=metrics)
        for (policy, step), metrics in sorted(evaluations.items())
    ]


def step_list(reader: RunReader, policy: str | None = None, *, problems: list[str] | None = None) -> list[StepLine]:
    """List the steps of a run in the order in which they were taken, including steps undone by a rollback. A step
    whose record is damaged is left out, and described in `problems`.

    Raises:
        InputError: there is no such policy, or it does not learn.
        JournalError: the journal is damaged.
    """
    return _lines(reader, problems, policy=policy)


def _lines(reader: RunReader, problems: list[str] | None = None, **key: str | int | None) -> list[StepLine]:
    """Return the steps whose columns have the given values; None: any."""
    columns = [name for name, value in key.items() if value is not None]
    condition, values = " AND ".join(["1", *(f"{name} = ?" for name in columns)]), [key[name] for name in columns]
    order = "ORDER BY stepped_at, policy, lineage, step"
    rows = verified_control_rows(reader.log, "steps", f"{condition} {order}", *values, problems=problems)
    if (policy := key["policy"]) is not None and not rows:
        learners = [name for (name,) in reader.log.rows("SELECT DISTINCT policy FROM versions ORDER BY policy")]
        if learners and policy not in learners:
            raise InputError(f"{reader.path}: no trained policy {policy!r}; there are: {', '.join(map(str, learners))}")
    rewards = reader.step_rewards(condition, *values)
    surviving = reader.surviving()
    lines = [_line(row, rewards, surviving.get(row["policy"], [])) for row in rows]
    texts = _no_gradient_texts(reader)
    return [
        msgspec.structs.replace(line, no_gradient=texts.get((line.policy, line.step), "")) if line.survives else line
        for line in lines
    ]


def _no_gradient_texts(reader: RunReader) -> dict[tuple[str, int], str]:
    """Return why steps of surviving versions had no gradient, by policy and step."""
    steps: dict[tuple[str, int], dict[str, float]] = {}
    for name, by_policy in reader.metrics(GRADIENT_METRICS).items():
        for policy, values in by_policy.items():
            for step, value in values:
                steps.setdefault((policy, step), {})[name] = value or 0.0
    return {key: no_gradient_text(metrics) for key, metrics in steps.items()}


def step_view(reader: RunReader, step: int, policy: str | None = None, lineage: int | None = None) -> StepView:
    """Return a step of the given policy (or the only one that learns), in the given lineage (or the newest that took
    it).

    Raises:
        InputError: there is no such step, or several policies took a step of this number.
        JournalError: the journal is damaged.
    """
    lines = _lines(reader, policy=policy, lineage=lineage, step=step)
    policies = sorted({line.policy for line in lines})
    if len(policies) > 1:
        raise InputError(f"{' and '.join(policies)} both have a step {step}; name one with --policy")
    if not lines:
        raise InputError(f"{reader.path}: there is no such step {step}; `agentrl step list {reader.path}` shows them")
    line = max(lines, key=lambda candidate: candidate.lineage)
    problems: list[str] = []
    key = (line.policy, line.lineage, line.step)
    (row,) = verified_control_rows(reader.log, "steps", "policy = ? AND lineage = ? AND step = ?", *key)
    units = verified_control_rows(
        reader.log,
        "step_units",
        "policy = ? AND lineage = ? AND step = ? ORDER BY position",
        *key,
        problems=problems,
    )
    columns = _columns(reader, row, problems)
    return StepView(
        line=line,
        started_from=str(PolicyVersion(line.policy, row["started_lineage"], row["started_step"])),
        normalizer=row["normaliser"],
        input_digest=row["input_digest"],
        columns_file=row["columns_file"],
        metrics=_metrics(row["metrics"], problems),
        fed=[_consumed_row(unit, columns.get(unit["episode"], []) if columns else None) for unit in units],
        problems=problems,
    )


def _line(
    row: Row,
    rewards: dict[tuple[str, int, int], tuple[float | None, int, dict[str, float]]],
    surviving: list[tuple[int, int, int]],
) -> StepLine:
    version = PolicyVersion(row["policy"], row["lineage"], row["step"])
    reward, units, by_seat = rewards.get((version.policy, version.lineage, version.step), (None, 0, {}))
    return StepLine(
        policy=version.policy,
        lineage=version.lineage,
        step=version.step,
        survives=any(lineage == version.lineage and first < row["step"] <= last for lineage, first, last in surviving),
        loss=row["loss"],
        grad_norm=row["grad_norm"],
        reward=reward,
        rewards=by_seat,
        units=units,
        samples=row["samples"],
        tokens=row["tokens"],
        seconds=row["seconds"],
        stepped_at=row["stepped_at"],
    )


def _columns(reader: RunReader, row: Row, problems: list[str]) -> dict[str, list[StepRow]]:
    """Read the rows of the step's file, by episode; empty if there is no readable file."""
    if row["columns_file"] is None:
        return {}
    columns: dict[str, list[StepRow]] = {}
    try:
        for step_row in read_step_rows(reader.path, row["columns_file"]):
            columns.setdefault(step_row.episode, []).append(step_row)
    except JournalError as error:
        problems.append(str(error))
    return columns


def _consumed_row(unit: Row, rows: list[StepRow] | None) -> ConsumedTrajectory:
    columns = [row.columns for row in rows or ()]
    ratios = [
        math.exp(min(now - then, 80.0))
        for part in columns
        for now, then in zip(part["trainer_logprobs"].tolist(), part["behavior_logprobs"].tolist(), strict=True)
        if math.isfinite(now - then)
    ]
    return ConsumedTrajectory(
        position=unit["position"],
        episode=unit["episode"],
        attempt=unit["attempt"],
        seat=unit["seat"],
        agent=unit["agent"],
        reward=unit["reward"],
        baseline=unit["baseline"],
        advantage=unit["advantage"],
        tokens=sum(len(part["position"]) for part in columns) if rows is not None else None,
        mean_ratio=sum(ratios) / len(ratios) if ratios else None,
        largest_lag=max((lag for part in columns for lag in part["lag"].tolist()), default=-1)
        if rows is not None
        else None,
    )


def _metrics(text: str, problems: list[str]) -> dict[str, float | None]:
    try:
        return msgspec.convert(json.loads(text), dict[str, float | None])
    except (ValueError, TypeError, RecursionError, msgspec.ValidationError):
        problems.append("the step's metrics cannot be read")
        return {}
