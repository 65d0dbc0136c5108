"""Messages between the run and the process of an episode worker, over a `core.rpc.Connection`: the control path.

Messages contain no tokens, which go from the engine to the worker and from there to its partition of the journal. The
spec of an episode is sent once; later messages name the episode by a number and take at most 256 bytes. After an
invalid message, the process is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentrl.core import rpc
from agentrl.core.custom_functions import FunctionCode
from agentrl.core.ports import EngineCapabilities, PolicyCounts
from agentrl.core.records import (
    EpisodeDataLocation,
    EpisodeHeader,
    EpisodeSpec,
    ForkPoint,
    PolicyVersion,
    ProposalNovelty,
    StopReason,
    Task,
    TrajectoryHeader,
)

Spoken = tuple[
    str, int, str, float | None, int, int, int, tuple[tuple[int, float], ...], tuple[tuple[str, float], ...], bytes
]
"""Fields of a `TrajectoryHeader`, in order."""


class EpisodeEnded(rpc.WireMessage, frozen=True):
    """Header of an episode that has ended, to be committed or dropped; its entries are on disk."""

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
    counts: dict[str, PolicyCounts] | None
    """Turns and metrics of each policy that acted; None: each has all turns and metrics."""


# --- to the worker ----------------------------------------------------------------------------------------------------


class WorkerSetup(rpc.WireMessage, frozen=True):
    """First message to a worker, with its settings: call 0."""

    number: int
    plan: dict[str, Any]
    """The worker's part of the run's plan."""
    journal: str
    """Directory of the journal on the run's host."""
    environments: dict[str, str]
    """References to classes that `registry.resolve` cannot find by name in another process."""
    sources: dict[str, str]
    """Contents of files that define environments, by path, for a worker on another host than the run's."""
    paths: tuple[str, ...]
    """Import paths of modules."""
    capabilities: EngineCapabilities
    """Capabilities of the engine, with this worker's share of its KV budget."""
    scorers: dict[str, FunctionCode]
    """Code of the scorers' functions, by the scorer's name."""
    receiver: str = ""
    """Address of the journal's receiver; "" if the worker writes its partition itself."""
    host: str = ""
    """Address of the worker's node; "" for the run's host."""


class EngineAddresses(rpc.WireMessage, frozen=True):
    """Current addresses of the processes of one base model's engine, or of a reward model's."""

    addresses: tuple[str, ...]
    base: int = 0
    """Number of the base model, in the order of `RolloutPlan.bases`; reward models come behind them."""


class StartEpisode(rpc.WireMessage, frozen=True):
    """Message that starts an episode; with `resume`, a partition of the journal may hold entries of it."""

    number: int
    spec: EpisodeSpec
    resume: bool


class ParkEpisode(rpc.WireMessage, frozen=True):
    """Request to park an episode: release its resources of the engine."""

    number: int


class UnparkEpisode(rpc.WireMessage, frozen=True):
    """Request to resume a parked episode."""

    number: int


class ChildEpisodeEnded(rpc.WireMessage, frozen=True):
    """Result of a child of a running episode: child number `index` of `call` in that attempt."""

    number: int
    attempt: int
    call: str
    index: int
    ended: EpisodeEnded
    """Header of the child, without the fields that its parent does not use."""
    partition: str | None


class ProposalReply(rpc.Reply, frozen=True):
    """Answer to `RememberProposal`."""

    known: ProposalNovelty


class BranchesStarted(rpc.Reply, frozen=True):
    """Answer to `StartBranches`."""

    pins: dict[str, PolicyVersion]
    """Versions on which the tree must stay, by policy."""
    refusal: str = ""
    """Reason if the version of the tree can no longer be served; then nothing was started."""


class CancelEpisodes(rpc.WireMessage, frozen=True):
    """Request to stop all episodes in flight: call 0."""


class ShutDownWorker(rpc.WireMessage, frozen=True):
    """Park all episodes and end: the machine is taken away."""


ToWorker = (
    WorkerSetup
    | EngineAddresses
    | StartEpisode
    | ParkEpisode
    | UnparkEpisode
    | ChildEpisodeEnded
    | ProposalReply
    | BranchesStarted
    | CancelEpisodes
    | ShutDownWorker
)


# --- from the worker --------------------------------------------------------------------------------------------------


class WorkerReady(rpc.Reply, frozen=True):
    """Answer to `WorkerSetup`: the worker is ready for episodes."""


class WorkerHeartbeat(rpc.WireMessage, frozen=True):
    """Heartbeat, with what the worker's episodes have spent their time on."""

    activity: dict[str, float]


class SpawnChildEpisodes(rpc.WireMessage, frozen=True):
    """Request for children of a running episode, one per task; a task with several children is sent once (`of` maps
    children to tasks). For `known`, see `EpisodeHost.spawn`."""

    number: int
    attempt: int
    call: str
    environment: str
    tasks: tuple[Task, ...]
    of: tuple[int, ...]
    known: tuple[str, ...]


class StartBranches(rpc.WireMessage, frozen=True):
    """Request for branches of a running episode; see `core.ports.EpisodeHost.branch`."""

    call: int
    number: int
    point: ForkPoint
    count: int
    versions: dict[str, PolicyVersion]


class RememberProposal(rpc.WireMessage, frozen=True):
    """Proposal of an episode for the memory."""

    call: int
    number: int
    call_id: str
    key: str
    structure: str


class AttemptStarted(rpc.WireMessage, frozen=True):
    """Message that a further attempt of an episode begins."""

    number: int
    attempt: int


class EpisodeProgressed(rpc.WireMessage, frozen=True):
    """Message that another worker's episode has new entries on disk here. Sent once."""

    number: int


class EpisodeParked(rpc.WireMessage, frozen=True):
    """Message that an episode no longer holds resources of the engine; see `rollout.episode.LiveEpisode.deadline`."""

    number: int
    deadline: float


class EpisodesCancelled(rpc.Reply, frozen=True):
    """Answer to `CancelEpisodes`: no episode is in flight."""


class WorkerShuttingDown(rpc.WireMessage, frozen=True):
    """The worker got SIGTERM, or a request to leave: it ends once its samples are on disk."""


class LogLine(rpc.WireMessage, frozen=True):
    """Line of output for the user."""

    line: str


class WorkerFailed(rpc.WireMessage, frozen=True):
    """Failure that no episode caused; `kind` is a class of `agentrl.core.errors`."""

    kind: str
    message: str


FromWorker = (
    WorkerReady
    | WorkerHeartbeat
    | EpisodeEnded
    | SpawnChildEpisodes
    | StartBranches
    | RememberProposal
    | AttemptStarted
    | EpisodeProgressed
    | EpisodeParked
    | EpisodesCancelled
    | WorkerShuttingDown
    | LogLine
    | WorkerFailed
    | rpc.ErrorReply
)

TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


# --- headers ----------------------------------------------------------------------------------------------------------


def encode_episode_ended(
    number: int,
    header: EpisodeHeader,
    digest: bytes = b"",
    metrics: Mapping[str, float] | None = None,
    detail: str = "",
    counts: Mapping[str, PolicyCounts] | None = None,
) -> EpisodeEnded:
    """Encode an episode's end as a message, without data that the run already has."""
    return EpisodeEnded(
        number=number,
        attempt=header.attempt,
        stop_reason=header.stop_reason,
        drop_reason=header.drop_reason,
        detail=detail,
        turns=header.turns,
        tokens=header.tokens,
        seconds=header.seconds,
        trajectories=tuple(
            (
                *(t.seat, t.index, t.policy, t.reward, t.tokens, t.oldest_step, t.lineage),
                *(t.turn_rewards, t.named_rewards, t.turn_states),
            )
            for t in header.trajectories
        ),
        measured_against=header.measured_against,
        entries=0 if header.location is None else header.location.entries,
        digest=digest,
        metrics=dict(metrics or {}),
        counts=None if counts is None else dict(counts),
    )


def decode_episode_header(spec: EpisodeSpec, message: EpisodeEnded, partition: str | None) -> EpisodeHeader:
    """Decode the header of an ended episode; `partition` is that of its worker."""
    return EpisodeHeader(
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        attempt=message.attempt,
        purpose=spec.purpose,
        parent_id=spec.parent_id,
        stop_reason=message.stop_reason,
        drop_reason=message.drop_reason,
        turns=message.turns,
        tokens=message.tokens,
        seconds=message.seconds,
        trajectories=tuple(TrajectoryHeader(*fields) for fields in message.trajectories),
        location=None if message.drop_reason or partition is None else EpisodeDataLocation(partition, message.entries),
        measured_against=message.measured_against,
    )
