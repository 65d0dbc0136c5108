"""The vocabulary of a run as records: an episode from its task to its header, and the optimizer step that consumes it.

Invariants, checked where a record is built:
1. `VersionSpan`s of a completion cover its tokens exactly, in order, without gaps.
2. `token_ids` and `logprobs` of a completion have the same length; logprobs are of the *processed* distribution.
3. A trajectory's rows carry one loss mask, one behavior logprob and one version per token.

Token columns are numpy arrays (`int32` ids, `float32` logprobs); numpy is imported by whoever makes one.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int32Array = NDArray[np.int32]
    Float32Array = NDArray[np.float32]
    ExpertArray = NDArray[np.uint8]
    RoutingArray = NDArray[np.int16]
    BoolArray = NDArray[np.bool_]

Purpose = Literal["train", "evaluate", "replay", "fork", "import"]
"""Why an episode runs; only `train` enters the buffer and the ledger. `import`: it was played elsewhere."""

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: a stop token, the token limit, or an abort that returned the partial."""

StopReason = Literal["completed", "max_turns", "context_length", "time_limit", "infrastructure", "refused"]
"""Why an episode ended, if it was committed; a dropped episode has a drop reason instead."""

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One work item.

    Example:
        >>> Task(id="chain_sum-7", data={"question": "What is 2 + 3?", "answer": "5"}).data["answer"]
        '5'
    """

    id: str
    """Unique within its source; episodes of one task are comparable."""
    data: Mapping[str, Any]
    """What the environment reads; JSON-serialisable."""


# --- policies and versions --------------------------------------------------------------------------------------------


class PolicyVersion(NamedTuple):
    """The id of a policy's weights. Never reused: after a rollback the lineage grows.

    Example:
        >>> str(PolicyVersion("solver", 0, 12))
        'solver@0.12'
    """

    policy: str
    lineage: int
    """Grows by one with every resume, so that a version of a dead lineage is never confused with a live one."""
    step: int
    """Optimizer steps that made these weights."""

    def __str__(self) -> str:
        return f"{self.policy}@{self.lineage}.{self.step}"


class VersionSpan(NamedTuple):
    """Tokens `[start, stop)` of a completion were sampled by `version`."""

    start: int
    stop: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRef:
    """Where a published version's immutable files lie."""

    version: PolicyVersion
    path: str
    """A directory: `model.safetensors` (full weights) or `adapter_model.safetensors` + `adapter_config.json`."""
    kind: Literal["full", "adapter"]
    sha256: str
    """Digest of its `files.WEIGHT_FILES`, one after another; the engine checks it before it serves the version."""


# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A policy's request to call a tool. `arguments` is what the model wrote, not yet validated."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """The parsed JSON object, or the raw text where it did not parse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    """Of the tool that answers, for role `tool`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """What a policy is told about a tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""


# --- completions and turns --------------------------------------------------------------------------------------------


class MaskKind(enum.IntEnum):
    """What `SamplingMask.counts` says where it is not the size of a kept set."""

    NONE = 0
    """Nothing was masked: the full vocabulary was kept."""
    MISSING = -1
    """A mask was applied but not recorded: do not train this token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMask:
    """The kept set K_t of each token after top-k, top-p and min-p, as a ragged array.

    `counts[t]` ids of `token_ids` belong to token t; a forced token has the set `{token}` (count 1); see `MaskKind`.
    """

    counts: Int32Array  # [n]
    token_ids: Int32Array  # [sum of the positive counts]


class RoutingBreak(NamedTuple):
    """From `row` of a completion's routing on, its positions begin again at `position`: the context was computed again
    (newer weights, a resume), through other experts. Tokens predicted before keep what they were sampled with.
    """

    row: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The engine's reply to one call: the five fields, and which weights sampled each token."""

    token_ids: Int32Array  # [n]
    logprobs: Float32Array  # [n], natural log, of the processed distribution
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    expert_routing: ExpertArray | None = None  # [positions, layers, top_k]; see `routing_start`
    routing_start: int = 0
    """Index, in the whole context, of the position that row 0 of `expert_routing` belongs to."""
    routing_breaks: tuple[RoutingBreak, ...] = ()
    sampling_mask: SamplingMask | None = None
    prompt_tokens: int = 0
    """Length of the context that was sent."""
    cached_tokens: int = 0
    """How many of those were served from the session's KV."""

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if len(self.logprobs) != count:
            raise ValueError(f"{count} tokens but {len(self.logprobs)} logprobs")
        at = 0
        for span in self.spans:
            if span.start != at or span.stop <= span.start:
                raise ValueError(f"version spans {self.spans} do not cover {count} tokens in order")
            at = span.stop
        if at != count:
            raise ValueError(f"version spans {self.spans} cover {at} of {count} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One engine call of an agent, as the environment sees it."""

    text: str
    """The decoded completion, special tokens left out."""
    message: Message
    completion: Completion

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that parsed from the completion."""
        return self.message.tool_calls


# --- episodes ---------------------------------------------------------------------------------------------------------


class SeatBinding(NamedTuple):
    """Who holds a seat: a policy, and a version where it is pinned (evaluation, past opponents)."""

    policy: str
    pin: PolicyVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPoint:
    """Where a fork leaves its parent: at a call of one of its attempts. All before it is read where it was written."""

    journal: str
    """The parent's journal directory, relative to the fork's own; `.` where they are the same."""
    partition: str
    episode_id: str
    attempt: int
    call_id: str
    """The first call that is the fork's own."""
    messages: tuple[dict[str, Any], ...] = ()
    """What the policy is told at that call, where it is something else than the environment says."""

    @property
    def edits(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        """What the policy is told instead, by call id."""
        return {self.call_id: self.messages} if self.messages else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """Everything a worker needs to run an episode, in this process or another."""

    episode_id: str
    environment: str
    """The registered name of the environment class."""
    task: Task
    seed: int
    seats: Mapping[str, SeatBinding]
    group_id: str
    group_size: int = 1
    attempt: int = 0
    purpose: Purpose = "train"
    parent_id: str | None = None
    pins: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """Policies that play at a fixed version, in the episode's children too."""
    fork: ForkPoint | None = None
    """Of a fork: where its recorded prefix lies."""
    deadline: int = field(default=0, compare=False)
    """For which step it was admitted, about: of calls that wait, those of lower ones are served first."""
    held_by: str = field(default="", compare=False)
    """What its admission had to wait for, and how long, in words; empty: nothing."""

    def pinned(self, pins: Mapping[str, PolicyVersion]) -> EpisodeSpec:
        """The same episode with policies at other versions."""
        seats = {seat: SeatBinding(held.policy, pins.get(held.policy)) for seat, held in self.seats.items()}
        return dataclasses.replace(self, seats=seats, pins=dict(pins))


class RoutingSpan(NamedTuple):
    """Tokens `[start, stop)` of a row were sampled with these experts at the positions before them."""

    start: int
    stop: int
    experts: RoutingArray  # [stop - 1, layers, top_k], -1 where none was recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token sequence of a trajectory; an agent has one, more where its context was rewritten."""

    token_ids: Int32Array  # [T]
    loss_mask: BoolArray  # [T], True where the policy sampled the token
    behavior_logprobs: Float32Array  # [T], 0 where the mask is False
    turn_index: Int32Array  # [T], the turn that sampled the token, -1 elsewhere
    spans: tuple[VersionSpan, ...]
    """Over positions of the row; they cover exactly the sampled tokens."""
    temperature: float = 1.0
    routing: tuple[RoutingSpan, ...] = ()
    """In order, over the row's tokens; several where a prefix was computed again through other experts."""
    sampling_mask: SamplingMask | None = None  # counts [T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One agent's conversation in an episode, as token sequences, with its reward."""

    seat: str
    index: int
    """Which of the seat's agents, from 0."""
    policy: str
    rows: tuple[Row, ...]
    reward: float | None
    """The sum of the rewards given to the agent; None where it was given none."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrajectoryHeader:
    """What the control path knows of one agent's trajectory."""

    seat: str
    index: int
    policy: str
    reward: float | None
    tokens: int
    """Sampled tokens."""
    oldest_step: int
    """Step of the oldest weights that sampled one of them, then their lineage."""
    lineage: int
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Of `reward`, what was given for single turns: (turn, reward), in order."""


class DataLocation(NamedTuple):
    """Where an episode's token columns lie."""

    partition: str
    """File name of the turn database, relative to the run's journal directory."""
    entries: int
    """How many journal entries the episode has there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeHeader:
    """All that passes through the orchestrator when an episode ends: at most 256 bytes for one agent, and 32 for each
    policy its children are played by (tested).
    """

    episode_id: str
    group_id: str
    attempt: int
    purpose: Purpose
    parent_id: str | None
    stop_reason: StopReason | None
    """None where the episode was dropped."""
    drop_reason: str | None
    """None where the episode was committed."""
    turns: int
    tokens: int
    """Sampled tokens of all agents."""
    seconds: float
    trajectories: tuple[TrajectoryHeader, ...]
    location: DataLocation | None
    measured_against: tuple[PolicyVersion, ...] = ()
    """What its rewards may depend on besides its own policies: of each policy that played in the children it waited
    for, the oldest weights that sampled a token there."""

    @property
    def committed(self) -> bool:
        """Whether the episode entered the journal whole."""
        return self.drop_reason is None

    @property
    def reward(self) -> float | None:
        """The sum over agents; None where no agent was rewarded."""
        rewards = [t.reward for t in self.trajectories if t.reward is not None]
        return sum(rewards) if rewards else None

    @property
    def winner(self) -> str | None:
        """The seat that was given most, in an episode that was a decided game: some gained by it, others lost."""
        seats: dict[str, float] = {}
        for trajectory in self.trajectories:
            seats[trajectory.seat] = seats.get(trajectory.seat, 0.0) + (trajectory.reward or 0.0)
        if not seats or not min(seats.values()) < 0.0 < max(seats.values()):
            return None
        return max(seats, key=lambda seat: seats[seat])

    def result(self, learner: str, opponent: str) -> GameResult | None:
        """The result of a game between a policy and the `opponent` that plays its past versions.

        Versions are the oldest that sampled a token; for a policy that holds several seats, the first seat's.

        Returns:
            None if one of the two did not act.
        """
        sides = [[t for t in self.trajectories if t.policy == policy] for policy in (learner, opponent)]
        if not all(sides):
            return None
        own, other = (sum(t.reward or 0.0 for t in side) / len(side) for side in sides)
        played, past = (PolicyVersion(learner, side[0].lineage, side[0].oldest_step) for side in sides)
        return GameResult(played, past, 0.5 if own == other else float(own > other))


class GameResult(NamedTuple):
    """How a committed episode between a policy and one of its past versions ended."""

    learner: PolicyVersion
    opponent: PolicyVersion
    score: float
    """1: the learner was given more than the opponent, ½: as much, 0: less; a seat given nothing counts as 0."""


class Tally(NamedTuple):
    """The number of games between two versions, and their summed score: a win counts 1, a draw ½."""

    episodes: int = 0
    score: float = 0.0

    @property
    def win_rate(self) -> float:
        """The mean, shrunk towards ½ by a win and a loss (Laplace): defined without any episode."""
        return (self.score + 1.0) / (self.episodes + 2.0)

    def plus(self, score: float) -> Tally:
        """The tally after one more game."""
        return Tally(self.episodes + 1, self.score + score)


def dropped_header(spec: EpisodeSpec, reason: str, *, seconds: float = 0.0) -> EpisodeHeader:
    """The header of an episode that ends without being trained."""
    return EpisodeHeader(
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        attempt=spec.attempt,
        purpose=spec.purpose,
        parent_id=spec.parent_id,
        stop_reason=None,
        drop_reason=reason,
        turns=0,
        tokens=0,
        seconds=seconds,
        trajectories=(),
        location=None,
    )


def usage_of(said: Mapping[str, Any]) -> dict[str, int]:
    """The endpoint's own counts of tokens in its answer, or in a remote policy's line; empty: it gave none.

    Example:
        >>> usage_of({"usage": {"prompt_tokens": 7, "completion_tokens": -1, "cost": 3}})
        {'prompt_tokens': 7}
    """
    usage = said.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return {
        name: count
        for name in ("prompt_tokens", "completion_tokens")
        if isinstance(count := counts.get(name), int) and not isinstance(count, bool) and 0 <= count < 1 << 31
    }


# --- what the run remembers of proposals and groups ------------------------------------------------------------------


class Proposal(NamedTuple):
    """A task that an episode thought up, as `ctx.remember` was told of it."""

    number: int
    """Its place among all the run remembers, in the order they were told."""
    episode_id: str
    attempt: int
    call_id: str
    environment: str
    key: str
    """Digest of what is the same in equal proposals, as the environment normalises them."""
    structure: str
    """What like proposals have in common, as the environment says; empty where it says nothing."""

    @property
    def made_by(self) -> tuple[str, int, str]:
        """The call that made it: told again, it is the same proposal."""
        return self.episode_id, self.attempt, self.call_id


class Recollection(NamedTuple):
    """What the run remembered when a proposal was made."""

    times: int
    """How often the same one had been made; 0: it is new."""
    share: float
    """Of the newest remembered proposals (100 at most) of its environment, how many had the same structure."""


class EarlierMean(NamedTuple):
    """What a policy used to get in a seat, when the group was admitted."""

    policy: str
    seat: str
    mean: float


class BaselineSet(NamedTuple):
    """Frozen and recorded once per group that is released before all of it has ended; see `credit.release`."""

    group_id: str
    finishers: tuple[str, ...]
    """Ids of the episodes that were waited for, in the order in which they ended."""
    earlier: tuple[EarlierMean, ...] = ()


# --- what a trainer consumes and reports ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrajectoryCredit:
    """The advantage of one trajectory, computed on the control path from headers alone."""

    seat: str
    index: int
    reward: float
    advantage: float
    """Of every token; of the first turn's where `turn_advantages` has one per turn, the last one of all later turns."""
    baseline: float
    turn_advantages: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An episode's trajectories of one policy: always in one optimizer step. Token data stays where `location` says."""

    episode_id: str
    attempt: int
    policy: str
    location: DataLocation
    credits: tuple[TrajectoryCredit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One optimizer step of one policy, by reference."""

    step_id: int
    """The step these units make: current step + 1. Trainers are idempotent by it."""
    policy: str
    units: tuple[Unit, ...]
    normaliser: float
    """The constant the summed token losses are divided by: step_size × configured tokens per unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A row to train on."""

    token_ids: Int32Array  # [T]
    loss_mask: BoolArray  # [T]
    behavior_logprobs: Float32Array  # [T]
    advantages: Float32Array  # [T], 0 where the mask is False
    temperature: float = 1.0
    spans: tuple[VersionSpan, ...] = ()
    """Over positions: which weights sampled the token."""
    expert_routing: RoutingArray | None = None  # [R, layers, top_k], R >= the last trained position; -1: not recorded
    sampling_mask: SamplingMask | None = None  # counts [T]
    episode_id: str = ""
    row_index: int = 0
    seat: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What an optimizer step did."""

    step_id: int
    policy: str
    started_from: PolicyVersion
    loss: float
    grad_norm: float
    samples: int
    tokens: int
    """Trained tokens."""
    seconds: float
    """Wall seconds the trainer was busy with it."""
    metrics: Mapping[str, float]
    input_digest: str
    """blake2b over the step's rows, masks, behavior logprobs and advantages, in order."""
    columns: str | None = None
    """File with the step's trainer logprobs, relative to the run directory."""
