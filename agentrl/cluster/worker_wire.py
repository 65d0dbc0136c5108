"""The messages between the run and an episode worker's process: the control path, as msgpack frames.

Tokens are not among them: they go from the engine to the worker (`engines.client`) and from there to its partition of
the journal. An episode is sent once as its spec, and afterwards named by a number; events about it take at most 256
bytes. The framing is that of `engines.wire`; an invalid frame replaces the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentrl.core.ports import Counted, EngineCapabilities
from agentrl.core.records import (
    DataLocation,
    EpisodeHeader,
    EpisodeSpec,
    PolicyVersion,
    Recollection,
    StopReason,
    Task,
    TrajectoryHeader,
)
from agentrl.engines.wire import WireMessage

Spoken = tuple[str, int, str, float | None, int, int, int, tuple[tuple[int, float], ...], tuple[tuple[str, float], ...]]
"""The fields of a `TrajectoryHeader`, in order."""


class Ended(WireMessage, frozen=True):
    """An episode has ended and its entries are on disk; it is to be committed, or dropped, with its header."""

    number: int
    attempt: int
    stop_reason: StopReason | None
    drop_reason: str | None
    detail: str
    turns: int
    tokens: int
    seconds: float
    trajectories: tuple[Spoken, ...]
    measured_against: tuple[PolicyVersion, ...]
    entries: int
    digest: bytes
    metrics: dict[str, float]
    counted: dict[str, Counted] | None
    """None: the one policy that acted counted all of `metrics`, in all turns."""


# --- to the worker ----------------------------------------------------------------------------------------------------


class Work(WireMessage, frozen=True):
    """The first message: what the worker is, and where."""

    number: int
    config: dict[str, Any]
    journal: str
    """Directory; on another host than the run's, the address of the journal's receiver."""
    environments: dict[str, str]
    """References to classes that `registry.resolve` could not find by name in another process."""
    sources: dict[str, str]
    """Contents of the files among them, by path, for a worker on another host than the run's."""
    paths: tuple[str, ...]
    """Import paths of modules."""
    capabilities: EngineCapabilities
    """Capabilities of the engine, with this worker's share of its KV budget."""


class Engines(WireMessage, frozen=True):
    """The present addresses of the processes of one base model's engine."""

    addresses: tuple[str, ...]
    base: int = 0
    """Number of the base model, in the order of `RunConfig.bases`."""


class Start(WireMessage, frozen=True):
    """An episode; with `resume` the journal may hold some of it, in whichever partition."""

    number: int
    spec: EpisodeSpec
    resume: bool


class Park(WireMessage, frozen=True):
    """Take an episode out of the engine."""

    number: int


class Unpark(WireMessage, frozen=True):
    """Let it go on."""

    number: int


class ChildEnded(WireMessage, frozen=True):
    """A child of a running episode has ended: number `index` of the children that `call` spawned in that attempt."""

    number: int
    attempt: int
    call: str
    index: int
    ended: Ended
    """The header of the child, without the fields that its parent does not use."""
    partition: str | None


class Recollected(WireMessage, frozen=True):
    """The run's answer about a proposal."""

    call: int
    known: Recollection


class CancelEpisodes(WireMessage, frozen=True):
    """Stop everything in flight."""


class Leave(WireMessage, frozen=True):
    """Park all episodes and end: the machine is taken away."""


ToWorker = Work | Engines | Start | Park | Unpark | ChildEnded | Recollected | CancelEpisodes | Leave


# --- from the worker --------------------------------------------------------------------------------------------------


class Ready(WireMessage, frozen=True):
    """Episodes can come."""


class Alive(WireMessage, frozen=True):
    """Heartbeat, sent when no other message was due."""


class Spawn(WireMessage, frozen=True):
    """Children of a running episode, one for each task; a task that several have is there once (`of` says which)."""

    number: int
    attempt: int
    call: str
    environment: str
    tasks: tuple[Task, ...]
    of: tuple[int, ...]


class Remember(WireMessage, frozen=True):
    """A proposal."""

    call: int
    number: int
    call_id: str
    key: str
    structure: str


class Readmitted(WireMessage, frozen=True):
    """A further attempt begins."""

    number: int
    attempt: int


class MadeProgress(WireMessage, frozen=True):
    """An episode that was begun elsewhere has got on here: something new of it is on disk. Said once."""

    number: int


class Parked(WireMessage, frozen=True):
    """An episode holds nothing of the engine any more; see `rollout.episode.LiveEpisode.deadline`."""

    number: int
    deadline: float


class Cancelled(WireMessage, frozen=True):
    """Answer to `Cancel`: no episode is in flight."""


class Leaving(WireMessage, frozen=True):
    """The worker got SIGTERM, or was told to leave: it ends once what it sampled is on disk."""


class LogLine(WireMessage, frozen=True):
    """A line for people."""

    line: str


class WorkerFailed(WireMessage, frozen=True):
    """A failure that is no episode's own; `kind` is a class of `agentrl.core.errors`."""

    kind: str
    message: str


FromWorker = (
    Ready
    | Alive
    | Ended
    | Spawn
    | Remember
    | Readmitted
    | MadeProgress
    | Parked
    | Cancelled
    | Leaving
    | LogLine
    | WorkerFailed
)

TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


# --- headers ----------------------------------------------------------------------------------------------------------


def ended_of(
    number: int,
    header: EpisodeHeader,
    *,
    digest: bytes = b"",
    metrics: Mapping[str, float] | None = None,
    detail: str = "",
    counted: Mapping[str, Counted] | None = None,
) -> Ended:
    """An episode's end as a message, without what the run already knows."""
    metrics, counted = dict(metrics or {}), dict(counted or {})
    plain = not counted or list(counted.values()) == [Counted(header.turns, metrics)]
    return Ended(
        number=number,
        attempt=header.attempt,
        stop_reason=header.stop_reason,
        drop_reason=header.drop_reason,
        detail=detail,
        turns=header.turns,
        tokens=header.tokens,
        seconds=header.seconds,
        trajectories=tuple(
            (t.seat, t.index, t.policy, t.reward, t.tokens, t.oldest_step, t.lineage, t.turn_rewards, t.named_rewards)
            for t in header.trajectories
        ),
        measured_against=header.measured_against,
        entries=0 if header.location is None else header.location.entries,
        digest=digest,
        metrics=metrics,
        counted=None if plain else counted,
    )


def header_of(spec: EpisodeSpec, ended: Ended, partition: str | None) -> EpisodeHeader:
    """The header that was told of; `partition` is its worker's."""
    return EpisodeHeader(
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        attempt=ended.attempt,
        purpose=spec.purpose,
        parent_id=spec.parent_id,
        stop_reason=ended.stop_reason,
        drop_reason=ended.drop_reason,
        turns=ended.turns,
        tokens=ended.tokens,
        seconds=ended.seconds,
        trajectories=tuple(TrajectoryHeader(*each) for each in ended.trajectories),
        location=None if ended.drop_reason or partition is None else DataLocation(partition, ended.entries),
        measured_against=ended.measured_against,
    )


def counted_of(ended: Ended) -> dict[str, Counted]:
    """The counts of each policy that acted."""
    if ended.counted is not None:
        return ended.counted
    return {policy: Counted(ended.turns, ended.metrics) for policy in {each[2] for each in ended.trajectories}}
