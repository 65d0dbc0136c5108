"""The vocabulary of a run as records: an episode from its task to its header, and the optimizer step that consumes it.

Tables of tokens are in `core/tokens.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from agentrl.core import ids
from agentrl.core.holds import AdmissionWait
from agentrl.core.json_data import copy_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from agentrl.core.tokens import Completion, TrajectoryRow

    Int32Array = NDArray[np.int32]
    Int64Array = NDArray[np.int64]
    Float32Array = NDArray[np.float32]
    Float64Array = NDArray[np.float64]
    ExpertArray = NDArray[np.uint8 | np.uint16]
    RoutingArray = NDArray[np.int16]
    BoolArray = NDArray[np.bool_]

Purpose = Literal["train", "evaluate", "replay", "fork"]
"""Reason why an episode runs; only `train` enters the buffer and the ledger. `import`: the episode was played
elsewhere."""

FinishReason = Literal["stop", "length", "abort"]
"""Reason why a completion ended: a stop token, the token limit, or an abort that returned the partial."""

StopReason = Literal["completed", "max_tokens", "max_turns", "context_length", "time_limit", "refused"]
"""Reason why a committed episode ended; a dropped episode has a drop reason instead. All but `completed` truncate it.
`max_tokens`: the last turn of an agent was cut."""

TRUNCATED = "truncated"
"""Drop reason of units of truncated episodes: `Environment.truncated_reward = None`."""


def find_finish_reason(text: object) -> FinishReason | None:
    """Return the reason with this name; None if there is none."""
    return next((reason for reason in get_args(FinishReason) if reason == text), None)


def find_stop_reason(text: object) -> StopReason | None:
    """Return the reason with this name; None if there is none."""
    return next((reason for reason in get_args(StopReason) if reason == text), None)


Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One work item.

    Example:
        >>> Task(id="chain_sum-7", data={"question": "What is 2 + 3?", "answer": "5"}).data["answer"]
        '5'
    """

    id: str
    """Id of the task, unique within its source; episodes of one task are comparable."""
    data: Mapping[str, Any]
    """Input of the environment: JSON data, which is copied."""

    def __init__(self, *, id: str, data: Mapping[str, Any]) -> None:
        """Check and copy the data. Decoding a task skips this: what was encoded has been checked."""
        if not isinstance(id, str):
            raise TypeError(f"Task(id={id!r}): the id must be a string, such as {str(id)!r}")
        if not isinstance(data, Mapping):
            raise TypeError(f"Task {id!r}: data is {type(data).__name__}; it must be a dict of JSON data")
        copy_json(id, "Task.id")
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "data", copy_json(dict(data), f"Task {id!r}: data"))


# --- policies and versions --------------------------------------------------------------------------------------------


class PolicyVersion(NamedTuple):
    """The id of a policy's weights. Never reused: after a rollback the lineage grows.

    Example:
        >>> str(PolicyVersion("solver", 0, 12))
        'solver@0.12'
    """

    policy: str
    lineage: int
    """Number of resumes before the version was made, so that versions before and after a resume stay distinct."""
    step: int
    """Number of optimizer steps that led to these weights."""

    def __str__(self) -> str:
        return f"{self.policy}@{self.lineage}.{self.step}"


@dataclass(slots=True)
class Lines:
    """The tree of a run's lineages, and the only code that compares versions of a policy.

    A resume starts a lineage from its checkpoint's version. The lineages of a policy share its initial weights, step 0.
    Steps alone do not order versions: a step that a rollback undid has the number of the step that replaced it.

    Example:
        >>> lines = Lines({("a", 1): PolicyVersion("a", 0, 2)})
        >>> undone, now = PolicyVersion("a", 0, 9), PolicyVersion("a", 1, 3)
        >>> lines.survives(undone, now), lines.fork(undone, now), lines.age(undone, now)
        (False, 2, 7)
    """

    parents: dict[tuple[str, int], PolicyVersion] = field(default_factory=dict)
    """The version that each (policy, lineage) started from; lineages without one started from the initial weights."""
    repeated: dict[PolicyVersion, PolicyVersion] = field(default_factory=dict)
    """For each version the first one with its weights: a step that was taken again on the same units makes the same
    weights."""
    _first: dict[tuple[PolicyVersion, str], PolicyVersion] = field(default_factory=dict, repr=False)
    """First version of each step, keyed by the weights before it and its digest."""

    def add(self, version: PolicyVersion, parent: PolicyVersion | None, sha256: str) -> None:
        """Add a published version, in the order of lineages and steps."""
        if parent is not None and parent.lineage < version.lineage:
            self.parents[version.policy, version.lineage] = parent
        # With the weights before the step: two steps may publish equal changes of different weights.
        before = self.weights(version._replace(step=version.step - 1))
        self.repeated[version] = self._first.setdefault((before, sha256), version)

    def line(self, at: PolicyVersion) -> list[tuple[int, int, int]]:
        """Return the steps that led to a version, newest first: (lineage, first, last) means steps first < s ≤ last."""
        line = []
        while (parent := self.parents.get((at.policy, at.lineage))) is not None:
            line.append((at.lineage, parent.step, at.step))
            at = parent
        return [*line, (at.lineage, -1, at.step)]

    def published_as(self, version: PolicyVersion) -> Iterator[PolicyVersion]:
        """Yield the ids under which the weights of a version were published, newest first: a resume publishes the
        weights that it starts from."""
        for lineage, first, _ in self.line(version):
            yield version._replace(lineage=lineage)
            if first != version.step:
                return

    def fork(self, version: PolicyVersion, at: PolicyVersion) -> int:
        """Return the step of the newest weights that led to both versions of a policy."""
        ends = {lineage: last for lineage, _, last in self.line(at)}
        shared = (min(last, ends[lineage]) for lineage, _, last in self.line(version) if lineage in ends)
        step, last = next(shared, 0), min(version.step, at.step)
        while step < last and self.weights(self.before(version, step + 1)) == self.weights(self.before(at, step + 1)):
            step += 1
        return step

    def survives(self, version: PolicyVersion, at: PolicyVersion) -> bool:
        """Whether the weights of `version` led to those of `at`, or are the same."""
        return self.fork(version, at) == version.step

    def age(self, version: PolicyVersion, at: PolicyVersion) -> int:
        """Return the number of steps between two versions, counted from their fork if one did not lead to the other."""
        return max(version.step, at.step) - self.fork(version, at)

    def before(self, at: PolicyVersion, step: int) -> PolicyVersion:
        """Return the version of a step on the line that led to `at`."""
        return next(PolicyVersion(at.policy, lineage, step) for lineage, first, _ in self.line(at) if step >= first)

    def weights(self, version: PolicyVersion) -> PolicyVersion:
        """Return the first version with the weights of `version`."""
        *_, version = self.published_as(version)
        version = version if version.step else version._replace(lineage=min(version.lineage, 0))
        return self.repeated.get(version, version)


NEVER_RESUMED = Lines()
"""The lineages of a run that was never resumed."""


class VersionSpan(NamedTuple):
    """The span of tokens `[start, stop)` that `version` sampled."""

    start: int
    stop: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRef:
    """The immutable files of a published version."""

    version: PolicyVersion
    path: str
    """Directory with `model.safetensors` (full weights), or `adapter_model.safetensors` and `adapter_config.json`."""
    kind: Literal["full", "adapter"]
    sha256: str
    """Digest of its `files.WEIGHT_FILES`, concatenated; the engine checks it before it serves the version."""


# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A policy's request to call a tool. `arguments` is the model's output, not yet validated."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """The parsed JSON object, or the raw text if it did not parse."""
    form: str = ""
    """Name of the reply format (`model.reply_format`) in which the model wrote a complete call, if the run reads
    another one. The call is then malformed, and `arguments` is the text of the reply."""
    problem: str = ""
    """Why a call with a `form` is malformed, for the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    """Name of the tool that answers, in messages of role `tool`."""
    thinking: str = ""
    """Reasoning of the model before its answer, in messages of role `assistant`; the chat template decides whether
    later turns see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool's description for policies."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""


class SampledTurn(NamedTuple):
    """The messages that a policy was given, and the tokens that it sampled."""

    messages: Sequence[Message]
    token_ids: Sequence[int]
    context: Sequence[int] = ()
    """The tokens of the messages, up to the start of the turn."""


# --- completions and turns --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One engine call of an agent, as the environment sees it."""

    text: str
    """The decoded completion without special tokens. If the turn is cut, the beginning of a reply: neither an answer
    nor a move."""
    message: Message
    completion: Completion

    @property
    def is_cut(self) -> bool:
        """Whether a limit on tokens ended the turn before the policy did: `sampling.max_tokens`, the `max_tokens` of
        `act` or of a request, or a full context."""
        return getattr(self.completion, "finish_reason", "stop") == "length"  # a test of a scorer may have none

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that parsed from the completion; none if the turn is cut, also if some were complete."""
        return () if self.is_cut else self.message.tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a scorer sees: a turn of an agent, and the conversation up to it."""

    task: Task
    seat: str
    turn: Turn
    """The turn; the agent's last one if the whole conversation is scored."""
    number: int
    """Number of the turn among the agent's turns, from 0."""
    messages: tuple[Message, ...]
    """The conversation up to the turn's reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A request for one score."""

    call_id: str
    """Id of the score in the journal."""
    where: str
    """Episode and score, for messages."""
    seed: int
    """Seed of a scorer that samples; the same on every execution of the attempt."""
    scored: Scored
    group: tuple[Scored, ...] = ()
    """The members of the group, if the scorer scores groups; `scored` is the first of them."""


@dataclass(frozen=True, slots=True)
class Score:
    """A scorer's answer with an explanation, which `agentrl episode why` shows."""

    value: Any
    """The score; None: the scorer says nothing. Of a group, a list with a score for each member."""
    note: str = ""


REWARD = "reward"
"""Name of rewards given without a name."""


# --- episodes ---------------------------------------------------------------------------------------------------------


class SeatBinding(NamedTuple):
    """The policy that holds a seat, and its version if that is pinned (evaluation, past opponents)."""

    policy: str
    pin: PolicyVersion | None = None


class AgentTurns(NamedTuple):
    """The number of turns that an agent has taken."""

    seat: str
    agent: int
    """Number of the agent within its seat."""
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPoint:
    """The call at which a fork leaves an attempt of its parent. Earlier entries are read where the parent wrote
    them."""

    journal: str
    """Journal directory of the parent, relative to the fork's own; `.` if they are the same."""
    partition: str
    episode_id: str
    attempt: int
    call_id: str
    """Id of the first call that belongs to the fork."""
    messages: tuple[dict[str, Any], ...] = ()
    """Messages for the policy at that call; empty: those of the environment."""
    branch: int = 0
    """Number, from 1, among the episodes that a call of `ctx.branch` started; 0: any other fork."""
    turns: tuple[AgentTurns, ...] = ()
    """For a branch, the turns that each agent had taken at the call."""

    @property
    def edits(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        """Replaced messages, keyed by call id."""
        return {self.call_id: self.messages} if self.messages else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """Everything a worker needs to run an episode, in this process or another."""

    episode_id: str
    environment: str
    """Registered name of the environment class."""
    task: Task
    seed: int
    seats: Mapping[str, SeatBinding]
    group_id: str
    group_size: int = 1
    attempt: int = 0
    purpose: Purpose = "train"
    parent_id: str | None = None
    pins: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """Versions at which policies are fixed, in the episode's children too."""
    fork: ForkPoint | None = None
    """Location of the recorded prefix, if the episode is a fork."""
    deadline: int = field(default=0, compare=False)
    """Scheduling priority: roughly the step the episode was admitted for. Waiting calls with a lower value run
    first."""
    waited: tuple[AdmissionWait, ...] = field(default=(), compare=False)
    """The rules that delayed its admission, in order; empty: it was not delayed."""

    def start_another(self, call_id: str, number: int | str, /, **differences: Any) -> EpisodeSpec:
        """Return the spec of an episode that starts from call `call_id` of this one: its child, or its fork.

        The new episode has its own seed, made of this one's, the call and `number`, and agrees in everything else that
        `differences` does not name.
        """
        seed = ids.stable_hash64(self.seed, self.attempt, call_id, number)
        return dataclasses.replace(self, **{"seed": seed, "attempt": 0, "fork": None, "waited": (), **differences})

    @property
    def branched_from(self) -> str | None:
        """Id of the main episode, if `ctx.branch` started this one."""
        return self.fork.episode_id if self.fork is not None and self.fork.branch else None

    def pinned(self, pins: Mapping[str, PolicyVersion]) -> EpisodeSpec:
        """Return a copy of the spec with these pins."""
        seats = {seat: SeatBinding(binding.policy, pins.get(binding.policy)) for seat, binding in self.seats.items()}
        return dataclasses.replace(self, seats=seats, pins=dict(pins))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One agent's conversation in an episode, as token sequences, with its reward."""

    seat: str
    index: int
    """Number of the agent within its seat, from 0."""
    policy: str
    rows: tuple[TrajectoryRow, ...]
    reward: float | None
    """Weighted sum of the agent's rewards; None if it received none."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)


STATE_BYTES = 8
"""Size of the hash of an anchor state."""


@dataclass(frozen=True, slots=True)
class TrajectoryHeader:
    """One agent's trajectory on the control path, without token data."""

    seat: str
    index: int
    policy: str
    reward: float | None
    tokens: int
    """Number of sampled tokens, without those that a fork inherited."""
    oldest_step: int
    """Step of the oldest weights that sampled a token; `lineage` belongs to the same weights."""
    lineage: int
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Part of `reward` that was given for single turns: (turn, reward), in order."""
    named_rewards: tuple[tuple[str, float], ...] = ()
    """Sum of the rewards under each name before weights, sorted by name; empty if it would only repeat `reward`."""
    turn_states: bytes = b""
    """Hashes of the anchor states of the turns, one after another; empty unless `credit.advantage` compares turns."""

    @property
    def oldest_version(self) -> PolicyVersion:
        """Oldest weights that sampled a token."""
        return PolicyVersion(self.policy, self.lineage, self.oldest_step)

    @property
    def states(self) -> tuple[bytes, ...]:
        """Hash of the anchor state of each turn, in order."""
        return tuple(self.turn_states[at : at + STATE_BYTES] for at in range(0, len(self.turn_states), STATE_BYTES))


class EpisodeDataLocation(NamedTuple):
    """The location of an episode's token columns."""

    partition: str
    """File name of the turn database, relative to the run's journal directory."""
    entries: int
    """Number of the episode's journal entries there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeHeader:
    """Everything about an ended episode that passes through the orchestrator: at most 256 bytes for one agent, and 32
    for each policy of its children (tested).
    """

    episode_id: str
    group_id: str
    attempt: int
    purpose: Purpose
    parent_id: str | None
    stop_reason: StopReason | None
    """Why a committed episode ended; None if it was dropped."""
    drop_reason: str | None
    """Why the episode was dropped; None if it was committed."""
    turns: int
    """Number of turns of all agents, including those that a fork or branch inherited."""
    tokens: int
    """Number of sampled tokens of all agents, without those that a fork inherited."""
    seconds: float
    trajectories: tuple[TrajectoryHeader, ...]
    location: EpisodeDataLocation | None
    measured_against: tuple[PolicyVersion, ...] = ()
    """Versions that the rewards may depend on, besides the episode's own policies: for each policy of the children it
    waited for, the oldest version that sampled a token there."""

    @property
    def committed(self) -> bool:
        """Whether the episode entered the journal whole."""
        return self.drop_reason is None

    @property
    def sampled_by(self) -> tuple[PolicyVersion, ...]:
        """Oldest versions that sampled the episode, for each agent, and the children it waited for."""
        own = (agent.oldest_version for agent in self.trajectories)
        return (*self.measured_against, *own)

    @property
    def reward(self) -> float | None:
        """Sum of the rewards over agents; None if no agent was rewarded."""
        rewards = [t.reward for t in self.trajectories if t.reward is not None]
        return sum(rewards) if rewards else None

    def drops_as_truncated(self, agent: TrajectoryHeader) -> bool:
        """Whether an agent's unit is dropped because it was truncated: `Environment.truncated_reward` is None."""
        return self.stop_reason not in ("completed", None) and agent.reward is None

    @property
    def winner(self) -> str | None:
        """Seat with the largest reward, if the episode was a decided game: some seats gained, others lost."""
        seats: dict[str, float] = {}
        for trajectory in self.trajectories:
            seats[trajectory.seat] = seats.get(trajectory.seat, 0.0) + (trajectory.reward or 0.0)
        if not seats or not min(seats.values()) < 0.0 < max(seats.values()):
            return None
        return max(seats, key=lambda seat: seats[seat])

    def result(self, learner: str, opponent: str) -> GameResult | None:
        """Return the result of a game between a policy and the `opponent` that plays its past versions.

        Versions are the oldest that sampled a token; for a policy that holds several seats, that of the first seat.

        Returns:
            None if one of the two did not act.
        """
        sides = [[t for t in self.trajectories if t.policy == policy] for policy in (learner, opponent)]
        if not all(sides):
            return None
        first, opponent_mean = (sum(t.reward or 0.0 for t in side) / len(side) for side in sides)
        learner_version, opponent_version = (side[0].oldest_version._replace(policy=learner) for side in sides)
        return GameResult(
            learner_version, opponent_version, 0.5 if first == opponent_mean else float(first > opponent_mean)
        )


class GameResult(NamedTuple):
    """The result of a committed episode between a policy and one of its past versions."""

    learner: PolicyVersion
    opponent: PolicyVersion
    score: float
    """Score of the learner: 1 if its reward exceeds the opponent's, ½ if they are equal, 0 otherwise; no reward counts
    as 0."""


class GameTally(NamedTuple):
    """The number of games between two versions, and their summed score: a win counts 1, a draw ½."""

    episodes: int = 0
    score: float = 0.0

    @property
    def win_rate(self) -> float:
        """Mean score, shrunk toward ½ by one win and one loss (Laplace); defined without any game."""
        return (self.score + 1.0) / (self.episodes + 2.0)

    def plus(self, score: float) -> GameTally:
        """Return the tally after one more game."""
        return GameTally(self.episodes + 1, self.score + score)


def dropped_header(spec: EpisodeSpec, reason: str, *, seconds: float = 0.0) -> EpisodeHeader:
    """Make the header of an episode that ends without being trained."""
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


def reported_token_usage(body: Mapping[str, Any]) -> dict[str, int]:
    """Return the endpoint's token counts in its answer, or in a remote policy's line; empty if it reports none.

    Example:
        >>> reported_token_usage({"usage": {"prompt_tokens": 7, "completion_tokens": -1, "cost": 3}})
        {'prompt_tokens': 7}
    """
    usage = body.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return {
        name: count
        for name in ("prompt_tokens", "completion_tokens")
        if isinstance(count := counts.get(name), int) and not isinstance(count, bool) and 0 <= count < 1 << 31
    }


# --- memory of proposals and groups -----------------------------------------------------------------------------------


class Proposal(NamedTuple):
    """A task that an episode proposed through `ctx.remember`."""

    number: int
    """Index of the proposal among all that the run remembers, in order of arrival."""
    episode_id: str
    attempt: int
    call_id: str
    environment: str
    key: str
    """Digest of the key that equal proposals share, as the environment normalizes it."""
    structure: str
    """Structure that similar proposals share, as the environment defines it; empty if it defines none."""

    @property
    def made_by(self) -> tuple[str, int, str]:
        """Call that made the proposal; repeating the call makes the same proposal."""
        return self.episode_id, self.attempt, self.call_id


class ProposalNovelty(NamedTuple):
    """The run's memory at the time of a proposal."""

    times: int
    """Number of equal earlier proposals; 0: the proposal is new."""
    share: float
    """Share of proposals with the same structure among the environment's newest (at most 100)."""


class RoleMeanAtAdmission(NamedTuple):
    """A policy's mean reward in a seat when the group was admitted."""

    policy: str
    seat: str
    mean: float


class FrozenGroupBaselines(NamedTuple):
    """The frozen baselines of a group released before all members have ended, recorded once; see `credit.release`."""

    group_id: str
    finishers: tuple[str, ...]
    """Ids of the episodes that had ended, in the order of their ends."""
    earlier: tuple[RoleMeanAtAdmission, ...] = ()


class MemberScore(NamedTuple):
    """The score of one agent by a scorer of groups."""

    episode_id: str
    seat: str
    agent: int
    """Number of the agent within its seat."""
    value: float | None
    """The score; None: the scorer says nothing."""


class GroupScores(NamedTuple):
    """The scores of one scorer for all members of a group, recorded once, before any of them is credited."""

    group_id: str
    scorer: str
    weight: float | None
    """Weight of the scores in the members' rewards; None: they are noted, and not credited."""
    scores: tuple[MemberScore, ...]
    note: str = ""
    """Explanation for readers."""
    seconds: float = 0.0
    """Seconds from the request to the scores."""


# --- inputs and reports of a trainer ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrajectoryCredit:
    """The advantage of one trajectory, computed on the control path from headers alone."""

    seat: str
    index: int
    reward: float
    advantage: float
    """Advantage of every token. If `turn_advantages` is given, the advantage of the first turn."""
    baseline: float
    turn_advantages: tuple[float, ...] = ()
    named_rewards: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An episode's trajectories of one policy: always in one optimizer step. Token data stays at `location`."""

    episode_id: str
    attempt: int
    policy: str
    location: EpisodeDataLocation
    credits: tuple[TrajectoryCredit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One optimizer step of one policy, by reference."""

    step_id: int
    """Step that these units produce: current step + 1. Trainers are idempotent by it."""
    policy: str
    units: tuple[Unit, ...]
    normalizer: float
    """Constant that divides the summed token losses; see `trainer.loss.normalizer`."""
    lines: Lines = field(default_factory=Lines)
    """The run's lineages, from which the ages of the units' tokens follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of an optimizer step."""

    step_id: int
    policy: str
    started_from: PolicyVersion
    loss: float
    grad_norm: float
    samples: int
    tokens: int
    """Number of trained tokens."""
    seconds: float
    """Wall-clock seconds of the step."""
    metrics: Mapping[str, float]
    input_digest: str
    """blake2b over the step's rows, masks, behavior logprobs and advantages, in order."""
    columns: str | None = None
    """File with the step's trainer logprobs, relative to the run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """A process of a run: its location and current activity."""

    name: str
    """Kind and number, such as `worker 1`."""
    node: str = ""
    """Address of the process's machine in a cluster; empty on the run's host."""
    gpus: tuple[str, ...] = ()
    """Ids of the process's GPUs."""
    doing: str
    """Activity of the process, for people."""

    @property
    def name_with_gpus(self) -> str:
        """Name of the process with its GPUs, for people."""
        return f"{self.name} on GPU {', '.join(self.gpus)}" if self.gpus else self.name
