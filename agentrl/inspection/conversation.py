"""The acts of an episode in the order they were recorded, with their times, as data for any renderer.

Only turns are recorded with the time they began; what lies between two turns of an agent and is no act is a wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.records import REWARD, PolicyVersion, usage_of
from agentrl.core.reply_formats import Reply, guess, json_value
from agentrl.inspection.reader import AgentLine, EpisodeLine, EpisodeView, checked_rows
from agentrl.journal.entries import (
    Begin,
    CancelEntry,
    EffectEntry,
    EntryBody,
    GatherEntry,
    Pause,
    ResourceEntry,
    RewardEntry,
    SpawnEntry,
    ToolEntry,
    TurnEntry,
    ValueEntry,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentrl.inspection.reader import RunReader


MAX_READ = 1 << 18
"""Characters of a reply that is taken apart; a longer one is shown as it was sampled."""


class _Act(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Something the episode did."""

    call: str
    """The call id."""


class TurnAct(_Act, frozen=True, kw_only=True, tag="turn"):
    """A policy was asked, and answered."""

    seat: str
    index: int
    policy: str
    turn: int
    row: int
    messages: list[dict[str, Any]]
    """Messages since its last turn."""
    text: str
    """Sampled text, special tokens included."""
    thinking: str
    """Reasoning before the answer, as far as the text shows it. `thinking`, `content` and `calls` are for display."""
    content: str
    """The text without thinking, calls and the token that ends it."""
    calls: list[dict[str, Any]]
    """Name and arguments of each call; arguments that are malformed are text."""
    tokens: int
    finish_reason: str
    versions: list[tuple[int, str]]
    """(first token, version); several if an update fell into the turn."""
    temperature: float
    drift: str | None
    cached_tokens: int
    at: float
    """Seconds since the episode's first turn began; of a fork, without those between its parent's turns and its own."""
    seconds: float
    waited: float
    """Seconds since the previous act of its branch, if times are recorded."""
    pauses: list[Pause]
    """Pauses during the turn: the episode was parked, its engine was lost, or the engine's memory was full."""


class ToolAct(_Act, frozen=True, kw_only=True, tag="tool"):
    """A tool was called."""

    name: str
    arguments: Any
    observation: str
    outcome: str
    external: bool
    seconds: float


class EffectAct(_Act, frozen=True, kw_only=True, tag="effect"):
    """An act on the outside world, or a call on a resource (`level` is then not empty)."""

    name: str
    arguments: Any
    value: Any
    error: str | None
    guarantee: str
    level: str
    seconds: float


class SpawnAct(_Act, frozen=True, kw_only=True, tag="spawn"):
    """Children were started."""

    environment: str
    children: list[str]


class ChildAct(_Act, frozen=True, kw_only=True, tag="child"):
    """A child's end was heard of."""

    child: str
    drop_reason: str | None
    rewards: dict[str, float]
    versions: list[str]
    """The oldest of each policy that played in it: what the rewards were measured with."""


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
        of = [*([self.name] if self.name != REWARD else []), *([f"turn {self.turn}"] if self.turn is not None else [])]
        weight = f"{self.weight:g} × " if self.weight != 1.0 else ""
        return f"{weight}{self.value:g}" + (f" ({', '.join(of)})" if of else "")


class OtherAct(_Act, frozen=True, kw_only=True, tag="other"):
    """Anything else the journal holds."""

    what: str
    value: Any


Act = TurnAct | ToolAct | EffectAct | SpawnAct | ChildAct | RewardAct | OtherAct


class WeightUpdate(msgspec.Struct, frozen=True, tag_field="kind", tag="update"):
    """Weights that were published while the episode ran."""

    version: str
    at: float
    """Seconds since the episode's first turn began."""


class ConversationView(msgspec.Struct, frozen=True):
    """An episode with all that happened in it."""

    summary: EpisodeLine
    agents: list[AgentLine]
    measured_against: list[str]
    """See `EpisodeView`."""
    metrics: dict[str, float | None]
    detail: str
    """The message of the failure that dropped it; empty if it was not dropped."""
    task: Any
    began: float | None
    """Wall-clock label of the first turn, seconds since the epoch."""
    acts: list[Act]
    inherited: int
    """Number of leading acts that a fork inherited from its parent."""
    updates: list[WeightUpdate]
    children: list[EpisodeLine]
    problems: list[str]
    """Problems met while reading, for people."""


def conversation(reader: RunReader, episode_id: str, attempt: int | None = None) -> ConversationView:
    """An episode in its newest attempt, or in a given one. Raises as `RunReader.episode`."""
    return conversation_of(reader, reader.episode(episode_id, attempt))


def conversation_of(reader: RunReader, view: EpisodeView) -> ConversationView:
    """The conversation of an episode that was read."""
    bodies = [(call, body) for call, body in view.entries if not isinstance(body, Begin)]
    turns = [body for _, body in bodies if isinstance(body, TurnEntry)]
    began = min((turn.started for turn in turns), default=None)
    begin = next((body for _, body in view.entries if isinstance(body, Begin)), None)
    waits = _Waits(began or 0.0)
    problems = list(view.problems)
    acts = [_act(call, body, waits) for call, body in bodies[: view.inherited]]
    own = [body for _, body in bodies[view.inherited :] if isinstance(body, TurnEntry)]
    if acts and own:
        waits.go_on_at(own[0].started)
    acts += [_act(call, body, waits) for call, body in bodies[view.inherited :]]
    external = _external_policies(reader.info())
    return ConversationView(
        summary=view.summary,
        agents=view.agents,
        measured_against=view.measured_against,
        metrics=view.metrics,
        detail=view.detail,
        task=None if begin is None else begin.task,
        began=began,
        acts=[_with_usage(act) if isinstance(act, TurnAct) and act.policy in external else act for act in acts],
        inherited=view.inherited,
        updates=_updates(reader, own, waits.began, problems),
        children=reader.children(view.summary.episode),
        problems=problems,
    )


def _external_policies(info: Mapping[str, Any]) -> set[str]:
    """The policies whose turns are a line of an endpoint or a bot, as a journal's `info` says."""
    config = info.get("config")
    policies = config.get("policies") if isinstance(config, dict) else None
    known = policies.items() if isinstance(policies, dict) else ()
    return {name for name, one in known if isinstance(one, dict) and one.get("kind") in ("remote", "bot")}


def _with_usage(act: TurnAct) -> TurnAct:
    """The same turn with the endpoint's count of its tokens, 0 if it gave none: what is recorded are bytes."""
    said = json_value(act.text)
    counts = usage_of(said) if isinstance(said, dict) else {}
    return msgspec.structs.replace(act, tokens=counts.get("completion_tokens", 0))


class _Waits:
    """Computes how long each branch was idle before its next turn."""

    def __init__(self, began: float) -> None:
        self.began = began
        self._ends: dict[str, float] = {}

    def before(self, call: str, turn: TurnEntry) -> float:
        """Seconds of a turn's branch between the end of its last act and the turn."""
        branch = call.rpartition("#")[0]
        known = self._ends.get(branch)
        self._ends[branch] = turn.started + turn.seconds
        return 0.0 if known is None else max(turn.started - known, 0.0)

    def go_on_at(self, started: float) -> None:
        """A fork played the acts that follow later: the time in between counts as no wait."""
        between = started - max(self._ends.values(), default=started)
        self.began += between
        self._ends = {branch: end + between for branch, end in self._ends.items()}

    def acted(self, call: str, seconds: float) -> None:
        """An act took a while."""
        branch = call.rpartition("#")[0]
        if branch in self._ends:
            self._ends[branch] += seconds


def _act(call: str, body: EntryBody, waits: _Waits) -> Act:
    match body:
        case TurnEntry():
            return _turn(call, body, waits)
        case ToolEntry():
            waits.acted(call, body.seconds)
            return ToolAct(
                call=call,
                name=body.name,
                arguments=body.arguments,
                observation=body.observation,
                outcome=body.outcome,
                external=body.external,
                seconds=body.seconds,
            )
        case EffectEntry() | ResourceEntry():
            waits.acted(call, body.seconds)
            return _effect(call, body)
        case SpawnEntry():
            return SpawnAct(call=call, environment=body.environment, children=list(body.children))
        case GatherEntry():
            versions = [str(PolicyVersion(policy, *of)) for policy, of in body.versions.items()]
            return ChildAct(
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
        case ValueEntry():
            return OtherAct(call=call, what=body.kind, value=body.value)
        case CancelEntry():
            return OtherAct(call=call, what="cancelled", value=None)
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    return OtherAct(call=call, what=type(body).__name__.removesuffix("Entry").lower(), value=fields)


def _turn(call: str, turn: TurnEntry, waits: _Waits) -> TurnAct:
    whose = turn.weights_of or turn.policy
    reply = guess(turn.text) if len(turn.text) <= MAX_READ else Reply("", turn.text, ())
    return TurnAct(
        call=call,
        seat=turn.seat,
        index=turn.index,
        policy=turn.policy,
        turn=turn.turn,
        row=turn.row,
        messages=list(turn.messages),
        text=turn.text,
        thinking=reply.thinking,
        content=reply.content,
        calls=[{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls],
        tokens=len(turn.token_ids) // 4,
        finish_reason=turn.finish_reason,
        versions=[(span.start, f"{whose}@{span.lineage}.{span.step}") for span in turn.spans],
        temperature=turn.temperature,
        drift=turn.drift,
        cached_tokens=turn.cached_tokens,
        at=turn.started - waits.began,
        seconds=turn.seconds,
        waited=waits.before(call, turn),
        pauses=list(turn.pauses),
    )


def _effect(call: str, body: EffectEntry | ResourceEntry) -> EffectAct:
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
    """Versions of the policies that took turns, published between the first and the last of them."""
    if not turns:
        return []
    first, last = min(turn.started for turn in turns), max(turn.started + turn.seconds for turn in turns)
    policies = {turn.weights_of or turn.policy for turn in turns}
    rows = checked_rows(
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


def events(view: ConversationView) -> list[Act | WeightUpdate]:
    """Return the acts of a conversation, with each weight update before the first turn that began after it."""
    found, updates = list[Act | WeightUpdate](), list(view.updates)
    for act in view.acts:
        while updates and isinstance(act, TurnAct) and updates[0].at < act.at:
            found.append(updates.pop(0))
        found.append(act)
    return found


def reward_components(view: ConversationView) -> dict[str, list[RewardAct]]:
    """Return the rewards of each agent, keyed `seat[index]`."""
    found: dict[str, list[RewardAct]] = {}
    for act in view.acts:
        if isinstance(act, RewardAct):
            found.setdefault(f"{act.seat}[{act.index}]", []).append(act)
    return found
