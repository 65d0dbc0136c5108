"""Records for tests: valid by default, each field of interest given by name.

Numbers follow from the arguments alone: equal calls give equal records.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from agentrl.core.records import (
    EpisodeDataLocation,
    EpisodeHeader,
    EpisodeSpec,
    PolicyVersion,
    SeatBinding,
    Task,
    Trajectory,
    TrajectoryHeader,
    VersionSpan,
)
from agentrl.core.tokens import Completion, ExpertRoutingSpan, TrajectoryRow
from agentrl.journal.port import Admission

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentrl.core.records import FinishReason, Purpose, StopReason
    from agentrl.journal.past_run import PastRun

INITIAL = PolicyVersion("policy", 0, 0)
"""The version that samples unless a test says otherwise."""


def make_task(number: int = 0, **data: Any) -> Task:
    """Task `task-<number>` with `data`.

    Example:
        >>> make_task(3, question="2 + 3").id
        'task-3'
    """
    return Task(id=f"task-{number}", data=data)


def make_spec(
    episode_id: str = "e0",
    *,
    environment: str = "test",
    task: Task | None = None,
    seed: int = 0,
    seats: Mapping[str, str] | None = None,
    group_id: str = "g0",
    group_size: int = 1,
    attempt: int = 0,
    purpose: Purpose = "train",
    parent_id: str | None = None,
) -> EpisodeSpec:
    """An episode to run; `seats` maps seat to policy, by default `agent` to `policy`.

    Example:
        >>> make_spec("e7", seats={"solver": "small"}).seats["solver"].policy
        'small'
    """
    bindings = {seat: SeatBinding(policy) for seat, policy in (seats or {"agent": INITIAL.policy}).items()}
    return EpisodeSpec(
        episode_id=episode_id,
        environment=environment,
        task=task or make_task(),
        seed=seed,
        seats=bindings,
        group_id=group_id,
        group_size=group_size,
        attempt=attempt,
        purpose=purpose,
        parent_id=parent_id,
    )


def make_episode_header(
    spec: EpisodeSpec | None = None,
    *,
    reward: float | None = 1.0,
    turns: int = 1,
    tokens: int = 8,
    version: PolicyVersion = INITIAL,
    seconds: float = 1.0,
    stop_reason: StopReason = "completed",
    drop_reason: str | None = None,
    location: EpisodeDataLocation | None = None,
) -> EpisodeHeader:
    """How `spec` ended: one trajectory per seat, each with the same reward and an equal share of the tokens.

    With `drop_reason` the episode was dropped: no stop reason, no trajectories, no location. A committed one lies in
    partition `turns-worker-0.db` with no entries unless `location` says otherwise.

    Example:
        >>> make_episode_header(make_spec("e1"), reward=0.5).reward
        0.5
    """
    spec = spec or make_spec()
    is_dropped = drop_reason is not None
    trajectories = tuple(
        TrajectoryHeader(
            seat=seat,
            index=0,
            policy=binding.policy,
            reward=reward,
            tokens=tokens // len(spec.seats),
            oldest_step=version.step,
            lineage=version.lineage,
        )
        for seat, binding in spec.seats.items()
    )
    return EpisodeHeader(
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        attempt=spec.attempt,
        purpose=spec.purpose,
        parent_id=spec.parent_id,
        stop_reason=None if is_dropped else stop_reason,
        drop_reason=drop_reason,
        turns=turns,
        tokens=tokens,
        seconds=seconds,
        trajectories=() if is_dropped else trajectories,
        location=None if is_dropped else location or EpisodeDataLocation("turns-worker-0.db", 0),
    )


def make_completion(
    token_ids: Sequence[int] = (5, 6, 7),
    *,
    logprobs: Sequence[float] | None = None,
    finish_reason: FinishReason = "stop",
    version: PolicyVersion = INITIAL,
    spans: Sequence[VersionSpan] | None = None,
) -> Completion:
    """A completion sampled by `version` alone, or by `spans`; logprobs are -0.5 unless given.

    Example:
        >>> make_completion([1, 2]).spans[0].stop
        2
    """
    import numpy as np

    whole = (VersionSpan(0, len(token_ids), version),) if len(token_ids) else ()
    return Completion(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.asarray([-0.5] * len(token_ids) if logprobs is None else logprobs, dtype=np.float32),
        finish_reason=finish_reason,
        spans=whole if spans is None else tuple(spans),
    )


def spans_of(row: TrajectoryRow) -> tuple[ExpertRoutingSpan, ...]:
    """The routing of a row's tokens, with a span per run of tokens that share it."""
    return () if row.experts is None else tuple(row.experts.spans(len(row)))


def make_trajectory(
    *,
    seat: str = "agent",
    policy: str = INITIAL.policy,
    turns: int = 2,
    context_tokens: int = 4,
    sampled_tokens: int = 3,
    reward: float | None = 1.0,
    version: PolicyVersion | None = None,
) -> Trajectory:
    """One row of `turns` turns, each `context_tokens` of context and then `sampled_tokens` sampled by `version`.

    Example:
        >>> row = make_trajectory(turns=2, context_tokens=4, sampled_tokens=3).rows[0]
        >>> len(row.token_ids), int(row.loss_mask.sum())
        (14, 6)
    """
    import numpy as np

    sampler = version or PolicyVersion(policy, 0, 0)
    width = context_tokens + sampled_tokens
    loss_mask = np.tile(np.arange(width) >= context_tokens, turns)
    turn_of_position = np.repeat(np.arange(turns), width)
    row = TrajectoryRow(
        token_ids=np.arange(10, 10 + turns * width, dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, -0.5, 0.0).astype(np.float32),
        turn_index=np.where(loss_mask, turn_of_position, -1).astype(np.int32),
        spans=tuple(VersionSpan(t * width + context_tokens, (t + 1) * width, sampler) for t in range(turns)),
    )
    return Trajectory(seat=seat, index=0, policy=policy, rows=(row,), reward=reward)


def make_past(*, unfinished: Sequence[EpisodeSpec] = ()) -> PastRun:
    """The past of a run whose `unfinished` episodes continue."""
    log = SimpleNamespace(next_number=lambda prefix: 0, repinning=None)
    past = SimpleNamespace(
        log=log,
        records=[Admission(spec=spec) for spec in unfinished],
        ended=(),
        unfinished=unfinished,
        open_groups={spec.group_id for spec in unfinished},
        fates={},
        baselines={},
        num_scores={},
        group_size=1,
        next_training=0,
        lost_numbers=lambda: (),
    )
    return cast("PastRun", past)


def no_lost_group(group: int) -> Task:
    """For `Dispatcher.resume` of a past without lost admissions."""
    raise AssertionError(f"group {group} was not lost")
