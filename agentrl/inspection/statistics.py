"""A run in numbers: episodes by environment and purpose, policies, win rates against past versions, current state.

The journal is the source of truth about episodes; `metrics.jsonl` and `status.json` may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from agentrl.core.control_messages import read_actions
from agentrl.core.errors import StorageError
from agentrl.core.records import REWARD, GameTally
from agentrl.inspection.reader import COLUMNS, EPISODES, MAX_SECONDS, OBJECTS
from agentrl.inspection.where_filter import find_column
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.run_process import read_failure
from agentrl.observe.alarms import read_raised_alarms
from agentrl.observe.run_state import (
    RunSnapshot,
    RunState,
    display_settings_from_config,
    read_metrics,
    read_run_snapshot,
)

if TYPE_CHECKING:
    from agentrl.core.records import EpisodeHeader, PolicyVersion
    from agentrl.inspection.reader import RunReader


class EpisodeDistribution(msgspec.Struct, frozen=True):
    """Distribution of a quantity over episodes."""

    mean: float | None
    low: float | None
    """10th percentile."""
    median: float | None
    high: float | None
    """90th percentile."""


class EpisodeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes of one environment and purpose that ended."""

    environment: str
    purpose: str
    episodes: int
    ended: dict[str, int]
    """Number of episodes by stop reason or drop reason, the most frequent first."""
    rewards: dict[str, EpisodeDistribution]
    """Keyed by column: `reward`, or `reward/SEAT` for each seat if several seats were rewarded."""
    turns: EpisodeDistribution
    tokens: EpisodeDistribution
    seconds: EpisodeDistribution


class PolicyStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a policy that sampled."""

    policy: str
    trajectories: int
    tokens: int
    """Number of sampled tokens."""
    reward: float | None
    """Mean reward of a trajectory."""
    named_rewards: dict[str, float]
    """Mean reward of a trajectory by name, before weights, if rewards have names."""
    steps: int
    """Number of steps that led to the newest version."""
    staleness: dict[int, int]
    """Number of trained trajectories by the lag of their oldest token in steps."""
    before_resume: int
    """Number of trained trajectories that began before a resume, whose weights it may have taken back."""


class RunStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run."""

    name: str
    episodes: list[EpisodeStatistics]
    policies: list[PolicyStatistics]
    in_flight: int
    """Number of unfinished episodes of the run's purpose: training, or evaluation."""
    repeated: int
    """Number of attempts beyond the first."""
    seconds: float
    """Duration of the run, as `RunLog.seconds` defines it."""
    tokens_per_second: float | None
    caveats: list[str]
    """Settings of scorers that bias the gradient estimate or change the objective; see docs/how-to/scores.md."""
    controls: list[str]
    """What was asked of the run while it ran, with time and user; see docs/how-to/operations.md."""


def run_statistics(reader: RunReader) -> RunStatistics:
    """Compute the figures of a run. Raises `JournalError` if its control log is damaged."""
    log = reader.log
    kinds = log.rows("SELECT environment, purpose, count(*) FROM episodes GROUP BY 1, 2 ORDER BY 2 DESC, 1")
    seconds = log.seconds() or 0.0
    ((tokens,),) = log.rows("SELECT coalesce(sum(tokens), 0) FROM episodes")
    ((num_repeated,),) = log.rows("SELECT count(*) FROM admissions WHERE attempt > 0")
    name = reader.info().get("name")
    return RunStatistics(
        name=name if isinstance(name, str) else reader.path.name,
        episodes=[_episodes(reader, environment, purpose, count) for environment, purpose, count in kinds],
        policies=_policies(reader),
        in_flight=reader.count(f"status = in_flight and purpose = {reader.purpose()}"),
        repeated=num_repeated,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        caveats=scorer_caveats(log.config()),
        controls=[action.line for action in read_actions(log.info())],
    )


def scorer_caveats(config: Mapping[str, Any]) -> list[str]:
    """Return what the scorers of a configuration do to the gradient estimate, for people."""
    advantage = (config.get("credit") or {}).get("advantage") or {}
    estimator = advantage.get("name", "") if isinstance(advantage, dict) else advantage
    caveats = []
    for name, scorer in (config.get("scorers") or {}).items():
        credited = scorer.get("credit") != "note"
        if scorer.get("per") == "group" and estimator == "leave_one_out" and credited:
            caveats.append(
                f"{name} scores members with their siblings in view, so the baseline of leave_one_out depends on the "
                "member: the estimate is biased; group_mean makes no such promise"
            )
    return caveats


def _episodes(reader: RunReader, environment: str, purpose: str, count: int) -> EpisodeStatistics:
    rows = reader.log.rows(
        "SELECT coalesce(drop_reason, stop_reason, '?') AS why, count(*) AS many FROM episodes"
        " WHERE environment = ? AND purpose = ? GROUP BY why ORDER BY many DESC, why",
        *(environment, purpose),
    )
    committed = "e.environment = ? AND e.purpose = ? AND e.drop_reason IS NULL"
    reward_columns = [name for name in reader.reward_columns(committed, environment, purpose) if "/" in name] or [
        "reward"
    ]
    spreads = {}
    for name in (*reward_columns, "turns", "tokens", "seconds"):
        column = find_column("column", name, COLUMNS, OBJECTS)
        statement = f"SELECT {column.sql} AS value{EPISODES} WHERE {committed} AND value IS NOT NULL ORDER BY value"
        spreads[name] = _spread(
            [value for (value,) in reader.log.rows(statement, *column.values, environment, purpose)]
        )
    return EpisodeStatistics(
        environment=environment,
        purpose=purpose,
        episodes=count,
        ended={str(reason): many for reason, many in rows},
        rewards={name: spreads.pop(name) for name in reward_columns},
        **spreads,
    )


def _spread(values: Sequence[float]) -> EpisodeDistribution:
    """Compute mean, median and outer deciles of values in ascending order. As many values are below the low decile as
    above the high one: a tenth, rounded down."""
    if not values:
        return EpisodeDistribution(None, None, None, None)
    tenth = len(values) // 10
    return EpisodeDistribution(fmean(values), values[tenth], median(values), values[-1 - tenth])


def _policies(reader: RunReader) -> list[PolicyStatistics]:
    log = reader.log
    staleness: dict[str, dict[int, int]] = {}
    before_resume: dict[str, int] = {}
    for policy, steps, count in log.rows(
        "SELECT s.policy, CASE WHEN t.lineage = s.lineage THEN max(s.step - 1 - t.oldest_step, 0) END AS steps,"
        " count(*) FROM step_units s JOIN trajectories t"
        " ON t.episode = s.episode AND t.attempt = s.attempt AND t.seat = s.seat AND t.agent = s.agent"
        " GROUP BY s.policy, steps ORDER BY s.policy, steps"
    ):
        if steps is None:
            before_resume[policy] = count
        else:
            staleness.setdefault(policy, {})[steps] = count
    step_counts = {
        policy: sum(last - max(first, 0) for _, first, last in line) for policy, line in reader.surviving().items()
    }
    reward_means: dict[str, dict[str, float]] = {}
    for policy, name, mean in log.rows(
        "WITH given AS (SELECT policy, json_extract(value, '$[0]') AS name, json_extract(value, '$[1]') AS reward"
        " FROM trajectories, json_each(named_rewards)"
        f" UNION ALL SELECT policy, '{REWARD}', coalesce(reward, 0.0) FROM trajectories WHERE named_rewards IS NULL)"
        " SELECT policy, name, sum(reward) / (SELECT count(*) FROM trajectories o WHERE o.policy = g.policy)"
        " FROM given g WHERE policy IN (SELECT policy FROM trajectories WHERE named_rewards IS NOT NULL)"
        " GROUP BY policy, name ORDER BY policy, name"
    ):
        reward_means.setdefault(policy, {})[str(name)] = float(mean)
    return [
        PolicyStatistics(
            policy=policy,
            trajectories=count,
            tokens=tokens,
            reward=reward,
            named_rewards=reward_means.get(policy, {}),
            steps=step_counts.get(policy, 0),
            staleness=staleness.get(policy, {}),
            before_resume=before_resume.get(policy, 0),
        )
        for policy, count, tokens, reward in log.rows(
            "SELECT policy, count(*), sum(tokens), avg(reward) FROM trajectories GROUP BY policy ORDER BY policy"
        )
    ]


class OpponentResult(msgspec.Struct, frozen=True):
    """The results of a policy against one past version of itself."""

    policy: str
    step: int
    """Step of the policy's oldest weights in the episode, rounded down to a step at which versions join."""
    opponent: str
    """Policy that plays past versions."""
    version: str
    episodes: int
    score: float
    """Wins per episode; draws count half."""


class _PolicyConfig(msgspec.Struct):
    kind: str = ""
    of: str = ""
    every: Annotated[int, msgspec.Meta(ge=1)] = 1


class _Opponents(msgspec.Struct):
    policies: dict[str, _PolicyConfig]


def run_win_rates(reader: RunReader) -> list[OpponentResult]:
    """Return the results against past versions, by the learner's step and the opponent's version."""
    try:
        config = msgspec.convert(reader.info().get("config"), _Opponents)
    except msgspec.ValidationError:  # an evaluation's configuration, or one that agentrl did not write
        return []
    results = []
    for name, policy in config.policies.items():
        if policy.kind == "past":
            ends = [each.header for each in reader.log.history() if isinstance(each, EpisodeEnd)]
            matrix = tally_games_by_version(ends, policy.of, name, every=policy.every)
            results += [
                OpponentResult(policy.of, step, name, str(version), tally.episodes, tally.score / tally.episodes)
                for (step, version), tally in matrix.items()
            ]
    return results


def tally_games_by_version(
    headers: Iterable[EpisodeHeader], learner: str, opponent: str, *, every: int
) -> dict[tuple[int, PolicyVersion], GameTally]:
    """Sum results by the learner's step, rounded down to multiples of `every`, and the opponent's version."""
    matrix: dict[tuple[int, PolicyVersion], GameTally] = {}
    for header in headers:
        result = header.result(learner, opponent)
        if result is not None and header.committed:
            key = (result.learner.step // every * every, result.opponent)
            matrix[key] = matrix.get(key, GameTally()).plus(result.score)
    return dict(sorted(matrix.items()))


def win_rate_matrix(results: Sequence[OpponentResult]) -> list[list[str]]:
    """Format win rates as text: a heading, then a row per step of the policy with a column per past version."""
    versions = list(dict.fromkeys(line.version for line in results))
    cells = {(line.policy, line.step, line.version): f"{line.score:.2f} of {line.episodes}" for line in results}
    steps = sorted({(line.policy, line.step) for line in results})
    rows = [
        [policy, str(step), *(cells.get((policy, step, opponent), "") for opponent in versions)]
        for policy, step in steps
    ]
    return [["policy", "from step", *versions], *rows]


def run_state(reader: RunReader) -> RunState:
    """Return the state of a run for the progress view. Its `problem` describes unreadable data."""
    plan = display_settings_from_config(reader.config() or {"name": reader.info().get("name", reader.path.name)})
    state = RunState(plan=plan, path=str(reader.path))
    read_metrics(reader.path / "metrics.jsonl", state)
    state.raised = read_raised_alarms(reader.path)
    state.standing = reader.standing()
    state.failure = read_failure(reader.path)
    is_running = state.standing == "running"
    status = read_run_snapshot(reader.path) or RunSnapshot(phase="")
    if not is_running:
        # The clock of the status is that of the last process, with its start.
        seconds = min(max(reader.log.seconds() or 0.0, 0.0), MAX_SECONDS)
        status = replace(status, waits=(), processes=(), seconds=seconds)
    steps = {name: policy.step for name, policy in state.policies.items()}
    if not is_running or (any(steps.values()) and all(steps[name] for name in plan.max_staleness)):
        status = replace(status, pace="")  # the first step was taken after the status was written
    try:
        counts, drop_counts = reader.counts()
        if not status.waits:  # these come with the numbers of the same moment
            status = replace(status, in_flight=counts.get("in_flight", 0), ready=counts.get("ready", 0))
        state.status = replace(
            status,
            trained=counts.get("trained", 0),
            dropped=drop_counts,
        )
    except StorageError as error:
        state.status, state.problem = status, str(error)
    return state


def latest_metrics(state: RunState) -> dict[str, dict[str, float]]:
    """Return the newest value of each metric, by policy."""
    latest: dict[str, dict[str, float]] = {}
    for policy in state.policies.values():
        values: dict[str, float] = {}
        for metrics_by_step in (policy.evaluations, policy.steps):
            for _, at_step in sorted(metrics_by_step.items()):
                values.update(at_step)
        latest[policy.name] = {name: values[name] for name in sorted(values)} | {"step": float(policy.step)}
    return latest
