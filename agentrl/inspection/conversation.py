"""The acts of an episode in the order they were recorded, with their times, as data for any renderer.

Only turns have a recorded start time; time between two turns of an agent that no act covers is a wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict

from agentrl.core.records import REWARD, PolicyVersion, reported_token_usage
from agentrl.core.reply_formats import parse_json_value
from agentrl.inspection.reader import AgentLine, EpisodeLine, EpisodeView, verified_control_rows
from agentrl.inspection.tokens import differing_request, text_beside_messages, without_end
from agentrl.journal.entries import (
    BeginEntry,
    ChildResultEntry,
    EffectEntry,
    EntryBody,
    NondeterministicValueEntry,
    ReplyRecord,
    ResourceCallEntry,
    RewardEntry,
    SpawnEntry,
    ToolEntry,
    TurnEntry,
    TurnPause,
    UnansweredEntry,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentrl.inspection.reader import RunReader


class _Act(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """An act of the episode."""

    call: str
    """Call id of the act."""


class PolicyTurn(_Act, frozen=True, kw_only=True, tag="turn"):
    """A turn of a policy."""

    seat: str
    index: int
    policy: str
    turn: int
    row: int
    messages: list[dict[str, Any]]
    """Messages since the agent's previous turn."""
    beside_messages: str
    """What the prompt says besides its messages, such as the tools; empty after a row's first turn. See
    `tokens.text_beside_messages`."""
    text: str
    """Sampled text without the control token at its end; an endpoint's or bot's is its content."""
    thinking: str
    """Reasoning before the answer. `thinking`, `content` and `calls` are what the run read in the text."""
    content: str
    """Text without thinking and calls; if an endpoint refused the turn, the reason."""
    calls: list[dict[str, Any]]
    """Name and arguments of each call; malformed arguments are text. See `ReplyRecord.calls` for its `form`."""
    tokens: int
    finish_reason: str
    versions: list[tuple[int, str]]
    """Versions that sampled the turn, as (first token, version); several if an update fell into the turn."""
    temperature: float
    asked: dict[str, Any]
    """What the request of an external agent asked for, where it differs from the run's sampling."""
    ignored: list[str]
    """Fields of the request without effect."""
    drift: str | None
    cached_tokens: int
    at: float
    """Seconds since the episode's first turn began; for a fork, without the time between its parent's turns and its
    own."""
    seconds: float
    waited: float
    """Seconds since the previous act of the branch, if times are recorded."""
    pauses: list[TurnPause]
    """Pauses during the turn: the episode was parked, its engine was lost, or the engine's memory was full."""
    state: str | None
    """State of the environment before the turn, if its program said it."""

    def message(self) -> dict[str, Any]:
        """Return the reply as its environment read it, in the form of `messages`."""
        calls = [call for call in self.calls if "form" not in call]  # the others are in the content
        optional = {"tool_calls": calls, "thinking": self.thinking}
        return {"role": "assistant", "content": self.content} | {key: value for key, value in optional.items() if value}


class ToolAct(_Act, frozen=True, kw_only=True, tag="tool"):
    """A call of a tool."""

    name: str
    arguments: Any
    observation: str
    outcome: str
    external: bool
    seconds: float
    location: str
    """File, line and function that raised; empty if the tool did not raise."""

    @property
    def ending(self) -> str:
        """Outcome, with the location of an exception."""
        return f"{self.outcome} at {self.location}" if self.location else self.outcome


class EffectAct(_Act, frozen=True, kw_only=True, tag="effect"):
    """An effect on the outside world, or a call on a resource (`level` is then not empty)."""

    name: str
    arguments: Any
    value: Any
    error: str | None
    guarantee: str
    level: str
    seconds: float


class SpawnAct(_Act, frozen=True, kw_only=True, tag="spawn"):
    """The start of children."""

    environment: str
    children: list[str]


class ChildEpisodeResultAct(_Act, frozen=True, kw_only=True, tag="child"):
    """The result of a child, received by its parent."""

    child: str
    drop_reason: str | None
    rewards: dict[str, float]
    versions: list[str]
    """Oldest version of each policy that played in the child, with which the rewards were measured."""


class RewardAct(_Act, frozen=True, kw_only=True, tag="reward"):
    """A component of an agent's reward."""

    seat: str
    index: int
    value: float
    turn: int | None
    name: str
    weight: float

    @property
    def words(self) -> str:
        """The value, with its name, weight and turn if it has them.

        Example:
            >>> RewardAct(call="1", seat="solver", index=0, value=1.0, turn=None, name="format", weight=0.2).words
            '0.2 × 1 (format)'
        """
        details = [
            *([self.name] if self.name != REWARD else []),
            *([f"turn {self.turn}"] if self.turn is not None else []),
        ]
        weight = f"{self.weight:g} × " if self.weight != 1.0 else ""
        return f"{weight}{self.value:g}" + (f" ({', '.join(details)})" if details else "")


class OtherAct(_Act, frozen=True, kw_only=True, tag="other"):
    """Any other entry of the journal."""

    entry_kind: str
    value: Any


Act = PolicyTurn | ToolAct | EffectAct | SpawnAct | ChildEpisodeResultAct | RewardAct | OtherAct


class WeightUpdate(msgspec.Struct, frozen=True, tag_field="kind", tag="update"):
    """A publication of weights while the episode ran."""

    version: str
    at: float
    """Seconds since the episode's first turn began."""


class ConversationView(msgspec.Struct, frozen=True):
    """An episode with all its acts."""

    summary: EpisodeLine
    agents: list[AgentLine]
    measured_against: list[str]
    metrics: dict[str, float | None]
    detail: str
    """Message of the failure that dropped the episode; empty if it was not dropped."""
    task: Any
    settings: dict[str, dict[str, float]]
    """Sampling settings and limits, keyed by seat; the key "" stands for all seats without a key."""
    began: float | None
    """Wall-clock label of the first turn, seconds since the epoch."""
    acts: list[Act]
    inherited: int
    """Number of leading acts that a fork inherited from its parent."""
    updates: list[WeightUpdate]
    children: list[EpisodeLine]
    problems: list[str]
    """Problems met while reading, for people."""
    note: str
    """Why replies are shown as text alone; empty if they are not."""


UNREAD_REPLIES = (
    "an older version of agentrl recorded this episode, without what it read in the replies: thinking and tool calls "
    "are shown as text"
)


def read_conversation(reader: RunReader, episode_id: str, attempt: int | None = None) -> ConversationView:
    """Read an episode in its newest attempt, or in a given one. Raises as `RunReader.episode`."""
    return build_conversation(reader, reader.episode(episode_id, attempt))


def build_conversation(reader: RunReader, view: EpisodeView) -> ConversationView:
    """Make the conversation of an episode that was read."""
    bodies = [(call, body) for call, body in view.entries if not isinstance(body, BeginEntry)]
    turns = [body for _, body in bodies if isinstance(body, TurnEntry)]
    began = min((turn.started for turn in turns), default=None)
    begin = next((body for _, body in view.entries if isinstance(body, BeginEntry)), None)
    waits = _Waits(began or 0.0)
    problems = list(view.problems)
    acts = [_act(reader, call, body, begin, waits) for call, body in bodies[: view.inherited]]
    new_turns = [body for _, body in bodies[view.inherited :] if isinstance(body, TurnEntry)]
    if acts and new_turns:
        waits.continue_at(new_turns[0].started)
    acts += [_act(reader, call, body, begin, waits) for call, body in bodies[view.inherited :]]
    external = _external_policies(reader.info())
    return ConversationView(
        summary=view.summary,
        agents=view.agents,
        measured_against=view.measured_against,
        metrics=view.metrics,
        detail=view.detail,
        task=None if begin is None else begin.task,
        settings={} if begin is None else {seat: asdict(each) for seat, each in begin.settings.items()},
        began=began,
        acts=[_external_turn(act) if isinstance(act, PolicyTurn) and act.policy in external else act for act in acts],
        inherited=view.inherited,
        updates=_updates(reader, new_turns, waits.began, problems),
        children=reader.children(view.summary.episode),
        problems=problems,
        note=UNREAD_REPLIES if any(turn.reply is None for turn in turns) else "",
    )


def _external_policies(info: Mapping[str, Any]) -> set[str]:
    """Return the policies whose turns are lines of an endpoint or a bot, by a journal's `info`."""
    config = info.get("config")
    policies = config.get("policies") if isinstance(config, dict) else None
    items = policies.items() if isinstance(policies, dict) else ()
    return {name for name, one in items if isinstance(one, dict) and one.get("kind") in ("remote", "bot")}


def _external_turn(act: PolicyTurn) -> PolicyTurn:
    """Replace the recorded line of an endpoint or bot by the content that the environment read in it, and the line's
    bytes by the endpoint's token counts, 0 if it gave none."""
    line = parse_json_value(act.text)
    if not isinstance(line, dict):
        return msgspec.structs.replace(act, tokens=0)
    content = str(line.get("refused") or line.get("content") or "")
    tokens = reported_token_usage(line).get("completion_tokens", 0)
    return msgspec.structs.replace(act, text=content, content=content, tokens=tokens)


class _Waits:
    """Computes how long each branch was idle before its next turn.

    Args:
        began: wall time of the first turn.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self._ends: dict[str, float] = {}

    def before(self, call: str, turn: TurnEntry) -> float:
        """Return the seconds between the end of the branch's last act and a turn."""
        branch = call.rpartition("#")[0]
        branch_end = self._ends.get(branch)
        self._ends[branch] = turn.started + turn.seconds
        return 0.0 if branch_end is None else max(turn.started - branch_end, 0.0)

    def continue_at(self, start: float) -> None:
        """Shift the time to that of a fork's own acts: the time between them and the inherited acts is not a wait."""
        between = start - max(self._ends.values(), default=start)
        self.began += between
        self._ends = {branch: end + between for branch, end in self._ends.items()}

    def add_action(self, call: str, seconds: float) -> None:
        """Add the duration of an act."""
        branch = call.rpartition("#")[0]
        if branch in self._ends:
            self._ends[branch] += seconds


def _act(reader: RunReader, call: str, body: EntryBody, begin: BeginEntry | None, waits: _Waits) -> Act:
    match body:
        case TurnEntry():
            return _turn(reader, call, body, begin, waits)
        case ToolEntry():
            waits.add_action(call, body.seconds)
            return ToolAct(
                call=call,
                name=body.name,
                arguments=body.arguments,
                observation=body.observation,
                outcome=body.outcome,
                external=body.external,
                seconds=body.seconds,
                location=body.location,
            )
        case EffectEntry() | ResourceCallEntry():
            waits.add_action(call, body.seconds)
            return _effect(call, body)
        case SpawnEntry():
            return SpawnAct(call=call, environment=body.environment, children=list(body.children))
        case ChildResultEntry():
            versions = [str(PolicyVersion(policy, *number)) for policy, number in body.versions.items()]
            return ChildEpisodeResultAct(
                call=call, child=body.child, drop_reason=body.drop_reason, rewards=body.rewards, versions=versions
            )
        case RewardEntry():
            return RewardAct(
                call=call,
                seat=body.seat,
                index=body.index,
                value=body.value,
                turn=body.turn,
                name=body.name,
                weight=body.weight,
            )
        case NondeterministicValueEntry():
            return OtherAct(call=call, entry_kind=body.kind, value=body.value)
        case UnansweredEntry():
            return OtherAct(call=call, entry_kind=body.stop_reason or "cancelled", value=body.message or None)
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    return OtherAct(call=call, entry_kind=type(body).__name__.removesuffix("Entry").lower(), value=fields)


def _turn(reader: RunReader, call: str, turn: TurnEntry, begin: BeginEntry | None, waits: _Waits) -> PolicyTurn:
    reply, text = turn.reply or ReplyRecord(), without_end(turn.text)
    return PolicyTurn(
        call=call,
        seat=turn.seat,
        index=turn.index,
        policy=turn.policy,
        turn=turn.turn,
        row=turn.row,
        messages=list(turn.messages),
        beside_messages="" if turn.parent_context else text_beside_messages(reader, turn),
        text=text,
        thinking=reply.thinking,
        content=reply.content if reply.thinking or reply.calls else text,
        calls=list(reply.calls),
        tokens=len(turn.tokens),
        finish_reason=turn.finish_reason,
        versions=[(span.start, str(span.version)) for span in turn.tokens.spans],
        temperature=turn.temperature,
        asked=differing_request(turn, begin),
        ignored=[] if turn.request is None else list(turn.request.ignored),
        drift=turn.drift,
        cached_tokens=turn.cached_tokens,
        at=turn.started - waits.began,
        seconds=turn.seconds,
        waited=waits.before(call, turn),
        pauses=list(turn.pauses),
        state=turn.state,
    )


def _effect(call: str, body: EffectEntry | ResourceCallEntry) -> EffectAct:
    if isinstance(body, EffectEntry):
        name, arguments, guarantee, level = body.name, None, body.guarantee, ""
    else:
        name, arguments, guarantee, level = f"{body.resource}.{body.method}", body.arguments, "", body.level
    return EffectAct(
        call=call,
        name=name,
        arguments=arguments,
        value=body.value,
        error=body.error,
        guarantee=guarantee,
        level=level,
        seconds=body.seconds,
    )


def _updates(reader: RunReader, turns: Sequence[TurnEntry], began: float, problems: list[str]) -> list[WeightUpdate]:
    """Return the versions of the policies that took turns, published between the first and the last turn."""
    if not turns:
        return []
    first, last = min(turn.started for turn in turns), max(turn.started + turn.seconds for turn in turns)
    policies = {turn.policy for turn in turns} | {s.version.policy for turn in turns for s in turn.tokens.spans}
    rows = verified_control_rows(
        reader.log,
        "versions",
        "published_at > ? AND published_at < ? ORDER BY published_at",
        first,
        last,
        problems=problems,
    )
    return [
        WeightUpdate(f"{row['policy']}@{row['lineage']}.{row['step']}", row["published_at"] - began)
        for row in rows
        if row["policy"] in policies
    ]


def acts_with_weight_updates(view: ConversationView) -> list[Act | WeightUpdate]:
    """Return the acts of a conversation, with each weight update before the first turn that began after it."""
    events, updates = list[Act | WeightUpdate](), list(view.updates)
    for act in view.acts:
        while updates and isinstance(act, PolicyTurn) and updates[0].at < act.at:
            events.append(updates.pop(0))
        events.append(act)
    return events


def reward_components(view: ConversationView) -> dict[str, list[RewardAct]]:
    """Return the rewards of each agent, keyed `seat[index]`."""
    components: dict[str, list[RewardAct]] = {}
    for act in view.acts:
        if isinstance(act, RewardAct):
            components.setdefault(f"{act.seat}[{act.index}]", []).append(act)
    return components
